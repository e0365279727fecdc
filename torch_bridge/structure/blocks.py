"""Repeated blocks: which modules of a list compute the same function, one after the other.

Blocks are the children of a `ModuleList` or `Sequential`, found by the module paths that torch
recorded. Each block's part of the graph is brought into a canonical form (`forms`); equal ones in
a row, whose values are handed from each to the next, are a stack, which becomes a loop. Several
blocks may be one layer of it: in Gemma 2 every second one is equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fzero.errors import ConversionError
from torch_bridge.export.mode import Mode
from torch_bridge.export.stand_ins.slopes import SLOPES
from torch_bridge.export.trace import Trace, trace
from torch_bridge.module.names import Layout
from torch_bridge.structure.children import Children
from torch_bridge.structure.loops import Loop, LoopedGraph, NotAChain, roll
from torch_bridge.structure.stacked_names import BlockStack, Names, join, stacked_leaves


# Fewer equal layers stay as they are: a loop would save little time in compiling, and its
# parameters would lose the names of their blocks.
MIN_LAYERS = 3
# Blocks to a layer. Gemma 3 repeats five blocks of one kind and one of another.
MAX_PERIOD = 8
# Single operators are no blocks, however often they are repeated.
_TORCH = "torch.nn.modules."


@dataclass(frozen=True)
class Unrolled:
    """Blocks that are computed one by one.

    Attributes:
        path: the block, or the module that holds the blocks.
        reason: why.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Blocks:
    """What became of a module's repeated blocks; `print` shows it.

    Attributes:
        stacks: equal blocks in a row, each one loop over stacked parameters.
        unrolled: blocks outside of them, with the reason.

    Example:
        >>> stack = BlockStack("h", 0, 12, 1, True)
        >>> print(Blocks((stack,), (Unrolled("head.0", "another class"),)))
        h: blocks 0 to 11 as 12 layers
        head.0: not rolled: another class
    """

    stacks: tuple[BlockStack, ...] = ()
    unrolled: tuple[Unrolled, ...] = ()

    def __str__(self) -> str:
        lines = []
        for stack in self.stacks:
            each = f" of {stack.period} blocks" if stack.period > 1 else ""
            name, last = stack.container or "(root)", stack.stop - 1
            lines.append(f"{name}: blocks {stack.first} to {last} as {stack.num} layers{each}")
        lines += [f"{one.path}: not rolled: {one.reason}" for one in self.unrolled]
        return "\n".join(lines) or "no repeated blocks"


# A stack as a loop of each mode's graph.
_Loops = Mapping[bool, Loop]


def fewest_layers(roll: bool | int) -> int:
    """The fewest layers that are rolled, from what the user said; 0: none.

    Raises:
        ValueError: `roll` is neither a bool nor an integer of 2 or more.
    """
    if isinstance(roll, bool):
        return MIN_LAYERS if roll else 0
    if not isinstance(roll, int) or roll < 2:
        raise ValueError(
            f"convert: roll={roll!r}: expected True, False, or the fewest equal layers (2 or more)"
            " that are worth a loop"
        )
    return roll


def roll_blocks(
    programs: Mapping[bool, torch.export.ExportedProgram],
    modes: Mapping[bool, Mode],
    layout: Layout,
    min_layers: int,
) -> tuple[dict[bool, LoopedGraph], Blocks]:
    """Make loops of equal blocks, the same ones in both modes.

    Args:
        programs: the exported program of each mode.
        modes: what was made of them.
        layout: the module's leaves.
        min_layers: the fewest layers that are rolled; 0: none.

    Returns:
        Each mode's graph, none where nothing is rolled, and what became of the blocks.
    """
    if not min_layers:
        return {}, Blocks(unrolled=(Unrolled("(root)", "roll=False"),))
    if any(op.operator == SLOPES for mode in modes.values() for op in mode.graph.ops):
        reason = (
            "the forward differentiates itself (torch.autograd.grad, torch.func.grad): all of it is"
            " one function"
        )
        return {}, Blocks(unrolled=(Unrolled("(root)", reason),))
    traces = {train: trace(programs[train], modes[train], layout) for train in modes}
    stacks, unrolled = _find_loops(traces, layout, min_layers)
    while stacks:
        names = Names(stacked_leaves(layout, list(stacks)))
        try:
            graphs = {
                train: roll(one, [loops[train] for loops in stacks.values()], names)
                for train, one in traces.items()
            }
        except NotAChain as problem:
            del stacks[problem.stack]
            unrolled.append(Unrolled(problem.stack.container or "(root)", str(problem)))
        else:
            return graphs, Blocks(tuple(stacks), tuple(unrolled))
    return {}, Blocks(unrolled=tuple(unrolled))


def roll_same(
    program: torch.export.ExportedProgram,
    mode: Mode,
    layout: Layout,
    min_layers: int,
    stacks: Sequence[BlockStack],
) -> LoopedGraph:
    """Make loops of blocks that are rolled already in another graph of the module.

    Args:
        program: an exported program.
        mode: what was made of it.
        layout: the module's leaves.
        min_layers: the fewest layers that were rolled there.
        stacks: what was rolled there.

    Raises:
        ConversionError: these blocks are not equal, or no chain, here.
    """
    traced = trace(program, mode, layout)
    found, unrolled = _find_loops({True: traced}, layout, min_layers)
    lost = [stack.name for stack in stacks if stack not in found]
    if lost:
        raise ConversionError(
            f"the blocks of {lost} are equal for other sizes and dtypes, but not here"
            f" ({'; '.join(f'{one.path}: {one.reason}' for one in unrolled)});"
            " convert with roll=False, or with an example of these"
        )
    same = {stack: loops[True] for stack, loops in found.items() if stack in stacks}
    try:
        return roll(traced, list(same.values()), Names(stacked_leaves(layout, list(same))))
    except NotAChain as problem:
        raise ConversionError(f"{problem.stack.name}: {problem}") from problem


def _find_loops(
    traces: Mapping[bool, Trace], layout: Layout, min_layers: int
) -> tuple[dict[BlockStack, _Loops], list[Unrolled]]:
    """All stacks, the outermost ones where blocks hold blocks.

    Args:
        traces: the graph of each mode; blocks must be equal in both.
        layout: the module's leaves.
        min_layers: the fewest layers that are rolled.

    Returns:
        The stacks in the order in which they are computed, with their loops, and the blocks
        outside of them.
    """
    found: dict[BlockStack, _Loops] = {}
    unrolled: list[Unrolled] = []
    for path, classes in _containers(traces).items():
        if any(_inside(path, stack) for stack in found):
            continue
        children = {mode: Children(one, layout, path, classes) for mode, one in traces.items()}
        stacks, rest = _stacks(list(children.values()), min_layers)
        for stack in stacks:
            found[stack] = {mode: one.loop(stack) for mode, one in children.items()}
        unrolled += rest
    mode, any_trace = next(iter(traces.items()))
    position = {op.name: number for number, op in enumerate(any_trace.ops)}
    ordered = sorted(found, key=lambda stack: position[found[stack][mode].body[0].name])
    outermost = [one for one in unrolled if not any(_inside(one.path, stack) for stack in found)]
    return {stack: found[stack] for stack in ordered}, outermost


def _inside(path: str, stack: BlockStack) -> bool:
    blocks = (stack.block(k, offset) for k in range(stack.num) for offset in range(stack.period))
    return any(path.startswith(block + ".") for block in blocks)


def _containers(traces: Mapping[bool, Trace]) -> dict[str, dict[int, str]]:
    """Modules with numbered children, outermost first: each child's number and class."""
    found: dict[str, dict[int, str]] = {}
    composite: set[str] = set()
    for one in traces.values():
        for op in one.ops:
            paths = one.known[op.name].modules
            for path, kind in paths:
                parent, _, name = path.rpartition(".")
                if name.isdigit():
                    found.setdefault(parent, {})[int(name)] = kind
            composite.update(
                path for path, _ in paths if any(p.startswith(f"{path}.") for p, _ in paths)
            )

    def is_block(parent: str, number: int, kind: str) -> bool:
        return join(parent, number) in composite or not kind.startswith(_TORCH)

    kept = {
        parent: dict(sorted(classes.items()))
        for parent, classes in found.items()
        if sum(is_block(parent, n, kind) for n, kind in classes.items()) > 1
    }
    return dict(sorted(kept.items(), key=lambda item: item[0].count(".") + bool(item[0])))


def _stacks(
    children: Sequence[Children], min_layers: int
) -> tuple[list[BlockStack], list[Unrolled]]:
    """The longest stacks among a module's children from left to right, and the blocks between them.

    Args:
        children: the same ones in each mode's graph.
        min_layers: the fewest layers that are rolled.
    """
    path, classes = children[0].path, children[0].classes
    numbers = list(classes)
    stacks: list[BlockStack] = []
    rest: list[Unrolled] = []
    start = 0
    while start < len(numbers):
        best = None
        for period in range(1, min(MAX_PERIOD, (len(numbers) - start) // min_layers) + 1):
            num, _ = _grow(children, numbers[start:], period)
            if num >= min_layers and (best is None or num * period > best.num * best.period):
                whole = num * period == len(numbers)
                best = BlockStack(path, numbers[start], num, period, whole)
        if best is not None:
            stacks.append(best)
            start += best.num * best.period
            continue
        if list(classes.values()).count(classes[numbers[start]]) > 1:
            reason = _reason(children, numbers, start)
            rest.append(Unrolled(join(path, numbers[start]), reason))
        start += 1
    if stacks:
        return stacks, rest
    # Of a module of which nothing is rolled one reason is enough; none where there is little to.
    told = rest[:1] if len(numbers) >= min_layers else []
    return [], [replace(one, path=path or "(root)") for one in told]


def _reason(children: Sequence[Children], numbers: Sequence[int], start: int) -> str:
    """Why a block is in no stack."""
    num, reason = _grow(children, numbers[start:], 1)
    if start + num >= len(numbers):
        num, reason = _grow(children, numbers[max(start - 1, 0) :], 1)
    return reason or f"only {num} equal blocks in a row"


def _grow(children: Sequence[Children], numbers: Sequence[int], period: int) -> tuple[int, str]:
    """How many equal layers the blocks begin with in every mode, and why not more."""
    return min((one.grow(numbers, period) for one in children), key=lambda found: found[0])
