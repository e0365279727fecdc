"""Schedules as CSV that PyTorch reads and writes, and as JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import TextIO

from fzero.errors import ScheduleError
from fzero.pipeline.actions import Action, Cell, Schedule


Source = str | PathLike[str] | TextIO

JSON_FORMAT = "fzero.schedule/1"

# What torch.distributed.pipelining writes for a forward and a backward that run side by side.
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
# Its lowered format; such a file was dumped with format="compute_comms".
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")


def to_csv(schedule: Schedule, path: str | PathLike[str] | None) -> str:
    """See `Schedule.to_csv`."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    for row in schedule.ranks:
        writer.writerow(["" if action is None else str(action) for action in row])
    return _write(buffer.getvalue(), path)


def from_csv(source: Source) -> Schedule:
    """See `Schedule.from_csv`."""
    with _opened(source) as (file, name):
        try:
            rows = list(csv.reader(file))
        except csv.Error as error:
            raise ScheduleError(f"{name}: not a CSV file: {error}") from error
    if not rows:
        raise ScheduleError(f"{name}: expected a row of actions per rank, got an empty file")
    return Schedule(
        [
            action
            for index, cell in enumerate(row)
            for action in _parse_cell(cell, _where(name, rank, index))
        ]
        for rank, row in enumerate(rows)
    )


def to_json(schedule: Schedule, path: str | PathLike[str] | None) -> str:
    """See `Schedule.to_json`."""
    ranks = [[None if a is None else str(a) for a in row] for row in schedule.ranks]
    return _write(json.dumps({"format": JSON_FORMAT, "ranks": ranks}), path)


def from_json(source: Source) -> Schedule:
    """See `Schedule.from_json`."""
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
    return Schedule(
        [_parse_json_cell(cell, _where(name, rank, index)) for index, cell in enumerate(row)]
        for rank, row in enumerate(ranks)
    )


def _parse_json_cell(cell: object, where: str) -> Cell:
    if cell is None:
        return None
    if not isinstance(cell, str):
        raise ScheduleError(f"{where}: expected a string or null, got {cell!r}")
    return _parse_action(cell, where)


def _parse_cell(cell: str, where: str) -> list[Cell]:
    text = cell.strip()
    if not text:
        return [None]
    overlap = _OVERLAP.fullmatch(text)
    if overlap is not None:
        return [_parse_action(part, where) for part in overlap.group(1).split(";")]
    if _COMMUNICATION.fullmatch(text):
        raise ScheduleError(
            f"{where}: expected a compute action, got the communication action {text!r}; dump the "
            f'file with format="compute_only": fzero derives communication from the order'
        )
    return [_parse_action(text, where)]


def _parse_action(text: str, where: str) -> Action:
    try:
        return Action.parse(text)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


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
