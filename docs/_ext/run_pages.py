"""Runs the code of pages: `python docs/_ext/run_pages.py OUT PAGE...`.

Each page gets a process of its own, forked from one that has imported what pages import, and a
folder `OUT/NAME` that it works in. What its blocks printed goes to `OUT/NAME.json`, with a key of
the page and of fzero's source: a page is run again when one of them has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shlex
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import given
from blocks import Piece, pieces


ROOT = Path(__file__).parents[2]


def key(page: Path) -> str:
    """What the outputs of a page depend on, as one word."""
    sources = [page, Path(__file__), ROOT / "docs/_ext/blocks.py", ROOT / "constraints.txt"]
    for package in ("fzero", "torch_bridge"):
        sources += sorted((ROOT / package).rglob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


def name_of(page: Path) -> str:
    """A page's name among outputs: `tutorials-zero`."""
    return "-".join(page.resolve().relative_to(ROOT / "docs").with_suffix("").parts)


def outputs_of(page: Path, out: Path) -> list[str] | None:
    """What the blocks of a page printed, if they were run as they stand."""
    found = out / f"{name_of(page)}.json"
    if not found.exists():
        return None
    made = json.loads(found.read_text())
    return made["outputs"] if made["key"] == key(page) else None


def run(page: Path, out: Path) -> None:
    """Runs a page in this process: once, since jax keeps its settings."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    # A program of two pages, or of a page that was only reworded, is compiled once.
    jax.config.update("jax_compilation_cache_dir", str(out / "_compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    folder = out / name_of(page)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs, seconds = [], []
    for piece in pieces(page.read_text()):
        if piece.kind == "given":
            names |= given.names(piece.body)
        if piece.runs:
            printed, began = io.StringIO(), time.process_time()
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                try:
                    run_piece(piece, page, names)
                except BaseException:
                    sys.stderr.write(printed.getvalue())
                    raise
            outputs.append(printed.getvalue())
            seconds.append(round(time.process_time() - began, 2))
    made = {"key": key(page), "outputs": outputs, "cpu_seconds": seconds}
    (out / f"{name_of(page)}.json").write_text(json.dumps(made, indent=1))


def run_piece(piece: Piece, page: Path, names: dict[str, Any]) -> None:
    """Runs a block of a page, with the names that the blocks before it have left."""
    if piece.kind == "python":
        # Blank lines before it, so that a traceback has the page's lines.
        exec(compile("\n" * (piece.line - 1) + piece.body, str(page), "exec"), names)
        return
    from fzero.cli import main

    for line in piece.body.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$"))
        if words[0] != "fzero":
            raise ValueError(f"{page}:{piece.line}: only `fzero` runs on a page, not {words[0]!r}")
        sys.argv = words
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{page}:{piece.line}: {line} ended with {end.code}") from end


def main(out: Path, pages: list[Path]) -> int:
    """Runs pages, each in a fork, `FZERO_DOCS_JOBS` at a time; how many failed."""
    out, pages = out.resolve(), [page.resolve() for page in pages]
    out.mkdir(parents=True, exist_ok=True)
    _import_what_pages_import()
    at_a_time = int(os.environ.get("FZERO_DOCS_JOBS", min(2, os.cpu_count() or 1)))
    waiting, running, failed = list(pages), {}, []
    while waiting or running:
        while waiting and len(running) < at_a_time:
            page = waiting.pop(0)
            sys.stdout.flush()
            child = os.fork()
            if not child:
                _child(page, out)
            running[child] = page
        child, status = os.wait()
        if status:
            failed.append(running[child])
        del running[child]
    for page in failed:
        print(f"failed: {page.relative_to(ROOT)}", file=sys.stderr)
    return len(failed)


def _child(page: Path, out: Path) -> None:
    try:
        run(page, out)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _import_what_pages_import() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("COLUMNS", "88")
    # Nothing here starts a backend or a thread: that is left to the forks.
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fzero"
    sys.path.insert(0, str(ROOT))
    import optax
    import torch
    import transformers

    import fzero
    import fzero.preflight.hlo
    import torch_bridge

    logging.getLogger("torchao").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # its pool does not survive a fork
    del optax, fzero, torch_bridge


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    sys.exit(min(main(Path(sys.argv[1]), [Path(page) for page in sys.argv[2:]]), 1))
