"""Calls of a converted module outside of `jax.jit`, compiled as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from torch_bridge.structure.retrace import Call


_Run = Callable[[Call, Mapping[str, Any], Mapping[str, Any]], list[Any]]


class CallPrograms:
    """One program for each graph and the shapes of its inputs.

    Operator by operator a forward takes some twenty times as long, and compiles each of them.
    """

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, list[Any]]] = {}

    def run(
        self, run: _Run, call: Call, params: Mapping[str, Any], buffers: Mapping[str, Any]
    ) -> list[Any]:
        """What `run` gives: arrays, and what is none as it is (a size, None)."""
        values = (*call.inputs.values(), *params.values(), *buffers.values())
        if not all(isinstance(value, np.ndarray | jax.Array) for value in values):
            return run(call, params, buffers)  # it knows what is wrong with the others
        key = (id(call.mode), *((x.shape, x.dtype) for x in call.inputs.values()))
        if key not in self._made:
            self._made[key] = _compiled(run, call._replace(inputs={}))
        program, others = self._made[key]
        arrays = iter(program(call.inputs, dict(params), dict(buffers)))
        return [next(arrays) if leaf is _ARRAY else leaf for leaf in others]


_ARRAY = object()


def _compiled(run: _Run, call: Call) -> tuple[Any, list[Any]]:
    """A program, and the output's leaves that are no arrays, known when it has run."""
    others: list[Any] = []

    @jax.jit
    def program(inputs: Any, params: Any, buffers: Any) -> list[Any]:
        leaves = run(call._replace(inputs=inputs), params, buffers)
        others[:] = [_ARRAY if isinstance(x, np.ndarray | jax.Array) else x for x in leaves]
        return [x for x in leaves if isinstance(x, np.ndarray | jax.Array)]

    return program, others
