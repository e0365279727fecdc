"""Every edge between versions of jax (0.10, and 0.11 from Python 3.12 on), flax and Python."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh


@contextmanager
def set_within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """A context variable's value while this is open; from Python 3.14 on its tokens do this."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def auto_mesh(grid: np.ndarray[Any, Any], axes: Sequence[str]) -> Mesh:
    """A mesh whose axes are `Auto`.

    `jax.make_mesh` gives `Explicit` axes since 0.9, under which third-party model code that was
    written for automatic sharding raises `ShardingTypeError`.
    """
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def why_no_empty(mesh: Mesh) -> str | None:
    """Why no array without elements may be compiled for these devices, and what to do; else None.

    jaxlib 0.11.2 ends the process for any program with a collective.
    """
    several = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    if not several or jax.__version_info__[:2] != (0, 11):
        return None
    return (
        "no elements: on several CPU devices this jaxlib ends with a segmentation fault when it"
        " compiles such a step; leave the array out, use one device, or jaxlib 0.10"
    )


def has_explicit_axes(sharding: Any) -> bool:
    """Whether a sharding is over a mesh of `jax.make_mesh` whose axes are part of arrays' types."""
    return AxisType.Explicit in getattr(getattr(sharding, "mesh", None), "axis_types", ())


def abstract_mesh(sizes: Mapping[str, int]) -> Any:
    """A mesh of devices that need not exist, which shapes can be split over; axes are `Auto`."""
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def ranks_mesh(mesh: Any, ranks: Sequence[int]) -> Any:
    """Some rows of the first axis of a mesh; a single row has no such axis."""
    one = len(ranks) == 1
    if isinstance(mesh, AbstractMesh):
        first, *rest = dict(mesh.shape).items()
        return abstract_mesh(dict(rest) if one else {first[0]: len(ranks), **dict(rest)})
    grid = mesh.devices[np.asarray(ranks)]
    return auto_mesh(grid[0] if one else grid, mesh.axis_names[one:])


@contextmanager
def outside_of_meshes() -> Iterator[None]:
    """Outside of a user's `jax.set_mesh`: what runs here has the mesh of its plan.

    Within a trace, where jax lets nobody set a mesh, that stays as it is.
    """
    scope: Any = nullcontext()
    if not jax.sharding.get_abstract_mesh().empty:
        with suppress(ValueError):
            scope = jax.set_mesh(None)
    with scope:
        yield


def switch(name: str) -> Any:
    """A setting of jax's, as it is here and now (its type does not have them)."""
    return getattr(jax.config, name)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key array (`jax.random.key`)."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def key_bits(leaf: Any) -> Any:
    """A random key's bits; any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def run_equation(equation: Any, values: Sequence[Any], scope: Sequence[Any]) -> list[Any]:
    """Applies one equation of a jaxpr to values, in the context it was traced in.

    That is its settings, and where it stood: `jax.named_scope`s and the line of its source, which
    profiles show and errors point to.

    `get_bind_params` gave (functions, params) up to jax 0.9, params alone since.

    Args:
        equation: the equation.
        values: its operands.
        scope: stacks of names around the calls that it was inlined from, the outermost first.
    """
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with standing(equation, scope):
        out = equation.primitive.bind(*functions, *values, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def scan_operands(equation: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What of a scan's operands (or of as many other values) is constant, carried, and cut in rows.

    Their numbers stood in `num_consts` and `num_carry` up to jax 0.10, and in `ft_in` since.
    """
    params = equation.params
    if "ft_in" in params:
        consts, carry, rows = params["ft_in"].update(values).unpack()
        return list(consts), list(carry), list(rows)
    first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(values[:first]), list(values[first:second]), list(values[second:])


@contextmanager
def standing(equation: Any, scope: Sequence[Any] = ()) -> Iterator[None]:
    """Where an equation stood and its settings, for what is traced in its place.

    Args:
        equation: the equation.
        scope: stacks of names around the calls that it was inlined from, the outermost first.
    """
    from jax.extend import source_info_util  # with all of `jax.extend`: slow

    source = equation.source_info
    names = sum((*scope, source.name_stack), start=source_info_util.current_name_stack())
    with source_info_util.user_context(source.traceback, name_stack=names), equation.ctx.manager:
        yield


def is_traced_on_host(value: Any) -> bool:
    """Inside jit, whether a value is in host memory."""
    return bool(getattr(jax.typeof(value), "memory_space", None) == jax.memory.Space.Host)


def to_device(value: jax.Array) -> jax.Array:
    """Inside jit, a value in device memory; itself if it is not on the host."""
    if not is_traced_on_host(value):
        return value
    return jax.device_put(value, jax.memory.Space.Device)


def to_host(value: jax.Array) -> jax.Array:
    """Inside jit, a value in pinned host memory."""
    return jax.device_put(value, jax.memory.Space.Host)


def traced_platform() -> str:
    """The platform (`cpu`, `gpu`) of the devices that a program is being traced for.

    Inside `shard_map` it is the mesh's, whose devices need not be here; elsewhere jax's default.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    device = device or getattr(jax.config, "jax_default_device", None)
    return str(getattr(device, "platform", None) or device or jax.default_backend())


def read_inputs(closed: Any) -> list[bool]:
    """Which inputs of a program it takes to compute what it gives."""
    from jax.interpreters import partial_eval

    return list(partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[1])


def current_trace() -> Any:
    """What JAX is tracing for, to be told from what it traces for later."""
    from jax.extend import core  # slow

    with core.take_current_trace() as trace:
        return weakref.ref(trace)


def derivatives_since(began: Any) -> list[Any] | None:
    """The derivatives (`jax.grad`, `jax.jvp`) being taken that were not when `current_trace` was.

    Returns:
        They, innermost first, as `primal` takes them; None if JAX transforms by anything else.
    """
    from jax.extend import core  # slow

    found: list[Any] = []
    with core.take_current_trace() as trace:
        while trace is not began():
            if not hasattr(trace, "to_primal_tangent_pair"):
                return None
            found.append(trace)
            trace = trace.parent_trace
    return found


def primal(value: Any, derivatives: Sequence[Any]) -> Any:
    """A value as it is outside of derivatives, innermost first."""
    for trace in derivatives:
        value, _ = trace.to_primal_tangent_pair(value)
    return value


def nnx_graphs() -> AbstractContextManager[Any]:
    """flax's functions of nnx look at modules as graphs, which older ones do always.

    `nnx.set_graph_mode(False)` has newer ones see trees, which hold no values of Python.
    """
    from flax import nnx

    return nnx.set_graph_mode(True) if hasattr(nnx, "set_graph_mode") else nullcontext()
