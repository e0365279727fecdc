"""Wrappers pile up: building steps and placing state is free of traces, however often it is done.

Original report: Lightning #8593, each call of the trainer wraps the module once more, parameter
names grow prefixes, and a new module around an old `backbone` is wrapped twice. Shown, on every
ZeRO stage: steps built ten times share one state whose tree structure never changes; `replan` to
the plan a state already has returns the same arrays, and replanning twice is replanning once; every
step is traced once; a new model around an old one's backbone evaluates with exactly those weights.
"""

from typing import Any

import failure_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from failure_cases import STAGES, batch_at, bits, build, differing, fit, memory, tiny_plan, tiny_run

import fzero as fz


@pytest.mark.parametrize("zero", STAGES)
def test_steps_built_ten_times(zero: int) -> None:
    model, tx, plan = cases.bigram_model(), optax.adam(1e-2), tiny_plan(zero)
    runs = [build(model, tx, plan) for _ in range(2)]
    described = vars(model).copy()
    spare = [(fz.train_step(model, tx, plan), fz.eval_step(model, plan)) for _ in range(8)]
    structures, states = set(), []
    for run in (runs[0], runs[1], runs[0]):  # the same state would be wrapped by each in turn
        state = run.start() if not states else states[-1]
        run.evaluate(state, batch_at(0))
        states.append(fit(run, state, 1, []))
        structures.add(jax.tree.structure(states[-1]))
    assert structures == {jax.tree.structure(runs[0].first)}
    assert type(states[-1]) is fz.TrainState
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(states[-1]))
    assert [key for key, _ in fz.tree.named_leaves(states[-1].params)] == ["out", "table"]
    assert vars(model) == described
    straight = fit(runs[0], runs[0].start(), 3, [])
    assert differing(bits(states[-1]), bits(straight)) == []
    assert all(step.num_traces == 1 for run in runs for step in (run.train, run.evaluate))
    assert all(step.num_traces == 0 for pair in spare for step in pair)  # building runs nothing


@pytest.mark.parametrize("zero", STAGES)
def test_placing_ten_times_copies_nothing(zero: int) -> None:
    run = tiny_run(zero)
    run.evaluate(fit(run, run.start(), 1, []), batch_at(0))
    traces = run.train.num_traces, run.evaluate.num_traces
    state, where = run.first, memory(run.first)
    for _ in range(10):
        state = fz.replan(state, run.model, run.tx, run.plan, run.plan)
        assert jax.tree.structure(state) == jax.tree.structure(run.first)
        assert memory(state) == where
    fit(run, cases.copied(state), 1, [])
    run.evaluate(state, batch_at(0))
    assert (run.train.num_traces, run.evaluate.num_traces) == traces


@pytest.mark.parametrize("zero", STAGES)
def test_replanning_twice_is_replanning_once(zero: int) -> None:
    run = tiny_run(zero)
    other = run.plan.replace(zero=(zero + 2) % 4, data=4)

    def over(state: fz.TrainState, old: fz.Plan, new: fz.Plan) -> fz.TrainState:
        return fz.replan(state, run.model, run.tx, old, new)

    once = over(run.first, run.plan, other)
    twice = over(once, other, other)
    assert memory(once) == memory(twice)
    back = over(twice, other, run.plan)
    assert differing(bits(back), bits(run.first)) == []
    assert [x.sharding for x in jax.tree.leaves(back)] == [
        x.sharding for x in jax.tree.leaves(run.first)
    ]


def backbone_model(init: Any = None) -> fz.Sequential:
    """The first links of the tiny model under a new head."""

    def head(p: dict, x: jax.Array, ctx: fz.Context) -> fz.Mean:
        return fz.Mean(jnp.sum(jnp.square(x @ p["w"])), jnp.float32(x.shape[0] * x.shape[1]))

    new = fz.Layer("probe", lambda rng: {"w": jax.random.normal(rng, (cases.WIDTH, 3))}, head)
    return fz.Sequential([*cases.tiny_model().layers[:3], new], init=init)


@pytest.mark.parametrize("zero", STAGES)
def test_new_model_around_an_old_backbone(zero: int) -> None:
    run = tiny_run(zero)
    old = fit(run, run.start(), 2, [])
    model = backbone_model()
    fresh = fz.init(model, None, run.plan, rng=3)
    shared = {name: old.params[name] for name in ("embed", "blocks", "center")}
    new = fresh.replace(params={**fresh.params, **shared}, buffers=old.buffers)
    assert all(new.params["blocks"][k] is old.params["blocks"][k] for k in shared["blocks"])

    step = fz.eval_step(model, run.plan)
    seen = bits(step(new, batch_at(0)))
    # The same weights by value, through host memory and another initialisation.
    own = jax.tree.map(jnp.copy, (fz.logical(model, new), new.buffers))
    values = jax.tree.map(np.asarray, own)
    by_value = fz.init(backbone_model(values), None, run.plan)
    assert bits(step(by_value, batch_at(0))) == seen
    assert bits(step(fresh, batch_at(0))) != seen
    assert step.num_traces == 1

    # Training the old model on gives its memory away, and the new one says so instead of reading
    # what is no longer there.
    fit(run, old, 1, [])
    with pytest.raises(fz.StateConsumedError, match="eval_step"):
        step(new, batch_at(0))
    assert bits(step(by_value, batch_at(0))) == seen


def test_consumption_shows_through_host_views() -> None:
    # jax 0.10 on CPU: a numpy view of a replicated array keeps its first shard alive, the others
    # are donated, `is_deleted()` stays False, and a program that reads the array crashes.
    run = tiny_run(0)
    state = fit(run, run.start(), 1, [])
    views = jax.tree.map(np.asarray, (state.params, state.opt_state, state.buffers))
    before = [view.copy() for view in jax.tree.leaves(views)]
    fit(run, state, 1, [])
    # What numpy still looks at must not change under it ...
    assert all(map(np.array_equal, jax.tree.leaves(views), before))
    # ... and the state must know that it was given away.
    with pytest.raises(fz.StateConsumedError):
        fz.logical(run.model, state)
