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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fzero.model import Context, Stack, apply_layer, split_shared
from fzero.tree import PyTree
from fzero.zero.partition import Split, is_split
from fzero.zero.rules import Rules
from fzero.zero.vjp import Floats, forward, remat_policy


@dataclass
class StackLink:
    """What a stack leaves for its backward pass.

    Args:
        stack: the stack.
        shards: its parameters as kept, stacked.
        run: the differentiable program of one layer.
        saved: per layer, what the backward pass reads: all layers stacked, or (all but the last
            stacked, the last).
    """

    stack: Stack
    shards: PyTree
    run: _LayerProgram
    saved: tuple[Any, Any]


class _LayerProgram:
    """One layer of a stack as `(weights, carry, shared) -> carry`, with gradients."""

    def __init__(self, rules: Rules, stack: Stack, x: Any, ctx: Context, number: int) -> None:
        carry, shared = split_shared(stack, x)
        self.carry, self.start, self.start_rest = Floats.of(carry)
        self.shared_def, self.shared, self.shared_rest = Floats.of(shared)
        self.rules, self.stack, self.ctx, self.number = rules, stack, ctx, number

    def apply(
        self, weights: PyTree, floats: list[Any], shared: list[Any], rest: list[Any], k: Any
    ) -> tuple[list[Any], tuple[list[Any], PyTree]]:
        """One layer: floats out, and (other leaves, new buffers)."""
        state = jax.tree.map(lambda leaf: _at(leaf, k), self.ctx.buffers)
        y, buffers = apply_layer(
            self.stack,
            weights,
            self.carry.join(floats, rest),
            self.shared_def.join(shared, self.shared_rest),
            self.ctx.at(self.number + k, state),
        )
        out, y_floats, y_rest = Floats.of(y)
        if out != self.carry:
            raise TypeError(
                f"stack {self.stack.name!r}: a layer's output must have its input's structure and"
                f" dtypes: expected {self.carry.treedef}, got {out.treedef}"
            )
        return y_floats, (y_rest, buffers)

    def forward(self, weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        """One layer in the forward pass: `(x, what to keep, new buffers)`."""
        floats, rest = x
        if self.rules.plan.remat == "layer":
            y, (y_rest, buffers) = self.apply(weights, floats, self.shared, rest, k)
            return (y, y_rest), (floats, rest, k), buffers
        run = jax.checkpoint(
            lambda w, f, s: self.apply(w, f, s, rest, k),
            policy=remat_policy(self.rules.plan.remat),
            prevent_cse=False,
        )
        y, (y_rest, buffers), pullback, residuals = forward(
            run, (weights, floats, self.shared), self._known(weights)
        )
        return (y, y_rest), (pullback, residuals), buffers

    def backward(self, weights: PyTree, kept: Any, cotangent: Any) -> tuple[Any, Any, Any]:
        """One layer in the backward pass: gradients of (weights, carry, shared)."""
        if self.rules.plan.remat == "layer":
            floats, rest, k = kept
            _, pull, _ = jax.vjp(
                lambda w, f, s: self.apply(w, f, s, rest, k), weights, floats, self.shared,
                has_aux=True,
            )  # fmt: skip
            grads: tuple[Any, Any, Any] = pull(cotangent)
            return grads
        pullback, residuals = kept
        grads = pullback.run(residuals, self._known(weights), cotangent)
        return grads

    def _known(self, weights: PyTree) -> list[Any]:
        return [
            *jax.tree.leaves(weights), *self.shared, *self.shared_rest,
            *jax.tree.leaves(self.ctx.batch),
        ]  # fmt: skip


def stack_forward(
    rules: Rules, stack: Stack, shards: PyTree, x: Any, ctx: Context, number: int
) -> tuple[StackLink, Any, PyTree]:
    """Runs a stack in training mode: `(link, x, new buffers)`."""
    program = _LayerProgram(rules, stack, x, ctx, number)
    y, saved, buffers = _loop(rules, stack, shards, program, program.forward)
    return StackLink(stack, shards, program, saved), y, buffers


def stack_eval(
    rules: Rules, stack: Stack, shards: PyTree, x: Any, ctx: Context, number: int
) -> tuple[Any, PyTree]:
    """Runs a stack in evaluation mode: `(x, buffers)`."""
    program = _LayerProgram(rules, stack, x, ctx, number)

    def run(weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        y, (y_rest, buffers) = program.apply(weights, x[0], program.shared, x[1], k)
        return (y, y_rest), (), buffers

    y, _, buffers = _loop(rules, stack, shards, program, run)
    return y, buffers


def _loop(
    rules: Rules,
    stack: Stack,
    shards: PyTree,
    program: _LayerProgram,
    run: Callable[[PyTree, Any, Any], tuple[Any, Any, PyTree]],
) -> tuple[Any, tuple[Any, Any], PyTree]:
    """The forward loop: `(x, (saved of the looped layers, saved of the last), new buffers)`."""
    start = rules.fence((program.start, program.start_rest))
    last = stack.num - 1
    if not rules.prefetch:

        def plain(x: Any, k: jax.Array) -> tuple[Any, Any]:
            y, saved, buffers = run(_fetch(rules, stack, shards, k), x, k)
            return y, (saved, buffers)

        x, (saved, buffers) = jax.lax.scan(plain, start, jnp.arange(stack.num))
        return _joined(program, rules.fence(x)), (saved, None), buffers

    def ahead(carry: Any, k: jax.Array) -> tuple[Any, Any]:
        x, weights = carry
        following = _fetch(rules, stack, shards, k + 1)
        y, saved, buffers = run(weights, x, k)
        return (y, following), (saved, buffers)

    carry = (start, _fetch(rules, stack, shards, 0))
    looped: Any = (None, None)
    if last:
        carry, looped = jax.lax.scan(ahead, carry, jnp.arange(last))
    x, saved, buffers = run(carry[1], rules.fence(carry[0]), jnp.int32(last))
    # A loop settles what it carries; outside of it a fence does.
    x = rules.fence(x)
    if last:
        buffers = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), looped[1], buffers)
    else:
        buffers = jax.tree.map(lambda b: b[None], buffers)
    return _joined(program, x), (looped[0], saved), buffers


def _joined(program: _LayerProgram, x: Any) -> Any:
    carry = program.carry.join(*x)
    if not program.stack.shared:
        return carry
    return {**carry, **program.shared_def.join(program.shared, program.shared_rest)}


def stack_backward(rules: Rules, link: StackLink, cotangent: Any) -> tuple[PyTree, Any]:
    """Gradients of a stack's parameters (stacked) and of its input's floating-point leaves."""
    stack, program = link.stack, link.run
    last = stack.num - 1
    carry_ct, shared_ct = _split_cotangent(program, cotangent)

    # The fence keeps the compiler from reusing layers gathered in the forward pass, and from
    # gathering the last one again before its input exists.
    shards, saved = rules.fence((link.shards, link.saved))

    def kept(k: Any, is_last: bool = False) -> Any:
        if is_last and saved[1] is not None:
            return saved[1]
        return jax.tree.map(lambda leaf: _at(leaf, k), saved[0])

    def weights_of(k: Any) -> PyTree:
        return _fetch(rules, stack, shards, k, again=True)

    def back(weights: PyTree, kept: Any, cts: Any) -> tuple[PyTree, Any]:
        grads, dx, ds = program.backward(weights, kept, cts[0])
        return grads, rules.fence((dx, [a + b for a, b in zip(cts[1], ds, strict=True)]))

    cts: Any = rules.fence((carry_ct, shared_ct))
    if not rules.prefetch or last == 0:

        def plain(cts: Any, k: jax.Array) -> tuple[Any, Any]:
            grads, cts = back(weights_of(k), kept(k, last == 0), cts)
            return cts, _scatter(rules, stack, grads)

        if last:
            cts, grads = jax.lax.scan(plain, cts, jnp.arange(stack.num), reverse=True)
        else:
            cts, grads = plain(cts, jnp.int32(0))
            grads = jax.tree.map(lambda g: g[None], grads)
        return grads, _join_cotangent(program, cts)

    def behind(carry: Any, k: jax.Array) -> tuple[Any, None]:
        cts, weights, pending, done = carry
        ahead = weights_of(k - 1)
        done = _put(done, _scatter(rules, stack, pending), k + 1)
        grads, cts = back(weights, kept(k), cts)
        return (cts, ahead, grads, done), None

    weights, ahead = weights_of(last), weights_of(last - 1)
    pending, cts = back(weights, kept(last, True), cts)
    done = _room(rules, stack, pending)
    carry = (cts, ahead, pending, done)
    if last > 1:
        carry, _ = jax.lax.scan(behind, carry, jnp.arange(1, last), reverse=True)
    cts, weights, pending, done = carry
    done = _put(done, _scatter(rules, stack, pending), 1)
    grads, cts = back(weights, kept(0), cts)
    done = _put(done, _scatter(rules, stack, grads), 0)
    return done, _join_cotangent(program, cts)


def _split_cotangent(program: _LayerProgram, cotangent: list[Any]) -> tuple[list[Any], list[Any]]:
    """A cotangent of the stack's output, as those of the carry and of the shared leaves."""
    if not program.stack.shared:
        return cotangent, []
    whole = program.carry.join(program.start, program.start_rest)
    whole = {**whole, **program.shared_def.join(program.shared, program.shared_rest)}
    structure, _, rest = Floats.of(whole)
    carry, shared = split_shared(program.stack, structure.join(cotangent, rest))
    return Floats.of(carry)[1], Floats.of(shared)[1]


def _join_cotangent(program: _LayerProgram, cts: tuple[list[Any], list[Any]]) -> list[Any]:
    if not program.stack.shared:
        return cts[0]
    carry = program.carry.join(cts[0], program.start_rest)
    return Floats.of({**carry, **program.shared_def.join(cts[1], program.shared_rest)})[1]


def _at(leaf: jax.Array, k: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, k, keepdims=False)


def _fetch(rules: Rules, stack: Stack, shards: PyTree, k: Any, again: bool = False) -> PyTree:
    """Layer k's parameters, ready for use."""
    splits = rules.layout[stack.name]
    return jax.tree.map(
        lambda split, leaf: rules.fetch(split, _at(leaf, k), again),
        splits,
        shards,
        is_leaf=is_split,
    )


def _scatter(rules: Rules, stack: Stack, grads: PyTree) -> PyTree:
    splits = rules.layout[stack.name]
    return jax.tree.map(rules.scatter, splits, grads, is_leaf=is_split)


def _room(rules: Rules, stack: Stack, grads: PyTree) -> PyTree:
    """Room for every layer's reduced gradient."""

    def room(split: Split, grad: jax.Array) -> jax.Array:
        shape = list(grad.shape)
        if rules.reduce and split.layer_dim is not None:
            shape[split.layer_dim] = (shape[split.layer_dim] + split.pad) // rules.group.data
        return jnp.zeros((stack.num, *shape), grad.dtype)

    return jax.tree.map(room, rules.layout[stack.name], grads, is_leaf=is_split)


def _put(done: PyTree, grads: PyTree, k: Any) -> PyTree:
    return jax.tree.map(
        lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, k, 0), done, grads
    )
