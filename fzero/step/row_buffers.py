"""Whether buffers count rows, of which each device has its own."""

from __future__ import annotations

from typing import Any

import jax

from fzero.batch import Inputs
from fzero.pieces import chain_forward, first_of_stack
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.buffers import follows_from, not_told, undeclared
from fzero.sharding.initial import initial_shapes, memo, tracing_context
from fzero.step.row_traces import row_numbers, traced_with_rows
from fzero.tree import named_leaves, shapes_of


def require_counts_told(blue: Blueprint, batch: Inputs) -> None:
    """Refuses buffers that nothing is said of, if they are others with other numbers of rows.

    A layer knows what it is given, but not where rows are in it: tokens of all rows may be one dim.
    So a chain is traced as a whole, with two numbers of rows. (A plain model is given the batch.)

    Raises:
        StateError: names a buffer.
    """
    model, buffers = blue.model, initial_shapes(blue.model)[1]
    asked = [
        (layer, name, leaf)
        for layer in model.layers
        if layer.name and layer.stateful
        for name, leaf in undeclared(layer, buffers[layer.name])
    ]
    if not asked or blue.group.row_shares == 1:
        return
    leaves, structure = jax.tree.flatten(batch.at(None))
    kinds = tuple((x.shape[1:], str(x.dtype)) for x in leaves)
    known, key = memo(model), ("counts", structure, kinds, tracing_context())
    if key not in known:
        counts = _counting(blue, batch)
        for layer, name, leaf in asked:
            if f"{layer.name}/{name}" in counts:
                raise not_told(layer, name, leaf)
        known[key] = True


def _counting(blue: Blueprint, batch: Inputs) -> set[str]:
    """The names of buffers that follow from buffers, and otherwise so with more rows."""

    def made(chain: Any, **about: Any) -> Any:
        forward = chain_forward(chain, first_of_stack, **about)
        return lambda *args, step: forward(*args, True, step)[1]

    shapes = initial_shapes(blue.model)
    found: list[list[str | None]] = []
    for rows in row_numbers((shapes, shapes_of(batch.shared)), batch.rows):
        traced = traced_with_rows(blue, batch, rows, rows, made)
        if isinstance(traced, Exception):
            return set()
        program, _ = traced
        given = program.inputs[-2 - len(program.outputs) : -2]  # before the key and the step
        found.append([follows_from(program, out, given) for out in program.outputs])
    names = [name for name, _ in named_leaves(shapes[1])]
    return {name for name, one, other in zip(names, *found, strict=True) if one != other}
