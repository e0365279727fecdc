"""Architectures from tiny configs, each beside its conversion.

    python benchmarks/models.py [--only REGEX] [--missing] [--check N] [--json OUT] [--table OUT.md]

For each entry of `model_list.py` the module is converted at one batch size and compared with
PyTorch's at another, with weights perturbed: outputs in eval mode, outputs in train mode and the
gradients of all parameters, and outputs in bfloat16. An entry is

- `right`: all of it agrees;
- `refused`: a ConversionError says why it does not convert;
- `wrong`: something differs;
- `failed`: some other exception, or more than five minutes of CPU time.

Values agree within 2e-5 of the largest, gradients within 1e-4 of the largest of their parameter; or
within that of what PyTorch gives in float64; or if they are as near to that as PyTorch's own
float32 (twice its error at most: both are roundings); or, where a rounding goes far, if module and
conversion agree within 1e-9 when both compute in float64. In bfloat16 the error against float32 is
at most 1.1 times that of PyTorch's own module in bfloat16, and a rounding of the result; where it
is more, as a router's choice may fall otherwise on either side, in the median of five draws.

What PyTorch itself cannot run from a tiny config is no entry. `--check N` runs every Nth row again,
from another one each day, and fails if one turned worse.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import re
import select
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


sys.path.insert(0, str(Path(__file__).parent))
import model_list
from beside import QUICK, VERDICTS, Wrong, verdict, worse, write

import torch_bridge as tb


SECONDS, EXAMPLE, BATCH = 300, 2, 3
VALUES, GRADIENTS, NEGLIGIBLE = 2e-5, 1e-4, 3e-3
WIDE = 1e-9
RESULTS = Path(__file__).parent / "results" / "models.json"
# Larger than this no config is tiny.
MOST = 6_000_000
Rows = dict[str, dict[str, Any]]
Arrays = dict[str, Any]


class NoEntry(Exception):
    """PyTorch itself cannot run it so."""


def livelier(module: torch.nn.Module) -> torch.nn.Module:
    """The module with weights that all have an effect: no zero biases, no norms of 1.

    And with nothing dropped, so that train mode can be compared.
    """
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout_prob", None), float):
            part.dropout_prob = 0.0
    make = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=make)
                parameter.add_(0.05 * noise.to(parameter.dtype))
    return module


def leaves(out: Any) -> list[Any]:
    """The arrays or tensors of an output, in one order for both sides."""
    if isinstance(out, Mapping):
        return [x for key in out for x in leaves(out[key])]
    if isinstance(out, list | tuple):
        return [x for value in out for x in leaves(value)]
    return [out] if isinstance(out, torch.Tensor | jax.Array | np.ndarray) else []


@dataclass(frozen=True)
class Side:
    """What one side gives: outputs, which of them have a gradient, gradients, buffers after."""

    outputs: list[Any]
    smooth: list[bool]
    gradients: Arrays
    buffers: Arrays


def theirs(
    module: torch.nn.Module, inputs: Mapping[str, Any], train: bool, dtype: torch.dtype
) -> Side:
    """PyTorch's side; in train mode with gradients of a fixed random projection."""

    def cast(x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(dtype) if floating else x

    module = copy.deepcopy(module).to(dtype).train(train)
    torch.manual_seed(0)
    with torch.set_grad_enabled(train):
        out = leaves(module(**pytree.tree_map(cast, dict(inputs))))
    smooth = [x.requires_grad for x in out]
    gradients: Arrays = {}
    if train:
        chosen = [x for x in out if x.requires_grad]
        if not chosen:
            raise NoEntry("nothing that it gives has a gradient")
        seeds = [torch.from_numpy(seed(x.shape)).to(x.dtype) for x in chosen]
        torch.autograd.backward(chosen, seeds)
        gradients = {
            name: np.zeros(p.shape) if p.grad is None else array(p.grad)
            for name, p in module.named_parameters()
        }
    buffers = {name: array(b) for name, b in module.named_buffers()}
    return Side([array(x) for x in out], smooth, gradients, buffers)


def array(x: torch.Tensor) -> Any:
    """A tensor as numpy has it, floats as float64."""
    return (x.detach().double() if x.is_floating_point() else x.detach()).numpy()


def seed(shape: Any) -> Any:
    """The cotangent of an output."""
    return np.random.default_rng(len(shape)).standard_normal(tuple(shape))


def ours(
    converted: tb.Converted,
    inputs: Mapping[str, Any],
    smooth: list[bool] | None,
    dtype: Any = np.float32,
) -> Side:
    """The same of the conversion; in train mode if `smooth` is given."""

    def cast(x: Any) -> Any:
        x = np.asarray(x)
        return x.astype(dtype) if np.issubdtype(x.dtype, np.floating) else x

    given = {name: cast(x) for name, x in inputs.items()}
    params = {name: cast(x) for name, x in converted.params.items()}
    train = smooth is not None

    def run(params: Any) -> Any:
        rng = jax.random.key(0)
        made = converted.apply(params, converted.buffers, train=train, rng=rng, **given)
        return leaves(made.output), made.buffers

    def loss(params: Any) -> Any:
        out, buffers = run(params)
        terms = [
            jnp.sum(x * seed(x.shape).astype(x.dtype))
            for x, counts in zip(out, smooth or [], strict=True)
            if counts
        ]
        return sum(terms), (out, buffers)

    if not train:
        out, buffers = jax.device_get(jax.jit(run)(params))
        return Side(out, [], {}, converted.by_name(buffers))
    gradients, (out, buffers) = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))
    return Side(out, [], converted.by_name(gradients), converted.by_name(buffers))


def compare(
    what: str, got: Any, want: Any, exact: Callable[[], Any], tolerance: float, scale: float
) -> None:
    """Raises `Wrong` unless two arrays agree as the head of this file says."""
    got = np.asarray(got)
    if got.shape != want.shape:
        raise Wrong(f"{what}: shape {got.shape}, torch {want.shape}")
    if not np.issubdtype(want.dtype, np.inexact):
        if not np.array_equal(got, want):
            raise Wrong(f"{what}: other whole numbers")
        return
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        raise Wrong(f"{what}: other infinities")
    scale = max(scale, float(np.max(np.abs(want[finite]), initial=0.0)), 1e-6)

    def gap(a: Any, b: Any) -> float:
        return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0)) / scale

    near = gap(got, want)
    if near <= tolerance:
        return
    truth = exact()
    if truth is None or gap(got, truth) > max(tolerance, 2 * gap(want, truth)):
        raise Wrong(f"{what}: off by {near:.1e}")


def largest(side: Side) -> float:
    """The largest number among all gradients."""
    return max((float(np.abs(g).max()) for g in side.gradients.values() if g.size), default=0.0)


class ExactSlopes(TorchFunctionMode):
    """PyTorch's slope of hardsigmoid is a sixth in float32, in float64 too: 3e-8 off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.hardsigmoid:
            return F.relu6(args[0] + 3) / 6
        return func(*args, **(kwargs or {}))


def check_mode(converted: tb.Converted, module: Any, inputs: Any, train: bool) -> None:
    """One mode in float32: outputs, and in train mode gradients and buffers."""
    want = theirs(module, inputs, train, torch.float32)
    got = ours(converted, inputs, want.smooth if train else None)
    mode = "train" if train else "eval"
    if len(got.outputs) != len(want.outputs):
        raise Wrong(f"{mode}: {len(got.outputs)} outputs, torch {len(want.outputs)}")

    @functools.cache
    def exact() -> Side:
        try:
            return theirs(module, inputs, train, torch.float64)
        except Exception:  # some have no float64
            return Side([None] * len(want.outputs), [], {}, {})

    for i, (g, w) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        compare(f"{mode}: output {i}", g, w, lambda i=i: exact().outputs[i], VALUES, 0.0)
    least = NEGLIGIBLE * largest(want)
    for name, g in got.gradients.items():
        w, e = want.gradients[name], lambda name=name: exact().gradients.get(name)
        compare(f"gradient of {name}", g, w, e, GRADIENTS, least)
    for name, g in got.buffers.items() if train else ():
        w, e = want.buffers[name], lambda name=name: exact().buffers.get(name)
        compare(f"buffer {name}", g, w, e, VALUES, 0.0)


def check_wide(module: Any, call: Any, train: bool) -> None:
    """One mode, with all of it in float64."""

    def cast(x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.double() if floating else x

    with jax.enable_x64(True):
        wide, inputs = copy.deepcopy(module).double(), pytree.tree_map(cast, call(BATCH))
        converted = tb.convert(wide, **pytree.tree_map(cast, call(EXAMPLE)))
        with ExactSlopes():
            want = theirs(wide, inputs, train, torch.float64)
        got = ours(converted, inputs, want.smooth if train else None, np.float64)
    for i, (g, w) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        compare(f"float64: output {i}", g, w, lambda: None, WIDE, 0.0)
    least = NEGLIGIBLE * largest(want)  # of what only rounding keeps from 0: a bias before a norm
    for name, g in got.gradients.items():
        compare(f"float64: gradient of {name}", g, want.gradients[name], lambda: None, WIDE, least)


def errors_in_bfloat16(
    converted: tb.Converted, module: Any, inputs: Any
) -> tuple[float, float, float]:
    """Of the float32 conversion in bfloat16, of PyTorch's own module, and what is allowed."""
    truth = theirs(module, inputs, False, torch.float32).outputs
    want = theirs(module, inputs, False, torch.bfloat16).outputs
    got = ours(converted, inputs, None, jnp.bfloat16).outputs
    floats = [i for i, t in enumerate(truth) if np.issubdtype(t.dtype, np.floating)]

    def error(side: Any) -> float:
        parts = (np.sum((np.float64(side[i]) - truth[i]) ** 2) for i in floats)
        return float(np.sqrt(sum(parts)) / size)

    size = float(np.sqrt(sum(np.sum(truth[i] ** 2) for i in floats)))
    # The error of a few numbers says little about its size.
    few = 1 + 2 / sum(truth[i].size for i in floats) ** 0.5
    mine, torchs = error(got), error(want)
    if not np.isfinite(mine) and np.isfinite(torchs):
        raise Wrong("bfloat16: not finite")
    return mine, torchs, 1.1 * few * torchs + 2.0**-9


def check_bfloat16(
    converted: tb.Converted, module: Any, build: model_list.Builder, call: Any
) -> str:
    """The bar of 16 bits, which the median of five draws of weights must hold."""
    try:
        theirs(module, call(BATCH), False, torch.bfloat16)
    except Exception as error:
        return f"PyTorch cannot: {type(error).__name__}"
    drawn = [errors_in_bfloat16(converted, module, call(BATCH))]
    if drawn[0][0] > drawn[0][2]:  # a router's choice may fall otherwise, for either side
        for draw in range(4, 8):
            torch.manual_seed(draw)
            other = livelier(build()[0]).eval()
            again = tb.convert(other, **call(EXAMPLE))
            drawn.append(errors_in_bfloat16(again, other, call(BATCH)))
    mine, torchs, allowed = np.median(np.asarray(drawn), axis=0)
    if mine > allowed:
        raise Wrong(f"bfloat16: error {mine:.1e}, torch's own {torchs:.1e}")
    return "right"


def check_model(build: model_list.Builder, row: dict[str, Any]) -> None:
    """Converts one entry and compares all of it; `row` takes what is measured."""
    torch.manual_seed(3)
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in build()[0].parameters())
    except Exception:
        size = 0  # some cannot be made without values
    if size > MOST:
        raise NoEntry(f"{size} parameters")
    try:
        module, call = build()
        livelier(module).eval()
        with torch.no_grad():
            module(**call(BATCH))
            module(**call(EXAMPLE))
    except Exception as error:
        raise NoEntry(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from error
    row["class"] = type(module).__name__
    start = time.process_time()
    converted = tb.convert(module, **call(EXAMPLE))
    row["seconds"] = round(time.process_time() - start, 1)
    inputs = call(BATCH)
    for train in (False, True):
        try:
            check_mode(converted, module, inputs, train)
        except Wrong as far:
            try:
                check_wide(module, call, train)
            except Exception as error:
                raise Wrong(f"{far}; {error}") from error
    row["bfloat16"] = check_bfloat16(converted, module, build, call)


def work() -> None:
    """A process that takes names on its input and gives a row for each."""
    warnings.simplefilter("ignore")
    jax.config.update("jax_platforms", "cpu")
    builders = dict(model_list.entries())
    for line in sys.stdin:
        name, row = line.strip(), {}

        def run(name: str = name, row: dict[str, Any] = row) -> None:
            try:
                check_model(builders[name], row)
            except NoEntry as error:
                row["none"] = str(error)

        with contextlib.redirect_stdout(sys.stderr):
            found = verdict(name, run, SECONDS)
        row |= {"verdict": "none" if "none" in row else found.verdict}
        row["why"] = row.pop("none", found.why)
        print(json.dumps(row), flush=True)


class Worker:
    """A process that checks models, made again when one ends or hangs it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def check(self, name: str) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "XLA_FLAGS": QUICK, "OMP_NUM_THREADS": "1"},
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        # Waiting for other work does not count against a model, nor does the start.
        if select.select([process.stdout], [], [], 4 * SECONDS)[0]:
            line = process.stdout.readline()
            if line:
                return dict(json.loads(line))
        self.close()
        return {"verdict": "failed", "why": "its process ended or hung"}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def markdown(rows: Rows) -> str:
    """All entries, a table for each library."""
    rows = {name: row for name, row in rows.items() if row["verdict"] != "none"}
    counts = Counter(row["verdict"] for row in rows.values())
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in VERDICTS)
    lines = [
        "# Architectures",
        "",
        f"Written by `make models` (benchmarks/models.py): {len(rows)} architectures, {summary}.",
        "Each is made from a tiny config with random weights, converted at one batch size and",
        "compared with PyTorch at another: outputs in eval and in train mode, gradients of all",
        "parameters, buffers, and outputs in bfloat16 (error against float32 at most 1.1 times",
        "that of PyTorch's own module in bfloat16). Seconds are those of `tb.convert` on one core",
        "of a busy machine. Dropout is off, so that both sides draw nothing. Where a rounding goes",
        "far in float32 (an activation at its kink), both agree within 1e-9 in float64.",
    ]
    for library in dict.fromkeys(name.split("/")[0] for name in sorted(rows)):
        lines += ["", f"## {library}", "", "| architecture | verdict | seconds | bfloat16 | why |"]
        lines += ["|---|---|---|---|---|"]
        for name, row in sorted(rows.items()):
            if name.split("/")[0] == library:
                why = row["why"].split(" at: ")[0].replace("|", "\\|")
                what = name.partition("/")[2]
                seconds, low = row.get("seconds", ""), row.get("bfloat16", "")
                lines.append(f"| {what} | {row['verdict']} | {seconds} | {low} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Checks the entries and prints what is not right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--missing", action="store_true", help="only entries without a row")
    parser.add_argument("--check", type=int, help="every Nth row may not have turned worse")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    rows: Rows = json.loads(options.json.read_text()) if options.json.exists() else {}
    names = [name for name, _ in model_list.entries() if re.search(options.only, name)]
    if options.missing:
        names = [name for name in names if name not in rows]
    if options.check:
        names = [n for n in names if rows.get(n, {}).get("verdict") in VERDICTS]
        names = names[date.today().toordinal() % options.check :: options.check]
    worker, found = Worker(), {}
    for name in names:
        found[name] = worker.check(name)
        if found[name]["verdict"] not in ("right", "none"):
            print(f"{found[name]['verdict']:8} {name}: {found[name]['why'][:200]}", flush=True)
        if not options.check:
            rows[name] = found[name]
            write(options.json, rows)
    worker.close()
    print(Counter(row["verdict"] for row in found.values()))
    if options.table and not options.check:
        options.table.write_text(markdown(rows))
    turned = [n for n in found if options.check and worse(found[n]["verdict"], rows[n]["verdict"])]
    if turned:
        sys.exit(f"turned worse: {', '.join(turned)}")


if __name__ == "__main__":
    main()
