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
    runs = list(kills.rounds(tmp_path, number, processes, each=5, seed=number))
    found = [one for run in runs for one in run["kills"]]
    assert len(found) == number, runs
    assert not any(one["hung"] or one["lost"] for one in found), found
    assert all(run["same bits"] for run in runs), runs
