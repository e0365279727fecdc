"""Quick compiles, for tests that would prove the same in programs that are slow or round otherwise.

Nearly all of this suite's time is LLVM's. With these options a step of a tiny model compiles in a
sixth of the time and runs at about two thirds of the speed (a large one at half). Its sums round
otherwise, and not alike in all stages: tests that compare the bits of different programs need the
options that users have, and do without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax


OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
# The same for a process of its own, as its XLA_FLAGS.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


@contextmanager
def compiles() -> Iterator[None]:
    """Programs of `jax.jit`s made meanwhile compile quickly, whenever they are called."""
    jit = jax.jit

    @functools.wraps(jit)
    def quick(*args: Any, **options: Any) -> Any:
        given = options.pop("compiler_options", None) or {}
        return jit(*args, compiler_options={**OPTIONS, **given}, **options)

    with mock.patch.object(jax, "jit", quick):
        yield
