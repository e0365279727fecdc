"""`.pt`, `.pth`, `.bin`: files of `torch.save`, read without running anything they contain.

`torch.load(weights_only=True)` rebuilds tensors and plain containers and refuses every other class
by name. Classes that are known to stand beside tensors in training checkpoints are replaced by
`Inert`, which does nothing. Tensors are mapped into memory: a slice reads its
own pages.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses import FakeTensorMode
from torch.serialization import safe_globals, set_default_mmap_options, skip_data

from fzero.errors import CheckpointError
from torch_bridge.formats.safetensors_files import merge_shard, read_index
from torch_bridge.module.lazy_tensor import LazyTensor, in_memory


# Bytes of a record that are held at once while its checksum is computed.
_BLOCK = 1 << 20
# What a file says beside its tensors' own bytes: some hundred bytes for each. One made to harm is
# small where it is compressed, and becomes objects of some eighty times its unpacked size.
_PICKLE_BYTES = 64 * 2**20


class Inert:
    """What takes the place of an object: it keeps the arguments, and has no behaviour."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Inert:
        new = super().__new__(cls)
        new.args = args
        return new

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# What training scripts put beside their tensors: arguments, paths, and numpy's numbers and arrays.
HARMLESS: dict[str, type] = dict.fromkeys(
    ("argparse.Namespace", "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
     "pathlib._local.WindowsPath", "torch.torch_version.TorchVersion", "numpy.dtype",
     "numpy.ndarray", "numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar",
     "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
    Inert,
)  # fmt: skip


def load_plain(path: Path, stand_ins: Mapping[str, type] | None = None) -> Any:
    """What a file of `torch.save` holds: tensors, plain values and containers of them.

    Args:
        path: the file.
        stand_ins: full names of classes, with what is made instead of them, beside `HARMLESS`
            ones; others are refused.

    Raises:
        CheckpointError: damaged, or it holds objects of other classes (named in the message).
    """
    known = {**HARMLESS, **(stand_ins or {})}
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _refuse_large(path)
            _refuse_globals(path, known)
        else:
            _refuse_others(path)
        with safe_globals([(cls, name) for name, cls in known.items()]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path.name}: cannot be read as plain tensors. Files that need unpickling of code "
            "are refused, because reading them runs whatever they contain; save "
            "module.state_dict() with torch.save instead. torch says: "
            f"{cause_of(error)}"
        ) from None


_ADVICE = re.compile(
    r"weights[_ ]only|safe_globals|trust(ed)? |can result in arbitrary", re.IGNORECASE
)


def cause_of(error: Exception) -> str:
    """What torch says is wrong, without its advice to read the file as code."""
    text = str(error).split("WeightsUnpickler error:")[-1]
    sentences = re.split(r"(?<=[.!?])\s+|\n", text)
    kept = [s.strip() for s in sentences if s.strip() and not _ADVICE.search(s)]
    return kept[0] if kept else type(error).__name__


def _refuse_others(path: Path) -> None:
    with path.open("rb") as file:
        first = file.read(1)
    if first != b"\x80":  # of any pickle since Python 2.3
        found = "is empty" if not first else "is no file of torch.save"
        raise CheckpointError(f"{path.name}: {found}, or what was written of one was cut off")


def _refuse_large(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        size = max((x.file_size for x in file.infolist() if x.filename.endswith("data.pkl")),
                   default=0)  # fmt: skip
    if size > _PICKLE_BYTES:
        raise CheckpointError(
            f"{path.name}: has {size:,} bytes beside its tensors, and more than {_PICKLE_BYTES:,}"
            " are not read: it is damaged, or made to take all memory. If it is yours, save"
            " the state_dict alone (torch.save), or long lists as tensors"
        )


def _refuse_globals(path: Path, known: Collection[str]) -> None:
    """Names everything that will not be read, instead of the first of it."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:
        return  # torch.load will say what is wrong
    refused = sorted(set(unknown) - set(known))
    if refused:
        raise CheckpointError(
            f"{path.name}: holds objects of {', '.join(refused)}, which are not plain tensors and "
            "values. Files that need unpickling of code are refused, because reading them runs "
            "whatever they contain; save without these objects"
        )


def read_state_dict(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The tensors of a flat `state_dict`, and further names of those that share memory.

    Args:
        path: the file.

    Raises:
        CheckpointError: damaged, not a flat dict of dense tensors, or a pickle that would have to
            run code to be read.
    """
    return weights_of(load_plain(path), path.name)


def weights_of(
    content: Any, file: str, key: str | None = None
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The same of what a file holds.

    Args:
        content: as `load_plain` gives it.
        file: its name, for messages.
        key: the entry that is the `state_dict`; None: the whole is.

    Raises:
        CheckpointError: no flat dict of dense tensors.
    """
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a state_dict, got {type(content).__name__}")
    nested = [
        k for k, v in content.items() if isinstance(v, dict) and any(map(is_dense, v.values()))
    ]
    if key is not None:
        if not isinstance(content.get(key), dict):
            raise CheckpointError(
                f"{file}: key={key!r}: no such entry that is a state_dict; there are {nested}"
            )
        content = content[key]
    elif nested:
        raise CheckpointError(
            f"{file}: holds several entries, of which {nested} may be the state_dict: say"
            f" which with key={nested[0]!r}"
        )
    wrong = [k for k, v in content.items() if not (isinstance(k, str) and is_dense(v))]
    if wrong:
        kinds = ", ".join(f"{k!r} ({type(content[k]).__name__})" for k in wrong[:5])
        raise CheckpointError(
            f"{file}: expected only tensors by name, but of {len(wrong)} entries that are others"
            f" the first are {kinds}. Take out what is none, and save .dequantize() of quantised"
            " tensors, .to_dense() of sparse ones, .full_tensor() of sharded ones"
        )
    return lazy_tensors(content, file)


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor that holds its elements."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
    )


def sizes_of(value: Any) -> tuple[int, ...] | None:
    """A shape that a file gives; None where it is none."""
    fine = isinstance(value, list | tuple) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    )
    return tuple(value) if fine else None


def lazy_tensors(
    content: Mapping[str, torch.Tensor], file: str
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Tensors of one file, and the ties among them (names of exactly the same memory)."""
    memory = {
        name: (x.data_ptr(), x.dtype, tuple(x.shape), x.stride()) if x.numel() else None
        for name, x in content.items()
    }
    ties = ties_in(memory)
    found = {name: in_memory(name, x, file) for name, x in content.items() if name not in ties}
    return found, ties


def ties_in(memory: Mapping[str, Any]) -> dict[str, str]:
    """Names of the same memory, each with the first one; nothing stands for memory of its own."""
    first: dict[Any, str] = {}
    kept = {name: first.setdefault(where or name, name) for name, where in memory.items()}
    return {name: one for name, one in kept.items() if one != name}


def read_sharded_bin(index: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """All tensors of the `.bin` files that an index lists.

    Raises:
        CheckpointError: as for each file, and where index and files disagree.
    """
    found: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    for file, names in read_index(index, ".bin").items():
        tensors, aliases = read_state_dict(index.parent / file)
        own = {**tensors, **{name: tensors[kept].named(name) for name, kept in aliases.items()}}
        merge_shard(index.name, file, names, own, found)
        ties.update(aliases)
    return {name: t for name, t in found.items() if name not in ties}, ties


def save_to(value: Any, file: IO[bytes]) -> None:
    """`torch.save`, whose archive fails to close after a disk was full, and says only that."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def write_plain(path: Path, content: Any) -> None:
    """Writes containers with `LazyTensor`s in them as `torch.save` does, one tensor after another.

    torch writes the file with room for the tensors, which are then filled in through a map of the
    file. Two places with one `LazyTensor` are one tensor in the file.

    Args:
        path: the file; written in place.
        content: dicts, lists, tuples, plain values and lazy tensors.
    """
    empty: dict[int, torch.Tensor] = {}
    lazy: dict[int, LazyTensor] = {}

    def skeleton(node: Any) -> Any:
        if isinstance(node, LazyTensor):
            lazy[id(node)] = node
            if id(node) not in empty:
                empty[id(node)] = torch.empty(node.shape, dtype=node.torch_dtype)
            return empty[id(node)]
        if isinstance(node, Mapping):
            return {key: skeleton(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(skeleton(value) for value in node)
        return node

    with path.open("w+b") as file:
        with FakeTensorMode(), skip_data(materialize_fake_tensors=True):
            save_to(skeleton(content), file)
        # The room is a hole: written through a map on a full disk, it would end the process.
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    # Shared, so that what is written to the tensors is written to the file.
    with set_default_mmap_options(mmap.MAP_SHARED):
        room = torch.load(path, mmap=True, weights_only=True)
    filled: set[int] = set()
    for target, source in _pairs(room, content):
        if id(source) not in filled:
            filled.add(id(source))
            target.copy_(source.tensor())
    del room
    _correct_checksums(path)


def _pairs(room: Any, content: Any) -> Iterator[tuple[torch.Tensor, LazyTensor]]:
    if isinstance(content, LazyTensor):
        yield room, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _pairs(room[key], value)
    elif isinstance(content, list | tuple):
        for one, value in zip(room, content, strict=True):
            yield from _pairs(one, value)


def _correct_checksums(path: Path) -> None:
    """Writes the checksums of what was filled in, in both places where a zip file has them.

    torch does not check them, but whoever else opens a zip file does.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        directory = archive.start_dir
    with path.open("r+b") as file:
        at = directory
        for record in records:
            file.seek(record.header_offset)
            name, extra = struct.unpack("<26xHH", file.read(30))
            file.seek(record.header_offset + 30 + name + extra)
            checksum, rest = 0, record.file_size
            while rest:
                block = file.read(min(_BLOCK, rest))
                checksum, rest = zlib.crc32(block, checksum), rest - len(block)
            # With this flag it stands after the data, behind a signature.
            after = record.header_offset + 30 + name + extra + record.file_size + 4
            local = after if record.flag_bits & 8 else record.header_offset + 14
            for offset in (local, at + 16):
                file.seek(offset)
                file.write(struct.pack("<I", checksum))
            file.seek(at + 28)
            at += 46 + sum(struct.unpack("<HHH", file.read(6)))
