"""bfloat16 in this process; float64 needs JAX with 64-bit values, and so a process of its own."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from parity import leaves_of
from zoo_entries import Call, Entry, livelier
from zoo_torch import ENTRIES as TORCH
from zoo_transformers import ENTRIES as TRANSFORMERS

import torch_bridge as tb
from tests.support import quick
from torch_bridge.dtypes import jax_dtype


ENTRIES = TORCH | TRANSFORMERS
LOW = ("cnn_batch_norm", "recurrent", "transformer_encoder", "llama", "bert", "convnext")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def _wide(leaf: Any) -> Any:
    wide = leaf.detach().float().numpy() if isinstance(leaf, torch.Tensor) else leaf
    return np.asarray(wide).astype(np.float64)


class Low(NamedTuple):
    """A model in float32 and in bfloat16, what each is called with, and the latter converted."""

    exact: torch.nn.Module
    call: Call
    low: torch.nn.Module
    args: list[Any]
    kwargs: dict[str, Any]
    converted: tb.Converted


def _in_bfloat16(name: str, train: bool) -> Low:
    entry: Entry = ENTRIES[name]
    torch.manual_seed(3)
    exact = livelier(entry.make()).train(train)
    low = copy.deepcopy(exact).bfloat16()
    call = entry.call(3)
    args = [_cast(a, torch.bfloat16) for a in call.args]
    kwargs = {k: _cast(a, torch.bfloat16) for k, a in call.kwargs.items()}
    return Low(exact, call, low, args, kwargs, tb.convert(low, *args, **kwargs))


@pytest.mark.extended
@pytest.mark.parametrize("name", LOW)
def test_bfloat16_is_as_exact_as_torchs(name: str) -> None:
    """Both round: neither may be further from float32 than about the other is."""
    exact, call, low, args, kwargs, converted = _in_bfloat16(name, train=False)
    run = jax.jit(
        lambda p, b: leaves_of(converted.apply(p, b, *args, **kwargs).output),
        compiler_options=quick.OPTIONS,
    )
    got = run(converted.params, converted.buffers)
    with torch.no_grad():
        want = leaves_of(low(*args, **kwargs))
        truth = leaves_of(exact(*call.args, **call.kwargs))
    for g, w, t in zip(got, want, truth, strict=True):
        assert g.dtype == jax_dtype(w.dtype)
        scale = np.abs(_wide(t)).max() + 1e-6
        ours, theirs = (np.abs(_wide(x) - _wide(t)).max() / scale for x in (g, w))
        assert ours <= 2.0 * theirs + 2**-8, (ours, theirs)


@pytest.mark.extended
@pytest.mark.parametrize("name", LOW)
def test_bfloat16_gradients_are_as_exact_as_torchs(name: str) -> None:
    """In train mode. Roundings differ, and a gradient adds up many: compared as a whole."""
    exact, call, low, args, kwargs, converted = _in_bfloat16(name, train=True)

    def loss(params: Any) -> Any:
        out = converted.apply(params, converted.buffers, *args, train=True, **kwargs).output
        return sum(jnp.sum(jnp.sin(x.astype(np.float32))) for x in leaves_of(out) if _floats(x))

    ours = jax.jit(jax.grad(loss), compiler_options=quick.OPTIONS)(converted.params)
    ours = converted.by_name(ours)
    grads = []
    for module, a, k in ((low, args, kwargs), (exact, call.args, call.kwargs)):
        leaves = [x for x in leaves_of(module(*a, **k)) if x.is_floating_point()]
        torch.stack([x.float().sin().sum() for x in leaves]).sum().backward()
        grads.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    theirs, truth = grads
    assert truth
    size = sum(float(np.sum(_wide(t) ** 2)) for t in truth.values())
    gap = {
        who: (sum(float(np.sum((_wide(g[n]) - _wide(t)) ** 2)) for n, t in truth.items()) / size)
        ** 0.5
        for who, g in (("ours", ours), ("torch's", theirs))
    }
    assert all(ours[n].dtype == jnp.bfloat16 for n in truth)
    assert gap["ours"] <= 1.5 * gap["torch's"] + 2**-8, gap


def _floats(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


@pytest.mark.slow
@pytest.mark.extended
def test_float64_agrees_to_twelve_digits() -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "x64_case.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            **os.environ,
            "JAX_ENABLE_X64": "1",
            "XLA_FLAGS": quick.FLAGS,
            "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parent), str(here)]),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "done"
