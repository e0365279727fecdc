"""The disk tier against raw direct I/O and tensorstore, in GB/s: jax arrays to files and back.

    python benchmarks/offload_disk.py --path /nvme/tmp
    python benchmarks/offload_disk.py --path /nvme/tmp --gib 4 --rounds 7 --json disk.json
    python benchmarks/offload_disk.py --hash           # the checksums that were compared

Arrays of one size in device memory are written and read by all contestants in turns:

- `fzero`: `fzero.storage.disk.write` and `read`, with names and checksums;
- `tensorstore`: its file driver, one key an array, direct and without `fsync`, as fzero;
- `raw`: threads that write preallocated, aligned memory to one new file with O_DIRECT, and read it
  back; no arrays, no checksums, no names: what `fio` would measure.

Same request size and requests in flight everywhere. The goal is 0.9 of the raw one.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import numpy as np
import xxhash
from rich.console import Console

from fzero.storage import disk, requests, scratch


KIB, MIB, GIB = 2**10, 2**20, 2**30
GOAL = 0.9
# Bytes of an array, and how many of them unless `--gib` or `--files` say less.
CASES = ((64 * KIB, 4096), (4 * MIB, 256), (256 * MIB, 4))


class Contestant:
    """Writes all arrays of a case, reads them, compares them, removes them."""

    def __init__(self, path: Path, arrays: Sequence[jax.Array]) -> None:
        self.path, self.arrays = path, arrays
        self.result: list[Any] = []

    def prepare(self) -> None:
        """What is not timed, before writing."""

    def write(self) -> None:
        """Timed."""
        raise NotImplementedError

    def read(self) -> None:
        """Timed."""
        raise NotImplementedError

    def check(self) -> None:
        """Compares what was read."""
        for new, old in zip(self.result, self.arrays, strict=True):
            assert (np.asarray(new) == np.asarray(old)).all()

    def drop(self) -> None:
        """Removes all files."""
        self.result = []


class Fzero(Contestant):
    """The disk tier."""

    handles: list[disk.DiskArray]

    def write(self) -> None:
        names = [f"leaf/{number}" for number in range(len(self.arrays))]
        self.handles = disk.write(self.arrays, self.path, names)

    def read(self) -> None:
        self.result = jax.block_until_ready(disk.read(self.handles))

    def drop(self) -> None:
        super().drop()
        self.handles = []
        gc.collect()


class TensorStore(Contestant):
    """tensorstore's file driver, one key an array."""

    def prepare(self) -> None:
        import tensorstore

        context = {
            "file_io_mode": {"mode": "direct"},
            "file_io_sync": False,
            "file_io_concurrency": {"limit": requests.DEPTH},
        }
        spec = {"driver": "file", "path": f"{self.path / 'store'}/", "context": context}
        self.store = tensorstore.KvStore.open(spec).result()

    def write(self) -> None:
        # Values are `bytes`. No more of them at once than fzero has in flight.
        waiting: list[Any] = []
        for number, array in enumerate(self.arrays):
            if len(waiting) >= requests.DEPTH:
                waiting.pop(0).result()
            waiting.append(self.store.write(f"{number:05d}", np.asarray(array).tobytes()))
        for future in waiting:
            future.result()

    def read(self) -> None:
        futures = [self.store.read(f"{number:05d}") for number in range(len(self.arrays))]
        for array, future in zip(self.arrays, futures, strict=True):
            value = np.frombuffer(future.result().value, array.dtype).reshape(array.shape)
            self.result.append(jax.device_put(value, array.sharding))
        jax.block_until_ready(self.result)

    def drop(self) -> None:
        super().drop()
        shutil.rmtree(self.path / "store", ignore_errors=True)


class Raw(Contestant):
    """One new file, from and to preallocated memory, by as many threads as fzero has."""

    fd = -1

    def prepare(self) -> None:
        total = sum(array.nbytes for array in self.arrays)
        self.starts = range(0, total, requests.CHUNK)
        self.total = total
        self.memory = [scratch.aligned(requests.CHUNK) for _ in range(requests.DEPTH)]
        source = np.concatenate([
            np.asarray(array).reshape(-1).view(np.uint8)
            for array in self.arrays[: -(-requests.CHUNK // self.arrays[0].nbytes)]
        ])  # fmt: skip
        for memory in self.memory:
            memory[: len(source)] = source[: requests.CHUNK]

    def run(self, request: Callable[[int, Any], Any]) -> None:
        """All requests."""
        todo, lock = iter(self.starts), threading.Lock()

        def work(memory: Any) -> None:
            while True:
                with lock:
                    start = next(todo, None)
                if start is None:
                    return
                request(start, memory[: min(requests.CHUNK, self.total - start)])

        threads = [threading.Thread(target=work, args=(memory,)) for memory in self.memory]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def write(self) -> None:
        self.fd = os.open(self.path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, self.total)
        self.run(lambda start, data: os.pwrite(self.fd, data, start))

    def read(self) -> None:
        self.run(lambda start, data: os.preadv(self.fd, [data], start))

    def check(self) -> None:
        assert (self.memory[0] == self.memory[-1]).all()

    def drop(self) -> None:
        super().drop()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


CONTESTANTS: dict[str, type[Contestant]] = {
    "fzero": Fzero,
    "tensorstore": TensorStore,
    "raw": Raw,
}


def main() -> int:
    """Runs what the command line asks for."""
    args = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 170)
    if args.hash:
        console.print(compare_checksums().rich())
        return 0
    with tempfile.TemporaryDirectory(dir=args.path) as directory:
        report, grid = compare(Path(directory), args)
    console.print(grid.rich())
    if args.json:
        common.save(args.json, report, grid)
    return 0


def compare(path: Path, args: argparse.Namespace) -> tuple[dict[str, Any], common.Grid]:
    """All cases; the table has a line for writing and one for reading."""
    report: dict[str, Any] = {"before": common.provenance(), "cases": []}
    report["mode"] = scratch.scratch(path).mode
    report["request_bytes"], report["in_flight"] = requests.CHUNK, requests.DEPTH
    rows = []
    for size, number in CASES:
        number = max(1, min(number, int(args.gib * GIB) // size, args.files))
        seconds = run_case(path, size, number, args)
        case: dict[str, Any] = {"bytes": size, "number": number}
        for what in ("write", "read"):
            rows.append(_row(size, number, what, seconds[what], case))
        report["cases"].append(case)
    report["after"] = common.provenance()
    columns = ("arrays", "", *CONTESTANTS, "of raw", "95 %")
    title = (
        f"GB/s, {requests.DEPTH} requests of {requests.CHUNK // MIB} MiB in flight,"
        f" {report['mode']} (goal: {GOAL} of raw)"
    )
    return report, common.Grid(title, columns, rows)


def run_case(
    path: Path, size: int, number: int, args: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every contestant's writing and reading, in turns."""
    random = np.random.default_rng(0)
    arrays = [
        jax.device_put(random.integers(0, 2**32, size // 4, np.uint32), jax.devices()[0])
        for _ in range(number)
    ]
    jax.block_until_ready(arrays)
    seconds: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in CONTESTANTS} for what in ("write", "read")
    }
    for index in range(args.rounds + 1):
        # The order turns round: what one leaves behind then falls on all.
        for name in list(CONTESTANTS)[:: 1 if index % 2 else -1]:
            contestant = CONTESTANTS[name](path, arrays)
            contestant.prepare()
            try:
                took = {"write": _time(contestant.write), "read": _time(contestant.read)}
                if not index:  # the first round warms up
                    contestant.check()
            finally:
                contestant.drop()
            for what, value in took.items():
                if index:
                    seconds[what][name].append(value)
    return seconds


def _time(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _row(
    size: int, number: int, what: str, seconds: dict[str, list[float]], case: dict[str, Any]
) -> tuple[str, ...]:
    """A line of the table; adds its numbers to the report."""
    gigabytes = size * number / 1e9
    rate = {name: gigabytes / statistics.median(times) for name, times in seconds.items()}
    low, high = common.ratio_interval(seconds["raw"], seconds["fzero"])
    case[what] = {
        "gb_per_s": rate,
        "seconds": seconds,
        "of_raw": rate["fzero"] / rate["raw"],
        "interval": (low, high),
    }
    unit = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
    return (
        f"{number} x {unit}", what, *(f"{rate[name]:.2f}" for name in CONTESTANTS),
        f"{case[what]['of_raw']:.2f}", f"{low:.2f}-{high:.2f}",
    )  # fmt: skip


def compare_checksums() -> common.Grid:
    """GB/s of the checksums that Python programs can get, on one core and on two."""
    candidates: dict[str, Callable[[Any], Any]] = {
        "xxhash.xxh3_64": lambda data: xxhash.xxh3_64_intdigest(data, seed=1),
        "xxhash.xxh3_128": lambda data: xxhash.xxh3_128_intdigest(data, seed=1),
        "zlib.crc32": zlib.crc32,
        "zlib.adler32": zlib.adler32,
    }
    try:
        import google_crc32c

        candidates["google_crc32c"] = lambda data: google_crc32c.extend(0, data)
    except ImportError:
        pass
    rows = []
    for name, function in candidates.items():
        cells = []
        for size in (64 * KIB, requests.CHUNK):
            # More than the caches hold: that is where shards are.
            data = [np.full(size, number % 256, np.uint8) for number in range(256 * MIB // size)]
            for threads in (1, 2):
                cells.append(f"{_hash_rate(function, data, threads):.1f}")
        rows.append((name, *cells))
    columns = ("checksum", "64 KiB", "two threads", f"{requests.CHUNK // MIB} MiB", "two threads")
    return common.Grid("GB/s of checksums", columns, rows)


def _hash_rate(function: Callable[[Any], Any], data: Sequence[Any], num_threads: int) -> float:
    def work(part: Sequence[Any]) -> None:
        for block in part:
            function(block)

    best = 0.0
    for _ in range(5):
        threads = [
            threading.Thread(target=work, args=(data[number::num_threads],))
            for number in range(num_threads)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        best = max(best, sum(len(block) for block in data) / seconds / 1e9)
    return best


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--path", help="a directory on the disk to measure (the temporary one)")
    parser.add_argument("--gib", type=float, default=1.0, help="most data of a case (1)")
    parser.add_argument("--files", type=int, default=4096, help="most files of a case (4096)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (5)")
    parser.add_argument("--hash", action="store_true", help="compare checksums instead")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
