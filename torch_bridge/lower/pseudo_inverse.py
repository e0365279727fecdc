"""Pseudoinverses, by a share of the largest singular value or by a bound that is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fzero.errors import ConversionError
from torch_bridge.lower.registry import register_operator


@register_operator("aten.linalg_pinv.default", "aten.pinverse.default")
def pinv(x: jax.Array, rcond: float = 1e-15, hermitian: bool = False) -> jax.Array:
    if hermitian:
        _refuse_hermitian()
    return jnp.linalg.pinv(x, rtol=rcond)


@register_operator("aten.linalg_pinv.atol_rtol_float", "aten.linalg_pinv.atol_rtol_tensor")
def pinv_bounded(
    x: jax.Array, *, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> jax.Array:
    if rtol is None:
        rtol = 0.0 if atol is not None else max(x.shape[-2:]) * float(jnp.finfo(x.dtype).eps)
    if hermitian:
        _refuse_hermitian()
    if atol is None and isinstance(rtol, float):
        return jnp.linalg.pinv(x, rtol=rtol)
    return _pinv_above(x, jnp.asarray(0.0 if atol is None else atol), jnp.asarray(rtol))


@jax.custom_jvp
def _pinv_above(x: jax.Array, atol: jax.Array, rtol: jax.Array) -> jax.Array:
    """The pseudoinverse from the singular values above a bound; JAX's takes no computed one."""
    u, sizes, vh = jnp.linalg.svd(x, full_matrices=False)
    kept = sizes > jnp.maximum(atol[..., None], rtol[..., None] * sizes[..., :1])
    inverse = jnp.where(kept, 1 / jnp.where(kept, sizes, 1), 0)
    return jnp.conj(vh.mT) @ (inverse[..., None] * jnp.conj(u.mT))


@_pinv_above.defjvp
def _pinv_slopes(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # G. H. Golub and V. Pereyra, The differentiation of pseudo-inverses, 1973, of constant rank.
    x, dx = primals[0], tangents[0]
    p = _pinv_above(*primals)
    ph, dxh = jnp.conj(p.mT), jnp.conj(dx.mT)
    rows, columns = (jnp.eye(n, dtype=x.dtype) for n in x.shape[-2:])
    moved = p @ ph @ dxh @ (rows - x @ p) + (columns - p @ x) @ dxh @ ph @ p
    return p, moved - p @ dx @ p


def _refuse_hermitian() -> None:
    raise ConversionError(
        "linalg.pinv(hermitian=True): its gradient is not known to be PyTorch's here; use"
        " hermitian=False, which is right for every matrix"
    )
