"""GPT-2 1.5B and a Llama-like 8B: shapes to plan and compile, never to run."""

from __future__ import annotations

import jax

import fzero as fz
from benchmarks.large_models import LLAMA_8B as LLAMA_8B
from benchmarks.large_models import LlamaSize as LlamaSize
from benchmarks.large_models import batch_shapes
from benchmarks.large_models import llama as llama
from benchmarks.large_models import num_params as num_params
from tests.support import gpt
from tests.support.gpt import Size


GPT2_XL = Size(vocab=50257, d=1600, layers=48, heads=25, seq=1024)


def gpt2(size: Size = GPT2_XL) -> fz.Model:
    """A GPT-2 of any size."""
    return gpt.gpt(size)


def abstract_batch(size: Size | LlamaSize, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch's shapes."""
    return batch_shapes(rows, size.seq)
