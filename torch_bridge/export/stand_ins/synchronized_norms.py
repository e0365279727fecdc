"""Synchronised batch norm while a module is exported: its statistics are those of all devices.

PyTorch's own forward synchronises where a process group is there, and is a batch norm per process
otherwise, which is what a graph would have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import SyncBatchNorm

from torch_bridge.export.stand_ins.replacement import replaced


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_LIBRARY.define("sum_over_devices(Tensor x) -> Tensor")
_LIBRARY.impl("sum_over_devices", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("torch_bridge::sum_over_devices", torch.empty_like, lib=_LIBRARY)


@contextlib.contextmanager
def synchronized_batch_norms() -> Iterator[None]:
    """While a module is exported: `SyncBatchNorm` is one over the devices of a step."""
    forward = SyncBatchNorm.forward

    def over_devices(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.training or (self.running_mean is None and self.running_var is None):
            return _batch_norm(self, x)
        return forward(self, x)

    with replaced([(SyncBatchNorm, "forward", over_devices)]):
        yield


def _batch_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Shapes: x `(N, C, ...)`."""
    norm._check_input_dim(x)
    norm._check_non_zero_input_channels(x)
    wide = x if x.dtype is torch.float64 else x.float()
    rest = [dim for dim in range(x.ndim) if dim != 1]
    shape = [-1, *[1] * (x.ndim - 2)]
    sums = torch.ops.torch_bridge.sum_over_devices
    devices = sums(torch.ones((), dtype=wide.dtype, device=x.device))
    mean = sums(wide.mean(rest)) / devices
    centred = wide - mean.reshape(shape)
    var = sums(centred.square().mean(rest)) / devices
    out = centred * torch.rsqrt(var + norm.eps).reshape(shape)
    if norm.weight is not None:
        out = out * norm.weight.reshape(shape) + norm.bias.reshape(shape)
    if norm.training and norm.track_running_stats:
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            share: Any = norm.momentum
            if share is None:  # averages over all batches so far
                share = 1.0 / norm.num_batches_tracked.to(wide.dtype)
            count = devices * (x.numel() // x.shape[1])
            for running, now in (
                (norm.running_mean, mean), (norm.running_var, var * (count / (count - 1)))
            ):  # fmt: skip
                running.copy_(running + (now.to(running.dtype) - running) * share)
    return out.to(x.dtype)
