"""Losses for `Converted.model`, as exact means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from fzero.compat import set_within
from fzero.errors import ConversionError
from fzero.links import Mean
from fzero.losses import CrossEntropy, as_labels, cross_entropy, linear_cross_entropy


def causal_lm_loss(
    logits: Any,
    labels: Any,
    ignore_index: int = -100,
    *,
    shift: bool = True,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Mean:
    """Cross entropy of the next token, as a mean over the tokens that count.

    With `shift` (as transformers does it) position t predicts label t + 1, so `labels` are the
    input ids themselves; the last position predicts nothing. With `shift=False` the labels are
    already those of each position.

    In the loss of a converted module whose blocks were rolled, logits of which nothing else reads
    are never there as a whole: the module's last layer and this are `fz.linear_cross_entropy`.

    Args:
        logits: `(..., T, V)`, any float dtype; computed in float32.
        labels: integers `(..., T)`; `ignore_index` where a position does not count. The loss is NaN
            if another one is no word: negative, or at least V.
        ignore_index: the label to leave out.
        shift: whether the labels are still to be shifted by one.
        label_smoothing: this much of the target is spread over the whole vocabulary.
        z_loss: factor of the squared logsumexp that is added.

    Returns:
        An `fzero.Mean`: the summed loss in nats and the number of tokens, both float32.

    Raises:
        ValueError: shapes that do not belong together.
        PlanError: labels that are no integers.

    Example:
        >>> mean = causal_lm_loss(jnp.zeros((1, 3, 8)), jnp.array([[1, 2, -100]]))
        >>> round(float(mean.total / mean.count), 4), float(mean.count)
        (2.0794, 1.0)
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {logits.shape} need labels of shape {logits.shape[:-1]}, got {labels.shape}"
        )
    labels = as_labels(labels)  # torch's int64 becomes int32
    if shift:
        # The labels move, not the logits: slicing logits would copy the largest array there is.
        fill = jnp.full((*labels.shape[:-1], 1), ignore_index, labels.dtype)
        labels = jnp.concatenate([labels[..., 1:], fill], axis=-1)
    terms = CrossEntropy(ignore_index, label_smoothing, z_loss)
    if not _marking.get():
        return cross_entropy(logits, labels, terms)
    total = LOSS.bind(jnp.asarray(logits), labels, terms=terms)
    return Mean(total=total, count=terms.count(labels))


# While a loss is taken apart its cross entropy is one operation, so that who computes it may see
# what the logits are made of.
_marking: ContextVar[bool] = ContextVar("marking", default=False)
LOSS = core.Primitive("causal_lm_loss")


def marked() -> AbstractContextManager[None]:
    """Within this, `causal_lm_loss` is the operation `LOSS` of logits and labels."""
    return set_within(_marking, True)


@dataclass(frozen=True)
class Head:
    """Logits that are not computed: what they are made of.

    Args:
        x: `(..., D)`.
        weight: `(V, D)`.
        bias: `(V,)`, or `None`.
        soft_cap: see `fz.CrossEntropy`.
    """

    x: jax.Array
    weight: jax.Array
    bias: Any
    soft_cap: float | None


def total_of(logits: jax.Array | Head, labels: jax.Array, *, terms: CrossEntropy) -> jax.Array:
    """What `LOSS` computes, of logits or of what they are made of."""
    if not isinstance(logits, Head):
        return terms.total(logits, labels)
    terms = replace(terms, soft_cap=logits.soft_cap)
    args = logits.x, logits.weight, labels
    return linear_cross_entropy(*args, bias=logits.bias, terms=terms).total


def _batched(args: Any, dims: Any, *, terms: CrossEntropy) -> Any:
    return jax.vmap(partial(total_of, terms=terms), in_axes=dims)(*args), 0


def _differentiated(primals: Any, tangents: Any, *, terms: CrossEntropy) -> Any:
    logits, labels = primals
    if isinstance(tangents[0], ad.Zero):
        return total_of(logits, labels, terms=terms), ad.Zero(jax.core.ShapedArray((), jnp.float32))
    return jax.jvp(lambda x: terms.total(x, labels), (logits,), (tangents[0],))


LOSS.def_impl(total_of)
LOSS.def_abstract_eval(lambda *_, terms: jax.core.ShapedArray((), jnp.float32))
batching.primitive_batchers[LOSS] = _batched
ad.primitive_jvps[LOSS] = _differentiated
mlir.register_lowering(LOSS, mlir.lower_fun(total_of, multiple_results=False))


def called_with_batch(batch: Any) -> Any:
    """What a module whose own loss is trained is called with: all of the batch."""
    return tuple(batch) if isinstance(batch, list | tuple) else batch


def all_but_the_loss(output: Any) -> Any:
    """What a module that returns its own loss gives besides; see `module_loss`."""
    if isinstance(output, Mapping):
        return type(output)({k: v for k, v in output.items() if k != "loss"})  # type: ignore[call-arg]
    return tuple(output[1:]) if isinstance(output, tuple | list) else None


def module_loss(output: Any, batch: Any) -> Any:
    """The loss that a module returns itself: its entry `loss`, its only output or the first one.

    Raises:
        ConversionError: it returns none.
    """
    if isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = output[0] if isinstance(output, tuple | list) else output
    if getattr(found, "shape", None) != ():
        several = output if isinstance(output, tuple | list) else ()
        scalars = [
            number for number, one in enumerate(several) if getattr(one, "shape", None) == ()
        ]
        raise ConversionError(
            'loss="module": the module returned no loss (an output `loss`, or a scalar'
            + (_ELSEWHERE.format(scalars[0]) if scalars else _WITHOUT)
        )
    return found


_WITHOUT = "). Give its labels in the example and in each batch, or a loss of the output"
# (`tb.fit` keeps the last part of a batch for the loss.)
_ELSEWHERE = (
    " that comes first), but a scalar as output[{0}]. Say loss=lambda output, *_: output[{0}], and"
    " in tb.fit give batches with the labels twice, (*inputs, labels, labels): the module is called"
    " with all but the last part"
)


def of_output(loss: Callable[..., Any], inputs: Callable[[Any], Any]) -> Callable[..., Any]:
    """A loss of the output as one that calls `forward`."""

    def called(forward: Callable[..., Any], batch: Any) -> Any:
        given = inputs(batch)
        if isinstance(given, Mapping):
            return loss(forward(**given), batch)
        if not isinstance(given, tuple):
            return loss(forward(given), batch)
        if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
            return loss(forward(*given[0], **given[1]), batch)
        return loss(forward(*given), batch)

    return called
