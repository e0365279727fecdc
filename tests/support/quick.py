"""Quick compiles, for tests that would prove the same in programs that are slow or round otherwise.

Nearly all of this suite's time is LLVM's. With these options a step of a tiny model compiles in a
sixth of the time and runs at about two thirds of the speed (a large one at half). Its sums round
otherwise, and not alike in all stages: tests that compare the bits of different programs compile as
users do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax


# Programs as small as these are not worth cutting into parts for several threads: a third of the
# time that is left.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    # jax 0.11 has no other way to fuse any more.
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
    "xla_cpu_parallel_codegen_split_count": 1,
}
# The same for a process of its own, as its XLA_FLAGS.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())


@contextmanager
def compiles(options: dict[str, Any] = OPTIONS) -> Iterator[None]:
    """Programs of `jax.jit`s made meanwhile compile quickly, whenever they are called."""
    jit = jax.jit

    @functools.wraps(jit)
    def quick(*args: Any, **more: Any) -> Any:
        given = more.pop("compiler_options", None) or {}
        return jit(*args, compiler_options={**options, **given}, **more)

    with mock.patch.object(jax, "jit", quick):
        yield
