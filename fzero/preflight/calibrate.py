"""Rates of a device, measured once: what `fzero preflight --rates FILE` takes.

Nothing here knows models. Each measurement is one small program, timed as the median of several
runs of many calls in a row. A program has so much to do that the device, not the host that starts
it, is what is timed: an H200 multiplies 512 x 512 in a microsecond, and a call takes fifty.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

from fzero.errors import PreflightError
from fzero.float8.scaling import E4M3, Scaled
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import GPUS, Topology


@dataclass(frozen=True)
class Effort:
    """How much a calibration measures.

    Args:
        sides: of square matmuls, in elements.
        mib: of arrays that are copied or added.
        attention: batch, positions, heads and their width.
        flops: that a program of products has at least, up to `_LINKS` of them.
        seconds: what one measurement takes about.
        repeats: runs that each median is of.
    """

    sides: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    mib: int = 512
    attention: tuple[int, int, int, int] = (2, 4096, 16, 128)
    flops: float = 2e11
    seconds: float = 0.2
    repeats: int = 5


# What a CPU, or a trial of the code, can do in a second or two.
SMALL = Effort((64, 256), 8, (1, 128, 2, 32), 1e7, 0.02, 3)
# Products in one program: more of them take long to compile.
_LINKS = 256

_PRECISIONS = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


@dataclass(frozen=True)
class Calibration:
    """What a device was measured to do.

    Args:
        device: its name.
        kind: the GPU of `fz.preflight`'s topologies that it is, or `cpu`.
        peaks: the matmul peaks that shares are of: the data sheet's, or on a device without one
            the best that was measured.
        measured: `name: value`, every measurement in FLOP/s, bytes per second or seconds.
        date: when.
    """

    device: str
    kind: str
    peaks: dict[str, float]
    measured: dict[str, float]
    date: str

    def rates(self) -> dict[str, Any]:
        """Fields of `fz.Rates` that were measured: what a rates file has."""
        found, peak = self.measured, self.peaks["bf16"]
        own = {
            name.partition("/")[2]: _share(value, peak)
            for name, value in found.items() if name.startswith("matmul bf16/")
        }  # fmt: skip
        result: dict[str, Any] = {
            "flops_share": max(own.values()),
            "matmul_shares": own,
            "launch_s": found["launch"],
            "pinned_bytes_per_s": min(found["to host"], found["from host"]),
        }
        narrow = {name: v for name, v in found.items() if name.startswith("matmul fp8")}
        for name, value in narrow.items():
            kind, _, side = name.partition("/")
            if kind == "matmul fp8":
                result["fp8_share"] = _share(value, self.peaks["fp8"] * own[side])
                result["fp8_exact_share"] = _share(narrow[f"matmul fp8 exact/{side}"], value)
        if "attention" in found:
            result["attention_share"] = _share(found["attention"], peak)
        known = default_rates(Topology(self.kind, 1, 1))
        if self.kind in GPUS:
            result["memory_share"] = _share(found["elementwise"], known.memory_bytes_per_s)
        else:
            result |= {"flops_per_s": self.peaks, "memory_bytes_per_s": found["elementwise"]}
        source = f"{self.device}, measured on {self.date}, jax {version('jax')}"
        return result | {"source": source, "kind": self.kind}


def _share(measured: float, peak: float) -> float:
    """Part of a peak; a measurement may be a little off, and nothing is faster than its peak."""
    return min(1.0, round(measured / peak, 4))


def calibrate(device: Any = None, effort: Effort | None = None) -> Calibration:
    """Measures a device: matmuls by size and dtype, attention, elementwise work, copies, launches.

    Args:
        device: an accelerator or a CPU; jax's first if not given. Nothing else may use it.
        effort: how much; by default half a minute on a GPU, seconds on a CPU.

    Returns:
        The measurements; `.rates()` of them is a rates file.

    Raises:
        PreflightError: a GPU that `fz.preflight` has no data sheet of.

    Example:
        >>> from fzero.preflight.rates import default_rates
        >>> from fzero.preflight.topology import parse
        >>> found = calibrate(effort=SMALL).rates()
        >>> own = default_rates(parse("cpu:1")).updated(found, "this machine")
        >>> own.memory_bytes_per_s == found["memory_bytes_per_s"]
        True
    """
    device = jax.devices()[0] if device is None else device
    is_gpu = device.platform != "cpu"
    effort = effort or (Effort() if is_gpu else SMALL)
    kind = kind_of(device)
    with jax.default_device(device):
        found = {**_matmuls(effort), **_memory(effort, device), "launch": _launch(effort)}
        if is_gpu:
            found["attention"] = _attention(effort)
            if "fp8" in default_rates(Topology(kind, 1, 1)).flops_per_s:
                found |= _narrow_matmuls(effort)
    if is_gpu:
        peaks = default_rates(Topology(kind, 1, 1)).flops_per_s
    else:
        peaks = {
            name: max(v for key, v in found.items() if key.startswith(f"matmul {name}/"))
            for name in _PRECISIONS
        }
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Calibration(device.device_kind, kind, dict(peaks), found, today)


def kind_of(device: Any) -> str:
    """The kind of topology that a device belongs to.

    Raises:
        PreflightError: it is a GPU without a data sheet.
    """
    if device.platform == "cpu":
        return "cpu"
    words = device.device_kind.upper()
    matching = [kind for kind in GPUS if kind.partition("-")[0].upper() in words]
    # Two sizes of A100: by the memory.
    if len(matching) > 1:
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        matching = ["a100-80" if limit > 45 * 2**30 else "a100-40"]
    if not matching:
        raise PreflightError(
            f"calibrate: {device.device_kind!r}: expected one of {', '.join(GPUS)}, whose peaks are"
            " known; give rates of your own (fz.Rates)"
        )
    return matching[0]


def _matmuls(effort: Effort) -> dict[str, float]:
    """FLOP/s of square matmuls of random numbers (of zeros a chip is faster), one after another."""
    found = {}
    for name, dtype in _PRECISIONS.items():
        for side in effort.sides:
            a, b = jax.random.normal(jax.random.key(0), (2, side, side), dtype)
            links = min(_LINKS, math.ceil(effort.flops / (2 * side**3)))
            # The deviation of each product's elements stays that of b's.
            seconds = _seconds(_chain(links), (a / side**0.5, b), effort) / links
            found[f"matmul {name}/{side}"] = 2 * side**3 / seconds
    return found


def _chain(links: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """So many products, each of the one before: a kernel each."""

    @jax.jit
    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(links):
            b = a @ b
        return b

    return run


def _narrow_matmuls(effort: Effort) -> dict[str, float]:
    """FLOP/s of the largest square matmul in 8 bits, with sums as they come and exact ones."""
    found = {}
    side = max(effort.sides)
    wide = jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16)
    a, b = Scaled.of(wide[0], 1, E4M3, "tensorwise"), Scaled.of(wide[1], 0, E4M3, "tensorwise")
    for name, exact in (("matmul fp8", False), ("matmul fp8 exact", True)):
        run = jax.jit(partial(Scaled.times, dtype=jnp.bfloat16, exact=exact))
        found[f"{name}/{side}"] = 2 * side**3 / _seconds(run, (a, b), effort)
    return found


def _attention(effort: Effort) -> float:
    """FLOP/s of cuDNN's causal attention, forwards and back; hidden products are not counted."""
    batch, length, heads, width = effort.attention
    shape = (3, batch, length, heads, width)
    q, k, v = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    seconds = _seconds(jax.jit(jax.grad(total, (0, 1, 2))), (q, k, v), effort)
    products = 2 + 5  # forwards; backwards the scores again, and two gradients of either product
    return products * 2 * batch * heads * length**2 * width / 2 / seconds


def _memory(effort: Effort, device: Any) -> dict[str, float]:
    """Bytes per second of elementwise work, and of copies to pinned host memory and back."""
    size = effort.mib * 2**20
    here = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
    pinned = here.sharding.with_memory_kind("pinned_host")
    there = jax.device_put(here, pinned)
    twice = jax.jit(lambda x: 2 * x + 1)
    return {
        "elementwise": 2 * size / _seconds(twice, (here,), effort),
        "to host": size / _seconds(lambda x: jax.device_put(x, pinned), (here,), effort),
        "from host": size / _seconds(lambda x: jax.device_put(x, here.sharding), (there,), effort),
    }


def _launch(effort: Effort) -> float:
    """Seconds that a kernel takes in a program when it has next to nothing to do."""

    a = jnp.eye(32)
    few, many = (_LINKS // 2, 2 * _LINKS) if effort.flops > SMALL.flops else (16, 64)
    times = [_seconds(_chain(links), (a, a), effort) for links in (few, many)]
    return max(times[1] - times[0], 0.0) / (many - few)


def _seconds(run: Callable[..., Any], args: tuple[Any, ...], effort: Effort) -> float:
    """Seconds of a call, the median of several runs of many."""

    def several(calls: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready([run(*args) for _ in range(calls)][-1])
        return (time.perf_counter() - started) / calls

    several(1)  # compiles
    calls = max(1, min(1000, round(effort.seconds / effort.repeats / max(several(2), 1e-6))))
    return statistics.median(several(calls) for _ in range(effort.repeats))
