"""A chain of links, or consecutive pieces of one, run forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fzero.keys import layer_key
from fzero.links import (
    Context,
    Layer,
    Mean,
    Stack,
    apply_layer,
    layer_params,
    of_link,
    require_takes,
    split_loss,
    split_shared,
    with_buffers,
)
from fzero.tree import PyTree


InitFn = Callable[[jax.Array], tuple[PyTree, PyTree]]
LossFn = Callable[..., tuple[Any, PyTree, dict[str, Any]]]


@dataclass(frozen=True)
class Piece:
    """A link of a chain, or some consecutive layers of a stack.

    Args:
        layer: the link.
        start: first layer of the stack (0 for a `Layer`).
        stop: one past the last (1 for a `Layer`).
        number: number of its first layer in the chain; random keys are folded from it.
        row: where its first layer lies on dim 0 of the arrays at hand.
    """

    layer: Layer | Stack
    start: int
    stop: int
    number: int
    row: int = 0

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return self.stop - self.start


def whole_chain(chain: Sequence[Layer | Stack]) -> tuple[Piece, ...]:
    """All links of a chain, uncut."""
    found: list[Piece] = []
    number = 0
    for layer in chain:
        found.append(Piece(layer, 0, layer.num_layers, number))
        number += layer.num_layers
    return tuple(found)


def run_chain(
    pieces: Sequence[Piece],
    x: Any,
    buffers: PyTree,
    run_piece: Callable[[Piece, Any, PyTree], tuple[Any, PyTree]],
) -> tuple[Any, PyTree]:
    """Runs a chain, or consecutive pieces of one, forward: `(output, new buffers)`.

    Args:
        pieces: what to run.
        x: what the first one gets.
        buffers: buffers of all links.
        run_piece: `run_piece(piece, x, its link's buffers) -> (x, new buffers)`.
    """
    if not pieces[0].layer.name:  # a plain Model: one link that owns everything
        return run_piece(pieces[0], x, buffers)
    new = dict(buffers)
    for piece in pieces:
        layer = piece.layer
        x, state = run_piece(piece, x, buffers.get(layer.name))
        if layer.stateful:
            new[layer.name] = state
    return x, new


def chain_init(chain: tuple[Layer | Stack, ...]) -> InitFn:
    """Initial values of a chain from those of its links."""

    def init(rng: jax.Array) -> tuple[PyTree, PyTree]:
        params: dict[str, PyTree] = {}
        buffers: dict[str, PyTree] = {}
        for index, layer in enumerate(chain):
            if layer.init is None:
                continue
            require_takes(layer.init, "init(rng)", of_link(layer))
            key = layer_key(rng, index)
            if isinstance(layer, Stack):
                values = jax.vmap(layer.init)(jax.random.split(key, layer.num))
            else:
                values = layer.init(key)
            if layer.stateful:
                pair = with_buffers(layer, values, "init", "params")
                params[layer.name], buffers[layer.name] = pair
            else:
                params[layer.name] = values
        return params, buffers

    return init


def chain_forward(
    chain: Sequence[Layer | Stack], run_stack: Callable[..., Any] | None = None, **about: Any
) -> Callable[..., tuple[Any, PyTree]]:
    """A chain as one function on whole parameters: `(output, new buffers)`.

    Args:
        chain: its links.
        run_stack: what is done with a stack, its params, input, context and number: all of its
            layers are run, one after the other, where it is not said (or `first_of_stack`).
        about: what else their `Context` says, such as `dtype`.
    """
    pieces = whole_chain(chain)

    def forward(
        params: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array, train: bool,
        step: Any = None,
    ) -> tuple[Any, PyTree]:  # fmt: skip
        def run_piece(piece: Piece, x: Any, state: PyTree) -> tuple[Any, PyTree]:
            layer = piece.layer
            weights = layer_params(layer, params)
            ctx = Context(batch, rng, train, state, step=step, **about)
            if isinstance(layer, Stack):
                return (run_stack or _scan_stack)(layer, weights, x, ctx, piece.number)
            return apply_layer(layer, weights, x, {}, ctx.at(piece.number))

        return run_chain(pieces, batch, buffers, run_piece)

    return forward


def chain_loss(chain: Sequence[Layer | Stack], **about: Any) -> LossFn:
    """A chain that ends in a loss, as one function on whole parameters; `about` as above."""
    forward = chain_forward(chain, **about)

    def loss(
        params: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array, train: bool,
        step: Any = None,
    ) -> tuple[Mean, PyTree, dict[str, Any]]:  # fmt: skip
        x, new = forward(params, buffers, batch, rng, train, step)
        out, metrics = split_loss(x)
        return out, new, metrics

    return loss


def _scan_stack(
    stack: Stack, params: PyTree, x: Any, ctx: Context, number: int
) -> tuple[Any, PyTree]:
    carry, shared = split_shared(stack, x)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        weights, state, index = xs
        return apply_layer(stack, weights, carry, shared, ctx.at(number + index, state))

    carry, new = jax.lax.scan(body, carry, (params, ctx.buffers, jnp.arange(stack.num)))
    return ({**carry, **shared} if shared else carry), new


def first_of_stack(
    stack: Stack, params: PyTree, x: Any, ctx: Context, number: int
) -> tuple[Any, PyTree]:
    """The first layer alone, and its new buffers."""
    carry, shared = split_shared(stack, x)
    weights, state = jax.tree.map(lambda leaf: leaf[0], (params, ctx.buffers))
    carry, new = apply_layer(stack, weights, carry, shared, ctx.at(number, state))
    return ({**carry, **shared} if shared else carry), new
