"""Models of transformers whose attention looks both ways: PyTorch's mask, not that of an export."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import torch_bridge as tb


pytestmark = pytest.mark.traced_once

SIZES: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
IDS = torch.randint(1, 36, (2, 10), generator=torch.Generator().manual_seed(0))


def gemma() -> Any:
    return hf.GemmaModel(hf.GemmaConfig(**SIZES, head_dim=8, use_bidirectional_attention=True))


def llama_as_an_encoder() -> Any:
    model = hf.LlamaModel(hf.LlamaConfig(**SIZES))
    for layer in model.layers:
        layer.self_attn.is_causal = False
    return model


def bert_as_an_encoder() -> Any:
    sizes = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
    model = hf.BertModel(hf.BertConfig(**sizes, is_decoder=True), add_pooling_layer=False)
    for layer in model.encoder.layer:
        layer.attention.self.is_causal = False
    return model


@pytest.mark.parametrize("make", [gemma, llama_as_an_encoder, bert_as_an_encoder])
def test_without_padding_there_is_no_mask(make: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    converted = tb.convert(model, input_ids=IDS)
    ids = IDS.roll(3, 1)[:1, :7]
    with torch.no_grad():
        want = model(input_ids=ids).last_hidden_state
        later = ids.clone()
        later[:, -1] = 1 + later[:, -1] % 30
        assert not torch.equal(model(input_ids=later).last_hidden_state[:, 0], want[:, 0])
    found = converted(input_ids=ids.numpy())["last_hidden_state"]
    np.testing.assert_allclose(found, want, atol=2e-5)


class Halves(torch.nn.Module):
    """Its second attention is shorter than what a mask was asked for, as Informer's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = hf.BertConfig(attn_implementation="eager")
        mask = hf.masking_utils.create_bidirectional_mask(config, x, None)
        for _ in range(2):
            scores = x @ x.mT
            x = (scores if mask is None else scores + mask[:, 0]).softmax(-1) @ x
            x = x.unflatten(1, (-1, 2)).amax(2)
        return x


def test_an_encoder_without_padding_has_no_mask() -> None:
    x = torch.randn(2, 8, 4)
    found = tb.convert(Halves(), x, train=False)(x.numpy())
    np.testing.assert_allclose(found, Halves()(x), rtol=1e-5)


def test_with_padding_it_is_said_that_pytorchs_mask_depends_on_values() -> None:
    model, given = llama_as_an_encoder().eval(), {"input_ids": IDS}
    mask = torch.ones_like(IDS)
    with pytest.warns(
        tb.TracedBranchWarning, match=r"LlamaModel: `layers\.0\.self_attn` looks both"
    ):
        converted = tb.convert(model, **given, attention_mask=mask, train=False)
    mask[0, -3:] = 0  # as the conversion has it, and PyTorch where a row is padded
    with torch.no_grad():
        want = model(**given, attention_mask=mask).last_hidden_state
    found = converted(input_ids=IDS.numpy(), attention_mask=mask.numpy())["last_hidden_state"]
    np.testing.assert_allclose(found, want, atol=2e-5)
    with pytest.warns(tb.TracedBranchWarning, match="looks both ways"):
        tb.convert(model, **given, position_ids=torch.arange(10).expand(2, 10), train=False)


def test_causal_models_and_encoders_say_nothing() -> None:
    bart = hf.BartConfig(
        vocab_size=37, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", tb.TracedBranchWarning)
        for model in (hf.BartModel(bart), hf.LlamaModel(hf.LlamaConfig(**SIZES))):
            given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
            tb.convert(model.eval(), **given, train=False)
