"""Calls of nnx modules: what one writes that no state keeps is refused while it is traced.

A step keeps a module's buffers and updates its parameters. All else that a call leaves behind is
gone before the next one, which begins at the module as it was given. So that may only be what no
later call would read: of Python's values it is watched who does, of arrays the program tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        watched: places whose readings are told, each by its own function.
    """

    def __init__(
        self, asked: NnxCall, graph: Any, leaves: Mapping[Path, Any], arguments: PyTree,
        watched: Mapping[Place, Callable[[], None]] | None = None,
    ) -> None:  # fmt: skip
        from flax import nnx

        self.module = nnx.merge(graph, nnx.from_flat_state(list(leaves.items())))
        self.before = Contents.of(self.module)
        for place, note in (watched or {}).items():
            self.before.python.watch(place, note)
        self.out = asked.run(self.module, arguments)
        nnx.pop(self.module, nnx.Intermediate)  # what a call only reports is not kept
        self.after = Contents.of(self.module)

    def results(self, places: Iterable[Path]) -> list[Any]:
        """Arrays that the call gives, and what it leaves at these places of the module."""
        out = [x for x in jax.tree.leaves(self.out) if isinstance(x, jax.Array | np.ndarray)]
        return out + [raw(self.after.leaves[place]) for place in places]


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

    Further calls follow one as the step makes it, each with inputs of its own. Whatever is the same
    after the second as after the first is so for good. What is not may be no matter to the third,
    in which it is watched: a count that nothing else reads, a shape that is written before it is
    read. If already the second reads nothing that the first changed, there needs no third.

    Args:
        asked: the module, and how it is called.
        call: the call.
        others: what it left otherwise, in words.
    """
    changed = call.before.python.changes(call.after.python)
    soon = others.keys() == changed.keys() and not any(map(_is_seen, changed.values()))
    for early in (True, False) if soon else (False,):
        call.before.python.put_back()
        runs = _Runs(asked, early)
        if runs.alike() and not runs.read:
            return
    told = list(others.values())
    why = "with that the next call would compute something else"
    if runs.read:
        told = [others.get(place, words) for place, words in runs.read.items()]
        why = "a later call reads that, so that it may compute something else"
    raise StateError(
        f"from_flax: a call of the module left behind {some_of(told, 4)}, and {why}; but here every"
        " call begins at the module as it was given, so it would be lost. Make in __init__ what"
        " the forward is to keep: submodules and parameters as they are, and a count or any other"
        " state as an nnx.Variable (self.calls = nnx.Variable(jnp.int32(0)), then self.calls[...]"
        " += 1)"
    )


class _Runs:
    """Calls of a module, one after the other, its leaves filled anew before each.

    Args:
        asked: the module, and how it is called.
        early: whether the second call is the one that is watched.

    Attributes:
        results: what each gave.
        read: what the last one read of what the first two left in different ways, in words.
    """

    def __init__(self, asked: NnxCall, early: bool) -> None:
        self.asked, self.early = asked, early
        self.results: list[list[Any]] = []
        self.read: dict[Place, str] = {}
        # By its path at first: where each leaf is now.
        self._places = {path: path for path in asked.values}
        self._calls: list[_Call] = []
        # Of what is watched: between which two times it changed.
        self._times: list[Held] = []

    def alike(self) -> bool:
        """Makes the calls; whether all compute the same of their inputs."""
        flat, tree = jax.tree.flatten((dict(self.asked.values), self.asked.arguments))
        traced = [i for i, x in enumerate(flat) if isinstance(x, jax.Array | np.ndarray)]

        def all_runs(*groups: list[Any]) -> PyTree:
            for group in groups:
                given = dict(zip(traced, group, strict=True))
                self.add(*jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(flat)]))
            return self.results

        inputs = [flat[i] for i in traced]
        program = jax.make_jaxpr(all_runs)(*[inputs] * (2 if self.early else 3))
        sizes = {len(jax.tree.leaves(result)) for result in self.results}
        return len(sizes) == 1 and repeats(program, len(inputs), *sizes)

    def add(self, values: Mapping[Path, Any], arguments: PyTree) -> None:
        """One more call; none that would be watched, if nothing has changed."""
        from flax import nnx

        leaves = self.asked.filled(values)
        if not self._calls:
            call = _Call(self.asked, self.asked.graph, leaves, arguments)
        else:
            last = self._calls[-1]
            here = {place: path for path, place in self._places.items()}
            leaves = {
                place: _with_value(leaf, leaves[here[place]] if place in here else leaf)
                for place, leaf in last.after.leaves.items()
            }
            watched: dict[Place, Any] = {}
            if len(self._times) == 2:
                watched = self._watched()
                if not watched or self.read:
                    return
            try:
                call = _Call(self.asked, nnx.graphdef(last.module), leaves, arguments, watched)
            except Exception:
                if not watched:
                    raise
                # Stand-ins are for no operation of jax: one of them was read.
                self.read = self.read or self._told
                return
        now = call.before.places(call.after)
        self._places = {path: now[at] for path, at in self._places.items() if at in now}
        self.results.append(call.results(self._places.values()))
        self._times += [call.before.python] if self.early and not self._calls else []
        self._times.append(call.after.python)
        self._calls.append(call)

    def _watched(self) -> dict[Place, Callable[[], None]]:
        """What is another value than it was a call before, to be watched."""
        changed = self._times[0].changes(self._times[1])
        self._told = {place: _change(place, *pair) for place, pair in changed.items()}

        def note(place: Place) -> Callable[[], None]:
            return lambda: self.read.update({place: self._told[place]})

        for place, pair in changed.items():
            if _is_seen(pair):
                note(place)()
        return {place: note(place) for place in changed}


def _is_seen(pair: tuple[Any, Any]) -> bool:
    """Whether a change is seen without a reading: it came or went, or is of another type."""
    was, now = pair
    return type(was) is not type(now) or isinstance(was, type)


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
    return value.__name__.split(".")[-1] if isinstance(value, type) else f"{value!r:.40}"


def _named(path: Path) -> str:
    return "/".join(map(str, path)) or "the module"
