"""Streaming: a pure function of leaves that are not on the device, which visit it in turn.

`StreamedFunction` divides a function by what is computed together (`fzero.programs.sites`) and
runs the sections one after the other. While one runs, what the section before it made is leaving
and what the next one reads arrives: no more than two sections' leaves are on the device at any
time.

A leaf larger than a bucket is kept as slabs (`fzero.storage.tiers.Slabs`). A section that works row
by row on it, as most optimizers do, is run once per slab; any other sees it whole.

What a visit read is let go when what it made is where it is kept. So a disk that cannot be written
loses nothing: what it does not take stays in host memory, and all sections are run to the end.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fzero.errors import PlacementError, some_of
from fzero.offload.slabs import Cut, SlabProgram, slabwise
from fzero.programs.jaxprs import Program, Var
from fzero.programs.sites import PlacedFunction, bring
from fzero.sharding.buckets import Parking
from fzero.sharding.park import Inbound, Outbound, cut_up, park, unpark
from fzero.storage.tiers import Leaf, Slabs, is_handle, settled, slab_shape, slabs_of, whole_leaf
from fzero.tree import PyTree


@dataclass(frozen=True)
class Visit:
    """One run of a section.

    Args:
        section: which section.
        slab: which slab of its leaves; `None` for all of them at once.
    """

    section: int
    slab: int | None = None


@dataclass(frozen=True)
class _Leaving:
    """What a visit made and is parked: of which results, and on its way."""

    results: tuple[Var, ...]
    outbound: Outbound


@dataclass(frozen=True)
class Parkings:
    """How the leaves of a streamed function are kept between its calls.

    Args:
        cuts: for each argument leaf, parked or not, its `Cut` or `None`.
        given: for each argument leaf, its `Parking` or `None`.
        made: takes the outputs' shapes and gives a `Parking` or `None` for each.
        path: where leaves on disk go.
    """

    cuts: Sequence[Cut | None]
    given: Sequence[Parking | None]
    made: Callable[[PyTree], Sequence[Parking | None]]
    path: str | None = None


class StreamedFunction:
    """A pure function, some of whose arguments and results are parked.

    Args:
        function: what to run.
        args: its arguments as `jax.ShapeDtypeStruct`s with the shardings they have on the device.
        out_shardings: as for `PlacedFunction`.
        everywhere: mesh of all devices.
        parked: how leaves are kept.
        options: as for `PlacedFunction`, by name. Its compiler's are for whole leaves; slabs are
            updated element by element.

    Attributes:
        visits: the runs of its sections, in order.
        observer: if set, is called with each event (`fetch`, `run`, `leave`, `gone`) and its visit.
        stuck: by name, the leaves that the last call could not write and left in host memory.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        args: Sequence[PyTree],
        out_shardings: Callable[[PyTree], PyTree],
        everywhere: Mesh,
        parked: Parkings,
        **options: Any,
    ) -> None:
        self.placed = PlacedFunction(function, args, out_shardings, everywhere, **options)
        self.sections = self.placed.sections
        self.path = parked.path or tempfile.gettempdir()
        self.observer: Callable[[str, Visit], None] | None = None
        self.stuck: dict[str, PlacementError] = {}
        inputs = self.placed.program.inputs
        self._parked = {var: p for var, p in zip(inputs, parked.given, strict=True) if p}
        self._parking = {
            var: parking
            for (var, _), parking in zip(
                self.placed.outputs, parked.made(self.placed.out), strict=True
            )
            if parking is not None and isinstance(var, Var)
        }
        by_var = {var: cut for var, cut in zip(inputs, parked.cuts, strict=True) if cut is not None}
        self._last = {var: i for i, section in enumerate(self.sections) for var in section.reads}
        self._slabs: dict[int, SlabProgram] = {}
        if by_var:
            self._compile_slabs(function, args, by_var)
        self.visits = tuple(self._planned())

    def _compile_slabs(
        self, function: Callable[..., PyTree], args: Sequence[PyTree], cuts: dict[Var, Cut]
    ) -> None:
        leaves, tree = jax.tree.flatten(tuple(args))

        def plain(var: Var, leaf: Any) -> jax.ShapeDtypeStruct:
            cut = cuts.get(var)
            shape = leaf.shape if cut is None else slab_shape(leaf.shape, (cut.dim, cut.count))
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        whole = self.placed.program
        shapes = [plain(var, leaf) for var, leaf in zip(whole.inputs, leaves, strict=True)]
        try:
            closed = jax.make_jaxpr(lambda *flat: function(*jax.tree.unflatten(tree, flat)))(
                *shapes
            )
        except Exception:
            # An optimizer's own code met a leaf in slabs beside one of the same parameter that has
            # no such rows (a flat moment, a history): everything visits whole.
            return
        small = Program(closed.jaxpr, closed.consts)
        kept = {var for var, _ in self.placed.outputs if isinstance(var, Var)}
        for i, section in enumerate(self.sections):

            def reusable(var: Var, here: int = i) -> bool:
                return var in self.placed.donated and self._last[var] == here and var not in kept

            found = slabwise(
                section, whole, small, cuts, self.placed.shardings,
                arrives=self._in_slabs, leaves=lambda var: self._cut_of(var) is not None,
                reusable=reusable,
            )  # fmt: skip
            if found is not None and self._can_leave_in(i, found):
                self._slabs[i] = found

    def _can_leave_in(self, number: int, slabs: SlabProgram) -> bool:
        """Whether all that leaves a section can do so slab by slab.

        What is parked has to be kept in the same slabs. What stays on the device is written into
        one array, slab after slab, of which only the function's results have a layout: what a later
        section alone reads has none.
        """
        gives = self.sections[number].gives
        cuts = {self._cut_of(var) for var in gives} - {None}
        into = {gives[i] for i in slabs.made if self._cut_of(gives[i]) is None}
        return cuts <= {(slabs.cut.dim, slabs.cut.count)} and into <= self.placed.shardings.keys()

    def _in_slabs(self, var: Var) -> bool:
        """Whether an argument comes in slabs."""
        parking = self._parked.get(var)
        return parking is not None and parking.cut is not None

    def _cut_of(self, var: Var) -> tuple[int, int] | None:
        """How a result leaves in slabs, if it does."""
        parking = self._parking.get(var)
        return None if parking is None else parking.cut

    def _last_slab(self, visit: Visit) -> bool:
        return visit.slab is None or visit.slab == self._slabs[visit.section].cut.count - 1

    def _planned(self) -> Iterator[Visit]:
        for i in range(len(self.sections)):
            if i in self._slabs:
                yield from (Visit(i, slab) for slab in range(self._slabs[i].cut.count))
            else:
                yield Visit(i)

    def __call__(self, *args: PyTree) -> PyTree:
        """Runs the function.

        Raises:
            PlacementError: something parked cannot be read.
        """
        env = self.placed.bound(args)
        env.update({var: self._in_form(var, env[var]) for var in self.placed.program.inputs})
        self.stuck = {}
        made: dict[Var, list[Any]] = {}
        before: _Leaving | None = None
        arriving = self._fetch(self.visits[0], env) if self.visits else {}
        for number, visit in enumerate(self.visits):
            try:
                here = self._here(visit, env, arriving)
            except PlacementError as error:
                self._collect(before, made)
                raise self._unreadable(error, args[0]) from error
            leaving = self._run(visit, env, here)
            self._collect(before, made)  # now there is room for what comes next
            self._tell("gone", visit)
            before = leaving
            if number + 1 < len(self.visits):
                arriving = self._fetch(self.visits[number + 1], env)
        self._collect(before, made)
        for var, slabs in made.items():
            env[var] = self._parked_leaf(var, slabs)
        return self.placed.results(env, _bring)

    def require_written(self, state: Any) -> None:
        """Raises `PlacementError`, with the new state, if the disk did not take all of it."""
        if not self.stuck:
            return
        error = next(iter(self.stuck.values()))
        raised = PlacementError(
            f"{self.placed.what}: the step was taken, but not all of its result is on disk:"
            f" {some_of(self.stuck, 6)} stay in host memory: {error} The new state is whole: go on"
            " with this error's .state once the disk can be written (the next step writes them"
            " again), or save it."
        )
        raised.state = state
        raise raised from error

    def _unreadable(self, error: PlacementError, state: PyTree) -> PlacementError:
        """What cannot be read, and what that means for the state, our first argument."""
        given = any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        said = (
            "The update had begun, and the state's memory was given to it: restore a checkpoint."
            " (A step with donate=False keeps its input.)"
            if given
            else "The step was not taken, and the state is as it was."
        )
        return PlacementError(f"{self.placed.what}: {error} {said}")

    def _collect(self, leaving: _Leaving | None, made: dict[Var, list[Any]]) -> None:
        """Waits until what a visit made is where it is kept."""
        if leaving is not None:
            kept = leaving.outbound.settled(self.stuck.setdefault)
            for var, slab in zip(leaving.results, kept, strict=True):
                made.setdefault(var, []).append(slab)

    def _in_form(self, var: Var, leaf: Leaf) -> Leaf:
        """A parked leaf in the slabs that it visits in, wherever it is."""
        leaf, parking = settled(leaf), self._parked.get(var)
        if parking is None:
            return unpark(leaf) if isinstance(leaf, jax.Array) or is_handle(leaf) else leaf
        if parking.cut is None or isinstance(leaf, Slabs):
            return leaf
        whole = unpark(leaf)
        # A copy: the leaf may be somebody else's, too.
        copy = jnp.array(whole, copy=True) if whole is leaf else whole
        return park(copy, parking, self.path)

    def _tell(self, event: str, visit: Visit) -> None:
        if self.observer is not None:
            self.observer(event, visit)

    def _fetch(self, visit: Visit, env: dict[Var, Any]) -> dict[int, Inbound]:
        """Starts bringing what a visit reads; by index of the section's reads."""
        arriving = {}
        for i, var in enumerate(self.sections[visit.section].reads):
            # What does not come in slabs comes with the first, and stays until the last.
            if var in self._parked and (self._in_slabs(var) or not visit.slab):
                arriving[i] = Inbound(self._visitors(visit, env[var]))
        self._tell("fetch", visit)
        return arriving

    def _visitors(self, visit: Visit, leaf: Leaf) -> Sequence[Any]:
        slabs = slabs_of(leaf)
        return slabs if visit.slab is None or len(slabs) == 1 else (slabs[visit.slab],)

    def _here(
        self, visit: Visit, env: dict[Var, Any], arriving: dict[int, Inbound]
    ) -> dict[int, Any]:
        """What a visit reads and was parked, on the device; by index of the section's reads."""
        here = {}
        for i, inbound in arriving.items():
            arrays, leaf = inbound.settled(), env[self.sections[visit.section].reads[i]]
            whole = visit.slab is None and isinstance(leaf, Slabs)
            here[i] = whole_leaf(leaf, arrays) if whole else arrays[0]
        return here

    def _run(self, visit: Visit, env: dict[Var, Any], here: dict[int, Any]) -> _Leaving:
        """Runs one visit; what it made and is parked is on its way then."""
        section = self.sections[visit.section]
        sources = {i: env[section.reads[i]] for i in here}
        for i, var in enumerate(section.reads):
            if i in here and visit.slab is not None and not self._in_slabs(var):
                env[var] = here.pop(i)
        if visit.slab is None:
            values = [
                _bring(here.get(i, env[var]), section.mesh) for i, var in enumerate(section.reads)
            ]
            results = section.program(*values)
        else:
            results = self._run_slab(visit, env, here)
        self._tell("run", visit)
        replaced = self._spent(visit, env, sources)
        vars_, arrays, parkings = list[Var](), list[jax.Array](), list[Parking]()
        for var, value in zip(section.gives, results, strict=True):
            parking = self._parking.get(var)
            if parking is None or (parking.cut is None and not self._last_slab(visit)):
                env[var] = value
                continue
            own = [value]
            if visit.slab is None and parking.cut is not None:
                own = cut_up(value, parking.cut)
                value.delete()
            vars_ += [var] * len(own)
            arrays += own
            parkings += [parking] * len(own)
        leaving = _Leaving(tuple(vars_), Outbound(arrays, parkings, self.path, replaced))
        self._tell("leave", visit)
        return leaving

    def _run_slab(self, visit: Visit, env: dict[Var, Any], here: dict[int, Any]) -> list[Any]:
        section, slabs = self.sections[visit.section], self._slabs[visit.section]
        into = {}
        for i in slabs.made:
            var = section.gives[i]
            if self._cut_of(var) is not None:
                continue
            if visit.slab:
                into[i] = env[var]
            elif i in slabs.source:
                into[i] = _bring(env[section.reads[slabs.source[i]]], section.mesh)
            else:
                into[i] = _empty(var.aval.shape, var.aval.dtype, self.placed.shardings[var])()
        kept = {
            i: _bring(env[var], section.mesh) for i, var in enumerate(section.reads)
            if i not in here and i not in slabs.source.values()
        }  # fmt: skip
        return slabs.run(np.int32(visit.slab or 0), here, kept, into)

    def _spent(self, visit: Visit, env: dict[Var, Any], sources: dict[int, Leaf]) -> list[Any]:
        """What was given away and has been read for the last time: parked slabs, to be let go."""
        section, slabs = self.sections[visit.section], self._slabs.get(visit.section)
        done = slabs is not None and self._last_slab(visit)
        spent: list[Any] = []
        for i, var in enumerate(section.reads):
            if var not in self.placed.donated or self._last[var] != visit.section:
                continue
            if i in sources:
                spent += self._visitors(visit, sources[i])
            elif slabs is not None and done and i in slabs.sliced - set(slabs.source.values()):
                env[var].delete()  # gradients, mostly
        return spent

    def _parked_leaf(self, var: Var, slabs: list[Any]) -> Leaf:
        parking = self._parking[var]
        if parking.cut is None:
            return slabs[0]
        dtype, sharding = np.dtype(var.aval.dtype), self.placed.shardings[var]
        return Slabs(tuple(var.aval.shape), dtype, sharding, parking.cut[0], tuple(slabs))


def _bring(value: Any, mesh: Any) -> Any:
    """A value on the devices of a mesh; what is parked stays where it is."""
    return value if is_handle(value) else bring(value, mesh)


@functools.cache
def _empty(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
