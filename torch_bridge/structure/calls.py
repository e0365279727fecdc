"""The calls of `forward` in a loss of a module that is one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fzero.errors import ConversionError
from fzero.programs.forward_calls import ForwardCalls
from torch_bridge.export.stand_ins.capacity import METRIC, told


# Beside the buffers, what the experts of all calls dropped.
_DROPPED = f"the metric {METRIC!r}"


def calls(
    apply: Callable[..., Any], buffers: Mapping[str, Any], rng: Any, counted: bool
) -> ForwardCalls:
    """`forward` of one loss.

    Args:
        apply: `(buffers, args, kwargs, key)` to an output and buffers.
        buffers: those of the first call.
        rng: the step's key.
        counted: whether outputs are pairs with what experts dropped.
    """

    def applied(left: dict[str, Any], key: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        left = dict(left)
        before = left.pop(_DROPPED, 0)
        out, new = apply(left, args, kwargs, key)
        if not counted:
            return out, new
        return out.output, {**new, _DROPPED: before + out.dropped}

    return ForwardCalls(applied, dict(buffers), rng, _refused)


def finished(forward: ForwardCalls, result: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """What a loss gives, the buffers after all calls, and metrics with what was dropped."""
    left = dict(forward.left)
    if _DROPPED in left:
        result = told(result, left.pop(_DROPPED))
    value, metrics = result if isinstance(result, tuple) else (result, {})
    return value, left, metrics


def _refused(what: str) -> ConversionError:
    return ConversionError(
        f"{what}, or, within jax.checkpoint or jax.jit, as a chain, where blocks are rolled:"
        " model(loss, chain=None)"
    )
