"""Arrays of the host, and of other libraries, as jax would hold them.

What jax has no numbers for, or would cut, is named.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fzero.tree import is_plain, shape_of


# Kinds do not tell them from what jax has: small floats of ml_dtypes are "V" too.
_NOT_OF_JAX = (np.void, np.longdouble, np.clongdouble)


# DLPack's kinds of memory that the host reads as its own: plain, pinned (CUDA, ROCm), managed.
_ON_HOST = (1, 3, 11, 13)


def received(leaf: Any) -> Any:
    """A leaf as numpy or jax has it; those of other libraries (torch's tensors) come by DLPack.

    What lies on the host shares its memory; what lies on a device that jax knows is copied there.

    Args:
        leaf: anything; what is an array of numpy or jax, or no array, is given back as it is.

    Raises:
        ValueError: an array that DLPack cannot hand over; with the library's reason.

    Source: the array API standard, `__dlpack__` and `__dlpack_device__`.
    """
    if isinstance(leaf, jax.Array | np.ndarray) or not hasattr(leaf, "__dlpack_device__"):
        return leaf
    try:
        for resolve in ("resolve_conj", "resolve_neg"):  # torch's own bits, which DLPack has not
            leaf = getattr(leaf, resolve, lambda leaf=leaf: leaf)()
        if leaf.__dlpack_device__()[0] in _ON_HOST:
            try:
                return np.from_dlpack(leaf)
            except (RuntimeError, BufferError):  # numpy has no small floats of its own
                return np.asarray(jax.dlpack.from_dlpack(leaf))
        with jax.enable_x64(True):  # as it is: who narrows it looks whether values fit
            here = jax.dlpack.from_dlpack(leaf, copy=True)
        return np.asarray(here) if shape_of(here).dtype != here.dtype else here
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        raise ValueError(
            f"is a {kind} that DLPack does not hand over ({str(error).splitlines()[0]}): pass an"
            " array of numpy or jax (a tensor of torch: torch_bridge.batch)"
        ) from error


def require_numbers(leaf: Any) -> None:
    """Raises `ValueError` with what is wrong if jax has no such numbers.

    Args:
        leaf: anything with a dtype.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            "is a masked array, whose mask would be lost: pass .filled(...) and the mask as a leaf"
            " of its own"
        )
    dtype = leaf.dtype
    known = not is_plain(leaf) or (
        dtype.isnative and dtype.kind in "biufcV" and not issubclass(dtype.type, _NOT_OF_JAX)
    )
    if not known:
        raise ValueError(
            f"has dtype {dtype}: expected numbers in the machine's order of bytes; encode what is"
            " none, and convert others with .astype"
        )


def require_held(leaf: Any) -> None:
    """Raises `ValueError` if jax has no such numbers, or would cut one of them."""
    require_numbers(leaf)
    if shape_of(leaf).dtype != leaf.dtype:
        own_copy(leaf)


def own_copy(leaf: Any) -> np.ndarray[Any, Any]:
    """A host array in memory of its own, in the dtype that jax has for it.

    Unless `jax_enable_x64` is set it has 32 bits for 64, and jax wraps integers that do not fit.

    Raises:
        ValueError: a value does not fit; with what is wrong.
    """
    host, dtype = np.array(leaf), shape_of(leaf).dtype
    if dtype == host.dtype:
        return host
    with np.errstate(over="ignore"):
        narrow = host.astype(dtype)
    integers = np.issubdtype(dtype, np.integer)
    lost = narrow != host if integers else np.isinf(narrow) & ~np.isinf(host)
    if np.any(lost):
        raise ValueError(
            f"has {host[lost][0]}, which {dtype} does not hold, and jax keeps {host.dtype} in"
            f" {dtype}: say jax.config.update('jax_enable_x64', True), or bring the values into its"
            " range"
        )
    return narrow
