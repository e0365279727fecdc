"""Tensors between torch and the outside: always copied, never aliased, the same bits.

`jax.device_put` of a numpy view of a torch tensor shares its memory on a CPU, so that a later
in-place update in torch changes the JAX array. Every function here therefore returns memory of
its own, and what comes from torch is marked read-only.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from torch_bridge.dtypes import canonical, numpy_dtype, torch_dtype


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A read-only numpy copy of a tensor with the same shape, dtype and bits.

    Args:
        tensor: any dense tensor on any device, shape `(...)`.

    Returns:
        An array that shares no memory with `tensor`.

    Raises:
        TypeError: the dtype has no numpy equivalent, or the tensor is not dense.

    Example:
        >>> to_numpy(torch.ones(2, dtype=torch.bfloat16)).dtype.name
        'bfloat16'
    """
    if tensor.is_nested:
        raise TypeError("expected a dense tensor, got a nested one; use .to_padded_tensor(0)")
    if tensor.layout is not torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {tensor.layout}; use .to_dense()")
    dtype = numpy_dtype(tensor.dtype)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if dtype.kind == "V" or dtype.name.startswith(("bfloat16", "float8")):
        # torch's .numpy() knows only numpy's own dtypes: pass the bits as integers.
        bits = torch.int16 if dtype.itemsize == 2 else torch.uint8
        array = plain.view(bits).numpy().copy().view(dtype)
    else:
        array = plain.numpy().copy()
    array.flags.writeable = False
    return array


def to_host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Like `to_numpy`, in the dtype that JAX holds (int64 becomes int32 while x64 is off).

    Raises:
        OverflowError: a 64-bit integer does not fit into 32 bits.
    """
    exact = to_numpy(tensor)
    narrow = canonical(exact.dtype)
    if narrow == exact.dtype:
        return exact
    if exact.dtype.kind in "iu" and exact.size:
        limits = np.iinfo(narrow)
        low, high = int(exact.min()), int(exact.max())
        if low < limits.min or high > limits.max:
            raise OverflowError(
                f"integers from {low} to {high} do not fit into {narrow.name}; "
                "enable 64-bit values with jax.config.update('jax_enable_x64', True)"
            )
    array = exact.astype(narrow)
    array.flags.writeable = False
    return array


def to_torch(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A torch CPU copy of a numpy or JAX array (gathered if sharded), with the same bits.

    Args:
        value: array of shape `(...)`; a tensor is cloned.
        dtype: the torch dtype wanted; None keeps the array's own.

    Returns:
        A tensor that shares no memory with `value`.

    Raises:
        ValueError: a JAX array whose shards are not all on this process's devices.

    Example:
        >>> to_torch(np.arange(3, dtype=np.int32), torch.int64)
        tensor([0, 1, 2])
    """
    if isinstance(value, torch.Tensor):
        tensor = value.detach().clone()
    else:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise ValueError(
                f"array of shape {value.shape} lives partly on other processes' devices; "
                "gather it first (jax.experimental.multihost_utils.process_allgather)"
            )
        array = np.array(value, copy=True, order="C")
        target = torch_dtype(array.dtype)
        if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat16", "float8")):
            raw = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
            tensor = torch.from_numpy(raw).view(target)
        else:
            tensor = torch.from_numpy(array)
    return tensor if dtype is None or dtype == tensor.dtype else tensor.to(dtype)
