"""What torch.export loses or freezes without a word: each trap once, as a module that shows it.

Numbers are those of the list of measured traps; most models of the zoo step on several.
"""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import check_parity, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_bridge as tb
from fzero.errors import ConversionError


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def operators_of(converted: tb.Converted, train: bool = True) -> list[str]:
    return [op.operator for op in converted._modes[train].graph.ops]


def gradient_of(converted: tb.Converted, *args: Any, train: bool = True) -> dict[str, Any]:
    def loss(params: Any) -> Any:
        out = converted.apply(params, converted.buffers, *args, train=train).output
        return jnp.sum(out)

    return jax.grad(loss)(converted.params)


class Quantised(nn.Module):
    """Straight-through rounding: all of the gradient comes past `detach`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return y + (y.round() - y).detach() * self.weight.detach()


def test_1_detach_stops_gradients() -> None:
    check_parity(Quantised(), X)


class Regions(nn.Module):
    """no_grad with enable_grad inside: gradients stop at operators that ran without, only there."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        with torch.no_grad():
            target = self.b(h).tanh()
            with torch.enable_grad():
                inside = self.b(h) * target
            same = h
        return h * target, inside, same, self.b(x) - target


@pytest.mark.parametrize("train", [True, False])
def test_2_gradients_stop_where_no_grad_was(train: bool) -> None:
    check_parity(Regions(), X, train=train)


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2.0
        with torch.no_grad():
            h.mul_(0.5)  # torch's gradient knows nothing of this
        return h


def test_2_a_write_without_gradient_into_a_value_with_one() -> None:
    x = X.clone().requires_grad_(True)
    Halved()(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 2.0))
    with pytest.raises(ConversionError, match=r"mul_.*no_grad[\s\S]*h\.mul_\(0\.5\)"):
        tb.convert(Halved(), X)


class Reversed(torch.autograd.Function):
    """A gradient of its own: reversed and scaled, as for domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * grad, None


class SplitScale(torch.autograd.Function):
    """The newer form, with two results, one of them without gradient."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y / rows, x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.rows = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, y = ctx.saved_tensors
        return grad * y * 3, grad * x / ctx.rows, None


class UsesFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        h = Reversed.apply(self.first(x), 0.5)
        scaled, best = SplitScale.apply(h, self.second(x), x.shape[0])
        return h, scaled * 2, best


def test_3_a_custom_backward_is_refused_until_it_has_a_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch_bridge.export.watch.functions._RULES", {})
    with pytest.raises(ConversionError, match=r"Reversed.*SplitScale[\s\S]*register_function"):
        tb.convert(UsesFunctions(), X)

    @jax.custom_vjp
    def reverse(x: Any, scale: float) -> Any:
        return x

    reverse.defvjp(lambda x, scale: (x, scale), lambda scale, grad: (-scale * grad, None))

    @jax.custom_vjp
    def split(x: Any, y: Any, rows: int) -> Any:
        return x * y / rows, jnp.argmax(x, -1)

    def split_back(saved: Any, grads: Any) -> Any:
        x, y, rows = saved
        return grads[0] * y * 3, grads[0] * x / rows, None

    split.defvjp(lambda x, y, rows: (split(x, y, rows), (x, y, rows)), split_back)
    tb.register_function(Reversed, reverse)
    tb.register_function(SplitScale, split)
    module = UsesFunctions()
    converted = check_parity(module, X, other_args=(X.repeat(2, 1)[:7],), train=True)
    check_parity(module, X, converted=converted)
    with pytest.raises(TypeError, match=r"subclass of torch\.autograd\.Function"):
        tb.register_function(UsesFunctions, reverse)  # type: ignore[arg-type]


def test_3_a_rule_that_returns_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_bridge.export.watch.functions._RULES", {})
    tb.register_function(Reversed, lambda x, scale: (x, x))
    tb.register_function(SplitScale, lambda x, y, rows: (x * y, x[..., 0]))
    converted = tb.convert(UsesFunctions(), X)
    with pytest.raises(ConversionError, match=r"JAX rule of Reversed[\s\S]*1 tensor\(s\)"):
        converted.apply(converted.params, {}, X.numpy())


@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.nightly)])
def test_4_dropout_between_recurrent_layers_is_kept(kind: type[nn.RNNBase]) -> None:
    steps, width = 3, 120
    module = kind(3, width, num_layers=2, dropout=0.3)  # type: ignore[arg-type]
    x = torch.ones(steps, 2, 3)
    converted = tb.convert(module, x)
    assert len(operators_of(converted)) < 20  # not unrolled over time
    run = jax.jit(
        lambda key: converted.apply(converted.params, {}, x.numpy(), rng=key, train=True).output[0]
    )
    first, again, other = (np.asarray(run(jax.random.key(k))) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert relative_error(first, other) > 1e-3
    assert (first != 0.0).all()  # what the last layer gives is not dropped
    check_parity(module, x, converted=converted)
    # Same mean as torch's over many draws, within what the draws leave open.
    drawn = np.mean([np.asarray(run(jax.random.key(k))) for k in range(20)], 0)
    torch.manual_seed(0)
    module.train()
    with torch.no_grad():
        wanted = np.mean([module(x)[0].numpy() for _ in range(20)], 0)
    assert relative_error(drawn, wanted) < 0.2


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.transpose(1, 2).flip(1).transpose(1, 2))
        q = y.view(y.shape[0], -1, 2, 3).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q)
        return self.linear(out.transpose(1, 2).reshape(y.shape))


def test_5_linear_and_6_attention_stay_whole() -> None:
    converted = check_parity(Heads(), torch.randn(2, 5, 6))
    operators = operators_of(converted, train=False)
    assert operators.count("aten.linear.default") == 2
    assert operators.count("aten.scaled_dot_product_attention.default") == 1
    assert not {"aten.bmm.default", "aten.expand.default", "aten.addmm.default"} & set(operators)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Writer(Counter):
    """Writes attributes that no later call reads: nothing to refuse, nothing to leave behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x)
        self.last = x
        return x * 2


def test_7_python_state_is_not_frozen() -> None:
    module = nn.Sequential(nn.ReLU(), Counter())
    with pytest.raises(ConversionError, match=r"Python attributes.*: 1\.calls\."):
        tb.convert(module, X)
    assert module[1].calls == 0
    writer = Writer()
    with pytest.warns(
        tb.PythonStateWarning, match=r"counts .* \(calls: 0, then 1; the length of seen: 0"
    ) as said:
        converted = tb.convert(writer, X)
    # One text for both modes, which Python shows once.
    assert len({str(one.message) for one in said}) == 1
    check_parity(Writer(), X, converted=converted)
    assert (writer.calls, writer.seen) == (0, [])
    assert not hasattr(writer, "last")


class Lottery(nn.Module):
    def __init__(self, numpy: bool) -> None:
        super().__init__()
        self.numpy = numpy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (float(np.random.rand()) if self.numpy else random.random())


@pytest.mark.parametrize("numpy", [True, False])
def test_7_random_numbers_of_python_are_not_frozen(numpy: bool) -> None:
    before = random.getstate(), np.random.get_state(legacy=False)
    with pytest.raises(ConversionError, match="Python's `random` or numpy"):
        tb.convert(Lottery(numpy), X)
    assert random.getstate() == before[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])


class FixedBatch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(2, -1) + torch.zeros(2, 1)


class TimeFirst(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y.mean(0, keepdim=True)).sum(-1)


def test_8_a_batch_that_is_not_free_is_said() -> None:
    example = torch.ones(2, 3)
    converted = tb.convert(FixedBatch(), example)
    assert "`x` dim 0" in converted.fixed_dims()
    with pytest.raises(ConversionError, match="`x` dim 0: expected 2, got 5"):
        converted.apply({}, {}, np.ones((5, 3), np.float32))
    with pytest.raises(ConversionError, match=r"batch_dim=0: the module ties `x` dim 0"):
        tb.convert(FixedBatch(), example, batch_dim=0)
    with pytest.raises(ConversionError, match=r"batch_dim=0: .*a size of 1 always is"):
        tb.convert(nn.Linear(3, 2), example[:1], batch_dim=0)
    free = tb.convert(TimeFirst(), torch.ones(2, 3, 4), torch.ones(5, 3, 4), batch_dim=1)
    out, _ = free.apply({}, {}, np.ones((6, 9, 4), np.float32), np.ones((5, 9, 4), np.float32))
    assert out.shape == (6, 9)
    assert not free.fixed_dims()


class Sized(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "nonzero":
            return x.flatten()[x.flatten().nonzero()[:, 0]]
        if self.how == "mask":
            return x[x[:, 0] > 0]
        if self.how == "unique":
            return x.long().unique()
        if self.how == "repeat":
            return x.repeat_interleave(x[:, 0].abs().long(), 0)
        return x.new_zeros(int(x.sum().item()))


@pytest.mark.parametrize("how", ["nonzero", "mask", "unique", "repeat", "item"])
def test_9_sizes_that_depend_on_data_are_refused(how: str) -> None:
    with pytest.raises(ConversionError, match=r"test_traps\.py"):
        tb.convert(nn.Sequential(nn.ReLU(), Sized(how)), X)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            return x * 2
        return x


def test_9_control_flow_that_depends_on_data_is_refused_with_its_line() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh(), Branch()))
    with pytest.raises(ConversionError) as caught:
        tb.convert(module, X)
    message = str(caught.value)
    assert "in 1.1 at:" in message
    assert "if x.mean() > 0:" in message
    assert "torch.where" in message


def test_10_statistics_of_instance_and_batch_norm_come_back() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.instance = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
            self.batch = nn.BatchNorm1d(3, momentum=0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.batch(self.instance(x) + x)

    module = Both()
    x = torch.randn(4, 3, 7) * 2 + 1
    converted = tb.convert(module, x)
    buffers: Any = converted.buffers
    for _ in range(2):
        out, buffers = converted.apply(converted.params, buffers, x.numpy(), train=True)
        want = module.train()(x)
    assert relative_error(out, want.detach().numpy()) < 2e-5
    for name, value in module.named_buffers():
        assert relative_error(buffers[name], value.numpy()) < 2e-5, name
    evaluated, after = converted.apply(converted.params, buffers, x.numpy())
    assert relative_error(evaluated, module.eval()(x).detach().numpy()) < 2e-5
    np.testing.assert_array_equal(after["batch.running_var"], buffers["batch.running_var"])


class FourNames(nn.Module):
    """One weight under four names, each used in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.same = self.embed
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.extra = self.head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)) + self.same(ids) @ self.extra.T


def test_11_a_tied_weight_is_one_leaf_with_the_gradient_of_all_its_uses() -> None:
    module = FourNames()
    converted = check_parity(module, torch.tensor([[0, 1, 5], [2, 2, 1]]))
    assert len(converted.params) == 1
    state = tb.state_dict(converted, converted.params)
    assert set(state) == {"extra", "embed.weight", "same.weight", "head.weight"}
    assert len({id(tensor) for tensor in state.values()}) == 1


def test_12_transformers_containers_come_without_a_cache() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    ids = torch.ones(2, 5, dtype=torch.long)
    converted = tb.convert(module, ids, output_hidden_states=True)
    assert module.config.use_cache
    out, _ = converted.apply(converted.params, converted.buffers, ids, output_hidden_states=True)
    assert list(out) == ["logits", "hidden_states"]
    assert isinstance(out.hidden_states, tuple)
    assert len(out.hidden_states) == 2


class SideEffects(nn.Module):
    """Buffers updated in place, assigned and swapped; arguments written to; recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.last = x.detach().mean(0)
            self.average.mul_(0.9).add_(self.last, alpha=0.1)
        h = checkpoint(lambda v: torch.tanh(self.linear(v)), x, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.linear(h)
        return h, low.float() * self.average, self.average


def test_13_side_effects_come_back_as_values() -> None:
    module = SideEffects()
    converted = check_parity(module, X, train=True, forward_rtol=2**-7, gradient_rtol=2**-6)
    _, buffers = converted.apply(converted.params, converted.buffers, X.numpy(), train=True)
    np.testing.assert_allclose(buffers["last"], X.mean(0).numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(buffers["average"], 0.1 * X.mean(0).numpy(), rtol=1e-5, atol=1e-7)


class WritesArgument(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return x * 2


def test_13_an_argument_that_is_written_to_is_not_an_output() -> None:
    converted = tb.convert(WritesArgument(), X.clone())
    given = X.numpy().copy()
    out, _ = converted.apply({}, {}, given)
    np.testing.assert_allclose(out, (X.numpy() + 1) * 2, rtol=1e-6)
    np.testing.assert_array_equal(given, X.numpy())


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 6), persistent=False)
        self.register_buffer("order", torch.tensor([5, 3, 0, 1, 2, 4]))
        self.register_buffer("flags", torch.tensor([True, False] * 3))
        self.register_buffer("steps", torch.tensor(7, dtype=torch.int32))
        self.register_buffer("nothing", None)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.steps += 1
            self.order.copy_(self.order.flip(0))
        return torch.where(self.flags, x[:, self.order], self.table) * self.scale, self.steps


def test_14_integer_and_non_persistent_buffers_keep_their_place() -> None:
    module = Buffers()
    converted = check_parity(module, X, train=True)
    assert set(converted.buffers) == {"table", "order", "flags", "steps"}
    _, buffers = converted.apply(converted.params, converted.buffers, X.numpy(), train=True)
    assert int(buffers["steps"]) == 8
    assert buffers["steps"].dtype == jnp.int32
    np.testing.assert_array_equal(buffers["order"], [4, 2, 1, 0, 3, 5])
    state = tb.state_dict(converted, converted.params)
    assert list(state) == list(module.state_dict())
    assert state["order"].dtype == torch.int64


def test_15_writes_through_views_reach_what_they_view() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> Any:
            y = x * self.weight
            row, column = y[1], y.t()[0]
            row.mul_(3.0)
            column.add_(row.sum())
            y.view(-1)[::5] = self.weight.sum()
            torch.add(x.detach(), 1.0, out=(z := torch.empty_like(x)))
            y.index_put_((torch.tensor([0, 3]),), x[:2], accumulate=True)
            return y, row, column, z.masked_fill_(x > 0, 0.0)

    check_parity(Views(), X)


class Aliases(nn.Module):
    """Writes that reach values computed before, under names that do not look like views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.0)  # inactive: gives back its argument itself

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        self.dropout(h).add_(1.0)
        h.float().contiguous().type_as(x).mul_(2.0)
        k = h + 1
        h.add_(k)
        t = h.tanh()
        v = h.view(-1)
        h.mul_(t).add_(h)
        return h, k, t, v


@pytest.mark.parametrize("train", [True, False])
def test_15_writes_reach_all_names_of_a_value(train: bool) -> None:
    check_parity(Aliases(), X, train=train)


def test_gelu_is_exact_where_torchs_is() -> None:
    x = torch.linspace(-6, 6, 241).reshape(1, 241).repeat(2, 1)
    for module in (nn.GELU(), nn.GELU(approximate="tanh")):
        converted = tb.convert(module, x)
        got = np.asarray(converted.apply({}, {}, x.numpy()).output)
        assert np.abs(got - module(x).numpy()).max() < 2e-6  # the two differ by 5e-4


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions_with_groups_agree(dims: int) -> None:
    kind = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
    module = kind(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=1)
    check_parity(module, torch.randn(2, 6, *(4, 3, 3)[:dims]))


def test_one_tensor_given_as_two_arguments_is_two_arguments():
    class Difference(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, y):
            return (x - y) * self.scale

    same = torch.zeros(2, 3)
    converted = tb.convert(Difference(), same, same)
    ones = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(converted(ones, 3 * ones), -2 * ones)


class Copies(nn.Module):
    """Writes what it computes into a buffer of another dtype, and reads the buffer."""

    def __init__(self, dtype: torch.dtype, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("kept", torch.zeros(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        value = 3.7 * y.sum(0).detach()
        if self.how == "whole":
            self.kept.copy_(value)
        elif self.how == "slice":
            self.kept[:] = value
        elif self.how == "part":
            self.kept[1:] = value[1:]
        elif self.how == "assigned":
            self.kept = value
        return y * self.kept


@pytest.mark.parametrize("how", ["whole", "slice", "part"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bool], ids=str)
def test_a_copy_into_a_buffer_casts(dtype: torch.dtype, how: str) -> None:
    """PyTorch's functionalisation forgets it: silently, a later read saw what was not rounded."""
    check_parity(Copies(dtype, how), torch.linspace(-1, 2, 8).reshape(2, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_buffer_that_becomes_one_of_other_numbers_is_refused(dtype: torch.dtype) -> None:
    """Silently, a state truncated what PyTorch keeps whole."""
    with pytest.raises(ConversionError, match=rf"torch.float32 to the buffer `kept`.*is {dtype}"):
        tb.convert(Copies(dtype, "assigned"), torch.randn(2, 4))
    check_parity(Copies(torch.float32, "assigned"), torch.randn(2, 4))
