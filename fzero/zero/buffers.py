"""The devices' values of a buffer become one, as its model declared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fzero.axes import AXES
from fzero.links import Layer, Stack
from fzero.sharding.buffers import declared_reduction, has_mean
from fzero.sharding.group import Group
from fzero.sharding.split import wide
from fzero.tree import PyTree, is_floating, map_named
from fzero.zero.collectives import summed


def agreed_buffers(
    layers: Iterable[Layer | Stack], old: PyTree, new: PyTree, group: Group
) -> PyTree:
    """One value of each buffer for all devices.

    Args:
        layers: whose buffers.
        old: before the step, the same on all devices.
        new: after it, each device's own.
        group: the devices.
    """
    # What a loss computes in float32 is kept in the buffer's own precision. (A constant comes out
    # of a traced program as a number of Python.)
    new = jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype if is_floating(a) else None), old, new)
    size = group.row_shares
    if size == 1:
        return new
    how = jax.tree.leaves(_reductions(layers, new))
    leaves, treedef = jax.tree.flatten(new)
    before = jax.tree.leaves(old)
    added = {
        i: wide(leaf) if how[i] == "mean" else leaf - before[i]
        for i, leaf in enumerate(leaves)
        if how[i] in ("mean", "sum")
    }
    for i, total in zip(added, summed(list(added.values()), group), strict=True):
        mean = how[i] == "mean"
        leaves[i] = (total / size).astype(leaves[i].dtype) if mean else before[i] + total
    done = [
        leaf if i in added else _largest(leaf, group).astype(leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, done)


def _largest(leaf: jax.Array, group: Group) -> jax.Array:
    """The largest of all devices' values; any of them, where all are the same.

    Of complex numbers, of both parts. NaN where one device has it.
    """
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(_largest(leaf.real, group), _largest(leaf.imag, group))
    number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
    whole = PartitionSpec()
    run = group.on_shards(lambda number: jax.lax.pmax(number, AXES), (whole,), whole)
    largest: jax.Array = run(number)
    if is_floating(leaf):  # a maximum over devices may leave NaN out
        ill = run(jnp.isnan(leaf).astype(jnp.int32))
        largest = jnp.where(ill > 0, jnp.asarray(jnp.nan, leaf.dtype), largest)
    return largest


def _reductions(layers: Iterable[Layer | Stack], buffers: PyTree) -> PyTree:
    """A word of `REDUCTIONS` for each buffer."""
    by_name = {layer.name: layer for layer in layers}
    if "" in by_name:
        return _of_layer(by_name[""], buffers)
    return {name: _of_layer(by_name[name], tree) for name, tree in buffers.items()}


def _of_layer(layer: Layer | Stack, buffers: PyTree) -> PyTree:
    def reduction(name: str, leaf: Any) -> str:
        declared = declared_reduction(layer, name)
        if has_mean(leaf):
            return declared or "mean"
        return "same" if declared in (None, "mean") else declared

    return map_named(reduction, buffers)
