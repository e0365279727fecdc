"""`fzero finetune` and `fzero merge`: from a directory and conversations to what PEFT loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from cli_cases import Command
from safetensors.torch import load_file

import fzero as fz
import torch_bridge as tb
from tests.support.tokens import TEMPLATE, VOCABULARY, byte_tokenizer
from torch_bridge.run import models
from torch_bridge.run.compose import _gauge
from torch_bridge.run.errors import CommandError
from torch_bridge.run.tuning_settings import LoraSettings, RowSettings
from torch_bridge.run.tuning_task import Tuning


def llama(folder: Path, layers: int) -> Path:
    """A small Llama and its tokenizer, as transformers writes them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=VOCABULARY, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=257,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("base"), layers=1)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers become one loop."""
    return llama(tmp_path_factory.mktemp("deep"), layers=3)


def conversation(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"{number} + 1?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chat.jsonl"
    lines = (json.dumps({"messages": conversation(number)}) for number in range(40))
    path.write_text("\n".join(lines))
    return path


def tuning(base: Path, chats: Path, out: Path) -> list[object]:
    return [
        "finetune", "--model", f"hf:{base}", "--data", chats, "--out", out, "--steps", 6,
        "--batch", 4, "--seq", 96, "--lr", 1e-2, "--devices", 2, "--eval-every", 3, "--zero", 3,
        "--plan-set", "min_shard_bytes=0",
    ]  # fmt: skip


LORA = ["--lora", 2, "--targets", "q_proj", "--targets", "v_proj", "--save-every", 3]


@torch.no_grad()
def validation_loss(module: torch.nn.Module, only_assistant: str = "<|start|>assistant\n") -> float:
    """Of every twentieth conversation, each alone, in PyTorch."""
    tokenizer = byte_tokenizer()
    total = count = 0.0
    for number in range(19, 40, 20):
        text = tokenizer.apply_chat_template(conversation(number), tokenize=False)
        ids = torch.tensor([tokenizer(text).input_ids])
        # what is behind the assistant's mark is learned
        start = len(tokenizer(text.partition(only_assistant)[0] + only_assistant).input_ids)
        logits = module.eval()(input_ids=ids).logits[0, start - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum"))
        count += ids.shape[1] - start
    return total / count


@pytest.mark.slow
def test_peft_loads_the_adapter_and_transformers_what_it_is_merged_into(
    here: Command, base: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = here(*tuning(base, chats, out), *LORA, "--lr", 5e-2, "--log", "tensorboard")
    assert done.status == 0, done.stderr
    assert "38 documents" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert summary["val_loss_first"] == pytest.approx(validation_loss(plain), abs=1e-5)
    tuned = peft.PeftModel.from_pretrained(plain, out)
    assert summary["val_loss_last"] == pytest.approx(validation_loss(tuned), abs=1e-5)
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.01
    assert summary["trained_parameters"] == sum(
        p.numel() for n, p in tuned.named_parameters() if "lora_" in n
    )
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert summary["tokens"] == sum(step["tokens"] for step in steps if "loss" in step)
    assert summary["tokens"] < 6 * 4 * 96  # rows are not full
    # Forwards, and once more back to what frozen weights read: they have no gradient.
    kept = [p for n, p in plain.named_parameters() if p.ndim == 2 and "embed" not in n]
    attention = 2 * 2 * 96 * plain.config.hidden_size
    about = json.loads((out / "about.json").read_text())
    assert about["flops_per_token"] == 2 * (2 * sum(p.numel() for p in kept) + attention)
    shown_by_tensorboard(out / "tensorboard", steps)

    other = byte_tokenizer(TEMPLATE.replace("assistant", "model"))
    other.save_pretrained(out)  # as of a run with --template
    merged = here("merge", "--model", base, "--adapter", out, "--out", tmp_path / "merged")
    assert merged.status == 0, merged.stderr
    talks = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert talks == other.chat_template != TEMPLATE
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / "generation_config.json").is_file()
    assert again.generation_config.eos_token_id == plain.generation_config.eos_token_id
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = tuned(input_ids=ids).logits
        torch.testing.assert_close(again(input_ids=ids).logits, want, atol=1e-5, rtol=0)
    assert "--out" in here("merge", "--model", base, "--adapter", out, "--out", out).stderr


@pytest.mark.parametrize(
    ("lora", "precision", "dtype"),
    [
        (None, "bf16", "fp32"),
        (LoraSettings(2), "fp32", "fp32"),
        (LoraSettings(2), "bf16", "bf16"),
        (LoraSettings(2, base="fp32"), "bf16", "fp32"),
        (LoraSettings(2, base="bf16"), "fp32", "bf16"),
        (LoraSettings(2, base="nf4"), "bf16", "bf16"),  # quantised after it was read
    ],
)
def test_frozen_weights_are_read_in_the_dtype_that_they_are_kept_in(
    monkeypatch: pytest.MonkeyPatch, lora: Any, precision: str, dtype: str
) -> None:
    loaded = SimpleNamespace(spec="hf:here", tokenizer=None)
    read: list[str] = []
    monkeypatch.setattr(models, "load", lambda spec, seed, kept: read.append(kept) or loaded)
    settings: Any = SimpleNamespace(model="hf:here", seed=0, precision=precision)
    with pytest.raises(CommandError, match="hf:here: expected a tokenizer"):
        Tuning(RowSettings(("chat.jsonl",), 8), lora).load(settings)
    assert read == [dtype]


@pytest.mark.nightly
def test_a_base_in_4_bits(here: Command, base: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = here(*tuning(base, chats, out), *LORA, "--lr", 5e-2, "--base", "nf4")
    assert done.status == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    widened = transformers.AutoModelForCausalLM.from_pretrained(base)
    for layer in widened.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            kept = fz.quantize(layer.weight.detach().numpy())
            wide = fz.dequantize(kept, tuple(layer.weight.shape), "float32")
            layer.weight.data = torch.tensor(wide.tolist())
    assert summary["val_loss_first"] == pytest.approx(validation_loss(widened), abs=1e-5)
    tuned = peft.PeftModel.from_pretrained(widened, out)
    assert summary["val_loss_last"] == pytest.approx(validation_loss(tuned), abs=1e-5)
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.01
    wrong = here(*tuning(base, chats, tmp_path / "x"), *LORA, "--base", "fp4")
    assert "--base fp4: expected one of fp32, bf16, nf4, nf4-double, int8" in wrong.stderr


def shown_by_tensorboard(folder: Path, steps: list[dict[str, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    losses = [(event.step, event.value) for event in read.Scalars("loss")]
    assert losses == [
        (step["step"], pytest.approx(step["loss"])) for step in steps if "loss" in step
    ]
    assert [event.step for event in read.Scalars("val_loss")] == [0, 3, 6]
    assert read.Scalars("tokens_per_s")[-1].value > 0


@pytest.mark.nightly
def test_what_was_merged_is_taken_out_again(
    here: Command, deep: Path, chats: Path, tmp_path: Path
) -> None:
    out, merged, plain = (tmp_path / name for name in ("run", "merged", "plain"))
    assert here(*tuning(deep, chats, out), *LORA, "--steps", 2).status == 0
    for model, folder, flags in ((deep, merged, ()), (merged, plain, ("--undo",))):
        done = here("merge", "--model", model, "--adapter", out, "--out", folder, *flags)
        assert done.status == 0, done.stderr
    want, between, found = (
        load_file(folder / "model.safetensors") for folder in (deep, merged, plain)
    )
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, atol=1e-7, rtol=1e-6)  # a rounding
    assert any(not torch.equal(between[name], value) for name, value in want.items())


@pytest.mark.nightly
def test_a_run_goes_on_as_if_nothing_had_been(
    here: Command, deep: Path, chats: Path, tmp_path: Path
) -> None:
    straight, out = tmp_path / "straight", tmp_path / "out"
    assert here(*tuning(deep, chats, straight), *LORA).status == 0
    shutil.copytree(straight, out)
    (out / "adapter_model.safetensors").unlink()
    # Killed in step 5: its checkpoint is that of step 3.
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:6]))
    done = here(*tuning(deep, chats, out), *LORA, "--resume", "--zero", 1, "--devices", 4)
    assert done.status == 0, done.stderr
    assert "resumed after step 3 of 6" in done.stdout
    summaries = [json.loads((run / "summary.json").read_text()) for run in (straight, out)]
    assert summaries[0]["tokens"] == summaries[1]["tokens"]
    got = load_file(out / "adapter_model.safetensors")
    for name, value in load_file(straight / "adapter_model.safetensors").items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-5)  # other devices
    other = here(*tuning(deep, chats, out), "--lora", 4, "--save-every", 3, "--resume")
    assert other.status == 2
    assert "lora" in other.stderr


@pytest.mark.nightly
def test_sigterm_writes_what_was_reached_and_how_to_go_on(
    here: Command, base: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = [*tuning(base, chats, out), "--no-pack", "--lora", 2, "--steps", 10**6]
    over = threading.Event()
    waiting = threading.Thread(target=ask_when, args=(out, 2, over), daemon=True)
    waiting.start()
    try:
        done = here(*run)
    finally:
        over.set()
        waiting.join()
    assert done.status == 0, done.stderr
    assert re.search(r"state after \d+ of 1000000 .* the same command with --resume", done.stdout)
    assert fz.checkpoint(out / "checkpoints").step == reached(out) >= 2
    assert (out / "adapter_model.safetensors").is_file()


def reached(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.is_file() else 0


def ask_when(out: Path, steps: int, over: threading.Event) -> None:
    """Asks the run to stop after so many steps, or when it has taken too long for them."""
    deadline = time.monotonic() + 900  # only where it hangs
    while reached(out) < steps and time.monotonic() < deadline:
        if over.wait(0.02):
            return  # it failed: there is no one to ask
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.nightly
def test_without_an_adapter_all_is_trained_and_transformers_loads_it(
    here: Command, base: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    again = tmp_path / "again"
    # What an older run left there, with adapters and as a pipeline; and a base of another dtype.
    leaves_nothing_of = ("adapter_config.json", "adapter_model.safetensors", "timeline.json")
    out.mkdir()
    for name in leaves_nothing_of:
        (out / name).write_text("{}")
    low = tmp_path / "low"
    transformers.AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16").save_pretrained(low)
    byte_tokenizer(None).save_pretrained(low)
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    done = here(*tuning(low, chats, out), "--steps", 2, "--overwrite", "--template", template)
    assert done.status == 0, done.stderr
    assert not [name for name in leaves_nothing_of if (out / name).exists()]
    summary = json.loads((out / "summary.json").read_text())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert summary["val_loss_last"] == pytest.approx(validation_loss(loaded), abs=1e-5)
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    replayed = here("finetune", "--plan", out / "run.json", "--out", again)
    assert replayed.status == 0, replayed.stderr
    found = load_file(again / "model.safetensors")
    for name, value in load_file(out / "model.safetensors").items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("adapts", [False, True])
def test_frozen_weights_take_part_in_two_of_three_passes(adapts: bool) -> None:
    """What is said of FLOP/s and MFU counts no gradient of theirs."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    made, plan = tb.convert(module, torch.zeros(4, 8)), fz.Plan(data=2)
    made = tb.lora(made, rank=2) if adapts else made
    model = made.model(lambda forward, batch: jnp.mean(forward(batch["x"]) ** 2))
    rows = {"x": np.zeros((1, 8), np.float32)}
    corpus = SimpleNamespace(train_batch=lambda seed, step, size, part: rows)
    settings = SimpleNamespace(seed=0, batch=4, data=SimpleNamespace(seq=1))
    job: Any = SimpleNamespace(model=model, plan=plan, corpus=corpus, converted=made)
    found = _gauge(settings, job, fz.init(model, None, plan), 2).flops_per_token
    factors = 2 * (8 + 16) + 2 * (16 + 4) if adapts else 0
    assert found == (2 if adapts else 3) * 2 * (8 * 16 + 16 * 4 + factors)


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        ('{"messages": 1}', (), r"rows\.jsonl:2: .*expected a list of messages, got int"),
        ('{"text"', (), r"rows\.jsonl:2: expected one JSON object"),
        ('{"text": "' + "x" * 97 + '"}', (), r"rows\.jsonl:2: 98 tokens, but rows have 96"),
        ('{"text": "b"}', ("--seq", 1), "--seq must be at least 2"),
        ('{"text": "b"}', ("--seq", 256), "longer than the 128 positions"),
        ('{"text": "b"}', ("--too-long", "fold"), "--too-long fold: expected one of error, cut"),
        ('{"text": "b"}', ("--lora", 0), "--lora 0: expected a rank"),
        ('{"text": "b"}', ("--targets", "q_proj"), "of adapters: give --lora"),
        ('{"text": "b"}', ("--lora", 2, "--base", "nf5"), "--base nf5: expected one of"),
        ('{"text": "b"}', ("--log", "paper"), "--log paper: expected one of"),
        ('{"text": "b"}', ("--data", "absent"), "absent: no such file or folder"),
        ('{"text": "b"}', ("--template", "absent"), "absent: cannot be read"),
    ],
)
def test_what_cannot_be_trained_leaves_nothing(
    here: Command, base: Path, tmp_path: Path, line: str, flags: tuple[object, ...], message: str
) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_text('{"text": "a"}\n' + line + "\n")
    done = here(*tuning(base, path, out), *flags)
    assert done.status == 2
    assert re.search(message, done.stderr), done.stderr
    assert not out.exists()


def test_models_that_cannot_be_tuned_or_merged_are_named(
    here: Command, base: Path, chats: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(base, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    out = tmp_path / "out"
    assert "expected a tokenizer beside" in here(*tuning(bare, chats, out)).stderr
    config, packed = json.loads((bare / "config.json").read_text()), {"quant_method": "gptq"}
    for where in (
        {"quantization_config": packed},
        {"text_config": {"quantization_config": packed}},
    ):
        (bare / "config.json").write_text(json.dumps(config | where))
        assert "quantised (quant_method 'gptq')" in here(*tuning(bare, chats, out)).stderr
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    packed["bnb_4bit_use_double_quant"] = True
    (bare / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    told = " ".join(here(*tuning(bare, chats, out)).stderr.split())
    assert "(quant_method 'bitsandbytes')" in told
    assert "--base nf4-double quantises that" in told
    assert "directory with weights" in here(
        "merge", "--model", tmp_path, "--adapter", base, "--out", out
    ).stderr  # fmt: skip
    assert "with adapter_config.json" in here(
        "merge", "--model", base, "--adapter", base, "--out", out
    ).stderr  # fmt: skip
    assert not out.exists()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for flag, place in (("--model", base), ("--adapter", adapter)):
        done = here(
            "merge", "--model", base, "--adapter", adapter, "--out", place, "--overwrite"
        )  # fmt: skip
        assert f"--out {place} is {flag}, which is read" in done.stderr
    plan = tmp_path / "run.toml"
    plan.write_text("[run]\nverify = true\n")
    done = here(*tuning(base, chats, out), "--plan", plan)
    assert (done.status, "verify is of `fzero train`" in done.stderr) == (2, True), done.stderr
    done = here(*tuning(base, chats, Path("s3://bucket/run")))
    assert "s3:/bucket/run: expected a directory of this machine" in done.stderr
    again = here(*tuning(base, chats, Path("s3://bucket/run")), "--resume")
    assert "got a URL (s3://); train into a directory and copy it there, or copy it here to" in (
        " ".join(again.stderr.split())
    )
    assert not Path("s3:").exists()
