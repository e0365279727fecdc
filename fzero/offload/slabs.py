"""Running part of a program on one slab of its leaves at a time.

An optimizer that works element by element on a leaf can see it in slabs. Whether it does is read
from its traced operations; the program for a slab is the same function traced with a slab's
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fzero.processes import in_turn
from fzero.programs.jaxprs import ELEMENTWISE, Op, Program, Var, run_ops
from fzero.programs.sites import Section


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
    name = "optimization_barrier" if op.equation is None else op.equation.primitive.name
    if name in ELEMENTWISE:
        return all(large(x) or _shape(x) == () for x in values)
    if not all(map(large, op.results)):
        return False
    if name == "cond":
        branches = [Program(b.jaxpr, b.consts) for b in op.equation.params["branches"]]
        return all(is_rowwise(s, dim, size) for branch in branches for s in branch.ops)
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
        ops = Program(params["jaxpr"], ()).ops
        inner = {"" if s.equation is None else s.equation.primitive.name for s in ops}
        return inner <= {"all_gather", "slice", "convert_element_type", "bitcast_convert_type"}
    return False


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.aval.shape) if isinstance(x, Var) else tuple(getattr(x, "shape", ()))


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
    if len(known) != 1 or len(small.ops) != len(whole.ops):
        return None
    (cut,) = known
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
    run = _runner(section, whole, small, cut, sliced, source)
    replicated = NamedSharding(section.mesh, PartitionSpec())
    out = [shardings.get(var, replicated) for var in section.gives]
    program = jax.jit(run, out_shardings=out, donate_argnums=(1, 3))
    return SlabProgram(cut, sliced, made, in_turn(section.mesh.devices.flat, program), source)


def _runner(
    section: Section,
    whole: Program,
    small: Program,
    cut: Cut,
    sliced: frozenset[int],
    source: Mapping[int, int],
) -> Callable[..., list[Any]]:
    """The function that is compiled: slabs out of whole arrays, the section's work, and back."""
    same = dict(zip(whole.inputs, small.inputs, strict=True))
    numbers = {id(op): i for i, op in enumerate(whole.ops)}
    for op, other in zip(whole.ops, small.ops, strict=True):
        same.update(zip(op.results, other.results, strict=True))
    ops = [small.ops[numbers[id(op)]] for op in section.ops]
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
