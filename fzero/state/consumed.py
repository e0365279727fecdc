"""Which arrays were given away, and to what: so that touching one can say so."""

from __future__ import annotations

import weakref
from typing import Any


_GIVEN: dict[int, tuple[weakref.ref[Any], str]] = {}


def give_away(leaf: Any, to: str) -> None:
    """Notes that a leaf's memory now belongs to something else, in words."""
    key = id(leaf)
    _GIVEN[key] = (weakref.ref(leaf, lambda _: _GIVEN.pop(key, None)), to)


def any_given() -> bool:
    """Whether any leaf was given away by `give_away`."""
    return bool(_GIVEN)


def given_to(leaf: Any) -> str | None:
    """What a leaf was given to by `give_away`, if it was."""
    entry = _GIVEN.get(id(leaf))
    return entry[1] if entry is not None and entry[0]() is leaf else None


def take_back(leaf: Any) -> None:
    """Forgets that a leaf was given away: it was not needed."""
    _GIVEN.pop(id(leaf), None)
