"""One microbatch through a chain on one device: forward, and backward with reduced gradients.

The chain is differentiated link by link, by hand. That is what decides when a leaf is gathered and
dropped, and when its gradient is reduced; autodiff of the whole would keep every gathered layer.

- A leaf outside a stack is gathered once for the forward pass, whoever reads it, dropped, and
  gathered once more for the backward pass. Its gradient is reduced once, when all readers are done.
- A stack's layers are gathered and reduced one by one (`fzero.zero.stack`).
- With `Plan(gather="lazy")` the first forward pass of a step gathers so, and holds what it
  gathered (`FetchedWeights.whole`): all other passes read that.

All stages run this code. Where parameters are kept whole, gathering is the identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from fzero.batch import opened
from fzero.links import Stack
from fzero.pieces import Piece, run_chain
from fzero.precision import cast_input
from fzero.tree import PyTree
from fzero.zero.layer import (
    End,
    LayerSaved,
    SecondHalf,
    layer_backward,
    layer_forward,
    layer_input_backward,
    layer_weight_backward,
)
from fzero.zero.rules import Rules
from fzero.zero.stack import StackSaved, stack_backward, stack_eval, stack_forward
from fzero.zero.stack_halves import StackHalf, stack_input_backward, stack_weight_backward
from fzero.zero.weights import FetchedWeights, Secondary, Sums, trained_leaves


Saved = list[LayerSaved | StackSaved]


def train_forward(
    pieces: Sequence[Piece],
    fetched: FetchedWeights,
    x: Any,
    buffers: PyTree,
    batch: PyTree,
    rng: jax.Array,
    *,
    first: bool = True,
    last: bool = True,
) -> tuple[Any, Saved, PyTree]:
    """Runs a chain, or a stage of one, in training mode and keeps what the backward pass needs.

    Args:
        pieces: what to run.
        fetched: new; holds what the pass gathered of all parameters afterwards, where its rules
            hold that. What follows, the backward pass first, reads `fetched.whole()` with
            `rules.held()`.
        x: what the first piece gets; the batch at the start of the chain.
        buffers: buffers before this microbatch.
        batch: this device's rows, or `Inputs`.
        rng: the microbatch's key.
        first: whether the chain starts here, so that `x` needs no gradient.
        last: whether it ends here, with the loss.

    Returns:
        `(out, saved, new buffers)`; `out` is an `End` where the chain ends.
    """
    rules, kept = fetched.rules, fetched.kept
    x, inputs = entered(rules, pieces[0], x), opened(batch)
    saved: Saved = []
    end: list[End] = []
    # Whether a gradient is to go further back than the piece at hand.
    before = not first

    def run_piece(piece: Piece, x: Any, state: PyTree) -> tuple[Any, PyTree]:
        nonlocal before
        ctx, layer = rules.context(inputs, rng, True, state), piece.layer
        learns = bool(trained_leaves(rules, layer))
        one: LayerSaved | StackSaved
        if isinstance(layer, Stack):
            one, x, state, held = stack_forward(rules, piece, kept[layer.name], x, ctx)
            if rules.hold:
                fetched.stacks[layer.name] = held
        else:
            one, x, state = layer_forward(
                layer, fetched, x, ctx.at(piece.number),
                differentiable=before,
                end=end if last and piece is pieces[-1] else None,
            )  # fmt: skip
        if before or learns:  # otherwise all so far is frozen, and has no backward pass
            saved.append(one)
        before = before or learns
        return x, state

    out, new = run_chain(pieces, x, buffers, run_piece)
    return end[0] if last else out, saved, new


def entered(rules: Rules, first: Piece, x: Any) -> Any:
    """A chain's input in the compute dtype. A plain model reads its batch as it is."""
    x, _ = opened(x)
    starts = first.number == 0 and bool(first.layer.name)
    return cast_input(rules.plan, x) if starts else x


def secondary_shards(saved: Saved) -> list[jax.Array]:
    """What this device keeps of weights for the backward pass (`Plan.secondary`)."""
    own = [one.secondary if isinstance(one, LayerSaved) else one.secondary() for one in saved]
    return jax.tree.leaves(own)


_Links = TypeVar("_Links", bound=Sequence[Any])


def without_inputs(saved: _Links) -> _Links:
    """Saved values or halves without the microbatch's rows and key, which live as long anyway."""
    return with_inputs(saved, None, None)


def with_inputs(saved: _Links, batch: PyTree, rng: jax.Array | None) -> _Links:
    """Saved values or halves with the microbatch's rows and key, as they were traced."""
    known = None if batch is None else opened(batch)

    def of(one: Any) -> Any:
        if not isinstance(one, StackSaved | StackHalf):
            return one
        program = dataclasses.replace(one.program, batch=known, rng=rng)
        return dataclasses.replace(one, program=program)

    found: Any = [of(one) for one in saved]
    return found


def train_backward(
    saved: Saved, rules: Rules, kept: PyTree, cotangent: Any, rng: jax.Array | None = None
) -> tuple[PyTree, list[Any]]:
    """Gradients of every trained parameter read, reduced as the rules say.

    Args:
        saved: what the forward pass left.
        rules: those of the forward pass; `rules.splits` has the parameters that these layers read.
        kept: as in the forward pass.
        cotangent: of the chain's output: a scalar for the loss's total where the chain ends, else
            one array per floating-point leaf.
        rng: the microbatch's key, where the backward pass is compiled in halves.

    Returns:
        `(gradients, cotangents of the input's floating-point leaves)`. Gradients are in the
        compute dtype: shards for split leaves if reduced now, otherwise whole.
    """
    fetched = FetchedWeights(rules, kept, _secondary(saved))
    sums = Sums(rules, [one.layer for one in saved])
    for one in reversed(saved):
        if isinstance(one, StackSaved):
            name = one.layer.name
            grads, cotangent = stack_backward(one, kept[name], cotangent)
            sums.add_stack(name, grads)
        else:
            cotangent = layer_backward(fetched, one, cotangent, sums, rng)
    return sums.finish(), cotangent


def _secondary(saved: Sequence[LayerSaved | StackSaved | SecondHalf | StackHalf]) -> Secondary:
    """What a pass before kept of leaves outside stacks."""
    own = [one.secondary for one in saved if isinstance(one, LayerSaved | SecondHalf)]
    return {path: shard for secondary in own for path, shard in secondary.items()}


Halves = list[SecondHalf | StackHalf]


def input_backward(
    saved: Saved, rules: Rules, kept: PyTree, cotangent: Any, rng: jax.Array
) -> tuple[Halves, list[Any]]:
    """The first half of `train_backward`: cotangents of the input, and what is left to do."""
    fetched = FetchedWeights(rules, kept, _secondary(saved))
    halves: Halves = []
    half: SecondHalf | StackHalf
    for one in reversed(saved):
        if isinstance(one, StackSaved):
            shards = kept[one.layer.name]
            half, cotangent = stack_input_backward(one, shards, cotangent)
        else:
            half, cotangent = layer_input_backward(fetched, one, cotangent, rng)
        halves.append(half)
    return halves, cotangent


def weight_backward(halves: Halves, rules: Rules, kept: PyTree, rng: jax.Array) -> PyTree:
    """The second half of `train_backward`: gradients of every parameter read, reduced."""
    fetched = FetchedWeights(rules, kept, _secondary(halves))
    sums = Sums(rules, [half.layer for half in halves])
    for half in halves:
        if isinstance(half, StackHalf):
            name = half.layer.name
            sums.add_stack(name, stack_weight_backward(half, kept[name]))
        else:
            layer_weight_backward(fetched, half, sums, rng)
    return sums.finish()


def eval_forward(
    pieces: Sequence[Piece],
    rules: Rules,
    kept: PyTree,
    x: Any,
    buffers: PyTree,
    batch: PyTree,
    rng: jax.Array,
) -> Any:
    """Runs a chain, or a stage of one, in evaluation mode; new buffers are dropped.

    Returns:
        What the last piece gives; `split_loss` takes it apart where the chain ends.
    """
    # An evaluation is of the weights that are saved and exported, not of their 8-bit image.
    rules = dataclasses.replace(rules, exact=True)
    fetched = FetchedWeights(rules, kept)
    x, inputs = entered(rules, pieces[0], x), opened(batch)

    def run_piece(piece: Piece, x: Any, state: PyTree) -> tuple[Any, PyTree]:
        ctx, layer = rules.context(inputs, rng, False, state), piece.layer
        if isinstance(layer, Stack):
            return stack_eval(rules, piece, kept[layer.name], x, ctx)
        return fetched.apply(layer, x, ctx.at(piece.number))

    out, _ = run_chain(pieces, x, buffers, run_piece)
    return out
