"""Where the leaves of a cut chain live: with the rank that runs the layer they belong to."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fzero.errors import PlanError, ScheduleError
from fzero.links import Stack, of_link, subtree
from fzero.model import Model
from fzero.pieces import Piece
from fzero.plan import Plan
from fzero.schedule.actions import Schedule
from fzero.schedule.check import check_forwards_in_order
from fzero.sharding.split import Home, stacked_names
from fzero.sharding.stages import Partition, partition
from fzero.tree import PyTree


# By the name of a stack that is not kept in order: the layer in each of its rows.
StackRows = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, eq=False)
class Stages:
    """A model cut into the stages of a plan's schedule.

    Args:
        schedule: the order of the work.
        partition: where the chain is cut.
        pieces: per stage, its pieces; `row` says where a stack's layers lie on their rank.
        homes: per link of the chain, which ranks hold its leaves.
    """

    schedule: Schedule
    partition: Partition
    pieces: tuple[tuple[Piece, ...], ...]
    homes: Mapping[str, Home]

    @property
    def rows(self) -> StackRows:
        """The stacks that ranks keep in another order than the chain's."""
        kept = sorted((name, home.reordered) for name, home in self.homes.items())
        return tuple((name, rows) for name, rows in kept if rows)

    def with_rows(self, rows: Mapping[str, Sequence[int]]) -> Stages:
        """The same with layers of stacks in these rows; in the chain's order where none are said.

        Only for what is read of such a state: a schedule finds its layers in the plan's own rows.
        """

        def had(name: str, home: Home) -> Home:
            kept = tuple(rows[name]) if name in rows else in_order(home.rows)
            return dataclasses.replace(home, rows=kept)

        homes = {name: had(name, home) for name, home in self.homes.items()}
        return dataclasses.replace(self, homes=homes)

    def rank_of(self, stage: int) -> int:
        """The rank that runs a stage."""
        return self.schedule.stage_to_rank[stage]


def cut_into_stages(model: Model, plan: Plan) -> Stages:
    """Cuts a model as its plan says.

    Raises:
        PlanError: the model cannot be cut like that, or its layers would hand their buffers on in
            another order than without a pipeline.
    """
    schedule = plan.build_schedule()
    method = list(plan.partition) if isinstance(plan.partition, tuple) else plan.partition
    cut = partition(model, schedule.num_stages, method)
    try:
        check_forwards_in_order(schedule, _with_buffers(cut))
    except ScheduleError as error:
        raise PlanError(f"plan: schedule: {error}") from error
    rank_of = schedule.stage_to_rank
    layers: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for stage, pieces in enumerate(cut.stages):
        for piece in pieces:
            layers[piece.layer.name][rank_of[stage]] += range(piece.start, piece.stop)
    stacks = stacked_names(model)
    users: dict[str, list[int]] = defaultdict(list)
    for stage, pieces in enumerate(cut.stages):
        for piece in pieces:
            users[piece.layer.name].append(stage)
    homes = {name: _home(name, held, users[name], stacks) for name, held in layers.items()}

    def placed(piece: Piece, rank: int) -> Piece:
        if not isinstance(piece.layer, Stack):
            return piece
        return dataclasses.replace(piece, row=layers[piece.layer.name][rank].index(piece.start))

    pieces_of = tuple(
        tuple(placed(piece, rank_of[stage]) for piece in pieces)
        for stage, pieces in enumerate(cut.stages)
    )
    return Stages(schedule, cut, pieces_of, homes)


def _with_buffers(cut: Partition) -> dict[int, str]:
    """Of each stage whose forwards read what the one before left: which layer it is of."""
    return {
        stage: f"{of_link(piece.layer)} reads the buffers that the microbatch before left"
        for stage, pieces in enumerate(cut.stages)
        for piece in pieces
        if piece.layer.stateful
    }


def in_order(rows: tuple[int, ...]) -> tuple[int, ...]:
    """As many layers as there are in some rows, each in its own."""
    return tuple(range(sum(row >= 0 for row in rows)))


def stages_of_outputs(stages: Stages, model: Model) -> Stages:
    """The same stages with the links that give outputs in place of those that give the loss.

    Raises:
        PlanError: the model says what its outputs are by one function.
    """
    links = {link.name: link for link in model.predictor}
    if "" in links:
        raise PlanError(
            "predict_step: the model's `predict` is one function, which has no stages; give"
            " fz.Sequential the links that predict (predict=[...]), or bring the state to one mesh"
            " with fz.replan(state, model, tx, plan, plan.replace(pipe=1))"
        )
    pieces = tuple(
        tuple(
            dataclasses.replace(piece, layer=links[piece.layer.name])
            for piece in stage
            if piece.layer.name in links
        )
        for stage in stages.pieces
    )
    return dataclasses.replace(stages, pieces=pieces)


def _home(
    name: str, held: Mapping[int, list[int]], stages: list[int], stacks: frozenset[str]
) -> Home:
    ranks = tuple(sorted(held))
    label = f"stage {stages[0]}" if len(stages) == 1 else name
    if len(ranks) == 1:
        return Home(ranks, label=label)
    if name not in stacks:
        return Home(ranks)
    longest = max(len(rows) for rows in held.values())
    rows = [[*held[rank], *[-1] * (longest - len(held[rank]))] for rank in ranks]
    return Home(ranks, tuple(row for one in rows for row in one), label)


def stage_tree(pieces: tuple[Piece, ...], tree: PyTree) -> PyTree:
    """The part of a params-like tree that the pieces read.

    Links keep their names, so that `layer_params` finds what it finds in the whole tree.
    """
    found: dict[str, PyTree] = {}
    for piece in pieces:
        name = piece.layer.name
        if name in tree:
            found[name] = tree[name]
    for piece in pieces:
        for path in getattr(piece.layer, "reads", {}).values():
            first, *steps = path.split("/")
            if first in {p.layer.name for p in pieces}:
                continue
            found[first] = _merged(found.get(first, {}), steps, subtree(tree, path))
    return found


def _merged(into: PyTree, steps: list[str], value: PyTree) -> PyTree:
    if not steps:
        return value
    return {**into, steps[0]: _merged(into.get(steps[0], {}), steps[1:], value)}
