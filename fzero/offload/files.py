"""Bytes to files and back: chunks in flight together, past the page cache, each with a checksum.

A file holds one shard, padded with zeros to whole blocks, and is cut into chunks: a chunk is one
request and has one checksum. Several threads work on the chunks of all files of a call, so one
large file keeps as many requests in flight as many small ones, and a chunk's checksum is computed
while other chunks are on their way.

Chosen by measurement (`benchmarks/offload_disk.py`): plain `os.pwrite` and `os.preadv` with
O_DIRECT, because tensorstore's file driver, which takes and gives whole values as `bytes`, moved
arrays from 4 MiB on at a seventh to three quarters of their rate; and XXH3, because one core
computes five times as much of it from memory (15 times from its caches) as of `zlib.crc32`, and
twice as much as of crc32c.

Files outlive a killed process, not a crash of the machine: nobody could use them after that. So
direct writes are not followed by `fsync`; buffered ones are, so that a failing disk is noticed
while the values are still in memory.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import functools
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fzero.errors import PlacementError


# Arrays of bytes. As `Any`: numpy's arrays are not yet seen as buffers by type checkers on 3.11.
Bytes = Any

# Large enough that a request's cost vanishes, small enough that few shards keep all threads busy.
CHUNK = 4 << 20
# Requests in flight per call. NVMe drives and cloud disks reach their bandwidth at 4 to 8 requests
# of this size; more only takes memory.
DEPTH = 8
# What offsets, lengths and our own memory are aligned to: a page, and the largest common block.
BLOCK = 4096
# Alignments of memory to try, the least demanding first: XLA aligns its buffers to 64 bytes, and
# where the drive can read from there (NVMe can), nothing is copied before it is written.
_ALIGNMENTS = (64, 512, BLOCK)
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True)
class Mode:
    """How the files of a directory are read and written.

    Args:
        direct: whether requests bypass the page cache.
        alignment: bytes that memory has to be aligned to.
        reason: why not direct; empty if direct.
    """

    direct: bool
    alignment: int
    reason: str = ""

    @property
    def flags(self) -> int:
        """What `os.open` needs."""
        return _DIRECT if self.direct else 0

    def describe(self) -> str:
        """`direct`, or `buffered` and why."""
        return "direct" if self.direct else f"buffered: {self.reason}"


def padded(nbytes: int) -> int:
    """Bytes rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def aligned(nbytes: int) -> Bytes:
    """Fresh memory that starts at a block. Where it is large, numpy asks for huge pages."""
    memory = np.empty(nbytes + BLOCK, np.uint8)
    start = -memory.ctypes.data % BLOCK
    return memory[start : start + nbytes]


# Memory that was touched before is read into a third faster. On CPU jax keeps what it is given as
# the array's own, for as long as the array lives (jax#37830): so a block is used again only when
# nothing refers to it but this list. Arrays and buffers all refer to the block that they look at.
_BLOCKS: list[mmap.mmap] = []
_BLOCKS_LOCK = threading.Lock()
# Most bytes in the list, in use or not: what a few requests in flight need, not a whole state.
REUSED = 256 << 20
# Smaller memory is not worth it: malloc does not give it back to the system in between.
_SMALLEST_REUSED = 1 << 20


def reused(nbytes: int) -> Bytes:
    """Memory that starts at a block, if possible some that nobody looks at any more."""
    if not _SMALLEST_REUSED <= nbytes <= REUSED:
        return aligned(nbytes)
    with _BLOCKS_LOCK:
        idle = [block for block in range(len(_BLOCKS)) if _references(_BLOCKS, block) == _ALONE]
        for block in idle:
            if len(_BLOCKS[block]) == nbytes:
                return np.frombuffer(_BLOCKS[block], np.uint8)
        size = sum(map(len, _BLOCKS))
        for block in reversed(idle):  # of another size: make room
            if size + nbytes > REUSED:
                size -= len(_BLOCKS.pop(block))
        if size + nbytes > REUSED:
            return aligned(nbytes)
        _BLOCKS.append(mmap.mmap(-1, nbytes))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                _BLOCKS[-1].madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(_BLOCKS[-1], np.uint8)


def _references(blocks: list[mmap.mmap], block: int) -> int:
    return sys.getrefcount(blocks[block])


_ALONE = _references([mmap.mmap(-1, BLOCK)], 0)


def checksum(data: Bytes, seed: int) -> int:
    """XXH3 (64 bits) of bytes. The seed says which bytes: another file's never match."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def seed_of(identity: str) -> int:
    """A seed from the name of a file, its directory's unique name included."""
    return xxhash.xxh3_64_intdigest(identity.encode())


def probe(directory: Path) -> Mode:
    """Tries direct I/O in a directory with a file of one block.

    Raises:
        OSError: nothing can be written there at all.
    """
    if not _DIRECT:
        return Mode(False, 1, "this operating system has no O_DIRECT")
    file, memory, reason = directory / "probe.tmp", aligned(2 * BLOCK), ""
    memory[:] = 0
    try:
        for alignment in _ALIGNMENTS:
            # Aligned to this, and to nothing larger.
            start = alignment % BLOCK
            try:
                fd = os.open(file, os.O_RDWR | os.O_CREAT | _DIRECT | os.O_CLOEXEC, 0o600)
                try:
                    os.pwrite(fd, memory[start : start + BLOCK], 0)
                    os.preadv(fd, [memory[start : start + BLOCK]], 0)
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                reason = f"no O_DIRECT for blocks of {BLOCK} bytes on this file system ({error})"
            else:
                return Mode(True, alignment)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)
    return Mode(False, 1, reason)


class Transfer(abc.ABC):
    """One file on its way. Its chunks may go in any order, from any thread.

    Args:
        path: the file.
        what: says in words which leaf and shard, for errors.
        nbytes: of the shard; the file is padded.
        mode: how.
        seed: of the checksums (`seed_of`).
    """

    def __init__(
        self, path: Path, what: Callable[[], str], nbytes: int, mode: Mode, seed: int
    ) -> None:
        self.path, self.what, self.nbytes, self.mode, self.seed = path, what, nbytes, mode, seed
        self.num_chunks = max(1, -(-nbytes // CHUNK))
        self._left = self.num_chunks
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._failed = False

    def jobs(self) -> list[Callable[[], None]]:
        """One call per chunk."""
        return [functools.partial(self._job, chunk) for chunk in range(self.num_chunks)]

    def close(self) -> None:
        """Closes the file and lets go of memory; without effect once finished."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _job(self, chunk: int) -> None:
        try:
            with self._lock:
                if self._failed:  # another chunk could not open it, and says why
                    return
                if self._fd is None:
                    self._failed = True
                    self._fd = self._open()
                    self._failed = False
                fd = self._fd
            self._move(fd, chunk)
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._finish(fd)
        except OSError as error:
            raise PlacementError(self._explain(error)) from error

    def _seed(self, chunk: int) -> int:
        return (self.seed + chunk) % 2**64

    @abc.abstractmethod
    def _open(self) -> int: ...

    @abc.abstractmethod
    def _move(self, fd: int, chunk: int) -> None: ...

    @abc.abstractmethod
    def _finish(self, fd: int) -> None: ...

    @abc.abstractmethod
    def _explain(self, error: OSError) -> str: ...


class Outgoing(Transfer):
    """A file being written, under a temporary name until it is whole.

    Args:
        source: gives the shard's bytes, when their turn comes.
        others: as for `Transfer`.
    """

    def __init__(self, source: Callable[[], Bytes], *others: Any) -> None:
        super().__init__(*others)
        self.checksums = [0] * self.num_chunks
        self._source, self._data = source, np.empty(0, np.uint8)
        self._temporary = f"{self.path}.tmp"

    def close(self) -> None:
        super().close()
        # jax does not give a buffer away (donation) while numpy looks at it.
        self._data = np.empty(0, np.uint8)

    def _open(self) -> int:
        self._data = self._source()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self.mode.flags
        fd = os.open(self._temporary, flags, 0o600)
        if self.num_chunks > 1:
            # Chunks then do not wait for each other to extend the file.
            with contextlib.suppress(AttributeError):
                _reserve(fd, padded(self.nbytes))
        return fd

    def _move(self, fd: int, chunk: int) -> None:
        start = chunk * CHUNK
        data = self._data[start : start + CHUNK]
        size = padded(len(data))
        if len(data) == size and data.ctypes.data % self.mode.alignment == 0:
            self._write(fd, chunk, data)
            return
        with _staging(size) as memory:
            memory[: len(data)] = data
            memory[len(data) : size] = 0
            self._write(fd, chunk, memory[:size])

    def _write(self, fd: int, chunk: int, data: Bytes) -> None:
        self.checksums[chunk] = checksum(data, self._seed(chunk))
        done = 0
        while done < len(data):
            count = os.pwrite(fd, data[done:], chunk * CHUNK + done)
            # Cut short, a direct request goes on at a block.
            count = count // BLOCK * BLOCK if self.mode.direct else count
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._temporary)
            done += count

    def _finish(self, fd: int) -> None:
        if not self.mode.direct:
            os.fdatasync(fd)
            # The values should not stay in memory as pages of the file.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()
        os.rename(self._temporary, self.path)

    def _explain(self, error: OSError) -> str:
        return (
            f"offload to disk: cannot write {self.what()} to {self.path}: {error.strerror}"
            f" ({self.nbytes:,} bytes; {_free(self.path)}). {advice(error)} Nothing was moved: all"
            " arrays are in memory, unchanged, and the files of this call are removed."
        )


class Incoming(Transfer):
    """A file being read into fresh memory and checked.

    Args:
        checksums: of its chunks, as they were written.
        done: gets the shard's bytes once all are there and right; may keep them.
        others: as for `Transfer`.
    """

    def __init__(
        self, checksums: Sequence[int], done: Callable[[Bytes], None], *others: Any
    ) -> None:
        super().__init__(*others)
        self._checksums, self._done = checksums, done
        self._data: Bytes = np.empty(0, np.uint8)

    def close(self) -> None:
        super().close()
        self._data = np.empty(0, np.uint8)

    def _open(self) -> int:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | self.mode.flags)
        size = os.fstat(fd).st_size
        if size != padded(self.nbytes):
            os.close(fd)
            raise self._damaged(f"{padded(self.nbytes):,} bytes were written, {size:,} are there")
        self._data = reused(padded(self.nbytes))
        return fd

    def _move(self, fd: int, chunk: int) -> None:
        start = chunk * CHUNK
        data, done = self._data[start : start + CHUNK], 0
        while done < len(data):
            count = os.preadv(fd, [data[done:]], start + done)
            if not count:
                raise self._damaged(f"it ends at byte {start + done:,}")
            done += count
        found = checksum(data, self._seed(chunk))
        if found != self._checksums[chunk]:
            raise self._damaged(
                f"bytes {start:,} to {start + len(data):,} have checksum {found:016x}, written with"
                f" {self._checksums[chunk]:016x}: damaged, or another file's"
            )

    def _finish(self, fd: int) -> None:
        data = self._data[: self.nbytes]
        self.close()
        self._done(data)

    def _damaged(self, found: str) -> PlacementError:
        return PlacementError(
            f"reload from disk: {self.what()} is not what was written: {self.path}: {found}."
            f" {_LOST} Find out what changed the file (another program, or a failing disk: see the"
            " kernel's log)."
        )

    def _explain(self, error: OSError) -> str:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        found = "the file is missing" if missing else error.strerror
        return (
            f"reload from disk: cannot read {self.what()} from {self.path}: {found}"
            f" ({padded(self.nbytes):,} bytes were written). {_LOST}"
        )


_LOST = "The files and arrays of all other leaves are untouched; this leaf needs a checkpoint."


def transfer(files: Sequence[Transfer]) -> None:
    """Moves files, `DEPTH` requests at a time, the caller's thread included.

    Raises:
        PlacementError: the first failure, once no request is in flight. All files are closed.
    """
    try:
        _run(job for file in files for job in file.jobs())
    finally:
        for file in files:
            file.close()


def _run(jobs: Iterable[Callable[[], None]]) -> None:
    queue, failures = deque(jobs), list[BaseException]()

    def work() -> None:
        while not failures:
            try:
                job = queue.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:
                failures.append(error)

    helpers = [executor().submit(work) for _ in range(min(DEPTH, len(queue)) - 1)]
    try:
        work()
    finally:
        queue.clear()
        # Helpers that never started would find nothing to do: calls that run on these threads
        # themselves (`write_async`) must not wait for them.
        wait([helper for helper in helpers if not helper.cancel()])
    if failures:
        raise failures[0]


@functools.cache
def executor() -> ThreadPoolExecutor:
    """The threads of all disk transfers; two more than requests, for calls in the background."""
    return ThreadPoolExecutor(DEPTH + 2, thread_name_prefix="fzero-disk")


# Touched once, used again and again. jax never sees them, only the kernel does.
_STAGING: deque[Bytes] = deque(maxlen=DEPTH)


@contextlib.contextmanager
def _staging(nbytes: int) -> Iterator[Bytes]:
    try:
        memory = _STAGING.pop()
    except IndexError:
        memory = aligned(CHUNK)
    if len(memory) < nbytes:
        memory = aligned(nbytes)
    try:
        yield memory
    finally:
        _STAGING.append(memory)


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def advice(error: OSError) -> str:
    """What to do about a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full: free space there, or pass another `path`."
    if error.errno == errno.EFBIG:
        return "Files may not be that large: raise the limit (ulimit -f), or pass another `path`."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "Pass a `path` that this process may write to."
    if error.errno == errno.EMFILE:
        return "Too many files are open: raise the limit (ulimit -n)."
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EEXIST):
        return "Something else changed this directory: give each job a `path` of its own."
    return "See the kernel's log for the disk's errors, or pass another `path`."


def free_bytes(path: Path) -> int:
    """Bytes free on the file system of a directory."""
    status = os.statvfs(path)
    return status.f_bfree * status.f_frsize


def _free(path: Path) -> str:
    try:
        return f"{free_bytes(path.parent):,} bytes free there"
    except OSError:
        return "no longer there"
