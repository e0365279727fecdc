"""Which weights of a module lie along `tensor` or `expert`: found in its graph, or told by it.

transformers says of many architectures which modules are divided by columns and by rows
(`base_model_tp_plan`); what it names is divided so. All else is found in the graph (`flow.py`).
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero.axes import EXPERT, TENSOR, Parts
from torch_bridge.export.mode import Mode, TensorInput
from torch_bridge.module.names import Layout, Leaf
from torch_bridge.structure.flow import DimUses, Walk
from torch_bridge.structure.flow_rules import rule_of
from torch_bridge.structure.stacked_names import Names


@dataclass(frozen=True)
class Divided:
    """One parameter that a `tensor` or `expert` axis divides.

    Attributes:
        name: its name in the conversion's `params`.
        dim: the dim that is divided (of one layer, where it is stacked).
        parts: heads, features or words: the axis has to divide their number, or it stays whole;
            of `expert`, experts, whose number it has to divide.
        how: `columns`, `rows`, `vocabulary`, `experts`, ...
        why: who says so.
        axis: which axis.
    """

    name: str
    dim: int
    parts: int
    how: str
    why: str
    axis: str = TENSOR

    @property
    def rule(self) -> tuple[str | Parts | None, ...]:
        """Its entry in `shard` of a model."""
        own = EXPERT if self.axis == EXPERT else Parts(self.axis, self.parts)
        return (*(None,) * self.dim, own)


@dataclass(frozen=True)
class Whole:
    """One parameter that stays whole, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Parallel:
    """How `Plan(tensor=n)` and `Plan(expert=n)` divide a converted module; `print` shows it.

    Numbers never depend on it: what is not divided, or not evenly, is computed by every device.

    Attributes:
        divided: parameters that are divided.
        whole: all others.

    Example:
        >>> found = Parallel((Divided("up.weight", 0, 24, "columns", "graph"),),
        ...                  (Whole("norm.weight", "not a product's"),))
        >>> print(found)
        up.weight: columns, dim 0 of 24 parts (graph)
        norm.weight: whole: not a product's
    """

    divided: tuple[Divided, ...] = ()
    whole: tuple[Whole, ...] = ()

    @property
    def shard(self) -> dict[str | re.Pattern[str], Sequence[str | Parts | None]]:
        """The rules, by parameter."""
        return {one.name: one.rule for one in self.divided}

    def __str__(self) -> str:
        lines: dict[str, None] = {}
        for cut in self.divided:
            text = f"{cut.how}, dim {cut.dim} of {cut.parts} parts ({cut.why})"
            lines[f"{_starred(cut.name)}: {text}"] = None
        for kept in self.whole:
            lines[f"{_starred(kept.name)}: whole: {kept.why}"] = None
        return "\n".join(lines) or "no parameters"


def _starred(name: str) -> str:
    """A name without the numbers of blocks, which all say the same."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def read_parallel(
    module: torch.nn.Module,
    program: torch.export.ExportedProgram,
    mode: Mode,
    layout: Layout,
    names: Names,
) -> Parallel:
    """What a `tensor` and an `expert` axis divide of a module.

    Args:
        module: the module, which may have a plan of transformers.
        program: its graph.
        mode: what was made of that.
        layout: its leaves.
        names: which of them are stacked.
    """
    tokens = frozenset(
        i.placeholder for i in mode.inputs if isinstance(i, TensorInput) and i.dtype.kind == "i"
    )
    found = _follow(program.graph, mode.params, tokens)
    told, kernels = _told(module), _kernels(program.graph, mode.params)
    decided = {
        leaf.name: _decide(leaf, found, told, kernels) for leaf in layout.leaves if leaf.is_param
    }
    divided: list[Divided] = []
    whole: list[Whole] = []
    inside = names.row_of()
    alone = {name: [one] for name, one in decided.items() if name not in inside}
    stacked = {
        one.name: [decided[leaf.name] for leaf in one.leaves]
        for one in names.stacked
        if one.is_param
    }
    for name, ways in (alone | stacked).items():
        first = ways[0]
        cuts = {(one.dim, one.parts) if isinstance(one, Divided) else None for one in ways}
        if len(cuts) > 1:
            whole.append(Whole(name, "its layers differ"))
        elif isinstance(first, Divided):
            divided.append(replace(first, name=name))
        else:
            whole.append(replace(first, name=name))
    return Parallel(tuple(divided), tuple(whole))


def _follow(
    graph: torch.fx.Graph, leaves: Mapping[str, str], tokens: frozenset[str]
) -> tuple[DimUses, dict[str, tuple[str, bool]]]:
    """The graph followed until nothing stops, and what stopped on the way."""
    stops: dict[str, tuple[str, bool]] = {}
    while True:
        gathered = frozenset(name for name, (_, cut) in stops.items() if cut)
        found = Walk(leaves, tokens, frozenset(stops), gathered).run(graph, rule_of)
        for leaf, cuts in found.cuts.items():
            if len({cut.dim for cut in cuts}) > 1:
                found.stops.setdefault(leaf, ("it is used along several dims", False))
        new = {name: stop for name, stop in found.stops.items() if name not in stops}
        if not new:
            return found, stops
        stops |= new


def _decide(
    leaf: Leaf,
    found: tuple[DimUses, Mapping[str, tuple[str, bool]]],
    told: Mapping[str, str],
    kernels: Mapping[str, str],
) -> Divided | Whole:
    flow, stops = found
    if leaf.name in flow.experts:
        dim = flow.experts[leaf.name]
        return Divided(leaf.name, dim, leaf.shape[dim], "experts", "each has its own", EXPERT)
    cuts = flow.cuts.get(leaf.name, set())
    dims = {cut.dim for cut in cuts}
    parts = math.gcd(
        *(cut.parts for cut in cuts),
        *(flow.parts.get(source, 0) for cut in cuts for source in cut.sources),
        flow.parts.get(leaf.name, 0),
        flow.parts.get(f"gathered {leaf.name}", 0) if len(leaf.shape) == 1 else 0,
    )
    style = next((told[name] for name in _modules(leaf) if name in told), None)
    plan = None if style is None else _styled(leaf, style)
    if plan is not None:
        dim, how = plan
        own = parts if dims == {dim} else leaf.shape[dim]
        how = min(cut.how for cut in cuts) if dims == {dim} else how
        return Divided(leaf.name, dim, own, how, f"transformers: {style}")
    if len(dims) == 1:
        how = min(cut.how for cut in cuts)
        return Divided(leaf.name, dims.pop(), parts, how, "graph")
    if style is not None:
        return Whole(leaf.name, f"transformers: {style}")
    none = kernels.get(leaf.name, "no product that is divided reads it")
    why = stops.get(leaf.name, (none, False))[0]
    return Whole(leaf.name, "it is used along several dims" if dims else why)


def _kernels(graph: torch.fx.Graph, leaves: Mapping[str, str]) -> dict[str, str]:
    """The kernels of convolutions, and what their values are gathered along (`lower/conv.py`)."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        named = {argument.name: at for at, argument in enumerate(_arguments(node))}
        if not {"input", "weight", "stride", "groups"} <= named.keys():
            continue
        kernel, at = node.args[named["weight"]], named["groups"]
        while kernel.name not in leaves and len(kernel.all_input_nodes) == 1:  # views of it
            kernel = kernel.all_input_nodes[0]
        leaf = leaves.get(kernel.name)
        if leaf is None:
            continue
        grouped = node.kwargs.get("groups", dict(enumerate(node.args)).get(at, 1)) != 1
        found[leaf] = (
            "a grouped convolution reads it: its values are whole along tensor and context"
            if grouped
            else "a convolution reads it: the features of its values are whole"
        )
    return found


def _arguments(node: torch.fx.Node) -> Sequence[Any]:
    schema = getattr(node.target, "_schema", None)
    return () if schema is None else schema.arguments


def _modules(leaf: Leaf) -> list[str]:
    return [name.rpartition(".")[0] for name in leaf.names] + list(leaf.names)


# What transformers' words mean for the weight of a Linear, which is (out, in).
_STYLES = {
    "colwise": (0, "columns"),
    "colwise_gather_output": (0, "columns, gathered"),
    "rowwise": (1, "rows"),
    "rowwise_split_input": (1, "rows"),
    "embedding_rowwise": (0, "vocabulary"),
    "embedding_colwise": (1, "columns, gathered"),
}


def _styled(leaf: Leaf, style: str) -> tuple[int, str] | None:
    """The dim that a word of transformers divides of a leaf; None: it stays whole."""
    dim, how = _STYLES.get(style, (None, ""))
    if dim is None or len(leaf.shape) > 2 or (len(leaf.shape) == 1 and dim == 1):
        return None
    return dim, how


def _told(module: torch.nn.Module) -> dict[str, str]:
    """transformers' plans of a module and those inside it: the style of each module they name."""
    found: dict[str, str] = {}
    paths = [name for name, _ in [*module.named_modules(), *module.named_parameters()]]
    for path, child in module.named_modules():
        plan: Any = getattr(child, "_tp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            continue
        prefix = f"{path}." if path else ""
        for pattern, style in plan.items():
            for name in fnmatch.filter(paths, prefix + pattern):
                found.setdefault(name, str(style))
    return found
