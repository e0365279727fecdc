"""Losses for `Converted.model`, as exact means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fzero.errors import ConversionError
from fzero.model import Mean


def causal_lm_loss(
    logits: Any, labels: Any, ignore_index: int = -100, *, shift: bool = True
) -> Mean:
    """Cross entropy of the next token, as a mean over the tokens that count.

    With `shift` (as transformers does it) position t predicts label t + 1, so `labels` are the
    input ids themselves; the last position predicts nothing. With `shift=False` the labels are
    already those of each position.

    Args:
        logits: `(..., T, V)`, any float dtype; computed in float32.
        labels: integers `(..., T)`; `ignore_index` where a position does not count.
        ignore_index: the label to leave out.
        shift: whether the labels are still to be shifted by one.

    Returns:
        An `fzero.Mean`: the summed loss in nats and the number of tokens, both float32.

    Raises:
        ValueError: shapes that do not belong together.

    Example:
        >>> mean = causal_lm_loss(jnp.zeros((1, 3, 8)), jnp.array([[1, 2, -100]]))
        >>> round(float(mean.total / mean.count), 4), float(mean.count)
        (2.0794, 1.0)
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {logits.shape} need labels of shape {logits.shape[:-1]}, got {labels.shape}"
        )
    if shift:
        # The labels move, not the logits: slicing logits would copy the largest array there is.
        labels = jnp.asarray(labels)  # torch's int64 becomes int32
        fill = jnp.full((*labels.shape[:-1], 1), ignore_index, labels.dtype)
        labels = jnp.concatenate([labels[..., 1:], fill], axis=-1)
    counted = labels != ignore_index
    picked = jnp.where(counted, labels, 0)
    wide = logits.astype(jnp.float32)
    target = jnp.squeeze(jnp.take_along_axis(wide, picked[..., None], axis=-1), -1)
    losses = jnp.where(counted, jax.nn.logsumexp(wide, axis=-1) - target, 0.0)
    return Mean(total=jnp.sum(losses), count=jnp.sum(counted, dtype=jnp.float32))


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
    if found is None or getattr(found, "shape", None) != ():
        raise ConversionError(
            'loss="module": the module returned no loss (an output `loss`, or a scalar). Give its'
            " labels in the example and in each batch, or a loss of the output"
        )
    return found
