"""What the training loop asks of what it trains on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


Batch = dict[str, NDArray[np.int32]]


class Source(Protocol):
    """Batches to train on and to validate with."""

    @property
    def fingerprint(self) -> str:
        """Equal where results can be compared."""

    @property
    def whole(self) -> str:
        """Identifies what is trained on, too."""

    @property
    def unigram_entropy(self) -> float:
        """Nats per validated token of a model that knows how often each occurs, and no more."""

    @property
    def byte_level(self) -> bool:
        """Whether tokens are bytes."""

    def describe(self) -> str:
        """One line for the reader of a run."""

    def train_batch(self, seed: int, step: int, size: int, who: tuple[int, int] = (0, 1)) -> Batch:
        """The batch of a step, from seed and step alone; of several processes, one's own rows."""

    def validation_batches(self, size: int, who: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """All that validates, likewise; rows that fill the last batch count nothing."""

    def num_tokens(self, seed: int, step: int, size: int) -> int:
        """Tokens in the batch of a step, over all processes, that are some."""


def own_rows(size: int, who: tuple[int, int]) -> slice:
    """A process's rows of a batch: this process, and how many there are."""
    own = size // who[1]
    return slice(who[0] * own, (who[0] + 1) * own)


def entropy(counts: Any) -> float:
    """Nats per token of a model that knows how often each token occurs, and nothing else.

    Args:
        counts: how often each occurs.
    """
    shares = counts / counts.sum()
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())
