"""Tensors in files: known by name, dtype and shape, read when and where they are needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fzero.errors import CheckpointError
from fzero.sharding.lazy_array import Index, LazyArray
from fzero.tree import num_bytes
from torch_bridge.dtypes import canonical, numpy_dtype
from torch_bridge.module.weights import to_host


Fetch = Callable[[Index], torch.Tensor]


@dataclass(frozen=True, eq=False)
class LazyTensor(LazyArray):
    """A tensor that is read slice by slice.

    Args:
        name: its name, for messages.
        torch_dtype: its dtype in the file; `dtype` is the one JAX holds instead.
        shape: its shape.
        fetch: gives the values of a slice (start, stop, step 1 of each dim).
        file: where it is, for messages.
    """

    name: str
    torch_dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Fetch = field(repr=False)
    file: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        """The dtype of what `read` returns."""
        try:
            return canonical(numpy_dtype(self.torch_dtype))
        except TypeError as error:
            raise CheckpointError(f"{self.file}: `{self.name}`: {error}") from error

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor in its own dtype."""
        return num_bytes(self.shape, self.torch_dtype)

    def tensor(self, index: Index | None = None) -> torch.Tensor:
        """The tensor, or a slice of it, on the CPU; it may be backed by the file (read only).

        Raises:
            CheckpointError: the file cannot be read, or holds something else than it says.
        """
        index = whole(self.shape) if index is None else index
        wanted = tuple(len(range(*s.indices(n))) for s, n in zip(index, self.shape, strict=True))
        try:
            found = self.fetch(index)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged file makes of its reader
            raise CheckpointError(
                f"{self.file}: `{self.name}` cannot be read: {_first_line(error)}"
            ) from error
        if tuple(found.shape) != wanted or found.dtype != self.torch_dtype:
            raise CheckpointError(
                f"{self.file}: `{self.name}`: expected {self.torch_dtype}{list(wanted)}, the file"
                f" holds {found.dtype}{list(found.shape)}"
            )
        return found

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """A slice as a host array of its own, in the dtype that JAX holds."""
        try:
            return to_host(self.tensor(index))
        except (OverflowError, TypeError) as error:
            raise CheckpointError(f"{self.file}: `{self.name}`: {error}") from error

    def cast(self, dtype: torch.dtype) -> LazyTensor:
        """The same values in another dtype, converted as they are read.

        A number that becomes infinite there, as 1e5 does in float16, is an error.
        """
        if dtype == self.torch_dtype:
            return self

        def fetch(index: Index) -> torch.Tensor:
            value = self.tensor(index)
            made = value.to(dtype)
            if dtype == torch.float16 and bool((made.isinf() & ~value.isinf()).any()):
                raise CheckpointError(
                    f"{self.file}: `{self.name}` has {float(value.abs().max()):g}, which is"
                    f" infinite in {dtype}: bfloat16 and float32 hold it"
                )
            return made

        return dataclasses.replace(self, torch_dtype=dtype, fetch=fetch)

    def named(self, name: str) -> LazyTensor:
        """The same tensor under another name."""
        return dataclasses.replace(self, name=name)


def whole(shape: Sequence[int]) -> Index:
    """The index of everything."""
    return tuple(slice(0, n) for n in shape)


def in_memory(name: str, tensor: torch.Tensor, file: str = "") -> LazyTensor:
    """A tensor that is there already (or mapped into memory from its file)."""
    plain = tensor.detach()
    return LazyTensor(name, plain.dtype, tuple(plain.shape), lambda i: plain[i], file)


def from_flat(
    name: str, shape: Sequence[int], flats: Sequence[torch.Tensor], file: str
) -> LazyTensor:
    """A tensor whose elements, in row-major order, are those of flat tensors one after the other.

    Raises:
        CheckpointError: they are more or fewer, or of different dtypes.
    """
    shape, total = tuple(shape), math.prod(shape)
    dtypes = {one.dtype for one in flats} or {torch.float32}
    if sum(one.numel() for one in flats) != total or len(dtypes) != 1:
        raise CheckpointError(
            f"{file}: `{name}` has {total} elements; the file has"
            f" {[f'{one.numel()} {one.dtype}' for one in flats]}"
        )

    def fetch(index: Index) -> torch.Tensor:
        # Rows of the first dim are one range of elements; what is cut further is cut afterwards.
        rows = index[0] if shape else slice(0, 1)
        width = total // shape[0] if shape and shape[0] else total
        taken = take(flats, rows.start * width, (rows.stop - rows.start) * width)
        flat = taken[0] if len(taken) == 1 else torch.cat([flats[0][:0], *taken])
        if not shape:
            return flat.reshape(())
        return flat.reshape(rows.stop - rows.start, *shape[1:])[(slice(None), *index[1:])]

    return LazyTensor(name, dtypes.pop(), shape, fetch if flats else _empty(shape), file)


def _empty(shape: tuple[int, ...]) -> Fetch:
    return lambda index: torch.empty(shape)[index]


def take(flats: Sequence[torch.Tensor], start: int, count: int) -> list[torch.Tensor]:
    """A range of the elements of flat tensors that are thought of as laid end to end.

    Example:
        >>> take([torch.arange(4), torch.arange(4, 9)], 3, 4)
        [tensor([3]), tensor([4, 5, 6])]
    """
    found, first = [], 0
    for flat in flats:
        low, high = max(start, first), min(start + count, first + flat.numel())
        if low < high:
            found.append(flat[low - first : high - first])
        first += flat.numel()
    return found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
