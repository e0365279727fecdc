"""Whole numbers beyond 32 bits and float64 while `jax_enable_x64` is off: PyTorch's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge as tb
from fzero.errors import ConversionError


class Fn(nn.Module):
    def __init__(self, fn: Any, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.fn = fn
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.fn(*args)


IDS = torch.tensor([[3, 2**31 - 1, 5, -7], [2**30, 0, 1, -(2**31)]])
TABLE = torch.arange(10.0)
PLACES = torch.tensor([[0, 1], [2, 2]])
FAR = torch.tensor([2**40, 1, -(2**50), 3])
WHOLE = {
    "hash": lambda x: (x * 1000003 + 12345) % 5003,
    "add": lambda x: x + 1,
    "sub": lambda x: x - x.flip(1),
    "neg": lambda x: -x,
    "alpha": lambda x: torch.add(x, x, alpha=3) // 4,
    "square": lambda x: x**2,
    "shift": lambda x: (x << 5) ^ (x >> 3),
    "sum": lambda x: x.sum(1),
    "cumsum": lambda x: x.cumsum(1),
    "prod": lambda x: (x.abs() % 70000).prod(1),
    "matmul": lambda x: (x % 100003) @ x.T,
    "compare": lambda x: x * 4 > 2**33,
    "where": lambda x: torch.where(x * 2 > x, x * 2, x),
    "mean": lambda x: (x * 3).float().mean(1),
    "float": lambda x: (x * 1000003).float() * 0.5,
    "truncated": lambda x: (x.float() * 1e3).long(),
    "large": lambda x: x + torch.full((4,), 2**40),
    "largest": lambda x: torch.where(x > 2, x, torch.iinfo(torch.int64).max).amin(1),
    "sorted": lambda x: (x * 5).sort(1).values,
    "places": lambda x: (x * 5).sort(1).indices,
    "lookup": lambda x: TABLE[(x * 1000003) % 10],
    "embedding": lambda x: nn.functional.embedding((x * 1000003) % 10, TABLE[:, None]),
    "index_put": lambda x: torch.zeros(4, dtype=torch.long).index_put(
        (torch.zeros(8, dtype=torch.long),), x.flatten(), accumulate=True
    ),
    "constant": lambda x: torch.where(x > 2, x, FAR),
    "negative powers": lambda x: 3 ** (x % 5 - 2),
    "taken from the end": lambda x: x.take(torch.tensor([-1, 2])),
    "taken at one place": lambda x: x.take(x.argmax()),
    "nonzero_static of a number": lambda x: torch.nonzero_static(x[0, 0], size=2),
    "linspace": lambda x: x[0, :1] + torch.linspace(5, -9, 7, dtype=torch.long),
    "nonzero_static": lambda x: torch.nonzero_static(x > 2, size=6),
    "scatter add": lambda x: x.scatter(1, PLACES, x[:, :2], reduce="add"),
    "scatter multiply": lambda x: x.scatter(1, PLACES, 3, reduce="multiply"),
    "transposed number": lambda x: x[0, 0].t(),
    "int32 wraps": lambda x: x.to(torch.int32) * 1000003,
}  # fmt: skip


def all_of(functions: Any, x: torch.Tensor) -> Any:
    """Names, what PyTorch gives, and what the conversion gives in a compiled program."""
    module = Fn(lambda x: tuple(fn(x) for fn in functions.values()))
    found = jax.jit(tb.convert(module, x, train=False))(jnp.asarray(x.numpy()))
    return zip(functions, module(x), map(np.asarray, found), strict=True)


def test_whole_numbers_are_those_of_64_bits() -> None:
    for name, want, found in all_of(WHOLE, IDS):
        np.testing.assert_array_equal(found, want.numpy(), err_msg=name)


def test_what_fits_stays_in_32_bits() -> None:
    """Positions, comparisons and places are computed as before, in 32 bits."""

    def positions(x: torch.Tensor) -> Any:
        rows = torch.arange(x.shape[1])
        return rows[:, None] - rows + 1, (x > 3).sum(1), x.argmax(1) + 1, x.clamp(0, 9) * 7

    converted = tb.convert(Fn(positions), IDS, train=False)
    program = str(jax.make_jaxpr(converted)(IDS.numpy().astype(np.int32)))
    assert "i64" not in program


WEIGHT = torch.tensor([1.0, 2.0, 3.0])
FLOATS = {
    "angles": lambda x: torch.sin(x.double() * 1e8).float(),
    "thirds": lambda x: (x.double() / 3 - x / 3).float(),
    "kept": lambda x: x.double() / 3,
    "softmax": lambda x: x.to(torch.float64).softmax(0).float(),
    "rotary": lambda x: torch.cos(
        torch.outer(x, 1 / 10000 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8))
    ).float(),
    "zero-dimensional": lambda x: x * torch.tensor(0.5, dtype=torch.float64),
}  # fmt: skip


def test_float64_is_computed_in_float64() -> None:
    for name, want, found in all_of(FLOATS, WEIGHT):
        assert str(found.dtype) in str(want.dtype), name
        eps = np.finfo(found.dtype).eps  # XLA's sin and exp are not those of torch to the last bit
        np.testing.assert_allclose(found, want, rtol=4 * eps, atol=4 * eps, err_msg=name)


class Positional(nn.Module):
    """Angles in float64, beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, wide: bool) -> torch.Tensor:
        h = self.scale(x)
        return (h.double() if wide else h) * torch.sin(torch.arange(3).double() * 1e9).to(h.dtype)


def test_gradients_beside_float64_are_right_and_through_it_refused() -> None:
    module, x = Positional(), torch.ones(2, 3)
    module(x, False).sum().backward()
    converted = tb.convert(module, x, False)

    def total(params: Any, converted: Any = converted, wide: bool = False) -> Any:
        return jnp.sum(converted.apply(params, {}, x.numpy(), wide, train=True).output)

    for gradient in (jax.grad(total), jax.jit(jax.grad(jax.checkpoint(total)))):
        found = gradient(converted.params)
        np.testing.assert_allclose(found["scale.bias"], module.scale.bias.grad, rtol=1e-6)
    through = tb.convert(module, x, True)
    with pytest.raises(ConversionError, match=r"goes through float64, in \(root\) .*test_wide"):
        jax.grad(lambda p: total(p, through, True))(converted.params)


def test_float64_that_was_cut_is_refused_by_name_and_line() -> None:
    with pytest.raises(ConversionError, match=r"float64 with `args_0`(.|\n)*test_wide(.|\n)*x64"):
        tb.convert(Fn(lambda x: x / 3), WEIGHT.double(), train=False)
    third = torch.tensor([1 / 3], dtype=torch.float64)
    with pytest.raises(ConversionError, match="which JAX holds in 32 bits"):
        tb.convert(Fn(lambda x: (x * third).float()), WEIGHT, train=False)
    # What becomes float32 at once loses nothing.
    converted = tb.convert(Fn(lambda x: x.float() * 2), WEIGHT.double(), train=False)
    assert converted(WEIGHT.double()).tolist() == [2, 4, 6]


def test_buffers_count_and_do_not_overflow() -> None:
    class Counting(nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor
            self.register_buffer("n", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n.copy_(self.n * self.factor + 1)
            return x + self.n

    converted = tb.convert(Counting(1), torch.ones(2))
    assert converted.apply({}, converted.buffers, np.ones(2, np.float32)).buffers["n"] == 4
    with pytest.raises(ConversionError, match="buffer `n` may grow beyond 32 bits"):
        tb.convert(Counting(3), torch.ones(2))


def test_sparse_tensors_are_refused_by_name() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(ConversionError, match=r"argument `args\[0\]` has layout torch.sparse_coo"):
        tb.convert(Fn(lambda a: a.to_dense()), sparse)
    with pytest.raises(ConversionError, match=r"`a` has layout torch.sparse_coo"):
        tb.convert(Fn(lambda x: x, a=sparse), torch.ones(2))


class Looked(nn.Module):
    """Looks hashed words up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2)

    def forward(self, h: torch.Tensor, hashed: torch.Tensor) -> torch.Tensor:
        return h + self.table((hashed ^ 77) % 7)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Looked() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, hashed = torch.zeros(*x.shape, 2), x * 1000003 + 5
        for block in self.blocks:
            h = block(h, hashed)
        return h


def test_wide_values_enter_loops_over_layers() -> None:
    torch.manual_seed(0)
    module = Layers()
    converted = tb.convert(module, IDS)
    assert [stack.num for stack in converted.blocks.stacks] == [3]
    module(IDS).sum().backward()

    def total(params: Any) -> Any:
        out = converted.apply(params, {}, IDS.numpy(), train=True).output
        return jnp.sum(out), out

    slopes, found = jax.jit(jax.grad(total, has_aux=True))(converted.params)
    np.testing.assert_allclose(found, module(IDS).detach(), rtol=1e-6)
    for name, slope in converted.by_name(slopes).items():
        np.testing.assert_array_equal(slope, module.get_parameter(name).grad)
