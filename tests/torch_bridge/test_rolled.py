"""Equal blocks become one loop: the same numbers, names that go back, and why others do not."""

from __future__ import annotations

import dataclasses
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from parity import check_parity, relative_error
from rolled_cases import WIDTH, Block, Net, convert, tiny_gpt2, unrolled
from torch import nn
from transformers import GPT2LMHeadModel

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError, ConversionError


X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(5))
IDS = np.random.default_rng(0).integers(0, 61, (8, 6)).astype(np.int32)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(2)
    return Net([Block(k) for k in range(4)], norms=True)


@pytest.fixture(scope="module")
def rolled(net: Net) -> tb.Converted:
    return convert(net)


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return tiny_gpt2(layers=4, dropout=0.1)


@pytest.fixture(scope="module")
def gpt2_rolled(gpt2: GPT2LMHeadModel) -> tb.Converted:
    return tb.convert(gpt2, torch.zeros(2, 8, dtype=torch.long))


def lm_loss(forward: Any, batch: Any) -> fz.Mean:
    return tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])


# --- names ---------------------------------------------------------------------------------------


def test_parameters_of_equal_blocks_are_one_entry(rolled: tb.Converted) -> None:
    assert str(rolled.blocks) == "blocks: blocks 0 to 3 as 4 layers"
    assert set(rolled.params) == {
        "embed.weight", "embed.bias", "blocks.*.linear.weight", "blocks.*.norm.weight",
        "blocks.*.norm.bias", "blocks.*.back.weight", "blocks.*.back.bias", "first.weight",
        "first.bias", "last.weight", "last.bias",
    }  # fmt: skip
    assert rolled.params["blocks.*.linear.weight"].shape == (4, WIDTH, WIDTH)
    assert set(rolled.buffers) == {
        f"{norm}.{name}"
        for norm in ("first", "blocks.*.norm", "last")
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_a_state_dict_goes_in_and_out_bit_for_bit(net: Net, rolled: tb.Converted) -> None:
    before = net.state_dict()
    params, buffers = tb.load_state_dict(rolled, {k: v + 1 for k, v in before.items()})
    assert params.keys() == rolled.params.keys()
    assert not params["blocks.*.back.bias"].flags.writeable
    after = tb.state_dict(rolled, dataclasses.make_dataclass("S", ["params", "buffers"])(
        params, buffers))  # fmt: skip
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor + 1), name
        assert after[name].dtype == tensor.dtype


def test_rolling_can_be_turned_off_or_asked_for(net: Net) -> None:
    assert set(convert(net, roll=False).params) == {n for n, _ in net.named_parameters()}
    pair = Net([Block(0), Block(1)])
    assert [run.num for run in convert(pair, roll=2).blocks.stacks] == [2]
    for wrong in (1, -1, "yes"):
        with pytest.raises(ValueError, match="the fewest equal layers"):
            convert(net, roll=wrong)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_values_and_gradients_are_torchs(net: Net, rolled: tb.Converted, train: bool) -> None:
    """Each layer divides by a number and multiplies by a constant of its own."""
    check_parity(net, X, train=train, converted=rolled)


@pytest.mark.parametrize("train", [False, True])
def test_a_loop_computes_what_the_blocks_do(rolled: tb.Converted, train: bool) -> None:
    """Up to the last bits: XLA fuses a loop's body otherwise than blocks in a row."""
    plain = unrolled(rolled)
    runs = [
        jax.jit(lambda p, b, one=one: one.apply(p, b, X.numpy(), train=train))(
            one.params, one.buffers
        )
        for one in (rolled, plain)
    ]
    assert relative_error(runs[0].output, runs[1].output) <= 1e-6
    buffers = rolled.by_name(runs[0].buffers)
    assert buffers.keys() == runs[1].buffers.keys()
    for name, value in runs[1].buffers.items():
        assert relative_error(buffers[name], value) <= 1e-6, name


def test_gpt2_is_the_same_bit_for_bit(gpt2_rolled: tb.Converted) -> None:
    """Without fusions nothing is left that could round otherwise."""
    plain = unrolled(gpt2_rolled)
    logits = [
        jax.jit(lambda p, one=one: one.apply(p, {}, IDS).output.logits)(one.params)
        for one in (gpt2_rolled, plain)
    ]
    np.testing.assert_array_equal(*logits)


@pytest.mark.nightly  # made of the conversion's own parts
def test_parity_compares_the_loop(net: Net, rolled: tb.Converted) -> None:
    assert tb.parity(net, rolled, X).agrees
    loop = rolled._rolled[True].members[1]
    wrong = dataclasses.replace(loop, scanned={k: v + 0.1 for k, v in loop.scanned.items()})
    members = (rolled._rolled[True].members[0], wrong, rolled._rolled[True].members[2])
    graphs = {**rolled._rolled, True: dataclasses.replace(rolled._rolled[True], members=members)}
    report = tb.parity(
        net,
        dataclasses.replace(rolled, _graphs=dataclasses.replace(rolled._graphs, rolled=graphs)),
        X,
    )
    assert not report.agrees
    assert report.output_train > 1e-3 > report.output_eval


def test_every_layer_drops_values_of_its_own() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Sequential(nn.Dropout(0.5), nn.Identity())

        def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            return x + self.drop(shared)

    module = Net([Dropping() for _ in range(4)])
    with torch.no_grad():
        for weight in (module.embed.weight, module.embed.bias):
            weight.zero_()
        module.head.weight = nn.Parameter(torch.eye(WIDTH))
    converted = convert(module)
    assert converted.blocks.stacks
    x = np.full((4000, WIDTH), 100.0, np.float32)  # sigmoid: 1
    run = jax.jit(lambda key: converted.apply(converted.params, {}, x, rng=key, train=True).output)
    first = run(jax.random.key(0))
    np.testing.assert_array_equal(first, run(jax.random.key(0)))
    assert not np.array_equal(first, run(jax.random.key(1)))
    # A sum of four independent values of 0 or 2: binomial. One mask for all layers would give 0
    # or 8 only. 16000 values: a share's standard deviation is at most 0.004.
    shares = [float(np.mean(np.asarray(first) == 2.0 * k)) for k in range(5)]
    np.testing.assert_allclose(shares, np.array([1, 4, 6, 4, 1]) / 16, atol=0.02)


# --- the chain -----------------------------------------------------------------------------------


def test_a_model_is_a_chain_and_the_head_reads_the_embedding(gpt2_rolled: tb.Converted) -> None:
    model = gpt2_rolled.model(lm_loss)
    assert isinstance(model, fz.Sequential)
    names = [(link.name, link.num_layers) for link in model.layers]
    assert names == [("start", 1), ("transformer.h", 4), ("end", 1)]
    assert model.layers[-1].reads == {"transformer.wte.weight": "start/transformer.wte.weight"}
    params, _ = model.init
    assert set(params["transformer.h"]) == {n for n in gpt2_rolled.params if ".h.*." in n}
    assert params["end"].keys() == {"transformer.ln_f.weight", "transformer.ln_f.bias"}


def test_a_function_divides_the_layers_of_a_loop_as_a_chain_does(
    gpt2_rolled: tb.Converted,
) -> None:
    """A stacked leaf has one dim more than the rule of its layers."""
    rules = gpt2_rolled.model(lm_loss, chain=False).shard
    assert len(rules) > 6
    for name, dims in rules.items():
        if "*" in name:
            assert dims[0] is None
        parts = {n: part.num for n, part in enumerate(dims) if part is not None}
        assert parts, name
        assert all(gpt2_rolled.params[name].shape[n] % num == 0 for n, num in parts.items()), name


def test_chain_and_function_agree(net: Net, rolled: tb.Converted) -> None:
    """Loss, gradients and running statistics, with constants that differ between layers."""

    def loss(forward: Any, batch: Any) -> Any:
        out = forward(batch["x"] * 2.0)
        return fz.Mean(jnp.sum(out**2), jnp.float32(len(out))), {"largest": jnp.max(out)}

    batch, results = {"x": X.numpy()}, []
    for model in (rolled.model(loss), rolled.model(loss, chain=False)):

        def total(params: Any, model: fz.Model = model) -> Any:
            mean, buffers, metrics = model.loss(
                params, model.init[1], batch, jax.random.key(0), True
            )
            return mean.total, (buffers, metrics)

        (value, (buffers, metrics)), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(
            model.init[0]
        )
        assert metrics.keys() == {"largest"}
        results.append({"loss": value, **rolled.by_name(buffers), **rolled.by_name(grads)})
    assert results[0].keys() == results[1].keys()
    scale = max(float(np.abs(value).max()) for value in results[1].values())
    for name, value in results[1].items():
        assert float(np.abs(results[0][name] - value).max()) <= 1e-5 * scale, name


def steps(model: fz.Model, plan: fz.Plan, batch: Any) -> tuple[list[float], fz.TrainState]:
    tx = optax.sgd(0.2, momentum=0.9)
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def test_stages_agree_bit_for_bit_with_dropout() -> None:
    torch.manual_seed(3)
    converted = convert(Net([Block(k, dropout=0.2) for k in range(3)]))
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch["x"]) ** 2))
    batch = {"x": np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)}
    (losses, kept), (sharded_losses, sharded) = (
        steps(model, fz.Plan(zero=zero, data=4, min_shard_bytes=0), batch) for zero in (0, 3)
    )
    assert losses == sharded_losses
    assert losses[1] < losses[0]
    one, other = tb.state_dict(converted, kept), tb.state_dict(converted, sharded)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_pipeline_trains_as_without(gpt2: GPT2LMHeadModel, gpt2_rolled: tb.Converted) -> None:
    """Tied embeddings on both ranks. Gradients of the two are added per stage: last bits differ."""
    model = gpt2_rolled.model(lm_loss)
    plan = fz.Plan(zero=3, data=2, pipe=2, microbatches=2)
    losses, state = steps(model, plan, {"ids": IDS})
    alone, unpiped = steps(model, plan.replace(pipe=1), {"ids": IDS})
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    one = tb.state_dict(gpt2_rolled, state, plan)
    other = tb.state_dict(gpt2_rolled, unpiped)
    for name in one:
        assert float((one[name] - other[name]).abs().max()) <= 1e-6, name
    gpt2.load_state_dict(one)


def test_layers_of_a_pipeline_go_back_in_order(
    gpt2: GPT2LMHeadModel, gpt2_rolled: tb.Converted
) -> None:
    """Looped stages keep layers 0, 2 on one rank and 1, 3 on the other."""
    before = gpt2_rolled.by_name(gpt2_rolled.params)
    plan = fz.Plan(
        zero=3, data=2, pipe=2, microbatches=2, schedule="interleaved", partition=(2, 1, 1, 2)
    )
    state = fz.init(gpt2_rolled.model(lm_loss), None, plan, rng=0)
    after = tb.state_dict(gpt2_rolled, state, plan)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name].numpy(), value)
    with pytest.raises(CheckpointError, match=r"`transformer\.h\.\*\..*pass the state's plan"):
        tb.state_dict(gpt2_rolled, state)
    with pytest.raises(CheckpointError, match="as another schedule or partition keeps them"):
        tb.state_dict(gpt2_rolled, state, plan.replace(schedule="1f1b", partition=(3, 3)))


def test_a_checkpoint_is_restored_into_a_chain(
    net: Net, rolled: tb.Converted, tmp_path: Path
) -> None:
    """Weights, statistics and Adam's moments, which PyTorch has for every block of its own."""
    other = {name: value + 1 for name, value in net.state_dict().items()}
    torch.save(other, tmp_path / "model.pt")
    tx, plan = optax.adam(1e-3), fz.Plan(zero=3, data=2, min_shard_bytes=0)
    for chain in (True, False):
        state = tb.restore(tmp_path / "model.pt", rolled, tx, plan, chain=chain)
        assert ("start" in state.params) == chain
        back = tb.state_dict(rolled, state)
        assert all(torch.equal(back[name], value) for name, value in other.items())
        names = dict(net.named_parameters())
        ones = {name: np.full(p.shape, k, np.float32) for k, (name, p) in enumerate(names.items())}
        moved = tb.with_moments(rolled, state.opt_state, tb.Moments(5, ones, ones))
        moments = tb.moments_of(rolled, moved)
        assert (moments.step, set(moments.exp_avg)) == (5, set(names))
        for name, value in ones.items():
            np.testing.assert_array_equal(moments.exp_avg[name], value)


class Remembers(nn.Module):
    """Notes what the last block gives; may add what it noted in the last step."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.zeros(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out = self.head(x + self.memory if self.reads else x)
        self.memory.copy_(x)
        return out


@pytest.mark.parametrize("reads", [True, False])
def test_a_buffer_whose_value_a_loop_gives_is_written_behind_it(reads: bool) -> None:
    torch.manual_seed(0)
    module = Remembers(reads)
    model = convert(module).model(lambda forward, batch: jnp.mean(forward(batch)))
    _, buffers, _ = model.loss(*model.init, X[:3].numpy(), jax.random.key(0), True)
    module(X[:3])
    np.testing.assert_allclose(
        buffers["end"]["memory"], module.memory.detach(), rtol=1e-6, atol=1e-6
    )


def test_a_chain_runs_the_module_once(rolled: tb.Converted) -> None:
    def twice(forward: Any, batch: Any) -> Any:
        return jnp.mean((forward(batch) - forward(-batch)) ** 2)

    def evaluate(model: fz.Model) -> Any:
        return model.loss(*model.init, X.numpy(), jax.random.key(0), False)[0]

    with pytest.raises(ConversionError, match=r"second time.*chain=False"):
        evaluate(rolled.model(twice))
    assert float(evaluate(rolled.model(twice, chain=False))) > 0.0
    with pytest.raises(ConversionError, match="did not call forward"):
        evaluate(rolled.model(lambda forward, batch: jnp.mean(batch)))
    short = tb.convert(nn.Linear(WIDTH, 2), X)
    with pytest.raises(ConversionError, match="nothing to make a chain of"):
        short.model(twice, chain=True)


def test_an_optimizers_groups_reach_stacked_parameters(net: Net, rolled: tb.Converted) -> None:
    named = dict(net.named_parameters())
    decayed = [p for name, p in named.items() if name.endswith("weight")]
    others = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": decayed, "lr": 1.0}, {"params": others, "lr": 2.0}]
    tx = tb.optimizer(torch.optim.SGD(groups), rolled)
    params, _ = rolled.model(lambda forward, batch: jnp.mean(forward(batch))).init
    updates, _ = tx.update(jax.tree.map(np.ones_like, params), tx.init(params), params)
    for name, moved in rolled.by_name(updates).items():
        assert np.all(np.asarray(moved) == (-1.0 if name.endswith("weight") else -2.0)), name
    layerwise = [{"params": [p], "lr": 0.1 * k} for k, p in enumerate(named.values())]
    with pytest.raises(ConversionError, match=r"`blocks\.\*\..*different groups"):
        tb.optimizer(torch.optim.SGD(layerwise), rolled)


# --- what is found -------------------------------------------------------------------------------


class Other(Block):
    """A block of another kind."""

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.relu(x), shared)


def test_blocks_that_alternate_are_layers_of_two() -> None:
    """The blocks left over stay as they are, under their own names."""
    kinds = [Other, *(Other, Block) * 3]
    net = Net([kind(k, norm=False) for k, kind in enumerate(kinds)])
    converted = convert(net)
    (run,) = converted.blocks.stacks
    assert (run.name, run.first, run.num, run.period) == ("blocks[1:7]", 1, 3, 2)
    assert {"blocks.[1:7:2].back.bias", "blocks.[2:7:2].back.bias"} < set(converted.params)
    assert "blocks.0.back.bias" in converted.params
    assert "blocks.0: not rolled" in str(converted.blocks)
    check_parity(net, X, converted=converted)
    values = tb.state_dict(converted, converted.params)
    assert list(values) == list(net.state_dict())
    again = Net([kind(k + 9, norm=False) for k, kind in enumerate(kinds)])  # of other values
    state = types.SimpleNamespace(params=converted.params, buffers=converted.buffers)
    for name, tensor in tb.load_into(again, state).state_dict().items():
        assert torch.equal(tensor, values[name]), name


class Within(nn.Module):
    """Layers of layers, with numbers of its own in every second one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        own = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.layers = nn.Sequential(*own)
        self.shift = nn.Parameter(torch.ones(WIDTH)) if number % 2 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return x if self.shift is None else x + self.shift


def test_layers_within_layers_of_two_blocks_are_no_loops_of_their_own() -> None:
    module = nn.Sequential(*(Within(k) for k in range(6)))
    converted = tb.convert(module, torch.zeros(2, WIDTH), train=False)
    assert [(run.num, run.period) for run in converted.blocks.stacks] == [(3, 2)]


def bare(number: int, **options: Any) -> Block:
    return Block(number, norm=False, **options)


def wider(blocks: list[Any]) -> list[Any]:
    return [blocks[0], bare(1, width=5), blocks[2], bare(3, width=6)]


def frozen(blocks: list[Any]) -> list[Any]:
    blocks[1].back.bias.requires_grad_(False)
    blocks[3].linear.weight.requires_grad_(False)
    return blocks


def tied(blocks: list[Any]) -> list[Any]:
    for block in blocks[1:]:
        block.back.weight = blocks[0].back.weight
    return blocks


UNEQUAL = {
    "sizes": (wider, {}, r"`0:linear\.weight` is \(5, 4\) instead of \(4, 4\)"),
    "frozen": (frozen, {}, "frozen in one of them only"),
    "tied": (tied, {}, r"`blocks\.0\.back\.weight` is tied to `blocks\.1\.back\.weight`"),
    "hidden states": (lambda blocks: blocks, {"hidden": True}, "is returned, or used by others"),
    "classes": (
        lambda blocks: [blocks[0], Other(1, norm=False), *blocks[2:]], {}, "blocks.1 is a Other"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNEQUAL)
def test_blocks_that_are_not_equal_are_reported(case: str) -> None:
    change, options, reason = UNEQUAL[case]
    converted = convert(Net(change([bare(k) for k in range(4)]), **options))
    assert not converted.blocks.stacks
    (one,) = converted.blocks.unrolled
    assert one.path == "blocks"
    assert re.search(reason, one.reason), one.reason


class ReadsWithin(nn.Module):
    """Reads a weight of a block, or what a block gave, behind the blocks."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.blocks, self.weight = nn.ModuleList(bare(k) for k in range(4)), weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, shared = [x], x.sin()
        for block in self.blocks:
            given.append(block(given[-1], shared))
        weight = self.blocks[1].get_parameter("linear.weight")
        return given[-1] * (x @ weight if self.weight else given[2])


@pytest.mark.parametrize("weight", [True, False])
def test_what_is_read_of_blocks_from_outside_is_no_layers(weight: bool) -> None:
    module = ReadsWithin(weight)
    converted = convert(module)
    (one,) = converted.blocks.unrolled
    assert re.search("used outside of its block" if weight else "used by others", one.reason)
    check_parity(module, X, converted=converted)


def test_blocks_with_another_eps_are_not_the_others_layers() -> None:
    """Where `eps` stands no array with a number for each layer could: it is compared."""
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps)) for eps in (1e-5, 1e-5, 1e-5, 1.0))
    )
    converted = tb.convert(net, X[:, :4])
    assert [run.num for run in converted.blocks.stacks] in ([], [3]), str(converted.blocks)


class Late(nn.Module):
    """Counts from a number of more than 32 bits, of which a stack would have no row."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), torch.tensor(2**33 + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.number - 2**33).float()


def test_blocks_with_other_wide_numbers_are_not_one_loop() -> None:
    net = nn.Sequential(*(Late(k + 1) for k in range(3)))
    converted = tb.convert(net, X[:, :4])
    assert not converted.blocks.stacks
    check_parity(net, X[:, :4], converted=converted)
    alike = tb.convert(nn.Sequential(*(Late(1) for _ in range(3))), X[:, :4])
    assert [run.num for run in alike.blocks.stacks] == [3], str(alike.blocks)


class All(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : x.shape[-1]]


class OverTime(nn.Module):
    """Cuts a padded convolution to the length, and runs a Python loop over it, as Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        mixed = self.conv(x[..., :length])[..., :length]
        return x + torch.stack([mixed[..., t].tanh() for t in range(length)], -1)


def test_a_slice_of_everything_may_be_returned() -> None:
    """PyTorch makes an alias of it, where the length is fixed by then."""
    module = nn.Sequential(OverTime(), All())
    x = torch.randn(2, 4, 5)
    np.testing.assert_allclose(tb.convert(module, x)(x), module(x).detach(), rtol=1e-5, atol=1e-6)


def test_slices_are_alike_though_the_length_was_fixed_in_the_first_block() -> None:
    converted = tb.convert(nn.Sequential(*(OverTime() for _ in range(3))), torch.randn(2, 4, 5))
    assert [run.num for run in converted.blocks.stacks] == [3], str(converted.blocks)
