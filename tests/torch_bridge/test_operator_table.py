"""The stored table of PyTorch's own operators and modules: what was right stays right.

All of it, of three dtypes and with three samples each: `make nightly-operators`.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fzero as fz
import torch_bridge as tb
from torch_bridge.lower import registry


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import beside  # noqa: E402
import operators  # noqa: E402
import special_entries  # noqa: E402


pytestmark = pytest.mark.traced_once

TABLE = ROOT / "benchmarks" / "results" / "operators.json"
X = torch.linspace(-2, 3, 8).reshape(2, 4)
LIBRARY = torch.library.Library("of_threads", "FRAGMENT")
BY_DAY = [
    line
    for line in (ROOT / "tests/data/operators_by_day.txt").read_text().splitlines()
    if not line.startswith("#")
]


@functools.cache
def of_name() -> dict[str, Any]:
    """The entries of `op_db`."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {operators.name_of(op): op for op in op_db}


class Together(torch.nn.Module):
    """Modules beside each other, on tensors of their own."""

    def __init__(self, samples: list[beside.Sample]) -> None:
        super().__init__()
        self.each = torch.nn.ModuleList([sample.module for sample in samples])
        self.counts = [len(sample.tensors) for sample in samples]

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        parts = [tuple(itertools.islice(given, count)) for count in self.counts]
        return [module(*part) for module, part in zip(self.each, parts, strict=True)]


@pytest.mark.parametrize("part", range(4))
def test_entries_that_no_other_test_of_the_day_runs(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All as one module: converted and compiled one by one, they take four times as long."""
    stored = json.loads(TABLE.read_text())["float32"]
    assert {stored[name][0] for name in BY_DAY} == {"right"}
    samples: list[beside.Sample] = []
    runs = {name: run for name, run in operators.entries("float32", 1) if name in BY_DAY}
    assert set(runs) == set(BY_DAY), "PyTorch's databases have other names: make operators"
    with monkeypatch.context() as patched:
        patched.setattr(operators, "check", samples.append)
        for name in BY_DAY[part::4]:
            runs[name]()
    # The database seeds what draws, which a forward may not.
    seeded = "torch.testing._internal.common_methods_invocations.wrapper_set_seed"
    monkeypatch.setattr(seeded, operators._unseeded)
    alike = operator.attrgetter("rtol", "random", "module.training")
    for (rtol, random, train), some in itertools.groupby(sorted(samples, key=alike), alike):
        some = list(some)
        tensors = [tensor for sample in some for tensor in sample.tensors]
        whole = beside.Sample(Together(some).train(train), tensors, rtol, random)
        beside.check(whole)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "nn.PReLU"),
        ("float32", "linalg.eig"),
        ("float32", "linalg.eigvals"),
        ("float32", "max_pool2d_with_indices_backward"),
        ("bfloat16", "matrix_exp"),
        ("bfloat16", "native_layer_norm"),
    ],
)
def test_entries_that_were_not_right_are(dtype: str, name: str) -> None:
    entry = dict(operators.entries(dtype, 3))[name]
    assert beside.verdict(name, entry, operators.SECONDS) == beside.Row(name, "right")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("equal", r"torch\.isclose"),
        ("resize_", r"reshape"),
        ("to_sparse", r"index_add"),
        ("geqrf", r"torch\.linalg\.qr"),
        ("hash_tensor", r"outside of the model"),
        ("unique", r"neighbours"),
        ("nonzero", r"torch\.where"),
        ("jiterator_unary", r"torch's operators"),
    ],
)
def test_a_refusal_says_what_to_do(name: str, remedy: str) -> None:
    row = beside.verdict(name, dict(operators.entries("float32", 1))[name], operators.SECONDS)
    assert row.verdict == "refused"
    assert re.search(remedy, row.why), row.why


def test_fake_quantisation_is_refused_with_its_form_in_other_operators() -> None:
    scale, zero, low, high = 0.125, 3, -20, 20
    x = torch.linspace(-4, 4, 1001, requires_grad=True)

    class Quantised(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fake_quantize_per_tensor_affine(x, scale, zero, low, high)

    with pytest.raises(fz.ConversionError) as refused:
        tb.convert(Quantised(), x.detach())
    q, y, out = re.findall(r"(?:q = |y = |then )(.*?)(?:;| has)", str(refused.value))
    names = {"torch": torch, "x": x, "scale": scale, "zero": zero, "low": low, "high": high}
    names["q"] = eval(q, names)
    names["y"] = eval(y, names)
    got, expected = eval(out, names), Quantised()(x)
    assert torch.equal(got, expected)
    assert torch.equal(*(torch.autograd.grad(value.sum(), x)[0] for value in (got, expected)))


def test_what_takes_too_long_has_failed_and_is_not_refused() -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while True:
                x = x + 1

    row = beside.verdict("slow", lambda: tb.convert(Slow(), torch.ones(2)), 1)
    assert (row.verdict, row.why) == ("failed", "Late: took more than 1 s of CPU time")


def test_a_check_fails_where_a_row_turned_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "operators.json"
    kept.write_text(json.dumps({"int64": {"abs": ["right", "", 1], "neg": ["right", "", 1]}}))
    arguments = ["--check", "--dtype", "int64", "--samples", "1", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["operators.py", *arguments, "--only", "^(abs|neg)$"])
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    operators.main()
    lowering = registry._TABLE["aten.neg.default"]
    monkeypatch.setitem(registry._TABLE, "aten.neg.default", replace(lowering, fn=lambda x: x))
    with pytest.raises(SystemExit, match=r"turned worse: neg$"):
        operators.main()
    assert json.loads(kept.read_text())["int64"]["neg"][0] == "right"


def test_every_name_of_pytorchs_databases_is_in_the_page() -> None:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    stored = json.loads(TABLE.read_text())
    names = {operators.name_of(op) for op in op_db}
    names |= {f"nn.{info.name.removeprefix('nn.')}" for info in module_db}
    rows = set().union(*stored.values())
    assert rows.isdisjoint(operators.WITHOUT_ROW)
    assert rows | set(operators.WITHOUT_ROW) == names, "make operators"
    for dtype, table in stored.items():
        assert set(table) == {name for name, _ in operators.entries(dtype, 1)}
    page = (ROOT / "docs" / "operators.md").read_text()
    assert page == operators.markdown(stored), "the page is written from the rows: make operators"


@pytest.mark.parametrize(
    "name", ["nn.functional.prelu", "nn.functional.gaussian_nll_loss", "topk", "kthvalue", "sort"]
)
def test_an_entry_at_special_points(name: str) -> None:
    assert not special_entries.differences(of_name()[name])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_every_entry_at_special_points(part: int) -> None:
    """Zeros of both signs, ones, equal values, ties, bounds, infinities and NaN."""
    chosen = [op for op in of_name().values() if not special_entries.reason_to_leave_out(op)]
    found = [text for op in chosen[part::8] for text in special_entries.differences(op)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["chunk", "linalg.cond", "nn.functional.max_unpool1d"])
def test_an_entry_without_elements(name: str) -> None:
    assert not special_entries.differences_of_none(of_name()[name])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_every_entry_without_elements(part: int) -> None:
    chosen = [op for op in of_name().values() if not special_entries.reason_to_leave_out(op)]
    found = [text for op in chosen[part::8] for text in special_entries.differences_of_none(op)]
    assert not found, "\n".join(found)


def test_every_entry_has_special_points_or_a_reason() -> None:
    reasons = {name: special_entries.reason_to_leave_out(op) for name, op in of_name().items()}
    kinds = {"no float32", "draws", "refused", *special_entries.LEFT_OUT.values()}
    assert set(reasons.values()) <= {None, *kinds}
    assert sum(reason is None for reason in reasons.values()) > 600
    listed = {*special_entries.OPEN, *special_entries.LEFT_OUT, *special_entries.LOOSE}
    listed |= set(special_entries.OF_NONE)
    assert listed <= set(reasons), "entries that PyTorch has no more"


def test_nothing_in_the_table_is_wrong() -> None:
    tables = json.loads(TABLE.read_text())
    assert set(tables) == set(operators.DTYPES)
    rows = {(dtype, name): row for dtype, table in tables.items() for name, row in table.items()}
    assert rows
    assert {row[0] for row in rows.values()} <= {"right", "refused"}
    refused = {name for (_, name), row in rows.items() if row[0] == "refused"}
    assert len(refused) <= 40
    assert all(row[1] for row in rows.values() if row[0] == "refused")
    told = (
        r"[Uu]se |[Cc]all |[Cc]ompute |[Gg]ive |[Kk]eep|[Ss]ort|[Ww]rite|convert |is torch\.where"
    )
    told += r"|has |counts|Say |Compare |Make |make |gives|detach|take it|float32|factorised by"
    assert all(re.search(told, row[1]) for row in rows.values() if row[0] == "refused")
    # A verdict, a reason, and how many samples were run.
    assert all(len(row) == 3 for row in rows.values())


def test_parity_and_the_table_of_operators_read_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong lowering is seen by a conversion, by `tb.parity` and by the table."""
    lowering = registry._TABLE["aten.neg.default"]
    wrong = replace(lowering, fn=lambda x: x)
    monkeypatch.setitem(registry._TABLE, "aten.neg.default", wrong)

    class Negative(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    converted = tb.convert(Negative(), X)
    np.testing.assert_array_equal(converted(X.numpy()), X)
    report = tb.parity(Negative(), converted, X)
    assert report.first is not None
    assert report.first.operator == "aten.neg.default"
    row = beside.verdict("neg", dict(operators.entries("float32", 1))["neg"], operators.SECONDS)
    assert row.verdict == "wrong"


def test_threads_may_register_and_convert_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread adds operators and converts modules of them, while the list is read."""
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    count, each, overloads = 4, 1, 2000
    begin, done = threading.Barrier(count + 1), threading.Event()

    def work(thread: int) -> list[float]:
        begin.wait()
        found = []
        for number in range(each):
            factor = 10 * thread + number
            name = f"times{factor}"
            LIBRARY.define(f"{name}(Tensor x) -> Tensor")
            LIBRARY.impl(name, torch.clone, "CompositeExplicitAutograd")
            names = [f"of_threads.{name}.{kind}" for kind in ("default", *range(1, overloads))]
            tb.register_operator(*names)(lambda x, factor=factor: x * factor)

            class Times(torch.nn.Module):
                def forward(self, x: torch.Tensor, name: str = name) -> torch.Tensor:
                    return getattr(torch.ops.of_threads, name)(x)  # type: ignore[no-any-return]

            found.append(float(tb.convert(Times(), X, train=False)(X.numpy())[1, 3]))
        return found

    def read() -> None:
        begin.wait()
        while not done.is_set():
            names = tb.registered_operators()
            own = [name for name in names if name.startswith("of_threads.")]
            assert list(names) == sorted(names)
            assert len(own) % overloads == 0, "a rule for several names was seen in part"

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        with ThreadPoolExecutor(count + 1) as pool:
            reading = pool.submit(read)
            results = [run.result() for run in [pool.submit(work, n) for n in range(count)]]
            done.set()
            reading.result()
    finally:
        sys.setswitchinterval(before)
    assert results == [[3.0 * (10 * n + i) for i in range(each)] for n in range(count)]
