"""The facade of schedules exports what it says."""

from __future__ import annotations

import inspect

import fzero.pipeline


def test_facade():
    names = fzero.pipeline.__all__
    assert len(set(names)) == len(names)
    for name in names:
        value = getattr(fzero.pipeline, name)
        assert inspect.getdoc(value), name
