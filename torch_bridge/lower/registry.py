"""The operator table: ATen overload name -> JAX function of the same arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


LowerFn = Callable[..., Any]
DrawsFn = Callable[..., bool]


@dataclass(frozen=True)
class Lowering:
    """How one operator is evaluated.

    `draws(*args, **kwargs)` tells from the graph's own arguments whether a call takes random
    numbers; such a call gets a `key` argument of its own.
    """

    fn: LowerFn
    draws: DrawsFn | None = None


_TABLE: dict[str, Lowering] = {}
# Of a rule for several names another thread sees all or none.
_LOCK = threading.Lock()


def register_operator(*names: str, draws: DrawsFn | None = None) -> Callable[[LowerFn], LowerFn]:
    """Say how an operator is computed in JAX; also the way to add one from outside.

    Args:
        *names: overload names as `torch.export` prints them, such as `"aten.add.Tensor"` or
            `"mylib.fused.default"`.
        draws: for operators with randomness: `draws(*args, **kwargs) -> bool` says whether this
            call needs a random key, which then arrives as the keyword argument `key`.

    Returns:
        A decorator for a function that takes the operator's arguments (arrays for tensors).

    Example:
        >>> @register_operator("mylib.twice.default")
        ... def twice(x):
        ...     return 2 * x
        >>> "mylib.twice.default" in registered_operators()
        True
    """

    def add(fn: LowerFn) -> LowerFn:
        with _LOCK:
            _TABLE.update(dict.fromkeys(names, Lowering(fn, draws)))
        return fn

    return add


def find_lowering(name: str) -> Lowering | None:
    """The lowering of an operator by its overload name, or None.

    `aten.view_copy.default` is `aten.view.default`: no array shares its memory here.
    """
    return _TABLE.get(name) or _TABLE.get(name.replace("_copy.", "."))


def registered_operators() -> Sequence[str]:
    """The names of all operators that can be converted, sorted."""
    with _LOCK:
        return sorted(_TABLE)
