"""What is kept for the backward pass is what the user's checkpoints and the plan say.

Each block has one `tanh`, whose result its backward pass reads: a program with twice as many
computes them again.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import fzero as fz
from fzero.batch import abstract_batch
from fzero.preflight.parking import on_the_device, room_of_parked
from fzero.preflight.shapes import saved_in_a_step
from fzero.report.report import Report
from fzero.sharding.blueprint import blueprint, planned
from fzero.sharding.device_memory import device_memory
from fzero.step.steps import TrainStep
from fzero.zero.keeping import CHOICES, SHARE, room_for
from tests.support import tiny


WIDTH, BLOCKS = 8, 4
NAMES = [f"block{i}" for i in range(BLOCKS)]
BATCH = {"x": np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32)}
SGD = optax.sgd(0.1)
POLICIES = jax.checkpoint_policies


def block(w, x):
    return jnp.tanh(x @ w)


def weight(key):
    return jax.random.normal(key, (WIDTH, WIDTH)) * 0.3


def plain_model(run):
    def init(key):
        return {name: weight(jax.random.fold_in(key, i)) for i, name in enumerate(NAMES)}, {}

    def loss(params, buffers, batch, rng, train):
        x = batch["x"]
        for name in NAMES:
            x = run(params[name], x)
        return jnp.mean(x**2), buffers, {}

    return fz.Model(init, loss)


def chain(run):
    first = fz.Layer("in", None, lambda p, batch, ctx: batch["x"])
    layers = [fz.Layer(name, weight, lambda w, x, ctx: run(w, x)) for name in NAMES]
    return fz.Sequential([first, *layers], loss=lambda x, batch: jnp.mean(x**2))


def stack(run):
    first = fz.Layer("in", None, lambda p, batch, ctx: batch["x"])
    blocks = fz.Stack("blocks", BLOCKS, weight, lambda w, x, ctx: run(w, x))
    return fz.Sequential([first, blocks], loss=lambda x, batch: jnp.mean(x**2))


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(WIDTH)(x))


class LinenNet(linen.Module):
    kind: type[linen.Module]

    @linen.compact
    def __call__(self, x):
        for name in NAMES:
            x = self.kind(name=name)(x)
        return x


class NnxNet(nnx.Module):
    def __init__(self, remat):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(BLOCKS)])
        self.remat = remat

    def __call__(self, x):
        def run(layer, x):
            return jnp.tanh(layer(x))

        for layer in self.blocks:
            x = (nnx.remat(run) if self.remat else run)(layer, x)
        return x


def squared(forward, batch):
    return jnp.mean(forward(batch["x"]) ** 2)


def linen_model(remat):
    kind = linen.remat(LinenBlock) if remat else LinenBlock
    return fz.from_flax(LinenNet(kind), squared, BATCH["x"][:1])


MODELS = {
    "model": lambda remat: plain_model(jax.checkpoint(block) if remat else block),
    "layers": lambda remat: chain(jax.checkpoint(block) if remat else block),
    "stack": lambda remat: stack(jax.checkpoint(block) if remat else block),
    "linen": linen_model,
    "nnx": lambda remat: fz.from_flax(NnxNet(remat), squared),
}


def tanhs(model, plan):
    """How many `tanh` a step has; a stack's body counts once for each pass."""
    state = fz.abstract_state(model, SGD, plan)
    return fz.train_step(model, SGD, plan).lower(state, BATCH).as_text().count("stablehlo.tanh")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("data", [1, 4])
def test_a_checkpoint_of_the_users_is_honoured(name, data):
    plan = tiny.plan(zero=3, data=data, remat="none")
    once = 1 if name == "stack" else BLOCKS
    assert tanhs(MODELS[name](False), plan) == once
    assert tanhs(MODELS[name](True), plan) == 2 * once


@pytest.mark.parametrize("remat", ["dots", POLICIES.nothing_saveable], ids=["dots", "policy"])
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_reaches_every_model(name, remat):
    plan = tiny.plan(zero=3, data=1)
    once = 1 if name == "stack" else BLOCKS
    assert tanhs(MODELS[name](False), plan.replace(remat=remat)) == 2 * once


def turned(p, x, *_):
    z = jax.lax.complex(*jnp.split(x @ p["w"], 2, axis=-1)) * jnp.exp(1j * p["b"])
    return x + jnp.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("kind", ["layers", "stack"])
@pytest.mark.parametrize(
    "options", [{"zero": 3, "data": 2}, {"pipe": 2, "microbatches": 2, "schedule": "zb_h1"}]
)
def test_complex_numbers_on_the_way_are_kept(kind, options):
    """A checkpoint of jax rounds what it keeps, and ends in a TypeError at complex numbers."""

    def weights(key):
        return {"w": 0.1 * jax.random.normal(key, (8, 8)), "b": jnp.ones(4)}

    several = [fz.Stack("blocks", 2, weights, turned)]
    if kind == "layers":
        several = [fz.Layer(f"block{i}", weights, turned) for i in range(2)]
    first = fz.Layer("in", None, lambda p, batch, ctx: batch["x"])
    model = fz.Sequential([first, *several], loss=lambda y, batch: jnp.mean(y**2))
    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    found = []
    for remat in ("none", "layer"):
        plan = tiny.plan(remat=remat, **options)
        _, metrics = fz.train_step(model, SGD, plan)(fz.init(model, SGD, plan), batch)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    # rtol: programs that compute something again may round otherwise
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert found[0][1] > 0.1


def test_the_plan_does_not_overrule_the_user():
    """A policy that would keep everything, around blocks that keep nothing."""
    plan = tiny.plan(zero=3, data=1, remat=POLICIES.everything_saveable)
    assert tanhs(MODELS["model"](False), plan) == BLOCKS
    assert tanhs(MODELS["model"](True), plan) == 2 * BLOCKS


@pytest.mark.parametrize("data", [1, 4])
def test_a_number_may_be_all_that_a_part_of_the_backward_pass_reads(data):
    """Padding's backward pass has the padding value, which is no array, beside a checkpoint."""

    def apply(w, x):
        y = jax.checkpoint(jnp.sin)(x @ w)
        return jnp.pad(y, ((0, 0), (1, 0)), constant_values=2.0)[:, :-1]

    def loss(p, buffers, batch, rng, train):
        return jnp.mean(apply(p["w"], batch["x"]) ** 2), buffers, {}

    w, x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.ones((4, 8), np.float32)
    model, tx = fz.Model(({"w": w}, {}), loss), optax.sgd(1.0)
    plan = tiny.plan(zero=3, data=data)
    state, _ = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), {"x": x})
    gradient = jax.grad(lambda w: jnp.mean(apply(w, x) ** 2))(w)
    # rtol: four devices add rows up in another order.
    tiny.close(fz.logical(model, state, plan)["w"], w - gradient, rtol=1e-6)


def test_nothing_is_another_number():
    """Remat of either kind, in a plain model over four devices: as plain jax has it."""
    losses = {}
    for remat in (False, True):
        for said in ("layer", POLICIES.dots_saveable):
            model, plan = MODELS["model"](remat), tiny.plan(zero=3, data=4, remat=said)
            state = fz.init(model, SGD, plan)
            for _ in range(2):
                state, metrics = fz.train_step(model, SGD, plan)(state, BATCH)
            losses[remat, str(said)] = float(metrics["loss"])
    np.testing.assert_allclose(list(losses.values()), losses[False, "layer"], rtol=1e-6)


def named(prim, *_, **__):
    return prim.name == "tanh"


class TestPolicies:
    """A JAX policy in a plan, and its name in JSON."""

    @pytest.mark.parametrize(
        "policy", [POLICIES.everything_saveable, POLICIES.dots_with_no_batch_dims_saveable]
    )
    def test_policies_of_jax_come_back_from_json(self, policy):
        plan = fz.Plan(remat=policy)
        assert plan.to_json()["remat"].startswith("jax.checkpoint_policies.")
        assert fz.Plan.from_json(plan.to_json()) == plan

    def test_other_policies_are_names_that_a_step_asks_the_function_of(self):
        plan = fz.Plan.from_json(tiny.plan(zero=3, data=1, remat=named).to_json())
        assert plan.remat == f"{__name__}.named"
        model = MODELS["model"](False)
        state = fz.init(model, SGD, plan)
        with pytest.raises(fz.PlanError, match=r"plan\.replace\(remat=policy\)"):
            fz.train_step(model, SGD, plan)(state, BATCH)
        fz.train_step(model, SGD, plan.replace(remat=named))(state, BATCH)

    def test_a_maker_of_policies_is_refused(self):
        with pytest.raises(fz.PlanError, match="save_only_these_names: this makes a policy"):
            fz.Plan(remat=POLICIES.save_only_these_names)


def step_with(plan, model, memory):
    """A step on devices that have as much memory for jax."""
    blue = dataclasses.replace(blueprint(model, SGD, plan), memory=memory)
    return TrainStep(blue, donate=False, apply=True)


def wide(w, x):
    """A block of which everything, products and inputs take different room: sums are no product,
    and not computed again either."""
    return x + jnp.cumsum(jnp.tanh(x @ w), axis=-1) ** 2


def shapes_of_step(step):
    return fz.abstract_state(step.blueprint.model, SGD, step.plan), BATCH


def sizes_of(plan, model):
    """What a forward pass leaves by each choice, and what else is in the way of it."""
    sizes = {}
    for remat in CHOICES:
        step = step_with(plan.replace(remat=remat), model, None)
        args = step.passes, step.blueprint.shapes(), abstract_batch(BATCH, step.blueprint.mesh).rows
        left = saved_in_a_step(*args)
        sizes[remat] = left.activations + left.secondary
    large = 10**9
    open_ = dataclasses.replace(blueprint(model, SGD, plan.replace(remat=None)), memory=large)
    return sizes, int(SHARE * large) - room_for(open_)


@pytest.mark.parametrize(
    ("zero", "tiers"),
    [(1, {"opt_state": "host"}), (3, {"opt_state": "host", "params": "host"})],
    ids=str,
)
def test_preflight_gives_passes_the_room_that_parking_leaves(tiers, zero):
    """It compiles the plan with all on the device: passes must keep no less for it."""
    model, tx, large = tiny.chain(4), optax.adam(1e-3), 10**9
    plan = tiny.plan(zero=zero, data=2, tiers=tiers, min_shard_bytes=0)
    parks = dataclasses.replace(blueprint(model, tx, plan), memory=large)
    beside = room_of_parked(Report.of_plan(planned(model, tx, plan, plan.sizes(2))))
    assert beside > 8 * sum(x.size for x in jax.tree.leaves(parks.shapes()["params"])) // 2
    here = blueprint(model, tx, on_the_device(plan))
    here = dataclasses.replace(here, memory=large + beside)
    # Of a field that is parked, scalars (a count) stay.
    assert room_for(here) == pytest.approx(room_for(parks), abs=16)


class StandIn:
    """A device as far as it is asked for its memory; a described one raises."""

    def __init__(self, platform="gpu", limit=None, process=0, described=False):
        self.platform, self.process_index = platform, process
        self.limit, self.described = limit, described

    def memory_stats(self):
        if self.described or self.process_index:
            raise RuntimeError("MemoryStats is only supported for addressable PjRt devices.")
        return None if self.limit is None else {"bytes_limit": self.limit}


def test_memory_is_what_the_own_devices_say_least(monkeypatch):
    """Of other processes' nothing is known; whoever has none of a mesh asks his own."""
    assert device_memory([StandIn(limit=7), StandIn(limit=5), StandIn(process=1)]) == 5
    assert device_memory([StandIn("cpu", limit=7)]) is None
    assert device_memory([StandIn(described=True)]) is None
    assert device_memory([StandIn(described=True), StandIn(limit=5)]) == 5
    assert device_memory([StandIn(limit=None)]) is None
    monkeypatch.setattr(jax, "local_devices", lambda: [StandIn(limit=3)])
    assert device_memory([StandIn(process=1)]) == 3


@pytest.mark.parametrize("plan", [fz.Plan(zero=3, data=2, min_shard_bytes=0), fz.Plan(data=1)])
def test_the_most_that_there_is_room_for_is_kept(plan):
    """The program is, to the letter, the one that a user gets who names that choice."""
    model = stack(wide)
    sizes, spoken_for = sizes_of(plan, model)
    assert sizes["none"] > sizes["dots"] > sizes["layer"] > 0
    for remat, size in sizes.items():
        memory = int(np.ceil((size + spoken_for) / SHARE)) + 1
        step = step_with(plan, model, memory)
        named = step_with(plan.replace(remat=remat), model, memory)
        found = step.lower(*shapes_of_step(step)).as_text()
        assert found == named.lower(*shapes_of_step(named)).as_text()
        assert step.passes.keeps == [remat]
        assert f"keeping {remat}" in repr(step)
        less = step_with(plan, model, memory - 8)
        less.lower(*shapes_of_step(less))
        assert less.passes.keeps != [remat] or remat == "layer"


def test_without_a_stack_products_are_less_than_layers():
    """Of what does not fit either, the smaller."""
    step = step_with(fz.Plan(data=1), chain(wide), 0)
    step.lower(*shapes_of_step(step))
    assert step.passes.keeps == ["dots"]


def test_where_nobody_says_how_much_memory_there_is_inputs_are_kept():
    """As on CPUs."""
    model, plan = stack(wide), fz.Plan(data=1)
    step, named = (
        fz.train_step(model, SGD, plan),
        fz.train_step(model, SGD, plan.replace(remat="layer")),
    )
    assert step.blueprint.memory is None
    texts = [one.lower(*shapes_of_step(one)).as_text() for one in (step, named)]
    assert texts[0] == texts[1]
    assert "kept for the backward pass (remat=None)" in str(fz.describe(plan, model))


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.nightly), "zb_h1"])
def test_a_rank_of_a_pipeline_has_room_for_all_its_slots(schedule):
    """Two ranks of equal layers have as much for each microbatch that they keep; and what a stage
    is found to keep has the bits of a plan that names it."""
    plan = fz.Plan(pipe=2, data=1, microbatches=4, schedule=schedule)
    model = stack(wide)
    blue = dataclasses.replace(blueprint(model, SGD, plan), memory=10**9)
    rooms = [room_for(blue, rank) for rank in range(2)]
    slots = fz.pipeline.slots(blue.stages.schedule).per_stage
    assert rooms[0] * slots[0] == pytest.approx(rooms[1] * slots[1], rel=1e-6)
    state, batch = fz.init(model, SGD, plan, rng=0), BATCH
    results = {}
    for name, memory in {"all": 10**9, "nothing": 0}.items():
        step = step_with(plan, model, memory)
        results[name] = step(state, batch)
        assert step.passes.keeps == ["none" if name == "all" else "layer"]
    for name, remat in {"all": "none", "nothing": "layer"}.items():
        expected = step_with(plan.replace(remat=remat), model, None)(state, batch)
        tiny.same_bits(results[name], expected)


def test_what_another_rank_has_is_in_nobodys_way():
    """A head takes room for itself and its gradient on the last rank alone."""
    head = fz.Layer("head", weight, lambda w, x, ctx: x @ w)
    model = fz.Sequential([*stack(wide).layers[:-1], head], loss=lambda x, batch: jnp.mean(x**2))
    plan = fz.Plan(pipe=2, data=1, microbatches=4, partition=[3, 3])
    blue = dataclasses.replace(blueprint(model, SGD, plan), memory=10**9)
    slots = fz.pipeline.slots(blue.stages.schedule).per_stage
    first, last = (room_for(blue, rank) * slots[rank] for rank in range(2))
    assert first - last == pytest.approx(2 * WIDTH * WIDTH * 4, abs=max(slots))
