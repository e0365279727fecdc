"""16 bits in this process; float64 needs JAX with 64-bit values, and so a process of its own."""

from __future__ import annotations

import collections
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
from fzero.errors import ConversionError
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
    converted = tb.convert(low, *args, train=train, masters=True, **kwargs)
    return Low(exact, call, low, args, kwargs, converted)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOW)
def test_bfloat16_is_as_exact_as_torchs(name: str) -> None:
    """Both round: neither may be further from float32 than about the other is."""
    exact, call, low, args, kwargs, converted = _in_bfloat16(name, train=False)
    run = jax.jit(lambda p, b: leaves_of(converted.apply(p, b, *args, **kwargs).output))
    got = run(converted.params, converted.buffers)
    with torch.no_grad():
        want = leaves_of(low(*args, **kwargs))
        truth = leaves_of(exact(*call.args, **call.kwargs))
    for g, w, t in zip(got, want, truth, strict=True):
        assert g.dtype == jax_dtype(w.dtype)
        scale = np.abs(_wide(t)).max() + 1e-6
        ours, theirs = (np.abs(_wide(x) - _wide(t)).max() / scale for x in (g, w))
        assert ours <= 2.0 * theirs + 2**-8, (ours, theirs)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOW)
def test_bfloat16_gradients_are_as_exact_as_torchs(name: str) -> None:
    """In train mode. Roundings differ, and a gradient adds up many: compared as a whole."""
    exact, call, low, args, kwargs, converted = _in_bfloat16(name, train=True)

    def loss(params: Any) -> Any:
        out = converted.apply(params, converted.buffers, *args, train=True, **kwargs).output
        return sum(jnp.sum(jnp.sin(x.astype(np.float32))) for x in leaves_of(out) if _floats(x))

    ours = jax.jit(jax.grad(loss))(converted.params)
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


# A model of float32, run in 16 bits: one in every run, all nightly; the dtypes inside, of two.
ALWAYS = ("llama", "cnn_batch_norm")
# Computes in float64 or in complex numbers, which torch has not in 16 bits, or not at all in them.
NOT_IN_16_BITS = (
    "spectra", "weight_and_spectral_norm", "norms", "indexing",
    "unet", "products",  # resizing with antialiasing, cdist
)  # fmt: skip
# Branches on values, if they are float16: `test_a_branch_on_float16_values_is_refused`.
NOT_IN_FLOAT16 = ("bart",)
EACH = [
    pytest.param(
        name,
        dtype,
        id=f"{name}-{str(dtype)[6:]}",
        marks=() if (name, dtype) == (ALWAYS[-1], torch.bfloat16) else pytest.mark.nightly,
    )
    for name in ENTRIES
    if name not in NOT_IN_16_BITS
    for dtype in (torch.bfloat16, torch.float16)
    if dtype != torch.float16 or name not in NOT_IN_FLOAT16
]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOT_IN_FLOAT16)
def test_a_branch_on_float16_values_is_refused(name: str) -> None:
    entry: Entry = ENTRIES[name]
    call = entry.call(2)
    converted = tb.convert(entry.make().eval(), *call.args, train=False, **call.kwargs)
    params = {k: np.asarray(v).astype(np.float16) for k, v in converted.params.items()}
    with pytest.raises(ConversionError, match=r"(?s)float16.*must not depend on tensor values"):
        converted.apply(params, converted.buffers, *call.args, **call.kwargs)


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_a_float32_module_in_16_bits_is_torchs_own(name: str, dtype: torch.dtype) -> None:
    """As exact as `module.to(dtype)`, in the same dtypes: what a plan with a precision runs."""
    entry: Entry = ENTRIES[name]
    torch.manual_seed(3)
    exact = livelier(entry.make()).eval()
    example, call = entry.call(2), entry.call(3)
    converted = tb.convert(exact, *example.args, train=False, **example.kwargs)
    args = [_cast(a, dtype) for a in call.args]
    kwargs = {k: _cast(a, dtype) for k, a in call.kwargs.items()}
    narrow = jax_dtype(dtype)
    run = jax.jit(lambda p, b: leaves_of(converted.apply(p, b, *args, **kwargs).output))
    errors, drawn, draws = np.zeros(2), 0, 1
    while drawn < draws:
        if drawn:
            _stir(exact, seed=drawn)
        low = copy.deepcopy(exact).to(dtype)
        params, buffers = tb.load_state_dict(converted, exact.state_dict())
        params = {k: np.asarray(v).astype(narrow) for k, v in params.items()}
        got = run(params, buffers)
        with torch.no_grad():
            want = leaves_of(low(*args, **kwargs))
            truth = leaves_of(exact(*call.args, **call.kwargs))
        assert [g.dtype for g in got] == [jax_dtype(w.dtype) for w in want]
        scale = sum(np.sum(_wide(t) ** 2) for t in truth)
        errors += [
            sum(np.sum((_wide(x) - _wide(t)) ** 2) for x, t in zip(side, truth, strict=True))
            / scale
            for side in (got, want)
        ]
        # Errors of a few numbers (the logits of a classifier) say little about their size: the
        # ratio of two random ones. So as many weights are drawn as make some hundreds of numbers.
        draws = min(64, max(4, 400 // sum(t.numel() for t in truth)))
        drawn += 1
    ours, theirs = np.sqrt(errors / draws)
    assert ours <= 1.1 * theirs, (ours, theirs)
    again = tb.convert(low, *args, train=False, **kwargs) if name in ALWAYS else None
    if again is not None:
        assert _dtypes(converted, params, args, kwargs) == _dtypes(again, params, args, kwargs)


def _stir(module: torch.nn.Module, seed: int) -> None:
    """Other weights of about the same size."""
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.03 * torch.randn(parameter.shape, generator=make))


def _dtypes(converted: tb.Converted, params: Any, args: Any, kwargs: Any) -> Any:
    """In which dtypes a forward multiplies matrices, normalises and takes exponentials."""
    program = jax.make_jaxpr(lambda p: converted.apply(p, converted.buffers, *args, **kwargs))
    found: collections.Counter[str] = collections.Counter()

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name in ("dot_general", "conv_general_dilated", "rsqrt", "exp"):
                found[f"{equation.primitive.name}: {equation.invars[0].aval.dtype}"] += 1
            for value in jax.tree.leaves(tuple(equation.params.values())):
                if hasattr(value, "jaxpr") or hasattr(value, "eqns"):
                    walk(getattr(value, "jaxpr", value))

    walk(program(params).jaxpr)
    assert found
    return found


def _floats(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


@pytest.mark.slow
@pytest.mark.nightly
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
            "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parent), str(here)]),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "done"
