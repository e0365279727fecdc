"""PyTorch's own operator and module databases, entry by entry, beside their conversion.

    python benchmarks/operators.py [--only REGEX] [--samples 3] [--dtype float32] [--part I/N]
                                   [--missing] [--check] [--json OUT] [--table OUT.md]

For each entry of `op_db` and `module_db` (torch.testing._internal) the samples that PyTorch tests
itself with are converted; values, and gradients of a fixed random projection, are compared with
PyTorch's. An entry is

- `right`: every sample agrees (2e-5 of the largest value in float32, 2e-2 in bfloat16, exactly for
  integers), or is as near as that to what PyTorch gives in float64 (in bfloat16 also as near as
  PyTorch itself);
- `refused`: a ConversionError says so for at least one sample, and none before it is wrong;
- `wrong`: a value, a shape, a dtype or a gradient differs;
- `failed`: some other exception.

The JSON has one row an entry and dtype, with the number of samples (of each mode, for modules).
Rows of entries that are not run are kept, so that a run can be done in pieces. Without `--dtype`
all are run (complex64: entries that have none of the others). `--check` runs what has a row, writes
nothing, and fails if one turned worse.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree


sys.path.insert(0, str(Path(__file__).parent))
from beside import QUICK, RTOL, VERDICTS, Sample, check, verdict, worse, write


DTYPES = ("float32", "int64", "bfloat16", "complex64")
SAMPLES = 3
# What has a row of no dtype, and why.
_EIGHT_BITS = "The database has it for floats of 8 bits alone, and without a gradient."
_OF_CUDA = "The database has it for GPUs of CUDA alone."
WITHOUT_ROW = {
    "torch._scaled_mm": _EIGHT_BITS,
    "torch._scaled_mm_v2": _EIGHT_BITS,
    "nn.functional.batch_norm.without_cudnn": _OF_CUDA,
    "torch.ops.aten._efficient_attention_forward": _OF_CUDA,
    "torch.ops.aten._flash_attention_forward": _OF_CUDA,
}
# An entry whose conversion takes longer has no finite graph.
SECONDS = 120
# Random by themselves: only shapes and dtypes can agree.
RANDOM = re.compile(
    r"rand|bernoulli|normal(?!ize)|uniform|dropout|multinomial|cauchy|(?<!windows\.)exponential"
    r"|geometric|rrelu|gumbel|empty|poisson(?!_nll)|fractional|multi_head_attention_forward"
)
# One sample's slope is 0, a difference of large equal numbers of which roundings are left.
LOOSE = {"nn.functional.normalize": 5e-3}
# Which of several equal values is named is left open: what stands there is compared.
ANY_OF_EQUALS = ("topk", "kthvalue")
# Sorting leaves open which of equals comes first, and so which one a gradient goes to.
ANY_ORDER = ("sort", "msort", "argsort")
Entry = tuple[str, Callable[[], None]]
# By dtype and name: the verdict, why, and how many samples were run.
Rows = dict[str, dict[str, list[Any]]]


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


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Called, list[Any]]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    constants = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]
    return Called(function, spec, constants), tensors


def name_of(op: Any) -> str:
    """An entry's name, with that of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples_of(op: Any, dtype: torch.dtype, gradients: bool) -> Iterator[Any]:
    """Those of `op.sample_inputs`, which looks through all modules for a running test's name."""
    from torch.testing._internal.common_utils import set_rng_seed

    made = iter(op.sample_inputs_func(op, "cpu", dtype, gradients))
    set_rng_seed()
    while (sample := next(made, None)) is not None:
        yield sample
        set_rng_seed()


def operators(dtype: torch.dtype, samples: int) -> Iterator[Entry]:
    """Entries of `op_db`: a name, and what checks it."""
    from torch.testing._internal import common_methods_invocations as database

    others = {getattr(torch, name) for name in DTYPES} - {torch.complex64}
    for op in database.op_db:
        if dtype not in op.dtypes or (dtype.is_complex and not others.isdisjoint(op.dtypes)):
            continue
        name = name_of(op)

        def run(op: Any = op, name: str = name) -> None:
            gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            torch.manual_seed(0)
            for sample in itertools.islice(samples_of(op, dtype, gradients), samples):

                def function(*args: Any, sample: Any = sample, **kwargs: Any) -> Any:
                    # What is free in an answer (the sign of an eigenvector) is taken out.
                    out = sample.output_process_fn_grad(op.op(*args, **kwargs))
                    return _chosen(args, out) if name in ANY_OF_EQUALS else out

                if name in ANY_ORDER + ANY_OF_EQUALS and dtype == torch.bfloat16:
                    _set_distinct(sample.input)
                args = (sample.input, *sample.args)
                module, tensors = _call(function, args, sample.kwargs)
                drops = sample.kwargs.get("dropout_p", 0) > 0
                random = drops or bool(RANDOM.search(name))
                # The database seeds what draws, which a forward may not.
                with mock.patch.object(database, "wrapper_set_seed", _unseeded):
                    rtol = max(RTOL[dtype], LOOSE.get(name, 0.0))
                    check(Sample(module.eval(), tensors, rtol, random))

        yield name, run


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _set_distinct(x: torch.Tensor) -> None:
    """Fills a bfloat16 tensor with positive values of which no two are equal."""
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))
    bits = 0x3C00 + order.to(torch.int16)
    with torch.no_grad():
        x.copy_(bits.view(torch.bfloat16).reshape(x.shape))


def _chosen(args: Any, out: Any) -> Any:
    """Values of `topk` and `kthvalue`, and those of the input at the indices."""
    values, index = out
    x, dim = args[0].detach(), args[2] if len(args) > 2 else -1
    if x.ndim == 0:
        return values, index
    index = index if index.ndim == x.ndim else index.unsqueeze(dim)
    return values, x.gather(dim, index)


def modules(samples: int) -> Iterator[Entry]:
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
                    given, forward = sample.constructor_input, sample.forward_input
                    module = info.module_cls(*given.args, **given.kwargs).train(training)
                    called, tensors = _call(module, forward.args, forward.kwargs)
                    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
                        called(*tensors)  # a lazy module takes its sizes from the first batch
                    random = training and _is_random(module)
                    check(Sample(called.train(training), tensors, RTOL[torch.float32], random))

        yield f"nn.{info.name.removeprefix('nn.')}", run


def _is_random(module: torch.nn.Module) -> bool:
    kinds = ("Dropout", "RReLU", "FractionalMaxPool")
    return any(
        any(kind in type(m).__name__ for kind in kinds) or getattr(m, "dropout", 0)
        for m in module.modules()
    )


def entries(dtype: str, samples: int) -> list[Entry]:
    """All entries that have a dtype."""
    found = list(operators(getattr(torch, dtype), samples))
    return found + list(modules(samples)) if dtype == "float32" else found


def markdown(rows: Rows) -> str:
    """What is not right, as a table for each dtype."""
    named = set().union(*rows.values())
    lines = [
        "# PyTorch's operators",
        "",
        "Written by `make operators` (benchmarks/operators.py): the entries of PyTorch's own",
        "`op_db` and `module_db`, each converted and compared with PyTorch: values and gradients.",
        "`refused` means that `tb.convert` raises ConversionError with the reason given here.",
        "",
        f"Of {len(named) + len(WITHOUT_ROW)} names {len(named)} have a row in one dtype or more;"
        " complex64 is run for those that have none of the others. No row have",
        "",
        *(f"- `{name}`: {why}" for name, why in WITHOUT_ROW.items()),
    ]
    for dtype, found in ((dtype, rows[dtype]) for dtype in DTYPES if dtype in rows):
        counts = Counter(kind for kind, *_ in found.values())
        summary = ", ".join(f"{counts[kind]} {kind}" for kind in VERDICTS)
        lines += ["", f"## {dtype}: {len(found)} entries, {summary}", ""]
        fewer = Counter(samples for _, _, samples in found.values() if samples < SAMPLES)
        if fewer:
            parts = [f"{fewer[n]} of them with {n}" for n in sorted(fewer, reverse=True)]
            lines += [f"Samples an entry: {SAMPLES}, {', '.join(parts)}.", ""]
        rest = {name: row for name, row in sorted(found.items()) if row[0] != "right"}
        if rest:
            lines += ["| entry | verdict | why |", "|---|---|---|"]
        for name, (kind, why, _) in rest.items():
            short = why.split(" at: ")[0].replace("|", "\\|")
            lines.append(f"| {name} | {kind} | {short} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the databases and prints what is not right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--dtype", choices=DTYPES, help="one only")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth entry from the Ith")
    parser.add_argument("--missing", action="store_true", help="only entries without a row")
    parser.add_argument("--check", action="store_true", help="no row may have turned worse")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = QUICK
    jax.config.update("jax_platforms", "cpu")
    known = options.json is not None and options.json.exists()
    rows: Rows = json.loads(options.json.read_text()) if known else {}
    counts: Counter[str] = Counter()
    turned: list[str] = []
    for dtype in [options.dtype] if options.dtype else DTYPES:
        found = rows.setdefault(dtype, {})
        made = run(dict(found), dtype, options, partial(save, rows, dtype, options))
        counts.update(row[0] for row in made.values())
        turned += [name for name in made if name in found and worse(made[name][0], found[name][0])]
        found |= made
    print(counts)
    if options.table and not options.check:
        options.table.write_text(markdown(rows))
    if options.check and turned:
        sys.exit(f"turned worse: {', '.join(turned)}")


def run(
    known: Mapping[str, list[Any]],
    dtype: str,
    options: argparse.Namespace,
    save: Callable[[dict[str, list[Any]]], None],
) -> dict[str, list[Any]]:
    """The rows of the chosen entries of a dtype; `save` is given those so far, after each."""
    first, step = (int(n) for n in options.part.split("/"))
    done: dict[str, list[Any]] = {}
    for name, entry in entries(dtype, options.samples)[first::step]:
        skipped = name not in known if options.check else options.missing and name in known
        if skipped or not re.search(options.only, name):
            continue
        row = verdict(name, entry, SECONDS)
        done[name] = [row.verdict, row.why, options.samples]
        if row.verdict != "right":
            print(f"{row.verdict:8} {dtype} {name}: {row.why[:200]}", flush=True)
        save(done)
    return done


def save(
    rows: Rows, dtype: str, options: argparse.Namespace, done: Mapping[str, list[Any]]
) -> None:
    """Writes all rows with those of a dtype that are done, unless they are only checked."""
    if options.json and not options.check:
        merged = {**rows, dtype: {**rows[dtype], **done}}
        write(options.json, merged)


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()
