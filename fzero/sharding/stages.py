"""Where a chain is cut into pipeline stages: contiguous pieces, through a `Stack` at any layer.

A unit is what cannot be cut: a `Layer`, or one layer of a `Stack`. The loss function given to a
`Sequential` is no unit: it runs with whatever comes last.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fzero.errors import PlanError
from fzero.links import Context, Layer, Stack, apply_layer, layer_params, split_shared
from fzero.model import Model, Sequential
from fzero.optimizer.layers import one_layer
from fzero.pieces import Piece
from fzero.programs.flops import flops
from fzero.schedule.grid import short
from fzero.sharding.initial import initial_shapes
from fzero.summary import Boxed
from fzero.tree import PyTree, shape_of


METHODS = ("uniform", "parameters", "cost", "type:REGEX")
# The name of the link that `Sequential` makes of its loss function; no layer may have it.
_LOSS = "loss"


# Stages that are printed: a screen.
_MOST_STAGES = 40


@dataclass(frozen=True, repr=False)
class Partition(Boxed):
    """A chain cut into stages.

    Args:
        stages: the pieces of each stage, in the order of the chain.
        loads: what was balanced, per stage.
        quantity: what `loads` counts: `layers`, `parameters`, `FLOPs` or `matches`.

    Example:
        >>> layer = Layer("in", None, lambda p, x, ctx: x)
        >>> blocks = Stack("blocks", 3, lambda rng: {}, lambda p, x, ctx: x)
        >>> print(partition(Sequential([layer, blocks]), 2))
        stage  layers  links
            0       2  in, blocks[0:1]
            1       2  blocks[1:3]
    """

    stages: tuple[tuple[Piece, ...], ...]
    loads: tuple[int, ...]
    quantity: str = "layers"

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Units per stage: what `partition` takes as an explicit list."""
        return tuple(
            sum(piece.num_layers for piece in stage if piece.layer.name != _LOSS)
            for stage in self.stages
        )

    def __repr__(self) -> str:
        return f"Partition({self.num_stages} stages, {self.quantity}, sizes={short(self.sizes)})"

    def __str__(self) -> str:
        balanced = self.quantity != "layers"
        rows = [["stage", "layers", *([self.quantity] if balanced else [])]]
        for index, (size, load) in enumerate(zip(self.sizes, self.loads, strict=True)):
            rows.append([str(index), str(size), *([f"{load:,}"] if balanced else [])])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        links = ["links", *(", ".join(map(_label, stage)) for stage in self.stages)]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), text])
            for row, text in zip(rows, links, strict=True)
        ]
        more = self.num_stages - _MOST_STAGES
        return "\n".join(
            lines[: _MOST_STAGES + 1] + ([f"... {more} more stages"] if more > 0 else [])
        )


def _label(piece: Piece) -> str:
    whole = piece.num_layers == piece.layer.num_layers
    return piece.layer.name + ("" if whole else f"[{piece.start}:{piece.stop}]")


def partition(
    model: Model, stages: int, method: str | Sequence[int] = "uniform", *, batch: PyTree = None
) -> Partition:
    """Cuts a chain into contiguous pipeline stages of at least one unit each.

    Args:
        model: a `Sequential`.
        stages: number of stages.
        method: what is balanced over the stages:

            - `"uniform"`: units. They differ by at most one; the first stages get the extra ones.
            - `"parameters"`: parameters; a tied leaf counts once, in the layer that owns it.
            - `"cost"`: FLOPs of the forward pass (`fzero.programs.flops`); needs `batch`.
            - `"type:REGEX"`: units whose layer's name the expression is found in, in any case.
            - a list: so many units per stage.

            Parameters, cost and matches are cut such that the largest stage is as small as it can
            be; among those, the rest is as even as it can be.
        batch: arrays or `jax.ShapeDtypeStruct`s of a batch, for `"cost"`. Nothing is allocated.

    Returns:
        The pieces of each stage. The loss function is the last stage's last piece.

    Raises:
        PlanError: the model is no chain, has fewer units than stages, or the method is unknown,
            matches nothing, does not sum up to the units, or lacks its batch.

    Example:
        >>> import jax.numpy as jnp
        >>> wide = Layer("wide", lambda rng: {"w": jnp.ones((30, 2))}, lambda p, x, ctx: x)
        >>> blocks = Stack("blocks", 4, lambda rng: {"w": jnp.ones(10)}, lambda p, x, ctx: x)
        >>> print(partition(Sequential([wide, blocks]), 2, "parameters"))
        stage  layers  parameters  links
            0       1          60  wide
            1       4          40  blocks

    Source: the methods are those of DeepSpeed's `PipelineModule(partition_method=...)`, as are the
    stages that get the extra layers; `cost` and lists are not in it.
    """
    units = _units(model)
    _check_stages(stages, len(units))
    quantity = "layers"
    if not isinstance(method, str):
        sizes = _explicit(method, stages, len(units))
        loads = [1] * len(units)
    elif method == "uniform":
        less, extra = divmod(len(units), stages)
        sizes = [less + (stage < extra) for stage in range(stages)]
        loads = [1] * len(units)
    else:
        quantity, loads = _loads(model, units, method, batch)
        sizes = balance(loads, stages)
    ends = list(itertools.accumulate(sizes, initial=0))
    cut = [_pieces(units[a:b]) for a, b in itertools.pairwise(ends)]
    if model.layers[-1].name == _LOSS:
        number = sum(link.num_layers for link in model.layers[:-1])
        cut[-1].append(Piece(model.layers[-1], 0, 1, number))
    totals = tuple(sum(loads[a:b]) for a, b in itertools.pairwise(ends))
    return Partition(tuple(map(tuple, cut)), totals, quantity)


def balance(loads: Sequence[int], num_ranges: int) -> list[int]:
    """Cuts a sequence into ranges of which the largest is as small as it can be.

    Among all such cuts the one with the least sum of squared loads is taken, among those the one
    with the least sum of squared lengths, and among those the one with the longest first ranges.

    Args:
        loads: what each item weighs, 0 or more.
        num_ranges: how many, at most one per item.

    Returns:
        The number of items in each range, at least one.

    Example:
        >>> balance([1, 1, 1, 5, 1, 1], 3)
        [3, 1, 2]
    """
    count = len(loads)
    before = list(itertools.accumulate(loads, initial=0))
    limit = _smallest_limit(loads, num_ranges)
    # One integer orders by squared loads first and squared lengths second.
    weight = count * count + 1
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # items so far: (cost, lengths)
    for number in range(num_ranges):
        found: dict[int, tuple[int, list[int]]] = {}
        for start, (cost, lengths) in best.items():
            # Every later range needs an item of its own.
            for end in range(start + 1, count - (num_ranges - number - 1) + 1):
                load = before[end] - before[start]
                if load > limit:
                    break
                total = cost + load * load * weight + (end - start) ** 2
                # Equally good: starts ascend, so the last one found gives early ranges more.
                if end not in found or total <= found[end][0]:
                    found[end] = (total, [*lengths, end - start])
        best = found
    return best[count][1]


def _smallest_limit(loads: Sequence[int], num_ranges: int) -> int:
    """The least limit under which filling parts in order needs no more than `num_ranges`.

    Fewer are as good: a part of several items can always be cut further.
    """

    def fits(limit: int) -> bool:
        used, room = 1, limit
        for load in loads:
            if load > room:
                used, room = used + 1, limit
            room -= load
        return used <= num_ranges

    low, high = max(loads), sum(loads)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _units(model: Model) -> list[Piece]:
    """The chain as pieces of one layer each, without the loss function."""
    if not isinstance(model, Sequential):
        raise PlanError(
            f"partition: expected a fz.Sequential, got a {type(model).__name__}, which is one"
            " function and cannot be cut. Write it as fz.Sequential([fz.Layer(...), ...]) (PyTorch"
            " modules: tb.sequential([...], example), or tb.convert(..., roll=2) where equal blocks"
            " are fewer than it rolls by itself), or train it without a pipeline (pipe=1)"
        )
    units: list[Piece] = []
    for link in model.layers:
        if link.name != _LOSS:
            first = len(units)
            units += [Piece(link, i, i + 1, first + i) for i in range(link.num_layers)]
    return units


def _pieces(units: Sequence[Piece]) -> list[Piece]:
    """Neighbouring layers of one stack as one piece."""
    joined: list[Piece] = []
    for unit in units:
        if joined and joined[-1].layer is unit.layer:
            last = joined.pop()
            unit = Piece(last.layer, last.start, unit.stop, last.number)
        joined.append(unit)
    return joined


def _check_stages(stages: int, units: int) -> None:
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise PlanError(f"partition: stages={stages!r}: expected an integer of 1 or more")
    if stages > units:
        raise PlanError(
            f"partition: {stages} stages, but the model has {units} layers (a Stack counts for its"
            f" num); every stage needs one. Use at most {units} stages, or split a layer in two"
        )


def _explicit(sizes: Sequence[int], stages: int, units: int) -> list[int]:
    wanted = f"a list of {stages} positive integers that sum to {units}, one per stage"
    try:
        given = list(sizes)
    except TypeError:
        given = []
    integers = all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in given)
    if not given or not integers or len(given) != stages or sum(given) != units:
        numbers = f" ({len(given)} of them, sum {sum(given)})" if given and integers else ""
        raise PlanError(
            f"partition: method={sizes!r}{numbers}: expected {wanted}, or one of"
            f" {', '.join(METHODS)}"
        )
    return given


def _loads(
    model: Model, units: Sequence[Piece], method: str, batch: PyTree
) -> tuple[str, list[int]]:
    """What a method balances: its name, and how much of it every unit has."""
    if method == "parameters":
        params, _ = initial_shapes(model)
        return "parameters", [_num_parameters(unit.layer, params) for unit in units]
    if method == "cost":
        if batch is None:
            raise PlanError(
                "partition: method='cost' counts the FLOPs of a batch: pass batch=, arrays or"
                " jax.ShapeDtypeStructs of the shapes that a step gets"
            )
        costs = _forward_flops(model, batch)
        return "FLOPs", [costs[unit.layer.name] for unit in units]
    kind, colon, pattern = method.partition(":")
    if kind != "type" or not colon:
        raise PlanError(
            f"partition: method={method!r}: expected one of {', '.join(METHODS)}, or a list with"
            " the number of layers of each stage"
        )
    return "matches", _matches(units, pattern)


def _num_parameters(link: Layer | Stack, params: PyTree) -> int:
    """Parameters of one layer of a link; what it reads from others is theirs."""
    leaves = jax.tree.leaves(params.get(link.name, {}))
    return sum(math.prod(leaf.shape) for leaf in leaves) // link.num_layers


def _matches(units: Sequence[Piece], pattern: str) -> list[int]:
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PlanError(
            f"partition: method='type:{pattern}': expected a regular expression: {error}"
        ) from error
    found = [int(expression.search(unit.layer.name) is not None) for unit in units]
    if not any(found):
        names = list(dict.fromkeys(unit.layer.name for unit in units))
        raise PlanError(
            f"partition: method='type:{pattern}' matches none of the layer names {names}; name a"
            " layer (or a part of its name), or use 'uniform'"
        )
    return found


def _forward_flops(model: Model, batch: PyTree) -> dict[str, int]:
    """FLOPs of one layer of every link, found by tracing the chain on shapes."""
    params, buffers = initial_shapes(model)
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.tree.map(shape_of, batch)
    costs: dict[str, int] = defaultdict(int)
    x = batch
    for link in model.layers:
        if link.name == _LOSS:
            break
        weights, state = layer_params(link, params), buffers.get(link.name)
        if isinstance(link, Stack):
            weights, state = jax.tree.map(one_layer, (weights, state))
        jaxpr, x = _trace(link, weights, state, x, batch, key)
        costs[link.name] = flops(jaxpr)
    return costs


def _trace(
    link: Layer | Stack, weights: PyTree, state: PyTree, x: Any, batch: PyTree, key: Any
) -> tuple[Any, Any]:
    """A layer's jaxpr and the shapes of what it gives on."""

    def run(weights: PyTree, state: PyTree, x: Any, batch: PyTree, key: jax.Array) -> Any:
        carry, shared = split_shared(link, x) if isinstance(link, Stack) else (x, {})
        y, _ = apply_layer(link, weights, carry, shared, Context(batch, key, True, state))
        return {**y, **shared} if shared else y

    jaxpr, out = jax.make_jaxpr(run, return_shape=True)(weights, state, x, batch, key)
    return jaxpr, out
