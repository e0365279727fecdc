"""Arrays that share their memory with tensors: what a forward writes there is state, too."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge as tb
from fzero.errors import ConversionError


X = torch.ones(4, 6)


class Counts(nn.Module):
    """Adds to an array, and reads it as a tensor."""

    def __init__(self, read: Callable[[Any], torch.Tensor], memory: Any, only: str = "") -> None:
        super().__init__()
        self.read, self.only = read, only
        self.memory = memory
        self.kept = [np.zeros(6, np.float32)]
        self.shared = torch.from_numpy(self.kept[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.only != "train" or self.training:
            self.kept[0] += 1
            self.memory[0] += 1
        return x * self.read(self)


def floats() -> Any:
    return np.zeros(6, np.float32)


@pytest.mark.parametrize(
    ("read", "memory", "only"),
    [
        (lambda m: torch.from_numpy(m.memory), floats(), ""),
        (lambda m: torch.from_numpy(m.memory), floats(), "train"),
        (lambda m: torch.tensor(m.memory), floats(), ""),
        (lambda m: torch.as_tensor(m.memory[:3]).sum(), floats(), ""),
        (lambda m: torch.from_dlpack(m.kept[0]), floats(), ""),
        (lambda m: m.shared, floats(), ""),
        (lambda m: torch.frombuffer(m.memory, dtype=torch.uint8)[0], bytearray(2), ""),
        (lambda m: torch.frombuffer(m.memory, dtype=torch.float64)[0], array.array("d", [0]), ""),
    ],
    ids=["numpy", "in train mode", "copied", "view", "dlpack", "shared", "bytearray", "array"],
)
def test_a_tensor_that_shares_what_a_forward_counts_in_is_refused(
    read: Any, memory: Any, only: str
) -> None:
    module = Counts(read, memory, only)
    before = bytes(memory)
    with pytest.raises(ConversionError, match=r"Python values that it changes[^\n]*\n  at: .*read"):
        tb.convert(module, X)
    assert bytes(module.memory) == before  # no call has been made
    assert not module.kept[0].any()


@torch.no_grad()
def added_without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.add_(1)


@torch.no_grad()
def made_without_gradient(memory: Any) -> torch.Tensor:
    return torch.from_numpy(memory).add_(1)


class Writes(nn.Module):
    """Adds to a tensor that it makes of an array."""

    def __init__(self, read: Callable[[Any], torch.Tensor], memory: Any) -> None:
        super().__init__()
        self.read, self.memory = read, memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self).add_(1)[:6]


@pytest.mark.parametrize(
    ("read", "memory"),
    [
        (lambda m: torch.from_numpy(m.memory), floats()),
        (lambda m: torch.as_tensor(m.memory[1:2]), floats()),
        (lambda m: torch.as_tensor(data=m.memory), floats()),
        (lambda m: torch.frombuffer(m.memory, dtype=torch.uint8), bytearray(6)),
        (lambda m: 1 * added_without_gradient(torch.from_numpy(m.memory)), floats()),
        (lambda m: 1 * made_without_gradient(m.memory), floats()),
    ],
    ids=["numpy", "view", "by name", "bytearray", "no_grad", "all in no_grad"],
)
def test_a_write_through_a_tensor_into_an_array_is_refused(read: Any, memory: Any) -> None:
    said = r"writes through a tensor into the array memory.*\n  at: .*, in (forward|\w+_without)"
    with pytest.raises(ConversionError, match=said):
        tb.convert(Writes(read, memory), X)
    assert not any(memory)


@pytest.mark.parametrize(
    "read",
    [
        lambda m: torch.tensor(m.memory),
        lambda m: torch.as_tensor(m.memory, dtype=torch.float64).float(),
        lambda m: torch.from_numpy(m.memory).clone(),
        lambda m: torch.from_numpy(np.zeros(6, np.float32)),
        lambda m: torch.from_numpy(m.memory + 1),
    ],
    ids=["tensor", "cast", "clone", "made here", "computed here"],
)
def test_a_write_into_memory_of_its_own_is_none_into_an_array(read: Any) -> None:
    module = Writes(read, floats())
    converted = tb.convert(module, X)
    for _ in range(2):
        np.testing.assert_array_equal(converted(X.numpy()), module(X))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = np.zeros(6, np.float32)
        self.register_buffer("seen", torch.from_numpy(self.steps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.get_buffer("seen")


def test_a_buffer_that_is_written_through_an_array_is_refused() -> None:
    module = Buffered()
    with pytest.raises(ConversionError, match="writes to steps, whose memory `seen` shares"):
        tb.convert(module, X)
    assert not module.steps.any()


class Scratch(nn.Module):
    """Fills one array twice, and reads it each time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = np.zeros(6, np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory[:] = 1
        x = x + torch.from_numpy(self.memory)
        self.memory[:] = np.arange(6)
        x = x * torch.as_tensor(self.memory)
        self.memory[:] = 7
        return x


def test_an_array_that_is_filled_anew_has_the_values_of_its_time() -> None:
    module = Scratch()
    converted = tb.convert(module, X)
    assert not module.memory.any()
    np.testing.assert_array_equal(converted(X), module(X).numpy())
