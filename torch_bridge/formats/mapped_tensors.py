"""Tensors that `torch.save` wrote somewhere inside a file: mapped into memory, read by slices."""

from __future__ import annotations

import io
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensorMode

from fzero.sharding.lazy_array import Index


@dataclass(frozen=True)
class Mapped:
    """A tensor in a file.

    Args:
        dtype: its dtype.
        shape: its shape.
        content: its bytes where they lie in the file, of shape `(*shape, bytes of an element)`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: np.ndarray[Any, Any]

    def copy_to(self, out: torch.Tensor, to: Index, index: Index) -> None:
        """Reads a slice into one of a tensor; no other byte of the file is read for it."""
        # As bytes, since elements begin anywhere in the file.
        out.unsqueeze(-1).view(torch.uint8).numpy()[to] = self.content[index]


def map_file(path: Path) -> mmap.mmap:
    """A file's bytes, of which those are read that are looked at."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def find_tensor(pages: mmap.mmap, start: int, length: int) -> Mapped:
    """The tensor that `torch.save` wrote at an offset.

    Args:
        pages: the file.
        start: the first byte.
        length: how many bytes there are.

    Raises:
        Exception: whatever a damaged file leads to; nothing in it runs.
    """
    with FakeTensorMode():  # fake tensors know where their elements lie, and do not read them
        file: Any = _FileRange(pages, start, length)
        found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, torch.Tensor):
        raise ValueError(f"expected a tensor, got {type(found).__name__}")
    storage: Any = found.untyped_storage()
    if found.is_conj() or found.is_neg() or storage._checkpoint_offset is None:
        return _read(_FileRange(pages, start, length))
    if not 0 <= storage._checkpoint_offset <= length - storage.nbytes():
        raise ValueError("the tensor's elements are said to lie outside of it")
    elements = memoryview(pages)[start + storage._checkpoint_offset :][: storage.nbytes()]
    size = found.element_size()
    strides = (*(step * size for step in found.stride()), 1)
    content: np.ndarray[Any, Any] = np.ndarray(
        (*found.shape, size), np.uint8, elements, found.storage_offset() * size, strides
    )
    return Mapped(found.dtype, tuple(found.shape), content)


def _read(file: Any) -> Mapped:
    """A tensor whose elements are not those in the file (a conjugate), or lie in an old layout."""
    found = torch.load(file, map_location="cpu", weights_only=True).detach()
    plain = found.resolve_conj().resolve_neg().contiguous()
    return Mapped(plain.dtype, tuple(plain.shape), plain.unsqueeze(-1).view(torch.uint8).numpy())


class _FileRange(io.RawIOBase):
    """Some bytes of a file as a file of their own."""

    def __init__(self, pages: mmap.mmap, start: int, length: int) -> None:
        self.pages, self.start, self.length, self.at = pages, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        return self.at

    def readinto(self, into: Any) -> int:
        count = max(0, min(len(into), self.length - self.at))
        into[:count] = self.pages[self.start + self.at : self.start + self.at + count]
        self.at += count
        return count
