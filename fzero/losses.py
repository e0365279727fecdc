"""A linear layer and the cross entropy of its output as one function, which never has the output.

Logits are `tokens x vocabulary`, the largest array of a language model by far. Here they exist for
a chunk of the tokens at a time. Their gradient follows from them alone, so it is computed where
they are, and multiplied into the gradients of what they were made of: three products of matrices,
as many as with whole logits, and nothing is computed twice.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from fzero.axes import free_axes, token_axes
from fzero.compat import traced_platform
from fzero.errors import PlanError
from fzero.links import Mean


# Bytes of float32 logits that there are at a time. Large enough that products of matrices run at
# full speed, small beside what a training step keeps anyway. GPUs have four times as many: each
# chunk reads and writes the weight's float32 gradient, which caches of GPUs do not hold.
CHUNK_BYTES = 2**27
# A product of fewer rows than this would read the weight more often than it computes with it.
MIN_ROWS = 128


@dataclass(frozen=True)
class CrossEntropy:
    """What is computed of the logits.

    Args:
        ignore_index: the label of positions that do not count.
        label_smoothing: this much of the target is spread over the whole vocabulary.
        z_loss: factor of the squared logsumexp that is added.
        soft_cap: logits are `cap * tanh(logits / cap)`, if not `None`.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        whole, smoothing = isinstance(self.ignore_index, numbers.Integral), self.label_smoothing
        if not whole or not -(2**31) <= self.ignore_index < 2**31:
            raise PlanError(
                f"ignore_index={self.ignore_index!r}: expected a whole number of 32 bits, as -100"
            )
        if not _is_real(smoothing) or not 0 <= smoothing <= 1:
            raise PlanError(f"label_smoothing={smoothing!r}: expected 0 to 1")
        cap = self.soft_cap
        if not (_is_real(self.z_loss) and 0 <= self.z_loss < math.inf) or (
            cap is not None and not (_is_real(cap) and 0 < cap < math.inf)
        ):
            raise PlanError(
                f"z_loss={self.z_loss!r}, soft_cap={self.soft_cap!r}: expected z_loss of at least"
                " 0, and a soft_cap above 0 or None, both finite"
            )

    def capped(self, logits: jax.Array) -> jax.Array:
        """Float32 logits with the soft cap."""
        wide = logits.astype(jnp.float32)
        return wide if self.soft_cap is None else self.soft_cap * jnp.tanh(wide / self.soft_cap)

    def total(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """The summed loss of logits `(..., V)` and labels `(...)`: a float32 scalar."""
        wide = self.capped(logits)
        return self._total(wide, as_labels(labels), jax.nn.logsumexp(wide, axis=-1))

    def _total(self, wide: jax.Array, labels: jax.Array, norm: jax.Array) -> jax.Array:
        counted = labels != self.ignore_index
        losses = norm - picked(wide, jnp.where(counted, labels, 0))
        if self.label_smoothing:
            uniform = norm - jnp.mean(wide, axis=-1)
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * uniform
        if self.z_loss:
            losses = losses + self.z_loss * norm**2
        return jnp.sum(jnp.where(counted, losses, 0.0))

    def count(self, labels: jax.Array) -> jax.Array:
        """How many positions count: a float32 scalar."""
        return jnp.sum(as_labels(labels) != self.ignore_index, dtype=jnp.float32)

    def gradient(self, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`total` of logits `(C, V)`, and its derivative by them, both float32."""
        wide, size = self.capped(logits), logits.shape[-1]
        norm = jax.nn.logsumexp(wide, axis=-1)
        off = self.label_smoothing / max(size, 1)
        # Numbers and words, as if they came with these logits: what is the same in all chunks XLA
        # lays out once, as wide as logits are, and reads it for each of them (jax 0.11, a GPU:
        # three arrays of their size, a twentieth of a GPT-2's step).
        fixed = jnp.float32(0), jnp.float32(off), jnp.float32(1 - self.label_smoothing + off)
        words = jnp.arange(size, dtype=labels.dtype)
        (nil, off, on), words, wide = jax.lax.optimization_barrier((fixed, words, wide))
        level = norm[:, None]
        found = jnp.exp(wide - level) * (1 + 2 * self.z_loss * level)
        found = found - jnp.where(words == labels[:, None], on, off)
        if self.soft_cap is not None:
            found = found * (1 - (wide / self.soft_cap) ** 2)
        counted = (labels != self.ignore_index)[:, None]
        return self._total(wide, labels, norm), jnp.where(counted, found, nil)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_labels(labels: Any) -> jax.Array:
    """Labels in a dtype that `ignore_index` fits: -100 would be word 156 among bytes.

    Raises:
        PlanError: they are no integers.
    """
    labels = jnp.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise PlanError(f"labels: expected integers, numbers of words; got {labels.dtype}")
    return labels.astype(jnp.int32) if labels.dtype.itemsize <= 4 else labels


def picked(values: jax.Array, labels: jax.Array, axis: int = -1) -> jax.Array:
    """The value at each label along an axis: `values` without that axis; NaN where no word is."""
    size = values.shape[axis]
    if not size:  # of which an index reads 0
        return jnp.full(labels.shape, jnp.nan, values.dtype)
    if not free_axes():
        # (Negative ones would count from the end.)
        at = jnp.expand_dims(jnp.where(labels < 0, size, labels), axis)
        return jnp.squeeze(jnp.take_along_axis(values, at, axis), axis)
    # Where a vocabulary may lie divided: a sum of one number and zeros, to which each device adds
    # its own words. (XLA's partitioner aborts on some gathers from divided logits.)
    labels = labels.astype(jnp.int32)
    words = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis % values.ndim)
    here = words == jnp.expand_dims(labels, axis)
    found = jnp.sum(jnp.where(here, values, jnp.zeros((), values.dtype)), axis=axis)
    return jnp.where((labels < 0) | (labels >= size), jnp.nan, found)


def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    terms: CrossEntropy = CrossEntropy(),
    chunk: int | None = None,
) -> Mean:
    """The cross entropy of `x @ weight.T + bias`, which is never there as a whole.

    As `cross_entropy` of the logits, to float32 rounding; products are accumulated in float32, so
    16-bit logits are not rounded. It has no derivatives in forward mode.

    Args:
        x: `(..., D)`.
        weight: `(V, D)`, as of an embedding or torch's Linear.
        labels: integers `(...)`; `terms.ignore_index` where a position does not count. The loss is
            NaN if another one is no word: negative, or at least V.
        bias: `(V,)`, or `None`.
        terms: label smoothing, z-loss, soft cap: `fz.CrossEntropy`.
        chunk: tokens at a time; by default so many that their logits are 128 MiB, on GPUs 512.

    Returns:
        The summed loss in nats and the number of positions that count, both float32.

    Raises:
        PlanError: shapes that do not belong together, labels that are no integers, or `chunk`
            below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> mean = linear_cross_entropy(jnp.ones((2, 3, 4)), jnp.zeros((8, 4)),
        ...                             jnp.full((2, 3), 5))
        >>> round(float(mean.total / mean.count), 4), float(mean.count)
        (2.0794, 6.0)

    Source: Hsu et al., Liger Kernel (arXiv:2410.10989), section 3.2, for the gradient in the
    forward pass.
    """
    _require_terms("linear_cross_entropy", terms)
    labels = as_labels(labels)
    fits = x.shape[:-1] == labels.shape and weight.ndim == 2 and x.shape[-1:] == weight.shape[1:]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise PlanError(
            "linear_cross_entropy: expected x (..., D), weight (V, D), labels (...) and bias (V,);"
            f" got {x.shape}, {weight.shape}, {labels.shape}"
            f"{'' if bias is None else f' and {bias.shape}'}"
        )
    if chunk is not None and (not isinstance(chunk, numbers.Integral) or chunk < 1):
        raise PlanError(f"linear_cross_entropy: chunk={chunk}: expected at least one token, whole")
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    added = jnp.zeros(weight.shape[:1], dtype) if bias is None else bias.astype(dtype)
    run = partial(_total, terms, chunk)
    at = _spread(x)
    if at:
        # A chunk of whole sequences would be one device's tokens, and the weight would travel for
        # each: so every device has chunks of its own, and what they add up is added once.
        more = -x.shape[1] % free_axes().get(at[1] or "", 1)
        x = jnp.pad(x, ((0, 0), (0, more), *((0, 0),) * (x.ndim - 2)))
        fill = ((0, 0), (0, more), *((0, 0),) * (labels.ndim - 2))
        padded = jnp.pad(labels, fill, constant_values=terms.ignore_index)
        names, tokens = tuple(name for name in at if name), PartitionSpec(*at)

        def own(x: jax.Array, weight: jax.Array, bias: jax.Array, labels: jax.Array) -> jax.Array:
            return jax.lax.psum(run(x, weight.astype(dtype), bias.astype(dtype), labels), names)

        # (What is whole is handed over in float32, in which its gradients are added up.)
        wide = jnp.float32 if dtype.itemsize < 4 else dtype
        whole = [leaf.astype(wide) for leaf in (weight, added)]
        divided = jax.shard_map(
            own, in_specs=(tokens, PartitionSpec(), PartitionSpec(), tokens),
            out_specs=PartitionSpec(), axis_names=set(names), check_vma=False,
        )  # fmt: skip
        # (Outside of a `jit`, JAX refuses a function with a derivative of its own there.)
        total: jax.Array = jax.jit(divided)(x.astype(dtype), *whole, padded)
    else:
        total = run(x.astype(dtype), weight.astype(dtype), added, labels)
    return Mean(total=total, count=terms.count(labels))


def _spread(x: jax.Array) -> tuple[str | None, ...]:
    """Axes that rows and positions are spread over where this is traced; none if neither is."""
    if x.ndim < 3:
        return ()
    at = token_axes(x.shape[0])
    return at if any(at) else ()


def _total(
    terms: CrossEntropy, chunk: int | None, x: jax.Array, weight: jax.Array, bias: jax.Array,
    labels: jax.Array,
) -> jax.Array:  # fmt: skip
    """The summed loss of the tokens at hand."""
    rows, flat = x.reshape(labels.size, x.shape[-1]), labels.reshape(-1)
    size = min(_rows_of(weight.shape[0]) if chunk is None else chunk, max(flat.size, 1))
    rows, flat = _padded(rows, flat, size, terms.ignore_index)
    return _chunked(terms, size)(rows, weight, bias, flat)


def cross_entropy(
    logits: jax.Array, labels: jax.Array, terms: CrossEntropy = CrossEntropy()
) -> Mean:
    """The cross entropy of logits `(..., V)` and labels `(...)`; see `linear_cross_entropy`.

    Raises:
        PlanError: their shapes do not belong together, or labels are no integers.
    """
    _require_terms("cross_entropy", terms)
    if jnp.shape(labels) != jnp.shape(logits)[:-1]:
        raise PlanError(
            "cross_entropy: expected logits (..., V) and labels (...), an integer for each row of"
            f" logits; got {jnp.shape(logits)}, {jnp.shape(labels)}"
        )
    return Mean(total=terms.total(logits, labels), count=terms.count(labels))


def _require_terms(name: str, terms: Any) -> None:
    if not isinstance(terms, CrossEntropy):
        raise PlanError(
            f"{name}: terms={terms!r}: expected an fz.CrossEntropy, such as"
            " fz.CrossEntropy(ignore_index=-100)"
        )


def _rows_of(vocabulary: int) -> int:
    """Tokens in a chunk: a power of two."""
    size = CHUNK_BYTES * (4 if traced_platform() == "gpu" else 1)
    fit = max(size // (4 * max(vocabulary, 1)), MIN_ROWS)
    return 2 ** int(math.log2(fit))


def _padded(
    rows: jax.Array, labels: jax.Array, size: int, ignore: int
) -> tuple[jax.Array, jax.Array]:
    """Rows filled up to whole chunks with some that do not count."""
    more = -labels.size % size
    if not more:
        return rows, labels
    return jnp.pad(rows, ((0, more), (0, 0))), jnp.pad(labels, (0, more), constant_values=ignore)


@lru_cache(maxsize=64)
def _chunked(terms: CrossEntropy, size: int) -> Callable[..., jax.Array]:
    """`(rows, weight, bias, labels) -> total`, by chunks of so many rows."""

    def chunks(rows: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        cut = labels.reshape(labels.size // size, size)
        return rows.reshape(*cut.shape, rows.shape[-1]), cut

    def logits(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return _product(x, weight, ((1,), (1,))) + bias.astype(jnp.float32)

    @jax.custom_vjp
    def total(rows: jax.Array, weight: jax.Array, bias: jax.Array, labels: jax.Array) -> jax.Array:
        def body(total: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            x, own = xs
            return total + terms.total(logits(x, weight, bias), own), None

        return jax.lax.scan(body, jnp.float32(0), chunks(rows, labels))[0]

    def forward(rows: Any, weight: Any, bias: Any, labels: Any) -> tuple[jax.Array, Any]:
        wanted = rows.perturbed, weight.perturbed, bias.perturbed
        w, b = weight.value, bias.value

        def body(sums: Any, xs: Any) -> tuple[Any, Any]:
            x, own = xs
            loss, slope = terms.gradient(logits(x, w, b), own)
            slopes = slope.astype(x.dtype)
            back = _product(slopes, w, ((1,), (0,))).astype(_seed_dtype(x)) if wanted[0] else None
            new = (
                loss,
                _product(slopes, x, ((0,), (0,))) if wanted[1] else None,
                jnp.sum(slope, axis=0) if wanted[2] else None,
            )
            return jax.tree.map(jnp.add, sums, new), back

        start = (
            jnp.float32(0),
            jnp.zeros(w.shape, jnp.float32) if wanted[1] else None,
            jnp.zeros(b.shape, jnp.float32) if wanted[2] else None,
        )
        (loss, by_weight, by_bias), by_rows = jax.lax.scan(
            body, start, chunks(rows.value, labels.value)
        )
        by_rows = None if by_rows is None else by_rows.reshape(rows.value.shape)
        # Named, so that a checkpoint policy that keeps names, or anything but data movement, keeps
        # these: otherwise `jax.checkpoint` keeps what each chunk added, to add it up once more.
        found = _named((by_rows, by_weight, by_bias))
        like = tuple(jnp.zeros((), x.dtype) for x in (rows.value, w, b))
        return _named(loss), (*found, like)

    def backward(residuals: Any, seed: Any) -> tuple[Any, ...]:
        *found, like = residuals
        if isinstance(seed, jax.custom_derivatives.SymbolicZero):
            return None, None, None, None
        scaled = [
            None if x is None else (x.astype(jnp.float32) * seed).astype(to.dtype)
            for x, to in zip(found, like, strict=True)
        ]
        return *scaled, None

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total


def _named(tree: Any) -> Any:
    return jax.tree.map(lambda x: checkpoint_name(x, "linear_cross_entropy"), tree)


def _seed_dtype(x: jax.Array) -> Any:
    """The dtype in which an input's gradient waits for its seed: float16 would lose small ones,
    which a loss scale is there to save."""
    return jnp.float32 if x.dtype == jnp.float16 else x.dtype


def _product(a: jax.Array, b: jax.Array, dims: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
    """A product of matrices, accumulated in float32."""
    return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=jnp.float32)
