"""Logits that only a loss reads are never there: the same numbers, less memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fzero as fz
import torch_bridge as tb


V = 512


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Ordinary promotion instead, which optax's Adam needs."""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.up(x))


class Decoder(torch.nn.Module):
    """A language model's shape: tied embeddings, equal blocks, and capped logits if it is told."""

    def __init__(self, cap=None, bias=False):
        super().__init__()
        self.cap = cap
        self.embed = torch.nn.Embedding(V, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(8, V, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return {"logits": logits, "hidden": x}


IDS = np.random.default_rng(0).integers(0, V, (8, 128), dtype=np.int32)


def fused(forward, batch):
    return tb.causal_lm_loss(forward(batch["ids"])["logits"], batch["ids"])


def whole(forward, batch):
    """The logits are read twice: they have to be there."""
    logits = forward(batch["ids"])["logits"]
    mean = tb.causal_lm_loss(logits, batch["ids"])
    return mean, {"largest": jax.lax.stop_gradient(jnp.max(logits))}


def converted(**options):
    torch.manual_seed(0)
    return tb.convert(Decoder(**options), torch.zeros(2, 4, dtype=torch.long))


@pytest.fixture(scope="module")
def plain():
    return converted()


def stepped(made, loss, plan):
    model, tx = made.model(loss), optax.sgd(0.1)
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    evaluated = float(fz.eval_step(model, plan)(state, {"ids": IDS})["loss"])
    memory = None
    if plan.pipe == 1:
        lowered = step.lower(fz.abstract_state(model, tx, plan), {"ids": IDS})
        memory = lowered.compile().memory_analysis().temp_size_in_bytes
    state, metrics = step(state, {"ids": IDS})
    return float(metrics["loss"]), evaluated, tb.state_dict(made, state, plan), memory


def same(got, want):
    assert got[:2] == pytest.approx(want[:2], rel=1e-6)
    assert got[0] == pytest.approx(got[1], rel=1e-6)
    for name, value in want[2].items():
        torch.testing.assert_close(got[2][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(fz.Plan(zero=0, data=1), marks=pytest.mark.nightly),
        fz.Plan(zero=3, data=4, min_shard_bytes=0),
        pytest.param(fz.Plan(zero=1, pipe=2, data=2, microbatches=2), marks=pytest.mark.nightly),
        pytest.param(fz.Plan(zero=3, data=2, remat="layer"), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.filterwarnings("ignore:plan")
def test_the_numbers_are_those_of_whole_logits_and_the_logits_are_not_there(
    plain, plan, monkeypatch
):
    monkeypatch.setattr("fzero.losses.CHUNK_BYTES", 1)  # 128 tokens, the least
    got, want = stepped(plain, fused, plan), stepped(plain, whole, plan)
    same(got, want)
    if got[3] is not None and plan.data == 1:
        assert want[3] - got[3] > IDS.size * V * 4  # float32 logits


@pytest.mark.parametrize("options", [{"cap": 2.0}, {"bias": True}])
@pytest.mark.nightly
def test_capped_logits_and_heads_with_a_bias(options):
    made, plan = converted(**options), fz.Plan(zero=0, data=2)
    same(stepped(made, fused, plan), stepped(made, whole, plan))


class Odd(Decoder):
    """Logits that are squeezed by one number and stretched by another, only stretched (as Cohere's
    are), stretched after a cap, read once more, or a product with one vector."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))
        for block in self.blocks:  # an evaluation draws nothing
            block.up = torch.nn.Sequential(block.up, torch.nn.Dropout(0.5))

    def forward(self, ids):
        logits = super().forward(ids)["logits"]
        if self.how == "summed":
            products = super().forward(ids)["hidden"][..., None, :] * self.embed.weight
            return {"logits": torch.nn.functional.linear(products, self.scale)}
        if self.how == "bent":
            return {"logits": torch.tanh(logits / 2.0) * 3.0}
        if self.how == "stretched":
            return {"logits": logits * 3.0}
        if self.how == "capped and stretched":
            return {"logits": torch.tanh(logits / 2.0) * 2.0 * 3.0}
        return {"logits": logits, "largest": logits.amax(-1)}


def test_the_label_to_leave_out_is_left_out_at_the_end_too():
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[1, 0, 3, 0, 2], [4, 5, 0, 6, 1]])
    found = tb.causal_lm_loss(logits.numpy(), labels.numpy(), ignore_index=0)
    given = logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1)
    want = torch.nn.functional.cross_entropy(*given, ignore_index=0, reduction="sum")
    assert float(found.total) == pytest.approx(want.item(), rel=1e-5)
    assert float(found.count) == 5


@pytest.mark.parametrize("how", ["bent", "stretched", "capped and stretched", "read", "summed"])
def test_what_no_cap_describes_and_what_others_read_is_computed(how):
    torch.manual_seed(0)
    module, plan, found = Odd(), fz.Plan(data=1), []
    module.how = how
    made = tb.convert(module, torch.zeros(2, 4, dtype=torch.long))
    for computed in (False, True):

        def loss(forward, batch, computed=computed):
            out = forward(batch["ids"])
            logits = out["logits"] + 0 if computed else out["logits"]
            largest = jax.lax.stop_gradient(jnp.mean(out.get("largest", 0.0)))
            return tb.causal_lm_loss(logits, batch["ids"]), {"largest": largest}

        model = made.model(loss)
        found.append(fz.eval_step(model, plan)(fz.init(model, None, plan), {"ids": IDS[:2]}))
    for name, value in found[1].items():
        assert float(found[0][name]) == pytest.approx(float(value), rel=1e-6)
    ids = torch.from_numpy(IDS[:2]).long()
    logits = module.eval()(ids)["logits"][:, :-1].reshape(-1, V)
    want = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1)).item()
    assert float(found[0]["loss"]) == pytest.approx(want, rel=1e-5)


def test_frozen_heads_and_other_losses(plain):
    """Smoothing and z-loss; and the loss of a module that is called as one function."""

    def smooth(forward, batch):
        ids = batch["ids"]
        logits = forward(ids)["logits"]
        return tb.causal_lm_loss(logits, ids, label_smoothing=0.1, z_loss=1e-3)

    state = fz.init(plain.model(smooth), None, fz.Plan(data=1))
    got = fz.eval_step(plain.model(smooth), fz.Plan(data=1))(state, {"ids": IDS})["loss"]
    function = plain.model(smooth, chain=False)
    state = fz.init(function, None, fz.Plan(data=1))
    want = fz.eval_step(function, fz.Plan(data=1))(state, {"ids": IDS})["loss"]
    assert float(got) == pytest.approx(float(want), rel=1e-6)


def test_a_loss_within_a_loop_reads_logits_as_ever(plain):
    def looped(forward, batch):
        logits = forward(batch["ids"])["logits"]
        means = jax.lax.map(
            lambda row: tb.causal_lm_loss(logits[row], batch["ids"][row]).total,
            jnp.arange(batch["ids"].shape[0]),
        )
        mapped = jax.vmap(lambda ids: tb.causal_lm_loss(logits, ids).total)(batch["ids"][None])
        return (jnp.sum(means) + mapped[0]) / 2 / (batch["ids"].size - batch["ids"].shape[0])

    plan = fz.Plan(zero=0, data=1)
    got, want = stepped(plain, looped, plan), stepped(plain, whole, plan)
    same(got, want)


@pytest.mark.parametrize("plan", [fz.Plan(zero=3, data=4), fz.Plan(pipe=2, data=2, microbatches=2)])
def test_the_loss_runs_once_in_a_trace_and_anew_in_the_next(plan):
    """And once more, where devices share rows out, for whether it is a sum over them."""
    runs, factor = [], 1.0

    def loss(forward, batch):
        runs.append(len(batch["ids"]))
        found = fused(forward, batch)
        return fz.Mean(found.total * factor, found.count)

    model = tb.convert(Decoder(), torch.from_numpy(IDS[:2]).long()).model(loss)
    tx, devices = optax.sgd(0.1), jax.devices()[:4]
    state = fz.init(model, tx, plan, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices, donate=False)
    first = step(state, {"ids": IDS})[1]["loss"]
    step(state, {"ids": IDS})
    assert runs == [199, 2]
    factor = 2.0  # another step reads what it is now, in a trace of its own
    again = fz.train_step(model, tx, plan, devices=devices)(state, {"ids": IDS})[1]["loss"]
    assert (runs[2:], float(again)) == ([2], 2 * float(first))
