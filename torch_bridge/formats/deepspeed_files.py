"""The files of a checkpoint of DeepSpeed, each read once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError
from torch_bridge.formats.torch_files import Inert, load_plain, sizes_of
from torch_bridge.module.lazy_tensor import LazyTensor, from_flat, take


STAND_INS: dict[str, type] = dict.fromkeys(
    (
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ),
    Inert,
)
FP32 = "fp32"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r".*expert_\d+_mp_rank_\d+_.*\.pt")


# What the files of model states hold, by data rank (None: all the same) and model rank.
Models = dict[tuple[int | None, int], dict[str, Any]]


@dataclass(frozen=True)
class Files:
    """The files of a folder by what they are: data rank (None: all the same) and model rank."""

    folder: Path
    models: dict[tuple[int | None, int], Path]
    optims: dict[tuple[int, int], Path]
    layers: dict[int, Path]

    @staticmethod
    def find(folder: Path) -> Files:
        files = Files(folder, {}, {}, {})
        for path in sorted(folder.iterdir()):
            if match := _MODEL.fullmatch(path.name):
                files.models[None if match[1] is None else int(match[1]), int(match[2])] = path
            elif match := _OPTIM.fullmatch(path.name):
                one = int(match[1]), int(match[2])
                if one in files.optims:
                    raise CheckpointError(
                        f"{folder.name}: {files.optims[one].name} and {path.name} are of one rank:"
                        " two runs wrote here; take away the files of one"
                    )
                files.optims[one] = path
            elif match := _LAYER.fullmatch(path.name):
                if int(match[2] or 0):
                    raise CheckpointError(
                        f"{folder.name}: {path.name} is a slice of a layer (tensor parallelism),"
                        " and does not say along which dim; merge the slices with the tools of the"
                        " framework that cut them, or convert to a universal checkpoint"
                    )
                files.layers[int(match[1])] = path
            elif _EXPERT.fullmatch(path.name):
                raise CheckpointError(
                    f"{folder.name}: {path.name}: expert parallelism is not covered; convert to a"
                    " universal checkpoint first (DeepSpeed's ds_to_universal)"
                )
        return files


def load_file(path: Path) -> dict[str, Any]:
    """The dict that a file holds; nothing in it runs."""
    content = load_plain(path, STAND_INS)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: expected a dict, got {type(content).__name__}")
    return content


def load_model(path: Path) -> dict[str, Any]:
    """What a `*_model_states.pt` holds."""
    content = load_file(path)
    degrees = content.get("checkpoint_parallel_dimensions")
    if isinstance(degrees, Mapping) and degrees.get("tp_degree", 1) != 1:
        raise CheckpointError(
            f"{path.name}: was saved with tensor parallelism ({degrees.get('tp_degree')}), which is"
            " not covered; convert to a universal checkpoint first (DeepSpeed's ds_to_universal)"
        )
    return content


def from_shards(
    name: str, shape: tuple[int, ...], ranks: Sequence[list[torch.Tensor]], offset: int, file: str
) -> LazyTensor:
    """A parameter of stage 3: an equal shard at the same offset of each rank's flat tensors."""
    total = math.prod(shape)
    each = -(-total // len(ranks))
    shards: list[torch.Tensor] = []
    for number, flats in enumerate(ranks):
        shards += take(flats, offset, min(each, total - number * each))
    return from_flat(name, shape, shards, file)


def shape_of(size: Any, name: Any, file: str) -> tuple[int, ...]:
    """The shape that a file gives for a name."""
    found = sizes_of(size)
    if found is None or not isinstance(name, str):
        raise CheckpointError(f"{file}: {name!r:.100} has no shape, but {size!r:.100}")
    return found
