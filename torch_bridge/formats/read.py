"""`checkpoint`: finds out what a file or directory is, and what it holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fzero.checkpoint.urls import is_url
from fzero.errors import CheckpointError
from torch_bridge.formats.adam import read_beside, read_optimizer
from torch_bridge.formats.content import Checkpoint, optimizer_fields
from torch_bridge.formats.dcp import is_dcp, read_dcp
from torch_bridge.formats.deepspeed import find_step, read_deepspeed
from torch_bridge.formats.deepspeed_universal import is_universal, read_universal
from torch_bridge.formats.lightning import read_lightning
from torch_bridge.formats.safetensors_files import read_file, read_sharded
from torch_bridge.formats.torch_files import (
    load_plain,
    read_sharded_bin,
    read_state_dict,
    weights_of,
)


PICKLED = (".pt", ".pth", ".bin")
LIGHTNING = ".ckpt"
SUFFIXES = (".safetensors", *PICKLED, LIGHTNING)


def checkpoint(path: str | os.PathLike[str], key: str | None = None) -> Checkpoint:
    """What a checkpoint of PyTorch holds: names, dtypes, shapes, ties, optimizer state.

    Nothing in it is executed, and no tensor is read before it is asked for.

    Args:
        path: a `.safetensors`, `.pt`, `.pth`, `.bin` or (Lightning's) `.ckpt` file, or a directory
            of Hugging Face, `torch.distributed.checkpoint` or DeepSpeed.
        key: which entry of a `.pt`, `.pth` or `.bin` file is the `state_dict`, as in
            `torch.save({"model": module.state_dict(), "optimizer": ..., "epoch": 3}, path)`. The
            optimizer's `state_dict` in the entries beside it, also in a list or under a name, is
            read, too; so is `optimizer.pt` beside the weights of a directory. Of a directory of
            `torch.distributed.checkpoint`, which entry is read ("generator", "ema.model"), and the
            optimizer in it, or else beside it.

    Raises:
        CheckpointError: no such file, none of these formats, damaged, or it holds pickled objects
            that would have to run code to be read.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(torch.nn.Linear(3, 2).state_dict(), folder + "/model.pt")
        ...     found = checkpoint(folder + "/model.pt")
        >>> found.format, {name: tensor.shape for name, tensor in found.tensors.items()}
        ('torch', {'weight': (2, 3), 'bias': (2,)})
    """
    if is_url(path):
        raise CheckpointError(
            f"{path}: what is in an object store is read by tb.restore and tb.load, or copied first"
        )
    source = Path(path)
    try:
        if source.is_dir() and is_dcp(source):
            return read_dcp(source, key)
        return _directory(source) if source.is_dir() and key is None else _file(source, key)
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged file led to that no reader expected
        raise CheckpointError(
            f"{source}: damaged: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def _file(source: Path, key: str | None) -> Checkpoint:
    suffix = source.suffix.lower()
    if not source.exists():
        raise CheckpointError(f"{source}: no such file")
    if source.is_dir():
        raise CheckpointError(
            f"{source}: key={key!r}: a directory says itself where its weights are; leave key= out,"
            f" or give one of its {', '.join(PICKLED)} files"
        )
    if suffix not in SUFFIXES:
        raise CheckpointError(
            f"{source.name}: unknown suffix {suffix!r}; expected one of {', '.join(SUFFIXES)},"
            " or a directory"
        )
    if not source.is_file():
        raise CheckpointError(f"{source}: expected a file")
    if key is not None and suffix not in PICKLED:
        raise CheckpointError(
            f"{source.name}: key={key!r}: only {', '.join(PICKLED)} files and directories of"
            " torch.distributed.checkpoint have entries by key"
        )
    if suffix == ".safetensors":
        tensors, ties = read_file(source)
        return Checkpoint(str(source), "safetensors", tensors, ties=ties)
    if suffix == LIGHTNING:
        return read_lightning(source)
    content = load_plain(source)
    tensors, ties = weights_of(content, source.name, key)
    optimizer = None if key is None else read_beside(content, source.name)
    return Checkpoint(str(source), "torch", tensors, ties=ties, **optimizer_fields(optimizer))


def _optimizer_beside(folder: Path) -> Any:
    """What transformers' Trainer and Accelerate write beside the weights, or why it is not read."""
    for file in (folder / "optimizer.pt", folder / "optimizer.bin"):
        if file.is_file():
            try:
                return read_optimizer(load_plain(file), file.name)
            except CheckpointError as error:
                return str(error)
    return None


def _directory(folder: Path) -> Checkpoint:
    step = find_step(folder)
    if step is not None:
        return read_universal(step) if is_universal(step) else read_deepspeed(step)
    for pattern, kind, read in (
        # In transformers' order. Its save_pretrained leaves an older index beside one file.
        ("model.safetensors", "safetensors", read_file),
        ("model.safetensors.index.json", "safetensors, sharded", read_sharded),
        ("pytorch_model.bin", "torch", read_state_dict),
        ("pytorch_model.bin.index.json", "torch, sharded", read_sharded_bin),
        # Other libraries have names of their own: adapter_model, diffusion_pytorch_model, ...
        ("*.safetensors.index.json", "safetensors, sharded", read_sharded),
        ("*.safetensors", "safetensors", read_file),
    ):
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        if len(files) > 1:
            raise CheckpointError(
                f"{folder}: {[path.name for path in files[:5]]} may be one checkpoint or several,"
                " and there is no index; give one of the files"
            )
        if files:
            tensors, ties = read(files[0])
            beside = optimizer_fields(_optimizer_beside(folder))
            return Checkpoint(str(folder), kind, tensors, ties=ties, **beside)
    raise CheckpointError(
        f"{folder}: no checkpoint that can be read; expected model.safetensors,"
        " model.safetensors.index.json, pytorch_model.bin, pytorch_model.bin.index.json, .metadata"
        " (torch.distributed.checkpoint), or latest and a step's folder (DeepSpeed)"
    )
