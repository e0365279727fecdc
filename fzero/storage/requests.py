"""Shards to their places in scratch files and back: requests in flight together, each checked.

A request is one chunk of a large shard, or as many small shards as lie side by side in so many
bytes. Each chunk has a checksum, which is computed while other requests are on their way.

Chosen by measurement (`benchmarks/offload_disk.py`): plain system calls, because tensorstore's file
driver, which takes and gives whole values as `bytes`, moved arrays at a seventh to three quarters
of their rate; XXH3, because one core computes five times as much of it from memory as of
`zlib.crc32`, and twice as much as of crc32c.

Nobody could use the bytes after a crash of the machine, so direct writes are not followed by
`fsync`; buffered ones are, so that a failing disk is noticed while the values are still in memory.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import xxhash

from fzero.errors import PlacementError
from fzero.storage.scratch import BLOCK, UNCHANGED, Bytes, Extent, Scratch, advice, aligned, padded


# Large enough that a request's cost vanishes, small enough that few shards keep all threads busy.
CHUNK = 4 << 20
# Requests in flight per call. NVMe drives and cloud disks reach their bandwidth at 4 to 8 requests
# of this size; more only takes memory.
DEPTH = 8
# Most chunks of one request: the kernel takes 1024 buffers.
_MOST = 1024


def checksum(data: Bytes, seed: int) -> int:
    """XXH3 (64 bits) of bytes. The seed says which bytes: those of another place never match."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


class Shard:
    """Bytes on their way to or from where they lie in a file, cut into chunks of at most `CHUNK`.

    Args:
        file: the file.
        extent: where in it.
        nbytes: of the shard, without padding.
        what: says in words which leaf and shard, for errors.
        memory: gives the memory that they are in or go to, when the first chunk's turn comes.
        checksums: of the chunks; zeros before they are written.
        keep: gets the bytes that were read, once all are there and right; may keep them.
    """

    def __init__(
        self,
        file: Scratch,
        extent: Extent,
        nbytes: int,
        what: Callable[[], str],
        memory: Callable[[], Bytes],
        checksums: Sequence[int] = (),
        keep: Callable[[Bytes], None] = lambda data: None,
    ) -> None:
        self.file, self.extent, self.nbytes, self.what = file, extent, nbytes, what
        self.num_chunks = -(-extent.nbytes // CHUNK)
        self.checksums = list(checksums) or [0] * self.num_chunks
        self._memory, self._keep = memory, keep
        self._left, self._lock = self.num_chunks, threading.Lock()
        self._data: Bytes | None = None

    def chunk(self, number: int) -> Bytes:
        """The memory of one chunk."""
        with self._lock:
            if self._data is None:
                self._data = self._memory()
            return self._data[number * CHUNK : (number + 1) * CHUNK]

    def seed(self, number: int) -> int:
        """Of a chunk's checksum: another for every place in every file."""
        return (self.file.seed + self.extent.offset // BLOCK + number * CHUNK // BLOCK) % 2**64

    def done(self) -> None:
        """One chunk is there."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        data = self._data
        self.drop()
        self._keep(data)

    def drop(self) -> None:
        """Lets go of the memory: jax does not give a buffer away while numpy looks at it."""
        self._data = None


# Chunks of shards, side by side in one file.
Request = list[tuple[Shard, int]]


def write(shards: Sequence[Shard]) -> None:
    """Writes shards, `DEPTH` requests at a time, and fills in their checksums.

    Raises:
        PlacementError: the first failure, once no request is in flight.
    """
    _run(_write, shards)
    for file in {shard.file for shard in shards if shard.file.mode != "direct"}:
        try:
            os.fdatasync(file.fd)
        except OSError as error:
            raise _not_written(shards[0], error) from error
        # The values should not stay in memory as pages of the file.
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read(shards: Sequence[Shard]) -> None:
    """Reads shards and compares their checksums.

    Raises:
        PlacementError: the first failure, once no request is in flight.
    """
    _run(_read, shards)


def _write(request: Request) -> None:
    (first, number), file = request[0], request[0][0].file
    try:
        buffers = [shard.chunk(chunk) for shard, chunk in request]
        for (shard, chunk), buffer in zip(request, buffers, strict=True):
            shard.checksums[chunk] = checksum(buffer, shard.seed(chunk))
        if any(len(x) % BLOCK or not len(x) or x.ctypes.data % file.alignment for x in buffers):
            buffers = [_in_blocks(buffers)]
        if not _all(os.pwritev, file.fd, buffers, first.extent.offset + number * CHUNK):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise _not_written(first, error) from error


def _read(request: Request) -> None:
    (first, number), file = request[0], request[0][0].file
    buffers = [shard.chunk(chunk) for shard, chunk in request]
    left = list(buffers)
    try:
        _all(os.preadv, file.fd, left, first.extent.offset + number * CHUNK)
    except OSError as error:
        raise PlacementError(
            f"reload from disk: cannot read {first.what()} from {file.directory}:"
            f" {error.strerror}. {_LOST}"
        ) from error
    for at, ((shard, chunk), buffer) in enumerate(zip(request, buffers, strict=True)):
        # Fresh memory may hold, by chance, what was there before: this very leaf.
        short = at >= len(buffers) - len(left)
        start, data = chunk * CHUNK, buffer[: max(0, shard.nbytes - chunk * CHUNK)]
        found, expected = checksum(data, shard.seed(chunk)), shard.checksums[chunk]
        if short or found != expected:
            raise PlacementError(
                f"reload from disk: {shard.what()} is not what was written to {file.directory}:"
                f" bytes {start:,} to {start + len(data):,} have checksum {found:016x}, written"
                f" with {expected:016x}{' (the file ends before)' if short else ''}. {_LOST} Find"
                " out what changed them: a failing disk, mostly (see the kernel's log)."
            )


_LOST = "Unless the disk recovers, this leaf needs a checkpoint."


def _in_blocks(buffers: Sequence[Bytes]) -> Bytes:
    """Copies of buffers in memory that can be written from, each padded with zeros."""
    size = sum(padded(len(buffer)) for buffer in buffers)
    # One per thread, touched once and used again and again. Only the kernel sees it.
    memory = getattr(_STAGING, "memory", None)
    if memory is None or len(memory) < size:
        memory = _STAGING.memory = aligned(max(size, CHUNK))
    at = 0
    for buffer in buffers:
        memory[at : at + len(buffer)] = buffer
        memory[at + len(buffer) : at + padded(len(buffer))] = 0
        at += padded(len(buffer))
    return memory[:size]


_STAGING = threading.local()


def _all(call: Callable[..., int], fd: int, buffers: list[Bytes], offset: int) -> bool:
    """Repeats a request that was cut short; `False` if it stays so."""
    while buffers:
        count = call(fd, buffers, offset)
        count -= count % BLOCK  # a direct request goes on at a block
        if not count:
            return False
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return True


def _requests(shards: Sequence[Shard]) -> Iterator[Request]:
    request: Request = []
    size = 0
    behind: tuple[Scratch | None, int] = None, 0
    for shard in sorted(shards, key=lambda shard: (id(shard.file), shard.extent)):
        for number in range(shard.num_chunks):
            at = shard.extent.offset + number * CHUNK
            nbytes = min(CHUNK, shard.extent.end - at)
            full = size + nbytes > CHUNK or len(request) == _MOST
            if request and (full or (shard.file, at) != behind):
                yield request
                request, size = [], 0
            request.append((shard, number))
            size, behind = size + nbytes, (shard.file, at + nbytes)
    if request:
        yield request


def _run(move: Callable[[Request], None], shards: Sequence[Shard]) -> None:
    queue, failures = deque(_requests(shards)), list[BaseException]()

    def work() -> None:
        while not failures:
            try:
                request = queue.popleft()
            except IndexError:
                return
            try:
                move(request)
                for shard, _ in request:
                    shard.done()
            except BaseException as error:
                failures.append(error)

    helpers = [executor().submit(work) for _ in range(min(DEPTH, len(queue)) - 1)]
    try:
        work()
    finally:
        queue.clear()
        # Helpers that never started would find nothing to do: calls that run on these threads
        # themselves must not wait for them.
        wait([helper for helper in helpers if not helper.cancel()])
        for shard in shards:
            shard.drop()
    if failures:
        raise failures[0]


@functools.cache
def executor() -> ThreadPoolExecutor:
    """The threads of all disk transfers; two more than requests, for calls in the background."""
    return ThreadPoolExecutor(DEPTH + 2, thread_name_prefix="fzero-disk")


def _not_written(shard: Shard, error: OSError) -> PlacementError:
    return PlacementError(
        f"offload to disk: cannot write {shard.what()} to {shard.file.directory}: {error.strerror}"
        f" ({shard.nbytes:,} bytes; {shard.file.free_bytes():,} bytes free there). {advice(error)}"
        f" {UNCHANGED}"
    )
