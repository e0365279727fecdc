"""`tb.parity`: it says where a conversion first differs, in values, gradients or statistics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.cli.bridge import app, parse_input
from torch_bridge.lower.registry import _TABLE, find_lowering, registered_operators
from torch_bridge.parity import _gradient_errors, _relative
from torch_bridge.run.errors import CommandError


X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2


def cnn() -> nn.Module:
    """Used as a factory by the command's test as well."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.Sequential(nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.4)),
        nn.Flatten(),
        nn.Linear(144, 5),
    )


@contextmanager
def lowered(operator: str, fn: Callable[..., Any]) -> Iterator[None]:
    """Another lowering for one operator."""
    before = _TABLE[operator]
    _TABLE[operator] = dataclasses.replace(before, fn=fn)
    try:
        yield
    finally:
        _TABLE[operator] = before


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return cnn()


@pytest.fixture(scope="module")
def report(module: nn.Module) -> tb.Parity:
    return tb.parity(module, tb.convert(module, X), X[:4])


def test_a_good_conversion_agrees_at_every_path(report: tb.Parity) -> None:
    assert report.agrees
    assert report.first is None
    assert [row.path for row in report.modules] == ["0", "1.0", "1.1", "1.2", "2", "3"]
    assert {row.path for row in report.modules if row.gradient_error is not None} == {
        "0", "1.0", "3",
    }  # fmt: skip
    assert set(report.gradients) == {"0.weight", "1.0.weight", "1.0.bias", "3.weight", "3.bias"}
    assert set(report.statistics) == {f"1.0.{name}" for name in (
        "running_mean", "running_var", "num_batches_tracked")}  # fmt: skip
    assert report.loss_torch != 0.0
    assert "forward train" in str(report)
    assert str(report).rstrip().endswith("agrees")
    figures = json.loads(report.to_json())
    assert figures["agrees"] is True
    assert figures["modules"][0]["path"] == "0"


def test_the_module_is_left_as_it_was(module: nn.Module) -> None:
    before = {name: t.clone() for name, t in module.state_dict().items()}
    module[3].weight.grad = torch.ones_like(module[3].weight)
    module[1].eval()
    tb.parity(module, tb.convert(module, X), X)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert torch.equal(module[3].weight.grad, torch.ones_like(module[3].weight))
    assert [m.training for m in module[1]] == [False] * 3
    module.train()


def test_the_first_wrong_value_is_found(module: nn.Module) -> None:
    with lowered("aten.gelu.default", lambda x, approximate="none": jax.nn.gelu(x) * 1.0001):
        report = tb.parity(module, tb.convert(module, X), X)
    assert not report.agrees
    assert report.first is not None
    assert (report.first.mode, report.first.path) == ("eval", "1.1")
    assert report.first.operator == "aten.gelu.default"
    assert "gelu" in report.first.source
    assert "first difference" in str(report)
    assert "DOES NOT AGREE" in str(report)
    errors = {row.path: row.eval_error for row in report.modules}
    assert errors["0"] is not None
    assert errors["0"] < 1e-5
    assert errors["1.1"] is not None
    assert errors["1.1"] > 9e-5


def test_a_wrong_gradient_is_found(module: nn.Module) -> None:
    @jax.custom_vjp
    def gelu(x: Any) -> Any:
        return jax.nn.gelu(x, approximate=False)

    gelu.defvjp(lambda x: (gelu(x), None), lambda _, g: (g,))
    with lowered("aten.gelu.default", lambda x, approximate="none": gelu(x)):
        report = tb.parity(module, tb.convert(module, X), X)
    assert report.output_train <= report.forward_tolerance
    assert not report.agrees
    assert report.first is None
    assert report.gradients["3.weight"] < 1e-4  # behind it
    assert report.gradients["0.weight"] > 1e-2  # in front of it


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1.0, 2.0], [np.nan, 2.0], np.inf),
        ([np.nan, np.inf, 2.0], [np.nan, np.inf, 4.0], 0.5),
        ([[1.0], [1.0]], [1.0, 1.0], np.inf),
        ([2j], [4j], 0.5),
        ([-3e38, 1.0], [-3.3e38, 2.0], 1.5e37),  # a mask's number hides none of the others
        ([-1e9, 1.0], [-1e9, 2.0], 0.5),
        ([-50.0, 1.0], [-50.0, 2.0], 0.02),  # but what is near them counts
    ],
)
def test_the_error_of_a_value(got: Any, want: Any, error: float) -> None:
    assert _relative(np.array(got), np.array(want)) == pytest.approx(error)


def test_gradients_that_are_rounding_alone_are_judged_by_the_largest() -> None:
    want = {"bias": np.zeros(2), "small": np.full(2, 1e-6), "weight": np.array([1.0, -2.0])}
    got = {"bias": np.full(2, 6e-8), "small": np.full(2, 1e-6), "weight": np.array([1.0, -1.0])}
    found = _gradient_errors(got, want)
    assert found == pytest.approx({"bias": 1e-6, "small": 0.0, "weight": 0.5})


def test_biases_before_a_batch_norm_agree_wherever_they_are() -> None:
    """Their gradients are zero, and the sums of large terms."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    x = torch.randn(8, 4)
    with torch.no_grad():
        module[0].bias += 4
    report = tb.parity(module, tb.convert(module, x), x[:6])
    assert report.agrees, report


def test_statistics_of_blocks_alike_are_compared() -> None:
    torch.manual_seed(5)
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    module = nn.Sequential(*blocks, nn.Linear(4, 3))
    x = torch.randn(8, 4)
    converted = tb.convert(module, x, roll=2)
    assert converted.blocks.stacks
    report = tb.parity(module, converted, x[:6])
    assert report.agrees, report
    assert {"0.1.running_mean", "1.1.running_var"} <= set(report.statistics)


def test_a_loss_that_is_nan_in_both_agrees() -> None:
    class Logs(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).abs().neg().log()

    module, x = Logs(3, 2), torch.ones(2, 3)
    report = tb.parity(module, tb.convert(module, x), x)
    assert np.isnan(report.loss_torch)
    assert report.agrees
    assert not dataclasses.replace(report, loss_jax=1.0).agrees


def test_gradients_that_are_nan_in_both_agree() -> None:
    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 0, self.first(x - 9).sqrt(), x) + self.rest(x)

    module, x = Roots(), torch.tensor([[1.0, -1.0, 0.5, -0.5]])
    report = tb.parity(module, tb.convert(module, x), x)
    assert report.agrees, report
    assert max(report.gradients.values()) < 1e-5


def test_of_several_statistics_the_largest_error_is_printed() -> None:
    errors = {"mean": 1e-7, "var": 0.25}
    report = tb.Parity((), 0.0, 0.0, 1.0, 1.0, {}, errors, None, 2e-5, 1e-4)
    assert "2 buffer(s) after a train step: up to 2.5e-01" in str(report)


def test_gradients_that_are_there_already_count_for_nothing() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    mine = module.weight.grad = torch.ones(2, 3)
    assert tb.parity(module, tb.convert(module, x), x).agrees
    assert module.weight.grad is mine
    assert (mine == 1).all()


def test_wrong_statistics_are_found(module: nn.Module) -> None:
    operator = "aten._native_batch_norm_legit_functional.default"
    right = find_lowering(operator)
    assert right is not None

    def biased(*args: Any) -> Any:
        out, mean, invstd, running_mean, running_var = right.fn(*args)
        return out, mean, invstd, running_mean, running_var * 0.99

    with lowered(operator, biased):
        report = tb.parity(module, tb.convert(module, X), X)
    assert not report.agrees
    assert report.statistics["1.0.running_var"] > 1e-3
    assert report.statistics["1.0.running_mean"] < 1e-5
    assert report.output_train <= report.forward_tolerance


def test_dropout_everywhere_is_off_for_the_comparison() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
            self.gru = nn.GRU(8, 4, 2, dropout=0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = nn.functional.dropout(self.attention(x, x, x)[0], 0.2, self.training)
            out, _ = self.attention(out, out, out, need_weights=False)
            return self.gru(out)[0]

    module, x = Net(), torch.randn(2, 3, 8)
    assert tb.parity(module, tb.convert(module, x), x).agrees


def test_other_randomness_is_refused() -> None:
    class DropPath(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(x.shape[0], 1).round() if self.training else x

    converted = tb.convert(DropPath(), X[0, 0])
    with pytest.raises(ConversionError, match=r"aten\.rand.*turn it off"):
        tb.parity(DropPath(), converted, X[0, 0])


def test_another_module_is_refused(module: nn.Module) -> None:
    converted = tb.convert(nn.Linear(3, 2), torch.ones(2, 3))
    with pytest.raises(ConversionError, match="other tensors"):
        tb.parity(module, converted, X)
    changed = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    converted = tb.convert(changed, torch.ones(2, 3))
    changed[1] = nn.Sigmoid()
    with pytest.raises(ConversionError, match="convert it again"):
        tb.parity(changed, converted, torch.ones(2, 3))


def test_a_parameter_that_nothing_reads_has_no_gradient_on_either_side() -> None:
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.spare = nn.Parameter(torch.ones(4))

    module, x = Spare(), torch.ones(2, 3)
    assert tb.parity(module, tb.convert(module, x), x).agrees


def test_keyword_arguments_and_arrays_are_taken() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, Any]:
            return {"b": x + y, "a": [x * y, None, 3]}

    module = Net()
    converted = tb.convert(module, x=torch.ones(2, 3), y=torch.ones(3))
    inputs = {"x": np.ones((4, 3), np.float32), "y": np.ones(3, np.float32)}
    assert tb.parity(module, converted, inputs).agrees


@pytest.fixture
def _precision() -> Iterator[None]:
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 31,
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.usefixtures("_precision")
def test_the_command_prints_the_table_and_writes_json(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(BERT))
    out = tmp_path / "parity.json"
    arguments = ["check", "--model", f"hf:{config}", "--seq", "5", "--json", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "compared at batch 3" in done.output
    assert "bert.encoder.layer.0.attention.self" in done.output
    assert json.loads(out.read_text())["agrees"] is True


@pytest.mark.usefixtures("_precision")
def test_the_command_takes_factories_and_fails_on_a_difference() -> None:
    arguments = ["check", "--model", f"{__file__}:cnn", "--input", "input=float32[2,3,8,8]"]
    with lowered("aten.gelu.default", lambda x, approximate="none": jax.nn.gelu(x) * 1.01):
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert "first difference" in done.output
    assert "sizes as in the example only: `input` dim 1" in done.output


def test_input_descriptions() -> None:
    batch, argument = parse_input("ids=int64[2,16]<100")
    assert (batch, argument.name, argument.dtype) == (2, "ids", torch.int64)
    assert (argument.shape, argument.limit) == ((16,), 100)
    for text in ("x", "x=float32[]", "x=float33[2]", "=float32[2]", "x=float32[2"):
        with pytest.raises(CommandError, match=r"expected NAME=DTYPE\[SHAPE\]"):
            parse_input(text)


def test_one_tensor_may_be_two_arguments() -> None:
    """As in `model(input_ids=ids, labels=ids)`."""

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(37, 8), nn.Linear(8, 37)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
            scores = self.head(self.words(input_ids))
            loss = nn.functional.cross_entropy(
                scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
            return loss, scores

    module, ids = Labelled(), torch.randint(0, 37, (2, 9))
    same = {"input_ids": ids, "labels": ids}
    assert tb.parity(module, tb.convert(module, **same), same).agrees


def test_values_of_this_packages_own_operators_are_compared() -> None:
    """A graph has them where torch.export can trace nothing of PyTorch's; PyTorch runs it, too."""

    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding.from_pretrained(X[0, 0, :, :4] * 3, max_norm=1.5)
            self.score = nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            scores = self.score(self.words(ids)).log_softmax(-1)
            return nn.functional.ctc_loss(scores, torch.tensor([[1, 2]]), (5,), (2,))

    ids = torch.tensor([[0], [3], [5], [3], [1]])
    module = Labelled()
    converted, weight = tb.convert(module, ids), module.words.weight.clone()
    report = tb.parity(module, converted, ids)
    assert report.agrees, report
    assert torch.equal(module.words.weight, weight), "the module's rows were scaled"
    own = [name for name in registered_operators() if name.startswith("torch_bridge.")]
    assert own
    for name in own:
        kernel = name.removesuffix(".default").replace(".", "::")
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has(kernel, "CompositeExplicitAutograd"), f"PyTorch cannot run {name}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_agree_to_their_own_roundings(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x = torch.randn(4, 8).to(dtype)
    assert tb.parity(module, tb.convert(module, x), x).agrees
    with lowered("aten.tanh.default", lambda x: np.float32(0.8).astype(x.dtype) * x):
        assert not tb.parity(module, tb.convert(module, x), x).agrees
