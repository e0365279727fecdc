"""Pipelines that run: small models with given values, and what is left of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from support import tiny

import fzero as fz
from fzero.pipeline import BUILDERS
from fzero.sharding.blueprint import blueprint
from fzero.sharding.initial import initial_shapes
from fzero.sharding.split import map_splits, trained


# Two stages on each rank.
CHUNKED = ("interleaved", "looped_bfs", "zb_v", "dualpipe_v")


def given(model: fz.Sequential, seed: int = 0, frozen: frozenset[str] = frozenset()) -> Any:
    """The chain with given initial values: no random numbers to compile for every test."""
    rng = np.random.default_rng(seed)

    def value(leaf: Any) -> np.ndarray:
        return np.asarray(rng.standard_normal(leaf.shape) * 0.3, leaf.dtype)

    params, buffers = initial_shapes(model)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), buffers)
    chain = [link for link in model.layers if link.name != "loss"]
    losses = [link for link in model.layers if link.name == "loss"]

    def loss(x: Any, batch: Any) -> Any:
        return losses[0].apply(None, x, fz.Context(batch, None, True))

    init = jax.tree.map(value, params), zeros
    return fz.Sequential(chain, loss if losses else None, init=init, frozen=frozen)


def untied(num: int = 4, apply: Any = tiny.block) -> Any:
    """A chain in which every leaf has one reader."""

    def head(p: Any, x: Any, ctx: Any) -> Any:
        return x @ p["out"]

    return given(
        fz.Sequential(
            [
                fz.Layer("embed", tiny.embed_init, tiny.embed),
                fz.Stack("blocks", num, tiny.block_init, apply),
                fz.Layer("head", lambda key: {"out": np.zeros((tiny.D, tiny.VOCAB))}, head),
            ],
            tiny.token_loss,
        )
    )


@cache
def tied(num: int = 4, apply: Any = tiny.block) -> Any:
    """`tiny.chain`: its head reads the embedding's table."""
    return given(tiny.chain(num, apply))


def counting(rows: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch that can be learnt: each token's label is the next one. Masked as `tiny.tokens`."""
    batch = tiny.tokens(rows, seed)
    return {**batch, "labels": (batch["ids"] + 1) % tiny.VOCAB}


def ranks_for(name: str, stages: int) -> int:
    """Ranks on which a schedule runs so many stages."""
    chunks = BUILDERS[name].chunks or (2 if name in CHUNKED else 1)
    assert stages % chunks == 0
    return stages // chunks


def plan_for(name: str, stages: int, **options: Any) -> fz.Plan:
    """A plan of so many stages, however many ranks they take."""
    return tiny.plan(**{"pipe": ranks_for(name, stages), "schedule": name, "data": 1, **options})


@dataclass(frozen=True)
class Run:
    """What a training run gave.

    Args:
        trace: every step's metrics.
        params: final parameters, layers in order.
        state: the final state.
        step: the step.
    """

    trace: list[dict[str, float]]
    params: dict[str, np.ndarray]
    state: fz.TrainState
    step: Any


def train(
    model: Any,
    plan: fz.Plan,
    steps: int = 3,
    rows: int | None = None,
    tx: Any = None,
    batch: Any = counting,
    **options: Any,
) -> Run:
    """Trains; two rows for each device and microbatch."""
    rows = rows or 2 * plan.data * plan.replica * plan.microbatches
    tx = tx or optax.sgd(0.1, momentum=0.9)
    state = fz.init(model, tx, plan)
    step = fz.train_step(model, tx, plan, **options)
    trace = []
    for seed in range(steps):
        state, metrics = step(state, batch(rows, seed))
        trace.append({name: float(value) for name, value in metrics.items()})
    return Run(trace, tiny.host(fz.logical(model, state, plan)), state, step)


def same(one: Run, other: Run) -> None:
    """Asserts that two runs gave the same bits."""
    assert one.trace == other.trace
    tiny.same_bits(one.params, other.params)


def gradients(model: Any, plan: fz.Plan, batch: Any, tx: Any = None) -> dict[str, np.ndarray]:
    """The summed gradients of one batch, layers in order, without padding."""
    tx = tx or optax.sgd(0.1)
    state, _ = fz.accumulate_step(model, tx, plan)(fz.init(model, tx, plan), batch)

    def own(split: Any, leaf: Any) -> np.ndarray:
        leaf = split.logical(leaf)
        return np.asarray(leaf if split.home is None else split.home.restore(leaf))

    layout = trained(blueprint(model, tx, plan).params)
    sums = map_splits(own, layout, state.grads.sums)
    return tiny.host(sums) | {"loss": np.asarray(state.grads.total)}
