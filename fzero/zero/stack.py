"""A stack of identical layers as a loop, gathered one layer ahead and reduced one layer behind.

Forward, layer k computes while k+1 is gathered. Backward, layer k computes while k-1 is gathered
and the gradient of k+1 is reduce-scattered (`fzero.zero.prefetch`). Alive at any time: two
gathered layers and one whole gradient.

Stages that keep whole parameters run the same loops, with nothing to gather: the numbers then are
the same, bit for bit, because the programs are.

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
from fzero.links import Context, Stack
from fzero.pieces import Piece
from fzero.tree import PyTree
from fzero.zero.prefetch import look_ahead
from fzero.zero.rules import Rules
from fzero.zero.stack_layer import LayerProgram, StackLayers, at_row, join_rows, put_row


@partial(jax.tree_util.register_dataclass, data_fields=["program", "values"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class StackSaved:
    """What a stack leaves for its backward pass: never a gathered weight.

    Args:
        program: the differentiable program of one layer.
        values: per layer, what the backward pass reads, and this device's secondary shards of its
            weights (`Plan.secondary`): all layers stacked, or (all but the last stacked, the last).
    """

    program: LayerProgram
    values: tuple[Any, Any]

    @property
    def layer(self) -> Stack:
        """The stack."""
        return self.program.static.stack

    def secondary(self) -> list[PyTree]:
        """This device's secondary shards of weights."""
        return [values[1] for values in self.values if values is not None]


def stack_forward(
    rules: Rules, piece: Piece, shards: PyTree, x: Any, ctx: Context
) -> tuple[StackSaved, Any, PyTree, PyTree]:
    """Runs layers of a stack in training mode: `(saved, x, new buffers, held)`.

    `held` is all layers' weights as they were gathered, if the rules hold them; the backward pass
    then takes them for its shards.
    """
    program, start = LayerProgram.of(rules, piece, x, ctx)
    layers = program.static

    def run(weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        y, saved, buffers = program.forward(weights, x, k)
        return y, (saved, layers.secondary(weights)), buffers

    layers = layers.narrowed(shards, lambda weights: run(weights, start, 0))
    y, saved, buffers, held = _forward(layers, shards, start, run, rules.hold)
    if rules.hold:
        layers = dataclasses.replace(layers, rules=rules.held())
    found = StackSaved(dataclasses.replace(program, static=layers), saved)
    return found, program.joined(*y), _placed(piece, ctx.buffers, buffers), held


def stack_eval(
    rules: Rules, piece: Piece, shards: PyTree, x: Any, ctx: Context
) -> tuple[Any, PyTree]:
    """Runs layers of a stack in evaluation mode: `(x, buffers)`."""
    x, buffers, _ = stack_watched(rules, piece, shards, x, ctx, lambda _: ())
    return x, buffers


def stack_watched(
    rules: Rules, piece: Piece, shards: PyTree, x: Any, ctx: Context,
    look: Callable[[list[Any]], PyTree],
) -> tuple[Any, PyTree, PyTree]:  # fmt: skip
    """Runs layers of a stack, and keeps nothing but what is seen: `(x, buffers, seen)`.

    Args:
        rules: how to fetch.
        piece: the layers.
        shards: the stack's parameters as they are kept.
        x: what the first one gets.
        ctx: of the stack.
        look: what is wanted of the floating-point leaves that a layer gives; stacked in `seen`.
    """
    program, start = LayerProgram.of(rules, piece, x, ctx)

    def run(weights: PyTree, x: Any, k: Any) -> tuple[Any, Any, PyTree]:
        y, (y_rest, buffers) = program.apply(weights, x[0], program.shared, x[1], k)
        return (y, y_rest), (look(y), None), buffers

    layers = program.static.narrowed(shards, lambda weights: run(weights, start, 0))
    y, (looped, last), buffers, _ = _forward(layers, shards, start, run)
    seen = join_rows(looped and looped[0], last and last[0])
    return program.joined(*y), _placed(piece, ctx.buffers, buffers), seen


def _placed(piece: Piece, old: PyTree, new: PyTree) -> PyTree:
    """New buffers of a piece's layers among those of the other layers."""

    def put(before: jax.Array, after: jax.Array) -> jax.Array:
        if before.shape == after.shape:
            return after
        return jax.lax.dynamic_update_slice_in_dim(before, after, piece.row, 0)

    return jax.tree.map(put, old, new)


def _forward(
    layers: StackLayers,
    shards: PyTree,
    start: Any,
    run: Callable[[PyTree, Any, Any], tuple[Any, Any, PyTree]],
    hold: bool = False,
) -> tuple[Any, tuple[Any, Any], PyTree, PyTree]:
    """The forward loop: `(x, (saved of the looped layers, saved of the last), new buffers, held)`.

    `held` is all layers' weights, if asked for.
    """
    rules, num = layers.rules, layers.piece.num_layers
    fetch = partial(layers.fetch, shards)

    def compute(carry: Any, weights: PyTree, k: Any, outside: bool) -> tuple[Any, Any]:
        x, held = carry
        # A loop settles what it carries; outside of it a fence does.
        x = rules.fence(x) if outside else x
        x, saved, buffers = layers.of_whole(lambda weights: run(weights, x, k), weights)
        result = (saved if outside else _away(layers, saved)), buffers
        return (x, put_row(held, weights, k)), result

    held = None
    if hold:  # written in place: joining looped layers with the last would copy them
        shapes = jax.eval_shape(fetch, 0)
        held = jax.tree.map(lambda w: jnp.zeros((num, *w.shape), w.dtype), shapes)
    carry = (rules.fence(start), held)
    (x, held), (looped, last) = look_ahead(num, fetch, compute, carry, ahead=rules.prefetch)
    saved, buffers = zip(looped or (None, None), last or (None, None), strict=True)
    return rules.fence(x), saved, join_rows(*buffers), held


def stack_backward(given: StackSaved, shards: PyTree, cotangent: Any) -> tuple[PyTree, Any]:
    """Gradients of a piece's parameters (stacked) and of its input's floating-point leaves."""
    program, layers = given.program, given.program.static
    rules, num = layers.rules, layers.piece.num_layers

    # The fence keeps the compiler from reusing layers gathered in the forward pass, and from
    # gathering the last one again before its input exists.
    shards, (looped, last) = rules.fence((shards, given.values))

    def saved_at(which: int, k: Any) -> Any:
        return jax.tree.map(lambda leaf: compat.to_device(at_row(leaf, k)), looped[which])

    def fetch(k: Any) -> PyTree:
        return layers.refetch(shards, saved_at(1, k), k)

    def back(weights: PyTree, saved: Any, cts: Any) -> tuple[PyTree, Any]:
        if rules.halves:
            cts, values, rest = program.input_half(weights, saved, cts)
            return program.weight_half(rest, values, weights), cts
        grads, dx, ds = layers.of_whole(
            lambda weights: program.backward(weights, saved, cts[0]), weights
        )
        return grads, rules.fence((dx, [a + b for a, b in zip(cts[1], ds, strict=True)]))

    def at_once(cts: Any, weights: PyTree, k: Any, outside: bool) -> tuple[Any, PyTree]:
        grads, cts = back(weights, saved_at(0, k), cts)
        return cts, layers.scatter(grads)

    def behind(carry: Any, weights: PyTree, k: Any, outside: bool) -> tuple[Any, None]:
        cts, pending, done = carry
        done = put_row(done, layers.scatter(pending), k + 1)
        grads, cts = back(weights, saved_at(0, k), cts)
        return (cts, grads, done), None

    cts: Any = rules.fence(program.split_cotangent(cotangent))
    if last is None:  # the forward pass did not look ahead
        cts, (grads, _) = look_ahead(num, fetch, at_once, cts, ahead=False, reverse=True)
        return grads, program.join_cotangent(cts)
    pending, cts = back(layers.refetch(shards, last[1], num - 1), last[0], cts)
    carry = (cts, pending, layers.room(pending))
    if num > 1:
        carry, _ = look_ahead(num - 1, fetch, behind, carry, ahead=True, reverse=True)
    cts, pending, done = carry
    return put_row(done, layers.scatter(pending), 0), program.join_cotangent(cts)


def _away(layers: StackLayers, saved: Any) -> Any:
    """What a looped layer keeps, where the plan wants it. (Secondary shards stay at hand.)"""
    if layers.rules.plan.remat != "offload":
        return saved
    own, secondary = saved
    return jax.tree.map(lambda leaf: compat.to_host(leaf) if leaf.ndim else leaf, own), secondary
