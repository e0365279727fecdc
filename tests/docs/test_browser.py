"""The site in a real browser: pages load, at two widths, light and dark, and search finds."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS = {"desk": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def built() -> Path:
    """The site, as `make docs` builds it: with no warning. What was built before is not again."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    out = ROOT / "docs/_build"
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "docs",
        out,
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(built: Path) -> Iterator[object]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as play:
        # No sandbox: the tests of a container run as root.
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def pages_of(built: Path) -> list[str]:
    found = [page.relative_to(built).as_posix() for page in sorted(built.rglob("*.html"))]
    return [page for page in found if not page.startswith("_")]


def watched(context, address):
    """A page that notes errors of the console, failed loads and requests to other hosts."""
    page, wrong = context.new_page(), []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("response", lambda r: wrong.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    page.on(
        "request", lambda r: None if r.url.startswith((address, "data:")) else wrong.append(r.url)
    )
    return page, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_loads(browser, built, address, width, scheme):
    context = browser.new_context(viewport=WIDTHS[width], color_scheme=scheme)
    page, wrong = watched(context, address)
    names, found = pages_of(built), []
    assert len(names) > 40
    for name in names:
        page.goto(address + name)
        found += [f"{name}: {what}" for what in wrong]
        wrong.clear()
        if page.evaluate("document.documentElement.scrollWidth") > WIDTHS[width]["width"]:
            found.append(f"{name}: wider than the window")
        lost = page.evaluate(
            "[...document.querySelectorAll('article img')]"
            ".filter(i => !i.alt.trim() || !i.complete || !i.naturalWidth).map(i => i.src)"
        )
        found += [f"{name}: picture without words, or lost: {src}" for src in lost]
        if (
            not page.evaluate("document.querySelector('h1')?.innerText.trim()")
            and name != "search.html"
        ):
            found.append(f"{name}: no heading")
    context.close()
    assert not found, "\n".join(found)


def test_dark_is_dark(browser, address):
    brightness = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(address + "index.html")
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness[scheme] = sum(int(part) for part in colour[4:-1].split(",")[:3])
        context.close()
    assert brightness["light"] > 600
    assert brightness["dark"] < 150


def test_each_group_of_a_plans_fields_has_its_picture(browser, address):
    context = browser.new_context()
    page = context.new_page()
    page.goto(address + "reference/plan.html")
    shown = page.eval_on_selector_all("article img", "all => all.map(i => i.naturalWidth)")
    context.close()
    assert len(shown) == 5
    assert all(shown)


@pytest.mark.parametrize(
    ("words", "page"),
    [("offload", "offload.html"), ("ds_config", "coming_from/deepspeed.html"),
     ("zb_h1", "tutorials/pipeline.html"), ("check_finite", "howto/nans.html")],
)  # fmt: skip
def test_search_finds(browser, address, words, page):
    context = browser.new_context()
    tab, wrong = watched(context, address)
    tab.goto(f"{address}search.html?q={words}")
    tab.wait_for_selector(".search li a")
    links = tab.eval_on_selector_all(".search li a", "all => all.map(a => a.href)")
    context.close()
    assert any(page in link for link in links), links
    assert not wrong


def test_a_tutorial_shows_what_its_code_printed_and_drew(browser, address):
    context = browser.new_context()
    page = context.new_page()
    page.goto(address + "tutorials/zero.html")
    printed = page.eval_on_selector_all(".output", "all => all.map(e => e.innerText)")
    assert any("the same, bit for bit" in text for text in printed)
    assert page.evaluate("document.querySelectorAll('article img').length") >= 1
    context.close()
