"""Functions of PyTorch beside their conversions: values and gradients, at points of choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import torch_bridge as tb


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *x: torch.Tensor) -> Any:
        return self.fn(*x)


def all_at_once(cases: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]) -> Any:
    """Of each function on inputs of its own, outputs and gradients of their sums: PyTorch's and
    ours. All are one module: converted and compiled one by one, they take ten times as long."""
    tracked = {name: [x.clone().requires_grad_() for x in xs] for name, (_, xs) in cases.items()}
    wants = {name: fn(*tracked[name]) for name, (fn, _) in cases.items()}

    def each(inputs: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
        return {name: fn(*inputs[name]) for name, (fn, _) in cases.items()}

    inputs = {name: list(xs) for name, (_, xs) in cases.items()}
    converted = tb.convert(Fn(each), inputs, train=False)
    arrays = {name: [jnp.asarray(x.numpy()) for x in xs] for name, xs in inputs.items()}
    # A function without a gradient (round of nothing) has none here either.
    sloped = {name: arrays.pop(name) for name, want in wants.items() if want.requires_grad}

    @jax.jit  # one program: operator by operator, compiling takes twice as long
    def run(sloped: Any, others: Any) -> Any:
        def outputs(sloped: Any) -> Any:
            given = {name: {**sloped, **others}[name] for name in cases}
            return converted.apply({}, converted.buffers, given).output

        got, pull = jax.vjp(outputs, sloped)
        return got, pull({name: jnp.ones_like(y) for name, y in got.items()})

    got, (found,) = run(sloped, arrays)
    results = {}
    for name, want in wants.items():
        slopes = want.requires_grad
        grads = torch.autograd.grad(want.sum(), tracked[name], allow_unused=True) if slopes else ()
        wanted = [
            np.zeros(x.shape) if g is None else g.numpy()
            for g, x in zip(grads, inputs[name] if slopes else (), strict=True)
        ]
        of_ours = [np.asarray(g) for g in found.get(name, ())]
        results[name] = want.detach().numpy(), np.asarray(got[name]), wanted, of_ours
    return results


def both(fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Outputs and gradients of one function."""
    return all_at_once({"": (fn, inputs)})[""]


def agree(fn: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Asserts PyTorch's values and gradients: float32's roundings, NaN where it has NaN."""
    require_equal(both(fn, *inputs), inputs)


def agree_all(*cases: tuple[Any, ...]) -> None:
    """The same of several functions, each with its inputs: `(fn, *inputs)`."""
    found = all_at_once({str(n): (fn, inputs) for n, (fn, *inputs) in enumerate(cases)})
    for result, (_, *inputs) in zip(found.values(), cases, strict=True):
        require_equal(result, tuple(inputs))


def require_equal(result: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    want, got, wanted, found = result
    assert want.dtype == got.dtype or want.dtype == np.int64
    assert want.shape == got.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for g, w, x in zip(found, wanted, inputs, strict=bool(found)):
        # A NaN has no slope: whatever loss it reaches is NaN in both.
        lost = torch.isnan(x).numpy()
        if want.shape == w.shape[: want.ndim]:
            lost = lost | np.isnan(want).reshape(*want.shape, *[1] * (w.ndim - want.ndim))
        g, w = (np.where(lost, 0, one) for one in (g, w))
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)
