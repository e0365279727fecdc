"""Records of JSONL files and of Hugging Face `datasets` on disk, each with where it is from."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fzero.errors import BatchError


# What a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote has in it.
_SAVED = ("state.json", "dataset_dict.json")
KINDS = ("messages", "prompt", "text")


@dataclass(frozen=True)
class Record:
    """One example as it was written.

    Attributes:
        values: its fields.
        where: `FILE:LINE`, or `FOLDER, row N`.
    """

    values: Mapping[str, Any]
    where: str


def read_records(sources: Iterable[str | Path]) -> Iterator[Record]:
    """The records of files and folders, in their order.

    Args:
        sources: JSONL files (empty lines count as nothing), and folders of `datasets`.

    Raises:
        BatchError: no such file, no JSON, no object, or an object with none of the fields that make
            an example; names the line.
    """
    for source in map(Path, sources):
        if source.is_dir():
            yield from _of_dataset(source)
        else:
            yield from _of_file(source)


def kind_of(record: Record) -> str:
    """Which of `KINDS` a record is.

    Raises:
        BatchError: none, or two at once.
    """
    found = [kind for kind in KINDS if record.values.get(kind) is not None]
    if len(found) != 1:
        has = sorted(key for key, value in record.values.items() if value is not None)
        raise BatchError(
            f'{record.where}: expected one of "messages", "prompt" with "completion", or "text",'
            f" got {'the fields ' + ', '.join(has) if has else 'no field'}"
        )
    return found[0]


def _of_file(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield Record(_object(line, f"{path}:{number}"), f"{path}:{number}")
    except OSError as error:
        raise BatchError(f"{path}: cannot be read ({error.strerror}); expected JSONL") from error


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line.decode("utf-8"))
        if rb"\ud" in line.lower():
            # Half of a pair of escapes is no character, and no text of UTF-8.
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise BatchError(f"{where}: expected one JSON object on this line: {error}") from error
    if not isinstance(found, dict):
        raise BatchError(f"{where}: expected a JSON object, got {type(found).__name__}")
    return found


def _of_dataset(folder: Path) -> Iterator[Record]:
    if not any((folder / name).is_file() for name in _SAVED):
        raise BatchError(
            f"{folder}: expected JSONL files, or a folder that datasets' save_to_disk wrote (it"
            " would have a state.json); got another folder"
        )
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise BatchError(
            f"{folder}: reading it takes the package datasets: pip install datasets"
        ) from error
    try:
        rows: Any = load_from_disk(str(folder))
    except Exception as error:  # of arrow, json, or the file system
        raise BatchError(f"{folder}: datasets cannot load it, is it whole? {error}") from error
    if not hasattr(rows, "features"):
        raise BatchError(
            f"{folder}: it has several splits, {sorted(rows)}: expected one; name its folder, as"
            f" {folder / sorted(rows)[0]}"
        )
    for number, values in enumerate(rows):
        yield Record(_without_nulls(values), f"{folder}, row {number}")


def _without_nulls(value: Any) -> Any:
    """Tables give every row every field, at any depth: what is null there was not in it."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(own) for name, own in value.items() if own is not None}
    if isinstance(value, list):
        return [_without_nulls(own) for own in value]
    return value
