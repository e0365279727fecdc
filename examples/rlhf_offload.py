"""Reinforcement learning from rewards on one state: it generates, is scored, and is trained.

    python examples/rlhf_offload.py

A small GPT-2 of transformers learns to write even numbers, by GRPO (arXiv:2402.03300): each round
samples a group of continuations of every prompt, rewards them, and pushes the policy towards those
that are better than their group, but not far from the reference, which is the policy as it began.
Generation and training use the same state: its optimizer waits on the host while it generates, and
the reference is on the device only while it is asked. The run without offload, in the same file,
has the same losses, bit for bit. Runs on every GPU there is, or else on 8 virtual CPU devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from rich.console import Console
from rich.table import Table

import fzero as fz
import torch_bridge as tb


jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax; GPUs come first

VOCAB, NUM_PROMPTS, GROUP, START, NEW = 32, 8, 8, 4, 12  # so many tokens given, and generated
ROUNDS, UPDATES, CLIP, KL = 8, 2, 0.2, 0.02
HOST = dict.fromkeys(("params", "opt_state", "buffers", "grads"), "host")
PHASES = fz.Phases(train={}, generate={"opt_state": "host"}, idle=HOST)
PLAN, TX = fz.Plan(zero=3, clip_norm=1.0), optax.adam(3e-3)


def policy() -> tb.Converted:
    """A GPT-2 of 3 layers, on sequences as long as ours."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=2, vocab_size=VOCAB, n_positions=32, bos_token_id=0,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config)
    return tb.convert(module, torch.zeros(2, START + NEW, dtype=torch.long))


def log_likelihood(logits, ids):
    """Of each generated token, (rows, NEW)."""
    logs = jax.nn.log_softmax(logits[:, START - 1 : -1])
    return jnp.take_along_axis(logs, ids[:, START:, None], -1)[..., 0]


def grpo(forward, batch):
    """The clipped objective of PPO with advantages over the group, and a pull to the reference."""
    logs = log_likelihood(forward(batch["ids"]).logits, batch["ids"])
    ratio = jnp.exp(logs - batch["old"])
    gain = batch["advantage"][:, None]
    objective = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
    apart = batch["reference"] - logs  # of exp(x) - x - 1 the mean is the KL divergence
    terms = KL * (jnp.exp(apart) - apart - 1) - objective
    return fz.Mean(jnp.sum(terms), jnp.float32(terms.size))


def reward(new: np.ndarray) -> np.ndarray:
    """The share of even numbers in each row."""
    return np.mean(new % 2 == 0, axis=1, dtype=np.float32)


CONVERTED = policy()
MODEL = CONVERTED.model(grpo)
ASKED = CONVERTED.model(lambda out, batch: 0.0, inputs=lambda batch: (batch["ids"],),
                        outputs=lambda out: out.logits)  # fmt: skip
TRAIN, ASK = fz.train_step(MODEL, TX, PLAN), fz.predict_step(ASKED, PLAN)


def table_of(phase: str, states: dict[str, fz.TrainState]) -> tuple[Table, int]:
    """Where both models are, and the bytes that they have on the fullest device."""
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


def run(park: bool) -> tuple[list[float], list[float], int]:
    """All rounds: losses, mean rewards, and the most bytes on a device at once."""
    console, peak, losses, rewards = Console(width=80), 0, [], []
    states = {"policy": fz.init(MODEL, TX, PLAN), "reference": fz.init(MODEL, None, PLAN)}
    rng = np.random.default_rng(0)

    def enter(phase: str, show: bool, **active: dict[str, str]) -> None:
        nonlocal peak
        if park:
            for name in sorted(states, key=lambda name: name in active):  # first make room
                states[name] = fz.enter(states[name], active.get(name, PHASES.idle))
        table, total = table_of(phase, states)
        peak = max(peak, total)
        if park and show:
            console.print(table)

    def ask(name: str, ids: np.ndarray) -> np.ndarray:
        return np.asarray(log_likelihood(np.asarray(ASK(states[name], {"ids": ids})), ids))

    for number in range(ROUNDS):
        show = number == 0
        prompts = rng.integers(0, VOCAB, (NUM_PROMPTS, START)).repeat(GROUP, axis=0)
        enter("generate", show, policy=PHASES.generate)
        sampling = tb.Sampling(temperature=1.0, seed=number)
        found = tb.generate(CONVERTED, states["policy"], prompts, NEW, sampling=sampling)
        ids, scores = np.stack(found.sequences), reward(np.stack(found.tokens))
        old = ask("policy", ids)
        enter("ask the reference", show, reference=PHASES.generate)
        reference = ask("reference", ids)
        groups = scores.reshape(NUM_PROMPTS, GROUP)
        centred = groups - groups.mean(1, keepdims=True)
        advantage = (centred / (groups.std(1, keepdims=True) + 1e-4)).reshape(-1)
        batch = {"ids": ids, "advantage": advantage, "old": old, "reference": reference}
        enter("train", show, policy=PHASES.train)
        for _ in range(UPDATES):
            states["policy"], metrics = TRAIN(states["policy"], batch)
            losses.append(float(metrics["loss"]))
        rewards.append(float(scores.mean()))
        if park:
            console.print(f"round {number}: reward {rewards[-1]:.3f}")
    return losses, rewards, peak


losses, rewards, peak = run(park=True)
expected, _, whole = run(park=False)
largest = fz.placement(PLAN, MODEL, TX).bytes_per_device["total"]
print(f"bytes on the fullest device: {peak:,} when parked, {whole:,} otherwise")
assert losses == expected, "offload changed a number"
assert peak <= largest < whole, (peak, largest, whole)  # never more than the policy in training
assert rewards[-1] > rewards[0] + 0.2, rewards
print(f"rewards rise from {rewards[0]:.2f} to {rewards[-1]:.2f};"
      " the same losses, bit for bit, as without offload")  # fmt: skip
