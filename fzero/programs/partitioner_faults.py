"""What XLA's partitioner gets wrong: refused, or held whole, before it divides it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax

from fzero.axes import manual_axes
from fzero.compat import standing
from fzero.errors import PlanError
from fzero.programs.jaxprs import inner_jaxprs


# What lies as its operands do.
_SAME = ("convert_element_type", "copy", "name", "optimization_barrier", "reduce_precision")
# What runs a program once, of the values that it is given.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr")  # fmt: skip
_HOLD = (
    "hold the value whole just before and its result just after, each by"
    " x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())"
)

# Dims of a value that a sharding constraint holds whole.
Dims = set[int]
# Of an equation: the dims of its first operands and of its result that are to be held whole.
DimsOf = Callable[[Any], tuple[Sequence[Sequence[int]], Sequence[int]]]


def partitioned(
    run: Callable[..., Any], mesh: Any, differentiates: bool = False
) -> Callable[..., Any]:
    """A function that XLA's partitioner divides rightly, or that is refused.

    Two gradients are wrong in jax 0.10, without a word, and right where sharding constraints hold
    what is read and what is given whole, and so refused without these: that of a largest value of
    windows that overlap along a divided dim (max pooling over positions; `select_and_scatter_add`),
    and that of a depthwise kernel whose dims are in another order than those of a value whose
    features are divided.

    Held whole is what it ends the process at: what an index picks of or writes into, along the
    dims of that index, where rows are shared out and two further axes divide (logits over `tensor`,
    say, of which `jnp.take_along_axis` picks labels; the gradient of `jnp.sort`), what a Fourier
    transform runs along, where the size is no multiple of an axis' square, and convolutions in
    groups of features or rows. And what it gets wrong: what a pad fills between, as the gradient of
    `x[:, ::3]` does; what is written at one place (`x.at[:, 1:].set(y)`) of what was written
    before, along the dims of that place; and all convolutions where two further axes divide. And
    what CPUs cannot add up between devices: a `reduce` by the caller's own rule, or exclusive or.

    Args:
        run: the function.
        mesh: the mesh that it runs on.
        differentiates: whether it takes gradients within, which are looked at then.

    Returns:
        `run` itself, where the mesh divides no layers, sequences or experts.
    """
    manual = manual_axes(mesh)
    large = {name: size for name, size in dict(mesh.shape).items() if size > 1}
    further = {name: size for name, size in large.items() if name not in manual}
    if not further:
        return run
    dims_of = partial(_to_hold, picks=1 < len(further) < len(large), sizes=tuple(further.values()))

    def traced(*args: Any) -> Any:
        from jax.extend.core import jaxpr_as_fun

        program, out = jax.make_jaxpr(run, return_shape=True)(*args)
        for equation, whole, jaxpr in _equations(program.jaxpr, ()) if differentiates else ():
            if wrong := _wrong(equation, whole, jaxpr):
                axes = ", ".join(f"{name}={size}" for name, size in further.items())
                raise PlanError(f"plan: {axes}: the model {wrong}")
        program = program.replace(jaxpr=_held_whole(program.jaxpr, dims_of))
        found = jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return traced


def partitioned_where_differentiated(
    run: Callable[..., Any], mesh: Any, gathers_at_use: bool
) -> Callable[..., Any]:
    """The same for a function that may be differentiated from without: it is looked at then.

    Outside of a `jit` JAX refuses to differentiate a `shard_map` over some axes alone, in its own
    words; within one it does. What gathers weights at use XLA's partitioner then refuses, in words
    of its own, where only further axes divide.
    """
    further = set(mesh.axis_names) - manual_axes(mesh)
    if not further:
        return run
    whole = partitioned(run, mesh)
    alone = all(mesh.shape[name] == 1 for name in manual_axes(mesh))
    found = jax.custom_jvp(whole)

    @found.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        if gathers_at_use and alone and any(mesh.shape[name] > 1 for name in further):
            raise PlanError(
                "plan: a gradient through an evaluation, with zero=3 (or gather='lazy') where rows"
                " are not shared out (data=1, replica=1): XLA's partitioner takes none. Take it"
                " with zero=2, whose numbers are the same: fz.replan, fz.eval_step; or data=2"
            )
        jax.eval_shape(partitioned(run, mesh, differentiates=True), *primals)
        return jax.jvp(jax.jit(whole), primals, tangents)

    return found


def _wrong(equation: Any, whole: Dims, jaxpr: Any) -> str:
    """What of an equation XLA would differentiate wrongly, and what to do; else nothing."""
    given = [x.aval.str_short() for x in equation.invars]
    over = _overlapping(equation)
    if over and not (over <= whole and _held_after(equation, over, jaxpr)):
        return (
            "takes the largest or smallest values of windows that overlap (max pooling), of"
            f" {given[0]}. XLA's partitioner gets their gradient wrong along a divided dim: {_HOLD}"
        )
    turned = _turned_depthwise(equation, jaxpr)
    if turned:
        before, after = turned
        if not before <= whole or not _held_after(equation, after, jaxpr):
            return (
                f"convolves each feature of {given[0]} by itself with a kernel {given[1]} that has"
                " features first where the value has them last, or the other way round. XLA's"
                " partitioner gets the kernel's gradient wrong along divided features: give both"
                f" the same order (dimension_numbers=('NHC', 'HIO', 'NHC')), or {_HOLD}"
            )
    return ""


def _equations(
    jaxpr: Any, given: Sequence[Dims]
) -> Generator[tuple[Any, Dims, Any], None, list[Dims]]:
    """All equations, each with what is held of its first operand and the program that it is in.

    Args:
        jaxpr: the program.
        given: what is held of its inputs, if that is known.

    Returns:
        What is held of its outputs.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    held = dict(zip(map(id, jaxpr.invars), given, strict=False))  # by value
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [held.get(id(x), set()) for x in equation.invars]
        if name == "sharding_constraint":
            held[id(equation.outvars[0])] = _constrained(equation)
        elif name in _SAME:
            held.update(zip(map(id, equation.outvars), operands, strict=True))
        yield equation, operands[0] if operands else set(), jaxpr
        for inner in inner_jaxprs(equation):
            found = yield from _equations(inner, operands if name in _CALLS else ())
            if name in _CALLS:
                held.update(zip(map(id, equation.outvars), found, strict=False))
    return [held.get(id(x), set()) for x in jaxpr.outvars]


def _to_hold(
    equation: Any, picks: bool, sizes: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """The dims of an equation's first operands, and of its result, that are to be whole.

    Args:
        equation: the equation.
        picks: whether indices along a divided dim may end the process.
        sizes: of the axes that XLA divides over.
    """
    name, given = equation.primitive.name, equation.params
    if name == "gather" and picks:
        numbers, (out,) = given["dimension_numbers"], equation.outvars
        kept = out.aval.ndim if equation.invars[0].aval.ndim == 2 else 0  # positions of tokens
        places = [d for d in range(kept, out.aval.ndim) if d not in numbers.offset_dims]
        dims = numbers.start_index_map
        return ((), ()) if _is_table(equation, dims, out) else ([dims], places)
    if name == "conv_general_dilated":
        value, kernel, out = given["dimension_numbers"]
        grouped = max(given["feature_group_count"], given["batch_group_count"]) > 1
        wide = any(equation.invars[1].aval.shape[d] > 1 for d in kernel[2:])
        if (grouped or wide) if len(sizes) > 1 else (grouped and not _depthwise(equation)):
            return [value, kernel], out
    if name.startswith("scatter"):
        dims = given["dimension_numbers"].scatter_dims_to_operand_dims
        many = picks and not _is_table(equation, dims, equation.invars[2])
        if many or _is_one_window(equation):
            return [dims], dims
    if name == "pad":
        dims = [d for d, (_, _, between) in enumerate(given["padding_config"]) if between > 0]
        return ([dims], dims) if dims else ((), ())
    if name in ("reduce", "reduce_xor"):
        dims = given["dimensions" if name == "reduce" else "axes"]
        return [dims] * len(equation.outvars), ()
    if name == "fft":
        shapes = [x.aval.shape for x in (*equation.invars, *equation.outvars)]
        along = range(len(shapes[0]))[-len(given["fft_lengths"]) :]
        parts = {*sizes, math.prod(sizes)}
        uneven = [d for d in along if any(shape[d] % n**2 for shape in shapes for n in parts)]
        return ([uneven], uneven) if uneven else ((), ())
    return (), ()


def _held_whole(jaxpr: Any, dims_of: DimsOf) -> Any:
    """A program that holds whole what equations take and give."""
    equations = []
    for equation in jaxpr.eqns:
        own = {
            name: jax.tree.map(partial(_within, dims_of=dims_of), value, is_leaf=_is_program)
            for name, value in equation.params.items()
            if any(map(_is_program, jax.tree.leaves(value, is_leaf=_is_program)))
        }
        equation = equation.replace(params={**equation.params, **own}) if own else equation
        before, after = dims_of(equation)
        operands, results = list(equation.invars), equation.outvars[:1]
        with standing(equation) if before or after else nullcontext():
            if (before or after) and not _divides():  # within a `shard_map` over all axes
                before, after = (), ()
            taken = {i: _holding(operands[i].aval, dims) for i, dims in enumerate(before) if dims}
            given = [_holding(x.aval, after) for x in results if after]
        for i, one in taken.items():
            equations.append(one.replace(invars=[operands[i]]))
            (operands[i],) = one.outvars
        equation = equation.replace(invars=operands) if taken else equation
        for one in given:
            equations.append(equation.replace(outvars=one.invars))
            equation = one.replace(outvars=equation.outvars)
        equations.append(equation)
    return jaxpr.replace(eqns=equations)


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns")


def _within(value: Any, dims_of: DimsOf) -> Any:
    if not _is_program(value):
        return value
    closed = getattr(value, "jaxpr", None)
    if closed is None:
        return _held_whole(value, dims_of)
    return value.replace(jaxpr=_held_whole(closed, dims_of))


def _divides() -> bool:
    """Whether there is an axis here that XLA divides over."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    auto = jax.sharding.AxisType.Auto
    return any(kind == auto and mesh.shape[name] > 1 for name, kind in kinds)


def _holding(aval: Any, dims: Sequence[int]) -> Any:
    """An equation that holds a value whole along dims."""
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = jax.sharding.PartitionSpec(*(None if d in dims else free for d in range(aval.ndim)))
    hold = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, spec))
    (equation,) = hold(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).jaxpr.eqns
    return equation


def _constrained(equation: Any) -> Dims:
    """The dims that a sharding constraint says are whole."""
    spec, (out,) = equation.params["sharding"].spec, equation.outvars
    return {d for d in range(out.aval.ndim) if d >= len(spec) or spec[d] is None}


def _overlapping(equation: Any) -> Dims:
    """The dims along which windows of largest or smallest values overlap."""
    if equation.primitive.name not in ("reduce_window_max", "reduce_window_min"):
        return set()
    windows = equation.params["window_dimensions"], equation.params["window_strides"]
    pairs = enumerate(zip(*windows, strict=True))
    return {dim for dim, (size, stride) in pairs if size > stride}


def _turned_depthwise(equation: Any, jaxpr: Any) -> tuple[Dims, Dims] | None:
    """The dims but rows before and after a convolution that has a kernel for each feature, with
    dims in another order; not of one that is the gradient of another's input (its kernel is turned
    round)."""
    if equation.primitive.name != "conv_general_dilated":
        return None
    value, kernel = equation.invars
    (_, before, *_), (out, *_), _ = equation.params["dimension_numbers"]
    turned = (before == value.aval.ndim - 1) != (out == kernel.aval.ndim - 1)
    alone = equation.params["batch_group_count"] == 1 and _depthwise(equation)
    if not alone or not turned:
        return None
    back = any(x.primitive.name == "rev" and x.outvars[0] is kernel for x in jaxpr.eqns)
    rows, _, rows_after = (spec[0] for spec in equation.params["dimension_numbers"])
    every = set(range(value.aval.ndim))
    return None if back else (every - {rows}, every - {rows_after})


def _is_one_window(equation: Any) -> bool:
    """Whether a scatter writes at one place, as `x.at[:, 1:].set(y)` does."""
    places = equation.invars[1].aval.shape
    return math.prod(places[:-1]) == 1


def _is_table(equation: Any, dims: Sequence[int], picked: Any) -> bool:
    """Whether a gather or scatter is of rows of a table, as of tokens: these XLA divides over a
    vocabulary and positions at once. One that is no larger than what is picked of it is held."""
    table = equation.invars[0].aval
    alone = table.ndim == 2 and tuple(dims) == (0,)
    batched = equation.params["dimension_numbers"].operand_batching_dims
    return bool(alone and not batched and table.size > picked.aval.size)


def _depthwise(equation: Any) -> bool:
    """Whether a convolution has a kernel for each feature, or is the gradient of such a kernel."""
    given, shape = equation.params, equation.invars[0].aval.shape
    rows, features, *_ = given["dimension_numbers"][0]
    if given["batch_group_count"] > 1:
        return bool(given["batch_group_count"] == shape[rows])
    return bool(given["feature_group_count"] == shape[features] > 1)


def _held_after(equation: Any, dims: Dims, jaxpr: Any) -> bool:
    """Whether all that reads what an equation gives is a constraint that holds dims of it."""
    (out,) = equation.outvars
    readers = [one for one in jaxpr.eqns if any(x is out for x in one.invars)]
    return bool(readers) and all(
        dims <= _constrained(one)
        if one.primitive.name == "sharding_constraint"
        else one.primitive.name in _SAME and _held_after(one, dims, jaxpr)
        for one in readers
    )
