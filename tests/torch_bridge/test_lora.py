"""Adapters: trained as PEFT trains them, over a frozen base, in and out of its files."""

from __future__ import annotations

import copy
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fzero as fz
import torch_bridge as tb
from torch_bridge.formats.peft import fitted
from torch_bridge.formats.staging import staged_directory
from torch_bridge.formats.turns import Turns
from torch_bridge.module.adapters import Adapter, computes_otherwise


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Ordinary promotion instead: optax's Adam needs it, and most of these tests train."""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}


def squares(forward, batch):
    return jnp.mean(forward(batch["x"]).astype(jnp.float32) ** 2)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def base(net):
    return tb.convert(net, torch.zeros(4, 8))


@pytest.fixture(scope="module")
def adapted(base):
    return tb.lora(base, rank=2, targets=["up", "down"], alpha=4)


class Headed(Net):
    """Says which layer gives its logits, as transformers' models do."""

    def get_output_embeddings(self):
        return self.head


def test_all_linear_layers_are_those_that_peft_takes():
    """All but the one that gives the logits, whose weight an embedding may be tied to."""
    own = tb.lora(tb.convert(Headed(), torch.zeros(4, 8)), rank=2).adapters["default"]
    assert {target.weight for target in own.targets} == {
        f"blocks.{n}.{name}.base_layer.weight" for n in range(4) for name in ("up", "down")
    }


def trained(converted, plan, steps=2):
    model, tx = converted.model(squares), optax.adam(1e-2)
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def follows_peft(module, own, loss, batch, torch_loss, tmp_path):
    """20 steps of AdamW in both; then what each makes of the other's adapter."""
    tb.save(tmp_path / "start", own, own.params, to="peft")
    theirs = peft.PeftModel.from_pretrained(module, tmp_path / "start", is_trainable=True)
    model = own.model(loss)
    tx, plan = optax.adamw(1e-2, weight_decay=1e-2), fz.Plan(zero=3, min_shard_bytes=0)
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    learned = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2, weight_decay=1e-2)
    first = None
    for _ in range(20):
        state, metrics = step(state, batch)
        loss = torch_loss(theirs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
        assert float(metrics["loss"]) == pytest.approx(loss.item(), abs=1e-5)
    assert loss.item() < first - 0.01
    want = peft.get_peft_model_state_dict(theirs)
    got = tb.adapter(own, state)
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, atol=1e-5, rtol=0)
    tb.save(tmp_path / "end", own, state, to="peft")
    again = peft.PeftModel.from_pretrained(theirs.unload(), tmp_path / "end").merge_and_unload()
    merged = tb.merge(own, state)
    assert merged.keys() == again.state_dict().keys()
    for key, value in again.state_dict().items():
        torch.testing.assert_close(merged[key], value, atol=1e-6, rtol=0)


def test_training_follows_peft_for_20_steps(adapted, net, tmp_path):
    x = torch.from_numpy(BATCH["x"])
    follows_peft(
        copy.deepcopy(net), adapted, squares, BATCH, lambda m: (m(x) ** 2).mean(), tmp_path
    )


@pytest.mark.nightly
def test_training_of_a_llama_follows_peft_for_20_steps(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (8, 8))
    own = tb.lora(tb.convert(module, torch.zeros(2, 8, dtype=torch.long)), rank=4,
                  targets=["q_proj", "v_proj"], alpha=8)  # fmt: skip
    assert own.blocks.stacks
    follows_peft(
        module, own,
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"]),
        {"ids": ids.numpy().astype(np.int32)},
        lambda m: m(input_ids=ids, labels=ids).loss, tmp_path,
    )  # fmt: skip


@pytest.mark.nightly
def test_modules_of_peft_convert_as_they_are(tmp_path):
    config = transformers.GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    wanted = peft.LoraConfig(
        r=2, lora_alpha=6, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True,
        use_rslora=True, lora_dropout=0.1, init_lora_weights=False,
    )  # fmt: skip
    module = peft.get_peft_model(transformers.GPT2LMHeadModel(config).bfloat16(), wanted)
    converted = tb.convert(module, torch.zeros(2, 8, dtype=torch.long))
    assert converted.blocks.stacks
    model = converted.model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
    )
    state = fz.init(model, optax.adam(1e-2), fz.Plan(zero=1))
    kinds = {
        str(leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        if "lora_" not in jax.tree_util.keystr(path)
    }
    assert kinds == {"bfloat16"}  # no master of what is frozen
    tb.save(tmp_path / "adapter", converted, state, to="peft")
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (written["r"], written["use_rslora"]) == (2, True)
    assert sorted(written["target_modules"]) == ["c_attn", "c_proj"]
    want = peft.get_peft_model_state_dict(module)
    got = tb.checkpoint(tmp_path / "adapter/adapter_model.safetensors").tensors
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key].tensor(), value)
    tb.save(tmp_path / "merged.safetensors", converted, state, merge=True)
    merged = tb.load(tmp_path / "merged.safetensors")
    want = module.merge_and_unload().state_dict()
    assert merged.keys() == want.keys()
    for key, value in want.items():
        # PEFT rounds the update to bfloat16 before it adds it: at most one more rounding.
        torch.testing.assert_close(merged[key], value, atol=1e-2, rtol=8e-3)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(fz.Plan(zero=1), marks=pytest.mark.nightly),
        fz.Plan(zero=3, min_shard_bytes=0),
        pytest.param(fz.Plan(zero=1, pipe=2, microbatches=2), marks=pytest.mark.nightly),
    ],
)
def test_only_factors_change_and_have_optimizer_state(adapted, plan):
    state, losses = trained(adapted, plan)
    _, want = trained(adapted, fz.Plan(zero=0))
    np.testing.assert_allclose(losses, want, rtol=1e-6)  # pipelines add up gradients otherwise
    leaves = tb.state_dict(adapted, state, plan)
    start = tb.state_dict(adapted, adapted.params)
    changed = {name for name, value in leaves.items() if not torch.equal(value, start[name])}
    assert changed == {name for name in leaves if "lora_" in name}
    moments = jax.tree_util.tree_leaves_with_path(state.opt_state[0].mu)
    assert moments
    assert all("lora_" in jax.tree_util.keystr(path) for path, _ in moments)


@pytest.mark.nightly
def test_dropout_of_the_updates_input(base):
    wet = tb.lora(base, rank=2, targets=["up"], dropout=0.5)
    params = dict(wet.params)
    params["blocks.*.up.lora_B.default.weight"] = np.ones((4, 16, 2), np.float32)
    call = lambda key, train: wet.apply(params, {}, BATCH["x"], rng=key, train=train).output  # noqa: E731
    keys = jax.random.key(0), jax.random.key(1)
    assert not np.array_equal(call(keys[0], True), call(keys[1], True))
    np.testing.assert_array_equal(call(keys[0], False), call(None, False))


def test_several_adapters_over_one_base(adapted, tmp_path):
    plan = fz.Plan(zero=3, min_shard_bytes=0)
    first, _ = trained(adapted, plan, steps=1)
    second, _ = trained(adapted, plan, steps=3)
    tb.save(tmp_path / "second", adapted, second, to="peft")
    own = tb.adapter(adapted, first)
    # A file in 16 bits is the factors' own dtype again.
    weights = tmp_path / "second" / "adapter_model.safetensors"
    narrow = {name: value.bfloat16() for name, value in load_file(weights).items()}
    shutil.copytree(tmp_path / "second", tmp_path / "narrow")
    save_file(narrow, tmp_path / "narrow" / weights.name)
    in_16_bits = tb.with_adapter(adapted, first, tmp_path / "narrow")
    restored = tb.restore(tmp_path / "narrow", adapted, None, plan)
    for state in (in_16_bits, restored):
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    other = tb.with_adapter(adapted, first, tmp_path / "second")
    evaluate = fz.eval_step(adapted.model(squares), plan)
    want = float(evaluate(second, BATCH)["loss"])
    assert float(evaluate(other, BATCH)["loss"]) == want != float(evaluate(first, BATCH)["loss"])
    back = tb.with_adapter(adapted, other, own)
    assert float(evaluate(back, BATCH)["loss"]) == float(evaluate(first, BATCH)["loss"])
    shared = back.params["blocks"]["blocks.*.up.base_layer.weight"]
    assert shared is first.params["blocks"]["blocks.*.up.base_layer.weight"]


@pytest.mark.parametrize("setting", ["the same", "another"])
def test_a_kill_leaves_no_factors_under_other_settings(tmp_path, monkeypatch, setting):
    def save(setting, factors):
        with staged_directory(tmp_path, merge=True, turns=Turns()) as temporary:
            (temporary / "adapter_config.json").write_text(setting)
            (temporary / "adapter_model.safetensors").write_text(factors)

    def killed_at_the_factors(path, target):
        if path.name.startswith("adapter_model"):
            raise KeyboardInterrupt
        return replace(path, target)

    replace = type(tmp_path).replace
    save("the same", "old")
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "replace", killed_at_the_factors)
        with pytest.raises(KeyboardInterrupt):
            save(setting, "new")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    old = {"adapter_model.safetensors": "old"} if setting == "the same" else {}
    assert found == {"adapter_config.json": setting, **old}
    save(setting, "new")
    assert (tmp_path / "adapter_model.safetensors").read_text() == "new"


def test_files_in_and_out(base, adapted, tmp_path):
    plan, tx = fz.Plan(zero=3, min_shard_bytes=0), optax.adam(1e-2)
    state, _ = trained(adapted, plan)
    tb.save(tmp_path / "adapter", adapted, state, to="peft")
    tb.save(tmp_path / "all.safetensors", adapted, state)
    want = tb.state_dict(adapted, state)
    for found in (
        tb.state_dict(adapted, tb.restore(tmp_path / "adapter", adapted, tx, plan)),
        tb.state_dict(adapted, tb.restore(tmp_path / "all.safetensors", adapted, tx, plan)),
    ):
        assert all(torch.equal(found[name], value) for name, value in want.items())
    same = tb.lora(base, tmp_path / "adapter")
    got = tb.adapter(same, same.params)
    assert all(torch.equal(got[key], value) for key, value in tb.adapter(adapted, state).items())


def test_rank_stabilised_updates_are_divided_by_the_root_of_the_rank(base):
    own = tb.lora(base, rank=4, targets=["up"], alpha=3, rslora=True, seed=1)
    name = "blocks.1.up.lora_A.default.weight"
    first, again = (tb.lora(base, rank=4, targets=["up"], seed=seed) for seed in (0, 1))
    drawn = [tb.state_dict(each, each.params)[name] for each in (own, first, again)]
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.ones_like(leaf) if "lora_B" in str(path) else np.asarray(leaf),
        own.params,
    )
    parts, merged = tb.state_dict(own, params), tb.merge(own, params)
    name = "blocks.1.up"
    up, down = (parts[f"{name}.lora_{k}.default.weight"] for k in "BA")
    want = parts[f"{name}.base_layer.weight"] + 3 / 2 * up @ down
    torch.testing.assert_close(merged[f"{name}.weight"], want, atol=1e-6, rtol=0)
    whole, buffers = tb.load_state_dict(base, merged)
    np.testing.assert_allclose(
        own.apply(params, own.buffers, BATCH["x"]).output,
        base.apply(whole, buffers, BATCH["x"]).output, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)]
)
def test_merging_and_unmerging_are_exact_to_rounding(net, base, adapted, dtype):
    if dtype == torch.bfloat16:
        half = Net().to(dtype)
        half.load_state_dict(net.state_dict())
        base = tb.convert(half, torch.zeros(4, 8, dtype=dtype))
        adapted = tb.lora(base, rank=2, targets=["up", "down"], alpha=4)
    state, _ = trained(adapted, fz.Plan(zero=0), steps=3)
    merged = tb.merge(adapted, state)
    parts = tb.state_dict(adapted, state)
    up, down = (parts[f"blocks.2.up.lora_{k}.default.weight"].double() for k in "BA")
    exact = parts["blocks.2.up.base_layer.weight"].double() + 2 * up @ down
    eps = torch.finfo(dtype).eps  # of numbers below 1: half of it is one rounding
    torch.testing.assert_close(merged["blocks.2.up.weight"].double(), exact, atol=eps / 2, rtol=0)
    if dtype == torch.bfloat16:  # added up in 32 bits, and rounded once
        assert torch.equal(merged["blocks.2.up.weight"], exact.to(dtype))
    params, buffers = tb.load_state_dict(base, merged)
    got = np.asarray(base.apply(params, buffers, BATCH["x"]).output, np.float32)
    want = fz.predict_step(adapted.model(squares), fz.Plan(zero=0))(state, BATCH)
    np.testing.assert_allclose(got, np.asarray(want, np.float32), atol=20 * eps)
    for name, value in tb.unmerge(adapted, merged, state).items():
        first = tb.state_dict(base, base.params)[name]
        torch.testing.assert_close(value, first, atol=2 * eps, rtol=2 * eps)


class Tied(torch.nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def test_unmerging_a_tied_weight_undoes_it_under_both_names():
    net = Tied()
    adapted = tb.lora(tb.convert(net, torch.zeros(2, 4)), rank=1, targets=["a"])
    params = {name: x + 1 if "lora" in name else x for name, x in adapted.params.items()}
    with pytest.warns(UserWarning, match=r"updates `a.weight`, .* tied to \['b.weight'\].* else"):
        merged = tb.merge(adapted, params)
    assert not torch.allclose(merged["b.weight"], net.b.weight, atol=0.1)
    for name, weight in tb.unmerge(adapted, merged, params).items():
        torch.testing.assert_close(weight, net.get_parameter(name).detach(), rtol=0, atol=1e-6)


class Twice(torch.nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.a = self.b = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("targets", [["b"], ["a", "b"]], ids=str)
def test_a_layer_under_two_names_is_adapted_where_it_is_named(targets):
    net, x = Twice(), torch.randn(2, 4)
    adapted = tb.lora(tb.convert(net, x, train=False), rank=1, targets=targets, alpha=1)
    params = {name: x + 1 if "lora" in name else x for name, x in adapted.params.items()}
    down, up = (torch.from_numpy(np.array(x)) for name, x in params.items() if "lora" in name)
    weight = net.a.weight.detach()
    changed = weight + up @ down
    first = x @ (changed if "a" in targets else weight).T + net.a.bias
    wanted = torch.tanh(first) @ changed.T + net.a.bias
    found = adapted.apply(params, {}, x.numpy(), train=False).output
    np.testing.assert_allclose(found, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_an_alpha_of_zero_in_a_file_is_not_the_default():
    """It switches an adapter off, in PEFT, too: another module would count it by its own alpha."""
    own = Adapter("default", {"lora_alpha": 8}, {}, frozenset(), (), True)
    assert computes_otherwise(own, {"lora_alpha": 0}) == {"lora_alpha": (0, 8)}
    assert not computes_otherwise(own, {"lora_alpha": None, "use_dora": None})


def test_other_adapters_are_refused_and_nothing_is_changed(base, adapted, tmp_path):
    other = tb.lora(base, rank=3, targets=["up"], alpha=4)
    tb.save(tmp_path / "other", other, other.params, to="peft")
    state, _ = trained(adapted, fz.Plan(zero=0), steps=1)
    with pytest.raises(fz.CheckpointError, match=r"(?s)other.*of another base.*missing: .*down"):
        tb.with_adapter(adapted, state, tmp_path / "other")
    assert float(fz.eval_step(adapted.model(squares), fz.Plan(zero=0))(state, BATCH)["loss"])
    plain = fz.init(base.model(squares), None, fz.Plan(zero=0))
    with pytest.raises(fz.CheckpointError, match="the state's params have no `"):
        tb.with_adapter(adapted, plain, tb.adapter(adapted, state))
    config = tmp_path / "other/adapter_config.json"
    plain = json.loads(config.read_text())
    config.write_text(json.dumps({**plain, "use_dora": True}))
    with pytest.raises(fz.CheckpointError, match=r"use_dora.*convert that module"):
        tb.lora(base, tmp_path / "other")
    for changed in ({"init_lora_weights": "pissa"}, {"of_a_later_peft": [1]}):
        config.write_text(json.dumps({**plain, **changed}))
        with pytest.raises(
            fz.CheckpointError, match=rf"{next(iter(changed))}.*convert that module"
        ):
            tb.lora(base, tmp_path / "other")
    config.write_text("{")
    with pytest.raises(fz.CheckpointError, match=r"adapter_config.json: expected an adapter's"):
        tb.lora(base, tmp_path / "other")
    config.write_text("[]")
    with pytest.raises(fz.CheckpointError, match="expected a JSON object, got list"):
        tb.lora(base, tmp_path / "other")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(fz.CheckpointError, match="is a file"):
        tb.save(tmp_path / "file", adapted, state, to="peft")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_may_list_targets_that_the_module_has_not(base, adapted, tmp_path):
    """As PEFT has it: one list for models of many kinds."""
    tb.save(tmp_path, adapted, adapted.params, to="peft")
    config = tmp_path / "adapter_config.json"
    kept = json.loads(config.read_text())
    config.write_text(json.dumps({**kept, "target_modules": ["up", "down", "query_key_value"]}))
    again = tb.lora(base, tmp_path)
    assert again.adapters["default"].targets == adapted.adapters["default"].targets
    config.write_text(json.dumps({**kept, "target_modules": ["query_key_value"]}))
    with pytest.raises(fz.ConversionError, match=r"\['query_key_value'\] names no layer"):
        tb.lora(base, tmp_path)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"k": (2,), "more": (2,)}, "unexpected: `more`"),
        (
            {"k": (2,), "lm_head.base_layer.weight": (2,)},
            r"unexpected: `lm_head.base_layer.weight` \(of the base: .* convert that module\)",
        ),
        ({}, "missing: `k`"),
        ({"k": (3,)}, r"shape: `k` is \(3,\), expected \(2,\)"),
    ],
)
def test_all_of_an_adapter_has_to_fit(given, problem):
    adapter = Adapter("default", {}, {"leaf": "k"}, frozenset(), (), plain=True)
    with pytest.raises(fz.CheckpointError, match=rf"in 1 place(.|\n)*\n  {problem}$"):
        fitted(adapter, {"leaf": (2,)}, {key: np.zeros(at) for key, at in given.items()}, "x")


def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4))


def in_peft(**kind):
    """A small module with one of PEFT's adapters, and its conversion."""
    config = peft.LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **kind)
    module = peft.get_peft_model(small(), config)
    return module, tb.convert(module, torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize(
    "kind",
    [
        {"target_modules": ["1"], "use_dora": True, "use_rslora": True},
        {"target_modules": ["1"], "bias": "lora_only"},
        {"target_modules": ["1"], "trainable_token_indices": {"0": [1, 3]}},
        {"target_modules": ["0"], "bias": "all"},
    ],
    ids=["dora", "bias of targets", "tokens", "all biases"],
)
def test_files_hold_what_peft_writes_beside_the_factors(kind, tmp_path):
    module, converted = in_peft(**kind)
    ids = torch.arange(5)[None]
    want = module(ids).detach().numpy()
    np.testing.assert_allclose(
        converted(ids.numpy()), want, rtol=1e-6, atol=1e-6
    )  # arrays are numpy's still
    module.save_pretrained(tmp_path / "theirs")
    tb.save(tmp_path / "ours", converted, converted.params, to="peft")
    ours, theirs = (peft.load_peft_weights(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    model = converted.model(lambda forward, batch: jnp.sum(forward(batch)))
    state = fz.init(model, None, fz.Plan(data=1))
    other = {key: value + 1 for key, value in tb.adapter(converted, state).items()}
    back = tb.with_adapter(converted, tb.with_adapter(converted, state, other), tmp_path / "theirs")
    for key, value in tb.adapter(converted, back).items():
        assert torch.equal(value, theirs[key])


def test_biases_that_an_adapter_trains_are_in_the_merged_weights():
    _, converted = in_peft(target_modules=["1"], bias="lora_only")
    params = {name: x + 1 for name, x in converted.params.items()}
    merged = tb.merge(converted, params)
    assert merged.keys() == small().state_dict().keys()
    torch.testing.assert_close(merged["1.bias"], small()[1].bias.detach() + 1)


def test_an_adapter_that_computes_otherwise_is_refused(tmp_path):
    module, converted = in_peft(target_modules=["1"])
    module.save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    kept = json.loads(config.read_text())
    for changed, said in (
        ({"lora_alpha": 12}, r"lora_alpha=12 \(here 6\)"),
        ({"use_rslora": True}, r"use_rslora=True \(here False\)"),
        ({"alpha_pattern": {"1": 2}}, r"alpha_pattern=\{'1': 2\} \(here \{\}\)"),
    ):
        config.write_text(json.dumps({**kept, **changed}))
        with pytest.raises(fz.CheckpointError, match=f"trained with {said}.*tb.lora"):
            tb.restore(tmp_path, converted, optax.sgd(0.1), fz.Plan(data=1))
    config.write_text(json.dumps(kept))
    assert tb.restore(tmp_path, converted, optax.sgd(0.1), fz.Plan(data=1))


def test_an_adapter_is_not_saved_in_part(tmp_path):
    """Neither of a kind whose names are others, nor where weights of the base are trained along."""
    ia3 = peft.IA3Config(target_modules=["1"], feedforward_modules=[])
    module = peft.get_peft_model(small(), ia3)
    converted = tb.convert(module, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(fz.CheckpointError, match=r"\(IA3\).* leave out `.*ia3_l.*load_into"):
        tb.save(tmp_path / "ia3", converted, converted.params, to="peft")
    module, _ = in_peft(target_modules=["1"])
    module.base_model.model[0].weight.requires_grad_(True)
    converted = tb.convert(module, torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(fz.CheckpointError, match=r"leave out `base_model.model.0.weight`"):
        tb.adapter(converted, converted.params)
    assert not list(tmp_path.iterdir())


def test_targets_that_name_no_linear_layer_are_refused(base, adapted):
    with pytest.raises(fz.ConversionError, match=r"\['q_proj'\] name no layer: .*'up', 'down'"):
        tb.lora(base, targets=["q_proj", "up"])
    with pytest.raises(fz.ConversionError, match=r"`blocks.0` is a Block: expected a torch.nn.Lin"):
        tb.lora(base, targets=r"blocks\.\d")
    with pytest.raises(fz.ConversionError, match=r"targets='\[up': expected a regular expression"):
        tb.lora(base, targets="[up")
    with pytest.raises(fz.ConversionError, match="alpha='8': expected a number"):
        tb.lora(base, alpha="8")
    with pytest.raises(fz.ConversionError, match="rank=0: expected a whole number"):
        tb.lora(base, rank=0)
    with pytest.raises(fz.ConversionError, match=r"has adapters \['default'\] already"):
        tb.lora(adapted)
    with pytest.raises(fz.ConversionError, match="the module has no adapters"):
        tb.merge(base, base.params)


def test_each_adapter_begins_otherwise() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    adapted = tb.lora(tb.convert(net, torch.zeros(2, 4)), rank=2, targets=["0", "2"])
    found = tb.state_dict(adapted, adapted.params)
    assert not torch.equal(found["0.lora_A.default.weight"], found["2.lora_A.default.weight"])


def test_an_adapter_goes_into_the_layers_of_a_pipeline_that_orders_them_otherwise() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    net = torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Linear(8, 3))
    adapted = tb.lora(tb.convert(net, torch.zeros(2, 8)), rank=2, targets=["up"])
    model = adapted.model(lambda forward, batch: jnp.mean(forward(batch["x"]) ** 2))
    plan = fz.Plan(pipe=2, data=1, microbatches=2, schedule="interleaved", min_shard_bytes=0)
    state = fz.init(model, None, plan)
    names = tb.adapter(adapted, state, plan)
    given = {k: np.full(x.shape, i, np.float32) for i, (k, x) in enumerate(names.items())}
    back = tb.adapter(adapted, tb.with_adapter(adapted, state, given, plan), plan)
    for name, value in given.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
