"""Adapters in PEFT's format: `adapter_config.json` beside `adapter_model.safetensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.errors import CheckpointError
from torch_bridge.formats.safetensors_files import read_file, write_file
from torch_bridge.formats.staging import staged_directory
from torch_bridge.formats.torch_files import read_state_dict
from torch_bridge.formats.turns import Turns
from torch_bridge.module.adapters import Adapter, computes_otherwise, pick
from torch_bridge.module.lazy_tensor import LazyTensor


CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds an adapter as PEFT writes it."""
    return (Path(path) / CONFIG).is_file()


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What an adapter's `adapter_config.json` says.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    path = Path(folder) / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected an adapter's configuration: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def read_weights(folder: str | os.PathLike[str]) -> dict[str, LazyTensor]:
    """The tensors of an adapter, by their names in the file; none is read yet.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    for name, read in ((WEIGHTS, read_file), (PICKLED, read_state_dict)):
        path = Path(folder) / name
        if path.is_file():
            try:
                return read(path)[0]
            except CheckpointError as error:
                raise CheckpointError(f"{folder}: {error}") from error
    raise CheckpointError(f"{folder}: expected {WEIGHTS} (or {PICKLED}) beside {CONFIG}")


def read_fitting(folder: str | os.PathLike[str], adapter: Adapter) -> dict[str, LazyTensor]:
    """The tensors of an adapter that a module's own computes with as its configuration says.

    Raises:
        CheckpointError: damaged, or the configuration says something else.
    """
    other = computes_otherwise(adapter, read_config(folder))
    if other:
        said = ", ".join(f"{name}={a!r} (here {b!r})" for name, (a, b) in other.items())
        raise CheckpointError(
            f"{folder}: the adapter was trained with {said}: expected what the module's own says."
            " Convert a module with this adapter: tb.lora(base, folder), or"
            " peft.PeftModel.from_pretrained(module, folder)"
        )
    return read_weights(folder)


def write_adapter(
    folder: str | os.PathLike[str],
    adapter: Adapter,
    tensors: Mapping[str, LazyTensor],
    turns: Turns,
) -> None:
    """Writes an adapter as PEFT does; what was there is replaced at the end, or not at all.

    Args:
        folder: directory; it may hold other files.
        adapter: what it is.
        tensors: by leaf name.
        turns: who writes.

    Raises:
        CheckpointError: the folder is a file.
    """
    own = {key: tensors[leaf] for leaf, key in adapter.keys.items()}
    config = {**adapter.config, "inference_mode": True}
    with staged_directory(Path(folder), True, turns) as temporary, turns.turn() as mine:
        if mine:
            write_file(temporary / WEIGHTS, own)
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (temporary / CONFIG).write_text(text, encoding="utf-8")


def fit_adapter(converted: Any, folder: str | os.PathLike[str]) -> dict[str, LazyTensor]:
    """The tensors of an adapter in a folder by leaf name, in the leaves' dtypes.

    Args:
        converted: a converted module with adapters.
        folder: where it is.

    Raises:
        CheckpointError: damaged, or it does not fit.
    """
    found = pick(converted.adapters, None, "restore")
    leaves = {leaf.name: leaf for leaf in converted.layout.leaves}
    shapes = {leaf: leaves[leaf].shape for leaf in found.keys}
    given = fitted(found, shapes, read_fitting(folder, found), str(folder))
    return {name: tensor.cast(leaves[name].dtype) for name, tensor in given.items()}


def fitted(
    adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The values of an adapter by leaf name, from those by their names in PEFT's files.

    Args:
        adapter: what they are for.
        shapes: of its leaves, by name.
        given: arrays, or tensors that are read later.
        where: what messages begin with.

    Raises:
        CheckpointError: lists all that does not fit: most likely it is an adapter of another
            module, or of other targets or rank.
    """
    given = {_as_written(key): value for key, value in given.items()}
    unexpected = [key for key in given if key not in adapter.keys.values()]
    problems = [f"unexpected: `{key}`{_of_base(key)}" for key in unexpected]
    found: dict[str, Any] = {}
    for leaf, key in adapter.keys.items():
        if key not in given:
            problems.append(f"missing: `{key}`")
        elif "float" not in (dtype := str(getattr(given[key], "dtype", type(given[key])))):
            problems.append(f"dtype: `{key}` is {dtype}, expected floats")
        elif tuple(given[key].shape) != shapes[leaf]:
            have = tuple(given[key].shape)
            problems.append(f"shape: `{key}` is {have}, expected {shapes[leaf]}")
        else:
            found[leaf] = given[key]
    if problems:
        shown = "\n  ".join(problems[:20])
        raise CheckpointError(
            f"{where}: this adapter does not fit the module in {len(problems)} place(s); is it of"
            f" another base, of other targets or of another rank?\n  {shown}"
        )
    return found


def _of_base(key: str) -> str:
    """What to do with a weight of the base, which PEFT saves along where it may have changed."""
    if not key.endswith((".base_layer.weight", "embed_tokens.weight", "lm_head.weight")):
        return ""
    return (
        " (of the base: save_embedding_layers. Save the adapter without, or load it with"
        " peft.PeftModel.from_pretrained(module, folder), and convert that module)"
    )


def _as_written(key: str) -> str:
    """A tensor's name as PEFT writes it: DoRA's magnitudes have another within."""
    return key.removesuffix(".weight") if key.endswith("lora_magnitude_vector.weight") else key
