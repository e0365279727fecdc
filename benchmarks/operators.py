"""PyTorch's own operator and module databases, entry by entry, beside their conversion.

    python benchmarks/operators.py [--only REGEX] [--samples 3] [--dtype float32]
                                   [--json OUT] [--table OUT.md]

For each entry of `op_db` and `module_db` (torch.testing._internal) the samples that PyTorch tests
itself with are converted; values, and gradients of a fixed random projection, are compared with
PyTorch's. An entry is

- `right`: every sample agrees (2e-5 of the largest value in float32, 2e-2 in bfloat16, exactly for
  integers);
- `refused`: a ConversionError says so for at least one sample, and none before it is wrong;
- `wrong`: a value, a shape, a dtype or a gradient differs;
- `failed`: some other exception.

The JSON has one row an entry.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as pytree

import torch_bridge as tb
from fzero.errors import ConversionError


# Of the largest reference value: float32 sums in another order; bfloat16 has 8 bits.
RTOL = {torch.float32: 2e-5, torch.int64: 0.0, torch.bfloat16: 2e-2}
# An entry whose conversion takes longer has no finite graph.
SECONDS = 60
# Random by themselves: only shapes and dtypes can agree.
RANDOM = re.compile(
    r"rand|bernoulli|normal|uniform|dropout|multinomial|cauchy|exponential|geometric|rrelu"
    r"|gumbel|empty|new_empty|poisson"
)


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


class Called(torch.nn.Module):
    """A function of tensors as a module; other arguments are constants."""

    def __init__(self, function: Callable[..., Any], spec: Any, leaves: list[Any]) -> None:
        super().__init__()
        self.function, self.spec, self.leaves = function, spec, leaves

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if leaf is None else leaf[0] for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        out = self.function(*args, **kwargs)
        return tuple(x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor))


class Wrong(Exception):
    """A value differs."""


def compare(what: str, got: Any, want: torch.Tensor, rtol: float, random: bool) -> None:
    """Raises `Wrong` if an array is not PyTorch's tensor."""
    want = want.detach()
    if tuple(got.shape) != tuple(want.shape):
        raise Wrong(f"{what}: shape {tuple(got.shape)}, torch {tuple(want.shape)}")
    if random:
        return
    a, b = np.asarray(got), want.resolve_conj().resolve_neg()
    b = (b.float() if b.dtype in (torch.bfloat16, torch.float16) else b).numpy()
    if not np.issubdtype(b.dtype, np.inexact):
        if not np.array_equal(a, b):
            raise Wrong(f"{what}: {_first(a, b)}")
        return
    a = a.astype(b.dtype)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        raise Wrong(f"{what}: infinities or NaN differ: {_first(a, b)}")
    scale = max(float(np.max(np.abs(b[finite]), initial=0.0)), 1e-3)
    gap = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0)) / scale
    if gap > rtol:
        raise Wrong(f"{what}: off by {gap:.1e}")


def _first(a: Any, b: Any) -> str:
    at = np.argwhere(~((a == b) | ((a != a) & (b != b))))
    index = tuple(int(i) for i in at[0]) if len(at) else ()
    return f"at {index} {a[index]}, torch {b[index]}"


def check(
    module: torch.nn.Module,
    tensors: list[torch.Tensor],
    dtype: torch.dtype,
    random: bool,
    gradients: bool = True,
) -> None:
    """Compares a converted module with PyTorch on one sample."""
    rtol = RTOL[dtype]
    inputs = [t.detach().clone() for t in tensors]
    converted = tb.convert(module, *inputs)
    # PyTorch's samples say which tensors have a gradient.
    tracked = [
        x.requires_grad_(gradients and x.is_floating_point() and t.requires_grad)
        for x, t in zip((t.detach().clone() for t in inputs), tensors, strict=True)
    ]
    wanted = [t for t in pytree.tree_leaves(module(*tracked)) if isinstance(t, torch.Tensor)]
    arrays = [tb.batch(t) if hasattr(tb, "batch") else _array(t) for t in inputs]
    training = module.training

    def run(params: Any, floats: list[Any]) -> list[Any]:
        given = iter(floats)
        full = [
            next(given) if t.is_floating_point() else x for t, x in zip(inputs, arrays, strict=True)
        ]
        out = converted.apply(
            params, converted.buffers, *full, train=training, rng=jax.random.key(0)
        ).output
        return list(jax.tree.leaves(out))

    floats = [x for t, x in zip(inputs, arrays, strict=True) if t.is_floating_point()]
    found = run(converted.params, floats)
    if len(found) != len(wanted):
        raise Wrong(f"{len(found)} outputs, torch {len(wanted)}")
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        compare(f"output {i}", got, want, rtol, random)
    smooth = [i for i, w in enumerate(wanted) if w.requires_grad and w.is_floating_point()]
    if not gradients or random or not smooth:
        return
    draw = np.random.default_rng(0)
    seeds = {i: draw.standard_normal(wanted[i].shape).astype(np.float32) for i in smooth}
    leaves = [t for t in tracked if t.requires_grad]
    places = [
        i for i, t in enumerate(t for t in tracked if t.is_floating_point()) if t.requires_grad
    ]
    grads = torch.autograd.grad(
        sum((wanted[i] * torch.from_numpy(seeds[i]).to(wanted[i].dtype)).sum() for i in smooth),
        leaves,
        allow_unused=True,
    )

    def projected(floats: list[Any]) -> Any:
        out = run(converted.params, floats)
        return sum(jnp.sum(out[i] * seeds[i].astype(out[i].dtype)) for i in smooth)

    found = [jax.grad(projected)(floats)[i] for i in places] if places else []
    for i, (got, want) in enumerate(zip(found, grads, strict=True)):
        reference = torch.zeros_like(leaves[i]) if want is None else want
        compare(f"gradient {i}", got, reference, rtol, random)


def _array(t: torch.Tensor) -> Any:
    if t.dtype == torch.bfloat16:
        return jnp.asarray(t.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(t.resolve_conj().resolve_neg().numpy())


def operators(dtype: torch.dtype, samples: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Entries of `op_db`: a name, and what checks it."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if dtype not in op.dtypes:
            continue
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name

        def run(op: Any = op, name: str = name) -> None:
            gradients = dtype.is_floating_point and op.supports_autograd
            torch.manual_seed(0)
            found = op.sample_inputs("cpu", dtype, requires_grad=gradients)
            for sample in itertools.islice(found, samples):
                leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
                tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
                constants = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]

                def function(*args: Any, sample: Any = sample, **kwargs: Any) -> Any:
                    # What is free in an answer (the sign of an eigenvector) is taken out.
                    return sample.output_process_fn_grad(op.op(*args, **kwargs))

                module = Called(function, spec, constants).eval()
                check(module, tensors, dtype, bool(RANDOM.search(name)), gradients)

        yield name, run


def modules(samples: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Entries of `module_db`: a name, and what checks it."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:

        def run(info: Any = info) -> None:
            for training in (False, True):
                made = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
                )
                for sample in itertools.islice(made, samples):
                    torch.manual_seed(0)
                    given = sample.constructor_input
                    module = info.module_cls(*given.args, **given.kwargs).train(training)
                    forward = sample.forward_input
                    leaves, spec = pytree.tree_flatten((forward.args, forward.kwargs))
                    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
                    constants = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]
                    called = Called(module, spec, constants).train(training)
                    check(called, tensors, torch.float32, training and bool(_drops(module)))

        yield f"nn.{info.name.removeprefix('nn.')}", run


def _drops(module: torch.nn.Module) -> list[Any]:
    random = ("Dropout", "RReLU", "FractionalMaxPool")
    return [
        m
        for m in module.modules()
        if any(word in type(m).__name__ for word in random) or getattr(m, "dropout", 0)
    ]


def verdict(name: str, run: Callable[[], None]) -> Row:
    """Runs one entry."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except ConversionError as error:
        return Row(name, "refused", _line(error))
    except Wrong as error:
        return Row(name, "wrong", str(error))
    except Exception as error:
        return Row(name, "failed", f"{type(error).__name__}: {_line(error)}")
    finally:
        signal.alarm(0)
    return Row(name, "right")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def markdown(rows: list[Row]) -> str:
    """The rows that are not right, as a table."""
    counts = Counter(row.verdict for row in rows)
    lines = [
        ", ".join(f"{counts[v]} {v}" for v in ("right", "refused", "wrong", "failed")),
        "",
        "| entry | verdict | why |",
        "|---|---|---|",
    ]
    for row in rows:
        if row.verdict != "right":
            why = row.why.replace("|", "\\|")
            lines.append(f"| {row.name} | {row.verdict} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the databases and prints what is not right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "int64", "bfloat16"])
    parser.add_argument("--part", default="0/1", help="I/N: every Nth entry from the Ith")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    dtype = getattr(torch, options.dtype)
    entries = list(operators(dtype, options.samples))
    if dtype == torch.float32:
        entries += list(modules(options.samples))
    first, step = (int(n) for n in options.part.split("/"))
    rows = []
    for name, run in entries[first::step]:
        if re.search(options.only, name):
            rows.append(verdict(name, run))
            if rows[-1].verdict != "right":
                print(f"{rows[-1].verdict:8} {name}: {rows[-1].why[:200]}", flush=True)
    print(Counter(row.verdict for row in rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=0) + "\n")
    if options.table:
        options.table.write_text(markdown(rows))


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
