"""Names the first value of a step that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fzero.batch import Inputs
from fzero.errors import NonFiniteError
from fzero.hosts.agree import exchange
from fzero.links import Stack
from fzero.pieces import Piece, whole_chain
from fzero.processes import named_devices
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.split import Split, flat_splits, trained
from fzero.tree import named_leaves


POINT = "step.check_finite"


@dataclass(frozen=True)
class Look:
    """Marks of some layers, or of their gradients, for one microbatch.

    Args:
        microbatch: its number.
        stage: of a pipeline; 0 without one.
        rank: that runs it.
        forward: whether of what layers give, or of gradients.
        pieces: the layers.
        leaves: the parameters whose gradients are marked.
        marks: what is known of them on each device by its id; see `fzero.zero.finite_marks`.
    """

    microbatch: int
    stage: int
    rank: int
    forward: bool
    pieces: Sequence[Piece]
    leaves: Sequence[Split]
    marks: dict[int, list[int]]


def looks_at_one_program(blue: Blueprint, marks: tuple[jax.Array, jax.Array]) -> list[Look]:
    """What `OneProgram.marks` found here."""
    pieces, leaves = whole_chain(blue.model.layers), flat_splits(trained(blue.params))
    return [
        Look(m, 0, 0, forward, pieces, leaves, {
            shard.device.id: np.asarray(shard.data)[0, m].tolist()
            for shard in found.addressable_shards
        })
        for m in range(blue.plan.microbatches)
        for forward, found in zip((True, False), marks, strict=True)
    ]  # fmt: skip


def looks_at_stages(executor: Any, marks: dict[Any, jax.Array]) -> list[Look]:
    """What `Executor.marks` found here: by microbatch, as values flow."""

    def when(item: tuple[Any, jax.Array]) -> Any:
        action, _ = item
        forward = action.kind == "F"
        return action.microbatch, not forward, action.stage if forward else -action.stage

    looks = []
    for action, found in sorted(marks.items(), key=when):
        program = executor.programs[action.stage]
        own = {s.device.id: np.asarray(s.data)[0].tolist() for s in found.addressable_shards}
        leaves = flat_splits(trained(program.splits))
        looks.append(Look(action.microbatch, program.stage, program.rank, action.kind == "F",
                          program.pieces, leaves, own))  # fmt: skip
    return looks


def require_finite_batch(batch: Any) -> None:
    """Refuses a batch with values that are not finite; of a global array, what is here is seen.

    Raises:
        NonFiniteError: in every process alike.
    """
    own = next((said for said in _bad_rows(batch)), None)
    for process, said in enumerate(exchange(f"{POINT}: batch", own)):
        if said is not None:
            where = f" (process {process})" if jax.process_count() > 1 else ""
            raise NonFiniteError(f"check_finite: batch {said}{where}")


def _bad_rows(batch: Any) -> Iterator[str]:
    for path, leaf in named_leaves(Inputs.of(batch).batch):
        arrays = [leaf]
        if isinstance(leaf, jax.Array):
            arrays = [shard.data for shard in leaf.addressable_shards]
        for number, array in enumerate(arrays):
            host = np.asarray(array)
            if not jax.numpy.issubdtype(host.dtype, jax.numpy.inexact):
                continue
            bad = ~np.isfinite(host.astype(np.float32) if host.itemsize < 4 else host)
            if not bad.any():
                continue
            row = int(np.argmax(bad.reshape(len(host), -1).any(axis=1))) if host.ndim else 0
            if isinstance(leaf, jax.Array) and host.ndim:
                row += leaf.addressable_shards[number].index[0].start or 0
            yield f"{path or '(the only leaf)'} has values that are not finite, first in row {row}"


def require_finite_looks(blue: Blueprint, looks: Sequence[Look]) -> None:
    """Refuses marks of anything not finite.

    Raises:
        NonFiniteError: in every process alike: names the first.
    """
    owners = {device.id: device for device in blue.mesh.devices.flat}
    everyone = exchange(POINT, [list(look.marks.items()) for look in looks])
    for number, look in enumerate(looks):
        marks = {device: own for one in everyone for device, own in one[number]}
        where = _first(look, marks)
        if where is None:
            continue
        what, bad = where
        stage = f" on stage {look.stage} (rank {look.rank})" if blue.stages is not None else ""
        who = named_devices([owners[device] for device in bad])
        raise NonFiniteError(
            f"check_finite: microbatch {look.microbatch}: {what}{stage} is not finite, while all"
            f" before it is; on {who}"
        )


def _first(look: Look, marks: dict[int, list[int]]) -> tuple[str, list[int]] | None:
    """What is first, and the devices that have it."""
    table = np.array(list(marks.values()))
    devices = list(marks)
    if look.forward:
        order = list(range(table.shape[1]))
    else:  # a backward pass comes to the last layers first
        chain = [piece.layer.name for piece in look.pieces]
        position = {name: number for number, name in enumerate(chain)}
        order = sorted(
            range(table.shape[1]),
            key=lambda n: -position.get(look.leaves[n].path.split("/")[0], len(chain)),
        )
    for number in order:
        own = table[:, number]
        if not own.any():
            continue
        row = int(own[own > 0].min() if look.forward else own.max())
        bad = [device for device, mark in zip(devices, own, strict=True) if mark == row]
        return (_output if look.forward else _gradient)(look, number, row - 1), bad
    return None


def _output(look: Look, number: int, row: int) -> str:
    piece = look.pieces[number]
    if not piece.layer.name:
        return "the loss"
    stacked = isinstance(piece.layer, Stack)
    return f"the output of {piece.layer.name}" + (f", layer {piece.start + row}" * stacked)


def _gradient(look: Look, number: int, row: int) -> str:
    split = look.leaves[number]
    what = f"the gradient of params/{split.path}"
    if not split.stacked:
        return what
    name = split.path.split("/")[0]
    start = next((piece.start for piece in look.pieces if piece.layer.name == name), 0)
    return f"{what}, layer {start + row},"
