"""What a PyTorch user brings along in the first hour: loops, schedulers and files of their own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fzero as fz
import torch_bridge as tb


BATCHES = [
    (torch.randn(4, 3, generator=make), torch.randn(4, 2, generator=make))
    for make in [torch.Generator().manual_seed(1)]
    for _ in range(5)
]
ONE = fz.Plan(data=1)


@pytest.fixture(autouse=True)
def _promotes() -> Any:
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic
        yield


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def torch_steps(module: nn.Module, optimizer: Any, scheduler: Any = None) -> nn.Module:
    for x, y in BATCHES:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return module


def fitted(module: nn.Module, optimizer: Any, scheduler: Any = None) -> nn.Module:
    loss = nn.MSELoss()
    made_by = {"optimizer": optimizer, "scheduler": scheduler, "plan": ONE}
    return tb.fit(module, BATCHES, loss, **made_by, trained_module=True)[1]


def same(one: nn.Module, other: nn.Module) -> None:
    for got, want in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Blocks(nn.Module):
    """Four equal layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_what_a_pipeline_trained_is_loaded_into_the_module() -> None:
    """Its layers lie on the ranks; what ended the call before it gave back what it had trained."""
    trained = torch_steps(theirs := Blocks(), torch.optim.SGD(theirs.parameters(), lr=0.1))
    plan = fz.Plan(zero=1, data=2, pipe=2, microbatches=2, schedule="zb_h1")
    ours = Blocks()
    sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
    options = {"optimizer": sgd, "plan": plan, "trained_module": True}
    state, _ = tb.fit(ours, BATCHES, nn.MSELoss(), **options)
    same(ours, trained)
    assert int(state.step) == len(BATCHES)
    assert any("pipe" in p.sharding.spec for p in jax.tree.leaves(state.params))


def test_collected_gradients_are_those_of_a_loop_that_steps_now_and_then() -> None:
    """`loss / 2`, a clipped step every second batch; what is left over at the end waits."""
    want = made()
    adamw = torch.optim.AdamW(want.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(BATCHES, 1):
        (nn.functional.mse_loss(want(x), y) / 2).backward()
        if number % 2 == 0:
            nn.utils.clip_grad_norm_(want.parameters(), 0.1)
            adamw.step()
            adamw.zero_grad()
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=1e-2))
    for tx in (
        optax.MultiSteps(clipped, 2),
        optax.MultiSteps(clipped, 2).gradient_transformation(),
    ):
        same(fitted(made(), tx), want)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    ],
    ids=["lambda", "cyclic"],
)
@pytest.mark.parametrize("begun", [False, True])
def test_schedules_that_only_run_to_tell_are_as_long_as_the_loader(
    schedule: Callable[[Any], Any], begun: bool
) -> None:
    def pair(module: nn.Module) -> tuple[Any, Any]:
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = schedule(sgd)
        for _ in range(3 if begun else 0):
            sgd.step()
            scheduler.step()
        return sgd, scheduler

    want, module = made(), made()
    same(fitted(module, *pair(module)), torch_steps(want, *pair(want)))


def test_a_cycle_that_ends_before_the_loader_is_refused_as_in_torch() -> None:
    module = made()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    cycle = lr_scheduler.OneCycleLR(sgd, max_lr=0.2, total_steps=4)
    with pytest.raises(fz.ConversionError, match=r"total_steps=4 and raises.*there are 5"):
        fitted(module, sgd, cycle)
    with pytest.raises(ValueError, match="number of total steps is 4"):
        torch_steps(module, sgd, cycle)


def test_an_optimizer_that_has_state_before_its_first_step_is_new() -> None:
    want, module = made(), made()
    torch_steps(want, torch.optim.Adagrad(want.parameters(), lr=0.1))
    adagrad = torch.optim.Adagrad(module.parameters(), lr=0.1)
    same(fitted(module, adagrad), want)
    torch_steps(module, adagrad)
    with pytest.raises(fz.ConversionError, match="has state of steps that it took"):
        fitted(module, adagrad)


@pytest.mark.parametrize(
    ("extra", "said"), [("scale", "`scale`.* 2.0"), ("text", "`text/0`.* 'a'"), ("n", r"`n`.*\(3")]
)
def test_what_has_no_rows_is_refused_before_a_module_is_traced(extra: str, said: str) -> None:
    given = {"scale": 2.0, "text": ["a", "b"], "n": torch.tensor(3)}[extra]
    loader = [{"input": torch.ones(2, 4), extra: given}]
    with pytest.raises(fz.ConversionError, match=f"{said}.*collate_fn"):
        tb.fit(nn.Linear(4, 1), loader, optimizer=optax.sgd(0.1))


def test_a_traced_graph_takes_no_loss_around_it() -> None:
    graph = torch.fx.symbolic_trace(made())
    with pytest.raises(fz.ConversionError, match=r"GraphModule.*the module that was traced"):
        fitted(graph, torch.optim.SGD(graph.parameters(), lr=0.1))


def test_a_file_of_several_entries_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    want = made()
    adamw = torch.optim.AdamW(want.parameters(), lr=1e-2)
    cosine = lr_scheduler.CosineAnnealingLR(adamw, 20)
    torch_steps(want, adamw, cosine)
    entries = {"model": want.state_dict(), "optimizer": adamw.state_dict(), "epoch": 1}
    torch.save({**entries, "scheduler": cosine.state_dict()}, tmp_path / "run.pt")
    module = made()
    converted = tb.convert(module, BATCHES[0][0])
    fresh = torch.optim.AdamW(module.parameters(), lr=1e-2)
    tx = tb.optimizer(fresh, converted, lr_scheduler.CosineAnnealingLR(fresh, 20))
    state = tb.restore(tmp_path / "run.pt", converted, tx, ONE, key="model")
    assert int(state.step) == len(BATCHES)
    model = converted.model(lambda forward, batch: jnp.mean((forward(batch[0]) - batch[1]) ** 2))
    step = fz.train_step(model, tx, ONE)
    for x, y in BATCHES:
        state, _ = step(state, (x.numpy(), y.numpy()))
    same(tb.load_into(module, state), torch_steps(want, adamw, cosine))


def test_state_of_another_optimizer_in_such_a_file_is_not_lost_without_a_word(
    tmp_path: Path,
) -> None:
    module = made()
    momentum = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    torch_steps(module, momentum)
    entries = {"model": module.state_dict(), "optimizer": momentum.state_dict()}
    torch.save(entries, tmp_path / "run.pt")
    converted = tb.convert(module, BATCHES[0][0])
    asked = tmp_path / "run.pt", converted, optax.sgd(1e-2), ONE
    with pytest.raises(fz.CheckpointError, match=r"momentum_buffer.*optimizer=False"):
        tb.restore(*asked, key="model")
    same(tb.load_into(made(), tb.restore(*asked, key="model", optimizer=False)), module)
    torch.save({**entries, "second": momentum.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(fz.CheckpointError, match=r"one optimizer, got \['optimizer', 'second'\]"):
        tb.restore(*asked, key="model")


def test_a_batch_that_arrays_cannot_hold_is_named() -> None:
    rows = [torch.ones(3), torch.ones(2)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    for told, given in {
        r"batch\['x'\]\[0\]: integers .* int32": {"x": [torch.tensor([1 << 40])]},
        r"batch\[1\]: expected a dense tensor, got layout": (rows[0], torch.eye(2).to_sparse()),
        r"batch: .* a nested one; use .to_padded": jagged,
        r"batch: Cannot copy out of meta tensor": torch.ones(2, device="meta"),
        r"batch\['x'\] is a PackedSequence.*lengths": {"x": nn.utils.rnn.pack_sequence(rows)},
    }.items():
        with pytest.raises(fz.ConversionError, match=told):
            tb.batch(given)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += (x > 0).sum().to(torch.int32)
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize(("layers", "name"), [(1, "0.seen"), (3, "*.seen")])
def test_counts_over_devices_are_added_where_one_says_so(layers: int, name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(Counting() for _ in range(layers)))
    batches = [(torch.ones(8, 3), torch.zeros(8, 3))] * 2

    def fitted(plan: fz.Plan, reduce: dict[str, str] | None) -> Any:
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        state = tb.fit(
            module, batches, nn.MSELoss(), optimizer=sgd, plan=plan, buffer_reduce=reduce
        )
        return np.asarray(jax.tree.leaves(state.buffers)[0])

    whole = fitted(ONE, {name: "sum"})
    assert whole.sum() >= 48
    assert (fitted(fz.Plan(), {name: "sum"}) == whole).all()
    with pytest.raises(fz.StateError, match=r"changes with the batch.*buffer_reduce"):
        fitted(fz.Plan(), None)
    with pytest.raises(fz.ConversionError, match=r"names 'of', which is no buffer"):
        fitted(ONE, {"of": "sum"})


class WithSizes(nn.Module):
    """Gives arrays, and what is none: a size, a text."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"out": self.linear(x), "rows": x.shape[0], "kind": "linear", "none": None}


def test_a_call_is_compiled_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    module = WithSizes()
    converted, traced = tb.convert(module, torch.randn(4, 3), train=False), []
    run = tb.Converted._run
    monkeypatch.setattr(tb.Converted, "_run", lambda *args: traced.append(1) or run(*args))
    for rows, times in ((4, 1), (5, 2), (4, 2), (5, 2), (1, 3), (1, 3)):
        x = torch.randn(rows, 3)
        found, want = converted(x), module(x)
        np.testing.assert_allclose(found.pop("out"), want.pop("out").detach(), rtol=1e-5)
        assert found == want
        assert len(traced) == times
    x = jnp.ones((4, 3))
    slope = jax.jit(jax.grad(lambda x: converted(x)["out"].sum()))(x)
    np.testing.assert_allclose(slope[0], module.linear.weight.detach().sum(0), rtol=1e-5)


def test_roundings_of_16_bits_are_no_rows_that_count_differently() -> None:
    module, labels = nn.Linear(4, 3).bfloat16(), torch.arange(16) * 7 % 5 % 3
    sgd, x = torch.optim.SGD(module.parameters(), lr=0.1), torch.ones(16, 4).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tb.fit(module, [(x, labels)], nn.CrossEntropyLoss(), optimizer=sgd)


SGD = torch.optim.SGD([torch.ones(1)], 0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": "mse"}, "loss='mse': expected a function or module"),
        ({"loss": nn.MSELoss}, "loss=<class.*MSELoss'>: expected a function or module"),
        ({"optimizer": torch.optim.SGD}, "the optimizer is the class SGD"),
        ({"optimizer": [SGD, SGD], "scheduler": [None]}, "several optimizers: expected one"),
        ({"epochs": 0}, "epochs=0: expected a number, 1 or more"),
        ({"epochs": "2"}, "epochs='2': expected a number, 1 or more"),
        ({"epochs": 1.5}, "epochs=1.5: expected a number, 1 or more"),
        ({"on_step": 3}, "on_step=3: expected a function"),
        ({"scheduler": 3}, "scheduler=3: expected one of torch.optim.lr_scheduler"),
    ],
)
def test_what_is_none_of_its_kind_is_refused_before_a_module_is_traced(
    given: dict[str, Any], said: str
) -> None:
    module = nn.Linear(4, 3)
    right = {"loss": nn.MSELoss(), "optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}
    with pytest.raises(fz.ConversionError, match=f"^(fit: )?{said}"):
        tb.fit(module, [(torch.ones(8, 4), torch.ones(8, 3))], **(right | given))


class Config:
    """An object that may change, with which a function is not compiled."""


@pytest.mark.parametrize("constant", [1, Config()], ids=["compiled", "not"])
def test_a_jax_function_returns_numbers_and_nothing_else_than_arrays(constant: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    twice, number, nothing = tb.wrap(lambda x, _: (x * 2, 3.0, None))(x, constant)
    twice.sum().backward()
    assert x.grad is not None
    assert (x.grad.tolist(), number.item(), nothing) == ([2.0] * 3, 3.0, None)
    with pytest.raises(TypeError, match=r"returned 'name', a str: expected arrays, numbers"):
        tb.wrap(lambda x, _: (x, "name"))(x, constant)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = made()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def test_a_loader_and_a_loss_of_torch_in_a_loop_of_ones_own() -> None:
    """Tensors as the loader gives them, a short batch last, and another loss than fit's."""
    loss, module = nn.SmoothL1Loss(beta=0.5), Net()
    data = [(x[0], y[0]) for x, y in BATCHES]
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    want = torch_trained(module, loader, loss)
    converted = tb.convert(tb.with_loss(module, loss), *next(iter(loader)))
    model, tx = converted.model("module"), optax.sgd(0.1)
    state, step = fz.init(model, tx, ONE), fz.train_step(model, tx, ONE)
    for batch in loader:
        state, _ = step(state, tuple(batch))
    assert int(state.step) == 3
    same(tb.load_into(module, state), want)
    # Frameworks copy what they are configured with; after a call, too.
    x, y = BATCHES[0]
    expected = converted(x, y)
    copied, again = copy.deepcopy((converted, step))
    np.testing.assert_array_equal(copied(x, y), expected)
    assert again(state, (x, y))[0].step == 4


def torch_trained(module: nn.Module, loader: Any, loss: Any) -> nn.Module:
    trained = copy.deepcopy(module)
    sgd = torch.optim.SGD(trained.parameters(), lr=0.1)
    for x, y in loader:
        sgd.zero_grad()
        loss(trained(x), y).backward()
        sgd.step()
    return trained


@pytest.mark.parametrize("rolled", [False, True])
def test_a_loss_of_torch_is_told_where_it_belongs(rolled: bool) -> None:
    layers = [nn.Linear(3, 3) for _ in range(3)] if rolled else [nn.Linear(3, 3)]
    converted = tb.convert(nn.Sequential(*layers), torch.zeros(4, 3))
    for loss in (nn.CrossEntropyLoss(), nn.functional.cross_entropy, torch.dist):
        with pytest.raises(fz.ConversionError, match=r"one of PyTorch.*tb\.with_loss.*tb\.fit"):
            converted.model(loss)
    own = converted.model(lambda forward, batch: torch.sum(forward(batch)))
    with pytest.raises(fz.ConversionError, match=r"one of PyTorch.*must be Tensor"):
        fz.train_step(own, optax.sgd(0.1), ONE)(fz.init(own, optax.sgd(0.1), ONE), jnp.ones((4, 3)))
    of_tensors = [
        nn.functional.mse_loss, nn.SmoothL1Loss(), torch.pow, nn.GaussianNLLLoss(),
        lambda x, _: (x - torch.zeros(1)).mean(), lambda x, _: (torch.zeros(1) - x).mean(),
        lambda x, _: x.unsqueeze(0).mean(), lambda x, b: x.reshape(b.size(0), -1).mean(),
    ]  # fmt: skip
    for each in of_tensors:
        inner = converted.model(lambda f, b, each=each: each(f(b), b))
        with pytest.raises(fz.ConversionError, match=r"one of PyTorch.*tb\.with_loss"):
            inner.loss(*inner.init, jnp.ones((4, 3)), None, True)
    with pytest.raises(TypeError, match="of the user"):
        converted.model(_raises).loss(*converted.model(_raises).init, jnp.ones((4, 3)), None, True)


def _raises(forward: Any, batch: Any) -> Any:
    raise TypeError("of the user")


class Queueing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("queue", torch.zeros(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.queue.copy_(torch.cat([x.detach(), self.queue[: -len(x)]]))
        return x


def test_a_queue_of_examples_is_said_to_be_averaged_over_devices() -> None:
    module, batches = Queueing(), [(torch.ones(8, 3), torch.zeros(8, 3))]
    for plan, named in ((fz.Plan(), True), (ONE, False)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            sgd = torch.optim.SGD(module.parameters(), lr=0.1)
            tb.fit(module, batches, nn.MSELoss(), optimizer=sgd, plan=plan)
        told = [str(w.message) for w in found if "buffers/queue keeps rows" in str(w.message)]
        assert len(told) == named
