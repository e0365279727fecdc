"""Folders that transformers wrote under other names than its modules have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError
from torch_bridge.formats.names_in_files import _converted, _module_of, concatenated, stacked
from torch_bridge.module.lazy_tensor import in_memory
from torch_bridge.module.names import read_layout


SIZES: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.zeros(2, 9, dtype=torch.int64)
TARGET = "h.0.attn.c_attn.base_layer.weight"  # with an adapter around it


def mixtral() -> Any:
    config = hf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return hf.MixtralForCausalLM(config).eval()


def neox() -> Any:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)).eval()


@functools.cache
def converted_neox() -> tb.Converted:
    """For tests that restore other values into it."""
    return tb.convert(neox(), IDS, train=False)


@pytest.mark.parametrize(
    ("make", "plan", "in_the_file"),
    [
        (mixtral, fz.Plan(zero=3, data=4, expert=2, min_shard_bytes=0),
         "block_sparse_moe.experts.1.w3.weight"),
        (neox, fz.Plan(data=1), "embed_out.weight"),
    ],
)  # fmt: skip
def test_a_module_without_values_has_those_of_its_folder(
    make: Any, plan: fz.Plan, in_the_file: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = make()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert any(in_the_file in name for name in tb.load(tmp_path))
    with torch.device("meta"):
        empty = make()
    converted = tb.convert(empty, IDS.to("meta"), train=False)
    back = tb.state_dict(converted, tb.restore(tmp_path, converted, None, plan))
    want = model.state_dict()
    assert list(back) == list(want)
    assert [name for name in want if not torch.equal(back[name], want[name])] == []


def test_a_model_without_its_head_has_those_of_one_with_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixtral()
    model.save_pretrained(tmp_path)
    converted = tb.convert(hf.MixtralModel(model.config).eval(), IDS, train=False)
    with pytest.warns(UserWarning, match=r"not used: 1 \(`lm_head\.weight`\)\.$"):
        state = tb.restore(tmp_path, converted, None, fz.Plan(data=1), strict=False)
    back = tb.state_dict(converted, state)
    for name, want in model.model.state_dict().items():
        assert torch.equal(back[name], want), name


def test_names_that_fit_are_kept(tmp_path: Path) -> None:
    """The hub's GPT-2 has those of the model without its head, and says that it has one."""
    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=37, n_embd=8, n_layer=1, n_head=2)).eval()
    gpt2.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    masks = {"h.0.attn.bias": torch.ones(1, 1, 9, 9)}  # of older versions
    file = {name: value + 1 for name, value in gpt2.transformer.state_dict().items()} | masks
    torch.save(file, tmp_path / "pytorch_model.bin")
    plain = tb.convert(gpt2.transformer, IDS, train=False)
    tb.restore(tmp_path, plain, None, fz.Plan(data=1))
    with_more = tb.lora(plain, rank=2)  # what is new in it is no surprise
    state = tb.restore(tmp_path, with_more, None, fz.Plan(data=1), strict=False)
    back = tb.state_dict(with_more, state)
    for name, own in {"wte.weight": "wte.weight", "h.0.attn.c_attn.weight": TARGET}.items():
        assert torch.equal(back[own], file[name])


def test_what_transformers_leaves_out_of_files_is_left_out() -> None:
    layout = read_layout(nn.ModuleDict({"model": hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))}))
    assert layout.ignores("model.model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not layout.ignores("other.layers.0.self_attn.rotary_emb.inv_freq")
    assert not layout.ignores("model.model.layers.0.self_attn.bias")
    assert not read_layout(nn.Linear(2, 2)).ignores("rotary_emb.inv_freq")


def test_a_config_that_names_no_class_has_the_table_of_its_family(tmp_path: Path) -> None:
    model = neox()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    converted = converted_neox()
    state = tb.restore(tmp_path, converted, None, fz.Plan(data=1))
    want = model.state_dict()["lm_head.weight"]  # `embed_out.weight` in the file
    assert torch.equal(tb.state_dict(converted, state)["lm_head.weight"], want)
    for own in ("Mine", "MixtralForCausalLM"):
        assert type(_module_of(tmp_path, own)) is hf.GPTNeoXModel


def test_two_names_for_one_weight_are_refused(tmp_path: Path) -> None:
    model = neox()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    head = torch.zeros(37, 16)
    torch.save(
        {"embed_out.weight": head, "lm_head.weight": head + 1}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(CheckpointError, match=r"and another are both `lm_head\.weight`"):
        tb.restore(tmp_path, converted_neox(), None, fz.Plan(data=1))


def test_code_beside_the_files_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    ran = tmp_path / "ran"
    (tmp_path / "configuration_mine.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import PretrainedConfig as Mine\n"
    )
    config = '{"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}'
    (tmp_path / "config.json").write_text(config)
    torch.save({"embed_out.weight": torch.zeros(37, 16)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"missing: `lm_head\.weight`"):
        tb.restore(tmp_path, converted_neox(), None, fz.Plan(data=1))
    assert not ran.exists()


def test_other_folders_are_refused_as_before(tmp_path: Path) -> None:
    converted = converted_neox()
    for config in (None, "{}", '{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'):
        torch.save({"embed_out.weight": torch.zeros(37, 16)}, tmp_path / "pytorch_model.bin")
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match=r"missing: `lm_head\.weight`"):
            tb.restore(tmp_path, converted, None, fz.Plan(data=1))


def test_what_is_joined_is_read_piece_by_piece() -> None:
    parts = torch.randn(3, 2, 4, 5).unbind()
    read: list[str] = []

    def noted(number: int) -> Any:
        lazy = in_memory(str(number), parts[number])

        def fetch(index: Any) -> torch.Tensor:
            read.append(str(number))
            return parts[number][index]

        return type(lazy)(lazy.name, lazy.torch_dtype, lazy.shape, fetch)

    tensors = [noted(number) for number in range(3)]
    for dim in range(4):
        want, lazy = torch.stack(parts, dim), stacked("all", tensors, dim)
        assert lazy.shape == want.shape
        index = tuple(slice(n // 2, n) for n in want.shape)
        torch.testing.assert_close(lazy.tensor(index), want[index], rtol=0, atol=0)
    for dim in range(3):
        want, lazy = torch.cat(parts, dim), concatenated("all", tensors, dim)
        for begin in range(want.shape[dim]):
            index = tuple(
                slice(begin, begin + 1) if d == dim else slice(0, n)
                for d, n in enumerate(want.shape)
            )
            read.clear()
            torch.testing.assert_close(lazy.tensor(index), want[index], rtol=0, atol=0)
            assert len(read) == 1
        torch.testing.assert_close(lazy.tensor(), want, rtol=0, atol=0)
    for other in (torch.zeros(2, 4, 6), parts[0].bfloat16()):
        with pytest.raises(CheckpointError, match=r"`all` is made of tensors that differ"):
            stacked("all", [tensors[0], in_memory("other", other)], 0)


def test_of_several_tensors_none_is_taken_for_all() -> None:
    one, other = (in_memory(name, torch.zeros(2)) for name in ("one", "other"))
    for found in ([[one, other]], [[one], [other]]):
        with pytest.raises(CheckpointError, match="several tensors are `all`"):
            _converted("all", found, [])
