"""Writing states of several processes: file by file, each by one of them in its turn.

A format's writer reads leaves in its own order, and may fail. So every process runs it on
stand-ins. Whose turn it is writes, and asks all for a leaf when it reads one; the others answer
until its part is written. A checkpoint of one file has one writer, process 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from fzero.errors import CheckpointError
from fzero.hosts.agree import exchange, require_same
from fzero.hosts.join import watch
from fzero.processes import to_process
from fzero.state.require import require_alive
from fzero.state.train_state import TrainState
from torch_bridge.formats.turns import ToldError, Turns


FIELDS = ("params", "opt_state", "buffers")
POINT = "tb.save"


def in_turns(write: Callable[[Any, Turns], None], state_or_params: Any) -> None:
    """Calls a writer with a state, in every process; each writes in its turn.

    Args:
        write: takes the state, or what stands for it, and the turns.
        state_or_params: a state or a params tree.

    Raises:
        CheckpointError: the writer failed in one process, in every one alike; or a leaf is on
            devices of other processes, which `fz.join` has not joined.
    """
    tree = state_or_params
    if isinstance(tree, TrainState):
        require_alive(tree, "save")
        tree = {name: getattr(tree, name) for name in FIELDS}
    leaves, structure = jax.tree.flatten(tree)
    if jax.process_count() == 1:
        write(state_or_params, Turns())
        return
    if watch() is None:
        if all(map(_is_here, leaves)):
            if jax.process_index() == 0:
                write(state_or_params, Turns())
            return
        raise CheckpointError(
            "save: leaves of the state are on devices of other processes, which have not joined"
            " each other: expected fz.join() in every process, before the first use of a device"
        )
    turns = _Together(leaves)
    found = [leaf if _is_here(leaf) else FarLeaf(turns, n, leaf) for n, leaf in enumerate(leaves)]
    stand_in = jax.tree.unflatten(structure, found)
    if isinstance(state_or_params, TrainState):
        stand_in = dataclasses.replace(state_or_params, compute=None, **stand_in)
    try:
        write(stand_in, turns)
        turns.told(None)
    except ToldError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:
        exchange(POINT, {"failed": str(error)})
        raise


def require_same_request(asked: Mapping[str, Any]) -> None:
    """Refuses what processes ask for differently: they would not write one checkpoint.

    Raises:
        CheckpointError: names the first argument that differs, and who has what.
    """
    if watch() is not None:
        require_same(POINT, {name: str(value) for name, value in asked.items()}, CheckpointError)


def _is_here(leaf: Any) -> bool:
    """Whether every process can read a leaf without the others."""
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
        return True
    return leaf.is_fully_replicated and len(leaf.sharding.device_set) == jax.device_count()


class _Together(Turns):
    """All processes: those that see the folder write, in turn.

    Args:
        leaves: of the state, the same in every process.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self._me = jax.process_index()
        self.leads = self._me == 0
        self._writers, self._mine, self._leaves = [0], False, leaves
        # The leaf that came last: the layers of a stack are asked for one by one.
        self._number, self._value = -1, np.empty(0)

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self._writers)

    @contextlib.contextmanager
    def turn(self, index: int = 0, of: int = 1) -> Iterator[bool]:
        writer = self._writers[index * self.count // of]
        if writer != self._me:
            self._forget()
            while (number := self.told(None)[writer]) is not None:
                to_process(self._leaves[number], writer)
            yield False
            return
        self._mine = True
        yield True
        self._mine = False
        self.told(None)

    def told(self, value: Any) -> list[Any]:
        found = exchange(POINT, {"said": value})
        for process, one in enumerate(found):
            if "failed" in one:
                raise ToldError(f"{one['failed']} (in process {process})")
        return [one["said"] for one in found]

    def folder(self, make: Callable[[], Path]) -> Path:
        if self.own_folders:
            self._writers = list(range(jax.process_count()))
            return make()
        path = Path(self.told(str(make()) if self.leads else None)[0])
        # On another host's own disk it is not.
        self._writers = [p for p, seen in enumerate(self.told(path.is_dir())) if seen]
        return path

    def value(self, number: int) -> np.ndarray[Any, Any]:
        """A leaf: of the process whose turn it is, or a number that all come to read."""
        leaf = self._leaves[number]
        if not self._mine:
            assert leaf.ndim == 0, "only the process whose turn it is reads arrays"
            found = to_process(leaf, 0)
            return np.asarray(self.told(None if found is None else found.item())[0], leaf.dtype)
        if number != self._number:
            self._forget()
            self.told(number)
            whole = to_process(leaf, self._me)
            assert whole is not None
            self._number, self._value = number, whole
        return self._value

    def _forget(self) -> None:
        self._number, self._value = -1, np.empty(0)


class FarLeaf:
    """Stands for an array of several processes.

    Args:
        turns: where its value comes from.
        number: which one it is.
        array: the array.
        rows: the rows of dim 0 that it has, in order; all by default.
    """

    def __init__(
        self,
        turns: _Together,
        number: int,
        array: jax.Array,
        rows: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self._turns, self._number, self._array, self._rows = turns, number, array, rows
        self.dtype, self.sharding, self.ndim = array.dtype, array.sharding, array.ndim
        self.shape = array.shape if rows is None else (len(rows), *array.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        whole = self._turns.value(self._number)
        return np.asarray(whole if self._rows is None else whole[self._rows], dtype=dtype)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray) and self._rows is None:
            return FarLeaf(self._turns, self._number, self._array, index)
        if isinstance(index, int) and self._rows is not None:
            return self._turns.value(self._number)[self._rows[index]]
        return np.asarray(self)[index]

    def __int__(self) -> int:
        return int(np.asarray(self))
