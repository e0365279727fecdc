"""The compute copy: parameters cast once, and which leaf was cast from which.

`TrainState.compute` is derived: `params` is the value. A state is a pytree that anybody may take
apart and put together, so a compute leaf is believed only while it is known, by the identity of
both arrays, to be cast from the very parameter beside it. Whoever makes such a pair says so
(`pair`); where nobody did, the copy is made anew, which is never wrong and costs one cast.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from fzero.errors import StateError
from fzero.precision import round_to
from fzero.processes import in_turn
from fzero.sharding.park import unpark
from fzero.sharding.relayout import place
from fzero.state.array_facts import ByIdentity
from fzero.storage.tiers import DEVICE, is_handle, settled, tier_of
from fzero.tree import PyTree, is_traced, named_leaves, same_structure, shape_at


# Of a compute leaf: the parameter that it was cast from.
_PAIRS: ByIdentity[weakref.ref[Any]] = ByIdentity()


def beside(params: PyTree, compute: PyTree) -> PyTree:
    """The parameters that have a compute leaf: frozen ones have none, passes read them as kept."""
    return jax.tree.map(lambda own, copy: None if copy is None else own, params, compute)


def pair(params: PyTree, compute: PyTree) -> None:
    """Notes that each compute leaf is cast from the parameter beside it; nothing without a copy."""
    if compute is None:
        return
    sources = jax.tree.leaves(beside(params, compute))
    for source, copy in zip(sources, jax.tree.leaves(compute), strict=True):
        _PAIRS.note(copy, weakref.ref(source))


def is_pair(source: Any, copy: Any) -> bool:
    """Whether a compute leaf is known to be cast from a parameter."""
    known = _PAIRS.get(copy)
    return known is not None and known() is source


def is_current(params: PyTree, compute: PyTree) -> bool:
    """Whether every compute leaf is known to be cast from the parameter beside it."""
    sources, copies = jax.tree.leaves(beside(params, compute)), jax.tree.leaves(compute)
    return len(sources) == len(copies) and all(map(is_pair, sources, copies))


def require_copy(params: PyTree, old: PyTree, new: PyTree) -> None:
    """Refuses an edit of a compute copy by itself, which steps would cast away without a word.

    Raises:
        StateError: a leaf is neither the old copy's nor cast from the parameter beside it.
    """
    try:
        sources = jax.tree.leaves(beside(params, new))
    except ValueError:  # another tree, which a step refuses
        return
    before = set(map(id, jax.tree.leaves(old)))
    for source, (path, leaf) in zip(sources, named_leaves(new), strict=True):
        if isinstance(leaf, jax.Array) and id(leaf) not in before and not is_pair(source, leaf):
            raise StateError(
                f"TrainState.replace: compute/{path} is edited by itself: steps cast it anew from"
                " params, which are what is trained; edit these: state.replace(params=...)"
            )


def inherit(old: Any, new: Any) -> None:
    """Notes that leaves of a state which were only moved are pairs where they were before."""
    if old.compute is None or new.compute is None:
        return
    before, after = (
        zip(jax.tree.leaves(beside(x.params, x.compute)), jax.tree.leaves(x.compute), strict=True)
        for x in (old, new)
    )
    for was, now in zip(before, after, strict=True):
        if is_pair(*was):
            pair([now[0]], [now[1]])


def settled_state(state: Any) -> Any:
    """A state, after waiting for leaves that are on their way: pairs stay pairs."""
    new = settled(state)
    if new is not state:
        inherit(state, new)
    return new


def recast(params: PyTree, like: PyTree) -> PyTree:
    """A new compute copy, and the note that it is one.

    Args:
        params: kept parameters, in any tier; those that are parked stay there.
        like: shape, dtype and sharding of each compute leaf (arrays or `jax.ShapeDtypeStruct`s).
    """
    sources, treedef = jax.tree.flatten(beside(params, like))
    targets = [shape_at(to, to.sharding) for to in jax.tree.leaves(like)]
    # One program for each mesh; a parked leaf visits the device alone.
    together: dict[Any, list[int]] = {}
    for i, (source, to) in enumerate(zip(sources, targets, strict=True)):
        parked = tier_of(source) != DEVICE
        where = i if parked else frozenset(to.sharding.device_set)
        together.setdefault(where, []).append(i)
    copies: list[Any] = [None] * len(sources)
    for numbers in together.values():
        visiting = [unpark(sources[i]) for i in numbers]
        made = _caster(tuple(targets[i] for i in numbers))(visiting)
        for i, visitor, copy in zip(numbers, visiting, made, strict=True):
            copies[i] = copy
            if visitor is not sources[i]:
                visitor.delete()
    compute = jax.tree.unflatten(treedef, copies)
    pair(params, compute)
    return compute


@functools.lru_cache(maxsize=64)
def _caster(targets: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    def cast(sources: list[jax.Array]) -> list[jax.Array]:
        return [cast_like(x, to) for x, to in zip(sources, targets, strict=True)]

    devices = {device for to in targets for device in to.sharding.device_set}
    return in_turn(devices, jax.jit(cast, out_shardings=[to.sharding for to in targets]))


def put_back(compute: PyTree, like: PyTree) -> PyTree:
    """A compute copy where the plan keeps it; itself if it is there.

    The program of a user that edits parameters gives the copy in a sharding that jax chose. What is
    parked stays so: a step says that.
    """
    if not same_structure(compute, like):
        return compute
    leaves, targets = jax.tree.leaves(compute), jax.tree.leaves(like)

    def strays(leaf: Any, to: Any) -> bool:
        return (
            isinstance(leaf, jax.Array)
            and tier_of(leaf) == DEVICE
            and (leaf.shape, leaf.dtype) == (to.shape, to.dtype)
            and leaf.sharding != to.sharding
            and leaf.sharding.device_set == to.sharding.device_set
        )

    wrong = [strays(leaf, to) for leaf, to in zip(leaves, targets, strict=True)]
    if not any(wrong):
        return compute
    found = zip(leaves, targets, wrong, strict=True)
    back = [place(x, to.sharding) if away else x for x, to, away in found]
    return jax.tree.unflatten(jax.tree.structure(compute), back)


def cast_like(source: jax.Array, to: Any) -> jax.Array:
    """A kept parameter as its compute leaf: without padding, rounded (inside jit or not)."""
    if source.shape != to.shape:
        source = jax.lax.slice(source, (0,) * source.ndim, to.shape)
    return rounded(source, to.dtype)


def rounded(leaf: jax.Array, dtype: Any) -> jax.Array:
    """A parameter in its compute dtype, as an array of its own: a step gives both away."""
    return round_to(leaf, dtype) if leaf.dtype != dtype else jnp.copy(leaf)


def refreshed(params: PyTree, compute: PyTree) -> PyTree:
    """The compute copy of edited parameters, where it can be made at once; otherwise `compute`.

    (What cannot be cast here, because it is parked or lies on other devices, a step casts, or
    refuses by name.)
    """
    try:
        own = beside(params, compute)
    except ValueError:  # another tree
        return compute
    sources, copies = jax.tree.leaves(own), jax.tree.leaves(compute)
    if len(sources) != len(copies) or not all(map(_fits, sources, copies)):
        return compute
    if is_traced((*sources, *copies)):
        return jax.tree.map(cast_like, own, compute)
    same = all(
        x.sharding.device_set == to.sharding.device_set
        for x, to in zip(sources, copies, strict=True)
    )
    return recast(params, compute) if same and not is_current(params, compute) else compute


def _fits(source: Any, to: Any) -> bool:
    """Whether a leaf is an array on the device from which a compute leaf can be cast."""
    if is_handle(source) or is_handle(to) or not isinstance(source, jax.Array):
        return False
    if not isinstance(to, jax.Array):
        return False
    if source.ndim != to.ndim or any(a < b for a, b in zip(source.shape, to.shape, strict=True)):
        return False
    traced = isinstance(source, jax.core.Tracer) or isinstance(to, jax.core.Tracer)
    return traced or (
        tier_of(source) == tier_of(to) == DEVICE and isinstance(to.sharding, NamedSharding)
    )
