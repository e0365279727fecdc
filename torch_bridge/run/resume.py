"""Going on with a run that ended early: its checkpoints, and what has to be as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fzero as fz
from fzero.hosts.agree import exchange
from torch_bridge.run import outputs
from torch_bridge.run.errors import CommandError
from torch_bridge.run.loop import History
from torch_bridge.run.settings import TrainSettings, absolute


FOLDER = "checkpoints"
KEEP = 2


class Saver:
    """Writes the checkpoints of a run into its directory.

    Args:
        settings: the run.
        plan: the plan of its state.
        fingerprint: of the text.

    Attributes:
        run: what has to be the same to go on.
    """

    def __init__(self, settings: TrainSettings, plan: fz.Plan, fingerprint: str) -> None:
        self.folder = settings.out / FOLDER
        self._plan = plan
        self.run = settings.result() | {"fingerprint": fingerprint}

    def save(self, state: fz.TrainState, done: int) -> None:
        """Writes the state after `done` steps, in the background."""
        position = {"step": done, "run": self.run}
        fz.save(self.folder, state, self._plan, data_position=position, keep=KEEP)

    def require_same(self, checkpoint: fz.Checkpoint) -> None:
        """Refuses a checkpoint whose run would have had another result.

        Raises:
            CommandError: names each difference.
        """
        then = checkpoint.data_position["run"]
        differences = [
            f"{name}: {then.get(name)} then, {now} now"
            for name, now in self.run.items()
            if then.get(name) != now
            and not (name == "model" and absolute(then[name]) == absolute(now))
        ]
        if differences:
            raise CommandError(
                f"--resume: {self.folder} is of another run ({'; '.join(differences)}); give the"
                " same flags as then (--zero, --gather, --devices, --microbatches and --eval-every"
                " may be others), or another --out"
            )


def newest(out: Path) -> fz.Checkpoint | None:
    """What a run can be resumed from; process 0 says what is there.

    Returns:
        The checkpoint; `None` of a run that was ended before its first one, which begins anew.

    Raises:
        CommandError: there is nothing, or nothing that `fzero train` wrote.
    """
    outputs.refuse_url(out)
    number, why = None, ""
    try:
        number = fz.checkpoint(out / FOLDER).number
    except fz.CheckpointError as error:
        why = "" if _only_begun(out) else str(error)
    number, why = exchange("resume", (number, why))[0]
    if number is None and not why:
        return None
    if number is None:
        raise CommandError(
            f"--resume: {why}; a run writes checkpoints with --save-every, and when Ctrl-C ends it"
        )
    try:
        found = fz.checkpoint(out / FOLDER, number)
    except fz.CheckpointError as error:
        raise CommandError(f"--resume: {error}") from error
    if not isinstance(found.data_position, dict) or "run" not in found.data_position:
        raise CommandError(f"--resume: {out / FOLDER} was not written by `fzero train`")
    return found


def _only_begun(out: Path) -> bool:
    """Whether a run began here that has neither a checkpoint, be it damaged, nor an end."""
    ends = (outputs.SUMMARY, *outputs.OF_A_MODEL)
    return (out / outputs.RUN).exists() and not (
        any(path.name.isdigit() for path in (out / FOLDER).glob("*"))
        or any(path.match(end) for path in out.iterdir() for end in ends)
    )


def rewind(out: Path, step: int, eval_every: int) -> History:
    """Cuts the metrics back to what was measured up to a step, and returns them."""
    path, history, kept = out / outputs.METRICS, History(), []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # A killed run may have left half a line.
    for line in (line for line in text.split("\n")[:-1] if line):
        entry = _entry(line, path)
        done = entry["step"]
        # A run that was interrupted validated once where it would not have otherwise.
        due = "loss" in entry or not done or (eval_every and done % eval_every == 0)
        if done > step or not due:
            continue
        kept.append(line + "\n")
        history.tokens += entry.get("tokens", 0)
        found = history.losses if "loss" in entry else history.validation
        value = entry["loss" if "loss" in entry else "val_loss"]
        found.append((done, float("nan") if value is None else value))
    if [done for done, _ in history.losses] != list(range(1, step + 1)):
        raise CommandError(
            f"--resume: {path} should have the losses of steps 1 to {step}, and has"
            f" {len(history.losses)} of them; without it the curve cannot go on"
        )
    with outputs.staged(out) as scratch:
        (scratch / outputs.METRICS).write_text("".join(kept), encoding="utf-8")
    return history


def _entry(line: str, path: Path) -> dict[str, Any]:
    """A line of the metrics."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise CommandError(
            f"--resume: {path}: expected lines of JSON with a step, got {line[:80]!r}; restore the"
            " file, or start anew with --overwrite"
        )
    return found
