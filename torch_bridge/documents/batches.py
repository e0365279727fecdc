"""Batches of rows by `grain`: read ahead by threads, a part for each process."""

from __future__ import annotations

import hashlib
import sys
from functools import cached_property
from typing import Any

import jax

from fzero.errors import BatchError
from torch_bridge.documents.rows import Batch, Rows


def grain_batches(
    rows: Rows,
    size: int,
    *,
    seed: int = 0,
    steps: int | None = None,
    process: int | None = None,
    num_processes: int | None = None,
    threads: int = 2,
) -> Any:
    """An iterator of `grain` over batches, each process with its own rows of each.

    Batch k is a function of seed and k, whatever the number of processes: the rows of process 0,
    then those of process 1, and so on, are those of `rows.batch(seed, k, size)`. So the iterator's
    position is the number of batches taken, the same in every process; saved with the state, it is
    where any number of processes goes on:

        fz.save(path, state, plan, data_position=iterator.get_state())
        iterator.set_state(fz.checkpoint(path).data_position)

    A position says of which batches it is: another seed or size, or other rows refuse it (another
    number of them, or another first batch: there may be too many to read).

    Args:
        rows: what batches are made of.
        size: rows in a batch, over all processes.
        seed: of the order, which is another in every epoch.
        steps: how many batches there are; without end if not given.
        process: which process this is, as jax counts them if not given.
        num_processes: how many there are, likewise.
        threads: that read ahead.

    Returns:
        A `grain.DatasetIterator` of dicts of arrays; `fz.local_batch` makes global ones of them.

    Raises:
        BatchError: there are no rows, they do not divide over the processes, or `grain` is missing;
            from `set_state`, a position in other batches.

    Example:
        >>> import numpy as np
        >>> from torch_bridge.documents.tokens import Document
        >>> one = [Document(np.array([n, n]), np.array([n, n]), "") for n in range(6)]
        >>> rows = Rows.of(one, length=2)
        >>> iterator = grain_batches(rows, 4, process=1, num_processes=2)
        >>> bool((next(iterator)["ids"] == rows.batch(0, 0, 4)["ids"][2:]).all())
        True
        >>> iterator.get_state()["next_index"]
        1
    """
    try:
        import grain
    except ImportError as error:
        raise BatchError("grain_batches takes the package grain: pip install grain") from error
    process = jax.process_index() if process is None else process
    count = jax.process_count() if num_processes is None else num_processes
    if not 0 <= process < count:
        raise BatchError(f"grain_batches: process={process}: expected 0 to {count - 1}")
    if not len(rows) or size < 1 or size % count:
        raise BatchError(
            f"grain_batches: {len(rows)} rows in batches of {size} over {count} processes: expected"
            " some rows, and a size that the processes divide"
        )
    num = size // count
    own = slice(process * num, (process + 1) * num)
    numbers = grain.MapDataset.range(sys.maxsize if steps is None else steps)
    numbered = numbers.map(lambda step: rows.batch(seed, int(step), size, own))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2 * threads, 1))
    batches = iter(numbered.to_iter_dataset(options))
    return _of_these(batches, {"rows": len(rows), "size": int(size), "seed": int(seed)}, rows)


def _of_these(batches: Any, about: dict[str, Any], rows: Rows) -> Any:
    """The iterator, with positions that say what they are positions in: grain's are a number."""
    import grain

    class Batches(grain.DatasetIterator):  # type: ignore[misc]  # grain may be missing
        def __next__(self) -> Batch:
            return next(batches)

        @cached_property
        def about(self) -> dict[str, Any]:
            # The first batch stands for all rows, of which there may be too many to read.
            first = rows.batch(about["seed"], 0, about["size"])
            digest = hashlib.sha256(b"".join(first[name].tobytes() for name in sorted(first)))
            return {**about, "first_batch": digest.hexdigest()[:16]}

        def get_state(self) -> dict[str, Any]:
            return {**batches.get_state(), **self.about}

        def set_state(self, state: dict[str, Any]) -> None:
            came = {name: state.get(name) for name in self.about}
            if came != self.about:
                raise BatchError(
                    f"grain_batches: expected a position in {self.about}, got one in {came}: it"
                    " would be somewhere else in these batches. Make the iterator of the rows,"
                    " size and seed that it was saved with, or begin anew. (None: it was saved"
                    " before positions said so; where it is the same, add these entries)"
                )
            batches.set_state({name: state[name] for name in state if name not in came})

    return Batches(batches)
