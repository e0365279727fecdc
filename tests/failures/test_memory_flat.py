"""Init, train, evaluate, drop, again and again: memory does not grow.

Original report: Lightning #2010, GPU memory grows with every trainer made in one process, because
wrappers, hooks and optimizers keep each other alive. Shown, with a model whose state takes 24 MiB:

- Device memory, as the bytes of `jax.live_arrays()`, is the same after every cycle, to the byte:
  nothing outlives the state. No garbage collection is needed, as no state is part of a cycle.
- Host memory, as the resident set (what holds arrays on CPU devices, too), grows by less than
  one eighth of what keeping every state would cost, between the tenth and the fiftieth cycle.
  Measured: below 1 MiB in all, which is the allocator and the compiler of each `fz.init`.
- Model and steps that are built anew in each cycle are collected with it.
- Their compiled programs are not all given back at once (measured: 30 cycles rise by 20 to 80 MiB
  and then stay there), so the bound of this test, which `make nightly` runs, is half of a state for
  each cycle, 156 MiB; and they run in a process of their own, as what other tests have left moves
  the resident set of theirs.
"""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from tests.support.memory import resident_bytes


ROOT = Path(__file__).parents[2]
ROWS, WIDTH = 262144, 8
STATE_BYTES = 3 * 4 * ROWS * WIDTH  # float32 weights and Adam's two moments


def bigram() -> fz.Model:
    """One wide table: many bytes, little to compute or compile."""

    def loss(params: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        rows = params["table"][batch["ids"]]
        return fz.Mean(jnp.sum(jnp.square(rows - 1)), jnp.float32(rows.size)), buffers, {}

    return fz.Model(lambda rng: ({"table": jnp.zeros((ROWS, WIDTH))}, {}), loss)


def live_bytes() -> int:
    """Bytes of all arrays on all devices."""
    return sum(leaf.nbytes for leaf in jax.live_arrays())


def cycles(
    count: int, built: list[Any] | None = None, keep: list[Any] | None = None
) -> Iterator[tuple[int, int]]:
    """Device and host bytes after each cycle of init, train, evaluate, drop.

    Args:
        count: how many.
        built: build model and steps anew in each cycle, and put weak references to them here.
        keep: a leak: every state is put here.
    """
    plan = fz.Plan(zero=3, data=8)

    def build() -> tuple[Any, ...]:
        model, tx = bigram(), optax.adam(1e-2)
        return model, tx, fz.train_step(model, tx, plan), fz.eval_step(model, plan)

    model, tx, train, evaluate = build()
    for number in range(count):
        if built is not None:
            model, tx, train, evaluate = build()
            built += [weakref.ref(thing) for thing in (model, train, evaluate)]
        batch = {"ids": np.arange(16, dtype=np.int32) + number}
        state = fz.init(model, tx, plan, rng=number)
        state, metrics = train(state, batch)
        assert np.isfinite(float(evaluate(state, batch)["loss"]))
        if keep is not None:
            keep.append(state)
        del state, metrics
        yield live_bytes(), resident_bytes()


def check_flat(measured: list[tuple[int, int]], share: float) -> None:
    """Fails when device bytes differ at all, or host bytes grow by a share of all states."""
    device = [live for live, _ in measured]
    assert len(set(device)) == 1, device
    host = [resident for _, resident in measured]
    allowed = STATE_BYTES * (len(host) - 1) * share
    assert host[-1] - host[0] < allowed, (host[-1] - host[0], allowed)


def test_fifty_states_with_the_same_steps() -> None:
    gc.collect()
    gc.disable()  # what only the collector would free counts as kept
    try:
        measured = list(cycles(50))
    finally:
        gc.enable()
    check_flat(measured[10:], 1 / 8)
    assert len({live for live, _ in measured}) == 1


def anew(count: int) -> list[tuple[int, int]]:
    """Cycles each of which builds everything anew."""
    gc.collect()  # what earlier tests left would count in the first cycle only
    measured, built = [], []
    for both in cycles(count, built=built):
        # A step refers to itself (its program is one of its own methods), so that it takes the
        # collector to free it; the newest is still in use.
        gc.collect()
        assert [reference() is None for reference in built[:-3]] == [True] * (len(built) - 3)
        measured.append(both)
    return measured


def test_what_is_built_anew_is_collected() -> None:
    assert len({live for live, _ in anew(3)}) == 1


def kept_states() -> None:
    """What a leak looks like, in a process whose allocator has no room left by earlier tests."""
    kept: list[Any] = []
    measured = list(cycles(12, keep=kept))
    assert len({live for live, _ in measured}) == 12
    with pytest.raises(AssertionError):
        check_flat([(0, resident) for _, resident in measured[2:]], 1 / 2)
    assert measured[-1][1] - measured[2][1] > 6 * STATE_BYTES


@pytest.mark.nightly
def test_programs_that_are_built_anew_are_given_back_and_a_kept_state_is_seen() -> None:
    code = (
        "import tests.conftest; from tests.failures import test_memory_flat as t;"
        " t.check_flat(t.anew(16)[2:], 1 / 2); t.kept_states(); print('both')"
    )
    # glibc's malloc keeps what is freed in pools, unless arrays are mapped one by one.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both\n"
