"""What a user's Python keeps, asks or sets beside its tensors, while it is traced."""

from __future__ import annotations

import copy
import functools
import operator
import random
import re
import warnings
from collections import deque
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import get_world_size, is_initialized
from torch.distributed.nn import functional as distributed_functions

import torch_bridge as tb
from fzero.errors import ConversionError


@functools.lru_cache(maxsize=8)
def causal(size: int) -> torch.Tensor:
    """A mask that is made once for each size."""
    return torch.triu(torch.full((size, size), float("-inf")), 1)


@functools.cache
def noise(size: int) -> torch.Tensor:
    """Numbers that are drawn once."""
    return torch.randn(size, size)


@functools.cache
def paths(size: int) -> int:
    """A number that takes ages to compute where nothing is kept."""
    return 1 if size < 2 else paths(size - 1) + paths(size - 2)


class Caches(nn.Module):
    """Keeps masks in a cache of a function, of a method, or as a property."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(4, 4), where

    @functools.lru_cache  # noqa: B019
    def mask(self, size: int) -> tuple[torch.Tensor, int]:
        return torch.triu(torch.full((size, size), float("-inf")), 1), size

    @functools.cached_property
    def five(self) -> torch.Tensor:
        return torch.triu(torch.full((5, 5), float("-inf")), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        mask = {
            "a function": lambda: causal(size), "a method": lambda: self.mask(size)[0],
            "a property": lambda: self.five, "noise": lambda: noise(size),
            "numbers": lambda: torch.full((size, size), paths(80) / 1e16),
        }[self.where]()  # fmt: skip
        return (self.linear(x) @ x.mT + mask).softmax(-1)


@pytest.mark.parametrize("where", ["a function", "a method", "a property", "numbers"])
@pytest.mark.parametrize("warm", [False, True])
def test_caches_of_python_are_computed_anew(where: str, warm: bool) -> None:
    """Values of a trace stayed in them: the next trace died of them, and the module, too."""
    module, x = Caches(where), torch.randn(2, 5, 4)
    Caches.mask.cache_clear()
    causal.cache_clear()
    if warm:
        module(x)
    held = causal.cache_info(), Caches.mask.cache_info(), set(vars(module))
    converted = tb.convert(module, x)
    assert (causal.cache_info(), Caches.mask.cache_info(), set(vars(module))) == held
    assert isinstance(causal, functools._lru_cache_wrapper)
    assert tb.parity(module, converted, x).agrees
    if where != "a property":
        other = torch.randn(3, 7, 4)
        np.testing.assert_allclose(
            converted(other), module.eval()(other).detach(), rtol=1e-6, atol=1e-6
        )


def test_random_numbers_that_python_keeps_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"noise` draws random numbers \(randn\)"):
        tb.convert(Caches("noise"), torch.randn(2, 5, 4))


class Seldom(nn.Linear):
    def __init__(self, numpy: bool, rate: float) -> None:
        super().__init__(3, 3)
        self.numpy, self.rate = numpy, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = np.random.uniform() if self.numpy else random.random()
        return x if draw < self.rate else super().forward(x)


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("rate", [0.001, 0.999])
def test_what_a_forward_does_at_random_one_time_in_a_thousand_is_refused(
    numpy: bool, rate: float
) -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ConversionError, match="Python's `random` or numpy"):
        tb.convert(Seldom(numpy, rate), x, train=False)
    drawn = Seldom(numpy, 0.0)  # and nothing depends on it
    want = drawn(x).detach().numpy()
    before = (random.getstate(), np.random.get_state()[1].tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tb.PythonStateWarning)
        converted = tb.convert(drawn, x, train=False)
    np.testing.assert_allclose(converted(x), want, rtol=2e-5, atol=1e-6)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


class KeepsAttributes(nn.Module):
    """Keeps in attributes what it computed: only to save time, or not."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.kept = nn.Linear(4, 4), what, None
        self.register_buffer("rates", torch.tensor([1.0, 0.1, 0.01, 0.001]), persistent=False)
        self.tables: dict[int, torch.Tensor] = {}
        self.longest, self.total, self.running = 0, 0, torch.zeros(())

    def a_mask(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.kept.shape[0] != x.shape[1]:
            self.kept = torch.triu(torch.ones(x.shape[1], x.shape[1])).to(x.device)
        return x + self.kept.sum(0)[:, None]

    def a_table(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.kept = torch.outer(torch.arange(self.longest).float(), self.rates).cos()
        return x * self.kept[: x.shape[1]]

    def a_late_mask(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late") or len(self.late) != x.shape[1]:
            self.late = torch.arange(x.shape[1]) > 1  # of bool
        return x.masked_fill(self.late[:, None], 0.5)

    def a_dict(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.tables:
            with torch.no_grad():
                self.tables[x.shape[1]] = x.new_ones(x.shape[1], 1).cumsum(0)
        return x * self.tables[x.shape[1]]

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.linear.weight * 2
        return x @ self.kept

    def the_last(self, x: torch.Tensor) -> torch.Tensor:
        before, self.kept = self.kept, x.detach() * 2
        return x if before is None else x + before

    def the_first(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = x.detach().amax()
        return x / self.kept

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.rand(4)
        return x * self.kept

    def a_count(self, x: torch.Tensor) -> torch.Tensor:
        self.running = self.running + 1
        return x * self.running

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.shape[1]
        return x * self.total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.what)(self.linear(x))


@pytest.mark.parametrize(
    ("what", "warm"),
    [("a_mask", False), ("a_table", True), ("a_dict", False), ("a_late_mask", False)],
)
@pytest.mark.filterwarnings("ignore:the forward keeps")
def test_what_saves_time_is_computed_anew(what: str, warm: bool) -> None:
    """As the mask in PyTorch's own tutorial of a Transformer."""
    module, x = KeepsAttributes(what), torch.randn(2, 5, 4)
    if warm:
        module(torch.randn(2, 3, 4))
    held = module.kept, dict(module.tables), module.longest
    name = {"a_dict": "tables", "a_late_mask": "late"}.get(what, "kept")
    with pytest.warns(
        tb.PythonStateWarning,
        match=f"keeps .*{name}.*follows from sizes, constants and buffers alone",
    ):
        converted = tb.convert(module, x)
    assert module.kept is held[0]
    assert not hasattr(module, "late")
    assert (module.tables, module.longest) == held[1:]
    assert tb.parity(module, converted, x).agrees
    wider = torch.cat([x, x], 1)
    np.testing.assert_allclose(
        converted(wider), module.eval()(wider).detach(), rtol=1e-6, atol=1e-6
    )


def test_what_saves_time_does_so_within_a_loss() -> None:
    """A hook around the forward is one within the call of a module with a loss."""
    module, x = KeepsAttributes("a_mask"), torch.randn(2, 5, 4)
    with pytest.warns(tb.PythonStateWarning, match="keeps kept, which follows from sizes"):
        converted = tb.convert(tb.with_loss(module, torch.nn.MSELoss()), x, x)
    for inputs in (x, torch.cat([x, x], 1)):
        want = (module.eval()(inputs) - inputs).square().mean()
        np.testing.assert_allclose(converted(inputs, inputs), want.detach(), rtol=1e-6)
    with pytest.raises(ConversionError, match="changes itself: kept"):
        tb.convert(tb.with_loss(KeepsAttributes("the_first"), torch.nn.MSELoss()), x, x)


@pytest.mark.parametrize("what", ["weights", "the_last", "the_first", "noise", "a_count", "tokens"])
def test_what_counts_is_no_cache(what: str) -> None:
    said = {"a_count": "running", "tokens": "total"}.get(what, "kept")
    with pytest.raises(ConversionError, match=f"changes itself: {said}"):
        tb.convert(KeepsAttributes(what), torch.randn(2, 5, 4))


class Anneals(torch.nn.Module):
    """What reads attributes that something behind its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.scale, self.seen, self.before = 1.0, [0], torch.zeros(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale * len(self.seen) + self.before

    def faded(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.scale *= 0.9
        return torch.nn.functional.mse_loss(out, y)

    def listed(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(0)
        return torch.nn.functional.mse_loss(out, y)

    def remembered(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.before = out.detach()
        return torch.nn.functional.mse_loss(out, y)


class AnnealsItself(Anneals):
    """One with a `__call__` of its own."""

    def __call__(self, *args: Any) -> Any:
        out = super().__call__(*args)
        self.scale *= 0.9
        return out


@pytest.mark.parametrize(
    ("loss", "said"), [("faded", "scale"), ("listed", "seen"), ("remembered", "before")]
)
def test_what_a_loss_writes_for_the_next_forward_is_refused(loss: str, said: str) -> None:
    """Python's state was looked at where the forward ended, and not behind the loss."""
    module, x = Anneals(), torch.ones(2, 4)
    with pytest.raises(ConversionError, match=f"changes itself: {said}"):
        tb.convert(tb.with_loss(module, getattr(module, loss)), x, x)
    assert (module.scale, module.seen, float(module.before.sum())) == (1.0, [0], 0)


def test_what_a_call_writes_behind_its_forward_is_refused() -> None:
    with pytest.raises(ConversionError, match="changes itself: scale"):
        tb.convert(AnnealsItself(), torch.ones(2, 4))


class Untouchable:
    """What a user's module has beside its functions: nobody may ask it for anything."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


UNTOUCHABLE = Untouchable()


def asked_by_another_name() -> bool:
    return torch._dynamo.is_compiling() and UNTOUCHABLE is not None


class Asks(nn.Linear):
    """Computes something else where it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.compiler.is_compiling() else 1)


class AsksElsewhere(nn.Linear):
    """Asks without a use for the answer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * int(asked_by_another_name())


class AsksInABranch(nn.Linear):
    """PyTorch traces a branch by other means."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def doubled(y: torch.Tensor) -> torch.Tensor:
            return y * 2 if torch.compiler.is_exporting() else y + y

        return torch.cond(x.sum() > 0, doubled, torch.cos, (super().forward(x),))


class Gathers(nn.Linear):
    """Looks at the rows of other processes, where there are any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            y = torch.cat(distributed_functions.all_gather(y))
        return y


class GathersByName(nn.Linear):
    """The same, named otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (get_world_size() if is_initialized() else 1)


class GathersByPath(nn.Linear):
    """The same, by the path of PyTorch's module alone."""

    several = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.several:
            torch.distributed.all_reduce(y)
        return y


class GathersNothing(nn.Linear):
    """Has a function of its own that is called as one of PyTorch's."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.broadcast(super().forward(x))


ASKS = {
    r"Gathers.forward asks torch.distributed \(all_gather, is_initialized\)": (Gathers, True),
    r"GathersByName.forward asks torch.distributed \(get_world_": (GathersByName, True),
    r"GathersByPath.forward asks torch.distributed \(all_reduce\)": (GathersByPath, True),
    "Asks.forward asks is_compiling": (Asks, False),
    "asked_by_another_name asks is_compiling": (AsksElsewhere, True),
    "AsksInABranch.forward asks is_exporting": (AsksInABranch, True),
}


@pytest.mark.parametrize(("said", "case"), ASKS.items(), ids=ASKS)
def test_a_question_whether_it_is_exported_or_alone_is_named(
    said: str, case: tuple[type[nn.Linear], bool]
) -> None:
    """Once, with its function; libraries' own are not. What is asked stays PyTorch's own."""
    (kind, agrees), own, x = case, torch.compiler.is_compiling, torch.ones(3, 4)
    module = kind(4, 4)
    with pytest.warns(tb.TracedBranchWarning, match=rf"test_users_code.py:\d+: {said}") as seen:
        converted = tb.convert(module, x)
    assert [one.category for one in seen].count(tb.TracedBranchWarning) == 1
    assert torch.compiler.is_compiling is own
    assert tb.parity(module, converted, x).agrees is agrees


def test_a_function_of_ones_own_asks_no_other_process() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.TracedBranchWarning)
        tb.convert(GathersNothing(4, 4), torch.ones(3, 4))


class KeepsItsNorm(nn.Sequential):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self[0].eval()
        return self


def test_a_mode_of_a_submodule_s_own_is_named() -> None:
    """Both converted modes are those of train() and eval(): a norm put into eval would train."""
    norm, drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
    x = torch.randn(6, 4)
    module = nn.Sequential(norm, nn.Sequential(drop))
    norm.eval()
    with pytest.warns(tb.ModeWarning, match=r"`0` \(BatchNorm1d\): in eval mode, while"):
        tb.convert(module, x)
    assert (norm.training, drop.training) == (False, True)
    module.eval()
    drop.train()
    with pytest.warns(tb.ModeWarning, match=r"`1\.0` \(Dropout\): in train mode, while"):
        tb.convert(module, x, train=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.ModeWarning)
        tb.convert(KeepsItsNorm(norm).train(), x)
        tb.convert(module.train(), x)
        quiet = nn.Sequential(nn.Dropout(0.0), nn.LayerNorm(4))  # which no mode changes
        quiet[0].eval()
        tb.convert(quiet, x)


class Registers(nn.Module):
    """Counts its calls in a buffer that is not there before the first one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("calls", getattr(self, "calls", torch.zeros(())) + 1)
        return x * self.calls


def test_a_buffer_that_the_forward_registers_is_refused() -> None:
    module = Registers()
    with pytest.raises(ConversionError, match=r"registers `calls`: .*Register it in __init__"):
        tb.convert(module, torch.ones(4, 6))
    assert not list(module.buffers())


class Own(deque[int]):
    """A container that cannot copy itself."""

    def copy(self) -> Any:
        raise TypeError("not this one")


class Box:
    """An object of a user's, shared by modules."""

    of_all: Any = None

    def __init__(self) -> None:
        self.last: Any = torch.ones(1)
        self.listed: list[Any] = [torch.ones(2)]
        self.named: dict[str, Any] = {"kept": torch.ones(3)}
        self.kinds, self.seen = frozenset({int, str}), Own([1, 2])
        self.inner: Any = None


BOX, LATEST, LOSSES = Box(), None, deque([0.5], maxlen=9)


class Leaves(nn.Linear):
    """Leaves what it computes wherever Python lets it."""

    def __init__(self, closed: Any = None) -> None:
        super().__init__(3, 3)
        self.nested: dict[str, dict[str, Any]] = {"states": {}}

        def keep(value: torch.Tensor) -> None:
            nonlocal closed
            closed = value

        self.keep, self.kept = keep, lambda: closed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global LATEST
        y = super().forward(x)
        BOX.last = LATEST = Box.of_all = self.nested["states"]["y"] = BOX.named["new"] = y.detach()
        BOX.named["kept"], BOX.inner = y, Box()
        BOX.inner.last = y
        BOX.listed.append(y)
        LOSSES.append(y.mean())
        self.keep(y)
        return y


def test_nothing_of_a_trace_is_left_outside_of_a_module() -> None:
    def left() -> list[Any]:
        values = [BOX.last, BOX.inner, Box.of_all, LATEST, module.kept(), *LOSSES, *BOX.listed]
        return [*values, *BOX.named.items(), *module.nested.items()]

    module, x = Leaves(), torch.randn(2, 3)
    before = left()
    with pytest.warns(UserWarning, match="the length of global BOX.listed: 1, then 2"):
        converted = tb.convert(module, x)
    assert all(map(operator.is_, left()[:7], before))
    assert len(left()) == len(before)
    assert list(BOX.named) == ["kept"]
    assert module.nested == {"states": {}}
    np.testing.assert_allclose(converted(x), module(x).detach(), rtol=1e-6)
    assert torch.equal(BOX.last, module.kept())
    assert len(BOX.listed) == 2


class AsksForGradients(nn.Module):
    """What it asks comes to the same in training; a leaf says the same in evaluation, too."""

    def __init__(self, question: Any) -> None:
        super().__init__()
        self.layer, self.question = nn.Linear(4, 2), question

    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        return h * 2 if self.question(self, h) else h


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (lambda self, h: torch.is_grad_enabled(), r"torch.is_grad_enabled\(\) in evaluation"),
        (lambda self, h: h.requires_grad, "a tensor's requires_grad in evaluation"),
        (lambda self, h: h.grad_fn is not None, "a tensor's grad_fn"),
        (lambda self, h: h.is_leaf, "a tensor's is_leaf"),
        (lambda self, h: self.training and torch.is_grad_enabled(), ""),
        (lambda self, h: self.layer.weight.requires_grad, ""),
        (lambda self, h: h.detach().requires_grad, ""),
    ],
)
def test_a_question_whether_gradients_are_on_is_named_in_evaluation(
    question: Any, said: str
) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tb.convert(AsksForGradients(question), torch.ones(3, 4))
    found = [str(one.message) for one in seen if one.category is tb.TracedBranchWarning]
    assert len(found) == bool(said)
    assert all(re.search(rf"users_code.py:\d+: .*asks {said}", one) for one in found)


class CopiesItsLayers(nn.Module):
    """Copies, the input's too, of which the original learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        return copy.deepcopy(self.norm)(self.layer(x)) + copy.deepcopy(self.layer)(copy.deepcopy(x))


def test_deep_copies_are_memory_of_their_own() -> None:
    module = CopiesItsLayers()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    converted = tb.convert(module, x)
    assert tb.parity(module, converted, x).agrees
    _, buffers = converted.apply(converted.params, converted.buffers, x.numpy(), train=True)
    jax.tree.map(np.testing.assert_array_equal, buffers, dict(converted.buffers))


@pytest.mark.parametrize("name", ["clamp", "clip", "clamp_"])
@pytest.mark.parametrize("bounds", [(-0.5, torch.tensor(0.5)), (torch.tensor(-1), 0.25)])
def test_a_number_beside_a_tensor_of_one_is_a_bound(name: str, bounds: Any) -> None:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Any) -> Any:
            return getattr(x * self.scale, name)(*bounds)

    x = torch.tensor([[-2.0, -1.0, -0.5, 0.0], [0.25, 0.5, 1.0, 3.0]])  # both bounds, too
    assert tb.parity(Clamps(), tb.convert(Clamps(), x), x).agrees
