"""`.ckpt` of PyTorch Lightning: a dict with the weights, the optimizers' states and the loops'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.errors import CheckpointError
from torch_bridge.formats.adam import optimizer_state, read_optimizer, step_of
from torch_bridge.formats.content import Checkpoint, optimizer_fields
from torch_bridge.formats.torch_files import Inert, is_dense, lazy_tensors, load_plain, write_plain


# Classes that Lightning and its users put beside the tensors; none of them is needed.
_STAND_INS: dict[str, type] = {
    f"{package}.{name}": stand_in
    for package in (
        "lightning",
        "lightning.pytorch",
        "lightning_fabric",
        "pytorch_lightning",
        "lightning.fabric",
    )
    for name, stand_in in {
        "utilities.data.AttributeDict": dict,
        "utilities.parsing.AttributeDict": dict,
        "callbacks.model_checkpoint.ModelCheckpoint": Inert,
        "callbacks.early_stopping.EarlyStopping": Inert,
    }.items()
}
_VERSION = "pytorch-lightning_version"
# The version whose layout is written: what its loops keep is what `loops` below holds.
_WRITTEN_VERSION = "2.0.0"


def read_lightning(path: Path) -> Checkpoint:
    """The weights, the first optimizer's moments and the step of a Lightning checkpoint.

    Raises:
        CheckpointError: damaged, not one of Lightning, or it holds objects of classes that are not
            known to be harmless (named in the message).
    """
    content = load_plain(path, _STAND_INS)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise CheckpointError(f"{path.name}: expected a Lightning checkpoint with a state_dict")
    weights = content["state_dict"]
    wrong = [k for k, v in weights.items() if not (isinstance(k, str) and is_dense(v))]
    if wrong:
        raise CheckpointError(f"{path.name}: state_dict: {wrong[:5]!r} are not dense tensors")
    tensors, ties = lazy_tensors(weights, path.name)
    states = content.get("optimizer_states")
    states = states if isinstance(states, list) else []
    optimizer = read_optimizer(states[0], path.name) if states else None
    extra: dict[str, Any] = {
        key: step_of(content[key], path.name) for key in ("global_step", "epoch") if key in content
    }
    if len(states) > 1:
        optimizer = f"{path.name}: expected the state of one optimizer, got {len(states)}"
        extra["optimizers"] = len(states)
    params = content.get("hyper_parameters")
    if isinstance(params, Mapping):
        extra["hyper_parameters"] = dict(params)
    version = content.get(_VERSION)
    return Checkpoint(
        str(path), "PyTorch Lightning", tensors, version=str(version) if version else None,
        ties=ties, extra=extra, **optimizer_fields(optimizer),
    )  # fmt: skip


def write_lightning(path: Path, content: Checkpoint) -> None:
    """Writes what `Trainer.fit(ckpt_path=...)` and `load_from_checkpoint` take.

    Parameters are numbered in the order of the weights, as in an optimizer over all that learn.
    """
    tensors = content.by_name()
    optimizer = content.optimizer
    step = int(content.extra.get("global_step", optimizer.step if optimizer else 0))
    epoch = int(content.extra.get("epoch", 0))
    states: list[Any] = []
    if optimizer is not None:
        of_weights = [name for name in tensors if name in optimizer.exp_avg]
        order = of_weights if optimizer.named else sorted(optimizer.exp_avg, key=int)
        states = [optimizer_state(optimizer, order)]
    write_plain(
        path,
        {
            "epoch": epoch,
            "global_step": step,
            _VERSION: _WRITTEN_VERSION,
            "state_dict": tensors,
            "loops": _loops(step, epoch),
            "callbacks": {},
            "optimizer_states": states,
            "lr_schedulers": [],
        },
    )


def _loops(step: int, epoch: int) -> dict[str, Any]:
    """Progress as Lightning's fit loop keeps it: `step` updates done, `epoch` epochs finished."""
    names = ("ready", "completed", "started", "processed")

    def progress(count: int, keys: tuple[str, ...] = names) -> dict[str, dict[str, int]]:
        return {"total": dict.fromkeys(keys, count), "current": dict.fromkeys(keys, 0)}

    optimizer = {"step": progress(step, names[:2]), "zero_grad": progress(step, names[:3])}
    return {
        "fit_loop": {
            "state_dict": {},
            "epoch_loop.state_dict": {"_batches_that_stepped": step},
            "epoch_loop.batch_progress": {**progress(step), "is_last_batch": False},
            "epoch_loop.scheduler_progress": progress(0, names[:2]),
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": progress(0, names[:2]),
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": {**progress(0), "is_last_batch": False},
            "epoch_progress": progress(epoch),
        }
    }
