"""Calls of nnx modules: what one writes that no state keeps is refused while it is traced.

A step keeps a module's buffers and updates its parameters. All else that a call leaves behind is
gone before the next one, which begins at the module as it was given.
"""

from __future__ import annotations

import copy
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fzero.compat import key_bits
from fzero.errors import StateError, some_of
from fzero.programs.unchanged import unchanged
from fzero.tree import PyTree


Path = tuple[Any, ...]

# Where an object lies, in a program's text: two traces of one function differ in it.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# What nnx itself keeps in a module.
_OF_NNX = ("_pytree__", "_object__")


@dataclass(frozen=True)
class Contents:
    """What a module holds at one time.

    Attributes:
        leaves: its variables, and arrays outside of them, by path.
        values: what those held at that time.
        attributes: values of Python by path; of a module, its type.
    """

    leaves: dict[Path, Any]
    values: dict[Path, Any]
    attributes: dict[Path, Any]

    @classmethod
    def of(cls, module: Any) -> Contents:
        """The contents of an nnx module."""
        from flax import nnx

        known = {path for path, _ in nnx.to_flat_state(nnx.state(module))}
        leaves: dict[Path, Any] = {}
        attributes = {}
        for path, value in nnx.iter_graph(module):
            if path in known:
                leaves[path] = value
            elif value is not None and not (path and str(path[-1]).startswith(_OF_NNX)):
                attributes[path] = type(value) if isinstance(value, nnx.Pytree) else _held(value)
        return cls(leaves, {path: raw(leaf) for path, leaf in leaves.items()}, attributes)

    def places(self, after: Contents) -> dict[Path, Path]:
        """The paths of these leaves at a later time, but for those that are gone.

        A variable that a module holds at two places may have another path by then.
        """
        now = {id(leaf): path for path, leaf in after.leaves.items()}
        found = {path: now.get(id(leaf), path) for path, leaf in self.leaves.items()}
        return {path: place for path, place in found.items() if place in after.leaves}

    def later(self, after: Contents) -> dict[Path, Any]:
        """These leaves as they are at a later time, but for those that are gone."""
        return {path: after.leaves[place] for path, place in self.places(after).items()}

    def others(self, after: Contents) -> list[str]:
        """What came, went or is another value of Python at a later time, in words."""
        was, now = self._shown(), after._shown()
        alike = {path for path in was if path in now and _same(*self._both(after, path))}
        told = [path for path in {**was, **now} if path not in alike]
        # Of a module that came or went, what it holds goes without saying.
        whole = {path for path in told if path not in was or path not in now}
        return [
            f"{_named(path)}: {was.get(path, 'nothing')}, then {now.get(path, 'nothing')}"
            for path in told
            if not any(path[:end] in whole for end in range(1, len(path)))
        ] + [
            f"{_named(path)}: its own, then that of {_named(was)}"
            for path, was in self._moved(after).items()
        ]

    def _both(self, after: Contents, path: Path) -> tuple[Any, Any]:
        """What stands at a path at both times: of a leaf, that there is one."""
        return self.attributes.get(path), after.attributes.get(path)

    def _moved(self, after: Contents) -> dict[Path, Path]:
        """Where leaves have changed places: by path, where its later leaf was before."""
        before = {id(leaf): path for path, leaf in self.leaves.items()}
        now = {path: before.get(id(leaf), path) for path, leaf in after.leaves.items()}
        return {path: was for path, was in now.items() if was != path and was in now}

    def _shown(self) -> dict[Path, str]:
        """All that there is, in words."""
        texts = {path: type(leaf).__name__ for path, leaf in self.leaves.items()}
        for path, value in self.attributes.items():
            texts[path] = value.__name__ if isinstance(value, type) else f"{value!r:.40}"
        return texts


def checked_call(
    graph: Any,
    filled: Callable[[Mapping[Path, Any]], dict[Path, Any]],
    run: Callable[[Any], Any],
    params: Sequence[Path],
) -> tuple[Any, dict[Path, Any]]:
    """A call of a module that is put together for it.

    Args:
        graph: the module's structure.
        filled: makes its leaves, some with values of one's own.
        run: calls the module.
        params: the paths of its parameters.

    Returns:
        What the call gives, and by path each leaf that the module then still has.

    Raises:
        StateError: the call wrote parameters, or left something behind, other than values of its
            leaves, with which a second call would compute something else.
    """
    call = _Call(graph, filled({}), run)
    held = call.before.later(call.after)
    if not all(path in held and raw(held[path]) is call.before.values[path] for path in params):
        _require_unwritten(call, filled, params)
    others = call.before.others(call.after)
    if others:
        _require_alike_again(call, filled, others)
    return call.out, held


class _Call:
    """One call of a module.

    Args:
        graph: the module's structure.
        leaves: its leaves by path.
        run: calls it.
    """

    def __init__(self, graph: Any, leaves: Mapping[Path, Any], run: Callable[[Any], Any]) -> None:
        from flax import nnx

        self.graph, self.run = graph, run
        module = nnx.merge(graph, nnx.from_flat_state(list(leaves.items())))
        self.before = Contents.of(module)
        self.out = run(module)
        nnx.pop(module, nnx.Intermediate)  # what a call only reports is not kept
        self.after = Contents.of(module)
        self.left = nnx.graphdef(module)

    def results(self, places: Iterable[Path]) -> PyTree:
        """Arrays that the call gives, and what it leaves at these places of the module."""
        out = [x for x in jax.tree.leaves(self.out) if isinstance(x, jax.Array | np.ndarray)]
        held = self.before.later(self.after)
        return out, [raw(held[place]) for place in places if place in held]


def _require_unwritten(
    call: _Call, filled: Callable[[Mapping[Path, Any]], dict[Path, Any]], params: Sequence[Path]
) -> None:
    """Refuses a call that wrote parameters.

    nnx's own transformations (`remat`, `jit`, `scan`) give all that they take back as new values,
    so that the program has to say which of them are those that came.
    """

    def values_after(values: list[Any]) -> list[Any]:
        again = _Call(call.graph, filled(dict(zip(params, values, strict=True))), call.run)
        held = again.before.later(again.after)
        return [raw(held[path]) if path in held else 0 for path in params]

    stayed = unchanged(jax.make_jaxpr(values_after)([call.before.values[x] for x in params]))
    written = [_named(path) for path, same in zip(params, stayed, strict=True) if not same]
    if written:
        raise StateError(
            f"from_flax: a call of the module wrote the nnx.Param {some_of(written, 4)}, which"
            " would be lost: here the optimizer alone changes parameters. Compute a normalised or"
            " clipped weight where it is used, without writing it back (nnx.WeightNorm and"
            " nnx.SpectralNorm write it; linen's do not), or clip weights in a transformation of"
            " optax; make what the forward is to keep an nnx.BatchStat, or another nnx.Variable"
            " that is no nnx.Param"
        )


def _require_alike_again(
    call: _Call, filled: Callable[[Mapping[Path, Any]], dict[Path, Any]], others: list[str]
) -> None:
    """Refuses a call that would compute something else after itself.

    What a call writes before it reads it (a shape, `norm.eval()`) is no state.

    Args:
        call: the call.
        filled: makes the module's leaves.
        others: what the call left otherwise.
    """
    places = call.before.places(call.after)
    came_from = {place: path for path, place in places.items()}

    def first() -> PyTree:
        return _Call(call.graph, filled({}), call.run).results(places)

    def again() -> PyTree:
        own = filled({})
        leaves = {
            place: own[came_from[place]] if place in came_from else _copied(leaf)
            for place, leaf in call.after.leaves.items()
        }
        return _Call(call.left, leaves, call.run).results(places.values())

    if not _alike(jax.make_jaxpr(first)(), jax.make_jaxpr(again)()):
        raise StateError(
            f"from_flax: a call of the module left behind {some_of(others, 4)}, and with that the"
            " next call would compute something else; but here every call begins at the module as"
            " it was given, so it would be lost. Make in __init__ what the forward is to keep:"
            " submodules and parameters as they are, and a count or any other state as an"
            " nnx.Variable (self.calls = nnx.Variable(jnp.int32(0)), then self.calls[...] += 1)"
        )


def _alike(one: Any, other: Any) -> bool:
    """Whether two programs without inputs are the same, of the same constants."""
    texts = {_ADDRESS.sub("", str(program.jaxpr)) for program in (one, other)}
    return len(texts) == 1 and all(map(_same_constant, one.consts, other.consts))


def _same_constant(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    return np.array_equal(key_bits(a), key_bits(b))


def raw(leaf: Any) -> Any:
    """What a variable holds, before its own functions (`get_value`) make something of it.

    An array outside of a variable is what it is.
    """
    return leaf.get_raw_value() if hasattr(leaf, "get_raw_value") else leaf


def for_flax_alone(variable: Any, value: Any) -> Any:
    """What a stream of random keys holds, where flax reads it (an `on_get_value`).

    Raises:
        StateError: the forward reads it itself. A stream begins in every step at a key of that
            step, so that neither its key nor its count is what the module holds.
    """
    from flax import nnx

    frame = inspect.currentframe()
    while frame and frame.f_globals.get("__name__") in (__name__, nnx.Variable.__module__):
        frame = frame.f_back
    if frame and not str(frame.f_globals.get("__name__")).startswith("flax."):
        what = type(variable).__name__
        raise StateError(
            f"from_flax: a forward read the nnx.{what} of a stream of random keys"
            f" {variable.get_metadata().get('tag', '')!r}, which is another here: every step gives"
            " each stream a key of its own, and counts from 0. Draw from the stream"
            " (self.rngs.noise()); keep a key that stays, or a count, in an nnx.Variable of the"
            " module (nnx.Variable(jax.random.key(3)), nnx.Variable(jnp.int32(0)))"
        )
    return value


def _copied(leaf: Any) -> Any:
    """A variable that may be written where this is called."""
    return leaf.copy() if hasattr(leaf, "get_raw_value") else leaf


@dataclass(frozen=True)
class _Object:
    """What an object of Python holds at one time."""

    kind: type
    attributes: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.kind.__name__} with {self.attributes}"


def _held(value: Any) -> Any:
    """A value as it is now: what is put into a container later is not in its copy."""
    if hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        return _Object(type(value), {name: _copied_container(x) for name, x in vars(value).items()})
    return _copied_container(value)


def _copied_container(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # of arrays in a container, say, which have no one answer
        return False


def _named(path: Path) -> str:
    return "/".join(map(str, path)) or "the module"
