"""Attention whose sequence may be divided over a mesh axis: a ring, or an exchange of heads."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fzero.axes import CONTEXT, TENSOR, free_axes, rows_axis
from fzero.errors import PlanError
from fzero.exchange.blocks import joined_heads
from fzero.exchange.cudnn import fused_attention
from fzero.exchange.ring import Ring, ring_attention


EXCHANGES = ("auto", "ring", "heads")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | None = None,
    segments: jax.Array | None = None,
    scale: float | jax.Array | None = None,
    exchange: str = "auto",
) -> jax.Array:
    """Softmax attention, of whole sequences wherever their parts are.

    In a step of `Plan(context=n)` the sequence is divided over the devices of that axis, and keys
    and values (or heads) are exchanged; anywhere else this is attention and nothing more. The
    numbers are the same but for the order of sums. Sums are float32.

    Args:
        q: queries `(batch, length, heads, features)`.
        k: keys `(batch, length, groups, features)`; `heads` is a multiple of `groups`, each of
            which serves that many neighbouring heads.
        v: values `(batch, length, groups, features of the result)`.
        causal: whether a position sees none behind it.
        window: how many positions one sees to each side (with `causal`: before it), itself not
            counted; `None` for all.
        segments: int or bool `(batch, length)`, the document of each position: one sees its own
            only.
        scale: factor of the scores; one over the root of `features` by default. One that is traced,
            as one that is learned, multiplies the queries, and is rounded with them.
        exchange: with `context`: `ring`, keys and values go round while they are computed with
            (causal work balanced); `heads`, an all-to-all gives each device all positions of some
            heads; `auto`, the one that sends less, of those that are possible.

    Returns:
        `(batch, length, heads, features of the result)` in the dtype of `q`.

    Raises:
        PlanError: shapes do not fit each other, the axis does not divide what it has to, or
            `scale` is no single number.

    Example:
        >>> import jax.numpy as jnp, fzero as fz
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> fz.attention(x, x, x, causal=True).shape
        (1, 4, 2, 8)

    Source: Ring Attention, arXiv:2310.01889; DeepSpeed-Ulysses, arXiv:2309.14509, section 3.
    """
    _check(q, k, v, segments, window, exchange)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if jnp.ndim(scale):
        raise PlanError(f"attention: scale has shape {jnp.shape(scale)}: expected one number")
    if isinstance(scale, jax.core.Tracer):  # learned, say; kernels and exchanges know numbers alone
        q, scale = (q.astype(scale.dtype) * scale).astype(q.dtype), 1.0
    scale = float(scale)
    if segments is not None and segments.dtype == jnp.bool_:
        segments = segments.astype(jnp.int32)
    window = None if window is not None and window >= q.shape[1] - 1 else window
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    axes = free_axes()
    size = axes.get(CONTEXT, 1)
    ring = Ring(CONTEXT, size, causal, window, scale)
    if size == 1:
        return joined_heads(_alone(q, k, v, segments, ring))
    ways = axes.get(TENSOR, 1)
    heads = TENSOR if ways > 1 and not k.shape[2] % ways else None
    groups = k.shape[2] // (ways if heads else 1)
    how = _exchange(exchange, q, groups, ring)
    run = partial(ring_attention if how == "ring" else _by_heads, ring=ring)
    batch = rows_axis(q.shape[0])
    split, rows = PartitionSpec(batch, CONTEXT, heads), PartitionSpec(batch, CONTEXT)
    out = jax.shard_map(
        run, in_specs=(split, split, split, None if segments is None else rows),
        out_specs=split, axis_names=set(axes), check_vma=False,
    )(q, k, v, segments)  # fmt: skip
    return joined_heads(out)


def divided_sequences() -> bool:
    """Whether what is traced here belongs to a step that divides sequences over devices."""
    return CONTEXT in free_axes()


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, window: int | None,
    exchange: str,
) -> None:  # fmt: skip
    fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    fits = fits and 0 not in (*q.shape, *k.shape, *v.shape)
    if not fits or k.shape[2] != v.shape[2] or q.shape[2] % k.shape[2] or q.shape[3] != k.shape[3]:
        raise PlanError(
            "attention: expected q (batch, length, heads, features), k and v (batch, length,"
            " groups, ...), no size of them 0, with heads a multiple of groups; got"
            f" {q.shape}, {k.shape}, {v.shape}"
        )
    if segments is not None and segments.shape != q.shape[:2]:
        raise PlanError(
            f"attention: segments are {segments.shape}: expected (batch, length) = {q.shape[:2]}"
        )
    if window is not None and window < 0:
        raise PlanError(f"attention: window={window}: expected at least 0, or None")
    if exchange not in EXCHANGES:
        raise PlanError(f"attention: exchange={exchange!r}: expected one of {list(EXCHANGES)}")


def _exchange(wanted: str, q: jax.Array, groups: int, ring: Ring) -> str:
    """`ring` or `heads`, whichever is asked for or sends less."""
    length, size = q.shape[1], ring.size
    chunks = 2 * size if ring.zigzag else size
    can = {"ring": not length % chunks, "heads": not length % size and not groups % size}
    if length % size or not (can["ring"] or can["heads"]) or not can.get(wanted, True):
        raise PlanError(
            f"attention: {ring.axis}={size} with {length} positions and {groups} groups of heads:"
            f" exchange='ring' takes positions that divide by {chunks}, 'heads' positions and"
            f" groups that divide by {size}; pad the sequence, choose another size of the axis, or"
            f" the other exchange; for a model that can do none of it leave {ring.axis} out"
        )
    if wanted != "auto":
        return wanted
    if not (can["ring"] and can["heads"]):
        return "ring" if can["ring"] else "heads"
    # Elements for each position, group and feature: keys and values in each round (and once more
    # to be dealt out, with queries and results), against queries, keys, values and results once.
    share = q.shape[3]
    rounds = len(ring.rounds(length // size)) - 1
    round_trip = 2 * rounds + (2 * share + 2 if ring.zigzag else 0)
    return "ring" if round_trip <= (2 * share + 2) * (size - 1) / size else "heads"


def _by_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, ring: Ring
) -> jax.Array:
    def all_positions(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, ring.axis, split_axis=2, concat_axis=1, tiled=True)

    if segments is not None:
        segments = jax.lax.all_gather(segments, ring.axis, axis=1, tiled=True)
    out = _alone(all_positions(q), all_positions(k), all_positions(v), segments, ring)
    return jax.lax.all_to_all(out, ring.axis, split_axis=1, concat_axis=2, tiled=True)


def _alone(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, ring: Ring
) -> jax.Array:
    """Attention of a sequence that is all here; of scores, nothing is kept for a backward pass."""
    heads, alone = q.reshape(*q.shape[:2], -1, q.shape[-1]), segments is None
    out = fused_attention(
        heads, k, v, causal=ring.causal, window=ring.window if alone else None, scale=ring.scale,
        mask=None if alone else _seen(q, k, segments, causal=False, window=ring.window),
    )  # fmt: skip
    if out is not None:
        return out.reshape(*q.shape[:-1], -1)

    @partial(jax.checkpoint, prevent_cse=False)
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqghf,bkgf->bghqk", q, k, preferred_element_type=jnp.float32)
        seen = _seen(q, k, segments, causal=ring.causal, window=ring.window)[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores * ring.scale, -jnp.inf))
        given = jnp.einsum("bghqk,bkgf->bqghf", weights, v.astype(jnp.float32))
        return given.astype(q.dtype)

    return run(q, k, v)


def _seen(
    q: jax.Array, k: jax.Array, segments: jax.Array | None, *, causal: bool, window: int | None
) -> jax.Array:
    """Which keys each query sees, `(batch or 1, 1, queries, keys)`."""
    far = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    seen = far >= 0 if causal else jnp.ones_like(far, bool)
    seen &= True if window is None else jnp.abs(far) <= window
    if segments is None:
        return seen[None, None]
    return seen & (segments[:, None, :, None] == segments[:, None, None, :])
