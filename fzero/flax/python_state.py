"""What objects of Python hold: seen at one time, compared with another, and put back.

That is what attributes, containers, functions, classes, buffers and generators of random numbers
hold, in whatever holds them, and which of them are one object; not what a global variable or an
iterator holds.
"""

from __future__ import annotations

import array
import enum
import pickle
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
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
ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None)))
# Objects of these are what they are: nothing that a module's author counts in.
_OTHERS = frozenset(
    """
    builtins enum flax functools fzero itertools jax jaxlib logging numpy pathlib re threading
    typing weakref
    """.split()  # noqa: SIM905
)
# In what libraries themselves keep in classes; functions are told whatever their names.
_INNER = ("__", "_abc_", "_pytree__", "_object__")
# What only describes attributes.
_DESCRIBES = (types.MemberDescriptorType, types.GetSetDescriptorType)
# Larger arrays of NumPy and buffers are told by which they are.
_LARGE = 2**20
# What lies deeper is told by which it is, too: a chain of objects may have no end.
_DEEP = 50
# What holds others, and for good: which of them are one object makes no difference.
_FIXED = (tuple, types.MappingProxyType)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, partial)
_METHODS = (staticmethod, classmethod)
# What holds others and is told by which it is.
_THEMSELVES = (*_FUNCTIONS, *_METHODS, property, enum.Enum)


class Drawn(bytes):
    """The state of a generator of random numbers."""


@dataclass(frozen=True)
class _Same:
    """What stands at a place of what stands at another one, too: that one."""

    path: Path

    def __repr__(self) -> str:
        return f"the same as {named(self.path)}"


class Held:
    """What some objects hold at one time.

    Attributes:
        parts: by the path of each that holds something: values by name. Of what holds things
            itself, its type.
        owners: those objects.
    """

    def __init__(self) -> None:
        self.parts: dict[Path, dict[Any, Any]] = {}
        self.owners: dict[Path, Any] = {}
        self._kept: list[Callable[[], None]] = []
        self._seen: dict[int, Path] = {}

    @classmethod
    def of(cls, value: Any) -> Held:
        """What one object holds."""
        held = cls()
        held.note((), "", value)
        return held

    def add(self, path: Path, owner: Any) -> None:
        """An object whose parts are told one by one."""
        self.owners[path] = owner
        self.parts.setdefault(path, {})
        if _resizes(owner):
            self._kept.append(partial(_write, owner, _contents(owner) or {}))
        self._add_beside(path, owner)
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
            if list(was) != list(now) and _resizes(self.owners.get(path)):
                found[path[:-1], path[-1]] = (_whole(was), _whole(now))
                continue
            for name in {**was, **now}:
                pair = was.get(name, _NOTHING), now.get(name, _NOTHING)
                if not _same(*pair) and not _is_cached(self.owners.get(path), name):
                    found[path, name] = pair
        return found

    def put_back(self) -> None:
        """Gives objects what they held; not those that were told one part after the other."""
        for write in self._kept:
            write()

    def _shown(self, value: Any, path: Path) -> Any:
        if isinstance(value, type):
            self._add_classes(value)
            return value
        kind = type(value)
        if kind in ATOMS or isinstance(value, jax.Array):
            return value
        if isinstance(value, _RANDOM):
            state, write = _random(value)
            self._kept.append(partial(write, state))
            return Drawn(pickle.dumps(state))
        if issubclass(kind, np.ndarray):
            if value.nbytes > _LARGE:
                return value
            self._kept.append(partial(_write_array, value, value.copy()))
            return value.copy()
        held = _bytes(value)
        if held is not None:
            self._kept.append(partial(_write_bytes, value, held))
            return held
        if issubclass(kind, set | frozenset):
            self._kept.append(partial(_write_set, value, set(value)))
            self._add_elements(path, value)
            return set(value)
        contents = _contents(value) if len(path) < _DEEP else None
        if contents is None:
            return value
        first = path if issubclass(kind, _FIXED) else self._seen.setdefault(id(value), path)
        if first == path:
            self._add_contents(path, value, contents)
        if isinstance(value, _THEMSELVES):
            return value
        return kind if first == path else _Same(first)

    def _add_contents(self, path: Path, value: Any, contents: dict[Any, Any]) -> None:
        self.owners[path] = value
        self._kept.append(partial(_write, value, contents))
        self.parts[path] = {
            name: x if type(x) in ATOMS else self._shown(x, (*path, name))
            for name, x in contents.items()
        }
        self._add_beside(path, value)
        self._add_classes(type(value))

    def _add_beside(self, path: Path, owner: Any) -> None:
        """What the keys of a dict hold themselves, and a container of one's own class beside."""
        if issubclass(type(owner), dict):
            self._add_elements(path, owner)
        if _resizes(owner) and hasattr(owner, "__dict__"):
            self.note((*path, "its"), "attributes", vars(owner))

    def _add_elements(self, path: Path, values: Iterable[Any]) -> None:
        for number, value in enumerate(values):
            if type(value) not in ATOMS:
                self.note((*path, "its elements"), number, value)

    def _add_classes(self, kind: type) -> None:
        for one in kind.__mro__:
            if id(one) in self._seen or _is_other(one):
                continue
            path = (one,)
            self._seen[id(one)] = path
            contents = _contents_of_class(one)
            self.owners[path] = one
            self._kept.append(partial(_write, one, contents))
            for name, value in contents.items():
                self.note(path, name, value)


def named(path: Path) -> str:
    """A path, in words."""
    steps = (f"class {x.__name__}" if isinstance(x, type) else str(x) for x in path)
    return "/".join(steps) or "the module"


def _is_other(kind: type) -> bool:
    return kind.__module__.split(".")[0] in _OTHERS


def _contents(value: Any) -> dict[Any, Any] | None:
    """What an object holds by name, if anything."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict(value)
    if issubclass(kind, types.MappingProxyType):
        return dict(value)
    if issubclass(kind, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, _FUNCTIONS):
        return _contents_of_function(value)
    if isinstance(value, _METHODS):
        return {"__func__": value.__func__}
    if isinstance(value, property):
        return {name: getattr(value, name) for name in ("fget", "fset", "fdel")}
    if _is_other(kind) or hasattr(kind, "set_metadata"):
        return None
    own = dict(getattr(value, "__dict__", {}))
    return {**own, **{name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}}


def _contents_of_function(function: Any) -> dict[Any, Any]:
    """What a function, a method or a partial call holds."""
    if isinstance(function, partial):
        return {name: getattr(function, name) for name in ("func", "args", "keywords")}
    if not isinstance(function, types.FunctionType):
        return {"__self__": function.__self__}
    if str(function.__module__).split(".")[0] in _OTHERS:
        return {}
    held = {name: cell.cell_contents for name, cell in _cells(function).items()}
    own = {name: getattr(function, name) for name in ("__defaults__", "__kwdefaults__")}
    return {**held, **own, "__dict__": vars(function)}


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    """The cells of a closure that hold something, by name."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return {name: cell for name, cell in cells.items() if cell != types.CellType()}


_RANDOM = (
    random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator,
    np.random.SeedSequence,
)  # fmt: skip


def _random(generator: Any) -> tuple[Any, Callable[[Any], None]]:
    """The state of a generator of random numbers, and what sets it."""
    if isinstance(generator, random.Random):
        return generator.getstate(), generator.setstate
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(), generator.set_state
    if isinstance(generator, np.random.SeedSequence):
        return generator.n_children_spawned, lambda _: None  # NumPy cannot set it
    bits = getattr(generator, "bit_generator", generator)
    spawned = getattr(bits.seed_seq, "n_children_spawned", 0)
    return (bits.state, spawned), lambda state: setattr(bits, "state", state[0])


def _bytes(value: Any) -> bytes | None:
    """What a buffer holds: a `bytearray`, an `array.array`, one of ctypes."""
    try:
        view = memoryview(value)
    except (TypeError, BufferError):
        return None
    return view.tobytes() if view.nbytes <= _LARGE else None


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                yield f"_{one.__name__.lstrip('_')}{name}" if private else name


def _contents_of_class(kind: type) -> dict[str, Any]:
    """A class's own values and functions, but for what only describes attributes."""
    return {
        name: value
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType)
        or not (name.startswith(_INNER) or isinstance(value, _DESCRIBES))
    }


def _is_cached(owner: Any, name: Any) -> bool:
    """Whether a value is computed at its first use, from what its owner holds."""
    return isinstance(name, str) and isinstance(getattr(type(owner), name, None), cached_property)


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
    if isinstance(a, float):  # not a number is the same, 0 and -0 are not
        return repr(a) == repr(b)
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
    elif isinstance(owner, types.FunctionType):
        if name in _cells(owner):
            _cells(owner)[name].cell_contents = value
        elif name != "__dict__":  # which is one dict for good
            setattr(owner, name, value)
    elif isinstance(owner, type):
        setattr(owner, name, value)
    elif name in _slots(type(owner)):
        object.__setattr__(owner, name, value)
    else:
        vars(owner)[name] = value


def _take(owner: Any, name: Any) -> None:
    """Takes away what was not there."""
    if isinstance(owner, type):
        type.__delattr__(owner, name)
    elif name in _slots(type(owner)):
        object.__delattr__(owner, name)
    else:
        del vars(owner)[name]


def _write_array(owner: Any, contents: Any) -> None:
    if owner.flags.writeable and not _same(owner, contents):
        owner[...] = contents


def _write_bytes(owner: Any, contents: bytes) -> None:
    if _bytes(owner) == contents:
        return
    if isinstance(owner, bytearray):
        owner[:] = contents
    elif isinstance(owner, array.array):
        del owner[:]
        owner.frombytes(contents)
    elif not memoryview(owner).readonly:
        memoryview(owner).cast("B")[:] = contents


def _write_set(owner: Any, contents: set[Any]) -> None:
    if isinstance(owner, set):
        owner.clear()
        owner.update(contents)


def _write(owner: Any, contents: dict[Any, Any]) -> None:
    """Makes an object hold what it held before."""
    now = _contents_of_class(owner) if isinstance(owner, type) else _contents(owner)
    assert now is not None
    if list(now) == list(contents) and all(now[name] is contents[name] for name in now):
        return
    if isinstance(owner, dict):
        owner.clear()
        owner.update(contents)
    elif isinstance(owner, list | deque):
        owner.clear()
        owner.extend(contents.values())
    elif not isinstance(owner, _FIXED):
        for name in now.keys() - contents.keys():
            _take(owner, name)
        for name, value in contents.items():
            if now.get(name, _NOTHING) is not value:
                _put(owner, name, value)
