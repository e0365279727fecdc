"""`torch.distributions` without what they assert of values: a compiled program cannot raise.

`validate_args=True` of one keeps its checks, in whichever place it was made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributions import Distribution

from torch_bridge.export.stand_ins.replacement import replaced


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """While a module is exported: also of those that it made before, and holds."""
    begin, default = Distribution.__init__, vars(Distribution)["_validate_args"]

    def made(
        self: Any, batch_shape: Any = (), event_shape: Any = (), validate_args: bool | None = None
    ) -> None:
        """Sizes that are traced are no `torch.Size` by themselves."""
        begin(self, torch.Size(batch_shape), torch.Size(event_shape), validate_args)

    Distribution._validate_args = _Default(default)  # type: ignore[assignment]
    try:
        with replaced(((Distribution, "__init__", made),)):
            yield
    finally:
        Distribution._validate_args = default


class _Default:
    """Whether a distribution checks values that does not say so itself: not in this thread."""

    def __init__(self, elsewhere: bool) -> None:
        self._elsewhere, self._exporting = elsewhere, threading.get_ident()

    def __get__(self, of: Any, kind: Any) -> bool:
        return self._elsewhere and threading.get_ident() != self._exporting
