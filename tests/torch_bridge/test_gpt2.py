"""A Hugging Face GPT-2: in, trained and evaluated, and out again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from bridge_cases import make_gpt2
from parity import FORWARD_RTOL, GRADIENT_RTOL, relative_error
from transformers import GPT2LMHeadModel

import fzero as fz
import torch_bridge as tb


IDS = torch.randint(0, 61, (3, 12), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def masked(gpt2: GPT2LMHeadModel) -> tb.Converted:
    example = torch.zeros(2, 8, dtype=torch.long)
    mask = torch.ones_like(example)
    return tb.convert(gpt2, input_ids=example, attention_mask=mask, train=False)


@pytest.mark.parametrize("train", [True, False])
def test_logits_agree_with_torch_at_other_sizes(
    gpt2: GPT2LMHeadModel, gpt2_converted: tb.Converted, train: bool
) -> None:
    run = jax.jit(
        lambda ids: (
            gpt2_converted.apply(
                gpt2_converted.params, {}, ids, train=train, rng=jax.random.key(0)
            ).output
        )
    )
    gpt2.train(train)
    for ids in (IDS, IDS[:, :5].repeat(3, 1)):
        out = run(ids.numpy())
        with torch.no_grad():
            want = gpt2(ids).logits
        assert isinstance(out, tb.Output)
        assert out["logits"] is out.logits is out[0]
        assert relative_error(out.logits, want.numpy()) <= FORWARD_RTOL


def test_logits_agree_with_torch_under_padding(gpt2: GPT2LMHeadModel, masked: tb.Converted) -> None:
    mask = torch.ones_like(IDS)
    mask[0, 7:] = 0
    mask[1, :3] = 0  # padded on the left: the first rows may attend to nothing
    run = jax.jit(
        lambda mask: masked.apply(masked.params, {}, input_ids=IDS.numpy(), attention_mask=mask)[0]
    )
    out = run(mask.numpy())
    gpt2.eval()
    want = gpt2(IDS, attention_mask=mask).logits.detach().numpy()
    assert relative_error(out.logits, want) <= FORWARD_RTOL
    unmasked = run(np.ones_like(mask.numpy()))
    assert relative_error(unmasked.logits, want) > 1e-3


def test_loss_and_gradients_agree_with_torch(
    gpt2: GPT2LMHeadModel, gpt2_converted: tb.Converted
) -> None:
    model = gpt2_converted.model(lambda forward, ids: tb.causal_lm_loss(forward(ids).logits, ids))
    params, buffers = model.init

    def mean(params: Any) -> Any:
        loss, _, _ = model.loss(params, buffers, IDS.numpy(), None, True)
        return loss.total / loss.count

    value, grads = jax.jit(jax.value_and_grad(mean))(params)
    gpt2.train()
    gpt2.zero_grad()
    want = gpt2(IDS, labels=IDS).loss
    want.backward()
    assert abs(float(value) - want.item()) <= 1e-5 * want.item()
    assert "lm_head.weight" not in grads
    for name, parameter in gpt2.named_parameters():
        assert relative_error(grads[name], parameter.grad.numpy()) <= GRADIENT_RTOL, name


def test_dropout_depends_on_the_key_only(gpt2_converted: tb.Converted) -> None:
    module = make_gpt2(0.1)
    converted = tb.convert(module, torch.zeros(2, 8, dtype=torch.long))
    run = jax.jit(
        lambda key: converted.apply(converted.params, {}, IDS.numpy(), rng=key, train=True)
    )
    first, again, other = (run(jax.random.key(k)).output.logits for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert relative_error(first, other) > 1e-2
    plain = gpt2_converted.apply(converted.params, {}, IDS.numpy()).output.logits
    evaluated = converted.apply(converted.params, {}, IDS.numpy()).output.logits
    assert relative_error(evaluated, plain) <= FORWARD_RTOL


def test_tied_weights_are_one_leaf_and_tied_again(
    gpt2: GPT2LMHeadModel, gpt2_converted: tb.Converted
) -> None:
    assert "lm_head.weight" not in gpt2_converted.params
    assert set(gpt2_converted.params) == set(dict(gpt2.named_parameters()))
    back = tb.state_dict(gpt2_converted, gpt2_converted.params)
    assert list(back) == list(gpt2.state_dict())
    assert back["lm_head.weight"] is back["transformer.wte.weight"]
    for name, tensor in gpt2.state_dict().items():
        assert torch.equal(back[name], tensor), name


def test_transformers_loads_what_was_saved(
    gpt2: GPT2LMHeadModel, gpt2_converted: tb.Converted, tmp_path: Path
) -> None:
    changed = {k: v + 0.01 for k, v in gpt2_converted.params.items()}
    state = SimpleNamespace(params=changed, buffers={})
    gpt2.config.save_pretrained(tmp_path)
    tb.save(tmp_path / "model.safetensors", gpt2_converted, state)
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, tensor in loaded.state_dict().items():
        leaf = "transformer.wte.weight" if name == "lm_head.weight" else name
        np.testing.assert_array_equal(tensor.numpy(), changed[leaf], err_msg=name)
    out, _ = jax.jit(lambda: gpt2_converted.apply(changed, {}, IDS.numpy()))()
    loaded.eval()
    assert relative_error(out.logits, loaded(IDS).logits.detach().numpy()) <= FORWARD_RTOL
    params, _ = tb.load_state_dict(gpt2_converted, tb.load(tmp_path / "model.safetensors"))
    for name, value in params.items():
        np.testing.assert_array_equal(value, changed[name])


def test_transformers_and_a_sharded_state_exchange_shards(
    gpt2: GPT2LMHeadModel, gpt2_converted: tb.Converted, tmp_path: Path
) -> None:
    gpt2.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    state = tb.restore(
        tmp_path / "theirs", gpt2_converted, None, fz.Plan(zero=3, min_shard_bytes=0)
    )
    back = tb.state_dict(gpt2_converted, state)
    assert all(torch.equal(back[n], want) for n, want in gpt2.state_dict().items())
    gpt2.config.save_pretrained(tmp_path / "ours")
    tb.save(tmp_path / "ours", gpt2_converted, state, max_shard_size="20KB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = type(gpt2).from_pretrained(tmp_path / "ours")
    assert all(torch.equal(v, gpt2.state_dict()[n]) for n, v in again.state_dict().items())


def test_ignored_labels_do_not_count() -> None:
    logits = jax.random.normal(jax.random.key(0), (2, 5, 7))
    labels = jnp.array([[1, 2, -100, 3, 4], [0, 0, 0, -100, -100]])
    loss = tb.causal_lm_loss(logits, labels)
    shifted = torch.nn.functional.cross_entropy(
        torch.from_numpy(np.array(logits))[:, :-1].reshape(-1, 7),
        torch.from_numpy(np.array(labels)).long()[:, 1:].reshape(-1),
        reduction="sum",
    )
    assert abs(float(loss.total) - float(shifted)) < 1e-5
    assert float(loss.count) == 5.0
    same = tb.causal_lm_loss(logits, jnp.roll(labels, -1, 1).at[:, -1].set(-100), shift=False)
    assert float(same.total) == float(loss.total)
    assert loss.total.dtype == jnp.float32
    with pytest.raises(ValueError, match="need labels of shape"):
        tb.causal_lm_loss(logits, labels[:, 1:])


def test_bfloat16_parameters_run_and_keep_their_bits(gpt2_converted: tb.Converted) -> None:
    low = {k: jnp.asarray(v, jnp.bfloat16) for k, v in gpt2_converted.params.items()}
    run = jax.jit(lambda params: gpt2_converted.apply(params, {}, IDS.numpy())[0])
    out, exact = run(low), run(gpt2_converted.params)
    assert out.logits.dtype == jnp.bfloat16
    assert relative_error(out.logits.astype(jnp.float32), exact.logits) < 3e-2
