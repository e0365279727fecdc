"""Operator families, one small module each: outputs and gradients equal torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import check_parity, relative_error
from torch import nn

import torch_bridge as tb


pytestmark = pytest.mark.traced_once


class Fn(nn.Module):
    """A module out of a function, with one parameter so that there is always a gradient."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fn = fn

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return self.fn(x * self.scale, *rest)


X = torch.linspace(-2.3, 2.9, 24).reshape(4, 6)
POSITIVE = X.abs() + 0.3
IMAGE = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(3))
IDS = torch.tensor([[0, 2, 1], [3, 1, 0]])  # no repeats in a row: scatter would pick any of them


def elementwise(x: torch.Tensor) -> Any:
    p = x.abs() + 0.4
    ints = torch.arange(6)
    return (
        torch.exp(x), torch.log(p), torch.sqrt(p), torch.rsqrt(p), torch.sin(x), torch.tanh(x),
        torch.erf(x), torch.sigmoid(x), x**3, x**2.0, p**0.5, p**1.7, 2.0**x, 1.0 / p, p.log1p(),
        x.clamp(-1, 1), x.clamp(min=0.1), torch.maximum(x, p * 0.5), torch.where(x > 0, x, p),
        x.abs(), x.sign(), x.round(), x.floor(), x.detach() // 0.7, x % 0.7, x.fmod(0.7),
        torch.atan2(x, p), x + ints, ints / 2, ints * True, torch.add(x, x, alpha=3), 3 - x,
        torch.lerp(x, p, 0.3), torch.addcmul(x, x, p, value=0.5), torch.addcdiv(x, x, p, value=2),
        (x > 0) & (p < 2) | ~(x < -1), ints.eq(3), torch.isnan(x), ints.remainder(4), ints // 4,
        (-ints).div(4, rounding_mode="trunc"), (-ints) // 4, x.cumsum(1), ints.cumsum(0),
        torch.masked_fill(x, x > 1, -7.0), torch.nan_to_num(x / 0.0), x.detach().double().float(),
        x.long(), (x * 0).bool(), torch.expm1(x), torch.cosh(x), torch.logical_not(x > 0),
        torch.lgamma(p), torch.digamma(p), torch.erfinv(x / 4), torch.hypot(x, p),
        x.masked_scatter(x > 0.5, p.flip(1)), x.median(1).values, (ints % 3 - 1) ** (2 - ints),
    )  # fmt: skip


def activations(x: torch.Tensor) -> Any:
    return (
        F.relu(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.softplus(x),
        F.softplus(x * 20), F.hardswish(x), F.hardsigmoid(x), F.hardtanh(x), F.leaky_relu(x, 0.2),
        F.elu(x), F.selu(x), F.celu(x, 1.3), F.logsigmoid(x), F.glu(x), F.softmax(x, 1),
        F.log_softmax(x, 0), F.relu6(x), F.tanhshrink(x), F.softsign(x), F.normalize(x, dim=1),
        F.hardshrink(x), F.softshrink(x), F.threshold(x, 0.1, 20.0), F.softmin(x, 0),
        F.softplus(x * 2, beta=3),
    )  # fmt: skip


def reductions(x: torch.Tensor) -> Any:
    return (
        x.sum(), x.sum(1), x.sum((0, 1), keepdim=True), x.mean(0), x.mean(), x.var(1), x.std(0),
        x.var(1, unbiased=False), x.amax(1), x.amin((0, 1)), x.max(), x.max(1), x.min(0),
        x.argmax(1), x.argmin(), x.logsumexp(1), x.norm(), x.norm(dim=1), x.norm(p=1),
        x.norm(p=3, dim=0), (x > 0).any(1), (x > -9).all(), x.prod(1), (x > 0).sum(0),
        x.norm(p=math.inf, dim=1), torch.var_mean(x, 1), x.topk(3, dim=1), x.sort(dim=1),
        x.sort(dim=0, descending=True), x.topk(2, largest=False), x[None].topk(2, largest=False),
        (x.abs() * 3).byte().prod(1),
        (x > 0).float().mean(), x.long().sum(), torch.cumprod(x, 1), x.argsort(1),
    )  # fmt: skip


def views(x: torch.Tensor) -> Any:
    y = x.view(4, 2, 3)
    z = x.clone()
    z[:, 1] = 5.0
    z[1:3, ::2] += x[1:3, ::2]
    z.mul_(2)
    return (
        y, y.permute(2, 0, 1), y.transpose(0, 2), y.flatten(1), y.unsqueeze(1), x.t(), x[1], x[-1],
        x[:, 1:5:2], x[..., -1], x.unsqueeze(0).squeeze(0), x[:1].expand(3, 6),
        torch.cat([x, x], 1),
        torch.stack([x, x], 1), *x.split(4, dim=1), *x.chunk(4), *x.unbind(0)[:2], x.flip(1),
        x.roll(2, 1), x.roll(1), x.repeat(2, 3), x.repeat_interleave(2, 1), x.tril(1), x.triu(),
        x.diagonal(), F.pad(x, (1, 2)), F.pad(x, (1, -2, 0, 1), value=3.0),
        F.pad(y, (1, 1), mode="reflect"), F.pad(y, (2, 0), mode="replicate"),
        F.pad(y, (1, 2), mode="circular"), z, x.unfold(1, 3, 2), x.narrow(1, 2, 3),
        torch.einsum("ij,kj->ik", x, x), x.reshape(-1, 8), x.split([1, 5], 1)[1],
        torch.meshgrid(x[0], x[1], indexing="ij"), F.pixel_shuffle(x.view(1, 4, 2, 3), 2),
        x.masked_fill(torch.ones(4, 6, dtype=torch.bool).tril(), 0.0), x.new_zeros(2).add(1),
        x.diff(prepend=x[:, :2], append=x[:, 2:3]), *x.chunk(4, 1),
    )  # fmt: skip


def indexing(x: torch.Tensor, ids: torch.Tensor) -> Any:
    flat = ids.flatten()
    y = x.clone()
    y[x > 1] = 0.0
    put = x.index_put((flat[:2],), x[:2] * 2)
    return (
        x[ids], x[:, ids], x[ids, ids], x.index_select(0, flat), x.gather(1, ids.expand(2, 3)),
        x.scatter(1, ids, x[:2, :3]), x.scatter_add(1, ids, x[:2, :3]), x.scatter(1, ids, 2.5),
        x.index_add(0, flat, x[flat], alpha=0.5), F.one_hot(ids, 5), x[torch.tensor([-1, 0])], y,
        torch.take_along_dim(x[:2], ids, 1), x.index_put((flat,), x[flat], accumulate=True),
        torch.searchsorted(torch.linspace(-2, 2, 6), x), x[:, torch.tril_indices(3, 4)[1]],
        torch.searchsorted(torch.arange(4), ids, right=True), torch.triu_indices(3, 3, 1),
        F.embedding(ids, x), x[None, :, ids[0]], torch.arange(6) * 2, torch.full((2,), 3),
        torch.zeros(2, 3), torch.ones_like(ids), torch.eye(3), torch.linspace(0, 1, 5),
        torch.tril(torch.ones(4, 4, dtype=torch.bool)), put,
    )  # fmt: skip


def seldom(x: torch.Tensor) -> Any:
    """What is seldom given, or seldom left out."""
    image, places = x.view(1, 1, 4, 6), torch.tanh(x[:3, :4]).reshape(1, 3, 2, 2)
    return (
        torch.ops.aten.hardtanh(x), x.detach().cumsum(0, dtype=torch.int64), x[:1].expand_as(x),
        torch.sort(x, dim=0, stable=True, descending=True),
        F.grid_sample(image, places, "bicubic", "border", align_corners=False),
        torch.fft.irfft(torch.fft.rfft(x, dim=0) * 1.5, n=5, dim=0),
    )  # fmt: skip


def losses(x: torch.Tensor) -> Any:
    target = torch.tensor([1, 5, -100, 0])
    weight = torch.linspace(0.5, 2.0, 6)
    y = torch.sigmoid(x).detach()
    p = torch.sigmoid(x)
    image = x.view(2, 3, 2, 2)
    return (
        F.cross_entropy(x, target), F.cross_entropy(x, target, weight=weight, reduction="sum"),
        F.cross_entropy(x, target, reduction="none"), F.mse_loss(x, y), F.l1_loss(x, y),
        F.cross_entropy(x, target, label_smoothing=0.1), F.smooth_l1_loss(x, y, beta=0.4),
        F.huber_loss(x, y, delta=0.3), F.binary_cross_entropy(p, y),
        F.binary_cross_entropy_with_logits(x, y, pos_weight=weight), F.kl_div(x, y),
        F.nll_loss(F.log_softmax(x, 1), target), F.cosine_similarity(x, y),
        F.cross_entropy(image, torch.ones(2, 2, 2, dtype=torch.long)), F.cross_entropy(x, y),
        F.margin_ranking_loss(x, y, torch.ones(4, 6)), F.triplet_margin_loss(x, y, -x),
        F.mse_loss(x, y, reduction="sum"), F.cosine_embedding_loss(x, y, torch.ones(4)),
        F.cross_entropy(x, target, weight=weight, label_smoothing=0.1),
        F.cross_entropy(image, y.view(2, 3, 2, 2)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (elementwise, (X,)),
        (activations, (X,)),
        (reductions, (X,)),
        (views, (X,)),
        (indexing, (X, IDS)),
        (seldom, (X,)),
        (losses, (X,)),
    ],
    ids=["elementwise", "activations", "reductions", "views", "indexing", "seldom", "losses"],
)
def test_functions_agree_with_torch(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    check_parity(Fn(fn), *args)


class Layers(nn.Module):
    """Many independent layers on one input: one export instead of twenty."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: layer(x) for name, layer in self.layers.items()}


def test_convolutions_agree_with_torch() -> None:
    module = Layers(
        plain=nn.Conv2d(4, 6, 3),
        # Dims whose padding is odd: one more behind than in front.
        same=nn.Conv2d(4, 6, (4, 5), padding="same", bias=False),
        strided=nn.Conv2d(4, 6, 3, stride=(2, 1), padding=(1, 2)),
        dilated=nn.Conv2d(4, 6, 3, dilation=2, padding=2),
        same_dilated=nn.Conv2d(4, 6, (3, 2), padding="same", dilation=(2, 3)),
        grouped=nn.Conv2d(4, 6, 3, groups=2),
        depthwise=nn.Conv2d(4, 8, 3, groups=4, padding=1, padding_mode="reflect"),
        transposed=nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        transposed_grouped=nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), groups=2, dilation=2),
    )
    converted = check_parity(module, IMAGE)
    check_parity(module, IMAGE, other_args=(IMAGE[:1].repeat(5, 1, 1, 1),), converted=converted)


def test_one_dimensional_layers_agree_with_torch() -> None:
    x = torch.randn(3, 4, 11)
    module = Layers(
        conv=nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2),
        transposed=nn.ConvTranspose1d(4, 2, 4, stride=3),
        max=nn.MaxPool1d(3, 2, padding=1),
        avg=nn.AvgPool1d(3, 2, padding=1),
        adaptive=nn.AdaptiveAvgPool1d(4),
        norm=nn.GroupNorm(2, 4),
        instance=nn.InstanceNorm1d(4, affine=True),
        batch=nn.BatchNorm1d(4, track_running_stats=False),
    )
    check_parity(module, x)


def test_pooling_agrees_with_torch() -> None:
    module = Layers(
        max=nn.MaxPool2d(2),
        max_odd=nn.MaxPool2d((3, 2), stride=2, padding=1, dilation=1),
        max_ceil=nn.MaxPool2d(3, stride=2, ceil_mode=True),
        max_dilated=nn.MaxPool2d(2, dilation=2, stride=1, padding=1),
        avg=nn.AvgPool2d(3, stride=2, padding=1),
        avg_ceil=nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True),
        avg_no_pad=nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False, ceil_mode=True),
        avg_divisor=nn.AvgPool2d(2, divisor_override=3),
        adaptive=nn.AdaptiveAvgPool2d((4, 3)),
        adaptive_one=nn.AdaptiveAvgPool2d(1),
        adaptive_keep=nn.AdaptiveAvgPool2d((None, 2)),
        adaptive_max=nn.AdaptiveMaxPool2d((4, 3)),
    )
    check_parity(module, IMAGE)


def test_max_pool_indices_agree_with_torch() -> None:
    module = Fn(lambda x: F.max_pool2d(x, 3, 2, padding=1, return_indices=True))
    check_parity(module, torch.randn(2, 3, 7, 6))


def test_norms_agree_with_torch() -> None:
    module = Layers(
        layer=nn.LayerNorm(6),
        layer_two=nn.LayerNorm((4, 6), bias=False),
        layer_plain=nn.LayerNorm(6, elementwise_affine=False, eps=1e-3),
        rms=nn.RMSNorm(6),
        rms_eps=nn.RMSNorm((4, 6), eps=1e-2),
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    check_parity(module, torch.randn(3, 4, 6) * 3 + 2)


@pytest.mark.parametrize("bias", [True, False])
def test_a_projected_state_agrees_with_torch(bias: bool) -> None:
    check_parity(nn.LSTM(6, 5, proj_size=2, bias=bias), X[None])


@pytest.mark.parametrize("train", [True, False])
def test_linear_layers_and_embeddings_agree_with_torch(train: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(7, 6, padding_idx=2)
            self.first = nn.Embedding(7, 6, padding_idx=0)
            self.l1 = nn.Linear(6, 5)
            self.l2 = nn.Linear(5, 3, bias=False)
            self.prelu = nn.PReLU(5)

        def forward(self, ids: torch.Tensor) -> Any:
            h = self.l1(self.emb(ids) + self.first(ids))
            a = h @ h.transpose(-1, -2)
            flat = h.flatten(0, 1)
            low = self.l2(flat)
            nothing = torch.full((3,), math.nan)  # what is not added is not looked at
            ignored = torch.addmm(nothing, flat, self.l2.weight.t(), beta=0)
            return low, a, torch.bmm(h, h.mT), self.prelu(flat), ignored

    module = Net()
    with torch.no_grad():
        module.emb.weight[2] = torch.randn(6)  # a padding row that is not zero still has no grad
        module.first.weight[0] = torch.randn(6)
    check_parity(module, IDS, train=train, other_args=(torch.tensor([[2, 6, 2, 0]] * 3),))


class Attend(nn.Module):
    """Attention under several options and masks at once: one export for all of them."""

    def __init__(self, *options: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.options = options

    def forward(self, q: Any, k: Any, v: Any, *masks: Any) -> list[torch.Tensor]:
        q = q @ self.weight
        return [
            F.scaled_dot_product_attention(q, k, v, mask, **options)
            for options in self.options
            for mask in (masks or (None,))
        ]


def qkv(heads: int = 4, key_heads: int = 4, rows: int = 5, cols: int = 7) -> tuple[Any, ...]:
    make = torch.Generator().manual_seed(5)
    shapes = ((2, heads, rows, 8), (2, key_heads, cols, 8), (2, key_heads, cols, 6))
    return tuple(torch.randn(shape, generator=make) for shape in shapes)


BOOL_MASK = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(7)) > 0.4
BOOL_MASK[0, 0, 1] = False  # a row with nothing to attend to
FLOAT_MASK = torch.zeros(5, 7).masked_fill(~BOOL_MASK[1, 0], -math.inf)
FINITE_MASK = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(8))
SIX_MASK = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(9))
MASKS = (BOOL_MASK, BOOL_MASK[1, 0], FINITE_MASK, FLOAT_MASK)


@pytest.mark.parametrize(
    ("options", "inputs", "masks"),
    [
        (({}, {"is_causal": True}, {"is_causal": True, "scale": 0.2}), qkv(), ()),
        (({"is_causal": True},), qkv(rows=7, cols=5), ()),
        (({}, {"scale": 0.1}), qkv(), MASKS),
        # Three heads to a group: a mask of heads is divided otherwise than by two.
        (({"enable_gqa": True},), qkv(heads=6, key_heads=2), (*MASKS[:2], SIX_MASK, FLOAT_MASK)),
        (({"enable_gqa": True, "is_causal": True}, {"enable_gqa": True}), qkv(key_heads=1), ()),
    ],
    ids=["plain", "causal_tall", "masks", "grouped_masks", "one_key_head"],
)
def test_attention_agrees_with_torch(
    options: tuple[dict[str, Any], ...], inputs: tuple[Any, ...], masks: tuple[Any, ...]
) -> None:
    check_parity(Attend(*options), *inputs, *masks)


def test_a_fully_masked_row_gives_zero() -> None:
    module = Attend({})
    args = (*qkv(), BOOL_MASK)
    converted = check_parity(module, *args)
    (out,), _ = converted.apply(converted.params, {}, *(a.numpy() for a in args))
    assert np.all(np.asarray(out)[0, :, 1] == 0.0)
    assert np.all(np.asarray(out)[1] != 0.0)


def test_attention_dropout_scales_what_it_keeps() -> None:
    module = Attend({"dropout_p": 0.25})
    nn.init.zeros_(module.weight)  # every key weighs the same, so only dropout makes a difference
    q, k, _ = qkv(rows=40, cols=40)
    ones = torch.ones(2, 4, 40, 8)
    converted = tb.convert(module, q, k, ones)
    arrays = [x.numpy() for x in (q, k, ones)]
    params = converted.params
    run = jax.jit(lambda key: converted.apply(params, {}, *arrays, rng=key, train=True).output[0])
    rows = np.asarray(run(jax.random.key(0)))
    assert abs(rows.mean() - 1.0) < 0.02
    # Variance of a mean over 40 keys, each kept with 0.75: 0.25 / 0.75 / 40.
    assert abs(rows[..., 0].var() - 1 / 120) < 0.002
    np.testing.assert_array_equal(rows, run(jax.random.key(0)))
    assert relative_error(rows, run(jax.random.key(1))) > 0.01


def test_every_second_place_is_written() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        y[:, ::2] = x[:, 1::2] * 2
        y[1:4:2] = 0.5
        return y

    check_parity(Fn(write), X)


def test_pairs_of_moments_the_smallest_values_and_edges_that_are_cut() -> None:
    def every_kind(x: torch.Tensor) -> Any:
        y = x.view(1, 4, 6)
        return (
            torch.std_mean(x, 1, keepdim=True), torch.var_mean(x, 0, keepdim=True),
            x.topk(2, largest=False), x.topk(2, dim=0, largest=False),
            F.pad(y, (-1, 2), mode="reflect"), F.pad(y, (2, -1), mode="circular"),
            *x.cummax(1), *x.cummin(-1), torch.full((2,), 2**63 - 1, dtype=torch.float32),
        )  # fmt: skip

    check_parity(Fn(every_kind), X)


def test_equations_of_several_matrices_and_from_the_right() -> None:
    def every_kind(x: torch.Tensor) -> Any:
        one = x[:, :4] + 3 * torch.eye(4)
        several = torch.stack([one, one.T, one + torch.eye(4)])
        lower, right = one.tril(), torch.linalg.solve_ex(one, x.T, left=False)[0]
        return (
            torch.linalg.solve(several, x), torch.linalg.solve(one, several), right,
            torch.linalg.solve_triangular(lower, several[:, :, :2], upper=False),
            torch.linalg.solve_triangular(several.tril()[:, None], x, upper=False),
            torch.mvlgamma(x.abs() + 2, 3), x.new_ones(3, 4, dtype=torch.int8).trace(),
            torch.linspace(0, 1, 5, dtype=torch.float16), x.nanmedian(1)[0], x.kthvalue(2, 1)[0],
        )  # fmt: skip

    check_parity(Fn(every_kind), X)


def test_images_are_resized_by_factors_and_to_one_pixel() -> None:
    def every_kind(x: torch.Tensor) -> Any:
        return (
            F.interpolate(x, scale_factor=1.5), F.interpolate(x, scale_factor=2, mode="bilinear"),
            F.interpolate(x, size=(1, 5), mode="bilinear", align_corners=True),
            F.interpolate(x, size=(3, 1), mode="bicubic", align_corners=True),
        )  # fmt: skip

    check_parity(Fn(every_kind), IMAGE)


@pytest.mark.parametrize("svd", [torch.linalg.svd, torch.ops.aten._linalg_svd.default])
def test_factors_of_singular_values_give_the_matrix(svd: Any) -> None:
    def again(x: torch.Tensor) -> torch.Tensor:
        u, values, v = svd(x, full_matrices=False)
        alone = torch.ops.aten._linalg_svd(x, compute_uv=False)[1]  # without the factors
        return (u * (values + alone) / 2) @ v

    converted = tb.convert(Fn(again), X, train=False)
    np.testing.assert_allclose(converted(X.numpy()), 1.5 * X, atol=1e-5)


@pytest.mark.parametrize("pool", [nn.MaxPool1d, nn.AvgPool1d])
def test_a_last_window_that_lies_in_the_padding_is_left_out(pool: Any) -> None:
    """With `ceil_mode`, of five elements: two windows, not three."""
    check_parity(pool(2, 3, 1, ceil_mode=True), torch.linspace(-1, 1, 20).reshape(1, 4, 5))
