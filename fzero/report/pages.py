"""HTML pages from templates: each is one file that needs no script, no font and no network."""

from __future__ import annotations

from importlib import resources
from typing import Any

from fzero.errors import FzeroError


def render(template: str, title: str, **values: Any) -> str:
    """A page; every value is escaped.

    Args:
        template: its path below `fzero/`. It extends `report/base.html.jinja`.
        title: what it is about.
        **values: what the template reads.

    Raises:
        FzeroError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise FzeroError(
            "page: expected jinja2 to be installed; pip install 'fzero[report]'"
        ) from error
    files = resources.files("fzero")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(title=title, **values)
