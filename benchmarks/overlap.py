"""Does communication hide behind compute? Reads the program that 8 H200s would run; needs no GPU.

Compiles fzero's ZeRO-3 training step of a GPT-2-like model for a described GPU topology and prints,
for each collective inside a loop, what XLA scheduled between its start and its done.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --layers 48 --width 1600 --batch 4 --json overlap.json
    python benchmarks/overlap.py --all           # with the collectives outside loops
    python benchmarks/overlap.py --no-tuning     # XLA's own combine thresholds
    python benchmarks/overlap.py --no-stack --precision fp32   # weights gathered one by one at use

Needs the CUDA plugin beside jax (`pip install "fzero[cuda]"`), whose compiler runs on any Linux
machine. Exits with 1 if a collective inside a loop has no matmul between its start and its done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from importlib import resources
from typing import Any


# Before jax starts: compile only. Nothing can be timed without the device, so no autotuning.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from rich.console import Console
from rich.table import Table

import fzero as fz
from fzero import hlo


MIB = 2**20
XLA_COMBINE_BYTES = 30 * MIB  # XLA's own default


def main() -> int:
    """Compiles, prints, and says whether every collective inside a loop is hidden."""
    args = _arguments()
    started = time.perf_counter()
    compiled = compile_step(args)
    seconds = time.perf_counter() - started
    text: str = compiled.as_text()
    report = summary(text, args, seconds)
    report["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    show(report, everything=args.all)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    if args.hlo:
        with open(args.hlo, "w") as file:
            file.write(text)
    return 1 if report["exposed_in_loops"] else 0


def gpt(vocabulary: int, num_layers: int, width: int, num_heads: int, seq: int) -> fz.Sequential:
    """A GPT-2: learned positions, pre-norm blocks, GELU, the output table tied to the input's."""

    def embed_init(rng: jax.Array) -> dict[str, jax.Array]:
        return {"tokens": _normal(rng, vocabulary, width), "positions": _normal(rng, seq, width)}

    def block_init(rng: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(rng, 4)
        return {
            "norm_1": jnp.ones(width),
            "qkv": _normal(keys[0], width, 3 * width),
            "out": _normal(keys[1], width, width),
            "norm_2": jnp.ones(width),
            "up": _normal(keys[2], width, 4 * width),
            "down": _normal(keys[3], 4 * width, width),
        }

    def embed(p: Any, batch: Any, ctx: fz.Context) -> Any:
        return p["tokens"][batch["ids"][:, :-1]] + p["positions"]

    def block(p: Any, x: jax.Array, ctx: fz.Context) -> Any:
        heads = (*x.shape[:2], num_heads, width // num_heads)
        q, k, v = (a.reshape(heads) for a in jnp.split(_norm(x, p["norm_1"]) @ p["qkv"], 3, -1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + attended @ p["out"]
        return x + jax.nn.gelu(_norm(x, p["norm_2"]) @ p["up"]) @ p["down"]

    def head(p: Any, x: jax.Array, ctx: fz.Context) -> fz.Mean:
        logits = (_norm(x, p["norm"]) @ p["tokens"].T).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ctx.batch["ids"][:, 1:])
        return fz.Mean(losses.sum(), jnp.float32(losses.size))

    return fz.Sequential(
        [
            fz.Layer("embed", embed_init, embed),
            fz.Stack("blocks", num_layers, block_init, block),
            fz.Layer("head", lambda _: {"norm": jnp.ones(width)}, head, {"tokens": "embed/tokens"}),
        ]
    )


def _normal(rng: jax.Array, *shape: int) -> jax.Array:
    return 0.02 * jax.random.normal(rng, shape)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    unit = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return unit.astype(x.dtype) * scale


def no_chain(num_layers: int, width: int) -> fz.Model:
    """A model without a stack: as many weights of width x width, one after the other."""

    def loss(params: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        x = batch["x"]
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return fz.Mean(jnp.sum(x.astype(jnp.float32)), jnp.float32(x.size)), buffers, {}

    def init(rng: jax.Array) -> Any:
        return {f"w{i:02}": _normal(rng, width, width) for i in range(num_layers)}, {}

    return fz.Model(init, loss)


def compile_step(args: argparse.Namespace) -> Any:
    """The training step compiled for `args.devices` H200s."""
    config = resources.files("fzero").joinpath("topologies/h200.txtpb").read_text()
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=config, topology=f"1x1x{args.devices}"
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise SystemExit(
            f'{error}\noverlap: needs the CUDA plugin: pip install "fzero[cuda]"'
        ) from error
    rows = args.batch * args.devices
    if args.no_stack:
        model = no_chain(args.layers, args.width)
        batch = {"x": jax.ShapeDtypeStruct((rows, args.width), jnp.float32)}
    else:
        model = gpt(args.vocabulary, args.layers, args.width, args.width // 64, args.seq)
        batch = {"ids": jax.ShapeDtypeStruct((rows, args.seq + 1), jnp.int32)}
    plan = fz.Plan(zero=args.zero, data=args.devices, precision=args.precision, clip_norm=1.0)
    tx, devices = optax.adamw(3e-4), topology.devices
    state = fz.abstract_state(model, tx, plan, devices=devices)
    lowered = fz.train_step(model, tx, plan, devices=devices).lower(state, batch)
    return lowered.compile(compiler_options=tuning(args))


def tuning(args: argparse.Namespace) -> dict[str, Any]:
    """XLA options of this run beyond those that a step sets itself (`fzero.flags`)."""
    pairs = (option.split("=", 1) for option in args.option)
    options: dict[str, Any] = {name: json.loads(value) for name, value in pairs}
    if args.no_tuning:
        for kind in ("all_gather", "reduce_scatter"):
            options[f"xla_gpu_{kind}_combine_threshold_bytes"] = XLA_COMBINE_BYTES
    return options


def summary(text: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What was found, as plain data. Bytes are those one device sends in one step."""
    found = hlo.overlaps(text)

    def sent(overlaps: list[hlo.Overlap]) -> float:
        return hlo.total(o.collective for o in overlaps).wire_bytes

    in_loops = [o for o in found if o.collective.in_loop]
    flops = hlo.matmul_flops(text)
    return {
        "settings": {**vars(args), "compiler_options": tuning(args), "jax": jax.__version__},
        "compile_seconds": seconds,
        "collectives": [_row(o) for o in found],
        "sent_bytes": sent(list(found)),
        "exposed_bytes": sent([o for o in found if o.exposed]),
        "sent_bytes_in_loops": sent(in_loops),
        "exposed_bytes_in_loops": sent([o for o in in_loops if o.exposed]),
        "exposed_in_loops": [o.collective.name for o in in_loops if o.exposed],
        "matmul_flops": flops.flops,
        "matmul_flops_unknown": list(flops.unknown),
    }


def _row(o: hlo.Overlap) -> dict[str, Any]:
    row = dataclasses.asdict(o.collective)
    del row["replica_groups"], row["axes"]
    extra = {"is_async": o.is_async, "num_matmuls": o.num_matmuls, "num_compute": o.num_compute}
    return {**row, **extra, "matmul_flops": o.matmul_flops}


def show(report: dict[str, Any], everything: bool) -> None:
    """Prints the table (of the collectives in loops, or of all) and the sums."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    settings = report["settings"]
    title = (
        f"ZeRO-{settings['zero']} step on {settings['devices']} H200: {settings['layers']} layers"
        f" of {settings['width']}, {settings['precision']}, {settings['batch']} x {settings['seq']}"
        " tokens per device"
    )
    table = Table(title=title, title_justify="left")
    for name in ("loop", "collective", "dtype"):
        table.add_column(name)
    for name in ("MiB", "times", "matmuls within", "GFLOP within", "other work within"):
        table.add_column(name, justify="right")
    bodies = list(dict.fromkeys(c["computation"] for c in report["collectives"] if c["in_loop"]))
    for row in report["collectives"]:
        if row["in_loop"] or everything:
            loop = str(bodies.index(row["computation"]) + 1) if row["in_loop"] else "-"
            numbers = (
                f"{row['bytes'] / MIB:.1f}", str(row["times"]), str(row["num_matmuls"]),
                f"{row['matmul_flops'] / 1e9:.0f}", str(row["num_compute"]),
            )  # fmt: skip
            cells = (loop, row["kind"], row["dtype"], *numbers)
            table.add_row(*cells, style="bold red" if not row["num_matmuls"] else None)
    console.print(table)
    for where, suffix in (("inside loops", "_in_loops"), ("in the whole step", "")):
        sent, exposed = report[f"sent_bytes{suffix}"], report[f"exposed_bytes{suffix}"]
        share = exposed / sent if sent else math.nan
        console.print(
            f"{where}: {sent / MIB:.1f} MiB sent per device, {exposed / MIB:.1f} MiB of it with no"
            f" matmul to hide behind ({share:.1%})"
        )
    size = settings["width"] ** 2 * (4 if settings["precision"] == "fp32" else 2)
    console.print(
        f"temporary memory: {report['temporary_bytes'] / MIB:.0f} MiB ="
        f" {report['temporary_bytes'] / size:.1f} weights of {settings['width']} squared"
    )
    console.print(
        f"{report['matmul_flops'] / 1e12:.2f} TFLOP of matmuls per device;"
        f" compiled in {report['compile_seconds']:.1f} s"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, default, what in (
        ("layers", 16, "layers of the stack"),
        ("width", 2048, "model width, a multiple of 64"),
        ("vocabulary", 50257, "rows of the embedding"),
        ("batch", 8, "examples per device"),
        ("seq", 1024, "tokens per example"),
        ("devices", 8, "GPUs, all in one host"),
        ("zero", 3, "ZeRO stage"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument(
        "--no-stack", action="store_true", help="a model that is no chain: weights one by one"
    )
    parser.add_argument("--all", action="store_true", help="show collectives outside loops too")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="one more XLA option"
    )
    parser.add_argument("--no-tuning", action="store_true", help="XLA's own combine thresholds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--hlo", metavar="FILE", help="write the compiled program there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
