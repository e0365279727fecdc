"""What a step's seconds go to, and plans that would spend fewer: `fz.preflight(...).explain()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fzero.errors import BatchError, PlanError, PreflightError, ScheduleError
from fzero.plan import Plan
from fzero.preflight.tables import duration, size, table_of, text_of


# `fz.Preflight`, whose module imports this one.
Preflight = Any


@dataclass(frozen=True)
class StepCost:
    """Part of a step's likely seconds.

    Args:
        kind: `products`, `recomputed`, `attention`, `elementwise`, `gathers`, `reductions`,
            `sends`, `bubble` or `parked`.
        what: the same in words.
        seconds: what it likely takes, of those that nothing else hides.
    """

    kind: str
    what: str
    seconds: float


@dataclass(frozen=True)
class Change:
    """A plan that was tried.

    Args:
        fields: what it changes.
        against: the kind of cost that it is against; `memory` where the plan does not fit.
        why: the reason, where there is no such plan for this model.
        found: its prediction, if it could be compiled.
    """

    fields: dict[str, Any]
    against: str
    why: str = ""
    found: Preflight | None = None


@dataclass(frozen=True)
class Explanation:
    """Where a step's time goes and what would change it; prints as tables.

    Args:
        found: the prediction that is explained.
        costs: all parts of its likely seconds, the largest first.
        changes: what was tried against the three largest, the best first: those that fit, by their
            likely seconds, then those that do not, then those that cannot be.
    """

    found: Preflight
    costs: tuple[StepCost, ...]
    changes: tuple[Change, ...]

    @property
    def best(self) -> Change | None:
        """The fastest change that fits, if it takes less time or the plan does not fit."""
        for change in self.changes:
            if change.found is None or not change.found.fits:
                return None
            faster = change.found.bounds.likely_seconds < self.found.bounds.likely_seconds
            return change if faster or not self.found.fits else None
        return None

    def to_json(self) -> dict[str, Any]:
        """The explanation as a JSON-able dict, predictions by their seconds and bytes."""
        return {
            "likely_seconds": self.found.bounds.likely_seconds,
            "costs": [dataclasses.asdict(cost) for cost in self.costs],
            "changes": [
                {
                    "fields": change.fields, "against": change.against, "why": change.why,
                    **_numbers(change.found),
                }
                for change in self.changes
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        whole = self.found.bounds.likely_seconds
        spent = table_of(f"where {duration(whole)} likely go", "what", "seconds", "of the step")
        for cost in self.costs:
            spent.add_row(cost.what, duration(cost.seconds), f"{cost.seconds / whole:.0%}")
        tried = table_of(
            "what would change it, each compiled", "change", "against", "likely", "of this plan",
            "peak", "", left=2,
        )  # fmt: skip
        for change in self.changes:
            words = " ".join(f"{name}={value}" for name, value in change.fields.items())
            if change.found is None:
                tried.add_row(words, change.against, "", "", "", "refused")
                continue
            seconds = change.found.bounds.likely_seconds
            verdict = "best" if change is self.best else "" if change.found.fits else "does not fit"
            tried.add_row(
                words, change.against, duration(seconds), f"{seconds / whole:.2f}",
                size(change.found.memory.peak), verdict,
            )  # fmt: skip
        reasons = dict.fromkeys(change.why for change in self.changes if change.why)
        return text_of(spent, tried, *(f"refused: {why}" for why in reasons))


def _numbers(found: Preflight | None) -> dict[str, Any]:
    if found is None:
        return {}
    seconds, peak = found.bounds.likely_seconds, found.memory.peak
    return {"likely_seconds": seconds, "peak_bytes": peak, "fits": found.fits}


def costs_of(found: Preflight) -> tuple[StepCost, ...]:
    """What a prediction's likely seconds are spent on, the largest first."""
    work, again = found.work, max(0.0, found.recomputed_fraction)
    repeated = work.product_seconds * again / (1 + again)
    elementwise = work.likely_seconds - work.product_seconds - work.attention_seconds
    spent = {
        ("products", "products of the model"): work.product_seconds - repeated,
        ("recomputed", "products computed again in the backward pass"): repeated,
        ("attention", "fused attention"): work.attention_seconds,
        ("elementwise", "other kernels, at the memory's rate"): elementwise,
        ("bubble", "waiting in the pipeline"): found.bounds.bubble_seconds,
        ("parked", "what is kept elsewhere on its way, beside nothing"): found.parked_seconds,
    }
    for use in found.collectives:
        kind = _KINDS.get(use.kind, "reductions")
        key = kind, f"{kind} over {use.axes}, beside nothing"
        spent[key] = spent.get(key, 0.0) + use.times * use.exposed_seconds
    made = [StepCost(kind, what, seconds) for (kind, what), seconds in spent.items() if seconds > 0]
    return tuple(sorted(made, key=lambda cost: -cost.seconds))


_KINDS = {"all-gather": "gathers", "send": "sends", "collective-permute": "sends"}


def explain(found: Preflight, again: Callable[[Plan], Preflight], most: int) -> Explanation:
    """Finds the costs, and tries plans against the three largest.

    Args:
        found: a prediction.
        again: predicts the same step under another plan.
        most: plans to try.
    """
    costs = costs_of(found)
    tried: list[Change] = []
    seen = [found.plan]
    for against, fields in _ideas(found, costs):
        if len(tried) == most:
            break
        change = Change(fields, against)
        try:
            plan = dataclasses.replace(found.plan, **fields)
        except PlanError:
            continue  # excludes itself, whatever the model
        if plan in seen:
            continue
        seen.append(plan)
        try:
            tried.append(dataclasses.replace(change, found=again(plan)))
        except (PlanError, BatchError, ScheduleError, PreflightError) as error:
            tried.append(dataclasses.replace(change, why=str(error).splitlines()[0]))
    return Explanation(found, costs, tuple(sorted(tried, key=_order)))


def _order(change: Change) -> tuple[int, float]:
    if change.found is None:
        return 2, 0.0
    return int(not change.found.fits), change.found.bounds.likely_seconds


def _ideas(found: Preflight, costs: tuple[StepCost, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What may help, against the largest costs in turn, the likeliest first."""
    kinds = [cost.kind for cost in costs if cost.seconds > 0][:3]
    if not found.fits:
        kinds.insert(0, "memory")
    lists = [(kind, list(_against(kind, found))) for kind in kinds]
    for number in range(max((len(ideas) for _, ideas in lists), default=0)):
        for kind, ideas in lists:
            if number < len(ideas):
                yield kind, ideas[number]


def _against(kind: str, found: Preflight) -> Iterator[dict[str, Any]]:
    plan, hosts = found.plan, found.topology.num_hosts
    fewer = plan.microbatches // 2
    if kind == "memory":
        yield {"remat": "layer"}
        yield {"microbatches": 2 * plan.microbatches}
        yield {"zero": 3}
        yield {"tiers": _parking_more(plan, "host")}
    elif kind in ("recomputed", "attention"):
        yield {"remat": "dots"}
        yield {"remat": "none"}
    elif kind in ("products", "elementwise"):
        # Larger products run nearer to the peak, and weights are read and cast once for more rows.
        if fewer and plan.pipe == 1:
            yield {"microbatches": fewer}
        yield {"remat": "dots"}
        yield {"remat": "none"}
        if plan.precision == "fp32":
            yield {"precision": "bf16"}
    elif kind == "gathers":
        if fewer and plan.pipe == 1:
            yield {"microbatches": fewer}
        if hosts > 1 and plan.replica == 1:
            yield {"replica": hosts, "data": found.topology.per_host}
        yield {"zero": 2, "gather": "lazy"} if plan.zero == 3 else {"gather": "lazy"}
        if plan.zero == 3:
            yield {"gather_dtype": "int8"}
        yield {"tensor": 2, "data": None}
    elif kind == "reductions":
        if plan.zero <= 1:
            yield {"reduce": "step"}
        if plan.reduce_dtype == "fp32":
            yield {"reduce_dtype": None}
        if hosts > 1 and plan.replica == 1:
            yield {"replica": hosts, "data": found.topology.per_host}
        if fewer and plan.pipe == 1:
            yield {"microbatches": fewer}
    elif kind in ("bubble", "sends"):
        yield {"microbatches": 2 * plan.microbatches}
        yield {"schedule": "zb_h1"}
        yield {"pipe": max(1, plan.pipe // 2), "data": None}
    elif kind == "parked":
        if plan.remat == "offload":
            yield {"remat": "layer"}
        if plan.tiers:
            yield {"tiers": {}, "update_on": "device"}
            yield {"tiers": _parking_more(plan, 0.5), "update_on": "device"}


def _parking_more(plan: Plan, opt_state: Any) -> dict[str, Any]:
    """The plan's tiers with another one for the optimizer's state."""
    had = {
        name: tier if share == 1 else (tier, share) for name, (tier, share) in plan.parked.items()
    }
    return had | {"opt_state": opt_state}
