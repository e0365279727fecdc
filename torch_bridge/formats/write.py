"""`write`: the content of a checkpoint in any format that can be written."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fzero.errors import CheckpointError
from torch_bridge.formats.content import Checkpoint
from torch_bridge.formats.dcp import METADATA, is_dcp
from torch_bridge.formats.dcp_write import write_dcp
from torch_bridge.formats.deepspeed import find_step
from torch_bridge.formats.deepspeed_universal import write_universal
from torch_bridge.formats.lightning import write_lightning
from torch_bridge.formats.peft import CONFIG, is_adapter
from torch_bridge.formats.read import LIGHTNING, PICKLED, SUFFIXES
from torch_bridge.formats.safetensors_files import write_directory, write_file
from torch_bridge.formats.staging import staged_directory, staged_file
from torch_bridge.formats.torch_files import write_plain
from torch_bridge.formats.turns import Turns


FORMATS = ("safetensors", "pt", "lightning", "dcp", "dcp-flat", "universal")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def write(
    content: Checkpoint,
    path: str | os.PathLike[str],
    to: str | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes a checkpoint; what was there is replaced at the end, or not at all.

    Args:
        content: what to write; its tensors are read one after the other.
        path: file or directory.
        to: the format; what the path's suffix says by default, "safetensors" for a directory.
        max_shard_size: bytes of tensors in a file of a safetensors directory.

    Raises:
        CheckpointError: unknown format or suffix, the format cannot hold the content, or the folder
            has a checkpoint of another format, which would be read in its place.

    Example:
        >>> import tempfile, torch, torch_bridge as tb
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(3, 2).state_dict(), folder + "/model.pt")
        ...     write(tb.checkpoint(folder + "/model.pt"), folder + "/model.safetensors")
        ...     tb.checkpoint(folder + "/model.safetensors").format
        'safetensors'
    """
    write_in_turns(content, path, to, max_shard_size, Turns())


def write_in_turns(
    content: Checkpoint,
    path: str | os.PathLike[str],
    to: str | None,
    max_shard_size: int | str,
    turns: Turns,
) -> None:
    """`write`, by all that write: a single file has one writer, the files of a folder several."""
    target = Path(path)
    to = to or format_of(target)
    if to not in FORMATS:
        raise CheckpointError(f"unknown format {to!r}; expected one of {', '.join(FORMATS)}")
    suffix = target.suffix.lower()
    own = {"pt": PICKLED, "lightning": (LIGHTNING,), "safetensors": (".safetensors",)}
    if suffix in SUFFIXES and suffix not in own.get(to, ()):
        raise CheckpointError(
            f"{target.name}: its suffix is not of {to!r}, so that nobody would read it as that:"
            " expected another name, or to= left out"
        )
    size = parse_size(max_shard_size)
    if to == "universal":
        with staged_directory(target, False, turns) as folder:
            write_universal(folder, content, turns)
    elif to in ("dcp", "dcp-flat"):
        with staged_directory(target, False, turns) as folder:
            write_dcp(folder, content, turns, flat=to == "dcp-flat")
    elif to == "safetensors" and suffix != ".safetensors":
        with staged_directory(target, True, turns, _require_read) as folder:
            write_directory(folder, content.tensors, content.ties, size, turns)
    else:
        with turns.turn() as mine:
            if mine:
                _write_file(target, content, to)


def _require_read(folder: Path) -> None:
    """Raises `CheckpointError` where something else would be read in the place of weights."""
    if is_dcp(folder):
        there = f"a checkpoint of torch.distributed.checkpoint ({METADATA})"
    elif (step := find_step(folder)) is not None:
        there = f"a checkpoint of DeepSpeed ({step.name})"
    elif is_adapter(folder):
        there = f"an adapter ({CONFIG})"
    else:
        return
    raise CheckpointError(
        f"{folder}: has {there}, which would be read in the place of these weights: expected"
        " another folder, or this one without it"
    )


def _write_file(target: Path, content: Checkpoint, to: str) -> None:
    with staged_file(target) as temporary:
        if to == "pt":
            write_plain(temporary, content.by_name())
        elif to == "lightning":
            write_lightning(temporary, content)
        else:
            write_file(temporary, content.tensors, content.ties)


def holds_optimizer(to: str) -> bool:
    """Whether a format has a place for Adam's moments."""
    return to not in ("safetensors", "pt")


def format_of(target: Path) -> str:
    """The format that a path's suffix stands for; safetensors for a directory.

    Raises:
        CheckpointError: it stands for none.
    """
    suffix = target.suffix.lower()
    if suffix in PICKLED:
        return "pt"
    if suffix == LIGHTNING:
        return "lightning"
    if suffix in ("", ".safetensors") or target.is_dir():
        return "safetensors"
    raise CheckpointError(
        f"{target.name}: unknown suffix {suffix!r}; expected one of {', '.join(SUFFIXES)}, a"
        " directory, or to=..."
    )


def parse_size(size: int | str) -> int:
    """Bytes from a number or a text such as "5GB" or "200MiB".

    Example:
        >>> parse_size("5GB"), parse_size("1.5KiB"), parse_size(7)
        (5000000000, 1536, 7)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS or match[1].count(".") > 1:
        raise CheckpointError(f"max_shard_size={size!r}: expected bytes, or a text such as '5GB'")
    found = int(float(match[1]) * _UNITS[match[2].upper()])
    if found < 1:
        raise CheckpointError(f"max_shard_size={size!r}: expected at least one byte")
    return found
