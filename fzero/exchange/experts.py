"""Mixtures of experts: tokens go to the devices that hold their experts, and what these give back.

Without an `expert` axis tokens are sorted by expert and multiplied group by group. With it every
device holds some experts, and its tokens travel by all-to-all. How many go from one device to
another is known at run time only, and buffers for the worst case would hold every token on every
device. So tokens travel in rounds of a fixed size, as many as the fullest pair of devices needs:
one where experts are about evenly used. No token is dropped, and what a round needs is bounded.
The backward pass runs the rounds again; nothing of them is kept.

Source: Lepikhin et al., GShard, arXiv:2006.16668, section 3.2 (all-to-all, capacity); Gale et al.,
    MegaBlocks, arXiv:2211.15841, section 4 (dropless, grouped products).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fzero.axes import AXES, EXPERT, free_axes
from fzero.errors import PlanError
from fzero.exchange.expert_products import Grouped
from fzero.tree import PyTree


# What of a pair's tokens a round takes, beside an even share: more rounds cost more than filling.
ROOM = 1.5

# `apply(own, weights, rows) -> rows`: what experts compute, of rows sorted by expert.
Apply = Callable[[Grouped, PyTree, jax.Array], jax.Array]


def experts(
    apply: Apply,
    weights: PyTree,
    x: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    *,
    capacity: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What a mixture of experts gives for each token: its experts' results, weighted and added.

    In a step of `Plan(expert=n)` leaves of `weights` lie along that axis (dim 0 counts experts:
    `shard={"up": ("expert",)}`), and tokens travel to their experts; anywhere else nothing is sent.
    The numbers are the same but for the order of sums. No token is dropped without `capacity`.

    Args:
        apply: `apply(own, weights, rows)` gives `(rows, outputs)` for rows sorted by expert:
            `own.dot(rows, weights["up"])` multiplies each with its expert's matrix,
            `own.each(weights["bias"])` is each one's own bias; all else is row by row. It is a
            function of its arguments alone: what all experts share is a leaf of `weights`, too,
            `jnp.broadcast_to(value, (experts, *value.shape))`, read as `weights["shared"][0]`.
        weights: leaves `(experts, ...)`.
        x: tokens `(..., features)`.
        chosen: integers `(..., k)`: each token's experts; another number, such as -1, is none.
        gates: `(..., k)`: the weights of their results.
        capacity: the most tokens that an expert takes: this times its even share of all devices'
            tokens, the first ones in order; `None` for all.

    Returns:
        `(..., outputs)` in the dtype of `x`, and how many of the choices were dropped, a float32
        scalar: `fz.Mean(dropped, jnp.float32(chosen.size))` is a metric, over all devices.

    Raises:
        PlanError: shapes do not fit each other, the axis does not divide the experts, or `apply`
            reads a traced value that is none of its arguments where tokens are spread over devices.

    Example:
        >>> import jax, jax.numpy as jnp, fzero as fz
        >>> def apply(own, p, rows):
        ...     return own.dot(jax.nn.silu(own.dot(rows, p["up"])), p["down"])
        >>> p = {"up": jnp.ones((4, 8, 16)), "down": jnp.ones((4, 16, 8))}
        >>> x, chosen = jnp.ones((2, 3, 8)), jnp.zeros((2, 3, 2), int)
        >>> y, dropped = fz.experts(apply, p, x, chosen, jnp.full((2, 3, 2), 0.5))
        >>> y.shape, float(dropped)
        ((2, 3, 8), 0.0)
    """
    # (Numpy's, outside of jit, cannot be indexed by what a loop carries.)
    weights, x, chosen, gates = jax.tree.map(jnp.asarray, (weights, x, chosen, gates))
    axes, num = free_axes(), _checked(weights, x, chosen, gates, capacity)
    capacity = None if capacity == math.inf else capacity
    lead = x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1]), chosen.reshape(-1, chosen.shape[-1]).astype(jnp.int32)
    tokens, own = flat[0].shape[0], gates.reshape(flat[1].shape)
    real = jnp.ones((tokens,), bool)
    split = PartitionSpec(tuple(axes)) if axes else PartitionSpec()
    ways, k = axes.get(EXPERT, 1), chosen.shape[-1]
    mixture = _Mixture(apply, num, ways, tuple(axes), capacity, tokens, k)
    if mixture.devices > 1 and num % mixture.devices:
        raise PlanError(
            f"experts: {EXPERT}={mixture.devices} does not divide {num} experts; choose a divisor"
        )
    more = -tokens % math.prod(axes.values())
    given = [
        jnp.pad(leaf, ((0, more), *((0, 0),) * (leaf.ndim - 1))) if more else leaf
        for leaf in (flat[0], flat[1], own, real)
    ]
    run: Callable[..., tuple[jax.Array, jax.Array]] = mixture.run
    if axes:
        _refuse_captured(apply, weights, x, num)
        held = PartitionSpec(EXPERT if EXPERT in axes else None)
        run = jax.shard_map(
            run, in_specs=(held, split, split, split, split), out_specs=(split, PartitionSpec()),
            axis_names=set(axes), check_vma=False,
        )  # fmt: skip
    out, dropped = run(weights, *given)
    return out[:tokens].reshape(*lead, -1), jax.lax.stop_gradient(dropped)


def _checked(
    weights: PyTree, x: jax.Array, chosen: jax.Array, gates: jax.Array, capacity: float | None
) -> int:
    """The number of experts."""
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(weights)}
    fits = chosen.shape == gates.shape and chosen.shape[:-1] == x.shape[:-1] and x.ndim > 1
    if not fits or len(counts) != 1 or counts == {()}:
        raise PlanError(
            "experts: expected tokens (..., features), chosen and gates (..., k), and weights"
            f" (experts, ...); got {x.shape}, {chosen.shape}, {gates.shape} and weights of"
            f" {sorted(counts)} experts"
        )
    if not chosen.size:
        raise PlanError(f"experts: expected at least one token and choice, got {chosen.shape}")
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise PlanError(f"experts: chosen has dtype {chosen.dtype}: expected integers")
    if capacity is not None and not (isinstance(capacity, Real) and capacity > 0):
        raise PlanError(f"experts: capacity={capacity!r}: expected a number above 0, or None")
    return int(counts.pop()[0])


def _refuse_captured(apply: Apply, weights: PyTree, x: jax.Array, num: int) -> None:
    """Refuse a function with values from outside: other devices do not have them."""

    def one(sizes: jax.Array, weights: PyTree, rows: jax.Array) -> PyTree:
        return apply(Grouped(sizes, 1), weights, rows)

    shapes = jax.ShapeDtypeStruct((num,), jnp.int32), jax.eval_shape(lambda: weights)
    found = jax.make_jaxpr(one)(*shapes, jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype)).consts
    traced = [value for value in found if isinstance(value, jax.core.Tracer)]
    if traced:
        raise PlanError(
            f"experts: apply reads values of shapes {[value.shape for value in traced]} that are"
            " none of its arguments, and tokens are spread over devices; give each as a leaf of"
            f" weights, jnp.broadcast_to(value, ({num}, *value.shape)), and read its row 0"
        )


@dataclass(frozen=True)
class _Mixture:
    """What one device does.

    Args:
        apply: what experts compute.
        num: the experts of all devices.
        devices: those that share them out.
        axes: mesh axes that tokens are spread over.
        capacity: as for `experts`.
        tokens: of all devices that share them out, without filling.
        k: experts of a token.
    """

    apply: Apply
    num: int
    devices: int
    axes: tuple[str, ...]
    capacity: float | None
    tokens: int
    k: int

    def run(
        self, weights: PyTree, x: jax.Array, chosen: jax.Array, gates: jax.Array, real: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """This device's tokens' results, and how many choices all of them dropped."""
        # (Filling is of no expert, as is a number that no expert has: it comes last.)
        known = real[:, None] & (chosen >= 0) & (chosen < self.num)
        of = jnp.where(known, chosen, self.num).reshape(-1)
        order = jnp.argsort(of, stable=True)
        kept = self._within(of, order)
        dropped = jnp.sum(of < self.num, dtype=jnp.float32) - jnp.sum(kept, dtype=jnp.float32)
        if self.axes:
            dropped = jax.lax.psum(dropped, self.axes)
        of = jnp.where(kept, of, self.num)
        if self.capacity is not None:
            order = jnp.argsort(of, stable=True)
        if self.devices == 1:
            out = self._here(weights, x, gates.reshape(-1), of, order)
        else:
            out = _in_rounds(self, weights, x, gates.reshape(-1), of, order)
        outputs = out.reshape(*chosen.shape, -1)
        return jnp.sum(outputs, axis=1).astype(x.dtype), dropped

    def _within(self, of: jax.Array, order: jax.Array) -> jax.Array:
        """Which choices their experts take."""
        real = of < self.num
        if self.capacity is None:
            return real
        counts = jnp.bincount(of, length=self.num + 1)
        before, over = jnp.cumsum(counts) - counts, self._over()
        first, blocks = jnp.zeros_like(counts), 1
        if over:  # choices of devices before this one come first
            everywhere = jax.lax.all_gather(counts, over)
            earlier = jnp.arange(everywhere.shape[0]) < jax.lax.axis_index(over)
            first = jnp.sum(jnp.where(earlier[:, None], everywhere, 0), axis=0)
            blocks = math.prod(jax.lax.axis_size(axis) for axis in over if axis in AXES)
        position = _inverse(order)
        most = math.ceil(self.capacity * self.tokens * blocks * self.k / self.num)
        return real & (position - before[of] + first[of] < most)

    def _over(self) -> tuple[str, ...]:
        """All mesh axes that tokens are spread over, outermost first."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(axis for axis in (*AXES, *self.axes) if axis in manual)

    def _here(
        self, weights: PyTree, x: jax.Array, gates: jax.Array, of: jax.Array, order: jax.Array
    ) -> jax.Array:
        """All choices' results, of experts that are all on this device."""
        own = Grouped(jnp.bincount(of, length=self.num + 1)[: self.num], of.size)
        rows = self.apply(own, weights, x[order // self.k])
        return _weighted(rows[_inverse(order)], gates, of < self.num)

    @property
    def room(self) -> int:
        """Choices that a device sends another one in a round."""
        ways = math.prod(jax.lax.axis_size(axis) for axis in self.axes)
        local = -(-self.tokens // ways) * self.k
        return min(local, math.ceil(ROOM * local / self.devices))

    def rounds(self, of: jax.Array) -> jax.Array:
        """How many rounds all devices need."""
        fullest = jnp.max(-(-self._counts(of) // self.room))
        found: jax.Array = jax.lax.pmax(fullest, self._over())
        return found

    def _counts(self, of: jax.Array) -> jax.Array:
        """Choices for each device."""
        ends = self.num // self.devices
        return jnp.bincount(of // ends, length=self.devices + 1)[: self.devices]

    def round(
        self, number: Any, weights: PyTree, x: jax.Array, gates: jax.Array, of: jax.Array,
        order: jax.Array,
    ) -> jax.Array:  # fmt: skip
        """Results of the choices that travel in a round, at their positions; 0 for all others."""
        counts, each = self._counts(of), self.num // self.devices
        nth = number * self.room + jnp.arange(self.room)
        sent = nth < counts[:, None]
        position = (jnp.cumsum(counts) - counts)[:, None] + nth
        choice = order[jnp.minimum(position, of.size - 1)]
        given = x[choice // self.k], gates[choice], of[choice] % each
        fill = jnp.zeros((), x.dtype), jnp.zeros((), gates.dtype), jnp.int32(each)
        rows, weight, own = [
            _exchanged(jnp.where(sent.reshape(*sent.shape, *(1,) * (value.ndim - 2)), value, none))
            for value, none in zip(given, fill, strict=True)
        ]
        sort = jnp.argsort(own, stable=True)
        sizes = jnp.bincount(own, length=each + 1)[:each]
        out = self.apply(Grouped(sizes, own.size), weights, rows[sort])
        out = _weighted(out[_inverse(sort)], weight, own < each).astype(x.dtype)
        back = _exchanged(out.reshape(*sent.shape, -1))
        whole = jnp.zeros((of.size, back.shape[-1]), x.dtype)
        to = jnp.where(sent, choice, of.size).reshape(-1)
        return whole.at[to].set(back, mode="drop")


def _exchanged(chunks: jax.Array) -> jax.Array:
    """The first of every device's chunks for the first device, and so on; in one dim."""
    out = jax.lax.all_to_all(chunks, EXPERT, split_axis=0, concat_axis=0, tiled=True)
    return out.reshape(-1, *chunks.shape[2:])


def _inverse(order: jax.Array) -> jax.Array:
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))


def _weighted(rows: jax.Array, gates: jax.Array, counts: jax.Array) -> jax.Array:
    """Rows times their weights, at least float32; 0 where a row does not count."""
    wide = np.promote_types(np.promote_types(rows.dtype, gates.dtype), jnp.float32)
    out = rows.astype(wide) * gates.astype(wide)[:, None]
    return jnp.where(counts[:, None], out, jnp.zeros((), wide))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(
    mixture: _Mixture, weights: PyTree, x: jax.Array, gates: jax.Array, of: jax.Array,
    order: jax.Array,
) -> jax.Array:  # fmt: skip
    """All choices' results, of experts that are spread over devices."""
    return _forward(mixture, weights, x, gates, of, order)[0]


def _forward(mixture: _Mixture, *given: Any) -> Any:
    return _summed(mixture, given[-2], lambda number: mixture.round(number, *given)), given


def _backward(mixture: _Mixture, given: Any, back: jax.Array) -> Any:
    weights, x, gates, of, order = given
    leaves, tree = jax.tree.flatten(weights)
    trained = [bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) for leaf in leaves]

    def joined(floats: list[jax.Array], others: list[Any]) -> PyTree:
        own = iter(floats)
        pairs = zip(others, trained, strict=True)
        return jax.tree.unflatten(tree, [next(own) if float_ else leaf for leaf, float_ in pairs])

    def pulled(number: Any) -> Any:
        def one(floats: list[jax.Array], x: jax.Array, gates: jax.Array) -> jax.Array:
            return mixture.round(number, joined(floats, leaves), x, gates, of, order)

        floats = [leaf for leaf, float_ in zip(leaves, trained, strict=True) if float_]
        return jax.vjp(one, floats, x, gates)[1](back)

    grads, *rest = _summed(mixture, of, pulled)
    return joined(grads, [None] * len(leaves)), *rest, None, None


_in_rounds.defvjp(_forward, _backward)


def _summed(mixture: _Mixture, of: jax.Array, one: Callable[[Any], PyTree]) -> PyTree:
    """The sum over all rounds of what one gives."""
    rounds = mixture.rounds(of)

    def body(carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        number, sums = carry
        return number + 1, jax.tree.map(jnp.add, sums, one(number))

    # (The first round is in the loop as well: half the program, and one body to predict from.)
    shapes = jax.eval_shape(one, jnp.int32(0))
    first = jnp.int32(0), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, body, first)[1]
