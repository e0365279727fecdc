"""The backward pass of a stack in two halves, which pipelines may run at different times."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fzero.links import Stack
from fzero.programs.halves import Rest
from fzero.tree import PyTree
from fzero.zero.prefetch import look_ahead
from fzero.zero.stack import StackSaved
from fzero.zero.stack_layer import LayerProgram, at_row, join_rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["program", "values", "rest", "secondary"],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class StackHalf:
    """What the weights' gradients of a stack take, once its input's gradient is known.

    Args:
        program: the program of one layer.
        values: per layer, stacked, what the second half reads.
        rest: the second half of one layer.
        secondary: per layer, stacked, this device's secondary shards of its weights.
    """

    program: LayerProgram
    values: list[Any]
    rest: Rest
    secondary: PyTree

    @property
    def layer(self) -> Stack:
        """The stack."""
        return self.program.static.stack


def stack_input_backward(
    given: StackSaved, shards: PyTree, cotangent: Any
) -> tuple[StackHalf, list[Any]]:
    """The first half of `stack_backward`: cotangents of the input's floating-point leaves."""
    program, layers = given.program, given.program.static
    rules = layers.rules
    shards, saved = rules.fence((shards, given.values))
    before, saved = join_rows(*given.values), join_rows(*saved)
    cell: list[tuple[Rest, list[int | None]]] = []

    def fetch(k: Any) -> PyTree:
        secondary = jax.tree.map(lambda leaf: at_row(leaf, k), saved[1])
        return layers.refetch(shards, secondary, k)

    def back(cts: Any, weights: PyTree, k: Any, outside: bool) -> tuple[Any, list[Any]]:
        layer_saved = jax.tree.map(lambda leaf: at_row(leaf, k), saved[0])
        cts, values, rest = program.input_half(weights, layer_saved, cts)
        # What is only passed on need not be copied through the loop.
        index = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(layer_saved))}
        cell.append((rest, [index.get(id(value)) for value in values]))
        return cts, [value for value in values if id(value) not in index]

    cts = rules.fence(program.split_cotangent(cotangent))
    num, ahead = layers.piece.num_layers, rules.prefetch
    cts, (found, _) = look_ahead(num, fetch, back, cts, ahead=ahead, reverse=True, outside=False)
    rest, passed_on = cell[-1]
    own, computed = jax.tree.leaves(before[0]), iter(found)
    values = [next(computed) if i is None else own[i] for i in passed_on]
    # The second half reads none of what the first did.
    bare = dataclasses.replace(program, shared=[], shared_rest=[], buffers=None)
    return StackHalf(bare, values, rest, before[1]), program.join_cotangent(cts)


def stack_weight_backward(half: StackHalf, shards: PyTree) -> PyTree:
    """The second half of `stack_backward`: gradients of a piece's parameters, stacked."""
    layers = half.program.static

    def plain(_: None, xs: Any) -> tuple[None, PyTree]:
        k, values, secondary = xs
        # Where no gradient reads the weights, as in chains of matmuls, the gathers fall away.
        weights = layers.refetch(shards, secondary, k)
        return None, layers.scatter(half.program.weight_half(half.rest, values, weights))

    xs = (jnp.arange(layers.piece.num_layers), half.values, half.secondary)
    _, grads = jax.lax.scan(plain, None, xs, reverse=True)
    return grads
