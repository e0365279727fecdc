"""What objects of Python hold: seen at one time, compared with another, and put back.

That is what attributes, containers and classes hold, in whatever holds them; not what a global
variable, a closure or an iterator does.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


Path = tuple[Any, ...]
# Where a value stands: the path of what holds it, and its name in that.
Place = tuple[Path, Any]


class _Nothing:
    """What stands at a place that is not there."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()

# Values that hold no others.
ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), type))
# Objects of these are what they are: nothing that a module's author counts in.
_OTHERS = frozenset(
    """
    builtins enum flax functools fzero itertools jax jaxlib logging numpy re threading typing
    weakref
    """.split()  # noqa: SIM905
)
# In what libraries themselves keep in classes.
_INNER = ("__", "_abc_", "_pytree__", "_object__")
# Larger arrays of NumPy are told by which they are.
_LARGE = 2**20
# What lies deeper is told by which it is, too: a chain of objects may have no end.
_DEEP = 50


class Held:
    """What some objects hold at one time.

    Attributes:
        parts: by the path of each that holds something: values by name. Of what holds things
            itself, its type.
        owners: those objects.
        arrays: jax's arrays among the values, of which a program tells what they are computed of.
    """

    def __init__(self) -> None:
        self.parts: dict[Path, dict[Any, Any]] = {}
        self.owners: dict[Path, Any] = {}
        self.arrays: dict[Place, jax.Array] = {}
        self._kept: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()

    def add(self, path: Path, owner: Any) -> None:
        """An object whose parts are told one by one."""
        self.owners[path] = owner
        self.parts.setdefault(path, {})
        if _resizes(owner):
            self._kept.append((owner, _contents(owner)))
        self._add_classes(type(owner))

    def note(self, path: Path, name: Any, value: Any) -> None:
        """A part of an object, and all that it holds."""
        self.parts.setdefault(path, {})[name] = self._shown(value, (*path, name))

    def changes(self, after: Held) -> dict[Place, tuple[Any, Any]]:
        """What is another value at a later time: the two, by place."""
        found: dict[Place, tuple[Any, Any]] = {}
        for path, was in self.parts.items():
            now = after.parts.get(path)
            if now is None:  # its own place tells
                continue
            if was.keys() != now.keys() and _resizes(self.owners.get(path)):
                found[path[:-1], path[-1]] = (_whole(was), _whole(now))
                continue
            for name in {**was, **now}:
                pair = was.get(name, _NOTHING), now.get(name, _NOTHING)
                if not _same(*pair):
                    found[path, name] = pair
        return found

    def put_back(self) -> None:
        """Gives objects what they held; not those that were told one part after the other."""
        for owner, contents in self._kept:
            _write(owner, contents)

    def _shown(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, jax.Array):
            self.arrays[path[:-1], path[-1]] = value
            return value
        if issubclass(kind, np.ndarray | set):
            if getattr(value, "nbytes", 0) > _LARGE:
                return value
            self._kept.append((value, value.copy()))
            return value.copy()
        contents = _contents(value) if len(path) < _DEEP else None
        if contents is None:
            return value
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self.owners[path] = value
            self._kept.append((value, contents))
            self.parts[path] = {
                name: x if type(x) in ATOMS else self._shown(x, (*path, name))
                for name, x in contents.items()
            }
            self._add_classes(kind)
        return kind

    def _add_classes(self, kind: type) -> None:
        for one in kind.__mro__:
            if id(one) in self._seen or _is_other(one):
                continue
            self._seen.add(id(one))
            contents = _contents_of_class(one)
            path = (f"class {one.__name__}",)
            self.owners[path] = one
            self._kept.append((one, contents))
            for name, value in contents.items():
                self.note(path, name, value)


def _is_other(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _OTHERS


def _contents(value: Any) -> dict[Any, Any] | None:
    """What an object holds by name, if anything."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict(value)
    if issubclass(kind, list | tuple | deque):
        return dict(enumerate(value))
    if _is_other(kind) or issubclass(kind, type | enum.Enum):
        return None
    own = dict(getattr(value, "__dict__", {}))
    return {**own, **{name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}}


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        yield from (
            name
            for name in ((slots,) if isinstance(slots, str) else slots)
            if name not in ("__dict__", "__weakref__")
        )


def _contents_of_class(kind: type) -> dict[str, Any]:
    """A class's own values: no methods, and nothing that only describes attributes."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith(_INNER) and not callable(value) and not hasattr(value, "__get__")
    }


def _resizes(owner: Any) -> bool:
    return issubclass(type(owner), dict | list | tuple | deque)


def _whole(parts: dict[Any, Any]) -> Any:
    """A container's parts, as they are told."""
    return list(parts.values()) if list(parts) == list(range(len(parts))) else parts


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):  # 1 and True, 1 and 1.0 are not
        return False
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    try:
        return bool(a == b)
    except Exception:  # of arrays in a container, say, which have no one answer
        return False


def _put(owner: Any, name: Any, value: Any) -> None:
    if issubclass(type(owner), dict | list | deque):
        owner[name] = value
    elif hasattr(owner, "set_metadata"):  # a variable of nnx, of which this is
        owner.set_metadata(name, value)
    elif isinstance(owner, type):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def _write(owner: Any, contents: Any) -> None:
    """Makes an object hold what it held before."""
    if isinstance(owner, np.ndarray):
        if owner.flags.writeable and not _same(owner, contents):
            owner[...] = contents
        return
    if isinstance(owner, set):
        owner.clear()
        owner.update(contents)
        return
    now = _contents_of_class(owner) if isinstance(owner, type) else _contents(owner)
    assert now is not None
    if now.keys() == contents.keys() and all(now[name] is contents[name] for name in now):
        return
    if isinstance(owner, dict):
        owner.clear()
        owner.update(contents)
    elif isinstance(owner, list | deque):
        owner.clear()
        owner.extend(contents.values())
    elif not isinstance(owner, tuple):
        for name in now.keys() - contents.keys():
            (type if isinstance(owner, type) else object).__delattr__(owner, name)
        for name, value in contents.items():
            _put(owner, name, value)
