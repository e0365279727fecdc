"""Documents as rows of one length, and batches of rows as a function of seed and step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fzero.errors import BatchError
from torch_bridge.documents.tokens import IGNORED, Document
from torch_bridge.packing import filled, rows_of


IntArray = NDArray[np.int32]
Batch = dict[str, IntArray]
TOO_LONG = ("error", "cut", "skip")
# Rows that are in memory at once where all are looked at.
_CHUNK = 16


@dataclass(frozen=True)
class Rows:
    """Rows of one length, made of their documents when they are asked for.

    Attributes:
        documents: what they hold; a `Spool` keeps them in a file.
        places: the numbers of each row's documents.
        length: tokens of a row; what is longer loses its end.
        left_out: documents that were left out because they are too long.
        cut: documents that lost their end for it.

    Example:
        >>> document = Document(np.array([4, 5, 6]), np.array([-100, 5, 6]), "file:1")
        >>> rows = Rows.of([document] * 3, length=8)
        >>> len(rows), rows[0]["ids"].tolist(), rows.num_tokens
        (2, [4, 5, 6, 4, 5, 6, 0, 0], 9)
    """

    documents: Sequence[Document]
    places: Sequence[NDArray[np.int64]]
    length: int
    left_out: int = 0
    cut: int = 0

    @classmethod
    def of(
        cls,
        documents: Sequence[Document],
        length: int,
        *,
        packed: bool = True,
        too_long: str = "error",
    ) -> Rows:
        """Documents as rows.

        Args:
            documents: what the rows hold, whole.
            length: tokens in a row.
            packed: whether several documents may be in a row.
            too_long: what becomes of a document that does not fit into a row: "error", "cut" (its
                end is), or "skip".

        Raises:
            BatchError: one does not fit; names file and line.
        """
        if too_long not in TOO_LONG:
            raise BatchError(f"too_long={too_long!r}: expected one of {TOO_LONG}")
        kept, sizes, cut, left_out = [], [], 0, 0
        for number, one in enumerate(documents):
            size = _checked(one)
            if size > length:
                if too_long == "error":
                    raise BatchError(
                        f"{one.where}: {size} tokens, but rows have {length}: expected a"
                        ' shorter one; make rows longer (--seq), or say too_long="cut" or "skip"'
                        " (--too-long)"
                    )
                if too_long == "skip":
                    left_out += 1
                    continue
                cut += 1
            if size:
                kept.append(number)
                sizes.append(min(size, length))
        numbers = np.asarray(kept, np.int64)
        found = [numbers[row] for row in rows_of(sizes, length, alone=not packed)]
        return cls(documents, found, length, left_out, cut)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Batch:
        """Rows by their numbers, as numpy takes them: int32 `(n, length)`, or `(length,)` of one.

        As `tb.pack` gives them: `ids`, `labels`, `segments`, `positions`.
        """
        chosen = np.arange(len(self))[index]
        rows = [self._documents(number) for number in np.atleast_1d(chosen)]
        found = filled(rows, self.length)
        return found if chosen.ndim else {name: value[0] for name, value in found.items()}

    def _documents(self, row: int) -> Iterator[tuple[IntArray, IntArray]]:
        for number in self.places[row]:
            one = self.documents[int(number)]
            yield one.ids[: self.length], one.labels[: self.length]

    @property
    def values(self) -> Batch:
        """All rows: they may be more than memory takes."""
        return self[:]

    def chunks(self) -> Iterator[Batch]:
        """All rows, in their order, a few at a time."""
        for start in range(0, len(self), _CHUNK):
            yield self[start : start + _CHUNK]

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """How many tokens each row has, without what fills it up."""
        found = [np.count_nonzero(chunk["segments"], axis=1) for chunk in self.chunks()]
        return np.concatenate([np.zeros(0, np.int64), *found])

    @property
    def num_tokens(self) -> int:
        """Tokens that are some, without what fills rows up."""
        return int(self.tokens.sum())

    @cached_property
    def num_learned(self) -> int:
        """Tokens that are predicted, and count."""
        return sum(int(np.count_nonzero(x["labels"] != IGNORED)) for x in self.chunks())

    def batch(self, seed: int, step: int, size: int, part: slice = slice(None)) -> Batch:
        """The batch of a step, from seed and step alone: no step needs those before it.

        Each epoch has every row once, in an order drawn from seed and epoch.

        Args:
            seed: of the order.
            step: from 0 on.
            size: rows in the whole batch.
            part: which of them; a process that reads only its own.
        """
        return self[batch_rows(len(self), seed, step, size)[part]]

    def in_order(self, size: int, part: slice = slice(None)) -> Iterator[Batch]:
        """All rows once, in batches of one size; rows that fill the last one count nothing.

        Args:
            size: rows in the whole batch.
            part: which of them; a process that reads only its own.
        """
        for start in range(0, len(self), size):
            own = np.arange(start, start + size)[part]
            rows = [self._documents(n) if n < len(self) else () for n in own]
            yield filled(rows, self.length)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal rows."""
        digest = hashlib.sha256()
        for name in ("ids", "labels", "positions", "segments"):
            for chunk in self.chunks():
                digest.update(chunk[name].tobytes())
        return digest.hexdigest()[:16]


def _checked(one: Document) -> int:
    """A document's number of tokens, if it has a label for each."""
    ids, labels = np.asarray(one.ids), np.asarray(one.labels)
    if ids.ndim != 1 or ids.shape != labels.shape or {ids.dtype.kind, labels.dtype.kind} - {*"iu"}:
        raise BatchError(
            f"{one.where}: expected whole numbers for ids (T,) and labels (T,), got {ids.dtype} of"
            f" shape {list(ids.shape)} and {labels.dtype} of shape {list(labels.shape)}"
        )
    return int(ids.size)


def batch_rows(length: int, seed: int, step: int, size: int) -> NDArray[np.int64]:
    """Which of `length` rows a step's batch has."""
    numbers = np.arange(step * size, (step + 1) * size)
    found = [_order(seed, int(p) // length, length)[p % length] for p in numbers]
    return np.asarray(found, np.int64)


@lru_cache(maxsize=2)  # a batch can straddle two epochs
def _order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)
