"""Attention over a sequence that is divided over devices: keys and values go round in a ring.

Every device keeps its queries and sees all keys in turn, those of its neighbour next, while the
ones it has are computed with. What each block gives is put together by its log-sum-exp, so the
result is the softmax over all keys. The backward pass goes round once more, and the gradients of
keys and values travel with them; nothing of a block is kept but the log-sum-exp of its rows.

A causal sequence in `n` shards gives the first device 1 block to compute and the last one `n`. So
shards are cut in two first and dealt out again in a zigzag, device `i` having `i` and `2n - 1 - i`:
then each device computes two of the smaller blocks in each round (three in the first).

Source: Ring Attention, arXiv:2310.01889, section 3; the balanced order is that of Llama 3's
    context parallelism, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange.blocks import LOW, CudnnBlocks, Plain


@dataclass(frozen=True)
class Ring:
    """How shards of a sequence go round.

    Args:
        axis: the mesh axis, over which the `shard_map` at hand is manual.
        size: its devices.
        causal: whether a position sees none behind it.
        window: positions that one sees to each side, itself not counted; `None` for all.
        scale: factor of the scores.
    """

    axis: str
    size: int
    causal: bool
    window: int | None
    scale: float

    @property
    def zigzag(self) -> bool:
        """Whether shards are cut in two and dealt out. A window is balanced as it is."""
        return self.causal and self.window is None

    def rounds(self, length: int) -> list[int]:
        """By how many devices keys have been moved on in each round; `length` is a shard's."""
        if self.window is None:
            return list(range(self.size))
        reach = min(-(-self.window // length), self.size - 1)
        back = list(range(reach + 1))
        if self.causal:
            return back
        return back + [r for r in range(self.size - reach, self.size) if r > reach]

    def blocks(self, moved: int) -> list[tuple[Any, Any]]:
        """Which chunks of the queries meet which chunks of the keys in a round."""
        if not self.zigzag:
            return [(0, 0)]
        if not moved:
            return [(0, 0), (1, 0), (1, 1)]
        # Keys of a device before this one: both chunks of the queries see the first chunk of the
        # keys. Of one behind: the second chunk of the queries sees all keys.
        behind = (jax.lax.axis_index(self.axis) < moved).astype(jnp.int32)
        return [(1, 0), (behind, behind)]

    def positions(self, length: int, moved: int = 0) -> jax.Array:
        """The positions in the whole sequence of chunks of `length`: `(chunks, length)`.

        Args:
            length: of each chunk.
            moved: by how many devices the chunks have been moved on.
        """
        first = (jax.lax.axis_index(self.axis) - moved) % self.size
        chunks = [first, 2 * self.size - 1 - first] if self.zigzag else [first]
        return jnp.stack(chunks)[:, None] * length + jnp.arange(length)

    def seen(self, at: Any, to: Any, own: Any, other: Any, moved: int) -> Any:
        """Which keys a block's queries see; `None` for all.

        Args:
            at: positions of the queries.
            to: of the keys.
            own: segments of the queries, or `None`.
            other: of the keys.
            moved: by how many devices the keys have been moved on.
        """
        far = at[:, None] - to[None, :]
        seen = None
        if self.causal and not (self.zigzag and moved):
            seen = far >= 0
        if self.window is not None:
            near = jnp.abs(far) <= self.window
            seen = near if seen is None else seen & near
        seen = None if seen is None else seen[None, None, None]
        if own is not None:
            same = (own[:, :, None] == other[:, None, :])[:, None, None]
            seen = same if seen is None else seen & same
        return seen

    def deal(self, block: jax.Array) -> jax.Array:
        """A shard as its chunks `(chunks, batch, length, ...)`, dealt out if need be."""
        if not self.zigzag:
            return block[None]
        first, second = jnp.split(block, 2, axis=1)
        first = jax.lax.ppermute(first, self.axis, [(i, self._holder(2 * i)) for i in self._all])
        second = jax.lax.ppermute(
            second, self.axis, [(i, self._holder(2 * i + 1)) for i in self._all]
        )
        return self._ordered(first, second)

    def collect(self, chunks: jax.Array) -> jax.Array:
        """The shard again: undoes `deal`."""
        if not self.zigzag:
            return chunks[0]
        first, second = self._ordered(chunks[0], chunks[1])
        first = jax.lax.ppermute(first, self.axis, [(self._holder(2 * i), i) for i in self._all])
        second = jax.lax.ppermute(
            second, self.axis, [(self._holder(2 * i + 1), i) for i in self._all]
        )
        return jnp.concatenate([first, second], axis=1)

    @property
    def _all(self) -> range:
        return range(self.size)

    def _holder(self, chunk: int) -> int:
        """The device that a chunk is dealt to."""
        return min(chunk, 2 * self.size - 1 - chunk)

    def _ordered(self, first: jax.Array, second: jax.Array) -> jax.Array:
        """Devices with odd numbers have their earlier chunk from the others' second ones."""
        odd = jax.lax.axis_index(self.axis) % 2 == 1
        return jnp.stack([jnp.where(odd, second, first), jnp.where(odd, first, second)])

    def moved_on(self, tree: Any, hops: int) -> Any:
        """Every leaf from the device that is so many devices before this one, in one transfer.

        (XLA has one under way at a time: of several, only one would run beside a round's work.)
        """
        leaves, form = jax.tree.flatten(tree)
        if not hops % self.size:
            return tree
        pairs = [(i, (i + hops) % self.size) for i in self._all]
        words = [_words(leaf) for leaf in leaves]
        sent = jax.lax.ppermute(jnp.concatenate(words), self.axis, pairs)
        ends = list(itertools.accumulate(word.size for word in words))[:-1]
        arrays = jnp.split(sent, ends)
        return jax.tree.unflatten(form, map(_of_words, arrays, leaves))


def ring_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, ring: Ring
) -> jax.Array:
    """Attention of this device's queries to all keys.

    Args:
        q: this device's queries `(batch, length, groups, heads of a group, features)`.
        k: keys `(batch, length, groups, features)`.
        v: values, likewise; features may be others.
        segments: int32 `(batch, length)`: positions see those of their own segment only.
        ring: how keys go round.

    Returns:
        `(batch, length, groups, heads of a group, features of v)`, in the dtype of `q`.
    """
    dealt = [ring.deal(x) for x in (q, k, v)]
    segments = None if segments is None else ring.deal(segments)
    return ring.collect(_attend(*dealt, segments, ring))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, own: Any, ring: Ring) -> jax.Array:
    return _forward(q, k, v, own, ring)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, own: Any, ring: Ring) -> Any:
    out = jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32)
    level = jnp.full(q.shape[:-1], LOW, jnp.float32)
    keys = k, v, own
    for moved, more in _rounds(q, ring):
        following = ring.moved_on(keys, more)
        for a, b in ring.blocks(moved):
            how = _block(q, keys, own, a, b, moved, ring)
            given, other = how.forward(q[a], keys[0][b], keys[1][b])
            old = level[a]
            new = jnp.logaddexp(old, other)
            kept, share = jnp.exp(old - new)[..., None], jnp.exp(other - new)[..., None]
            out, level = out.at[a].set(out[a] * kept + given * share), level.at[a].set(new)
        keys, out, level = jax.lax.optimization_barrier((following, out, level))
    out = out.astype(q.dtype)
    return out, (q, k, v, own, out, level)


def _backward(ring: Ring, residuals: Any, given: jax.Array) -> Any:
    q, k, v, own, out, level = residuals
    dq = jnp.zeros(q.shape, jnp.float32)
    keys, given = jax.lax.optimization_barrier(((k, v, own), given))
    grads = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    before = 0
    for moved, more in _rounds(q, ring):
        # What others have found of the keys at hand comes while this device's part is computed,
        # together with the keys that are next.
        if more == moved - before:
            following, arriving = ring.moved_on((keys, grads), more)
        else:
            following = ring.moved_on(keys, more)
            arriving = ring.moved_on(grads, moved - before) if moved else grads
        dk, dv = jnp.zeros_like(grads[0]), jnp.zeros_like(grads[1])
        for a, b in ring.blocks(moved):
            how = _block(q, keys, own, a, b, moved, ring)
            of = how.backward(q[a], keys[0][b], keys[1][b], out[a], level[a], given[a])
            dq, dk, dv = dq.at[a].add(of[0]), dk.at[b].add(of[1]), dv.at[b].add(of[2])
        grads, before = (arriving[0] + dk, arriving[1] + dv), moved
        keys, dq, grads = jax.lax.optimization_barrier((following, dq, grads))
    # Home they go as they are handed on: rounded after the hop they would be the same bits, and
    # twice the bytes, with no round left to send them beside.
    dk, dv = ring.moved_on((grads[0].astype(k.dtype), grads[1].astype(v.dtype)), -before)
    return dq.astype(q.dtype), dk, dv, None


_attend.defvjp(_forward, _backward)


def _rounds(q: jax.Array, ring: Ring) -> Iterator[tuple[int, int]]:
    """By how many devices keys have been moved on, and by how many they are for the next round.

    What is sent for a round is sent while the one before is computed: each round ends with a
    barrier, or XLA's scheduler would put many transfers in a row, with nothing beside them.
    """
    rounds = ring.rounds(q.shape[2] * q.shape[0])
    for moved, following in zip(rounds, [*rounds[1:], rounds[-1]], strict=True):
        yield moved, following - moved


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array, 32 at a time; filled up at the end."""
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32).ravel()
    size = 4 // x.dtype.itemsize
    filled = jnp.pad(x.ravel(), (0, -x.size % size))
    return jax.lax.bitcast_convert_type(filled.reshape(-1, size), jnp.uint32)


def _of_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """The way back."""
    more = (like.dtype.itemsize // 4,) if like.dtype.itemsize > 4 else ()
    if like.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(words.reshape(*like.shape, *more), like.dtype)
    return jax.lax.bitcast_convert_type(words, like.dtype).ravel()[: like.size].reshape(like.shape)


def _block(
    q: jax.Array, keys: Any, own: Any, a: Any, b: Any, moved: int, ring: Ring
) -> Plain | CudnnBlocks:
    """How a block is computed: by cuDNN where all keys are seen, or those up to the query."""
    k, v, other = keys
    how = CudnnBlocks(ring.zigzag and not moved and a == b, ring.scale)
    if own is None and ring.window is None and how.possible(q[0], k[0], v[0]):
        return how
    at, to = ring.positions(q.shape[2])[a], ring.positions(q.shape[2], moved)[b]
    if own is not None:
        own, other = own[a], other[b]
    return Plain(ring.seen(at, to, own, other, moved), ring.scale)
