"""The kinds of actions as people see them: in words, and in colours."""

from __future__ import annotations

import html
import re


WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Okabe and Ito's colours: told apart with every common colour blindness, and in grey.
COLOURS = {"F": "#56B4E9", "B": "#009E73", "I": "#CC79A7", "W": "#E69F00"}
_ACTION = re.compile(r"\b\d+([FBIW])\d+\b")


def coloured(text: str) -> str:
    """The lines of a grid as HTML, for a notebook.

    Args:
        text: what `format_grid` gives.

    Example:
        >>> coloured("rank 0: 0F0")
        '<pre>rank 0: <span style="background:#56B4E9">0F0</span></pre>'
    """

    def mark(found: re.Match[str]) -> str:
        return f'<span style="background:{COLOURS[found[1]]}">{found[0]}</span>'

    return f"<pre>{_ACTION.sub(mark, html.escape(text))}</pre>"
