"""Files and directories that get their name only when they are complete."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fzero.errors import CheckpointError
from torch_bridge.formats.turns import Turns


# Weights of an earlier save, which a loader would take for a part of the new one.
_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
    r"|before-model-\d{5}-of-\d{5}\.safetensors"  # of `_set_aside`
)
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"


@contextlib.contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place only when written completely."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(above for above in target.parents if above.exists())
        raise CheckpointError(f"{target}: expected folders above it; {file} is a file") from error
    if target.is_dir():
        raise CheckpointError(f"{target}: expected a file, and it is a directory; name one in it")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        sync(temporary)
        temporary.chmod(0o666 & ~_umask())  # mkstemp's 0600 would hide the file from others
        temporary.replace(target)
        sync(target.parent)
    except OSError as error:
        _say_where(error, target)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def staged_directory(
    target: Path,
    merge: bool,
    turns: Turns,
    check: Callable[[Path], None] = lambda _: None,
) -> Iterator[Path]:
    """A temporary directory beside `target` that takes its place when written completely.

    Args:
        target: a directory that does not exist, or is empty.
        merge: whether it may also have files: those of the same name are replaced one by one, after
            all have been written, and of weights those that do not belong to the new ones are
            removed. Of shards with an index all are read as they were, or all as they are written.
        turns: who writes; one process makes the directory and gives it its name.
        check: raises `CheckpointError` if nothing may be written into a directory that is there.

    Raises:
        CheckpointError: there is something else.
    """
    owns = turns.leads or turns.own_folders
    temporary = turns.folder(lambda: _beside(target, merge, check))
    try:
        yield temporary
        turns.told(None)  # all is written
        if temporary.is_dir():
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
        turns.told(None)  # and on the disk
        if owns:
            _replace(temporary, target, merge)
    except OSError as error:
        _say_where(error, target)
        raise
    finally:
        if owns:
            shutil.rmtree(temporary, ignore_errors=True)


def _say_where(error: OSError, target: Path) -> None:
    """Has the error of a disk, which names no file, say what was being written."""
    if error.errno is not None and error.filename is None:
        error.filename = str(target)
        error.strerror = f"{error.strerror} (it was not written; what was there before is whole)"


def _beside(target: Path, merge: bool, check: Callable[[Path], None]) -> Path:
    """A new directory for what shall be at `target`, if it may be there."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; expected a directory")
    if not merge and target.is_dir() and any(target.iterdir()):
        raise CheckpointError(
            f"{target}: is not empty; this format is written to a new directory, because files of"
            " an earlier checkpoint would be taken for its own"
        )
    if target.is_dir():
        check(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))


def _replace(temporary: Path, target: Path, merge: bool) -> None:
    if not (merge and target.is_dir() and any(target.iterdir())):
        temporary.chmod(0o777 & ~_umask())
        temporary.replace(target)
        sync(target.parent)
        return
    written = sorted(temporary.iterdir())  # an index comes after its shards
    names = {path.name for path in written}
    _set_aside(target, names, temporary)
    if _ADAPTER in names and not _same(target / _ADAPTER, temporary / _ADAPTER):
        # Two files and no third that names them: a kill leaves none of the factors, not those of
        # another rank or scale.
        for old in target.glob("adapter_model.*"):
            old.unlink()
        sync(target)
    for path in written:
        if path.name == _INDEX:
            sync(target)  # its shards are there, whatever happens
        path.replace(target / path.name)
    if any(map(_WEIGHTS.fullmatch, names)):
        for path in target.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
    sync(target)


def _same(one: Path, other: Path) -> bool:
    """Whether two files have the same bytes; a missing one is no other's."""
    return one.is_file() and one.read_bytes() == other.read_bytes()


def _set_aside(target: Path, names: set[str], temporary: Path) -> None:
    """Gives shards that will be replaced a second name, and has the old index say that one.

    Shards of two saves have the same names where there are as many. A kill between two of them
    would leave an index of which some are new; so the old one is read until the new one is there.
    """
    index = target / _INDEX
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        shards = content["weight_map"]
        replaced = {name for name in shards.values() if name in names and (target / name).is_file()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return  # none, or none that anybody could read
    if _INDEX not in names or not replaced:
        return
    for name in replaced:
        aside = target / f"before-{name}"
        aside.unlink(missing_ok=True)
        try:
            os.link(target / name, aside)
        except OSError:  # not every file system has two names for a file
            shutil.copyfile(target / name, aside)
            sync(aside)
    content["weight_map"] = {
        tensor: f"before-{name}" if name in replaced else name for tensor, name in shards.items()
    }
    again = temporary / f"before-{_INDEX}"
    again.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(again)
    sync(target)
    again.replace(index)
    sync(target)


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's names, are on the disk."""
    written = os.open(path, os.O_RDONLY)
    try:
        os.fsync(written)
    finally:
        os.close(written)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
