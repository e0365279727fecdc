"""Which kernels a step in 8 bits becomes on H200s."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from jax.stages import Lowered

import fzero as fz
from fzero.preflight.hlo import Module
from tests.gpu_programs.conftest import TX
from tests.support.large import LLAMA_8B, abstract_batch, llama


def test_products_of_a_layer_read_8_bits_and_predictions_know():
    size = dataclasses.replace(LLAMA_8B, layers=2)
    plan = fz.Plan(zero=3, data=8, precision="fp8", remat="layer")
    found = {
        name: fz.preflight(llama(size), TX, one, abstract_batch(size, 8), "h200:8")
        for name, one in (("fp8", plan), ("bf16", plan.replace(precision="bf16")))
    }
    # The work is the same. Of two layers and a head, which stays in bf16 and is a third of it, the
    # layers' products take half the time.
    assert found["fp8"].compiled_flops == found["bf16"].compiled_flops
    assert found["fp8"].work.product_seconds < 0.85 * found["bf16"].work.product_seconds
    # The layers' weights travel in 8 bits, forwards and back; the table and the head in 16.
    gathers = {
        name: [c for c in one.collectives if c.kind == "all-gather" and c.bytes > 2**20]
        for name, one in found.items()
    }
    narrow = sum(c.total_bytes for c in gathers["fp8"] if c.dtype in ("f8e4m3fn", "u8", "s8"))
    wide = sum(c.total_bytes for c in gathers["fp8"]) - narrow
    layers = sum(c.total_bytes for c in gathers["bf16"]) - wide
    assert narrow == layers / 2 > 0


SMALL = dataclasses.replace(LLAMA_8B, layers=3, d=512, heads=8, hidden=1024, vocab=2048, seq=512)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_every_large_product_is_a_kernel_on_8_bit_operands(recipe, monkeypatch):
    texts = []
    compiling = Lowered.compile

    def kept(*args, **options):
        compiled = compiling(*args, **options)
        texts.append(compiled.as_text())
        return compiled

    monkeypatch.setattr(Lowered, "compile", kept)
    plan = fz.Plan(zero=3, data=8, precision="fp8", float8=fz.Float8(recipe=recipe), remat="layer")
    fz.preflight(llama(SMALL), TX, plan, abstract_batch(SMALL, 16), "h200:8")
    (text,) = texts
    narrow, wide, exact = [], [], []
    for comp in Module(text).computations.values():
        for i in comp.instructions:
            # Without a GPU to tune on XLA takes Triton; with one it may take cuBLASLt.
            if i.opcode == "dot" or "__cublas$lt$matmul" in i.target:
                is_narrow = all(a.dtype.startswith("f8") for a in comp.inputs(i)[:2])
                (narrow if is_narrow else wide).append(max(math.prod(a.dims) for a in i.arrays))
                if is_narrow and re.search(r"operand_precision\W+highest", i.attributes, re.I):
                    exact.append(i)
    # In 16 bits: the head's three products with the vocabulary, and nothing else.
    assert len(wide) == 3
    assert len(narrow) > 3 * 7
    # Of each seven products of a layer, two products in the backward pass have exact sums.
    assert 0 < len(exact) < len(narrow)
