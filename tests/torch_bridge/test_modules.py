"""Whole modules: both modes, buffers, ties, reuse, and what happens to the module itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from parity import FORWARD_RTOL, check_parity, relative_error
from torch import nn

import torch_bridge as tb


pytestmark = pytest.mark.traced_once

IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 + 1


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, bias=False)  # its gradient would be 0
        self.norm = nn.BatchNorm2d(6, momentum=0.3)
        self.pool = nn.MaxPool2d(2)
        self.flat_norm = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        return self.head(self.flat_norm(torch.tanh(x)))


@pytest.fixture(scope="module")
def cnn() -> Cnn:
    torch.manual_seed(4)
    module = Cnn()
    for parameter in module.norm.parameters():  # at bias 0 the later norm cancels the scale
        nn.init.uniform_(parameter, 0.3, 1.5)
    return module


@pytest.fixture(scope="module")
def cnn_converted(cnn: Cnn) -> tb.Converted:
    return tb.convert(cnn, IMAGES)


@pytest.mark.parametrize("train", [True, False])
def test_cnn_agrees_with_torch(cnn: Cnn, cnn_converted: tb.Converted, train: bool) -> None:
    # A batch that goes through normalisation twice amplifies rounding by 1/deviation.
    check_parity(cnn, IMAGES, train=train, converted=cnn_converted, forward_rtol=5e-5,
                 gradient_rtol=5e-4)  # fmt: skip


def test_batch_norm_statistics_come_back_as_buffers(cnn: Cnn, cnn_converted: tb.Converted) -> None:
    assert set(cnn_converted.buffers) == {n for n, _ in cnn.named_buffers()}
    step = jax.jit(
        lambda buffers, x: cnn_converted.apply(cnn_converted.params, buffers, x, train=True)
    )
    reference = Cnn()
    reference.load_state_dict(cnn.state_dict())
    reference.train()
    buffers: Any = cnn_converted.buffers
    for batch in (IMAGES, IMAGES[:3] * 0.5):
        _, buffers = step(buffers, batch.numpy())
        reference(batch)
    for name, want in reference.named_buffers():
        assert relative_error(buffers[name], want.numpy()) <= FORWARD_RTOL, name
    assert int(buffers["norm.num_batches_tracked"]) == 2
    _, untouched = cnn_converted.apply(cnn_converted.params, buffers, IMAGES.numpy())
    for name, value in untouched.items():
        np.testing.assert_array_equal(value, buffers[name])
    # and torch continues from them
    continued = Cnn()
    continued.load_state_dict(
        tb.state_dict(cnn_converted, _State(cnn_converted.params, buffers)), strict=True
    )
    assert continued.norm.num_batches_tracked.dtype == torch.int64
    continued.eval()
    reference.eval()
    assert torch.allclose(continued(IMAGES), reference(IMAGES), rtol=1e-4, atol=1e-5)


class _State:
    def __init__(self, params: Any, buffers: Any) -> None:
        self.params, self.buffers = params, buffers


class Shared(nn.Module):
    """One layer used twice, tied and frozen parameters, odd shapes, all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.steps = nn.Parameter(torch.tensor([3]), requires_grad=False)
        self.register_buffer("kept", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("dropped", torch.tensor([5.0]), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.table = torch.tensor([0.5, 0.25, 0.125, 1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            with torch.no_grad():
                self.kept.mul_(0.9).add_(x.mean(0) * self.scalar)
        h = torch.tanh(self.encoder(x))
        h = torch.tanh(self.encoder(h))
        h = self.decoder(h) * self.frozen * self.scalar + self.kept
        h = torch.cat([h, self.empty]) * self.table + self.dropped * self.steps
        with torch.no_grad():
            norm = h.norm()
        return h / norm + h.detach().sum()


@pytest.fixture(scope="module")
def shared() -> Shared:
    torch.manual_seed(6)
    return Shared()


X = torch.linspace(-1, 2, 12).reshape(3, 4)


@pytest.fixture(scope="module")
def shared_converted(shared: Shared) -> tb.Converted:
    return tb.convert(shared, X)


@pytest.mark.parametrize("train", [True, False])
def test_reused_tied_frozen_and_odd_leaves_agree_with_torch(
    shared: Shared, shared_converted: tb.Converted, train: bool
) -> None:
    check_parity(shared, X, train=train, converted=shared_converted, other_args=(X.repeat(2, 1),))


def test_each_kind_of_tensor_is_where_it_belongs(shared_converted: tb.Converted) -> None:
    assert set(shared_converted.params) == {
        "encoder.weight", "encoder.bias", "frozen", "scalar", "empty",
    }  # fmt: skip
    assert set(shared_converted.buffers) == {"steps", "kept", "dropped", "count"}
    assert shared_converted.frozen == {"frozen"}
    assert shared_converted.params["scalar"].shape == ()
    assert shared_converted.params["empty"].shape == (0, 4)


def test_state_dict_round_trip_is_exact(shared: Shared, shared_converted: tb.Converted) -> None:
    _, buffers = shared_converted.apply(
        shared_converted.params, shared_converted.buffers, X.numpy(), train=True
    )
    back = tb.state_dict(shared_converted, _State(shared_converted.params, buffers))
    assert list(back) == list(shared.state_dict())
    assert "dropped" not in back
    assert back["decoder.weight"] is back["encoder.weight"]
    assert int(back["count"]) == 1
    for name, want in shared.state_dict().items():
        assert back[name].dtype == want.dtype
        assert back[name].shape == want.shape
        if name not in ("count", "kept"):
            assert torch.equal(back[name], want), name
    other = Shared()
    other.load_state_dict(back, strict=True)
    assert torch.equal(other.kept, back["kept"])


def test_the_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    module[0].eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    tensors = {k: id(v) for k, v in [*module.named_parameters(), *module.named_buffers()]}
    modes = [m.training for m in module.modules()]
    generator = torch.random.get_rng_state()
    tb.convert(module, X)
    assert [m.training for m in module.modules()] == modes
    assert {k: id(v) for k, v in [*module.named_parameters(), *module.named_buffers()]} == tensors
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_memory_is_copied_never_aliased() -> None:
    module = nn.Linear(64, 64)  # large enough to be aligned, and so to be shared if it could be
    example = torch.ones(2, 64)
    converted = tb.convert(module, example)
    on_device = jax.device_put(converted.params)
    before = {k: np.array(v) for k, v in on_device.items()}
    with torch.no_grad():
        module.weight.fill_(7.0)
        module.bias.add_(1.0)
    for name, want in before.items():
        np.testing.assert_array_equal(converted.params[name], want)
        np.testing.assert_array_equal(on_device[name], want)
    back = tb.state_dict(converted, on_device)
    back["weight"].zero_()
    np.testing.assert_array_equal(on_device["weight"], before["weight"])
    np.testing.assert_array_equal(converted.params["weight"], before["weight"])
    source = {k: v.clone() for k, v in module.state_dict().items()}
    params, _ = tb.load_state_dict(converted, source)
    source["weight"].zero_()
    assert float(params["weight"][0, 0]) == 7.0
    with pytest.raises(ValueError, match="read-only"):
        converted.params["weight"][0, 0] = 1.0


def test_bfloat16_is_exact_both_ways() -> None:
    module = nn.Linear(4, 3).bfloat16()
    with torch.no_grad():  # every kind of bit pattern, subnormals and negative zero included
        bits = torch.tensor([0x0001, 0x8000, 0x7F80, 0x3F81, 0x0080, 0x4049], dtype=torch.int32)
        module.weight[0] = bits[:4].to(torch.int16).view(torch.bfloat16)
    converted = tb.convert(module, X.bfloat16())
    assert converted.params["weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        converted.params["weight"].view(np.int16), module.weight.detach().view(torch.int16).numpy()
    )
    back = tb.state_dict(converted, jax.device_put(converted.params))
    assert back["weight"].dtype == torch.bfloat16
    assert torch.equal(back["weight"].view(torch.int16), module.weight.view(torch.int16))
    assert converted(X.bfloat16()).dtype == ml_dtypes.bfloat16
    for masters, kept in ((True, "float32"), (False, "bfloat16")):
        again = tb.convert(module, X.bfloat16(), masters=masters)
        params, _ = again.model(lambda forward, b: forward(b).sum()).init
        assert params["weight"].dtype == kept


def test_half_precision_layers_agree_with_torch() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Softmax(-1))
    module = module.bfloat16()
    x = torch.randn(8, 16).bfloat16()
    converted = tb.convert(module, x)
    out, _ = converted.apply(converted.params, {}, x)
    assert out.dtype == jnp.bfloat16
    want = module(x).detach().float().numpy()
    assert relative_error(out.astype(jnp.float32), want) <= 2**-6  # a few units of bfloat16
    mixed, _ = converted.apply(
        {k: np.asarray(v, np.float32) for k, v in converted.params.items()}, {}, x
    )
    assert mixed.dtype == jnp.float32


def test_images_follow_the_parameters_and_statistics_stay_wide() -> None:
    """torch refuses a float32 image beside weights of 16 bits, so it is cast to theirs."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    converted = tb.convert(module, IMAGES)
    low = {k: jnp.asarray(v, jnp.bfloat16) for k, v in converted.params.items()}
    out, buffers = converted.apply(low, converted.buffers, IMAGES.numpy(), train=True)
    assert out.dtype == jnp.bfloat16
    assert buffers["1.running_mean"].dtype == jnp.float32
    narrow, _ = converted.apply(low, converted.buffers, jnp.asarray(IMAGES.numpy(), jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16


def test_dropout_keeps_the_mean_and_has_its_own_mask_at_each_place() -> None:
    module = nn.ModuleList([nn.Dropout(0.25), nn.Dropout(0.25)])
    module.forward = lambda x: tuple(layer(x) for layer in module)  # type: ignore[method-assign]
    ones = torch.ones(200, 50)
    converted = tb.convert(module, ones)
    first, second = converted.apply({}, {}, ones.numpy(), rng=jax.random.key(0), train=True).output
    for mask in (first, second):
        assert set(np.unique(mask)) == {np.float32(0.0), np.float32(1 / 0.75)}
        assert abs(float(jnp.mean(mask)) - 1.0) < 0.02  # 3 sigma is 0.017
    agreement = float(jnp.mean((first > 0) == (second > 0)))
    assert abs(agreement - (0.75**2 + 0.25**2)) < 0.02


def test_forward_may_be_called_twice_in_a_loss(cnn_converted: tb.Converted) -> None:
    def loss(forward: Any, batch: Any) -> Any:
        a, b = forward(batch), forward(batch)
        return jnp.mean((a - b) ** 2), {"a": jnp.mean(a)}

    model = cnn_converted.model(loss)
    value, buffers, metrics = model.loss(*model.init, IMAGES.numpy(), jax.random.key(0), True)
    assert float(value) == 0.0
    assert int(buffers["norm.num_batches_tracked"]) == 2
    assert set(metrics) == {"a"}
    dropout = tb.convert(nn.Dropout(0.5), X).model(loss)
    value, _, _ = dropout.loss(*dropout.init, X.numpy(), jax.random.key(0), True)
    assert float(value) > 0.0  # each call draws its own mask


def test_padded_and_sharded_leaves_are_cut_back(shared_converted: tb.Converted) -> None:
    params = dict(shared_converted.params)
    weight = params["encoder.weight"]
    params["encoder.weight"] = jnp.pad(weight, ((0, 4), (0, 0)))
    back = tb.state_dict(shared_converted, params)
    np.testing.assert_array_equal(back["encoder.weight"].numpy(), weight)


_LIBRARY = torch.library.Library("of_a_user", "DEF")
_LIBRARY.define("doubled(Tensor x) -> Tensor")
_LIBRARY.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.of_a_user.doubled(x) + 1


def test_user_operators_can_be_added() -> None:
    @tb.register_operator("of_a_user.doubled.default")
    def doubled(x: Any) -> Any:
        return jnp.multiply(x, 2)

    converted = tb.convert(Doubled(), X, train=False)
    np.testing.assert_array_equal(converted(X.numpy()), X.numpy() * 2 + 1)


def test_an_example_may_be_a_view_of_another_tensor() -> None:
    """torch.export notes the sizes of the tensor behind it, and fails where it decomposes."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))[:, :4]
    converted = tb.convert(module, x)
    np.testing.assert_allclose(converted(x.numpy()), module(x).detach(), rtol=1e-5, atol=1e-6)


class Pair(NamedTuple):
    low: Any
    high: Any


def test_named_tuples_go_in_and_come_out() -> None:
    class Turned(nn.Module):
        def forward(self, pair: Pair) -> Pair:
            return Pair(low=pair.high + 1, high=pair.low * 2)

    converted = tb.convert(Turned(), Pair(X, X))
    found = converted(Pair(X.numpy(), 3 * X.numpy()))
    assert type(found) is Pair
    np.testing.assert_array_equal(found.low, 3 * X.numpy() + 1)
    np.testing.assert_array_equal(found.high, 2 * X.numpy())
