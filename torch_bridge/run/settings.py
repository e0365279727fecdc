"""What a run was asked to do, as frozen data, and the checks that need no device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fzero as fz
from torch_bridge.run.errors import CommandError
from torch_bridge.run.figures.writers import check_writers
from torch_bridge.run.plan_file import RUN
from torch_bridge.run.tuning_settings import LoraSettings, RowSettings, check_seq


STDLIB = "stdlib"
# Enough sequences that the validation loss is steady to about 1 %, few enough that an evaluation
# stays short.
EVAL_SEQUENCES = 256
SEQ = 128
BATCH = 16
ZERO = 3
HF_PREFIX = "hf:"


@dataclass(frozen=True)
class DataSettings:
    """Which text, cut how. Two runs with equal settings validate on the same sequences."""

    sources: tuple[str, ...]  # ("stdlib",), or absolute paths of text files
    seq: int  # tokens per sequence
    eval_sequences: int = EVAL_SEQUENCES  # validation sequences scored, at most

    def check(self) -> None:
        """Refuses sizes that no text could be cut into."""
        check_seq(self.seq)
        if self.eval_sequences < 1:
            raise CommandError(f"--eval-sequences must be at least 1, got {self.eval_sequences}")

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `DataSettings.from_json` reads back."""
        return asdict(self) | {"sources": list(self.sources)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DataSettings:
        """The inverse of `to_json`."""
        return cls(tuple(data["sources"]), data["seq"], data["eval_sequences"])


@dataclass(frozen=True)
class TrainSettings:
    """One `fzero train` as data: its flags, and what a file said beside them."""

    model: str
    data: DataSettings | RowSettings
    out: Path
    steps: int
    batch: int  # sequences per step, over all devices and microbatches
    lr: float
    devices: int | None
    eval_every: int
    seed: int
    plan_fields: Mapping[str, Any]  # of `fz.Plan`
    overwrite: bool = False
    verify: bool = False
    save_every: int = 0  # steps between checkpoints; 0: only when Ctrl-C ends the run
    resume: bool = False
    optimizer: Mapping[str, Any] | None = None  # an optax function's name and arguments
    schedule: Mapping[str, Any] | None = None
    lora: LoraSettings | None = None
    log: tuple[str, ...] = ()  # further writers of figures

    @property
    def text(self) -> DataSettings:
        """The data of a run on plain text."""
        assert isinstance(self.data, DataSettings)
        return self.data

    @property
    def precision(self) -> str:
        """What the plan computes in."""
        return str(self.plan_fields.get("precision", "fp32"))

    def result(self) -> dict[str, Any]:
        """What the final weights depend on. Another layout of the state only rounds otherwise."""
        names = ("model", "steps", "batch", "lr", "precision", "seed")
        kept = {name: getattr(self, name) for name in names}
        return kept | {
            "clip": self.plan_fields.get("clip_norm"), "seq": self.data.seq, **self._sections()
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The run as a file that `--plan` reads; without its directory."""
        run = {name: getattr(self, name) for name in RUN}
        run["model"] = absolute(self.model)
        return {
            "run": {name: value for name, value in run.items() if value is not None},
            "data": self.data.to_json(),
            "plan": dict(self.plan_fields),
            **self._sections(),
        }

    def _sections(self) -> dict[str, dict[str, Any]]:
        """What a run has only where it was said."""
        lora = None if self.lora is None else self.lora.to_json()
        said = {"lora": lora, "optimizer": self.optimizer, "schedule": self.schedule}
        return {name: dict(values) for name, values in said.items() if values}

    def check(self) -> None:
        """Refuses what cannot work, before anything is loaded.

        Raises:
            CommandError: a flag's value makes no sense.
            PlanError: the plan excludes itself.
        """
        self.data.check()
        check_writers(self.log)
        if self.lora is not None:
            self.lora.check()
        if self.resume and self.overwrite:
            raise CommandError("--resume goes on with what --overwrite would replace: give one")
        for flag, number in (
            ("--steps", self.steps),
            ("--batch", self.batch),
            ("--microbatches", self.plan_fields.get("microbatches", 1)),
        ):
            if number < 1:
                raise CommandError(f"{flag} must be at least 1, got {number}")
        clip = self.plan_fields.get("clip_norm")
        if not all(0 < number < math.inf for number in (self.lr, 1.0 if clip is None else clip)):
            raise CommandError(
                f"--lr and --clip must be positive and finite, got {self.lr} and {clip}"
            )
        self.plan(None)

    def plan(self, num_devices: int | None) -> fz.Plan:
        """The plan of the flags; its data axis takes what other axes leave of the devices.

        Raises:
            CommandError: other axes do not divide the devices.
            PlanError: it excludes itself.
        """
        plan = fz.Plan.from_json(dict(self.plan_fields))
        if num_devices is None or plan.data is not None:
            return plan
        others = math.prod((plan.pipe, plan.replica, *plan.further.values()))
        if num_devices % others:
            raise CommandError(
                f"--devices {num_devices} must be a multiple of {others}, the product of the plan's"
                " other axes"
            )
        return plan.replace(data=num_devices // others)


@dataclass(frozen=True)
class EvalSettings:
    """One `fzero eval` as data."""

    model: str  # as for `fzero train`
    weights: Path | None  # safetensors to load into the module; None: it comes with its weights
    data: DataSettings
    batch: int
    zero: int
    devices: int | None
    precision: str
    fingerprint: str | None  # of the validation sequences of the training run, where known


def absolute(model: str) -> str:
    """`--model` with its path from the root, so that it can be read from anywhere."""
    if model.startswith(HF_PREFIX):
        return f"{HF_PREFIX}{path_of(model.removeprefix(HF_PREFIX))}"
    path, colon, factory = model.rpartition(":")
    return f"{path_of(path)}{colon}{factory}" if path else model


def path_of(text: str) -> Path:
    """A path as typed, from the root."""
    return Path(text).expanduser().absolute()


def check_batch(batch: int, plan: fz.Plan) -> int:
    """Refuses a batch that does not split evenly, with the two nearest sizes that do.

    Returns:
        Sequences that a device sees at once.
    """
    shards = (plan.data or 1) * plan.replica
    unit = shards * plan.microbatches
    if batch < 1 or batch % unit:
        below = batch // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        raise CommandError(
            f"--batch {batch} must be a multiple of {unit} = {shards} devices of the data axis x "
            f"--microbatches {plan.microbatches}: every device takes equally many sequences; "
            f"use --batch {nearest}"
        )
    return batch // unit


def resolve_sources(data: list[str] | None, more: list[str] | None) -> tuple[str, ...]:
    """The sources of `--data A --data B` and of `--data A B`: absolute paths, or ("stdlib",).

    Raises:
        CommandError: stdlib mixed with files, a path that is no file, or one given twice.
    """
    names = [*(data or []), *(more or [])] or [STDLIB]
    if STDLIB in names:
        if len(names) > 1:
            raise CommandError(
                f"--data is either {STDLIB} or paths of text files, got {' '.join(names)}"
            )
        return (STDLIB,)
    paths = [path_of(name) for name in names]
    for path in paths:
        if path.is_dir():
            raise CommandError(f"--data {path} is a directory; give its files, as in {path}/*.txt")
        if not path.is_file():
            raise CommandError(
                f"--data {path}: no such file (for the standard library say --data {STDLIB})"
            )
    if len(set(paths)) < len(paths):
        raise CommandError(
            "--data names a file twice; it could end up in both training and validation"
        )
    return tuple(str(path) for path in paths)
