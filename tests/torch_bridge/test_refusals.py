"""What cannot be converted without changing the result is refused, with reason and place."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from torch import nn
from transformers.integrations import finegrained_fp8

import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.export.origins import source_line
from torch_bridge.lower import find_lowering


X = torch.linspace(-1, 1, 12).reshape(3, 4)


_LIBRARY = torch.library.Library("unknown", "DEF")
for _name in ("inner", "block", "outer"):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    _LIBRARY.impl(_name, torch.sin, "CompositeExplicitAutograd")


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.unknown.inner(x) + torch.ops.unknown.block(x)


class TwoMissing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([Inner(), nn.Linear(4, 4), Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.block:
            x = layer(x)
        return torch.ops.unknown.outer(torch.ops.unknown.inner(x))


def test_all_missing_operators_are_listed_with_their_modules() -> None:
    with pytest.raises(ConversionError) as caught:
        tb.convert(TwoMissing(), X)
    message = str(caught.value)
    assert message.startswith("3 operator(s) have no JAX lowering")
    assert re.search(r"unknown\.inner\.default  in \(root\), block\.0, block\.2", message)
    assert re.search(r"unknown\.block\.default  in block\.0, block\.2", message)
    assert re.search(r"unknown\.outer\.default  in \(root\)", message)
    assert "register_operator" in message


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 7


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cut.apply(x)


def test_a_custom_autograd_function_is_refused_by_name() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(ConversionError, match=r"autograd\.Function.*Cut"):
        tb.convert(Custom(), X)
    assert torch.autograd.Function.__dict__["apply"] is before
    x = X.clone().requires_grad_(True)
    Cut.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 7.0))


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_data_dependent_sizes_are_refused_with_the_source_line() -> None:
    with pytest.raises(ConversionError, match=r"depends on\s+tensor values[\s\S]*x\[x > 0\]"):
        tb.convert(Masked(), X)


class MaskedColumn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_put((x[:, 0] > 0, torch.tensor(1)), torch.tensor(2.0))


def test_a_mask_beside_an_index_is_refused_with_the_source_line() -> None:
    converted = tb.convert(MaskedColumn(), X, train=False)
    with pytest.raises(ConversionError, match=r"test_refusals\.py.*with a boolean mask.*where"):
        jax.jit(converted)(X.numpy())


def test_a_node_that_torch_added_has_an_unknown_line() -> None:
    assert source_line(torch.fx.Graph().placeholder("x")) == "unknown line"


def test_arguments_in_a_tuple_are_told_apart() -> None:
    """As `torch.export.export` takes them."""
    with pytest.raises(ConversionError, match=r"come one by one: tb\.convert\(module, \*example\)"):
        tb.convert(nn.Linear(4, 4), (X,))


@pytest.mark.parametrize("kind", [dict, collections.UserDict])
def test_what_a_tokenizer_returns_is_unpacked(kind: Callable[..., Any]) -> None:
    with pytest.raises(ConversionError, match=r"tb\.convert\(module, \*\*example\)"):
        tb.convert(nn.Linear(4, 4), kind(input=X))


class NoSuchDim(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch._weight_norm(self.weight, self.weight, 7)


def test_an_error_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch writes a traceback to its log, too, for each try."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)  # it hands nothing on to the root
    try:
        with pytest.raises(ConversionError, match="Dimension out of range"):
            tb.convert(NoSuchDim(4, 4), X)
    finally:
        log.removeHandler(caplog.handler)
    assert not [one for one in caplog.records if one.name == log.name]
    assert not log.disabled


def test_data_dependent_control_flow_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"train forward: .*data-dependent"):
        tb.convert(Branch(), X)
    with pytest.raises(ConversionError, match=r"eval forward: .*data-dependent"):
        tb.convert(Branch(), X, train=False)


class WritesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


def test_writing_to_a_parameter_is_refused() -> None:
    with pytest.raises(ConversionError, match="writes to the parameter `weight`"):
        tb.convert(WritesWeight(), X)


def test_float64_is_refused_while_x64_is_off() -> None:
    with pytest.raises(ConversionError, match=r"torch.float64.*jax_enable_x64"):
        tb.convert(nn.Linear(4, 2).double(), X.double())


def test_overlapping_tensors_are_refused() -> None:
    module = nn.Linear(4, 4)
    module.part = nn.Parameter(module.weight.detach()[1:3])
    with pytest.raises(ConversionError, match=r"`weight` and `part` share memory"):
        tb.convert(module, X)


class Masks(nn.Module):
    """Glow's: triangles of one array."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, upper = counts, np.triu(np.ones((4, 4), np.float32), 1)
        self.register_buffer("upper", torch.from_numpy(upper))
        self.register_buffer("lower", torch.from_numpy(upper.T))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.upper += 1
        return x @ self.upper + 2 * x @ self.lower


def test_buffers_that_overlap_are_refused_where_one_is_written() -> None:
    module = Masks(counts=False)
    np.testing.assert_allclose(tb.convert(module, X)(X.numpy()), module(X).numpy(), rtol=1e-6)
    with pytest.raises(ConversionError, match=r"`lower` and `upper` share memory"):
        tb.convert(Masks(counts=True), X)


@dataclasses.dataclass
class Answer:
    value: torch.Tensor


def test_an_output_of_a_users_own_type_is_refused_with_a_remedy() -> None:
    class Answers(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Answer(super().forward(x))

    with pytest.raises(ConversionError, match=r"Answer.*Return a dict, a tuple or a NamedTuple"):
        tb.convert(Answers(4, 4), X)


def in_one_memory(how: str) -> nn.Module:
    """Two linear layers and a buffer; some are other tensors in the memory of the first weight."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = module[0], module[1]
    if how == "a buffer":
        module.register_buffer("start", first.weight.data)
    elif how == "a frozen parameter":
        second.weight = nn.Parameter(first.weight.data, requires_grad=False)
    elif how == "two trained ones":
        second.weight = nn.Parameter(first.weight.data)
    elif how == "assigned data":
        second.weight.data = first.weight.data
    return module


@pytest.mark.parametrize(
    "how", ["a buffer", "a frozen parameter", "two trained ones", "assigned data"]
)
def test_a_trained_parameter_in_whose_memory_another_is_is_refused(how: str) -> None:
    """Silently, the buffer was trained, or the parameter was not."""
    other = "start" if how == "a buffer" else "1.weight"
    module = in_one_memory(how)
    with pytest.raises(ConversionError, match=f"`{other}` and `0.weight` are two tensors in the"):
        tb.convert(module, X)
    with pytest.raises(ConversionError, match=f"`{other}` and `0.weight` are two tensors in the"):
        tb.sequential(module, X, loss=lambda y, batch: y.sum())
    converted = tb.convert(module, X, train=False)
    np.testing.assert_allclose(converted(X), module.eval()(X).detach(), rtol=1e-5)
    module.requires_grad_(False)
    tb.convert(module, X)


class Nameless(nn.Module):
    """Reads its weight or its buffer past their names, or what was made of them before."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.listed = [self.weight]
        self.detached = self.weight.detach()
        self.computed = self.weight * 2
        self.kept = {"a": self.shift}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = {
            "listed": self.listed[0],
            "detached": self.detached,
            "computed": self.computed,
            "buffer": self.kept["a"],
        }
        return x * tensors[self.how] + self.weight


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("listed", r"`weight`, but not by this name"),
        ("detached", r"`weight`, but not by this name"),
        ("computed", "`computed`"),
        ("buffer", r"`shift`, but not by this name"),
    ],
)
def test_weights_that_export_would_make_constants_are_refused(how: str, what: str) -> None:
    with pytest.raises(
        ConversionError, match=rf"(?s)\(root\) reads {what}.*test_refusals\.py.*list"
    ):
        tb.convert(Nameless(how), X)


def test_tensors_of_ones_own_are_constants() -> None:
    """Weights that are hidden from `parameters()`, as teachers are, and plain tensors."""
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    module.teacher = [nn.Linear(4, 4)]
    module.table, module.nothing = torch.randn(4), torch.zeros(0)
    module.register_buffer("empty", torch.zeros(0))  # in no memory, as the other one
    module.forward = lambda x: (  # type: ignore[method-assign]
        module.teacher[0](x) * module.table
        + module.nothing.sum()
        # The same in every trace, though NaN equals nothing.
        + torch.tensor([math.nan, 1.0]).nan_to_num().sum()
    )
    converted = tb.convert(module, X)
    out = converted.apply(converted.params, converted.buffers, X.numpy()).output
    np.testing.assert_allclose(out, module(X).detach().numpy(), rtol=1e-5, atol=1e-6)


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, double: bool = False, extra: Any = None, *, shift: float = 0.0
    ) -> torch.Tensor:
        y = self.linear(x) * (2 if double else 1) + shift
        return y if extra is None else y + extra["a"] - extra["b"][0]


@pytest.fixture(scope="module")
def options() -> tb.Converted:
    extra = {"a": torch.ones(4), "b": [torch.zeros(4)]}
    return tb.convert(Options(), X, True, extra=extra, shift=1.0)


def test_arguments_may_be_spelled_differently(options: tb.Converted) -> None:
    extra = {"b": [np.zeros(4, np.float32)], "a": np.ones(4, np.float32)}  # another key order
    x = np.ones((5, 4), np.float32)
    first, _ = options.apply(options.params, {}, x, True, extra=extra, shift=1.0)
    second, _ = options.apply(options.params, {}, x=x, double=True, shift=1.0, extra=extra)
    np.testing.assert_array_equal(first, second)
    want = 2 * (x @ options.params["linear.weight"].T)
    want += 2 * options.params["linear.bias"] + 2.0
    np.testing.assert_allclose(first, want, rtol=1e-5)


def test_an_argument_may_be_given_as_the_default_that_it_had() -> None:
    converted = tb.convert(Options(), X, train=False)
    x = X.numpy()
    np.testing.assert_array_equal(converted(x, False, extra=None, shift=0.0), converted(x))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"double": False}, "`double`: expected True, got False"),
        ({"shift": 2.0}, "`shift`: expected 1.0, got 2.0"),
        ({"extra": {"a": X[0].numpy()}}, r"`extra`: expected a dict with keys"),
        ({"extra": 2.0}, "`extra`: expected a dict with keys .*, got float"),
        ({"extra": {"a": X[0].numpy(), "b": []}}, r"`extra\['b'\]`: expected 1 items"),
        ({"x": np.ones((5, 4), np.int32)}, "`x`: expected float32 as in the example, got int32"),
        ({"x": np.ones((5, 3), np.float32)}, "`x` dim 1: expected 4, got 3"),
        ({"x": np.ones((5, 2, 4), np.float32)}, r"`x`: expected 2 dims.*\(5, 2, 4\)"),
        ({"x": None}, "`x`: expected an array of float32"),
        ({"x": lambda forward, batch: 0.0}, r"`x`: expected an array.*converted\.model\(loss\)"),
    ],
)
def test_other_arguments_are_refused(
    options: tb.Converted, change: dict[str, Any], match: str
) -> None:
    good = {
        "x": np.ones((5, 4), np.float32),
        "double": True,
        "shift": 1.0,
        "extra": {"a": np.ones(4, np.float32), "b": [np.ones(4, np.float32)]},
    }
    assert options.apply(options.params, {}, **good).output.shape == (5, 4)
    with pytest.raises(ConversionError, match=match):
        options.apply(options.params, {}, **{**good, **change})


def test_state_that_does_not_fit_is_refused() -> None:
    converted = tb.convert(nn.Linear(4, 2), X)
    params = dict(converted.params)
    del params["bias"]
    with pytest.raises(ConversionError, match="params: `bias` is missing"):
        converted.apply(params, {}, X.numpy())
    params["bias"] = jnp.zeros(3)
    with pytest.raises(ConversionError, match=r"`bias` has shape \(3,\), expected \(2,\)"):
        converted.apply(params, {}, X.numpy())
    plain = tb.convert(Options(), X)
    with pytest.raises(ConversionError, match="argument `extra` was not given"):
        plain.apply(plain.params, {}, X.numpy(), extra={"a": 1})


def test_randomness_without_a_key_is_refused() -> None:
    converted = tb.convert(nn.Dropout(0.5), X)
    with pytest.raises(ConversionError, match=r"train forward draws random numbers in 1 place"):
        converted.apply({}, {}, X.numpy(), train=True)
    np.testing.assert_array_equal(converted.apply({}, {}, X.numpy()).output, X.numpy())
    dropped = converted.apply({}, {}, X.numpy(), train=True, rng=jax.random.key(0)).output
    assert set(np.unique(np.asarray(dropped) / X.numpy())) == {0.0, 2.0}


def test_modules_that_are_not_ready_are_refused() -> None:
    with pytest.raises(ConversionError, match="`weight` has no shape yet: run one batch"):
        tb.convert(nn.LazyLinear(2), X)
    scripted = torch.jit.script(nn.Linear(4, 2))
    with pytest.raises(ConversionError, match="a scripted Linear has no Python"):
        tb.convert(scripted, X)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(x)


def test_modules_are_traced_within_inference_mode_but_not_made_there() -> None:
    module = nn.Linear(4, 2)
    converted = tb.convert(module, X)
    with torch.inference_mode():
        np.testing.assert_allclose(converted(X[:1]), module(X[:1]), rtol=1e-6, atol=1e-6)
        again = tb.convert(module, X + 0)
        made_here = X + 0
        with pytest.raises(ConversionError, match="`weight` was made within"):
            tb.convert(nn.Linear(4, 2), X)
    for one in (again, tb.convert(module, made_here)):
        np.testing.assert_allclose(one(X), module(X).detach(), rtol=1e-6, atol=1e-6)


def test_what_is_no_module_and_calls_that_a_forward_does_not_take_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"a torch.nn.Module, got the class Linear"):
        tb.convert(nn.Linear, X)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"forward takes \(input: .*: too many positional"):
        tb.convert(nn.Linear(4, 3), X, X)
    with pytest.raises(ConversionError, match=r"forward takes \(input: .* argument 'y'"):
        tb.convert(nn.Linear(4, 3), X, train=False)(X, y=X)


def test_a_module_that_was_exported_is_refused() -> None:
    exported = torch.export.export(nn.Linear(4, 3), (X,)).module()
    with pytest.raises(ConversionError, match="convert the module that was exported"):
        tb.convert(exported, X)


def test_autocast_counts_within_a_forward_only() -> None:
    converted = tb.convert(Autocast(), X)
    assert converted.apply(converted.params, {}, X.numpy()).output.dtype == jnp.bfloat16
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConversionError, match=r"within torch\.autocast: .*Convert outside of it"),
    ):
        tb.convert(nn.Linear(4, 2), X)


def test_a_loader_that_gives_nothing_is_named() -> None:
    module = nn.Linear(4, 2)
    sgd = torch.optim.SGD(module.parameters())
    with pytest.raises(ConversionError, match=r"loader is a function: .* has to be called"):
        tb.fit(module, lambda: [(X, X[:, :2])], nn.MSELoss(), optimizer=sgd)  # type: ignore[arg-type]


class CountingLoss(nn.Module):
    """A loss with a state of its own, which is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return ((out - target) ** 2).mean() * self.seen


def test_a_buffer_that_is_not_the_modules_says_where_it_belongs() -> None:
    module = nn.Linear(4, 2)
    loader = [(torch.ones(4, 4), torch.ones(4, 2))]
    with pytest.raises(ConversionError, match="no buffer of the module: a buffer of a loss"):
        tb.fit(module, loader, loss=CountingLoss(), optimizer=torch.optim.SGD(module.parameters()))


def test_a_cache_that_a_forward_returns_says_what_to_do() -> None:
    class ReturnsItsCache(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            cache = transformers.DynamicCache()
            cache.update(x, x, 0)
            return x, cache

    with pytest.raises(ConversionError, match=r"DynamicCache'> in output.*use_cache=False"):
        tb.convert(ReturnsItsCache(), torch.ones(2, 1, 3, 4))


def test_a_lowering_that_refuses_says_what_to_do() -> None:
    x = jnp.zeros((2, 3))
    for name, args, remedy in (
        ("aten.one_hot.default", (jnp.zeros(3, jnp.int32),), "say num_classes"),
        ("aten._grouped_mm.default", (x, x, x), r"expected \(rows, I\) and \(experts, I, O\)"),
        ("torch_bridge.expert_rows.default", (x,), "Set its dropout to 0"),
    ):
        lowering = find_lowering(name)
        assert lowering is not None
        with pytest.raises(NotImplementedError, match=remedy):
            lowering.fn(*args)


def test_another_module_than_the_converted_one_is_refused_with_a_remedy() -> None:
    converted = tb.convert(nn.Linear(4, 2), X)
    with pytest.raises(ConversionError, match="give that one, or convert this one"):
        tb.parity(nn.Linear(4, 3), converted, X)


def test_layers_of_other_quantisers_are_named_with_the_way_back() -> None:
    """One of transformers, and one that says where it is from (bitsandbytes is not installed)."""
    fp8 = finegrained_fp8.FP8Linear(4, 4)
    packed = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})(4, 4)
    for layer, name in ((fp8, r"finegrained_fp8\.FP8Linear"), (packed, r"modules\.Linear4bit")):
        for module, path in ((layer, r"\(root\)"), (nn.Sequential(nn.Tanh(), layer), "1")):
            with pytest.raises(ConversionError, match=rf"`{path}`.*{name}.*model\.dequantize"):
                tb.convert(module, X)
    own = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes_of_mine"})(4, 4)
    np.testing.assert_allclose(tb.convert(own, X)(X), own(X).detach(), rtol=1e-6, atol=1e-6)


class Tripled(torch.autograd.Function):
    """With a gradient that is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        with torch.no_grad():
            shift = Tripled.apply(y)
        return y + shift


def test_a_custom_function_without_gradients_converts() -> None:
    module = WithoutGradient()
    converted = tb.convert(module, X)
    out, grads = jax.value_and_grad(lambda p: converted.apply(p, {}, X.numpy()).output.sum())(
        dict(converted.params)
    )
    want = module(X).sum()
    want.backward()
    np.testing.assert_allclose(out, want.item(), rtol=1e-6)
    np.testing.assert_allclose(grads["weight"], module.weight.grad, rtol=1e-6)


class Bridged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tb.wrap(jnp.sin)(x)


def test_a_forward_that_calls_jax_is_refused_by_that_name() -> None:
    with pytest.raises(ConversionError, match=r"a function made by tb\.wrap(?s:.)*call the JAX"):
        tb.convert(Bridged(), X)


def test_mappings_for_a_torch_loss_are_refused_by_their_keys() -> None:
    module = nn.Linear(4, 2)
    with pytest.raises(ConversionError, match=r'mappings \(x, y\)(?s:.)*loss="module"'):
        tb.fit(module, [{"x": X, "y": X[:, :2]}], nn.MSELoss(), optimizer=optax.sgd(0.1))
