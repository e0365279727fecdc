"""Linear algebra: factorisations, solutions and products of several matrices."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl

from torch_bridge.dtypes import accumulation_dtype, canonical, cast, is_complex
from torch_bridge.lower.registry import register_operator


_LA = jnp.linalg


def _first_of(bad: jax.Array) -> jax.Array:
    """LAPACK's status, one number a matrix: 0, or which pivot is the first bad one."""
    behind = jnp.zeros((*bad.shape[:-1], 1), bool)
    bad = jnp.concatenate([behind, bad], axis=-1)
    return jnp.argmax(bad, axis=-1).astype(jnp.int32)


def _lu_info(x: jax.Array) -> jax.Array:
    packed, _, _ = jax.lax.linalg.lu(jax.lax.stop_gradient(x))
    return _first_of(jnp.diagonal(packed, axis1=-2, axis2=-1) == 0)


def _cholesky_info(x: jax.Array, upper: bool) -> jax.Array:
    """Which leading minor is the first that is not positive; 0: all are."""
    if not x.size:
        return jnp.zeros(x.shape[:-2], jnp.int32)
    fixed = jax.lax.stop_gradient(x)
    low = jnp.conj(jnp.swapaxes(fixed, -1, -2)) if upper else fixed
    whole = jnp.tril(low) + jnp.conj(jnp.swapaxes(jnp.tril(low, -1), -1, -2))

    def step(rest: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        column = jnp.take(rest, k, axis=-1)
        pivot = jnp.real(jnp.take(column, k, axis=-1))
        products = column[..., :, None] * jnp.conj(column)[..., None, :]
        return rest - products / pivot[..., None, None].astype(rest.dtype), ~(pivot > 0)

    _, bad = jax.lax.scan(step, whole, jnp.arange(x.shape[-1]))
    return _first_of(jnp.moveaxis(bad, 0, -1))


@register_operator("aten.linalg_inv.default", "aten.inverse.default")
def inv(x: jax.Array) -> jax.Array:
    return _LA.inv(x)


@register_operator("aten.linalg_inv_ex.default")
def inv_ex(x: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    return _LA.inv(x), _lu_info(x)


def _is_vectors(a: jax.Array, b: jax.Array) -> bool:
    """Whether torch takes the right sides as a batch of vectors."""
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])


@register_operator("aten.linalg_solve.default")
def solve(a: jax.Array, b: jax.Array, *, left: bool = True) -> jax.Array:
    if _is_vectors(a, b):
        return _LA.solve(a, b[..., None])[..., 0]
    if left:
        return _LA.solve(*_broadcast(a, b))
    flipped = _LA.solve(*_broadcast(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2)))
    return jnp.swapaxes(flipped, -1, -2)


def _broadcast(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (
        jnp.broadcast_to(a, batch + a.shape[-2:]),
        jnp.broadcast_to(b, batch + b.shape[-2:]),
    )


@register_operator("aten.linalg_solve_ex.default")
def solve_ex(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    return solve(a, b, left=left), _lu_info(a)


@register_operator("aten._linalg_solve_ex.default")
def solve_with_factors(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, ...]:
    lu, pivots, _ = jax.lax.linalg.lu(a)
    return solve(a, b, left=left), lu, pivots + 1, _lu_info(a)


@register_operator("aten.linalg_solve_triangular.default")
def solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    return jax.lax.linalg.triangular_solve(
        *_broadcast(a, b), left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@register_operator("aten.triangular_solve.default")
def triangular_solve(
    b: jax.Array, a: jax.Array, upper: bool = True, transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    a, b = _broadcast(a, b)
    found = jax.lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return found, a


@register_operator("aten.linalg_det.default", "aten.det.default")
def det(x: jax.Array) -> jax.Array:
    return _LA.det(x) if x.shape[-1] else jnp.ones(x.shape[:-2], x.dtype)


@register_operator("aten.linalg_slogdet.default", "aten.slogdet.default")
def slogdet(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    sign, log = _LA.slogdet(x)
    return sign, log


@register_operator("aten.logdet.default")
def logdet(x: jax.Array) -> jax.Array:
    sign, log = _LA.slogdet(x)
    return jnp.where(sign < 0, jnp.nan, log) if not is_complex(x) else log + jnp.log(sign)


@register_operator("aten.linalg_cholesky.default", "aten.cholesky.default")
def cholesky(x: jax.Array, upper: bool = False) -> jax.Array:
    # torch reads one triangle; jax's default averages both.
    full = _mirrored(x, upper)
    lower = jax.lax.linalg.cholesky(full, symmetrize_input=False)
    return jnp.conj(jnp.swapaxes(lower, -1, -2)) if upper else lower


def _mirrored(x: jax.Array, upper: bool) -> jax.Array:
    """The Hermitian matrix that one triangle stands for; its gradient is spread over both."""
    return _symmetric(jnp.triu(x) if upper else jnp.tril(x), x)


def _symmetric(triangle: jax.Array, x: jax.Array) -> jax.Array:
    values = triangle + jnp.conj(jnp.swapaxes(triangle, -1, -2))
    values = values - _on_diagonal(jnp.diagonal(triangle, axis1=-2, axis2=-1), x.shape[-1])
    # torch's gradient is that of a symmetric argument.
    both = (x + jnp.conj(jnp.swapaxes(x, -1, -2))) / 2
    return both + jax.lax.stop_gradient(values - both)


def _on_diagonal(values: jax.Array, size: int) -> jax.Array:
    return values[..., None] * jnp.eye(size, dtype=values.dtype)


@register_operator("aten.linalg_cholesky_ex.default")
def cholesky_ex(
    x: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    return cholesky(x, upper), _cholesky_info(x, upper)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    other = jnp.conj(jnp.swapaxes(factor, -1, -2))
    low, high = (other, factor) if upper else (factor, other)
    half = jax.lax.linalg.triangular_solve(*_broadcast(low, b), left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(*_broadcast(high, half), left_side=True, lower=False)


@cholesky_solve.defjvp
def _cholesky_solve_slopes(upper: bool, primals: Any, tangents: Any) -> Any:
    """PyTorch's: of the whole factor, of which one triangle is read."""
    (_, factor), (db, dfactor) = primals, tangents
    solved = cholesky_solve(*primals, upper)
    h, dh = (jnp.conj(jnp.swapaxes(each, -1, -2)) for each in (factor, dfactor))
    moved = dh @ factor + h @ dfactor if upper else dfactor @ h + factor @ dh
    return solved, cholesky_solve(db - moved @ solved, factor, upper)


register_operator("aten.cholesky_solve.default")(cholesky_solve)


@register_operator("aten.cholesky_inverse.default")
def cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return cholesky_solve(eye, factor, upper)


@register_operator("aten.linalg_qr.default")
def qr(x: jax.Array, mode: str = "reduced") -> tuple[jax.Array, jax.Array]:
    if mode == "r":
        return jnp.zeros((0,), x.dtype), _LA.qr(x, mode="r")
    q, r = _LA.qr(x, mode=mode)
    return q, r


@register_operator("aten.qr.default")
def qr_old(x: jax.Array, some: bool = True) -> tuple[jax.Array, jax.Array]:
    return qr(x, "reduced" if some else "complete")


@register_operator("aten.linalg_eigh.default")
def eigh(x: jax.Array, UPLO: str = "L") -> tuple[jax.Array, jax.Array]:
    values, vectors = _LA.eigh(_mirrored(x, UPLO.upper() == "U"), symmetrize_input=False)
    return values, vectors


@register_operator("aten._linalg_eigh.default")
def eigh_or_values(
    x: jax.Array, UPLO: str = "L", compute_v: bool = True
) -> tuple[jax.Array, jax.Array]:
    values, vectors = eigh(x, UPLO)
    return values, vectors if compute_v else jnp.zeros((0,), x.dtype)


@register_operator("aten.linalg_eigvalsh.default")
def eigvalsh(x: jax.Array, UPLO: str = "L") -> jax.Array:
    return eigh(x, UPLO)[0]


@jax.custom_jvp
def _eig(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, vectors = jax.lax.linalg.eig(x, compute_left_eigenvectors=False)
    return values, vectors


@_eig.defjvp
def _eig_slopes(primals: Any, tangents: Any) -> Any:
    """Of vectors of length 1, as PyTorch has them (jax differentiates eigenvalues only)."""
    (x,), (dx,) = primals, tangents
    values, vectors = _eig(x)
    inner = _LA.solve(vectors, dx.astype(vectors.dtype) @ vectors)
    gaps = values[..., None, :] - values[..., :, None]
    same = jnp.eye(x.shape[-1], dtype=bool)
    turned = vectors @ jnp.where(same, 0, inner / jnp.where(same, 1, gaps))
    along = jnp.sum(jnp.conj(vectors) * turned, axis=-2, keepdims=True)
    return (values, vectors), (
        jnp.diagonal(inner, axis1=-2, axis2=-1),
        turned - vectors * along.real.astype(vectors.dtype),
    )


@register_operator("aten.linalg_eig.default")
def eig(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _eig(x)


@register_operator("aten.linalg_eigvals.default", "aten._linalg_eigvals.default")
def eigvals(x: jax.Array) -> jax.Array:
    return _eig(x)[0]


@register_operator("aten.linalg_svd.default")
def svd(
    x: jax.Array, full_matrices: bool = True, *, driver: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    u, s, vh = _LA.svd(x, full_matrices=full_matrices)
    return u, s, vh


@register_operator("aten._linalg_svd.default")
def svd_or_values(
    x: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if compute_uv:
        return svd(x, full_matrices)
    empty = jnp.zeros((0,), x.dtype)
    return empty, svdvals(x), empty


@register_operator("aten.svd.default")
def svd_old(x: jax.Array, some: bool = True, compute_uv: bool = True) -> tuple[jax.Array, ...]:
    u, s, vh = svd(x, not some)
    return u, s, jnp.conj(jnp.swapaxes(vh, -1, -2))


@register_operator("aten.linalg_svdvals.default")
def svdvals(x: jax.Array, *, driver: Any = None) -> jax.Array:
    return _LA.svd(x, compute_uv=False)


@register_operator("aten.linalg_lu_factor.default")
def lu_factor(x: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array]:
    lu, pivots, _ = jax.lax.linalg.lu(x)
    return lu, pivots + 1  # LAPACK counts from one


@register_operator("aten.linalg_lu_factor_ex.default")
def lu_factor_ex(
    x: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return *lu_factor(x), _lu_info(x)


@register_operator("aten.linalg_lu.default")
def lu(x: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    packed, _, order = jax.lax.linalg.lu(x)
    low, high = _unpacked(packed)
    return _permutation(order, x.dtype), low, high


def _unpacked(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, columns = packed.shape[-2:]
    size = min(rows, columns)
    eye = jnp.eye(rows, size, dtype=packed.dtype)
    return jnp.tril(packed[..., :size], -1) + eye, jnp.triu(packed[..., :size, :])


def _permutation(order: jax.Array, dtype: Any) -> jax.Array:
    """P with A = P L U, from the rows of A in the order of L's."""
    rows = jnp.eye(order.shape[-1], dtype=dtype)[order]
    return jnp.swapaxes(rows, -1, -2)


@register_operator("aten.lu_unpack.default")
def lu_unpack(
    packed: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    empty = jnp.zeros((0,), packed.dtype)
    low, high = _unpacked(packed) if unpack_data else (empty, empty)
    if not unpack_pivots:
        return empty, low, high
    order = jax.lax.linalg.lu_pivots_to_permutation(
        (pivots - 1).astype(jnp.int32), packed.shape[-2]
    )
    return _permutation(order, packed.dtype), low, high


@register_operator("aten.linalg_lu_solve.default")
def lu_solve(
    packed: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    if not left:  # X A = B is A^H X^H = B^H
        return jnp.conj(lu_solve(packed, pivots, jnp.conj(b.mT), adjoint=not adjoint).mT)
    p, low, high = (_broadcast(part, b)[0] for part in lu_unpack(packed, pivots))
    b = _broadcast(packed, b)[1]
    solved = functools.partial(jax.lax.linalg.triangular_solve, left_side=True)
    lower = functools.partial(solved, low, lower=True, unit_diagonal=True)
    upper = functools.partial(solved, high, lower=False)
    if adjoint:
        half = upper(b, transpose_a=True, conjugate_a=True)
        return p @ lower(half, transpose_a=True, conjugate_a=True)
    return upper(lower(jnp.swapaxes(p, -1, -2) @ b))


@register_operator("aten.lu_solve.default")
def lu_solve_old(b: jax.Array, packed: jax.Array, pivots: jax.Array) -> jax.Array:
    return lu_solve(packed, pivots, b)


@register_operator("aten.linalg_matrix_exp.default", "aten.matrix_exp.default")
def matrix_exp(x: jax.Array) -> jax.Array:
    if 0 in x.shape:
        return x
    return jsl.expm(cast(x, accumulation_dtype(x))).astype(x.dtype)  # jax's has no 16 bits


@register_operator("aten.linalg_matrix_power.default", "aten.matrix_power.default")
def matrix_power(x: jax.Array, n: int) -> jax.Array:
    return _LA.matrix_power(x, n)


@register_operator("aten.linalg_multi_dot.default", "aten.chain_matmul.default")
def multi_dot(matrices: Sequence[jax.Array]) -> jax.Array:
    return _LA.multi_dot(list(matrices))


@register_operator("aten.linalg_vecdot.default")
def vecdot(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    return jnp.sum(jnp.conj(x) * y, axis=dim)


@register_operator("aten.linalg_cross.default")
def linalg_cross(x: jax.Array, y: jax.Array, *, dim: int = -1) -> jax.Array:
    return jnp.cross(x, y, axis=dim)


@register_operator("aten.cross.default")
def cross(x: jax.Array, y: jax.Array, dim: int | None = None) -> jax.Array:
    return jnp.cross(x, y, axis=x.shape.index(3) if dim is None else dim)


@register_operator("aten.linalg_matrix_rank.default")
def matrix_rank(x: jax.Array, tol: Any = None, hermitian: bool = False) -> jax.Array:
    return _LA.matrix_rank(x, rtol=tol).astype(canonical("int64"))


@register_operator("aten.linalg_tensorinv.default")
def tensorinv(x: jax.Array, ind: int = 2) -> jax.Array:
    return _LA.tensorinv(x, ind)


@register_operator("aten.linalg_tensorsolve.default")
def tensorsolve(a: jax.Array, b: jax.Array, dims: Any = None) -> jax.Array:
    if dims is not None:
        a = jnp.moveaxis(a, tuple(dims), range(a.ndim - len(dims), a.ndim))
    free = a.shape[b.ndim :]
    return jnp.reshape(_LA.solve(a.reshape(b.size, -1), b.reshape(-1)), free)


@register_operator("aten.linalg_vander.default")
def vander(x: jax.Array, *, N: int | None = None) -> jax.Array:
    x = jnp.atleast_1d(x)
    count = x.shape[-1] if N is None else N
    ones = jnp.ones((*x.shape, 1), x.dtype)
    powers = jnp.broadcast_to(x[..., None], (*x.shape, count - 1))
    return jnp.concatenate([ones, jnp.cumprod(powers, axis=-1)], axis=-1)


@register_operator("aten.linalg_householder_product.default", "aten.orgqr.default")
def householder_product(x: jax.Array, tau: jax.Array) -> jax.Array:
    """Columns of H_1 H_2 ... H_k; by rank-one updates, which can be differentiated."""
    rows, columns = x.shape[-2:]
    q = jnp.broadcast_to(jnp.eye(rows, columns, dtype=x.dtype), x.shape)
    for k in reversed(range(tau.shape[-1])):
        below = jnp.arange(rows) > k
        v = jnp.where(below, x[..., :, k], (jnp.arange(rows) == k).astype(x.dtype))
        along = jnp.einsum("...m,...mn->...n", jnp.conj(v), q)
        q = q - tau[..., k, None, None] * v[..., :, None] * along[..., None, :]
    return q


@register_operator("aten.ormqr.default")
def ormqr(
    x: jax.Array, tau: jax.Array, other: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    rows = x.shape[-2]
    held = x[..., :rows]
    whole = jnp.pad(held, [(0, 0)] * (x.ndim - 1) + [(0, rows - held.shape[-1])])
    q = householder_product(whole, tau)
    q = jnp.conj(jnp.swapaxes(q, -1, -2)) if transpose else q
    return q @ other if left else other @ q


@register_operator("aten.trace.default")
def trace(x: jax.Array) -> jax.Array:
    found = jnp.trace(x)
    return found.astype(canonical("int64")) if jnp.issubdtype(x.dtype, jnp.integer) else found


@register_operator("aten.kron.default")
def kron(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.kron(x, y)
