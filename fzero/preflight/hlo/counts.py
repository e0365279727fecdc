"""Read a compiled XLA module: what it communicates, what hides it, what it multiplies.

The text of `compiled.as_text()` is the only input; no device is needed. Loops are multiplied out.
What cannot be known (a loop without a trip count, a kernel whose FLOPs the text does not show) is
reported as unknown, never guessed.

Units: `elements` and `bytes` are the full size of the value that a collective assembles, reduces
or moves (the gathered side of an all-gather, the unreduced side of a reduce-scatter). `wire_*` is
what one device has to send for it: (n-1)/n of the full size in a group of n, twice that for an
all-reduce. Both are per device and per execution; `times` counts the executions.

Two traps. The CPU backend converts bfloat16 to float32 before it gathers or reduces, so on CPU
compare elements; bytes are right on GPU. And XLA peels iterations off loops on GPU: a loop of 16
layers may be one of 15 and a copy of its body outside, so sums are exact, but `times` of one
instruction may be 15.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fzero.preflight.hlo.module import (
    Array,
    Computation,
    Groups,
    HloError,
    HloInstruction,
    Module,
    braces,
    replica_groups,
)


__all__ = [
    "FREE", "KINDS", "Collective", "Flops", "HloError", "Matmuls", "Module", "Total", "Window",
    "collectives", "matmul_flops", "total", "windows",
]  # fmt: skip

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
         "collective-permute", "collective-broadcast")  # fmt: skip

# Instructions that launch no kernel, so that they cannot hide a collective. The copies are those
# between memory spaces, which run on their own engine.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
         "opt-barrier", "add-dependency", "partition-id", "replica-id", "copy-start")  # fmt: skip
_MATMULS = ("dot", "ragged-dot", "convolution")
# cuBLAS, cuDNN (convolutions, attention), oneDNN, Triton and CUTLASS kernels by target name.
_MATMUL_CALL = re.compile(r"__cublas\$|__cudnn\$|__onednn\$(matmul|conv)|gemm|fmha|attention", re.I)


@dataclass(frozen=True)
class Collective:
    """One collective instruction; a combined one, with several operands, counts as one."""

    name: str
    kind: str
    dtype: str
    """XLA's name (`bf16`); joined by `+` where one instruction moves several types."""
    elements: int
    bytes: int
    wire_elements: float
    wire_bytes: float
    group_size: int
    replica_groups: tuple[tuple[int, ...], ...]
    """Device numbers of each group; of a collective-permute, its (source, target) pairs."""
    axes: tuple[str, ...] | None
    """Mesh axes it runs over; None without `mesh_axes`, or where the groups fit no set of axes."""
    times: int | None
    """Executions per call of the module; None in a loop whose trip count is unknown."""
    in_loop: bool
    conditional: bool
    """Inside a conditional: counted because no other branch of it communicates more."""
    computation: str
    """Where its start is scheduled."""
    op_name: str


@dataclass(frozen=True)
class Window:
    """A collective, and the instructions that the schedule runs between its start and its done."""

    collective: Collective
    is_async: bool
    computation: Computation
    between: tuple[HloInstruction, ...]
    """Those that launch a kernel; of a loop among them, the loop alone."""


@dataclass(frozen=True)
class Total:
    """Sums over executions, per device."""

    elements: int
    bytes: int
    wire_elements: float
    wire_bytes: float
    executions: int


@dataclass(frozen=True)
class Flops:
    """2·M·N·K of every matmul, loops multiplied out, per device."""

    flops: int
    num_matmuls: int
    """Executions."""
    unknown: tuple[str, ...] = ()
    """What is missing from the sums, and why."""


def collectives(text: str, *, mesh_axes: Mapping[str, int] | None = None) -> tuple[Collective, ...]:
    """Every collective that the entry computation reaches, in the order of the schedule.

    Args:
        text: `compiled.as_text()`.
        mesh_axes: sizes by name, major to minor, of a mesh over devices 0, 1, 2, ...; fills
            `Collective.axes`.

    Example:
        >>> text = '''HloModule m, is_scheduled=true, num_partitions=4
        ... ENTRY %main (x: f32[2,3]) -> f32[8,3] {
        ...   %x = f32[2,3]{1,0} parameter(0)
        ...   ROOT %g = f32[8,3]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
        ... }'''
        >>> (gather,) = collectives(text, mesh_axes={"data": 4})
        >>> gather.kind, gather.elements, gather.wire_bytes, gather.axes, gather.times
        ('all-gather', 24, 72.0, ('data',), 1)
    """
    return tuple(found.collective for found in _walk(Module(text), mesh_axes))


def total(found: Iterable[Collective], kind: str | None = None) -> Total:
    """Sums over all executions, of one kind or of all.

    Raises:
        HloError: one of them sits in a loop whose trip count is unknown.
    """
    sums = Total(0, 0, 0.0, 0.0, 0)
    for c in found:
        if kind not in (None, c.kind):
            continue
        if c.times is None:
            raise HloError(
                f"{c.kind} `{c.name}` in `{c.computation}` runs in a loop whose trip count is not "
                f"in the module (op_name {c.op_name!r}), so a total would be a guess; make it a "
                "loop of known length (`lax.scan`) or leave it out of the sum"
            )
        sums = Total(
            sums.elements + c.times * c.elements,
            sums.bytes + c.times * c.bytes,
            sums.wire_elements + c.times * c.wire_elements,
            sums.wire_bytes + c.times * c.wire_bytes,
            sums.executions + c.times,
        )
    return sums


def windows(module: Module, mesh_axes: Mapping[str, int] | None = None) -> Iterator[Window]:
    """What XLA scheduled between the start and the done of each collective.

    A collective that is one instruction hides behind nothing. Where the done is not in the same
    computation (it belongs to the next iteration), the end of the computation stands for it.

    Raises:
        HloError: the module is not scheduled, so the order of its lines means nothing.
    """
    if not module.is_scheduled:
        raise HloError("windows: expected a compiled module (`is_scheduled=true`)")
    for found in _walk(module, mesh_axes):
        comp = found.computation
        end = _done(comp, found.start) if found.is_async else found.start + 1
        between = tuple(filter(launches, comp.instructions[found.start + 1 : end]))
        yield Window(found.collective, found.is_async, comp, between)


def matmul_flops(text: str) -> Flops:
    """FLOPs of every dot, convolution and GEMM call, those inside fusions included.

    A product that XLA rewrote as multiply and reduce (matrix times vector, on CPU) is not counted.

    Example:
        >>> text = '''HloModule m
        ... ENTRY %main (x: f32[2,3], y: f32[3,5]) -> f32[2,5] {
        ...   %x = f32[2,3]{1,0} parameter(0)
        ...   %y = f32[3,5]{1,0} parameter(1)
        ...   ROOT %d = f32[2,5] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        ... }'''
        >>> matmul_flops(text)
        Flops(flops=60, num_matmuls=1, unknown=())
    """
    module = Module(text)
    return Matmuls(module).flops(module.entry)


# --- collectives ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    collective: Collective
    computation: Computation
    start: int
    """Position of the instruction that starts it."""
    is_async: bool


@dataclass(frozen=True)
class _Context:
    """How the walk came to a computation."""

    times: int | None = 1
    in_loop: bool = False
    conditional: bool = False
    anchor: tuple[Computation, int, bool] | None = None
    """Async pair or fusion around the collective: where, at which line, async or not."""


def _walk(module: Module, mesh_axes: Mapping[str, int] | None) -> Iterator[_Found]:
    def visit(comp: Computation, context: _Context) -> Iterator[_Found]:
        for position, i in enumerate(comp.instructions):
            kind = i.opcode.removesuffix("-start").removesuffix("-done")
            if kind in KINDS:
                if not i.opcode.endswith("-done"):
                    where = context.anchor or (comp, position, i.opcode.endswith("-start"))
                    yield _found(module, comp, i, context, where, mesh_axes)
                continue
            is_loop = i.opcode == "while"
            # Inside a fusion or an async wrapper the schedule is that of the caller.
            anchor = context.anchor
            if anchor is None and (i.opcode == "fusion" or i.opcode.endswith("-start")):
                anchor = (comp, position, i.opcode.endswith("-start"))
            for name, trips in module.runs(comp, i):
                times = None if context.times is None or trips is None else context.times * trips
                inner = _Context(times, context.in_loop or is_loop, context.conditional, anchor)
                yield from visit(module.computations[name], inner)
            if i.branches:
                inner = _Context(context.times, context.in_loop, True, anchor)
                branches = [[*visit(module.computations[name], inner)] for name in i.branches]
                yield from max(branches, key=_known_wire_bytes)

    yield from visit(module.computations[module.entry], _Context())


def _known_wire_bytes(found: list[_Found]) -> float:
    """Size of a branch; a loop of unknown length outweighs all, so that it is reported."""
    return sum(
        math.inf if f.collective.times is None else f.collective.times * f.collective.wire_bytes
        for f in found
    )


def _found(
    module: Module,
    comp: Computation,
    i: HloInstruction,
    context: _Context,
    where: tuple[Computation, int, bool],
    mesh_axes: Mapping[str, int] | None,
) -> _Found:
    kind = i.opcode.removesuffix("-start")
    if kind == "collective-permute":
        groups = braces(i.plain, "source_target_pairs")
        group_size = _ring_size(groups)
    else:
        groups = replica_groups(i.plain) or (tuple(range(module.num_devices)),)
        group_size = max(map(len, groups))
    # Operands: the shape of a start holds operands, results and contexts, in an order of its own.
    arrays = comp.inputs(i)
    if kind == "ragged-all-to-all":
        arrays = arrays[:1]  # the rest is the output buffer, offsets and sizes
    scale = group_size if kind == "all-gather" else 1
    elements = scale * sum(a.elements for a in arrays)
    size = scale * sum(a.bytes for a in arrays)
    share = _wire_share(kind, group_size)
    comp_of_start, start, is_async = where
    starter = comp_of_start.instructions[start]
    collective = Collective(
        name=i.name,
        kind=kind,
        dtype="+".join(sorted({a.dtype for a in arrays})),
        elements=elements,
        bytes=size,
        wire_elements=share * elements,
        wire_bytes=share * size,
        group_size=group_size,
        replica_groups=groups,
        axes=_axes(kind, groups, mesh_axes) if mesh_axes else None,
        times=context.times,
        in_loop=context.in_loop,
        conditional=context.conditional,
        computation=comp_of_start.name,
        op_name=i.op_name or starter.op_name,
    )
    is_sync = '"is_sync":true' in starter.attributes.replace("\\", "")
    return _Found(collective, comp_of_start, start, is_async and not is_sync)


def _wire_share(kind: str, group_size: int) -> float:
    """Part of the full size that one device, the busiest, sends."""
    if group_size <= 1:
        return 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (group_size - 1) / group_size


def _ring_size(pairs: Groups) -> int:
    """Devices of the largest set that (source, target) pairs connect."""
    member_of: dict[int, set[int]] = {}
    for source, target in pairs:
        merged = member_of.get(source, {source}) | member_of.get(target, {target})
        member_of.update(dict.fromkeys(merged, merged))
    return max(map(len, member_of.values()), default=1)


def _axes(kind: str, groups: Groups, mesh_axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Axes whose coordinates differ inside the groups, if the groups are exactly their product."""
    sizes = tuple(mesh_axes.values())
    if max(map(max, groups), default=0) >= math.prod(sizes):
        return None
    coordinates = [np.stack(np.unravel_index(group, sizes)) for group in groups if group]
    varies = np.any([(c != c[:, :1]).any(axis=1) for c in coordinates], axis=0)
    names = tuple(name for name, varying in zip(mesh_axes, varies, strict=True) if varying)
    # A permute's groups are pairs, of any two along the axes.
    whole = math.prod(mesh_axes[name] for name in names)
    return (
        names
        if kind == "collective-permute" or all(len(group) == whole for group in groups)
        else None
    )


# --- matmuls --------------------------------------------------------------------------------------


class Matmuls:
    """Counts matmuls; remembers each computation, which may be called from many places.

    Args:
        module: the module.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._instructions: dict[str, int] = {}
        self._flops: dict[str, Flops] = {}

    def instructions(self, name: str) -> int:
        """Matmul instructions in a computation and in all it may run, each counted once."""
        if name not in self._instructions:
            comp = self.module.computations[name]
            self._instructions[name] = sum(self.instructions_at(comp, i) for i in comp.instructions)
        return self._instructions[name]

    def instructions_at(self, comp: Computation, i: HloInstruction) -> int:
        """Matmul instructions that `i` is or runs; a fusion is one kernel, so at most one."""
        if _is_matmul(i):
            return 1
        called = {name for name, _ in self.module.runs(comp, i)} | set(i.branches)
        inside = sum(map(self.instructions, called))
        return min(inside, 1) if i.opcode == "fusion" else inside

    def flops(self, name: str) -> Flops:
        """FLOPs of one execution of a computation."""
        if name not in self._flops:
            comp = self.module.computations[name]
            self._flops[name] = _sum(self.flops_at(comp, i) for i in comp.instructions)
        return self._flops[name]

    def flops_at(self, comp: Computation, i: HloInstruction) -> Flops:
        """FLOPs of one execution of an instruction; of a conditional, its costliest branch."""
        if _is_matmul(i):
            own = _own_flops(comp, i)
            what = f"`{i.name}` ({i.target or i.opcode}): the text does not show its FLOPs"
            return Flops(0, 1, (what,)) if own is None else Flops(own, 1)
        each = [max(map(self.flops, i.branches), key=lambda f: f.flops, default=Flops(0, 0))]
        for name, times in self.module.runs(comp, i):
            f = self.flops(name)
            if times is not None:
                each.append(Flops(times * f.flops, times * f.num_matmuls, f.unknown))
            elif f.num_matmuls:
                each.append(Flops(0, 0, (f"`{i.name}` in `{comp.name}`: loop of unknown length",)))
        return _sum(each)


def _sum(counts: Iterable[Flops]) -> Flops:
    counts = [*counts]
    unknown = tuple(dict.fromkeys(u for f in counts for u in f.unknown))
    return Flops(sum(f.flops for f in counts), sum(f.num_matmuls for f in counts), unknown)


def _is_matmul(i: HloInstruction) -> bool:
    return i.opcode in _MATMULS or (
        i.opcode.startswith("custom-call") and _MATMUL_CALL.search(i.target) is not None
    )


def _own_flops(comp: Computation, i: HloInstruction) -> int | None:
    """FLOPs of a matmul instruction; None if the text does not show them."""
    inputs = comp.inputs(i)
    if len(inputs) < 2 or not i.arrays:
        return None
    lhs, rhs = inputs[0].dims, inputs[1].dims
    out = i.arrays[0].elements  # a GEMM call returns the result, then its workspace
    if i.opcode == "dot":
        return 2 * out * math.prod(lhs[d] for d in i.ints("lhs_contracting_dims"))
    if i.opcode == "convolution" and (labels := re.search(r"dim_labels=\w+_(\w+)->", i.plain)):
        # Each element of the result meets one kernel, which is all of rhs but its output features.
        return 2 * out * math.prod(rhs) // rhs[labels[1].index("o")]
    if "__cudnn$conv" in i.target and (labels := re.search(r"dim_labels=\w+_(\w+)->", i.plain)):
        # (input, kernel), (input, gradient of the output), or (gradient of the output, kernel).
        kernel = i.arrays[0] if "BackwardFilter" in i.target else inputs[1]
        forward = i.arrays[0] if "Forward" in i.target else inputs[0]
        result = inputs[1] if "BackwardFilter" in i.target else forward
        return 2 * result.elements * kernel.elements // kernel.dims[labels[1].index("o")]
    if "__cudnn$fmha" in i.target and len(lhs) == len(rhs) == 4:
        return _attention_flops(inputs, i.target.endswith("Backward"))
    config = i.attributes.replace("\\", "")
    dims = re.search(r'"lhs_contracting_dimensions":\[(.*?)\]', config)
    if "__cublas$" in i.target and dims:
        return 2 * out * math.prod(lhs[int(d)] for d in re.findall(r"\d+", dims[1]))
    if "__onednn$matmul" in i.target:
        return 2 * out * lhs[-2 if re.search(r"transpose_a\W+true", config) else -1]
    return None


def _attention_flops(inputs: Sequence[Array], backward: bool) -> int:
    """FLOPs of a fused attention; hidden scores count, as where products compute them.

    Its first operands are queries `(B, T, H, E)`, and keys and values `(B, S, K, E)`. Forwards it
    makes two products, backwards five: the scores again, and two gradients of either product.
    """
    query, keys = inputs[0], inputs[1].dims[1]
    return (5 if backward else 2) * 2 * query.elements * keys


def launches(i: HloInstruction) -> bool:
    """Whether an instruction runs a kernel that is no collective."""
    name = i.opcode.removesuffix("-start").removesuffix("-done")
    return not (i.opcode in FREE or i.opcode.endswith(("-done", "-update")) or name in KINDS)


def _done(comp: Computation, start: int) -> int:
    """Position of the done of the pair that starts at `start`, through any updates on the way."""
    waiting = comp.instructions[start].name
    for position, i in enumerate(comp.instructions[start + 1 :], start + 1):
        if waiting in i.operands and i.opcode.endswith("-update"):
            waiting = i.name
        elif waiting in i.operands and i.opcode.endswith("-done"):
            return position
    return len(comp.instructions)
