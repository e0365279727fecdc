"""Code on the pages of the site runs, and the reference has every public name."""

import re
import sys
from pathlib import Path

import pytest

import fzero
import fzero.pipeline
import fzero_command
import torch_bridge


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "_ext"))

import given  # noqa: E402
import plan_fields  # noqa: E402
from blocks import pieces, with_outputs  # noqa: E402
from run_pages import run_piece  # noqa: E402


PAGES = [
    page for page in sorted(DOCS.rglob("*.md"))
    if not page.relative_to(DOCS).parts[0].startswith("_") and "tutorials" not in page.parts
]  # fmt: skip
WITH_CODE = [page for page in PAGES if any(piece.runs for piece in pieces(page.read_text()))]
SITE = [*PAGES, *sorted((DOCS / "tutorials").glob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.mark.nightly
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for piece in pieces(page.read_text()):
        if piece.kind == "given":
            names |= given.names(piece.body)
        elif piece.runs:
            run_piece(piece, page, names)


@pytest.mark.parametrize("page", SITE, ids=name_of)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert not [x for x in links if "://" not in x and not (page.parent / x).exists()]


@pytest.mark.parametrize("page", SITE, ids=name_of)
def test_pictures_have_words(page):
    text = page.read_text()
    assert not re.findall(r"!\[\s*\]\(", text)
    for words in re.findall(r"<!-- (?:picture|drawing): [\w.-]+(.*?)-->", text):
        assert len(words.strip(" |")) > 10


def test_reference_has_every_public_name_once():
    told = [
        (module, name)
        for page in (DOCS / "reference").glob("*.md")
        for module, names in re.findall(
            r"<!-- reference ([\w.]+): (.*?) -->", page.read_text(), re.S
        )
        for name in names.split()
    ]
    plan = {("fzero", "Plan"), ("fzero", "LossScaling"), ("fzero.pipeline", "BUILDERS")}
    public = {
        (module.__name__, name)
        for module, names in (
            (fzero, [n for n in dir(fzero) if not n.startswith("_")]),
            (fzero.pipeline, fzero.pipeline.__all__),
            (torch_bridge, torch_bridge.__all__),
        )
        for name in names
        if not isinstance(getattr(module, name), type(sys))
    }
    assert len(told) == len(set(told))
    assert set(told) == public - plan


def test_reference_has_every_command():
    page = (DOCS / "reference/commands.md").read_text()
    assert sorted(re.findall("<!-- help: (.*?) -->", page)) == sorted(fzero_command.commands())


def test_every_field_of_a_plan_is_in_a_group_and_explained():
    text = "".join(plan_fields.table(group) for group in plan_fields.GROUPS)
    shown = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert sorted(shown) == sorted(set(shown))
    assert set(shown) == set(fzero.Plan.__dataclass_fields__)
    assert "None" not in plan_fields.descriptions().values()


def test_what_a_page_prints_stands_below_its_code():
    page = "# A\n\n```python\nprint(1)\n```\n\ntext\n\n<!-- picture: a.svg | a line -->\n"
    made = with_outputs(page, ["1\n"], "../made")
    assert "print(1)\n```\n```{code-block} text\n:class: output\n\n1\n```\n" in made
    assert "![a line](../made/a.svg)" in made
    left_out = "<!-- not run: shown only -->\n```python\nraise\n```\n"
    assert not any(piece.runs for piece in pieces(left_out))
    with pytest.raises(ValueError, match="line 1: a block without an end"):
        pieces("```python\n1\n")


def test_files_that_a_page_names_exist():
    """A page says `zero/chain.py`, from the repository or from a package in it."""
    named = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`")
    homes = [ROOT, ROOT / "fzero", ROOT / "torch_bridge"]
    found = {(name_of(page), name) for page in SITE for name in named.findall(page.read_text())}
    assert len(found) > 20
    assert not [(page, name) for page, name in found
                if not any((home / name).is_file() for home in homes)]  # fmt: skip
