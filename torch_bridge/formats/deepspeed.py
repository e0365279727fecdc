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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError, warn
from torch_bridge.formats.adam import MOMENTS, at_one_step, read_optimizer
from torch_bridge.formats.content import Checkpoint, Optimizer, optimizer_fields
from torch_bridge.formats.deepspeed_files import (
    _LAYER,
    _MODEL,
    FP32,
    Files,
    Models,
    from_shards,
    load_file,
    load_model,
    shape_of,
)
from torch_bridge.formats.deepspeed_zero import ZeroFiles
from torch_bridge.formats.torch_files import is_dense, lazy_tensors
from torch_bridge.module.lazy_tensor import LazyTensor


# The files that name the newest step; the partitioned one goes before the universal.
_LATEST = ("latest", "latest_universal")
# What names of layers that a pipeline's stages share begin with.
_TIED = "tied_modules."


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
    _require_whole(files, models)
    tensors, ties = own_weights(files, models)
    optimized: dict[str, dict[str, LazyTensor]] = {key: {} for key in (FP32, *MOMENTS)}
    ranks = sorted({rank for _, rank in files.optims})
    zeros = [ZeroFiles.read(files, rank, _first(models, rank)) for rank in ranks]
    own = [zero.tensors() for zero in zeros]
    own, groups = _by_layers(own, [zero.groups() for zero in zeros], tensors, folder)
    for found in own:
        for key, values in found.items():
            _merge(optimized[key], values, folder)
    steps = [step for zero in zeros for step in zero.steps]
    unread = [zero.unread for zero in zeros if zero.unread]
    stage3 = any(data is not None for data, _ in files.models)
    frozen = frozen_weights(models, folder) if stage3 else {}
    tied = _tied_layers(tensors, optimized[FP32])
    ties = {**ties, **tied, **shared_names(models)}
    absent = absent_names(tensors, models) if stage3 else set()
    lost = sorted(absent - {*frozen, *optimized[FP32], *ties})
    if lost:
        raise CheckpointError(
            f"{folder.name}: {lost[:5]} are kept in parts, but no file has parts of them"
        )
    tensors = {name: t for name, t in tensors.items() if name not in {*tied, *absent}}
    tensors = {**tensors, **frozen, **optimized[FP32]}
    state = _first(models, 0) if models else {}
    optimizer: Optimizer | str | None = None
    if not files.optims:
        optimizer = _of_stages(models, folder.name)
        if optimizer is None and any("param_shapes" in state for state in models.values()):
            optimizer = (
                f"{folder.name}: ZeRO wrote it, but its *_optim_states.pt, with float32 weights and"
                " moments, are missing"
            )
    elif unread:
        optimizer = unread[0]
    elif steps:
        optimizer = at_one_step(steps, folder.name, optimized, groups)
    _require_layers(files, models, tensors, optimized[FP32], optimizer)
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


def _of_stages(models: Models, file: str) -> Any:
    """Without ZeRO each model rank's file has its optimizer, which numbers its own parameters."""
    found: list[Optimizer] = []
    ranks = sorted({rank for _, rank in models})
    without = []
    for rank in ranks:
        held = _first(models, rank).get("optimizer")
        if isinstance(held, Mapping) and "optimizer_state_dict" in held:
            return (
                f"{file}: its float32 weights and moments are those of 16 bits without ZeRO (stage"
                " 0), which are not read: save with stage 1"
            )
        own = read_optimizer(held, f"{file}, model rank {rank}")
        if isinstance(own, str):
            return own
        if own is None:
            without.append(rank)
            continue
        if own.named and len(ranks) > 1:
            return f"{file}: expected numbered parameters of model rank {rank}, got names"
        if own.named:
            return own
        found.append(own)
    if not found:
        return None
    if without:
        return f"{file}: model ranks {without} have no optimizer state, the other ones do"
    return _numbered_on(found, file)


def _numbered_on(stages: Sequence[Optimizer], file: str) -> Optimizer | str:
    """The stages' optimizers as one over the whole module, which has the groups of each.

    It numbers group by group, and so each group's parameters of all stages in a row.
    """
    hyper = [[{k: v for k, v in g.items() if k != "params"} for g in one.groups] for one in stages]
    if any(one != hyper[0] for one in hyper):
        return f"{file}: expected the same parameter groups in each stage of the pipeline"
    found: dict[str, dict[str, LazyTensor]] = {key: {} for key in MOMENTS}
    groups: list[Mapping[str, Any]] = []
    start = 0
    for number, rest in enumerate(hyper[0]):
        listed = [(one, str(n)) for one in stages for n in one.groups[number]["params"]]
        for new, (one, old) in enumerate(listed, start):
            for key, values in zip(MOMENTS, (one.exp_avg, one.exp_avg_sq), strict=True):
                found[key] |= {str(new): values[old]} if old in values else {}
        groups.append({**rest, "params": list(range(start, start + len(listed)))})
        start += len(listed)
    return at_one_step([one.step for one in stages], file, found, tuple(groups), named=False)


def _require_whole(files: Files, models: Models) -> None:
    """Raises `CheckpointError` if stages of a pipeline are missing, or files are of several steps.

    What is missing would go unseen: another stage's numbers, or weights in 16 bits, in its place.
    """
    folder, ranks = files.folder.name, {rank for _, rank in models}
    degrees = {n for state in models.values() if isinstance(n := state.get("mp_world_size"), int)}
    of_optims = {rank for _, rank in files.optims} or ranks
    for what, have, wanted in (
        *(("model states", ranks, set(range(n))) for n in degrees),
        ("optimizer states", of_optims, ranks | of_optims),
    ):
        if have != wanted:
            raise CheckpointError(
                f"{folder}: expected the {what} of model ranks {sorted(wanted)[:8]}, got those of"
                f" {sorted(have)[:8]}: files of the others are missing"
            )
    steps = {n for state in models.values() if isinstance(n := state.get("global_steps"), int)}
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder}: its files are of different steps {sorted(steps)[:5]}: a save was cut short"
        )


def _require_layers(
    files: Files,
    models: Models,
    tensors: Mapping[str, LazyTensor],
    fp32: Mapping[str, LazyTensor],
    optimizer: Optimizer | str | None,
) -> None:
    """Raises `CheckpointError` if a layer's file of a pipeline is missing; warns if one may be.

    Layers without a file are the functions among them; nothing else says how many layers there are.
    """
    if not files.layers and any(state.get("module") is not None for state in models.values()):
        return
    folder, have = files.folder.name, set(files.layers)
    learned = {int(first) for n in fp32 if (first := n.split(".")[0]).isdigit()}
    if lost := sorted(learned - have):
        raise CheckpointError(
            f"{folder}: expected layer_{lost[0]:02}-model_states.pt: layers {lost[:8]} learn, and"
            " have no files"
        )
    moments = optimizer.exp_avg if isinstance(optimizer, Optimizer) and not fp32 else {}
    spare = Counter(t.shape for t in moments.values()) - Counter(t.shape for t in tensors.values())
    if spare:
        raise CheckpointError(
            f"{folder}: its optimizers have moments of {spare.total()} parameters that no"
            f" layer_XX-model_states.pt has, of shapes {list(spare)[:5]}: there are layers"
            f" {sorted(have)[:50]}"
        )
    if gaps := sorted(set(range(max(have, default=0))) - have):
        warn(
            f"{folder}: there are no files of layers {gaps[:8]}, layer_{gaps[0]:02}-model_states.pt"
            " and so on: right if they are functions, or else their frozen weights and buffers are"
            " missing here"
        )


def _first(models: Models, rank: int) -> dict[str, Any]:
    """What the first data rank wrote for a model rank."""
    found = models.get((None, rank), models.get((0, rank)))
    if found is None:
        raise CheckpointError(
            f"expected mp_rank_{rank:02}_model_states.pt, or zero_pp_rank_0_mp_rank_{rank:02}_model"
            "_states.pt of stage 3: there is no file with that model rank's states"
        )
    return found


def own_weights(files: Files, models: Models) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """The module's own weights and buffers, as its `state_dict` has them."""
    contents = {
        path.name: {f"{number}.{name}": value for name, value in load_file(path).items()}
        for number, path in sorted(files.layers.items())
    }
    for (data, rank), state in models.items():
        if data in (None, 0) and state.get("module") is not None:
            contents[files.models[data, rank].name] = state["module"]
    found: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    for file, content in contents.items():
        tensors, aliases = lazy_tensors(_dense(content, file), file)
        if twice := sorted(set(tensors) & set(found)):
            raise CheckpointError(
                f"{file}: has {twice[:5]} as another model rank does: slices of them (tensor"
                " parallelism) are not covered"
            )
        found |= tensors
        ties |= aliases
    return found, ties


def _dense(content: Any, file: str) -> dict[str, torch.Tensor]:
    fine = isinstance(content, Mapping)
    if not fine or not all(isinstance(k, str) and is_dense(v) for k, v in content.items()):
        raise CheckpointError(f"{file}: expected a state_dict of dense tensors")
    return dict(content)


def absent_names(tensors: Mapping[str, LazyTensor], models: Models) -> set[str]:
    """Weights that are empty in a module's own file because stage 3 keeps them in parts."""
    buffers = {name for state in models.values() for name in state.get("buffer_names") or ()}
    return {name for name, tensor in tensors.items() if tensor.shape == (0,)} - buffers


_Tensors = dict[str, dict[str, LazyTensor]]
_Groups = tuple[Mapping[str, Any], ...]


def _by_layers(
    own: list[_Tensors], groups: list[_Groups], weights: Mapping[str, LazyTensor], folder: Path
) -> tuple[list[_Tensors], _Groups]:
    """The stages' tensors and groups, with names that tell stages apart.

    `TiedLayerSpec` ties a layer's weight; its bias has one name in two stages, and is not the same.
    It gets the name that the layer's file has, which is found by its bits.

    Args:
        own: of each stage, the parameters by kind and name.
        groups: of each stage, its groups of parameters.
        weights: what the layers' files have, by `NUMBER.name`.
        folder: for messages.
    """
    first: dict[str, LazyTensor] = {}
    differing: set[str] = set()
    for found in own:
        for name, tensor in found.get(FP32, {}).items():
            before = first.setdefault(name, tensor)
            if name.startswith(_TIED) and before is not tensor:
                differing |= set() if torch.equal(before.tensor(), tensor.tensor()) else {name}
    taken: set[str] = set()
    named: list[dict[str, str]] = []
    for found in own:
        new: dict[str, str] = {}
        for name in sorted(differing & set(found.get(FP32, {}))):
            layers = [n for n in _layers_of(name, found[FP32][name], weights) if n not in taken]
            if not layers:
                raise CheckpointError(
                    f"{folder.name}: `{name}` has other values in each stage of the pipeline, and"
                    " no layer's file has those of one: expected layer_XX-model_states.pt of all"
                )
            new[name] = layers[0]
            taken.add(layers[0])
        named.append(new)
    renamed = [
        {key: {new.get(name, name): x for name, x in values.items()}
         for key, values in found.items()}
        for found, new in zip(own, named, strict=True)
    ]  # fmt: skip
    listed = tuple(
        {**group, "params": [new.get(name, name) for name in group["params"]]}
        for several, new in zip(groups, named, strict=True)
        for group in several
    )
    return renamed, listed


def _merge(into: dict[str, LazyTensor], found: Mapping[str, LazyTensor], folder: Path) -> None:
    """Adds the parameters of a model rank; tied layers of a pipeline are in several, all equal."""
    for name, tensor in found.items():
        if name in into and not name.startswith(_TIED):
            raise CheckpointError(
                f"{folder.name}: `{name}` is in the files of several model ranks: slices of one"
                " parameter (tensor parallelism) are not covered"
            )
        into.setdefault(name, tensor)


def shared_names(models: Models) -> dict[str, str]:
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
        if name.startswith(_TIED):
            layers = _layers_of(name, tensor, weights)
            ties.update({n: name for n in layers if n not in fp32 and n not in ties})
    return ties


def _layers_of(name: str, tensor: LazyTensor, weights: Mapping[str, LazyTensor]) -> Iterator[str]:
    """What the layers' files call a tied module's values, as far as these are the same bits."""
    inner = name.split(".", 2)[-1]
    for other, weight in weights.items():
        if other.split(".", 1)[-1] == inner and weight.shape == tensor.shape:
            value = tensor.tensor().to(weight.torch_dtype).view(torch.uint8)
            if torch.equal(value, weight.tensor().contiguous().view(torch.uint8)):
                yield other


def frozen_weights(models: Models, folder: Path) -> dict[str, LazyTensor]:
    """Stage 3's weights that do not learn: each data rank's file has a part."""
    found: dict[str, LazyTensor] = {}
    for rank in sorted({rank for _, rank in models}):
        own = {d: s for (d, r), s in sorted(models.items()) if r == rank and d is not None}
        states = list(own.values())
        shapes = (states[0].get("frozen_param_shapes") or {}) if states else {}
        expected = (states[0].get("dp_world_size") or max(own) + 1) if shapes else 0
        if shapes and sorted(own) != list(range(expected)):
            raise CheckpointError(
                f"{folder.name}: expected the model states of data ranks 0 to {expected - 1}, got"
                f" those of {sorted(own)}: parts of weights that do not learn are missing"
            )
        for name, size in shapes.items():
            shape = shape_of(size, name, folder.name)
            shards: list[Any] = [(s.get("frozen_param_fragments") or {}).get(name) for s in states]
            if not all(is_dense(shard) for shard in shards):
                raise CheckpointError(f"{folder.name}: a part of `{name}` is missing")
            flats = [[shard.reshape(-1)] for shard in shards]
            found[name] = from_shards(str(name), shape, flats, 0, folder.name)
    return found
