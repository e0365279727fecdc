"""What `fzero finetune` packs: losses of the documents alone, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

import fzero as fz
import torch_bridge as tb
from torch_bridge.run.errors import CommandError
from torch_bridge.run.models import LoadedModel, _logits_width
from torch_bridge.run.packing_check import check_packs
from torch_bridge.run.tuning_settings import RowSettings
from torch_bridge.run.tuning_task import Tuning


V, SEQ = 67, 16
SMALL: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
    "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Ordinary promotion instead, as in training."""


def loaded(config: Any, attention: str | None = None) -> LoadedModel:
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # so that what is seen counts
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return LoadedModel(module, "hf:small", V, None, None, config)


def packing(seq: int = SEQ) -> Tuning:
    return Tuning(RowSettings(("chat.jsonl",), seq), None)


@pytest.mark.parametrize(
    ("config", "attention", "precision"),
    [
        (transformers.Gemma2Config(**SMALL, sliding_window=SEQ), "eager", "fp32"),
        pytest.param(transformers.LlamaConfig(**SMALL), "eager", "bf16", marks=pytest.mark.nightly),
        pytest.param(transformers.LlamaConfig(**SMALL), "sdpa", "fp32", marks=pytest.mark.nightly),
    ],
    ids=["gemma2", "llama-bf16", "llama-sdpa"],
)
def test_the_loss_of_packed_rows_is_that_of_the_documents_alone(
    config: Any, attention: str, precision: str
) -> None:
    given = loaded(config, attention)
    assert given.module.config._attn_implementation == attention
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, V, n).tolist() for n in (7, 5, 9, 3, 4)]
    made, loss = packing().convert(given)
    plan = fz.Plan(zero=1, data=2, precision=precision)
    model = made.model(loss)
    rows = tb.pack(documents, SEQ, rows=2)
    assert rows["segments"].max() > 1
    got = fz.eval_step(model, plan)(fz.init(model, optax.sgd(1.0), plan), rows)["loss"]
    total = count = 0.0
    with torch.no_grad():
        for document in documents:  # in PyTorch, each alone
            ids = torch.tensor([document])
            logits = given.module.eval()(input_ids=ids).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += len(document) - 1
    # bf16 has 8 bits; with a mask that is not read it is off by more than 10 %
    assert float(got) == pytest.approx(total / count, rel=1e-5 if precision == "fp32" else 1e-2)


def test_the_mask_stays_finite_when_it_is_cast_to_16_bits() -> None:
    segments = np.array([[1, 1, 2, 0]])
    mask = tb.packed_mask(segments)
    assert mask.dtype == jnp.float32
    assert mask.shape == (1, 1, 4, 4)
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    for found in (mask, mask.astype(jnp.bfloat16), tb.packed_mask(segments, jnp.float16)):
        assert (found[0, 0] == 0).astype(int).tolist() == want
        assert bool(jnp.isfinite(found).all())
        assert float(found.min()) <= -6e4
    assert tb.packed_mask(segments, bool)[0, 0].astype(int).tolist() == want


def test_a_window_shorter_than_a_row_is_refused() -> None:
    mistral = transformers.MistralConfig(**SMALL, sliding_window=SEQ // 2)
    with pytest.raises(CommandError, match=r"8 tokens back \(sliding_window .*--no-pack, or --seq"):
        packing().convert(loaded(mistral))
    check_packs(loaded(mistral), SEQ // 2)
    unused = transformers.Qwen2Config(**SMALL, sliding_window=4, use_sliding_window=False)
    check_packs(loaded(unused), SEQ)


class Recurrent(torch.nn.Module):
    """Takes what transformers' decoders take, and lets documents run into each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = torch.nn.Embedding(V, 8), torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, V)

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None) -> Any:
        return self.head(self.rnn(self.embed(input_ids))[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda: loaded(
                transformers.BloomConfig(vocab_size=V, hidden_size=16, n_layer=1, n_head=2)
            ),
            "BloomForCausalLM does not take packed rows .*--no-pack",
        ),
        (
            lambda: LoadedModel(Recurrent(), "hf:small", V, None),
            "of two, the logits of the second differ .*--no-pack",
        ),
        (
            lambda: loaded(transformers.Lfm2Config(**SMALL, layer_types=["conv"])),
            "layers of kind conv carry a state .*--no-pack",
        ),
    ],
    ids=["bloom", "recurrent", "lfm2"],
)
def test_what_lets_documents_run_into_each_other_is_refused(given: Any, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        packing().convert(given())


def test_looking_at_a_factorys_logits_leaves_its_submodules_in_their_modes():
    """Or `tb.ModeWarning` would have nothing to name."""
    parts = torch.nn.Embedding(10, 4), torch.nn.Dropout(), torch.nn.Linear(4, 9)
    module = torch.nn.Sequential(*parts)
    module[1].eval()
    assert _logits_width(module, "file.py:make") == 9
    assert [part.training for part in module] == [True, False, True]
