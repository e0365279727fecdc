"""cuDNN's attention where there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """What cuDNN is asked for, answered by jax's own products."""
    asked = jax.nn.dot_product_attention

    def here(*args: Any, implementation: str, **more: Any) -> Any:
        assert implementation == "cudnn"
        with jax.numpy_dtype_promotion("standard"):
            return asked(*args, implementation="xla", **more)

    with (
        mock.patch.object(jax.nn, "dot_product_attention", here),
        mock.patch("fzero.exchange.cudnn.traced_platform", return_value="gpu"),
    ):
        yield
