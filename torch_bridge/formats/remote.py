"""PyTorch's checkpoints in object stores: by way of this host's disk, with fsspec."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from fzero.errors import CheckpointError
from torch_bridge.formats.turns import ToldError, Turns


# What makes a folder a checkpoint is sent last.
_LAST = ("latest", ".metadata")
_PREFIX = "fzero-"
_LIBRARIES = {"s3": "s3fs", "gs": "gcsfs"}


@contextlib.contextmanager
def fetched(url: str) -> Iterator[Path]:
    """A file or folder of an object store, copied to this host's disk for as long as it is read.

    Raises:
        CheckpointError: nothing is there, or it cannot be read. Errors of the reader name the URL.
    """
    url = url.rstrip("/")
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        local = Path(folder) / url.rpartition("/")[2]
        with _said(url, "read"):
            store = _store(url)
            if not store.exists(url):
                raise CheckpointError(f"{url}: no such file")
            store.get(f"{url}/" if store.isdir(url) else url, str(local), recursive=True)
        try:
            yield local
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(local), url)) from error


@contextlib.contextmanager
def sent(url: str, turns: Turns) -> Iterator[Path]:
    """Where to write what shall be in an object store; it is sent when all of it is written.

    A file is there whole or not at all, and replaces what had its name. A folder has to be new; the
    files that say what is in it are sent last.

    Args:
        url: where; that of process 0 counts.
        turns: who writes; every process sends what it has written.

    Raises:
        CheckpointError: it cannot be written, or is a folder that is there.
    """
    turns.own_folders = True
    url = str(turns.told(url)[0]).rstrip("/")
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        local = Path(folder) / url.rpartition("/")[2]
        with _said(url, "written"):
            store = _store(url)
            if store.isdir(url):
                raise CheckpointError(f"{url}: is a folder that is there; expected a new one")
        try:
            yield local
        except CheckpointError as error:
            # What was told stays that: another class would be told to all once more.
            kind = ToldError if isinstance(error, ToldError) else CheckpointError
            raise kind(_with_url(str(error), url)) from error
        files = [local] if local.is_file() else sorted(p for p in local.rglob("*") if p.is_file())
        for paths in ([p for p in files if not _is_last(p)], [p for p in files if _is_last(p)]):
            with _said(url, "written"):
                for path in paths:
                    inner = path.relative_to(local).as_posix()
                    store.put_file(str(path), url if path == local else f"{url}/{inner}")
            turns.told(None)


def _with_url(message: str, url: str) -> str:
    """A message without the paths of any host's disk, where what is written has another name."""
    name, made = re.escape(url.rpartition("/")[2]), "[a-z0-9_]{8}"
    path = rf"[^\s'\"]*/{_PREFIX}{made}/(?:\.{name}\.{made}|{name})"
    return re.sub(path, lambda _: url, message)


def _is_last(path: Path) -> bool:
    return path.name in _LAST or path.name.endswith(".index.json")


def _store(url: str) -> Any:
    scheme = url.partition("://")[0]
    try:
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise CheckpointError(
            f"{url}: reading and writing {scheme}:// takes the package {_LIBRARIES[scheme]}, which"
            f" is not installed: pip install {_LIBRARIES[scheme]}"
        ) from error


@contextlib.contextmanager
def _said(url: str, what: str) -> Iterator[None]:
    """What a store's client raises has no class in common."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{url}: cannot be {what}: {type(error).__name__}: {error}"
        ) from error
