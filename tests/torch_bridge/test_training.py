"""What a PyTorch user writes first: one call to train, loaders, wrappers, calls both ways."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from optax import sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fzero as fz
import torch_bridge as tb
from torch_bridge.mean_loss import require_mean


class Pair(NamedTuple):
    x: Any
    y: Any


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3))


def data(rows: int) -> TensorDataset:
    make = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(rows, 4, generator=make), torch.randint(0, 3, (rows,), generator=make)
    )


def trained_by_torch(module: nn.Module, loader: Any, epochs: int) -> nn.Module:
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    return module


@pytest.fixture(autouse=True)
def _promotes() -> Any:
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic
        yield


def test_a_module_a_loader_and_an_optimizer_are_all_it_takes() -> None:
    loader = DataLoader(data(24), batch_size=8)
    want = trained_by_torch(small(), loader, epochs=2)
    module, seen = small(), []
    state, back = tb.fit(
        module,
        loader,
        nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
        plan=fz.Plan(data=1),
        epochs=2,
        on_step=lambda step, metrics: seen.append((step, float(metrics["loss"]))),
        trained_module=True,
    )
    assert back is module
    assert (int(state.step), [step for step, _ in seen]) == (6, [1, 2, 3, 4, 5, 6])
    for name, tensor in want.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_rows_that_devices_cannot_share_are_left_out_with_a_word() -> None:
    module = nn.Linear(4, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="2 of 6 rows of a batch are left out"):
        state = tb.fit(
            module,
            DataLoader(data(10), 6),
            nn.functional.cross_entropy,
            optimizer=sgd,
            plan=fz.Plan(data=1, replica=2, microbatches=2),
        )
    assert int(state.step) == 2


@pytest.mark.filterwarnings("ignore:fit. .* rows of a batch are left out")
def test_batches_of_too_few_rows_for_all_devices_are_refused() -> None:
    module = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    small = [(torch.ones(2, 3), torch.ones(2, 1))]
    with pytest.raises(fz.ConversionError, match=r"no batch has 4 rows.*make batches larger"):
        tb.fit(module, small, torch.nn.MSELoss(), optimizer=sgd, plan=fz.Plan(data=4))


def test_rows_are_shared_by_the_data_axis_alone() -> None:
    """Of eight devices four share each row, so that two rows are enough."""
    module = nn.Linear(4, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="tensor"):
        state = tb.fit(
            module,
            DataLoader(data(6), 6),
            nn.functional.cross_entropy,
            optimizer=sgd,
            plan=fz.Plan(tensor=4),
        )
    assert int(state.step) == 1


class Scored(nn.Module):
    """Returns its own loss where it has labels, from equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.mse_loss(x, labels), "logits": x}


def test_a_module_trains_on_its_own_loss_and_takes_stacked_values_back() -> None:
    torch.manual_seed(0)
    module = Scored()
    x, labels = torch.randn(2, 8, 4)
    before = [block[0].weight.detach().clone() for block in module.blocks]
    state = tb.fit(
        module,
        [{"x": x, "labels": labels}],
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        plan=fz.Plan(data=1),
    )
    assert any("*" in name for tree in state.params.values() for name in tree)
    assert all(torch.equal(b[0].weight, old) for b, old in zip(module.blocks, before, strict=True))
    module(x, labels)["loss"].backward()
    want = [b[0].weight.detach() - 0.1 * b[0].weight.grad for b in module.blocks]
    tb.load_into(module, state)
    for block, value in zip(module.blocks, want, strict=True):
        torch.testing.assert_close(block[0].weight.detach(), value, rtol=1e-5, atol=1e-6)
    with pytest.raises(fz.CheckpointError, match="no such tensors"):
        tb.load_into(nn.Linear(2, 2), state)
    with pytest.raises(fz.CheckpointError, match="expected a state, got a dict"):
        tb.load_into(module, state.params)


def test_a_converted_module_is_called_like_one() -> None:
    module = small().eval()
    x = data(8).tensors[0]
    converted = tb.convert(module, x)
    np.testing.assert_allclose(converted(x), module(x).detach().numpy(), rtol=1e-6, atol=1e-6)


def test_batches_of_loaders_become_arrays() -> None:
    x, y = tb.batch(next(iter(DataLoader(data(4), 4))))
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    named = tb.batch(Pair(torch.ones(2), torch.zeros(3)))
    assert (type(named), named.y.shape) == (Pair, (3,))
    nested = tb.batch({"a": [torch.ones(2, dtype=torch.bfloat16)], "b": np.ones(2)})
    assert nested["a"][0].dtype == jnp.bfloat16


def test_a_module_that_is_only_evaluated_needs_only_that_mode() -> None:
    class SkipsAtRandom(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skip = self.training and torch.rand(()).item() < 0.5
            return x if skip else super().forward(x)

    module, x = SkipsAtRandom(4, 4), torch.randn(2, 4)
    with pytest.raises(fz.ConversionError):
        tb.convert(module, x)
    converted = tb.convert(module, x, train=False)
    np.testing.assert_allclose(converted(x), module.eval()(x).detach(), rtol=1e-6, atol=1e-6)
    with pytest.raises(fz.ConversionError, match="train=False"):
        converted.apply(converted.params, {}, x, train=True)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    assert tb.convert(blocks, x, train=False).blocks.stacks


def test_wrapped_modules_are_unwrapped_or_refused(tmp_path: Path) -> None:
    module, x = small().eval(), data(8).tensors[0]
    want = module(x).detach().numpy()
    for wrapped in (torch.compile(module), nn.DataParallel(module)):
        converted = tb.convert(wrapped, x)
        assert set(converted.params) == set(dict(module.named_parameters()))
        np.testing.assert_allclose(converted(x), want, rtol=1e-6, atol=1e-6)
        state = fz.init(converted.model(lambda f, b: jnp.mean(f(b))), None, fz.Plan(data=1))
        assert tb.load_into(wrapped, state) is wrapped
    inner = nn.Sequential(torch.compile(nn.Linear(4, 4)))
    with pytest.raises(fz.ConversionError, match=r"submodule `0` is compiled"):
        tb.convert(inner, x)
    named = {f"module._orig_mod.{name}": t for name, t in module.state_dict().items()}
    torch.save({"model": named, "optimizer": {}, "epoch": 3}, tmp_path / "all.pt")
    with pytest.raises(fz.CheckpointError, match=r"key='model'"):
        tb.restore(tmp_path / "all.pt", converted, None, fz.Plan(data=1))
    state = tb.restore(tmp_path / "all.pt", converted, None, fz.Plan(data=1), key="model")
    np.testing.assert_array_equal(state.params["0.weight"], module[0].weight.detach().numpy())
    # Wrappers within: blocks that were compiled, or recompute in the backward pass.
    for word in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module._orig_mod"):
        within = {name.replace(".", f".{word}."): t for name, t in module.state_dict().items()}
        params, _ = tb.load_state_dict(converted, within)
        np.testing.assert_array_equal(params["0.weight"], module[0].weight.detach().numpy())
    # What was normed by the older function goes into a parametrization, as in PyTorch.
    normed = torch.nn.utils.weight_norm(nn.Linear(4, 3)).state_dict()
    new = tb.convert(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), x)
    for prefix in ("", "module."):
        params, _ = tb.load_state_dict(new, {prefix + name: t for name, t in normed.items()})
        np.testing.assert_array_equal(
            params["parametrizations.weight.original1"], normed["weight_v"].numpy()
        )
    with pytest.raises(fz.CheckpointError, match=r"key='optim'.*'model'"):
        tb.checkpoint(tmp_path / "all.pt", key="optim")


def test_only_public_names_are_shown() -> None:
    shown = {name for name in dir(tb) if not name.startswith("_")}
    assert shown == set(tb.__all__)
    assert all(hasattr(tb, name) for name in shown)


def batches(rows: int = 16) -> list[Any]:
    return [data(rows)[:], data(2 * rows)[rows:]]


class LossLast(nn.Linear):
    """As nanoGPT's and minGPT's."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = super().forward(x)
        return logits, nn.functional.cross_entropy(logits, y)


def test_a_loss_that_comes_after_other_outputs_is_named_with_what_takes_it() -> None:
    torch.manual_seed(0)
    (x, y), module = next(iter(DataLoader(data(8), batch_size=8))), LossLast(4, 3)
    with pytest.raises(fz.ConversionError, match=r"scalar as output\[1\].*lambda output, \*_: o"):
        tb.fit(module, [(x, y)], optimizer=sgd(0.1))
    said: list[Any] = []
    tb.fit(
        module, [(x, y, y)], lambda output, *_: output[1], optimizer=sgd(0.1),
        plan=fz.Plan(data=1), on_step=lambda _, metrics: said.append(float(metrics["loss"])),
    )  # fmt: skip
    np.testing.assert_allclose(said, module(x, y)[1].item(), rtol=1e-5)


class Scaled(nn.Module):
    """Takes a vector that belongs to no row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.up(x) * scale.sum()


def patched(module: nn.Module) -> nn.Module:
    module.forward = lambda x: 2 * type(module).forward(module, x)
    return module


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    adam = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 4)).sum().backward()
    adam.step()
    return adam


def counting(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that counts beside the parameters' state."""
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state["k"] = 3
    return optimizer


def step_lr(module: nn.Module) -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters(), lr=0.1), 1)


class Once:
    """A loader whose batches come once."""

    def __init__(self) -> None:
        self.batches = iter(batches())

    def __iter__(self) -> Any:
        yield from self.batches


SUMMED = nn.CrossEntropyLoss(reduction="sum")


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("gives its batches once", lambda m: {"loader": iter(batches()), "epochs": 2}),
        ("no batch in epoch 2 of 3", lambda m: {"loader": Once(), "epochs": 3}),
        ("the loss is a sum over rows", lambda m: {"loss": SUMMED}),
        ("`forward` is an attribute of its own", lambda m: {"module": patched(m)}),
        (
            r"shapes \(\(16, 4\), \(10,\), \(16,\)\)",
            lambda m: {
                "module": (module := Scaled()),
                "optimizer": torch.optim.SGD(module.parameters()),
                "loader": [(x, torch.ones(10), y) for x, y in batches()],
            },
        ),
        ("Adam has state of steps that it took", lambda m: {"optimizer": stepped(m)}),
        ("SGD has state of steps that it took", lambda m: {"optimizer": counting(m)}),
        ("scheduler= is of a torch", lambda m: {"optimizer": sgd(0.1), "scheduler": step_lr(m)}),
    ],
)
def test_what_would_train_otherwise_than_in_torch_is_refused(message: str, changed: Any) -> None:
    module = nn.Linear(4, 3)
    asked: dict[str, Any] = {
        "module": module,
        "loader": batches(),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "plan": fz.Plan(data=2),
    }
    asked |= changed(module)
    with pytest.raises(fz.ConversionError, match=message):
        tb.fit(asked.pop("module"), asked.pop("loader"), asked.pop("loss"), **asked)


def test_rates_changed_on_the_way_are_refused() -> None:
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def halve(step: int, metrics: Any) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    with pytest.raises(fz.ConversionError, match="were changed in step 1"):
        tb.fit(module, batches(), SUMMED, optimizer=optimizer, on_step=halve, plan=fz.Plan(data=1))


def test_what_is_changed_on_the_way_is_said_and_a_loss_for_each_row_refused() -> None:
    module = small()
    module.tau = 1.0  # type: ignore[assignment]
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)

    def anneal(step: int, metrics: Any) -> None:
        module.tau = 0.5  # type: ignore[assignment]
        module[0].requires_grad_(False)

    plan = fz.Plan(data=1)
    with pytest.warns(UserWarning, match=r"fit: `0.bias.requires_grad`.*, tau changed while"):
        tb.fit(module, batches(), SUMMED, optimizer=sgd, on_step=anneal, plan=plan)
    each = nn.CrossEntropyLoss(reduction="none")
    for loss in (each, lambda out, y: each(out, y).mean(0, keepdim=True)):
        with pytest.raises(fz.ConversionError, match=r"the loss has 1 dim.*reduction=.mean"):
            tb.fit(module, batches(), loss, optimizer=sgd, plan=plan)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "`1.training`": lambda module: module[1].eval(),
    "`0.weight`": lambda module: module[0].weight.data.clamp_(-0.01, 0.01),
    "the parts of `Sequential`": lambda module: module.append(nn.Identity()),
    "the hooks of `0`": lambda module: module[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_the_module_on_the_way_are_said(what: str) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)

    def change(step: int, _: Any) -> None:
        if step == 2:
            CHANGES[what](module)

    with pytest.warns(UserWarning, match=f"fit: {re.escape(what)} changed while it ran"):
        tb.fit(module, batches(), SUMMED, optimizer=sgd, on_step=change, plan=fz.Plan(data=1))


@pytest.mark.parametrize(
    ("loss", "labels", "said"),
    [
        (nn.CrossEntropyLoss(), torch.arange(16) % 3, False),
        (nn.CrossEntropyLoss(), torch.where(torch.arange(16) < 5, -100, 1), True),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0, 1.0])), torch.arange(16) // 6, True),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.5, 2.0])), torch.arange(16) % 3, True),
        (nn.functional.cross_entropy, torch.rand(16, 3), False),
        # Both means are nearly one: 1.23928 and 1.23921.
        (nn.CrossEntropyLoss(torch.tensor([1, 2, 0.5])), torch.arange(16) * 13 % 23 % 3, True),
    ],
)
def test_rows_that_count_differently_are_said(loss: Any, labels: Any, said: bool) -> None:
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-9)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tb.fit(module, [(torch.ones(16, 4), labels)], loss, optimizer=optimizer)
    told = [str(one.message) for one in seen if "rows" in str(one.message)]
    assert ["rows count differently" in text for text in told] == [True] * said, told


def test_rows_that_fill_no_share_say_nothing_of_a_loss() -> None:
    """Of 17 rows 8 devices have two each: the mean of theirs is that of 16."""
    example = torch.ones(17, 4), torch.arange(17) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert require_mean(nn.Linear(4, 3), nn.CrossEntropyLoss(), example, 8)


def test_hooks_of_the_module_come_before_the_loss() -> None:
    def made() -> nn.Module:
        module = small()
        module.register_forward_hook(lambda module, given, out: 3 * out)
        module.register_forward_pre_hook(lambda module, given: (2 * given[0],))
        return module

    loader = DataLoader(data(24), batch_size=8)
    want, module = trained_by_torch(made(), loader, epochs=1), made()
    tb.fit(
        module,
        loader,
        nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
        plan=fz.Plan(data=1),
        trained_module=True,
    )
    for name, tensor in want.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


class Annealed(nn.Module):
    """A loss that ends after a hundred calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(x, y) * (1 if self.calls < 100 else 0)


@pytest.mark.parametrize("loss", [Annealed(), Annealed().__call__, lambda *x: ANNEALED[0](*x)])
def test_what_a_loss_counts_in_is_named(loss: Any) -> None:
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with pytest.warns(tb.PythonStateWarning, match=r"\(.*calls: \d, then \d"):
        tb.fit(module, [data(8).tensors], loss, optimizer=optimizer, plan=fz.Plan(data=1))


ANNEALED = [Annealed()]


def test_layers_with_learning_rates_of_their_own_are_fitted_unrolled() -> None:
    def blocks() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(nn.Sequential(*layers), nn.Linear(4, 1))

    def rates(module: nn.Sequential) -> torch.optim.Optimizer:
        own = [{"params": one.parameters(), "lr": 0.1 / 2**i} for i, one in enumerate(module[0])]
        return torch.optim.SGD([*own, {"params": module[1].parameters(), "lr": 0.2}], lr=0.1)

    draw = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=draw), torch.zeros(8, 1)) for _ in range(3)]
    module, plan = blocks(), fz.Plan(data=1)
    given = {"optimizer": rates(module), "plan": plan, "trained_module": True}
    with pytest.raises(fz.ConversionError, match=r"different groups .*roll=False"):
        tb.fit(module, data, nn.MSELoss(), **given)
    _, trained = tb.fit(module, data, nn.MSELoss(), roll=False, **given)
    wanted = blocks()
    optimizer = rates(wanted)
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(wanted(x), y).backward()
        optimizer.step()
    for name, value in wanted.state_dict().items():
        np.testing.assert_allclose(trained.state_dict()[name], value, rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    def __init__(self, tied: bool, size: int = 4, more: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, size, bias=False), nn.Linear(4, size, bias=False)
        self.register_buffer("kept", torch.tensor([300.0, 2.0]))
        if tied:
            self.b.weight = self.a.weight
        if more:
            self.c = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x) + self.a(x) + self.kept.sum()


def with_small_buffer() -> nn.Module:
    module = Tied(tied=False)
    module.kept = torch.zeros(2, dtype=torch.int8)
    return module


@pytest.mark.parametrize(
    ("tied", "other", "message"),
    [
        (False, lambda: Tied(False, more=True), "`c.weight`: the state has no value for it"),
        (True, lambda: Tied(False), "`b.weight`: the state has no value for it"),
        (False, lambda: Tied(True), "`a.weight` and `b.weight` are one tensor, but have two"),
        (False, lambda: Tied(False, 3), r"`a.weight` is \(3, 4\), smaller than \(4, 4\)"),
        (False, with_small_buffer, "`kept`: torch.int8 cannot hold the values of float32"),
        (False, lambda: Tied(False).to("meta"), "`a.weight` is on the meta device"),
    ],
)
def test_values_are_not_put_into_a_module_of_another_shape(
    tied: bool, other: Any, message: str
) -> None:
    converted = tb.convert(Tied(tied), torch.zeros(2, 4))
    state = fz.init(converted.model(lambda f, x: jnp.mean(f(x))), None, fz.Plan(data=1))
    module = other()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(fz.CheckpointError, match=message):
        tb.load_into(module, state)
    for name, value in module.state_dict().items():
        assert value.is_meta or torch.equal(value, before[name])
    tb.load_into(Tied(tied), state)


def test_a_name_that_looks_like_blocks_is_a_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ParameterDict({"a*": torch.ones(3), "b[0:2]": torch.ones(3)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.own["a*"] + self.own["b[0:2]"]

    module = Named()
    converted = tb.convert(module, torch.ones(2, 3))
    state = fz.init(converted.model(lambda f, x: jnp.mean(f(x))), None, fz.Plan(data=1))
    twice = state.replace(params={name: 2 * value for name, value in state.params.items()})
    tb.load_into(module, twice)
    assert all((p == 2).all() for p in module.parameters())


def test_values_too_large_for_half_a_float_are_refused() -> None:
    wide = nn.Linear(4, 4)
    nn.init.constant_(wide.weight, 1e6)
    converted = tb.convert(wide, torch.zeros(2, 4))
    state = fz.init(converted.model(lambda f, x: jnp.mean(f(x))), None, fz.Plan(data=1))
    with pytest.raises(fz.CheckpointError, match=r"`weight`: torch\.float16 cannot hold"):
        tb.load_into(nn.Linear(4, 4).half(), state)
    assert tb.load_into(nn.Linear(4, 4).bfloat16(), state).weight[0, 0] > 9e5


def test_values_of_a_consumed_state_are_refused_by_name() -> None:
    converted = tb.convert(small(), torch.ones(8, 4))
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch)))
    state = fz.init(model, sgd(0.1), fz.Plan(data=1))
    for leaf in jax.tree.leaves(state.params):
        leaf.delete()
    with pytest.raises(fz.StateConsumedError, match="load_into"):
        tb.load_into(small(), state)
    with pytest.raises(fz.StateConsumedError, match="state_dict"):
        tb.state_dict(converted, state)
