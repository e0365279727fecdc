"""Writes what DeepSpeed writes: the files of ZeRO 1, 2 and 3 for any number of ranks.

Layouts as in the files of DeepSpeed 0.19 beside this directory's `zero1` and `zero3`.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def foreign_class(path: str, base: type = object) -> Iterator[Any]:
    """A class that pickles as one of a package that is not installed."""
    module, _, name = path.rpartition(".")
    parts = module.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {n: sys.modules.get(n) for n in names}
    for n in names:
        sys.modules[n] = types.ModuleType(n)
    made = type(name, (base,), {"__module__": module})
    setattr(sys.modules[module], name, made)
    try:
        yield made
    finally:
        for n, old in before.items():
            if old is None:
                del sys.modules[n]
            else:
                sys.modules[n] = old


def save(content: Any, path: Path) -> None:
    with foreign_class("deepspeed.runtime.fp16.loss_scaler.LossScaler") as scaler:
        content.get("optimizer_state_dict", content)["loss_scaler"] = scaler()
        torch.save(content, path)


State = Mapping[str, Mapping[str, torch.Tensor]]  # "fp32", "exp_avg", "exp_avg_sq", by name


def write_zero(
    root: Path,
    state: State,
    groups: Sequence[Sequence[str]],
    ranks: int,
    stage: int,
    step: int,
    buffers: Mapping[str, torch.Tensor],
    align: int = 1,
) -> Path:
    """Writes a checkpoint; returns the folder of its step.

    Args:
        align: of stages 1 and 2, what parameters' places in a group are multiples of.
    """
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    shapes = [OrderedDict((n, state["fp32"][n].shape) for n in group) for group in groups]
    cut = _cut_parameters if stage == 3 else _cut_groups
    paddings = [[-state["fp32"][n].numel() % align for n in group] for group in groups]

    def placed(values: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        """What is not read is 7."""
        return [
            [torch.cat([values[n].reshape(-1), torch.full((pad,), 7.0)]) if pad else values[n]
             for n, pad in zip(group, own, strict=True)]
            for group, own in zip(groups, paddings, strict=True)
        ]  # fmt: skip

    parts = {key: cut(placed(values), ranks) for key, values in state.items()}
    weights = {n: t.bfloat16() if stage < 3 else torch.empty(0) for n, t in state["fp32"].items()}
    model = {
        "module": {**weights, **buffers},
        "buffer_names": list(buffers),
        "param_shapes": shapes,
        "shared_params": {},
        "ds_version": "0.12.0",
        "global_steps": step,
    }
    for rank in range(ranks):
        if stage == 3:
            save(dict(model), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        own = {key: values[rank] for key, values in parts.items()}
        inner = {
            "state": {
                i: {"step": step, "exp_avg": own["exp_avg"][i], "exp_avg_sq": own["exp_avg_sq"][i]}
                for i in range(len(groups))
            },
            "param_groups": [{"lr": 1e-3, "params": [i]} for i in range(len(groups))],
        }
        zero: dict[str, Any] = {"zero_stage": stage}
        if stage == 3:
            zero |= {"partition_count": ranks, "fp32_flat_groups": own["fp32"],
                     "optimizer_state_dict": inner}  # fmt: skip
        else:
            ends = [sum(s.numel() for s in group.values()) + sum(pads)
                    for group, pads in zip(shapes, paddings, strict=True)]  # fmt: skip
            lean = [flat[: max(0, end - rank * len(flat))]
                    for flat, end in zip(own["fp32"], ends, strict=True)]  # fmt: skip
            if align > 1:
                zero["param_alignment_paddings"] = paddings
            zero |= {"partition_count": [ranks] * len(groups), "base_optimizer_state": inner,
                     "single_partition_of_fp32_groups": lean}  # fmt: skip
        prefix = "bf16_" if stage == 3 else ""
        save(
            {"optimizer_state_dict": zero, "ds_version": "0.12.0"},
            folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    if stage < 3:
        save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def _cut_groups(groups: list[list[torch.Tensor]], ranks: int) -> list[list[torch.Tensor]]:
    """Each group's parameters end to end, padded to a multiple of 2 * ranks, one part a rank."""
    found: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        flat = torch.cat([t.reshape(-1) for t in group])
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % (2 * ranks))])
        for rank, part in enumerate(padded.chunk(ranks)):
            found[rank].append(part.clone())
    return found


def _cut_parameters(groups: list[list[torch.Tensor]], ranks: int) -> list[list[torch.Tensor]]:
    """Each parameter padded to a multiple of ranks; a rank's parts of a group end to end."""
    found: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        padded = [torch.cat([t.reshape(-1), t.new_zeros(-t.numel() % ranks)]) for t in group]
        for rank in range(ranks):
            found[rank].append(torch.cat([p.chunk(ranks)[rank] for p in padded]))
    return found
