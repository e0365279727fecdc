"""Streaming: a pure function of leaves that are not on the device, which visit it in turn.

`StreamedFunction` divides a function by what is computed together (`fzero.programs.places`) and
runs the parts one after the other. While one runs, what the part before it made is leaving and what
the next one reads arrives: no more than two parts' leaves are on the device at any time.

A leaf larger than a chunk is kept as pieces (`fzero.storage.tiers.Pieces`). A part that works row
by row on it, as most optimizers do, is run once per piece; any other sees it whole.

What a visit read is let go when what it made is where it is kept. So a disk that cannot be written
loses nothing: what it does not take stays in host memory, and all parts are run to the end.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fzero.errors import PlacementError, StateError
from fzero.offload.park import Inbound, Outbound, cut_up, park, unpark
from fzero.offload.piecewise import Cut, PieceProgram, piecewise
from fzero.programs.jaxprs import Program, Var
from fzero.programs.places import PlacedFunction
from fzero.sharding.chunks import Parking
from fzero.storage.tiers import Leaf, Pieces, is_handle, joined, piece_shape, pieces_of, settled
from fzero.tree import PyTree


@dataclass(frozen=True)
class Visit:
    """One run of a part.

    Args:
        part: which part.
        piece: which piece of its leaves; `None` for all of them at once.
    """

    part: int
    piece: int | None = None


@dataclass(frozen=True)
class _Leaving:
    """What a visit made and is parked: of which results, and on its way."""

    results: tuple[Var, ...]
    outbound: Outbound


class StreamedFunction(PlacedFunction):
    """A pure function, some of whose arguments and results are parked.

    Args:
        function: what to run.
        args: its arguments as `jax.ShapeDtypeStruct`s with the shardings they have on the device.
        out_shardings: as for `PlacedFunction`.
        everywhere: mesh of all devices.
        labels: for each argument leaf, what it is computed together with.
        cuts: for each argument leaf, parked or not, its `Cut` or `None`.
        parked: for each argument leaf, its `Parking` or `None`.
        out_parked: takes the outputs' shapes and gives a `Parking` or `None` for each.
        donate: indices of arguments whose memory may be reused.
        what: what the function is, for messages.
        path: where leaves on disk go.
        compiler_options: of the programs for whole leaves; pieces are updated element by element.

    Attributes:
        visits: the runs of its parts, in order.
        observer: if set, is called with each event (`fetch`, `run`, `leave`, `gone`) and its visit.
        stuck: by name, the leaves that the last call could not write and left in host memory.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        args: Sequence[PyTree],
        out_shardings: Callable[[PyTree], PyTree],
        everywhere: Mesh,
        *,
        labels: PyTree,
        cuts: Sequence[Cut | None],
        parked: Sequence[Parking | None],
        out_parked: Callable[[PyTree], Sequence[Parking | None]],
        donate: Sequence[int] = (),
        what: str = "function",
        path: str | None = None,
        out_labels: Callable[[PyTree], Sequence[str]] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            function, args, out_shardings, everywhere, donate, labels, what, out_labels,
            compiler_options,
        )  # fmt: skip
        self.path = path or tempfile.gettempdir()
        self.observer: Callable[[str, Visit], None] | None = None
        self.stuck: dict[str, PlacementError] = {}
        self._parked = {v: p for v, p in zip(self.program.inputs, parked, strict=True) if p}
        self._parking = {
            var: parking
            for (var, _), parking in zip(self.outputs, out_parked(self.out), strict=True)
            if parking is not None and isinstance(var, Var)
        }
        by_var = {v: c for v, c in zip(self.program.inputs, cuts, strict=True) if c is not None}
        self._last = {var: i for i, part in enumerate(self.parts) for var in part.reads}
        self._pieces: dict[int, PieceProgram] = {}
        if by_var:
            self._compile_pieces(function, args, by_var)
        self.visits = tuple(self._planned())

    def _compile_pieces(
        self, function: Callable[..., PyTree], args: Sequence[PyTree], cuts: dict[Var, Cut]
    ) -> None:
        leaves, tree = jax.tree.flatten(tuple(args))

        def plain(var: Var, leaf: Any) -> jax.ShapeDtypeStruct:
            cut = cuts.get(var)
            shape = leaf.shape if cut is None else piece_shape(leaf.shape, (cut.dim, cut.count))
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        shapes = [plain(v, leaf) for v, leaf in zip(self.program.inputs, leaves, strict=True)]
        closed = jax.make_jaxpr(lambda *flat: function(*jax.tree.unflatten(tree, flat)))(*shapes)
        small = Program(closed.jaxpr, closed.consts)
        kept = {var for var, _ in self.outputs if isinstance(var, Var)}
        for i, part in enumerate(self.parts):

            def reusable(var: Var, here: int = i) -> bool:
                return var in self.donated and self._last[var] == here and var not in kept

            found = piecewise(
                part, self.program, small, cuts, self.shardings,
                arrives=self._in_pieces, leaves=lambda var: self._cut_of(var) is not None,
                reusable=reusable,
            )  # fmt: skip
            if found is not None and self._in_same_pieces(i, found):
                self._pieces[i] = found

    def _in_same_pieces(self, number: int, pieces: PieceProgram) -> bool:
        """Whether everything that leaves is kept in the pieces that a part would make."""
        part = self.parts[number]
        cuts = {self._cut_of(var) for var in part.gives} - {None}
        return cuts <= {(pieces.cut.dim, pieces.cut.count)}

    def _in_pieces(self, var: Var) -> bool:
        """Whether an argument comes in pieces."""
        parking = self._parked.get(var)
        return parking is not None and parking.cut is not None

    def _cut_of(self, var: Var) -> tuple[int, int] | None:
        """How a result leaves in pieces, if it does."""
        parking = self._parking.get(var)
        return None if parking is None else parking.cut

    def _last_piece(self, visit: Visit) -> bool:
        return visit.piece is None or visit.piece == self._pieces[visit.part].cut.count - 1

    def _planned(self) -> Iterator[Visit]:
        for i in range(len(self.parts)):
            if i in self._pieces:
                yield from (Visit(i, piece) for piece in range(self._pieces[i].cut.count))
            else:
                yield Visit(i)

    def __call__(self, *args: PyTree) -> PyTree:
        """Runs the function.

        Raises:
            PlacementError: something parked cannot be read.
        """
        leaves, tree = jax.tree.flatten(args)
        if str(tree) != str(self.in_tree):
            raise StateError(f"{self.what}: expected {self.in_tree}, got {tree}")
        env: dict[Var, Any] = dict(self.program.consts)
        for var, leaf in zip(self.program.inputs, leaves, strict=True):
            env[var] = self._in_form(var, leaf)
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
        for var, pieces in made.items():
            env[var] = self._parked_leaf(var, pieces)
        return self._results(env)

    def require_written(self, state: Any) -> None:
        """Raises `PlacementError`, with the new state, if the disk did not take all of it."""
        if not self.stuck:
            return
        names, error = ", ".join(list(self.stuck)[:6]), next(iter(self.stuck.values()))
        more = f" and {len(self.stuck) - 6} more" if len(self.stuck) > 6 else ""
        raised = PlacementError(
            f"{self.what}: the step was taken, but not all of its result is on disk: {names}{more}"
            f" stay in host memory: {error} The new state is whole: go on with this error's .state"
            " once the disk can be written (the next step writes them again), or save it."
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
        return PlacementError(f"{self.what}: {error} {said}")

    def _collect(self, leaving: _Leaving | None, made: dict[Var, list[Any]]) -> None:
        """Waits until what a visit made is where it is kept."""
        if leaving is not None:
            kept = leaving.outbound.settled(self.stuck.setdefault)
            for var, piece in zip(leaving.results, kept, strict=True):
                made.setdefault(var, []).append(piece)

    def _in_form(self, var: Var, leaf: Leaf) -> Leaf:
        """A parked leaf in the pieces that it visits in, wherever it is."""
        leaf, parking = settled(leaf), self._parked.get(var)
        if parking is None:
            return unpark(leaf) if isinstance(leaf, jax.Array) or is_handle(leaf) else leaf
        if parking.cut is None or isinstance(leaf, Pieces):
            return leaf
        whole = unpark(leaf)
        # A copy: the leaf may be somebody else's, too.
        copy = jnp.array(whole, copy=True) if whole is leaf else whole
        return park(copy, parking, self.path)

    def _tell(self, event: str, visit: Visit) -> None:
        if self.observer is not None:
            self.observer(event, visit)

    def _fetch(self, visit: Visit, env: dict[Var, Any]) -> dict[int, Inbound]:
        """Starts bringing what a visit reads; by index of the part's reads."""
        arriving = {}
        for i, var in enumerate(self.parts[visit.part].reads):
            # What does not come in pieces comes with the first, and stays until the last.
            if var in self._parked and (self._in_pieces(var) or not visit.piece):
                arriving[i] = Inbound(self._visitors(visit, env[var]))
        self._tell("fetch", visit)
        return arriving

    def _visitors(self, visit: Visit, leaf: Leaf) -> Sequence[Any]:
        pieces = pieces_of(leaf)
        return pieces if visit.piece is None or len(pieces) == 1 else (pieces[visit.piece],)

    def _here(
        self, visit: Visit, env: dict[Var, Any], arriving: dict[int, Inbound]
    ) -> dict[int, Any]:
        """What a visit reads and was parked, on the device; by index of the part's reads."""
        here = {}
        for i, inbound in arriving.items():
            arrays, leaf = inbound.settled(), env[self.parts[visit.part].reads[i]]
            whole = visit.piece is None and isinstance(leaf, Pieces)
            here[i] = joined(leaf, arrays) if whole else arrays[0]
        return here

    def _run(self, visit: Visit, env: dict[Var, Any], here: dict[int, Any]) -> _Leaving:
        """Runs one visit; what it made and is parked is on its way then."""
        part = self.parts[visit.part]
        sources = {i: env[part.reads[i]] for i in here}
        for i, var in enumerate(part.reads):
            if i in here and visit.piece is not None and not self._in_pieces(var):
                env[var] = here.pop(i)
        if visit.piece is None:
            values = [
                here[i] if i in here else self._bring(env[var], part.mesh)
                for i, var in enumerate(part.reads)
            ]
            results = part.program(*values)
        else:
            results = self._run_piece(visit, env, here)
        self._tell("run", visit)
        replaced = self._spent(visit, env, sources)
        vars_, arrays, parkings = list[Var](), list[jax.Array](), list[Parking]()
        for var, value in zip(part.gives, results, strict=True):
            parking = self._parking.get(var)
            if parking is None or (parking.cut is None and not self._last_piece(visit)):
                env[var] = value
                continue
            own = [value]
            if visit.piece is None and parking.cut is not None:
                own = cut_up(value, parking.cut)
                value.delete()
            vars_ += [var] * len(own)
            arrays += own
            parkings += [parking] * len(own)
        leaving = _Leaving(tuple(vars_), Outbound(arrays, parkings, self.path, replaced))
        self._tell("leave", visit)
        return leaving

    def _run_piece(self, visit: Visit, env: dict[Var, Any], here: dict[int, Any]) -> list[Any]:
        part, pieces = self.parts[visit.part], self._pieces[visit.part]
        into = {}
        for i in pieces.made:
            var = part.gives[i]
            if self._cut_of(var) is not None:
                continue
            if visit.piece:
                into[i] = env[var]
            elif i in pieces.source:
                into[i] = self._bring(env[part.reads[pieces.source[i]]], part.mesh)
            else:
                into[i] = _empty(var.aval.shape, var.aval.dtype, self.shardings[var])()
        kept = {
            i: self._bring(env[var], part.mesh) for i, var in enumerate(part.reads)
            if i not in here and i not in pieces.source.values()
        }  # fmt: skip
        return pieces.run(np.int32(visit.piece or 0), here, kept, into)

    def _spent(self, visit: Visit, env: dict[Var, Any], sources: dict[int, Leaf]) -> list[Any]:
        """What was given away and has been read for the last time: parked pieces, to be let go."""
        part, pieces = self.parts[visit.part], self._pieces.get(visit.part)
        done = pieces is not None and self._last_piece(visit)
        spent: list[Any] = []
        for i, var in enumerate(part.reads):
            if var not in self.donated or self._last[var] != visit.part:
                continue
            if i in sources:
                spent += self._visitors(visit, sources[i])
            elif pieces is not None and done and i in pieces.sliced - set(pieces.source.values()):
                env[var].delete()  # gradients, mostly
        return spent

    def _parked_leaf(self, var: Var, pieces: list[Any]) -> Leaf:
        parking = self._parking[var]
        if parking.cut is None:
            return pieces[0]
        dtype, sharding = np.dtype(var.aval.dtype), self.shardings[var]
        return Pieces(tuple(var.aval.shape), dtype, sharding, parking.cut[0], tuple(pieces))

    def _bring(self, value: Any, mesh: Any) -> Any:
        return value if is_handle(value) else super()._bring(value, mesh)


@functools.cache
def _empty(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
