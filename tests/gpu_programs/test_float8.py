"""Which kernels a step in 8 bits becomes on H200s."""

from __future__ import annotations

import dataclasses

import fzero as fz
from tests.gpu_programs.conftest import TX
from tests.support.large import LLAMA_8B, abstract_batch, llama


def test_products_of_a_layer_read_8_bits_and_predictions_know():
    size = dataclasses.replace(LLAMA_8B, layers=2)
    plan = fz.Plan(zero=3, data=8, precision="fp8")
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
