"""Which arrays were given away, and to what: so that touching one can say so."""

from __future__ import annotations

from typing import Any

from fzero.state.by_identity import ByIdentity


_GIVEN: ByIdentity[str] = ByIdentity()


def give_away(leaf: Any, to: str) -> None:
    """Notes that a leaf's memory now belongs to something else, in words."""
    _GIVEN.note(leaf, to)


def any_given() -> bool:
    """Whether any leaf was given away by `give_away`."""
    return bool(_GIVEN.known)


def given_to(leaf: Any) -> str | None:
    """What a leaf was given to by `give_away`, if it was."""
    return _GIVEN.get(leaf)


def take_back(leaf: Any) -> None:
    """Forgets that a leaf was given away: it was not needed."""
    _GIVEN.forget(leaf)
