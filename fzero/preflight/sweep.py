"""Many plans for one model: which fit, and which is the fastest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax

from fzero.axes import FURTHER
from fzero.errors import BatchError, FzeroError, PlanError, PreflightError, ScheduleError
from fzero.model import Model
from fzero.plan import Plan
from fzero.preflight.public import preflight
from fzero.preflight.rates import Rates, rates_of
from fzero.preflight.result import Preflight
from fzero.preflight.tables import duration, size, table_of, text_of
from fzero.preflight.topology import Topology, parse
from fzero.report.report import Report
from fzero.sharding.blueprint import planned
from fzero.storage.tiers import DEVICE
from fzero.tree import PyTree


_NUMBERS = ("zero", "data", "pipe", "replica", *FURTHER, "microbatches")
_WORDS = (
    "precision", "remat", "schedule", "reduce", "gather", "partition",
    "gather_dtype", "secondary", "reduce_dtype",
)  # fmt: skip
_MAY_BE_NONE = ("data", "schedule", "gather_dtype", "secondary", "reduce_dtype")
FITS, TOO_LARGE, NOT_COMPILED, REFUSED = "fits", "too large", "too large, not compiled", "refused"


@dataclass(frozen=True)
class Tried:
    """One plan of a sweep.

    Args:
        choice: what was chosen for it.
        plan: the plan; `None` if there is none like that.
        verdict: `fits`, `too large`, `too large, not compiled` (what it keeps between steps is too
            much already) or `refused`.
        why: the reason, where it is refused.
        state_bytes: kept between steps per device, if known.
        found: the prediction, if it was compiled.
    """

    choice: dict[str, Any]
    plan: Plan | None
    verdict: str
    why: str = ""
    state_bytes: int | None = None
    found: Preflight | None = None

    def to_json(self) -> dict[str, Any]:
        """The trial as a JSON-able dict."""
        return {
            "choice": self.choice,
            "plan": None if self.plan is None else self.plan.to_json(),
            "verdict": self.verdict,
            "why": self.why,
            "state_bytes": self.state_bytes,
            "preflight": None if self.found is None else self.found.to_json(),
        }


@dataclass(frozen=True)
class Sweep:
    """Plans tried: those that fit by the bound on their step time, then the others; prints so.

    Args:
        tried: every plan.
    """

    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried | None:
        """The plan that fits with the smallest bound on its step time; `None` if none fits."""
        first = self.tried[0] if self.tried else None
        return first if first is not None and first.verdict == FITS else None

    def to_json(self) -> dict[str, Any]:
        """The sweep as a JSON-able dict; `best` is the choice that is."""
        best = self.best
        return {
            "best": None if best is None else best.choice,
            "tried": [one.to_json() for one in self.tried],
        }

    def __str__(self) -> str:
        names = list(self.tried[0].choice) if self.tried else []
        table = table_of(
            "plans, fastest first", "", *names, "verdict", "peak", "at best", "likely", "MFU",
            left=2 + len(names),
        )  # fmt: skip
        for one in self.tried:
            cells = [str(one.choice[name]) for name in names]
            mark = "best" if one is self.best else ""
            if one.found is None:
                shown = "" if one.state_bytes is None else f"{size(one.state_bytes)} +"
                table.add_row(mark, *cells, one.verdict, shown, "", "", "")
                continue
            b = one.found.bounds
            table.add_row(
                mark, *cells, one.verdict, size(one.found.memory.peak), duration(b.best_seconds),
                duration(b.likely_seconds), f"{b.likely_mfu:.0%}",
            )  # fmt: skip
        reasons = dict.fromkeys(one.why for one in self.tried if one.why)
        return text_of(table, *(f"refused: {why}" for why in reasons))


def parse_choices(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Reads `zero=0,1,2,3`, `remat=layer,dots`, ...: fields of a `Plan`, values to try.

    Raises:
        PreflightError: an unknown field, no value, or a number that is none.

    Example:
        >>> parse_choices(["zero=1,3", "data=none,4", "remat=layer"])
        {'zero': (1, 3), 'data': (None, 4), 'remat': ('layer',)}
    """
    found: dict[str, tuple[Any, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        known = (*_NUMBERS, *_WORDS)
        if not equals or name not in known or not all(values.split(",")):
            raise PreflightError(
                f"--sweep: expected field=value,value with a field of {', '.join(known)}; got"
                f" {word!r}"
            )
        found[name] = tuple(_value(name, value) for value in values.split(","))
    return found


def _value(name: str, text: str) -> Any:
    if text == "none" and name in _MAY_BE_NONE:
        return None
    if name in _WORDS and not (name == "secondary" and text.isdecimal()):
        return text
    try:
        return int(text)
    except ValueError:
        raise PreflightError(f"--sweep: {name}={text!r}: expected a whole number") from None


def sweep(
    model_of: Callable[[Plan], Model],
    tx: optax.GradientTransformation,
    plan: Plan,
    choices: Mapping[str, Sequence[Any]],
    batch: PyTree,
    topology: str | Topology = "h200:8",
    *,
    rates: Rates | None = None,
    progress: Callable[[Tried], None] = lambda one: None,
) -> Sweep:
    """Tries every combination of some choices.

    A plan whose state alone is too large is not compiled.

    Args:
        model_of: the model for a plan; most ignore which.
        tx: the optimizer.
        plan: all that is not a choice.
        choices: fields of the plan, and the values to try.
        batch: a global batch, or its shapes.
        topology: as for `fz.preflight`.
        rates: likewise.
        progress: told of each plan as it was tried.

    Returns:
        The plans, best first.

    Raises:
        PreflightError: the topology is unknown, or cannot be compiled for.
    """
    where = parse(topology)
    where.devices()  # what is wrong with it is wrong with every plan
    limits = rates_of(where, rates)
    tried: list[Tried] = []
    for choice in _combinations(choices):
        one = _try(model_of, tx, plan, choice, batch, where, limits)
        progress(one)
        tried.append(one)
    return Sweep(tuple(sorted(tried, key=_order)))


def _combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _try(
    model_of: Callable[[Plan], Model],
    tx: optax.GradientTransformation,
    base: Plan,
    choice: dict[str, Any],
    batch: PyTree,
    where: Topology,
    rates: Rates,
) -> Tried:
    plan: Plan | None = None
    try:
        plan = dataclasses.replace(base, **choice)
        model = model_of(plan)
        kept = Report.of_plan(planned(model, tx, plan, plan.sizes(where.num_devices)))
        state = kept.fullest(DEVICE)["total"]
        if state > rates.memory_bytes - rates.reserve_bytes:
            return Tried(choice, plan, NOT_COMPILED, state_bytes=state)
        found = preflight(model, tx, plan, batch, where, rates=rates)
    except (PlanError, BatchError, ScheduleError, PreflightError) as error:
        return Tried(choice, plan, REFUSED, _first_line(error))
    return Tried(choice, plan, FITS if found.fits else TOO_LARGE, "", state, found)


def _first_line(error: FzeroError) -> str:
    return str(error).splitlines()[0]


def _order(one: Tried) -> tuple[int, float]:
    rank = (FITS, TOO_LARGE, NOT_COMPILED, REFUSED).index(one.verdict)
    return rank, one.found.bounds.best_seconds if one.found is not None else 0.0
