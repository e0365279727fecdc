"""cuDNN's fused attention: scores never leave the chip, hidden ones are not computed.

What the kernel can do is jax's to know (`jax.nn.dot_product_attention`): it is asked, and where it
refuses (precision, head size, no cuDNN) there is none. Of whole sequences the kernel is jax's, too.
A block of a divided sequence wants more than jax gives: the log-sum-exp of its rows in float32, by
which blocks are put together, and gradients for those of all blocks. So `block` and `gradients`
call the same kernels by their names in XLA.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fzero.axes import CONTEXT, TENSOR, free_axes, rows_axis
from fzero.compat import traced_platform
from fzero.errors import warn


_TYPES = {jnp.dtype(jnp.float16): "F16", jnp.dtype(jnp.bfloat16): "BF16"}
# Added to a score, this leaves no weight; as jax has it: cuDNN's differences of lower ones are off.
_LOWEST = {jnp.dtype(jnp.float16): -(2.0**15), jnp.dtype(jnp.bfloat16): -(2.0**41)}


def fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None, scale: float,
    mask: jax.Array | None = None, lengths: jax.Array | None = None,
) -> jax.Array | None:  # fmt: skip
    """Attention of whole sequences by cuDNN, where a program is for a GPU and cuDNN can do it.

    Heads lie along the axis `tensor` and rows along `expert`, where those divide them: what XLA
    divides by itself it cannot divide here, since the kernel is none of its own.

    Args:
        q: queries `(batch, length, heads, features)`.
        k: keys `(batch, length of keys, groups, features)`.
        v: values, likewise.
        causal: whether a position sees none behind it.
        window: how many positions before it one sees, itself not counted; `None` for all.
        scale: factor of the scores.
        mask: what is computed of data or learned: True where a key is seen, or a number that is
            added to a score (rounded to the dtype of `q`), `(batch or 1, heads or 1, length,
            length of keys)`. A row that sees nothing gives 0; with `causal` there may be none.
        lengths: int32 `(batch,)`, of the keys of each row: others are seen by nothing. Of a row
            without keys the result is 0. There may be none with `mask`; with a window, and where
            an axis `context` divides sequences, there is no kernel.

    Returns:
        `(batch, length, heads, features)`, or `None`.
    """
    if (causal and q.shape[1] != k.shape[1]) or (window is not None and not causal):
        return None  # cuDNN does not say which corner it counts from, and has windows backwards
    near = None if window is None else (window, 0)
    axes, length = free_axes(), q.shape[1]
    if lengths is not None and (window is not None or axes.get(CONTEXT, 1) > 1):
        return None
    # (jax (0.11.2) refuses odd lengths where gradients are taken: with a mask, as cuDNN does, and
    # without one, where it takes its own placeholder for a mask. Only a trace of them says so.)
    if mask is not None:
        if q.dtype not in _TYPES or mask.dtype not in (bool, q.dtype, *_wider(q.dtype)):
            return None
        if axes.get(CONTEXT, 1) == 1:
            q, k, v, mask = _even(q, k, v, mask)
        elif length % (2 * axes[CONTEXT]) or k.shape[1] % 2:
            return None  # of odd lengths it has no gradients, which only a trace of those would say
    if mask is None:
        if lengths is None and k.shape[1] % 2 and not causal:
            lengths = jnp.full((k.shape[0],), k.shape[1], jnp.int32)
        q, k, v = (_longer(x, x.shape[1] % 2) for x in (q, k, v))
    more = {} if mask is None else {"bias": _bias(mask, q.dtype)}
    if lengths is not None:
        more["key_value_seq_lengths"] = jnp.maximum(lengths, 1)
    if not can_fuse(q, k, v, causal=causal, window=near, **more):
        return None
    run, given = _kernel(causal, near, scale, tuple(more)), (q, k, v, *more.values())
    if axes:
        ways, rows = axes.get(TENSOR, 1), rows_axis(q.shape[0])
        heads = TENSOR if ways > 1 and not k.shape[2] % ways else None
        whole = PartitionSpec(rows, None, heads)
        # With a bias each device has its own queries of a divided sequence, and all keys.
        split = whole if mask is None else PartitionSpec(rows, _divided(axes), heads)
        own = (_along(x, rows, heads, _divided(axes)) for x in more.values())
        run = jax.shard_map(
            run, in_specs=(split, whole, whole, *own), out_specs=split,
            axis_names=set(axes), check_vma=False,
        )  # fmt: skip
    out: jax.Array = run(*given)
    if mask is not None:
        seen = jnp.any(mask if mask.dtype == bool else mask > -jnp.inf, axis=-1)
        out = jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], out, jnp.zeros((), out.dtype))
    elif lengths is not None:
        seen = (lengths > 0)[:, None, None, None]
        out = jnp.where(seen, out, jnp.zeros((), out.dtype))
    return out[:, :length]


def _divided(axes: Any) -> Any:
    return CONTEXT if axes.get(CONTEXT, 1) > 1 else None


def _along(given: jax.Array, rows: Any, heads: Any, queries: Any) -> PartitionSpec:
    """Of lengths, or of a bias, which is whole where all rows, or all heads, have the same."""
    if given.ndim == 1:
        return PartitionSpec(rows)
    own = (None if given.shape[d] == 1 else x for d, x in enumerate((rows, heads)))
    return PartitionSpec(*own, queries)


def _wider(dtype: Any) -> tuple[Any, ...]:
    """Masks that are rounded to a dtype. To float16 none: its lowest number swallows no score, as
    that of a wider one does where a row adds it to all."""
    return () if dtype == jnp.float16 else (jnp.dtype(jnp.float32), jnp.dtype(jnp.float64))


def _even(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any, Any, Any]:
    """Even lengths, by a query or key that is not seen: of odd ones cuDNN has no gradients."""
    more, keys = q.shape[1] % 2, k.shape[1] % 2
    if not more and not keys:
        return q, k, v, mask

    unseen = False if mask.dtype == bool else -jnp.inf
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, more), (0, keys)), constant_values=unseen)
    return _longer(q, more), _longer(k, keys), _longer(v, keys), mask


def _longer(x: Any, by: int) -> Any:
    return jnp.pad(x, ((0, 0), (0, by), (0, 0), (0, 0))) if by else x


def _bias(mask: jax.Array, dtype: Any) -> jax.Array:
    """A mask as numbers that cuDNN adds to scores."""
    lowest = _LOWEST[jnp.dtype(dtype)]
    if mask.dtype == bool:
        return jnp.where(mask, jnp.zeros((), dtype), jnp.asarray(lowest, dtype))
    if dtype == jnp.float16:
        # A row that adds the lowest number to all has the weights of its scores, as it has without.
        top = jax.lax.stop_gradient(jnp.max(mask, axis=-1, keepdims=True))
        low = jnp.isfinite(top) & (top < lowest / 2)
        mask = jnp.where(low, mask - jnp.where(low, top, jnp.zeros_like(top)), mask)
    return jnp.maximum(mask, jnp.asarray(lowest, mask.dtype)).astype(dtype)


def can_fuse(
    q: Any, k: Any, v: Any, *, causal: bool, window: tuple[int, int] | None, **more: Any
) -> bool:
    """Whether what is traced here is for a GPU with a kernel for such queries, keys and values
    (and what `_kernel` takes besides)."""
    if q.ndim != 4 or q.dtype not in _TYPES or traced_platform() != "gpu":
        return False
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, *more.values())]
    try:
        jax.eval_shape(_kernel(causal, window, 1.0, tuple(more)), *shapes)
    except (NotImplementedError, ValueError):  # shapes that it has no kernel for
        return False
    except RuntimeError as error:
        warn(
            f"no fused attention in this program for GPUs: {error} It multiplies the matrices one"
            " by one instead and holds all scores. Install cuDNN (nvidia-cudnn-cu13) beside jax's"
            " CUDA plugin to compile what runs where there is a GPU."
        )
        return False
    return True


def _kernel(
    causal: bool, window: tuple[int, int] | None, scale: float, names: tuple[str, ...] = ()
) -> Any:
    """Of queries, keys, values, and arguments of these names in jax."""

    def run(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, local_window_size=window,
            implementation="cudnn", **dict(zip(names, more, strict=True)),
        )  # fmt: skip

    return run


def block(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Attention of some queries to some keys, where `can_fuse` says so.

    Args:
        q: `(batch, length, heads, features)`.
        k: `(batch, length of keys, groups, features)`.
        v: likewise.
        causal: whether query `i` sees keys up to `i`.
        scale: factor of the scores.

    Returns:
        `(batch, length, heads, features)`, and the log-sum-exp of the scores of each row,
        float32 `(batch, heads, length)`.
    """
    rows, length, heads, features = q.shape
    out = jax.ShapeDtypeStruct((rows, heads, length, features), q.dtype)
    level = jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)
    call = _call("__cudnn$fmhaSoftmax", (out, level), q, k, causal, scale, _FORWARD)
    found, level, _ = call(q, k, v)
    return jnp.swapaxes(found, 1, 2), level


def gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, level: jax.Array, given: jax.Array,
    *, causal: bool, scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """A block's part of the gradients of attention to all keys.

    Args:
        q: as for `block`.
        k: likewise.
        v: likewise.
        out: the result of attention to all keys, like `q`.
        level: the log-sum-exp of all scores of each row.
        given: the gradient of `out`.
        causal: as for `block`.
        scale: likewise.

    Returns:
        The gradients of `q`, `k` and `v`.
    """
    kinds = tuple(
        jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype)
        for x in (q, k, v)
    )
    call = _call("__cudnn$fmhaSoftmaxBackward", kinds, q, k, causal, scale, _BACKWARD)
    dq, dk, dv, _ = call(q, k, v, level, given.astype(q.dtype), out.astype(q.dtype))
    return jnp.swapaxes(dq, 1, 2), jnp.swapaxes(dk, 1, 2), jnp.swapaxes(dv, 1, 2)


# Products by name: contracted dims, then those of batch and heads, of both sides. Arrays are
# (batch, length, heads, features), scores (batch, heads, length, length of keys).
_Product = tuple[str, tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]
_FORWARD: tuple[_Product, ...] = (
    ("bmm1", (3, 3), ((0, 2), (0, 2))),
    ("bmm2", (3, 1), ((0, 1), (0, 2))),
)
_BACKWARD: tuple[_Product, ...] = (
    ("bmm1_grad_gemm1", (2, 1), ((0, 1), (0, 2))),
    ("bmm1_grad_gemm2", (3, 1), ((0, 1), (0, 2))),
    ("bmm2_grad_gemm1", (2, 1), ((0, 1), (0, 2))),
    ("bmm2_grad_gemm2", (3, 3), ((0, 2), (0, 2))),
)


def _call(
    target: str, results: tuple[jax.ShapeDtypeStruct, ...], q: jax.Array, k: jax.Array,
    causal: bool, scale: float, products: tuple[_Product, ...],
) -> Any:  # fmt: skip
    """A kernel of cuDNN's by its name in XLA; what it returns last is its workspace."""
    # Results of 4 dims lie in memory as the arguments do: heads beside features.
    layouts = [(0, 2, 1, 3) if len(x.shape) == 4 else tuple(range(len(x.shape))) for x in results]
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    return jax.ffi.ffi_call(
        target, (*results, workspace), output_layouts=(*layouts, (0,)), custom_call_api_version=2,
        legacy_backend_config=json.dumps(_config(q, k, causal, scale, products)),
    )  # fmt: skip


def _config(
    q: jax.Array, k: jax.Array, causal: bool, scale: float, products: tuple[_Product, ...]
) -> dict[str, Any]:
    """XLA's `GpuBackendConfig` of such a kernel; int64s are text in JSON of protocol buffers."""
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    dims = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(dim) for dim in both[0]],
            "rhs_batch_dimensions": [str(dim) for dim in both[1]],
        }
        for name, (left, right), both in products
    }
    kernel = {
        "algorithm": {
            "algo_id": "0", "math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True,
            "tuning_knobs": {"17": "1", "24": "0"}, "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": _TYPES[jnp.dtype(q.dtype)],
            "dimensions": [str(size) for size in scores],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        "dropout_rate": 0.0, "seed": 42, "sliding_window_length": 0, "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }  # fmt: skip
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": kernel | dims}
