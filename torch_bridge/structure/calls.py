"""The calls of `forward` in a loss of a module that is one function: what each leaves to the next.

Buffers, and what experts dropped, go from call to call beside the values that `forward` returns. A
function that JAX transforms (`jax.checkpoint`, `jax.grad`) hands on nothing but what it returns, so
that within one a call may change neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core

from fzero.errors import ConversionError
from torch_bridge.export.stand_ins.capacity import METRIC, told


class Calls:
    """`forward` of one loss: each call has a key of its own, and the buffers of the one before.

    Args:
        apply: `(buffers, args, kwargs, key)` to an output and buffers.
        buffers: those of the first call.
        rng: the step's key.
        counted: whether outputs are pairs with what experts dropped.
    """

    def __init__(
        self, apply: Callable[..., Any], buffers: Mapping[str, Any], rng: Any, counted: bool
    ) -> None:
        self._apply, self._rng, self._counted = apply, rng, counted
        self.buffers = buffers
        self._dropped: list[Any] = []
        self._calls = 0
        self._trace = core.get_opaque_trace_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = None if self._rng is None else jax.random.fold_in(self._rng, self._calls)
        self._calls += 1
        out, buffers = self._apply(self.buffers, args, kwargs, key)
        written = [name for name, value in buffers.items() if value is not self.buffers[name]]
        if (written or self._counted) and core.get_opaque_trace_state() != self._trace:
            raise ConversionError(_within(written))
        self.buffers = buffers
        if self._counted:
            out, count = out
            self._dropped.append(count)
        return out

    def told(self, result: Any) -> Any:
        """What the loss gives, with what all calls dropped as a metric."""
        return told(result, self._dropped) if self._dropped else result


def _within(written: list[str]) -> str:
    what = f"writes the buffer `{written[0]}`" if written else f"counts the metric {METRIC!r}"
    return (
        "the loss calls forward within a function that JAX transforms (jax.checkpoint, jax.jit,"
        f" jax.grad, jax.vmap, a loop), and forward {what}, which would be lost there. Call it as"
        " it is (what is kept for the backward pass, a plan says: Plan(remat='dots')), or, within"
        " jax.checkpoint or jax.jit, as a chain, where blocks are rolled: model(loss, chain=None)"
    )
