"""Products with parameters on 8-bit operands, found in a traced function.

Not by swapping layers: whatever multiplies activations with one parameter, in a native layer, a
flax module or a converted one, is a `dot_general` whose one operand is that parameter, cast or
transposed. Here the function's program is run with those products replaced. Loops and
`jax.checkpoint` inside it stay what they are; functions with derivatives of their own (kernels,
losses) run as they were written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fzero import compat
from fzero.float8.recipe import Float8
from fzero.float8.scaling import E4M3, E5M2, Scaled, scaled_weight
from fzero.programs.jaxprs import CHECKPOINTS
from fzero.tree import PyTree, path_name


# A parameter that is cast, transposed or cut is still that parameter.
_MOVEMENT = frozenset(
    ("transpose", "convert_element_type", "reduce_precision", "reshape", "squeeze", "slice",
     "split", "copy", "copy_p", "concatenate", "optimization_barrier", "stop_gradient", "name",
     "sharding_constraint")
)  # fmt: skip
_INLINED = frozenset(("jit", "pjit", "closed_call", "core_call"))
# What `checkpoint_name` calls the result of a product in 8 bits.
PRODUCT = "fzero.product"


def in_float8(
    apply: Callable[..., Any],
    name: str,
    float8: Float8,
    reads: Mapping[str, str] = MappingProxyType({}),
) -> Callable[..., Any]:
    """`apply(params, *args)` with its products with parameters on 8-bit operands.

    Args:
        apply: any traceable function; `params` is a pytree of arrays.
        name: what stands before the paths in `params` that `float8` is asked about.
        float8: which products, and how.
        reads: the paths of parameters that `params` has from elsewhere, by their key.

    Forward-mode derivatives (`jax.jvp`) do not pass through.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> product = in_float8(lambda w, x: x @ w["w"], "mlp", Float8())
        >>> x, w = jnp.full((16, 16), 1.07, jnp.bfloat16), jnp.eye(16, dtype=jnp.bfloat16)
        >>> float(product({"w": w}, x)[0, 0])  # 1.07 is 448 after scaling, which 8 bits hold
        1.0703125
    """

    def run(params: PyTree, *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(apply, return_shape=True)(params, *args)
        paths: list[Paths] = [
            _paths(path_name(path), name, reads)
            for path, _ in jax.tree_util.tree_leaves_with_path(params)
        ]
        values = jax.tree.leaves((params, args))
        paths += [None] * (len(values) - len(paths))
        out, _ = _RunByPath(float8).program(closed.jaxpr, closed.consts, values, paths)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


Paths = tuple[str, ...] | None
"""The paths of the parameter that a value is; `None` for any other value."""

_FOUND: ContextVar[list[Paths] | None] = ContextVar("fzero_products_in_float8", default=None)


@contextmanager
def products_found() -> Iterator[list[Paths]]:
    """Of the products that are traced in 8 bits while this is open, the parameters."""
    found: list[Paths] = []
    with compat.set_within(_FOUND, found):
        yield found


def _paths(path: str, layer: str, reads: Mapping[str, str]) -> tuple[str, ...]:
    key, slash, rest = path.partition("/")
    own = f"{layer}/{path}" if layer else path
    return (own, f"{reads[key]}{slash}{rest}") if key in reads else (own,)


class _RunByPath:
    """Runs a program of whose values it is known which are parameters."""

    def __init__(self, float8: Float8) -> None:
        self.float8 = float8

    def program(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], paths: Sequence[Paths]
    ) -> tuple[list[Any], list[Paths]]:
        """Its outputs and their paths."""
        from jax.extend.core import Literal  # with all of `jax.extend`: slow

        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        known: dict[Any, Paths] = dict(zip(jaxpr.invars, paths, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        def told(atom: Any) -> Paths:
            return None if isinstance(atom, Literal) else known.get(atom)

        for equation in jaxpr.eqns:
            values, names = [[of(x) for x in equation.invars] for of in (read, told)]
            out, found = self._equation(equation, values, names)
            env.update(zip(equation.outvars, out, strict=True))
            known.update(zip(equation.outvars, found, strict=True))
        return [[of(x) for x in jaxpr.outvars] for of in (read, told)]  # type: ignore[return-value]

    def _equation(
        self, equation: Any, values: list[Any], paths: list[Paths]
    ) -> tuple[list[Any], list[Paths]]:
        kind, params = equation.primitive.name, equation.params
        none: list[Paths] = [None] * len(equation.outvars)
        if kind in _INLINED:
            body = params["jaxpr"]
            with compat.standing(equation):
                return self.program(body.jaxpr, body.consts, values, paths)
        if kind in CHECKPOINTS:
            body = params["jaxpr"]
            again = jax.checkpoint(
                lambda *args: self.program(body, (), args, paths)[0],
                policy=params["policy"], prevent_cse=params["prevent_cse"],
            )  # fmt: skip
            with compat.standing(equation):
                return again(*values), none
        if kind == "scan":
            consts, carry, rows = compat.scan_operands(equation, paths)
            inner = [*consts, *([None] * len(carry)), *rows]
            body = params["jaxpr"]
            traced = jax.make_jaxpr(
                lambda *args: self.program(body.jaxpr, body.consts, args, inner)[0]
            )(*body.in_avals)
            with compat.standing(equation):
                return equation.primitive.bind(*values, **{**params, "jaxpr": traced}), none
        if kind == "dot_general" and (found := self._found(equation, paths)) is not None:
            with compat.standing(equation):
                return [_general(found, equation, values)], none
        out = compat.run_equation(equation, values, ())
        if _moves(equation) and paths and None not in paths:
            # Of what is joined, all paths: one that stays in bf16 keeps all of it there.
            joined = tuple(dict.fromkeys(path for one in paths for path in one or ()))
            return out, [joined] * len(out)
        return out, none

    def _found(self, equation: Any, paths: list[Paths]) -> _Product | None:
        """How a product runs in 8 bits; `None` if it does not."""
        (left, right), batch = equation.params["dimension_numbers"]
        if (paths[0] is None) == (paths[1] is None) or any(batch):
            return None
        avals = [x.aval for x in equation.invars]
        if any(aval.dtype not in (jnp.bfloat16, jnp.float16) for aval in avals):
            return None
        at = 0 if paths[0] is not None else 1
        sums = (left, right)[at]
        size = math.prod(avals[at].shape[d] for d in sums)
        path = paths[at]
        assert path is not None
        if not size or not self.float8.takes(path, size, avals[at].size // size):
            return None
        if (found := _FOUND.get()) is not None:
            found.append(path)
        return _Product(at, (left, right)[1 - at], sums, self.float8.recipe)


def _moves(equation: Any) -> bool:
    """Whether what an equation gives are elements of what it reads."""
    if equation.primitive.name == "broadcast_in_dim":  # how `w[None]` is traced
        return bool(equation.invars[0].aval.size == equation.outvars[0].aval.size)
    return equation.primitive.name in _MOVEMENT


class _Product(NamedTuple):
    """A product of a value with a parameter.

    Args:
        at: which operand is the parameter.
        value: dims of the value that are summed along.
        weight: dims of the parameter that are.
        recipe: how operands are scaled.
    """

    at: int
    value: tuple[int, ...]
    weight: tuple[int, ...]
    recipe: str


def _general(product: _Product, equation: Any, values: list[Any]) -> jax.Array:
    """The product as one of two matrices."""
    x, w = values[1 - product.at], values[product.at]
    rows = [d for d in range(x.ndim) if d not in product.value]
    columns = [d for d in range(w.ndim) if d not in product.weight]
    shape = [x.shape[d] for d in rows], [w.shape[d] for d in columns]
    size = math.prod(w.shape[d] for d in product.weight)
    left = x.transpose(*rows, *product.value).reshape(-1, size)
    right = w.transpose(*product.weight, *columns).reshape(size, -1)
    out = _multiply(product.recipe, equation.outvars[0].aval.dtype, left, right)
    # A policy of `jax.checkpoint` does not see the product itself.
    out = checkpoint_name(out, PRODUCT)
    out = out.reshape(*shape[0], *shape[1])
    if product.at == 0:  # the parameter's dims come first
        split = len(shape[0])
        out = out.transpose(*range(split, out.ndim), *range(split))
    return out


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(recipe: str, dtype: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` of [rows, size] with [size, columns], rounded to `dtype`."""
    return Scaled.of(x, 1, E4M3, recipe).times(scaled_weight(w, 0, recipe), dtype)


def _forward(recipe: str, dtype: Any, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    # What is kept are the operands as they came: a parameter is then still known as one, and is not
    # kept but gathered again.
    return _multiply(recipe, dtype, x, w), (x, w)


def _backward(recipe: str, _: Any, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    gradients: tuple[jax.Array, jax.Array] = _gradients(recipe, *residuals, g)
    return gradients


_multiply.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    recipe: str, x: jax.Array, w: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Those of `x` and `w`, where `g` is that of their product."""
    of_gradients = E5M2 if recipe == "tensorwise" else E4M3
    # Gradients' sums are exact, as those of torchao and TransformerEngine are.
    rows, columns = (Scaled.of(g, dim, of_gradients, recipe) for dim in (1, 0))
    dx = rows.times(scaled_weight(w, 1, recipe).T, x.dtype, exact=True)
    dw = Scaled.of(x.T, 1, E4M3, recipe).times(columns, w.dtype, exact=True)
    return dx, dw


def _gradients_forward(recipe: str, *operands: jax.Array) -> tuple[Any, Any]:
    return _gradients(recipe, *operands), operands


def _gradients_backward(_: str, operands: Any, cotangents: Any) -> Any:
    # Rounding to 8 bits has no derivative of use, so gradients of gradients are those of products
    # in 16.
    def plain(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (g @ w.T).astype(x.dtype), (x.T @ g).astype(w.dtype)

    return jax.vjp(plain, *operands)[1](cotangents)


_gradients.defvjp(_gradients_forward, _gradients_backward)
