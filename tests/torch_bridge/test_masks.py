"""Masks that depend on sizes: known as patterns when JAX traces, and then no arrays at all."""

from __future__ import annotations

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
from fzero.links import Context
from fzero.preflight.topology import has_plugin
from tests.support.cudnn import answered
from torch_bridge.export.interpret import Instruction
from torch_bridge.lower.attention import attention
from torch_bridge.lower.kernels import fused_attention
from torch_bridge.lower.masks import ATTENTION, MASK, Pattern, SizeMask, pattern_of


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


def attentions(converted: tb.Converted) -> list[Instruction]:
    steps = converted._modes[False].graph.instructions
    return [step for step in steps if step.operator == ATTENTION]


@pytest.mark.parametrize(
    ("module", "folded", "patterns"),
    [
        (Prefixed(None), True, [Pattern(True), Pattern(True)]),
        (Prefixed(4), True, [Pattern(True), Pattern(True, 4)]),
        (Prefixed(None, prefix=2), True, [None, None]),
        (Prefixed(4, per_example=True), False, []),
        (OneRow(), True, [None, None]),
    ],
    ids=["causal", "window", "prefix", "data", "one_row"],
)
def test_values_are_torchs_whatever_the_mask(
    module: nn.Module, folded: bool, patterns: list[Pattern | None]
) -> None:
    converted = tb.convert(module, torch.randn(2, 5, 8), train=False)
    (step,) = attentions(converted)
    mask = step.args[MASK]
    assert isinstance(mask, SizeMask) == folded
    if folded:  # sizes stand in the order in which the graph computes them
        found = [mask.pattern((2, n)[-len(mask.sizes) :], (2, 1, n, n)) for n in (3, 7)]
        assert found == patterns
        assert not [s for s in converted._modes[False].graph.instructions if "arange" in s.operator]
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
    assert all(isinstance(step.args[MASK], SizeMask) for step in attentions(gpt2_converted))
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


def test_masks_beside_a_causal_one_and_wider_ones_of_float16_are_products() -> None:
    """A float16 cannot swallow a score, as the lowest float32 does where a row adds it to all."""
    x = jax.random.normal(jax.random.key(0), (3, 2, 4, 8, 16), jnp.bfloat16)
    seen = jnp.asarray(documents()[:, None])
    with answered():
        assert fused_attention(*x, Pattern(True), 0.25, seen) is None
        assert fused_attention(*x.astype(jnp.float16), Pattern(), 0.25, jnp.zeros((8, 8))) is None
        assert fused_attention(*x, Pattern(), 0.25, seen) is not None
