"""Calls of nnx modules: what one writes that no state keeps is refused while it is traced.

A step keeps a module's buffers and updates its parameters. All else that a call leaves behind is
gone before the next one, which begins at the module as it was given. So that may only be what
every call leaves alike, and with which the next one computes what the first did.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fzero.errors import StateError, some_of
from fzero.programs.repeats import repeats
from fzero.programs.unchanged import unchanged
from fzero.python_state import ATOMS, Held, Path, Place
from fzero.tree import PyTree


# What nnx itself keeps in a module.
_OF_NNX = ("_pytree__", "_object__")


@dataclass(frozen=True)
class NnxCall:
    """A call of a module that is put together for it.

    Attributes:
        graph: the module's structure.
        filled: makes its leaves of their values.
        values: those values.
        run: calls the module, with arguments.
        arguments: those arguments.
    """

    graph: Any
    filled: Callable[[Mapping[Path, Any]], dict[Path, Any]]
    values: Mapping[Path, Any]
    run: Callable[[Any, PyTree], Any]
    arguments: PyTree


@dataclass(frozen=True)
class Contents:
    """What a module holds at one time.

    Attributes:
        leaves: its variables, and arrays outside of them, by path.
        values: what those held at that time.
        python: all else.
    """

    leaves: dict[Path, Any]
    values: dict[Path, Any]
    python: Held

    @classmethod
    def of(cls, module: Any) -> Contents:
        """The contents of an nnx module."""
        from flax import nnx

        known = {path for path, _ in nnx.to_flat_state(nnx.state(module))}
        leaves: dict[Path, Any] = {}
        python = Held()
        for path, value in nnx.iter_graph(module):
            if path and str(path[-1]).startswith(_OF_NNX):
                continue
            shown = jax.Array if path in known else type(value)
            if shown in ATOMS:  # most of what there is
                shown = value
            elif isinstance(value, nnx.Variable):
                shown = type(value)
                python.add(path, value)
                for name, told in value.get_metadata().items():
                    python.note(path, name, told)
            elif isinstance(value, nnx.Pytree) or path in python.parts:
                python.add(path, value)
            elif path not in known:
                shown = value
            if path in known:
                leaves[path] = value
            if path:
                python.note(path[:-1], path[-1], shown)
        return cls(leaves, {path: raw(leaf) for path, leaf in leaves.items()}, python)

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

    def others(self, after: Contents) -> dict[Place, str]:
        """What came, went or is another value of Python at a later time, in words."""
        changed = self.python.changes(after.python)
        told = {place: _change(place, *pair) for place, pair in changed.items()}
        for path, was in self._moved(after).items():
            told[path[:-1], path[-1]] = f"{_named(path)}: its own, then that of {_named(was)}"
        return told

    def _moved(self, after: Contents) -> dict[Path, Path]:
        """Where leaves have changed places: by path, where its later leaf was before."""
        before = {id(leaf): path for path, leaf in self.leaves.items()}
        now = {path: before.get(id(leaf), path) for path, leaf in after.leaves.items()}
        return {path: was for path, was in now.items() if was != path and was in now}


def checked_call(asked: NnxCall, params: Sequence[Path]) -> tuple[Any, dict[Path, Any]]:
    """A call of a module.

    Args:
        asked: the call.
        params: the paths of the module's parameters.

    Returns:
        What the call gives, and by path each leaf that the module then still has.

    Raises:
        StateError: the call wrote parameters, or left something behind, other than values of its
            leaves, which a later call would read.
    """
    call = _Call(asked, asked.graph, asked.filled(asked.values), asked.arguments)
    held = call.before.later(call.after)
    if not all(path in held and raw(held[path]) is call.before.values[path] for path in params):
        _require_unwritten(call, asked, params)
    others = call.before.others(call.after)
    if others:
        try:
            _require_alike_again(asked, call, others)
        finally:
            call.before.python.put_back()  # the module itself is never changed
    return call.out, held


class _Call:
    """One call of a module.

    Args:
        asked: the module and how it is called.
        graph: its structure, which may be that after an earlier call.
        leaves: its leaves by path.
        arguments: those of the call.
    """

    def __init__(
        self, asked: NnxCall, graph: Any, leaves: Mapping[Path, Any], arguments: PyTree
    ) -> None:
        from flax import nnx

        self.module = nnx.merge(graph, nnx.from_flat_state(list(leaves.items())))
        self.before = Contents.of(self.module)
        self.out = asked.run(self.module, arguments)
        nnx.pop(self.module, nnx.Intermediate)  # what a call only reports is not kept
        self.after = Contents.of(self.module)

    def next(self, asked: NnxCall, values: Mapping[Path, Any], arguments: PyTree) -> _Call:
        """The call after this one: of the module as it is now, its leaves filled anew."""
        from flax import nnx

        filled = asked.filled(values)
        paths = {place: path for path, place in self.before.places(self.after).items()}
        leaves = {
            place: _with_value(leaf, filled[paths[place]] if place in paths else leaf)
            for place, leaf in self.after.leaves.items()
        }
        return _Call(asked, nnx.graphdef(self.module), leaves, arguments)

    def left_otherwise(self) -> dict[Place, str]:
        """What it left otherwise, in words; not of arrays, of which a program tells."""
        before, after = self.before, self.after
        arrays = before.python.arrays.keys() & after.python.arrays.keys()
        return {at: told for at, told in before.others(after).items() if at not in arrays}

    def arrays(self) -> list[Any]:
        """Arrays that the call gives, and what it leaves in the module."""
        left = [raw(leaf) for leaf in self.after.leaves.values()]
        every = [*jax.tree.leaves(self.out), *left, *self.after.python.arrays.values()]
        return [x for x in every if isinstance(x, jax.Array | np.ndarray)]


def _require_unwritten(call: _Call, asked: NnxCall, params: Sequence[Path]) -> None:
    """Refuses a call that wrote parameters.

    nnx's own transformations (`remat`, `jit`, `scan`) give all that they take back as new values,
    so that the program has to say which of them are those that came.
    """

    def values_after(values: list[Any]) -> list[Any]:
        given = {**asked.values, **dict(zip(params, values, strict=True))}
        again = _Call(asked, asked.graph, asked.filled(given), asked.arguments)
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


def _require_alike_again(asked: NnxCall, call: _Call, others: dict[Place, str]) -> None:
    """Refuses a call after which a later one may compute something else.

    A second call follows one as the step makes it, each with inputs of its own. If it leaves behind
    what the first did, and computes of its inputs what the first did of its, so will all later
    ones.

    Args:
        asked: the module, and how it is called.
        call: the call.
        others: what it left otherwise, in words.
    """
    call.before.python.put_back()
    flat, tree = jax.tree.flatten((dict(asked.values), asked.arguments))
    traced = [i for i, x in enumerate(flat) if isinstance(x, jax.Array | np.ndarray)]
    again: dict[Place, str] = {}
    found: list[list[Any]] = []

    def both(*groups: list[Any]) -> list[list[Any]]:
        given = [dict(zip(traced, group, strict=True)) for group in groups]
        (values, arguments), following = (
            jax.tree.unflatten(tree, [some.get(i, x) for i, x in enumerate(flat)]) for some in given
        )
        first = _Call(asked, asked.graph, asked.filled(values), arguments)
        second = first.next(asked, *following)
        again.update(second.left_otherwise())
        found.extend((first.arrays(), second.arrays()))
        return found

    inputs = [flat[i] for i in traced]
    program = jax.make_jaxpr(both)(inputs, inputs)
    sizes = {len(arrays) for arrays in found}
    if again:
        why = f"and the next call something else again ({some_of(list(again.values()), 4)})"
    elif len(sizes) > 1 or not repeats(program, len(inputs), *sizes):
        why = "and with that the next call would compute something else"
    else:
        return
    raise StateError(
        f"from_flax: a call of the module left behind {some_of(list(others.values()), 4)}, {why};"
        " but here every call begins at the module as it was given, so it would be lost. Make in"
        " __init__ what the forward is to keep: submodules and parameters as they are, and a count"
        " or any other state as an nnx.Variable (self.calls = nnx.Variable(jnp.int32(0)), then"
        " self.calls[...] += 1)"
    )


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


def _with_value(leaf: Any, other: Any) -> Any:
    """A leaf that may be written where this is called, with what another one holds."""
    return leaf.replace(raw(other)) if hasattr(leaf, "get_raw_value") else other


def _change(place: Place, was: Any, now: Any) -> str:
    path, name = place
    return f"{_named((*path, name))}: {_short(was)}, then {_short(now)}"


def _short(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.shape}"
    return value.__name__.split(".")[-1] if isinstance(value, type) else f"{value!r:.40}"


def _named(path: Path) -> str:
    return "/".join(map(str, path)) or "the module"
