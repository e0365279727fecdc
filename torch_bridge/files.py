"""Weight files, `.safetensors` and `.pt`: written whole or not at all, read without code."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fzero.errors import CheckpointError

from .convert import Converted
from .sequential import ConvertedSequential
from .statedict import state_dict


_PICKLED = (".pt", ".pth", ".bin")


def save(
    path: str | os.PathLike[str],
    converted: Converted | ConvertedSequential,
    state_or_params: Any,
) -> None:
    """Write a state as a weight file that PyTorch loads; an existing file is replaced at the end.

    In `.safetensors` a tied tensor is stored once, under the name that transformers keeps, with
    its other names in the metadata (as `safetensors.torch.save_model` has it), so that both
    `from_pretrained` and `load` tie again. `.pt`, `.pth` and `.bin` hold all names.

    Args:
        path: file to write; its suffix says the format.
        converted: the module or chain that the state was made from.
        state_or_params: as for `state_dict`.

    Raises:
        CheckpointError: an unknown suffix, or a state that does not fit.

    Example:
        >>> import tempfile
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/model.safetensors", converted, converted.params)
        ...     sorted(load(folder + "/model.safetensors"))
        ['bias', 'weight']
    """
    target = Path(path)
    suffix = _suffix(target)
    tensors = state_dict(converted, state_or_params)
    with _replacing(target) as temporary:
        if suffix == ".safetensors":
            _write_safetensors(temporary, converted, tensors)
        else:
            torch.save(tensors, temporary)


def load(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read a weight file; nothing in it is ever executed.

    Args:
        path: a `.safetensors`, `.pt`, `.pth` or `.bin` file that holds a flat `state_dict`.

    Returns:
        CPU tensors by name; names that were tied when the file was written share one tensor.

    Raises:
        CheckpointError: no such file, damaged, not a flat dict of tensors, or a pickle that would
            have to run code to be read.

    Example:
        >>> load("nowhere.pt")
        Traceback (most recent call last):
        fzero.errors.CheckpointError: nowhere.pt: no such file
    """
    source = Path(path)
    suffix = _suffix(source)
    if not source.is_file():
        raise CheckpointError(f"{source}: no such file")
    return _read_safetensors(source) if suffix == ".safetensors" else _read_pickle(source)


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix != ".safetensors" and suffix not in _PICKLED:
        known = ", ".join((".safetensors", *_PICKLED))
        raise CheckpointError(f"{path.name}: unknown suffix {suffix!r}; expected one of {known}")
    return suffix


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[str]:
    """A temporary file beside `target` that takes its place only when written completely."""
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's 0600 would hide the file from others
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _write_safetensors(
    path: str, converted: Converted | ConvertedSequential, tensors: Mapping[str, torch.Tensor]
) -> None:
    kept: dict[str, torch.Tensor] = {}
    metadata = {"format": "pt"}  # transformers refuses files without it
    for leaf in converted.layout.leaves:
        names = [name for name in leaf.names if name in tensors]
        if names:
            first = leaf.saved_name if leaf.saved_name in names else names[0]
            kept[first] = tensors[first].contiguous()
            metadata.update({name: first for name in names if name != first})
    save_file(kept, path, metadata=metadata)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path.name}: not a readable safetensors file: {error}") from error
    for name, kept in metadata.items():
        if name not in tensors and kept in tensors:
            tensors[name] = tensors[kept]
    return tensors


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path.name}: cannot be read as plain tensors. Files that need unpickling of code "
            "are refused, because reading them runs whatever they contain; save "
            "module.state_dict() with torch.save instead. torch says: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: expected a state_dict, got {type(content).__name__}")
    wrong = [k for k, v in content.items() if not (isinstance(k, str) and _is_tensor(v))]
    if wrong:
        raise CheckpointError(
            f"{path.name}: expected only tensors by name, but {wrong[:5]!r} are not; if the "
            "state_dict is nested in the file, save that entry on its own"
        )
    return {name: value.detach() for name, value in content.items()}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
