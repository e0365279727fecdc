"""JAX functions within PyTorch: values, gradients of any order, memory, constants."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import torch_bridge as tb


@pytest.fixture(autouse=True)
def _promotes() -> Any:
    with jax.numpy_dtype_promotion("standard"):  # the functions are a user's
        yield


def test_results_of_jax_share_no_memory_with_arguments_or_each_other() -> None:
    """JAX hands an argument on as a result; what torch writes to one, it would not see in both."""
    x = torch.full((3,), 2.0, requires_grad=True)
    first, second, _ = tb.wrap(lambda x: (x, x, x * 2))(x)
    with torch.no_grad():
        first.mul_(10)
    assert x.tolist() == second.tolist() == [2.0] * 3
    y = tb.wrap(lambda x: x)(x)
    y.retain_grad()
    y.sum().backward()
    x.grad.mul_(5)
    assert y.grad.tolist() == [1.0] * 3
    held = types.SimpleNamespace(params=jnp.ones(4))
    tb.wrap(lambda held, x: held.params)(held, torch.ones(1)).zero_()
    assert held.params.tolist() == [1.0] * 4


def test_transformations_of_torch_around_jax_are_refused_or_pass_it_by() -> None:
    wrapped, x = tb.wrap(jnp.sin), torch.ones(3)
    compiled = torch.compile(lambda x: wrapped(x) + 1, backend="eager")
    torch.testing.assert_close(compiled(x), torch.sin(x) + 1)
    for call in (torch.func.vmap(wrapped), torch.func.grad(lambda x: wrapped(x).sum())):
        with pytest.raises(RuntimeError, match=r"torch\.func.*jax\.vmap"):
            call(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"jax\.jvp"):
        wrapped(forward_ad.make_dual(x, x))
    with pytest.raises(TypeError, match=r"to_dense\(\)"):
        wrapped(x.to_sparse())


def test_a_jax_function_in_torch_has_its_gradients() -> None:
    def function(x: Any, scale: Any, ids: Any, power: int = 2) -> Any:
        return {"y": jnp.sin(x * scale["s"]) ** power, "ids": ids + 1}

    wrapped = tb.wrap(function)
    x = torch.randn(3, 4, requires_grad=True)
    s = torch.randn(4, requires_grad=True)
    ids = torch.arange(3, dtype=torch.int32)
    hidden = x * 2
    out = wrapped(hidden, {"s": s}, ids, power=3)
    assert out["ids"].tolist() == [1, 2, 3]
    out["y"].square().sum().backward()
    got = x.grad.clone(), s.grad.clone()
    x.grad = s.grad = None
    (torch.sin(x * 2 * s) ** 3).square().sum().backward()
    torch.testing.assert_close(got, (x.grad, s.grad), rtol=1e-4, atol=1e-5)
    # What was written to meanwhile is found, as in torch itself.
    y = wrapped(x.detach().requires_grad_(), {"s": s}, ids)["y"]
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_jax_function_in_torch_has_gradients_of_gradients(dtype: torch.dtype) -> None:
    """As in torch, to the third order; a gradient penalty has one of the second."""
    torch.manual_seed(0)
    x, y = (torch.randn(3, 2, dtype=dtype, requires_grad=True) for _ in range(2))

    def ours(x: Any, y: Any) -> Any:
        return jnp.sin(x) * y.conj(), jnp.argmax(jnp.abs(x), 1), x

    def theirs(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.sin(x) * y.conj(), x.abs().argmax(1), x

    def of(function: Any) -> list[torch.Tensor]:
        made, _, same = function(2 * x, y)
        found, value = list[torch.Tensor](), (made * same).abs().square().sum()
        for _ in range(3):
            gradients = torch.autograd.grad(value, (x, y), create_graph=True)
            found += gradients
            value = sum(g.abs().square().sum() for g in gradients)
        return found

    for got, want in zip(of(tb.wrap(ours)), of(theirs), strict=True):
        assert (got - want).abs().max().item() < 1e-5 * want.abs().max().item()


COMPLEX = {
    "into": (lambda z, x: jnp.imag(z * z), lambda z, x: (z * z).imag),
    "out of": (lambda z, x: x * (1 + 2j), lambda z, x: x * (1 + 2j)),
    "through": (
        lambda z, x: jnp.fft.irfft(jnp.fft.rfft(x) * z, 4),
        lambda z, x: torch.fft.irfft(torch.fft.rfft(x) * z, n=4),
    ),
}


@pytest.mark.parametrize(("ours", "torchs"), COMPLEX.values(), ids=COMPLEX)
def test_gradients_of_complex_numbers_are_pytorchs(ours: Any, torchs: Any) -> None:
    """JAX's are the conjugates: silently, imaginary parts had the other sign."""
    found = []
    for function in (tb.wrap(ours), torchs):
        z = torch.tensor([1 + 1j, 2 - 1j, 0.5j], requires_grad=True)
        x = torch.tensor([1.0, 2.0, -1.0, 0.5], requires_grad=True)
        y = function(z, x)
        torch.view_as_real(y + 0j).mul(torch.tensor([1.0, 3.0])).sum().backward()
        found.append([None if leaf.grad is None else leaf.grad.numpy() for leaf in (z, x)])
    for one, other in zip(*found, strict=True):
        given = np.zeros_like(one) if other is None else other  # torch's: nothing was read
        np.testing.assert_allclose(one, given, rtol=1e-5, atol=1e-5)


class Factor:
    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Factor()"


def test_a_jax_function_in_torch_sees_each_constant_as_it_is() -> None:
    """Those that print alike, and those that were changed since."""
    x = torch.ones(2)
    times = tb.wrap(lambda x, by: x * jnp.sum(getattr(by, "value", by)))
    long = np.zeros(5000, np.float32)
    for asked in (lambda a: a, jnp.asarray):
        assert times(x, asked(long))[0] == 0
        long[2500] = 7
        assert times(x, asked(long))[0] == 7
        long[2500] = 0
    factor = Factor(2.0)
    assert times(x, factor)[0] == 2
    assert times(x, Factor(3.0))[0] == 3
    factor.value = 5.0
    x.requires_grad_()
    times(x, factor).sum().backward()
    assert x.grad[0] == 5
    assert times(torch.ones(3), long)[0] == 0
    assert times(x, 1)[0] == times(x, 1.0)[0] == 1


def test_what_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"tb\.wrap: expected a function of arrays, got 3"):
        tb.wrap(3)  # type: ignore[arg-type]
