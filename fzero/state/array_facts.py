"""What is known of arrays, which cannot be hashed, for as long as they live."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar


Fact = TypeVar("Fact")


class ByIdentity(Generic[Fact]):
    """A dict whose keys are arrays themselves, by their identity; it does not keep them alive."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Any], Fact]] = {}

    def get(self, leaf: Any) -> Fact | None:
        """What is known of this very array."""
        found = self.known.get(id(leaf))
        return found[1] if found is not None and found[0]() is leaf else None

    def note(self, leaf: Any, fact: Fact) -> None:
        """Puts in what is known of an array; what was known before is forgotten."""
        self.known[id(leaf)] = weakref.ref(leaf, partial(self._gone, id(leaf))), fact

    def forget(self, leaf: Any) -> None:
        """Takes out what is known of an array."""
        self.known.pop(id(leaf), None)

    def _gone(self, key: int, ref: Any) -> None:
        found = self.known.get(key)
        if found is not None and found[0] is ref:  # another array may have its place by now
            del self.known[key]


# To what, in words, the memory of an array was given, so that touching it can say so.
GIVEN: ByIdentity[str] = ByIdentity()
