"""`torch.autograd.grad` in a forward (forces of an energy): one operator, which JAX differentiates.

torch.export records what a forward computes, not what autograd does. While a module is exported the
call is one operator of this package; when the graph runs, the steps before it are differentiated
with respect to the values that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from fzero.errors import ConversionError


SLOPES = "torch_bridge.slopes.default"


def _shapes(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    further: bool,
) -> list[torch.Tensor]:
    return [torch.zeros_like(x) for x in inputs]


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_LIBRARY.define(
    "slopes(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds, bool further) -> Tensor[]"
)
_LIBRARY.impl("slopes", _shapes, "CompositeExplicitAutograd")
torch.library.register_fake("torch_bridge::slopes", _shapes, lib=_LIBRARY)


def record_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor, ...]:
    """What stands for `torch.autograd.grad` while a module is exported."""
    outs, ins, seeds = _listed(outputs), _listed(inputs), _listed(grad_outputs)
    if is_grads_batched or (allow_unused and not materialize_grads):
        raise ConversionError(
            "torch.autograd.grad in the forward: is_grads_batched is not converted, and"
            " allow_unused only with materialize_grads=True (zeros, not None)"
        )
    if any(x.is_complex() for x in (*outs, *ins)):
        raise ConversionError(
            "torch.autograd.grad in the forward: of complex numbers; use real ones"
        )
    if not seeds:
        seeds = [None] * len(outs)
    given = [
        torch.ones_like(x) if seed is None else seed for x, seed in zip(outs, seeds, strict=True)
    ]
    return tuple(torch.ops.torch_bridge.slopes(outs, ins, given, bool(create_graph)))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def slopes(
    run: Callable[[dict[str, Any]], Sequence[Any]],
    inputs: Sequence[str],
    values: Sequence[Any],
    seeds: Sequence[Any],
    further: bool,
) -> list[jax.Array]:
    """Gradients of `run(inputs by name)`, times `seeds`, with respect to some values.

    Args:
        run: the outputs, from values of the inputs.
        inputs: their names.
        values: their values.
        seeds: what each output's gradient is multiplied by.
        further: whether the result may be differentiated.
    """

    def outputs(*chosen: Any) -> list[Any]:
        return [jnp.asarray(x) for x in run(dict(zip(inputs, chosen, strict=True)))]

    found, pull = jax.vjp(outputs, *map(jnp.asarray, values))
    made = pull([jnp.asarray(s).astype(x.dtype) for s, x in zip(seeds, found, strict=True)])
    return [x if further else jax.lax.stop_gradient(x) for x in made]
