"""From the exported graphs of both modes to rolled ones: one decision for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero.errors import ConversionError
from torch_bridge.export.mode import Mode
from torch_bridge.export.slopes import SLOPES
from torch_bridge.export.trace import trace
from torch_bridge.module.names import Layout
from torch_bridge.structure.blocks import MIN_LAYERS, Blocks, Unrolled, find_runs
from torch_bridge.structure.rolled import NotAChain, Rolled, roll
from torch_bridge.structure.stacked import Names, Run, stacked_leaves


@dataclass(frozen=True)
class Rolling:
    """What is rolled in a module.

    Attributes:
        graphs: each mode's graph; empty where nothing is rolled.
        names: the stacked leaves.
        blocks: the report.
    """

    graphs: Mapping[bool, Rolled]
    names: Names
    blocks: Blocks


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
) -> Rolling:
    """Find equal blocks and make loops of them.

    Args:
        programs: the exported program of each mode.
        modes: what was made of them.
        layout: the module's leaves.
        min_layers: the fewest layers that are rolled; 0: none.
    """
    if not min_layers:
        return Rolling({}, Names(), Blocks(unrolled=(Unrolled("(root)", "roll=False"),)))
    if any(step.operator == SLOPES for mode in modes.values() for step in mode.graph.instructions):
        reason = (
            "the forward differentiates itself (torch.autograd.grad, torch.func.grad): all of it is"
            " one function"
        )
        return Rolling({}, Names(), Blocks(unrolled=(Unrolled("(root)", reason),)))
    traces = {train: trace(programs[train], modes[train], layout) for train in modes}
    runs, unrolled = find_runs(traces, layout, min_layers)
    while runs:
        stacked = stacked_leaves(layout, [found.run for found in runs])
        try:
            graphs = {
                train: roll(one, [(found.run, found.layers[train]) for found in runs], stacked)
                for train, one in traces.items()
            }
        except NotAChain as problem:
            runs = [found for found in runs if found.run != problem.run]
            unrolled.append(Unrolled(problem.run.container or "(root)", str(problem)))
            continue
        blocks = Blocks(tuple(found.run for found in runs), tuple(unrolled))
        return Rolling(graphs, Names(stacked), blocks)
    return Rolling({}, Names(), Blocks(unrolled=tuple(unrolled)))


def roll_same(
    program: torch.export.ExportedProgram,
    mode: Mode,
    layout: Layout,
    min_layers: int,
    runs: Sequence[Run],
) -> Rolled:
    """Make loops of blocks that are rolled already in another graph of the module.

    Args:
        program: an exported program.
        mode: what was made of it.
        layout: the module's leaves.
        min_layers: the fewest layers that were rolled there.
        runs: what was rolled there.

    Raises:
        ConversionError: these blocks are not equal, or no chain, here.
    """
    traced = trace(program, mode, layout)
    found, unrolled = find_runs({True: traced}, layout, min_layers)
    same = [one for one in found if one.run in runs]
    lost = [run.name for run in runs if run not in [one.run for one in same]]
    if lost:
        raise ConversionError(
            f"the blocks of {lost} are equal for other sizes, but not here"
            f" ({'; '.join(f'{one.path}: {one.reason}' for one in unrolled)});"
            " convert with roll=False, or with an example of these sizes"
        )
    try:
        return roll(
            traced,
            [(one.run, one.layers[True]) for one in same],
            stacked_leaves(layout, [one.run for one in same]),
        )
    except NotAChain as problem:
        raise ConversionError(f"{problem.run.name}: {problem}") from problem
