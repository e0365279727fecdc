"""Documents in a file of this process's own: in memory is only what is looked at."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fzero.errors import BatchError
from torch_bridge.documents.tokens import Document


class Spool(Sequence[Document]):
    """Documents that were written to a file without a name, which goes with its reader.

    A slice of it is one, too, of the same file.

    Args:
        bytes_of: the file, as bytes.
        ends: int64 `(N, 3)`: where each document's tokens, labels and source end in it.
        chosen: which of them, by number.

    Example:
        >>> made = (Document(np.arange(n), np.arange(n), f"file:{n}") for n in (2, 3, 4))
        >>> spool = Spool.of(made)
        >>> len(spool), spool[1].ids.tolist(), spool[-1].where, len(spool[1:])
        (3, [0, 1, 2], 'file:4', 2)
    """

    def __init__(
        self, bytes_of: NDArray[np.uint8], ends: NDArray[np.int64], chosen: NDArray[np.int64]
    ) -> None:
        self._bytes, self._ends, self._chosen = bytes_of, ends, chosen

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Spool:
        """Writes documents, one at a time.

        Raises:
            BatchError: there is no room for them; says where there might be.
        """
        ends, at = array("q"), 0
        with tempfile.TemporaryFile() as file:
            try:
                for one in documents:
                    tokens = (x.astype(np.int32).tobytes() for x in (one.ids, one.labels))
                    for data in (*tokens, one.where.encode("utf-8", "surrogateescape")):
                        file.write(data)
                        at += len(data)
                        ends.append(at)
                file.flush()
            except OSError as error:
                raise BatchError(
                    f"documents: their tokens cannot be written to {tempfile.gettempdir()}"
                    f" ({error.strerror}); TMPDIR says where else there is room"
                ) from error
            whole = np.memmap(file, np.uint8, "r").view(np.ndarray) if at else np.zeros(0, np.uint8)
        ends_of = np.array(ends, np.int64).reshape(-1, 3)
        return cls(whole, ends_of, np.arange(len(ends_of)))

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Spool: ...
    def __getitem__(self, index: Any) -> Any:
        chosen = self._chosen[index]
        if isinstance(index, slice):
            return Spool(self._bytes, self._ends, chosen)
        begin = self._ends[chosen - 1, 2] if chosen else 0
        ids, labels, end = self._ends[chosen] - begin
        # Copied: a source may have any number of bytes, so tokens begin anywhere.
        own = self._bytes[begin : begin + end].tobytes()
        return Document(
            np.frombuffer(own[:ids], np.int32),
            np.frombuffer(own[ids:labels], np.int32),
            own[labels:].decode("utf-8", "surrogateescape"),
        )

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))

    def without(self, other: Spool) -> Spool:
        """What is not in another part of the same documents."""
        kept = np.setdiff1d(self._chosen, other._chosen, assume_unique=True)
        return Spool(self._bytes, self._ends, kept)
