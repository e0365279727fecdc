"""Space on a disk in a file without a name: bytes there and back, each request with a checksum.

A process keeps one such file per directory, for as long as anything in it is wanted. It was made
with `O_TMPFILE`, or is unlinked at once: the kernel frees it when the process ends, killed or not,
and nobody else can find it. Whoever writes takes space in it, in whole blocks; space that is let go
is used again; what is more than `SPARE` at the end of the file is given back to the disk.

One file, because a file per shard costs more than the shard where that is small; not one per call,
because a step that streams makes as many calls as it has chunks, each would keep a file open, and
blocks that were written before are written again faster than new ones.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import os
import secrets
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero.errors import PlacementError


# Arrays of bytes. As `Any`: numpy's arrays are not yet seen as buffers by type checkers on 3.11.
Bytes = Any

# What offsets and lengths are multiples of: a page, and the largest common block.
BLOCK = 4096
# Alignments of memory to try, the least demanding first: XLA aligns its buffers to 64 bytes, and
# where the drive can read from there (NVMe can), nothing is copied before it is written.
_ALIGNMENTS = (64, 512, BLOCK)
_DIRECT = getattr(os, "O_DIRECT", 0)
# Most bytes at the end of the file that are kept for later: giving back takes half a millisecond.
SPARE = 64 << 20


class Extent(NamedTuple):
    """Space in a file.

    Attributes:
        offset: its first byte.
        nbytes: whole blocks.
    """

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes


def padded(nbytes: int) -> int:
    """Bytes rounded up to whole blocks; one at least."""
    return max(1, -(-nbytes // BLOCK)) * BLOCK


def aligned(nbytes: int) -> Bytes:
    """Fresh memory that starts at a block. Where it is large, numpy asks for huge pages."""
    memory = np.empty(nbytes + BLOCK, np.uint8)
    start = -memory.ctypes.data % BLOCK
    return memory[start : start + nbytes]


class Scratch:
    """A file without a name.

    Args:
        directory: on the disk to use.

    Attributes:
        directory: the same.
        mode: `direct`, or `buffered` and why.

    Raises:
        OSError: no file can be made there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pid = os.getpid()
        # Checksums of this file alone.
        self.seed = secrets.randbits(64)
        self.fd = _unnamed(directory)
        weakref.finalize(self, os.close, self.fd)
        self.alignment, self.mode = _make_direct(self.fd)
        self._end = self._size = 0  # of what is taken, and of the file
        self._free: list[Extent] = []  # in order, never side by side, never at the end
        self._lock = threading.Lock()
        self._released: deque[Extent] = deque()

    def take(self, sizes: Sequence[int]) -> list[Extent]:
        """Space for so many bytes each, side by side where the file ends.

        Raises:
            OSError: there is no room for all of them; then none is taken.
        """
        with self._lock:
            self._merge()
            before = self._end, list(self._free)
            taken = [self._fit(padded(size)) or self._behind(padded(size)) for size in sizes]
            try:
                self._grow()
            except BaseException:
                self._end, self._free = before
                self._shrink()
                raise
            return taken

    def release(self, extents: Iterable[Extent]) -> None:
        """Lets space go. Without waiting, in any thread, also in the middle of `take`.

        The garbage collector calls this at any point: whoever holds the lock does what is left.
        """
        if os.getpid() != self._pid:
            return  # a fork's copy: the space is its parent's
        self._released.extend(extents)
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._merge()
            finally:
                self._lock.release()

    def free_bytes(self) -> int:
        """What the disk has left for this user, who is not root."""
        status = os.fstatvfs(self.fd)
        return status.f_bavail * status.f_frsize

    def _fit(self, nbytes: int) -> Extent | None:
        """Space that was let go: the first that is large enough."""
        for i, extent in enumerate(self._free):
            if extent.nbytes >= nbytes:
                rest = Extent(extent.offset + nbytes, extent.nbytes - nbytes)
                self._free[i : i + 1] = [rest] if rest.nbytes else []
                return Extent(extent.offset, nbytes)
        return None

    def _behind(self, nbytes: int) -> Extent:
        extent = Extent(self._end, nbytes)
        self._end = extent.end
        return extent

    def _grow(self) -> None:
        """Takes blocks from the disk now: better than to notice a full one after minutes."""
        needed = self._end - self._size
        if needed <= 0:
            return
        try:
            if needed > self.free_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.fd, self._size, needed)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        self._size = self._end

    def _shrink(self) -> None:
        """Gives the end of the file back to the disk."""
        with contextlib.suppress(OSError):
            os.ftruncate(self.fd, self._end)
            self._size = self._end

    def _merge(self) -> None:
        while self._released:
            extent = self._released.popleft()
            i = bisect.bisect(self._free, extent)
            if i < len(self._free) and self._free[i].offset == extent.end:
                extent = Extent(extent.offset, extent.nbytes + self._free.pop(i).nbytes)
            if i and self._free[i - 1].end == extent.offset:
                i -= 1
                extent = Extent(self._free[i].offset, self._free.pop(i).nbytes + extent.nbytes)
            if extent.end == self._end:
                self._end = extent.offset
            else:
                self._free.insert(i, extent)
        if self._size - self._end > (SPARE if self._end else 0):
            self._shrink()


# By process, path and the directory that is there now. Gone with the last handle.
_SCRATCHES: weakref.WeakValueDictionary[Any, Scratch] = weakref.WeakValueDictionary()
_OPENING = threading.Lock()


def scratch(path: str | os.PathLike[str]) -> Scratch:
    """This process's file in a directory.

    Args:
        path: the directory. It or its parent has to exist: a mistyped mount point must not silently
            fill the system's disk.

    Raises:
        PlacementError: nothing can be written there.
    """
    base = Path(os.path.realpath(path))
    if not base.exists() and not base.parent.exists():
        raise PlacementError(
            f"offload to disk: {base} does not exist, nor does its parent {base.parent}; expected"
            " `path` to be a directory, or a new one in an existing directory. Is the disk"
            f" mounted? {UNCHANGED}"
        )
    try:
        base.mkdir(exist_ok=True)
        status = base.stat()
        key = os.getpid(), base, status.st_dev, status.st_ino
        with _OPENING:
            found = _SCRATCHES.get(key)
            if found is None:
                found = _SCRATCHES[key] = Scratch(base)
            return found
    except OSError as error:
        wrong = "is no directory" if isinstance(error, FileExistsError | NotADirectoryError) else ""
        raise PlacementError(
            f"offload to disk: cannot write in {base}: {wrong or error.strerror}."
            f" {'Pass the path of a directory.' if wrong else advice(error)} {UNCHANGED}"
        ) from error


UNCHANGED = "What was to be written is still in memory, unchanged."


def _unnamed(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            # Not every file system has it: some say so, some see a directory that is written to.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
    fd, name = tempfile.mkstemp(prefix="fzero-", dir=directory)
    os.unlink(name)
    return fd


def _make_direct(fd: int) -> tuple[int, str]:
    """Switches direct requests on if they work here; the alignment of memory, and what is on."""
    if not _DIRECT:
        return 1, "buffered: this operating system has no O_DIRECT"
    flags, memory, reason = fcntl.fcntl(fd, fcntl.F_GETFL), aligned(4 * BLOCK), ""
    memory[:] = 0
    for alignment in _ALIGNMENTS:
        start = alignment % BLOCK  # aligned to this, and to nothing larger
        buffers = [memory[i + start : i + start + BLOCK] for i in (0, 2 * BLOCK)]
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
            os.pwritev(fd, buffers, 0)
            os.preadv(fd, buffers, 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            reason = f"no O_DIRECT for blocks of {BLOCK} bytes on this file system ({error})"
        else:
            os.ftruncate(fd, 0)
            return alignment, "direct"
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return 1, f"buffered: {reason}"


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
    return "See the kernel's log for the disk's errors, or pass another `path`."
