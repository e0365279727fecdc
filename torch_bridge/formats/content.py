"""What a checkpoint holds, whatever its format: named tensors, ties, an optimizer's state."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from fzero.errors import CheckpointError
from fzero.summary import Printed, summary
from torch_bridge.module.lazy_tensor import LazyTensor
from torch_bridge.module.moments import Moments


@dataclass(frozen=True)
class Optimizer:
    """The state of Adam or AdamW in a checkpoint.

    Args:
        step: updates done.
        exp_avg: first moments, by parameter name, or by position ("0", "1", ...) if not `named`.
        exp_avg_sq: second moments, likewise.
        groups: plain hyperparameters of each parameter group; "params" lists its parameters.
        named: False where the format numbers parameters, in the order of the groups.
    """

    step: int
    exp_avg: Mapping[str, LazyTensor]
    exp_avg_sq: Mapping[str, LazyTensor]
    groups: tuple[Mapping[str, Any], ...] = ()
    named: bool = True

    def moments(self, names: Sequence[str] | None = None) -> Moments:
        """The moments by parameter name.

        Args:
            names: where parameters are numbered: the name of each number. A name may come twice
                where two stages of a pipeline have a tied parameter each: its moments are equal.

        Raises:
            CheckpointError: parameters are numbered, and `names` are missing, or not one for each;
                or the moments of one name differ.
        """
        if self.named:
            return Moments(self.step, self.exp_avg, self.exp_avg_sq)
        count = self.num_params
        if names is None or len(names) != count:
            raise CheckpointError(
                f"this optimizer state numbers its parameters, of which it has {count}:"
                f" {'no names were' if names is None else f'{len(names)} names were'} given;"
                " pass names=[...], in the order in which the optimizer was given its parameters"
            )
        return Moments(self.step, _named(names, self.exp_avg), _named(names, self.exp_avg_sq))

    @property
    def num_params(self) -> int:
        """Parameters that the optimizer was given, also those that have no moments."""
        given = sum(len(group.get("params", ())) for group in self.groups)
        return max(given, 1 + max((int(key) for key in self.exp_avg), default=-1))


def _named(names: Sequence[str], values: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for key, value in values.items():
        name = names[int(key)]
        if name in found and not torch.equal(found[name].tensor(), value.tensor()):
            raise CheckpointError(
                f"`{name}` was named twice, but the moments of parameter {key} are others:"
                " expected the same for tied parameters; are the names in order?"
            )
        found.setdefault(name, value)
    return found


def optimizer_fields(found: Optimizer | str | None) -> dict[str, Any]:
    """What a reader found of an optimizer, as fields of a `Checkpoint`."""
    return {"unread": found} if isinstance(found, str) else {"optimizer": found}


@dataclass(frozen=True, repr=False)
class Checkpoint(Printed):
    """A checkpoint on disk. Nothing of it has been read but names, dtypes and shapes.

    Args:
        path: file or directory.
        format: in words, such as "safetensors, sharded" or "DeepSpeed ZeRO-3".
        tensors: weights and buffers by `state_dict` name.
        version: of the format, or of the program that wrote it.
        ties: further names of tensors that are in `tensors`.
        optimizer: Adam's moments, if there are any that can be read.
        unread: why the optimizer's state that is there could not be read in full, in words; then
            none of it is in `optimizer`.
        extra: whatever else it says, as plain values.
    """

    path: str
    format: str
    tensors: Mapping[str, LazyTensor]
    version: str | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    unread: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def _summary(self) -> str:
        optimizer = "no optimizer state" if self.unread is None else self.unread
        if self.optimizer is not None:
            optimizer = f"Adam at step {self.optimizer.step}"
        title = f"{self.format} checkpoint {self.path}, {optimizer}"
        shapes = {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in self.tensors.items()}
        return summary(title, {"tensors": shapes}).replace(" on each device", "", 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def is_wide(self) -> bool:
        """Whether the format holds what learns as float32, whatever a module's dtype."""
        return self.format.startswith("DeepSpeed")

    def cast(self, dtype: torch.dtype) -> Checkpoint:
        """The same with floating-point tensors of another dtype; moments stay as they are."""
        tensors = {
            name: tensor.cast(dtype) if tensor.torch_dtype.is_floating_point else tensor
            for name, tensor in self.tensors.items()
        }
        return dataclasses.replace(self, tensors=tensors)

    def named_as(self, known: Collection[str]) -> Checkpoint:
        """The same where a tensor with no known name goes by one of its ties' that is known.

        A tied layer of DeepSpeed's pipelines is `tied_modules.KEY`, and a layer by number.
        """
        new: dict[str, str] = {}
        for name, kept in self.ties.items():
            if name in known and kept not in known:
                new.setdefault(kept, name)
        optimizer = self.optimizer
        if not new:
            return self

        def renamed(values: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
            return {new.get(name, name): tensor for name, tensor in values.items()}

        if optimizer is not None and optimizer.named:
            optimizer = dataclasses.replace(
                optimizer, exp_avg=renamed(optimizer.exp_avg),
                exp_avg_sq=renamed(optimizer.exp_avg_sq),
                groups=tuple({**g, "params": [new.get(n, n) for n in g.get("params", ())]}
                             for g in optimizer.groups),
            )  # fmt: skip
        ties = {n: new.get(kept, kept) for n, kept in self.ties.items() if n not in new.values()}
        return dataclasses.replace(
            self, tensors=renamed(self.tensors), ties=ties, optimizer=optimizer
        )

    def by_name(self) -> dict[str, LazyTensor]:
        """All tensors, tied ones under each of their names."""
        return {**self.tensors, **{n: self.tensors[kept] for n, kept in self.ties.items()}}
