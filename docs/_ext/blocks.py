"""Pages of Markdown as pieces: prose, code that runs, what it printed and drew.

A page is plain Markdown, readable where it lies. Comments say what the site adds:

    <!-- given: torch -->               names that the code of this page may use (given.py)
    <!-- not run: why -->               the block that follows is not run
    <!-- picture: bytes.svg | words --> a picture that the code above has written, and what it shows
"""

from __future__ import annotations

import re
from dataclasses import dataclass


_COMMENT = re.compile(r"<!-- (given|not run|picture): (.*?) -->\s*")
_FENCE = re.compile(r"(```+)([^`]*?)\s*")


@dataclass(frozen=True)
class Piece:
    """A piece of a page.

    Args:
        kind: `text`, `python`, `console`, or the first word of a comment.
        body: lines of text or code; what follows the comment's first word.
        line: where it begins in the page, from 1.
    """

    kind: str
    body: str
    line: int = 1

    @property
    def runs(self) -> bool:
        """Whether it is code."""
        return self.kind in ("python", "console")


def pieces(page: str) -> list[Piece]:
    """A page in pieces, in order. Blocks of other languages, and those not run, stay text."""
    found: list[Piece] = []
    text: list[str] = []
    lines = page.splitlines(keepends=True)
    number, left_out = 0, False

    def end_of_text() -> None:
        if text:
            found.append(Piece("text", "".join(text), number - len(text) + 1))
            text.clear()

    while number < len(lines):
        line = lines[number]
        comment, fence = _COMMENT.fullmatch(line), _FENCE.fullmatch(line)
        if comment:
            end_of_text()
            found.append(Piece(comment[1], comment[2], number + 1))
            left_out = comment[1] == "not run"
            number += 1
        elif fence:
            last = next(
                (i for i in range(number + 1, len(lines)) if lines[i].strip() == fence[1]), None
            )
            if last is None:
                raise ValueError(f"line {number + 1}: a block without an end")
            if fence[2] in ("python", "console") and not left_out:
                end_of_text()
                body = "".join(lines[number + 1 : last])
                found.append(Piece(fence[2], body, number + 2))
            else:
                text.extend(lines[number : last + 1])
            number, left_out = last + 1, False
        else:
            text.append(line)
            number += 1
    end_of_text()
    return found


def with_outputs(page: str, outputs: list[str], pictures: str) -> str:
    """The page with what each block printed below it, and pictures where the comments stand.

    Args:
        page: the Markdown.
        outputs: of each piece that runs, what it printed.
        pictures: the folder of the pictures, as a page's links reach it.
    """
    rest, made = iter(outputs), []
    for piece in pieces(page):
        if piece.kind == "text":
            made.append(piece.body)
        elif piece.runs:
            made.append(f"```{piece.kind}\n{piece.body}```\n")
            printed = next(rest).rstrip()
            if printed:
                made.append(f"```{{code-block}} text\n:class: output\n\n{printed}\n```\n")
        elif piece.kind == "picture":
            name, _, words = piece.body.partition("|")
            made.append(f"![{words.strip()}]({pictures}/{name.strip()})\n")
    return "".join(made)
