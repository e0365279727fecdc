"""The one comparison that most tests are made of: torch and the converted module, values and
gradients, in both modes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_bridge as tb


FORWARD_RTOL = 2e-5
GRADIENT_RTOL = 1e-4


def numpy_of(value: Any) -> Any:
    return jax.tree.map(
        lambda x: x.detach().numpy().copy() if isinstance(x, torch.Tensor) else x, value
    )


def relative_error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if not want.size:
        return 0.0
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    scale = max(float(np.abs(np.nan_to_num(want)).max()), 1e-6)
    return float(np.abs(np.nan_to_num(got) - np.nan_to_num(want)).max()) / scale


def leaves_of(output: Any) -> list[Any]:
    if isinstance(output, torch.Tensor | np.ndarray | jax.Array):
        return [output]
    if isinstance(output, dict):
        return [leaf for value in output.values() for leaf in leaves_of(value)]
    if isinstance(output, tuple | list):
        return [leaf for value in output for leaf in leaves_of(value)]
    return []


def convert(module: torch.nn.Module, *args: Any, both: bool, **kwargs: Any) -> tb.Converted:
    """For both modes, or for eval mode in half of the time; the leaves are the same."""
    return tb.convert(module, *args, train=both, masters=True, **kwargs)


def check_parity(
    module: torch.nn.Module,
    *args: Any,
    train: bool = False,
    other_args: tuple[Any, ...] | None = None,
    converted: tb.Converted | None = None,
    forward_rtol: float = FORWARD_RTOL,
    gradient_rtol: float = GRADIENT_RTOL,
    **kwargs: Any,
) -> tb.Converted:
    """Convert (once, for eval mode alone if `train` is false), then compare outputs and all
    gradients on the same inputs.

    The loss is a fixed random projection of every floating-point output, so that each output
    element has a gradient of its own. Float inputs are differentiated as well.
    """
    converted = converted or convert(module, *args, both=train, **kwargs)
    inputs = other_args if other_args is not None else args
    module.train(train)
    module.zero_grad()
    tracked = [
        a.detach().clone().requires_grad_(True)
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in inputs
    ]
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    want = leaves_of(module(*tracked, **kwargs))
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=tuple(w.shape)).astype(np.float32) for w in want]
    differentiable = [w.is_floating_point() and w.requires_grad for w in want]

    def loss(params: Any, floats: list[Any]) -> Any:
        supply = iter(floats)
        call = [
            next(supply) if isinstance(t, torch.Tensor) and t.is_floating_point() else numpy_of(t)
            for t in tracked
        ]
        out, _ = converted.apply(params, converted.buffers, *call, train=train, **numpy_of(kwargs))
        leaves = leaves_of(out)
        total = jnp.float32(0)
        for leaf, weight, counts in zip(leaves, weights, differentiable, strict=True):
            if counts:
                total = total + jnp.sum(leaf.astype(jnp.float32) * weight)
        return total, leaves

    floats = [numpy_of(t) for t in tracked if isinstance(t, torch.Tensor) and t.requires_grad]
    floats = [jnp.asarray(f) for f in floats]
    # Compiled once and run once: LLVM optimisation would cost more than it saves.
    quick = {"xla_backend_optimization_level": 0}
    grad_fn = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), compiler_options=quick
    )
    (_, got), (param_grads, input_grads) = grad_fn(converted.params, floats)
    for g, w in zip(got, want, strict=True):
        assert g.shape == tuple(w.shape)
        assert relative_error(g, w.detach().numpy()) <= forward_rtol
    if any(differentiable):
        sum(
            (w * torch.from_numpy(weight)).sum()
            for w, weight, counts in zip(want, weights, differentiable, strict=True)
            if counts
        ).backward()
    for name, buffer in module.named_buffers():  # the forward in train mode has moved them
        buffer.copy_(before[name])
    _check_gradients(module, converted, param_grads, gradient_rtol)
    wanted = [t for t in tracked if isinstance(t, torch.Tensor) and t.requires_grad]
    for g, t in zip(input_grads, wanted, strict=True):
        reference = torch.zeros_like(t) if t.grad is None else t.grad
        assert relative_error(g, reference.numpy()) <= gradient_rtol
    return converted


def _check_gradients(
    module: torch.nn.Module, converted: tb.Converted, grads: Any, rtol: float
) -> None:
    named = dict(module.named_parameters())  # tied ones once, under their first name
    grads = converted.by_name(grads)
    trained = {name for name, value in named.items() if value.requires_grad}
    assert trained <= set(grads) <= set(named)
    for name, got in grads.items():
        reference = named[name].grad
        want = np.zeros(got.shape) if reference is None else reference.numpy()
        assert relative_error(got, want) <= rtol, name
