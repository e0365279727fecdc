"""What is worked out once while a step is traced, although several parts of its program need it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from fzero import compat


_KNOWN: contextvars.ContextVar[dict[Hashable, Any] | None] = contextvars.ContextVar(
    "known", default=None
)


@contextlib.contextmanager
def one_trace() -> Iterator[None]:
    """While this is open `once` knows what it gave; another step traces anew what may differ."""
    with compat.set_within(_KNOWN, {}):  # a new one, also where it decorates a function
        yield


def once(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` gives; the first time only, within one trace.

    Args:
        key: what was made, and all that it depends on. What is named by `id` in it has to be part
            of the result, so that it lives as long.
        make: makes it. It must not give anything of the trace at hand.
    """
    known = _KNOWN.get()
    if known is None:
        return make()
    if key not in known:
        known[key] = make()
    return known[key]
