"""Mixed precision: casts from one fp32 master."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.errors import PlanError
from fzero.plan import Plan
from fzero.tree import found_in, is_floating


PyTree = Any

# With fp8, products alone have 8 bits: what they read and give has 16 (`fzero.float8`).
COMPUTE_DTYPES = {
    "fp32": None, "bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.bfloat16
}  # fmt: skip


def compute_dtype(plan: Plan, dtype: Any, path: str = "") -> np.dtype[Any]:
    """The dtype in which a parameter of `dtype`, at a path, computes and travels."""
    target = COMPUTE_DTYPES[plan.precision]
    if target is None or not jnp.issubdtype(dtype, np.floating):
        return np.dtype(dtype)
    if found_in(plan.keep_fp32, path):  # (jax promotes no 8 bits)
        return np.dtype(np.float32 if jnp.finfo(dtype).bits < 32 else dtype)
    return np.dtype(target)


def round_to(leaf: jax.Array, dtype: Any) -> jax.Array:
    """A cast that really rounds.

    The rounding is an operation of its own: XLA may drop a cast that is widened again later
    (`xla_allow_excess_precision`), in one program and not in another. What is no float stays, and
    so do floats of 8 bits, in which nothing is computed.
    """
    if not jnp.issubdtype(dtype, np.floating):
        return leaf
    info = jnp.finfo(dtype)
    if info.bits != 16:
        return leaf.astype(dtype)
    wide = leaf if jnp.finfo(leaf.dtype).bits >= 32 else leaf.astype(jnp.float32)
    narrow = jax.lax.reduce_precision(wide, info.nexp, info.nmant)
    if dtype == jnp.float16:
        # Below 6e-5 that makes zeros of what float16 still has in steps of 2^-24. (The rounding has
        # no derivative; that of the other term is 1.)
        small = jnp.where(narrow == 0, wide, 0)
        steps = jax.lax.round(small * 2.0**24, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
        narrow += steps * 2.0**-24
    return narrow.astype(dtype)


def cast_input(plan: Plan, x: PyTree) -> PyTree:
    """What a model is called with: floats follow the parameters into the compute dtype."""
    return jax.tree.map(
        lambda leaf: round_to(leaf, compute_dtype(plan, leaf.dtype)) if is_floating(leaf) else leaf,
        x,
    )


def cast(tree: PyTree, like: PyTree) -> PyTree:
    """Floats in the dtype of others: inputs in that of a model's parameters.

    A step hands a loss function its parameters in the precision of the plan and its batch as it
    came; where a product of both shall run in that precision, this says so.

    Args:
        tree: arrays of any shapes; those that are no floats stay as they are.
        like: arrays, of whose floats all have one dtype.

    Returns:
        `tree` with its floats rounded to that dtype.

    Raises:
        PlanError: `like` has no floats, or floats of several dtypes.

    Example:
        >>> import jax.numpy as jnp
        >>> cast({"x": jnp.ones(2), "ids": jnp.arange(2)}, like=jnp.zeros(3, jnp.bfloat16))
        {'ids': Array([0, 1], dtype=int32), 'x': Array([1, 1], dtype=bfloat16)}
    """
    dtypes = float_dtypes(like)
    if len(dtypes) != 1:
        raise PlanError(
            f"cast: expected `like` to have floats of one dtype, got {dtypes or 'none'}; pass the"
            " array that the product is with"
        )
    return jax.tree.map(
        lambda leaf: round_to(jnp.asarray(leaf), dtypes[0]) if is_floating(leaf) else leaf, tree
    )


def called_with(args: PyTree, params: PyTree, dtype: Any = None) -> PyTree:
    """A module's arguments beside its parameters: where those have 16 bits, floats have as many.

    Args:
        args: what a module is called with.
        params: its parameters.
        dtype: that of the plan's precision, where some parameters are kept in float32.
    """
    dtypes = float_dtypes(params)
    narrow = dtypes[0] if len(dtypes) == 1 else dtype if dtypes else None
    if narrow is None or jnp.finfo(narrow).bits != 16:
        return args
    return jax.tree.map(
        lambda x: cast(x, like=jnp.zeros((), narrow)) if hasattr(x, "dtype") else x, args
    )


def float_dtypes(tree: PyTree) -> list[np.dtype[Any]]:
    """The dtypes of a tree's floats, each once."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return list(dict.fromkeys(np.dtype(leaf.dtype) for leaf in leaves if is_floating(leaf)))


def power_of_two_below(x: jax.Array) -> jax.Array:
    """The largest power of two that is not above `|x|`, down to 2**-64 (1 for 0 and NaN).

    Scaling by it is exact, so gradients of a sum can be kept at the size of gradients of a mean,
    which fp16 needs, without changing a single bit of the result. Weights of rows may add up to
    next to nothing, or to less than nothing.
    """
    size = jnp.abs(x.astype(jnp.float32))
    _, exponent = jnp.frexp(jnp.where(size > 0, size, 1.0))
    return jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, -64))
