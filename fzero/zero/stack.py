"""A stack of identical layers as a loop, gathered one layer ahead and reduced one layer behind.

Forward, layer k computes while k+1 is gathered. Backward, layer k computes while k-1 is gathered
and the gradient of k+1 is reduce-scattered. A compiler can only overlap what does not depend on
each other within one loop body, so both are carried around the loop; the first and last layers,
which have no neighbour on one side, stand outside it. Alive at any time: two gathered layers and
one whole gradient.

Stages that keep whole parameters run the same loops, with nothing to gather: the numbers then are
the same, bit for bit, because the programs are. Where nothing can run beside computation (CPUs, a
single device; `Plan.prefetch`) the loops are plain: each layer is gathered when it is used.

Between the passes only each layer's input is kept, plus what `Plan.remat` asks for; never weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fzero import compat
from fzero.model import Context, Piece, Stack, apply_layer, split_shared
from fzero.precision import COMPUTE_DTYPES
from fzero.programs.halves import Rest, first_half
from fzero.sharding.buffers import require_reductions
from fzero.sharding.split import Split, map_splits, trained, with_frozen
from fzero.tree import PyTree, shapes_of
from fzero.zero.rules import Rules
from fzero.zero.vjp import Floats, forward, remat_policy


@dataclass(frozen=True, eq=False)
class _Static:
    """What is fixed when a stack is traced: which layers, and the structure of what flows."""

    rules: Rules
    piece: Piece
    carry: Floats
    like: tuple[list[Any], list[Any]]
    shared: Floats
    train: bool

    @property
    def stack(self) -> Stack:
        """The stack itself."""
        assert isinstance(self.piece.layer, Stack)
        return self.piece.layer

    @property
    def layout(self) -> PyTree:
        """A `Split` for each of the stack's leaves."""
        return self.rules.layout[self.piece.layer.name]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shared", "shared_rest", "batch", "rng", "buffers"],
    meta_fields=["static"],
)
@dataclass(frozen=True, eq=False)
class _LayerProgram:
    """One layer of a stack as `(weights, carry, shared) -> carry`, with gradients.

    A pytree, like everything that a forward pass leaves for its backward pass, so that the two may
    be compiled apart.
    """

    static: _Static
    shared: list[Any]
    shared_rest: list[Any]
    batch: Any  # (rows, step number), or `None`
    rng: jax.Array | None
    buffers: PyTree

    @staticmethod
    def of(rules: Rules, piece: Piece, x: Any, ctx: Context) -> tuple[_LayerProgram, Any]:
        """The program, and what the first layer gets."""
        assert isinstance(piece.layer, Stack)
        carry, shared = split_shared(piece.layer, x)
        structure, start, rest = Floats.of(carry)
        shared_def, floats, shared_rest = Floats.of(shared)
        like = shapes_of((start, rest))
        static = _Static(rules, piece, structure, like, shared_def, ctx.train)
        inputs = ctx.batch, ctx.step
        made = _LayerProgram(static, floats, shared_rest, inputs, ctx.rng, ctx.buffers)
        return made, (start, rest)

    def apply(
        self, weights: PyTree, floats: list[Any], shared: list[Any], rest: list[Any], k: Any
    ) -> tuple[list[Any], tuple[list[Any], PyTree]]:
        """One layer: floats out, and (other leaves, new buffers)."""
        static = self.static
        piece = static.piece
        state = jax.tree.map(lambda leaf: _at(leaf, piece.row + k), self.buffers)
        assert self.rng is not None
        carry = static.carry.join(floats, rest)
        fixed = static.shared.join(shared, self.shared_rest)
        (batch, step), dtype = self.batch, COMPUTE_DTYPES[static.rules.plan.precision]
        ctx = Context(batch, self.rng, static.train, None, dtype, step)
        ctx = ctx.at(piece.number + k, state)
        if not static.rules.alone:
            require_reductions(static.stack, weights, {**carry, **fixed} if fixed else carry, ctx)
        y, buffers = apply_layer(static.stack, weights, carry, fixed, ctx)
        out, y_floats, y_rest = Floats.of(y)
        if out != static.carry:
            raise TypeError(
                f"stack {static.stack.name!r}: a layer's output must have its input's structure and"
                f" dtypes: expected {static.carry.treedef}, got {out.treedef}"
            )
        return y_floats, (y_rest, buffers)

    def forward(self, weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        """One layer in the forward pass: `(x, what to keep, new buffers)`."""
        floats, rest = x
        plan = self.static.rules.plan
        if plan.keeps_inputs:
            y, (y_rest, buffers) = self.apply(weights, floats, self.shared, rest, k)
            return (y, y_rest), (floats, rest, k), buffers
        own = trained(self.static.layout, weights)
        y, (y_rest, buffers), pullback, residuals = forward(
            lambda w, f, s: self.apply(self._with_frozen(w, weights), f, s, rest, k),
            (own, floats, self.shared),
            self._known(weights),
            remat_policy(plan.remat),
        )
        return (y, y_rest), (pullback, residuals), buffers

    def backward(self, weights: PyTree, kept: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        """One layer in the backward pass: gradients of (trained weights, carry, shared)."""
        if self.static.rules.plan.keeps_inputs:
            floats, rest, k = kept
            _, pull, _ = jax.vjp(
                lambda w, f, s: self.apply(self._with_frozen(w, weights), f, s, rest, k),
                trained(self.static.layout, weights), floats, self.shared, has_aux=True,
            )  # fmt: skip
            grads: tuple[Any, Any, Any] = pull(cotangent)
            return grads
        pullback, residuals = kept
        grads = pullback.run(residuals, self._known(weights), cotangent)
        return grads

    def input_half(self, weights: PyTree, kept: Any, cts: Any) -> tuple[Any, list[Any], Rest]:
        """The first half of `backward`: new cotangents, and what the second half takes."""
        leaves, treedef = jax.tree.flatten(weights)
        rules, rng = self.static.rules, self.rng
        assert rng is not None

        def whole(leaves: list[Any]) -> Any:
            grads, dx, ds = self.backward(jax.tree.unflatten(treedef, leaves), kept, cts[0])
            return jax.tree.leaves(grads), (dx, ds)

        (dx, ds), values, rest = first_half(whole, leaves, lambda run: rules.apart(run, rng))
        return rules.fence((dx, [a + b for a, b in zip(cts[1], ds, strict=True)])), values, rest

    def weight_half(self, rest: Rest, values: list[Any], weights: PyTree) -> PyTree:
        """The second half of `backward`: gradients of the weights."""
        leaves, own = jax.tree.leaves(weights), trained(self.static.layout, weights)
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
        return with_frozen(self.static.layout, own, weights)

    def _known(self, weights: PyTree) -> list[Any]:
        return [
            *jax.tree.leaves(weights), *self.shared, *self.shared_rest,
            *jax.tree.leaves(self.batch),
        ]  # fmt: skip


@partial(jax.tree_util.register_dataclass, data_fields=["program", "saved"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class StackLink:
    """What a stack leaves for its backward pass: never a gathered weight.

    Args:
        program: the differentiable program of one layer.
        saved: per layer, what the backward pass reads, and this device's parts of its weights
            (`Plan.secondary`): all layers stacked, or (all but the last stacked, the last).
    """

    program: _LayerProgram
    saved: tuple[Any, Any]

    def parts(self) -> list[PyTree]:
        """This device's parts of weights."""
        return [saved[1] for saved in self.saved if saved is not None]

    def with_inputs(self, batch: PyTree, rng: jax.Array | None) -> StackLink:
        """The link with the microbatch's rows and key put in (or taken out: `None`)."""
        program = dataclasses.replace(self.program, batch=batch, rng=rng)
        return StackLink(program, self.saved)


def stack_forward(
    rules: Rules, piece: Piece, shards: PyTree, x: Any, ctx: Context
) -> tuple[StackLink, Any, PyTree, PyTree]:
    """Runs layers of a stack in training mode: `(link, x, new buffers, held)`.

    `held` is all layers' weights as they were gathered, if the rules hold them; the backward pass
    then takes them for its shards.
    """
    program, start = _LayerProgram.of(rules, piece, x, ctx)

    def run(weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        y, saved, buffers = program.forward(weights, x, k)
        return y, (saved, _parts(program.static, weights)), buffers

    y, saved, buffers, held = _loop(program.static, shards, start, run, rules.hold)
    out = program.joined(*y), _placed(piece, ctx.buffers, buffers), held
    if rules.hold:
        static = dataclasses.replace(program.static, rules=rules.held())
        link = StackLink(dataclasses.replace(program, static=static), saved)
        return link, *out
    return StackLink(program, saved), *out


def stack_eval(
    rules: Rules, piece: Piece, shards: PyTree, x: Any, ctx: Context
) -> tuple[Any, PyTree]:
    """Runs layers of a stack in evaluation mode: `(x, buffers)`."""
    program, start = _LayerProgram.of(rules, piece, x, ctx)

    def run(weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        y, (y_rest, buffers) = program.apply(weights, x[0], program.shared, x[1], k)
        return (y, y_rest), ((), None), buffers

    y, _, buffers, _ = _loop(program.static, shards, start, run)
    return program.joined(*y), _placed(piece, ctx.buffers, buffers)


def _placed(piece: Piece, old: PyTree, new: PyTree) -> PyTree:
    """New buffers of a piece's layers among those of the other layers."""

    def place(before: jax.Array, after: jax.Array) -> jax.Array:
        if before.shape == after.shape:
            return after
        return jax.lax.dynamic_update_slice_in_dim(before, after, piece.row, 0)

    return jax.tree.map(place, old, new)


def _loop(
    static: _Static,
    shards: PyTree,
    start: Any,
    run: Callable[[PyTree, Any, Any], tuple[Any, Any, PyTree]],
    hold: bool = False,
) -> tuple[Any, tuple[Any, Any], PyTree, PyTree]:
    """The forward loop: `(x, (saved of the looped layers, saved of the last), new buffers, held)`.

    `held` is all layers' weights, if asked for.
    """
    rules, num = static.rules, static.piece.num_layers
    start = rules.fence(start)
    last = num - 1
    if not rules.prefetch:

        def plain(x: Any, k: jax.Array) -> tuple[Any, Any]:
            weights = _fetch(static, shards, k)
            y, saved, buffers = run(weights, x, k)
            return y, (_away(static, saved), buffers, weights if hold else None)

        x, (saved, buffers, held) = jax.lax.scan(plain, start, jnp.arange(num))
        return rules.fence(x), (saved, None), buffers, held

    def ahead(carry: Any, k: jax.Array) -> tuple[Any, Any]:
        x, weights, held = carry
        following = _fetch(static, shards, k + 1)
        y, saved, buffers = run(weights, x, k)
        return (y, following, _put(held, weights, k)), (_away(static, saved), buffers)

    first = _fetch(static, shards, 0)
    # Room for all, written in place: joining looped layers with the last would copy them.
    room = jax.tree.map(lambda w: jnp.zeros((num, *w.shape), w.dtype), first) if hold else None
    carry = (start, first, room)
    looped: Any = (None, None)
    if last:
        carry, looped = jax.lax.scan(ahead, carry, jnp.arange(last))
    x, weights, held = carry
    x, saved, buffers = run(weights, rules.fence(x), jnp.int32(last))
    # A loop settles what it carries; outside of it a fence does.
    x = rules.fence(x)
    if last:
        buffers = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), looped[1], buffers)
    else:
        buffers = jax.tree.map(lambda b: b[None], buffers)
    return x, (looped[0], saved), buffers, _put(held, weights, last)


def stack_backward(link: StackLink, shards: PyTree, cotangent: Any) -> tuple[PyTree, Any]:
    """Gradients of a piece's parameters (stacked) and of its input's floating-point leaves."""
    program = link.program
    static = program.static
    rules = static.rules
    last = static.piece.num_layers - 1

    # The fence keeps the compiler from reusing layers gathered in the forward pass, and from
    # gathering the last one again before its input exists.
    shards, saved = rules.fence((shards, link.saved))

    def own(which: int, k: Any, is_last: bool) -> Any:
        if is_last and saved[1] is not None:
            return saved[1][which]
        return jax.tree.map(lambda leaf: compat.to_device(_at(leaf, k)), saved[0][which])

    def kept(k: Any, is_last: bool = False) -> Any:
        return own(0, k, is_last)

    def weights_of(k: Any, is_last: bool = False) -> PyTree:
        return _refetch(static, shards, own(1, k, is_last), k)

    def back(weights: PyTree, kept: Any, cts: Any) -> tuple[PyTree, Any]:
        if rules.halves:
            cts, values, rest = program.input_half(weights, kept, cts)
            return program.weight_half(rest, values, weights), cts
        grads, dx, ds = program.backward(weights, kept, cts[0])
        return grads, rules.fence((dx, [a + b for a, b in zip(cts[1], ds, strict=True)]))

    cts: Any = rules.fence(program.split_cotangent(cotangent))
    if not rules.prefetch or last == 0:

        def plain(cts: Any, k: jax.Array) -> tuple[Any, Any]:
            grads, cts = back(weights_of(k, last == 0), kept(k, last == 0), cts)
            return cts, _scatter(static, grads)

        if last:
            cts, grads = jax.lax.scan(plain, cts, jnp.arange(last + 1), reverse=True)
        else:
            cts, grads = plain(cts, jnp.int32(0))
            grads = jax.tree.map(lambda g: g[None], grads)
        return grads, program.join_cotangent(cts)

    def behind(carry: Any, k: jax.Array) -> tuple[Any, None]:
        cts, weights, pending, done = carry
        ahead = weights_of(k - 1)
        done = _put(done, _scatter(static, pending), k + 1)
        grads, cts = back(weights, kept(k), cts)
        return (cts, ahead, grads, done), None

    weights, ahead = weights_of(last, True), weights_of(last - 1)
    pending, cts = back(weights, kept(last, True), cts)
    done = _room(static, pending)
    carry = (cts, ahead, pending, done)
    if last > 1:
        carry, _ = jax.lax.scan(behind, carry, jnp.arange(1, last), reverse=True)
    cts, weights, pending, done = carry
    done = _put(done, _scatter(static, pending), 1)
    grads, cts = back(weights, kept(0), cts)
    done = _put(done, _scatter(static, grads), 0)
    return done, program.join_cotangent(cts)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["program", "values", "rest", "parts"],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class StackHalf:
    """What the weights' gradients of a stack take, once its input's gradient is known.

    Args:
        program: the program of one layer.
        values: per layer, stacked, what the second half reads.
        rest: the second half of one layer.
        parts: per layer, stacked, this device's parts of its weights.
    """

    program: _LayerProgram
    values: list[Any]
    rest: Rest
    parts: PyTree

    def with_inputs(self, batch: PyTree, rng: jax.Array | None) -> StackHalf:
        """As `StackLink.with_inputs`."""
        program = dataclasses.replace(self.program, batch=batch, rng=rng)
        return dataclasses.replace(self, program=program)


def stack_input_backward(
    link: StackLink, shards: PyTree, cotangent: Any
) -> tuple[StackHalf, list[Any]]:
    """The first half of `stack_backward`: cotangents of the input's floating-point leaves."""
    program, static = link.program, link.program.static
    rules, last = static.rules, static.piece.num_layers - 1
    shards, saved = rules.fence((shards, link.saved))
    before = link.saved
    cell: list[tuple[Rest, list[int | None]]] = []

    def back(weights: PyTree, kept: Any, cts: Any) -> tuple[Any, list[Any]]:
        cts, values, rest = program.input_half(weights, kept, cts)
        # What is only passed on need not be copied through the loop.
        index = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(kept))}
        cell.append((rest, [index.get(id(value)) for value in values]))
        return cts, [value for value in values if id(value) not in index]

    def plain(cts: Any, xs: Any) -> tuple[Any, Any]:
        k, (kept, parts) = xs
        return back(_refetch(static, shards, parts, k), kept, cts)

    def ahead(carry: Any, xs: Any) -> tuple[Any, Any]:
        (k, (kept, _)), (cts, weights) = xs, carry
        following = weights_of(jnp.maximum(k - 1, 0))
        cts, values = back(weights, kept, cts)
        return (cts, following), values

    def weights_of(k: Any) -> PyTree:
        parts = jax.tree.map(lambda leaf: _at(leaf, k), saved[0][1])
        return _refetch(static, shards, parts, k)

    layers = jnp.arange(last + 1)
    if saved[1] is not None:  # the last layer's stand apart where the forward pass looked ahead
        saved = before = (_joined(saved[0], saved[1]), None)
    cts = rules.fence(program.split_cotangent(cotangent))
    if rules.prefetch:
        start = (cts, weights_of(last))
        (cts, _), values = jax.lax.scan(ahead, start, (layers, saved[0]), reverse=True)
    else:
        cts, values = jax.lax.scan(plain, cts, (layers, saved[0]), reverse=True)
    rest, marks = cell[-1]
    own, computed = jax.tree.leaves(before[0][0]), iter(values)
    values = [next(computed) if mark is None else own[mark] for mark in marks]
    # The second half reads none of what the first did.
    bare = dataclasses.replace(program, shared=[], shared_rest=[], buffers=None)
    return StackHalf(bare, values, rest, before[0][1]), program.join_cotangent(cts)


def stack_weight_backward(half: StackHalf, shards: PyTree) -> PyTree:
    """The second half of `stack_backward`: gradients of a piece's parameters, stacked."""
    static = half.program.static

    def plain(_: None, xs: Any) -> tuple[None, PyTree]:
        k, values, parts = xs
        # Where no gradient reads the weights, as in chains of matmuls, the gathers fall away.
        weights = _refetch(static, shards, parts, k)
        return None, _scatter(static, half.program.weight_half(half.rest, values, weights))

    layers = jnp.arange(static.piece.num_layers)
    _, grads = jax.lax.scan(plain, None, (layers, half.values, half.parts), reverse=True)
    return grads


def _joined(looped: Any, last: Any) -> Any:
    if looped is None:
        return jax.tree.map(lambda x: jnp.asarray(x)[None], last)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.asarray(b)[None]]), looped, last)


def _away(static: _Static, saved: Any) -> Any:
    """What a looped layer keeps, where the plan wants it. (Parts of weights stay at hand.)"""
    if static.rules.plan.remat != "offload":
        return saved
    own, parts = saved
    return jax.tree.map(lambda leaf: compat.to_host(leaf) if leaf.ndim else leaf, own), parts


def _at(leaf: jax.Array, k: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False)


def _fetch(static: _Static, shards: PyTree, k: Any) -> PyTree:
    """Layer k's parameters, ready for use."""
    rules, piece = static.rules, static.piece
    return map_splits(
        lambda split, leaf: rules.fetch(split, _at(leaf, piece.row + k)), static.layout, shards
    )


def _parts(static: _Static, weights: PyTree) -> PyTree:
    """This device's parts of a layer's parameters."""
    return map_splits(static.rules.part, static.layout, weights)


def _refetch(static: _Static, shards: PyTree, parts: PyTree, k: Any) -> PyTree:
    """Layer k's parameters, ready for use in a backward pass."""
    rules, piece = static.rules, static.piece
    return map_splits(
        lambda split, leaf, part: rules.refetch(split, _at(leaf, piece.row + k), part),
        static.layout, shards, parts,
    )  # fmt: skip


def _scatter(static: _Static, grads: PyTree) -> PyTree:
    return map_splits(static.rules.scatter, trained(static.layout), grads)


def _room(static: _Static, grads: PyTree) -> PyTree:
    """Room for every layer's reduced gradient."""
    rules, num = static.rules, static.piece.num_layers

    def room(split: Split, grad: jax.Array) -> jax.Array:
        shape = list(grad.shape)
        if rules.reduce and split.layer_dim is not None:
            shape[split.layer_dim] = (shape[split.layer_dim] + split.pad) // rules.group.data
        zeros = jnp.zeros((num, *shape), rules.reduced_dtype(split, grad.dtype))
        return rules.group.pin(zeros, split.lies(False))

    return map_splits(room, trained(static.layout), grads)


def _put(done: PyTree, one: PyTree, k: Any) -> PyTree:
    """All layers' arrays with layer k's put in; `None` where nobody wants them."""
    if done is None:
        return None
    return jax.tree.map(
        lambda all_, own: jax.lax.dynamic_update_index_in_dim(all_, own, k, 0), done, one
    )
