"""Checkpoints: a state on disk, whole or not there at all.

Orbax writes them: every process its own shards, in the background, into a directory that gets its
name when it is complete. So a kill at any moment leaves the checkpoint before. What is written is
each leaf as it is kept, and how that was: the plan and the mesh. `restore` brings every leaf from
there to wherever another plan keeps it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fzero.axes import zero_sizes
from fzero.checkpoint import claim, objects
from fzero.checkpoint.metadata import FORMAT, absolute_path, array_key, sealed
from fzero.checkpoint.seal import SEAL, seal_of
from fzero.checkpoint.shards import is_elsewhere
from fzero.checkpoint.urls import is_url
from fzero.compat import key_bits
from fzero.errors import CheckpointError, PlanError, warn
from fzero.hosts.activity import doing
from fzero.hosts.join import fail
from fzero.plan import Plan
from fzero.sharding.relayout import ways_of
from fzero.state.init import key_of
from fzero.state.require import require_alive, require_arrays, require_on_mesh
from fzero.state.train_state import TrainState
from fzero.storage import disk
from fzero.storage.disk import DiskArray
from fzero.storage.tiers import Slabs, settled
from fzero.tree import leaf_bytes, named_leaves


# What follows from other fields is not written.
FIELDS = ("params", "opt_state", "ema", "buffers", "loss_scale", "grads")
_OPEN: dict[str, _Open] = {}  # what writes into a path, until it has written
_LOCKS: dict[str, threading.RLock] = {}  # threads that save to one path do so one after another
_HELD: set[str] = set()
_LAST: dict[str, int] = {}  # the number that this process wrote last into a directory
_LOST: list[str] = []  # paths of which, at exit, the last checkpoint could not be written
_ANY = ""  # saves to any path begin one after another: orbax knows them by the last one's number
# A forked process has none of the threads that write or hold a lock here, and would wait for ever.
os.register_at_fork(after_in_child=_OPEN.clear)
os.register_at_fork(after_in_child=_LOCKS.clear)
os.register_at_fork(after_in_child=_HELD.clear)
# Python 3.12.0 and 3.12.1 start no thread once the main one has ended: a writer could not finish.
_EXIT_IS_ABRUPT = (3, 12) <= sys.version_info < (3, 12, 2)


@dataclass(frozen=True)
class _Open:
    """What writes a checkpoint, and which; none when it was opened and has not begun."""

    writer: Any
    number: int | None = None


@doing("save")
def save(
    path: str | os.PathLike[str],
    state: TrainState,
    plan: Plan,
    *,
    data_position: Any = None,
    keep: int | None = None,
    asynchronous: bool = True,
) -> int:
    """Writes a checkpoint. The state stays as it is and may be stepped at once.

    When the one before failed in the background, and no `wait` said so, this one is written all the
    same; a `UserWarning` names the one that failed and why. (In a directory that several processes
    write, it is an error: the others cannot go on from a checkpoint that one did not write.)

    Args:
        path: a directory for checkpoints of one run, made if it is not there; or a folder of an
            object store, `gs://bucket/run` or `s3://bucket/run`.
        state: the state. Leaves that are parked, by the plan or by hand, are read where they are.
        plan: its plan.
        data_position: anything JSON-able that says where the data was, for `checkpoint`.
        keep: how many of the newest checkpoints stay; all by default.
        asynchronous: return when the state has been copied, and write in the background. The next
            `save` or `restore` of the path, `wait`, and the end of the process wait for it. (Which
            ends with 1 if it could not be written.)

    Returns:
        The checkpoint's number.

    Raises:
        CheckpointError: the directory cannot be written, or the data position is nothing that JSON
            holds; or, in a directory of several processes, the checkpoint before could not be
            written. Earlier checkpoints are untouched.
        PlanError: `plan` is none.
        StateConsumedError: the state was given away.
        StateError: a leaf was put in by hand, and is no array on the state's devices, or `rng` is
            not one key.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> tx, plan = optax.adam(1e-3), fz.Plan(data=1)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     number = fz.save(path, fz.init(model, tx, plan), plan, data_position={"row": 7})
        ...     state = fz.restore(path, model, tx, plan.replace(zero=0))
        ...     position = fz.checkpoint(path).data_position
        >>> number, int(state.step), position
        (0, 0, {'row': 7})

    Source: orbax.checkpoint.CheckpointManager.
    """
    state = settled(state)
    require_alive(state, "save")
    require_arrays(state, "save")
    if not isinstance(plan, Plan):
        raise PlanError(f"save(path, state, plan): expected an fz.Plan, got {type(plan).__name__}")
    keep = keep.item() if isinstance(keep, np.integer) else keep
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"save: keep={keep!r}: expected at least 1, or None for all")
    if state.rows and plan.pipe == 1:
        raise CheckpointError(
            "save: state.rows says that it is a pipeline's, the plan has none; pass the state's own"
        )
    key = key_of(state.rng, "save")
    fields = {name: getattr(state, name) for name in FIELDS}
    require_on_mesh({**fields, "step": state.step}, "save")
    _require_json(data_position)
    leaves = dict(named_leaves(fields))
    mesh = getattr(state.step.sharding, "mesh")  # noqa: B009 (states live on meshes)
    meta = {
        "format": FORMAT,
        "step": int(state.step),
        "plan": plan.to_json(),
        "zero": zero_sizes(dict(mesh.shape)),
        "rows": dict(state.rows),
        "padded": dict(state.padded),
        "data_position": data_position,
        "leaves": {p: [list(x.shape), str(x.dtype)] for p, x in leaves.items()},
        "ways": {p: ways for p, x in leaves.items() if max(ways := ways_of(x), default=1) > 1},
        "rng": [str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key)).tolist()],
        SEAL: True,
    }
    with _one_writer(absolute_path(path)):
        earlier = _end(path)  # an error of one process alone: in a store none stops here
        if earlier is not None and jax.process_count() > 1 and not is_url(path):
            raise earlier  # which ends the others: they wait in orbax's barrier for its part
        try:
            begin = _to_objects if is_url(path) else _to_directory
            with _one_writer(_ANY):
                number = begin(path, leaves, meta, keep)
            if (not asynchronous or _EXIT_IS_ABRUPT) and (failed := _end(path)) is not None:
                raise failed
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"save: expected to write a checkpoint to {os.fspath(path)}: {error}. Earlier"
                " checkpoints are untouched"
            ) from error
        finally:  # not before: warnings may be errors, and this checkpoint is to be written
            if earlier is not None:
                warn(str(earlier))
    return number


def _to_directory(
    path: str | os.PathLike[str], leaves: dict[str, Any], meta: dict[str, Any], keep: int | None
) -> int:
    """Begins to write with orbax; the checkpoint's number."""
    from fzero.checkpoint.manager import Manager, items

    arrays, shards = _split_by_writer(leaves)
    folder = absolute_path(path)
    _finish_at_exit()
    first_says(lambda: claim.take(folder))
    try:
        manager = Manager(folder, keep)
    except BaseException:
        claim.give(folder)
        raise
    _OPEN[folder] = _Open(manager)
    number = first_says(lambda: _after(manager.latest_step()))
    _OPEN[folder] = _Open(manager, number)
    meta = sealed(meta | {"parts": sorted(shards)})
    manager.save(number, args=items(arrays | {SEAL: seal_of(meta)}, shards, meta))
    before, _LAST[folder] = _LAST.get(folder, number), number
    if number > before + 1 and jax.process_index() == 0:
        warn(
            f"save: checkpoint {number - 1} in {folder} is there, and this process wrote none after"
            f" {before}: two runs write into one directory. `keep=` counts both's, and the newest"
            " may be the other one's; give each its own path"
        )
    return number


def _to_objects(
    path: str | os.PathLike[str], leaves: dict[str, Any], meta: dict[str, Any], keep: int | None
) -> int:
    """Begins to write into an object store; the checkpoint's number."""
    arrays, shards = _split_by_writer(leaves)
    url = absolute_path(path)
    number = first_says(lambda: objects.begin(url))
    meta = sealed(meta | {"parts": sorted({**arrays, **shards, SEAL: None})})
    _finish_at_exit()
    arrays = {**arrays, **shards, SEAL: seal_of(meta)}
    _OPEN[url] = _Open(objects.Writer(url, number, arrays, meta, keep), number)
    return number


def wait(path: str | os.PathLike[str]) -> None:
    """Waits until all checkpoints of a path are written.

    Args:
        path: the directory given to `save`.

    Raises:
        CheckpointError: the last one could not be written. Those before are untouched. (When
            one that is not the last fails, the `save` after it warns.)

    Example:
        >>> import fzero as fz
        >>> fz.wait("nothing/is/being/written/here")
    """
    with _one_writer(absolute_path(path)):
        error = _end(path)
    if error is not None:
        raise error


def _end(path: str | os.PathLike[str]) -> CheckpointError | None:
    """Waits for what writes into a path; why it failed, if it did, which is told once."""
    found = _OPEN.pop(absolute_path(path), None)
    if found is None:
        return None
    try:
        try:
            found.writer.wait_until_finished()
            found.writer.close()
        finally:
            claim.give(absolute_path(path))
    except Exception as error:  # whatever the background writer met
        which = "a checkpoint" if found.number is None else f"checkpoint {found.number}"
        failed = CheckpointError(
            f"save: writing {which} to {os.fspath(path)} failed: {error}. Earlier checkpoints"
            " are untouched"
        )
        failed.__cause__ = error.with_traceback(_innermost(error.__traceback__))
        return failed
    return None


def _innermost(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Where an error arose, without the hundred lines of orbax's threads that handed it on."""
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames


def _split_by_writer(leaves: dict[str, Any]) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """Leaves by key: those that orbax writes, and those that each process writes its shards of."""
    arrays: dict[str, Any] = {}
    shards: dict[str, jax.Array] = {}
    for number, (name, leaf) in enumerate(leaves.items()):
        if leaf_bytes(leaf):
            found = _readable(leaf, name)
            (shards if is_elsewhere(found) else arrays)[array_key(number)] = found
    return arrays, shards


def _readable(leaf: Any, name: str) -> Any:
    """A leaf as something that can be written, wherever it is; without the device."""
    if isinstance(leaf, DiskArray):
        return disk.read([leaf], "pinned_host")[0]
    if isinstance(leaf, Slabs):
        slabs = [_readable(slab, name) for slab in leaf.slabs]
        if not all(slab.is_fully_addressable for slab in slabs):
            raise CheckpointError(
                f"save: {name} is parked in {len(slabs)} slabs on several processes, which cannot"
                " be written: bring it back first with state = fz.reload(state,"
                f" [{name.split('/')[0]!r}])"
            )
        return np.concatenate([np.asarray(slab) for slab in slabs], leaf.dim)
    return key_bits(leaf)


def first_says(find: Callable[[], int]) -> int:
    """What process 0 finds, in every process: directories may not look alike everywhere yet.

    Raises:
        CheckpointError: process 0 failed; there with its own words.
    """
    if jax.process_count() == 1:
        return find()
    from jax.experimental import multihost_utils

    found, problem = -1, None
    try:
        found = find() if jax.process_index() == 0 else -1
    except (OSError, ValueError, CheckpointError) as error:
        problem = error
    said = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    if problem is not None:
        raise problem
    if said < 0:
        raise CheckpointError("checkpoint: process 0 found none, or could not look; it says why")
    return said


def _after(newest: int | None) -> int:
    return 0 if newest is None else newest + 1


@contextlib.contextmanager
def _one_writer(key: str) -> Iterator[None]:
    """Looks after the writer of a path, other threads having done so.

    Raises:
        CheckpointError: this thread does already, and a signal's handler came in between.
    """
    with _LOCKS.setdefault(key, threading.RLock()):
        if key in _HELD:
            raise CheckpointError(
                "save: called within another save or wait of this thread, by a signal's handler:"
                " have the handler set a flag, and save after the step that sees it. The"
                " checkpoint that was being written is untouched"
            )
        _HELD.add(key)
        try:
            yield
        finally:
            _HELD.discard(key)


def _require_json(data_position: Any) -> None:
    try:
        json.dumps(data_position)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"save: data_position: expected something that JSON holds, got {data_position!r}:"
            f" {error}. Nothing was written"
        ) from error


def _finish() -> None:
    for path in list(_OPEN):
        try:
            wait(path)
        except CheckpointError as error:
            text = "".join(traceback.format_exception(error)).rstrip()
            fail(error, 1, text)
            print(text, file=sys.stderr)
            _LOST.append(path)


@atexit.register
def _fail_if_lost() -> None:
    """Ends the process with 1 where its last checkpoint was not written: whoever began it would
    take it for done. (Python has no other way by now; what was registered since has been called.)
    """
    if _LOST:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@functools.cache
def _finish_at_exit() -> None:
    """Has `_finish` called before thread pools end, which is the first thing at exit.

    What `atexit` knows is called too late for a writer that still needs a pool. What is registered
    here is called before what was registered earlier, so a writer's own imports come first.
    """
    getattr(threading, "_register_atexit", atexit.register)(_finish)
