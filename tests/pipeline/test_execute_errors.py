"""What fails in a pipeline says where, once, and leaves the state as it was."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.schedule.actions import Action


# Stage 1 has half of the stack and the head. One device each: where several wait for each other in
# a collective and one of them fails, XLA's CPU backend ends the process.
PLAN = fz.Plan(pipe=2, data=1, microbatches=4, schedule="zb_h1")


def guarded(p, x, ctx):
    """A head that refuses some rows, as a check of the user's own would: when it runs."""

    def check(bad):
        if bad.any():
            raise ValueError("row of another language")
        return np.zeros((), np.float32)

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    zero = jax.pure_callback(check, shape, ctx.batch["bad"], vmap_method="sequential")
    return tiny.head(p, x, ctx) + zero


def chain(head=guarded):
    return fz.Sequential(
        [
            fz.Layer("embed", tiny.embed_init, tiny.embed),
            fz.Stack("blocks", 4, tiny.block_init, tiny.block),
            fz.Layer("head", tiny.head_init, head, reads={"table": "embed/table"}),
        ],
        loss=tiny.token_loss,
    )


def batch(bad_row=None):
    rows = {**tiny.tokens(16), "bad": np.zeros(16, bool)}
    if bad_row is not None:
        rows["bad"][bad_row] = True
    return rows


@pytest.mark.parametrize("donate", [True, False])
def test_a_failure_at_run_time_names_its_action_and_leaves_the_state(donate):
    model, tx = chain(), optax.adamw(1e-2)
    step = fz.train_step(model, tx, PLAN, donate=donate)
    state = fz.init(model, tx, PLAN)
    before = jax.device_get(state.params)
    # 4 rows in a microbatch.
    said = (
        r"forward of microbatch 2 on stage 1 \(rank 1, layers blocks, head, loss; action 1F2\)"
        r" failed: (.|\n)*row of another language"
    )
    with pytest.raises(fz.PipelineError, match=said):
        step(state, batch(bad_row=9))
    tiny.same_bits(jax.device_get(state.params), before)
    # The failure came once: the same state and step go on as if it had not been.
    state, metrics = step(state, batch())
    reference = fz.train_step(model, tx, PLAN)
    _, expected = reference(fz.init(model, tx, PLAN), batch())
    assert float(metrics["loss"]) == float(expected["loss"])
    assert float(metrics["grad_norm"]) == float(expected["grad_norm"])


def picky(of_weight):
    """A scale whose backward pass refuses rows, for the gradient of its weight or of its input."""

    def check(grad, bad):
        if bad.any():
            raise ValueError("row of another language")
        return grad

    def checked(grad, bad):
        shape = jax.ShapeDtypeStruct(grad.shape, grad.dtype)
        return jax.pure_callback(check, shape, grad, bad, vmap_method="sequential")

    @jax.custom_vjp
    def scale(gain, x, bad):
        return gain * x

    def back(kept, ct):
        gain, x, bad = kept
        of_gain, of_x = jnp.sum(x * ct), gain * ct
        if of_weight:
            of_gain = checked(of_gain, bad)
        else:
            of_x = checked(of_x, bad)
        return of_gain, of_x, None

    scale.defvjp(lambda gain, x, bad: (gain * x, (gain, x, bad)), back)

    def head(p, x, ctx):
        x = scale(p["gain"], x, ctx.batch["bad"])
        return (x @ p["down"]) @ p["table"].T

    return head


KINDS = [
    ("zb_h1", False, "input gradient", "I"),
    ("zb_h1", True, "weight gradient", "W"),
    ("1f1b", False, "backward", "B"),
    ("1f1b", True, "backward", "B"),
]


@pytest.mark.parametrize(("schedule", "of_weight", "words", "kind"), KINDS)
def test_failures_of_backward_passes(schedule, of_weight, words, kind):
    model, tx, plan = chain(picky(of_weight)), optax.sgd(0.1), PLAN.replace(schedule=schedule)
    step = fz.train_step(model, tx, plan)
    state = fz.init(model, tx, plan)
    before = jax.device_get(state.params)
    said = (
        rf"the {words} of microbatch 1 on stage 1 \(.*; action 1{kind}1\) failed: (.|\n)*language"
    )
    for _ in range(2):
        with pytest.raises(fz.PipelineError, match=said) as caught:
            step(state, batch(bad_row=5))
        assert caught.value.__cause__ is not None
    tiny.same_bits(jax.device_get(state.params), before)
    state, metrics = step(state, batch())
    assert np.isfinite(float(metrics["loss"]))
    assert int(state.step) == 1


def test_a_failure_while_tracing_names_its_stage():
    def broken(p, x, ctx):
        return x @ jnp.ones((3, 3))

    model, tx = chain(broken), optax.sgd(0.1)
    state = fz.init(model, tx, PLAN)
    with pytest.raises(fz.PipelineError, match=r"microbatch 0 on stage 1 \(rank 1.*action 1F0\)"):
        fz.train_step(model, tx, PLAN)(state, batch())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_failure_in_evaluation_names_its_action():
    model = chain()
    state = fz.init(model, None, PLAN)
    with pytest.raises(fz.PipelineError, match=r"forward of microbatch 0 on stage 1"):
        fz.eval_step(model, PLAN)(state, batch(bad_row=0))
    assert np.isfinite(float(fz.eval_step(model, PLAN)(state, batch())["loss"]))


@pytest.mark.parametrize("settles", [True, False])
def test_on_cpus_a_step_ends_when_its_actions_have(settles):
    """So that a failure is told before the update takes the state."""
    model, tx = tiny.chain(2), optax.sgd(0.1)
    plan = tiny.plan(pipe=2, data=1, microbatches=2)
    step = fz.train_step(model, tx, plan)
    assert step.executor.settles
    step.executor.settles = settles
    step(fz.init(model, tx, plan), tiny.tokens(8))
    assert (not step.executor._under_way) == settles


def test_a_failure_that_nobody_waited_for_is_told_by_the_next_step_at_last():
    """As on accelerators, where a step does not wait for its last actions."""
    model, tx = chain(), optax.sgd(0.1)
    step = fz.train_step(model, tx, PLAN, donate=False)
    state = fz.init(model, tx, PLAN)
    step.executor.settles, step.executor.ahead = False, len(PLAN.build_schedule().actions)

    def two_steps():
        for row in (9, None):  # jax may see it in the first one's update already
            step(state, batch(bad_row=row))

    with pytest.raises(fz.PipelineError, match=r"forward of microbatch 2 on stage 1 .*action 1F2"):
        two_steps()
    state, metrics = step(state, batch())
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize("settles", [True, False])
def test_few_actions_are_under_way(settles):
    """When an action is dispatched, all but the last few have ended."""

    def slow(p, x, ctx):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        first = jax.lax.stop_gradient(x[0, 0, 0])  # a callback has no derivative
        zero = jax.pure_callback(lambda x: time.sleep(0.02) or np.float32(0), shape, first,
                                 vmap_method="sequential")  # fmt: skip
        return tiny.head(p, x, ctx) + zero

    model, tx = chain(slow), optax.sgd(0.1)
    step = fz.train_step(model, tx, PLAN)
    state, seen, late = fz.init(model, tx, PLAN), [], []

    def observe(action, held):
        seen.append((action, held.last))
        late.append([str(a) for a, result in seen[:-3] if not result.is_ready()])

    step.executor.observer, step.executor.ahead = observe, 3
    step.executor.settles = settles
    for _ in range(2):
        state, metrics = step(state, {k: v for k, v in batch().items() if k != "bad"})
    assert len(seen) == 2 * len(PLAN.build_schedule().actions)
    assert not any(late), late
    assert np.isfinite(float(metrics["loss"]))


def test_after_a_failure_what_read_of_it_is_forgotten():
    plan = tiny.plan(pipe=2, data=1, microbatches=2)
    executor = fz.train_step(tiny.chain(), optax.sgd(0.1), plan).executor

    class Failing:
        def block_until_ready(self):
            raise RuntimeError("the device is gone")

    for number in range(2):
        under_way = Action("F", 0, number), executor.programs[0], [Failing()]
        executor._under_way.append(under_way)
    with pytest.raises(fz.PipelineError, match=r"microbatch 0.*the device is gone"):
        executor.wait()
    executor.wait()
