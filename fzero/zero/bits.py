"""All that makes programs round alike, and what goes wrong without it.

Equal arithmetic is not yet equal bits: a compiler may fuse, and so round, one program otherwise
than another. Stages, schedules and numbers of processes give the same bits because of

- `fence`, around what lies between a fetch and a scatter. Without it XLA skips the rounding of a
  cast whose result is widened again (`xla_allow_excess_precision`), in one stage, not in another;
- `apart`, where XLA's CPU backend is concerned, which drops fences before its last fusions. Without
  it the halves of a backward pass, norms and casts contract products and sums as they happen to be
  fused: schedules of a pipeline, and stages, differ in the last bit;
- `as_bits` and `from_bits`, around what CPUs send in 16 bits. Without them the backend widens such
  a collective to float32 and drops the casts around it: twice the bytes, and values that were never
  rounded get through;
- `add_in_order`, between CPU processes. Without it gloo's rings add in an order that depends on how
  devices are spread over processes;
- `fzero.precision.round_to`, everywhere: a cast that is an operation of its own.

Tests marked `bits` compare such programs; `make test-bits` runs them for other instruction sets.
No option of the compiler does the same for less: without its fusion passes
(`xla_disable_hlo_passes=fusion`) fences and branches change no bit, but a step takes 1.1 times as
long in float32 and 2 to 3 times in bf16. Without excess precision, fused multiply-adds (an
instruction set of AVX), the concurrent scheduler or the newer emitters, bits still differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fzero import compat
from fzero.sharding.group import Group
from fzero.tree import PyTree


_AS_INTEGERS = {1: jnp.uint8, 2: jnp.uint16}


def fence(value: PyTree) -> PyTree:
    """Stops the compiler from fusing across; the value is the same."""
    fenced: PyTree = jax.lax.optimization_barrier(value)
    return fenced


def apart(function: Callable[[], PyTree], unknown: jax.Array, needed: bool = True) -> PyTree:
    """Runs a function so that XLA's CPU backend compiles it alike wherever it stands.

    It fuses nothing into a branch. This one is always taken, which it cannot know.

    Args:
        function: what to run; it may give random keys, too.
        unknown: a scalar of 32 or 64 bits that no compiler can foresee.
        needed: whether anything could make it round otherwise; if not, it simply runs.
    """
    if not needed:
        return function()
    shapes = jax.eval_shape(lambda: jax.tree.map(compat.key_bits, function()))
    kinds: list[Any] = []

    def run() -> PyTree:
        out = function()
        kinds.extend(jax.random.key_impl(x) if compat.is_key(x) else None
                     for x in jax.tree.leaves(out))  # fmt: skip
        return jax.tree.map(compat.key_bits, out)

    def never() -> PyTree:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    bits = jnp.int64 if unknown.dtype.itemsize == 8 else jnp.int32
    taken = (jax.lax.bitcast_convert_type(unknown, bits) | 1) != 0
    leaves, treedef = jax.tree.flatten(jax.lax.cond(taken, run, never))
    keyed = [
        x if impl is None else jax.random.wrap_key_data(x, impl=impl)
        for x, impl in zip(leaves, kinds, strict=False)
    ]
    return jax.tree.unflatten(treedef, keyed)


def as_bits(value: jax.Array, group: Group) -> jax.Array:
    """What is sent: floats of 16 and 8 bits as integers, where the backend would widen them."""
    if group.bits and value.dtype.itemsize <= 2 and jnp.issubdtype(value.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value, _AS_INTEGERS[value.dtype.itemsize])
    return value


def from_bits(value: jax.Array, dtype: Any) -> jax.Array:
    """What was sent by `as_bits`."""
    return value if value.dtype == dtype else jax.lax.bitcast_convert_type(value, dtype)


def add_in_order(addends: jax.Array, size: int) -> jax.Array:
    """The sum over dim 0; 16-bit floats in float32, as the CPU backend does within a process."""
    wide = addends if addends.dtype.itemsize != 2 else addends.astype(jnp.float32)
    total = wide[0]
    for index in range(1, size):
        total = total + wide[index]
    return total.astype(addends.dtype)
