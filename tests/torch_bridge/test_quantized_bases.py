"""Modules with linear layers in blocks of 4 and 8 bits, and adapters beside them (QLoRA)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

import fzero as fz
import torch_bridge as tb


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Ordinary promotion instead: optax's Adam needs it."""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = {"x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)}
TARGETS = ["up", "down"]


def squares(forward, batch):
    return jnp.mean(forward(batch["x"]).astype(jnp.float32) ** 2)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def base(net):
    return tb.convert(net, torch.zeros(4, 16))


@pytest.fixture(scope="module")
def adapted(base):
    return tb.lora(tb.quantize(base, targets=TARGETS), rank=2, targets=TARGETS)


def trained(converted, plan, steps=2):
    model, tx = converted.model(squares), optax.adam(1e-2)
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def widened(net, to="nf4"):
    """A copy of the module with the values that its quantised weights stand for."""
    made = Net()
    values = dict(net.state_dict())
    for name, value in values.items():
        if value.ndim == 2 and "head" not in name:
            wide = fz.dequantize(fz.quantize(value.numpy(), to), tuple(value.shape), "float32")
            values[name] = torch.from_numpy(np.array(wide))
    made.load_state_dict(values)
    return made


def same_as_widened(net, adapted, plan, to="nf4"):
    dense = tb.lora(tb.convert(widened(net, to), torch.zeros(4, 16)), rank=2, targets=TARGETS)
    state, losses = trained(adapted, plan)
    other, want = trained(dense, plan)
    assert losses == want
    own, theirs = tb.adapter(adapted, state, plan), tb.adapter(dense, other, plan)
    assert own
    assert all(torch.equal(value, theirs[key]) for key, value in own.items())
    merged, whole = tb.merge(adapted, state, plan), tb.merge(dense, other, plan)
    assert list(merged) == list(whole)
    assert all(torch.equal(value, whole[key]) for key, value in merged.items())
    return state


def test_training_is_that_of_the_widened_weights(net, adapted, tmp_path):
    plan = fz.Plan(zero=3, data=2, min_shard_bytes=0)
    state = same_as_widened(net, adapted, plan)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(state.opt_state[0].mu)}
    assert kinds == {"float32"}
    kept = state.params["blocks"]["blocks.*.up.base_layer.weight"]
    assert (kept.dtype, kept.shape) == (np.uint8, (3, 8, 36))
    assert {shard.data.shape for shard in kept.addressable_shards} == {(3, 4, 36)}
    # Everything, to go on; and the file of the whole base, which is quantised as it is read.
    tb.save(tmp_path / "all.safetensors", adapted, state)
    again = tb.restore(tmp_path / "all.safetensors", adapted, None, plan)
    want = tb.state_dict(adapted, state)
    assert all(torch.equal(v, want[k]) for k, v in tb.state_dict(adapted, again).items())
    small = tb.quantize(adapted.base.base, targets=TARGETS)
    torch.save(net.state_dict(), tmp_path / "base.pt")
    found = tb.restore(tmp_path / "base.pt", small, None, plan)
    np.testing.assert_array_equal(found.params["blocks"]["blocks.*.up.weight"], kept)


def test_the_state_of_pytorch_and_the_forward_agree(net, base):
    small = tb.quantize(base, to="int8", targets=TARGETS)
    x = torch.from_numpy(BATCH["x"])
    with torch.no_grad():
        want = widened(net, "int8")(x)
    np.testing.assert_allclose(small(x), want, rtol=1e-6, atol=1e-6)
    assert (small(x) - base(x)).std() > 1e-5
    assert small.frozen == {"blocks.*.up.weight", "blocks.*.down.weight"}
    assert tb.state_dict(small, small.params)["blocks.1.up.weight"].dtype == torch.uint8


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan",
    [
        fz.Plan(zero=0), fz.Plan(zero=1), fz.Plan(zero=2),
        fz.Plan(zero=3, min_shard_bytes=0, precision="bf16"),
        fz.Plan(zero=1, pipe=2, microbatches=2),
        fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0),
    ],
)  # fmt: skip
def test_training_is_that_of_the_widened_weights_in_every_plan(net, adapted, plan):
    same_as_widened(net, adapted, plan)


@pytest.mark.nightly
def test_scales_in_8_bits_train_as_the_widened_weights(net, base):
    adapted = tb.lora(tb.quantize(base, "nf4-double", TARGETS), rank=2, targets=TARGETS)
    plan = fz.Plan(zero=3, data=2, min_shard_bytes=0)
    state = same_as_widened(net, adapted, plan, "nf4-double")
    kept = state.params["blocks"]["blocks.*.up.base_layer.weight"]
    assert (kept.dtype, kept.shape) == (np.uint8, (3, 1, 8456))


@pytest.mark.nightly
def test_tokens_are_those_of_the_widened_weights():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(2, 8, dtype=torch.long)
    adapted = tb.lora(tb.quantize(tb.convert(module, ids)), rank=2, targets=["q_proj"])
    factor = "model.layers.*.self_attn.q_proj.lora_B.default.weight"
    params = {**adapted.params, factor: np.ones((3, 16, 2), np.float32)}
    module.load_state_dict(tb.merge(adapted, params))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    made = tb.generate(adapted, params, prompts, 12, stop=())
    for prompt, tokens in zip(prompts, made.tokens, strict=True):
        given = torch.tensor([prompt])
        want = module.generate(given, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert tokens.tolist() == want[0, len(prompt) :].tolist()


def test_what_is_refused(net, base, adapted, tmp_path):
    with pytest.raises(fz.ConversionError, match=r"to='fp4': expected one of"):
        tb.quantize(base, "fp4")
    with pytest.raises(fz.ConversionError, match=r"quantize: targets \['q_proj'\] name no layer"):
        tb.quantize(base, targets=["q_proj"])
    with pytest.raises(fz.ConversionError, match=r"has adapters .* already; quantise first"):
        tb.quantize(adapted)
    small = adapted.base
    with pytest.raises(fz.ConversionError, match=r"`blocks.0.up` is quantised already"):
        tb.quantize(small, targets=["up"])
    values = tb.state_dict(small, small.params)
    values["blocks.0.up.weight"] = values["blocks.0.up.weight"][:5]
    torch.save(values, tmp_path / "short.pt")
    with pytest.raises(fz.CheckpointError, match=r"`blocks.0.up.weight` is \(5, 36\), expected"):
        tb.restore(tmp_path / "short.pt", small, None, fz.Plan(data=1))
    tied = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    tied[1].weight = tied[0].weight
    with pytest.raises(fz.ConversionError, match=r"target `0` is tied: its weight is"):
        tb.quantize(tb.convert(tied, torch.zeros(2, 16)), targets=["0"])


def test_a_layer_in_two_places_is_quantised_once():
    layer = torch.nn.Linear(16, 16)
    twice = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
    found = tb.quantize(tb.convert(twice, torch.zeros(2, 16)), targets=["0", "2"])
    assert sum(bool(leaf.dense) for leaf in found.layout.leaves) == 1


def _scale(value):
    def change(values):
        values["blocks.0.up.weight"][5, -4:] = torch.tensor([value]).view(torch.uint8)

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            _scale(float("nan")),
            r"`blocks.0.up.weight`: .* block 5 is negative or not",
        ),
        (_scale(-1.0), r"`blocks.0.up.weight`: .* block 5 is negative or not finite"),
        (lambda v: v.pop("blocks.1.down.weight"), r"missing: `blocks.1.down.weight`"),
        (lambda v: v.update(more=torch.ones(2)), r"unexpected: `more`"),
        (
            lambda v: v.update({"blocks.1.up.weight": v["blocks.1.up.weight"].float()}),
            r"dtype: `blocks.1.up.weight` is torch.float32, expected torch.uint8",
        ),
        (
            lambda v: v.update({"blocks.1.up.weight": v["blocks.1.up.weight"][:, :35].clone()}),
            r"shape: `blocks.1.up.weight` is \(8, 35\), expected \(8, 36\)",
        ),
    ],
    ids=["nan", "negative", "missing", "more", "floats", "short"],
)
def test_a_damaged_file_of_blocks_is_named(base, tmp_path, change, told):
    small = tb.quantize(base, targets=TARGETS)
    values = tb.state_dict(small, small.params)
    change(values)
    torch.save(values, tmp_path / "bad.pt")
    with pytest.raises(fz.CheckpointError, match=rf"(?s){told}"):
        tb.restore(tmp_path / "bad.pt", small, None, fz.Plan(data=1), cast=True)


def test_a_file_of_blocks_that_was_cut_or_garbled_is_named(base, tmp_path):
    small = tb.quantize(base, targets=TARGETS)
    path = tmp_path / "base.safetensors"
    tb.save(path, small, small.params)
    good = path.read_bytes()
    header = good.replace(b'"U8"', b'"I8"', 1), good.replace(b"[8,36]", b"[9,36]", 1)
    for bad in (good[:-1], good[:40], b"", b"\xff" * 8 + good[8:], *header):
        path.write_bytes(bad)
        with pytest.raises(fz.CheckpointError, match=r"not a readable safetens|is torch.int8"):
            tb.restore(path, small, None, fz.Plan(data=1))


def test_weights_are_widened_on_the_device_of_their_blocks():
    records = torch.empty(8, 36, dtype=torch.uint8, device="meta")
    wide = torch.ops.fzero.dequantize(records, [16, 32], torch.bfloat16)
    assert (wide.device.type, wide.dtype, wide.shape) == ("meta", torch.bfloat16, (16, 32))
