"""Shapes of a model's initial values, and the check that no two of them are one array."""

from __future__ import annotations

import jax

from fzero.errors import StateError
from fzero.model import Model
from fzero.tree import PyTree, aliased_leaves, shapes_of


def initial_shapes(model: Model) -> tuple[PyTree, PyTree]:
    """Shapes of a model's (params, buffers), without computing them.

    Raises:
        StateError: two leaves are the same array.
    """
    found: list[list[str]] = []
    if callable(model.init):
        init = model.init

        def probe(rng: jax.Array) -> PyTree:
            params, buffers = init(rng)
            found.extend(aliased_leaves({"params": params, "buffers": buffers}))
            return params, buffers

        shapes = jax.eval_shape(probe, jax.eval_shape(lambda: jax.random.key(0)))
    else:
        params, buffers = model.init
        found.extend(aliased_leaves({"params": params, "buffers": buffers}))
        shapes = shapes_of((params, buffers))
    if found:
        raise StateError(
            "init: these leaves are one array: "
            + "; ".join(" = ".join(paths) for paths in found)
            + ". A step gives its input's memory away, and one buffer cannot be given away twice."
            " Keep tied weights as one leaf that several layers read"
            ' (fz.Layer(..., reads={"table": "embed/table"})), or copy the array'
        )
    result: tuple[PyTree, PyTree] = shapes
    return result
