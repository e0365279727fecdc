"""`tb.stream`: the tensors of `tb.state_dict`, one at a time, from any plan."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError, ConversionError, PlacementError
from torch_bridge.formats.multiprocess_write import FarLeaf


WIDTH, LAYERS = 24, 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(torch.nn.Module):
    """A tied embedding (of a size that 8 devices do not divide), blocks that roll, and a head."""

    def __init__(self, layers: int = LAYERS, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def converted() -> tb.Converted:
    torch.manual_seed(0)
    return tb.convert(Net(), torch.zeros(2, 5, dtype=torch.long))


@functools.cache
def state_of(plan: fz.Plan) -> fz.TrainState:
    model = converted().model(lambda forward, batch: forward(batch).sum())
    return fz.init(model, None, plan)


@pytest.mark.parametrize(
    "plan",
    [
        fz.Plan(data=1),
        fz.Plan(zero=3),
        fz.Plan(zero=3, precision="bf16", data=4, replica=2),
        fz.Plan(zero=1, pipe=2, data=2, microbatches=2),
    ],
    ids=lambda plan: f"zero {plan.zero}, pipe {plan.pipe}, {plan.precision}",
)
def test_any_plan_streams_its_state_dict(plan: fz.Plan) -> None:
    state = state_of(plan)
    expected = tb.state_dict(converted(), state, plan)
    found = list(tb.stream(converted(), state, plan))
    assert sorted(name for name, _ in found) == sorted(expected)
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_nothing_is_gathered_but_the_tensor_at_hand() -> None:
    """What lives beside the state meanwhile is one leaf of one layer, on one device."""
    state = state_of(fz.Plan(zero=3))
    leaves = jax.tree.leaves(state.params)
    largest = 4 * WIDTH * WIDTH  # a layer's matrix
    shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
    before = [*jax.live_arrays(), *shards]  # kept, so that no other array has the name of one
    known = {id(array) for array in before}
    most = 0
    for _, tensor in tb.stream(converted(), state):
        new = [array.nbytes for array in jax.live_arrays() if id(array) not in known]
        most = max(most, sum(new))
        del tensor
    # the row that was taken out, and where it was gathered
    assert 0 < most <= 2 * largest < sum(leaf.nbytes for leaf in leaves)


def test_a_tensor_that_is_whole_on_its_device_is_handed_over_without_a_copy() -> None:
    state = state_of(fz.Plan(data=1))
    tensors = dict(tb.stream(converted(), state))
    leaf = next(
        leaf for path, leaf in jax.tree.leaves_with_path(state.params) if "embed" in str(path)
    )
    assert tensors["embed.weight"].data_ptr() == leaf.unsafe_buffer_pointer()
    assert tensors["head.weight"].data_ptr() == leaf.unsafe_buffer_pointer()


def test_pytorch_loads_what_was_streamed() -> None:
    module = Net()
    module.load_state_dict(dict(tb.stream(converted(), state_of(fz.Plan(zero=3)))))
    ids = torch.arange(10).reshape(2, 5)
    ours = converted().apply(converted().params, {}, ids.numpy()).output
    # one forward in each framework
    np.testing.assert_allclose(module(ids).detach().numpy(), ours, rtol=1e-5, atol=1e-5)


def test_adapters_go_alone_or_merged() -> None:
    adapted = tb.lora(converted(), rank=2, targets=["up"])
    model = adapted.model(lambda forward, batch: forward(batch).sum())
    plan, tx = fz.Plan(zero=3), optax.sgd(0.1)
    state, _ = fz.train_step(model, tx, plan)(
        fz.init(model, tx, plan), np.arange(40, dtype=np.int32).reshape(8, 5) % 13
    )
    alone = dict(tb.stream(adapted, state))
    assert alone.keys() == tb.adapter(adapted, state).keys()
    assert all(torch.equal(alone[k], t) for k, t in tb.adapter(adapted, state).items())
    merged, expected = dict(tb.stream(adapted, state, which="merged")), tb.merge(adapted, state)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    everything = dict(tb.stream(adapted, state, which="all"))
    assert everything.keys() == tb.state_dict(adapted, state).keys()


def test_what_cannot_be_streamed_is_named_before_the_first_pair() -> None:
    with pytest.raises(ConversionError, match="stream"):
        tb.stream(converted(), state_of(fz.Plan(data=1)), which="adapter")
    with pytest.raises(ConversionError, match="which='some'"):
        tb.stream(converted(), state_of(fz.Plan(data=1)), which="some")  # type: ignore[arg-type]
    parked = fz.offload(state_of(fz.Plan(zero=3)), "params", to="host")
    with pytest.raises(PlacementError, match="stream"):
        tb.stream(converted(), parked)


def test_some_rows_of_a_leaf_that_lies_in_several_processes() -> None:
    whole = np.arange(12).reshape(4, 3)
    turns = types.SimpleNamespace(value=[whole].__getitem__)
    some = FarLeaf(turns, 0, jnp.asarray(whole))[np.asarray([3, 0])]
    assert some.shape == (2, 3)
    np.testing.assert_array_equal(np.asarray(some), whole[[3, 0]])
    np.testing.assert_array_equal(some[1], whole[0])


def test_masters_of_16_bits_are_streamed_in_16_bits() -> None:
    """A module in bfloat16 trains float32 ones; what is handed over is the module's."""
    module = Net().bfloat16()
    own = tb.convert(module, torch.zeros(2, 5, dtype=torch.long))
    model = own.model(lambda forward, batch: forward(batch).astype(jnp.float32).sum())
    for plan in (fz.Plan(data=1), fz.Plan(zero=3)):
        state = fz.init(model, optax.adamw(1e-3), plan)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
        found = dict(tb.stream(own, state, plan))
        for name, tensor in module.state_dict().items():
            assert found[name].dtype == torch.bfloat16
            assert torch.equal(found[name], tensor), name


@functools.cache
def converted_otherwise(*sizes: int) -> tb.Converted:
    return tb.convert(Net(*sizes), torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.parametrize("other", [(3, 13), (5, 13), (4, 11), (4, 14)], ids=str)
@pytest.mark.parametrize("plan", [fz.Plan(zero=0, data=1), fz.Plan(zero=3, data=8), None], ids=str)
def test_a_state_of_another_model_is_not_cut_to_this_ones_sizes(other, plan, tmp_path):
    made, here = converted(), converted_otherwise(*other)
    state: Any = made.params  # nothing says what of these is padding: but for zeros it is none
    if plan is not None:
        state = state_of(plan)
    assert tb.state_dict(made, state).keys() >= {"embed.weight", "blocks.3.up.bias"}
    for ask in (
        lambda: tb.state_dict(here, state),
        lambda: dict(tb.stream(here, state)),
        lambda: tb.save(tmp_path / "model.safetensors", here, state),
    ):
        with pytest.raises(CheckpointError, match=r"expected shape \(\d+.*another model's"):
            ask()
    assert not list(tmp_path.iterdir())
    if plan is not None:
        return
    tx = optax.adam(1e-3)
    moments = jax.tree.map(lambda x: x + 1, tx.init(state))
    with pytest.raises(CheckpointError, match=r"expected shape \(\d+"):
        tb.moments_of(here, moments)


def test_an_adapter_of_another_rank_is_not_cut():
    small, large = (tb.lora(converted(), rank=rank, targets=["up"]) for rank in (2, 4))
    for ask in (tb.adapter, tb.merge):
        with pytest.raises(CheckpointError, match=r"expected shape \(4, 2, 24\), got \(4, 4, 24\)"):
            ask(small, large.params)
