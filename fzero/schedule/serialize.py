"""Grids of text cells as CSV that PyTorch reads and writes, and as JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import NamedTuple, TextIO

from fzero.errors import ScheduleError


Source = str | PathLike[str] | TextIO

JSON_FORMAT = "fzero.schedule/1"

# What torch.distributed.pipelining writes for a forward and a backward that run side by side.
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# Its lowered format; such a file was dumped with format="compute_comms".
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")


class Text(NamedTuple):
    """A cell as text.

    Attributes:
        text: the action's text, empty for idle.
        where: file, row and cell, for messages.
    """

    text: str
    where: str


def write_csv(rows: Sequence[Sequence[str]], path: str | PathLike[str] | None) -> str:
    """Writes text cells as CSV.

    Args:
        rows: the cells of each rank, empty for idle.
        path: file to write; `None` writes none.

    Returns:
        The text.
    """
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows(rows)
    return _write(buffer.getvalue(), path)


def read_csv(source: Source) -> list[list[Text]]:
    """Reads text cells from CSV; PyTorch's overlapped pairs become two cells.

    Args:
        source: a path or an open text file.

    Returns:
        The cells of each rank.

    Raises:
        ScheduleError: the file cannot be read, or holds communication actions.
    """
    with _opened(source) as (file, name):
        try:
            rows = list(csv.reader(file))
        except csv.Error as error:
            raise ScheduleError(f"{name}: not a CSV file: {error}") from error
    if not rows:
        raise ScheduleError(f"{name}: expected a row of actions per rank, got an empty file")
    return [
        [text for index, cell in enumerate(row) for text in _split(cell, _where(name, rank, index))]
        for rank, row in enumerate(rows)
    ]


def write_json(rows: Sequence[Sequence[str]], path: str | PathLike[str] | None) -> str:
    """Writes text cells as JSON.

    Args:
        rows: the cells of each rank, empty for idle.
        path: file to write; `None` writes none.

    Returns:
        The text.
    """
    ranks = [[cell or None for cell in row] for row in rows]
    return _write(json.dumps({"format": JSON_FORMAT, "ranks": ranks}), path)


def read_json(source: Source) -> list[list[Text]]:
    """Reads text cells from JSON.

    Args:
        source: a path or an open text file.

    Returns:
        The cells of each rank.

    Raises:
        ScheduleError: the file cannot be read, or is not what `write_json` writes.
    """
    with _opened(source) as (file, name):
        try:
            data = json.load(file)
        except json.JSONDecodeError as error:
            raise ScheduleError(f"{name}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != JSON_FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ScheduleError(
            f"{name}: expected an object with format {JSON_FORMAT!r}, got {got!r}; write the file "
            f"with Schedule.to_json"
        )
    ranks = data.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(row, list) for row in ranks):
        raise ScheduleError(f"{name}: expected `ranks` to be a list of lists of cells")
    return [
        [_json_cell(cell, _where(name, rank, index)) for index, cell in enumerate(row)]
        for rank, row in enumerate(ranks)
    ]


def _json_cell(cell: object, where: str) -> Text:
    if cell is not None and not isinstance(cell, str):
        raise ScheduleError(f"{where}: expected a string or null, got {cell!r}")
    return Text(cell or "", where)


def _split(cell: str, where: str) -> list[Text]:
    text = cell.strip()
    overlap = _OVERLAP.fullmatch(text)
    if overlap is not None:
        return [Text(one.strip(), where) for one in overlap.group(1).split(";")]
    if _COMMUNICATION.fullmatch(text):
        raise ScheduleError(
            f"{where}: expected a compute action, got the communication action {text!r}; dump the "
            f'file with format="compute_only": fzero derives communication from the order'
        )
    return [Text(text, where)]


def _where(name: str, rank: int, cell: int) -> str:
    return f"{name}, row {rank + 1} (rank {rank}), cell {cell + 1}"


def _write(text: str, path: str | PathLike[str] | None) -> str:
    if path is not None:
        with open(path, "w", newline="", encoding="utf-8") as file:
            file.write(text)
    return text


@contextmanager
def _opened(source: Source) -> Iterator[tuple[TextIO, str]]:
    if isinstance(source, (str, PathLike)):
        path = Path(fspath(source))
        try:
            with path.open(newline="", encoding="utf-8") as file:
                yield file, str(path)
        except OSError as error:
            raise ScheduleError(
                f"{path}: cannot read a schedule from here: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise ScheduleError(f"{path}: not a text file: {error}") from error
    else:
        yield source, str(getattr(source, "name", "<text>"))
