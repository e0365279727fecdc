"""RLHF's four models take turns on the device: whoever waits is parked on the host.

    python examples/rlhf_offload.py

An actor and a critic are trained; a reference model and a reward model are only asked. Each round
generates, scores, computes values, and trains both. A model that has no part in a phase leaves the
device; every phase prints where all four are. The run without offload, in the same file, has the
same losses, bit for bit. Runs on every GPU there is, or else on 8 virtual CPU devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import fzero as fz


jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax; GPUs come first

VOCAB, WIDTH, LAYERS, LENGTH, ROWS, ROUNDS = 64, 128, 4, 16, 16, 3
HOST = dict.fromkeys(("params", "opt_state", "buffers", "grads"), "host")
# Where a model is, by what it does: the same value for all phases of all models.
PHASES = fz.Phases(train={}, generate={"opt_state": "host"}, idle=HOST)
PLAN, TX = fz.Plan(zero=3), optax.adamw(1e-3)


def network(params, ids):
    """Numbers per token from a small residual network: logits, or values."""
    x = params["table"][ids]
    for p in params["blocks"]:
        before = jnp.cumsum(x, axis=1) / jnp.arange(1, LENGTH + 1)[:, None]  # causal
        x = x + jax.nn.gelu((x + before) @ p["up"]) @ p["down"]
    return x @ params["out"]


def model_of(width_out, loss):
    """A network with `width_out` numbers per token, trained by a loss of those and the batch."""

    def init(rng):
        table, out, *blocks = jax.random.split(rng, 2 + LAYERS)
        return {
            "table": jax.random.normal(table, (VOCAB, WIDTH)) * 0.1,
            "blocks": [
                {
                    "up": jax.random.normal(key, (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
                    "down": jax.random.normal(key, (4 * WIDTH, WIDTH)) / WIDTH**0.5 / 4,
                }
                for key in blocks
            ],
            "out": jax.random.normal(out, (WIDTH, width_out)) * 0.05,
        }, {}

    def of_batch(params, buffers, batch, rng, train):
        return loss(network(params, batch["ids"]), batch), buffers, {}

    return fz.Model(init, of_batch)


def log_likelihood(logits, ids):
    """Of each next token, (rows, length - 1)."""
    logs = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(logs, ids[:, 1:, None], -1)[..., 0]


def policy_loss(logits, batch):
    """Policy gradient with a pull towards the reference model."""
    logs = log_likelihood(logits, batch["ids"])
    terms = -batch["advantage"] * logs + 0.1 * (logs - batch["reference"])
    return fz.Mean(jnp.sum(terms), jnp.float32(terms.size))


def value_loss(values, batch):
    """Squared error against the reward of the whole sequence."""
    error = values[:, :-1, 0] - batch["reward"][:, None]
    return fz.Mean(jnp.sum(error**2), jnp.float32(error.size))


ACTOR, CRITIC = model_of(VOCAB, policy_loss), model_of(1, value_loss)
MODELS = {"actor": ACTOR, "critic": CRITIC, "reference": ACTOR, "reward": CRITIC}
TRAINED = ("actor", "critic")


ask = jax.jit(network)


def table_of(phase: str, states: dict[str, fz.TrainState]) -> tuple[Table, int]:
    """Where every model is, and the bytes that all have on the fullest device."""
    table = Table(title=phase)
    for column in ("model", "device bytes", "host bytes"):
        table.add_column(column, justify="right" if "bytes" in column else "left")
    total = 0
    for name, state in states.items():
        where = fz.placement(state)
        total += where.bytes_per_device["total"]
        sizes = (where.bytes_per_device["total"], where.host_bytes_per_device["total"])
        table.add_row(name, *(f"{size:,}" for size in sizes))
    return table, total


def run(park: bool) -> tuple[list[float], int]:
    """All rounds; losses, and the most bytes of all models on a device at once."""
    console, peak, losses = Console(width=80), 0, []
    states = {
        name: fz.init(model, TX if name in TRAINED else None, PLAN, rng=number)
        for number, (name, model) in enumerate(MODELS.items())
    }
    steps = {name: fz.train_step(MODELS[name], TX, PLAN) for name in TRAINED}
    rng = np.random.default_rng(0)

    def enter(phase: str, **active: dict[str, str]) -> None:
        nonlocal peak, states
        if park:
            for name in sorted(states, key=lambda name: name in active):  # first make room
                states[name] = fz.enter(states[name], active.get(name, PHASES.idle))
        table, total = table_of(phase, states)
        peak = max(peak, total)
        if park:
            console.print(table)

    for round_ in range(ROUNDS):
        ids = np.zeros((ROWS, LENGTH), np.int32)
        ids[:, 0] = rng.integers(0, VOCAB, ROWS)
        enter(f"round {round_}: generate", actor=PHASES.generate)
        for at in range(1, LENGTH):
            logits = np.asarray(ask(states["actor"].params, ids))[:, at - 1]
            ids[:, at] = np.argmax(logits + rng.gumbel(size=logits.shape), -1)
        enter("score", reference=PHASES.generate, reward=PHASES.generate)
        reward = np.tanh(np.asarray(ask(states["reward"].params, ids))[:, -1, 0])
        asked = ask(states["reference"].params, ids)
        reference = np.asarray(log_likelihood(asked, ids))
        enter("values", critic=PHASES.generate)
        values = np.asarray(ask(states["critic"].params, ids))[:, :-1, 0]
        batch = {"ids": ids, "reward": reward, "reference": reference,
                 "advantage": reward[:, None] - values}  # fmt: skip
        for name in TRAINED:
            enter(f"train {name}", **{name: PHASES.train})
            states[name], metrics = steps[name](states[name], batch)
            losses.append(float(metrics["loss"]))
    return losses, peak


losses, peak = run(park=True)
expected, whole = run(park=False)
largest = fz.placement(PLAN, ACTOR, TX).bytes_per_device["total"]
print("losses", " ".join(f"{loss:.6f}" for loss in losses))
print(f"bytes on the fullest device: {peak:,} when parked, {whole:,} otherwise")
assert losses == expected, "offload changed a number"
# The largest phase trains the actor: one model with its optimizer state, and nothing else.
assert peak <= largest < whole / 2, (peak, largest, whole)
print("the same losses, bit for bit, as without offload")
