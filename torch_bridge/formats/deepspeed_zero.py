"""The optimizer's files of DeepSpeed's ZeRO: flat partitions as tensors by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError
from torch_bridge.formats.adam import MOMENTS, step_of, unaccounted
from torch_bridge.formats.deepspeed_files import FP32, Files, from_shards, load_file, shape_of
from torch_bridge.formats.torch_files import Inert, is_dense
from torch_bridge.module.lazy_tensor import LazyTensor, from_flat, take


@dataclass(frozen=True)
class ZeroFiles:
    """The partitioned optimizer state of one model rank.

    Args:
        file: for messages.
        shapes: parameter shapes by name, for each group.
        flats: for "fp32", "exp_avg" and "exp_avg_sq" the flat tensors of each group and rank.
        steps: of each group.
        stage3: whether parameters are cut one by one.
        paddings: elements behind each parameter, for each group.
        hyper: hyperparameters of each group.
        unread: why the moments cannot be read in full, in words.
    """

    file: str
    shapes: list[dict[str, tuple[int, ...]]]
    flats: dict[str, list[list[torch.Tensor]]]
    steps: list[int]
    stage3: bool
    paddings: list[list[int]]
    hyper: list[dict[str, Any]]
    unread: str | None

    @staticmethod
    def read(files: Files, rank: int, model: Mapping[str, Any]) -> ZeroFiles:
        paths = {data: path for (data, r), path in sorted(files.optims.items()) if r == rank}
        name = next(iter(paths.values())).name
        states: list[Any] = [load_file(p).get("optimizer_state_dict") for p in paths.values()]
        if not all(isinstance(state, Mapping) for state in states):
            raise CheckpointError(f"{name}: expected the optimizer state of DeepSpeed's ZeRO")
        first = states[0]
        count = first.get("partition_count")
        counts = set(count) if isinstance(count, list) else {count}
        if counts != {len(paths)} or set(paths) != set(range(len(paths))):
            raise CheckpointError(
                f"{files.folder.name}: expected the optimizer files of {sorted(map(str, counts))}"
                f" ranks, found {len(paths)}: ranks {sorted(paths)[:8]}"
            )
        stage3 = "fp32_flat_groups" in first
        fp32 = "fp32_flat_groups" if stage3 else "single_partition_of_fp32_groups"
        groups = model.get("param_shapes")
        if not isinstance(groups, list | tuple) or not all(isinstance(g, Mapping) for g in groups):
            raise CheckpointError(
                f"{name}: its model states have no param_shapes, without which its flat tensors are"
                " in no order (DeepSpeed writes none with bf16 and stage 0): let ds_to_universal of"
                " DeepSpeed join them, or save with stage 1"
            )
        shapes = [{n: shape_of(size, n, name) for n, size in group.items()} for group in groups]
        flats: dict[str, list[list[torch.Tensor]]] = {key: [] for key in (FP32, *MOMENTS)}
        bases = [_base(state, stage3, name) for state in states]
        unread = _unread(bases, states, name)
        steps: list[int] = []
        _require_one_save(list(paths.values()), bases, states)
        for state, base in zip(states, bases, strict=True):
            flats[FP32].append(_flat(state.get(fp32), name))
            if unread is None and any(base):
                for key in MOMENTS:
                    flats[key].append(_flat([entry[key] for entry in base], name))
                steps += [step_of(step, name) for step in _steps(base, state)]
        if any(len(values) not in (0, len(states)) for values in flats.values()):
            raise CheckpointError(f"{name}: some ranks have moments and some have none")
        paddings = [] if stage3 else _paddings(first, shapes, name)
        return ZeroFiles(
            name, shapes, flats, steps, stage3, paddings, _hyper(first), unread
        )  # fmt: skip

    def tensors(self) -> dict[str, dict[str, LazyTensor]]:
        """All parameters out of the flat tensors, by kind and name."""
        return {
            key: self._whole(ranks) if self.stage3 else self._cut(ranks)
            for key, ranks in self.flats.items()
            if ranks
        }

    def _cut(self, ranks: list[list[torch.Tensor]]) -> dict[str, LazyTensor]:
        """Stages 1 and 2: a group's parameters are one range of all ranks' partitions."""
        found: dict[str, LazyTensor] = {}
        if any(len(flat) != len(self.shapes) for flat in ranks):
            raise CheckpointError(f"{self.file}: expected {len(self.shapes)} parameter groups")
        for number, group in enumerate(self.shapes):
            flats = [flat[number] for flat in ranks]
            start = 0
            for (name, shape), padding in zip(group.items(), self.paddings[number], strict=True):
                found[name] = from_flat(
                    name, shape, take(flats, start, math.prod(shape)), self.file
                )
                start += math.prod(shape) + padding
            rest = sum(flat.numel() for flat in flats) - start
            if not 0 <= rest < 2 * len(ranks):
                raise CheckpointError(
                    f"{self.file}: the parameters take {start} elements of all ranks, but there are"
                    f" {rest} more; expected less than {2 * len(ranks)} of padding"
                )
        return found

    def _whole(self, ranks: list[list[torch.Tensor]]) -> dict[str, LazyTensor]:
        """Stage 3: each parameter has a shard at the same offset of every rank's range."""
        found: dict[str, LazyTensor] = {}
        offset = 0
        for group in self.shapes:
            for name, shape in group.items():
                found[name] = from_shards(name, shape, ranks, offset, self.file)
                offset += -(-math.prod(shape) // len(ranks))
        have = [sum(flat.numel() for flat in flats) for flats in ranks]
        if set(have) != {offset}:
            raise CheckpointError(
                f"{self.file}: the parameters take {offset} elements on each rank, but there are"
                f" {have[:8]}"
            )
        return found

    def groups(self) -> tuple[Mapping[str, Any], ...]:
        """Hyperparameters with the names of each group's parameters."""
        if len(self.hyper) != len(self.shapes):
            return ()
        both = zip(self.hyper, self.shapes, strict=True)
        return tuple({**hyper, "params": list(shapes)} for hyper, shapes in both)


def _base(state: Mapping[str, Any], stage3: bool, file: str) -> list[Mapping[str, Any]]:
    """What the optimizer inside keeps for each group: a dict by number, or (elastic) a list."""
    base = state.get("optimizer_state_dict" if stage3 else "base_optimizer_state")
    if isinstance(base, Mapping):
        entries = base.get("state")
        base = None
        if isinstance(entries, Mapping) and all(str(key).isdigit() for key in entries):
            base = [entries[key] for key in sorted(entries, key=int)]
    if not isinstance(base, list) or not all(isinstance(entry, Mapping) for entry in base):
        raise CheckpointError(f"{file}: has no state of the optimizer inside")
    return base


def _require_one_save(
    paths: Sequence[Path], bases: Sequence[list[Mapping[str, Any]]], states: Sequence[Any]
) -> None:
    """Ranks have parts of the same weights: raises `CheckpointError` if they are of two saves."""
    found = [
        [_number(step) for step in _steps(base, state)]
        for base, state in zip(bases, states, strict=True)
    ]
    for path, steps in zip(paths, found, strict=True):
        if steps != found[0]:
            raise CheckpointError(
                f"{path.name} is of step {steps[0] if steps else None}, {paths[0].name} of"
                f" {found[0][0] if found[0] else None}: a save was cut short, and each has a part"
                " of every weight. Restore an older checkpoint"
            )


def _number(step: Any) -> Any:
    return step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step


def _steps(base: list[Mapping[str, Any]], state: Mapping[str, Any]) -> list[Any]:
    """Elastic files have one step for all groups, some optimizers one for each."""
    found = [entry["step"] for entry in base if "step" in entry]
    return found or _common_steps(state)


def _common_steps(state: Mapping[str, Any]) -> list[Any]:
    if "base_optimizer_state_step" in state:
        return [state["base_optimizer_state_step"]]
    return [group["step"] for group in _groups(state) if "step" in group]


def _unread(bases: Sequence[list[Mapping[str, Any]]], states: Sequence[Any], file: str) -> Any:
    """Why the optimizer inside is not Adam alone, in words; None if it is, or has no state."""
    for state, base in zip(states, bases, strict=True):
        common = {"step": 0} if _common_steps(state) else {}
        for number, entry in enumerate(base if any(base) else ()):
            wrong = unaccounted({**common, **entry})
            if wrong is not None:
                return f"{file}: expected Adam's state, but that of group {number} {wrong}"
    return None


def _paddings(
    state: Mapping[str, Any], shapes: list[dict[str, tuple[int, ...]]], file: str
) -> list[list[int]]:
    """Elements that stages 1 and 2 leave behind each parameter, so that the next is aligned."""
    found = state.get("param_alignment_paddings")
    if found is None:
        return [[0] * len(group) for group in shapes]
    fine = isinstance(found, list) and len(found) == len(shapes) and all(
        isinstance(own, list) and len(own) == len(group)
        and all(isinstance(n, int) and n >= 0 for n in own)
        for own, group in zip(found, shapes, strict=True)
    )  # fmt: skip
    if not fine:
        raise CheckpointError(
            f"{file}: param_alignment_paddings: expected a number for each of"
            f" {[len(group) for group in shapes]} parameters of the groups, got {found!r:.200}"
        )
    return [list(own) for own in found]


def _groups(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of the optimizer inside, of stage 3 or another one."""
    base = state.get("optimizer_state_dict", state.get("base_optimizer_state"))
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return []
    return groups


def _hyper(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in group.items() if not isinstance(v, Inert)} for group in _groups(state)
    ]


def _flat(values: Any, file: str) -> list[torch.Tensor]:
    fine = isinstance(values, list | tuple) and len(values) > 0
    if not fine or not all(is_dense(value) for value in values):
        raise CheckpointError(f"{file}: expected flat tensors, one for each group")
    return [value.detach().reshape(-1) for value in values]
