"""One layer of a stack as a program that a loop runs: its weights, and both its passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fzero.axes import FURTHER
from fzero.errors import PlanError
from fzero.links import Context, Stack, apply_layer, split_shared
from fzero.pieces import Piece
from fzero.programs.halves import Rest, first_half
from fzero.sharding.buffers import require_reductions
from fzero.sharding.split import Split, flat_splits, map_splits, trained, with_frozen
from fzero.tree import PyTree, named_leaves, shapes_of
from fzero.zero.float8_weights import Narrow, narrow_inputs, traced, with_narrow
from fzero.zero.rules import Rules
from fzero.zero.sequence_parallel import Handover
from fzero.zero.vjp import Floats, forward, remat_policy


@dataclass(frozen=True, eq=False)
class StackLayers:
    """Layers of a stack: what is fixed when they are traced, and how their weights come and go.

    Args:
        rules: how weights are fetched and gradients reduced.
        piece: which layers.
        carry: the structure of what each takes and gives.
        like: its shapes: (floating-point leaves, others).
        shared: the structure of what all of them read.
        train: whether in training mode.
        narrow: paths of the leaves that are gathered in 8 bits.
    """

    rules: Rules
    piece: Piece
    carry: Floats
    like: tuple[list[Any], list[Any]]
    shared: Floats
    train: bool
    narrow: frozenset[str] = frozenset()

    @property
    def stack(self) -> Stack:
        """The stack itself."""
        assert isinstance(self.piece.layer, Stack)
        return self.piece.layer

    @property
    def splits(self) -> PyTree:
        """A `Split` for each of the stack's leaves."""
        return self.rules.splits[self.piece.layer.name]

    @property
    def handover(self) -> Handover:
        """How values go from layer to layer."""
        return Handover.of(self.rules.plan, self.splits)

    def fetch(self, shards: PyTree, k: Any) -> PyTree:
        """Layer k's parameters, ready for use."""
        row, narrow = self.piece.row, self._in_8_bits(shards, k, again=False)
        return map_splits(
            lambda split, leaf: narrow.get(split.path)
            or self.rules.fetch(split, at_row(leaf, row + k)),
            self.splits, shards,
        )  # fmt: skip

    def refetch(self, shards: PyTree, secondary: PyTree, k: Any) -> PyTree:
        """Layer k's parameters, ready for use in a backward pass."""
        row, narrow = self.piece.row, self._in_8_bits(shards, k, again=True)
        return map_splits(
            lambda split, leaf, shard: narrow.get(split.path)
            or self.rules.refetch(split, at_row(leaf, row + k), shard),
            self.splits, shards, secondary,
        )  # fmt: skip

    def _in_8_bits(self, shards: PyTree, k: Any, again: bool) -> dict[str, Narrow]:
        """Those of layer k's parameters that are gathered in 8 bits, by path."""
        pairs = zip(flat_splits(self.splits), jax.tree.leaves(shards), strict=True)
        own = [(split, leaf) for split, leaf in pairs if split.path in self.narrow]
        if not own:
            return {}
        splits = [split for split, _ in own]
        rows = [at_row(leaf, self.piece.row + k) for _, leaf in own]
        found = self.rules.fetch_narrow(splits, rows, again)
        return {split.path: narrow for split, narrow in zip(splits, found, strict=True)}

    def narrowed(self, shards: PyTree, run: Callable[[PyTree], PyTree]) -> StackLayers:
        """The same, with those leaves in `narrow` that `run(weights)` reads in 8 bits only."""
        splits = flat_splits(self.splits)
        if not any(self.rules.may_narrow(split) for split in splits):
            return self
        shapes = jax.eval_shape(lambda: self.fetch(shards, 0))
        program, _ = traced(run, shapes)
        only = narrow_inputs(program, program.inputs)
        paths = [split.path for split, var in zip(splits, program.inputs, strict=True)
                 if var in only and self.rules.may_narrow(split)]  # fmt: skip
        return replace(self, narrow=frozenset(paths))

    def of_whole(self, function: Callable[[PyTree], PyTree], weights: PyTree) -> Any:
        """`function(weights)` of a layer's fetched parameters."""
        dtypes = [split.compute for split in flat_splits(self.splits)]
        return with_narrow(function, weights, dtypes)

    def secondary(self, weights: PyTree) -> PyTree:
        """This device's secondary shards of a layer's parameters."""
        return map_splits(self.rules.secondary_shard, self.splits, weights)

    def scatter(self, grads: PyTree) -> PyTree:
        """The reduced gradients of a layer."""
        return map_splits(self.rules.scatter, trained(self.splits), grads)

    def room(self, grads: PyTree) -> PyTree:
        """Room for every layer's reduced gradient."""
        rules, num = self.rules, self.piece.num_layers

        def room(split: Split, grad: jax.Array) -> jax.Array:
            shape = list(grad.shape)
            dim = split.layer_dim if rules.reduce else None
            if dim is not None:
                shape[dim] = (shape[dim] + split.pad) // rules.group.data
            zeros = jnp.zeros((num, *shape), rules.reduced_dtype(split, grad.dtype))
            return rules.group.pin(zeros, split.spec(dim is not None, FURTHER, zeros.ndim))

        return map_splits(room, trained(self.splits), grads)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shared", "shared_rest", "batch", "rng", "buffers"],
    meta_fields=["static"],
)
@dataclass(frozen=True, eq=False)
class LayerProgram:
    """One layer of a stack as `(weights, carry, shared) -> carry`, with gradients.

    A pytree, like everything that a forward pass leaves for its backward pass, so that the two may
    be compiled apart.
    """

    static: StackLayers
    shared: list[Any]
    shared_rest: list[Any]
    batch: Any  # (rows, step number), or `None`
    rng: jax.Array | None
    buffers: PyTree

    @staticmethod
    def of(rules: Rules, piece: Piece, x: Any, ctx: Context) -> tuple[LayerProgram, Any]:
        """The program, and what the first layer gets."""
        assert isinstance(piece.layer, Stack)
        carry, shared = split_shared(piece.layer, x)
        structure, start, rest = Floats.of(carry)
        shared_def, floats, shared_rest = Floats.of(shared)
        like = shapes_of((start, rest))
        static = StackLayers(rules, piece, structure, like, shared_def, ctx.train)
        start, inputs = static.handover.given(start), (ctx.batch, ctx.step)
        made = LayerProgram(static, floats, shared_rest, inputs, ctx.rng, ctx.buffers)
        return made, (start, rest)

    def apply(
        self, weights: PyTree, floats: list[Any], shared: list[Any], rest: list[Any], k: Any
    ) -> tuple[list[Any], tuple[list[Any], PyTree]]:
        """One layer: floats out, and (other leaves, new buffers)."""
        static = self.static
        piece = static.piece
        state = jax.tree.map(lambda leaf: at_row(leaf, piece.row + k), self.buffers)
        assert self.rng is not None
        carry = static.carry.join(static.handover.taken(floats), rest)
        fixed = static.shared.join(shared, self.shared_rest)
        ctx = static.rules.context(self.batch, self.rng, static.train, None)
        ctx = ctx.at(piece.number + k, state)
        if not static.rules.one_device:
            require_reductions(static.stack, weights, {**carry, **fixed} if fixed else carry, ctx)
        y, buffers = apply_layer(static.stack, weights, carry, fixed, ctx)
        out, y_floats, y_rest = Floats.of(y)
        _require_alike(static, out.join(y_floats, y_rest))
        return static.handover.given(y_floats), (y_rest, buffers)

    def forward(self, weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        """One layer in the forward pass: `(x, what to keep, new buffers)`."""
        floats, rest = x
        plan = self.static.rules.plan
        if plan.keeps_inputs:
            y, (y_rest, buffers) = self.apply(weights, floats, self.shared, rest, k)
            return (y, y_rest), (floats, rest, k), buffers
        own = trained(self.static.splits, weights)
        y, (y_rest, buffers), pullback, residuals = forward(
            lambda w, f, s: self.apply(self._with_frozen(w, weights), f, s, rest, k),
            (own, floats, self.shared),
            self._known(weights),
            remat_policy(plan.remat),
        )
        return (y, y_rest), (pullback, residuals), buffers

    def backward(self, weights: PyTree, saved: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        """One layer in the backward pass: gradients of (trained weights, carry, shared)."""
        if self.static.rules.plan.keeps_inputs:
            floats, rest, k = saved
            _, pull, _ = jax.vjp(
                lambda w, f, s: self.apply(self._with_frozen(w, weights), f, s, rest, k),
                trained(self.static.splits, weights), floats, self.shared, has_aux=True,
            )  # fmt: skip
            grads: tuple[Any, Any, Any] = pull(cotangent)
            return grads
        pullback, residuals = saved
        grads = pullback.run(residuals, self._known(weights), cotangent)
        return grads

    def input_half(self, weights: PyTree, saved: Any, cts: Any) -> tuple[Any, list[Any], Rest]:
        """The first half of `backward`: new cotangents, and what the second half takes."""
        leaves, treedef = jax.tree.flatten(weights)
        rules, rng = self.static.rules, self.rng
        assert rng is not None

        def whole(leaves: list[Any]) -> Any:
            grads, dx, ds = self.backward(jax.tree.unflatten(treedef, leaves), saved, cts[0])
            return jax.tree.leaves(grads), (dx, ds)

        (dx, ds), values, rest = first_half(whole, leaves, lambda run: rules.apart(run, rng))
        return rules.fence((dx, [a + b for a, b in zip(cts[1], ds, strict=True)])), values, rest

    def weight_half(self, rest: Rest, values: list[Any], weights: PyTree) -> PyTree:
        """The second half of `backward`: gradients of the weights."""
        leaves, own = jax.tree.leaves(weights), trained(self.static.splits, weights)
        assert self.rng is not None
        grads = self.static.rules.apart(lambda: rest.run(values, leaves), self.rng)
        return jax.tree.unflatten(jax.tree.structure(own), grads)

    def joined(self, floats: list[Any], rest: list[Any]) -> Any:
        """The stack's output from its last layer's."""
        static = self.static
        carry = static.carry.join(floats, rest)
        if not static.stack.shared:
            return carry
        return {**carry, **static.shared.join(self.shared, self.shared_rest)}

    def split_cotangent(self, cotangent: list[Any]) -> tuple[list[Any], list[Any]]:
        """A cotangent of the stack's output, as those of the carry and of the shared leaves."""
        if not self.static.stack.shared:
            return cotangent, []
        structure, _, rest = Floats.of(self.joined(*self.static.like))
        carry, shared = split_shared(self.static.stack, structure.join(cotangent, rest))
        return Floats.of(carry)[1], Floats.of(shared)[1]

    def join_cotangent(self, cts: tuple[list[Any], list[Any]]) -> list[Any]:
        """The cotangent of the stack's input from those of the carry and of the shared leaves."""
        if not self.static.stack.shared:
            return cts[0]
        carry = self.static.carry.join(cts[0], self.static.like[1])
        return Floats.of({**carry, **self.static.shared.join(cts[1], self.shared_rest)})[1]

    def _with_frozen(self, own: PyTree, weights: PyTree) -> PyTree:
        return with_frozen(self.static.splits, own, weights)

    def _known(self, weights: PyTree) -> list[Any]:
        return [
            *jax.tree.leaves(weights), *self.shared, *self.shared_rest,
            *jax.tree.leaves(self.batch),
        ]  # fmt: skip


def at_row(leaf: jax.Array, k: Any) -> jax.Array:
    """Row k of a leaf of all layers."""
    return jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False)


def put_row(done: PyTree, one: PyTree, k: Any) -> PyTree:
    """All layers' arrays with layer k's put in; `None` where nobody wants them."""
    if done is None:
        return None
    return jax.tree.map(
        lambda all_, own: jax.lax.dynamic_update_index_in_dim(all_, own, k, 0), done, one
    )


def join_rows(looped: PyTree, last: PyTree) -> PyTree:
    """All layers' arrays: of the looped layers, and of the last one where it is not looped."""
    if last is None:
        return looped
    if looped is None:
        return jax.tree.map(lambda x: jnp.asarray(x)[None], last)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.asarray(b)[None]]), looped, last)


def _require_alike(layers: StackLayers, found: PyTree) -> None:
    """Refuses a layer that gives something else than it takes: the next one takes it.

    Raises:
        PlanError: names the stack, the leaf, and what may have widened it.
    """
    name, expected = layers.stack.name, layers.carry.join(*layers.like)
    have: Any
    want: Any
    have, want = (jax.tree.structure(tree) for tree in (found, expected))
    if have != want:
        raise PlanError(
            f"stack {name!r}: a layer gives what the next one takes: expected {want}, got {have}"
        )
    pairs = zip(named_leaves(expected), jax.tree.leaves(found), strict=True)
    for (path, before), after in pairs:
        if before.shape == after.shape and jnp.result_type(before) == jnp.result_type(after):
            continue  # (a NumPy array of 64 bits is one of 32 to jax)
        keep = layers.rules.plan.keep_fp32
        why = (
            f"; keep_fp32={keep!r} leaves parameters in float32, which widens what they meet: end"
            " the layer with .astype(x.dtype), or keep less"
            if keep and after.dtype != before.dtype
            else ""
        )
        raise PlanError(
            f"stack {name!r}: a layer gives what the next one takes: expected"
            f" {before.dtype.name}{list(before.shape)}{f' of {path}' if path else ''}, got"
            f" {after.dtype.name}{list(after.shape)}{why}"
        )
