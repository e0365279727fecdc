"""What took how long in a run: lines of timings.jsonl, beside metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import fzero as fz
from torch_bridge.run.figures import gauge


class Timings:
    """Writes what was done since the last line, so that all lines together are the whole time.

    Args:
        sink: takes lines of JSON.
    """

    def __init__(self, sink: TextIO) -> None:
        self._sink = sink
        self._mark = time.perf_counter()

    def done(self, what: str, step: int) -> float:
        """What ended now, after so many steps; returns the seconds since what ended before it."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        write_line(self._sink, {"what": what, "step": step, "seconds": round(seconds, 6)})
        return seconds

    def placed(self, state: fz.TrainState, step: int) -> None:
        """Where the state is after so many steps, and what arrays take on the fullest device."""
        where = fz.placement(state)
        tiers = {
            "device": where.bytes_per_device,
            "host": where.host_bytes_per_device,
            "disk": where.disk_bytes_per_device,
        }
        held = {tier: {k: v for k, v in sizes.items() if v} for tier, sizes in tiers.items()}
        write_line(
            self._sink,
            {"what": "placement", "step": step, "bytes_per_device": held}
            | {"bytes_in_use": gauge.bytes_in_use(), "peak_bytes": gauge.peak_bytes()},
        )


def write_line(sink: TextIO, entry: Mapping[str, Any]) -> None:
    """Writes a line of JSON in one go: who follows the file, or reads it after the run was killed,
    finds whole lines."""
    sink.write(json.dumps(entry) + "\n")
    sink.flush()


@contextlib.contextmanager
def timings(path: Path, again: bool) -> Iterator[Timings]:
    """The timings of a run; a resumed one goes on below those of the first.

    Args:
        path: the file.
        again: whether the run was resumed.
    """
    with path.open("a" if again else "w", encoding="utf-8") as sink:
        yield Timings(sink)
