"""The grid of a schedule as text, with marked cells, for error messages and the terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


Position = tuple[int, int]

# A grid of 4-character cells this wide still fits a 200-column terminal; wider ones are cut.
MAX_COLUMNS = 32
# Numbers of a list that are printed.
_SHOWN = 8


def format_grid(rows: Sequence[Sequence[object]], marks: Collection[Position] = ()) -> str:
    """Prints one line per rank and one column per cell, marked cells as `>2B0<`.

    Args:
        rows: the cells of each rank; `None` prints as a dot.
        marks: (rank, cell) to mark. A cell one past the end of a row marks what is missing there.

    Returns:
        The text. Where it would be wider than `MAX_COLUMNS`, the columns around the first mark.

    Example:
        >>> print(format_grid([["0F0", None, "0B0"], [None, "1F0", "1B0"]], marks=[(1, 2)]))
                   0   1    2
        rank 0:  0F0   .  0B0
        rank 1:    . 1F0 >1B0<
    """
    width = max([len(row) for row in rows] + [cell + 1 for _, cell in marks], default=0)
    first, last = _window(width, marks)
    columns = range(first, last)
    texts = [[_text(rows, rank, cell, marks) for cell in columns] for rank in range(len(rows))]
    sizes = [
        max([len(row[k].rstrip("<")) for row in texts] + [len(str(column))])
        for k, column in enumerate(columns)
    ]
    label = len(f"rank {len(rows) - 1}: ")
    before, after = ("... " if first else ""), (" ..." if last < width else "")
    lines = [
        " " * (label + len(before))
        + "".join(f"{c:>{n + 1}}" for c, n in zip(columns, sizes, strict=True))
    ]
    for rank, row in enumerate(texts):
        cells = ""
        for text, size in zip(row, sizes, strict=True):
            # The closing mark takes the blank that would stand before the next cell.
            gap = "" if cells.endswith("<") else " "
            cells += gap + f"{text.rstrip('<'):>{size}}" + ("<" if text.endswith("<") else "")
        lines.append(f"{f'rank {rank}: ':<{label}}{before}{cells}{after}".rstrip())
    return "\n".join(lines)


def _window(width: int, marks: Collection[Position]) -> tuple[int, int]:
    if width <= MAX_COLUMNS:
        return 0, width
    centre = min((cell for _, cell in marks), default=0)
    first = max(0, min(centre - MAX_COLUMNS // 2, width - MAX_COLUMNS))
    return first, first + MAX_COLUMNS


def _text(
    rows: Sequence[Sequence[object]], rank: int, cell: int, marks: Collection[Position]
) -> str:
    row = rows[rank]
    if cell >= len(row):
        return ">?<" if (rank, cell) in marks else ""
    text = "." if row[cell] is None else str(row[cell])
    return f">{text}<" if (rank, cell) in marks else text


def short(values: Sequence[object]) -> str:
    """A list as text, of a long one the beginning and the number.

    Example:
        >>> short([1, 2]), short(range(100))
        ('[1, 2]', '[0, 1, 2, 3, 4, 5, 6, 7, ... 92 more]')
    """
    first = ", ".join(map(str, values[:_SHOWN]))
    more = len(values) - _SHOWN
    return f"[{first}]" if more <= 0 else f"[{first}, ... {more} more]"
