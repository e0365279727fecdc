"""Values that are read slice by slice, only where they are needed."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np


Index = tuple[slice, ...]


class LazyArray(abc.ABC):
    """A value that is read slice by slice: an initial leaf of a model may be one.

    `fz.init` asks for the slice that each device keeps, so that no host ever holds the whole. A
    subclass sets `shape` and `dtype` (what `read` returns) and defines `read`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """What `index` says: a slice with start, stop and step 1 for each dim."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The whole value."""
        whole = self.read(tuple(slice(0, n) for n in self.shape))
        return np.array(whole, dtype=dtype, copy=copy)


class Stacked(LazyArray):
    """Equal layers' leaves as the one leaf of a `Stack`: dim 0 counts the layers.

    Args:
        rows: arrays or `LazyArray`s of one shape and dtype; only those that are asked for are read.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = tuple(rows)
        self.shape = (len(self.rows), *self.rows[0].shape)
        self.dtype = np.dtype(self.rows[0].dtype)

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`."""
        first, *rest = index
        inner = tuple(rest)
        found = np.empty([s.stop - s.start for s in index], self.dtype)
        for at, row in enumerate(self.rows[first]):
            found[at] = row.read(inner) if isinstance(row, LazyArray) else row[inner]
        return found
