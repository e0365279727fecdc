"""Moments in 8 or 16 bits between steps: a wrapper around any optax transformation.

What is kept of a float32 are its highest bits. Adam's second moment changes by 0.1 % a step, less
than such a number's precision, so rounding to the nearest would keep it where it is; it is rounded
up or down by chance, with the float32's value on average. That chance is a hash of the step and of
what was kept before: the same in every sharding, and for a layer of a stack as for a layer alone.

8 bits are 3 of a mantissa and an exponent below the largest of the row (the last dim), whose own is
kept beside: 16 octaves with a sign, 32 in a row without a negative number (second moments). What is
kept lies on a grid that does not move when the largest changes.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fzero.optimizer.layers import with_extra_args
from fzero.tree import PyTree


# Of a float32: bits of the whole mantissa, and those that 8 bits keep of it.
_MANTISSA, _KEPT = 23, 3
_CUT = _MANTISSA - _KEPT
# Shorter rows stay as they are: the row's exponent would cost more than is saved, and what layers
# have as a single number each has only as many elements as a stack has layers.
SHORTEST_ROW = 64
Dtype = Literal["int8", "bf16"]


class SmallMomentsState(NamedTuple):
    """State of `small_moments`.

    Attributes:
        count: int32, steps taken.
        small: the inner state; of the leaves that are kept small what is kept.
        scales: for 8 bits, each row's largest exponent, doubled, and whether it has signs.
    """

    count: Any
    small: PyTree
    scales: PyTree


def small_moments(
    tx: optax.GradientTransformation, dtype: Dtype = "int8"
) -> optax.GradientTransformationExtraArgs:
    """A transformation whose state is kept in fewer bits between steps.

    It computes in float32 as ever; what it keeps is rounded at the end of each step, up or down by
    a hash of the step and of what was kept before: every sharding gives the same numbers. Small are
    all float32 leaves with at least 64 elements along the last dim; others stay as they are.

    Precision: `bf16` has 8 bits of mantissa; `int8` has 4 (a relative step of 6 to 12 %, exact on
    average), for values down to 2**-15 of the largest in their row along the last dim, and 2**-31
    in rows without negative numbers. Smaller ones become that; in rows with signs that or 0, so
    that they too are right on average. Wrap the part of a chain that has
    the moments, not one that keeps weights (`fz.lookahead`).

    Args:
        tx: any transformation, such as `optax.scale_by_adam()` or `optax.adamw(1e-3)`.
        dtype: `int8` (1 byte an element and 2 a row) or `bf16` (2 bytes an element).

    Raises:
        ValueError: another dtype.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> tx, params = small_moments(optax.adam(0.1)), {"w": jnp.ones((4, 256))}
        >>> state = tx.init(params)
        >>> {leaf.dtype.name for leaf in jax.tree.leaves(state.small[0].mu)}
        {'uint8'}
        >>> updates, state = tx.update({"w": jnp.ones((4, 256))}, state, params)
        >>> round(float(updates["w"][0, 0]), 4)
        -0.1

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021 (the idea; grid,
        rounding and rows are others).
    """
    if dtype not in _CODECS:
        raise ValueError(f"small_moments: dtype={dtype!r}: expected one of {list(_CODECS)}")
    inner = with_extra_args(tx, "small_moments")
    encode, decode, none = _CODECS[dtype]

    def kept(state: PyTree, old: PyTree, count: jax.Array) -> SmallMomentsState:
        leaves = jax.tree.leaves(state)
        tree: Any = jax.tree.structure(state)
        before = [None] * len(leaves) if old is None else jax.tree.leaves(old)
        pairs = [
            encode(leaf, _noise(leaf, was, count)) if _is_small(leaf, was) else (leaf, none)
            for leaf, was in zip(leaves, before, strict=True)
        ]
        small = [kept for kept, _ in pairs]
        scales = [None if scale is None else jnp.asarray(scale) for _, scale in pairs]
        return SmallMomentsState(count, tree.unflatten(small), tree.unflatten(scales))

    def init(params: PyTree) -> SmallMomentsState:
        return kept(inner.init(params), None, jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: SmallMomentsState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, SmallMomentsState]:
        leaves = jax.tree.leaves(state.small)
        tree: Any = jax.tree.structure(state.small)
        scales = tree.flatten_up_to(state.scales)
        shapes = jax.tree.leaves(jax.eval_shape(inner.init, updates if params is None else params))
        wide = [
            decode(leaf, scale) if _is_small(to, leaf) else leaf
            for leaf, scale, to in zip(leaves, scales, shapes, strict=True)
        ]
        updates, new = inner.update(updates, tree.unflatten(wide), params, **extra)
        return updates, kept(new, state.small, optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_small(leaf: Any, kept: Any) -> bool:
    """Whether a leaf of the inner state, in its own dtype, is kept small.

    Args:
        leaf: the leaf, or its shape.
        kept: what is kept of it; `None` where that has to be decided. (What visits a device in
            slabs is not asked for its shape again.)
    """
    if leaf.dtype != jnp.float32:
        return False
    if kept is not None:
        return bool(kept.dtype != leaf.dtype)
    return bool(leaf.shape and leaf.shape[-1] >= SHORTEST_ROW)


def _noise(leaf: Any, old: Any, count: jax.Array) -> jax.Array:
    """32 random bits for each element, of the step and of what was kept before."""
    # Not of the position, which a layer has alone otherwise than in a stack; nor of the value
    # itself, of which plans that round otherwise have other low bits.
    if old is None:
        before = jnp.zeros_like(leaf, jnp.uint32)
    elif old.dtype == jnp.uint8:
        before = old.astype(jnp.uint32)
    else:
        before = jax.lax.bitcast_convert_type(old, jnp.uint16).astype(jnp.uint32)
    # Odd constants of Knuth's and of xxHash, and a mixer of Wellons's (triple32, shortened).
    start = count.astype(jnp.uint32) * np.uint32(0x85EBCA77) + np.uint32(leaf.shape[-1])
    found = (before * np.uint32(0x9E3779B1)) ^ start
    found = (found ^ (found >> 15)) * np.uint32(0x2C1B3C6D)
    found = (found ^ (found >> 12)) * np.uint32(0x297A2D39)
    return found ^ (found >> 15)


def _encode_bf16(leaf: jax.Array, noise: jax.Array) -> tuple[jax.Array, None]:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    up = ((bits + (noise >> 16)) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(up, jnp.bfloat16)
    # An infinity would become NaN, and NaN might become something else.
    return jnp.where(jnp.isfinite(leaf), rounded, leaf.astype(jnp.bfloat16)), None


def _decode_bf16(leaf: jax.Array, _: None) -> jax.Array:
    return leaf.astype(jnp.float32)


def _encode_int8(leaf: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = jax.lax.bitcast_convert_type(leaf, jnp.int32)
    size, negative = bits & 0x7FFFFFFF, bits < 0
    largest = jnp.max(size, axis=-1, keepdims=True)
    signed = jnp.max((negative & (size > 0)).astype(jnp.int32), axis=-1, keepdims=True)
    exponent = largest >> _MANTISSA  # 255: something in the row is not finite
    keys = (size + (noise >> (32 - _CUT)).astype(jnp.int32)) >> _CUT
    code = jnp.clip(keys - _zero(exponent, signed), 1, _most(signed))
    # Below the least code: that or 0, by chance. Were it always that, a value that fades would stay
    # there, and its parameter drift for ever. (Second moments keep it: they are divided by.)
    least = _least(exponent, signed)
    chance = (noise >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    dropped = (signed == 1) & (jnp.abs(leaf) < least) & (chance * least >= jnp.abs(leaf))
    code = jnp.where((size == 0) | dropped, 0, code)
    code = code | jnp.where(negative & (code > 0), 128, 0)
    return code.astype(jnp.uint8), (exponent * 2 + signed).astype(jnp.int16)


def _decode_int8(leaf: jax.Array, scale: jax.Array) -> jax.Array:
    both, code = scale.astype(jnp.int32), leaf.astype(jnp.int32)
    exponent, signed = both >> 1, both & 1
    negative = (code >= 128) & (signed == 1)
    code = jnp.where(negative, code - 128, code)
    keys = jnp.maximum(code + _zero(exponent, signed), 0)
    size = jax.lax.bitcast_convert_type(keys << _CUT, jnp.float32)
    size = jnp.where(exponent == 255, jnp.float32(jnp.nan), jnp.where(code == 0, 0.0, size))
    return jnp.where(negative, -size, size)


def _least(exponent: jax.Array, signed: jax.Array) -> jax.Array:
    """The least value that is not 0."""
    key = jnp.maximum(1 + _zero(exponent, signed), 0)
    return jax.lax.bitcast_convert_type(key << _CUT, jnp.float32)


def _most(signed: jax.Array) -> jax.Array:
    """The largest code without its sign."""
    return jnp.where(signed == 1, 127, 255)


def _zero(exponent: jax.Array, signed: jax.Array) -> jax.Array:
    """What is between codes and the highest bits of floats: the largest code is twice the exponent.

    (The largest of a row may be rounded up to the next power of two.)
    """
    return ((exponent + 1) << _KEPT) - _most(signed)


# How a leaf is kept, how it is read, and what stands for the scale of one that stays as it is.
_CODECS: dict[str, Any] = {
    "int8": (_encode_int8, _decode_int8, np.zeros((), np.int16)),
    "bf16": (_encode_bf16, _decode_bf16, None),
}
