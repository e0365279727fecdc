"""Whole numbers beyond 32 bits and float64 while `jax_enable_x64` is off: PyTorch's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from parity import check_parity
from torch import nn

import fzero as fz
import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.lower.reduce import argmax, argmin


pytestmark = pytest.mark.traced_once


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
    "compare far": lambda x: (x < 2**40) & (x.clamp(max=2**40) == x),
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
    # Ranges of what is multiplied or subtracted next say whether that fits.
    "remainder by a negative number": lambda x: (x.abs() % -70000) * 70000,
    "remainder with the sign of the first": lambda x: x.fmod(70000) - (2**31 - 1),
    "square of what may be 0": lambda x: x.clamp(-50000, 50000) ** 2 - 2500000000,
    "all bits of two numbers": lambda x: ((x % 2 + 32768) | (x % 2 + 32766)) * 40000,
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


def test_quotients_and_remainders_may_be_0_and_sizes_small() -> None:
    functions = {
        "few of a free size": lambda x: (x.clamp(9, 10).sum() - 9 * 2**29) % 5003,
        "the first of a free size": lambda x: (x.clamp(9, 10).cumsum(0) - 9 * 2**29) % 5003,
        "quotient": lambda x: (2**31 - x.clamp(0, 9) // 20) // 2,
        "remainder": lambda x: (2**31 - x % 5) // 2,
    }
    for name, want, found in all_of(functions, torch.tensor([5, 7])):
        np.testing.assert_array_equal(found, want.numpy(), err_msg=name)


def test_indices_beyond_32_bits_do_not_come_round_to_others() -> None:
    """As any index outside, which torch refuses, they read NaN."""
    looked_up = Fn(lambda x: nn.functional.embedding(x * 2**32 + x % 2, TABLE[:, None]))
    found = tb.convert(looked_up, torch.tensor([0, 0]), train=False)(np.int32([0, 1]))
    np.testing.assert_array_equal(found[:, 0], [0.0, np.nan])


def test_what_fits_stays_in_32_bits() -> None:
    """Positions, comparisons and places are computed as before, in 32 bits."""

    def positions(x: torch.Tensor) -> Any:
        rows = torch.arange(x.shape[1])
        few = x.clamp(0, 9)
        places = rows[:, None] - rows + 1, (x > 3).sum(1), x.argmax(1) + 1
        bounded = x.clamp(max=9).clamp(min=0), torch.fill(few, 2), torch.rsub(few, 1)
        added = few.scatter(1, PLACES, few[:, :2], reduce="add")
        return *places, few * 7, added * 7, *(one * 7 for one in bounded)

    converted = tb.convert(Fn(positions), IDS, train=False)
    program = str(jax.make_jaxpr(converted)(IDS.numpy().astype(np.int32)))
    assert "i64" not in program


def test_sums_over_a_batch_are_of_as_many_rows_as_come() -> None:
    """One row's number fits; how many rows there are is not known when a module is converted."""
    module = Fn(lambda x: (x.clamp(0, 2**30).sum(), x.clamp(0, 2**30).sum(0) // 8))
    converted = tb.convert(module, torch.ones(4, 2, dtype=torch.long), train=False)
    x = np.full((6, 2), 2**30, np.int32)
    for found, want in zip(converted(x), module(torch.from_numpy(x).long()), strict=True):
        np.testing.assert_array_equal(found, want.numpy())


WEIGHT = torch.tensor([1.0, 2.0, 3.0])
T64 = torch.tensor([1 / 3, 0.1, 3.0, 4.0], dtype=torch.float64)
FLOATS = {
    "angles": lambda x: torch.sin(x.double() * 1e8).float(),
    "constant": lambda x: (x.double() * T64[:3] - x / 3).float(),
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
    # An operator that widens by itself, differentiated as a step does: once it is a program.
    inside = tb.convert(Fn(lambda x: x.softmax(0, dtype=torch.float64).float()), x, train=False)
    for way in (jax.jit, jax.checkpoint):
        with pytest.raises(ConversionError, match=r"goes through float64, in \(root\) .*test_wide"):
            jax.grad(way(lambda x: jnp.sum(inside(x))))(x.numpy())


def test_float64_that_was_cut_is_refused_by_name_and_line() -> None:
    with pytest.raises(ConversionError, match=r"float64 with `args_0`(.|\n)*test_wide(.|\n)*x64"):
        tb.convert(Fn(lambda x: x / 3), WEIGHT.double(), train=False)
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
        tb.convert(Counting(1003), torch.ones(2))


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


class Chained(nn.Module):
    """Blocks that hand a second value on."""

    def __init__(self, step: Any, num: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Step(step) for _ in range(num))

    def forward(self, h: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h, second = block(h, second)
        return h


class Step(nn.Module):
    def __init__(self, step: Any) -> None:
        super().__init__()
        self.table, self.step = nn.Embedding(7, 2), step

    def forward(self, h: torch.Tensor, second: torch.Tensor) -> Any:
        return self.step(self.table, h, second)


def hashed(table: Any, h: torch.Tensor, ids: torch.Tensor) -> Any:
    ids = ids * 1001 + 1
    return h + table(ids % 7), ids


def counted(table: Any, h: torch.Tensor, places: torch.Tensor) -> Any:
    return h + table(places % 7), places + 1


def summed(table: Any, h: torch.Tensor, total: torch.Tensor) -> Any:
    return h * 0.5 + total.float() + table.weight[0, 0], total + h.detach().double() / 3


@pytest.mark.parametrize(
    "step", [hashed, *(pytest.param(x, marks=pytest.mark.nightly) for x in (counted, summed))]
)
def test_blocks_that_hand_64_bits_on_are_computed_one_by_one(step: Any) -> None:
    torch.manual_seed(0)
    module = Chained(step, 4)
    h = torch.ones(3, 2)
    second = h / 7 if step is summed else torch.tensor([1, 5, 2**30])
    converted = tb.convert(module, h, second)
    assert not converted.blocks.stacks
    assert "64 bits" in str(converted.blocks)
    np.testing.assert_allclose(converted(h, second), module(h, second).detach(), rtol=1e-6)


def test_attention_in_float64_with_a_mask_of_free_sizes() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).float()

    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    converted = tb.convert(Fn(attend), x, train=False)
    np.testing.assert_allclose(converted(x[:, :4]), attend(x[:, :4]), rtol=1e-6, atol=1e-7)


SMALL = {
    "uint16": lambda x: x + torch.tensor([1, 2, 3], dtype=torch.uint16).long(),
    "uint32": lambda x: x + torch.tensor([1, 2, 3], dtype=torch.uint32).long(),
    "uint64": lambda x: x + torch.tensor([1, 2, 3], dtype=torch.uint64).long(),
    "compared": lambda x: (x * 1.1).double() > 1.1,
    "several": lambda x: torch.linalg.qr(x.double()[:, None])[1].abs().float(),
    "sorted": lambda x: torch.sort(x.double(), 0).values.float(),
    "table": lambda x: x + T64[:3].float(),
    "root": lambda x: x * torch.tensor(np.sqrt(3.0)),
    "far": lambda x: (FAR % 1000003).float().sum() + x,
    "large": lambda x: x.long() < 2**40,
    "clamped": lambda x: x.long().clamp(max=2**40),
    "rsub": lambda x: torch.rsub(x.long(), 5, alpha=3),
    "rsub far": lambda x: torch.rsub(x.to(torch.int32).long(), 5, alpha=2**31) // 2**20,
    "not": lambda x: ~(x.long() - 4),
    "and": lambda x: (x.long() * -(2**31)) & 255,
}  # fmt: skip


def test_what_converted_before_still_does() -> None:
    for name, want, found in all_of(SMALL, WEIGHT):
        np.testing.assert_allclose(found, want, rtol=1e-6, err_msg=name)
    converted = tb.convert(Fn(lambda x: x[:2].view(2, 1).float() * 2), WEIGHT.double(), train=False)
    assert converted(WEIGHT.double()).tolist() == [[2], [4]]


def test_gradients_that_pytorch_does_not_send_are_not_refused() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (x.double() / 3).float()
        top = x.double().softmax(0).detach().float()
        return (x * scale + top) * (x.double() > 1.5) * x.double().round().float()

    x = WEIGHT.clone().requires_grad_()
    forward(x).sum().backward()
    converted = tb.convert(Fn(forward), WEIGHT)
    slope = jax.grad(lambda x: jnp.sum(converted.apply({}, {}, x, train=True).output))
    np.testing.assert_allclose(slope(jnp.asarray(WEIGHT.numpy())), x.grad, rtol=1e-6)


COUNTS = {
    "one_hot": lambda n, at: n.add_(nn.functional.one_hot(at, 4).sum((0, 1))),
    "scatter": lambda n, at: n.scatter_add_(0, at.flatten(), torch.ones_like(at.flatten())),
    "index": lambda n, at: n.index_add_(0, at.flatten(), torch.ones_like(at.flatten())),
    "put": lambda n, at: n.index_put_((at,), torch.ones_like(at), accumulate=True),
    "unknown": lambda n, at: n.add_((at[:, :1].T @ at[:, 1:]).sum()),
}  # fmt: skip


def test_counters_that_add_convert() -> None:
    class Counters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in COUNTS:
                self.register_buffer(name, torch.zeros(4, dtype=torch.long))

        def forward(self, at: torch.Tensor) -> torch.Tensor:
            for name, count in COUNTS.items():
                count(self.get_buffer(name), at)
            return at * 2

    module, at = Counters(), torch.tensor([[0, 1], [3, 3], [1, 3]])
    converted = tb.convert(module, at, train=False)
    apply = jax.jit(lambda buffers, at: converted.apply({}, buffers, at, train=False).buffers)
    found = apply(converted.buffers, at.numpy())
    module(at)
    for name in COUNTS:
        assert found[name].dtype == jnp.int32, name
        assert found[name].tolist() == module.get_buffer(name).tolist(), name


def test_random_whole_numbers_stay_in_32_bits() -> None:
    def draw(x: torch.Tensor) -> Any:
        return (torch.randint(7, (64,)), torch.randint_like(x.long(), 3, 9) + 1,
                torch.multinomial(x, 2) + 1, torch.randint(2, 5, (3,)).square())  # fmt: skip

    converted = tb.convert(Fn(draw), WEIGHT, train=False)
    found = converted.apply({}, {}, WEIGHT.numpy(), train=False, rng=jax.random.key(0)).output
    assert {x.dtype for x in found} == {jnp.dtype(jnp.int32)}


def test_whole_numbers_are_drawn_from_a_first_one_beyond_32_bits() -> None:
    module = Fn(lambda x: torch.randint(-(2**31) - 2**30, 5, (64,)) // 2**20 + x)
    converted = tb.convert(module, torch.tensor([0]), train=False)
    key = jax.random.key(0)
    found = np.asarray(converted.apply({}, {}, np.array([0]), train=False, rng=key).output)
    assert -3072 <= found.min() < -2048
    assert -1024 < found.max() <= 0


def test_arrays_of_64_bits_are_not_cut() -> None:
    converted = tb.convert(Fn(lambda x: x + 1), torch.tensor([3]), train=False)
    with jax.enable_x64(True):
        small, large = jnp.asarray([3]), jnp.asarray([2**40])
    assert converted(small).tolist() == [4]
    with pytest.raises(ConversionError, match="do not fit into int32"):
        converted(large)
    with pytest.raises(ConversionError, match="`args"):
        jax.jit(converted)(large)


@pytest.mark.parametrize(
    ("example", "given"),
    [
        (torch.uint8, np.array([300])), (torch.uint8, np.array([-1])),
        (torch.int8, np.array([200], np.uint8)), (torch.bool, np.array([7])),
        (torch.int64, np.array([3_000_000_000], np.uint32)),
    ],
)  # fmt: skip
def test_whole_numbers_are_not_wrapped_to_the_examples_dtype(
    example: torch.dtype, given: np.ndarray[Any, Any]
) -> None:
    converted = tb.convert(Fn(lambda x: x / 2), torch.zeros(1, dtype=example), train=False)
    with pytest.raises(ConversionError, match=r"do not fit into .*, the example's dtype"):
        converted(given)
    assert converted(np.sign(given) ** 2).tolist() == [0.5]
    assert converted(np.ones(1, np.bool_)).tolist() == [0.5]
    with pytest.raises(ConversionError, match=r"some may not fit: give .astype\(np\."):
        jax.jit(converted)(given.astype(np.uint32))


class Residual(nn.Linear):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(super().forward(h))


class Between(nn.Module):
    """Hashes what it is given first, and looks it up behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.behind = nn.Embedding(50, 8), nn.Embedding(97, 8)
        self.blocks = nn.ModuleList(Residual(8, 8) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hashed, turned = ids * 1000003 * 1000003 + 12345, ids.double() * 1e9 / 3
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        return h * self.behind(hashed % 97) * torch.sin(turned).float()[..., None]


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [1, 3])
def test_64_bits_are_read_on_another_stage_of_a_pipeline(zero: int) -> None:
    torch.manual_seed(0)
    module, ids = Between(), torch.arange(32).reshape(8, 4) + 3
    model = tb.convert(module, ids[:2]).model(lambda forward, b: jnp.mean(forward(b) ** 2))
    plan, devices = fz.Plan(zero=zero, data=2, pipe=2, microbatches=2), jax.devices()[:4]
    state = fz.init(model, optax.sgd(0.1), plan, rng=0, devices=devices)
    step = fz.train_step(model, optax.sgd(0.1), plan, devices=devices)
    state, metrics = step(state, ids.numpy().astype(np.int32))
    want = (module(ids) ** 2).mean()
    want.backward()
    np.testing.assert_allclose(metrics["loss"], want.detach(), rtol=1e-6)
    norm = sum(float((p.grad**2).sum()) for p in module.parameters() if p.grad is not None) ** 0.5
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


class Hashed(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids * 1000003 * 1000003


def test_64_bits_between_modules_of_a_sequential_are_refused_by_name() -> None:
    modules = nn.Sequential(Hashed(), nn.Embedding(97, 2))
    modules[1].forward = lambda hashed: modules[1].weight[hashed % 97]  # type: ignore[method-assign]
    chain = tb.sequential(modules, IDS, loss=lambda y, batch: jnp.mean(y), inputs=None)
    with pytest.raises(ConversionError, match=r"argument `hashed`: whole numbers of 64 bits"):
        jax.eval_shape(
            lambda ids: chain.model.loss(chain.params, {}, ids, jax.random.key(0), True),
            IDS.numpy().astype(np.int32),
        )


def _places(x: torch.Tensor) -> Any:
    """Where extremes are, among whole numbers that may not fit into 32 bits and in float64."""
    whole, double = (x * 2.0**40).long(), x.detach().double()
    found = whole.argmax(1), whole.argmin(), *whole.max(1), *whole.min(0), whole.mode(1)[0]
    return x, *found, double.argmax(1, keepdim=True), *double.min(1), double.mode(1)[0]


def test_places_of_extremes_are_found_in_64_bits_beside_a_gradient() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-1.0, -3.0, -1.0, -3.0], [2.0, 5.0, 2.0, 5.0]])
    converted = tb.convert(Fn(_places), x, train=False)

    def loss(x: Any) -> Any:
        first, *found = converted.apply({}, {}, x).output
        return first.sum(), found

    (_, found), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(x.numpy()))
    assert (slope == 1).all()
    for got, want in zip(found, _places(x)[1:], strict=True):
        np.testing.assert_array_equal(got, want.numpy())
    assert int(argmax(jnp.asarray([[1.0, np.nan, 9.0, np.nan]]), keepdims=True)[0, 0]) == 1
    assert int(argmin(np.asarray([3.0, np.nan, -1.0]), axis=-1)) == 1


def test_a_sum_of_complex_numbers_is_complex() -> None:
    module, x = Fn(lambda x: torch.view_as_real(torch.complex(x, x * x).sum(0))), torch.rand(3, 4)
    np.testing.assert_allclose(tb.convert(module, x)(x), module(x), rtol=1e-6)


def test_exponents_and_numbers_that_fill_may_be_complex() -> None:
    def raised(x: torch.Tensor) -> Any:
        z = torch.complex(x, x * x) ** (1.5 + 0.5j)
        return torch.view_as_real(z), torch.view_as_real(x ** (1j) + torch.full((4,), 2 - 1j))

    check_parity(Fn(raised), torch.rand(3, 4) + 0.5)


def test_the_factor_of_a_complex_matrix_has_pytorchs_gradient() -> None:
    def factor(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x * x.sin())
        return torch.view_as_real(torch.linalg.cholesky(z @ z.mH + torch.eye(4)))

    check_parity(Fn(factor), torch.rand(4, 4, generator=torch.Generator().manual_seed(0)))
