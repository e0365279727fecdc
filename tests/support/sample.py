"""Cases of which `make test` runs some, and `make nightly` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *nightly: Any) -> list[Any]:
    """The cases for `parametrize`, those named afterwards marked `nightly`."""
    found = list(cases)
    assert all(case in found for case in nightly), "nightly cases must be among the cases"
    return [
        case if case not in nightly
        else pytest.param(*(case if isinstance(case, tuple) else (case,)),
                          marks=pytest.mark.nightly)
        for case in found
    ]  # fmt: skip
