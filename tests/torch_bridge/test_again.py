"""Sizes that the example's graph does not hold for: traced when they come, as PyTorch computes."""

from __future__ import annotations

import functools
import itertools
import threading
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from parity import check_parity
from rolled_cases import WIDTH, Block, Net, tiny_gpt2
from torch import nn
from transformers import GPT2LMHeadModel

import fzero as fz
import torch_bridge as tb
from fzero.errors import ConversionError
from tests.support import memory
from torch_bridge.module.copied import without_weights


X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(5))
IDS = np.random.default_rng(0).integers(0, 61, (8, 6)).astype(np.int32)


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return tiny_gpt2(layers=3, dropout=0.0)


@pytest.fixture(scope="module")
def gpt2_rolled(gpt2: GPT2LMHeadModel) -> tb.Converted:
    converted = tb.convert(gpt2, torch.zeros(2, 8, dtype=torch.long))
    assert converted.blocks.stacks
    return converted


def times_traced(converted: tb.Converted) -> int:
    return sum(len(graphs) for graphs in converted._graphs.again._found.values())


def sgd_in_torch(module: nn.Module, ids: np.ndarray[Any, Any], rate: float) -> Any:
    """The loss of a step of SGD on all rows, and the weights after it; the module stays."""
    tensor = torch.from_numpy(ids).long()
    module.zero_grad()
    loss = module.train()(tensor, labels=tensor).loss
    loss.backward()
    after = {n: (p - rate * p.grad).detach().clone() for n, p in module.named_parameters()}
    module.zero_grad()
    return float(loss.detach()), after


# --- a batch of one ------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_one_row_is_torchs_values_and_gradients(
    gpt2: GPT2LMHeadModel, gpt2_rolled: tb.Converted, train: bool
) -> None:
    one = torch.from_numpy(IDS[:1]).long()
    check_parity(gpt2, one, train=train, converted=gpt2_rolled)
    traced = times_traced(gpt2_rolled)
    check_parity(gpt2, one[:, :4], train=train, converted=gpt2_rolled)
    assert times_traced(gpt2_rolled) == traced  # the length is free in this trace too


@pytest.mark.parametrize(
    "plan",
    [
        fz.Plan(zero=3, data=8, min_shard_bytes=0),
        pytest.param(fz.Plan(zero=1, data=2, pipe=2, microbatches=4), marks=pytest.mark.slow),
    ],
    ids=["zero3", "pipeline"],
)
def test_a_row_per_device_trains_as_torch_does(
    gpt2: GPT2LMHeadModel, gpt2_rolled: tb.Converted, plan: fz.Plan
) -> None:
    def loss(forward: Any, batch: Any) -> fz.Mean:
        return tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])

    model, tx = gpt2_rolled.model(loss), optax.sgd(0.5)
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    state, metrics = step(state, {"ids": IDS})
    want, weights = sgd_in_torch(gpt2, IDS, 0.5)
    # Sums over rows are taken in another order than torch takes them.
    assert abs(float(metrics["loss"]) - want) <= 1e-6 * want
    after = tb.state_dict(gpt2_rolled, state, plan)
    for name, value in weights.items():
        assert float((after[name] - value).abs().max()) <= 1e-6, name


def test_parity_follows_the_sizes() -> None:
    """Also without dropout, which PyTorch and JAX draw differently."""
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.Tanh())
    report = tb.parity(module, tb.convert(module, X), X[:1])
    assert report.agrees
    assert report.output_train < 1e-6


def test_rolled_blocks_with_statistics_and_constants_of_their_own() -> None:
    """Batch norm cannot train on one row, as PyTorch says; it can be evaluated."""
    torch.manual_seed(2)
    net = Net([Block(k) for k in range(4)], norms=True)
    converted = tb.convert(net, torch.ones(3, WIDTH))
    assert converted.blocks.stacks
    check_parity(net, X[:1], converted=converted)
    with pytest.raises(ConversionError, match=r"(?s)size 1, but.*from 2.*more than 1 value per ch"):
        converted.apply(converted.params, converted.buffers, X[:1].numpy(), train=True)


class Peeking(Net):
    """For one row the head reads the first norm's weight, too."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out * self.first.weight if x.shape[0] == 1 else out


def test_a_link_of_a_chain_does_not_miss_a_parameter() -> None:
    converted = tb.convert(Peeking([Block(k) for k in range(3)], norms=True), torch.ones(3, WIDTH))

    def loss(forward: Any, batch: Any) -> jax.Array:
        return jnp.mean(forward(batch) ** 2)

    def evaluate(**options: Any) -> Any:
        model = converted.model(loss, **options)
        return model.loss(*model.init, X[:1].numpy(), jax.random.key(0), False)

    with pytest.raises(ConversionError, match=r"'end' of the chain reads `first\.weight`"):
        evaluate()
    assert evaluate(chain=False)[0] > 0


def test_a_graph_found_under_a_trace_serves_outside_of_it() -> None:
    """Nothing of the first caller's trace stays in what is kept; threads share one graph."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.GELU())
    converted = tb.convert(module, X)

    def run(x: Any) -> Any:
        return converted.apply(converted.params, {}, x).output

    one = X[:1].numpy()
    with jax.checking_leaks():
        jitted = jax.jit(jax.grad(lambda x: jnp.sum(run(x) ** 2)))(one)
    assert np.isfinite(jitted).all()
    outputs: list[Any] = []
    threads = [threading.Thread(target=lambda: outputs.append(run(one))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = module.eval()(X[:1]).detach().numpy()
    assert len(outputs) == 4
    for out in outputs:
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    assert times_traced(converted) == 1


# --- other sizes ---------------------------------------------------------------------------------


class BySize(nn.Module):
    """Another path through its Python code for few numbers, and for one row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return x * 5
        return x * 2 if x.shape[0] * x.shape[1] > 10 else x


@pytest.fixture(scope="module")
def by_size() -> tb.Converted:
    return tb.convert(BySize(), X)


@pytest.mark.parametrize("shape", [(4, 5), (2, 2), (1, 7), (1, 1), (3, 1), (20, 9), (2, 3)])
def test_every_size_takes_its_own_path(by_size: tb.Converted, shape: tuple[int, int]) -> None:
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    for train in (False, True):
        out = by_size.apply({}, {}, x, train=train).output
        np.testing.assert_array_equal(out, BySize()(torch.from_numpy(x)).numpy())


class BySizeAlone(nn.Module):
    """What is made of a size alone, in Python's ways."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[1]
        waves = torch.fft.fftfreq(n, 0.3) + torch.fft.rfftfreq(2 * n - 1)
        x = x * round(n / 7, 2) + (n ^ 5) + (n << 2) + waves
        # Edges are met to the last bit: as numbers between them, and in whole ones.
        edges, grid = torch.linspace(-1, 1, n), torch.arange(-1, 1.05, 0.1)
        whole = torch.bucketize(torch.linspace(-1, 1, 2 * n - 1), edges)[: len(grid)]
        halves = [
            row.float()
            for row in (
                torch.linspace(0, 1, n, dtype=torch.bfloat16),
                torch.arange(0, n, 0.03, dtype=torch.float16),
            )
        ]
        made = edges, grid, (edges * 10).floor(), whole, *halves
        return x[:, : round(n * 0.5) + (n >> 1)], *made


def test_numbers_of_a_size_are_pythons() -> None:
    module = BySizeAlone()
    converted = tb.convert(module, torch.zeros(2, 12), train=False)
    for n in (12, 17, 5):
        x = torch.arange(2.0 * n).reshape(2, n)
        # A product and the sum after it are one operation for XLA.
        (found, *made), (wanted, *others) = converted(x.numpy()), module(x)
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6)
        for mine, torchs in zip(made, others, strict=True):
            np.testing.assert_array_equal(mine, torchs.numpy())


class Normed(nn.Module):
    """No batch norm of one row; another bias instead."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, 4, bias=False), nn.BatchNorm1d(4)
        self.alone = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + self.alone if x.shape[0] == 1 else self.norm(y)


@pytest.mark.parametrize("train", [False, True])
def test_a_path_may_read_other_weights(train: bool) -> None:
    torch.manual_seed(0)
    module = Normed()
    converted = tb.convert(module, X)
    for rows in (1, 6):
        check_parity(module, X[:rows], train=train, converted=converted)


def test_an_example_of_one_row_serves_any() -> None:
    module = nn.Linear(WIDTH, 2)
    converted = tb.convert(module, X[:1])
    for rows in (1, 6, 4):
        check_parity(module, X[:rows], converted=converted)
    assert times_traced(converted) == 1  # 6 rows; 4 are the same graph
    assert "`input` dim 0" in converted.fixed_dims()


def test_what_torch_refuses_is_refused_with_its_words() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2))
    converted = tb.convert(module, X)
    with pytest.raises(ConversionError, match=r"(?s)dim 1: expected \d+, got 5.*failed.*in 0 at:"):
        converted.apply(converted.params, {}, np.ones((3, 5), np.float32))
    with pytest.raises(ConversionError, match="expected 2 dims as in the example"):
        converted.apply(converted.params, {}, np.ones((3, 5, WIDTH), np.float32))


# --- the copy ------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, factor: Any = 3.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2, bias=False)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


@pytest.mark.parametrize("factor", [3.0, torch.tensor([3.0, 4.0])], ids=["number", "tensor"])
def test_a_module_that_changed_since_is_not_asked(factor: Any) -> None:
    module = Scaled(factor)
    converted = tb.convert(module, X)
    want = module(X[:1]).detach().numpy()
    module.factor = 100.0
    module.linear = nn.Linear(WIDTH, 7)
    out = converted.apply(converted.params, {}, X[:1].numpy()).output
    np.testing.assert_allclose(out, want, rtol=1e-6)


def test_the_copy_takes_no_memory() -> None:
    """256 MiB of weights, tied under two names."""
    module = nn.ModuleList([nn.Linear(8192, 8192, bias=False) for _ in range(2)])
    module[1].weight = module[0].weight
    module.optimizer = torch.optim.SGD(module.parameters(), momentum=0.9)  # as GANs keep theirs
    module.optimizer.state[module[0].weight]["momentum_buffer"] = torch.ones(8192, 8192)
    before = memory.resident_bytes()
    copied = without_weights(module)
    assert memory.resident_bytes() - before < 8 * 2**20
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.shape == (8192, 8192)
    assert copied[0].weight is not module[0].weight


class Locked(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_copied_is_converted_and_says_so_later() -> None:
    converted = tb.convert(Locked(), X)
    assert converted.apply(converted.params, {}, X.numpy()).output.shape == (6, 2)
    with pytest.raises(ConversionError, match=r"(?s)size 1.*no copy of the Locked.*lock"):
        converted.apply(converted.params, {}, X[:1].numpy())


class Holding(nn.Module):
    """Computes with functions that hold the module, or a part of it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = linear = nn.Linear(WIDTH, WIDTH)
        self.factor = 3.0
        self.functions: Any = {"": lambda x: x * self.factor if self.training else x}
        if way == "part":
            self.functions[""] = lambda x: linear(x) if linear.training else linear(x) * 2
        elif way == "method":
            self.functions[""] = self.times
        elif way == "partial":
            self.functions[""] = functools.partial(lambda module, x: module.times(x), self)
        elif way == "default":
            self.functions[""] = lambda x, module=self: module.times(x)
        elif way == "wrapped":
            inner = self.functions[""]
            self.functions = types.SimpleNamespace(get=lambda _: lambda x: inner(x) + self.factor)
        elif way == "hook":
            linear.register_forward_hook(lambda *given: self.times(given[-1]))
            self.functions[""] = lambda x: x
        elif way == "forward":
            forward = self.forward
            self.forward = lambda x: self.times(forward(x))  # type: ignore[method-assign]

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if self.training else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.functions.get("")(self.linear(x))
        return out


WAYS = ["self", "part", "method", "partial", "default", "wrapped", "hook", "forward"]


class HoldingBeside(nn.Module):
    """One of each way, on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([Holding(way) for way in WAYS])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([module(x) for module in self.each], 1)


@pytest.mark.parametrize(
    ("way", "loss"),
    [("self", False), ("hook", False), ("forward", False), ("all", False), ("method", True),
     ("hook", True)],
)  # fmt: skip
def test_a_function_that_holds_the_module_is_one_of_the_copy(way: str, loss: bool) -> None:
    """Traced later, its mode and its numbers are those of the conversion."""
    module = HoldingBeside() if way == "all" else Holding(way)
    criterion = nn.MSELoss()
    converted = tb.convert(*((tb.with_loss(module, criterion), X, X) if loss else (module, X)))
    wants = {}
    for train, rows in itertools.product((True, False), (6, 1)):
        out = module.train(train)(X[:rows]).detach()
        wants[train, rows] = criterion(out, X[:rows]) if loss else out
    for holding in [one for one in module.modules() if isinstance(one, Holding)]:
        holding.factor, holding.linear = 100.0, nn.Linear(WIDTH, 7)
    for (train, rows), want in wants.items():
        module.train(not train)
        given = [X[:rows].numpy()] * (2 if loss else 1)
        out = converted.apply(converted.params, {}, *given, train=train).output
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


class Masked(torch.nn.Module):
    """Attention's usual mask: the lowest number of the dtype, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x)
        return scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_lowest_number_is_that_of_the_dtype_computed_in(dtype: Any) -> None:
    mask = torch.tensor([[True] * 4, [False] * 4])
    converted = tb.convert(Masked(), torch.randn(2, 4), mask)
    low = {name: value.astype(dtype) for name, value in converted.params.items()}
    got = converted.apply(low, {}, torch.randn(2, 4), mask).output
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got[0], np.float32), [0.25] * 4)


def test_arguments_keep_their_dtype_where_the_module_takes_it() -> None:
    """A time that is widened inside is not rounded before; what meets weights is cast."""

    class Timed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            phase = (time.float() * 1000).sin()[:, None]
            return self.linear(x) + phase.to(x.dtype)

    module = Timed()
    x, time = torch.randn(4, 3), torch.rand(4)
    converted = tb.convert(module, x[:2], time[:2])
    low = {name: value.astype(jnp.bfloat16) for name, value in converted.params.items()}
    got = converted.apply(low, {}, x.bfloat16(), time).output
    want = module.bfloat16()(x.bfloat16(), time)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), want.detach().float().numpy(), rtol=1e-2, atol=1e-2
    )
    # In float32 the linear layer of 16 bits does not take x.
    assert converted.apply(low, {}, x, time).output.dtype == jnp.bfloat16


@pytest.mark.parametrize("embedded", [True, False])
def test_a_chain_computes_in_the_precision_of_its_plan(embedded: bool) -> None:
    """All links agree on the dtype, also where the first one has no parameters to tell it by."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(torch.nn.functional.rms_norm(x, (4,)))

    first = [torch.nn.Linear(4, 4)] if embedded else []
    module = torch.nn.Sequential(*first, *(Block() for _ in range(3)))
    x = torch.randn(8, 4)
    converted = tb.convert(module, x[:2])
    seen: list[Any] = []

    def loss(forward: Any, batch: Any) -> Any:
        out = forward(batch)
        seen.append(out.dtype)
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    model, plan = converted.model(loss, chain=True), fz.Plan(data=1, precision="bf16")
    state = fz.init(model, None, plan)
    metrics = fz.eval_step(model, plan)(state, x.numpy())
    low = module.bfloat16()(x.bfloat16()).float()
    np.testing.assert_allclose(float(metrics["loss"]), float((low**2).mean().detach()), rtol=1e-2)
    assert set(seen) == {np.dtype(jnp.bfloat16)}


class Residual(nn.Module):
    """A block with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


@pytest.fixture(scope="module")
def residual() -> tb.Converted:
    return tb.convert(nn.Sequential(*(Residual() for _ in range(3))), torch.zeros(2, 4))


def value_of(model: Any, batch: Any) -> float:
    state = fz.init(model, None, fz.Plan(data=1))
    return float(fz.eval_step(model, fz.Plan(data=1))(state, batch)["loss"])


def mean_square(out: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(out - batch["y"]))


def test_losses_of_a_chain(residual: tb.Converted) -> None:
    """A chain's loss may wrap `forward` in what only says how to compile, or not see it at all."""
    x, y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
    batch = {"x": x, "y": y}
    runs: list[int] = []

    def plain(forward: Any, batch: Any) -> Any:
        runs.append(1)
        return mean_square(forward(batch["x"] * 1.0), batch)

    want = value_of(residual.model(plain, chain=False), batch)
    before = len(runs)
    assert value_of(residual.model(plain, chain=True), batch) == pytest.approx(want, rel=1e-6)
    assert len(runs) - before <= 2 * 3  # each of three links, for shapes and for the program
    for wrap in (jax.checkpoint, jax.jit):
        model = residual.model(lambda f, b, w=wrap: mean_square(w(f)(b["x"]), b), chain=True)
        assert value_of(model, batch) == pytest.approx(want, rel=1e-6)
    for inputs in (lambda b: b["x"], lambda b: (b["x"],), lambda b: ((b["x"],), {})):
        model = residual.model(mean_square, inputs=inputs, chain=True)
        assert value_of(model, batch) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda f, b: jnp.mean(jax.vmap(f)(b["x"][:, None])), "maps"),
        (lambda f, b: jnp.mean(jax.grad(lambda x: jnp.sum(f(x)))(b["x"]) ** 2), "differentiates"),
        (lambda f, b: jnp.mean(jax.lax.map(f, b["x"][:, None])), "within a loop"),
        (lambda f, b: jnp.mean(f(b["x"]) + f(b["y"])), "a second time"),
        (lambda f, b: jnp.mean(b["x"]), "did not call forward"),
    ],
)
def test_what_a_chain_cannot_do_is_said(residual: tb.Converted, loss: Any, what: str) -> None:
    x = np.ones((8, 4), np.float32)
    with pytest.raises(ConversionError, match=what):
        value_of(residual.model(loss, chain=True), {"x": x, "y": x})


class Whole(nn.Module):
    """Makes a tensor without saying of which dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((4,), 0.1) + torch.ones(4).new_tensor(0.3)


class Positions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(4) / 7


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16])
def other_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_is_that_of_the_conversion(other_dtype: torch.dtype) -> None:
    x = torch.ones(3, 4, dtype=torch.float16)
    want, converted = Whole()(x), tb.convert(Whole(), x)
    torch.set_default_dtype(torch.float32)
    for one in (x, x[:1]):
        found = converted(one)
        assert str(found.dtype) == str(want.dtype).removeprefix("torch.")
        # A compiled program may leave a rounding to 16 bits out.
        last = float(torch.finfo(want.dtype).eps) if want.dtype.itemsize == 2 else 0
        np.testing.assert_allclose(
            np.asarray(found, np.float32), want[: len(one)].float(), rtol=last
        )


def test_whole_numbers_of_another_default_dtype_are_refused(other_dtype: torch.dtype) -> None:
    if other_dtype == torch.float64:
        return
    with pytest.raises(ConversionError, match=r"aten\.div.*arange\(4\) / 7.*set_default_dtype"):
        tb.convert(Positions(), torch.ones(3, 4))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def test_whole_numbers_beside_values_of_another_default_dtype_are_taken(
    other_dtype: torch.dtype,
) -> None:
    if other_dtype == torch.float64:
        return
    module, x = Table(), torch.tensor([[0, 4, 2]])
    found = tb.convert(module, x)(x)
    np.testing.assert_array_equal(np.asarray(found, np.float32), module(x).detach().float())
