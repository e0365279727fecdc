"""What a pipeline holds while it runs: the activations that its schedule needs, and no more."""

from __future__ import annotations

import gc
from collections import defaultdict
from functools import cache

import jax
import numpy as np
import optax
import pytest
from support import tiny
from support.sample import some

import fzero as fz
from fzero.pipeline import slots
from fzero.preflight import hlo


# name, ranks: always four stages
SCHEDULES = [
    ("gpipe", 4), ("1f1b", 4), ("eager_1f1b", 4), ("zb_h1", 4), ("zb_h2", 4), ("interleaved", 2),
    ("looped_bfs", 2), ("zb_v", 2), ("dualpipe_v", 2),
]  # fmt: skip
MICROBATCHES = 8


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def live_bytes() -> int:
    return sum(leaf.nbytes for leaf in jax.live_arrays())


class Watched:
    """Second step of a schedule, watched after each action."""

    def __init__(self, name: str, ranks: int) -> None:
        self.plan = fz.Plan(
            zero=1, pipe=ranks, data=1, microbatches=MICROBATCHES, schedule=name,
            min_shard_bytes=128,
        )  # fmt: skip
        model, tx = tiny.chain(6), optax.sgd(0.1)
        self.step = fz.train_step(model, tx, self.plan)
        state = fz.init(model, tx, self.plan)
        state, _ = self.step(state, tiny.tokens(64))
        self.gradient_bytes = nbytes(state.params)
        self.live: dict[int, int] = defaultdict(int)
        self.held: list[int] = []  # bytes in slots and under way, after each action
        self.all: list[int] = []  # bytes of all arrays there are

        def observe(action, held) -> None:
            for stage in range(4):
                self.live[stage] = max(self.live[stage], held.live(stage))
            self.held.append(nbytes((held.saved, held.halves, held.sent)))
            self.all.append(live_bytes())

        gc.collect()  # so that what others left does not end meanwhile
        self.step.executor.observer = observe
        state, _ = self.step(state, tiny.tokens(64))
        self.step.executor.observer = None
        # Steps leave nothing but the state.
        after = []
        for _ in range(3):
            state, metrics = self.step(state, tiny.tokens(64))
            del metrics
            after.append((live_bytes(), len(jax.live_arrays())))
        assert len(set(after)) == 1, after


@cache
def watched_in(name: str, ranks: int) -> Watched:
    return Watched(name, ranks)


@pytest.mark.parametrize(
    ("name", "ranks"),
    some(SCHEDULES, ("eager_1f1b", 4), ("dualpipe_v", 2)),
)
def test_live_activations_are_those_of_the_slots(name, ranks):
    watched = watched_in(name, ranks)
    need = slots(watched.plan.build_schedule()).per_stage
    assert [watched.live[stage] for stage in range(4)] == need
    # Whatever else lives while the schedule runs (parameters, sums, the batch) does not grow with
    # what is held: only the microbatches' losses come on top, a few bytes each.
    other = np.subtract(watched.all, watched.held)
    allowed = 4096
    if name == "looped_bfs":
        # It runs backwards in the reverse order of microbatches. To give the bits of the other
        # schedules, gradients are added in theirs: all but the last to come wait for it.
        allowed += (MICROBATCHES - 1) * watched.gradient_bytes
    assert other.max() - other.min() < allowed, (other.min(), other.max())


def test_1f1b_holds_what_gpipe_holds_less_the_slots():
    gpipe, one = watched_in("gpipe", 4), watched_in("1f1b", 4)
    assert [gpipe.live[s] for s in range(4)] == [8, 8, 8, 8]
    assert [one.live[s] for s in range(4)] == [4, 3, 2, 1]
    saved = max(gpipe.all) - max(one.all)
    # All of GPipe's slots are full at once; all of 1F1B's too, but for one under way.
    assert saved > 0.6 * (1 - 10 / 32) * max(gpipe.held)


@pytest.mark.parametrize(("schedule", "name"), [("1f1b", "backward"), ("zb_h1", "weight_backward")])
def test_gradients_are_added_where_their_sums_are(schedule, name):
    """A stage would have two of them at once."""
    plan, given = tiny.plan(pipe=2, data=1, microbatches=2, schedule=schedule), []
    step = fz.train_step(tiny.chain(2), optax.sgd(0.1), plan)

    def watched(run):
        def call(*args):
            given.extend(jax.tree.leaves(args[-1]))
            return run(*args)

        return call

    for program in step.executor.programs:
        made = getattr(program, name)
        setattr(program, name, lambda with_sums, made=made: watched(made(with_sums)))
    step(fz.init(tiny.chain(2), optax.sgd(0.1), plan), tiny.tokens(8))
    assert given
    assert all(leaf.is_deleted() for leaf in given)


# Stages of both kinds of link, and of one.
@pytest.mark.parametrize(("layers", "pipe"), some([(4, 2), (2, 4)], (2, 4)))
@pytest.mark.parametrize("remat", ["layer", "none"])
def test_two_halves_multiply_what_the_whole_does(remat, layers, pipe):
    model, tx = tiny.chain(layers), optax.sgd(0.1)
    plan = fz.Plan(
        zero=3, pipe=pipe, data=2, microbatches=2, schedule="zb_h1", remat=remat,
        min_shard_bytes=128,
    )  # fmt: skip
    step = fz.train_step(model, tx, plan)
    flops: dict[tuple[int, str], float] = {}
    programs = step.executor.programs

    def count(stage, kind, program):
        def run(*args):
            if (stage, kind) not in flops:
                text = program.lower(*args).compile().as_text()
                flops[stage, kind] = hlo.matmul_flops(text).flops
            return program(*args)

        return run

    for program in programs:
        stage = program.stage
        forward = program.forward
        program.__dict__["forward"] = count(stage, "F", forward)
        program.__dict__["input_backward"] = count(stage, "I", program.input_backward)
        halves = program.weight_backward
        program.weight_backward = lambda with_sums, s=stage, h=halves: count(s, "W", h(with_sums))
    state = fz.init(model, tx, plan)
    step(state, tiny.tokens(16))
    whole = fz.train_step(model, tx, plan.replace(schedule="1f1b"))
    for program in whole.executor.programs:
        made = program.backward
        program.backward = lambda with_sums, s=program.stage, m=made: count(s, "B", m(with_sums))
    whole(fz.init(model, tx, plan.replace(schedule="1f1b")), tiny.tokens(16))
    for stage in range(pipe):
        # Tokens have no gradient, so an embedding alone has nothing to do at first.
        assert (flops[stage, "I"] > 0) == (pipe == 2 or stage > 0)
        assert flops[stage, "W"] > 0
        assert flops[stage, "I"] + flops[stage, "W"] == flops[stage, "B"]
        # Each layer's backward is twice its forward, plus the forward again where it is not kept.
        assert flops[stage, "B"] <= (3 if remat == "layer" else 2) * flops[stage, "F"]
