"""Writing states of several processes: process 0 writes, leaves come to it one at a time.

A format's writer reads leaves in its own order, and may fail. So process 0 runs it on stand-ins,
which ask all processes for a leaf when it is read; the others answer until it is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from fzero.errors import CheckpointError
from fzero.hosts.agree import exchange
from fzero.hosts.join import watch
from fzero.processes import to_first
from fzero.state.require import require_alive
from fzero.state.train_state import TrainState


FIELDS = ("params", "opt_state", "buffers")
POINT = "tb.save"


def by_first(write: Callable[[Any], None], state_or_params: Any) -> None:
    """Calls a writer with a state; over several processes in process 0 alone.

    Args:
        write: takes the state, or what stands for it.
        state_or_params: a state or a params tree.

    Raises:
        CheckpointError: the writer failed, in every process alike; or a leaf is on devices of other
            processes, which `fz.join` has not joined.
    """
    tree = state_or_params
    if isinstance(tree, TrainState):
        require_alive(tree, "save")
        tree = {name: getattr(tree, name) for name in FIELDS}
    leaves, structure = jax.tree.flatten(tree)
    if jax.process_count() == 1:
        write(state_or_params)
        return
    if watch() is None:
        if all(map(_is_here, leaves)):
            if jax.process_index() == 0:
                write(state_or_params)
            return
        raise CheckpointError(
            "save: leaves of the state are on devices of other processes, which have not joined"
            " each other: expected fz.join() in every process, before the first use of a device"
        )
    if jax.process_index() != 0:
        _answer(leaves)
        return
    far = _Far()
    found = [leaf if _is_here(leaf) else Leaf(far, n, leaf) for n, leaf in enumerate(leaves)]
    stand_in = jax.tree.unflatten(structure, found)
    if isinstance(state_or_params, TrainState):
        stand_in = dataclasses.replace(state_or_params, compute=None, **stand_in)
    try:
        write(stand_in)
    except Exception as error:
        exchange(POINT, {"failed": str(error)})
        raise
    exchange(POINT, {"done": True})


def _is_here(leaf: Any) -> bool:
    """Whether process 0 can read a leaf without the others."""
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return True
    return leaf.is_fully_replicated and len(leaf.sharding.device_set) == jax.device_count()


def _answer(leaves: list[Any]) -> None:
    """Gives process 0 what it asks for, until it has written."""
    while True:
        said = exchange(POINT, None)[0]
        if "leaf" not in said:
            break
        to_first(leaves[said["leaf"]])
    if "failed" in said:
        raise CheckpointError(f"{said['failed']} (in process 0, which writes)")


class _Far:
    """The leaf that came last: the layers of a stack are asked for one by one."""

    def __init__(self) -> None:
        self._number, self._value = -1, np.empty(0)

    def value(self, number: int, leaf: jax.Array) -> np.ndarray[Any, Any]:
        if number != self._number:
            self._value = np.empty(0)
            exchange(POINT, {"leaf": number})
            found = to_first(leaf)
            assert found is not None
            self._number, self._value = number, found
        return self._value


class Leaf:
    """Stands for an array of several processes, in process 0.

    Args:
        far: where its value comes from.
        number: which one it is.
        array: the array.
        rows: the rows of dim 0 that it has, in order; all by default.
    """

    def __init__(
        self, far: _Far, number: int, array: jax.Array, rows: np.ndarray[Any, Any] | None = None
    ) -> None:
        self._far, self._number, self._array, self._rows = far, number, array, rows
        self.dtype, self.sharding, self.ndim = array.dtype, array.sharding, array.ndim
        self.shape = array.shape if rows is None else (len(rows), *array.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        whole = self._far.value(self._number, self._array)
        return np.asarray(whole if self._rows is None else whole[self._rows], dtype=dtype)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray) and self._rows is None:
            return Leaf(self._far, self._number, self._array, index)
        if isinstance(index, int) and self._rows is not None:
            return self._far.value(self._number, self._array)[self._rows[index]]
        return np.asarray(self)[index]

    def __int__(self) -> int:
        return int(np.asarray(self))
