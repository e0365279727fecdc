"""Masks that depend on sizes: known as patterns when JAX traces, and then no arrays at all."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import relative_error
from torch import nn
from transformers import GPT2LMHeadModel

import torch_bridge as tb
from fzero.errors import ConversionError
from fzero.links import Context
from fzero.preflight.topology import has_plugin
from tests.support.cudnn import answered
from torch_bridge.export.interpret import Op
from torch_bridge.lower.attention import attention
from torch_bridge.lower.kernels import fused_attention
from torch_bridge.lower.masks import ATTENTION, MASK, ComputedMask, Pattern, pattern_of


pytestmark = pytest.mark.traced_once

CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~CAUSAL.roll(3, 0).tril(-3)
LOW = torch.finfo(torch.float32).min
ODD = torch.stack([CAUSAL, CAUSAL.roll(1, 1)])


def hidden(seen: torch.Tensor, by: float) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, by)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (CAUSAL, Pattern(causal=True)),
        (CAUSAL.expand(3, 2, 6, 6), Pattern(causal=True)),
        (CAUSAL.repeat(3, 1, 1, 1), Pattern(causal=True)),
        (CAUSAL[:4], Pattern(causal=True)),
        (hidden(CAUSAL, LOW), Pattern(causal=True)),
        (hidden(CAUSAL, -np.inf), Pattern(causal=True)),
        (WINDOW, Pattern(causal=True, window=3)),
        (torch.eye(6, dtype=torch.bool), Pattern(causal=True, window=1)),
        (torch.ones(2, 1, 1, 6, dtype=torch.bool), Pattern()),
        (torch.zeros(6, 6), Pattern()),
        (hidden(CAUSAL, -1.0), None),
        (hidden(CAUSAL, LOW) + 0.5, None),
        (CAUSAL.long(), None),
        (ODD, None),
        (CAUSAL[2:], None),
        (CAUSAL | CAUSAL.T.roll(3, 0), None),
        (WINDOW | WINDOW.T, None),
        (~CAUSAL, None),
        (torch.zeros(6, 6, dtype=torch.bool), None),
    ],
)
def test_a_pattern_is_what_the_mask_says(mask: torch.Tensor, expected: Pattern | None) -> None:
    assert pattern_of(mask) == expected


class Prefixed(nn.Module):
    """Attention under masks that it makes itself: of sizes only, and of its input."""

    def __init__(self, window: int | None, prefix: int = 0, per_example: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.window, self.prefix, self.per_example = window, prefix, per_example

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
        row, column = place[:, None, :, None], place[:, None, None, :]
        seen = (column <= row) | (column < self.prefix)
        if self.window is not None:
            seen = seen & (column > row - self.window)
        if self.per_example:
            seen = seen & (x[:, None, None, :, 0] < 1.0)
        q = (x @ self.weight)[:, None]
        return F.scaled_dot_product_attention(q, q, q, seen)


class OneRow(nn.Module):
    """A mask of one row, for all queries: on its own it would be causal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(x.shape[1])[None, None, None] < 1
        q = (x @ self.weight)[:, None]
        return F.scaled_dot_product_attention(q, q, q, seen)


class Sloped(nn.Module):
    """A bias of each example in a memory of their own, read by views and strides (ALiBi)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        bias = -0.5 * torch.arange(length).repeat(rows, 1)
        strided = torch.as_strided(bias, (rows, 1, 1, length), (length, 1, 1, 1)).clone()
        q = (x @ self.weight)[:, None]
        bias = bias.view(-1).view(rows, 1, 1, length) + strided
        return F.scaled_dot_product_attention(q, q, q, bias)


def attentions(converted: tb.Converted) -> list[Op]:
    ops = converted._modes[False].graph.ops
    return [op for op in ops if op.operator == ATTENTION]


@pytest.mark.parametrize(
    ("module", "folded", "patterns"),
    [
        (Prefixed(None), True, [Pattern(True), Pattern(True)]),
        (Prefixed(4), True, [Pattern(True), Pattern(True, 4)]),
        (Prefixed(None, prefix=2), True, [None, None]),
        (Prefixed(4, per_example=True), False, []),
        (OneRow(), True, [None, None]),
        (Sloped(), True, [None, None]),
    ],
    ids=["causal", "window", "prefix", "data", "one_row", "sloped"],
)
def test_values_are_torchs_whatever_the_mask(
    module: nn.Module, folded: bool, patterns: list[Pattern | None]
) -> None:
    converted = tb.convert(module, torch.randn(2, 5, 8), train=False)
    (op,) = attentions(converted)
    mask = op.args[MASK]
    assert isinstance(mask, ComputedMask) == folded
    if folded:  # sizes stand in the order in which the graph computes them
        found = [mask.pattern((2, n)[-len(mask.sizes) :], (2, 1, n, n)) for n in (3, 7)]
        assert found == patterns
        assert not [s for s in converted._modes[False].graph.ops if "arange" in s.operator]
    graph = converted._modes[False].graph
    made = {op.name for op in graph.ops}
    # Outside of a jit, what nothing reads any more takes no memory.
    assert len(made.difference(*(op.drop for op in graph.ops))) == len(graph.outputs) == 1
    for shape in ((2, 3, 8), (3, 7, 8)):
        x = torch.randn(shape)
        got = converted.apply(converted.params, {}, x.numpy()).output
        assert relative_error(got, module(x).detach().numpy()) <= 1e-6


def test_a_mask_of_many_examples_is_computed_once(gpt2_converted: tb.Converted) -> None:
    """Nothing is as large as (B, S, S): the machine has no room for that."""
    mask = attentions(gpt2_converted)[0].args[MASK]
    rows, length = 1 << 12, 1024
    assert mask.pattern((rows, length), (rows, 4, length, length)) == Pattern(causal=True)


def test_transformers_mask_travels_through_no_block(
    gpt2: GPT2LMHeadModel, gpt2_converted: tb.Converted
) -> None:
    assert all(isinstance(op.args[MASK], ComputedMask) for op in attentions(gpt2_converted))
    batch, length = 3, 7
    model = tb.convert(gpt2, torch.zeros(2, 8, dtype=torch.long), roll=2).model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch).logits, batch)
    )
    first = model.layers[0]
    ctx = Context(np.zeros((batch, length), np.int32), None, False, {})
    between = jax.tree.leaves(
        jax.eval_shape(lambda p: first.apply(p, None, ctx), model.init[0]["start"])
    )
    assert between
    assert not [x.shape for x in between if x.shape[-2:] == (length, length)]


# PyTorch for CUDA brings the library, too; jax finds it by its own plugin.
CUDNN = has_plugin() and importlib.util.find_spec("nvidia.cudnn") is not None


def on_a_gpu() -> Any:
    """Traces as for an H200."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_programs_for_gpus_get_the_fused_kernel_or_say_why_not(half: Any) -> None:
    """Where cuDNN is not installed it says so; float32 is no question."""
    x = jnp.ones((2, 4, 8, 16), half)
    with on_a_gpu(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = str(jax.make_jaxpr(lambda x: attention(x, x, x, None, 0.0, True))(x))
    assert ("dot_product_attention_fwd" in program) == CUDNN
    assert bool(said) != CUDNN
    assert all("Install cuDNN" in str(one.message) for one in said)
    wide = x.astype(jnp.float32)  # before: on a mesh of no devices nothing can be computed
    with on_a_gpu(), warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.make_jaxpr(lambda x: attention(x, x, x, None, 0.0, True))(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.make_jaxpr(lambda x: attention(x, x, x, None, 0.0, True))(x)


def test_angles_in_float32_do_not_widen_attention() -> None:
    """PyTorch refuses mixed dtypes here, so the narrow one is what the module computes in."""
    x = jnp.ones((1, 2, 4, 8))
    out = attention(x, x, x.astype(jnp.bfloat16), None, 0.0, True)
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("pattern", [Pattern(True), Pattern(True, 1), Pattern(True, 4), Pattern()])
def test_the_fused_kernel_is_asked_for_the_mask(pattern: Pattern) -> None:
    """A window has its size."""
    x = jax.random.normal(jax.random.key(0), (3, 2, 4, 8, 16), jnp.bfloat16)
    with answered():
        found = fused_attention(*x, pattern, 0.25)
    row, column = np.mgrid[:8, :8]
    keep = (column <= row) if pattern.causal else np.ones((8, 8), bool)
    if pattern.window is not None:
        keep &= column > row - pattern.window
    scores = jnp.einsum("bhte,bhse->bhts", *x[:2].astype(jnp.float32)) * 0.25
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    expected = jnp.einsum("bhts,bhse->bhte", weights, x[2].astype(jnp.float32))
    # Weights of 16 bits: 2^-8 of values up to four.
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.03)


LOWEST = float(np.finfo(np.float32).min)


def documents() -> np.ndarray[Any, Any]:
    """`(2, 8, 8)`: of documents of 3 and 5 tokens, and of one that is filled up in front."""
    row, column = np.mgrid[:8, :8]
    first, second = np.repeat([1, 2], [3, 5]), np.repeat([0, 1], [3, 5])
    return np.stack(
        [(column <= row) & (s[:, None] == s[None]) & (s > 0)[None] for s in (first, second)]
    )


@pytest.mark.parametrize(
    ("kind", "half"),
    [
        *((x, jnp.float16) for x in ("bool", "lowest", "heads", "all", "odd", "odd keys")),
        *((x, jnp.bfloat16) for x in ("lowest", "infinite", "one", "keys", "heads", "all", "odd")),
    ],
)
def test_masks_of_data_are_the_fused_kernels_too(kind: str, half: Any) -> None:
    """As products and a softmax have them, and their gradients: rows that see nothing, too.

    So are biases of heads, whose own gradients are those of all rows (T5's are learned).
    """
    seen = documents()[:, None]
    if kind == "one":
        seen = seen[0, 0]
    elif kind == "keys":
        seen = seen[:, :, -1:]
    mask = jnp.asarray(seen)
    lowest = LOWEST if half == jnp.bfloat16 else float(np.finfo(np.float16).min)
    if kind in ("lowest", "infinite"):
        mask = jnp.where(mask, 0.0, lowest if kind == "lowest" else -jnp.inf)
        mask = mask.astype(half) if half == jnp.float16 else mask
    elif kind in ("heads", "all", "odd", "odd keys"):
        bias = jax.random.normal(jax.random.key(2), (4, 8, 8))
        mask = (bias if kind == "heads" else jnp.where(mask, bias, lowest)).astype(half)
    queries, keys = 7 if kind == "odd" else 8, 7 if kind.startswith("odd") else 8
    mask = mask[..., :queries, :keys] if kind.startswith("odd") else mask
    x = jax.random.normal(jax.random.key(0), (3, 2, 4, 8, 16), half)
    given = jax.random.normal(jax.random.key(1), x.shape[1:], half)[..., :queries, :]

    def loss(x: Any, mask: Any) -> Any:
        q, k, v = x[0][..., :queries, :], *(one[..., :keys, :] for one in x[1:])
        out = attention(q, k, v, mask, scale=0.25)
        return jnp.sum((out * given).astype(jnp.float32)), out

    learned = 0 if kind in ("bool", "lowest", "infinite", "one", "keys") else (0, 1)
    want = jax.grad(loss, learned, has_aux=True)(x, mask)
    with (
        answered(),
        jax.numpy_dtype_promotion("standard"),
        mock.patch("torch_bridge.lower.attention._contract", side_effect=AssertionError),
    ):
        got = jax.grad(loss, learned, has_aux=True)(x, mask)
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):  # 16 bits, as above
        np.testing.assert_allclose(*(v.astype(jnp.float32) for v in (one, other)), atol=0.06)


class Padded(nn.Module):
    """Attention, under a mask that is computed of an argument that says what is padding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.3)
        self.kind = kind

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        if self.kind == "hidden":  # True where it is padding, as numbers to add, for each head
            added = torch.zeros(given.shape).masked_fill(given, -torch.inf)
            seen = added[:, None, None].to(x.dtype).expand(-1, 2, x.shape[1], -1)
        elif self.kind == "lengths":
            seen = (at[None] < given[:, None])[:, None, None]
        else:
            seen = given.bool()[:, None, None] & (at <= at[:, None])
            seen = seen & (at > at[:, None] - 3) if self.kind == "window" else seen
        q = (x @ self.weight).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, seen)


LENGTHS = torch.tensor([7, 3, 1, 6])


def padding_of(kind: str) -> torch.Tensor:
    inside = torch.arange(7) < LENGTHS[:, None]
    return {"lengths": LENGTHS, "hidden": ~inside}.get(kind, inside.long())


@pytest.mark.parametrize("kind", ["causal", "hidden", "lengths", "window"])
def test_rows_that_end_in_their_padding_have_a_length(kind: str) -> None:
    """PyTorch's values and gradients, by products and by the kernel, which takes no mask (but
    where there is a window); another example than was converted with, and in 16 bits."""
    module, given, x = Padded(kind), padding_of(kind), torch.randn(4, 7, 16)
    first = given[:2] if kind == "lengths" else given[:2, :5]
    converted = tb.convert(module, x[:2, :5], first, train=False, padding_side="right")
    want = module(x, given)
    want.square().sum().backward()

    def loss(params: Any) -> Any:
        out = converted.apply(params, {}, x.numpy(), given.numpy()).output
        return jnp.sum(jnp.square(out.astype(jnp.float32))), out

    def compare(got: Any, bar: float) -> None:
        slopes, out = got
        assert relative_error(out.astype(jnp.float32), want.detach().numpy()) <= bar
        slope = slopes["weight"].astype(jnp.float32)
        assert relative_error(slope, module.weight.grad.numpy()) <= bar

    slope = jax.jit(jax.grad(loss, has_aux=True))
    compare(slope(converted.params), 1e-5)
    half = {"weight": converted.params["weight"].astype(jnp.bfloat16)}
    with (
        answered(),
        jax.numpy_dtype_promotion("standard"),
        mock.patch("torch_bridge.lower.attention._contract", side_effect=AssertionError),
        contextlib.nullcontext()
        if kind == "window"
        else mock.patch("fzero.exchange.cudnn._bias", side_effect=AssertionError),
    ):
        compare(jax.grad(loss, has_aux=True)(half), 0.03)  # 2^-8 of what is summed


def test_a_row_of_other_padding_than_declared_is_nan_in_its_gradients_too() -> None:
    """On each device, whatever computes it; one without any key gives 0, as in PyTorch."""
    module, x = Padded("causal"), torch.randn(4, 7, 16)
    given = padding_of("causal")
    given[1] = given[1].flip(0)
    given[2] = 0
    converted = tb.convert(module, x[:2], given[:2], train=False, padding_side="right")

    @jax.jit
    def slope(params: Any, *arguments: Any) -> Any:
        def loss(params: Any) -> Any:
            out = converted.apply(params, {}, *arguments).output
            return jnp.sum(out.astype(jnp.float32)), out

        return jax.grad(loss, has_aux=True)(params)

    others = np.array([0, 2, 3, 3])
    half = {"weight": converted.params["weight"].astype(jnp.bfloat16)}
    for params, within in ((converted.params, contextlib.nullcontext()), (half, answered())):
        with within, jax.numpy_dtype_promotion("standard"):
            slopes, out = slope(params, x.numpy(), given.numpy())
            assert jnp.isnan(slopes["weight"]).all()
            assert np.isnan(out).any((1, 2, 3)).tolist() == [False, True, False, False]
            assert not np.any(np.asarray(out[2], np.float32))
            slopes, _ = slope(params, x.numpy()[others], given.numpy()[others])
            assert jnp.isfinite(slopes["weight"]).all()


def test_padding_that_no_attention_reads_is_refused() -> None:
    x = torch.randn(2, 5, 8)
    with pytest.raises(ConversionError, match=r"no scaled_dot_product_attention.*sizes and one"):
        tb.convert(Prefixed(None), x, train=False, padding_side="right")
    with pytest.raises(ConversionError, match=r"padding_side='left'.*expected \"right\""):
        tb.convert(Prefixed(None), x, train=False, padding_side="left")


def test_masks_beside_a_causal_one_and_wider_ones_of_float16_are_products() -> None:
    """A float16 cannot swallow a score, as the lowest float32 does where a row adds it to all."""
    x = jax.random.normal(jax.random.key(0), (3, 2, 4, 8, 16), jnp.bfloat16)
    seen = jnp.asarray(documents()[:, None])
    with answered():
        assert fused_attention(*x, Pattern(True), 0.25, seen) is None
        assert fused_attention(*x.astype(jnp.float16), Pattern(), 0.25, jnp.zeros((8, 8))) is None
        assert fused_attention(*x, Pattern(), 0.25, seen) is not None
