"""`tb.sequential`: modules in a row, against PyTorch; ties, statistics, and the way back."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from parity import FORWARD_RTOL, GRADIENT_RTOL, relative_error
from torch import nn

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError, ConversionError
from fzero.pipeline import partition


IMAGES = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1)) * 2 + 1
IDS = torch.randint(0, 11, (16, 5), generator=torch.Generator().manual_seed(2))
X = torch.linspace(-1, 2, 12).reshape(3, 4)
VOCAB, WIDTH = 11, 8


def make_cnn(dropout: float = 0.4) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 6, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(6, momentum=0.3),
            relu=nn.ReLU(inplace=True),
            drop=nn.Dropout(dropout),
            pool=nn.AdaptiveAvgPool2d((5, 5)),  # 12 is no multiple of 5: windows differ and overlap
            flat=nn.Flatten(),
            head=nn.Linear(6 * 5 * 5, 4),
        )
    )


class Head(nn.Module):
    """Logits through the embedding's own weight."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x @ self.table.T


def make_tied() -> nn.Sequential:
    torch.manual_seed(5)
    embed = nn.Embedding(VOCAB, WIDTH)
    return nn.Sequential(embed, nn.Linear(WIDTH, WIDTH), nn.Tanh(), Head(embed.weight))


def mean_square(out: Any, batch: Any) -> fz.Mean:
    return fz.Mean(jnp.sum(jnp.square(out - batch["y"])), jnp.float32(out.size))


def token_loss(logits: Any, batch: Any) -> fz.Mean:
    return tb.causal_lm_loss(logits, batch["x"])


@pytest.fixture(scope="module")
def cnn() -> nn.Sequential:
    return make_cnn()


@pytest.fixture(scope="module")
def cnn_chain(cnn: nn.Sequential) -> tb.ConvertedSequential:
    return tb.sequential(cnn, IMAGES, loss=mean_square)


@pytest.fixture(scope="module")
def tied() -> nn.Sequential:
    return make_tied()


@pytest.fixture(scope="module")
def tied_chain(tied: nn.Sequential) -> tb.ConvertedSequential:
    return tb.sequential(tied, IDS, loss=token_loss)


def check(module: nn.Module, chain: tb.ConvertedSequential, x: torch.Tensor, train: bool) -> None:
    """Outputs, updated buffers and every gradient of a random projection agree with PyTorch."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train(train)
    module.zero_grad()
    want = module(x.clone())
    weights = np.random.default_rng(0).normal(size=tuple(want.shape)).astype(np.float32)
    (want * torch.from_numpy(weights)).sum().backward()

    @jax.jit
    def run(params: Any) -> Any:
        def loss(params: Any) -> Any:
            out, buffers = chain.apply(params, chain.buffers, x.numpy(), train=train)
            return jnp.sum(out * weights), (out, buffers)

        return jax.grad(loss, has_aux=True)(params)

    grads, (out, buffers) = run(chain.params)
    assert relative_error(out, want.detach().numpy()) <= FORWARD_RTOL
    found = chain.by_name(grads)
    assert set(found) == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert relative_error(found[name], parameter.grad.numpy()) <= GRADIENT_RTOL, name
    moved = chain.by_name(buffers)
    for name, buffer in module.named_buffers():
        assert relative_error(moved[name], buffer.numpy()) <= FORWARD_RTOL, name
        buffer.copy_(before[name])


# Values


@pytest.mark.parametrize("rows", [8, 3])
def test_cnn_in_eval_mode(cnn: nn.Sequential, cnn_chain: tb.ConvertedSequential, rows: int) -> None:
    check(cnn, cnn_chain, IMAGES[:rows], train=False)


def test_cnn_in_train_mode() -> None:
    module = make_cnn(dropout=0.0)
    check(module, tb.sequential(module, IMAGES), IMAGES, train=True)


@pytest.mark.parametrize("train", [True, False])
def test_tied_weights(tied: nn.Sequential, tied_chain: tb.ConvertedSequential, train: bool) -> None:
    check(tied, tied_chain, IDS[:, :3], train)


def test_one_module_called_twice() -> None:
    linear = nn.Linear(4, 4)
    module = nn.Sequential(linear, nn.Tanh(), linear)
    chain = tb.sequential(module, X)
    assert chain.params.keys() == {"0"}
    assert chain.model.layers[2].reads == {"weight": "0/weight", "bias": "0/bias"}
    check(module, chain, X, train=True)


def test_outputs_may_be_nested_and_inputs_several() -> None:
    class Split(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
            return {"sum": a + b, "both": (a, b)}

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, parts: dict[str, Any]) -> torch.Tensor:
            a, b = parts["both"]
            return parts["sum"] * self.w + a * b

    parts = [Split(), Join()]
    # What feeds a chain may be jax or numpy arrays too.
    chain = tb.sequential(
        parts, X.numpy(), jnp.ones((3, 4)), inputs=("a", "b"), loss=lambda out, batch: jnp.sum(out)
    )
    batch = {"b": np.ones((3, 4), np.float32), "a": X.numpy(), "unused": np.zeros(3)}
    value, _, _ = chain.model.loss(*chain.model.init, batch, jax.random.key(0), True)
    assert float(value.total) == pytest.approx(float((X + 1 + X).sum()))


def test_the_batch_itself_may_be_the_input() -> None:
    chain = tb.sequential([nn.Linear(4, 2)], X, inputs=None, loss=lambda out, batch: jnp.sum(out))
    value, _, _ = chain.model.loss(*chain.model.init, X.numpy(), jax.random.key(0), True)
    assert np.isfinite(float(value.total))


def test_without_a_loss_the_last_module_gives_it() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x**2).mean()

    chain = tb.sequential([nn.Linear(4, 2), Loss()], X)
    assert [layer.name for layer in chain.model.layers] == ["0", "1"]
    plan, tx = fz.Plan(data=1), optax.sgd(0.1)
    state = fz.init(chain.model, tx, plan)
    _, metrics = fz.train_step(chain.model, tx, plan)(state, {"x": X.numpy()})
    assert float(metrics["loss"]) > 0


# Dropout


def test_keys_are_the_layers_own_and_those_of_the_model() -> None:
    module = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.25))
    chain = tb.sequential(module, torch.ones(2, 50), loss=lambda y, batch: jnp.sum(y))
    ones, key = np.ones((200, 50), np.float32), jax.random.key(3)
    out, _ = chain.apply({}, {}, ones, rng=key, train=True)
    kept = float(jnp.mean(out > 0))
    assert abs(kept - 0.75**2) < 0.02  # one mask in both places would keep 0.75
    value, _, _ = chain.model.loss({}, {}, {"x": ones}, key, True)
    assert float(value.total) == pytest.approx(float(jnp.sum(out)))
    with pytest.raises(ConversionError, match="pass rng"):
        chain.apply({}, {}, ones, train=True)


# Steps


def in_torch(module: nn.Sequential, batches: list[Any], loss: Any, lr: float) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    module.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(module, batch).backward()
        optimizer.step()


def test_steps_with_batch_norm_follow_pytorch() -> None:
    module = make_cnn(dropout=0.0)
    chain = tb.sequential(module, IMAGES, loss=mean_square)
    rng = np.random.default_rng(0)
    batches = [
        {"x": IMAGES.numpy() * scale, "y": rng.normal(size=(8, 4)).astype(np.float32)}
        for scale in (np.float32(1), np.float32(0.5), np.float32(2))
    ]
    plan, tx = fz.Plan(data=1), optax.sgd(0.05)
    state, step = fz.init(chain.model, tx, plan), fz.train_step(chain.model, tx, plan)
    for batch in batches:
        state, _ = step(state, batch)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return (module(torch.from_numpy(batch["x"])) - torch.from_numpy(batch["y"])).square().mean()

    in_torch(module, batches, loss, 0.05)
    back = tb.state_dict(chain, state)
    assert list(back) == list(module.state_dict())
    for name, want in module.state_dict().items():
        assert back[name].dtype == want.dtype
        # Three steps of rounding, each amplified by the normalisation's 1/deviation.
        assert relative_error(back[name].numpy(), want.numpy()) <= 10 * GRADIENT_RTOL, name


@pytest.mark.parametrize("zero", [0, 3])
def test_steps_with_tied_weights_follow_pytorch_on_eight_devices(
    zero: int, tied_chain: tb.ConvertedSequential
) -> None:
    plan, tx = fz.Plan(zero=zero, data=8, min_shard_bytes=0), optax.sgd(0.3)
    state, step = fz.init(tied_chain.model, tx, plan), fz.train_step(tied_chain.model, tx, plan)
    batches = [{"x": np.roll(IDS.numpy().astype(np.int32), n, 0)} for n in range(3)]
    for batch in batches:
        state, _ = step(state, batch)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        ids = torch.from_numpy(batch["x"]).long()
        logits = module(ids)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())

    module = make_tied()
    in_torch(module, batches, loss, 0.3)
    back = tb.state_dict(tied_chain, state)
    assert back["3.table"] is back["0.weight"]
    for name, want in module.state_dict().items():
        assert relative_error(back[name].numpy(), want.numpy()) <= GRADIENT_RTOL, name


def test_frozen_parameters_stay_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    module[0].weight.requires_grad_(False)
    chain = tb.sequential(module, X, loss=lambda y, batch: jnp.mean(y**2))
    assert chain.model.frozen == {"0/weight"}
    plan, tx = fz.Plan(data=1), optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
    state = fz.init(chain.model, tx, plan)
    state, _ = fz.train_step(chain.model, tx, plan)(state, {"x": X.numpy()})
    back = tb.state_dict(chain, state)
    assert torch.equal(back["0.weight"], module[0].weight)
    assert not torch.equal(back["1.weight"], module[1].weight)


def test_frozen_parameters_of_16_bits_have_no_masters() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).bfloat16()
    module[0].weight.requires_grad_(False)
    chain = tb.sequential(module, X.bfloat16(), loss=lambda y, batch: jnp.mean(y**2))
    params = fz.init(chain.model, optax.sgd(0.1), fz.Plan(data=1)).params
    kept = {name: value.dtype for name, value in chain.by_name(params).items()}
    assert kept.pop("0.weight") == jnp.bfloat16
    assert set(kept.values()) == {jnp.dtype(jnp.float32)}


def test_a_chain_is_cut_into_stages(
    cnn_chain: tb.ConvertedSequential, tied_chain: tb.ConvertedSequential
) -> None:
    names = [p.layer.name for p in partition(cnn_chain.model, 2, "uniform").stages[0]]
    assert names == ["conv", "norm", "relu", "drop"]
    assert partition(tied_chain.model, 4, "parameters").loads == (88, 72, 0, 1)
    batch = {"x": jax.ShapeDtypeStruct((8, 3, 12, 12), jnp.float32)}
    cost = partition(cnn_chain.model, 2, "cost", batch=batch)
    assert cost.loads[0] == 2 * 8 * 6 * 144 * 27  # the convolution is most of it
    assert cost.sizes == (4, 3)


# The way back


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_files_round_trip_exactly(
    tied: nn.Sequential, tied_chain: tb.ConvertedSequential, name: str, tmp_path: Path
) -> None:
    tb.save(tmp_path / name, tied_chain, tied_chain.params)
    loaded = tb.load(tmp_path / name)
    assert set(loaded) == set(tied.state_dict())
    make_tied().load_state_dict(loaded, strict=True)
    params, buffers = tb.load_state_dict(tied_chain, loaded)
    assert jax.tree.structure(params) == jax.tree.structure(tied_chain.params)
    jax.tree.map(np.testing.assert_array_equal, params, tied_chain.params)
    assert buffers == {}


def test_state_dict_round_trip_is_exact(
    cnn: nn.Sequential, cnn_chain: tb.ConvertedSequential
) -> None:
    state = fz.init(cnn_chain.model, optax.sgd(0.1), fz.Plan(zero=3, data=8, min_shard_bytes=0))
    back = tb.state_dict(cnn_chain, state)
    assert list(back) == list(cnn.state_dict())
    for name, want in cnn.state_dict().items():
        assert back[name].dtype == want.dtype
        assert torch.equal(back[name], want), name
    other = make_cnn()
    with torch.no_grad():
        other.norm.running_mean.fill_(3.0)
    params, buffers = tb.load_state_dict(cnn_chain, other.state_dict())
    np.testing.assert_array_equal(buffers["norm"]["running_mean"], np.full(6, 3, np.float32))
    assert params["conv"].keys() == {"weight"}
    with pytest.raises(CheckpointError, match=r"missing: `head\.bias`"):
        tb.load_state_dict(cnn_chain, {k: v for k, v in back.items() if k != "head.bias"})
    with pytest.raises(CheckpointError, match=r"have no `head\.weight`"):
        tb.state_dict(cnn_chain, {k: v for k, v in cnn_chain.params.items() if k != "head"})


class Root(nn.Module):
    """A model that calls its parts one after the other, but keeps them elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
        self.backbone["second"].weight = self.backbone["first"].weight
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def parts(self) -> list[nn.Module]:
        return [self.backbone["first"], nn.Tanh(), self.backbone["second"]]


def test_names_of_the_module_that_a_list_was_taken_from() -> None:
    root = Root()
    chain = tb.sequential(root.parts(), X, names=["a", "b", "c"], root=root)
    assert chain.params["a"].keys() == {"weight", "bias"}
    assert chain.params["c"].keys() == {"bias"}
    back = tb.state_dict(chain, chain.params)
    assert list(back) == list(root.state_dict())
    Root().load_state_dict(back, strict=True)
    params, _ = tb.load_state_dict(chain, root.state_dict())
    jax.tree.map(np.testing.assert_array_equal, params, chain.params)


def test_names() -> None:
    parts = [nn.Linear(4, 4), nn.Tanh()]
    assert list(tb.sequential(parts, X).modules) == ["0", "1"]
    assert list(tb.sequential(nn.ModuleList(parts), X).modules) == ["0", "1"]
    chain = tb.sequential(nn.Sequential(*parts), X, names=["lin", "act"])
    assert list(chain.modules) == ["lin", "act"]
    assert list(chain.params) == ["lin"]
    assert set(tb.state_dict(chain, chain.params)) == {"0.weight", "0.bias"}  # the module's own
    chain = tb.sequential(parts, X, names=["lin", "act"])
    assert set(tb.state_dict(chain, chain.params)) == {"lin.weight", "lin.bias"}


def test_module_and_example_are_left_as_they_were() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Dropout(0.5))
    module[1].eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    modes, example = [m.training for m in module.modules()], X.clone()
    tb.sequential(module, example)
    assert torch.equal(example, X)
    assert [m.training for m in module.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


# Buffers that modules share


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor, counts: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.mask += 1
        return x * self.mask


def test_a_shared_constant_is_kept_by_every_layer() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 2.0])
    chain = tb.sequential([Masked(mask), Masked(mask)], X)
    assert chain.buffers.keys() == {"0", "1"}
    out, _ = chain.apply({}, chain.buffers, X.numpy())
    np.testing.assert_allclose(out, (X * mask * mask).numpy())
    back = tb.state_dict(chain, {})
    assert back["0.mask"] is back["1.mask"]


def test_a_shared_buffer_that_is_updated_is_refused() -> None:
    mask = torch.ones(4)
    with pytest.raises(ConversionError, match=r"'0' updates the buffer `mask`.*shares with\s+\['1"):
        tb.sequential([Masked(mask, counts=True), Masked(mask)], X)
    norm = nn.BatchNorm1d(4)
    with pytest.raises(ConversionError, match="its own buffer"):
        tb.sequential([norm, nn.Tanh(), norm], X)


# What is refused


class Own(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def hooked() -> nn.Sequential:
    module = nn.Sequential(nn.Tanh())
    module.register_forward_hook(lambda *_: None)
    return module


LINEAR = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("modules", "options", "message"),
    [
        (nn.Linear(4, 4), {}, r"expected a torch\.nn\.Sequential .* got a Linear.*tb\.convert"),
        ([torch.tanh], {}, "item 0 is a builtin.*put functions into"),
        ([], {}, "at least one module"),
        (Own(nn.Tanh()), {}, "a forward of its own.*would leave out"),
        (hooked(), {}, "forward hooks"),
        ([nn.Tanh()], {"names": ["a", "b"]}, "2 names for 1 modules"),
        ([nn.Tanh(), nn.Tanh()], {"names": ["a", "a"]}, r"expected different.*names=\[\.\.\.\]"),
        ([nn.Tanh()], {"names": ["a/b"]}, "without '/'"),
        ([nn.Tanh()], {"names": ["a.b"]}, "without '/'"),
        ([nn.Tanh()], {"names": [""]}, "non-empty"),
        (nn.Sequential(OrderedDict(loss=nn.Tanh())), {}, "none of them 'loss'"),
        ([nn.Tanh(), nn.Linear(5, 4)], {}, r"module '1' \(Linear\): torch\.export cannot trace"),
        ([nn.Linear(5, 4), nn.Tanh()], {}, r"module '0' \(Linear\): torch\.export cannot trace"),
        ([LINEAR], {"root": nn.Linear(4, 4)}, "`weight` of a Linear is no tensor of the Linear"),
        (
            [LINEAR],
            {"root": nn.Sequential(LINEAR, nn.Linear(4, 2))},
            r"root has \['1\.weight', '1\.bias'\], which no module of the list holds",
        ),
    ],
)
def test_refusals(modules: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=f"(?s){message}"):
        tb.sequential(modules, X, **options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [({"image": X.numpy()}, r"\['x'\].*has \['image'\].*inputs="), (X.numpy(), "is a ndarray")],
)
def test_a_batch_without_the_input_says_what_it_has(batch: Any, message: str) -> None:
    chain = tb.sequential([nn.Tanh()], X, loss=lambda y, batch: jnp.sum(y))
    with pytest.raises(ConversionError, match=message):
        chain.model.loss({}, {}, batch, jax.random.key(0), True)


def test_a_buffer_that_is_another_modules_parameter_is_refused() -> None:
    """Of a trained one a step would change both; a frozen one could only be kept as one of them."""
    linear = nn.Linear(4, 4, bias=False)
    for learns, said in ((True, "two tensors in the same"), (False, "shares its memory with a")):
        linear.requires_grad_(learns)
        with pytest.raises(ConversionError, match=said):
            tb.sequential([linear, Masked(linear.weight.data)], torch.ones(4, 4))


def test_a_state_of_a_chain_goes_back_as_the_refusal_says() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    chain = tb.sequential(module, torch.ones(2, 3), loss=lambda y, _: jnp.mean(y))
    state = fz.init(chain.model, None, fz.Plan(data=1))
    with pytest.raises(fz.CheckpointError, match=r"load_state_dict\(tb.state_dict\(chain, state"):
        tb.load_into(module, state)
    want = module[1].weight.detach().clone()
    with torch.no_grad():
        module[1].weight.zero_()
    module.load_state_dict(tb.state_dict(chain, state))
    assert torch.equal(module[1].weight, want)
