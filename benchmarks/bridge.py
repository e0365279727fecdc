"""Converted PyTorch models: how long they take to convert and compile, and how fast they run.

    python benchmarks/bridge.py --depth --json depth.json     # GPT-2 of 4, 12 and 48 tiny layers
    python benchmarks/bridge.py --speed --json speed.json     # against torch and hand-written JAX
    python benchmarks/bridge.py --speed --models gpt2 --rounds 5 --threads 1

`--depth` converts GPT-2 and compiles loss and gradients, with its blocks rolled and without.
Conversion is mostly torch.export's own time, and is given apart.

`--speed` runs forward and train step (loss, gradients, AdamW, running statistics) of transformers'
GPT-2, Llama and ResNet (on 8 and on 32 images): converted, written by hand in JAX
(`bridge_by_hand.py`), in eager torch, and with `torch.compile` where it works. All take turns in
one process and start from the same weights; a ratio is the converted one's median by the other's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import bridge_by_hand as by_hand
import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from rich.console import Console

import fzero as fz
import torch_bridge as tb


convert_module = importlib.import_module("torch_bridge.convert")
GOAL = 1.03  # largest ratio to hand-written JAX that we accept
LEARNING_RATE = 1e-3


def main() -> int:
    """Runs what the command line asks for."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    report, grid = depths(args) if args.depth else speeds(args)
    Console(width=None if sys.stdout.isatty() else 150).print(grid.rich())
    if args.json:
        common.save(args.json, report, grid)
    return 0


# --- depth ---------------------------------------------------------------------------------------


def depths(args: argparse.Namespace) -> tuple[dict[str, Any], common.Grid]:
    """Conversion and compile time over depth, rolled and not."""
    before, rows = common.provenance(), []
    tiny_gpt2(2)  # what the first conversion and compilation of a process load
    for depth in args.depths:
        rows.append({"layers": depth, **tiny_gpt2(depth)})
        print(rows[-1], file=sys.stderr, flush=True)
    names = [name for name in rows[0] if name != "layers"]
    grid = common.Grid(
        "GPT-2 of width 32, CPU seconds: conversion; tracing and compilation of loss and gradients",
        ("layers", *(name.replace("_", " ") for name in names)),
        [(str(row["layers"]), *(f"{row[name]:.2f}" for name in names)) for row in rows],
    )
    return {"before": before, "rows": rows, "after": common.provenance()}, grid


def tiny_gpt2(depth: int) -> dict[str, float]:
    """CPU seconds, which others on the machine change less than wall time."""
    config = transformers.GPT2Config(
        n_layer=depth, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0,
        eos_token_id=0, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros((2, 16), dtype=torch.int64)
    with (
        _timed(convert_module, "export_both") as export,
        _timed(convert_module, "roll_blocks") as rolling,
    ):
        start = time.process_time()
        converted = tb.convert(module, ids, roll=2)
        convert = time.process_time() - start
    times = {"convert": convert, "of_it_torch": export[0], "of_it_rolling": rolling[0]}
    # The same graphs evaluated block by block, as roll=False has them.
    plain = dataclasses.replace(
        converted,
        _params=converted.by_name(converted._params),
        names=type(converted.names)(),
        _graphs=converted._graphs.unrolled(),
    )
    for name, one in (("rolled", converted), ("unrolled", plain)):
        trace, compiled = _compile_times(one.model(_lm_loss), ids.numpy().astype(np.int32))
        times |= {f"trace_{name}": trace, f"compile_{name}": compiled}
    return times


def _compile_times(model: Any, ids: Any) -> tuple[float, float]:
    def total(params: Any, key: jax.Array) -> jax.Array:
        mean = model.loss(params, {}, {"ids": ids}, key, True)[0]
        return mean.total / mean.count

    start = time.process_time()
    lowered = jax.jit(jax.value_and_grad(total)).lower(model.init[0], jax.random.key(0))
    trace = time.process_time() - start
    start = time.process_time()
    lowered.compile()
    return trace, time.process_time() - start


@contextlib.contextmanager
def _timed(module: Any, name: str) -> Iterator[list[float]]:
    """The CPU seconds spent in a function of a module meanwhile."""
    original, spent = getattr(module, name), [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            spent[0] += time.process_time() - start

    setattr(module, name, timed)
    try:
        yield spent
    finally:
        setattr(module, name, original)


def _lm_loss(forward: Any, batch: Any) -> Any:
    return tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])


# --- speed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One model: the torch module, a batch, and its hand-written counterpart."""

    module: torch.nn.Module
    batch: dict[str, torch.Tensor]
    torch_loss: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    jax_loss: Callable[[Any, Any], Any]
    hand_params: Callable[..., Any]
    hand_loss: Callable[..., Any]


def _language(module: torch.nn.Module, hand: str, batch: int, seq: int) -> Case:
    ids = torch.randint(0, module.config.vocab_size, (batch, seq))

    def loss(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = module(batch["ids"], use_cache=False).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch["ids"][:, 1:].flatten())

    return Case(
        module, {"ids": ids}, loss, _lm_loss,
        getattr(by_hand, f"{hand}_params"), getattr(by_hand, f"{hand}_loss"),
    )  # fmt: skip


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=256, n_head=4, vocab_size=512, n_positions=128, bos_token_id=0,
        eos_token_id=0, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _language(transformers.GPT2LMHeadModel(config), "gpt2", 4, 128)


def llama() -> Case:
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=256, intermediate_size=688, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=128,
    )  # fmt: skip
    return _language(transformers.LlamaForCausalLM(config), "llama", 4, 128)


def resnet(num_images: int = 8) -> Case:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="basic",
        num_labels=10,
    )  # fmt: skip
    module = transformers.ResNetForImageClassification(config)
    images, labels = torch.randn(num_images, 3, 64, 64), torch.randint(0, 10, (num_images,))

    def loss(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(module(batch["images"]).logits, batch["labels"])

    def jax_loss(forward: Any, batch: Any) -> Any:
        logits = forward(batch["images"]).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    batch = {"images": images, "labels": labels}
    return Case(module, batch, loss, jax_loss, by_hand.resnet_params, by_hand.resnet_loss)


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet-8": resnet,
    "resnet-32": functools.partial(resnet, 32),
}


def speeds(args: argparse.Namespace) -> tuple[dict[str, Any], common.Grid]:
    """Forward and train step of each model, all contestants in turns."""
    before, rows = common.provenance(), []
    for name in args.models:
        rows += compare(name, args)
    contestants = ("by hand", "torch", "torch.compile", "torchax")
    grid = common.Grid(
        f"converted, in ms, and its ratio to others (goal by hand: at most {GOAL})",
        ("model", "what", "converted ms", *contestants, "loss gap"),
        [
            (
                row["model"],
                row["what"],
                f"{row['converted']['median_s'] * 1e3:.1f}",
                *(_cell(row, contestant) for contestant in contestants),
                f"{row['loss_gap']:.0e}",
            )
            for row in rows
        ],
    )
    return {"before": before, "rows": rows, "after": common.provenance()}, grid


def _cell(row: dict[str, Any], contestant: str) -> str:
    """The ratio of medians with its 95 % interval, or why there is none."""
    if contestant not in row["ratio"]:
        return str(row["missing"].get(contestant, "left out"))
    low, high = row["interval"][contestant]
    return f"{row['ratio'][contestant]:.3f} ({low:.3f}-{high:.3f})"


def compare(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the forward pass and one for the train step."""
    torch.manual_seed(0)
    case = MODELS[name]()
    case.module.train()
    runs = {"converted": converted_runs(case), "by hand": hand_runs(case)}
    runs["torch"] = torch_runs(case, case.torch_loss)
    missing: dict[str, str] = {}
    without = set(args.without)
    if not importlib.util.find_spec("torchax"):
        missing["torchax"] = "not installed"
    elif "torchax" not in without:
        runs["torchax"] = torchax_runs(case)
        # It registers a device that torch's compiler then asks for and does not find.
        without.add("torch.compile")
    if "torch.compile" not in without:
        compiled, problem = compiled_runs(case)
        runs |= {"torch.compile": compiled} if compiled is not None else {}
        missing |= {"torch.compile": problem} if compiled is None else {}
    gap = _largest_gap(name, runs)
    rows = []
    for what in ("forward", "train step"):
        times, cpu = common.interleaved(
            {w: p[what] for w, p in runs.items()}, args.rounds, warmup=2
        )
        median = {who: common.spread(seconds)["median_s"] for who, seconds in times.items()}
        rows.append(
            {
                "model": name,
                "what": what,
                **{who: common.spread(seconds) for who, seconds in times.items()},
                "ratio": {w: median["converted"] / m for w, m in median.items()},
                "cpu_ratio": {
                    w: float(np.median(cpu["converted"]) / np.median(seconds))
                    for w, seconds in cpu.items()
                },
                "interval": {
                    w: common.ratio_interval(times["converted"], seconds)
                    for w, seconds in times.items()
                },
                "loss_gap": gap,
                "missing": missing,
            }
        )
        print(rows[-1]["model"], what, rows[-1]["ratio"], file=sys.stderr, flush=True)
    return rows


def _largest_gap(name: str, runs: Mapping[str, Runs]) -> float:
    """Relative difference of the losses by hand, forwards and in three steps, from the converted.

    Raises:
        SystemExit: someone trains another model.
    """
    losses = {
        who: [run["forward"](0), *(run["train step"](0) for _ in range(3))]
        for who, run in runs.items()
    }
    gaps = {
        who: float(np.max(np.abs(np.divide(seen, losses["converted"]) - 1)))
        for who, seen in losses.items()
    }
    if max(gaps.values()) > 1e-3 or gaps["by hand"] > 1e-4:
        raise SystemExit(f"{name}: not one model: losses {losses}")
    return gaps["by hand"]


Runs = dict[str, Callable[[int], float]]


def jax_runs(loss: Callable[[Any, Any, Any], Any], params: Any, buffers: Any, batch: Any) -> Runs:
    """`loss(params, buffers, batch) -> (loss, buffers)` as both timed programs."""
    tx = optax.adamw(LEARNING_RATE)
    forward = jax.jit(lambda p, b, x: loss(p, b, x)[0])

    def step(state: Any, batch: Any) -> Any:
        params, buffers, moments = state
        (value, buffers), grads = jax.value_and_grad(loss, has_aux=True)(params, buffers, batch)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), buffers, moments), value

    params, buffers, batch = jax.tree.map(jnp.array, (params, buffers, batch))
    held = [(jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, buffers), tx.init(params))]
    train = jax.jit(step, donate_argnums=0)

    def run_step(_: int) -> float:
        held[0], value = train(held[0], batch)
        return float(jax.block_until_ready(value))

    return {"forward": lambda _: float(forward(params, buffers, batch)), "train step": run_step}


def converted_runs(case: Case) -> Runs:
    """The converted module, as `Converted.model` gives it."""
    args = [value for name, value in case.batch.items() if name != "labels"]
    converted = tb.convert(case.module, *args)
    model = converted.model(case.jax_loss)

    def loss(params: Any, buffers: Any, batch: Any) -> Any:
        value, new, _ = model.loss(params, buffers, batch, jax.random.key(0), True)
        return (value.total / value.count if isinstance(value, fz.Mean) else value), new

    return jax_runs(loss, *model.init, _numpy(case.batch))


def hand_runs(case: Case) -> Runs:
    """The hand-written counterpart, from the same weights."""
    weights = {name: value.detach().numpy() for name, value in case.module.state_dict().items()}
    config = case.module.config
    params = case.hand_params(weights, config)
    buffers = {n: v for n, v in weights.items() if n.endswith(("running_mean", "running_var"))}
    values = tuple(_numpy(case.batch).values())
    batch = values[0] if len(values) == 1 else values
    return jax_runs(lambda p, b, x: case.hand_loss(p, b, x, config), params, buffers, batch)


def torch_runs(
    case: Case, loss: Callable[..., torch.Tensor], *, compile_first: bool = False
) -> Runs:
    """PyTorch, on a copy of the module; what compiles when it is called is called and undone."""
    module = copy.deepcopy(case.module)
    tx = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)

    def forward(_: int) -> float:
        with torch.no_grad():
            return float(loss(module, case.batch))

    def step(_: int) -> float:
        tx.zero_grad()
        value = loss(module, case.batch)
        value.backward()
        tx.step()
        return float(value.detach())

    if compile_first:
        forward(0)
        step(0)
        module.load_state_dict(case.module.state_dict())
        tx.state.clear()
    return {"forward": forward, "train step": step}


def compiled_runs(case: Case) -> tuple[Runs | None, str]:
    """PyTorch through its compiler, or why not."""
    try:
        runs = torch_runs(case, torch.compile(case.torch_loss), compile_first=True)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return runs, ""


def torchax_runs(case: Case) -> Runs:
    """PyTorch's modules, traced by JAX through torchax, which drops new running statistics."""
    import torchax

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = copy.deepcopy(case.module)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return case.torch_loss(self.module, batch)

    module = WithLoss()
    states, call = torchax.extract_jax(module)
    learned = dict(module.named_parameters())
    params = {name: value for name, value in states.items() if name in learned}
    buffers = {name: value for name, value in states.items() if name not in learned}
    return jax_runs(
        lambda p, b, x: (call({**p, **b}, (x,)), b), params, buffers, _numpy(case.batch)
    )


def _numpy(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    narrow = {np.dtype(np.int64): np.int32}
    arrays = {name: value.numpy() for name, value in batch.items()}
    return {name: a.astype(narrow.get(a.dtype, a.dtype)) for name, a in arrays.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--depth", action="store_true", help="conversion and compile time")
    what.add_argument("--speed", action="store_true", help="forward and train step")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 12, 48])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", nargs="+", default=[], choices=["torch.compile", "torchax"])
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--json", help="file for the figures; the table goes beside it as .md")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
