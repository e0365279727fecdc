"""All schedules of the same stages and microbatches give the same bits.

What a compiler fuses decides how sums round, so the schedule with the most kinds of programs is
compared as users compile, and all of them as quickly as may be.
"""

from __future__ import annotations

import optax
import pytest
from execute_cases import plan_for, same, tied, train
from schedule_cases import TRAINING
from support import tiny


pytestmark = pytest.mark.slow


def main(name):
    """20 steps: tied weights, dropout, uneven stages, devices in groups, some steps clipped."""
    plan = plan_for(name, 4, data=2, microbatches=8, clip_norm=1.0)
    return train(tied(4, tiny.dropped_block), plan, steps=20, tx=optax.adamw(1e-2))


@pytest.fixture(scope="module")
def gpipe():
    return main("gpipe")


def check(run, gpipe):
    same(run, gpipe)
    assert run.trace[-1]["loss"] < 0.8 * run.trace[0]["loss"]
    norms = [metrics["grad_norm"] for metrics in run.trace]
    assert min(norms) < 1 < max(norms)


@pytest.mark.parametrize("name", [name for name in TRAINING if name != "gpipe"])
def test_every_schedule_gives_the_same_bits(name, gpipe):
    check(main(name), gpipe)


@pytest.mark.nightly
@pytest.mark.as_users
def test_whole_and_halved_backward_passes_have_the_same_bits_as_users_compile_them():
    check(main("zb_h1"), main("gpipe"))
