"""`tb.optimizer` on converted modules: groups by name, what torch leaves alone, every way to train.

The reference is PyTorch's own loop over the same batches.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from support import tiny
from torch import nn
from torch.optim import lr_scheduler

import fzero as fz
import torch_bridge as tb
from fzero.errors import ConversionError


NUM_STEPS = 20
VOCAB, WIDTH = 11, 8


class Net(nn.Module):
    """A tied pair, and all that an optimizer may be given without training it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.teacher = nn.Linear(WIDTH, 16)  # runs without gradients
        self.detached = nn.Parameter(torch.ones(16))
        self.unused = nn.Parameter(torch.ones(3))
        self.in_no_group = nn.Parameter(torch.ones(16))
        self.down = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        with torch.no_grad():
            hint = self.teacher(x)
        y = torch.tanh(self.up(x)) * self.in_no_group + hint * self.detached.detach()
        return self.head(self.down(self.frozen(y)))


UNTRAINED = ("frozen.", "teacher.", "detached", "unused", "in_no_group")


def make_net():
    torch.manual_seed(3)
    return Net()


def adamw(net, **options):
    """Decay for matrices only, as it is usually done, with warmup and a cosine."""
    grouped = [p for name, p in net.named_parameters() if name != "in_no_group"]
    rest = {"params": [p for p in grouped if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3}
    groups = [{"params": [p for p in grouped if p.ndim >= 2]}, rest]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3, **options)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=1e-3)
    return optimizer, lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [4])


def batch_at(step):
    ids = np.random.default_rng(step).integers(0, VOCAB, (16, 2)).astype(np.int32)
    return {"ids": ids[:, 0], "next": ids[:, 1]}


def loss(forward, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(forward(batch["ids"]), batch["next"])
    return fz.Mean(jnp.sum(losses), jnp.float32(losses.size))


@cache
def by_torch():
    """Losses and the final state dict of PyTorch's own training."""
    net = make_net()
    optimizer, scheduler = adamw(net)
    losses = []
    for step in range(NUM_STEPS):
        batch = {k: torch.from_numpy(v).long() for k, v in batch_at(step).items()}
        value = nn.functional.cross_entropy(net(batch["ids"]), batch["next"])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(value.detach()))
    return losses, {name: t.detach().numpy() for name, t in net.state_dict().items()}


@cache
def converted_net():
    net = make_net()
    return net, tb.convert(net, torch.zeros(4, dtype=torch.long))


def transformation(**options):
    net, converted = converted_net()
    optimizer, scheduler = adamw(net, **options)
    return tb.optimizer(optimizer, converted, scheduler)


def train(plan, steps=NUM_STEPS):
    _, converted = converted_net()
    model, tx = converted.model(loss), transformation()
    step, state, losses = fz.train_step(model, tx, plan), fz.init(model, tx, plan), []
    for number in range(steps):
        state, metrics = step(state, batch_at(number))
        losses.append(float(metrics["loss"]))
    return losses, state, step


def check(losses, state, rtol, atol):
    expected, final = by_torch()
    start = converted_net()[0].state_dict()
    np.testing.assert_allclose(losses, expected[: len(losses)], rtol)
    for name, tensor in tb.state_dict(converted_net()[1], state).items():
        ours = tensor.float().numpy()
        np.testing.assert_allclose(ours, final[name], 0, atol, err_msg=name)
        alone = name.startswith(UNTRAINED)
        assert np.array_equal(ours, start[name].numpy()) == alone, name
        assert np.array_equal(ours, final[name]) or not alone, name


# Adam divides by a gradient's own size: where it is small, the relative error of a sum over 16 rows
# in another order counts fully, times the rate of 1e-2, in twenty steps.
@pytest.mark.parametrize("zero", [0, 3])
def test_training_follows_torch(zero):
    losses, state, _ = train(tiny.plan(zero=zero, clip_norm=None))
    check(losses, state, rtol=5e-6, atol=2e-5)


def test_mixed_precision_keeps_one_master_in_float32():
    with jax.numpy_dtype_promotion("standard"):  # which bf16 plans need
        losses, state, _ = train(tiny.plan(zero=2, precision="bf16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(losses, by_torch()[0], 0.02)


def test_parked_state_is_updated_row_by_row():
    plan = tiny.plan(zero=3, tiers={"opt_state": "host"}, stream_bytes=64)
    losses, state, step = train(plan)
    check(losses, state, rtol=5e-6, atol=2e-5)
    slabs = [visit.section for visit in step.stream.visits if visit.slab is not None]
    assert len(slabs) >= 4
    assert max(map(slabs.count, slabs)) > 1


def test_what_torch_leaves_alone_has_no_state():
    _, converted = converted_net()
    state = transformation().init(jax.tree.map(jnp.asarray, converted.params))
    names = {path.split("/")[-1] for path in tiny.host(state)} - {"count"}
    trained = {name for name in converted.params if not name.startswith(UNTRAINED)}
    assert names == trained
    assert set(state.inner_states) == {"0", "1", "untrained"}
    assert state.inner_states["untrained"].inner_state == optax.EmptyState()


def test_a_chain_is_trained_by_the_names_of_its_module():
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    module[2].weight = nn.Parameter(torch.eye(8))
    module[2].requires_grad_(False)
    chain = tb.sequential(module, torch.zeros(2, 4))
    weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
    sgd = torch.optim.SGD([{"params": weights, "lr": 0.5}, {"params": [module[0].bias]}], lr=0.1)
    tx = tb.optimizer(sgd, chain)
    params = jax.tree.map(jnp.asarray, chain.params)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(ones, tx.init(params), params)
    found = {name: float(u.reshape(-1)[0]) for name, u in chain.by_name(updates).items()}
    frozen = {"2.weight": 0.0, "2.bias": 0.0, "3.bias": 0.0}
    expected = {"0.weight": -0.5, "0.bias": -0.1, "3.weight": -0.5, **frozen}
    assert found == pytest.approx(expected)


class Still(nn.Linear):
    """A layer that sends no gradient to its own weight."""

    def forward(self, x):
        return super().forward(x).detach()


def test_a_tied_weight_of_a_chain_learns_by_any_layer_that_reads_it():
    module = nn.Sequential(Still(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    chain = tb.sequential(module, torch.zeros(2, 4))
    tx = tb.optimizer(torch.optim.SGD(module.parameters(), lr=0.5), chain)
    params = jax.tree.map(jnp.asarray, chain.params)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    moved = {name for name, update in chain.by_name(updates).items() if bool(jnp.any(update != 0))}
    assert moved == {"0.weight", "1.bias"}


def test_an_optimizer_made_of_names_fits_a_module_that_is_no_more():
    net, converted = make_net(), converted_net()[1]
    sgd = torch.optim.SGD([("head.weight", net.head.weight)], lr=0.5)
    tx = tb.optimizer(sgd, converted)
    params = jax.tree.map(jnp.asarray, converted.params)
    updates, _ = tx.update(params, tx.init(params), params)
    moved = [name for name, update in updates.items() if bool(jnp.any(update != 0))]
    assert moved == ["embed.weight"]


def test_what_is_frozen_after_the_conversion_is_left_alone():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    converted = tb.convert(module, torch.zeros(2, 4))
    module[0].requires_grad_(False)
    tx = tb.optimizer(torch.optim.AdamW(module.parameters(), lr=0.5), converted)
    params = jax.tree.map(jnp.asarray, converted.params)
    updates, _ = tx.update(params, tx.init(params), params)
    moved = {name for name, update in updates.items() if bool(jnp.any(update != 0))}
    assert moved == {"1.weight", "1.bias"}


class Compared(nn.Module):
    """Parameters of which only comparisons, whole numbers and shapes are read."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        for name in ("limit", "table", "like", "cast", "largest", "trained"):
            setattr(self, name, nn.Parameter(torch.full((4,), 1.5)))

    def forward(self, x):
        y = self.up(x) * (x > self.limit) + torch.ones_like(self.like)
        y = y * self.trained if self.training else y
        return y + self.cast.to(torch.int32) + torch.argmax(self.largest) * (self.table != 0)


def test_a_comparison_sends_no_gradient_and_so_nothing_decays():
    module = Compared()
    converted = tb.convert(module, torch.zeros(2, 4))
    adamw = torch.optim.AdamW(module.parameters(), lr=0.5)
    tx = tb.optimizer(adamw, converted)
    params = jax.tree.map(jnp.asarray, converted.params)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    moved = {name for name, update in updates.items() if bool(jnp.any(update != 0))}
    module(torch.ones(2, 4)).sum().backward()
    assert moved == {name for name, p in module.named_parameters() if p.grad is not None}


class Heads(nn.Module):
    """Two heads, of which its own loss reads one; three equal blocks before them, or none."""

    def __init__(self, layers):
        super().__init__()
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers))
        self.read, self.other = nn.Linear(4, 4), nn.Linear(4, 2)
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x, labels):
        for up in self.up:
            x = up(x)
        read = self.read(x)
        loss = nn.functional.mse_loss(read, labels)
        return {"loss": loss, "read": read, "other": self.other(x), "frozen": self.frozen(x)}


@pytest.mark.parametrize("layers", [0, 3])
def test_what_only_an_output_reads_that_the_loss_does_not_is_left_alone(layers):
    torch.manual_seed(0)
    module = Heads(layers)
    batch = {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    options = {"lr": 0.1, "weight_decay": 0.5}
    adamw = torch.optim.AdamW(module.parameters(), **options)
    said = r"no output that depends on `other\.bias`, `other\.weight`\."
    with pytest.warns(UserWarning, match=said):
        _, trained = tb.fit(
            module, [batch], optimizer=adamw, plan=fz.Plan(data=1), trained_module=True
        )
    for name in ("other.weight", "other.bias"):
        torch.testing.assert_close(trained.get_parameter(name).detach(), before[name])
    assert not torch.equal(trained.read.weight, before["read.weight"])
    # A loss of one's own: metrics may read what they like, comparisons send nothing back.
    converted = tb.convert(module, **batch)

    def loss(forward, batch):
        out = forward(**batch)
        value = jnp.mean(out["read"] ** 2) + jnp.sum((out["other"] > 0).astype(jnp.float32))
        return value, {"other": jnp.mean(out["other"])}

    model, plan = converted.model(loss), fz.Plan(data=1)
    tx = tb.optimizer(adamw, converted, unread=["other.weight", "other.bias"])
    state = fz.init(model, tx, plan)
    want = converted.by_name(jax.device_get(state.params))
    with pytest.warns(UserWarning, match=said):
        state, _ = fz.train_step(model, tx, plan)(state, tb.batch(batch))
    found = converted.by_name(jax.device_get(state.params))
    unmoved = {name for name in want if np.array_equal(want[name], found[name])}
    assert unmoved == {"other.weight", "other.bias", "frozen.weight", "frozen.bias"}
    with pytest.warns(UserWarning, match="no output that depends on"):  # a number reads nothing
        found = converted.unread(lambda f, b: 0.0 * len(f(**b)), tb.batch(batch))
    assert {"read.weight", "other.weight"} <= found
    with pytest.raises(ConversionError, match=r"unread has \['othre'\]"):
        tb.optimizer(adamw, converted, unread=["othre"])


class Bessel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x):
        other = self.other(x)
        return {"sum": self.read(x) + torch.special.bessel_j0(other), "other": other}


def test_what_a_function_without_gradient_reads_is_left_alone():
    batch = {"x": torch.randn(3, 4)}
    converted = tb.convert(Bessel(), **batch)
    with pytest.warns(UserWarning, match="no output that depends on"):
        found = converted.unread(lambda f, b: jnp.sum(f(**b)["sum"]), tb.batch(batch))
    assert found == {"other.weight", "other.bias"}


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_what_is_left_alone_may_be_said_by_any_of_its_names(name):
    """Decay alone would show."""
    net, converted = converted_net()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=0.5)
    tx = tb.optimizer(sgd, converted, unread=[name])
    params = dict(converted.params)
    updates, _ = tx.update(jax.tree.map(np.zeros_like, params), tx.init(params), params)
    assert not updates["embed.weight"].any()
    assert updates["up.weight"].any()


def test_what_learns_only_after_the_conversion_is_refused():
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    converted = tb.convert(module, torch.zeros(2, 4))
    module.requires_grad_(True)
    with pytest.raises(ConversionError, match=r"`0.weight` learns now, but was frozen"):
        tb.optimizer(torch.optim.AdamW(module.parameters(), lr=0.5), converted)


def test_a_tensor_of_another_module_is_refused():
    _, converted = converted_net()
    other = nn.Linear(2, 3)
    with pytest.raises(ConversionError, match=r"group 0, parameter 1 \(3,\): it is no parameter"):
        tb.optimizer(torch.optim.SGD([converted_net()[0].up.bias, other.bias], lr=0.1), converted)


def test_params_of_another_model_are_refused():
    with pytest.raises(ConversionError, match=r"'down.bias'.*are missing, \['w'\] are not known"):
        transformation().init({"w": jnp.ones(3)})
    module = nn.Linear(2, 3)
    tx = tb.optimizer(torch.optim.SGD(module.parameters(), lr=0.1), module.named_parameters())
    with pytest.raises(ConversionError, match=r"\['bias'\] are missing"):
        tx.init({"weight": jnp.ones((3, 2))})


def test_what_is_no_torch_optimizer_is_refused_by_what_it_is():
    named = [("w", torch.nn.Parameter(torch.ones(2)))]
    for given, what in (({}, "none"), (optax.sgd(0.1), "function"), (3, "int")):
        with pytest.raises(ConversionError, match=rf"expected a torch optimizer.* got {what}\."):
            tb.optimizer(given, named)


def test_an_optimizer_of_nothing_is_refused():
    net, converted = converted_net()
    with pytest.raises(ConversionError, match="SGD: none of its parameters can be trained"):
        tb.optimizer(torch.optim.SGD([net.unused], lr=0.1), converted)


def test_complex_parameters_are_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConversionError, match=r"`w` is complex.*torch\.view_as_complex"):
        tb.optimizer(torch.optim.Adam([weight]), [("w", weight)])
