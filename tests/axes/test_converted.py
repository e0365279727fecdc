"""Converted models under plans that divide layers and sequences: the numbers of one device."""

import math

import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P
from transformers import LlamaConfig, LlamaForCausalLM

import fzero as fz
import torch_bridge as tb
from fzero.preflight import hlo


VOCAB, LENGTH, LAYERS = 64, 32, 2


def converted_llama(layers):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    module = LlamaForCausalLM(config)
    return tb.convert(module, torch.zeros(2, LENGTH, dtype=torch.long))


def trained_by(converted):
    return converted.model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
    )


def llama(layers):
    return trained_by(converted_llama(layers))


@pytest.fixture(scope="module")
def model():
    return llama(LAYERS)


def numbers(model, plan, devices=None):
    tx = optax.adamw(1e-3)
    state = fz.init(model, tx, plan, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    found = []
    for seed in range(2):
        ids = np.random.default_rng(seed).integers(0, VOCAB, (4, LENGTH), dtype=np.int32)
        state, metrics = step(state, {"ids": ids})
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(found), jax.tree.map(np.asarray, fz.logical(model, state, plan))


@pytest.fixture(scope="module")
def alone(model):
    return numbers(model, fz.Plan(zero=0, data=1), jax.devices()[:1])


def agree(divided, alone):
    # Sums in another order; Adam's first steps amplify what is near zero.
    np.testing.assert_allclose(divided[0], alone[0], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), divided[1], alone[1]
    )


PLANS = [
    {"data": 2, "context": 4},
    pytest.param({"data": 2, "context": 2, "tensor": 2}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("axes", PLANS, ids=str)
def test_a_converted_model_trains_on_divided_sequences_as_on_one_device(model, alone, axes):
    """Rotary angles, the causal mask and shifted labels are those of whole sequences."""
    agree(numbers(model, fz.Plan(zero=3, min_shard_bytes=0, **axes)), alone)


@pytest.mark.nightly
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"context": 2}], ids=str)
def test_a_converted_model_s_stages_are_divided_too(axes):
    """Blocks in a loop, cut into two stages, each of which divides its own."""
    model, devices = llama(4), jax.devices()
    plan = fz.Plan(zero=3, pipe=2, data=2, microbatches=2, min_shard_bytes=0, **axes)
    agree(numbers(model, plan), numbers(model, fz.Plan(zero=0, data=1), devices[:1]))


@pytest.mark.nightly
def test_its_attention_exchanges_heads_and_nothing_gathers_sequences(model):
    """Two layers, forward and backward: queries, keys, values and results by all-to-all. Besides,
    only the rows that are added into the token table's gradient are gathered, and labels."""
    tx, plan = optax.adamw(1e-3), fz.Plan(data=2, context=4)
    batch = {"ids": jax.ShapeDtypeStruct((4, LENGTH), np.int32)}
    step = fz.train_step(model, tx, plan)
    compiled = step.lower(fz.abstract_state(model, tx, plan), batch).compile()
    found = hlo.collectives(compiled.as_text(), mesh_axes={"replica": 1, "data": 2, "context": 4})
    exchanged = [c for c in found if c.kind == "all-to-all"]
    assert sum(c.times for c in exchanged) == 2 * 2 * 4
    assert {c.elements for c in exchanged} == {2 * LENGTH // 4 * 16}
    gathered = [c for c in found if c.kind == "all-gather" and c.elements > 2 * LENGTH]
    assert all("scatter-add" in c.op_name and c.times == 1 for c in gathered)


@pytest.mark.nightly
def test_pytorchs_files_and_predictions_do_not_depend_on_axes(tmp_path):
    """What is written under one plan is read under another, to the bit, moments too."""
    converted, tx, devices = converted_llama(LAYERS), optax.adamw(1e-3), jax.devices()
    model = trained_by(converted)
    ids = np.random.default_rng(0).integers(0, VOCAB, (4, LENGTH), dtype=np.int32)
    plans = [
        fz.Plan(zero=3, data=2, context=2, tensor=2, min_shard_bytes=0),
        fz.Plan(zero=1, data=1, tensor=4, min_shard_bytes=0),
        fz.Plan(zero=0, data=1),
    ]
    used = [devices[: math.prod((plan.data, *plan.further.values()))] for plan in plans]
    state, _ = fz.train_step(model, tx, plans[0])(fz.init(model, tx, plans[0]), {"ids": ids})
    wanted = jax.device_get((state.params, state.opt_state))
    outputs = []
    for number, (plan, own) in enumerate(zip(plans, used, strict=True)):
        if number:
            state = tb.restore(tmp_path / str(number - 1), converted, tx, plan, devices=own)
        tb.save(tmp_path / str(number), converted, state, to="dcp")
        jax.tree.map(
            np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), wanted
        )
        predict = fz.predict_step(model, plan, devices=own)
        outputs.append(np.asarray(predict(state, {"ids": ids}).logits))
    for found in outputs[:2]:  # sums in another order
        np.testing.assert_allclose(found, outputs[2], rtol=0, atol=2e-6)


def test_a_converted_llama_is_divided_as_transformers_says(model, alone):
    """Two key heads: four devices leave keys and values whole, and divide all else."""
    plan = fz.Plan(zero=3, data=2, tensor=4, min_shard_bytes=0)
    layout = fz.layout(model, optax.adamw(1e-3), plan).state.params
    spec = {name.removeprefix("model.layers.0."): x.sharding.spec for name, x in layout.items()}
    assert spec["self_attn.q_proj.weight"] == spec["mlp.up_proj.weight"] == P("tensor", "data")
    assert spec["self_attn.o_proj.weight"] == spec["mlp.down_proj.weight"] == P("data", "tensor")
    assert spec["self_attn.k_proj.weight"] == P("data")
    assert spec["model.embed_tokens.weight"] == spec["lm_head.weight"] == P("tensor", "data")
    agree(numbers(model, plan), alone)


@pytest.mark.nightly
def test_a_divided_head_gives_its_loss_without_its_logits(model):
    """Over `tensor`: two sums of activations a layer forward, two backward, one each of the token
    table and the head; and of the loss a few numbers for each token. Never logits."""
    tx, plan = optax.adamw(1e-3), fz.Plan(data=2, tensor=2)
    batch = {"ids": jax.ShapeDtypeStruct((4, LENGTH), np.int32)}
    devices = jax.devices()[:4]
    step = fz.train_step(model, tx, plan, devices=devices)
    state = fz.abstract_state(model, tx, plan, devices=devices)
    text = step.lower(state, batch).compile().as_text()
    found = hlo.collectives(text, mesh_axes={"replica": 1, "data": 2, "tensor": 2})
    over = [c for c in found if "tensor" in c.axes]
    tokens, width = 2 * LENGTH, 16
    # (Sums at the same place are sent as one: those of the gradients by two and three products.)
    sums = sum(c.times * c.elements for c in over if c.elements > 200)
    assert {c.kind for c in over} == {"all-reduce"}
    assert sums == tokens * width * (LAYERS * (2 + 3 + 2) + 2)
    assert max(c.elements for c in over) < tokens * VOCAB


def test_what_is_divided_is_said_with_its_reason():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(40, 8)
            self.gate, self.up = torch.nn.Linear(8, 24), torch.nn.Linear(8, 24, bias=False)
            self.down = torch.nn.Linear(24, 8)
            self.cut = torch.nn.Linear(8, 48)
            self.alone = torch.nn.Linear(8, 8)
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, ids):
            x = self.norm(self.table(ids))
            x = x + self.down(torch.relu(self.gate(x)) * self.up(x))
            a, b = self.cut(x).chunk(2, dim=-1)
            x = x + self.down(a * b)
            return (x + self.alone(x)).mean(1)

    said = str(tb.convert(Net(), torch.zeros(2, 5, dtype=torch.long)).parallel)
    assert said.splitlines() == [
        "table.weight: vocabulary, dim 0 of 40 parts (graph)",
        "gate.weight: columns, dim 0 of 24 parts (graph)",
        "gate.bias: with its columns, dim 0 of 24 parts (graph)",
        "up.weight: columns, dim 0 of 24 parts (graph)",
        "down.weight: rows, dim 1 of 24 parts (graph)",
        "cut.weight: columns, gathered, dim 0 of 48 parts (graph)",
        "cut.bias: with its columns, dim 0 of 48 parts (graph)",
        "down.bias: whole: no product that is divided reads it",
        "alone.weight: whole: add joins it with features that are not divided",
        "alone.bias: whole: no product that is divided reads it",
        "norm.weight: whole: no product that is divided reads it",
        "norm.bias: whole: no product that is divided reads it",
    ]


def test_features_stay_divided_where_positions_are_taken():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 24, bias=False)
            self.down, self.first = (torch.nn.Linear(24, 8, bias=False) for _ in range(2))

        def forward(self, x):
            hidden = torch.relu(self.up(x))
            return self.down(hidden[:, 1:4]), self.first(hidden[:, 0])

    said = str(tb.convert(Net(), torch.zeros(2, 5, 8), train=False).parallel)
    assert said.splitlines() == [
        "up.weight: columns, dim 0 of 24 parts (graph)",
        "down.weight: rows, dim 1 of 24 parts (graph)",
        "first.weight: rows, dim 1 of 24 parts (graph)",
    ]


def test_features_of_which_some_are_taken_are_gathered_before():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 24, bias=False)
            self.down = torch.nn.Linear(12, 8, bias=False)

        def forward(self, x):
            return self.down(torch.relu(self.up(x))[..., 12:])

    said = str(tb.convert(Net(), torch.zeros(2, 5, 8), train=False).parallel)
    assert said.splitlines() == [
        "up.weight: columns, gathered, dim 0 of 24 parts (graph)",
        "down.weight: rows, dim 1 of 12 parts (graph)",
    ]


def test_a_style_of_another_dim_than_the_graphs_has_the_parts_of_its_own():
    module = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8))
    module._tp_plan = {"0": "rowwise"}
    said = str(tb.convert(module, torch.zeros(2, 5, 8), train=False).parallel)
    assert said.splitlines()[0] == "0.weight: rows, dim 1 of 8 parts (transformers: rowwise)"


def test_a_plan_for_one_layer_of_a_stack_leaves_it_whole():
    """transformers' plans may name a layer by its number; a stack is divided as one, or not."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]
    module = torch.nn.Sequential(torch.nn.Sequential(*blocks))
    module._tp_plan = {"0.0.0": "colwise"}
    converted = tb.convert(module, torch.zeros(2, 5, 8))
    assert converted.blocks.stacks
    assert str(converted.parallel).splitlines() == [
        "0.*.*.weight: whole: its layers differ",
        "0.*.*.bias: whole: its layers differ",
    ]
    said = str(tb.convert(module, torch.zeros(2, 5, 8), roll=False).parallel)
    assert "weight: columns, dim 0 of 8 parts (transformers: colwise)" in said


def test_features_that_a_view_cuts_across_are_gathered():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 6), torch.nn.Linear(12, 8)

        def forward(self, x):
            pairs = self.up(x)[..., None].expand(-1, 6, 2)
            return self.down(pairs.reshape(-1, 4, 3).flatten(1))

    said = str(tb.convert(Net(), torch.zeros(2, 8)).parallel)
    assert "up.weight: columns, gathered, dim 0 of 6 parts" in said


def test_what_convolutions_compute_whole_is_said_of_their_kernels():
    """Also where it is read through views, as Mamba reads its own."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = torch.nn.Conv1d(8, 8, 3)
            self.turned = torch.nn.ConvTranspose1d(8, 8, 3, groups=2, bias=False)
            self.deep = torch.nn.Parameter(torch.ones(8, 3))

        def forward(self, x):
            return FN.conv1d(self.turned(self.plain(x)), self.deep.unsqueeze(1), groups=8)

    said = str(tb.convert(Net(), torch.zeros(2, 8, 12)).parallel).splitlines()
    grouped = "whole: a grouped convolution reads it: its values are whole along tensor and context"
    assert sorted(said) == [
        f"deep: {grouped}",
        "plain.bias: whole: no product that is divided reads it",
        "plain.weight: whole: a convolution reads it: the features of its values are whole",
        f"turned.weight: {grouped}",
    ]


class Pooled(torch.nn.Module):
    """Every way in which modules mix positions without attention, one after the other."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)
        self.conv = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.causal = torch.nn.Conv1d(8, 8, 4, padding=3, groups=8)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        x = x + torch.nn.functional.max_pool1d(x, 3, 1, 1)
        x = x + self.conv(x) + self.causal(x)[..., : x.shape[-1]]
        x = x + torch.nn.functional.avg_pool1d(x, 3, 1, 1).cumsum(-1) / 4
        return self.out((x + x.flip(-1)).transpose(1, 2))


def trains_on_divided_positions_as_on_one_device(module):
    ids = np.random.default_rng(0).integers(0, 32, (4, 16)).astype(np.int32)
    converted = tb.convert(module, torch.from_numpy(ids).long()[:2])
    model = converted.model(lambda f, b: tb.causal_lm_loss(f(b["ids"]), b["ids"]))
    found = []
    for plan in (fz.Plan(data=1), fz.Plan(zero=3, data=2, context=4, min_shard_bytes=0)):
        devices, tx = jax.devices()[: plan.data * plan.context], optax.sgd(0.5)
        state = fz.init(model, tx, plan, devices=devices)
        state, _ = fz.train_step(model, tx, plan, devices=devices)(state, {"ids": ids})
        found.append(jax.device_get(fz.logical(model, state, plan)))
    # Sums in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6), *found)


def test_what_mixes_positions_otherwise_is_that_of_one_device():
    torch.manual_seed(0)
    trains_on_divided_positions_as_on_one_device(Pooled())


class Around(torch.nn.Module):
    """One way of mixing positions, of values (batch, positions, 8 features)."""

    def __init__(self, mix, own=None):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)
        self.mix, self.own = mix, own

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(x + self.mix(x, self.own))


def mamba():
    config = transformers.MambaConfig(
        vocab_size=8, hidden_size=8, state_size=3, num_hidden_layers=1, time_step_rank=2
    )
    return transformers.MambaModel(config)


ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))
FN = torch.nn.functional
# How values are mixed, and what makes the weights of that.
MIXERS = {
    "lstm": (lambda x, own: own(x)[0].unflatten(-1, (2, 8)).sum(2),
             lambda: torch.nn.LSTM(8, 8, batch_first=True, bidirectional=True)),
    "gru": (lambda x, own: own(x)[0], lambda: torch.nn.GRU(8, 8, 2, batch_first=True)),
    "mamba": (lambda x, own: own(inputs_embeds=x, use_cache=False)[0], mamba),
    "product": (lambda x, own: own(x.transpose(1, 2)).transpose(1, 2),
                lambda: torch.nn.Linear(16, 16)),
    "windows": (lambda x, own: FN.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).prod(-1), None),
    "sort": (lambda x, own: x.sort(1).values, None),
    "roll": (lambda x, own: x.roll(3, 1), None),
    "order": (lambda x, own: x[:, ORDER] + x.index_select(1, ORDER).flip(1), None),
    "scatter": (lambda x, own: torch.zeros_like(x).index_add(1, ORDER // 2, x), None),
    "softmax": (lambda x, own: x.softmax(1) * x + x.logcumsumexp(1), None),
    "largest": (lambda x, own: x.cummax(1).values + x.amax(1, keepdim=True), None),
    "moments": (lambda x, own: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), None),
    "fft": (lambda x, own: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5j, n=16, dim=1), None),
    "resized": (lambda x, own: FN.avg_pool1d(
        FN.interpolate(x.transpose(1, 2), scale_factor=2, mode="linear"), 2).transpose(1, 2), None),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXERS)
def test_each_way_of_mixing_positions_is_that_of_one_device(name):
    torch.manual_seed(0)
    mix, make = MIXERS[name]
    trains_on_divided_positions_as_on_one_device(Around(mix, None if make is None else make()))


def test_a_depthwise_convolution_over_divided_positions_and_features_is_that_of_one_device():
    """XLA's gradient of its kernel was wrong under both axes, with features held whole alone."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
            self.conv = torch.nn.Conv1d(16, 16, 3, padding=1, groups=16)

        def forward(self, x):
            hidden = torch.tanh(self.up(x)).transpose(1, 2)
            return self.down(torch.tanh(self.conv(hidden)).transpose(1, 2))

    torch.manual_seed(0)
    made = tb.convert(Net(), torch.zeros(4, 12, 8)).model(lambda f, batch: (f(batch) ** 2).mean())
    x = np.random.default_rng(0).normal(size=(4, 12, 8)).astype(np.float32)

    def stepped(plan):
        devices, tx = jax.devices()[: plan.tensor * plan.context], optax.sgd(1.0)
        state = fz.init(made, tx, plan, devices=devices)
        state, _ = fz.train_step(made, tx, plan, devices=devices)(state, x)
        return jax.device_get(fz.logical(made, state, plan))

    axes = fz.Plan(data=1, context=2, tensor=2, min_shard_bytes=0)
    with pytest.warns(fz.UnusedDevicesWarning):
        found = stepped(axes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found,
                 stepped(fz.Plan(data=1)))  # fmt: skip


class Cross(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, y):
        q, k, v = (
            layer(z).unflatten(-1, (2, 4)).transpose(1, 2)
            for layer, z in ((self.q, x), (self.k, y), (self.v, y))
        )
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return seen.transpose(1, 2).flatten(2)


def test_attention_to_another_length_is_that_of_one_device():
    rng, found = np.random.default_rng(0), []
    batch = {"x": rng.normal(size=(4, 8, 8)), "y": rng.normal(size=(4, 16, 8))}
    batch = {name: value.astype(np.float32) for name, value in batch.items()}
    made = tb.convert(Cross(), *(torch.from_numpy(value[:2]) for value in batch.values()))
    model = made.model(lambda forward, b: (forward(b["x"], b["y"]) ** 2).mean())
    for plan in (fz.Plan(zero=0, data=1), fz.Plan(zero=0, data=1, context=2)):
        about = {"devices": jax.devices()[: 1 + bool(found)]}
        state = fz.init(model, optax.sgd(0.1), plan, **about)
        _, metrics = fz.train_step(model, optax.sgd(0.1), plan, **about)(state, batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert found[1] == pytest.approx(found[0], rel=1e-5)  # sums in another order
