"""What a forward can count in: plain values that its module and its code lead to.

A forward may change in every fourth call and keep the count anywhere: in an attribute, the length
of a list, an object, a closure, a global, a class, an iterator. Two calls compute the same then,
and only the count says that a later one need not.
"""

from __future__ import annotations

import array
import random
import types
import warnings
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch


# How far an object's attributes and a container's elements are followed, how many, and in all.
_DEPTH, _MOST, _ALL = 4, 256, 20_000
# Their state is not a user's, or is kept elsewhere.
_FOREIGN = {
    "torch", "numpy", "jax", "jaxlib", "fzero", "torch_bridge", "builtins", "transformers",
    "diffusers", "timm", "torchvision", "torchaudio", "importlib", "logging", "re", "typing",
    "tqdm",  # a thread of its own counts when it woke
}  # fmt: skip
# Modules whose iterators are Python's own.
_OF_PYTHON = {"builtins", "itertools", "collections", "_collections"}
_PLAIN = (bool, int, float, complex, str, bytes)
# What keeps values in memory that a tensor can share.
Memory: TypeAlias = "np.ndarray[Any, Any] | bytearray | array.array[Any]"
# Where the tensors are at home that a trace computes, and the note of one.
_OF_TRACES = "torch._subclasses"
LEFT = "a tensor without values"
# Where the class of a module that is called with a loss keeps it.
LOSS = "_loss_around_forward"


def reachable(
    module: torch.nn.Module, harmless: set[str]
) -> tuple[dict[str, Any], dict[str, Memory]]:
    """What a forward can count in, by name: numbers, texts, sizes of containers, positions; and
    the arrays among that.

    Args:
        module: the module whose forward it is.
        harmless: attributes of modules that nobody counts in.
    """
    found: dict[str, Any] = {}
    walk = _Walk(found, harmless)
    walk.modules("", module, 0)
    return found | of_loss(module, harmless), walk.arrays


def holders(module: torch.nn.Module, harmless: set[str]) -> tuple[list[Any], dict[str, Memory]]:
    """What a forward, or a loss around it, can leave values in: containers, the dicts of objects,
    functions and Python's modules, classes, cells of closures; and arrays, by name.

    Args:
        module: the module whose forward it is.
        harmless: attributes of modules that are not looked into.
    """
    walk = _Walk({}, harmless)
    walk.modules("", module, 0)
    walk.value("the loss", getattr(type(module), LOSS, None), 0)
    return list(walk.holders.values()), walk.arrays


def of_loss(module: torch.nn.Module, harmless: set[str]) -> dict[str, Any]:
    """The same of a loss that is called behind the module's forward."""
    found: dict[str, Any] = {}
    _Walk(found, harmless).value("the loss", getattr(type(module), LOSS, None), 0)
    return found


class _Walk:
    """One walk through what is there, each object once."""

    def __init__(self, found: dict[str, Any], harmless: set[str]) -> None:
        self._found, self._harmless, self._seen = found, harmless, set[int]()
        self.holders: dict[int, Any] = {}
        self.arrays: dict[str, Memory] = {}

    def modules(self, name: str, module: torch.nn.Module, depth: int) -> None:
        """Notes what a module, all within it, their hooks and classes hold."""
        new = [
            (path, m) for path, m in module.named_modules(prefix=name) if id(m) not in self._seen
        ]
        self._seen.update(id(m) for _, m in new)
        for path, m in new:
            for key, value in m.__dict__.items():
                if key not in self._harmless:
                    self.value(f"{path}.{key}" if path else key, value, depth)
            for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()):
                self.value(f"a hook of `{path}`" if path else "a hook", hook, depth)
            for kind in type(m).__mro__:
                if not is_foreign(kind):
                    self.kind(kind, depth)

    def _holds(self, holder: Any) -> None:
        self.holders[id(holder)] = holder

    def value(self, name: str, value: Any, depth: int) -> None:
        """Notes a value, or what it holds."""
        if isinstance(value, _PLAIN):
            self._found[name] = value
            return
        if value is None or id(value) in self._seen:
            return
        if depth > _DEPTH or len(self._seen) > _ALL:
            return
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat):
            if type(value).__module__.startswith(_OF_TRACES):
                self._found[name] = LEFT
            return
        if isinstance(value, torch.nn.Module):
            self.modules(name, value, depth + 1)
            return
        self._seen.add(id(value))
        if isinstance(value, np.ndarray | bytearray | array.array):
            self._found[name] = _array(value)
            self.arrays[name] = value
        elif isinstance(value, memoryview):
            self.value(name, value.obj, depth + 1)
        elif isinstance(value, list | tuple | set | frozenset | deque | dict):
            self._container(name, value, depth)
        elif isinstance(value, types.FunctionType | types.MethodType):
            self.function(name, value, depth)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            self.value(name, value.__self__, depth + 1)  # an iterator's `__next__`, say
        elif isinstance(value, type):
            if not is_foreign(value):
                self.kind(value, depth)
        elif (state := _state(value)) is not None:
            self._found[name] = state
        elif not is_foreign(type(value)):
            if isinstance(own := getattr(value, "__dict__", None), dict):
                self._holds(own)
            for key, inner in _attributes(value):
                self.value(f"{name}.{key}", inner, depth + 1)

    def _container(self, name: str, value: Any, depth: int) -> None:
        if not isinstance(value, tuple):
            self._found[f"the length of {name}"] = len(value)
            if not isinstance(value, frozenset):
                self._holds(value)
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        if isinstance(value, set | frozenset):
            return
        for _, (key, inner) in zip(range(_MOST), inside, strict=False):
            self.value(f"{name}[{key!r}]" if isinstance(key, _PLAIN) else name, inner, depth + 1)

    def kind(self, kind: type, depth: int) -> None:
        """Notes what a class holds, and what its functions lead to."""
        self._seen.add(id(kind))
        self._holds(kind)
        for name, value in list(vars(kind).items()):
            if isinstance(value, classmethod | staticmethod | property):
                value = getattr(value, "__func__", None) or getattr(value, "fget", None)
            if not name.startswith("__") or isinstance(value, types.FunctionType):
                self.value(f"{kind.__name__}.{name}", value, depth + 1)

    def function(self, name: str, function: Any, depth: int) -> None:
        """Notes what a function closes over, has as defaults, and names of its module."""
        if isinstance(function, types.MethodType):
            self.value(name, function.__self__, depth + 1)
            function = function.__func__
        if not isinstance(function, types.FunctionType) or is_foreign(function):
            return
        for cell_name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._holds(cell)
            try:
                self.value(f"`{cell_name}` of {name}", cell.cell_contents, depth + 1)
            except ValueError:  # nothing is in it yet
                continue
        for at, default in enumerate(function.__defaults__ or ()):
            self.value(f"default {at} of {name}", default, depth + 1)
        for key, default in (function.__kwdefaults__ or {}).items():
            self.value(f"default `{key}` of {name}", default, depth + 1)
        self.value(name, vars(function), depth + 1)
        self._holds(function.__globals__)
        names = set(names_of(function.__code__))
        for word in sorted(names & function.__globals__.keys()):
            self._global(word, function.__globals__[word], names, depth)

    def _global(self, word: str, value: Any, names: set[str], depth: int) -> None:
        if not isinstance(value, types.ModuleType):
            self.value(f"global {word}", value, depth + 1)
        elif not is_foreign(value):
            for key in sorted(names & vars(value).keys()):
                self.value(f"{word}.{key}", vars(value)[key], depth + 1)


def is_foreign(what: Any) -> bool:
    module = getattr(what, "__name__" if isinstance(what, types.ModuleType) else "__module__", None)
    return (module or "builtins").partition(".")[0] in _FOREIGN


def names_of(code: types.CodeType) -> Iterator[str]:
    """All names in a function's code, and in the functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_of(inner)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """An object's attributes, slots too."""
    slots = (
        name for kind in type(value).__mro__ for name in _words(vars(kind).get("__slots__", ()))
    )
    return [
        *list(getattr(value, "__dict__", {}).items())[:_MOST],
        *((name, getattr(value, name)) for name in slots if hasattr(value, name)),
    ]


def _words(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _array(value: Memory) -> Any:
    if not isinstance(value, np.ndarray):
        return len(value), zlib.crc32(value)
    if value.dtype == object:
        return value.shape
    return value.shape, zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)


def _state(value: Any) -> Any:
    """Where an iterator or a generator of numbers stands, or None for all else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, _plain(frame.f_locals))
    return _position(value)


def _position(value: Any) -> Any:
    """Where an iterator of Python's own stands, which its copy would start from.

    No others are asked: to copy is code of theirs, and that of a file closes it. What a class of a
    user's counts in is in its attributes.
    """
    if not isinstance(value, Iterator) or type(value).__module__ not in _OF_PYTHON:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # itertools' own way to say it is to go
        try:
            return (_plain(value.__reduce__()),)
        except TypeError:
            return None


def _plain(value: Any) -> Any:
    """The numbers and texts within containers and iterators; of all else nothing."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value[:_MOST]]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if isinstance(key, str)}
    return _position(value)


def moved(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is in both and differs."""
    return [name for name in one.keys() & other.keys() if not _same(one[name], other[name])]


def _same(one: Any, other: Any) -> bool:
    return bool(type(one) is type(other) and (one == other or one != one))
