"""Running part of a program on one slab of its leaves at a time.

An optimizer that works element by element on a leaf can see it in slabs. Whether it does is read
from its traced operations; the program for a slab is the same function traced with a slab's
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fzero.compat import key_bits
from fzero.processes import in_turn
from fzero.programs.jaxprs import ELEMENTWISE, Op, Program, Var, run_ops
from fzero.programs.sites import Section


_OF_GATHERS = frozenset(("all_gather", "slice", "convert_element_type", "bitcast_convert_type"))


@dataclass(frozen=True)
class Cut:
    """A dim, and the number of equal slabs that leaves are cut into along it."""

    dim: int
    count: int


@dataclass(frozen=True)
class SlabProgram:
    """A part of a program, compiled for one slab of its leaves.

    Args:
        cut: how they are cut.
        sliced: which of the section's reads are seen in slabs.
        made: which of its results are made in slabs.
        run: `run(index, here, kept, into)`: `here` are slabs by index of the section's reads,
            `kept` whole values; `into` whole arrays, by index of the section's results, which their
            slabs are written into (and, where `source` says so, read from).
        source: for results, the read that is the same memory.
    """

    cut: Cut
    sliced: frozenset[int]
    made: frozenset[int]
    run: Callable[..., list[Any]]
    source: Mapping[int, int]


def is_rowwise(op: Op, dim: int, size: int) -> bool:
    """Whether an operation treats every row of a dim by itself.

    Args:
        op: the operation.
        dim: the dim.
        size: the number of rows of leaves that are cut along it.
    """

    def large(x: Any) -> bool:
        shape = _shape(x)
        return len(shape) > dim and shape[dim] == size

    values = (*op.operands, *op.results)
    if not any(map(large, values)):
        return True
    name = _name(op)
    if name in ELEMENTWISE:
        return all(large(x) or _shape(x) == () for x in values)
    if not all(map(large, op.results)):
        return False
    if name == "cond":
        return all(is_rowwise(s, dim, size) for branch in _programs_in(op) for s in branch.ops)
    params = {} if op.equation is None else op.equation.params
    if name == "broadcast_in_dim":
        return all(_shape(x) == () for x in op.operands)
    if name == "slice":
        starts, strides = params["start_indices"], params["strides"]
        return starts[dim] == 0 and (strides is None or strides[dim] == 1)
    if name == "pad":
        return params["padding_config"][dim] == (0, 0, 0)
    if name == "shard_map":
        # Gathering whole leaves: along another dim, as the one that is cut is not split.
        (inner,) = _programs_in(op)
        return _OF_GATHERS.issuperset(map(_name, inner.ops))
    return False


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.aval.shape) if isinstance(x, Var) else tuple(getattr(x, "shape", ()))


def _alike(one: Program, other: Program, dim: int, pairs: Iterable[tuple[Op, Op]]) -> bool:
    """Whether operations and those of a slab do the same, but for how many rows they do it to.

    A function may compute with its arguments' shapes (`update / update.shape[-1]`): then numbers
    differ that stand in the operations, or among what they read.

    Args:
        one: the program of the whole leaves.
        other: that of a slab.
        dim: the dim that is cut.
        pairs: operations of both that stand at the same place.
    """
    for op, small in pairs:
        if _name(op) != _name(small):
            return False
        if any(not _same_constant(one, x, other, y)
               for x, y in zip(op.operands, small.operands, strict=True)):  # fmt: skip
            return False
        if any(_but(dim, x) != _but(dim, y)
               for x, y in zip(op.results, small.results, strict=True)):  # fmt: skip
            return False
        if op.equation is None:
            continue
        if _settings(op) != _settings(small):
            return False
        for inner, theirs in zip(_programs_in(op), _programs_in(small), strict=True):
            if len(inner.ops) != len(theirs.ops):
                return False
            if not _alike(inner, theirs, dim, zip(inner.ops, theirs.ops, strict=True)):
                return False
    return True


def _same_constant(one: Program, x: Any, other: Program, y: Any) -> bool:
    """Whether operands are the same number, or none of them is known."""
    x, y = (p.consts.get(z) if isinstance(z, Var) else z for p, z in ((one, x), (other, y)))
    if x is None or y is None:
        return x is y
    return np.array_equal(key_bits(x), key_bits(y), equal_nan=True)


def _but(dim: int, x: Var) -> tuple[int, ...]:
    """A value's shape without the dim that is cut."""
    shape = _shape(x)
    return (*shape[:dim], *shape[dim + 1 :])


def _settings(op: Op) -> dict[str, Any]:
    """What an operation is told in numbers and words; shapes are compared as its results'."""
    return {
        key: value
        for key, value in op.equation.params.items()
        if key not in ("shape", "limit_indices") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.dtype)


def _name(op: Op) -> str:
    return "optimization_barrier" if op.equation is None else op.equation.primitive.name


def _programs_in(op: Op) -> list[Program]:
    """The branches of a condition, and what each device runs of a `shard_map`."""
    params = op.equation.params
    if _name(op) == "cond":
        return [Program(branch.jaxpr, branch.consts) for branch in params["branches"]]
    return [Program(params["jaxpr"], ())] if _name(op) == "shard_map" else []


def slabwise(
    section: Section,
    whole: Program,
    small: Program,
    cuts: Mapping[Var, Cut],
    shardings: Mapping[Var, NamedSharding],
    arrives: Callable[[Var], bool],
    leaves: Callable[[Var], bool],
    reusable: Callable[[Var], bool],
) -> SlabProgram | None:
    """Compiles a section for one slab of its leaves; `None` if it needs them whole.

    Args:
        section: the section.
        whole: the program that it is part of.
        small: the same function traced with the shapes of slabs.
        cuts: for inputs of the program, how they are cut.
        shardings: of values on the device.
        arrives: whether an input comes in slabs; others are whole on the device.
        leaves: whether a result goes in slabs.
        reusable: whether nobody needs a value after this section.
    """
    known = {cuts[var] for var in section.reads if var in cuts}
    if len(known) != 1 or list(map(_name, small.ops)) != list(map(_name, whole.ops)):
        return None
    (cut,) = known
    numbers = {id(op): i for i, op in enumerate(whole.ops)}
    ops = [small.ops[numbers[id(op)]] for op in section.ops]
    if not _alike(whole, small, cut.dim, zip(section.ops, ops, strict=True)):
        return None
    size = next(var.aval.shape[cut.dim] for var in section.reads if var in cuts)
    if not all(is_rowwise(op, cut.dim, size) for op in section.ops):
        return None

    def of_rows(values: Sequence[Var]) -> frozenset[int]:
        shapes = [_shape(var) for var in values]
        return frozenset(i for i, s in enumerate(shapes) if len(s) > cut.dim and s[cut.dim] == size)

    sliced, made = of_rows(section.reads), of_rows(section.gives)
    if any(section.reads[i] not in cuts for i in sliced):
        return None
    source: dict[int, int] = {}
    for i in made:
        var = section.gives[i]
        for j in sorted(sliced - set(source.values())) if not leaves(var) else ():
            read = section.reads[j]
            alike = (read.aval.shape, read.aval.dtype, shardings.get(read)) == (
                var.aval.shape, var.aval.dtype, shardings.get(var)
            )  # fmt: skip
            if alike and reusable(read) and not arrives(read):
                source[i] = j
                break
    run = _runner(section, whole, small, ops, cut, sliced, source)
    replicated = NamedSharding(section.mesh, PartitionSpec())
    out = [shardings.get(var, replicated) for var in section.gives]
    program = jax.jit(run, out_shardings=out, donate_argnums=(1, 3))
    return SlabProgram(cut, sliced, made, in_turn(section.mesh.devices.flat, program), source)


def _runner(
    section: Section,
    whole: Program,
    small: Program,
    ops: Sequence[Op],
    cut: Cut,
    sliced: frozenset[int],
    source: Mapping[int, int],
) -> Callable[..., list[Any]]:
    """The function that is compiled: slabs out of whole arrays, the section's work, and back."""
    same = dict(zip(whole.inputs, small.inputs, strict=True))
    for op, other in zip(whole.ops, small.ops, strict=True):
        same.update(zip(op.results, other.results, strict=True))
    memory = {j: i for i, j in source.items()}

    def run(
        index: jax.Array, here: dict[int, Any], kept: dict[int, Any], into: dict[int, Any]
    ) -> list[Any]:
        env: dict[Any, Any] = dict(small.consts)
        for i, var in enumerate(section.reads):
            value = here.get(i)
            if value is None:
                value = into[memory[i]] if i in memory else kept[i]
                if i in sliced:
                    rows = value.shape[cut.dim] // cut.count
                    value = jax.lax.dynamic_slice_in_dim(value, index * rows, rows, cut.dim)
            env[same[var]] = value
        run_ops(ops, env)
        out = []
        for i, var in enumerate(section.gives):
            value = env[same[var]]
            if i in into:
                start = index * value.shape[cut.dim]
                value = jax.lax.dynamic_update_slice_in_dim(into[i], value, start, cut.dim)
            out.append(value)
        return out

    return run
