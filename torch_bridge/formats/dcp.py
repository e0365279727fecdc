"""Directories of `torch.distributed.checkpoint` (FSDP2), read without torch processes.

`.metadata` is a pickle that says which chunk of which tensor lies where. It is read by an unpickler
that knows only the handful of names in it and makes inert records of them; each chunk is a file of
`torch.save` in itself. A piece of a tensor reads its own bytes of the chunks that it touches.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError
from fzero.sharding.lazy_array import Index
from torch_bridge.formats.adam import MOMENTS, at_one_step, labelled, step_of
from torch_bridge.formats.content import Checkpoint, Optimizer, optimizer_fields
from torch_bridge.formats.mapped_tensors import Mapped, find_tensor, map_file
from torch_bridge.formats.torch_files import cause_of, sizes_of, ties_in
from torch_bridge.module.lazy_tensor import LazyTensor


METADATA = ".metadata"
# What a checkpoint holds by its path in the saved tree: name, and tensor if it is one.
Entries = dict[tuple[Any, ...], tuple[str, LazyTensor | None]]
# File, first byte and number of bytes of a chunk.
Location = tuple[str, int, int]
_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata",
                 "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                 "_MEM_FORMAT_ENCODING")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
}  # fmt: skip
# What frameworks call the optimizer's part of the saved tree.
_OPTIMIZER = re.compile(r"(optim|optimizers?|opt_state)\.")
# Some two hundred bytes for each chunk: a thousand tensors on six hundred ranks. A file made to
# harm becomes objects of some sixty times its size before anything can be said about it.
_METADATA_BYTES = 128 * 2**20


class _Unpickler(pickle._Unpickler):
    """Knows the names of a `.metadata` file and no other; all become inert records.

    The one written in Python: a short file can make the one in C allocate all memory.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)

        class Placeholder:
            """A class of its own for each file, so that none can leave anything behind."""

            def __init__(self, *_: Any) -> None:
                pass

            def __setstate__(self, state: Any) -> None:
                # A tensor's properties are a tuple that begins with the dtype.
                self.__dict__.update(
                    {"dtype": state[0]} if isinstance(state, tuple) and state else state
                )

        self.record = Placeholder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return self.record
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return lambda value: value
        raise pickle.UnpicklingError(f"{module}.{name}, which does not belong there")


def is_dcp(folder: Path) -> bool:
    """Whether a directory is one of `torch.distributed.checkpoint`."""
    return (folder / METADATA).is_file()


def read_dcp(folder: Path, key: str | None = None) -> Checkpoint:
    """Model and Adam's moments of a directory, however they are nested in it.

    Args:
        folder: the directory.
        key: the entry that is read alone, such as "generator" or "ema.model"; all of them, of which
            one is a model, by default.

    Raises:
        CheckpointError: damaged, with other objects in its metadata, chunks that do not make up
            their tensors, or several models.
    """
    about = _metadata(folder)
    chunks = _Chunks(folder, about)
    entries: Entries = {
        _path(about, name): (name, chunks.tensor(name, entry)) for name, entry in _items(about)
    }
    if key is not None:
        entries = _within(entries, tuple(key.split(".")), folder.name)
    moments, rest = _divide(entries)
    prefix = _prefix([path for path, (_, lazy) in rest.items() if lazy is not None], folder.name)
    found = {
        ".".join(map(str, path[len(prefix) :])): lazy
        for path, (_, lazy) in rest.items()
        if lazy is not None and path[: len(prefix)] == prefix
    }
    ties = ties_in({name: chunks.locations(lazy.name) for name, lazy in found.items()})
    tensors = {name: lazy.named(name) for name, lazy in found.items() if name not in ties}
    extra = {".".join(map(str, p)): chunks.value(n) for p, (n, lazy) in rest.items()
             if lazy is None and len(p) <= 2 and "param_groups" not in str(p)}  # fmt: skip
    version = getattr(about, "version", None)
    return Checkpoint(
        str(folder), "torch.distributed.checkpoint", tensors, ties=ties,
        version=str(version) if version else None,
        extra={k: v for k, v in extra.items() if isinstance(v, bool | int | float | str)},
        **optimizer_fields(_optimizer(folder, moments, chunks, rest)),
    )  # fmt: skip


def _metadata(folder: Path) -> Any:
    path = folder / METADATA
    try:
        if path.stat().st_size > _METADATA_BYTES:
            raise ValueError(
                f"{path.stat().st_size:,} bytes, and more than {_METADATA_BYTES:,} are not read:"
                " an index of that size is damaged, or made to take all memory. If it is yours,"
                " write the checkpoint from fewer ranks, or as one file with"
                " torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
            )
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        for name in ("state_dict_metadata", "storage_data"):
            if not isinstance(getattr(found, name, None), dict):
                raise ValueError(f"no {name}")
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(
            f"{folder.name}/{METADATA}: not the metadata of torch.distributed.checkpoint (nothing"
            f" in it was executed): {type(error).__name__}: {str(error)[:300]}"
        ) from error
    return found


def _items(about: Any) -> list[tuple[str, Any]]:
    found: dict[Any, Any] = about.state_dict_metadata
    wrong = [name for name in found if not isinstance(name, str)]
    if wrong:
        raise CheckpointError(f"{METADATA}: {wrong[:3]!r:.200} are not names of tensors")
    return list(found.items())


def _path(about: Any, name: str) -> tuple[Any, ...]:
    planner = getattr(about, "planner_data", None)
    path = planner.get(name) if isinstance(planner, dict) else None
    fine = isinstance(path, tuple) and path and all(isinstance(p, str | int) for p in path)
    return path if fine else (name,)  # type: ignore[return-value]


class _Chunks:
    """Where the chunks of every tensor are, and maps of the files that were read."""

    def __init__(self, folder: Path, about: Any) -> None:
        self.folder = folder
        self.infos: dict[str, dict[tuple[int, ...], Location]] = {}
        self.maps: dict[str, mmap.mmap] = {}
        self.mapped: dict[Location, Mapped] = {}
        for key, info in about.storage_data.items():
            name, offset = getattr(key, "fqn", None), getattr(key, "offset", None)
            file = getattr(info, "relative_path", None)
            extent = getattr(info, "offset", None), getattr(info, "length", None)
            if (
                not isinstance(name, str)
                or not isinstance(file, str)
                or not all(isinstance(n, int) and n >= 0 for n in extent)
                or not (offset is None or sizes_of(offset) is not None)
            ):
                raise CheckpointError(f"{METADATA}: does not say where {name!r:.100} is")
            if Path(file).name != file or "\\" in file:
                raise CheckpointError(
                    f"{METADATA}: `{name}` is said to be in {file!r}; expected a file of the"
                    " directory itself"
                )
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{METADATA}: `{name}` is compressed or transformed")
            where = (file, int(extent[0] or 0), int(extent[1] or 0))
            self.infos.setdefault(name, {})[() if offset is None else tuple(offset)] = where

    def locations(self, name: str) -> Any:
        """What two names of one stored tensor share."""
        return frozenset(self.infos.get(name, {}).items())

    def tensor(self, name: str, entry: Any) -> LazyTensor | None:
        """A tensor that is read chunk by chunk; None for an entry that is not one."""
        dtype = getattr(getattr(entry, "properties", None), "dtype", None)
        shape, chunks = sizes_of(getattr(entry, "size", None)), getattr(entry, "chunks", None)
        if dtype is None and shape is None and chunks is None:
            return None
        if not isinstance(dtype, torch.dtype) or shape is None or not isinstance(chunks, list):
            raise CheckpointError(f"{METADATA}: `{name}` has no dtype, size or chunks")
        filled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for chunk in chunks:
            start = sizes_of(getattr(chunk, "offsets", None))
            size = sizes_of(getattr(chunk, "sizes", None))
            if (
                start is None
                or size is None
                or not len(start) == len(size) == len(shape)
                or any(a + b > n for a, b, n in zip(start, size, shape, strict=True))
            ):
                raise CheckpointError(f"{METADATA}: a chunk of `{name}` lies outside of it")
            if math.prod(size):
                filled.append((start, size))
                if start not in self.infos.get(name, {}):
                    raise CheckpointError(
                        f"{METADATA}: the chunk of `{name}` at {start} is nowhere"
                    )
        if sum(math.prod(size) for _, size in filled) != math.prod(shape):
            raise CheckpointError(
                f"{METADATA}: the chunks of `{name}` do not make up {list(shape)}"
            )

        def fetch(index: Index) -> torch.Tensor:
            return self._fetch(name, dtype, filled, index)

        return LazyTensor(name, dtype, shape, fetch, self.folder.name)

    def _fetch(self, name: str, dtype: torch.dtype, chunks: Any, index: Index) -> torch.Tensor:
        out = torch.empty([i.stop - i.start for i in index], dtype=dtype)
        seen = torch.zeros(out.shape, dtype=torch.bool)
        for start, size in chunks:
            low = [max(i.start, a) for i, a in zip(index, start, strict=True)]
            high = [min(i.stop, a + n) for i, a, n in zip(index, start, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            chunk = self._chunk(self.infos[name][start])
            if chunk.shape != size or chunk.dtype != dtype:
                raise CheckpointError(
                    f"{self.folder.name}: `{name}`: the chunk at {start} is not {dtype}{list(size)}"
                )
            to = tuple(slice(a - i.start, b - i.start)
                       for a, b, i in zip(low, high, index, strict=True))  # fmt: skip
            at = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            chunk.copy_to(out, to, at)
            seen[to] = True
        if not bool(seen.all()):
            raise CheckpointError(
                f"{self.folder.name}: the chunks of `{name}` overlap, and leave gaps"
            )
        return out

    def _chunk(self, where: Location) -> Mapped:
        file, offset, length = where
        pages = self._pages(where)
        if where not in self.mapped:
            try:
                self.mapped[where] = find_tensor(pages, offset, length)
            except Exception as error:
                raise CheckpointError(
                    f"{self.folder.name}/{file}: what lies at byte {offset:,} cannot be read as"
                    f" plain tensors: {cause_of(error)}"
                ) from None
        return self.mapped[where]

    def _pages(self, where: Location) -> mmap.mmap:
        file, offset, length = where
        path = self.folder / file
        # Each time: to look at pages that a file has no longer ends the process.
        if not path.is_file() or offset + length > path.stat().st_size:
            raise CheckpointError(f"{self.folder.name}/{file}: missing or truncated")
        if file not in self.maps:
            self.maps[file] = map_file(path)
        return self.maps[file]

    def value(self, name: str) -> Any:
        """A plain value; None for one that needs unpickling of code."""
        where = next(iter(self.infos.get(name, {}).values()), None)
        try:
            if where is None:
                return None
            _, offset, length = where
            content = io.BytesIO(self._pages(where)[offset : offset + length])
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception:  # not a plain value: it is not needed
            return None


def _within(entries: Entries, key: tuple[str, ...], folder: str) -> Entries:
    """What is under a key; where that has no optimizer, those beside it as well."""
    found = {path: entry for path, entry in entries.items() if path[: len(key)] == key}
    if not found:
        heads = sorted({str(path[0]) for path in entries})[:10]
        raise CheckpointError(f"{folder}: key={'.'.join(key)!r}: no such entry; there are {heads}")
    if not _owners(name for name, _ in found.values()):
        owners = _owners(name for name, _ in entries.values())
        beside = tuple(one for one in owners if one and one.split(".")[:-2] == list(key[:-1]))
        found |= {path: one for path, one in entries.items() if one[0].startswith(beside)}
    return found


def _owners(names: Iterable[str]) -> set[str]:
    """What the names of each optimizer's entries begin with: it has groups of parameters."""
    return {name.partition("param_groups.")[0] for name in names if "param_groups." in name}


# Of one optimizer, by parameter name and key.
Moments = dict[str, dict[str, Any]]


def _divide(entries: Entries) -> tuple[dict[tuple[Any, ...], Moments], Entries]:
    """Adam's state, by where its optimizer is, and all other entries.

    The optimizer's `state_dict` may be nested, (..., "state", name, key), or flattened by torch
    into one key, "....state.name.key".
    """
    moments: dict[tuple[Any, ...], Moments] = {}
    rest: Entries = {}
    for path, entry in entries.items():
        head, _, key = str(path[-1]).rpartition(".")
        whole = (*path[:-1], head, key) if head else path
        name = str(whole[-2]) if len(whole) > 1 else ""
        marked = "state" in path[:-2] or name.startswith("state.") or ".state." in name
        if key in ("step", *MOMENTS) and len(whole) > 1 and marked:
            if "state" in path[:-2]:
                stem = path[: path.index("state")]
            else:  # the first one: a module's name may have more
                head, name = re.split(r"(?:^|\.)state\.", name, maxsplit=1)
                stem = (*path[:-1], head)
            moments.setdefault(stem, {}).setdefault(name, {})[key] = entry
        else:
            rest[path] = entry
    return moments, rest


def _prefix(paths: list[tuple[Any, ...]], folder: str) -> tuple[Any, ...]:
    """What stands before the names of the weights, such as `("model",)`: the first in the tree."""
    nested = [path for path in paths if len(path) > 1]
    for word in ("model", "state_dict", "module"):
        found = {path[: path.index(word) + 1] for path in nested if word in path[:-1]}
        first = [one for one in found if len(one) == min(map(len, found))]
        if len(first) > 1:
            names = sorted(".".join(map(str, one)) for one in first)
            raise CheckpointError(
                f"{folder}: it has the weights of several models, {names}: say which with key="
            )
        if first:
            return first[0]
    heads = {path[:-1] for path in paths}
    return heads.pop() if len(heads) == 1 else ()


def _optimizer(
    folder: Path, owners: dict[tuple[Any, ...], Moments], chunks: _Chunks, rest: Entries
) -> Optimizer | str | None:
    wanted = {"step", *MOMENTS}
    states = tuple(f"{one}state." for one in _owners(name for name, _ in rest.values()))
    more = [
        name for name, lazy in rest.values()
        if lazy is not None and (_OPTIMIZER.match(name) or name.startswith(states))
        and "param_groups." not in name
    ]  # fmt: skip
    if more:
        return f"{folder.name}: expected Adam's state alone, got {more[:3]} ({len(more)} in all)"
    if len(owners) > 1:
        names = sorted(".".join(map(str, stem)) for stem in owners)
        return f"{folder.name}: it has the states of several optimizers, {names}"
    moments = next(iter(owners.values()), {})
    if not moments:
        return None
    groups, named = tuple(_groups(chunks, rest)), True
    if any(isinstance(n, int) for group in groups for n in group.get("params") or ()):
        # The optimizer's own state_dict, which numbers its parameters.
        labels = labelled(groups, [int(n) if n.isdigit() else n for n in moments], folder.name)
        if isinstance(labels, str):
            return labels
        of_numbers, groups, named = labels
        moments = {of_numbers[int(number)]: entry for number, entry in moments.items()}
    for name, entry in moments.items():
        lost = sorted(wanted - set(entry))
        if lost:
            return f"{folder.name}: the state of `{name}` has no {', '.join(lost)}"
    lazies = {key: {name: entry[key][1] for name, entry in moments.items()} for key in MOMENTS}
    if any(lazy is None for values in lazies.values() for lazy in values.values()):
        return f"{folder.name}: the moments are no tensors"
    steps = []
    for entry in moments.values():
        name, lazy = entry["step"]
        steps.append(step_of(chunks.value(name) if lazy is None else lazy.tensor(), folder.name))
    return at_one_step(steps, folder.name, lazies, groups, named)


def _number(value: Any) -> Any:
    """A rate may be a tensor of one element."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _groups(chunks: _Chunks, rest: Entries) -> list[dict[str, Any]]:
    """Hyperparameters of each group; of a flattened state, of parameters that have the same."""
    groups: dict[int, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for path, (name, _) in rest.items():
        if len(path) > 2 and path[-3] == "param_groups" and isinstance(path[-2], int):
            groups.setdefault(path[-2], {})[str(path[-1])] = _number(chunks.value(name))
        elif found := re.search(r"(?:^|\.)param_groups\.(.+)\.(\w+)$", str(path[-1])):
            flat.setdefault(found[1], {})[found[2]] = _number(chunks.value(name))
    joined: list[dict[str, Any]] = []
    for name, values in flat.items():
        same = next((g for g in joined if {**g, "params": ()} == {**values, "params": ()}), None)
        if same is None:
            joined.append({**values, "params": [name]})
        else:
            same["params"].append(name)
    return joined or [groups[number] for number in sorted(groups)]
