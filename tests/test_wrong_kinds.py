"""What is no device, path, layer or optimizer at all is named as that, where it was given."""

import jax
import optax
import pytest
from support import tiny

import fzero as fz


TX, PLAN, DEVICE = optax.sgd(1e-2), fz.Plan(data=1), "jax.devices()[:4]"

DEVICES = {
    "a number": (lambda found: 4, ["devices=4", DEVICE]),
    "one": (lambda found: found[0], ["devices=CpuDevice", DEVICE]),
    "a platform": (lambda found: "cpu", ["devices='cpu'", DEVICE]),
    "none": (lambda found: [], ["devices=[]", DEVICE]),
    "numbers": (lambda found: [0, 1], ["devices=[0, 1]", DEVICE]),
    "one twice": (lambda found: [*found[:2], found[0]], ["each device once", "0 2 times"]),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_devices(kind):
    choose, said = DEVICES[kind]
    with pytest.raises(fz.PlanError) as error:
        fz.init(tiny.chain(1), TX, PLAN, devices=choose(jax.devices()))
    assert all(part in str(error.value) for part in said), error.value


@pytest.mark.parametrize("path", [None, 3, b"here"], ids=str)
def test_paths(path):
    state = fz.init(tiny.chain(1), TX, PLAN)
    for call in (
        lambda: fz.save(path, state, PLAN),
        lambda: fz.restore(path, tiny.chain(1), TX, PLAN),
        lambda: fz.checkpoint(path),
        lambda: fz.wait(path) if path is not None else fz.checkpoint(path),
    ):
        with pytest.raises(fz.CheckpointError, match=r"expected a directory's path, or a URL") as e:
            call()
        assert repr(path) in str(e.value)


def test_layers():
    with pytest.raises(fz.PlanError, match=r"layers\[1\] is a function: expected an fz.Layer"):
        fz.Sequential([fz.Layer("first", None, lambda p, x, c: x), lambda x: x])


WRAPPERS = {
    "per_layer": fz.per_layer,
    "as_stacked": fz.as_stacked,
    "lookahead": lambda tx: fz.lookahead(tx, 2, 0.5),
    "small_moments": fz.small_moments,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_optimizers(name):
    with pytest.raises(fz.PlanError, match=f"{name}: expected an optax transformation.*adam"):
        WRAPPERS[name](optax.adam)
    several = optax.MultiSteps(optax.sgd(0.1), 2)  # no transformation by its type
    assert callable(WRAPPERS[name](several).init)


STEPS = [(0, 0.5), (2.5, 0.5), ("2", 0.5), (2, 1.5), (2, -1), (2, float("nan")), (2, "1")]


@pytest.mark.parametrize(("period", "size"), STEPS, ids=str)
def test_how_far_slow_weights_move(period, size):
    said = f"slow_step_size={size!r}: expected 0 to 1" if period == 2 else "sync_period="
    with pytest.raises(fz.PlanError, match=f"lookahead: {said}"):
        fz.lookahead(TX, period, size)


def test_a_step_needs_an_optimizer():
    with pytest.raises(fz.PlanError, match=r"train_step: expected an optimizer, .* got None"):
        fz.train_step(tiny.chain(1), None, PLAN)


def test_a_state_of_another_optimizer_that_keeps_nothing_either():
    model, batch = tiny.chain(1), tiny.tokens(2)
    with pytest.raises(fz.StateError, match=r"opt_state: expected a tree like .*EmptyState.* got"):
        fz.train_step(model, TX, PLAN)(fz.init(model, None, PLAN), batch)
