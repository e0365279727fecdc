"""Pipelines over processes: the fewest plans in which every two choices meet."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product, starmap
from typing import Any, NamedTuple

from support import tiny

import fzero as fz
from fzero import pipeline


class Paired(NamedTuple):
    """One of each; its name lists them."""

    schedule: str
    zero: int
    processes: int
    place: str
    tier: str
    precision: str
    rows: str
    updates: str
    then: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


CHOICES = Paired(
    schedule=("1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "csv"),
    zero=(0, 1, 2, 3),
    processes=(2, 4),
    # Two ranks in one process (of four: in the same two), a rank for each (of four: four), and
    # ranks whose data axis goes over several processes.
    place=("within", "across", "spanning"),
    tier=("device", "host", "disk"),
    precision=("fp32", "bf16"),
    rows=("global", "local"),  # fz.local_batch: what each process has read
    updates=("step", "accumulate"),
    then=("evaluate", "predict"),
)
# Less than any norm of these steps.
CLIP_NORM = 0.25
# Ranks, and devices in an order that is not jax's.
PLACES = {
    (2, "within"): (4, range(8)),
    (2, "across"): (2, range(8)),
    (2, "spanning"): (2, [0, 4, 1, 5, 2, 6, 3, 7]),
    (4, "within"): (4, [0, 2, 1, 3, 4, 6, 5, 7]),
    (4, "across"): (4, range(8)),
    (4, "spanning"): (2, range(8)),
}


def paired() -> dict[str, Paired]:
    """By their names; of those that show the most new pairs, one whose choices were rare so far."""
    pairs = {one: _pairs(one) for one in starmap(Paired, product(*CHOICES))}
    missing = set().union(*pairs.values())
    found: list[Paired] = []
    while missing:
        often = Counter(choice for one in found for choice in enumerate(one))
        new = {one: len(missing & shown) for one, shown in pairs.items()}
        most = max(new.values())
        best = [one for one in pairs if new[one] == most]
        found.append(min(best, key=lambda one: sum(often[choice] for choice in enumerate(one))))
        missing -= pairs[found[-1]]
    return {str(one): one for one in found}


def _pairs(one: Paired) -> set[Any]:
    return set(combinations(enumerate(one), 2))


PAIRED = paired()


def of(processes: int) -> list[str]:
    """The names of those for two processes, or for four."""
    return [name for name, one in PAIRED.items() if one.processes == processes]


def plan(one: Paired) -> fz.Plan:
    """Its plan, which splits even tiny leaves, over eight devices."""
    ranks, _ = PLACES[one.processes, one.place]
    microbatches = 2 * ranks
    schedule: Any = one.schedule
    if schedule == "csv":  # out of a file
        table = pipeline.schedule("zb_h2", stages=ranks, microbatches=microbatches).to_csv()
        schedule = pipeline.Schedule.from_csv(io.StringIO(table))
    return tiny.plan(
        pipe=ranks, data=8 // ranks, zero=one.zero, microbatches=microbatches,
        schedule=schedule, precision=one.precision, clip_norm=CLIP_NORM,
        tiers={} if one.tier == "device" else {"opt_state": one.tier},
    )  # fmt: skip


def layers(one: Paired) -> int:
    """Of the stack; two more are the chain's ends, and some ranks have two stages."""
    ranks, _ = PLACES[one.processes, one.place]
    twice = one.schedule in ("interleaved", "zb_v", "dualpipe_v")
    return max(2, (2 if twice else 1) * ranks - 2)


def order(one: Paired) -> Sequence[int]:
    """Of the devices."""
    return PLACES[one.processes, one.place][1]
