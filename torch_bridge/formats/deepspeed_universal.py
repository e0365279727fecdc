"""DeepSpeed's universal checkpoints: one folder for each parameter, whatever the parallelism.

`TAG/zero/NAME/` holds `fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt`; beside `zero/` are
the model's own files. Each file is a tensor, or a dict with one under "param". What comes from
stage 3 is flat, and its shape is in the model's files; the step is in `zero/optimizer_state.pt`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero.errors import CheckpointError
from torch_bridge.formats.adam import MOMENTS, at_one_step, groups_of, step_of
from torch_bridge.formats.content import Checkpoint, Optimizer, optimizer_fields
from torch_bridge.formats.deepspeed import absent_names, frozen_weights, own_weights, shared_names
from torch_bridge.formats.deepspeed_files import (
    FP32,
    STAND_INS,
    Files,
    Models,
    load_file,
    load_model,
    shape_of,
)
from torch_bridge.formats.torch_files import is_dense, load_plain, save_to, write_plain
from torch_bridge.formats.turns import Turns
from torch_bridge.module.lazy_tensor import LazyTensor, from_flat, in_memory


# DeepSpeed refuses files without a version; from this one on it can load universal checkpoints.
_VERSION = "0.14.0"
_INFO_VERSION = 0.2


def is_universal(folder: Path) -> bool:
    """Whether a step's folder is a universal checkpoint."""
    zero = folder / "zero"
    return zero.is_dir() and any((path / f"{FP32}.pt").is_file() for path in zero.iterdir())


def read_universal(folder: Path) -> Checkpoint:
    """All weights (fp32 where there are masters), buffers, Adam's moments and the step.

    Raises:
        CheckpointError: damaged or incomplete.
    """
    models, own, ties = _modules(folder)
    states = [state for (data, _), state in models.items() if data in (None, 0)]
    shapes = _learned_shapes(states, folder)
    found, steps, unread = _folders(folder, shapes)
    if lost := sorted(set(shapes) - set(found[FP32])):
        raise CheckpointError(f"{folder.name}: {lost[:5]} learn, but have no folders in zero/")
    # What has no moments does not learn: the module has it in its own dtype.
    moments = found["exp_avg"]
    learned = {n: t for n, t in found[FP32].items() if n in moments or n not in own}
    tensors = {**own, **learned}
    for name, kept in ties.items():
        if kept in tensors and name not in moments:
            tensors.pop(name, None)
    path = folder / "zero" / "optimizer_state.pt"
    common = load_file(path) if path.is_file() else {}
    first = states[0] if states else {}
    optimizer: Optimizer | str | None = unread
    if moments and (partly := sorted(set(shapes) - set(moments))):
        optimizer = f"{folder.name}: {partly[:5]} learn, but have no moments; other ones have"
    elif moments and unread is None:
        steps = steps or _steps(common, folder)
        optimizer = at_one_step(steps, folder.name, found, _groups(common, states))
    version = first.get("ds_version", common.get("ds_version"))
    return Checkpoint(
        str(folder), "DeepSpeed universal", tensors, version=str(version) if version else None,
        ties={name: kept for name, kept in ties.items() if name not in tensors and kept in tensors},
        extra={k: first[k] for k in ("global_steps",) if isinstance(first.get(k), int)},
        **optimizer_fields(optimizer),
    )  # fmt: skip


def _modules(folder: Path) -> tuple[Models, dict[str, LazyTensor], dict[str, str]]:
    """What the module's files hold, by data rank (`None`: of all) and model rank; the weights in
    them, as the module has them; and the names of one tensor, each with the one that is kept."""
    files = Files.find(folder)
    # `write_universal` leaves files for stage 3 beside those: the same without the parameters.
    for rank in {rank for data, rank in files.models if data is None}:
        files.models.pop((0, rank), None)
    models = {key: load_model(path) for key, path in sorted(files.models.items())}
    own, ties = own_weights(files, models)
    if any(data is not None for data, _ in models):
        absent = absent_names(own, models)
        own = {name: tensor for name, tensor in own.items() if name not in absent}
        own |= frozen_weights(models, folder)
    return models, own, ties | shared_names(models)


def _learned_shapes(states: Sequence[Any], folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of what is trained, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for group in (group for state in states for group in state.get("param_shapes") or ()):
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{folder.name}: param_shapes are not shapes by name")
        shapes |= {name: shape_of(size, name, folder.name) for name, size in group.items()}
    return shapes


def _folders(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, dict[str, LazyTensor]], list[int], str | None]:
    """Each parameter's tensors by kind and name, the steps, and what was not read, in words."""
    tensors: dict[str, dict[str, LazyTensor]] = {key: {} for key in (FP32, *MOMENTS)}
    steps: list[int] = []
    unread = None
    for path in sorted((folder / "zero").iterdir()):
        found = {file.stem for file in path.glob("*.pt")} if path.is_dir() else set()
        if not found:
            continue
        if FP32 not in found:
            raise CheckpointError(f"{folder.name}: `{path.name}` has no {FP32}.pt")
        if found - {FP32, *MOMENTS, "step"}:
            unread = f"{folder.name}: `{path.name}` has {sorted(found)}, expected Adam's alone"
        has = {key for key in MOMENTS if key in found}
        if len(has) == 1:
            raise CheckpointError(f"{folder.name}: `{path.name}` has only one of {MOMENTS}")
        for key in (FP32, *sorted(has)):
            tensors[key][path.name] = _tensor(path, key, shapes.get(path.name))
        if "step" in found:
            steps.append(step_of(load_plain(path / "step.pt", STAND_INS), path.name))
    return tensors, steps, unread


def _tensor(path: Path, key: str, shape: tuple[int, ...] | None) -> LazyTensor:
    where = f"{path.name}/{key}.pt"
    content = load_plain(path / f"{key}.pt", STAND_INS)
    value: Any = content.get("param") if isinstance(content, dict) else content
    if not is_dense(value):
        raise CheckpointError(f"{where}: expected a tensor")
    if shape is None or tuple(value.shape) == shape:
        return in_memory(path.name, value, where)
    return from_flat(path.name, shape, [value.detach().reshape(-1)], where)


def _steps(common: Mapping[str, Any], folder: Path) -> list[int]:
    inner = common.get("optimizer_state_dict")
    state = inner.get("state") if isinstance(inner, Mapping) else None
    entries = state.values() if isinstance(state, Mapping) else ()
    steps = [e["step"] for e in entries if isinstance(e, Mapping) and "step" in e]
    if not steps:
        raise CheckpointError(f"{folder.name}: does not say at which step its moments are")
    return [step_of(step, folder.name) for step in steps]


def _groups(common: Mapping[str, Any], states: list[dict[str, Any]]) -> tuple[Any, ...]:
    groups = common.get("param_groups")
    shapes = states[0].get("param_shapes") if states else None
    if not isinstance(groups, list) or not isinstance(shapes, list) or len(groups) != len(shapes):
        return ()
    return tuple(
        {**group, "params": list(names)}
        for group, names in zip(groups, shapes, strict=True)
        if isinstance(group, Mapping) and isinstance(names, Mapping)
    )


def write_universal(folder: Path, content: Checkpoint, turns: Turns) -> None:
    """Writes what DeepSpeed loads with `"checkpoint": {"load_universal": true}` and ZeRO 1 to 3.

    Stage 3 has a model file of its own, and reads no checkpoint without moments.

    Args:
        folder: an empty directory.
        content: what to write; with moments by name, or without.
        turns: who writes.

    Raises:
        CheckpointError: a parameter's name cannot be that of a folder.
    """
    optimizer = content.optimizer
    if optimizer is not None and not optimizer.named:
        raise CheckpointError(
            "universal: this optimizer state numbers its parameters; bring it into a state with"
            " tb.restore(..., names=[...]) first, and save that"
        )
    # Without moments nobody knows which tensors learn: floats are taken to.
    learned = optimizer.exp_avg if optimizer else {
        name: tensor for name, tensor in content.tensors.items()
        if tensor.torch_dtype.is_floating_point
    }  # fmt: skip
    by_name = content.by_name()
    step = optimizer.step if optimizer else 0
    step = int(content.extra.get("step", content.extra.get("global_steps", step)))
    tag = f"global_step{step}_universal"
    zero = folder / tag / "zero"
    for name in learned:
        no_folder = Path(name).name != name or name in ("", "..") or {"\\", "\0"} & set(name)
        if no_folder or name not in by_name:
            raise CheckpointError(f"universal: there is no folder or no weight for `{name}`")
    kinds = {FP32: {name: by_name[name].cast(torch.float32) for name in learned}}
    if optimizer is not None:
        kinds |= {"exp_avg": dict(optimizer.exp_avg), "exp_avg_sq": dict(optimizer.exp_avg_sq)}
    names, count = list(learned), turns.count
    for number in range(count):
        with turns.turn(number, count) as mine:
            if mine:
                own = names[len(names) * number // count : len(names) * (number + 1) // count]
                _write_folders(zero, own, kinds, optimizer)
    with turns.turn() as mine:
        if mine:
            zero.mkdir(parents=True, exist_ok=True)
            shapes = OrderedDict((name, torch.Size(by_name[name].shape)) for name in learned)
            _write_models(folder / tag, content, _model_state(content, shapes, step))
            for file in ("latest_universal", "latest"):
                (folder / file).write_text(tag, encoding="utf-8")


def _write_folders(
    zero: Path,
    names: list[str],
    kinds: Mapping[str, Mapping[str, LazyTensor]],
    optimizer: Optimizer | None,
) -> None:
    """The folders of some parameters, kind by kind: layers of a stack come from one array."""
    for name in names:
        (zero / name).mkdir(parents=True)
    for kind, tensors in kinds.items():
        for name in names:
            whole = tensors[name].tensor().clone()
            with (zero / name / f"{kind}.pt").open("wb") as file:
                save_to({"param": whole, "cat_dim": 0}, file)
    if optimizer is not None:
        for name in names:
            torch.save(torch.tensor(float(optimizer.step)), zero / name / "step.pt")


def _write_models(folder: Path, content: Checkpoint, model: dict[str, Any]) -> None:
    """What lies beside the parameters' folders."""
    optimizer = content.optimizer
    groups = groups_of(optimizer, [0]) if optimizer else []
    common: dict[str, Any] = {
        "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0, "ds_version": _VERSION,
        "param_groups": groups,
    }  # fmt: skip
    write_plain(folder / "mp_rank_00_model_states.pt", model)
    if optimizer is not None:
        state = {0: {"step": torch.tensor(float(optimizer.step))}}
        common["optimizer_state_dict"] = {"state": state, "param_groups": groups}
        # Stage 3's modules hold empty parameters; it refuses others, frozen ones too.
        here = set(model["buffer_names"])
        by_name = content.by_name()
        absent = {n: t if n in here else torch.empty(0) for n, t in by_name.items()}
        stage_3 = {**model, "module": absent}
        write_plain(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", stage_3)
    torch.save(common, folder / "zero" / "optimizer_state.pt")


def _model_state(content: Checkpoint, shapes: Any, step: int) -> dict[str, Any]:
    """What DeepSpeed's engine reads beside the parameters."""
    by_name = content.by_name()
    learned = {kept for name in shapes for kept in (name, content.ties.get(name, name))}
    return {
        "module": by_name,
        "buffer_names": [n for n in content.tensors if n not in learned],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {name: kept for name, kept in content.ties.items() if kept in shapes},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": _INFO_VERSION},
    }
