"""Whole numbers of 64 bits and indices outside: refused, or seen; never cut or clamped."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

import torch_bridge as tb
from fzero.errors import ConversionError


pytestmark = pytest.mark.traced_once


class Fn(torch.nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: torch.Tensor) -> Any:
        return self.fn(*args)


LAST = torch.tensor([1, -2, 2**31 - 1, -(2**31)])
BYTES = torch.arange(16, dtype=torch.int8)
READ_AS = {
    torch.int64: (BYTES, BYTES.view(torch.int32).reshape(2, 2)),
    torch.int32: (LAST, BYTES, torch.tensor([0.5, -3.0])),
    torch.int16: (LAST, BYTES),
    torch.int8: (LAST, torch.tensor([0.5, -3.0])),
    torch.float32: (LAST.clamp(-2, 1), BYTES),
}


@pytest.mark.parametrize("dtype", READ_AS)
def test_bits_are_read_as_another_dtype(dtype: torch.dtype) -> None:
    for x in READ_AS[dtype]:

        def read(x: torch.Tensor) -> torch.Tensor:
            other = x.view(dtype)
            return other % 1_000_003 if dtype is torch.int64 else other

        converted = tb.convert(Fn(read), x, train=False)
        np.testing.assert_array_equal(converted(x), read(x))


BIG = torch.tensor([2**40 + 7, 5])


@pytest.mark.parametrize("given", [BIG, BIG.numpy()], ids=["torch", "numpy"])
def test_numbers_that_do_not_fit_are_refused_by_name(given: Any) -> None:
    converted = tb.convert(Fn(lambda x: x % 1000), torch.tensor([1, 2]), train=False)
    assert converted(torch.tensor([2**31 - 1, -(2**31)])).tolist() == [647, 352]
    with pytest.raises(
        ConversionError, match=r"argument `args\[0\]`: 5 to 1099511627783 do not fit"
    ):
        converted(given)


TABLE = torch.arange(5.0) * 10
READS = {
    "index": lambda x, i: x[i],
    "gather": lambda x, i: x.gather(0, i),
    "index_select": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x[:, None])[:, 0],
    "nll_loss": lambda x, i: -torch.nn.functional.nll_loss(x.repeat(2, 1), i, reduction="none"),
}


def bags(mode: str) -> Any:
    return lambda x, i: torch.nn.functional.embedding_bag(i[:, None], x[:, None], mode=mode)[:, 0]


READS |= {f"embedding_bag {mode}": bags(mode) for mode in ("sum", "mean", "max")}


@pytest.mark.parametrize("name", READS)
def test_indices_outside_read_nan(name: str) -> None:
    converted = tb.convert(Fn(READS[name]), TABLE, torch.tensor([0, 1]), train=False)
    found = np.asarray(converted(TABLE, torch.tensor([4, 5])))
    assert found[0] == 40
    assert np.isnan(found[1])
    below = np.asarray(converted(TABLE, torch.tensor([1, -1])))
    assert below[0] == 10
    # Only `x[i]` counts from the end, as in torch.
    assert below[1] == 40 if name == "index" else np.isnan(below[1])


def test_indices_of_no_dims_keep_the_dim_that_they_select_of() -> None:
    x = torch.randn(4, 3)
    picked = Fn(lambda x, i: (
        x.index_select(0, i), x[:, 0].index_select(0, i), x.index_add(0, i, x[:1]),
        x.index_copy(1, i, x[:, :1] * 2), x.index_fill(1, i, 3.0),
    ))  # fmt: skip
    converted = tb.convert(picked, x, torch.tensor(2))
    assert tb.parity(picked, converted, (x, torch.tensor(2))).agrees


def test_a_start_that_is_a_tensor_may_count_from_the_end() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    for dim, length, starts in ((0, 1, (-1, -4, 3)), (1, 2, (-2, -3, 1))):
        fn = Fn(lambda x, i, dim=dim, length=length: torch.narrow(x, dim, i, length))
        converted = tb.convert(fn, x, torch.tensor(0), train=False)
        for start in starts:
            want = torch.narrow(x, dim, torch.tensor(start), length)
            np.testing.assert_array_equal(converted(x, torch.tensor(start)), want)
        for outside in (-x.shape[dim] - 1, x.shape[dim], -length + 1 if length > 1 else -9):
            assert np.isnan(np.asarray(converted(x, torch.tensor(outside)))).any(), outside


def test_indices_along_a_dim_are_taken_modulo_its_size() -> None:
    """So does PyTorch, silently, but where it reads all of a tensor as a vector."""
    x, index = torch.arange(12.0).reshape(4, 3), torch.tensor([[99, 1, -9], [-1, 4, 0]])
    along = tb.convert(Fn(lambda x, i: torch.take_along_dim(x, i, 0)), x, index, train=False)
    np.testing.assert_array_equal(along(x, index), torch.take_along_dim(x, index, 0))
    flat = tb.convert(Fn(torch.take_along_dim), x, torch.tensor([3, 4]), train=False)
    found = np.asarray(flat(x, torch.tensor([11, 12, -1])))
    np.testing.assert_array_equal(np.isnan(found), [False, True, True])
    assert found[0] == 11


def test_gradients_of_what_is_inside_stay() -> None:
    converted = tb.convert(Fn(READS["gather"]), TABLE, torch.tensor([0, 1]), train=False)
    index = np.asarray([4, 9])
    slopes = jax.grad(lambda x: converted(x, index)[0])(TABLE.numpy())
    assert slopes.tolist() == [0, 0, 0, 0, 1]


ONES, FIVE = torch.ones(2, 3), torch.tensor(5.0)
WRITES = {
    "scatter": lambda x, i: x.scatter(0, i[:, None], 7.0),
    "scatter of rows": lambda x, i: x.scatter(1, i[None], ONES[:1, :2]),
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(2, 3), ONES),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i[:, None], ONES[:, :1], "amax"),
    "index_add": lambda x, i: x.index_add(0, i, ONES),
    "index_add of columns": lambda x, i: x.index_add(1, i, ONES.T[:, :2].expand(3, 2)),
    "index_copy": lambda x, i: x.index_copy(0, i, ONES),
    "index_copy of columns": lambda x, i: x.index_copy(1, i, ONES.T),
    "index_fill": lambda x, i: x.index_fill(1, i, 3.0),
    "index_put": lambda x, i: x.index_put((i,), FIVE),
    "index_put of pairs": lambda x, i: x.index_put((i, i), FIVE, accumulate=True),
    "index_reduce": lambda x, i: x.index_reduce(0, i, ONES, "amax"),
    "index_reduce of columns": lambda x, i: x.index_reduce(
        1, i, ONES.T[:, :2].expand(3, 2), "mean"
    ),
    "put": lambda x, i: x[0].put(i, FIVE.expand(2)),
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i, 3) @ x.long(),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_outside_is_seen(name: str) -> None:
    """PyTorch raises; here it was dropped, or written to the end, without a word."""
    fn, x, inside = WRITES[name], torch.arange(9.0).reshape(3, 3), torch.tensor([0, 2])
    converted = tb.convert(Fn(fn), x, inside, train=False)
    np.testing.assert_allclose(converted(x, inside), fn(x, inside))
    for outside in ([0, 3], [3, 2], [-1, 1]):
        if (
            name.startswith(("index_put", "index_fill", "put")) and -1 in outside
        ):  # counted from the end, as `x[-1]` is
            np.testing.assert_allclose(
                converted(x, torch.tensor(outside)), fn(x, torch.tensor(outside))
            )
            continue
        with pytest.raises((RuntimeError, IndexError)):
            fn(x, torch.tensor(outside))
        found = np.asarray(converted(x, torch.tensor(outside)))
        assert np.isnan(found).any() if found.dtype == np.float32 else found.min() < -1000


FOURS = torch.full((2, 3), 4, dtype=torch.int32)
REDUCTIONS: dict[str, Any] = {
    "scatter_add": lambda x, i: x.scatter_add(0, i[:, None].expand(2, 3), FOURS),
    "index_add": lambda x, i: x.index_add(0, i, FOURS),
    "index_add of columns": lambda x, i: x.index_add(1, i, FOURS.T[:, :2]),
    "index_put": lambda x, i: x.index_put((i,), FOURS[0, 0], accumulate=True),
    "put": lambda x, i: x.put(4 * i, FOURS[0, :2], accumulate=True),
    **{
        f"{write} {kind}": fn
        for kind in ("sum", "prod", "mean", "amax", "amin")
        for write, fn in {
            "scatter_reduce": lambda x, i, k=kind: x.scatter_reduce(0, i[:, None], FOURS[:, :1], k),
            "index_reduce": lambda x, i, k=kind: x.index_reduce(1, i, FOURS.T[:, :2], k),
        }.items()
        if (write, kind) != ("index_reduce", "sum")
    },
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_whole_numbers_that_are_reduced_outside_are_the_smallest(name: str) -> None:
    """A maximum with the smallest, a product, or a sum that wraps, does not show it."""
    fn, x, inside = REDUCTIONS[name], torch.arange(9).int().reshape(3, 3), torch.tensor([0, 2])
    converted = tb.convert(Fn(fn), x, inside, train=False)
    np.testing.assert_array_equal(converted(x, inside), fn(x, inside))
    found, known = np.asarray(converted(x, torch.tensor([0, 5]))), fn(x, inside).numpy()
    lost = found == np.iinfo(np.int32).min  # what is written to the last row or column there is
    assert lost[2].any()
    if name != "index_put":  # which writes nothing else then
        np.testing.assert_array_equal(found[~lost], known[~lost])
        assert lost.sum() <= 3


BYTES = torch.tensor([156, 5, 255], dtype=torch.uint8)
NUMBERS = {
    "==": lambda x, n: x == n,
    "<": lambda x, n: x < n,
    "+": lambda x, n: x + n,
    "*": lambda x, n: x * n,
    "where": lambda x, n: torch.where(x == 5, n, x),
    "masked_fill": lambda x, n: x.masked_fill(x == 5, n),
    "clamp": lambda x, n: x.clamp(min=n),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full((2,), n),
    "fill_": lambda x, n: x.clone().fill_(n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beside_whole_numbers_are_torchs_or_refused(name: str) -> None:
    fn = NUMBERS[name]
    for dtype in (torch.uint8, torch.int8, torch.int32):
        x = BYTES.to(dtype)
        for number in (-100, -1, 7):
            converted = tb.convert(Fn(lambda x, n=number: fn(x, n)), x, train=False)
            np.testing.assert_array_equal(converted(x), fn(x, number))
        large = 2**40 if dtype == torch.int32 else 300
        with pytest.raises(ConversionError, match=rf"the number {large} does not fit into u?int"):
            tb.convert(Fn(lambda x, n=large: fn(x, n)), x, train=False)(x)


def test_running_sums_are_beyond_32_bits_on_the_way() -> None:
    def sums(x: torch.Tensor) -> Any:
        x, same = x.clamp(0, 2**29), torch.zeros(5, dtype=torch.int64)
        means = x.scatter_reduce(0, same, x, "mean", include_self=False)
        return x.cumsum(0) // 2, (means + 2**30 + 2**29 + 2**28) // 4, (x & 2**29) * 8 // 16

    x = torch.full((5,), 2**29)
    for found, expected in zip(tb.convert(Fn(sums), x, train=False)(x), sums(x), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_buffer_may_hold_the_largest_of_32_bits() -> None:
    module = torch.nn.Module()
    module.register_buffer("most", torch.tensor([2**31 - 1, -(2**31)]))
    module.forward = lambda x: module.most + x * 0
    assert tb.convert(module, torch.tensor([1, 2]), train=False)(torch.tensor([0, 0])).tolist() == [
        2**31 - 1, -(2**31),
    ]  # fmt: skip


def test_a_quotient_by_a_negative_number_may_be_negative() -> None:
    """What is computed of it afterwards is beyond 32 bits."""
    x = torch.tensor([2**30 + 5, 3])

    class Divides(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((torch.clamp(x, 0, 2**30 + 5) // -1) - 2**30) // 2

    converted = tb.convert(Divides(), x)
    np.testing.assert_array_equal(converted(x), Divides()(x))


def test_indices_outside_raise_in_the_checked_mode() -> None:
    converted = tb.convert(torch.nn.Embedding(4, 2), torch.tensor([0, 1]), train=False)
    with jax.debug_nans(True):
        converted(np.array([0, 3]))
        with pytest.raises(FloatingPointError, match="gather"):
            converted(np.array([0, 4]))


def test_factors_of_whole_products_are_whole() -> None:
    class Product(torch.nn.Module):
        def forward(self, a: Any, b: Any, c: Any) -> Any:
            return torch.addmm(a, b, c, beta=2.5, alpha=1.5)

    given = [torch.arange(4).reshape(2, 2) + n for n in range(3)]
    found = tb.convert(Product(), *given).apply({}, {}, *(x.numpy() for x in given)).output
    assert found.tolist() == Product()(*given).tolist()


@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_the_first_of_what_is_written_decides_where_a_bool_itself_does_not_count(kind: str) -> None:
    module = Fn(lambda x, i, y: x.scatter_reduce(0, i, y, kind, include_self=False))
    x, i = torch.tensor([True, False, True]), torch.tensor([0, 1, 1])
    y = torch.tensor([kind == "amin", True, False])
    np.testing.assert_array_equal(
        tb.convert(module, x, i, y, train=False)(x, i, y), module(x, i, y)
    )
