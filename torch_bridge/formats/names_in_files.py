"""Folders of transformers whose files have other names than the module: experts each for itself.

transformers renames and joins tensors as it loads them, by a table for each kind of model. The same
table is taken here, and what it joins is read piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError
from fzero.sharding.lazy_array import Index
from torch_bridge.module.lazy_tensor import LazyTensor
from torch_bridge.module.names import Layout


def named_as_in_the_module(
    path: Path, tensors: dict[str, LazyTensor], layout: Layout
) -> dict[str, LazyTensor]:
    """Tensors of a folder by the names that a module of transformers has for them.

    Args:
        path: a folder with a config.json beside the files, or one of them; of any other the names
            stay.
        tensors: by their names in the files.
        layout: of the module: it may be the model without its head, or another of that kind.

    Returns:
        The tensors by their new names; what the table does not know keeps its own.

    Raises:
        CheckpointError: transformers makes a tensor of several in a way that is not known here.
    """
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # older than such tables
        return tensors
    module = _module_of(path if path.is_dir() else path.parent, layout.kind)
    if module is None:
        return tensors
    own = dict.fromkeys(layout.leaf_of(), True)
    table = get_model_conversion_mapping(module)
    renames = [one for one in table if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in table if isinstance(one, loading.WeightConverter)]
    found: dict[str, LazyTensor] = {}
    joined: dict[str, dict[str, list[LazyTensor]]] = {}
    for name in sorted(tensors, key=loading.dot_natural_key):
        new, pattern = name, None
        if name not in own:
            asked = module.base_model_prefix, own
            new, pattern = loading.rename_source_key(name, renames, converters, *asked)
        if pattern is None and new in found:
            raise CheckpointError(f"{tensors[name].file}: `{name}` and another are both `{new}`")
        if pattern is None:
            found[new] = tensors[name].named(new)
        else:
            joined.setdefault(new, {}).setdefault(pattern, []).append(tensors[name])
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    for new, sources in joined.items():
        converter = of_pattern[next(iter(sources))]
        ordered = [sources[p] for p in converter.source_patterns if p in sources]
        found[new] = _converted(new, ordered, converter.operations)
    return found


def _module_of(folder: Path, own: str) -> Any:
    """The module that a folder is of, without memory; `None` if its config does not say.

    Older configs have no `architectures`, and only say which family they are of: it is of class
    `own` then, if that is one of this family, or the family's model without a head.
    """
    if not (folder / "config.json").is_file():
        return None
    import transformers

    try:
        # Code that stands beside the files is never run, nor asked about.
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        kind: Any = getattr(transformers, (config.architectures or [own])[0], None)
        if not config.architectures and getattr(kind, "config_class", None) is not type(config):
            kind = transformers.MODEL_MAPPING[type(config)]
        if not issubclass(kind, transformers.PreTrainedModel):
            return None
        with torch.device("meta"):
            return kind(config)
    except Exception:  # a config of something else, or of code that is not there
        return None


def _converted(
    name: str, found: Sequence[list[LazyTensor]], operations: Sequence[Any]
) -> LazyTensor:
    """What a table's operations make of lists of tensors, one for each of its patterns."""
    for operation in operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            found = [[stacked(one[0].name, one, operation.dim)] for one in found]
        elif kind == "Concatenate":
            found = [[one for several in found for one in several]]
            found = [[concatenated(found[0][0].name, found[0], operation.dim)]]
        else:
            raise CheckpointError(
                f"{found[0][0].file}: transformers makes `{name}` of `{found[0][0].name}` and"
                f" others by {kind}, which is not known here: load the module with from_pretrained,"
                " and convert it with its values"
            )
    if [len(one) for one in found] != [1]:
        raise CheckpointError(f"{found[0][0].file}: several tensors are `{name}`")
    return found[0][0].named(name)


def stacked(name: str, tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Tensors of one shape along a new dim."""
    shape = tensors[0].shape
    axis = dim % (len(shape) + 1)
    _require_alike(name, tensors, lambda one: one.shape)

    def fetch(index: Index) -> torch.Tensor:
        rest = (*index[:axis], *index[axis + 1 :])
        return torch.stack([one.tensor(rest) for one in tensors[index[axis]]], axis)

    whole = (*shape[:axis], len(tensors), *shape[axis:])
    return LazyTensor(name, tensors[0].torch_dtype, whole, fetch, tensors[0].file)


def concatenated(name: str, tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Tensors one after the other along a dim."""
    axis = dim % len(tensors[0].shape)
    _require_alike(name, tensors, lambda one: (*one.shape[:axis], *one.shape[axis + 1 :]))
    sizes = [one.shape[axis] for one in tensors]

    def fetch(index: Index) -> torch.Tensor:
        def of(low: int, high: int) -> Index:
            return (*index[:axis], slice(low, high), *index[axis + 1 :])

        begin, slices = 0, []
        for one, size in zip(tensors, sizes, strict=True):
            low = min(max(index[axis].start - begin, 0), size)
            high = min(max(index[axis].stop - begin, 0), size)
            begin += size
            if low < high or size == 0:
                slices.append(one.tensor(of(low, high)))
        return torch.cat(slices, axis) if slices else tensors[0].tensor(of(0, 0))

    whole = (*tensors[0].shape[:axis], sum(sizes), *tensors[0].shape[axis + 1 :])
    return LazyTensor(name, tensors[0].torch_dtype, whole, fetch, tensors[0].file)


def _require_alike(
    name: str, tensors: Sequence[LazyTensor], shape: Callable[[LazyTensor], Any]
) -> None:
    kinds: Mapping[Any, str] = {(shape(one), one.torch_dtype): one.name for one in tensors}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{tensors[0].file}: `{name}` is made of tensors that differ in shape or dtype:"
            f" {sorted(kinds.values())[:3]}"
        )
