"""`.safetensors`: one file, or shards with an index as Hugging Face writes them.

Reading goes through the safetensors library, which refuses headers that are too large or not
JSON, and tensors that overlap, leave gaps or do not fill the file. A slice reads its own bytes.
Writing streams: the header follows from shapes alone, then tensor after tensor is written.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fzero.errors import CheckpointError
from fzero.sharding.lazy_array import Index
from torch_bridge.formats.turns import Turns
from torch_bridge.module.lazy_tensor import LazyTensor


# The format's own names of dtypes, in the order in which the library's serializer puts tensors
# into a file: what is aligned most comes first.
_DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_ORDER = {code: rank for rank, code in enumerate(_DTYPES)}
_METADATA = "__metadata__"
# transformers refuses files without it.
_FORMAT = {"format": "pt"}
# An index has some hundred bytes for each tensor, and a model some ten thousand tensors.
_INDEX_BYTES = 64 * 2**20
# A file's number and how many there are, as all libraries name shards.
_SHARD = re.compile(r"-(\d+)-of-(\d+)(?=\.)")


def read_file(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The tensors of one file, and further names of them that its metadata gives.

    Raises:
        CheckpointError: damaged, or a dtype that torch does not have.
    """
    try:
        # The handle stays open as long as one of the tensors is there.
        file: Any = safe_open(path, framework="pt", device="cpu")
        metadata = file.metadata() or {}
        found: dict[str, LazyTensor] = {}
        for name in file.keys():  # noqa: SIM118 (not a dict)
            stored = file.get_slice(name)
            dtype = _DTYPES.get(str(stored.get_dtype()))
            if dtype is None:
                raise CheckpointError(
                    f"{path.name}: `{name}` has dtype {stored.get_dtype()}, which is not covered"
                )
            shape = tuple(int(n) for n in stored.get_shape())
            found[name] = LazyTensor(name, dtype, shape, partial(_slice, file, name), path.name)
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path.name}: not a readable safetensors file: {error}") from error
    ties = {
        name: kept for name, kept in metadata.items()
        if name not in _FORMAT and name not in found and kept in found
    }  # fmt: skip
    return found, ties


def _slice(file: Any, name: str, index: Index) -> torch.Tensor:
    found: torch.Tensor = file.get_slice(name)[index]
    return found


def read_index(path: Path, suffix: str) -> dict[str, list[str]]:
    """The tensor names of each file that an index lists; the files lie beside it.

    Args:
        path: the index.
        suffix: what its files end with.

    Raises:
        CheckpointError: not such an index, or it names files elsewhere.
    """
    try:
        if path.stat().st_size > _INDEX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes; expected at most {_INDEX_BYTES:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: not a readable index: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{path.name}: expected a weight_map of tensor names to files")
    files: dict[str, list[str]] = {}
    for name, file in names.items():
        if not isinstance(file, str) or not file.endswith(suffix) or not _is_bare(file):
            raise CheckpointError(
                f"{path.name}: `{name}` is said to be in {file!r}: expected the bare name of a"
                f" {suffix} file beside the index"
            )
        files.setdefault(file, []).append(name)
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise CheckpointError(f"{path.name}: lists {missing[:5]}, which are not beside it")
    _require_all_shards(path.name, files)
    return files


def _require_all_shards(index: str, files: Collection[str]) -> None:
    """Refuses an index that leaves out a whole file: their names say how many there are."""
    listed: dict[tuple[str, str], set[int]] = {}
    for file in files:
        if found := _SHARD.search(file):
            listed.setdefault((file[: found.start()], found[2]), set()).add(int(found[1]))
    for (stem, total), numbers in listed.items():
        if len(numbers) < int(total):
            raise CheckpointError(
                f"{index}: lists {len(numbers)} of the {int(total)} files {stem}-...-of-{total},"
                f" numbers {sorted(numbers)[:5]}; what is in the others would be missing. Copy the"
                " checkpoint again, index included; where it is meant to be a part, give the files"
                " names, there and in the index, without -of-"
            )


def _is_bare(file: str) -> bool:
    return Path(file).name == file and not any(c in file for c in "\\:\0")


def read_sharded(index: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """All tensors of the files that an index lists, and their further names.

    Raises:
        CheckpointError: as for each file, and where index and files disagree.
    """
    found: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    for file, names in read_index(index, ".safetensors").items():
        tensors, aliases = read_file(index.parent / file)
        merge_shard(index.name, file, names, tensors, found)
        ties.update(aliases)
    return found, {name: kept for name, kept in ties.items() if name not in found}


def merge_shard(
    index: str,
    file: str,
    names: Sequence[str],
    tensors: Mapping[str, LazyTensor],
    into: dict[str, LazyTensor],
) -> None:
    """Adds the tensors of one shard, which must be exactly those that the index lists."""
    wrong = set(tensors) ^ set(names)
    twice = set(tensors) & set(into)
    if wrong or twice:
        raise CheckpointError(
            f"{index} and {file} disagree about"
            f" {sorted(wrong)[:5] if wrong else sorted(twice)[:5]}"
            f"{' (in another file, too)' if twice and not wrong else ''}; is a file of another"
            " checkpoint among them?"
        )
    into.update(tensors)


def write_file(
    path: Path, tensors: Mapping[str, LazyTensor], ties: Mapping[str, str] | None = None
) -> None:
    """Writes one file, tensor after tensor; the same bytes as the library's `save_file`.

    Args:
        path: the file; written in place.
        tensors: what to write; each is read once.
        ties: further names of some of them, which go into the metadata.

    Raises:
        CheckpointError: a dtype that the format does not have.
    """
    wrong = {n: t.torch_dtype for n, t in tensors.items() if t.torch_dtype not in _CODES}
    if wrong or _METADATA in tensors:
        raise CheckpointError(f"{path.name}: safetensors cannot hold {wrong or _METADATA}")
    codes = {name: _CODES[tensor.torch_dtype] for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (_ORDER[codes[name]], name.encode()))
    known = {n: kept for n, kept in (ties or {}).items() if kept in tensors}
    header: dict[str, Any] = {_METADATA: dict(sorted({**known, **_FORMAT}.items()))}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].num_bytes
        header[name] = {
            "dtype": codes[name], "shape": list(tensors[name].shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            # A file of torch may have conjugates and negatives as views that are computed later.
            own = tensors[name].tensor().resolve_conj().resolve_neg()
            flat = own.contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


def shards(
    tensors: Mapping[str, LazyTensor], max_shard_size: int, stem: str, suffix: str
) -> dict[str, list[str]]:
    """Which tensors go into which file: in order, a new file where the next one does not fit.

    Args:
        tensors: all of them.
        max_shard_size: bytes; a larger tensor gets a file of its own.
        stem: such as `model`.
        suffix: such as `.safetensors`.

    Returns:
        Tensor names by file name; one file has no number.
    """
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.num_bytes > max_shard_size:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.num_bytes
    if len(files) == 1:
        return {f"{stem}{suffix}": files[0]}
    total = len(files)
    return {f"{stem}-{i:05}-of-{total:05}{suffix}": f for i, f in enumerate(files, 1)}


def write_directory(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    ties: Mapping[str, str],
    max_shard_size: int,
    turns: Turns,
) -> None:
    """Writes `model.safetensors`, or numbered shards and `model.safetensors.index.json`.

    Args:
        folder: an empty directory.
        tensors: what to write; read once each, one after the other.
        ties: further names.
        max_shard_size: bytes of tensors in a file.
        turns: who writes.
    """
    files = shards(tensors, max_shard_size, "model", ".safetensors")
    for number, (file, names) in enumerate(files.items()):
        with turns.turn(number, len(files)) as mine:
            if mine:
                write_file(folder / file, {name: tensors[name] for name in names}, ties)
    if len(files) > 1 and turns.leads:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
