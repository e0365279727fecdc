"""Processes killed at random moments: nothing hangs, nothing is lost, and the bits are the same."""

from __future__ import annotations

import kills
import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.parametrize(
    ("processes", "number"),
    [pytest.param(2, 4, marks=pytest.mark.nightly),
     pytest.param(2, 100, marks=pytest.mark.nightly),
     pytest.param(4, 100, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_killed_runs_end_like_one_that_nobody_killed(tmp_path, processes, number):
    found = kills.rounds(tmp_path, number, processes, each=5, seed=number, seconds=86400)
    assert found["kills"] == number, found
    assert (found["hung"], found["lost"]) == (0, 0), found
    assert found["runs bit for bit"] == found["runs"], found
