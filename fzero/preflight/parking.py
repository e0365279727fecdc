"""Plans that park leaves: what a step of theirs needs, from the step that keeps all on the device.

A described GPU has no memory but its own, so such a step's programs cannot be compiled for it. What
is compiled is the same step with everything on the device; bytes then move by the plan's
arithmetic, and every byte that visits takes the link's rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from fzero.plan import Plan
from fzero.preflight.rates import Rates
from fzero.report.report import Report
from fzero.storage.tiers import DISK, HOST
from fzero.zero.keeping import SHARE


@dataclass(frozen=True)
class Parked:
    """What a plan keeps elsewhere between steps, per device.

    Args:
        host_bytes: in pinned memory.
        disk_bytes: on a drive.
        visiting_bytes: most bytes of them on the device at once.
        up_seconds: to bring what a step reads.
        down_seconds: to take away what it writes.
        hidden_seconds: of what comes and goes for passes, beside computation.
        seconds: what parking likely adds to the step.
    """

    host_bytes: int
    disk_bytes: int
    visiting_bytes: int
    up_seconds: float
    down_seconds: float
    hidden_seconds: float
    seconds: float


def on_the_device(plan: Plan) -> Plan:
    """The plan with nothing parked."""
    return plan.replace(tiers={}, update_on="device")


def room_of_parked(where: Report | None) -> int:
    """Bytes that a device has more of where nothing is parked, so that passes keep as much.

    What they may keep is a share of the memory, less the state that is there (`room_for`).

    Args:
        where: where the plan's leaves are; `None`: all on the device.
    """
    if where is None:
        return 0
    return math.ceil(sum(where.fullest(tier)["total"] for tier in (HOST, DISK)) / SHARE)


def moved_bytes(plan: Plan, where: Report, among: Collection[int] | None = None) -> tuple[int, int]:
    """Bytes that the fullest of some devices has elsewhere, and the most of them there at once.

    Args:
        plan: the plan.
        where: where its leaves are.
        among: devices to look at; all by default.
    """
    away = sum(where.fullest(tier, among)["total"] for tier in (HOST, DISK))
    return away, min(2 * plan.stream_bytes, away) if plan.update_on == "device" else 0


def parked(
    plan: Plan,
    where: Report,
    rates: Rates,
    moving: tuple[int, int],
    computing_seconds: float,
) -> Parked:
    """What parking costs a step.

    Optimizer state and masters visit during the update, in turn, which comes after the
    gradients: their ways up and down run beside each other and beside the update's own work, which
    is short. Parameters come for every pass, and layers' inputs (`remat="offload"`) leave and come
    back in each; both hide behind its layers.

    Args:
        plan: the plan.
        where: where its leaves are.
        rates: of one device.
        moving: bytes of one device's summed gradients, and of what a forward pass of one microbatch
            leaves on the host.
        computing_seconds: of a step's kernels, which what comes for passes hides behind.
    """
    link, (gradient_bytes, saved_bytes) = rates.pinned_bytes_per_s, moving
    by_class = {tier: where.fullest(tier) for tier in (HOST, DISK)}
    on_host, on_disk = (by_class[tier]["total"] for tier in (HOST, DISK))
    _, visiting = moved_bytes(plan, where)
    if plan.update_on == "host":
        # Gradients go down and parameters up; the optimizer state stays where it is.
        up = down = gradient_bytes / link
        update = up + down
    else:
        # A drive does one at a time.
        disk = 2 * on_disk / rates.disk_bytes_per_s
        up = down = (on_host + on_disk) / link
        # The first bucket arrives and the last one leaves beside nothing.
        update = max(up, disk) + visiting / link
    saved = plan.microbatches * saved_bytes / link
    coming = saved
    if "params" in plan.parked:
        # Each pass, forwards and backwards, brings them again.
        coming += 2 * plan.microbatches * by_class[HOST]["params"] / link
    passes = coming + saved
    hidden = min(passes, computing_seconds)
    return Parked(
        on_host, on_disk, visiting, up + coming, down + saved, hidden, update + passes - hidden
    )
