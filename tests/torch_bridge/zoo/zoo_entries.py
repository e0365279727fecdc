"""What a model of the zoo is, and the one evaluation that all its tests look at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from parity import leaves_of, numpy_of

import torch_bridge as tb


# The batch of the example and the batch that everything is compared at: never the same.
EXAMPLE_BATCH, TEST_BATCH = 2, 3
LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class Call:
    """Arguments of a forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One model: how to make it and call it, and how far apart the two may be.

    `fixed` names the arguments whose first dim is none of the batch.
    """

    make: Callable[[], torch.nn.Module]
    call: Callable[[int], Call]
    forward: float = 2e-5
    gradient: float = 1e-4
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """Both sides of one model, as numpy arrays; `before` is the module's own state_dict."""

    converted: tb.Converted
    before: dict[str, torch.Tensor]
    frozen: frozenset[str]
    evaluated: tuple[list[Any], list[Any]]
    trained: tuple[list[Any], list[Any]]
    gradients: tuple[dict[str, Any], dict[str, Any]]
    buffers: tuple[dict[str, Any], dict[str, Any]]
    stepped: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class _State:
    params: Any
    buffers: Any


def livelier(module: torch.nn.Module) -> torch.nn.Module:
    """The module with weights at which every parameter has an effect of its own.

    Right after initialisation biases are 0, norms are 1 and transformers' matrices are so small
    that attention is uniform: much could be wrong without a difference.
    """
    make = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=make)
            if parameter.ndim >= 2 and float(parameter.std()) < 0.03:
                parameter.mul_(5.0)
            else:
                parameter.add_(0.05 * noise.to(parameter.dtype))
    return module


def evaluate(entry: Entry, batch: int = TEST_BATCH) -> Result:
    """Convert at one batch size, then run torch and JAX at another, in both modes."""
    torch.manual_seed(3)
    module = livelier(entry.make())
    example = entry.call(EXAMPLE_BATCH)
    converted = tb.convert(module, *example.args, **example.kwargs)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    call = entry.call(batch)

    with torch.no_grad():
        evaluated = numpy_of(leaves_of(module.eval()(*call.args, **call.kwargs)))
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    trained = leaves_of(module(*call.args, **call.kwargs))
    counts = [leaf.requires_grad for leaf in trained]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(leaf.shape, generator=generator) / leaf.numel() ** 0.5
               for leaf in trained]  # fmt: skip
    _projection(trained, weights, counts, torch.sum).backward()
    gradients = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
        for name, p in module.named_parameters()
    }
    optimizer.step()
    got = _in_jax(converted, call, [w.numpy() for w in weights], counts)
    after = {name: numpy_of(b) for name, b in module.named_buffers()}
    stepped = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return Result(
        converted=converted,
        before=before,
        frozen=converted.frozen,
        evaluated=(got["evaluated"], evaluated),
        trained=(got["trained"], numpy_of(trained)),
        gradients=(converted.by_name(got["gradients"]), gradients),
        buffers=(converted.by_name(got["buffers"]), after),
        stepped=(tb.state_dict(converted, _State(got["params"], got["buffers"])), stepped),
    )


def _projection(leaves: Any, weights: Any, counts: Any, total: Any) -> Any:
    """A fixed random projection of every output that has a gradient."""
    terms = [
        total(abs(leaf) * weight) if _is_complex(leaf) else total(leaf * weight)
        for leaf, weight, counted in zip(leaves, weights, counts, strict=True)
        if counted
    ]
    return functools.reduce(lambda a, b: a + b, terms)


def _is_complex(leaf: Any) -> bool:
    return "complex" in str(leaf.dtype)


def _in_jax(
    converted: tb.Converted, call: Call, weights: list[Any], counts: list[bool]
) -> dict[str, Any]:
    """Everything about a model in one compiled program: compiling is what takes the time."""
    args, kwargs = numpy_of(call.args), numpy_of(dict(call.kwargs))
    tx = optax.sgd(LEARNING_RATE, MOMENTUM)

    def loss(params: Any, buffers: Any) -> Any:
        out, buffers = converted.apply(params, buffers, *args, train=True, **kwargs)
        leaves = leaves_of(out)
        return _projection(leaves, weights, counts, jnp.sum), (leaves, buffers)

    def everything(params: Any, buffers: Any) -> dict[str, Any]:
        evaluated = leaves_of(converted.apply(params, buffers, *args, **kwargs).output)
        (_, (trained, new)), gradients = jax.value_and_grad(loss, has_aux=True)(params, buffers)
        updates, _ = tx.update(gradients, tx.init(params), params)
        return {
            "evaluated": evaluated,
            "trained": trained,
            "gradients": gradients,
            "buffers": new,
            "params": optax.apply_updates(params, updates),
        }

    compiled = jax.jit(everything)
    return jax.device_get(compiled(converted.params, converted.buffers))
