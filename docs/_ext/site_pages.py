"""What the site adds to the Markdown of its pages before Sphinx reads it.

- Tutorials are run, and get what their code printed and drew (blocks.py, run_pages.py).
- `<!-- reference fzero: init train_step -->` becomes what docstrings say of these names.
- `<!-- plan: layout -->` becomes the fields of a group, with what `fz.Plan` says of them.
- `<!-- help: train -->` becomes `fzero train --help`.
- Links to files outside of `docs/` become their paths: the site has pages only.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import drawings
import kept
import plan_fields
from blocks import with_outputs
from run_pages import ROOT, name_of, outputs_of


DOCS = ROOT / "docs"
MADE = DOCS / "_made"
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_REFERENCE = re.compile(r"<!-- reference ([\w.]+): (.*?) -->", re.DOTALL)
_PLAN = re.compile(r"<!-- plan: (\w+) -->")
_HELP = re.compile(r"<!-- help: ([\w-]+) -->")


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls it."""
    app.connect("builder-inited", run_tutorials)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", code_in_docstrings, priority=400)
    return {"parallel_read_safe": True}


def run_tutorials(app: Any) -> None:
    """Runs the tutorials whose outputs are not of these pages and this source."""
    drawings.draw(MADE)
    pages = [page for page in sorted((DOCS / "tutorials").glob("*.md")) if page.stem != "index"]
    old = [page for page in pages if page not in kept.KEPT and outputs_of(page, MADE) is None]
    if not old:
        return
    print("running", ", ".join(page.stem for page in old))
    command = [sys.executable, DOCS / "_ext/run_pages.py", MADE, *old]
    # Threads of XLA for CPUs, by the variable that it reads: eight devices that wait in two gathers
    # at once took all of the eight that it has otherwise, and none was left for the last to arrive.
    env = {"NPROC": "32", **os.environ}
    if subprocess.run(command, cwd=ROOT, env=env).returncode:
        raise RuntimeError("the code of a tutorial failed: see above")


def read(app: Any, docname: str, source: list[str]) -> None:
    """Rewrites one page."""
    page, text = DOCS / f"{docname}.md", source[0]
    if docname.startswith("tutorials/") and page.stem != "index":
        up = "../" * docname.count("/")
        text = with_outputs(text, _outputs(page), f"{up}_made/{name_of(page)}")
    text = re.sub(r"<!-- (?:given|not run): .*? -->\n", "", text)
    text = re.sub(
        r"<!-- drawing: ([\w.-]+) \| (.*?) -->",
        lambda m: f"![{m[2]}]({os.path.relpath(MADE / m[1], page.parent)})", text,
    )  # fmt: skip
    text = _REFERENCE.sub(lambda m: reference(m[1], m[2].split()), text)
    text = _PLAN.sub(lambda m: plan_fields.table(m[1]), text)
    text = _HELP.sub(lambda m: help_of(m[1]), text)
    source[0] = _LINK.sub(lambda m: outside(page, m), text)


def _outputs(page: Path) -> list[str]:
    if page in kept.KEPT:
        return json.loads(kept.outputs_file(page).read_text())["outputs"]
    outputs = outputs_of(page, MADE)
    if outputs is None:
        raise RuntimeError(f"{page}: has not been run")
    return outputs


def reference(module: str, names: list[str]) -> str:
    """Directives of autodoc for public names of a module."""
    lines = ["```{eval-rst}", f".. currentmodule:: {module}", ""]
    for name in names:
        found = getattr(importlib.import_module(module), name)
        if inspect.isclass(found):
            kind = "exception" if issubclass(found, BaseException) else "class"
            lines += [f".. auto{kind}:: {name}", "   :members:", ""]
        elif callable(found):
            lines += [f".. autofunction:: {name}", ""]
        else:
            lines += [f".. autodata:: {name}", ""]
    return "\n".join([*lines, "```"])


def help_of(command: str) -> str:
    """What `fzero COMMAND --help` prints."""
    from typer.testing import CliRunner

    from fzero.cli import app

    env = {"COLUMNS": "92", "TERMINAL_WIDTH": "92", "NO_COLOR": "1", "TERM": "dumb"}
    ran = CliRunner().invoke(app, [command, "--help"], env=env, prog_name="fzero")
    if ran.exit_code:
        raise RuntimeError(f"fzero {command} --help: {ran.output}")
    return f"```text\n{ran.stdout.strip()}\n```"


def code_in_docstrings(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings write `code` as Markdown does, also within words: `Layer`s."""
    lines[:] = _CODE.sub(r"\\ ``\1``\\ ", "\n".join(lines)).split("\n")


def outside(page: Path, link: re.Match[str]) -> str:
    """A link to a file that is no page, as words and the file's path."""
    target = (page.parent / link[2]).resolve()
    if target.is_relative_to(DOCS):
        return link[0]
    path = target.relative_to(ROOT).as_posix()
    words = link[1].strip("`")
    return f"`{path}`" if words in (path, target.name) else f"{link[1]} (`{path}`)"
