"""The directory that a run leaves: each file is written aside, then renamed into place."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fzero.runs.files import METRICS as METRICS
from fzero.runs.files import RUN as RUN
from fzero.runs.files import SUMMARY as SUMMARY
from fzero.runs.files import TIMELINE as TIMELINE
from fzero.runs.files import TIMINGS as TIMINGS
from torch_bridge.formats.staging import sync
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import DataSettings


WEIGHTS = "model.safetensors"
# How the run cut its text and laid out its state: the defaults of `fzero eval`.
RECORD = "fzero.json"
# What is read of a model's directory, as patterns.
OF_A_MODEL = (
    "config.json", "generation_config.json", RECORD, "adapter_*", "model*.safetensors",
    "pytorch_model*.bin", "*.index.json", "tokenizer*", "vocab.*", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.*",
)  # fmt: skip
_CONFIGS = ("config.json", "adapter_config.json")
PLOT = "loss.png"
# A path keeps one of a URL's two slashes.
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/")
PACKAGES = ("fzero", "jax", "jaxlib", "numpy", "optax", "torch", "transformers", "safetensors")


@dataclass(frozen=True)
class RunRecord:
    """What `fzero eval` has to know about the run that wrote a directory."""

    factory: str | None  # FILE.py:FUNCTION; None: the directory itself is a transformers one
    data: DataSettings
    batch: int  # sequences per evaluation step
    zero: int
    devices: int
    precision: str
    fingerprint: str  # of the validation sequences

    def to_json(self) -> dict[str, Any]:
        """A dictionary that `RunRecord.read` understands."""
        return vars(self) | {"data": self.data.to_json()}

    @classmethod
    def read(cls, directory: Path) -> RunRecord | None:
        """The record in `directory`; None where `fzero train` wrote none.

        Raises:
            CommandError: it is damaged.
        """
        path = directory / RECORD
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(**values | {"data": DataSettings.from_json(values["data"])})
        except (ValueError, TypeError, KeyError) as error:  # no JSON, other keys, a missing one
            raise CommandError(
                f"{path} is no record of `fzero train` ({type(error).__name__}: {error}): restore"
                f" it, or remove it and say --data and --seq"
            ) from error


def check(directory: Path, overwrite: bool) -> None:
    """Refuses a URL, a file, and a directory with something in it but with `overwrite`.

    What an older run left there goes away only when this run replaces it: a run that fails early
    keeps it.
    """
    refuse_url(directory)
    if directory.is_file():
        raise CommandError(f"--out {directory} is a file; give a directory")
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise CommandError(
            f"--out {directory}: expected a place that can be written, but {there} is"
            f" {'read-only' if there.is_dir() else 'a file'}; give another directory"
        )
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise CommandError(
            f"--out {directory} is not empty; give another directory, or --overwrite to replace "
            "what an earlier run left there"
        )


def make(directory: Path) -> None:
    """Makes the directory of a run.

    Raises:
        CommandError: the file system does not let it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"--out {directory}: cannot be made ({error.strerror}); give another directory"
        ) from error


def refuse_url(directory: Path) -> None:
    """Refuses a run that would be kept, or go on, in an object store: as a path it is another."""
    if remote := _REMOTE.match(str(directory)):
        raise CommandError(
            f"--out {directory}: expected a directory of this machine, got a URL ({remote[1]}://);"
            " train into a directory and copy it there, or copy it here to --resume it"
        )


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A scratch directory; what it holds in the end moves into `directory`, entry by entry.

    Raises:
        CommandError: there is no room, or no right to write.
    """
    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".writing-", dir=directory))
        yield scratch
        for path in scratch.rglob("*"):
            sync(path)
        # Nothing loads a model without its config: it comes last.
        for path in sorted(scratch.iterdir(), key=lambda one: (one.name in _CONFIGS, one.name)):
            target = directory / path.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)  # no rename replaces a folder that holds something
            path.replace(target)
        sync(directory)
    except OSError as error:
        raise CommandError(
            f"--out {directory}: cannot be written ({error}). If it has checkpoints (--save-every),"
            " make room and run the same command with --resume"
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def model_staged(directory: Path) -> Iterator[Path]:
    """As `staged`, for a model: what an older one left in `directory` goes away.

    transformers and `fzero eval` would take it for this model's: an adapter beside whole weights,
    another tokenizer.
    """
    with staged(directory) as scratch:
        yield scratch
        # Before the new one moves in: a kill in between leaves too little, not two models.
        written = {path.name for path in scratch.iterdir()}
        for path in directory.iterdir():
            left = path.name not in written and any(path.match(one) for one in OF_A_MODEL)
            if (left or path.name in _CONFIGS) and path.is_file():
                path.unlink()


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes one JSON file whole."""
    with staged(path.parent) as scratch:
        (scratch / path.name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """The versions a result depends on."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
