"""Pseudoinverses, by a share of the largest singular value or by a bound that is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.lower.linalg import eigh
from torch_bridge.lower.registry import register_operator


@register_operator("aten.linalg_pinv.default", "aten.pinverse.default")
def pinv(x: jax.Array, rcond: float = 1e-15, hermitian: bool = False) -> jax.Array:
    if not x.size:
        return jnp.zeros_like(x.mT)
    if hermitian:
        return _pinv_hermitian(x, jnp.zeros(()), jnp.asarray(rcond))
    return jnp.linalg.pinv(x, rtol=rcond)


@register_operator("aten.linalg_pinv.atol_rtol_float", "aten.linalg_pinv.atol_rtol_tensor")
def pinv_bounded(
    x: jax.Array, *, atol: Any = None, rtol: Any = None, hermitian: bool = False
) -> jax.Array:
    if not x.size:
        return jnp.zeros_like(x.mT)
    if rtol is None:
        rtol = 0.0 if atol is not None else max(x.shape[-2:]) * float(jnp.finfo(x.dtype).eps)
    if hermitian:
        bounds = (jnp.asarray(0.0 if bound is None else bound) for bound in (atol, rtol))
        return _pinv_hermitian(x, *bounds)
    if atol is None and isinstance(rtol, float):
        return jnp.linalg.pinv(x, rtol=rtol)
    return _pinv_above(x, jnp.asarray(0.0 if atol is None else atol), jnp.asarray(rtol))


@jax.custom_jvp
def _pinv_above(x: jax.Array, atol: jax.Array, rtol: jax.Array) -> jax.Array:
    """The pseudoinverse from the singular values above a bound; JAX's takes no computed one."""
    u, sizes, vh = jnp.linalg.svd(x, full_matrices=False)
    kept = sizes > jnp.maximum(atol[..., None], rtol[..., None] * sizes[..., :1])
    inverse = jnp.where(kept, 1 / jnp.where(kept, sizes, 1), 0)
    return jnp.conj(vh.mT) @ (inverse[..., None].astype(x.dtype) * jnp.conj(u.mT))


@jax.custom_jvp
def _pinv_hermitian(x: jax.Array, atol: jax.Array, rtol: jax.Array) -> jax.Array:
    """The same from the eigenvalues of the matrix that the lower triangle stands for."""
    values, vectors = eigh(x)
    sizes = jnp.abs(values)
    largest = jnp.max(sizes, axis=-1, keepdims=True, initial=0)
    kept = sizes > jnp.maximum(atol[..., None], rtol[..., None] * largest)
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0)
    return (vectors * inverse[..., None, :].astype(x.dtype)) @ jnp.conj(vectors.mT)


def _pinv_slopes(
    inverse: Callable[..., jax.Array], primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    # G. H. Golub and V. Pereyra, The differentiation of pseudo-inverses, 1973, of constant rank.
    # In PyTorch it is that of a Hermitian one, too, of the whole matrix as it came.
    x, dx = primals[0], tangents[0]
    p = inverse(*primals)
    ph, dxh = jnp.conj(p.mT), jnp.conj(dx.mT)
    rows, columns = (jnp.eye(n, dtype=x.dtype) for n in x.shape[-2:])
    moved = p @ ph @ dxh @ (rows - x @ p) + (columns - p @ x) @ dxh @ ph @ p
    return p, moved - p @ dx @ p


for _inverse in (_pinv_above, _pinv_hermitian):
    _inverse.defjvp(functools.partial(_pinv_slopes, _inverse))
