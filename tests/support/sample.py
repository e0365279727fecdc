"""Cases of which `make test` runs some, and `make test-extended` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *extended: Any, mark: str = "extended") -> list[Any]:
    """The cases for `parametrize`, those named afterwards marked `extended` (or `nightly`)."""
    found = list(cases)
    assert all(case in found for case in extended), "extended cases must be among the cases"
    return [
        case if case not in extended
        else pytest.param(*(case if isinstance(case, tuple) else (case,)),
                          marks=getattr(pytest.mark, mark))
        for case in found
    ]  # fmt: skip
