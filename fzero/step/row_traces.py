"""A model traced with other numbers of rows than its batch has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from fzero.batch import Inputs
from fzero.exchange.rows import told_rows
from fzero.precision import COMPUTE_DTYPES
from fzero.programs.jaxprs import Program
from fzero.programs.trace_memo import one_trace
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.initial import initial_shapes
from fzero.sharding.split import map_splits
from fzero.tree import PyTree, shape_of, shapes_of


def traced_with_rows(
    blue: Blueprint,
    batch: Inputs,
    rows: int,
    every: int | None,
    made: Callable[..., Callable[..., Any]],
) -> tuple[Program, PyTree] | Exception:
    """A function of a chain as a program for so many rows, and what it gives; or why not.

    Args:
        blue: the blueprint.
        batch: its batch: arrays or shapes.
        rows: how many rows the program has.
        every: how many all devices have; `None` where the rows are those of all.
        made: makes the function of a chain and what its `Context` says beside; it is given params,
            buffers, the batch and a key, and the step by its name.
    """
    model, plan = blue.model, blue.plan
    own, buffers = initial_shapes(model)  # of a pipeline's layers without the rows that fill up
    params = map_splits(lambda s, x: jax.ShapeDtypeStruct(x.shape, s.compute), blue.params, own)
    run = made(model.layers, dtype=COMPUTE_DTYPES[plan.precision], keep_fp32=plan.keep_fp32)

    def of_rows(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), shape_of(x).dtype)

    def opened(batch: Inputs, params: PyTree, buffers: PyTree, rng: jax.Array, step: Any) -> Any:
        return run(params, buffers, batch.batch, rng, step=step)

    key, step = jax.eval_shape(lambda: (jax.random.key(0), np.int32(0)))
    given = shapes_of(batch.map_rows(of_rows).at(None)), params, buffers, key, step
    try:
        told = nullcontext() if every is None else told_rows(rows, every)
        with one_trace(), jax.numpy_dtype_promotion("standard"), told:
            closed, shapes = jax.make_jaxpr(opened, return_shape=True)(*given)
    except Exception as error:  # it takes other numbers of rows, or wants a mesh
        return error
    return Program(closed.jaxpr, closed.consts), shapes


def row_numbers(shapes: PyTree, rows: PyTree) -> tuple[int, int]:
    """Prime numbers that divide no other dim: of a device's rows, and of those of all."""
    dims = [dim for leaf in jax.tree.leaves(shapes) for dim in leaf.shape]
    dims += [dim for leaf in jax.tree.leaves(rows) for dim in leaf.shape[1:]]
    free = (
        p for p in itertools.count(199) if _is_prime(p) and all(dim == 0 or dim % p for dim in dims)
    )
    return next(free), next(free)


def _is_prime(number: int) -> bool:
    return all(number % other for other in range(2, math.isqrt(number) + 1))
