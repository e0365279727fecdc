"""Learning-rate schedules: torch's own scheduler is run once, and what it does is kept.

So every scheduler is followed to the last bit of its float64, however it is composed. How it goes
on after the steps that were run is known for torch's own classes (`_PATTERNS`); for others, such
as a `LambdaLR`, the number of steps must be given.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.optim import lr_scheduler

from fzero.errors import ConversionError
from torch_bridge.optim.rates import Rates


# What torch's schedulers change: `OneCycleLR` and `CyclicLR` cycle momentum too.
_CHANGING = ("lr", "momentum", "betas")
# Values that are looked up rather than computed, where a schedule goes on for ever.
_TABLE = 1024
# What those may grow by, so that they are finite in float32, and their factor in float64.
_GROWTH = 2.0**64
# How many values of the next period are compared with what a pattern says.
_CHECKED = 1024


@dataclass(frozen=True)
class _Pattern:
    """From scheduler step `start` on, each `period` values are those before, times `factor`."""

    start: int
    period: int = 1
    factor: float = 1.0


def follow(
    optimizer: Any, scheduler: Any, every: int, num_steps: int | None
) -> list[dict[str, Any]]:
    """The hyperparameters of an optimizer's groups; those that a scheduler changes as `Rates`.

    Args:
        optimizer: a torch optimizer.
        scheduler: its scheduler, in any position, or `None`. It is left as it was.
        every: optimizer steps between two steps of the scheduler.
        num_steps: optimizer steps, those that were made included, to follow a scheduler whose
            values have no known pattern.

    Returns:
        One dict per group, without its parameters. Items of `betas` may be `Rates`.

    Raises:
        ConversionError: the scheduler belongs to another optimizer, needs metrics or `num_steps`,
            fails, or changes other hyperparameters; a number of steps is none, or of no scheduler.
    """
    _require_counts(scheduler, every, num_steps)
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    if scheduler is None:
        return groups
    require_of(optimizer, scheduler)
    first = position(scheduler)
    if isinstance(scheduler, lr_scheduler.OneCycleLR) and num_steps is not None:
        _require_as_many(scheduler, -(-num_steps // every))
    pattern = _pattern(scheduler)
    table = None if pattern is None else _periodic(optimizer, scheduler, first, pattern)
    if table is None:
        if num_steps is None:
            raise ConversionError(
                f"{_name(scheduler)}: its values can be computed, but not how they go on: pass"
                " num_steps=, the number of optimizer steps to train for"
            )
        count = max(-(-num_steps // every), first + 1)
        table = _run(optimizer, scheduler, count - first), _Pattern(count)
    rows, pattern = table

    def rates(key: tuple[int, str, int]) -> Any:
        column, factor = rows[key], pattern.factor if key[1] == "lr" else 1.0
        if factor == 1 and np.all(column == column[0]):
            return float(column[0])
        # What came before `first` has been: its values are never looked up.
        values = np.concatenate([np.full(first, column[0]), column])
        return Rates(values, pattern.period, factor, every, first * every)

    for number, group in enumerate(groups):
        for name in _CHANGING:
            if name in group:
                pair = isinstance(group[name], tuple | list)
                size = len(group[name]) if pair else 1
                found = tuple(rates((number, name, i)) for i in range(size))
                group[name] = found if pair else found[0]
    return groups


def _require_as_many(scheduler: lr_scheduler.OneCycleLR, steps: int) -> None:
    """Refuse a cycle that ends before the training, as torch does in the step after its last."""
    total = int(scheduler.total_steps)
    if steps > total:
        raise ConversionError(
            f"{_name(scheduler)} has total_steps={total} and raises in torch beyond them, and there"
            f" are {steps}: make it with as many"
        )


def _require_counts(scheduler: Any, every: Any, num_steps: Any) -> None:
    """Refuse numbers of steps that are none, and those of a scheduler that is not there."""
    for name, value in {"every": every, "num_steps": 1 if num_steps is None else num_steps}.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or value < 1:
            raise ConversionError(
                f"optimizer: {name}={value!r:.60}: expected a number of optimizer steps, at least 1"
            )
    if scheduler is None and every != 1:
        raise ConversionError(
            f"optimizer: every={every} is between two steps of a scheduler, and there is none:"
            " expected it beside scheduler="
        )


def require_of(optimizer: Any, scheduler: Any) -> None:
    """Refuse what is no scheduler of this optimizer, and one that asks for metrics."""
    name = _name(scheduler)
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise ConversionError(
            f"{name} depends on metrics, which no schedule can know before. Leave it out, and add"
            " optax.contrib.reduce_on_plateau to the transformation (every step passes it its"
            " loss), or use a schedule of steps"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise ConversionError(
            f"scheduler={scheduler!r:.60}: expected one of torch.optim.lr_scheduler, made with the"
            " optimizer"
        )
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise ConversionError(f"{name} belongs to another optimizer; pass the one it was made with")


def _name(scheduler: Any) -> str:
    return f"scheduler {type(scheduler).__name__}"


def _inner(scheduler: Any) -> Sequence[Any]:
    """The schedulers that one consists of."""
    return tuple(getattr(scheduler, "_schedulers", ()))


def position(scheduler: Any) -> int:
    """How many steps a scheduler has made."""
    if isinstance(scheduler, lr_scheduler.ChainedScheduler):
        return position(_inner(scheduler)[0])
    return int(scheduler.last_epoch)


Columns = Mapping[tuple[int, str, int], np.ndarray[Any, np.dtype[np.float64]]]


def _periodic(
    optimizer: Any, scheduler: Any, first: int, pattern: _Pattern
) -> tuple[Columns, _Pattern] | None:
    """A table that goes on as a pattern says; `None` if the scheduler does not."""
    start = max(first, pattern.start)
    checked = 0
    if not isinstance(scheduler, lr_scheduler.OneCycleLR):  # which refuses to go on
        checked = min(pattern.period, _CHECKED)
    rows = _run(optimizer, scheduler, start - first + pattern.period + checked)
    for key, column in rows.items():
        factor = pattern.factor if key[1] == "lr" else 1.0
        before = column[start - first :][:checked]
        after = column[start - first + pattern.period :]
        if not np.allclose(after, before * factor, rtol=1e-9, atol=1e-12 * np.abs(column).max()):
            return None
    rows = {key: column[: len(column) - checked] for key, column in rows.items()}
    times = 1 if pattern.factor == 1 else -(-_TABLE // pattern.period)
    if pattern.factor > 1:
        times = max(1, min(times, int(math.log(_GROWTH) / math.log(pattern.factor))))
    if times > 1:
        # Some hundred values more: the fewer multiplications when they are looked up.
        rows = _run(optimizer, scheduler, start - first + pattern.period * times)
    return rows, _Pattern(start, pattern.period * times, pattern.factor**times)


def _run(optimizer: Any, scheduler: Any, count: int) -> Columns:
    """The next `count` values of what a scheduler changes, by group, name and item."""
    keys = [
        (number, name, i)
        for number, group in enumerate(optimizer.param_groups)
        for name in _CHANGING
        if name in group
        for i in range(len(group[name]) if isinstance(group[name], tuple | list) else 1)
    ]
    rows = _steps(optimizer, scheduler, count, keys)
    if rows != _steps(optimizer, scheduler, count, keys):
        raise ConversionError(
            f"{_name(scheduler)} gives other values when it is run once more: what it counts in"
            " lies outside of it (a global, a variable of the function around a lambda). Compute"
            " the value from the step that it is given, or keep the count in an attribute"
        )
    columns = np.asarray(rows, np.float64).T
    return dict(zip(keys, columns, strict=True))


def _steps(
    optimizer: Any, scheduler: Any, count: int, keys: Sequence[tuple[int, str, int]]
) -> list[list[float]]:
    """The items of `keys` in each of a scheduler's next steps; it stays as it is."""
    optimizer, scheduler = _copied(optimizer, scheduler)
    optimizer._opt_called = True
    others, rows = _others(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(count):
            if number:
                try:
                    scheduler.step()
                except Exception as error:
                    raise ConversionError(
                        f"{_name(scheduler)} cannot make step {number}: {error}. Give it as many"
                        " steps as will be trained, or num_steps= as few as it has"
                    ) from error
            rows.append([_item(optimizer.param_groups[g][name], i) for g, name, i in keys])
    changed = [key for key, value in _others(optimizer).items() if value != others.get(key)]
    if changed:
        raise ConversionError(
            f"{_name(scheduler)} changes {changed}; what can change from step to step is"
            f" {', '.join(_CHANGING)}. Write that schedule in optax (optax.inject_hyperparams)"
        )
    return rows


def _item(value: Any, number: int) -> float:
    return float(value[number] if isinstance(value, tuple | list) else value)


def _others(optimizer: Any) -> dict[str, Any]:
    """All that a scheduler must leave alone, by name."""
    skipped = ("params", "initial_lr", *_CHANGING)
    return {
        f"{name} of group {number}": repr(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in skipped
    }


def _copied(optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """An optimizer and its scheduler, with all that they hold but parameters and moments.

    Raises:
        ConversionError: something of it cannot be copied.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    memo = {id(one): one for one in (*params, optimizer.state)}
    try:
        return copy.deepcopy((optimizer, scheduler), memo)
    except Exception as error:
        raise ConversionError(
            f"{_name(scheduler)} is run on a copy, and something that it holds cannot be copied:"
            f" {error}. Leave out what it holds beside numbers, functions and schedulers"
        ) from error


def _pattern(scheduler: Any) -> _Pattern | None:
    """How the values of a scheduler go on, if its class says so."""
    find = _PATTERNS.get(type(scheduler))
    return None if find is None else find(scheduler)


def _settled(scheduler: Any) -> _Pattern:
    return _Pattern(int(scheduler.total_iters))


def _cosine(scheduler: Any) -> _Pattern | None:
    whole = int(scheduler.T_max) == scheduler.T_max
    return _Pattern(0, 2 * int(scheduler.T_max)) if whole else None


def _restarting(scheduler: Any) -> _Pattern | None:
    return _Pattern(0, scheduler.T_0) if scheduler.T_mult == 1 else None


def _in_turn(scheduler: Any) -> _Pattern | None:
    last = _pattern(_inner(scheduler)[-1])
    begin = max(scheduler._milestones, default=0)
    return None if last is None else _Pattern(begin + last.start, last.period, last.factor)


def _together(scheduler: Any) -> _Pattern | None:
    """Schedulers that only multiply the rate do so whatever the others do."""
    multiply = (*_SETTLING, *_GEOMETRIC, lr_scheduler.MultiStepLR)
    inner = _inner(scheduler)
    found = [_pattern(one) for one in inner if type(one) in multiply]
    patterns = [one for one in found if one is not None]
    if len(patterns) != len(inner):
        return None
    period = math.lcm(*(one.period for one in patterns))
    factor = math.prod(one.factor ** (period // one.period) for one in patterns)
    return _Pattern(max(one.start for one in patterns), period, factor)


_SETTLING = (lr_scheduler.ConstantLR, lr_scheduler.LinearLR, lr_scheduler.PolynomialLR)
_GEOMETRIC = (lr_scheduler.StepLR, lr_scheduler.ExponentialLR)
_PATTERNS: Mapping[type, Callable[[Any], _Pattern | None]] = {
    **dict.fromkeys(_SETTLING, _settled),
    lr_scheduler.StepLR: lambda s: _Pattern(0, int(s.step_size), s.gamma),
    lr_scheduler.ExponentialLR: lambda s: _Pattern(0, 1, s.gamma),
    lr_scheduler.MultiStepLR: lambda s: _Pattern(max(s.milestones, default=0)),
    lr_scheduler.OneCycleLR: lambda s: _Pattern(int(s.total_steps) - 1),
    lr_scheduler.CosineAnnealingLR: _cosine,
    lr_scheduler.CosineAnnealingWarmRestarts: _restarting,
    lr_scheduler.SequentialLR: _in_turn,
    lr_scheduler.ChainedScheduler: _together,
}
