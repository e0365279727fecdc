"""A pipeline schedule as an immutable value: which rank does what, in which order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Literal, NamedTuple, get_args

from fzero.errors import ScheduleError
from fzero.schedule.grid import format_grid
from fzero.schedule.kinds import coloured
from fzero.schedule.serialize import Source, Text, read_csv, read_json, write_csv, write_json


Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
# Ranks that are printed: with the heading, a screen.
_MOST_RANKS = 40


class Action(NamedTuple):
    """One computation of one stage on one microbatch.

    Kinds: `F` forward, `B` whole backward, `I` gradient of the stage's input, `W` gradient of its
    weights. `B` does what `I` and then `W` do.

    Example:
        >>> Action("B", stage=2, microbatch=0)
        2B0
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads PyTorch's spelling of an action, stage first.

        Args:
            text: for example `2B0`.

        Returns:
            The action.

        Raises:
            ScheduleError: the text is not a compute action.

        Example:
            >>> Action.parse("1W4").kind
            'W'
        """
        match = _CELL.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"expected stage, kind and microbatch, like 0F3, 2B0, 1I4 or 1W4, got {text!r}"
            )
        stage, kind, microbatch = match.groups()
        return cls(kind, int(stage), int(microbatch))  # type: ignore[arg-type]


Cell = Action | None
Rows = tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, repr=False)
class Schedule:
    """For each rank the ordered actions; `None` is an idle cell of the compute grid.

    A schedule is data: two are equal when their grids are equal, and making one proves nothing.
    `fzero.schedule.check` proves it, and it is what refuses an illegal one.

    Args:
        ranks: one row of cells per rank. Rows may differ in length.

    Raises:
        ScheduleError: a cell is not an `Action` with a known kind and natural numbers.

    Example:
        >>> one = Schedule([[Action("F", 0, 0), None, Action("B", 0, 0)]])
        >>> one.num_ranks, one.num_stages, one.num_microbatches
        (1, 1, 1)
        >>> one.rank_actions(0)
        (0F0, 0B0)
    """

    ranks: Rows

    def __init__(self, ranks: Iterable[Iterable[Cell]]) -> None:
        rows = tuple(tuple(row) for row in ranks)
        for rank, row in enumerate(rows):
            for cell, action in enumerate(row):
                _require_action(action, rank, cell)
        object.__setattr__(self, "ranks", rows)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, one row of the grid each."""
        return len(self.ranks)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, rank after rank, without idle cells."""
        return tuple(a for row in self.ranks for a in row if a is not None)

    @cached_property
    def num_stages(self) -> int:
        """One more than the highest stage that occurs."""
        return max((a.stage for a in self.actions), default=-1) + 1

    @cached_property
    def num_microbatches(self) -> int:
        """One more than the highest microbatch that occurs."""
        return max((a.microbatch for a in self.actions), default=-1) + 1

    @cached_property
    def stage_to_rank(self) -> dict[int, int]:
        """The rank of each stage; where a faulty schedule splits a stage, the first rank."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.ranks):
            for action in row:
                if action is not None:
                    found.setdefault(action.stage, rank)
        return dict(sorted(found.items()))

    @property
    def num_chunks(self) -> int:
        """The largest number of stages that one rank holds."""
        held = list(self.stage_to_rank.values())
        return max((held.count(rank) for rank in set(held)), default=0)

    def rank_actions(self, rank: int) -> tuple[Action, ...]:
        """The actions of one rank in order, without idle cells.

        Args:
            rank: from 0 to `num_ranks - 1`.

        Returns:
            The actions in the order in which the rank runs them.
        """
        return tuple(a for a in self.ranks[rank] if a is not None)

    def compact(self) -> Schedule:
        """The same orders with every idle cell taken out."""
        return Schedule(self.rank_actions(rank) for rank in range(self.num_ranks))

    def first_microbatches(self, count: int) -> Schedule:
        """The same orders with every microbatch from `count` on taken out.

        No dependency crosses microbatches, so what is left of a legal schedule is legal.

        Args:
            count: number of microbatches to keep.

        Returns:
            The smaller schedule, without idle cells.
        """
        return Schedule(
            [a for a in self.rank_actions(rank) if a.microbatch < count]
            for rank in range(self.num_ranks)
        )

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """Writes PyTorch's compute-only CSV: a row per rank, an empty cell for idle.

        Args:
            path: file to write; `None` writes none.

        Returns:
            The text, with the line ends that `csv.writer` and so PyTorch write.

        Example:
            >>> Schedule([[Action("F", 0, 0), None, Action("B", 0, 0)]]).to_csv()
            '0F0,,0B0\\r\\n'
        """
        return write_csv(self._texts(), path)

    @classmethod
    def from_csv(cls, source: Source) -> Schedule:
        """Reads PyTorch's compute-only CSV, whoever wrote it.

        Args:
            source: a path or an open text file.

        Returns:
            The schedule. PyTorch's overlapped pairs, `(0F3;3B1)OVERLAP_F_B`, become two adjacent
            cells in their order, which is how PyTorch itself runs them.

        Raises:
            ScheduleError: a cell is not a compute action; names file, row and cell.
        """
        return cls(map(_parse_row, read_csv(source)))

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Writes the grid as JSON.

        Args:
            path: file to write; `None` writes none.

        Returns:
            The text: an object with `format` and `ranks`, cells as in the CSV, `null` for idle.
        """
        return write_json(self._texts(), path)

    @classmethod
    def from_json(cls, source: Source) -> Schedule:
        """Reads what `to_json` wrote.

        Args:
            source: a path or an open text file.

        Returns:
            A schedule equal to the one written.

        Raises:
            ScheduleError: not such a file; names file, row and cell.
        """
        return cls(map(_parse_row, read_json(source)))

    def _texts(self) -> list[list[str]]:
        return [["" if action is None else str(action) for action in row] for row in self.ranks]

    def __repr__(self) -> str:
        return (
            f"Schedule(num_ranks={self.num_ranks}, num_stages={self.num_stages}, "
            f"num_microbatches={self.num_microbatches})"
        )

    def __str__(self) -> str:
        text = format_grid(self.ranks[:_MOST_RANKS])
        more = self.num_ranks - _MOST_RANKS
        return text if more <= 0 else f"{text}\n... {more} more ranks"

    def _repr_html_(self) -> str:
        return coloured(str(self))


def _parse_row(row: Iterable[Text]) -> list[Cell]:
    return [_parse_cell(text, where) for text, where in row]


def _parse_cell(text: str, where: str) -> Cell:
    try:
        return Action.parse(text) if text else None
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


def natural(name: str, value: int, least: int = 1) -> int:
    """Returns `value` when it is a whole number of at least `least`.

    Args:
        name: what the number counts, for the message.
        value: the number.
        least: the smallest allowed number.

    Returns:
        The number.

    Raises:
        ScheduleError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ScheduleError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return value


def _require_action(action: object, rank: int, cell: int) -> None:
    if action is None:
        return
    where = f"schedule, rank {rank}, cell {cell}"
    if not isinstance(action, Action):
        raise ScheduleError(
            f"{where}: expected an Action or None, got {action!r}; write Action('F', stage, "
            f"microbatch), or Action.parse('0F0') for text"
        )
    if action.kind not in KINDS:
        raise ScheduleError(
            f"{where}: expected one of the kinds {', '.join(KINDS)}, got {action.kind!r}"
        )
    for name, value in (("stage", action.stage), ("microbatch", action.microbatch)):
        natural(f"{where}, {name}", value, least=0)


def rows_of(cells: Sequence[Sequence[str]]) -> Schedule:
    """A schedule from text cells, for tests and examples.

    Args:
        cells: one sequence of cells per rank, an empty string for idle.

    Returns:
        The schedule.

    Example:
        >>> rows_of([["0F0", "", "0B0"]]).ranks
        ((0F0, None, 0B0),)
    """
    return Schedule([Action.parse(cell) if cell else None for cell in row] for row in cells)
