"""What is known of a checkpoint without reading its arrays, and where each of them is."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fzero.checkpoint import objects
from fzero.checkpoint.shards import shards_path
from fzero.checkpoint.urls import folder_of, is_url, kvstore
from fzero.errors import CheckpointError, FzeroError
from fzero.plan import Plan
from fzero.summary import Printed, summary


FORMAT = 2
# Format 1 says less of how a state was shared out; who reads that alone refuses format 2.
READABLE = (1, FORMAT)
SUM = "sum"  # of all else that is written beside the arrays


@dataclass(frozen=True, repr=False)
class Checkpoint(Printed):
    """What is known of a checkpoint without reading its arrays.

    Args:
        path: the directory given to `save`.
        number: checkpoints of a directory are numbered.
        step: optimizer steps taken.
        plan: the plan of the state.
        data_position: what `save` was given.
        leaves: shape and dtype of every leaf by path, as it was kept.
    """

    path: Path
    number: int
    step: int
    plan: Plan
    data_position: Any
    leaves: dict[str, tuple[tuple[int, ...], str]]

    def _summary(self) -> str:
        shapes = {p: jax.ShapeDtypeStruct(s, _dtype(d)) for p, (s, d) in self.leaves.items()}
        title = f"Checkpoint {self.number} in {self.path}, step {self.step}, {self.plan!r}"
        return summary(title, {"leaves": shapes}).replace(" on each device", "", 1)


def checkpoint(path: str | os.PathLike[str], number: int | None = None) -> Checkpoint:
    """What a checkpoint holds, without its arrays.

    This only reads: a checkpoint that is being written is not there yet, and nobody waits for it.

    Args:
        path: the directory given to `save`.
        number: which one; the newest that is complete by default.

    Returns:
        Its step, plan, data position, and the shapes of its leaves.

    Raises:
        CheckpointError: there is none, `number` or what it says of its plan is none, or another
            version of fzero wrote it.

    Example:
        >>> import tempfile, jax.numpy as jnp, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> plan = fz.Plan(data=1)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     number = fz.save(path, fz.init(model, None, plan), plan, asynchronous=False)
        ...     print(fz.checkpoint(path).leaves)
        {'params/w': ((8, 2), 'float32')}
    """
    folder = folder_of(absolute_path(path)) if is_url(path) else Path(absolute_path(path))
    if number is not None and (isinstance(number, bool) or not isinstance(number, Integral)):
        raise CheckpointError(f"restore: number={number!r:.60}: expected a whole number, or None")
    found = _whole(folder) if number is None or not _is_there(folder, number) else [number]
    if not found or number not in (None, *found):
        raise CheckpointError(
            f"restore: expected a checkpoint {'' if number is None else f'{number} '}in {folder},"
            f" found {found or 'none'}"
        )
    number = found[-1] if number is None else number
    meta = read_meta(folder, number)
    try:
        plan = _plan_of(meta)
    except FzeroError as error:
        raise CheckpointError(
            f"restore: the plan of checkpoint {number} in {folder} is none: {error}"
            f"{instead(folder, number)}"
        ) from error
    return Checkpoint(
        folder, number, meta["step"], plan, meta["data_position"],
        {path: (tuple(shape), dtype) for path, (shape, dtype) in meta["leaves"].items()},
    )  # fmt: skip


def array_path(folder: Path, number: int, key: str, shards: Collection[str]) -> dict[str, Any]:
    """Where an array of a checkpoint is, as `tensorstore.open` takes it.

    Args:
        folder: the directory of all checkpoints.
        number: the checkpoint.
        key: the array's (`array_key`).
        shards: keys of those that each process wrote its shards of.

    Source: orbax writes arrays as zarr into one key-value store (OCDBT).
    """
    if key in shards:
        return shards_path(folder / str(number), key)
    base = kvstore(folder / str(number) / "state")
    inner = {"driver": "ocdbt", "base": base, "path": f"{key}/"}
    return {"driver": "zarr", "kvstore": inner}


def read_meta(folder: Path, number: int) -> Mapping[str, Any]:
    """What was written beside the arrays of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or another version of fzero wrote it.
    """
    from fzero.checkpoint.manager import read_json

    try:
        if is_url(folder):
            meta = objects.read_meta(str(folder), number)
        else:
            meta = read_json(folder / str(number) / "meta")
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"restore: checkpoint {number} in {folder} cannot be read: {error}"
            f"{instead(folder, number)}"
        ) from error
    if not isinstance(meta, dict) or meta.get("format") not in READABLE:
        raise CheckpointError(
            f"restore: checkpoint {number} in {folder}: expected one of the formats"
            f" {list(READABLE)} of fzero, got"
            f" {meta.get('format') if isinstance(meta, dict) else type(meta).__name__}"
        )
    if meta.get(SUM) not in (None, sealed(meta)[SUM]):
        raise CheckpointError(
            f"restore: checkpoint {number} in {folder} is damaged: what its file meta/metadata says"
            f" was changed after it was written (changed by hand: take {SUM!r} out of it as well)"
            f"{instead(folder, number)}"
        )
    if wrong := _wrong_in(meta):
        raise CheckpointError(
            f"restore: checkpoint {number} in {folder} is damaged: its file meta/metadata {wrong}"
            f"{instead(folder, number)}"
        )
    return meta


def _wrong_in(meta: Mapping[str, Any]) -> str:
    """What metadata says that no checkpoint has, in words; it may have been edited by hand."""
    if missing := sorted({"step", "plan", "data_position", "leaves", "rng"} - meta.keys()):
        return f"has no {', '.join(missing)}"
    step, rng = meta["step"], meta["rng"]
    if type(step) is not int or not 0 <= step < 2**31:
        return f"has step {step!r:.60}: expected a whole number from 0 to 2**31 - 1"
    try:
        impl, data = rng
        wanted = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))
        bits = np.asarray(data)
        fine = bits.shape == wanted.shape and bits.dtype == np.int64
    except (TypeError, ValueError, OverflowError):
        fine = False
    if not fine or bits.min() < 0 or bits.max() >= 2**32:
        return f"has rng {rng!r:.60}: expected a kind of key that this jax has, and its bits"
    return ""


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What is written beside the arrays, with a checksum of it: no value shows that it is wrong."""
    rest = json.loads(json.dumps({key: value for key, value in meta.items() if key != SUM}))
    return {**meta, SUM: zlib.crc32(json.dumps(rest, sort_keys=True).encode())}


def _is_there(folder: Any, number: int) -> bool:
    """Whether a directory has this checkpoint, also where its listing is not up to date yet."""
    return not is_url(folder) and (folder / str(number)).is_dir()


def _whole(folder: Any) -> list[int]:
    """The checkpoints of a path that are complete, in order."""
    if is_url(folder):
        try:
            return objects.numbers(str(folder))
        except OSError as error:
            raise CheckpointError(f"restore: {folder} cannot be read: {error}") from error
    if not folder.is_dir():
        return []
    return sorted(
        int(entry.name) for entry in folder.iterdir()
        if re.fullmatch("0|[1-9][0-9]*", entry.name) and entry.is_dir()
    )  # fmt: skip


def instead(folder: Any, number: int) -> str:
    """What can be read in place of a checkpoint that is damaged, for the end of a message."""
    others = [other for other in _whole(folder) if other != number]
    if not others:
        return ""
    return f"; to go on from {others[-1]}, give number={others[-1]}, or move {number} out of there"


def _plan_of(meta: Mapping[str, Any]) -> Plan:
    """The plan of a checkpoint, in today's words: no layout followed from what is left out."""
    values = dict(meta["plan"])
    if values.get("reduce_dtype") == "int8":  # fzero 0.1
        values["reduce_dtype"] = None
    return Plan.from_json(values)


def _dtype(name: str) -> Any:
    """A dtype by its name; a random key's as that of the data that stands for it."""
    return np.dtype("uint32" if name.startswith("key<") else name)


def array_key(number: int) -> str:
    """The key of the array of a leaf, by its position among all leaves that were saved."""
    return f"{number:06}"


def absolute_path(path: str | os.PathLike[str]) -> str:
    """A path as it is known by: a directory has one writer, by whatever name."""
    return str(folder_of(os.fspath(path))) if is_url(path) else os.path.realpath(path)
