"""Every measured figure on a page is one that a command wrote into a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sources import GIVEN, RESULTS, SAID, pages, read

from benchmarks import divided, divided_models, gathered_lazily, published
from benchmarks import pages as large
from benchmarks.on_gpu import table as gpu_table
from tests.multiprocess import kills


ROOT = Path(__file__).parents[2]
# These pages are written whole by commands that `make nightly` runs again; a guarantee's figure is
# the bound of the test in its row.
WRITTEN = ("operators.md", "architectures.md", "guarantees.md", "_build", "_made")
PAGES = [
    "README.md",
    "benchmarks/README.md",
    *(
        page.relative_to(ROOT).as_posix()
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if not set(page.relative_to(ROOT).parts) & set(WRITTEN)
    ),
]
MADE: dict[str, tuple[str, Callable[[], str]]] = {
    "make published": ("docs/published.md", lambda: published.table(read("published"))),
    "tests/multiprocess/kills.py": (
        "docs/hosts.md", lambda: kills.table([
            json.loads(line) for line in (RESULTS / "kills.jsonl").read_text().splitlines()
        ]),
    ),
    "benchmarks.gathered_lazily": (
        "docs/preflight.md", lambda: gathered_lazily.table(read("gathered_lazily")),
    ),
    "benchmarks.divided_models": (
        "docs/axes.md", lambda: divided_models.table(read("divided_models")),
    ),
    **{
        f"benchmarks.on_gpu.table: {name}": ("docs/gpu.md", lambda make=make: make(read("gpu")))
        for name, make in (("figures", gpu_table.figures), ("checks", gpu_table.checks))
    },
    **{
        f"benchmarks.divided: {name}": ("docs/axes.md", lambda rows=rows: divided.table(rows))
        for name, rows in read("divided").items()
    },
    **{
        f"benchmarks.pages: {name}": (page, lambda make=make: make(pages))
        for name, (page, make) in large.PARTS.items()
    },
}  # fmt: skip

UNIT = r"(?:%|ms|us|s|(?:milli|micro)?seconds?|minutes?|hours?|[KMGT]i?B|[KMGT]?(?:B|bit|FLOP)/s)"
# A number with a unit, a decimal, a power of ten.
FIGURE = re.compile(
    rf"(?<![\w.\-=])\d[\d,]*(?:\.\d+)?(?:e-?\d+)? ?(?:{UNIT}(?!\w)|tokens/s|times(?!\w))"
    r"|(?<![\w.\-=])\d+\.\d+(?:e-?\d+)?(?![\w.]*\w)|(?<![\w.])\d+e-\d+"
)


def words(text: str) -> str:
    return " ".join(text.split())


def prose(page: str) -> str:
    """A page without code that runs, parts that are made, comments, `code` and links' targets."""
    text = (ROOT / page).read_text()
    text = re.sub(r"^```(?:python|toml|console).*?^```", "", text, flags=re.S | re.M)
    text = re.sub(r"<!-- made by .*?<!-- end -->|^```.*?$", "", text, flags=re.S | re.M)
    return words(re.sub(r"<!--.*?-->", "", text, flags=re.S))


@pytest.mark.parametrize("name", MADE)
def test_tables_are_those_of_their_files(name):
    page, make = MADE[name]
    _, begin, rest = (ROOT / page).read_text().partition(f"<!-- made by {name} -->\n")
    assert begin, f"{page} has no part made by {name}"
    assert rest.partition("\n<!-- end -->")[0] == make(), f"{page} is older than its file"


@pytest.mark.parametrize("page", sorted({page for page, *_ in SAID}))
def test_sentences_say_what_their_files_say(page):
    told = prose(page)
    expected = [words(text.format(*figures)) for own, text, *figures in SAID if own == page]
    assert not [text for text in expected if text not in told], f"not on {page}"


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_source(page):
    told = prose(page)
    known = [text.format(*figures) for own, text, *figures in SAID if own == page]
    for text in (*known, *GIVEN.get(page, ())):
        assert words(text) in told, f"{page} does not say: {text}"
        told = told.replace(words(text), "")
    told = re.sub(r"\]\([^)]*\)|`[^`]*`", "", told)
    found = [told[max(0, m.start() - 40) : m.end() + 20] for m in FIGURE.finditer(told)]
    assert not found, (
        f"{page}: figures without a source. Let a command write them to benchmarks/results and say"
        " them in SAID of tests/docs/sources.py; or, where nothing was measured, add them to GIVEN."
    )


def test_no_figure_is_known_of_a_page_that_is_not_there():
    assert {*GIVEN, *(page for page, *_ in SAID)} <= set(PAGES)
