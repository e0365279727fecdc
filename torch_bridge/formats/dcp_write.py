"""Directories of `torch.distributed.checkpoint` written, for `dcp.load` in any number of ranks."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_bridge.formats.adam import groups_of
from torch_bridge.formats.content import Checkpoint
from torch_bridge.formats.torch_files import save_to
from torch_bridge.formats.turns import Turns
from torch_bridge.module.lazy_tensor import LazyTensor


def write_dcp(folder: Path, content: Checkpoint, turns: Turns, flat: bool) -> None:
    """Writes `{"model": ..., "optim": ...}`, as `get_state_dict` gives them, for `dcp.load`.

    Tensors are read one after the other; a tied one is stored once. Each writer is a rank of the
    checkpoint, with a file of its own.

    Args:
        folder: an empty directory.
        content: what to write.
        turns: who writes.
        flat: the optimizer's state as `StateDictOptions(flatten_optimizer_state_dict=True)` has it.
    """
    lazy: dict[str, LazyTensor] = {}

    def empty(path: str, tensor: LazyTensor) -> torch.Tensor:
        lazy[path] = tensor
        return torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="meta")

    state: dict[str, Any] = {
        "model": {name: empty(f"model.{name}", t) for name, t in content.tensors.items()}
    }
    optimizer = content.optimizer
    if optimizer is not None and optimizer.named:
        entries: dict[str, Any] = {}
        for name in optimizer.exp_avg:
            path = f"optim.state.{name}"
            entries[name] = {
                "step": torch.tensor(float(optimizer.step)),
                "exp_avg": empty(f"{path}.exp_avg", optimizer.exp_avg[name]),
                "exp_avg_sq": empty(f"{path}.exp_avg_sq", optimizer.exp_avg_sq[name]),
            }
        groups = groups_of(optimizer, list(entries))
        nested = {"state": entries, "param_groups": groups}
        state["optim"] = _flattened(entries, groups) if flat else nested
    ties = {f"model.{name}": f"model.{kept}" for name, kept in content.ties.items()}
    planner, writer = _Planner(lazy), _Writer(folder, ties)
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    whole = planner.create_local_plan()
    local = [dataclasses.replace(whole, items=x) for x in _divided(whole.items, lazy, turns.count)]
    plans, metadata = planner.create_global_plan(local)
    written: list[WriteResult] = []
    for rank, plan in enumerate(writer.prepare_global_plan(plans)):
        with turns.turn(rank, turns.count) as mine:
            if mine:
                written += writer.write_items(plan, planner)
    everywhere = turns.told([_plain_result(result) for result in written])
    if turns.leads:
        writer.finish(metadata, [[_result(one) for one in own] for own in everywhere])


def _flattened(
    entries: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Each parameter's state and hyperparameters under its own name."""
    found = {f"state.{name}.{k}": v for name, own in entries.items() for k, v in own.items()}
    for group in groups:
        for name in group.pop("params"):
            found |= {f"param_groups.{name}.{k}": v for k, v in group.items()}
    return found


def _divided(
    items: list[WriteItem], lazy: Mapping[str, LazyTensor], count: int
) -> list[list[WriteItem]]:
    """Items in order, in lists of about equally many bytes."""
    sizes = [lazy[i.index.fqn].num_bytes if i.index.fqn in lazy else 0 for i in items]
    found: list[list[WriteItem]] = [[] for _ in range(count)]
    before, total = 0, max(sum(sizes), 1)
    for item, size in zip(items, sizes, strict=True):
        found[min(before * count // total, count - 1)].append(item)
        before += size
    return found


def _plain_result(result: WriteResult) -> list[Any]:
    """Where an item was written, for processes that did not write it."""
    index, stored = result.index, result.storage_data
    at = None if index.offset is None else list(index.offset)
    return [index.fqn, at, index.index, stored.relative_path, stored.offset, stored.length]


def _result(plain: list[Any]) -> WriteResult:
    name, at, number, file, offset, length = plain
    index = MetadataIndex(name, None if at is None else torch.Size(at), number)
    return WriteResult(index, length, _StorageInfo(file, offset, length))


class _Planner(DefaultSavePlanner):
    """Plans with empty tensors, and reads each when it is written."""

    def __init__(self, lazy: Mapping[str, LazyTensor]) -> None:
        super().__init__()
        self.lazy = lazy

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if name in self.lazy:
            tensor = self.lazy[name].tensor().contiguous()
            # A view would be saved with all that it is a view of.
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            return tensor if whole else tensor.clone()
        return super().resolve_data(write_item)


class _Writer(FileSystemWriter):
    """Writes tied tensors' further names as entries that point to the same place."""

    def __init__(self, folder: Path, ties: Mapping[str, str]) -> None:
        super().__init__(folder, single_file_per_rank=True, thread_count=1)
        self.ties = ties

    def write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes a rank's file as `write_data` does, which holds all its tensors until its end."""
        name, results = f"{plan.storage_data.prefix}0.distcp", []
        with Path(self.path, name).open("wb") as file:
            for item in plan.items:
                start, data = file.tell(), planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    file.write(data.getbuffer())
                else:
                    save_to(data, file)
                size = file.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(name, start, size)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        more: list[WriteResult] = []
        for name, kept in self.ties.items():
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[kept]
            metadata.planner_data[name] = ("model", name.removeprefix("model."))
            for result in (r for own in results for r in own if r.index.fqn == kept):
                index = MetadataIndex(name, result.index.offset, result.index.index)
                more.append(WriteResult(index, result.size_in_bytes, result.storage_data))
        super().finish(metadata, [*results, more])
