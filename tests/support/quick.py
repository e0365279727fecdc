"""Quick compiles, for tests that would prove the same in programs that are slow or round otherwise.

Nearly all of this suite's time is LLVM's. With these options a step of a tiny model compiles in a
seventh of the time and runs at about two thirds of the speed (a large one at half). All tests
compile so, and the processes that they start; what a user gets is what `as_users` compiles. The
sums round otherwise, and not alike in all stages: tests of such bits are marked `bits`, or
`as_users` where `make test-bits` need not repeat them.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
from jax.interpreters import mlir


# Programs as small as these are not worth cutting into parts for several threads: a third of the
# time that is left.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    # jax 0.11 has no other way to fuse any more.
    **({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}),
    "xla_cpu_parallel_codegen_split_count": 1,
}
# What XLA does without them.
AS_USERS = {
    "xla_backend_optimization_level": 3,
    **({"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}),
    "xla_cpu_parallel_codegen_split_count": 32,
}
# The same for a whole process, as its XLA_FLAGS.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())


def from_now_on() -> None:
    """All programs of this process and of those that it starts, before jax compiles its first."""
    given = os.environ.get("XLA_FLAGS", "")
    if FLAGS not in given:  # a worker has its parent's
        os.environ["XLA_FLAGS"] = f"{FLAGS} {given}".strip()
    share_contexts()


def share_contexts(programs: int = 64) -> None:
    """As many programs are written down in one context of MLIR, not each in its own.

    To make one, with all of its dialects, takes a third of a tiny program's way to the compiler. It
    keeps the constants of what it wrote, so that it is not kept for good.
    """
    made, here = mlir.make_ir_context, threading.local()

    def shared() -> Any:
        if getattr(here, "left", 0) == 0:
            here.context, here.left = made(), programs
        here.left -= 1
        return here.context

    # Where jax itself looks it up; were it elsewhere, each would have its own again.
    vars(sys.modules[made.__module__])["make_ir_context"] = shared


def environment_of_users() -> dict[str, str]:
    """This process's environment, for a program that is to compile as users do."""
    return {**os.environ, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "").replace(FLAGS, "")}


@contextmanager
def as_users() -> Iterator[None]:
    """Programs of `jax.jit`s made meanwhile are compiled as users compile, whenever called."""
    jit = jax.jit

    @functools.wraps(jit)
    def plain(*args: Any, **more: Any) -> Any:
        given = more.pop("compiler_options", None) or {}
        return jit(*args, compiler_options={**AS_USERS, **given}, **more)

    with mock.patch.object(jax, "jit", plain):
        yield
