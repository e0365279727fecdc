"""Between the state, whose leaves are at home, and the stages, which each see their own devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fzero.axes import AXES
from fzero.batch import Inputs, place_batch
from fzero.compat import is_key
from fzero.errors import PlanError
from fzero.links import Stack
from fzero.pipeline.programs import LOCAL, WHOLE, StagePrograms, pack, unpack
from fzero.processes import at_home, jit_on, joined, mesh_of, send, view
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.homes import stage_tree
from fzero.sharding.split import Home, Split, flat_splits, map_splits, trained
from fzero.tree import PyTree
from fzero.zero.buffers import agreed_buffers


class StageInputs:
    """Takes leaves to the stages that read them and results back home.

    Args:
        blue: the blueprint.
        programs: the stages.

    Raises:
        PlanError: a layer reads a weight of a stack that is cut.
    """

    def __init__(self, blue: Blueprint, programs: list[StagePrograms]) -> None:
        assert blue.stages is not None
        self.blue, self.programs, self.stages = blue, programs, blue.stages
        self.ranks = range(self.stages.schedule.num_ranks)
        self.whole = [NamedSharding(blue.rank_mesh(rank), WHOLE) for rank in self.ranks]
        self.local = [NamedSharding(blue.rank_mesh(rank), LOCAL) for rank in self.ranks]
        # Stages that give gradients of a leaf, in order.
        self.givers: dict[str, list[StagePrograms]] = {}
        for program in programs:
            for split in flat_splits(program.splits):
                self.givers.setdefault(split.path, []).append(program)
            self._require_at_hand(program)
        self._joins: dict[Any, Any] = {}

    def _require_at_hand(self, program: StagePrograms) -> None:
        """A layer sees a stack's weights whole and in order only where the whole stack is."""
        whole = {p.layer.name for p in program.pieces if p.num_layers == p.layer.num_layers}
        stacks = {link.name for link in self.blue.model.layers if isinstance(link, Stack)}
        for piece in program.pieces:
            for path in getattr(piece.layer, "reads", {}).values():
                name = path.split("/")[0]
                if name in stacks - whole:
                    raise PlanError(
                        f"plan: layer {piece.layer.name!r} on stage {program.stage} reads {path}, a"
                        f" weight of a stack on rank(s) {list(self.stages.homes[name].ranks)}; only"
                        " weights of single layers can be read from another stage: read it within"
                        " the stack, make it a Layer's, or choose a partition that keeps the stack"
                        " and its reader on one stage"
                    )

    def kept(self, tree: PyTree) -> list[PyTree]:
        """What the forward pass of each stage reads, on its rank."""
        return [
            map_splits(
                lambda split, to, leaf, rank=program.rank: self._on_rank(leaf, split, to, rank),
                program.splits, program.kept_at, stage_tree(program.pieces, tree),
            )
            for program in self.programs
        ]  # fmt: skip

    def _on_rank(self, leaf: jax.Array, split: Split, to: NamedSharding, rank: int) -> jax.Array:
        home = split.home
        assert home is not None
        if home.ranks == (rank,):
            return leaf
        if rank in home.ranks:
            return view(leaf, to)
        moved: jax.Array = send(leaf, to)
        return moved

    def batch(self, inputs: Inputs) -> list[Inputs]:
        """The batch's rows, what is shared and the step number on every rank that runs a stage."""
        steps = self.everywhere(inputs.step)
        return [
            place_batch(inputs, self.blue.rank_mesh(rank)).at(steps[rank]) for rank in self.ranks
        ]

    def everywhere(self, value: jax.Array) -> list[Any]:
        """A small replicated value on every rank."""
        if is_key(value):
            impl = jax.random.key_impl(value)
            bits = self.everywhere(jax.random.key_data(value))
            like = jax.ShapeDtypeStruct(value.shape, value.dtype)
            return [
                jax.random.wrap_key_data(x, impl=impl) if at_home(mesh_of(x)) else like
                for x in bits
            ]
        return [view(value, sharding) for sharding in self.whole]

    def buffers(self, tree: PyTree) -> list[dict[str, PyTree]]:
        """The buffers of each rank's links."""
        found: list[dict[str, PyTree]] = [{} for _ in self.ranks]
        for name, own in tree.items():
            home = self.stages.homes[name]
            for rank in home.ranks:
                found[rank][name] = jax.tree.map(
                    lambda x, home=home, rank=rank: (
                        x if len(home.ranks) == 1 else view(x, self.whole[rank])
                    ),
                    own,
                )
        return found

    def pack_buffers(self, ranks: list[dict[str, PyTree]]) -> list[dict[str, PyTree]]:
        """Buffers as each device's own, to be changed by one microbatch after the other."""
        return [
            self._program("pack", rank, pack, WHOLE, LOCAL)(tree) if tree else {}
            for rank, tree in enumerate(ranks)
        ]

    def home_buffers(self, old: list[dict[str, PyTree]], new: list[dict[str, PyTree]]) -> PyTree:
        """One value of each buffer for all devices, at home, from each rank's before and after."""

        def agreed(both: tuple[PyTree, PyTree]) -> PyTree:
            layers, (old, new) = self.blue.model.layers, both
            return agreed_buffers(layers, old, unpack(new), self.blue.group)

        done = [
            self._program("agreed", rank, agreed, (WHOLE, LOCAL), WHOLE)(both) if both[1] else {}
            for rank, both in enumerate(zip(old, new, strict=True))
        ]
        homes = self.stages.homes
        return {
            name: jax.tree.map(
                lambda *rows, home=homes[name]: self._joined(rows, home, WHOLE),
                *(done[rank][name] for rank in homes[name].ranks),
            )
            for name in self.blue.buffers
        }

    def _program(self, name: str, rank: int, run: Any, into: Any, out: Any) -> Any:
        if (name, rank) not in self._joins:
            mesh = self.blue.rank_mesh(rank)
            self._joins[name, rank] = jit_on(
                mesh,
                jax.shard_map(
                    run, mesh=mesh, in_specs=(into,), out_specs=out, axis_names=set(AXES),
                    check_vma=False,
                ),
                NamedSharding(mesh, out),
            )  # fmt: skip
        return self._joins[name, rank]

    def home_sums(self, sums: dict[int, PyTree]) -> PyTree:
        """Gradients of all parameters at home, from those of the stages."""
        flat = {
            program.stage: dict(
                zip(
                    [split.path for split in flat_splits(trained(program.splits))],
                    jax.tree.leaves(sums.pop(program.stage)),
                    strict=True,
                )
            )
            for program in self.programs
        }

        def home_sum(split: Split) -> jax.Array:
            home = split.home
            assert home is not None
            givers = self.givers[split.path]
            grads = [(program, flat[program.stage].pop(split.path)) for program in givers]
            if not split.stacked:
                return self._added([grad for _, grad in grads], split, home.ranks[0])
            by_rank = [self._rows(grads, split, rank) for rank in home.ranks]
            return self._joined(by_rank, home, split.spec(True))

        return map_splits(home_sum, trained(self.blue.params))

    def _added(self, grads: list[jax.Array], split: Split, rank: int) -> jax.Array:
        """A tied leaf's gradients from several stages, added where it lives, first stage first."""
        if len(grads) == 1:
            return grads[0]
        to = NamedSharding(self.blue.rank_mesh(rank), split.spec(True))
        key = "add", len(grads), to
        if key not in self._joins:
            self._joins[key] = jit_on(
                self.blue.rank_mesh(rank), lambda *grads: sum(grads[1:], grads[0]), to
            )
        total: jax.Array = self._joins[key](*(send(grad, to) for grad in grads))
        return total

    def _rows(self, grads: list[tuple[StagePrograms, jax.Array]], split: Split, rank: int) -> Any:
        """The gradients of a stack's layers on one rank, in the rows where they are kept."""
        own = [grad for program, grad in grads if program.rank == rank]
        assert split.home is not None
        rows = split.home.rows_per_rank if split.home.rows else split.shape[0]
        fill = rows - sum(grad.shape[0] for grad in own)
        if len(own) == 1 and not fill:
            return own[0]
        to = NamedSharding(self.blue.rank_mesh(rank), split.spec(True))
        key = "rows", rank, split.path
        if key not in self._joins:

            def join(*grads: jax.Array) -> jax.Array:
                widths = [(0, fill), *[(0, 0)] * (grads[0].ndim - 1)]
                return jnp.pad(jnp.concatenate(grads), widths)

            self._joins[key] = jit_on(self.blue.rank_mesh(rank), join, to)
        return self._joins[key](*own)

    def _joined(self, rows: Any, home: Home, spec: PartitionSpec) -> jax.Array:
        """A leaf at home from its rows on each of the ranks."""
        if len(rows) == 1:
            one: jax.Array = rows[0]
            return one
        shape = (len(home.rows), *rows[0].shape[1:])
        return joined(shape, self.blue.sharding(home, spec), rows, rows[0].dtype)
