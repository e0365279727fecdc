"""What excludes what in a plan: one table.

What follows from more than the plan is refused where that is known: schedules in `Plan`, numbers of
devices in `Plan.sizes`, shapes in `sharding.blueprint`, processes in `processes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fzero.errors import PlanError
from fzero.float8.recipe import Float8


# When two fields of a plan `p` exclude each other, and what to do then (a template of `p`).
EXCLUSIONS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    # Pipelines.
    (
        lambda p: p.pipe > 1 and p.remat == "offload",
        "remat='offload' with pipe > 1: what a stage keeps is handed from program to program on"
        " the device; use remat='layer'",
    ),
    # When gradients are reduced.
    (
        lambda p: p.pipe > 1 and p.reduce == "step",
        "reduce='step' keeps whole gradients of every stage until the last microbatch; a pipeline"
        " reduces each: use reduce='microbatch'",
    ),
    (
        lambda p: p.reduce == "step" and p.zero >= 2,
        "reduce='step' keeps whole gradients on every device, which zero={p.zero} promises not to"
        " do; use reduce='microbatch', or zero=0 or 1",
    ),
    # When weights are gathered, and how they are sent.
    (
        lambda p: p.gather == "lazy" and p.zero == 0,
        "gather='lazy' with zero=0: stage 0 has no shards to gather; leave gather out, or use"
        " zero=1 or 2",
    ),
    (
        lambda p: p.gather == "lazy" and p.zero == 3,
        "gather='lazy' with zero=3: stage 3 gathers layer by layer in every pass as it is; leave"
        " gather out, or use zero=1 or 2",
    ),
    (
        lambda p: p.gather == "lazy" and p.pipe > 1,
        "gather='lazy' with pipe={p.pipe}: the programs of a stage are handed whole parameters, or"
        " gather them each for itself (zero=3); use gather='eager', or zero=3, or pipe=1",
    ),
    (
        lambda p: p.gather_dtype is not None and p.zero != 3,
        "gather_dtype={p.gather_dtype!r} with zero={p.zero}: it is about the gathers of each pass,"
        " which only zero=3 has; use zero=3, or leave it out",
    ),
    (
        lambda p: p.secondary is not None and p.zero != 3,
        "secondary={p.secondary!r} with zero={p.zero}: it is about the gathers of each pass, which"
        " only zero=3 has; use zero=3, or leave it out",
    ),
    (
        lambda p: p.float8 != Float8() and p.precision != "fp8",
        "float8=... with precision={p.precision!r} would do nothing; use precision='fp8', or leave"
        " it out",
    ),
    (
        lambda p: p.keep_fp32 and p.precision == "fp32",
        "keep_fp32={p.keep_fp32!r} with precision='fp32' would do nothing; use precision='bf16',"
        " or leave it out",
    ),
    (
        lambda p: p.sequence_parallel is True and p.tensor == 1,
        "sequence_parallel=True with tensor=1 would do nothing: positions are shared out by the"
        " devices that share out layers; use tensor=2 or more, or leave it out (long sequences:"
        " context=2)",
    ),
    # What is parked off the device.
    (
        lambda p: "master" in p.parked and not p.keeps_compute_copy,
        "tiers={{'master': ...}}: with precision={p.precision!r} and zero={p.zero} the only"
        " parameters are those that the forward pass reads; leave it out, or park 'params' (zero=3"
        " or gather='lazy')",
    ),
    (
        lambda p: p.update_on == "host"
        and (
            p.tier("opt_state") != ("host", 1.0)
            or "disk" in (p.tier("params")[0], p.tier("ema")[0])
        ),
        "update_on='host' computes where the optimizer state is, and the plan keeps tiers={tiers}:"
        " say tiers={{'opt_state': 'host'}}, with nothing on disk",
    ),
    (
        lambda p: "ema" in p.parked and p.ema is None,
        "tiers={{'ema': ...}}, but the plan keeps no averages; say ema=0.999, or leave it out",
    ),
    (
        lambda p: p.update_on == "host" and (p.zero == 0 or p.pipe > 1),
        "update_on='host' with zero={p.zero} and pipe={p.pipe}: expected zero of 1 to 3, which"
        " divides the update over the devices, and pipe=1; use update_on='device', where parked"
        " leaves visit the device",
    ),
    (
        lambda p: "params" in p.parked
        and (not p.gathers_at_use or p.pipe > 1 or p.parked["params"][0] == "disk"),
        "tiers={{'params': {tiers[params][0]!r}}} with zero={p.zero} and pipe={p.pipe}: parameters"
        " visit the device layer by layer from the host, with zero=3 (or gather='lazy') and pipe=1;"
        " park 'opt_state' or 'master' instead",
    ),
)  # fmt: skip


def check_exclusions(plan: Any) -> None:
    """Refuses a plan with fields that exclude each other.

    Raises:
        PlanError: it says which, why, and what to do.
    """
    for excluded, why in EXCLUSIONS:
        if excluded(plan):
            raise PlanError("plan: " + why.format(p=plan, tiers=plan.parked))
