"""DeepSpeed's directories: fp32 weights and Adam moments out of ZeRO's partitioned files.

A directory has a folder for each saved step, and a file `latest` that names one. In it, per model
rank (a pipeline stage), `mp_rank_XX_model_states.pt` holds the module's own weights and buffers and
the shapes of its parameters in order; per data rank, `..._optim_states.pt` holds flat fp32 tensors:

- Stages 1 and 2 lay the parameters of each group end to end and cut that into one part per rank.
  The parts are padded to a multiple of twice the number of ranks; the fp32 ones lose it again.
- Stage 3 cuts each parameter into equal parts, the last ones padded, and lays the parts of one rank
  end to end. Weights that do not learn are cut likewise, and stay in the model's files.

The files are those of `torch.save` with a few objects of DeepSpeed's own among plain values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError
from torch_bridge.formats.adam import MOMENTS, one_step, read_optimizer, step_of, unaccounted
from torch_bridge.formats.content import Checkpoint, Optimizer, optimizer_fields
from torch_bridge.formats.torch_files import Inert, is_dense, lazy_tensors, load_plain
from torch_bridge.module.lazy import LazyTensor, flat_piece, take


STAND_INS: dict[str, type] = dict.fromkeys(
    (
        "argparse.Namespace",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "torch.torch_version.TorchVersion",
    ),
    Inert,
)
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r".*expert_\d+_mp_rank_\d+_.*\.pt")
_FP32 = "fp32"
# The files that name the newest step; the partitioned one goes before the universal.
_LATEST = ("latest", "latest_universal")


def find_step(folder: Path) -> Path | None:
    """The folder with DeepSpeed's files: the given one, or the one that its `latest` names.

    Raises:
        CheckpointError: `latest` names something else than a folder beside it.
    """
    if any(_MODEL.fullmatch(path.name) or _LAYER.fullmatch(path.name) for path in folder.iterdir()):
        return folder
    latest = next((f for n in _LATEST if (f := folder / n).is_file()), None)
    if latest is None:
        return folder if (folder / "zero").is_dir() else None
    name = latest.read_bytes()[:4096].decode("utf-8", "replace").strip()
    if not name or Path(name).name != name or "\\" in name or not (folder / name).is_dir():
        raise CheckpointError(f"{latest}: expected the name of a folder beside it, got {name!r}")
    return folder / name


def read_deepspeed(folder: Path) -> Checkpoint:
    """All weights (fp32 where ZeRO has them), buffers, Adam's moments and the step.

    Args:
        folder: a folder that `find_step` gave.

    Raises:
        CheckpointError: damaged, incomplete, with objects of unknown classes, or with tensor or
            expert parallelism, whose files do not say how they belong together.
    """
    files = Files.find(folder)
    models = {key: load_model(path) for key, path in sorted(files.models.items())}
    tensors, ties = own_weights(files, models)
    pieces: dict[str, dict[str, LazyTensor]] = {_FP32: {}, "exp_avg": {}, "exp_avg_sq": {}}
    steps: list[int] = []
    groups: tuple[Mapping[str, Any], ...] = ()
    unread: list[str] = []
    for rank in sorted({rank for _, rank in files.optims}):
        zero = _Zero.read(files, rank, _first(models, rank))
        for key, found in zero.pieces().items():
            _merge(pieces[key], found, folder)
        steps += zero.steps
        groups += zero.groups()
        unread += [zero.unread] if zero.unread else []
    stage3 = any(data is not None for data, _ in files.models)
    frozen = frozen_weights(models, folder) if stage3 else {}
    tied = _tied_layers(tensors, pieces[_FP32])
    ties = {**ties, **tied, **shared_names(models)}
    absent = absent_names(tensors, models) if stage3 else set()
    lost = sorted(absent - {*frozen, *pieces[_FP32], *ties})
    if lost:
        raise CheckpointError(
            f"{folder.name}: {lost[:5]} are kept in parts, but no file has parts of them"
        )
    tensors = {name: t for name, t in tensors.items() if name not in {*tied, *absent}}
    tensors = {**tensors, **frozen, **pieces[_FP32]}
    state = _first(models, 0) if models else {}
    optimizer: Optimizer | str | None = None
    if not files.optims:
        optimizer = _of_stages(models, folder.name)
    elif unread:
        optimizer = unread[0]
    elif steps:
        optimizer = Optimizer(
            one_step(steps, folder.name), pieces["exp_avg"], pieces["exp_avg_sq"], groups
        )
    kind = "DeepSpeed" if not files.optims else f"DeepSpeed ZeRO-{'3' if stage3 else '1/2'}"
    extra = {k: state[k] for k in ("global_steps", "global_samples", "dp_world_size",
             "mp_world_size") if isinstance(state.get(k), int)}  # fmt: skip
    version = state.get("ds_version")
    return Checkpoint(
        str(folder), kind + (", pipeline" if files.layers else ""), tensors,
        version=str(version) if version else None,
        ties={name: kept for name, kept in ties.items() if name not in tensors and kept in tensors},
        extra=extra, **optimizer_fields(optimizer),
    )  # fmt: skip


def _of_stages(models: Mapping[tuple[int | None, int], dict[str, Any]], file: str) -> Any:
    """Without ZeRO each model rank's file has its optimizer, which numbers its own parameters.

    All of them are numbered on, stage after stage.
    """
    found: dict[str, dict[str, LazyTensor]] = {key: {} for key in MOMENTS}
    groups: list[Mapping[str, Any]] = []
    steps: list[int] = []
    ranks = sorted({rank for _, rank in models})
    without = []
    start = 0
    for rank in ranks:
        own = read_optimizer(_first(models, rank).get("optimizer"), f"{file}, model rank {rank}")
        if isinstance(own, str):
            return own
        if own is None:
            without.append(rank)
            continue
        if own.named and len(ranks) > 1:
            return f"{file}: expected numbered parameters of model rank {rank}, got names"
        if own.named:
            return own
        for key in MOMENTS:
            values = own.exp_avg if key == MOMENTS[0] else own.exp_avg_sq
            found[key] |= {str(int(number) + start): value for number, value in values.items()}
        groups += [{**g, "params": [n + start for n in g["params"]]} for g in own.groups]
        steps.append(own.step)
        start += own.num_params
    if not steps:
        return None
    if without:
        return f"{file}: model ranks {without} have no optimizer state, the other ones do"
    return Optimizer(
        one_step(steps, file), found["exp_avg"], found["exp_avg_sq"], _joined(groups), named=False
    )


def _joined(groups: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """One group where all stages have the same hyperparameters: that is what the user made."""
    rest = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    if any(one != rest[0] for one in rest):
        return tuple(groups)
    return ({**rest[0], "params": [n for group in groups for n in group["params"]]},)


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
                files.optims[int(match[1]), int(match[2])] = path
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


def _load(path: Path) -> dict[str, Any]:
    content = load_plain(path, STAND_INS)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name}: expected a dict, got {type(content).__name__}")
    return content


def load_model(path: Path) -> dict[str, Any]:
    content = _load(path)
    degrees = content.get("checkpoint_parallel_dimensions")
    if isinstance(degrees, Mapping) and degrees.get("tp_degree", 1) != 1:
        raise CheckpointError(
            f"{path.name}: was saved with tensor parallelism ({degrees.get('tp_degree')}), which is"
            " not covered; convert to a universal checkpoint first (DeepSpeed's ds_to_universal)"
        )
    return content


def _first(models: Mapping[tuple[int | None, int], dict[str, Any]], rank: int) -> dict[str, Any]:
    """What the first data rank wrote for a model rank."""
    found = models.get((None, rank), models.get((0, rank)))
    if found is None:
        raise CheckpointError(f"there is no file with the model states of model rank {rank}")
    return found


def own_weights(
    files: Files, models: Mapping[tuple[int | None, int], dict[str, Any]]
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The module's own weights and buffers, as its `state_dict` has them."""
    found: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    for number, path in sorted(files.layers.items()):
        content = {f"{number}.{name}": value for name, value in _load(path).items()}
        tensors, aliases = lazy_tensors(_dense(content, path.name), path.name)
        found.update(tensors)
        ties.update(aliases)
    for (data, rank), state in models.items():
        if data in (None, 0) and state.get("module") is not None:
            name = files.models[data, rank].name
            tensors, aliases = lazy_tensors(_dense(state["module"], name), name)
            if set(tensors) & set(found):
                raise CheckpointError(
                    f"{name}: has {sorted(set(tensors) & set(found))[:5]} as another model rank"
                    " does: slices of them (tensor parallelism) are not covered"
                )
            found.update(tensors)
            ties.update(aliases)
    return found, ties


def _dense(content: Any, file: str) -> dict[str, torch.Tensor]:
    fine = isinstance(content, Mapping)
    if not fine or not all(isinstance(k, str) and is_dense(v) for k, v in content.items()):
        raise CheckpointError(f"{file}: expected a state_dict of dense tensors")
    return dict(content)


def absent_names(
    tensors: Mapping[str, LazyTensor], models: Mapping[Any, Mapping[str, Any]]
) -> set[str]:
    """Weights that are empty in a module's own file because stage 3 keeps them in parts."""
    buffers = {name for state in models.values() for name in state.get("buffer_names") or ()}
    return {name for name, tensor in tensors.items() if tensor.shape == (0,)} - buffers


def _merge(into: dict[str, LazyTensor], found: Mapping[str, LazyTensor], folder: Path) -> None:
    """Adds the parameters of a model rank; tied layers of a pipeline are in several, all equal."""
    for name, tensor in found.items():
        if name in into and not name.startswith("tied_modules."):
            raise CheckpointError(
                f"{folder.name}: `{name}` is in the files of several model ranks: slices of one"
                " parameter (tensor parallelism) are not covered"
            )
        into.setdefault(name, tensor)


def shared_names(models: Mapping[Any, dict[str, Any]]) -> dict[str, str]:
    ties: dict[str, str] = {}
    for state in models.values():
        shared = state.get("shared_params")
        pairs = shared.items() if isinstance(shared, Mapping) else shared or ()
        ties.update({str(name): str(kept) for name, kept in pairs})
    return ties


def _tied_layers(
    weights: Mapping[str, LazyTensor], fp32: Mapping[str, LazyTensor]
) -> dict[str, str]:
    """Which layer of a pipeline holds a tied module's weights.

    Their fp32 values are `tied_modules.KEY.name`, the layer's file has them as `NUMBER.name`; they
    are found by their bits.
    """
    ties: dict[str, str] = {}
    for name, tensor in fp32.items():
        if not name.startswith("tied_modules."):
            continue
        inner = name.split(".", 2)[-1]
        for other, weight in weights.items():
            same = other.split(".", 1)[-1] == inner and weight.shape == tensor.shape
            if same and other not in fp32 and other not in ties:
                value = tensor.tensor().to(weight.torch_dtype)
                if torch.equal(
                    value.view(torch.uint8), weight.tensor().contiguous().view(torch.uint8)
                ):
                    ties[other] = name
    return ties


def frozen_weights(
    models: Mapping[tuple[int | None, int], dict[str, Any]], folder: Path
) -> dict[str, LazyTensor]:
    """Stage 3's weights that do not learn: each data rank's file has a part."""
    found: dict[str, LazyTensor] = {}
    for rank in sorted({rank for _, rank in models}):
        states = [s for (d, r), s in sorted(models.items()) if r == rank and d is not None]
        for name, size in (states[0].get("frozen_param_shapes") or {}).items():
            shape = shape_of(size, name, folder.name)
            parts: list[Any] = [(s.get("frozen_param_fragments") or {}).get(name) for s in states]
            if not all(is_dense(part) for part in parts):
                raise CheckpointError(f"{folder.name}: a part of `{name}` is missing")
            flats = [[part.reshape(-1)] for part in parts]
            found[name] = _from_parts(str(name), shape, flats, 0, folder.name)
    return found


def _from_parts(
    name: str, shape: tuple[int, ...], ranks: Sequence[list[torch.Tensor]], offset: int, file: str
) -> LazyTensor:
    """A parameter of stage 3: an equal part at the same offset of each rank's flat tensors."""
    total = math.prod(shape)
    each = -(-total // len(ranks))
    parts: list[torch.Tensor] = []
    for number, flats in enumerate(ranks):
        parts += take(flats, offset, min(each, total - number * each))
    return flat_piece(name, shape, parts, file)


def shape_of(size: Any, name: Any, file: str) -> tuple[int, ...]:
    """A shape that a file gives."""
    fine = isinstance(size, tuple | list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in size
    )
    if not fine or not isinstance(name, str):
        raise CheckpointError(f"{file}: {name!r:.100} has no shape, but {size!r:.100}")
    return tuple(size)


@dataclass(frozen=True)
class _Zero:
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
    def read(files: Files, rank: int, model: Mapping[str, Any]) -> _Zero:
        paths = {data: path for (data, r), path in sorted(files.optims.items()) if r == rank}
        name = next(iter(paths.values())).name
        states: list[Any] = [_load(p).get("optimizer_state_dict") for p in paths.values()]
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
            raise CheckpointError(f"{name}: its model states have no param_shapes")
        shapes = [{n: shape_of(size, n, name) for n, size in group.items()} for group in groups]
        flats: dict[str, list[list[torch.Tensor]]] = {key: [] for key in (_FP32, *MOMENTS)}
        bases = [_base(state, stage3, name) for state in states]
        unread = _unread(bases, states, name)
        steps: list[int] = []
        for state, base in zip(states, bases, strict=True):
            flats[_FP32].append(_flat(state.get(fp32), name))
            if unread is None and any(base):
                for key in MOMENTS:
                    flats[key].append(_flat([entry[key] for entry in base], name))
                steps += [step_of(s, name) for s in _base_steps(state, base)]
        if any(len(values) not in (0, len(states)) for values in flats.values()):
            raise CheckpointError(f"{name}: some ranks have moments and some have none")
        paddings = [] if stage3 else _paddings(first, shapes, name)
        return _Zero(
            name, shapes, flats, steps, stage3, paddings, _hyper(first), unread
        )  # fmt: skip

    def pieces(self) -> dict[str, dict[str, LazyTensor]]:
        """All parameters out of the flat tensors, by kind and name."""
        return {
            key: self._whole(ranks) if self.stage3 else self._cut(ranks)
            for key, ranks in self.flats.items()
            if ranks
        }

    def _cut(self, ranks: list[list[torch.Tensor]]) -> dict[str, LazyTensor]:
        """Stages 1 and 2: a group's parameters are one range of all ranks' parts."""
        found: dict[str, LazyTensor] = {}
        if any(len(flat) != len(self.shapes) for flat in ranks):
            raise CheckpointError(f"{self.file}: expected {len(self.shapes)} parameter groups")
        for number, group in enumerate(self.shapes):
            flats = [flat[number] for flat in ranks]
            start = 0
            for (name, shape), padding in zip(group.items(), self.paddings[number], strict=True):
                found[name] = flat_piece(
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
        """Stage 3: each parameter has a part at the same place of every rank's range."""
        found: dict[str, LazyTensor] = {}
        offset = 0
        for group in self.shapes:
            for name, shape in group.items():
                found[name] = _from_parts(name, shape, ranks, offset, self.file)
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
        base = [entries[key] for key in sorted(entries)] if isinstance(entries, Mapping) else None
    if not isinstance(base, list) or not all(isinstance(entry, Mapping) for entry in base):
        raise CheckpointError(f"{file}: has no state of the optimizer inside")
    return base


def _base_steps(state: Mapping[str, Any], base: list[Mapping[str, Any]]) -> list[Any]:
    """The step of each group; elastic files have one for all, some optimizers one by group."""
    return [entry["step"] for entry in base if "step" in entry] or _common_steps(state)


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
