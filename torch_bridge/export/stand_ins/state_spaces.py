"""Recurrences of transformers as they compute, not as loops, while a module is exported.

Without kernels for GPUs transformers runs a Python loop over positions, which a graph would show
position by position. The states are the only part that depends on those before; the rest is written
here for all positions at once, in the dtypes that the loop has. (That is Mamba's; a delta rule has
its own form for this, which it leaves out where it is exported.)
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from torch_bridge.export.stand_ins.replacement import StandIn, replaced, transformers_modules


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_SCAN = "mamba_selective_scan"
# Gated delta rules solve a triangular system, for which they run a loop over rows where they are
# exported: not all that takes such graphs can solve one.
_DELTA_RULE, _EXPORTING = "torch_chunk_gated_delta_rule", "is_torchdynamo_exporting"


def _states(decay: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    state, found = torch.zeros_like(added[:, :, 0]), []
    for at in range(decay.shape[2]):
        state = decay[:, :, at] * state + added[:, :, at]
        found.append(state)
    return torch.stack(found, dim=2)


_LIBRARY.define("linear_recurrence(Tensor decay, Tensor added) -> Tensor")
_LIBRARY.impl("linear_recurrence", _states, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_bridge::linear_recurrence", lambda decay, added: torch.empty_like(added), lib=_LIBRARY
)


def _selective_scan(
    hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, D: torch.Tensor | None = None, z: torch.Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Shapes: hidden_states, dt, z `(N, channels, T)`, A `(channels, S)`, B, C `(N, S, T)`.

    Source: A. Gu and T. Dao, Mamba, arXiv:2312.00752, equations 2a, 2b and 4.
    """
    if options.get("delta_bias") is not None:
        dt = dt + options["delta_bias"].to(dt.dtype)[..., None]
    if options.get("delta_softplus"):
        dt = F.softplus(dt)
    step = dt[:, :, :, None]
    decay = torch.exp(A[None, :, None, :] * step)
    added = step * B.transpose(1, 2)[:, None].float() * hidden_states[:, :, :, None].float()
    states = torch.ops.torch_bridge.linear_recurrence(decay, added.to(decay.dtype))
    read = states.transpose(1, 2).to(hidden_states.dtype) @ C.transpose(1, 2).unsqueeze(-1)
    out = read.squeeze(-1).transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return (out, states[:, :, -1]) if options.get("return_last_state") else out


_KNOWN = frozenset(
    ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus",
     "return_last_state", "use_mambapy", "use_associative_scan")
)  # fmt: skip


@contextlib.contextmanager
def state_space_stand_ins() -> Iterator[None]:
    """While a module is exported: transformers' loops over positions are one operator each."""
    loops: list[StandIn] = []
    for module in transformers_modules():
        own = vars(module)
        loop = own.get(_SCAN)
        if loop is not None and _KNOWN.union(("kwargs",)) == {*inspect.signature(loop).parameters}:
            loops.append((module, _SCAN, _selective_scan))
        if _DELTA_RULE in own and _EXPORTING in own:
            loops.append((module, _EXPORTING, lambda: False))
    with replaced(loops):
        yield
