"""Commands run in this process and in processes of their own, and what they are given."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from fzero import cli


TINY_CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    # Dropout on: training must draw it, evaluation must not.
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# A factory as a user would write it; its one tied weight has two names in the state_dict.
FACTORY_SOURCE = """
import torch


class Bigram(torch.nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        torch.nn.init.constant_(self.norm.bias, 0.5)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def bigram():
    return Bigram(256)


def narrow():
    return Bigram(100)


def no_module():
    return "a string"


def no_logits():
    return torch.nn.Flatten()
"""


@dataclass(frozen=True)
class Run:
    """A finished command."""

    status: int
    stdout: str
    stderr: str


def fzero(*args: object) -> Run:
    """Runs `fzero` in this process, where torch and transformers are imported already."""
    argv, hook = sys.argv, sys.excepthook
    sys.argv = ["fzero", *map(str, args)]
    precision = jax.config.jax_default_matmul_precision
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            cli.main()
    finally:
        # A command owns its process and sets these for good; here others come after it.
        sys.argv, sys.excepthook = argv, hook
        jax.config.update("jax_default_matmul_precision", precision)
    code = ended.value.code
    assert isinstance(code, int | None)
    return Run(code or 0, *(said.buffer.getvalue().decode() for said in (out, err)))


Command = Callable[..., Run]


def command() -> str:
    """The script that the installation put beside this interpreter."""
    return str(Path(sys.executable).with_name("fzero"))


def environment() -> dict[str, str]:
    """This process's environment without what may say how many devices it has."""
    return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}


def training(config_file: Path, texts: list[Path], out: Path) -> list[object]:
    """The arguments of a short training run."""
    return [
        "train", "--model", f"hf:{config_file}", "--data", *texts, "--out", out, "--steps", 6,
        "--batch", 8, "--seq", 32, "--lr", 1e-2, "--zero", 3, "--devices", 4, "--clip", 1.0,
        "--microbatches", 2, "--eval-every", 3, "--eval-sequences", 21, "--seed", 7,
    ]  # fmt: skip
