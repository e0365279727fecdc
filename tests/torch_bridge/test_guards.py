"""What a forward does besides computing is kept or refused; what changes nothing is let through."""

from __future__ import annotations

import gc
import io
import itertools
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from parity import check_parity
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.export.watch.forward import failing_line
from torch_bridge.module.quantized_linear import QuantizedLinear


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))
COUNTED = {"calls": 0}


class Two(nn.Module):
    """A layer whose gradient something is done with, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Inference(Two):
    @torch.inference_mode()
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = self.a(x)
        return self.b(x) + y.clone() + self.features(x).clone()


class SwitchedOn(Two):
    """Gradients are switched on within inference mode, which goes on to track none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            with torch.enable_grad():
                y = self.a(x)
            slope = torch.func.grad(lambda v: self.a(v).square().sum())(x)
            torch.set_grad_enabled(True)
            z = self.a(x)
            with torch.inference_mode(False):
                tracked = self.b(x)
        return self.b(x) + tracked + y.clone() + z.clone() + slope.clone()


@pytest.mark.parametrize("kind", [Inference, SwitchedOn])
def test_inference_mode_has_no_gradients(kind: type[Two]) -> None:
    check_parity(kind(), X)


class ScalesGradient(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.1)
        return self.b(hidden)


def test_hooks_on_gradients_are_refused_by_name_and_line() -> None:
    with pytest.raises(ConversionError, match=r"register_hook(?s:.)*test_guards\.py\", line \d+"):
        tb.convert(ScalesGradient(), X)
    module = Two()
    module.a.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ConversionError, match=r"parameter `a\.weight` has a gradient hook"):
        tb.convert(module, X)
    module = Two()
    handle = module.b.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ConversionError, match="submodule `b` has a backward hook"):
        tb.convert(module, X)
    handle.remove()
    tb.convert(module, X)


class Depends(nn.Module):
    """Multiplies by what `step` gives, which may change from call to call."""

    def __init__(self, step: Callable[[], Any]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.step()


def in_object() -> Callable[[], float]:
    counter = types.SimpleNamespace(calls=0)

    def step() -> float:
        counter.calls += 1
        return counter.calls

    return step


def in_array() -> Callable[[], float]:
    count = np.zeros(1)

    def step() -> float:
        count[0] += 1
        return float(count[0])

    return step


def in_array_as_tensor() -> Callable[[], Any]:
    count = np.zeros(1, np.float32)

    def step() -> torch.Tensor:
        count[0] += 1
        return torch.from_numpy(count.copy())

    return step


def in_iterator() -> Callable[[], float]:
    return itertools.count(1).__next__


def to_and_fro() -> Callable[[], float]:
    return itertools.cycle((1.0, 2.0)).__next__


def in_global() -> Callable[[], float]:
    def step() -> float:
        COUNTED["calls"] += 1
        return COUNTED["calls"]

    return step


@pytest.mark.parametrize(
    "made", [in_object, in_array, in_array_as_tensor, in_iterator, to_and_fro, in_global]
)
def test_state_of_python_is_not_frozen_wherever_it_is(made: Callable[[], Any]) -> None:
    with pytest.raises(
        ConversionError,
        match=r"(?i)depends on Python values that it changes itself: .*(count|step)",
    ):
        tb.convert(Depends(made()), X)


class Calls:
    """Where a forward may count: what is named by its code, or by what it closes over."""

    number = 0
    given: ClassVar[list[int]] = []

    @classmethod
    def in_class(cls) -> int:
        cls.number += 1
        return cls.number

    @staticmethod
    def in_length() -> int:
        Calls.given.append(0)
        return len(Calls.given)


def in_closure() -> Callable[[], int]:
    calls = deque[int]()

    def step() -> int:
        calls.append(0)
        return len(calls)

    return step


def in_default() -> Callable[[], int]:
    def step(calls: list[int] = [], *, given: int = 2) -> int:  # noqa: B006
        calls.append(given)
        return len(calls)

    return step


def in_keyword_default() -> Callable[[], int]:
    def step(given: int = 2, *, calls: list[int] = []) -> int:  # noqa: B006
        calls.append(given)
        return len(calls)

    return step


class Late(nn.Module):
    """Does something else in every hundredth call."""

    def __init__(self, step: Callable[[], Any]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if self.step() % 100 == 0 else 1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self) -> int:
        self.calls += 1
        return self.calls


def beside() -> Callable[[], int]:
    counting = [Counting()]  # no submodule of any module
    return lambda: counting[0]()


def hooked() -> nn.Module:
    module, step = nn.Linear(4, 4), in_closure()
    module.register_forward_hook(lambda _, __, y: y * (2 if step() % 100 == 0 else 1))
    return module


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Late(in_object()), "`counter` of step.calls: 0, then 1"),
        (Late(in_array()), "`count` of step"),
        (Late(in_closure()), "the length of `calls` of step: 0, then 1"),
        (Late(in_default()), "the length of default 0 of step: 0, then 1"),
        (Late(in_keyword_default()), "the length of default `calls` of step: 0, then 1"),
        (Late(in_global()), r"global COUNTED\['calls'\]: "),
        (Late(Calls.in_class), "Calls.number: 0, then 1"),
        (Late(Calls.in_length), "the length of Calls.given: 0, then 1"),
        (Late(in_iterator()), r"step\)"),
        (hooked(), "the length of `calls` of `step` of a hook: 0, then 1"),
        (Late(beside()), r"`counting` of .*calls: 0, then 1"),
    ],
)
def test_what_a_later_call_may_depend_on_is_named(module: nn.Module, name: str) -> None:
    """The first calls are alike, and only the count says that another may not be."""
    with pytest.warns(tb.PythonStateWarning, match=rf"counts in values of Python \(.*{name}"):
        tb.convert(module, X, train=False)


def in_a_bar() -> Callable[[], int]:
    """tqdm's own thread notes when it woke, whatever a forward does."""

    def step() -> int:
        tqdm.monitor.woken += 1.0
        return 0

    return step


def test_what_tqdm_counts_is_no_count_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor", types.SimpleNamespace(woken=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.PythonStateWarning)
        tb.convert(Late(in_a_bar()), X, train=False)


class Turns:
    """An iterator of a user's own, which cannot be copied."""

    def __init__(self) -> None:
        self.turn = 0

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> int:
        self.turn += 1
        return self.turn

    def __reduce__(self) -> str:
        raise NotImplementedError


class Log(io.TextIOWrapper):
    """As a console's or a test runner's: copied, it closes what it writes to."""


def test_iterators_that_are_not_pythons_own_are_left_alone() -> None:
    with pytest.warns(tb.PythonStateWarning, match=r"\(.*step.turn: 0, then 1"):
        tb.convert(Late(Turns().__next__), X, train=False)
    log = Log(io.BytesIO())
    reader = iter(DataLoader(range(3)))  # torch refuses to copy it

    def step() -> int:
        return len((log, reader))

    tb.convert(Late(step), X, train=False)
    gc.collect()
    assert not log.closed


class Allocates(nn.Module):
    """Makes so many objects that Python collects what nothing refers to any more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.set_threshold(100)
        assert len([[] for _ in range(500)]) == 500
        return x * 2.0


@torch.no_grad()
def waiting() -> Iterator[None]:
    """Turns gradients off and on again when it is ended."""
    yield


def test_what_python_collects_during_a_trace_is_no_part_of_it() -> None:
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(10_000_000)
        generator = waiting()
        next(generator)
        circle: list[Any] = [generator]
        circle.append(circle)
        del generator, circle
        converted = tb.convert(Allocates(), X)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    np.testing.assert_array_equal(converted(X), X.numpy() * 2)


class Running(nn.Module):
    """Keeps a tensor that is no buffer from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + x.mean()
        return x * self.mean


def test_a_tensor_attribute_that_is_set_anew_is_not_frozen() -> None:
    with pytest.raises(ConversionError, match=r"changes itself: mean(?s:.)*register_buffer"):
        tb.convert(Running(), X)


RUNNING = torch.zeros(())


def tensor_in_object() -> Callable[[], torch.Tensor]:
    held = types.SimpleNamespace(value=torch.zeros(()))

    def step() -> torch.Tensor:
        held.value = held.value + 1
        return held.value

    return step


def tensor_in_closure() -> Callable[[], torch.Tensor]:
    value = torch.zeros(())

    def step() -> torch.Tensor:
        nonlocal value
        value = value + 1
        return value

    return step


def tensor_in_global() -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        global RUNNING
        RUNNING = RUNNING + 1
        return RUNNING

    return step


@pytest.mark.parametrize("made", [tensor_in_object, tensor_in_closure, tensor_in_global])
@pytest.mark.parametrize("train", [True, False])
def test_a_tensor_that_is_set_anew_in_no_module_is_refused_by_line(
    made: Callable[[], Any], train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "RUNNING", torch.zeros(()))
    said = "forward depends on tensors that an earlier call computed.*\n  at: .*test_guards"
    mode = "train" if train else "eval"
    with pytest.raises(ConversionError, match=rf"{mode} {said}.*\n.*register_buffer"):
        tb.convert(Depends(made()), X, train=train)


class Idle(nn.Module):
    """Draws and counts, and computes with neither."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = types.SimpleNamespace(number=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        np.random.rand()
        self.calls.number += 1
        return x * 2


class Integers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x % 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class OfIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(Integers.apply(ids))


class Checks(nn.Module):
    """Asks whether a mask holds as many as there are, as multimodal models do."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        torch._check(mask.sum().item() >= 0)
        return torch.where(mask, x, 0.0)


class ChecksAll(nn.Module):
    """The same, as a tensor that is asserted: torch then knows the number, and says so."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        said = f"{mask.sum()} of {x.shape[0]}"
        torch._check_tensor_all(mask.sum() * x.shape[-1] >= 0, lambda: said)
        return torch.where(mask, x, 0.0)


def test_what_nothing_depends_on_is_no_reason_to_refuse() -> None:
    with pytest.warns(tb.PythonStateWarning, match=r"calls\.number: 0, then 1"):
        check_parity(Idle(), X)
    check_parity(OfIntegers(), torch.arange(6).reshape(2, 3))
    check_parity(Checks(), X, X > 0)
    check_parity(ChecksAll(), X, X > 0)


def test_parity_compares_scalars() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).mean()

    module = Loss()
    assert tb.parity(module, tb.convert(module, X), X).agrees


class PathOfASize(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x if not self.training and x.shape[0] % 3 == 0 else 2 * x


class Renamed(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        a, b = 2 * x, 3 * x
        return {"a": a, "b": b} if self.training else {"b": a, "a": b}


@pytest.mark.parametrize("kind", [PathOfASize, Renamed])
def test_modes_of_one_graph_that_differ_in_sizes_or_in_what_they_return(kind: Any) -> None:
    module = kind().eval()
    converted = tb.convert(module, torch.ones(4, 2))
    x = torch.ones(6, 2)
    got, want = converted(x.numpy()), module(x)
    for name in ("a", "b") if kind is Renamed else (...,):
        np.testing.assert_array_equal(got[name], want[name])


def test_a_line_of_the_bridge_s_own_layers_is_not_named_as_a_user_s() -> None:
    net = nn.Sequential(Two(), nn.Linear(4, 4))
    net[0].a = QuantizedLinear(nn.Linear(4, 4), "int8")  # type: ignore[union-attr]
    with pytest.raises(ConversionError) as caught:
        net(torch.zeros(2, 4, dtype=torch.int64))
    found = failing_line(caught.value, net)
    assert found is not None
    assert found[0] == "0"
    assert found[1].endswith("return self.b(self.a(x))")


class TriesARow(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x).reshape(-1, 5)
        except RuntimeError:
            return super().forward(x)


def test_what_fails_for_some_sizes_is_tried_for_each() -> None:
    module = TriesARow(4, 4)
    converted = tb.convert(module, X)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        np.testing.assert_allclose(converted(x), module(x).detach(), 1e-5, 1e-6)
