"""What a command refuses, in words that say what to do; listing without loading; display."""

from __future__ import annotations

import errno
import io
import json
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cli_cases import TINY_CONFIG, Command
from rich.console import Console

import fzero as fz
from fzero import cli
from torch_bridge.run import check, devices, hosts, interrupt, models, outputs, resume
from torch_bridge.run.errors import CommandError
from torch_bridge.run.figures import progress
from torch_bridge.run.figures.gauge import Gauge
from torch_bridge.run.settings import DataSettings, TrainSettings


def refusal(here: Command, *args: object) -> str:
    """The error of a command that must fail."""
    done = here(*args)
    assert done.status == 2
    return done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch", 7, "--devices", 2), "--batch 7 must be a multiple of 2"),
        (("--batch", 6, "--devices", 2, "--microbatches", 2), "use --batch 4 or 8"),
        (("--batch", 0), "--batch must be at least 1, got 0"),
        (("--steps", 0), "--steps must be at least 1, got 0"),
        (("--seq", 1), "--seq must be at least 2"),
        (("--seq", 64), "longer than the 32 positions"),
        (("--lr", 0), "must be positive and finite, got 0.0"),
        (("--lr", "nan"), "must be positive and finite, got nan"),
        (("--clip", -1), "must be positive"),
        (("--devices", 0), "--devices must be at least 1, got 0"),
        (("--devices", 4096, "--batch", 4096), "--devices 4096 asked for"),
        (("--data", "absent.txt"), "absent.txt: no such file"),
        (("--data", "stdlib", "absent.txt"), "either stdlib or paths"),
        (("--data", "."), "is a directory; give its files"),
        (("--model", "hf:absent"), "absent does not exist"),
        (("--model", "absent.py:make"), "absent.py does not exist"),
        (("--model", "gpt2"), "expected hf:DIR, hf:CONFIG.json or path/to/file.py:factory"),
        (("--zero", 4), "--zero"),
        (("--gather", "lazy"), "gather='lazy' with zero=3"),
        (("--zero", 1, "--gather", "late"), "--gather"),
        (("--precision", "fp4"), "--precision"),
        (("--out", f"{__file__}/run"), "can be written, but " + __file__ + " is a file"),
        (("--resume",), "expected a checkpoint in"),
        (("--resume", "--out", "gs://bucket/run"), "got a URL (gs://)"),
        (("--resume", "--overwrite"), "--resume goes on with what --overwrite would replace"),
    ],
)
def test_train_refuses(
    here: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config_file: Path,
    texts: list[Path],
    flags: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    base = {
        "--model": f"hf:{config_file}",
        "--out": "out",
        "--seq": 32,
        "--devices": 1,
        "--batch": 4,
    }
    arguments = [
        text for name, value in base.items() if name not in flags for text in (name, value)
    ]
    if "--data" not in flags:
        arguments += ["--data", texts[0], texts[1]]
    # What was wrong is in the error; nothing else was written.
    assert message in refusal(here, "train", *arguments, *flags)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_full_disk_is_named_and_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")

    def write() -> None:
        with outputs.staged(tmp_path) as scratch:
            (scratch / "kept").write_text("new")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CommandError, match=r"--out .*cannot be written \(.*No space.*--resume"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"


def test_a_directory_with_something_in_it_is_refused(
    here: Command, tmp_path: Path, config_file: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    error = refusal(here, "train", "--model", f"hf:{config_file}", "--out", tmp_path)
    assert "is not empty; give another directory, or --overwrite" in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "a vocabulary of 200 cannot hold the 256 byte values"),
        ({"model_type": "no-such-model"}, "no transformers configuration"),
        ({"model_type": "vit"}, "no causal language model"),
    ],
)
def test_a_configuration_that_cannot_serve_is_refused(
    here: Command,
    tmp_path: Path,
    texts: list[Path],
    changes: dict[str, object],
    message: str,
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_CONFIG | changes))
    error = refusal(
        here, "train", "--model", f"hf:{tmp_path}", "--out", tmp_path / "out", "--data",
        *texts, "--seq", 32, "--devices", 1,
    )  # fmt: skip
    assert message in error


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("absent", "has no function named 'absent'"),
        ("no_module", "must return a torch.nn.Module, got str"),
        ("no_logits", "must turn token ids [batch, seq] into logits"),
        ("narrow", "a vocabulary of 100 cannot hold the 256 byte values"),
    ],
)
def test_a_factory_that_cannot_serve_is_refused(
    here: Command,
    tmp_path: Path,
    factory_file: Path,
    texts: list[Path],
    factory: str,
    message: str,
) -> None:
    error = refusal(
        here, "train", "--model", f"{factory_file}:{factory}", "--out", tmp_path / "out",
        "--data", *texts, "--devices", 1,
    )  # fmt: skip
    assert message in error


def test_a_directory_that_cannot_be_made_is_named() -> None:
    with pytest.raises(CommandError, match=r"--out /proc/run: cannot be made .*give another"):
        outputs.make(Path("/proc/run"))  # where root may not either


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (b"half a header", "its weights cannot be read (SafetensorError"),
        (safetensors.torch.save({"transformer.ln_f.weight": torch.ones(32)}), "its files lack"),
    ],
)
def test_weights_that_are_damaged_or_missing_are_refused(
    here: Command, tmp_path: Path, weights: bytes, message: str
) -> None:
    """What is in no file, transformers would draw at random."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    (tmp_path / "model.safetensors").write_bytes(weights)
    error = refusal(here, "eval", "--model", f"hf:{tmp_path}", "--seq", 32, "--devices", 1)
    assert message in error
    assert str(tmp_path) in error


@pytest.mark.parametrize("record", ["{", "[]", "{}", '{"data": {}}', '{"other": 1}'])
def test_a_damaged_record_of_a_run_is_refused(here: Command, tmp_path: Path, record: str) -> None:
    (tmp_path / outputs.RECORD).write_text(record)
    error = refusal(here, "eval", "--model", tmp_path)
    assert f"{tmp_path / outputs.RECORD} is no record of `fzero train`" in error


@pytest.mark.parametrize(
    ("values", "flags", "message"),
    [
        ({"gradient_clipping": 1.0}, ("--auto", "gradient_cliping=1"), "has no 'auto' there"),
        ({"gradient_clipping": 1.0}, ("--auto", "gradient_clipping=2"), "has no 'auto' there"),
        ({}, ("--num-steps", 3), "--num-steps: "),
        ({"distributed_type": "NO"}, ("--devices", 2, "--num-steps", 3), "--devices, --num-steps"),
        ({"output_dir": "x"}, ("--auto", "learning_rate=1"), "of TrainingArguments, which takes"),
    ],
)
def test_what_a_configuration_does_not_ask_for_is_refused(
    here: Command, tmp_path: Path, values: dict[str, object], flags: tuple[object, ...],
    message: str,
) -> None:  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert message in refusal(here, "import-config", path, *flags)


def test_a_value_that_a_configuration_asks_for_is_taken(here: Command, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"gradient_clipping": "auto"}))
    done = here("import-config", path, "--auto", "gradient_clipping=2.5")
    assert "clip_norm=2.5" in done.stdout, done.stderr


def test_an_unknown_command_is_refused(here: Command) -> None:
    assert "No such command 'trian'" in refusal(here, "trian")


def test_the_commands_are_the_registered_ones() -> None:
    assert {"train", "eval", "schedule"} <= set(cli.commands())


def test_a_run_that_diverges_fails_and_says_since_when(
    here: Command, tmp_path: Path, config_file: Path, texts: list[Path]
) -> None:
    out = tmp_path / "out"
    said = refusal(
        here, "train", "--model", f"hf:{config_file}", "--data", *texts, "--batch", 8, "--seq", 32,
        "--eval-sequences", 8, "--steps", 2, "--lr", 1e30, "--devices", 1, "--out", out,
    )  # fmt: skip
    assert "the run diverged: its loss is not finite, in training since step 2" in said
    assert (out / "model.safetensors").is_file()


def test_an_adapter_is_no_model_to_generate_with(here: Command, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    said = refusal(here, "generate", "--model", f"hf:{tmp_path}", "--prompt", "a")
    assert "is an adapter; fzero merge --model BASE --adapter" in " ".join(said.split())


def test_what_is_not_there_has_no_suffix_to_complain_of(here: Command, tmp_path: Path) -> None:
    assert "no such file" in refusal(here, "inspect", tmp_path / "model")
    assert "no such file" in refusal(here, "convert", tmp_path / "model", tmp_path / "a.pt")


def test_more_devices_than_rows_are_refused_before_they_are_made(
    here: Command, tmp_path: Path, config_file: Path, texts: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(devices, "configure", lambda *_: pytest.fail("devices were made"))
    said = refusal(
        here, "train", "--model", f"hf:{config_file}", "--data", *texts, "--batch", 8,
        "--devices", 9999, "--out", tmp_path / "out",
    )  # fmt: skip
    assert "--batch 8 must be a multiple of 9999" in " ".join(said.split())


def test_staged_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("old")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/old.jinja").write_text("old")

    def fails() -> None:
        with outputs.staged(tmp_path) as scratch:
            (scratch / "one.txt").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (tmp_path / "one.txt").read_text() == "old"
    with outputs.staged(tmp_path) as scratch:
        (scratch / "one.txt").write_text("new")
        (scratch / "two.txt").write_text("new")
        (scratch / "templates").mkdir()  # as of a tokenizer with several templates
        (scratch / "templates/new.jinja").write_text("new")
    assert {
        path.relative_to(tmp_path).as_posix(): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    } == {"one.txt": "new", "two.txt": "new", "templates/new.jinja": "new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.txt", "templates", "two.txt"]


def test_of_an_older_model_nothing_stays_beside_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_now(*_: object) -> None:
        raise KeyboardInterrupt

    own = ("notes.txt", "loss.png", "checkpoints")
    older = ("config.json", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
             "model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.json",
             "pytorch_model.bin", "fzero.json", "generation_config.json")  # fmt: skip
    for name in (*own, *older):
        (tmp_path / name).write_text("old")
    with pytest.raises(KeyError), outputs.model_staged(tmp_path):
        raise KeyError
    assert {path.name for path in tmp_path.iterdir()} == {*own, *older}  # a run that failed
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", killed_now)
        with pytest.raises(KeyboardInterrupt), outputs.model_staged(tmp_path) as scratch:
            (scratch / "config.json").write_text("new")
    # Too little is left, not an adapter that would be added to other weights.
    assert {path.name for path in tmp_path.iterdir()} == {*own}
    with outputs.model_staged(tmp_path) as scratch:
        for name in ("model.safetensors", "config.json"):
            (scratch / name).write_text("new")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"model.safetensors": "new", "config.json": "new", **dict.fromkeys(own, "old")}


@pytest.mark.parametrize("resume", [False, True])
def test_only_process_0_logs_a_run_elsewhere(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "metrics.jsonl").write_text("so far")
    settings = TrainSettings(
        model="hf:here", data=DataSettings(("stdlib",), seq=16, eval_sequences=2), out=tmp_path,
        steps=1, batch=2, lr=1e-3, devices=None, eval_every=0, seed=0, plan_fields={},
        log=("wandb",), resume=resume,
    )  # fmt: skip
    own = [hosts.own(settings, fz.World("arguments", 2, process, {})) for process in (0, 1)]
    assert [(one.log, one.out == tmp_path) for one in own] == [(("wandb",), True), ((), False)]
    # What there is to go on with is read by all of them.
    assert (own[1].out / "metrics.jsonl").exists() is resume


def test_a_bar_on_a_terminal_shows_loss_rate_and_remaining_time() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with progress.display(20, console) as shown:
        shown.step(5, 2.5, 12345.6)
        shown.line("step 5  validation loss 2.25")
        shown.step(10, 1.5, 12345.6, Gauge(2e9, 1e14, 3 * 2**20).words(12345.6))
    text = screen.getvalue()
    for part in ("10/20", "loss 1.5000", "12,346 tokens/s", "MFU 25%", "3.0 MiB/device", "left",
                 "validation loss 2.25"):  # fmt: skip
        assert part in text


def test_all_of_the_numbers_fit_eighty_columns() -> None:
    screen = io.StringIO()
    with progress.display(2000, Console(file=screen, force_terminal=True, width=80)) as shown:
        shown.step(1234, 2.3456, 123456.0, Gauge(2e6, None, 20 * 2**20).words(123456.0))
    for part in ("1234/2000", "loss 2.3456", "123,456 tokens/s", "246.9 GFLOP/s", "20.0 MiB",
                 "left"):  # fmt: skip
        assert part in screen.getvalue()
    assert "…" not in screen.getvalue()


def test_a_long_run_prints_few_plain_lines() -> None:
    log = io.StringIO()
    with progress.display(1000, Console(file=log)) as shown:
        for step in range(1, 1001):
            shown.step(step, 1.0, None)
    assert 20 <= log.getvalue().count("\n") <= 22
    assert "step 1000/1000" in log.getvalue()


def test_the_second_ctrl_c_is_not_held_back() -> None:
    import signal

    # Whoever started the tests in the background had SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupt.StopOnInterrupt() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_is_stopped_before_it_writes_leaves_nothing(
    here: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config_file: Path,
    texts: list[Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    import signal

    load = models.load

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return load(*args, **kwargs)

    monkeypatch.setattr(models, "load", interrupted)
    out = tmp_path / "out"
    done = here(
        "train", "--model", f"hf:{config_file}", "--data", *texts, "--out", out, "--seq", 32,
        "--devices", 1, "--batch", 4, "--steps", 1,
    )  # fmt: skip
    assert done.status == 130
    assert not out.exists()
    assert "Ctrl-C: stopping after this step; again: at once" in capfd.readouterr().err


def test_figures_off_their_bounds_are_named() -> None:
    good = {"logits_max_abs_diff": 9e-5, "torch_val_loss": 2.00001}
    assert check.missed_bounds(good, 2.0, "fp32") == []
    assert check.missed_bounds(good | {"torch_val_loss": 2.1}, 2.0, "bf16") == []
    (loss,) = check.missed_bounds(good | {"torch_val_loss": 2.0001}, 2.0, "fp32")
    assert "relative difference 5e-05, expected at most 1e-05" in loss
    (logits,) = check.missed_bounds(good | {"logits_max_abs_diff": float("nan")}, 2.0, "fp32")
    assert "logits differ by nan" in logits


def test_without_a_number_every_device_is_used() -> None:
    import jax

    assert devices.configure(None, "bf16") == len(jax.devices())


def test_tokens_of_a_resumed_run_count_from_its_beginning(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "val_loss": 3.0}, {"step": 1, "loss": 2.0, "tokens": 7},
        {"step": 2, "loss": 1.0, "tokens": 5}, {"step": 3, "loss": 1.0, "tokens": 9},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert resume.rewind(tmp_path, 2, 0).tokens == 12


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 2e-2), ("steps", 7), ("clip", 0.5), ("seq", 64), ("seed", 1), ("precision", "bf16"),
        ("model", "hf:two"),
    ],
)  # fmt: skip
def test_what_the_weights_depend_on_is_as_it_was(tmp_path: Path, name: str, value: Any) -> None:
    def saver(**given: Any) -> resume.Saver:
        own = {"lr": 1e-2, "steps": 6, "seed": 0, "seq": 32, "clip": 1.0, "precision": "fp32"}
        own |= {"model": "hf:one"} | given
        plan = {"clip_norm": own["clip"], "precision": own["precision"], "zero": len(given)}
        data = DataSettings(("stdlib",), own["seq"])
        settings = TrainSettings(
            own["model"], data, tmp_path, own["steps"], 8, own["lr"], 2, 0, own["seed"], plan
        )
        return resume.Saver(settings, settings.plan(2), "text")

    then = types.SimpleNamespace(data_position={"step": 3, "run": saver().run})
    saver().require_same(then)
    saver(model=f"hf:{Path('one').absolute()}").require_same(then)  # as run.json has it
    with pytest.raises(CommandError, match=rf"another run \({name}: .* then, {value} now\)"):
        saver(**{name: value}).require_same(then)


def test_a_kill_while_a_model_moves_in_leaves_none_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one's config beside the other's weights: it comes last, and the older one goes first."""

    def write(folder: Path, what: str) -> None:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).write_text(what)

    write(tmp_path, "old")
    move, moved = Path.replace, []

    def killed(path: Path, target: Path) -> Path:
        if len(moved) == kill:
            raise KeyboardInterrupt
        moved.append(target.name)
        return move(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    for kill in (1, 2):
        moved.clear()
        with pytest.raises(KeyboardInterrupt), outputs.model_staged(tmp_path) as scratch:
            write(scratch, "new")
        assert len(moved) == kill
        assert not (tmp_path / "config.json").exists()
