"""Checkpoints in object stores (`gs://`, `s3://`), which rename nothing and have no directories.

Tensorstore reads and writes the stores. A mark below `marks/NUMBER/` says first that a checkpoint
is begun. Then every process writes its own shards, as in `checkpoint.shards`, and a mark
of its own. A checkpoint is whole, and not there before, once all its marks are: so nobody has to
wait for anybody while data is written, and a kill at any moment leaves the checkpoint before.
Numbers are never used twice: whatever a kill leaves, its number is begun.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from fzero.checkpoint.shards import FOLDER, Shards, shards_of, write_shards
from fzero.checkpoint.urls import kvstore


MARKS = "marks"
BEGUN = "begun"
# Looking whether the others have written: soon at first, then seldom beside what was waited for.
LOOK_S = 0.2
LOOK_SHARE, LOOK_MOST_S = 0.1, 10.0
# A process that is lost ends the others by itself (`fzero.hosts`). This is for one that lives on,
# and neither writes nor says why; orbax waits as long for those of a directory.
WAIT_S = 1200.0
_Found = TypeVar("_Found")


def numbers(url: str) -> list[int]:
    """Checkpoints of a folder that are whole, in order."""
    return [number for number, whole in _known(_open(url)).items() if whole]


def begin(url: str) -> int:
    """Marks a checkpoint as begun: a number that none of a folder has, whole or not.

    One process calls this, before any writes a part.
    """
    store = _open(url)
    number = max(_known(store), default=-1) + 1
    _say(lambda: store.write(f"{MARKS}/{number}/{BEGUN}", b"").result())
    return number


def read_meta(url: str, number: int) -> Any:
    """What was written beside the arrays of a checkpoint."""
    found = _say(lambda: _open(url).read(f"{MARKS}/{number}/meta").result())
    if found.state != "value":
        raise ValueError(f"there is no {MARKS}/{number}/meta")
    return json.loads(found.value)


class Writer:
    """Writes one checkpoint in the background; every process has one.

    Args:
        url: the folder of all checkpoints.
        number: of this one, which is begun; the same in every process.
        leaves: arrays by key; copied at once.
        meta: what process 0 writes beside them.
        keep: how many of the newest checkpoints stay.
    """

    def __init__(
        self, url: str, number: int, leaves: Mapping[str, Any], meta: Any, keep: int | None
    ) -> None:
        for leaf in leaves.values():
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        shards = {key: shards_of(leaf) for key, leaf in leaves.items()}
        self._error: Exception | None = None
        self._job = _Job(url, number, shards, meta, keep)
        # No daemon: the interpreter ends when the checkpoint is written.
        self._thread = threading.Thread(target=self._run, name="fzero-objects", daemon=False)
        self._thread.start()

    def wait_until_finished(self) -> None:
        """Until the checkpoint is whole: all processes have written.

        Raises:
            Exception: what kept it from becoming whole.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nothing is open."""

    def _run(self) -> None:
        try:
            _write(self._job)
        except Exception as error:
            self._error = error


@dataclass
class _Job:
    """What one process writes."""

    url: str
    number: int
    shards: dict[str, Shards]
    meta: Any
    keep: int | None


def _write(job: _Job) -> None:
    """Shards, the mark, until the marks of all are there; then what is too old goes."""
    me, num = jax.process_index(), jax.process_count()
    store, marks = _open(job.url), f"{MARKS}/{job.number}/"

    def mark(name: str, value: bytes = b"") -> None:
        _say(lambda: store.write(marks + name, value).result())

    try:
        asyncio.run(_write_all(f"{job.url}/{job.number}/{FOLDER}", job.shards))
        if me == 0:
            mark("meta", json.dumps(job.meta).encode())
        mark(f"done-{me}-of-{num}")
    except Exception as error:
        mark(f"failed-{me}", str(error).encode())  # the others stop waiting
        raise
    _wait_for_all(store, marks, num)
    if me == 0:
        _remove_old(store, job.number, job.keep)


async def _write_all(folder: str, shards: dict[str, Shards]) -> None:
    for key in list(shards):
        try:
            await write_shards(kvstore(f"{folder}/{key}"), shards.pop(key))
        except Exception as error:  # tensorstore has one kind of error for each code
            raise OSError(str(error)) from error


def _wait_for_all(store: Any, marks: str, num: int) -> None:
    began = time.monotonic()
    while True:
        names = [key.removeprefix(marks) for key in _list(store, marks)]
        failed = [name for name in names if name.startswith("failed-")]
        if failed:
            who = failed[0].removeprefix("failed-")
            why = store.read(marks + failed[0]).result().value.decode()
            raise OSError(f"process {who} could not write its part: {why}")
        missing = [str(p) for p in range(num) if f"done-{p}-of-{num}" not in names]
        if not missing:
            return
        waited = time.monotonic() - began
        if waited > WAIT_S:
            raise OSError(
                f"no word of process {', '.join(missing)} (of {num}) for {waited:.0f} s after this"
                f" one, process {jax.process_index()}, had written its part"
            )
        time.sleep(min(max(LOOK_S, LOOK_SHARE * waited), LOOK_MOST_S))


def _remove_old(store: Any, newest: int, keep: int | None) -> None:
    """Removes what ended unfinished before a checkpoint, and whole ones that are too many.

    All processes have finished what came before it, or they would not write it.
    """
    known = _known(store)
    whole = [number for number, is_whole in known.items() if is_whole]
    stay = whole if keep is None else whole[-keep:]
    for number in known:
        if number < newest and number not in stay:
            # First it is no longer whole; a mark stays as long as there is something to remove.
            _say(store.write(f"{MARKS}/{number}/meta", None).result)
            for prefix in (f"{number}/", f"{MARKS}/{number}/"):
                _say(store.delete_range(_below(prefix)).result)


def _known(store: Any) -> dict[int, bool]:
    """Every number that was begun, in order, and whether its checkpoint is whole."""
    marks: dict[int, list[str]] = {}
    for key in _list(store, f"{MARKS}/"):
        _, number, name = key.split("/", 2)
        marks.setdefault(int(number), []).append(name)
    return {number: _is_whole(names) for number, names in sorted(marks.items())}


def _is_whole(names: list[str]) -> bool:
    done = [name for name in names if name.startswith("done-")]
    return "meta" in names and bool(done) and len(done) == int(done[0].rpartition("-")[2])


def _list(store: Any, prefix: str) -> list[str]:
    return [key.decode() for key in _say(store.list(_below(prefix)).result)]


def _below(prefix: str) -> Any:
    import tensorstore

    return tensorstore.KvStore.KeyRange(prefix, f"{prefix[:-1]}0")  # "0" follows "/"


def _open(url: str) -> Any:
    import tensorstore

    return _say(lambda: tensorstore.KvStore.open(kvstore(url)).result())


def _say(call: Callable[[], _Found]) -> _Found:
    """A call of tensorstore, which has one kind of error for each code."""
    try:
        return call()
    except Exception as error:
        raise OSError(str(error)) from error
