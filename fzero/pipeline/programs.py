"""The compiled programs of one pipeline stage: one for each kind of action.

What passes between programs and stages is local to a device: each array gets a leading dim of
devices, so that it is an ordinary sharded array on the stage's mesh. Inside, the programs are those
of an unpipelined step (`fzero.zero.chain`), run on the stage's pieces of the chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.axes import AXES
from fzero.batch import Inputs
from fzero.keys import block_key
from fzero.links import Mean, split_loss
from fzero.processes import jit_on, send
from fzero.programs.partitioner_faults import partitioned
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.homes import stage_tree
from fzero.sharding.split import Split, map_splits, trained, update_dtype
from fzero.tree import PyTree, added
from fzero.zero.chain import (
    Saved,
    eval_forward,
    input_backward,
    train_backward,
    train_forward,
    weight_backward,
    with_inputs,
    without_inputs,
)
from fzero.zero.collectives import all_reduce_tree, shard_index
from fzero.zero.finite_marks import chain_marks, gradient_marks
from fzero.zero.grads import float_mean, float_means, loss_seed, require_rows, unscaled
from fzero.zero.keeping import keeps, room_for, with_remat
from fzero.zero.layer import End
from fzero.zero.options import compiler_options
from fzero.zero.rules import Rules
from fzero.zero.weights import FetchedWeights


LOCAL = PartitionSpec(AXES)
WHOLE = PartitionSpec()
INPUTS = Inputs.specs(LOCAL, WHOLE)


class StagePrograms:
    """One stage's programs, each compiled when it first runs.

    Args:
        blue: the blueprint; `blue.stages` says how the model is cut.
        stage: which stage.
        on_trace: called whenever a program is traced.

    Attributes:
        rank: the rank that runs it.
        mesh: that rank's devices, axes `(replica, data)` and the plan's further ones.
        splits: a `Split` for each parameter that the stage reads, as its rank holds it.
        keeps: what forward passes keep (`Plan.remat`), as the last program that was traced has it.
    """

    def __init__(self, blue: Blueprint, stage: int, on_trace: Callable[[], None]) -> None:
        stages = blue.stages
        assert stages is not None
        self.blue, self.plan, self.stage, self.on_trace = blue, blue.plan, stage, on_trace
        self.pieces = stages.pieces[stage]
        self.rank = stages.rank_of(stage)
        self.mesh: Mesh = blue.rank_mesh(self.rank)
        self.first = stage == 0
        self.last = stage == stages.schedule.num_stages - 1
        self.splits: PyTree = stage_tree(self.pieces, blue.params)
        self.count = self.plan.microbatches
        self.stateful = [p.layer.name for p in self.pieces if p.layer.stateful]
        self._made: dict[str, Any] = {}
        rules = Rules.of(blue, self.splits)
        self.rules = dataclasses.replace(rules, room=room_for(blue, self.rank))
        self.keeps = keeps(self.rules)

    def place(self, tree: PyTree) -> PyTree:
        """Lays local arrays of another stage out over this one's devices."""
        return send(tree, NamedSharding(self.mesh, LOCAL))

    @property
    def grad_specs(self) -> PyTree:
        """Specs of the stage's gradients on its mesh."""
        return map_splits(lambda s: s.spec(True, AXES), trained(self.splits))

    @property
    def grads_at(self) -> PyTree:
        """Where its gradients lie."""
        return map_splits(lambda s: NamedSharding(self.mesh, s.spec(True)), trained(self.splits))

    @cached_property
    def kept_specs(self) -> PyTree:
        """Specs of what the forward pass reads."""
        return map_splits(lambda s: s.spec(self.plan.gathers_at_use, AXES), self.splits)

    @cached_property
    def kept_at(self) -> PyTree:
        """Where what the forward pass reads lies."""
        return map_splits(
            lambda s: NamedSharding(self.mesh, s.spec(self.plan.gathers_at_use)), self.splits
        )

    def _jit(
        self,
        function: Callable[..., Any],
        specs: Any,
        out: Any,
        donate: tuple[int, ...] = (),
        at: Any = None,
    ) -> Any:
        def traced(*args: Any) -> Any:
            self.on_trace()
            # Something small to wait for: what a program gives may be given away by its reader.
            return function(*args), jnp.zeros((1,), jnp.int8)

        run: Any = jax.shard_map(
            traced,
            mesh=self.mesh,
            in_specs=specs,
            out_specs=(out, LOCAL),
            axis_names=set(AXES),
            check_vma=False,
        )
        run = partitioned(run, self.mesh, differentiates=True)
        platform = self.mesh.devices.flat[0].platform
        options = compiler_options(self.plan, self.splits, self.blue.group.shards, platform)
        local = NamedSharding(self.mesh, LOCAL)
        at = NamedSharding(self.mesh, out) if at is None else at
        return jit_on(
            self.mesh, run, (at, local), donate_argnums=donate, compiler_options=options or None
        )

    @cached_property
    def forward(self) -> Any:
        """`F(kept, buffers, batch, key, number, x, scale) -> (out, saved, buffers)`.

        `out` is what the next stage gets, or `(seed, unscale, mean, metrics)` at the end.
        """

        def run(
            kept: PyTree, buffers: PyTree, batch: Inputs, key: Any, number: Any, x: Any, scale: Any
        ) -> Any:
            rows, rng = self._microbatch(batch, key, number, self.count)
            old, given = unpack(buffers), rows if self.first else unpack(x)

            def passed(rules: Rules) -> tuple[Any, Saved, PyTree]:
                return train_forward(
                    self.pieces, FetchedWeights(rules, kept), given, old, rows, rng,
                    first=self.first, last=self.last,
                )  # fmt: skip

            rules = with_remat(self.rules, lambda rules: passed(rules)[1])
            self.keeps = keeps(rules)
            out, saved, new = passed(rules)
            saved = self.rules.fence(without_inputs(saved))
            if isinstance(out, End):
                mean, metrics = self.rules.fence((out.mean, out.metrics))
                seed, unscale = loss_seed(self.rules, mean, scale)
                out = seed, unscale, float_mean(mean), float_means(metrics)
            return pack((out, saved, {name: new[name] for name in old}))

        specs = (self.kept_specs, LOCAL, INPUTS, WHOLE, WHOLE, LOCAL, WHOLE)
        return self._jit(
            run, specs, LOCAL, donate=(1,), at=(self._local, self._inside, self._local)
        )

    @property
    def _local(self) -> NamedSharding:
        """Where what goes to other programs lies."""
        return NamedSharding(self.mesh, LOCAL)

    @property
    def _inside(self) -> NamedSharding | None:
        """Where what stays in the stage lies: along further axes, as its forward left it."""
        return None if self.plan.further else self._local

    def backward(self, with_sums: bool) -> Any:
        """`B(kept, batch, key, number, saved, cotangent, unscale, sums) -> (cotangent, sums)`.

        Without sums to add to, the gradients of the microbatch are given.
        """

        def run(
            kept: PyTree, batch: Inputs, key: Any, number: Any, saved: Any, cotangent: Any,
            unscale: Any, sums: PyTree,
        ) -> Any:  # fmt: skip
            rows, rng = self._microbatch(batch, key, number, self.count)
            whole = with_inputs(unpack(saved), rows, rng)
            grads, back = train_backward(whole, self.rules, kept, unpack(cotangent), rng)
            return pack(back), self._added(sums, unscaled(grads, unpack(unscale)))

        return self._cached(
            f"B{with_sums}",
            run,
            (self.kept_specs, INPUTS, WHOLE, WHOLE, LOCAL, LOCAL, LOCAL, self._sums(with_sums)),
            (LOCAL, self.grad_specs),
            donate=(7,) if with_sums else (),
            at=(self._local, self.grads_at),
        )

    @cached_property
    def input_backward(self) -> Any:
        """`I(kept, batch, key, number, saved, cotangent) -> (cotangent, halves)`.

        What the weights' gradients need of that is a `Same` in the halves, and not copied: see
        `with_same`.
        """

        def run(
            kept: PyTree, batch: Inputs, key: Any, number: Any, saved: Any, cotangent: Any
        ) -> Any:
            rows, rng = self._microbatch(batch, key, number, self.count)
            own = unpack(saved)
            whole = with_inputs(own, rows, rng)
            halves, back = input_backward(whole, self.rules, kept, unpack(cotangent), rng)
            return pack((back, without_same(without_inputs(halves), own)))

        specs = (self.kept_specs, INPUTS, WHOLE, WHOLE, LOCAL, LOCAL)
        return self._jit(run, specs, LOCAL, at=(self._local, self._inside))

    def weight_backward(self, with_sums: bool) -> Any:
        """`W(kept, batch, key, number, halves, unscale, sums) -> sums`; see `backward`."""

        def run(
            kept: PyTree, batch: Inputs, key: Any, number: Any, halves: Any, unscale: Any,
            sums: PyTree,
        ) -> Any:  # fmt: skip
            rows, rng = self._microbatch(batch, key, number, self.count)
            whole = with_inputs(unpack(halves), rows, rng)
            grads = weight_backward(whole, self.rules, kept, rng)
            return self._added(sums, unscaled(grads, unpack(unscale)))

        return self._cached(
            f"W{with_sums}",
            run,
            (self.kept_specs, INPUTS, WHOLE, WHOLE, LOCAL, LOCAL, self._sums(with_sums)),
            self.grad_specs,
            donate=(6,) if with_sums else (),
            at=self.grads_at,
        )

    def evaluate(self, count: int, outputs: bool = False) -> Any:
        """`E(kept, buffers, batch, key, number, x) -> out` for `count` microbatches.

        `out` is what the next stage gets, or `(mean, metrics)` at the end; where `outputs` are
        wanted, what the last stage gives for each row.
        """

        def run(kept: PyTree, buffers: PyTree, batch: Inputs, key: Any, number: Any, x: Any) -> Any:
            rows, rng = self._microbatch(batch, key, number, count)
            out = eval_forward(
                self.pieces, self.rules, kept, rows if self.first else unpack(x), buffers, rows,
                rng,
            )  # fmt: skip
            if self.last and outputs:
                return pack(require_rows(out, rows))
            if self.last:
                mean, metrics = split_loss(out)
                return pack((float_mean(mean), float_means(metrics)))
            return pack(out)

        specs = (self.kept_specs, WHOLE, INPUTS, WHOLE, WHOLE, LOCAL)
        return self._cached(f"E{count}{outputs}", run, specs, LOCAL)

    @cached_property
    def marks(self) -> Any:
        """`N(kept, buffers, batch, key, number, x) -> marks` of a forward action's layers."""

        def run(kept: PyTree, buffers: PyTree, batch: Inputs, key: Any, number: Any, x: Any) -> Any:
            rows, rng = self._microbatch(batch, key, number, self.count)
            given = rows if self.first else unpack(x)
            _, found = chain_marks(self.pieces, self.rules, kept, given, unpack(buffers), rows, rng)
            return pack(found)

        specs = (self.kept_specs, LOCAL, INPUTS, WHOLE, WHOLE, LOCAL)
        return self._jit(run, specs, LOCAL)

    @cached_property
    def gradient_marks(self) -> Any:
        """`G(gradients) -> marks` of one microbatch's gradients."""

        def run(grads: PyTree) -> Any:
            return pack(gradient_marks(trained(self.splits), grads))

        return self._jit(run, (self.grad_specs,), LOCAL)

    @cached_property
    def rows(self) -> Any:
        """`R([outputs, ...]) -> outputs` of all microbatches, rows in the batch's order."""

        def run(results: list[PyTree]) -> PyTree:
            return jax.tree.map(lambda *x: jnp.concatenate(x), *unpack(results))

        return self._jit(run, (LOCAL,), LOCAL)

    @cached_property
    def add(self) -> Any:
        """`(sums, gradients) -> sums`, for gradients that had to wait for their turn."""
        specs = (self.grad_specs, self.grad_specs)
        return self._jit(self._added, specs, self.grad_specs, donate=(0,), at=self.grads_at)

    @cached_property
    def zeros(self) -> Any:
        """`Z() -> sums`: room for the stage's gradients, where microbatches are several."""
        pieces = {piece.layer.name: piece.num_layers for piece in self.pieces}

        def zero(split: Split) -> jax.Array:
            shape = split.stored_shape
            if split.stacked:
                shape = (pieces[split.path.split("/")[0]], *shape[1:])
            return jnp.zeros(shape, update_dtype(split.compute))

        def run() -> PyTree:
            return map_splits(zero, trained(self.splits))

        return jit_on(self.mesh, run, self.grads_at)

    @cached_property
    def totals(self) -> Any:
        """`T([(mean, metrics), ...]) -> (mean, metrics)` summed over microbatches and devices."""

        def run(results: list[tuple[Mean, dict[str, Mean]]]) -> Any:
            own = unpack(results)
            total = own[0]
            if len(own) > 1:
                total = jax.tree.map(jnp.zeros_like, total)
                for one in own:
                    total = jax.tree.map(jnp.add, total, one)
            return all_reduce_tree(total, self.blue.group)

        return self._jit(run, (LOCAL,), WHOLE)

    def _cached(
        self, name: str, run: Any, specs: Any, out: Any, donate: Any = (), at: Any = None
    ) -> Any:
        if name not in self._made:
            self._made[name] = self._jit(run, specs, out, donate, at)
        return self._made[name]

    def _sums(self, with_sums: bool) -> Any:
        return self.grad_specs if with_sums else WHOLE

    def _microbatch(
        self, batch: Inputs, key: jax.Array, number: Any, count: int
    ) -> tuple[Inputs, jax.Array]:
        """One microbatch's rows of this device, and its key."""
        rows = batch.in_microbatches(count).map_rows(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
        )
        block = shard_index() * count + number
        return rows, block_key(key, block)

    def _added(self, sums: PyTree, grads: PyTree) -> PyTree:
        if sums is None:
            return grads
        return added(sums, grads)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Same:
    """Stands for a leaf of a program's argument, so that no program copies it.

    Args:
        index: which leaf.
    """

    index: int


def without_same(tree: PyTree, argument: PyTree) -> PyTree:
    """A tree with a `Same` for each leaf that an argument has (inside jit)."""
    index = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(argument))}
    return jax.tree.map(lambda x: Same(index[id(x)]) if id(x) in index else x, tree)


def with_same(tree: PyTree, argument: PyTree) -> PyTree:
    """A tree with the argument's own leaves where a `Same` stands for one."""
    leaves = jax.tree.leaves(argument)
    return jax.tree.map(
        lambda x: leaves[x.index] if isinstance(x, Same) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Same),
    )


def pack(tree: PyTree) -> PyTree:
    """Gives every local array its dim of devices."""
    return jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)


def unpack(tree: PyTree) -> PyTree:
    """Takes the dim of devices away."""
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), tree)
