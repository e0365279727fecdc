"""Convolution, plain and transposed, in 1 to 3 dimensions; its output has the features last."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.dtypes import promote
from torch_bridge.lower.features_last import Last, over, takes_last
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import product_dtype, with_bias
from torch_bridge.lower.whole_dims import undivided


_SPATIAL = "DHW"


@register_operator("aten.convolution.default")
@takes_last
def convolution(
    x: jax.Array | Last,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array | Last:
    """Shapes: x `(N, C, *spatial)`; weight `(O, C / groups, *kernel)`, or `(C, O / g, ..)`."""
    dims = weight.ndim - 2
    x = over(x, dims)
    unbatched = not isinstance(x, Last) and x.ndim == dims + 1
    # XLA's partitioner gives wrong gradients of a depthwise kernel where features are divided, and
    # where positions are beside them.
    whole = (-1,) if groups == 1 else range(1, dims + 2)
    a, w = promote(undivided(_held(x, unbatched), whole), weight)
    dtype = product_dtype(a, bias)
    stride, padding, dilation = (_each(v, dims) for v in (stride, padding, dilation))
    if transposed:
        out = _transposed(
            a, w, stride, padding, dilation, _each(output_padding, dims), groups, dtype
        )
    else:
        out = jax.lax.conv_general_dilated(
            a,
            w,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            feature_group_count=groups,
            dimension_numbers=_layout(dims),
            preferred_element_type=dtype,
        )
    out = with_bias(undivided(out, whole), bias, a.dtype)
    return jnp.moveaxis(jnp.squeeze(out, 0), -1, 0) if unbatched else Last(out)


def _held(x: jax.Array | Last, unbatched: bool) -> jax.Array:
    if isinstance(x, Last):
        return x.held
    return jnp.moveaxis(jnp.expand_dims(x, 0) if unbatched else x, 1, -1)


def _register_whole(dims: int) -> None:
    """The operators of one number of dims, which decomposing would turn into `convolution`."""

    @register_operator(f"aten.conv{dims}d.default", f"aten.conv{dims}d.padding")
    @takes_last
    def plain(
        x: jax.Array | Last,
        weight: Any,
        bias: Any = None,
        stride: Any = (1,),
        padding: Any = (0,),
        dilation: Any = (1,),
        groups: int = 1,
    ) -> jax.Array | Last:
        if isinstance(padding, str):
            return _named_padding(x, weight, bias, stride, padding, dilation, groups)
        return convolution(x, weight, bias, stride, padding, dilation, False, (0,), groups)

    name = f"aten.conv_transpose{dims}d.{'default' if dims == 1 else 'input'}"

    @register_operator(name)
    @takes_last
    def transposed(
        x: jax.Array | Last,
        weight: Any,
        bias: Any = None,
        stride: Any = (1,),
        padding: Any = (0,),
        output_padding: Any = (0,),
        groups: int = 1,
        dilation: Any = (1,),
    ) -> jax.Array | Last:
        return convolution(x, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _named_padding(
    x: jax.Array | Last, weight: Any, bias: Any, stride: Any, name: str, dilation: Any, groups: int
) -> jax.Array | Last:
    """Padding "valid", or "same": where it is odd, torch puts the larger half behind."""
    dims = weight.ndim - 2
    totals = [
        d * (k - 1) if name == "same" else 0
        for k, d in zip(weight.shape[2:], _each(dilation, dims), strict=True)
    ]
    spatial = [(t // 2, t - t // 2, 0) for t in totals]
    x = over(x, dims)
    if isinstance(x, Last):
        widths = [(0, 0, 0), *spatial, (0, 0, 0)]
        padded: Any = Last(jax.lax.pad(x.held, jnp.zeros((), x.held.dtype), widths))
    else:
        widths = [(0, 0, 0)] * (x.ndim - dims) + spatial
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
    return convolution(padded, weight, bias, stride, (0,), dilation, False, (0,), groups)


def _each(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) * dims if len(values) == 1 else tuple(values)


def _layout(dims: int) -> tuple[str, str, str]:
    spatial = _SPATIAL[3 - dims :]
    return f"N{spatial}C", f"OI{spatial}", f"N{spatial}C"


def _transposed(
    x: jax.Array,
    weight: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dtype: Any,
) -> jax.Array:
    """The transpose of a convolution: the input spread by `stride`, the kernel mirrored."""
    dims = weight.ndim - 2
    cin, per_group, *kernel = weight.shape
    # (C, O/g, ...) -> (O, C/g, ...): swap in and out channels inside each group.
    w = jnp.reshape(weight, (groups, cin // groups, per_group, *kernel))
    w = jnp.reshape(jnp.swapaxes(w, 1, 2), (groups * per_group, cin // groups, *kernel))
    w = jnp.flip(w, tuple(range(2, 2 + dims)))
    edges = [
        (d * (k - 1) - p, d * (k - 1) - p + extra)
        for k, p, d, extra in zip(kernel, padding, dilation, output_padding, strict=True)
    ]
    # Of three dims XLA gives cuDNN (jax 0.11.2, cuDNN 9.19) shapes that it refuses for groups.
    calls = groups if dims == 3 else 1
    found = [
        jax.lax.conv_general_dilated(
            own,
            kernels,
            (1,) * dims,
            edges,
            lhs_dilation=stride,
            rhs_dilation=dilation,
            feature_group_count=groups // calls,
            dimension_numbers=_layout(dims),
            preferred_element_type=dtype,
        )
        for own, kernels in zip(jnp.split(x, calls, axis=-1), jnp.split(w, calls), strict=True)
    ]
    return jnp.concatenate(found, axis=-1)


for _dims in (1, 2, 3):
    _register_whole(_dims)
