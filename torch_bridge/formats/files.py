"""Checkpoints of PyTorch: written whole or not at all, read without code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint.urls import is_url
from fzero.errors import CheckpointError, warn
from fzero.hosts.activity import doing
from fzero.plan import Plan
from fzero.state.selection import read_from
from torch_bridge.converted import Converted
from torch_bridge.formats.adam import groups_like, require_all, require_known
from torch_bridge.formats.adapters import adapter_content, merged_content
from torch_bridge.formats.multiprocess_write import in_turns, require_same_request
from torch_bridge.formats.peft import write_adapter
from torch_bridge.formats.read import checkpoint
from torch_bridge.formats.remote import fetched, sent
from torch_bridge.formats.state import state_content
from torch_bridge.formats.turns import Turns
from torch_bridge.formats.write import format_of, holds_optimizer, write_in_turns
from torch_bridge.moments import follows_schedule
from torch_bridge.sequential import ConvertedSequential


def save(
    path: str | os.PathLike[str],
    converted: Converted | ConvertedSequential,
    state_or_params: Any,
    plan: Plan | None = None,
    *,
    to: str | None = None,
    max_shard_size: int | str = "5GB",
    optimizer: bool | torch.optim.Optimizer | None = None,
    hyper: Mapping[str, Any] | None = None,
    merge: bool = False,
    adapter: str | None = None,
    which: str = "params",
) -> None:
    """Write a state as a checkpoint that PyTorch loads; what is there is replaced at the end.

    Leaves are copied to the host one after the other, so that it never holds two of them. Over
    several processes every process calls this. Formats of several files (shards of safetensors,
    "dcp", "universal") are written by all in turn, one leaf at a time; a single file by process 0.

    In `.safetensors` a tied tensor is stored once, under the name that transformers keeps, with
    its other names in the metadata (as `safetensors.torch.save_model` has it), so that both
    `from_pretrained` and `load` tie again. `.pt`, `.pth` and `.bin` hold all names.

    Args:
        path: file to write, whose suffix says the format, or a directory: then as Hugging Face
            does, in shards with an index where the weights do not fit into one file. Also in an
            object store, `s3://` or `gs://`, by way of each host's disk; a folder there is new.
        converted: the module or chain that the state was made from.
        state_or_params: as for `state_dict`.
        plan: likewise.
        to: the format, where the path does not say it. "dcp-flat" is "dcp" for those who load with
            `flatten_optimizer_state_dict`; "peft": the adapter alone, into a directory, as PEFT
            writes it.
        max_shard_size: bytes of weights in one file of a directory, as a number or as "5GB".
        optimizer: whether Adam's moments are written: by default where the format has a place for
            them and the state has them; True demands it. A state that keeps more than
            these (Muon's momentum, slow weights) is refused. Such formats hold float32 masters of
            parameters of 16 bits, too. Neither if this is False. A torch Adam or AdamW over the
            module's parameters demands it for that one to load: in its groups, numbered in its
            order, with its hyperparameters (`.ckpt`, "dcp"); its own state is not read.
        hyper: hyperparameters to write beside them, by torch's names (`lr`, `betas`, `eps`,
            `weight_decay`; what schedulers keep there, as `initial_lr`): an optax state does not
            hold them, and a torch optimizer takes over what a checkpoint says. What is not given is
            torch's default of AdamW.
        merge: write the module without adapters, with what they add in its weights (`tb.merge`).
        which: of a `TrainState`, the `params` or their moving averages (`ema`), which have no
            moments.
        adapter: which adapter `merge` and "peft" mean, where the module has several.

    Raises:
        CheckpointError: an unknown suffix or hyperparameter, a state that does not fit, an option
            that says nothing of what is written, or arguments that differ between processes.

    Example:
        >>> import tempfile
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/model.safetensors", converted, converted.params)
        ...     sorted(load(folder + "/model.safetensors"))
        ['bias', 'weight']
    """
    with doing("tb.save"):
        groups = _groups(converted, optimizer, hyper)
        demanded = True if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        asked = _Asked(to, max_shard_size, demanded, groups, merge, adapter)
        chosen = read_from(state_or_params, which, "save")
        # That of process 0 counts; `fzero train` gives the others a folder to throw away.
        kind = f"{str(path).partition('://')[0]}://" if is_url(path) else ""
        kind += Path(path).suffix
        require_same_request(
            {"what path ends with, or its scheme": kind, "which": which, **vars(asked)}
        )
        in_turns(lambda state, turns: _save(path, converted, state, plan, asked, turns), chosen)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What `save` was asked for, beside the state."""

    to: str | None
    max_shard_size: int | str
    optimizer: bool | None
    groups: tuple[Mapping[str, Any], ...]
    merge: bool
    adapter: str | None


def _groups(
    converted: Converted | ConvertedSequential, optimizer: Any, hyper: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any], ...]:
    """What is known of the groups of the optimizer that shall load a file."""
    known = require_known(hyper or {})
    if isinstance(optimizer, torch.optim.Optimizer):
        return groups_like(optimizer, converted.layout, "save: optimizer", known)
    return (known,) if known else ()


def _save(
    path: str | os.PathLike[str],
    converted: Converted | ConvertedSequential,
    state_or_params: Any,
    plan: Plan | None,
    asked: _Asked,
    turns: Turns,
) -> None:
    """`save`, in every process."""
    if is_url(path):
        with sent(str(path), turns) as local:
            return _save(local, converted, state_or_params, plan, asked, turns)
    to, size, optimizer = asked.to, asked.max_shard_size, asked.optimizer
    if asked.adapter is not None and not asked.merge and to != "peft":
        raise CheckpointError(
            f'save: adapter={asked.adapter!r} says which one merge=True or to="peft" writes:'
            " expected one of these, or none of it: all of the module is written"
        )
    if to == "peft":
        if not isinstance(converted, Converted):
            raise CheckpointError('save: to="peft": expected a converted module with adapters')
        if asked.merge or optimizer or asked.groups:
            said = "merge=True" if asked.merge else "optimizer=True" if optimizer else "hyper="
            raise CheckpointError(
                f'save: to="peft" writes the adapter alone, and {said} asks for more: expected one'
                " of the two"
            )
        own = adapter_content(converted, state_or_params, plan, asked.adapter)
        return write_adapter(path, *own, turns)
    to = to or format_of(Path(path))
    if asked.merge:
        if optimizer or asked.groups or not isinstance(converted, Converted):
            raise CheckpointError("save: merge=True: expected a module with adapters, no optimizer")
        merged = merged_content(converted, state_or_params, plan, asked.adapter)
        return write_in_turns(merged, path, to, size, turns)
    if optimizer and not holds_optimizer(to):
        raise CheckpointError(f"save: optimizer=True, but {to} has no place for its state")
    wanted = optimizer if holds_optimizer(to) else False
    # What a training goes on from; weights alone are those that the module computes with.
    masters = holds_optimizer(to) and optimizer is not False
    content = state_content(converted, state_or_params, wanted, plan, masters)
    trains = content.optimizer is not None and to == "lightning"
    if trains and follows_schedule(state_or_params.opt_state):
        warn(
            "save: the file has no scheduler's state: Trainer.fit(ckpt_path=) goes on with the"
            " optimizer's step, but begins its scheduler anew. Set it there (scheduler.step() as"
            " often, or last_epoch=), or train without one"
        )
    if asked.groups and content.optimizer is None:
        raise CheckpointError(
            f"save: hyper= stands beside Adam's moments, and none are written ({to}): expected a"
            ' state that has them and a place for them, such as to="lightning", or no hyper='
        )
    if content.optimizer is not None and asked.groups:
        known = dataclasses.replace(content.optimizer, groups=asked.groups)
        content = dataclasses.replace(content, optimizer=require_all(known, to))
    write_in_turns(content, path, to, size, turns)


def load(path: str | os.PathLike[str], key: str | None = None) -> dict[str, torch.Tensor]:
    """Read the weights of a checkpoint; nothing in it is ever executed.

    Args:
        path: as for `checkpoint`.
        key: likewise.

    Returns:
        CPU tensors of their own memory by name; tied names share one tensor.

    Raises:
        CheckpointError: no such file, damaged, an unknown format, or a pickle that would have to
            run code to be read.

    Example:
        >>> load("nowhere.pt")
        Traceback (most recent call last):
        fzero.errors.CheckpointError: nowhere.pt: no such file
    """
    if is_url(path):
        with fetched(str(path)) as local:
            return load(local, key)
    found = checkpoint(path, key)
    tensors = {name: lazy.tensor().clone() for name, lazy in found.tensors.items()}
    return {**tensors, **{name: tensors[kept] for name, kept in found.ties.items()}}
