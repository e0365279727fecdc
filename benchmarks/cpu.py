"""A step on a CPU, where everyone first tries it: fzero, JAX by hand, torch; plain and pipelines.

    python benchmarks/cpu.py --json benchmarks/results/cpu.json   # minutes, nothing else running
    python benchmarks/cpu.py --runs 2 --json ...                  # every contestant twice
    python benchmarks/cpu.py --huge-pages --json ...              # memory in pages of 2 MiB
    python benchmarks/cpu.py --quick                              # a trial: times mean nothing

One GPT from the same weights on the same tokens, float32, AdamW. Every contestant is a process of
its own, one after the other, on the whole machine: torch eager; JAX by hand with a scan and with
separate layers, by what is kept for the backward pass; fzero by `remat`; pipelines of two ranks,
fzero's in one process and torch's 1F1B in two. Peak memory is what a process took after its first
step, which compiles, above what it had after its imports. Takes torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common


REMATS = ("layer", "dots", "none")
# XLA frees a step's temporary memory after the step, and touches each page of it again in the next.
HUGE_PAGES = "glibc.malloc.hugetlb=1"
MICROBATCHES = 8
WARMUP = 3
# What has to be at least what: the goals, as ratios of tokens per second.
GOALS = (
    ("a plain step beside the fastest JAX by hand", "fzero ", "jax ", 1.0),
    ("keeping everything beside recomputing it", "fzero none", "fzero ", 1.0),
    ("a pipeline beside the plain step", "fzero 1f1b ", "fzero ", 0.95),
    ("a pipeline beside torch's", "fzero 1f1b ", "torch 1f1b", 0.9),
)


def contestants() -> list[str]:
    """Everyone's name, in the order in which they run."""
    by_hand = [f"jax {how} {remat}" for how in ("scan", "layers") for remat in REMATS]
    own = [f"fzero {remat}" for remat in REMATS]
    piped = [f"fzero 1f1b {remat}" for remat in REMATS]
    return ["torch eager", *by_hand, *own, *piped, "torch 1f1b"]


def main() -> int:
    """Runs everyone, or one as a child."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="processes of each contestant (1)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each (8)")
    parser.add_argument("--only", nargs="+", choices=contestants(), default=contestants())
    parser.add_argument("--huge-pages", action="store_true",
                        help="ask glibc for huge pages, for everyone")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, a table beside it")
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = common.CONFIGS["tiny" if args.quick else "small"]
    steps = 2 if args.quick else args.steps
    if args.name:
        print("FOUND", json.dumps(run_one(args.name, config, steps)), flush=True)
        return 0
    before = common.provenance()
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.runs):
        for name in args.only:
            found = _child(name, args, steps)
            rows.setdefault(name, []).append(found)
            print(f"{name:18} {config.tokens / found['median_s']:6.0f} tokens/s", flush=True)
    grid = table(rows, config)
    print(grid.markdown())
    report = {"huge_pages": args.huge_pages, "before": before, "after": common.provenance(),
              "rows": rows, "goals": goals(rows)}  # fmt: skip
    if args.json:
        common.save(args.json, report, grid)
    return 0


def _child(name: str, args: argparse.Namespace, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--as", name, "--steps", str(steps)]
    command += ["--quick"] * args.quick
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if args.huge_pages:
        environment["GLIBC_TUNABLES"] = HUGE_PAGES
    if name != "torch 1f1b":
        return _found([subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)])
    own = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    own["MASTER_PORT"] = str(_free_port())
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**environment, **own, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    return _found(ranks)


def _found(children: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """What the last one said; peaks of all are added up."""
    said = []
    for child in children:
        out, _ = child.communicate()
        line = next(one for one in out.decode().splitlines() if one.startswith("FOUND"))
        said.append(json.loads(line.removeprefix("FOUND")))
    return {**said[-1], "peak_mib": sum(one["peak_mib"] for one in said)}


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_one(name: str, config: common.Config, steps: int) -> dict[str, Any]:
    """A contestant's figures."""
    who, *how = name.split()
    batches = common.token_batches(config, WARMUP + steps)
    if who == "torch":
        import torch
        import torch.distributed.pipelining  # noqa: F401

        make: Callable[..., Any] = _torch_pipeline if how == ["1f1b"] else _torch_eager
    elif who == "jax":
        make = partial(_by_hand, how[0], how[1])
    else:
        make = partial(_fzero, how[-1], "1f1b" in how)
    imported = _resident("VmRSS")
    step = make(config)
    seconds, losses = [], []
    for ids in batches:
        started = time.perf_counter()
        losses.append(step(ids))
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    return {
        "median_s": statistics.median(seconds[WARMUP:]), "seconds": seconds, "losses": losses,
        "first_step_s": seconds[0], "peak_mib": (_resident("VmHWM") - imported) / 1024,
    }  # fmt: skip


def _resident(field: str) -> int:
    """KiB, by the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _by_hand(how: str, remat: str, config: common.Config) -> Callable[[Any], float]:
    """A step as a JAX user writes it, with a scan over layers or one after the other."""
    import jax
    import optax

    tx = common.adamw()
    params = jax.tree.map(jax.numpy.asarray, common.initial_params(config))
    if how == "layers":
        stacked = params["blocks"]
        params["blocks"] = [
            {name: leaf[k] for name, leaf in stacked.items()} for k in range(config.layers)
        ]
    block = partial(common.block, heads=config.heads)
    if remat != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        block = jax.checkpoint(block, policy=policy if remat == "dots" else None)

    def loss(params: Any, ids: Any) -> Any:
        x = common.embed(params["embed"], ids[:, :-1])
        if how == "scan":
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = block(p, x)
        return common.head(params["head"], x, ids[:, 1:]) / config.tokens

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, ids: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, ids)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    held = (params, tx.init(params))

    def run(ids: Any) -> float:
        nonlocal held
        *held, value = jax.block_until_ready(step(*held, ids))
        return float(value)

    return run


def _fzero(remat: str, piped: bool, config: common.Config) -> Callable[[Any], float]:
    import jax

    jax.config.update("jax_num_cpu_devices", 2 if piped else 1)
    import fzero as fz

    plan = fz.Plan(zero=0, data=1, remat=remat)
    if piped:
        plan = plan.replace(pipe=2, microbatches=MICROBATCHES, schedule="1f1b")
    model, tx = common.gpt(config), common.adamw()
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)

    def run(ids: Any) -> float:
        nonlocal state
        state, metrics = step(state, {"ids": ids})
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return run


class _Torch:
    """The model of `common` in torch."""

    def __init__(self, config: common.Config) -> None:
        import torch

        self.config, self.torch = config, torch
        params = common.initial_params(config)

        def own(x: Any) -> Any:
            return torch.nn.Parameter(torch.from_numpy(x.copy()))

        self.embed = {name: own(leaf) for name, leaf in params["embed"].items()}
        self.head = {name: own(leaf) for name, leaf in params["head"].items()}
        self.blocks = [
            # Matrices as torch's own layers have them: (out, in), contiguous.
            {name: own(leaf[k].T if leaf.ndim == 3 else leaf[k])
             for name, leaf in params["blocks"].items()}
            for k in range(config.layers)
        ]  # fmt: skip

    def norm(self, x: Any, p: Any, name: str) -> Any:
        f = self.torch.nn.functional
        return f.layer_norm(x, x.shape[-1:], p[f"{name}_scale"], p[f"{name}_bias"], 1e-5)

    def block(self, p: Any, x: Any) -> Any:
        f = self.torch.nn.functional
        rows, length, width = x.shape
        qkv = f.linear(self.norm(x, p, "norm_1"), p["qkv"], p["qkv_bias"])
        split = (rows, length, self.config.heads, width // self.config.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in qkv.chunk(3, -1))
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + f.linear(seen.transpose(1, 2).reshape(x.shape), p["out"], p["out_bias"])
        hidden = f.linear(self.norm(x, p, "norm_2"), p["up"], p["up_bias"])
        return x + f.linear(f.gelu(hidden, approximate="tanh"), p["down"], p["down_bias"])

    def part(self, first: int, last: int) -> Any:
        """Some layers as a module; the first embeds, the last gives logits."""
        torch, config = self.torch, self.config
        model = self

        class Part(torch.nn.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                own = [*model.blocks[first:last]]
                own += [model.embed] * (first == 0) + [model.head] * (last == config.layers)
                self.own = torch.nn.ParameterList(leaf for p in own for leaf in p.values())

            def forward(self, x: Any) -> Any:
                if first == 0:
                    x = torch.nn.functional.embedding(x, model.embed["tokens"])
                    x = x + model.embed["positions"]
                for p in model.blocks[first:last]:
                    x = model.block(p, x)
                if last == config.layers:
                    x = model.norm(x, model.head, "norm") @ model.head["table"]
                return x

        return Part()

    def tx(self, module: Any) -> Any:
        """The optimizer."""
        return self.torch.optim.AdamW(
            module.parameters(), lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
        )


def _torch_loss(logits: Any, ids: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _torch_eager(config: common.Config) -> Callable[[Any], float]:
    import torch

    model = _Torch(config)
    module = model.part(0, config.layers)
    tx = model.tx(module)

    def run(ids: Any) -> float:
        whole = torch.from_numpy(ids).long()
        value = _torch_loss(module(whole[:, :-1]), whole[:, 1:])
        value.backward()
        tx.step()
        tx.zero_grad(set_to_none=True)
        return float(value.detach())

    return run


def _torch_pipeline(config: common.Config) -> Callable[[Any], float]:
    import torch
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, half = torch.distributed.get_rank(), config.layers // 2
    model = _Torch(config)
    module = model.part(rank * half, (rank + 1) * half)
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=_torch_loss)
    tx = model.tx(module)

    def run(ids: Any) -> float:
        whole = torch.from_numpy(ids).long()
        losses: list[Any] = []
        if rank == 0:
            schedule.step(whole[:, :-1])
        else:
            schedule.step(target=whole[:, 1:].contiguous(), losses=losses)
        tx.step()
        tx.zero_grad(set_to_none=True)
        torch.distributed.barrier()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return run


def goals(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each goal: the ratio of the fastest on either side, and whether it is reached."""

    def fastest(start: str, but: str = "") -> tuple[float, str]:
        names = [
            name for name in rows
            if name.startswith(start) and name != but
            and ("1f1b" in name) == ("1f1b" in start)
        ]  # fmt: skip
        return min(
            ((min(one["median_s"] for one in rows[name]), name) for name in names),
            default=(float("nan"), ""),
        )

    found = []
    for what, own, other, least in GOALS:
        above, below = fastest(other, but=own), fastest(own)
        ratio = above[0] / below[0]
        found.append({
            "goal": what, "ratio": ratio, "least": least, "reached": ratio >= least,
            "own": below[1], "other": above[1],
        })  # fmt: skip
    return found


def table(rows: dict[str, list[dict[str, Any]]], config: common.Config) -> common.Grid:
    """A line for each contestant, then one for each goal."""
    cells = []
    for name, runs in rows.items():
        rates = sorted(config.tokens / one["median_s"] for one in runs)
        spread = f"{rates[0]:.0f}" if len(rates) == 1 else f"{rates[0]:.0f} to {rates[-1]:.0f}"
        cells.append((
            name, spread, f"{max(one['peak_mib'] for one in runs):.0f}",
            f"{runs[0]['first_step_s']:.1f}", f"{runs[0]['losses'][-1]:.4f}",
        ))  # fmt: skip
    for one in goals(rows):
        verdict = "reached" if one["reached"] else "missed"
        words = f"{verdict}: {one['own']} / {one['other']}, goal {one['least']}"
        cells.append((one["goal"], f"{one['ratio']:.2f}", "", "", words))
    columns = ("who", "tokens/s", "peak MiB above imports", "first step s", "last loss")
    title = (
        f"{config.name}: {config.layers} x {config.width}, {config.batch} x {config.seq} tokens,"
        " float32, AdamW"
    )
    return common.Grid(title, columns, cells)


if __name__ == "__main__":
    raise SystemExit(main())
