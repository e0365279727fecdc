"""Converted models under plans that divide sequences: the numbers of one device."""

import jax
import numpy as np
import optax
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fzero as fz
import torch_bridge as tb
from fzero.preflight import hlo


VOCAB, LENGTH = 64, 32


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    converted = tb.convert(module, torch.zeros(2, LENGTH, dtype=torch.long))
    return converted.model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
    )


def numbers(model, plan, devices=None):
    tx = optax.adamw(1e-3)
    state = fz.init(model, tx, plan, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    found = []
    for seed in range(2):
        ids = np.random.default_rng(seed).integers(0, VOCAB, (4, LENGTH), dtype=np.int32)
        state, metrics = step(state, {"ids": ids})
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(found), jax.tree.map(np.asarray, fz.logical(model, state))


def test_a_converted_model_trains_on_divided_sequences_as_on_one_device(model):
    """Rotary angles, the causal mask and shifted labels are those of whole sequences."""
    divided = numbers(model, fz.Plan(zero=3, data=2, context=4, min_shard_bytes=0))
    alone = numbers(model, fz.Plan(zero=0, data=1), jax.devices()[:1])
    # Sums in another order; Adam's first steps amplify what is near zero.
    np.testing.assert_allclose(divided[0], alone[0], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), divided[1], alone[1]
    )


@pytest.mark.extended
def test_its_attention_exchanges_heads_and_nothing_gathers_sequences(model):
    """Two layers, forward and backward: queries, keys, values and results by all-to-all. Besides,
    only the rows that are added into the token table's gradient are gathered, and labels."""
    tx, plan = optax.adamw(1e-3), fz.Plan(data=2, context=4)
    batch = {"ids": jax.ShapeDtypeStruct((4, LENGTH), np.int32)}
    step = fz.train_step(model, tx, plan)
    compiled = step.lower(fz.abstract_state(model, tx, plan), batch).compile()
    found = hlo.collectives(compiled.as_text(), mesh_axes={"replica": 1, "data": 2, "context": 4})
    exchanged = [c for c in found if c.kind == "all-to-all"]
    assert sum(c.times for c in exchanged) == 2 * 2 * 4
    assert {c.elements for c in exchanged} == {2 * LENGTH // 4 * 16}
    gathered = [c for c in found if c.kind == "all-gather" and c.elements > 2 * LENGTH]
    assert all("scatter-add" in c.op_name and c.times == 1 for c in gathered)
