"""What the benchmarks share: a GPT in plain JAX, its data, timing, and where the numbers came from.

The model, its initial weights and its tokens are those of other frameworks' runs (`--peers` of
`benchmarks/step.py`): drawn from numpy's frozen `RandomState`, so that any program can start from
the same bits. Shapes in names and comments: B examples, T tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import fzero as fz


PyTree = Any
SEED = 20240917  # of the peers' weights; tokens use the next number


@dataclass(frozen=True)
class Config:
    """Sizes of a model and of its batch."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    seq: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens that one step trains on."""
        return self.batch * self.seq


CONFIGS = {
    config.name: config
    for config in (
        Config("small", vocabulary=512, width=256, layers=8, heads=4, seq=128, batch=16),
        Config("tiny", vocabulary=96, width=32, layers=4, heads=4, seq=32, batch=8),
        Config("mem", vocabulary=4096, width=512, layers=12, heads=8, seq=32, batch=8),
    )
}


def adamw() -> optax.GradientTransformation:
    """The peers' optimizer: decay on every parameter, no clipping."""
    return optax.adamw(3e-4, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)


def initial_params(config: Config) -> dict[str, Any]:
    """The peers' initial weights; layers stacked, matrices as (in, out)."""
    random = np.random.RandomState(SEED)
    width, layers = config.width, config.layers

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
        return (random.standard_normal((rows, columns)) * 0.02 * scale).astype(np.float32)

    def layer() -> dict[str, np.ndarray[Any, Any]]:
        narrow = 1 / math.sqrt(2 * layers)
        return {  # drawn in this order, as (out, in)
            "qkv": matrix(3 * width, width).T,
            "out": matrix(width, width, narrow).T,
            "up": matrix(4 * width, width).T,
            "down": matrix(width, 4 * width, narrow).T,
        }

    embed = {"tokens": matrix(config.vocabulary, width), "positions": matrix(config.seq, width)}
    drawn = [layer() for _ in range(layers)]
    blocks = {name: np.stack([one[name] for one in drawn]) for name in drawn[0]}
    for name, size in {"qkv": 3 * width, "out": width, "up": 4 * width, "down": width}.items():
        blocks[f"{name}_bias"] = np.zeros((layers, size), np.float32)
    for norm in ("norm_1", "norm_2"):
        blocks[f"{norm}_scale"] = np.ones((layers, width), np.float32)
        blocks[f"{norm}_bias"] = np.zeros((layers, width), np.float32)
    head = {
        "norm_scale": np.ones(width, np.float32),
        "norm_bias": np.zeros(width, np.float32),
        "table": matrix(config.vocabulary, width).T,
    }
    return {"embed": embed, "blocks": blocks, "head": head}


def token_batches(config: Config, steps: int) -> np.ndarray[Any, Any]:
    """The peers' tokens, (steps, B, T + 1) int32: each token has four likely successors."""
    random = np.random.RandomState(SEED + 1)
    successors = random.randint(0, config.vocabulary, size=(config.vocabulary, 4))
    # The peers draw 30 steps position by position, so a shorter run takes the first of 30.
    rows = max(steps, 30) * config.batch
    out = np.empty((rows, config.seq + 1), np.int32)
    out[:, 0] = random.randint(0, config.vocabulary, size=rows)
    for position in range(1, config.seq + 1):
        likely = successors[out[:, position - 1], random.randint(0, 4, size=rows)]
        noise = random.randint(0, config.vocabulary, size=rows)
        out[:, position] = np.where(random.random_sample(rows) < 0.9, likely, noise)
    return out.reshape(-1, config.batch, config.seq + 1)[:steps]


def embed(p: PyTree, ids: jax.Array) -> jax.Array:
    """(B, T) tokens to (B, T, D)."""
    return p["tokens"][ids] + p["positions"]


def block(p: PyTree, x: jax.Array, heads: int) -> jax.Array:
    """One pre-norm transformer layer, (B, T, D) to (B, T, D)."""
    qkv = _linear(_norm(x, p["norm_1_scale"], p["norm_1_bias"]), p["qkv"], p["qkv_bias"])
    split = (*x.shape[:2], heads, x.shape[-1] // heads)
    q, k, v = (part.reshape(split) for part in jnp.split(qkv, 3, axis=-1))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + _linear(attended, p["out"], p["out_bias"])
    hidden = _linear(_norm(x, p["norm_2_scale"], p["norm_2_bias"]), p["up"], p["up_bias"])
    return x + _linear(jax.nn.gelu(hidden, approximate=True), p["down"], p["down_bias"])


def head(p: PyTree, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Sum of the cross entropies of (B, T) targets."""
    logits = _linear(_norm(x, p["norm_scale"], p["norm_bias"]), p["table"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()


def _linear(x: jax.Array, matrix: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ matrix + bias` over rows of tokens.

    A weight's gradient contracts over all tokens. Over (B, T) as two dims the CPU backend would
    copy a transposed gradient first; over their product it does not. On GPU both are the same.
    """
    y = x.reshape(-1, x.shape[-1]) @ matrix
    y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], -1)


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias


def gpt(config: Config) -> fz.Sequential:
    """The same functions as a chain of layers."""

    def from_batch(p: PyTree, batch: PyTree, ctx: fz.Context) -> jax.Array:
        return embed(p, batch["ids"][:, :-1])

    def one_layer(p: PyTree, x: jax.Array, ctx: fz.Context) -> jax.Array:
        return block(p, x, config.heads)

    def to_loss(p: PyTree, x: jax.Array, ctx: fz.Context) -> fz.Mean:
        targets = ctx.batch["ids"][:, 1:]
        return fz.Mean(head(p, x, targets), jnp.float32(targets.size))

    def given(_: jax.Array) -> PyTree:
        raise NotImplementedError("initial values are given to the Sequential")

    return fz.Sequential(
        [
            fz.Layer("embed", given, from_batch),
            fz.Stack("blocks", config.layers, given, one_layer),
            fz.Layer("head", given, to_loss),
        ],
        init=(initial_params(config), {}),
    )


@dataclass(frozen=True)
class Limit:
    """What a step cannot do without.

    Args:
        flops: of all matrix products on all devices, the recomputed forward pass of the stacked
            layers included.
        sent_bytes: what each device has to send (ZeRO, arXiv:1910.02054, section 7).
        seconds: `flops` at the rate of one large matrix product on this machine.
    """

    flops: float
    sent_bytes: float
    seconds: float


def limit(config: Config, zero: int, devices: int, flops_per_second: float) -> Limit:
    """The limit of one step; `6 x parameters x tokens`, and 2 more for what is recomputed."""
    layer = 12 * config.width**2
    stacked, table = config.layers * layer, config.vocabulary * config.width
    # Scores and weighted values of one layer, for all positions (no kernel here skips the future).
    attention = config.layers * 2 * config.seq * config.width
    flops = config.tokens * (8 * (stacked + attention) + 6 * table)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(initial_params(config)))
    share = (devices - 1) / devices
    sent = (3 if zero == 3 else 2) * 4 * parameters * share
    return Limit(flops, sent, flops / flops_per_second)


def matmul_rate(repeats: int = 20, size: int = 2048) -> float:
    """FLOP/s of one large float32 matrix product, the best of a few."""
    a = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def interleaved(
    runs: Mapping[str, Callable[[int], Any]], rounds: int, warmup: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and CPU seconds of each run's calls, in turns, so that all see the same machine.

    CPU seconds (of all threads) say less, but hardly change when others use the cores.

    Args:
        runs: per name, a function of the round's number that returns when its work is done.
        rounds: timed calls of each. The order turns round every time: what a call leaves behind
            (caches, the clock) then falls on both.
        warmup: untimed calls of each before that.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(warmup + rounds):
        for name in list(runs)[:: 1 if index % 2 else -1]:
            start, cpu_start = time.perf_counter(), time.process_time()
            runs[name](index)
            if index >= warmup:
                times[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
    return times, cpu


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of two medians, rounds kept together."""
    pairs = np.stack([above, below])
    random = np.random.default_rng(0)
    picks = pairs[:, random.integers(0, pairs.shape[1], size=(2000, pairs.shape[1]))]
    medians = np.median(picks, axis=2)
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    return float(low), float(high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a median, of order statistics: it supposes nothing of the distribution."""
    ordered = sorted(values)
    outer = max(int(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))), 0)
    return ordered[outer], ordered[len(ordered) - 1 - outer]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and minimum, in seconds."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {
        "median_s": statistics.median(times), "quartile_1_s": low, "quartile_3_s": high,
        "min_s": min(times),
    }  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A table of text: printed with rich, saved as markdown."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def rich(self) -> Table:
        """For the terminal."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a file."""
        rules = (":--", *("--:",) * (len(self.columns) - 1))
        lines = (f"| {' | '.join(row)} |" for row in (self.columns, rules, *self.rows))
        return "\n".join([f"**{self.title}**", "", *lines, ""])


def save(path: str, report: Mapping[str, Any], grid: Grid) -> None:
    """Writes a report as JSON, and its table as markdown beside it."""
    file = Path(path)
    file.write_text(json.dumps(report, indent=1) + "\n")
    facts = []
    for when in ("before", "after"):
        seen = report[when]
        versions = ", ".join(f"{name} {version}" for name, version in seen["versions"].items())
        load = ", ".join(f"{x:.2f}" for x in seen["load_average"])
        facts.append(f"- {when}: {seen['date']}, {seen['device']}, load {load}; {versions}")
    file.with_suffix(".md").write_text("\n".join([grid.markdown(), *facts, ""]))


def write_part(page: Path, by: str, text: str) -> None:
    """What stands on a page between `<!-- made by BY -->` and the next `<!-- end -->`.

    Raises:
        SystemExit: the page has no such part; nothing is written.
    """
    begin, end = f"<!-- made by {by} -->\n", "\n<!-- end -->"
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} has no lines {begin.strip()} and {end.strip()}: add them")
    page.write_text(before + begin + text + end + after)


def provenance() -> dict[str, Any]:
    """Date, device, versions and load: without them a time says nothing."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else f"{os.cpu_count()}-core CPU"
    versions = {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": kind,
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), **versions},
        "load_average": list(os.getloadavg()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
