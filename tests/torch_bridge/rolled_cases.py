"""Small modules of repeated blocks, and a conversion without its loops to compare with."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import torch_bridge as tb
from torch_bridge.structure.divide import Parallel
from torch_bridge.structure.stacked_names import Names


WIDTH = 4


class Block(nn.Module):
    """A residual block with running statistics, and a number and a constant of its own."""

    def __init__(
        self, number: int, dropout: float = 0.0, width: int = WIDTH, norm: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width, bias=False)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.back = nn.Linear(width, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.number = number

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        each = torch.tensor([1.0 + self.number, 2.0, 3.0, 4.0])
        y = self.back(torch.tanh(self.norm(self.linear(x)))) * shared / (self.number + 1.0)
        return x + self.dropout(y) * each


class Net(nn.Module):
    """Blocks between an embedding of the input and a head that shares its weight.

    With `norms`, statistics are kept before the blocks and after them, too.
    """

    def __init__(self, blocks: list[nn.Module], hidden: bool = False, norms: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = (
            nn.BatchNorm1d(WIDTH) if norms else nn.Identity() for _ in range(2)
        )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> Any:
        shared = torch.sigmoid(x)
        seen = [torch.tanh(self.first(torch.tanh(self.embed(x))))]
        for block in self.blocks:
            seen.append(block(seen[-1], shared))
        out = self.head(self.last(seen[-1]))
        return (out, seen) if self.hidden else out


def tiny_gpt2(layers: int, dropout: float) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=layers, n_embd=16, n_head=2, vocab_size=61, n_positions=16, bos_token_id=0,
        eos_token_id=0, embd_pdrop=dropout, resid_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def convert(net: nn.Module, **options: Any) -> tb.Converted:
    return tb.convert(net, torch.ones(3, WIDTH), **options)


def unrolled(converted: tb.Converted) -> tb.Converted:
    """The same conversion, evaluated block by block under the names of the blocks."""
    return dataclasses.replace(
        converted,
        _params=converted.by_name(converted._params),
        _buffers=converted.by_name(converted._buffers),
        names=Names(),
        parallel=Parallel(),
        _graphs=converted._graphs.unrolled(),
    )
