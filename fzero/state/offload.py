"""Moving leaves between tiers: pure functions of the state.

A move copies leaf by leaf and releases each source as soon as its copy is complete, so that the old
and the new copy of a leaf never coexist longer than one batch of leaves: the largest leaf, or
`BATCH_BYTES` of small ones, which would crawl one by one.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from fzero.errors import PlacementError
from fzero.state.array_facts import GIVEN
from fzero.state.compute_copy import inherit
from fzero.state.require import require_alive, require_arrays, require_state
from fzero.state.train_state import TrainState
from fzero.storage import disk
from fzero.storage.disk import DiskArray
from fzero.storage.tiers import (
    DEVICE,
    DISK,
    HOST,
    HOST_KIND,
    Arriving,
    Leaf,
    Transfer,
    host_sharding,
    largest,
    lies_in,
    made_of_slabs,
    on_device,
    settled,
    slabs_of,
)
from fzero.tree import device_bytes, is_plain, leaf_bytes, named_leaves


BATCH_BYTES = 64 * 2**20

# Words for what a state has, and the fields that hold it. The first field that is there counts
# where a state may not have a copy of its own for it.
_FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "params": (("params", "compute"),),
    "master": (("params",),),
    "compute": (("compute",), ("params",)),
    "opt_state": (("opt_state",),),
    "ema": (("ema",),),
    "buffers": (("buffers",),),
    "grads": (("grads",),),
}
_WORDS = {
    # DeepSpeed's OffloadStateTypeEnum
    "optim_states": "opt_state",
    "hp_params": "master",
    "lp_params": "compute",
    "lp_grads": "grads",
}
CLASSES = ("params", "compute", "opt_state", "ema", "buffers", "grads")


def offload(
    state: TrainState,
    include: str | Iterable[str] | None = None,
    to: str = HOST,
    *,
    where: str | None = None,
    fraction: float = 1.0,
    path: str | os.PathLike[str] | None = None,
    non_blocking: bool = False,
    donate: bool = True,
    observer: Observer | None = None,
) -> TrainState:
    """Moves leaves of a state to host memory or to disk.

    Values and tree structure stay exactly the same; what is already there is not touched. Steps
    refuse a parked leaf that they need with `PlacementError`: nothing is ever moved silently.

    Args:
        state: the state.
        include: what to move: any of `params` (with the compute copy, where there is one),
            `master` (the fp32 parameters), `compute`, `opt_state`, `ema` (averages), `buffers`,
            `grads` (an accumulation in progress); DeepSpeed's `hp_params`, `lp_params`,
            `optim_states` and `lp_grads` are understood. All of them by default. Step count, random
            key and loss scale, a few bytes, stay.
        to: `host` (pinned memory) or `disk`.
        where: a regular expression; only leaves whose path (`opt_state/0/mu/blocks/w`) contains a
            match are moved.
        fraction: the largest of these leaves, until they make up this share of their bytes.
        path: for `disk`, a directory on the drive to use; the system's directory for temporary
            files by default (which may be kept in memory: name a real one).
        non_blocking: return at once. The first use of a leaf waits for it; the memory it came from
            is released when it has arrived.
        donate: whether the moved leaves of `state` are given away: touching it afterwards raises
            `StateConsumedError`. With `False` both copies stay.
        observer: is called with each event, the tier and the paths that it is about: `copy` (it
            begins), `done` (the copies are there; not where nobody waits), `release` (of what was
            copied). For progress, and for tests.

    Returns:
        The state with these leaves in their new tier. Leaves that were not moved are shared.

    Raises:
        PlacementError: a value is out of range, or the disk cannot be written; `state` is whole.
        StateConsumedError: the state was given away.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> state = fz.init(model, optax.adam(1e-3), fz.Plan(data=1))
        >>> state = fz.offload(state, "opt_state", to="host")
        >>> fz.placement(state).bytes_per_device["opt_state"]
        0
        >>> state = fz.reload(state)

    Source: names after DeepSpeed's `engine.offload_states(include=...)`.
    """
    if to not in (HOST, DISK):
        raise PlacementError(f"offload: to={to!r}: expected 'host' or 'disk'")
    how = How("offload", path, non_blocking, donate, observer, where, fraction)
    return _move(state, include, to, how)


def reload(
    state: TrainState,
    include: str | Iterable[str] | None = None,
    *,
    where: str | None = None,
    non_blocking: bool = False,
    donate: bool = True,
    observer: Observer | None = None,
) -> TrainState:
    """Moves leaves of a state back to their devices.

    Args:
        state: the state.
        include: what to move; everything that is parked by default. See `offload`.
        where: as for `offload`.
        non_blocking: as for `offload`.
        donate: as for `offload`; space on disk goes with the handle of the leaf.
        observer: as for `offload`.

    Returns:
        The state with these leaves on the device, in the sharding they had.

    Raises:
        PlacementError: a file is damaged or gone; `state` is as it was.
        StateConsumedError: the state was given away.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> state = fz.init(model, optax.adam(1e-3), fz.Plan(data=1))
        >>> parked = fz.offload(state, "opt_state", to="host")
        >>> state = fz.reload(parked, where="mu")
        >>> fz.placement(state).bytes_per_device["opt_state"]
        64
    """
    how = How("reload", None, non_blocking, donate, observer, where)
    return _move(state, include, DEVICE, how)


def fields_meant(word: str, state: TrainState | None = None) -> tuple[str, ...]:
    """The state's fields that a word stands for."""
    known = _FIELDS.get(_WORDS.get(word, word)) if isinstance(word, str) else None
    if known is None:
        words = [*_FIELDS, *_WORDS]
        raise PlacementError(f"include: {word!r} is no field of a state: expected any of {words}")
    if state is None:
        return known[0]
    return next((x for x in known if any(getattr(state, name) is not None for name in x)), known[0])


# Event, tier, paths.
Observer = Callable[[str, str, tuple[str, ...]], None]


@dataclass(frozen=True)
class How:
    """What all moves of a call have in common; arguments as for `offload`."""

    operation: str
    path: str | os.PathLike[str] | None
    non_blocking: bool
    donate: bool
    observer: Observer | None
    where: str | None = None
    fraction: float = 1.0


def _move(state: TrainState, include: str | Iterable[str] | None, to: str, how: How) -> TrainState:
    require_state(state, how.operation)
    several = isinstance(include, Iterable) and not isinstance(include, str)
    words: Iterable[Any] = include if several else (include,)  # type: ignore[assignment]
    words = CLASSES if include is None else words
    fields = {name for word in words for name in fields_meant(word, state)}
    return move_fields(state, [x for x in CLASSES if x in fields], to, how)


def move_fields(state: TrainState, fields: Sequence[str], to: str, how: How) -> TrainState:
    operation, fraction = how.operation, how.fraction
    require_alive(state, operation)
    require_arrays(state, operation)
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise PlacementError(f"{operation}: fraction={fraction!r}: expected a share from 0 to 1")
    trees = {name: getattr(state, name) for name in fields}
    names = [name for name, _ in named_leaves(trees)]
    leaves, treedef = jax.tree.flatten(trees)
    chosen = _chosen(names, leaves, how)
    move = _Move(names, leaves, to, how)
    try:
        move.run(chosen)
    except PlacementError as error:
        # Complete: what was moved is where it was going, everything else where it was.
        error.state = _with_leaves(state, treedef, leaves)
        raise
    return _with_leaves(state, treedef, leaves)


def _with_leaves(state: TrainState, treedef: Any, leaves: Sequence[Leaf]) -> TrainState:
    """A state with some fields' leaves where they are by now."""
    new = dataclasses.replace(state, **jax.tree.unflatten(treedef, leaves))
    inherit(state, new)
    return new


def _chosen(names: Sequence[str], leaves: Sequence[Leaf], how: How) -> list[int]:
    """Indices of the leaves that a call is about, wherever they are now; the largest first."""
    try:
        pattern = re.compile(how.where or "")
        pattern.search("")
    except (re.error, TypeError) as error:
        raise PlacementError(
            f"{how.operation}: where={how.where!r}: expected a regular expression: {error}"
        ) from error
    # Typed random keys are a few bytes, and no array that could be copied by its bytes.
    found = {
        name: i
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        if is_plain(leaf) and pattern.search(name)
    }
    if how.where and not found and names:
        raise PlacementError(
            f"{how.operation}: where={how.where!r} is found in no path of what include= names;"
            f" there are {list(names)[:8]}"
        )
    sizes = {name: device_bytes(leaves[i]) for name, i in found.items()}
    return [found[name] for name in largest(sizes, how.fraction)]


@dataclass(frozen=True)
class _Move:
    """One call: replaces entries of `leaves` by copies in another tier."""

    names: Sequence[str]
    leaves: list[Leaf]
    to: str
    how: How

    def _tell(self, event: str, which: Iterable[int]) -> None:
        if self.how.observer is not None:
            self.how.observer(event, self.to, tuple(self.names[i] for i in which))

    def run(self, chosen: Sequence[int]) -> None:
        leaves, to = self.leaves, self.to
        for i in chosen:
            if isinstance(leaves[i], Arriving) and not (
                self.how.non_blocking and leaves[i].to == to
            ):
                leaves[i] = settled_or_back(leaves[i])
        moved = [i for i in chosen if not lies_in(leaves[i], to)]
        slow = [i for i in moved if to == DISK or any(map(_is_on_disk, slabs_of(leaves[i])))]
        for batch in _batches([i for i in moved if i not in set(slow)], leaves):
            self._copy(batch)
        if slow:
            self._through_disk(slow)

    def _goal(self, slab: jax.Array) -> Any:
        """The sharding of an array where it goes."""
        return (host_sharding if self.to == HOST else on_device)(slab.sharding)

    def _copy(self, batch: Sequence[int]) -> None:
        """Between device and host memory."""
        old = [self.leaves[i] for i in batch]
        flat = [slab for leaf in old for slab in slabs_of(leaf)]
        self._tell("copy", batch)
        try:
            copies = jax.device_put(flat, [self._goal(slab) for slab in flat])
            if not self.how.non_blocking:
                jax.block_until_ready(copies)
                self._tell("done", batch)
        except jax.errors.JaxRuntimeError as error:
            size = sum(map(leaf_bytes, flat))
            raise PlacementError(
                f"{self.how.operation}: could not copy {self.names[batch[0]]} and others, {size:,}"
                f" bytes in all, to {self.to} memory: {error}. This error's .state is complete:"
                " what was moved before is there, everything else is where it was"
            ) from error
        self._replace(batch, made_of_slabs(old, copies, self.to))
        if self.how.donate:
            # The runtime keeps memory for as long as a copy reads it.
            self._release(batch, old, old)

    def _through_disk(self, moved: Sequence[int]) -> None:
        """To or from the disk. Sources are released when all has arrived: a disk may be full."""
        old = [self.leaves[i] for i in moved]
        flat = [(self.names[i], slab) for i, leaf in zip(moved, old, strict=True)
                for slab in slabs_of(leaf)]  # fmt: skip
        # Of a leaf that a failing disk has not taken as a whole, some slabs are there already.
        goes = [k for k, (_, slab) in enumerate(flat) if _is_on_disk(slab) != (self.to == DISK)]
        out, names = [flat[k][1] for k in goes], [flat[k][0] for k in goes]
        future: Future[list[Any]]
        self._tell("copy", moved)
        if self.to == DISK:
            future = disk.write_async(out, self.how.path or tempfile.gettempdir(), names)
        else:
            future = disk.read_async(out, HOST_KIND if self.to == HOST else DEVICE)

        def arranged(new: list[Any]) -> list[Leaf]:
            slabs = [slab for _, slab in flat]
            for k, slab in enumerate(slabs):
                if not _is_on_disk(slab) and self.to != DISK:
                    slabs[k] = jax.device_put(slab, self._goal(slab))
            for k, slab in zip(goes, new, strict=True):
                slabs[k] = slab
            found = made_of_slabs(old, slabs, self.to)
            if self.to == DISK and self.how.non_blocking and self.how.donate:
                _delete(out)  # who waits may wake before the future's callback has run
            return found

        transfer = Transfer(future, arranged)
        if not self.how.non_blocking:
            self._replace(moved, jax.block_until_ready(transfer.settled()))
            self._tell("done", moved)
            if self.how.donate:
                self._release(moved, old, out)
            return
        self._replace(moved, [Arriving(leaf, self.to, transfer, k) for k, leaf in enumerate(old)])
        if self.how.donate:
            for leaf in old:
                GIVEN.note(leaf, self.how.operation)
            future.add_done_callback(lambda done: _delete(() if done.exception() else out))

    def _replace(self, where: Sequence[int], new: Sequence[Leaf]) -> None:
        for i, leaf in zip(where, new, strict=True):
            self.leaves[i] = leaf

    def _release(self, which: Iterable[int], old: Sequence[Leaf], memory: Sequence[Any]) -> None:
        self._tell("release", which)
        for leaf in old:
            GIVEN.note(leaf, self.how.operation)
        _delete(memory)


def _is_on_disk(slab: Any) -> bool:
    return isinstance(slab, DiskArray)


def settled_or_back(leaf: Leaf) -> Leaf:
    """A leaf; one that was on its way is where it came from if it could not get there."""
    try:
        return settled(leaf)
    except PlacementError:
        GIVEN.forget(leaf.source)
        return leaf.source


def _delete(leaves: Iterable[Leaf]) -> None:
    for leaf in leaves:
        leaf.delete()


def _batches(order: Iterable[int], leaves: Sequence[Leaf]) -> Iterator[list[int]]:
    """Leaves that travel together: of at most `BATCH_BYTES`, or one that is larger."""
    batch: list[int] = []
    size = 0
    for i in order:
        own = leaf_bytes(leaves[i])
        if batch and size + own > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(i)
        size += own
    if batch:
        yield batch
