"""Several models in one process: none of them knows of the others.

Original reports: DeepSpeed #5620 (a second engine in one process breaks the first, ZeRO-3's hooks
and parameter coordinator are global) and Lightning #19773 (several models, several optimizers, one
strategy). Shown: with interleaved steps, different plans and overlapping devices, each model's
whole trace and final state equal those of a run of its own, with steps of its own, bit for bit; for
a GAN-like pair with two optimizers, and for policy, reference and reward.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from failure_cases import Run, bits, build, copied, differing

import fzero as fz


NOISE, POINT, ROWS, ROUNDS = 8, 16, 8, 3


def mlp(p: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["first"]) @ p["last"]


def mlp_init(inputs: int, outputs: int) -> Callable[[jax.Array], dict]:
    def init(rng: jax.Array) -> dict:
        first, last = jax.random.split(rng)
        return {"first": 0.5 * jax.random.normal(first, (inputs, 16)),
                "last": 0.5 * jax.random.normal(last, (16, outputs))}  # fmt: skip

    return init


def of_rows(values: jax.Array) -> fz.Mean:
    return fz.Mean(jnp.sum(values), jnp.float32(values.shape[0]))


def critic_run() -> Run:
    """Tells real from made points; ZeRO-3 on all 8 devices."""

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        scores = mlp(p, batch["x"])[:, 0]
        return of_rows(jax.nn.softplus(-scores * batch["sign"])), buffers, {}

    model = fz.Model(lambda rng: (mlp_init(POINT, 1)(rng), {}), loss)
    return build(model, optax.adam(1e-2), fz.Plan(zero=3, data=8, min_shard_bytes=0))


def generator_run() -> Run:
    """Makes points that the critic, which lies in its buffers, takes for real; ZeRO-1 on 4."""

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        scores = mlp(buffers["critic"], mlp(p, batch["noise"]))[:, 0]
        return of_rows(jax.nn.softplus(-scores)), buffers, {}

    def init(rng: jax.Array) -> tuple[dict, dict]:
        return mlp_init(NOISE, POINT)(rng), {"critic": mlp_init(POINT, 1)(rng)}

    plan = fz.Plan(zero=1, data=4, min_shard_bytes=0)
    return build(fz.Model(init, loss), optax.sgd(0.1, momentum=0.9), plan)


def host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


def train(run: Run, state: fz.TrainState, batch: Any, trace: list[Any]) -> fz.TrainState:
    state, metrics = run.train(state, batch)
    trace += [bits(metrics), bits(run.evaluate(state, batch))]
    return state


def with_critic(state: fz.TrainState, critic: Any) -> fz.TrainState:
    """The generator's state with other critic weights in its buffers (in memory of their own)."""
    place = jax.tree.map(lambda old, new: jax.device_put(np.array(new), old.sharding),
                         state.buffers["critic"], critic)  # fmt: skip
    return state.replace(buffers={"critic": place})


def points(step: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(step)
    return (draw.standard_normal((ROWS, NOISE)).astype(np.float32),
            draw.standard_normal((ROWS, POINT)).astype(np.float32) + 1)  # fmt: skip


def test_gan_with_two_optimizers() -> None:
    generator, critic = generator_run(), critic_run()
    g, c = generator.start(), critic.start()
    g_trace, c_trace = [], []
    g_inputs, c_inputs = [], []
    for step in range(ROUNDS):
        noise, real = points(step)
        made = np.asarray(mlp(host(g.params), jnp.asarray(noise)))
        signs = np.repeat(np.float32([1, -1]), ROWS)
        c_inputs.append({"x": np.concatenate([real, made]), "sign": signs})
        c = train(critic, c, c_inputs[-1], c_trace)
        g_inputs.append(({"noise": noise}, host(fz.logical(critic.model, c))))
        g = train(generator, with_critic(g, g_inputs[-1][1]), g_inputs[-1][0], g_trace)

    # Each on its own, with what the other one gave it on record.
    alone, trace = generator_run(), []
    g_alone = alone.start()
    for batch, weights in g_inputs:
        g_alone = train(alone, with_critic(g_alone, weights), batch, trace)
    assert trace == g_trace
    assert differing(bits(g), bits(g_alone)) == []
    alone, trace = critic_run(), []
    c_alone = alone.start()
    for batch in c_inputs:
        c_alone = train(alone, c_alone, batch, trace)
    assert trace == c_trace
    assert differing(bits(c), bits(c_alone)) == []
    assert generator.train.num_traces == critic.train.num_traces == 1
    # They did talk to each other: another critic gives another generator.
    other, trace = generator.start(), []
    for batch, _ in g_inputs:
        other = train(generator, with_critic(other, g_inputs[0][1]), batch, trace)
    assert trace != g_trace


def language_model() -> fz.Model:
    """Policy and reference: log probabilities of actions, weighted per row."""

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        picked = jax.nn.log_softmax(mlp(p, batch["x"]))[jnp.arange(batch["x"].shape[0]), batch["a"]]
        return of_rows(-picked * batch["weight"]), buffers, {"nll": of_rows(-picked)}

    return fz.Model(lambda rng: (mlp_init(POINT, 4)(rng), {}), loss)


def reward_model() -> fz.Model:
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        score = mlp(p, batch["x"])[:, 0]
        return of_rows(jnp.square(score - batch["a"])), buffers, {"score": of_rows(score)}

    return fz.Model(lambda rng: (mlp_init(POINT, 1)(rng), {}), loss)


class Trio:
    """Policy (ZeRO-3 on 8 devices), reference (no optimizer, 4 devices), reward (ZeRO-2 on 2)."""

    def __init__(self) -> None:
        self.policy = build(language_model(), optax.adamw(1e-2), fz.Plan(data=8, min_shard_bytes=0))
        plan, devices = fz.Plan(zero=1, data=4), jax.devices()[4:]
        model = language_model()
        self.reference = fz.init(model, None, plan, rng=7, devices=devices)
        self.ask = fz.eval_step(model, plan, devices=devices)
        reward_plan = fz.Plan(zero=2, data=2, min_shard_bytes=0)
        self.reward = build(reward_model(), optax.sgd(0.05), reward_plan)


def actions(step: int) -> dict[str, np.ndarray]:
    draw = np.random.RandomState(100 + step)
    return {"x": draw.standard_normal((ROWS, POINT)).astype(np.float32),
            "a": draw.randint(0, 4, ROWS).astype(np.int32),
            "weight": np.ones(ROWS, np.float32)}  # fmt: skip


def test_policy_reference_and_reward() -> None:
    trio = Trio()
    policy, reward = trio.policy.start(), trio.reward.start()
    untouched = bits(trio.reference)
    traces: dict[str, list[Any]] = {"policy": [], "reference": [], "reward": []}
    policy_batches = []
    for step in range(ROUNDS):
        batch = actions(step)
        asked = trio.ask(trio.reference, batch)
        traces["reference"].append(bits(asked))
        reward = train(trio.reward, reward, batch, traces["reward"])
        score = trio.reward.evaluate(reward, batch)["score"]
        weight = np.float32(score) - np.float32(asked["nll"])
        policy_batches.append({**batch, "weight": np.full(ROWS, weight)})
        policy = train(trio.policy, policy, policy_batches[-1], traces["policy"])
    assert bits(trio.reference) == untouched

    # One after the other, each with steps of its own.
    alone = Trio()
    trace = [bits(alone.ask(alone.reference, actions(step))) for step in range(ROUNDS)]
    assert trace == traces["reference"]
    state, trace = alone.reward.start(), []
    for step in range(ROUNDS):
        state = train(alone.reward, state, actions(step), trace)
    assert trace == traces["reward"]
    assert differing(bits(state), bits(reward)) == []
    state, trace = alone.policy.start(), []
    for batch in policy_batches:
        state = train(alone.policy, state, batch, trace)
    assert trace == traces["policy"]
    assert differing(bits(state), bits(policy)) == []


def test_policy_and_reference_start_equal_and_part() -> None:
    trio = Trio()
    weights = bits(fz.logical(trio.policy.model, trio.policy.first))
    assert bits(trio.reference.params) == weights
    policy = train(trio.policy, copied(trio.policy.first), actions(0), [])
    assert differing(bits(fz.logical(trio.policy.model, policy)), weights)
    assert bits(trio.reference.params) == weights
