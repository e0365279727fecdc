"""The two collectives of ZeRO: gather a leaf's shards, reduce-scatter its gradient.

Used inside `jax.shard_map` with the `replica` and `data` axes manual. Hybrid sharding reduces
within a group first, so that only a shard crosses groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fzero.axes import AXES, DATA, FURTHER, REPLICA
from fzero.precision import round_to
from fzero.sharding.group import Group
from fzero.sharding.split import Split
from fzero.tree import PyTree
from fzero.zero.bits import add_in_order, as_bits, from_bits
from fzero.zero.quantize import decode, encode


def gather(shard: jax.Array, split: Split, group: Group, again: bool = False) -> jax.Array:
    """A whole leaf (or one layer of a stack) from its shards.

    `again` marks the gather of a backward pass: a unit dim makes it another operation than the
    forward pass's, which the CPU compiler would otherwise reuse (it drops barriers before its last
    search for common subexpressions) and so keep the gathered leaf alive.
    """
    dim = split_dim(shard, split)
    if dim is None or split.shards == 1:
        return shard
    return split.logical(_gather_bits(shard, group, split.over, dim, again), dim)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def _gather_bits(
    shard: jax.Array, group: Group, over: tuple[str, ...], dim: int, again: bool
) -> jax.Array:
    return from_bits(_all_gather(as_bits(shard, group), over, dim, again), shard.dtype)


@_gather_bits.defjvp
def _gather_tangents(
    group: Group,
    over: tuple[str, ...],
    dim: int,
    again: bool,
    shard: tuple[jax.Array],
    tangent: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    # Integers have no derivative: one taken through the bits would be zero without a word.
    return _gather_bits(*shard, group, over, dim, again), _all_gather(*tangent, over, dim, again)


def gather_int8(shard: jax.Array, split: Split, dtype: Any, again: bool) -> jax.Array:
    """A whole leaf (or one layer of a stack) in `dtype`, its shards sent as 8-bit blocks.

    A device's own shard is seen through its bytes too, so that all have the same weights.

    Source: ZeRO++, arXiv:2306.10209, section 3.1 (qwZ).
    """
    dim = split_dim(shard, split)
    if dim is None or split.shards == 1:
        return round_to(shard, dtype)
    sent = _all_gather(encode(shard.reshape(1, -1)), split.over, 0, again)
    shards = round_to(decode(sent, shard.size), dtype).reshape(split.shards, *shard.shape)
    shape = list(shard.shape)
    shape[dim] *= split.shards
    return split.logical(jnp.moveaxis(shards, 0, dim).reshape(shape), dim)


def agreed_largest(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The largest of all shards' values, for each of several scalars that are not negative.

    As integers, of which floats that are not negative have the order: NaN is above all others,
    where a reduction of floats may drop it.
    """
    bits = jax.lax.bitcast_convert_type(jnp.stack(values), jnp.int32)
    found = jax.lax.bitcast_convert_type(jax.lax.pmax(bits, DATA), jnp.float32)
    return [found[i] for i in range(len(values))]


def secondary_shard(whole: jax.Array, split: Split, group: Group) -> jax.Array:
    """What this device keeps of a whole leaf between two passes, for its secondary group."""
    dim = split_dim(whole, split)
    assert dim is not None
    padded = split.store(whole, dim)
    length = padded.shape[dim] // group.secondary
    start = jax.lax.axis_index(DATA) % group.secondary * length
    return jax.lax.dynamic_slice_in_dim(padded, start, length, dim)


def gather_secondary(shard: jax.Array, split: Split, group: Group) -> jax.Array:
    """The whole leaf from `secondary_shard`, gathered within each secondary group.

    Source: ZeRO++, arXiv:2306.10209, section 3.2 (hpZ).
    """
    dim = split_dim(shard, split)
    assert dim is not None
    size = group.secondary
    neighbours = [list(range(at, at + size)) for at in range(0, group.data, size)]
    whole = jax.lax.all_gather(
        as_bits(shard, group), DATA, axis=dim, tiled=True, axis_index_groups=neighbours
    )
    return split.logical(from_bits(whole, shard.dtype), dim)


def split_dim(leaf: jax.Array, split: Split) -> int | None:
    """The dim that is split, of a leaf or of one layer of a stack."""
    one_layer = leaf.ndim == len(split.shape) - int(split.stacked)
    return split.layer_dim if one_layer else split.dim


def _all_gather(shard: jax.Array, over: tuple[str, ...], dim: int, again: bool) -> jax.Array:
    if not again:
        return jax.lax.all_gather(shard, over, axis=dim, tiled=True)
    # Behind the split dim, so that the layout of what is gathered stays what it is.
    shard = jnp.expand_dims(shard, dim + 1)
    return jnp.squeeze(jax.lax.all_gather(shard, over, axis=dim, tiled=True), dim + 1)


def dealt(grad: jax.Array, split: Split, group: Group) -> tuple[jax.Array, PartitionSpec]:
    """A split leaf's gradient as `reduce_scatter` takes it, and its spec over the further axes.

    Where it shall be split over some of these, XLA, which adds up over them, has to know which part
    of the sum each device needs: a dim of its own for each axis says so.
    """
    dim, inner = split_dim(grad, split), split.over[1:]
    assert dim is not None
    axes = [*split.spec(False, FURTHER, grad.ndim)]
    if not inner:
        return grad, PartitionSpec(*axes)
    axes += [None] * (grad.ndim - len(axes))
    # Whole first: XLA would carry the parts back into what made them, and ends the process where
    # that is a scatter (jax 0.10.2). A sum that is cut at once is sent in parts all the same.
    grad = split.store(group.pin(grad, PartitionSpec(*axes)), dim)
    sizes = dict(group.further)
    num = group.data, *(sizes[axis] for axis in inner), -1
    spec = PartitionSpec(*axes[:dim], None, *inner, None, *axes[dim + 1 :])
    return group.pin(grad.reshape(*grad.shape[:dim], *num, *grad.shape[dim + 1 :]), spec), spec


def reduce_scatter(grad: jax.Array, dim: int, split: Split, group: Group) -> jax.Array:
    """This device's shard of a gradient summed over devices.

    Args:
        grad: the gradient, `dealt`.
        dim: the dim of the leaf, or of the layer, that is split.
        split: how.
        group: the devices.
    """
    inner = len(split.over) - 1
    if inner:  # of whose dims this device has one row each
        grad = grad.reshape(*grad.shape[:dim], -1, *grad.shape[dim + inner + 2 :])
    else:
        grad = split.store(grad, dim)
    if group.data > 1:
        grad = _scatter_sum(grad, dim, group)
    return sum_over(grad, REPLICA, group.replica, group)


def all_reduce(value: jax.Array, group: Group) -> jax.Array:
    """The sum over all devices."""
    inner = sum_over(value, DATA, group.data, group)
    return sum_over(inner, REPLICA, group.replica, group)


def all_reduce_tree(
    tree: PyTree, group: Group, reduce: Callable[[jax.Array, Group], jax.Array] = all_reduce
) -> PyTree:
    """The sums over all devices of many small arrays, one collective per dtype."""
    leaves, treedef = jax.tree.flatten(tree)
    out: list[Any] = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        where = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in where])
        flat = reduce(flat, group)
        start = 0
        for i in where:
            out[i] = flat[start : start + leaves[i].size].reshape(leaves[i].shape)
            start += leaves[i].size
    return jax.tree.unflatten(treedef, out)


def summed(tree: PyTree, group: Group) -> PyTree:
    """The sums over all devices of arrays that no further axis divides."""
    whole = PartitionSpec()
    return group.on_shards(lambda tree: all_reduce_tree(tree, group), (whole,), whole)(tree)


def shard_index() -> jax.Array:
    """This device's number over both axes, replica-major; rows of a batch follow it."""
    return jax.lax.axis_index(AXES)


def sum_over(value: jax.Array, axis: str, size: int, group: Group) -> jax.Array:
    """The sum over one mesh axis."""
    if size == 1:
        return value
    if not group.ordered:
        return jax.lax.psum(value, axis)
    addends = jax.lax.all_gather(as_bits(value, group), axis)
    return add_in_order(from_bits(addends, value.dtype), size)


def _scatter_sum(grad: jax.Array, dim: int, group: Group) -> jax.Array:
    if not group.ordered:
        return jax.lax.psum_scatter(grad, DATA, scatter_dimension=dim, tiled=True)
    bits = as_bits(_for_each_device(grad, dim, group), group)
    addends = from_bits(jax.lax.all_to_all(bits, DATA, 0, 0), grad.dtype)
    return add_in_order(addends, group.data)


def _for_each_device(whole: jax.Array, dim: int, group: Group) -> jax.Array:
    """The shards of a whole leaf, one a row."""
    length = whole.shape[dim] // group.data
    shards = whole.reshape(*whole.shape[:dim], group.data, length, *whole.shape[dim + 1 :])
    return jnp.moveaxis(shards, dim, 0)
