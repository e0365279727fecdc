"""`fzero train` and `fzero eval` on real text: files, figures, PyTorch, tokenizers, Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import TINY_CONFIG, Command, Run, command, environment, training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fzero as fz
from torch_bridge.run import data, loop, resume, verify
from torch_bridge.run.errors import CommandError
from torch_bridge.run.models import LoadedModel
from torch_bridge.run.settings import DataSettings
from torch_bridge.run.tasks import Trained


pytestmark = pytest.mark.slow
PNG = b"\x89PNG\r\n\x1a\n"


def summary_of(out: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return values


def printed_loss(run: Run) -> float:
    assert run.status == 0, run.stderr
    return float(run.stdout.partition("validation loss ")[2].split()[0])


def test_training_lowers_the_validation_loss_and_pytorch_agrees(trained: tuple[Path, Run]) -> None:
    summary = summary_of(trained[0])
    assert summary["val_loss_last"] < summary["val_loss_first"] - 0.5
    assert summary["torch_val_loss"] == pytest.approx(summary["val_loss_last"], rel=1e-5)
    assert 0 < summary["logits_max_abs_diff"] <= 1e-4
    # The comparison is worth something only in a process without jax.
    assert summary["jax_imported"] is False
    assert summary["fzero_imported"] is False


def test_the_summary_says_what_ran(trained: tuple[Path, Run]) -> None:
    summary = summary_of(trained[0])
    assert summary["plan"]["zero"] == 3
    assert summary["plan"]["data"] == summary["devices"]["count"] == 4
    assert summary["plan"]["microbatches"] == 2
    assert summary["plan"]["clip_norm"] == 1.0
    assert summary["steps"] == 6
    assert summary["interrupted"] is False
    assert [step for step, _ in summary["val_losses"]] == [0, 3, 6]
    assert summary["tokens_per_s"] > 0
    assert summary["below_unigram_entropy"] == pytest.approx(
        summary["byte_entropy"] - summary["val_loss_last"]
    )
    held = summary["bytes_per_device"]
    assert held["opt_state"] > held["params"] > 0
    assert held["total"] == sum(size for name, size in held.items() if name != "total")
    # Leaves below `min_shard_bytes` stay whole, so a model this small saves less than a quarter.
    assert held["params"] < 4 * summary["parameters"]
    assert summary["versions"]["torch"].startswith("2.")


def test_metrics_hold_every_step_and_every_validation(trained: tuple[Path, Run]) -> None:
    out, _ = trained
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    order = [(entry["step"], "val_loss" in entry) for entry in entries]
    assert order == [
        (0, True), (1, False), (2, False), (3, False), (3, True), (4, False), (5, False),
        (6, False), (6, True),
    ]  # fmt: skip
    steps = [entry for entry in entries if "loss" in entry]
    assert {entry["count"] for entry in steps} == {8 * 31.0}
    assert all(entry["grad_norm"] > 0 for entry in steps)
    summary = summary_of(out)
    assert steps[0]["loss"] == summary["train_loss_first"]
    assert steps[-1]["loss"] == summary["train_loss_last"]
    assert entries[-1]["val_loss"] == summary["val_loss_last"]


@pytest.mark.parametrize(
    ("spec", "name"),
    [("hf:/a/llama-3.1", "llama-3.1"), ("hf:/a/tiny.json", "tiny"), ("/a/gpt.py:small", "gpt")],
)
def test_a_picture_calls_a_model_by_its_folder_or_file(spec: str, name: str) -> None:
    assert LoadedModel(torch.nn.Module(), spec, 8, None).name == name


def test_timings_say_what_all_of_the_time_went_to(trained: tuple[Path, Run]) -> None:
    out, _ = trained
    entries = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    what = [(entry["what"], entry["step"]) for entry in entries if "seconds" in entry]
    assert what == [
        ("validation", 0), ("first step", 1), ("step", 2), ("step", 3), ("validation", 3),
        ("step", 4), ("checkpoint", 4), ("step", 5), ("step", 6), ("validation", 6),
    ]  # fmt: skip
    assert all(entry["seconds"] > 0 for entry in entries if "seconds" in entry)
    # What a device keeps, as the summary has it.
    places = [entry for entry in entries if entry["what"] == "placement"]
    assert [entry["step"] for entry in places] == [0, 3, 6]
    held = {k: v for k, v in summary_of(out)["bytes_per_device"].items() if v}
    assert [entry["bytes_per_device"]["device"] for entry in places] == [held] * 3


def test_the_directory_is_one_that_transformers_loads(trained: tuple[Path, Run]) -> None:
    out, _ = trained
    module = AutoModelForCausalLM.from_pretrained(out)
    assert type(module).__name__ == "GPT2LMHeadModel"
    assert module.lm_head.weight is module.transformer.wte.weight
    stored = load_file(out / "model.safetensors")
    torch.testing.assert_close(module.state_dict()["transformer.wpe.weight"],
                               stored["transformer.wpe.weight"], rtol=0, atol=0)  # fmt: skip
    assert (out / "loss.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in out.iterdir()) == [
        "about.json", "checkpoints", "config.json", "fzero.json", "generation_config.json",
        "loss.png", "metrics.jsonl", "model.safetensors", "run.json", "summary.json",
        "timings.jsonl",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert {name: config[name] for name in TINY_CONFIG} == TINY_CONFIG


def test_the_validation_loss_is_the_one_that_pytorch_computes_from_the_text(
    trained: tuple[Path, Run], texts: list[Path]
) -> None:
    corpus = data.load(DataSettings(tuple(map(str, texts)), 32, 21))
    module = AutoModelForCausalLM.from_pretrained(trained[0]).eval()
    with torch.no_grad():
        loss = verify.mean_loss(
            module,
            torch.from_numpy(corpus.validation).long(),
            torch.from_numpy(corpus.labels).long(),
        )
    assert summary_of(trained[0])["val_loss_last"] == pytest.approx(loss, rel=1e-5)


def test_what_is_printed_without_a_terminal(trained: tuple[Path, Run]) -> None:
    lines = trained[1].stdout.splitlines()
    assert sum(line.startswith("step ") and "/6  loss" in line for line in lines) == 6
    assert sum("  validation loss " in line for line in lines) == 3
    # CPUs have no peak to be a share of, and do not say what is in use.
    assert sum("GFLOP/s" in line and "KiB/device of state" in line for line in lines) == 5
    assert lines[-1] == f"written to {trained[0]}"
    assert "\x1b" not in trained[1].stdout


def test_eval_prints_the_validation_loss_that_training_printed_last(
    trained: tuple[Path, Run], here: Command
) -> None:
    out, run = trained
    last = [line for line in run.stdout.splitlines() if line.startswith("step 6  validation")][-1]
    done = here("eval", "--model", out)
    assert done.status == 0, done.stderr
    assert done.stdout.split()[2] == last.split()[-1]


def test_eval_gives_the_same_loss_under_another_layout_and_batch(
    trained: tuple[Path, Run], texts: list[Path], here: Command
) -> None:
    out, _ = trained
    done = here(
        "eval", "--model", out, "--data", *texts, "--seq", 32, "--batch", 5, "--zero", 0,
        "--devices", 1, "--precision", "fp32", "--eval-sequences", 21,
    )  # fmt: skip
    assert printed_loss(done) == pytest.approx(summary_of(out)["val_loss_last"], abs=2e-6)
    assert "cannot be compared" not in done.stdout


def test_eval_says_when_the_text_is_another(
    trained: tuple[Path, Run], texts: list[Path], here: Command
) -> None:
    done = here("eval", "--model", trained[0], "--data", texts[0])
    assert done.status == 0, done.stderr
    assert "cannot be compared" in done.stdout


def test_a_run_goes_on_from_its_checkpoint_as_if_nothing_had_been(
    tmp_path: Path, trained: tuple[Path, Run], config_file: Path, texts: list[Path], here: Command
) -> None:
    """What a run leaves that was killed in step 6: a checkpoint of step 4, metrics up to step 5."""
    straight, out = trained[0], tmp_path / "out"
    shutil.copytree(straight / "checkpoints", out / "checkpoints")
    lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:-2]) + '{"step": 6, "lo')
    arguments = training(config_file, texts, out)
    refused = here(*arguments, "--lr", 2e-2, "--clip", 0.5, "--resume")
    assert refused.status == 2
    differences = "lr: 0.01 then, 0.02 now; clip: 1.0 then, 0.5 now"
    assert f"is of another run ({differences}); give the same flags" in refused.stderr
    more = texts[0].with_name("also.txt")  # trains, by its name
    more.write_text("also\n" * 40)
    refused = here(*training(config_file, [*texts, more], out), "--resume")
    assert "is of another run (fingerprint:" in refused.stderr
    (out / "metrics.jsonl").write_text("step 1\n")
    refused = here(*arguments, "--resume")
    assert "metrics.jsonl: expected lines of JSON with a step, got 'step 1'" in refused.stderr
    (out / "metrics.jsonl").write_text("".join(lines[:-2]) + '{"step": 6, "lo')
    done = here(*arguments, "--resume")
    assert done.status == 0, done.stderr
    assert "resumed after step 4 of 6" in done.stdout
    assert (out / "metrics.jsonl").read_text() == "".join(lines)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (straight, out)]
    assert weights[0] == weights[1]
    before, after = summary_of(straight), summary_of(out)
    for name in ("val_losses", "train_loss_first", "train_loss_last", "steps", "plan"):
        assert before[name] == after[name]


@pytest.mark.parametrize("left", ["summary.json", "adapter_model.safetensors", "checkpoints/3"])
def test_only_a_run_without_checkpoint_and_end_begins_anew(tmp_path: Path, left: str) -> None:
    with pytest.raises(CommandError, match="expected a checkpoint in"):
        resume.newest(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    assert resume.newest(tmp_path) is None
    (tmp_path / left).mkdir()  # a damaged checkpoint, say
    with pytest.raises(CommandError, match="--resume: "):
        resume.newest(tmp_path)


def test_a_module_from_a_factory_trains_in_bf16_and_evaluates(
    tmp_path: Path, factory_file: Path, texts: list[Path], here: Command
) -> None:
    out = tmp_path / "out"  # of a run that was killed in its first step
    out.mkdir()
    (out / "run.json").write_text("{}")
    (out / "metrics.jsonl").write_text('{"step": 0, "val_loss": 1.0}\n{"st')
    done = here(
        "train", "--model", f"{factory_file}:bigram", "--data", texts[0], "--data", texts[1],
        "--resume", "--out", out, "--steps", 4, "--batch", 2, "--seq", 16, "--zero", 2,
        "--devices", 2, "--precision", "bf16", "--eval-sequences", 8, "--verify",
    )  # fmt: skip
    assert done.status == 0, done.stderr
    assert "ended before its first checkpoint; it begins anew" in done.stdout
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sorted({*steps}) == [0, 1, 2, 3, 4]
    summary = summary_of(out)
    assert summary["logits_max_abs_diff"] <= 1e-4
    assert summary["torch_val_loss"] == pytest.approx(summary["val_loss_last"], rel=2e-2)
    assert not (out / "config.json").exists()
    weights = load_file(out / "model.safetensors")
    assert "embed.weight" in weights
    # A frozen parameter stays what it was, weight decay or not.
    np.testing.assert_array_equal(weights["norm.bias"].numpy(), np.full(16, 0.5, np.float32))
    evaluated = here("eval", "--model", out)
    assert printed_loss(evaluated) == pytest.approx(summary["val_loss_last"], abs=1e-6)


def test_ctrl_c_writes_what_was_reached(
    tmp_path: Path, factory_file: Path, texts: list[Path]
) -> None:
    """The installed command, in a process of its own."""
    out = tmp_path / "out"
    arguments = [
        "train", "--model", f"{factory_file}:bigram", "--data", str(texts[0]), str(texts[1]),
        "--out", str(out), "--steps", "1000000", "--batch", "4", "--seq", "16", "--devices", "2",
        "--eval-every", "0", "--eval-sequences", "4",
    ]  # fmt: skip
    process = subprocess.Popen(
        [command(), *arguments], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        metrics = out / "metrics.jsonl"
        deadline = time.monotonic() + 900  # only where it hangs
        # The fifth line is step 4: training runs, nothing compiles any more.
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert process.poll() is None, "ended before it could be interrupted"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=900)
    finally:
        process.kill()
    assert process.returncode == 130
    summary = summary_of(out)
    reached = summary["steps"]
    assert 4 <= reached < 1000000
    assert summary["interrupted"] is True
    assert f"Ctrl-C: stopped after step {reached};" in stdout
    assert f"interrupted: the state after {reached} of 1000000 steps is in {out};" in stdout
    about = fz.checkpoint(out / "checkpoints")
    assert (about.step, about.data_position["step"]) == (reached, reached)
    assert [step for step, _ in summary["val_losses"]] == [0, reached]
    weights = load_file(out / "model.safetensors")
    assert weights
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.nightly
def test_a_tokenizer_in_the_model_directory_is_used_and_handed_on(
    tmp_path: Path, texts: list[Path], here: Command
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=120, special_tokens=["<unk>", "<end>"])
    tokenizer.train([str(path) for path in texts], trainer)
    model = tmp_path / "model"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.save_pretrained(model)
    # Too small for bytes, large enough for these words.
    config = TINY_CONFIG | {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))

    out = tmp_path / "out"
    done = here(
        "train", "--model", f"hf:{model}", "--data", *texts, "--out", out, "--steps", 3,
        "--batch", 2, "--seq", 16, "--devices", 1, "--eval-sequences", 6,
    )  # fmt: skip
    assert done.status == 0, done.stderr
    summary = summary_of(out)
    assert summary["byte_entropy"] is None
    assert 0 < summary["unigram_entropy"] < np.log(120)
    again = AutoTokenizer.from_pretrained(out)
    assert again("scatter 7 of")["input_ids"] == fast("scatter 7 of")["input_ids"]
    # The directory is a model like any other: its weights are where a second run starts.
    further = here(
        "train", "--model", f"hf:{out}", "--data", *texts, "--out", tmp_path / "second",
        "--steps", 1, "--batch", 2, "--seq", 16, "--devices", 1, "--eval-sequences", 6,
    )  # fmt: skip
    assert further.status == 0, further.stderr
    assert summary_of(tmp_path / "second")["val_loss_first"] == summary["val_loss_last"]


@pytest.mark.parametrize("there", [False, True])
def test_a_tokenizer_is_written_beside_weights(tmp_path: Path, there: bool) -> None:
    tokenizer = types.SimpleNamespace(save_pretrained=lambda folder: (folder / "it").touch())
    loaded: Any = types.SimpleNamespace(config=None, tokenizer=tokenizer if there else None)
    nothing: Any = None
    Trained(loaded, nothing, nothing, nothing, nothing).save_around(tmp_path)
    assert (tmp_path / "it").exists() is there


@pytest.mark.parametrize("after", [0, 1])
def test_a_run_that_ended_as_it_was_stopped_was_not_interrupted(after: int) -> None:
    history, saved = loop.History(), []
    recorder = types.SimpleNamespace(
        history=history, pause=lambda: None, resume=lambda: None, say=lambda text: None,
        validation=lambda done, loss: history.validation.append((done, loss)),
        step=lambda done, metrics, tokens: history.losses.append((done, 0.0)),
        timings=types.SimpleNamespace(placed=lambda *_: None, done=lambda *_: None),
    )  # fmt: skip

    class Stop:
        agreed = ""

        def agree(self) -> None:
            self.agreed = "SIGTERM" if len(history.losses) == after else ""

    corpus = types.SimpleNamespace(num_tokens=lambda *_: 1)
    feed: Any = types.SimpleNamespace(train=lambda *_: None, corpus=corpus)
    settings: Any = types.SimpleNamespace(steps=1, eval_every=0, save_every=0, seed=0, batch=1)
    step: Any = lambda state, rows: (state + 1, {})  # noqa: E731
    stop: Any = Stop()
    save: Any = lambda *given: saved.append(given)  # noqa: E731
    loop.fit(0, step, lambda state: 0.0, feed, recorder, stop, settings, save)
    # None is begun that nobody wants any more, and the last one leaves nothing to go on with.
    assert len(history.losses) == after
    assert (history.interrupted, saved) == ((False, []) if after else (True, [(0, 0)]))
