"""Reductions over stretches of a dim whose ends are data: bags, segments, alignments."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import accumulation_dtype, canonical, cast
from torch_bridge.lower.arithmetic import clamp
from torch_bridge.lower.index import not_negative, taken
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.scatter import reduce_into
from torch_bridge.lower.tangents import sloped


def _segment_of(bounds: jax.Array, count: int) -> jax.Array:
    """The segment that each of `count` positions is in; behind the last one: one more."""
    return jnp.searchsorted(bounds[1:], jnp.arange(count), side="right").astype(np.int32)


@register_operator("aten.segment_reduce.default")
def segment_reduce(
    data: jax.Array, reduce: str, *, lengths: Any = None, indices: Any = None, offsets: Any = None,
    axis: int = 0, unsafe: bool = False, initial: float | None = None,
) -> jax.Array:  # fmt: skip
    """Shapes: data `(*batch, length, *rest)`, lengths `(*batch, segments)`, offsets one more."""
    axis = axis % data.ndim
    if offsets is not None:
        return _segments(data, reduce, offsets, axis, initial)
    ends = jnp.cumsum(lengths, axis=-1)
    offsets = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends], axis=-1)
    found = _segments(data, reduce, offsets, axis, initial)
    # Lengths that are not those of the data, for which PyTorch raises.
    fine = jnp.all(ends[..., -1:] == data.shape[axis]) & jnp.all(lengths >= 0)
    return found if unsafe or not lengths.shape[-1] else jnp.where(fine, found, jnp.nan)


def _segments(
    data: jax.Array, reduce: str, bounds: jax.Array, axis: int, initial: float | None
) -> jax.Array:
    if axis:
        one = jax.vmap(lambda d, b: _segments(d, reduce, b, axis - 1, initial))
        return one(data, bounds)
    extreme = reduce in ("max", "min")
    start = {"max": -np.inf, "min": np.inf, "prod": 1.0}.get(reduce, 0.0)
    start = start if initial is None or extreme else initial
    # What stands before the first segment or behind the last one goes to an index that is cut off.
    segments = bounds.shape[0] - 1
    position = jnp.where(
        jnp.arange(data.shape[0]) < bounds[0], segments, _segment_of(bounds, data.shape[0])
    )
    first = jnp.full((segments + 1, *data.shape[1:]), start, data.dtype)
    kind = {"max": "amax", "min": "amin", "mean": "sum"}.get(reduce, reduce)
    found = reduce_into(first, (position,), data, kind, True)[:segments]
    if extreme and initial is not None:  # which has no share in the gradient of equals
        return clamp(found, **{"min" if reduce == "max" else "max": initial})
    if reduce != "mean":
        return found
    sizes = jnp.reshape(jnp.diff(bounds), (-1, *(1,) * (data.ndim - 1))).astype(data.dtype)
    empty = jnp.asarray(jnp.nan if initial is None else initial, data.dtype)
    return jnp.where(sizes == 0, empty, found / jnp.maximum(sizes, 1))


_SUM, _MEAN, _MAX = 0, 1, 2


@register_operator("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag(
    weight: jax.Array, indices: jax.Array, offsets: jax.Array, scale_grad_by_freq: bool = False,
    mode: int = _SUM, sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Bags of rows, each added up, averaged or its largest. Shapes: weight `(rows, dim)`."""
    if scale_grad_by_freq:
        raise NotImplementedError(
            "EmbeddingBag(scale_grad_by_freq=True): PyTorch divides by how often another word is"
            " there on CPUs; use Embedding(scale_grad_by_freq=True) and a sum or mean over dim 1"
        )
    count = indices.shape[0]
    bags = offsets.shape[0] - int(include_last_offset)
    begins = offsets[:bags]
    bag = jnp.searchsorted(begins, jnp.arange(count), side="right").astype(np.int32) - 1
    kept = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    position = jnp.where(kept, bag, bags)
    places = not_negative(indices, weight.shape[0])
    rows = taken(weight, lambda table: jnp.take(table, places, axis=0))
    if per_sample_weights is not None:
        rows = rows * cast(per_sample_weights, rows.dtype)[:, None]
    sizes = jnp.zeros((bags + 1,), np.int32).at[position].add(1)[:bags]
    if mode == _MAX:
        found = _largest_of_bags(rows, position, bags)
    else:
        wide = cast(rows, accumulation_dtype(rows))
        found = jnp.zeros((bags + 1, weight.shape[1]), wide.dtype).at[position].add(wide)[:bags]
        if mode == _MEAN:
            found = found / jnp.maximum(sizes, 1)[:, None].astype(wide.dtype)
        found = found.astype(weight.dtype)
    whole = canonical("int64")
    return found, bag.astype(whole), sizes.astype(whole), jnp.zeros((bags,), whole)


def _largest_of_bags(rows: jax.Array, position: jax.Array, bags: int) -> jax.Array:
    """0 for empty bags; of equal values the first one has the gradient, as in torch."""
    fixed = jax.lax.stop_gradient(rows)
    best = jnp.full((bags + 1, rows.shape[1]), -jnp.inf, rows.dtype).at[position].max(fixed)
    numbers = jnp.arange(rows.shape[0], dtype=np.int32)[:, None]
    behind = np.int32(rows.shape[0])
    first = jnp.full(best.shape, behind, np.int32)
    first = first.at[position].min(jnp.where(fixed == best[position], numbers, behind))[:bags]
    none = first == behind
    picked = jnp.take_along_axis(rows, jnp.where(none, 0, first), axis=0)
    # Nothing is equal to the largest of a bag with a NaN.
    absent = jnp.where(jnp.isnan(best[:bags]), best[:bags], jnp.zeros((), rows.dtype))
    return jnp.where(none, absent, picked)


# Stands for log(0): finite, so that sums of such have gradients.
_NEVER = -1e30


@register_operator("torch_bridge.ctc_loss.default")
def ctc_loss(
    log_probs: jax.Array, targets: jax.Array, input_lengths: jax.Array, target_lengths: jax.Array,
    blank: int, zero_infinity: bool,
) -> jax.Array:  # fmt: skip
    """Negative log-likelihoods of label sequences, summed over alignments.

    Shapes: log_probs `(T, [N,] C)`, targets `(N, S)`, `(S,)` or one behind another; lengths `(N,)`.
    """
    if log_probs.ndim == 2:
        lengths = jnp.reshape(input_lengths, (1,)), jnp.reshape(target_lengths, (1,))
        return ctc_loss(
            log_probs[:, None], jnp.reshape(targets, (1, -1)), *lengths, blank, zero_infinity
        )[0]
    if targets.ndim == 1:
        begins = jnp.cumsum(target_lengths) - target_lengths
        positions = begins[:, None] + jnp.arange(targets.shape[0])
        targets = jnp.take(targets, positions, mode="clip")
    losses = jax.vmap(_alignments, (1, 0, 0, 0, None))(
        log_probs, targets, input_lengths, target_lengths, blank
    )
    # torch's gradient is that before a log_softmax, whatever the logarithms come from.
    used = (jnp.arange(log_probs.shape[0])[:, None] < input_lengths)[..., None]
    fixed = jax.lax.stop_gradient(log_probs)
    extra = sloped(log_probs, jnp.where(used, jnp.exp(fixed), 0))
    losses = losses + jnp.sum(extra, axis=(0, 2))
    losses = jnp.where(losses == -jnp.inf, jnp.nan, losses)  # of a probability that is infinite
    never = losses > -_NEVER / 2
    if zero_infinity:
        return jnp.where(never, 0.0, losses).astype(log_probs.dtype)
    lost = sloped(log_probs, jnp.where(used & never[:, None], jnp.nan, 0))
    losses = jnp.where(never, jnp.inf, losses) + jnp.sum(lost, axis=(0, 2))
    return losses.astype(log_probs.dtype)


def _alignments(
    log_probs: jax.Array, target: jax.Array, steps: jax.Array, length: jax.Array, blank: int
) -> jax.Array:
    """One sequence. States are the labels with a blank before, between and behind them."""
    states = 2 * target.shape[0] + 1
    labels = jnp.full((states,), blank, target.dtype).at[1::2].set(target)
    number = jnp.arange(states)
    # A blank may be left out between different labels.
    skips = (number % 2 == 1) & (number > 1) & (labels != jnp.roll(labels, 2))
    before = jnp.full((states,), _NEVER, log_probs.dtype)

    def shifted(x: jax.Array, by: int) -> jax.Array:
        return jnp.concatenate([jnp.full((by,), _NEVER, x.dtype), x])[:states]

    def step(last: jax.Array, given: Any) -> tuple[jax.Array, None]:
        t, row = given
        ways = [last, shifted(last, 1), jnp.where(skips, shifted(last, 2), _NEVER)]
        started = jnp.where(number <= 1, 0.0, _NEVER).astype(row.dtype)
        reached = jnp.where(t == 0, started, jax.nn.logsumexp(jnp.stack(ways), axis=0))
        following = jnp.maximum(reached + jnp.take(row, labels), _NEVER)
        return jnp.where(t < steps, following, last), None

    last, _ = jax.lax.scan(step, before, (jnp.arange(log_probs.shape[0]), log_probs))
    ends = jnp.where((number == 2 * length) | (number == 2 * length - 1), last, _NEVER)
    found = -jax.nn.logsumexp(ends)
    return jnp.where(steps == 0, jnp.where(length == 0, 0.0, -_NEVER), found)
