"""Names that pages of prose use without making them: tiny, and as the pages call them."""

from __future__ import annotations

from functools import cache
from typing import Any


def names(kinds: str) -> dict[str, Any]:
    """The names of each kind, with states of their own: pages consume them."""
    found: dict[str, Any] = {}
    for kind in kinds.split():
        found |= {"jax_names": jax_names, "torch_names": torch_names}[kind]()
        found["state"] = found["fz"].init(found["model"], found["tx"], found["plan"], rng=0)
    return found


@cache
def jax_names() -> dict[str, Any]:
    """A chain, its optimizer, plan, state, steps and a batch."""

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import fzero as fz

    def first(rng):
        return {"w": jax.random.normal(rng, (16, 32)) / 4}

    def layer(rng):
        up, down = jax.random.split(rng)
        return {"up": jax.random.normal(up, (32, 64)) / 6,
                "down": jax.random.normal(down, (64, 32)) / 8, "norm": jnp.ones(32)}  # fmt: skip

    def block(p, x, ctx):
        return x + jnp.tanh(x * p["norm"] @ p["up"]) @ p["down"]

    def squares(x, batch):
        error = x - batch["y"]
        return fz.Mean(jnp.sum(error**2), jnp.float32(error.size))

    model = fz.Sequential(
        [fz.Layer("first", first, lambda p, batch, ctx: batch["x"] @ p["w"]),
         fz.Stack("blocks", 4, layer, block),
         fz.Layer("head", lambda rng: {"w": jnp.ones(32) / 32}, lambda p, x, ctx: x @ p["w"])],
        squares,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 16)).astype(np.float32), "y": np.ones(16, np.float32)}
    plan, tx = fz.Plan(zero=3, min_shard_bytes=0), optax.adamw(1e-2)
    another_plan, other_tx = fz.Plan(zero=1, replica=2), optax.sgd(0.1)
    train_step, eval_step = fz.train_step(model, tx, plan), fz.eval_step(model, plan)
    return dict(locals())


@cache
def torch_names() -> dict[str, Any]:
    """A Llama of transformers, its conversion, optimizer, plan, state, steps and a batch."""
    import numpy as np
    import optax
    import torch
    import transformers

    import fzero as fz
    import torch_bridge as tb

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=128, bos_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    prompts = [[1, 2, 3], [4, 5]]
    converted = tb.convert(module, torch.zeros(2, 16, dtype=torch.long))

    def loss(forward, batch):
        return tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])

    model = converted.model(loss)
    plan, tx = fz.Plan(zero=3, min_shard_bytes=0), optax.adamw(1e-3)
    ids = np.random.default_rng(0).integers(0, 64, (16, 16), dtype=np.int32)
    batch = {"ids": ids}
    train_step, eval_step = fz.train_step(model, tx, plan), fz.eval_step(model, plan)
    return dict(locals())
