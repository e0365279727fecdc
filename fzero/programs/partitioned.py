"""What XLA's partitioner gets wrong, refused before it divides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from fzero.axes import CONTEXT, manual_axes
from fzero.errors import PlanError
from fzero.programs.flops import inner_jaxprs


# What lies as its operands do.
_SAME = ("convert_element_type", "copy", "name", "optimization_barrier", "reduce_precision")


def checked(run: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function that is differentiated within, refused where that would be wrong on a mesh.

    The gradient of a largest value of windows that overlap along a divided dim (max pooling over
    positions) is wrong in jax 0.10 (`select_and_scatter_add`). It is right where a sharding
    constraint holds the value that the windows run over.

    Args:
        run: the function.
        mesh: the mesh that it runs on.

    Returns:
        `run` itself, where the mesh divides no sequences.
    """
    size = dict(mesh.shape).get(CONTEXT, 1)
    if size == 1:
        return run

    def traced(*args: Any) -> Any:
        from jax.extend.core import jaxpr_as_fun

        program, out = jax.make_jaxpr(run, return_shape=True)(*args)
        for equation, whole in _equations(program.jaxpr):
            if not _overlapping(equation) <= whole:
                raise PlanError(
                    f"plan: context={size}: the model takes the largest or smallest values of"
                    f" windows that overlap (max pooling), of"
                    f" {equation.invars[0].aval.str_short()}. XLA's partitioner gets their gradient"
                    " wrong along a divided dim: hold the value whole just before, by"
                    " x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())"
                )
        found = jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return traced


def checked_where_differentiated(run: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """The same for a function that may be differentiated from without: it is refused then.

    Outside of a `jit` JAX refuses to differentiate a `shard_map` over some axes alone, in its own
    words; within one it does.
    """
    if not set(mesh.axis_names) - manual_axes(mesh):
        return run
    found = jax.custom_jvp(run)

    @found.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        jax.eval_shape(checked(run, mesh), *primals)
        return jax.jvp(jax.jit(run), primals, tangents)

    return found


def _equations(jaxpr: Any) -> Iterator[tuple[Any, set[int]]]:
    """All equations, and the dims of the first value read that a constraint holds whole."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    held: dict[int, set[int]] = {}  # by value
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "sharding_constraint":
            spec, (out,) = equation.params["sharding"].spec, equation.outvars
            held[id(out)] = {d for d in range(out.aval.ndim) if d >= len(spec) or spec[d] is None}
        elif name in _SAME:
            pairs = zip(equation.invars, equation.outvars, strict=True)
            held.update((id(out), held[id(given)]) for given, out in pairs if id(given) in held)
        yield equation, held.get(id(equation.invars[0]), set()) if equation.invars else set()
        for inner in inner_jaxprs(equation.params):
            yield from _equations(inner)


def _overlapping(equation: Any) -> set[int]:
    """The dims along which windows of largest or smallest values overlap."""
    if equation.primitive.name not in ("reduce_window_max", "reduce_window_min"):
        return set()
    windows = equation.params["window_dimensions"], equation.params["window_strides"]
    pairs = enumerate(zip(*windows, strict=True))
    return {dim for dim, (size, stride) in pairs if size > stride}
