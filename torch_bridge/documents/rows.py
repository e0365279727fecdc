"""Documents as rows of one length, and batches of rows as a function of seed and step."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fzero.errors import BatchError
from torch_bridge.documents.tokens import IGNORED, Document
from torch_bridge.packing import pack


IntArray = NDArray[np.int32]
Batch = dict[str, IntArray]
TOO_LONG = ("error", "cut", "skip")


@dataclass(frozen=True)
class Rows:
    """Rows of one length.

    Attributes:
        values: int32 arrays `(N, length)`, as `tb.pack` gives them: `ids`, `labels`, `segments`,
            `positions`.
        left_out: documents that were left out because they are too long.
        cut: documents that lost their end for it.

    Example:
        >>> document = Document(np.array([4, 5, 6]), np.array([-100, 5, 6]), "file:1")
        >>> rows = Rows.of([document] * 3, length=8)
        >>> len(rows), rows[0]["ids"].tolist(), rows.num_tokens
        (2, [4, 5, 6, 4, 5, 6, 0, 0], 9)
    """

    values: Mapping[str, IntArray]
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
        kept, cut = [], 0
        for one in documents:
            if len(one.ids) > length:
                if too_long == "error":
                    raise BatchError(
                        f"{one.where}: {len(one.ids)} tokens, but rows have {length}: expected a"
                        ' shorter one; make rows longer (--seq), or say too_long="cut" or "skip"'
                        " (--too-long)"
                    )
                if too_long == "skip":
                    continue
                cut += 1
                one = Document(one.ids[:length], one.labels[:length], one.where)
            kept.append(one)
        ids, labels = [d.ids for d in kept], [d.labels for d in kept]
        made = pack(ids, length, labels=labels, alone=not packed)  # type: ignore[arg-type]
        return cls(made, len(documents) - len(kept), cut)

    def __len__(self) -> int:
        return len(self.values["ids"])

    def __getitem__(self, index: Any) -> Batch:
        return {name: value[index] for name, value in self.values.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens that are some, without what fills rows up."""
        return int(np.count_nonzero(self.values["segments"]))

    @property
    def num_learned(self) -> int:
        """Tokens that are predicted, and count."""
        return int(np.count_nonzero(self.values["labels"] != IGNORED))

    def batch(self, seed: int, step: int, size: int, part: slice = slice(None)) -> Batch:
        """The batch of a step, from seed and step alone: no step needs those before it.

        Each epoch has every row once, in an order drawn from seed and epoch.

        Args:
            seed: of the order.
            step: from 0 on.
            size: rows in the whole batch.
            part: which of them; a process that reads only its own.
        """
        return self[batch_places(len(self), seed, step, size)[part]]

    def in_order(self, size: int) -> Iterator[Batch]:
        """All rows once, in batches of one size; rows that fill the last one count nothing."""
        fill = {"labels": IGNORED}
        for start in range(0, len(self), size):
            found = self[start : start + size]
            missing = size - len(found["ids"])
            yield {
                name: np.pad(value, ((0, missing), (0, 0)), constant_values=fill.get(name, 0))
                for name, value in found.items()
            }

    @property
    def fingerprint(self) -> str:
        """Equal for equal rows."""
        digest = hashlib.sha256()
        for name in sorted(self.values):
            digest.update(self.values[name].tobytes())
        return digest.hexdigest()[:16]


def batch_places(length: int, seed: int, step: int, size: int) -> NDArray[np.int64]:
    """Which of `length` rows a step's batch has."""
    places = np.arange(step * size, (step + 1) * size)
    found = [_order(seed, int(p) // length, length)[p % length] for p in places]
    return np.asarray(found, np.int64)


@functools.lru_cache(maxsize=2)  # a batch can straddle two epochs
def _order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)
