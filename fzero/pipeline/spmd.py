"""A pipeline as one program: every device runs the same loop, each rank its own stage in it.

For processes that cannot reach each other's devices. Order is GPipe's: all forwards, then all
backwards. In each turn of the loop a rank runs its stage on the microbatch that has come (or idles,
while the pipeline fills and drains) and hands the result to its neighbour with a `ppermute`. Only
what a stage received is kept for the backward pass, which runs the stage's forward again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fzero.axes import PIPE
from fzero.batch import Inputs
from fzero.errors import PlanError
from fzero.keys import block_key
from fzero.links import Mean, split_loss
from fzero.precision import compute_dtype
from fzero.sharding.homes import Stages, stage_tree
from fzero.sharding.split import Split, map_splits, trained
from fzero.tree import PyTree, shapes_of
from fzero.zero.buffers import agreed_buffers
from fzero.zero.chain import eval_forward, train_backward, train_forward
from fzero.zero.collectives import all_reduce_tree, shard_index, sum_over
from fzero.zero.grads import float_mean, float_means, loss_seed, require_rows, unscaled
from fzero.zero.layer import End
from fzero.zero.rules import Rules
from fzero.zero.vjp import Floats


Ends = tuple[Mean, dict[str, Mean]]


def spmd_gradients(
    stages: Stages,
    rules: Rules,
    kept: PyTree,
    buffers: PyTree,
    batch: Inputs,
    rng: jax.Array,
    scale: jax.Array | None,
) -> tuple[PyTree, Mean, dict[str, Mean], PyTree]:
    """`fzero.zero.grads.local_gradients` for a pipeline; all mesh axes are manual."""
    count = rules.plan.microbatches
    loop = _Loop(stages, rules, kept, _rows(batch, count), rng, count, scale)
    received, ends, new = loop.forward(buffers)
    sums = loop.backward(received)
    mean, metrics = loop.everywhere(ends)
    return loop.joined(sums), mean, metrics, loop.agreed(buffers, new)


def spmd_evaluation(
    stages: Stages,
    rules: Rules,
    kept: PyTree,
    buffers: PyTree,
    batch: Inputs,
    rng: jax.Array,
    count: int,
) -> Ends:
    """`fzero.zero.grads.local_evaluation` for a pipeline, over `count` microbatches."""
    loop = _Loop(stages, rules, kept, _rows(batch, count), rng, count, None)
    return loop.everywhere(loop.evaluate(buffers))


def spmd_outputs(
    stages: Stages,
    rules: Rules,
    kept: PyTree,
    buffers: PyTree,
    batch: Inputs,
    rng: jax.Array,
    count: int,
) -> PyTree:
    """`fzero.zero.grads.local_outputs` for a pipeline, over `count` microbatches."""
    return _Loop(stages, rules, kept, _rows(batch, count), rng, count, None).outputs(buffers)


def _rows(batch: Inputs, count: int) -> Inputs:
    return batch.map_rows(lambda x: x.reshape(count, -1, *x.shape[1:]))


@dataclass(frozen=True, eq=False)
class _Loop:
    stages: Stages
    rules: Rules
    kept: PyTree
    rows: Inputs  # this device's, microbatches on dim 0
    rng: jax.Array
    count: int
    scale: jax.Array | None

    @property
    def size(self) -> int:
        """Number of stages, one per rank."""
        return len(self.stages.pieces)

    def microbatch(self, number: Any) -> tuple[Inputs, jax.Array]:
        """One microbatch's rows, and its key."""
        block = shard_index(self.rules.group) * self.count + number
        rows = self.rows.map_rows(lambda x: _at(x, number))
        return rows, block_key(self.rng, block)

    def stage_rules(self, stage: int) -> Rules:
        """The rules, for the leaves of one stage."""
        layout = stage_tree(self.stages.pieces[stage], self.rules.layout)
        return dataclasses.replace(self.rules, layout=layout)

    def run_forward(
        self, stage: int, number: Any, x: Any, buffers: PyTree
    ) -> tuple[Any, Any, PyTree]:
        """A stage's forward pass: `(out or End, links, new buffers)`."""
        rows, rng = self.microbatch(number)
        pieces = self.stages.pieces[stage]
        first, last = stage == 0, stage == self.size - 1
        names = {piece.layer.name for piece in pieces}
        own = {name: tree for name, tree in buffers.items() if name in names}
        out, links, new = train_forward(
            pieces, self.stage_rules(stage), stage_tree(pieces, self.kept), rows if first else x,
            own, rows, rng, first=first, last=last,
        )  # fmt: skip
        return out, links, {**buffers, **{name: new[name] for name in own}}

    def run_eval(self, stage: int, number: Any, x: Any, buffers: PyTree) -> Any:
        """A stage's evaluation."""
        rows, rng = self.microbatch(number)
        pieces = self.stages.pieces[stage]
        return eval_forward(
            pieces, self.stage_rules(stage), stage_tree(pieces, self.kept),
            rows if stage == 0 else x, buffers, rows, rng,
        )  # fmt: skip

    def shapes(self, run: Callable[..., Any], buffers: PyTree) -> tuple[Any, Any]:
        """Shapes of what passes between stages, and of what the last one gives.

        Raises:
            PlanError: different stages pass different shapes on.
        """
        wires: list[Any] = []
        x: Any = None
        for stage in range(self.size):
            x = jax.eval_shape(lambda x, stage=stage: run(stage, 0, x, buffers), x)
            wires.append(x)
        for stage, wire in enumerate(wires[1:-1], 1):
            if shapes_of(wire) != shapes_of(wires[0]):
                raise PlanError(
                    "plan: pipe_backend='spmd' runs all stages as one program, so all pass on the"
                    f" same shapes; stage 0 gives {wires[0]}, stage {stage} gives {wire}: cut the"
                    " model elsewhere (Plan.partition), or use pipe_backend='mpmd'"
                )
        return wires[0], wires[-1]

    def forward(self, buffers: PyTree) -> tuple[tuple[Any, PyTree], Ends, PyTree]:
        """All forwards: what was received (and the buffers then), loss sums, new buffers."""

        def ends_of(out: Any) -> Any:
            return (float_mean(out.mean), float_means(out.metrics)) if isinstance(out, End) else out

        def probe(stage: int, number: Any, x: Any, buffers: PyTree) -> Any:
            return ends_of(self.run_forward(stage, number, x, buffers)[0])

        wire, ends = self.shapes(probe, buffers)

        def stage_branch(stage: int) -> Callable[..., Any]:
            def run(number: Any, x: Any, buffers: PyTree) -> Any:
                out, _, new = self.run_forward(stage, number, x, buffers)
                out = self.rules.fence(ends_of(out))
                last = stage == self.size - 1
                return (_zeros(wire), out, new) if last else (out, _zeros(ends), new)

            return run

        def idle(number: Any, x: Any, buffers: PyTree) -> Any:
            return _zeros(wire), _zeros(ends), buffers

        branches = [*(stage_branch(stage) for stage in range(self.size)), idle]

        def turn(carry: Any, t: jax.Array) -> tuple[Any, Any]:
            x, total, buffers = carry
            number = t - self.rank
            out, end, new = self._switch(branches, number, x, buffers)
            total = jax.tree.map(jnp.add, total, end)
            return (self._pass_on(out, 1), total, new), (x, buffers)

        start = (_zeros(wire), _zeros(ends), buffers)
        turns = jnp.arange(self.count + self.size - 1)
        (_, total, new), received = jax.lax.scan(turn, start, turns)
        return received, total, new

    def backward(self, received: tuple[Any, PyTree]) -> PyTree:
        """All backwards: sums of gradients of this rank's stage, zero for the others' leaves."""
        wire = jax.tree.map(lambda x: x[0], received[0])
        structure, like, _ = Floats.of(wire)
        del structure
        unit = jnp.ones((), jnp.float32)

        def stage_branch(stage: int) -> Callable[..., Any]:
            def run(number: Any, x: Any, buffers: PyTree, cotangent: Any, unscale: Any) -> Any:
                out, links, _ = self.run_forward(stage, number, x, buffers)
                rules = self.stage_rules(stage)
                links = rules.fence(links)
                if isinstance(out, End):
                    mean = rules.fence(out.mean)
                    cotangent, found = loss_seed(rules, mean, self.scale)
                    unscale = unit if found is None else found
                _, rng = self.microbatch(number)
                kept = stage_tree(self.stages.pieces[stage], self.kept)
                grads, back = train_backward(links, rules, kept, cotangent, rng)
                grads = unscaled(grads, unscale if self.scaled else None)
                back = back if stage else _zeros(like)
                return back, unscale, self._spread(stage, grads)

            return run

        shapes = jax.eval_shape(
            stage_branch(self.size - 1), 0, wire, jax.tree.map(lambda x: x[0], received[1]), like,
            unit,
        )[2]  # fmt: skip
        dtype = jnp.float32 if self.count > 1 else None
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, dtype or s.dtype), shapes)

        def idle(number: Any, x: Any, buffers: PyTree, cotangent: Any, unscale: Any) -> Any:
            return _zeros(like), unit, _zeros(shapes)

        branches = [*(stage_branch(stage) for stage in range(self.size)), idle]

        def turn(carry: Any, t: jax.Array) -> tuple[Any, None]:
            cotangent, unscale, sums = carry
            number = t - (self.size - 1 - self.rank)
            # A stage received microbatch m in turn m + rank.
            at = jnp.clip(number, 0, self.count - 1) + self.rank
            x, buffers = jax.tree.map(lambda leaf: _at(leaf, at), received)
            out, scale, grads = self._switch(branches, number, x, buffers, cotangent, unscale)
            sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, grads)
            return (*self._pass_on((out, scale), -1), sums), None

        turns = jnp.arange(self.count + self.size - 1)
        (_, _, sums), _ = jax.lax.scan(turn, (_zeros(like), unit, zeros), turns)
        return sums

    def evaluate(self, buffers: PyTree) -> Ends:
        """All forwards in evaluation mode, and the loss sums."""

        def sums(out: Any) -> Ends:
            mean, metrics = split_loss(out)
            return float_mean(mean), float_means(metrics)

        def add(total: Ends, end: Ends) -> tuple[Ends, None]:
            return jax.tree.map(jnp.add, total, end), None

        ends = self._all_forwards(buffers, sums)
        total, _ = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros_like(x[0]), ends), ends)
        return total

    def outputs(self, buffers: PyTree) -> PyTree:
        """All forwards in evaluation mode: what the last stage gives, on every rank."""
        one, _ = self.microbatch(0)
        ends = self._all_forwards(buffers, lambda out: require_rows(out, one))
        last = self.rank == self.size - 1

        def rows(leaf: jax.Array) -> jax.Array:
            found = leaf[self.size - 1 :]  # the turns in which the last stage ran
            return _of_one(found.reshape(-1, *found.shape[2:]), last)

        return jax.tree.map(rows, ends)

    def _all_forwards(self, buffers: PyTree, end_of: Callable[[Any], Any]) -> PyTree:
        """What the last stage ends with in each turn, zero where it is idle and on other ranks."""

        def probe(stage: int, number: Any, x: Any, buffers: PyTree) -> Any:
            out = self.run_eval(stage, number, x, buffers)
            return end_of(out) if stage == self.size - 1 else out

        wire, ends = self.shapes(probe, buffers)

        def stage_branch(stage: int) -> Callable[..., Any]:
            def run(number: Any, x: Any) -> Any:
                out = probe(stage, number, x, buffers)
                return (_zeros(wire), out) if stage == self.size - 1 else (out, _zeros(ends))

            return run

        branches = [*(stage_branch(stage) for stage in range(self.size)),
                    lambda number, x: (_zeros(wire), _zeros(ends))]  # fmt: skip

        def turn(x: Any, t: jax.Array) -> tuple[Any, Any]:
            out, end = self._switch(branches, t - self.rank, x)
            return self._pass_on(out, 1), end

        turns = jnp.arange(self.count + self.size - 1)
        _, found = jax.lax.scan(turn, _zeros(wire), turns)
        return found

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled."""
        return self.scale is not None and self.rules.plan.precision == "fp16"

    @property
    def rank(self) -> jax.Array:
        """This device's rank, which is its stage."""
        return jax.lax.axis_index(PIPE)

    def _switch(self, branches: Sequence[Callable[..., Any]], number: Any, *args: Any) -> Any:
        """Runs this rank's stage on a microbatch; the last branch where there is none."""
        there = (number >= 0) & (number < self.count)
        return jax.lax.switch(
            jnp.where(there, self.rank, self.size), branches, jnp.clip(number, 0, self.count - 1),
            *args,
        )  # fmt: skip

    def _pass_on(self, tree: PyTree, by: int) -> PyTree:
        pairs = [(i, i + by) for i in range(self.size) if 0 <= i + by < self.size]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPE, pairs), tree)

    def _spread(self, stage: int, grads: PyTree) -> PyTree:
        """A stage's gradients among all leaves of its rank, zero for the others."""
        pieces = {piece.layer.name: piece for piece in self.stages.pieces[stage]}
        own: dict[str, jax.Array] = {}
        map_splits(
            lambda split, grad: own.__setitem__(split.path, grad),
            trained(self.stage_rules(stage).layout), grads,
        )  # fmt: skip

        def spread(split: Split, leaf: jax.Array) -> jax.Array:
            grad = own.get(split.path)
            if grad is None or not split.stacked:
                shape = self._grad_shape(split, leaf)
                return jnp.zeros(shape, self._dtype(split)) if grad is None else grad
            rows = leaf.shape[0]
            piece = pieces[split.path.split("/")[0]]
            widths = [(piece.row, rows - piece.row - piece.num_layers)]
            return jnp.pad(grad, widths + [(0, 0)] * (grad.ndim - 1))

        layout = self.rules.layout
        return map_splits(spread, trained(layout), trained(layout, self.kept))

    def _grad_shape(self, split: Split, leaf: jax.Array) -> tuple[int, ...]:
        """Shape of a reduced gradient on this device."""
        shape = list(split.stored_shape)
        if split.stacked:
            shape[0] = leaf.shape[0]
        if split.dim is not None:
            shape[split.dim] //= self.rules.group.data
        return tuple(shape)

    def _dtype(self, split: Split) -> Any:
        plan = self.rules.plan
        wide = self.scaled or plan.reduce_dtype is not None
        return jnp.float32 if wide else compute_dtype(plan, split.dtype)

    def joined(self, sums: PyTree) -> PyTree:
        """Gradients of leaves that several ranks read, added over the ranks."""

        def join(split: Split, grad: jax.Array) -> jax.Array:
            return grad if split.stacked else sum_over(grad, PIPE, self.size, self.rules.group)

        return map_splits(join, trained(self.rules.layout), sums)

    def everywhere(self, ends: Ends) -> Ends:
        """What the last stage knows, on all devices."""
        group = self.rules.group
        known = jax.tree.map(lambda x: sum_over(x, PIPE, self.size, group), ends)
        total: Ends = all_reduce_tree(known, group)
        return total

    def agreed(self, old: PyTree, new: PyTree) -> PyTree:
        """One value of each buffer for all devices that hold it."""
        layers = [piece.layer for pieces in self.stages.pieces for piece in pieces]
        agreed = agreed_buffers(layers, old, new, self.rules.group)
        stages_of = {
            piece.layer.name: stage
            for stage, pieces in enumerate(self.stages.pieces)
            for piece in pieces
        }

        def owned(name: str, leaf: jax.Array) -> jax.Array:
            if self.stages.homes[name].rows:
                return leaf
            return _of_one(leaf, self.rank == stages_of[name])

        return {
            name: jax.tree.map(lambda leaf, name=name: owned(name, leaf), tree)
            for name, tree in agreed.items()
        }


def _of_one(leaf: jax.Array, there: Any) -> jax.Array:
    """The value of the rank where it is, on all of them."""
    mine = jnp.where(there, leaf, jnp.zeros_like(leaf))
    flag = leaf.dtype == jnp.bool_
    return jax.lax.psum(mine.astype(jnp.int32) if flag else mine, PIPE).astype(leaf.dtype)


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _at(leaf: jax.Array, k: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False)
