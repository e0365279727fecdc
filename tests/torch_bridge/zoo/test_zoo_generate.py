"""transformers' decoders generate the tokens that transformers' own `generate` gives."""

from __future__ import annotations

import pytest
import torch
from zoo_decoders import DECODERS, PROMPTS, WITHOUT_A_STATIC_CACHE, lively
from zoo_transformers import ENTRIES

import torch_bridge as tb
from fzero.errors import ConversionError


NEW = 64
# Windows and grouped queries; GPT-2 is in generation/; the others take `make nightly`.
CORE = ("mistral",)


# With these weights they say one token again and again: what is shown of them is less.
DULL = ("gemma2", "gemma3")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in CORE else pytest.mark.nightly) for x in DECODERS]
)
def test_the_tokens_are_those_of_transformers(name: str) -> None:
    """Of rows of several lengths in one batch; transformers is given one row at a time."""
    module, new = lively(DECODERS[name]), 24 if name in CORE else NEW
    converted = tb.convert(module, torch.zeros(2, 5, dtype=torch.long), train=False)
    found = tb.generate(converted, converted.params, PROMPTS, new, stop=())
    variety = 0
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        expected = module.generate(
            torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
        assert tokens.tolist() == expected.tolist()
        variety = max(variety, len(set(expected.tolist())))
    assert variety > 5 or name in DULL  # not one token again and again


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert", "BertForMaskedLM: its forward takes no `past_key_values`"),
        ("mamba", "MambaForCausalLM: its forward takes no `past_key_values`"),
        pytest.param(
            "t5", "T5ForConditionalGeneration: it has an encoder", marks=pytest.mark.nightly
        ),
        pytest.param(
            "bart", "BartForConditionalGeneration: it has an encoder", marks=pytest.mark.nightly
        ),
    ],
)
def test_others_are_refused_by_name(name: str, reason: str) -> None:
    entry = ENTRIES[name]
    call = entry.call(2)
    converted = tb.convert(entry.make(), *call.args, **call.kwargs, train=False)
    with pytest.raises(ConversionError, match=reason):
        tb.generate(converted, converted.params, [[3, 4]], 4)


@pytest.mark.nightly
def test_a_decoder_without_a_static_cache_is_refused_by_name() -> None:
    module = WITHOUT_A_STATIC_CACHE()
    converted = tb.convert(module, torch.zeros(2, 5, dtype=torch.long), train=False)
    with pytest.raises(ConversionError, match="GPTNeoForCausalLM: it takes no cache of fixed"):
        tb.generate(converted, converted.params, [[3, 4]], 4)
