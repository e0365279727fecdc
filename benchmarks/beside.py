"""A converted module beside PyTorch's: values, and gradients of a fixed random projection."""

from __future__ import annotations

import copy
import json
import re
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

import torch_bridge as tb
from fzero.errors import ConversionError


# Of the largest reference value: float32 sums in another order; bfloat16 has 8 bits. Whole numbers
# are compared exactly.
RTOL = {torch.float32: 2e-5, torch.int64: 2e-5, torch.bfloat16: 2e-2, torch.complex64: 2e-5}
# Compiling is what takes the time, of many small programs; the tests compile so, too.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
VERDICTS = ("right", "refused", "wrong", "failed")  # the best first


@dataclass(frozen=True)
class Row:
    """What became of an entry.

    Args:
        name: as PyTorch names it.
        verdict: `right`, `refused`, `wrong` or `failed`.
        why: the first reason, in one line.
    """

    name: str
    verdict: str
    why: str = ""


def worse(new: str, old: str) -> bool:
    """Whether a verdict is worse than one that was kept. What is no entry any more is, too."""
    return new not in VERDICTS or VERDICTS.index(new) > VERDICTS.index(old)


def write(path: Path, rows: Any) -> None:
    """Writes a table; one that is read or killed meanwhile finds the old one or the new one."""
    made = path.with_suffix(".new")
    made.write_text(json.dumps(rows, indent=0, sort_keys=True) + "\n")
    made.replace(path)


class Late(BaseException):
    """It took too long: no exception, since a conversion that is cut short would refuse for it."""


class Wrong(Exception):
    """A value differs."""


@dataclass(frozen=True)
class Sample:
    """One call of a module.

    Args:
        module: takes tensors, gives tensors.
        tensors: its arguments; those that require a gradient are differentiated.
        rtol: how far a value may be off, of the largest one.
        random: whether only shapes and dtypes can agree.
    """

    module: torch.nn.Module
    tensors: Sequence[torch.Tensor]
    rtol: float
    random: bool = False

    def inputs(self, wide: bool = False) -> list[torch.Tensor]:
        """The arguments, each in memory of its own; with `wide` in float64."""
        return [_own(t, wide) for t in self.tensors]


def _own(t: torch.Tensor, wide: bool = False) -> torch.Tensor:
    """A tensor as its own leaf. Part of a larger storage stays so: as_strided would see it."""
    x = t.detach()
    partial = x.layout == torch.strided and x.untyped_storage().nbytes() > x.nbytes
    x = x if partial else x.clone()
    if wide and (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.complex128 if x.is_complex() else torch.float64)
    return x.requires_grad_(t.requires_grad and (x.is_floating_point() or x.is_complex()))


def check(sample: Sample) -> None:
    """Compares a converted module with PyTorch on one sample.

    Raises:
        Wrong: something differs.
    """
    found, pull = _ours(sample)
    wanted, slopes, seeds = _theirs(sample, None)
    if len(found) != len(wanted):
        raise Wrong(f"{len(found)} outputs, torch {len(wanted)}")
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        _same_kind(f"output {i}", got, want)
    if sample.random:
        return
    truth = _Truth(sample, seeds)
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        compare(f"output {i}", got, want, sample.rtol, lambda i=i: truth.outputs[i])
    if not slopes:
        return
    for i, (got, want) in enumerate(zip(pull(seeds), slopes, strict=True)):
        _same_kind(f"gradient {i}", got, want)
        compare(f"gradient {i}", got, want, sample.rtol, lambda i=i: truth.slopes[i])


def _ours(sample: Sample) -> tuple[list[Any], Callable[[dict[int, Any]], list[Any]]]:
    """Outputs of the converted module, and what pulls cotangents of them back to the inputs."""
    inputs = sample.inputs()
    converted = tb.convert(sample.module, *inputs, train=sample.module.training)
    arrays = [_array(t) for t in inputs]
    tracked = [i for i, t in enumerate(inputs) if t.requires_grad]

    def run(chosen: list[Any]) -> list[Any]:
        given = dict(zip(tracked, chosen, strict=True))
        full = [given.get(i, x) for i, x in enumerate(arrays)]
        state = (converted.params, converted.buffers)
        training = sample.module.training
        made = converted.apply(*state, *full, train=training, rng=jax.random.key(0))
        return list(jax.tree.leaves(made.output))

    if not tracked:
        return run([]), lambda seeds: []

    @jax.jit
    def split(chosen: list[Any]) -> tuple[list[Any], list[Any]]:
        out = run(chosen)
        return [x for x in out if _is_inexact(x)], out

    smooth, pull, out = jax.vjp(split, [arrays[i] for i in tracked], has_aux=True)
    places = [i for i, x in enumerate(out) if _is_inexact(x)]

    def back(seeds: dict[int, Any]) -> list[Any]:
        # JAX's cotangents of complex values are conjugates of torch's.
        given = [
            jnp.conj(seeds[i]).astype(x.dtype) if i in seeds else jnp.zeros_like(x)
            for i, x in zip(places, smooth, strict=True)
        ]
        return [jnp.conj(x) for x in jax.jit(pull)(given)[0]]

    return out, back


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _theirs(
    sample: Sample, seeds: dict[int, Any] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, Any]]:
    """PyTorch's outputs and gradients; in float64 where seeds are given."""
    inputs = sample.inputs(wide=seeds is not None)
    module = sample.module if seeds is None else copy.deepcopy(sample.module).double()
    tracked = [t for t in inputs if t.requires_grad]
    # A leaf may be written to in a forward: its own copy is.
    given = [t.clone() if t.requires_grad else t for t in inputs]
    out = [t for t in pytree.tree_leaves(module(*given)) if isinstance(t, torch.Tensor)]
    smooth = [i for i, t in enumerate(out) if t.requires_grad]
    if seeds is None:
        draw = np.random.default_rng(0)
        seeds = {i: draw.standard_normal(out[i].shape).astype(np.float32) for i in smooth}
    if not smooth or not tracked:
        return out, [], seeds
    cotangents = [torch.from_numpy(np.asarray(seeds[i])).to(out[i].dtype) for i in smooth]
    found = torch.autograd.grad([out[i] for i in smooth], tracked, cotangents, allow_unused=True)
    slopes = [torch.zeros_like(t) if g is None else g for g, t in zip(found, tracked, strict=True)]
    return out, slopes, seeds


class _Truth:
    """The same in float64, worked out when it is asked for."""

    def __init__(self, sample: Sample, seeds: dict[int, Any]) -> None:
        self._sample, self._seeds = sample, seeds
        self._known: tuple[Any, ...] | None = None

    def _found(self) -> tuple[Any, ...]:
        if self._known is None:
            torch.manual_seed(0)
            self._known = _theirs(self._sample, self._seeds)
        return self._known

    @property
    def outputs(self) -> list[torch.Tensor]:
        return list(self._found()[0])

    @property
    def slopes(self) -> list[torch.Tensor]:
        return list(self._found()[1])


def _array(t: torch.Tensor) -> Any:
    t = t.detach()
    if t.dtype == torch.bfloat16:
        return jnp.asarray(t.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(t.resolve_conj().resolve_neg().numpy())


def _same_kind(what: str, got: Any, want: torch.Tensor) -> None:
    if tuple(got.shape) != tuple(want.shape):
        raise Wrong(f"{what}: shape {tuple(got.shape)}, torch {tuple(want.shape)}")
    kind, expected = np.dtype(got.dtype).name, str(want.dtype).removeprefix("torch.")
    # Without x64 JAX holds 64-bit numbers in 32.
    narrow = {"int64": "int32", "float64": "float32", "complex128": "complex64"}
    if kind not in (expected, narrow.get(expected)):
        raise Wrong(f"{what}: dtype {kind}, torch {expected}")


def compare(
    what: str, got: Any, want: torch.Tensor, rtol: float, truth: Callable[[], torch.Tensor]
) -> None:
    """Raises `Wrong` if an array is neither PyTorch's tensor nor as near to its float64 one.

    In 16 bits it may be as far from that as PyTorch's tensor is: where rounding is all there is (a
    slope that is 0), two ways to compute it agree in nothing else.
    """
    a, b = np.asarray(got), _numpy(want)
    if not np.issubdtype(b.dtype, np.inexact):
        if not np.array_equal(a, b):
            raise Wrong(f"{what}: {_first(a, b)}")
        return
    why = _apart(a.astype(b.dtype), b, rtol)
    if why is None:
        return
    try:
        exact = _numpy(truth())
    except Exception:
        raise Wrong(f"{what}: {why}") from None
    if exact.shape != b.shape:
        raise Wrong(f"{what}: {why}")
    if want.dtype in (torch.bfloat16, torch.float16):
        rtol = max(rtol, _gap(b.astype(exact.dtype), exact))
    if _apart(a.astype(exact.dtype), exact, rtol) is not None:
        raise Wrong(f"{what}: {why}")


def _numpy(t: torch.Tensor) -> Any:
    t = t.detach().resolve_conj().resolve_neg()
    t = torch.zeros(t.shape, dtype=t.dtype) if t._is_zerotensor() else t
    return (t.float() if t.dtype in (torch.bfloat16, torch.float16) else t).numpy()


def _apart(a: Any, b: Any, rtol: float) -> str | None:
    """How two arrays differ, or None."""
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return f"infinities or NaN differ: {_first(a, b)}"
    gap = _gap(a, b)
    return f"off by {gap:.1e}" if gap > rtol else None


def _gap(a: Any, b: Any) -> float:
    """The largest difference of finite values, of the largest value."""
    finite = np.isfinite(b)
    scale = max(float(np.max(np.abs(b[finite]), initial=0.0)), 1e-3)
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0)) / scale


def _first(a: Any, b: Any) -> str:
    at = np.argwhere(~((a == b) | ((a != a) & (b != b))))
    index = tuple(int(i) for i in at[0]) if len(at) else ()
    return f"at {index} {a[index]}, torch {b[index]}"


def verdict(name: str, run: Callable[[], None], seconds: int) -> Row:
    """Runs one entry; what takes longer than `seconds` of CPU time has failed."""

    def late(*_: Any) -> None:
        raise Late(f"took more than {seconds} s of CPU time")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except ConversionError as error:
        return Row(name, "refused", _line(error))
    except Wrong as error:
        return Row(name, "wrong", str(error))
    except (Exception, Late) as error:
        return Row(name, "failed", f"{type(error).__name__}: {_line(error)}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Row(name, "right")


def _line(error: BaseException) -> str:
    return reason(str(error))


def reason(text: str) -> str:
    """A message in one line, without the places of this machine."""
    text = re.sub(r"\n\s+at: [^\n]*", "", text)  # the place
    text = " ".join(text.split()).split(" at: ")[0].split(", please report")[0]
    text = re.sub(r' \("/[^"]*", line \d+.*?\)(?=: |$)', "", text)
    return re.sub(r'"/[^"]*"(:\d+)?', "its source", text)[:600]
