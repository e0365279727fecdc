"""Right or wrong: what so far was only compiled, run."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fzero as fz
from fzero.zero.quantize import BLOCK, decode, encode, encoded_bytes
from on_gpu.child import Row


# Relative differences of losses beside torch's, over the steps of a row. In 16 bits both round
# every product's result once, in other orders; fp32 multiplies in TF32 unless told otherwise.
BARS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
STEPS = 5
# More, of which a loss scale that is too large may skip some: torch's autocast keeps norms and
# softmax in float32, and fewer of its gradients overflow.
MAY_SKIP = 4


def losses(tiny: bool) -> dict[str, Row]:
    """Models by precision: five steps of AdamW beside torch on the same device."""
    names = ("gpt2", "llama", "resnet", "vit")
    return {
        f"{name} {precision}": functools.partial(_losses, name, precision)
        for name in names
        # torch's fp16 autocast is for GPUs.
        for precision in (("fp32", "bf16") if tiny else BARS)
    }


def _losses(name: str, precision: str) -> dict[str, Any]:
    import torch

    from on_gpu import cases

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # its convolutions' usual way, unlike its products'
    case = cases.tiny(name)
    plan = fz.Plan(zero=0, data=1, precision=precision, remat="none")
    ours = cases.Fzero(cases.model_of(case), plan, cases.numpy_batch(case))
    theirs = cases.Torch(case, precision, cases.torch_device())
    with jax.default_matmul_precision("highest"):
        found = [float(ours.step()) for _ in range(STEPS + MAY_SKIP)]
    said = [float(theirs.step()) for _ in range(STEPS + MAY_SKIP)]
    if precision == "fp16":  # a step that the loss scale skips leaves the loss as it was
        found, said = ([one for one, _ in itertools.groupby(losses)] for losses in (found, said))
    found, said = found[:STEPS], said[:STEPS]
    gap = float(np.max(np.abs(np.divide(found, said) - 1)))
    return {"right": gap <= BARS[precision], "gap": gap, "bar": BARS[precision], "losses": found}


def attention(tiny: bool) -> dict[str, Row]:
    """Fused attention, forwards and back, against products in float32."""
    length = 128 if tiny else 1024
    masks: dict[str, dict[str, Any]] = {
        "all": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (length // 8 - 1, 0)},
        "lengths": {"key_value_seq_lengths": jnp.array([length, length // 2 + 3])},
        "causal lengths": {
            "is_causal": True, "key_value_seq_lengths": jnp.array([length, length - 5])
        },
        "packed": {"mask": _seen(_documents(length))},
        "packed, window": {"mask": _seen(_documents(length), length // 8)},
    }  # fmt: skip
    packings: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "packed": {"causal": True, "segments": _documents(length)},
        "packed, window": {
            "causal": True, "segments": _documents(length), "window": length // 8
        },
        "packed, both ways": {"segments": _documents(length)},
    }  # fmt: skip
    own: dict[str, Row] = {
        f"fz.attention {name}, {dtype}": functools.partial(_own_attention, given, length, dtype)
        for name, given in packings.items()
        for dtype in ("bfloat16", "float32")
    }
    # As a ViT has: of these jax refuses the gradients.
    own |= {
        f"fz.attention of 197, {name}": functools.partial(_own_attention, given, 197, "bfloat16")
        for name, given in (("both ways", {}), ("causal", {"causal": True}))
    }
    return own | {
        f"{mask}, {heads} heads of {kv}, {dtype}, {width}": functools.partial(
            _attention, dict(given), (2, length, heads, width), kv, dtype
        )
        for mask, given in masks.items()
        for heads, kv, width in ((4, 4, 32 if tiny else 64), (8, 2, 32 if tiny else 128))
        # CPUs multiply no float16.
        for dtype in (("bfloat16",) if tiny else ("bfloat16", "float16"))
    }


def _attention(
    given: dict[str, Any], shape: tuple[int, ...], kv: int, dtype: str
) -> dict[str, Any]:
    b, t, _, width = shape
    keys = jax.random.split(jax.random.key(0), 4)
    q, out = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (b, t, kv, width), dtype) for key in keys[2:])
    fused = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def run(implementation: str, *arrays: jax.Array) -> Any:
        attend = functools.partial(
            jax.nn.dot_product_attention, implementation=implementation, **given
        )
        value, back = jax.vjp(attend, *arrays)
        return value, *back(out.astype(value.dtype))

    found = jax.jit(functools.partial(run, fused))(q, k, v)
    with jax.default_matmul_precision("highest"):
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        expected = jax.jit(functools.partial(run, "xla"))(*wide)
    # A result in 16 bits is off by half a unit in its last place, gradients by some of them.
    bar = 2e-2 if dtype == "bfloat16" else 4e-3
    names = ("out", "q", "k", "v")
    gaps = {
        name: float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))
        for name, a, b in zip(names, found, expected, strict=True)
    }
    return {"right": max(gaps.values()) <= bar, "bar": bar, **gaps}


def _documents(length: int) -> jax.Array:
    """The document of each position, of two rows that are packed otherwise."""
    ends = jnp.array([[length // 3, length // 2], [length // 8, length - 7]])
    return (jnp.arange(length)[None, :, None] >= ends[:, None]).sum(-1).astype(jnp.int32)


def _seen(segments: jax.Array, window: int | None = None, causal: bool = True) -> jax.Array:
    """Which position sees which, `(rows, 1, length, length)`."""
    at = jnp.arange(segments.shape[1])
    behind = at[:, None] - at
    seen = behind >= 0 if causal else jnp.ones_like(behind, bool)
    if window is not None:
        seen &= jnp.abs(behind) <= window
    return seen & (segments[:, None, :, None] == segments[:, None, None, :])


def _own_attention(given: dict[str, Any], length: int, dtype: str) -> dict[str, Any]:
    """`fz.attention`, whichever kernels it takes, forwards and back against products."""
    keys = jax.random.split(jax.random.key(1), 4)
    q, out = (jax.random.normal(key, (2, length, 8, 64), dtype) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, length, 2, 64), dtype) for key in keys[2:])
    segments = given.get("segments", jnp.zeros((2, length), jnp.int32))
    mask = _seen(segments, given.get("window"), given.get("causal", False))

    def run(attend: Any, *arrays: jax.Array) -> Any:
        value, back = jax.vjp(attend, *arrays)
        return value, *back(out.astype(value.dtype))

    plain = functools.partial(jax.nn.dot_product_attention, mask=mask, implementation="xla")
    with jax.default_matmul_precision("highest"):
        found = jax.jit(functools.partial(run, functools.partial(fz.attention, **given)))(q, k, v)
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        expected = jax.jit(functools.partial(run, plain))(*wide)
    bar = 2e-2 if dtype == "bfloat16" else 1e-4
    gaps = [
        float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))
        for a, b in zip(found, expected, strict=True)
    ]
    return {"right": max(gaps) <= bar, "bar": bar, "gaps": gaps}


def tiers(tiny: bool) -> dict[str, Row]:
    """Steps of plans whose state is elsewhere, against those of a plan with all on the device."""
    host: dict[str, Any] = {
        "optimizer on the host": {"tiers": {"opt_state": "host"}},
        "half of it": {"tiers": {"opt_state": 0.5}},
        "optimizer on disk": {"tiers": {"opt_state": "disk"}},
        "parameters on the host": {"tiers": {"params": "host"}},
        "updated on the host": {"tiers": {"opt_state": "host"}, "update_on": "host"},
        "activations on the host": {"remat": "offload"},
        "moved between steps": {},
    }
    rows: dict[str, Row] = {
        name: functools.partial(_tier, name, more) for name, more in host.items()
    }
    return {**rows, "pinned memory": _pinned}


def _tier(name: str, more: dict[str, Any]) -> dict[str, Any]:
    from on_gpu import cases

    case = cases.tiny("gpt2")
    model, batch = cases.model_of(case), cases.numpy_batch(case)
    base = fz.Plan(zero=3, data=1, precision="bf16", min_shard_bytes=0, remat="layer")
    here = cases.Fzero(model, base, batch)
    there = cases.Fzero(model, base.replace(**more, stream_bytes=2**16), batch)
    gaps = []
    for _ in range(3):
        if name == "moved between steps":
            there.state = fz.reload(fz.offload(there.state))
        a, b = float(here.step()), float(there.step())
        gaps.append(abs(a / b - 1))
    kinds = sorted({
        str(leaf.sharding.memory_kind)
        for leaf in jax.tree.leaves(there.state.opt_state) if isinstance(leaf, jax.Array)
    })  # fmt: skip
    # Pieces may round a product and a sum twice where one program does it once, which bf16 shows;
    # an update on the host's cores rounds as they do.
    bar = 1e-3
    placed = fz.placement(there.state)
    return {
        "right": max(gaps) <= bar, "gap": max(gaps), "bar": bar, "opt_state_kinds": kinds,
        "device_bytes": placed.bytes_per_device["total"],
        "host_bytes": placed.host_bytes_per_device["total"],
    }  # fmt: skip


def _pinned() -> dict[str, Any]:
    """What host memory is here, and how an array in it lies."""
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    there = jax.device_put(
        jnp.arange(2**20, dtype=jnp.float32),
        jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"),
    )
    back = np.asarray(jax.device_put(there, jax.sharding.SingleDeviceSharding(device)))
    pointer = there.addressable_shards[0].data.unsafe_buffer_pointer()
    return {
        "right": "pinned_host" in kinds and bool((back == np.arange(2**20)).all()),
        "kinds": kinds, "default": device.default_memory().kind,
        "alignment": pointer & -pointer, "kvikio": _has("kvikio"),
    }  # fmt: skip


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


def encoding(tiny: bool) -> dict[str, Row]:
    """The 8-bit blocks of gathers: there and back within half a step, and the CPU's bytes.

    A GPU's quotients are within two units of their last place, so what lies as near as that to the
    middle between two integers may become either.
    """

    def run(dtype: str) -> dict[str, Any]:
        rows = jax.random.normal(jax.random.key(0), (4, 1000 if tiny else 10**6), dtype)
        rows = rows.at[0, 5].set(0).at[1, :256].set(0)
        here = jax.jit(encode)(rows)
        cpu = jax.devices("cpu")[0]
        there = jax.jit(encode)(jax.device_put(rows, cpu))
        size = rows.shape[1]
        back = jax.jit(decode, static_argnums=1)(here, size)
        wide = np.asarray(rows, np.float32)
        step = np.abs(wide).max() / 127
        differ = np.asarray(here) != np.asarray(there)
        rows_, columns = np.nonzero(differ)
        starts = columns - columns % BLOCK
        peaks = [np.abs(wide[r, s : s + BLOCK]).max() for r, s in zip(rows_, starts, strict=True)]
        quotients = 127 * wide[rows_, np.minimum(columns, size - 1)] / np.array(peaks, np.float64)
        from_middle = np.abs(np.abs(quotients % 1) - 0.5)
        ties = bool((from_middle < 127 * 2**-22).all() and (columns < size).all())
        error = float(np.abs(np.asarray(back) - wide).max() / step)
        return {
            "right": ties and error <= 0.51 and here.shape[1] == encoded_bytes(size),
            "bytes_that_differ": int(differ.sum()), "error_in_steps": error,
            "furthest_from_a_tie": float(from_middle.max(initial=0.0)),
        }  # fmt: skip

    return {dtype: functools.partial(run, dtype) for dtype in ("float32", "bfloat16")}


def deterministic(tiny: bool) -> dict[str, Row]:
    """The same steps twice: the same bits, where the plan promises it."""

    def run(name: str, precision: str) -> dict[str, Any]:
        from on_gpu import cases

        case = cases.tiny(name)
        model, batch = cases.model_of(case), cases.numpy_batch(case)
        plan = fz.Plan(zero=0, data=1, precision=precision, deterministic=True)
        found = []
        for _ in range(2):
            one = cases.Fzero(model, plan, batch)
            for _ in range(3):
                one.step()
            found.append(jax.tree.map(np.asarray, one.state.params))
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), *found)
        return {"right": all(jax.tree.leaves(same))}

    return {
        f"{name} {precision}": functools.partial(run, name, precision)
        for name in ("gpt2", "resnet")
        for precision in ("fp32", "bf16")
    }


def processes(tiny: bool) -> dict[str, Row]:
    """Two processes with the GPU between them, each with a step of its own; then joined."""
    return {"apart": functools.partial(_two, False), "joined": functools.partial(_two, True)}


_WORKER = """
import sys
import jax
joined, port, rank = sys.argv[1] == "joined", sys.argv[2], int(sys.argv[3])
if joined:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from on_gpu import cases
import fzero as fz
import torch
torch.manual_seed(0)
case = cases.tiny("gpt2")
plan = fz.Plan(zero=3, data=2 if joined else 1, min_shard_bytes=0)
run = cases.Fzero(cases.model_of(case), plan, cases.numpy_batch(case))
print("LOSSES", [float(run.step()) for _ in range(3)], flush=True)
"""


def _two(joined: bool) -> dict[str, Any]:
    """What happens; NCCL refuses two ranks on one GPU, so joined may be refused, and says so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if jax.default_backend() == "cpu":
        environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    command = [sys.executable, "-c", _WORKER, "joined" if joined else "apart", str(port)]
    children = [
        subprocess.Popen(
            [*command, str(rank)], env=environment, text=True, cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [child.communicate(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()  # those that hang; the others have ended
    found = [
        next((line for line in out.splitlines() if line.startswith("LOSSES")), "")
        for out, _ in said
    ]
    alike = bool(found[0]) and found[0] == found[1]
    why = [error.strip().splitlines()[-1][:300] if error.strip() else "" for _, error in said]
    refused = joined and not alike and jax.default_backend() == "gpu"
    return {"right": alike or refused, "refused": refused, "losses": found, "last_words": why}
