"""Mixtures of experts of converted models: experts on their owners, the numbers of one device."""

import functools
import math
import sys
import threading
import types

import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from jax.sharding import PartitionSpec as P
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import fzero as fz
import torch_bridge as tb


WORDS, WIDTH, NUM, LENGTH = 32, 8, 8, 8
MIXTRAL = transformers.MixtralConfig(
    hidden_size=WIDTH, intermediate_size=12, num_local_experts=NUM, num_experts_per_tok=2,
    vocab_size=WORDS, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)  # fmt: skip


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture = MixtralSparseMoeBlock(MIXTRAL)
        for leaf in self.parameters():
            torch.nn.init.normal_(leaf, std=0.5)

    def forward(self, x):
        return x + self.mixture(torch.tanh(x))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@functools.cache
def net():
    torch.manual_seed(0)
    module = Net()
    return module, tb.convert(module, torch.zeros(2, LENGTH, dtype=torch.long), roll=2)


def batch(rows=8):
    ids = np.random.default_rng(0).integers(0, WORDS, (rows, LENGTH), dtype=np.int32)
    return {"ids": ids, "labels": ids}


def next_word(forward, batch):
    out = forward(batch["ids"])
    return tb.causal_lm_loss(getattr(out, "logits", out), batch["ids"])


def trained(model, plan, tx=None):
    """Loss, norm and what was dropped of a step, and all parameters after it."""
    tx = optax.sgd(0.1) if tx is None else tx
    devices = jax.devices()[: plan.pipe * plan.data * plan.expert * plan.tensor * plan.context]
    state = fz.init(model, tx, plan, devices=devices)
    state, metrics = fz.train_step(model, tx, plan, devices=devices)(state, batch())
    names = [name for name in ("loss", "grad_norm", "dropped") if name in metrics]
    numbers = np.array([float(metrics[name]) for name in names])
    state = fz.reload(state, ["params"]) if plan.tiers else state
    return numbers, jax.device_get(fz.logical(model, state, plan))


def agree(found, wanted):
    # Sums in another order.
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, found[1], wanted[1])


def test_experts_of_a_converted_model_live_on_their_owners_and_train_as_in_pytorch():
    module, converted = net()
    assert str(converted.blocks) == "blocks: blocks 0 to 1 as 2 layers"
    said = [line for line in str(converted.parallel).splitlines() if "experts" in line]
    assert said == [
        f"blocks.*.mixture.experts.{name}: experts, dim 0 of 8 parts (each has its own)"
        for name in ("gate_up_proj", "down_proj")
    ]
    model, plan = converted.model(next_word), fz.Plan(zero=3, data=2, expert=4, min_shard_bytes=0)
    up = fz.layout(model, None, plan).state.params["blocks"][
        "blocks.*.mixture.experts.gate_up_proj"
    ]
    assert up.sharding.spec == P(None, "expert", "data")
    found = trained(model, plan)
    # What PyTorch computes with a loop over experts, and its step.
    agree((found[0], converted.by_name(found[1])), stepped(module, module))


def test_experts_that_an_axis_does_not_divide_are_not_whole_on_each_device():
    model = net()[1].model(next_word)
    with pytest.raises(fz.PlanError, match=r"expert=3 does not divide dim \d \(8\) of .*experts"):
        fz.layout(model, None, fz.Plan(zero=0, data=1, expert=3))


def stepped(module, forward):
    """What `trained` gives, by PyTorch: without what is dropped."""
    ids = torch.from_numpy(batch()["ids"]).long()
    logits = forward(ids)[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), ids[:, 1:].reshape(-1))
    module.zero_grad()
    loss.backward()
    norm = torch.sqrt(sum((leaf.grad**2).sum() for leaf in module.parameters()))
    values = {name: (leaf - 0.1 * leaf.grad).detach() for name, leaf in module.named_parameters()}
    wanted = {name: value.numpy() for name, value in values.items()}
    return np.array([loss.item(), norm.item()]), wanted


CAPACITY = 0.75


@functools.cache
def bounded():
    return tb.convert(net()[0], torch.zeros(2, LENGTH, dtype=torch.long), roll=2, capacity=CAPACITY)


def test_a_converted_expert_takes_the_first_of_its_tokens_and_a_metric_says_what_is_dropped():
    """Of all devices' tokens, in every layer of a loop; in evaluation it takes all."""
    module, everything = net()
    assert type(module) is Net
    dropped = []

    def forward(ids):
        x = module.words(ids)
        for block in module.blocks:
            rows, experts = torch.tanh(x).reshape(-1, WIDTH), block.mixture.experts
            _, gates, chosen = block.mixture.gate(rows)
            most = math.ceil(CAPACITY * chosen.numel() / NUM)
            out = torch.zeros_like(rows)
            for number in range(NUM):
                token, place = torch.where(chosen == number)
                dropped.append(max(0, len(token) - most) / chosen.numel())
                token, place = token[:most], place[:most]
                hidden = experts._apply_gate(rows[token] @ experts.gate_up_proj[number].T)
                one = hidden @ experts.down_proj[number].T
                out = out.index_add(0, token, one * gates[token, place][:, None])
            x = x + out.reshape(x.shape)
        return module.head(x)

    numbers, wanted = stepped(module, forward)
    share = sum(dropped) / len(module.blocks)
    assert 0.1 < share < 0.9
    model = bounded().model(lambda forward, batch: next_word(jax.checkpoint(forward), batch))
    found = trained(model, fz.Plan(zero=3, data=2, expert=4, min_shard_bytes=0))
    agree((found[0], bounded().by_name(found[1])), (np.array([*numbers, share]), wanted))
    given = bounded().params, bounded().buffers, batch()["ids"]
    train = jax.eval_shape(functools.partial(bounded().apply, train=True), *given)
    assert train.output.output.shape == (*given[-1].shape, WORDS)
    assert train.output.dropped.shape == (2,)
    evaluated = (jax.make_jaxpr(one.apply)(*given).jaxpr for one in (bounded(), everything))
    assert len({str(jaxpr) for jaxpr in evaluated}) == 1


BOUNDED = [
    ({"data": 1, "expert": 2, "tensor": 2, "context": 2}, {"data": 1}, None),
    ({"zero": 3, "data": 2, "expert": 2}, {"data": 1}, False),
    ({"zero": 2, "data": 2, "expert": 4, "microbatches": 2, "gather": "lazy"},
     {"data": 2, "microbatches": 2}, None),
    ({"zero": 3, "data": 2, "expert": 2, "pipe": 2, "microbatches": 2, "schedule": "zb_h1"},
     {"data": 2, "microbatches": 2}, None),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("axes", "other", "chain"), BOUNDED, ids=str)
def test_what_a_capacity_drops_does_not_depend_on_axes_and_stages(axes, other, chain):
    """Microbatches have the same rows where `data` is the same."""
    model = bounded().model(next_word, chain=chain)
    found, wanted = (trained(model, fz.Plan(min_shard_bytes=0, **one)) for one in (axes, other))
    assert found[0][2] == wanted[0][2] > 0
    agree(found, wanted)


@functools.cache
def whole(name, **config):
    """A model of transformers whose blocks are a mixture, and one step of it on one device."""
    torch.manual_seed(0)
    kinds = {
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {}),
        "qwen": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM, {
            "num_experts": NUM, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 8}),
        "deepseek": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, {
            "n_routed_experts": NUM, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12,
            "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}),
        "gpt-oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM, {"head_dim": 4}),
    }  # fmt: skip
    kind, module, own = kinds[name]
    shared = {
        key: getattr(MIXTRAL, key)
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_local_experts",
            "num_experts_per_tok",
            "vocab_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        )
    }
    made = module(kind(**{**shared, "num_hidden_layers": 2, **own, **config}))
    return made, tb.convert(made, torch.zeros(2, LENGTH, dtype=torch.long), roll=2)


@functools.cache
def alone(name):
    return trained(whole(name)[1].model(next_word), fz.Plan(zero=0, data=1))


PLANS = [
    {"zero": 3, "data": 2, "expert": 4},
    {"zero": 2, "data": 1, "expert": 2, "tensor": 2, "context": 2, "microbatches": 2},
    {"zero": 1, "data": 2, "expert": 2, "gather": "lazy", "remat": "layer"},
]


CASES = [
    *(("mixtral", axes) for axes in PLANS),
    *((name, PLANS[0]) for name in ("qwen", "deepseek", "gpt-oss")),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "axes"), CASES, ids=str)
def test_a_mixture_of_transformers_trains_on_many_devices_as_on_one(name, axes):
    module, converted = whole(name)
    if axes["zero"] == 3:
        ids = torch.from_numpy(batch()["ids"]).long()
        assert tb.parity(module, converted, ids).agrees
    model = converted.model(next_word)
    agree(trained(model, fz.Plan(min_shard_bytes=0, **axes)), alone(name))


@pytest.mark.nightly
def test_the_stages_of_a_converted_pipeline_have_experts_too():
    model = net()[1].model(next_word)
    plan = fz.Plan(zero=3, data=2, expert=2, pipe=2, microbatches=2, min_shard_bytes=0)
    agree(trained(model, plan), trained(model, fz.Plan(zero=0, data=1)))


@pytest.mark.nightly
def test_the_load_balancing_loss_of_transformers_is_that_of_all_devices():
    """A product of two means over tokens: those of one device's tokens would give another."""
    module, _ = whole("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    ids = torch.from_numpy(batch()["ids"]).long()
    converted = tb.convert(module, input_ids=ids, labels=ids)
    wanted = module(input_ids=ids, labels=ids).loss.item()
    plan = fz.Plan(zero=3, data=2, expert=2, min_shard_bytes=0)
    devices = jax.devices()[:4]
    model = converted.model("module")
    state = fz.init(model, None, plan, devices=devices)
    given = {"input_ids": batch()["ids"], "labels": batch()["labels"]}
    found = fz.eval_step(model, plan, devices=devices)(state, given)
    np.testing.assert_allclose(float(found["loss"]), wanted, rtol=1e-6)


def balanced_by(monkeypatch, load_balancing_loss_func):
    """A module whose model file has a load balancing loss of its own, and that file."""
    own = types.ModuleType("transformers.models.own.modeling_own")
    own.load_balancing_loss_func = load_balancing_loss_func
    monkeypatch.setitem(sys.modules, own.__name__, own)

    class Net(torch.nn.Module):
        def forward(self, x):
            return own.load_balancing_loss_func(x.softmax(-1), x > 0)

    return Net(), own


def test_a_load_balancing_loss_of_another_kind_is_said(monkeypatch):
    """It stays what it is, a function of the tokens at hand."""

    def load_balancing_loss_func(probs, indices):
        return (probs.mean(0) * indices.float().mean(0)).sum()

    net, own = balanced_by(monkeypatch, load_balancing_loss_func)
    x = torch.randn(4, 3)
    with pytest.warns(UserWarning, match="modeling_own is its own, .* fz.balance_loss"):
        converted = tb.convert(net, x)
    assert own.load_balancing_loss_func is load_balancing_loss_func
    np.testing.assert_allclose(converted(x.numpy()), net(x).numpy(), rtol=1e-6)


def test_a_load_balancing_loss_that_is_a_mean_over_rows_is_not_warned_of(monkeypatch, recwarn):
    def load_balancing_loss_func(router_probs, expert_indices):
        return (router_probs * expert_indices.float()).sum(-1).mean()

    net, _ = balanced_by(monkeypatch, load_balancing_loss_func)
    tb.convert(net, torch.randn(4, 3))
    assert not [one for one in recwarn if issubclass(one.category, tb.OwnLossWarning)]


def test_a_load_balancing_loss_that_is_a_mean_over_rows_is_that_of_all_devices(recwarn):
    """Switch Transformers': two devices, four rows that choose otherwise; nothing to warn of."""
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(3, NUM)

        def forward(self, x):
            logits = self.router(x)
            return switch.load_balancing_loss_func(logits.softmax(-1), logits.argmax(-1))

    torch.manual_seed(0)
    module, x = Net(), 3 * torch.randn(4, LENGTH, 3)
    model, devices = tb.convert(module, x).model("module"), jax.devices()[:2]
    plan = fz.Plan(zero=0, data=2)
    state = fz.init(model, None, plan, devices=devices)
    found = fz.eval_step(model, plan, devices=devices)(state, {"x": x.numpy()})
    np.testing.assert_allclose(float(found["loss"]), module(x).item(), rtol=1e-6)
    assert not [one for one in recwarn if issubclass(one.category, tb.OwnLossWarning)]


def test_another_thread_trains_a_mixture_while_one_is_converted():
    """What stands in its place in a trace has no gradient: it is the converting thread's alone."""
    x = torch.randn(2, LENGTH, WIDTH)
    other, found = Block().mixture, []

    def train():
        other.zero_grad()
        out = other(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        found.append(other.experts.down_proj.grad.clone())

    class Meanwhile(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixture = Block().mixture

        def forward(self, x):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            return self.mixture(x)

    train()
    tb.convert(Meanwhile(), x)
    assert len(found) > 1
    assert all(torch.equal(one, found[0]) for one in found)


def test_an_experts_function_that_draws_random_numbers_is_refused():
    block = Block().mixture
    block.experts.act_fn = torch.nn.Dropout(0.5)
    converted = tb.convert(block, torch.zeros(2, LENGTH, WIDTH))
    x = np.ones((2, LENGTH, WIDTH), np.float32)
    assert jax.eval_shape(converted, x).shape == x.shape
    with pytest.raises(fz.ConversionError, match=r"expert_rows.* it reads sizes or draws random"):
        converted.apply(converted.params, {}, x, train=True, rng=jax.random.key(0))


def refused_capacity(kind):
    if kind == "number":
        tb.convert(net()[0], capacity=0)
    elif kind == "train":
        tb.convert(net()[0], train=False, capacity=1.25)
    elif kind == "dense":
        tb.convert(torch.nn.Linear(3, 2), torch.zeros(4, 3), capacity=1.25)
    elif kind == "patched":
        module = torch.nn.Linear(3, 2)
        module.forward = module.forward
        tb.convert(module, torch.zeros(4, 3), capacity=1.25)
    elif kind == "parity":
        tb.parity(net()[0], bounded(), torch.zeros(2, LENGTH, dtype=torch.long))
    elif kind == "transformed":
        loss = lambda forward, batch: next_word(jax.checkpoint(forward), batch)  # noqa: E731
        trained(bounded().model(loss, chain=False), fz.Plan(zero=0, data=1))
    else:
        model = bounded().model(lambda forward, batch: (next_word(forward, batch), {"dropped": 0}))
        trained(model, fz.Plan(zero=0, data=1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("number", r"capacity=0\): expected a number above 0"),
        ("train", r"drop tokens in train mode only"),
        ("dense", r"no mixture .* ran in the Linear's forward .*fz\.experts"),
        ("patched", r"Linear's forward was replaced on the module itself"),
        ("parity", r"take all their tokens, and this conversion has a capacity"),
        ("transformed", r"JAX transforms \(jax.checkpoint.*'dropped'.*as it is.*chain=None"),
        ("metric", r"has a metric 'dropped', .* another name"),
    ],
)
def test_a_capacity_whose_drops_would_not_be_said_is_refused(kind, message):
    with pytest.raises(fz.ConversionError, match=message):
        refused_capacity(kind)


def test_a_loop_over_experts_whose_tokens_depend_on_data_is_refused():
    class Looped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x):
            chosen, out = x.argmax(-1) % 2, torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                (rows,) = torch.where(chosen == number)
                out.index_add_(0, rows, expert(x[rows]))
            return out

    with pytest.raises(fz.ConversionError, match=r"depends on\s+tensor values|data-dependent"):
        tb.convert(Looped(), torch.zeros(4, WIDTH), train=False)


def test_an_axis_of_its_own_keeps_what_data_keeps():
    """ZeRO shares out over `expert`, too, what does not lie along it: dense layers."""
    model = net()[1].model(next_word)

    def kept(plan):
        state = fz.layout(model, optax.adam(1e-2), plan).state
        sizes = {True: 0, False: 0}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            bytes_ = np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            sizes["experts" in str(path)] += bytes_ if leaf.shape else 0
        return sizes

    own, data = (kept(fz.Plan(zero=3, min_shard_bytes=0, **axes))
                 for axes in ({"data": 2, "expert": 4}, {"data": 8}))  # fmt: skip
    assert own[True] == data[True] > 0
    assert own[False] == data[False] > 0


OTHERWISE = [
    {"remat": "offload"},
    {"tiers": {"params": "host", "opt_state": "host"}},
    {"secondary": 2},
]


@pytest.mark.nightly
@pytest.mark.parametrize("options", OTHERWISE, ids=str)
def test_experts_are_kept_and_computed_in_every_way_as_on_one_device(options):
    model = net()[1].model(next_word)
    plan = fz.Plan(zero=3, data=2, expert=2, min_shard_bytes=0, **options)
    agree(trained(model, plan), trained(model, fz.Plan(zero=0, data=1)))


@pytest.mark.nightly
def test_experts_compute_in_16_bits():
    model = net()[1].model(next_word)
    plan = fz.Plan(zero=3, data=2, expert=2, precision="bf16", min_shard_bytes=0)
    with jax.numpy_dtype_promotion("strict"):
        plans = plan, fz.Plan(data=1, precision="bf16")
        found, wanted = (trained(model, one)[0] for one in plans)
    np.testing.assert_allclose(found, wanted, rtol=2**-8)  # bfloat16 has 8 bits


@pytest.mark.nightly
def test_files_of_pytorch_and_other_plans_have_the_experts_bit_for_bit(tmp_path):
    converted, plan = net()[1], fz.Plan(zero=3, data=2, expert=4, min_shard_bytes=0)
    other = fz.Plan(zero=1, data=2, expert=2, tensor=2, min_shard_bytes=0)
    model = converted.model(next_word)
    state = fz.init(model, None, plan)
    tb.save(tmp_path / "model.safetensors", converted, state, plan)
    read = tb.restore(tmp_path / "model.safetensors", converted, None, other)
    back = fz.replan(read, model, None, other, plan)
    assert back.params["blocks"]["blocks.*.mixture.experts.down_proj"].sharding.spec[1] == "expert"
    jax.tree.map(np.testing.assert_array_equal, back.params, state.params)


@pytest.mark.nightly
def test_doge_s_router_reads_tokens_of_its_device_s_rows_alone_as_under_ddp():
    """It chooses by logits of other tokens of the batch; of its balance a warning says as much."""
    torch.manual_seed(0)
    config = transformers.DogeConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, is_moe=True, num_experts=16,
        num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    module = transformers.DogeForCausalLM(config).eval()
    for leaf in module.parameters():
        torch.nn.init.normal_(leaf, std=0.5)
    given = batch()["ids"]
    given[:, 0] = np.arange(len(given))  # equal first tokens tie, which PyTorch breaks anyhow
    ids = torch.from_numpy(given).long()
    with pytest.warns(tb.OwnLossWarning, match=r"modeling_doge is its own"):
        converted = tb.convert(module, train=False, input_ids=ids, labels=ids)
    plan, model = fz.Plan(zero=3, data=2, min_shard_bytes=0), converted.model("module")
    state = fz.init(model, None, plan, devices=jax.devices()[:2])
    evaluate = fz.eval_step(model, plan, devices=jax.devices()[:2])
    found = evaluate(state, {"input_ids": given, "labels": given})["loss"]
    halves = [module(input_ids=half, labels=half).loss.item() for half in ids.chunk(2)]
    np.testing.assert_allclose(found, np.mean(halves), rtol=1e-5)
    assert abs(module(input_ids=ids, labels=ids).loss.item() - np.mean(halves)) > 1e-3
