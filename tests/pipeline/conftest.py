"""Pipelines are many small programs, and most tests here compile the same ones."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def every_program_is_compiled_once() -> Iterator[None]:
    """The session's cache takes all programs, not only those that take long."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)
