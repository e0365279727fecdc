"""`fzero launch -- train`: several processes, one run; SIGTERM saves, and fewer go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli_finetune import conversation, llama


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.nightly]

# On a machine that does other things, too. What hangs is ended by fzero itself, after a minute.
LIMIT_S = 1800


def start(processes: int, out: Path, *arguments: str, devices: int = 2) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "fzero.cli", "launch", "--processes", str(processes), "--logs",
        str(out.with_name(f"logs-{processes}")), "--", "train", "--out", str(out), *arguments,
    ]  # fmt: skip
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices // processes)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def test_sigterm_saves_in_all_processes_and_one_goes_on(tmp_path, config_file, texts):
    out = tmp_path / "out"
    arguments = [
        "--model", f"hf:{config_file}", "--data", str(texts[0]), str(texts[1]), "--steps", "2000",
        "--batch", "4", "--seq", "16", "--eval-every", "0", "--eval-sequences", "4",
        "--zero", "3", "--seed", "3",
    ]  # fmt: skip
    process, metrics = start(2, out, *arguments), out / "metrics.jsonl"
    try:
        deadline = time.monotonic() + LIMIT_S
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, shown
    summary = json.loads((out / "summary.json").read_text())
    reached = summary["steps"]
    assert 4 <= reached < 2000
    assert summary["devices"]["count"] == 2
    assert f"SIGTERM: stopped after step {reached};" in shown
    assert "the same command with --resume goes on" in shown
    assert (out / "summary.json").exists()
    # One process with both devices has all that two had: the run goes on where it was.
    process = start(1, out, "--resume", *arguments)
    try:
        deadline = time.monotonic() + LIMIT_S
        while metrics.read_text().count("\n") < reached + 6:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, shown
    assert f"resumed after step {reached} of 2000" in shown
    losses = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [e["step"] for e in losses if "loss" in e][: reached + 5] == list(range(1, reached + 6))


def test_a_killed_run_goes_on_with_more_processes_and_fewer(tmp_path, config_file, texts):
    """Each time on as many devices: the losses of a run that nothing interrupted, in their order.

    What two processes add is added in another order than in one, so losses agree to rounding; a
    batch that is left out or seen twice would be far off.
    """
    arguments = [
        "--model", f"hf:{config_file}", "--data", str(texts[0]), str(texts[1]), "--steps", "60",
        "--batch", "4", "--seq", "16", "--eval-every", "0", "--eval-sequences", "3",
        "--zero", "2", "--seed", "3", "--save-every", "3",
    ]  # fmt: skip
    out, straight = tmp_path / "out", tmp_path / "straight"
    for processes, stop_at in ((2, 8), (4, 16)):
        resumed = ["--resume"] if processes > 2 else []
        code, shown = killed_at(stop_at, start(processes, out, *resumed, *arguments, devices=4))
        assert code == 137, shown
        assert "was lost: killed, out of memory, or its host went down" in shown
    for folder, resumed in ((out, ["--resume"]), (straight, [])):
        process = start(1, folder, *resumed, *arguments, devices=4)
        shown, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, shown
    losses = [in_order(folder / "metrics.jsonl") for folder in (out, straight)]
    assert [step for step, _ in losses[0]] == list(range(1, 61))
    for (step, found), (_, expected) in zip(*losses, strict=True):
        assert abs(found / expected - 1) < 1e-5, step
    ends = [json.loads((f / "summary.json").read_text())["val_loss_last"] for f in (out, straight)]
    assert abs(ends[0] / ends[1] - 1) < 1e-5


def test_finetune_trains_the_same_in_two_processes_that_read_their_own_rows(tmp_path):
    """Losses to rounding, counts of tokens exactly; and an adapter that PEFT loads."""
    import peft
    import transformers

    base, chats = llama(tmp_path / "base", layers=1), tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"messages": conversation(n)}) for n in range(40)))
    found = {}
    for processes in (1, 2):
        out = tmp_path / f"out-{processes}"
        command = [
            sys.executable, "-m", "fzero.cli", "launch", "--processes", str(processes), "--",
            "finetune", "--model", f"hf:{base}", "--data", str(chats), "--out", str(out),
            "--steps", "5", "--batch", "4", "--seq", "96", "--lr", "1e-2", "--zero", "3",
            "--plan-set", "min_shard_bytes=0", "--eval-every", "0", "--lora", "2",
        ]  # fmt: skip
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(2 // processes)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((out / "summary.json").read_text())
        losses = [loss for _, loss in in_order(out / "metrics.jsonl")]
        found[processes] = [*losses, summary["val_loss_last"]], summary["tokens"]
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        assert peft.PeftModel.from_pretrained(plain, out)
    assert found[2][1] == found[1][1]
    assert found[2][0] == pytest.approx(found[1][0], rel=1e-5)


def in_order(metrics: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def killed_at(step: int, launcher: subprocess.Popen[str]) -> tuple[int, str]:
    """Kills the last process once a step is in the metrics and a checkpoint is there."""
    out = Path(launcher.args[launcher.args.index("--out") + 1])  # type: ignore[union-attr]
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (out / "metrics.jsonl").exists() or not reached(out, step):
            assert launcher.poll() is None, launcher.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        shown, _ = launcher.communicate(timeout=LIMIT_S)
        return launcher.returncode, shown
    finally:
        launcher.kill()


def reached(out: Path, step: int) -> bool:
    lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    done = max((json.loads(line)["step"] for line in lines if line), default=0)
    whole = [int(p.name) for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    return done >= step and bool(whole)
