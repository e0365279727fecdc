"""Calls of nnx modules: what one writes that no state keeps is refused while it is traced.

A step keeps a module's buffers and updates its parameters. All else that a call leaves behind is
gone before the next one, which begins at the module as it was given. So it leaves nothing else.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from fzero.compat import nnx_graphs
from fzero.errors import StateError, some_of
from fzero.flax.python_state import ATOMS, Drawn, Held, Path, Place, named
from fzero.programs.unchanged import unchanged
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
                if not isinstance(value, nnx.Pytree | dict | list | tuple):
                    kind = jax.tree.structure(value, is_leaf=partial(operator.is_not, value))
                    python.note(path, "its structure", kind)
            elif path not in known:
                shown = value
            if path in known:
                leaves[path] = value
            if path:
                python.note(path[:-1], path[-1], shown)
        return cls(leaves, {path: raw(leaf) for path, leaf in leaves.items()}, python)

    def later(self, after: Contents) -> dict[Path, Any]:
        """These leaves as they are at a later time, but for those that are gone."""
        return {path: after.leaves[path] for path in self.leaves if path in after.leaves}

    def others(self, after: Contents) -> list[str]:
        """What came, went or is another value of Python at a later time, in words."""
        changed = self.python.changes(after.python)
        moved = self._moved(after)
        return [
            *(_change(place, *pair) for place, pair in changed.items()),
            *(f"{named(x)}: its own, then that of {named(was)}" for x, was in moved.items()),
        ]

    def written_for_all(self, after: Contents) -> list[str]:
        """What is another value later in an object that is not the module's alone, in words."""
        from flax import nnx

        was, now = self.python.owners, after.python.owners
        return [
            _change((path, name), *pair)
            for (path, name), pair in self.python.changes(after.python).items()
            for owner in [was.get((*path, name), was.get(path))]
            if not isinstance(owner, nnx.Pytree)
            and any(owner is now.get(place) for place in ((*path, name), path))
        ]

    def values_written(self, after: Contents) -> list[str]:
        """Leaves that came, went or hold another value later, in words."""
        paths = {**self.values, **after.values}
        return [
            f"{named(path)}: another value" if path in self.values and path in after.values
            else f"{named(path)}: {'gone' if path in self.values else 'new'}"
            for path in paths
            if self.values.get(path) is not after.values.get(path)
        ]  # fmt: skip

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
        What the call gives, and the values of its leaves by path: the very ones of `asked.values`
        where it did not write.

    Raises:
        StateError: the call wrote parameters, or left something behind other than values of its
            leaves.
    """
    came = Held.of(asked.arguments)
    call = _Call(asked, asked.filled(asked.values))
    others = call.before.others(call.after)
    # The module itself is never changed, and what it holds is not either, cached values included.
    call.before.python.put_back()
    if others:
        raise StateError(
            f"from_flax: a call of the module left behind {some_of(others, 4)}, which would be"
            " lost: here a forward writes nnx.Variables alone, and every call begins at the module"
            " as it was given. Make in __init__ what the forward is to keep, as an nnx.Variable (a"
            " count: self.calls = nnx.Variable(jnp.int32(0)), then self.calls[...] += 1), tables"
            " and submodules; give modes as arguments (self.norm(x, use_running_average=True));"
            " what is only reported is returned, or noted in an nnx.Intermediate (self.weights ="
            " nnx.Intermediate(weights))"
        )
    held = {
        path: asked.values[path] if raw(leaf) is call.before.values[path] else raw(leaf)
        for path, leaf in call.before.later(call.after).items()
    }
    if not all(path in held and held[path] is asked.values[path] for path in params):
        left = Held.of(asked.arguments)
        came.put_back()  # the call is made once more
        try:
            _require_unwritten(call, asked, params)
        finally:
            left.put_back()
    return call.out, held


class _Call:
    """One call of a module.

    Args:
        asked: the module and how it is called.
        leaves: its leaves by path.
    """

    def __init__(self, asked: NnxCall, leaves: Mapping[Path, Any]) -> None:
        from flax import nnx

        with nnx_graphs():
            module = nnx.merge(asked.graph, nnx.from_flat_state(list(leaves.items())))
            self.before = Contents.of(module)
        try:
            self.out = asked.run(module, asked.arguments)
            with nnx_graphs():
                nnx.pop(module, nnx.Intermediate)  # what a call only reports is not kept
                self.after = Contents.of(module)
        except BaseException:
            self.before.python.put_back()
            raise


def _require_unwritten(call: _Call, asked: NnxCall, params: Sequence[Path]) -> None:
    """Refuses a call that wrote parameters.

    nnx's own transformations (`remat`, `jit`, `scan`) give all that they take back as new values,
    so that the program has to say which of them are those that came.
    """

    def values_after(values: list[Any]) -> list[Any]:
        given = {**asked.values, **dict(zip(params, values, strict=True))}
        again = _Call(asked, asked.filled(given))
        held = again.before.later(again.after)
        return [raw(held[path]) if path in held else 0 for path in params]

    stayed = unchanged(jax.make_jaxpr(values_after)([call.before.values[x] for x in params]))
    written = [named(path) for path, same in zip(params, stayed, strict=True) if not same]
    if written:
        raise StateError(
            f"from_flax: a call of the module wrote the nnx.Param {some_of(written, 4)}, which"
            " would be lost: here the optimizer alone changes parameters. Compute a normalised or"
            " clipped weight where it is used, without writing it back (nnx.WeightNorm and"
            " nnx.SpectralNorm write it; linen's do not), or clip weights in a transformation of"
            " optax; make what the forward is to keep an nnx.BatchStat, or another nnx.Variable"
            " that is no nnx.Param"
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


def _change(place: Place, was: Any, now: Any) -> str:
    path, name = place
    before, after = _short(was), _short(now)
    return f"{named((*path, name))}: {before}, then {'another' if after == before else after}"


def _short(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.shape}"
    if isinstance(value, Drawn):
        return "its next random number"
    return value.__name__.split(".")[-1] if isinstance(value, type) else f"{value!r:.40}"
