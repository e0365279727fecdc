"""One immutable state for train and eval: seven failures of mutable engines, as seven checks.

    python examples/validate_then_fit.py

Each line computes both sides and compares them bit for bit, on 8 devices. Exit code 1 if one
differs. In brackets the bug reports about failures that cannot be written down here.
"""

import gc
import resource
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import fzero as fz
import torch_bridge as tb


jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax; GPUs come first
STAGES, TX = (0, 1, 2, 3), optax.adam(1e-2)


class Net(torch.nn.Module):
    """Small, with all that gets lost: tied, frozen, scalar and empty leaves, statistics."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.frozen = torch.nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(16, affine=False)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.gain = torch.nn.Parameter(torch.tensor(0.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 16))

    def forward(self, ids):
        """Logits for every id."""
        x = self.dropout(self.norm(self.frozen(self.embed(ids))))
        return self.gain * self.head(x) + self.empty.sum()


def batch_at(step):
    """The batch of one step, from its number alone."""
    ids = np.random.default_rng(step).integers(0, 32, (32, 2)).astype(np.int32)
    return {"ids": ids[:, 0], "next": ids[:, 1]}


def loss(forward, batch):
    """Cross-entropy as an exact mean."""
    losses = optax.softmax_cross_entropy_with_integer_labels(forward(batch["ids"]), batch["next"])
    return fz.Mean(jnp.sum(losses), jnp.float32(losses.size))


torch.manual_seed(0)
converted = tb.convert(Net(), torch.zeros(4, dtype=torch.int64))
model = converted.model(loss)


def plan_of(zero):
    """A plan that splits everything that can be split."""
    return fz.Plan(zero=zero, clip_norm=1.0, min_shard_bytes=0)


@cache
def steps_of(zero):
    """(train, accumulate, evaluate), built once and used by all checks."""
    plan = plan_of(zero)
    train, add = (make(model, TX, plan) for make in (fz.train_step, fz.accumulate_step))
    return train, add, fz.eval_step(model, plan)


def bits(tree):
    """Every leaf as bytes."""
    leaves = jax.tree.map(lambda x: jax.random.key_data(x) if x.dtype == KEY else x, tree)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(leaves)]


KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype


def run(zero, operations, state=None):
    """Carries out `T`rain, `A`ccumulate and `E`valuate; gives the final state and the trace."""
    train, add, evaluate = steps_of(zero)
    state = fz.init(model, TX, plan_of(zero), rng=0) if state is None else state
    trace, position = [], int(state.step)
    for operation in operations:
        if operation == "E":
            before = bits(state)
            evaluate(state, batch_at(1000))
            assert bits(state) == before, "evaluation changed the state"
            continue
        state, metrics = (train if operation == "T" else add)(state, batch_at(position))
        trace.append([metrics["loss"], *([metrics["grad_norm"]] if operation == "T" else [])])
        position += 1
    return state, bits(trace)


@cache
def alone(zero):
    """Two steps, each from two batches."""
    return run(zero, "ATAT")


def check_evaluation_never_interferes():
    """validate, fit, test, validate in half an accumulation, fit: training alone, on every stage"""
    for zero in STAGES:
        state, trace = run(zero, "EATEAETE")
        expected, expected_trace = alone(zero)
        if (bits(state), trace) != (bits(expected), expected_trace):
            return False
    return True


def check_nothing_wraps():
    """ten builds, placements and replans change nothing; a shared backbone is read as it is"""
    plan, (state, _) = plan_of(3), run(3, "T")
    before, structure = bits(state), jax.tree.structure(state)
    for _ in range(10):
        fz.train_step(model, TX, plan), fz.eval_step(model, plan)
        state = fz.replan(state, model, TX, plan, plan)
    same = bits(state) == before and jax.tree.structure(state) == structure

    def probe_loss(params, buffers, *rest):
        return model.loss(params["backbone"], buffers, *rest)

    probe = fz.Model(({"backbone": model.init[0], "extra": np.ones(8)}, model.init[1]), probe_loss)
    other = fz.init(probe, None, plan)
    params = {**other.params, "backbone": state.params}
    other = other.replace(params=params, buffers=state.buffers)
    found = fz.eval_step(probe, plan)(other, batch_at(0))["loss"]
    return same and bits(found) == bits(steps_of(3)[2](state, batch_at(0))["loss"])


def check_fit_twice():
    """fit(2 steps) twice is fit(4 steps), counters and data position included"""
    once, trace = run(3, "TTTT")
    half, first = run(3, "TT")
    twice, second = run(3, "TT", state=half)
    return (bits(once), trace) == (bits(twice), first + second) and int(twice.step) == 4


def check_three_models_at_once():
    """policy, reward (another optimizer) and reference, interleaved, equal their separate runs"""
    plan, sgd = plan_of(3), optax.sgd(0.1)
    train, _, evaluate = steps_of(3)
    reward_train = fz.train_step(model, sgd, plan)

    def make():
        txs = (TX, sgd, None)
        return [fz.init(model, tx, plan, rng=seed) for seed, tx in enumerate(txs)]

    policy, reward, reference = make()
    apart = []
    for step in range(3):
        policy, metrics = train(policy, batch_at(step))
        apart.append(metrics["loss"])
    for step in range(3):
        reward, metrics = reward_train(reward, batch_at(step))
        apart.append(metrics["loss"])
    apart.append(evaluate(reference, batch_at(0))["loss"])
    apart = bits([apart, policy, reward, reference])

    policy, reward, reference = make()
    losses = [[], []]
    for step in range(3):
        policy, metrics = train(policy, batch_at(step))
        losses[0].append(metrics["loss"])
        judged = evaluate(reference, batch_at(0))["loss"]
        reward, metrics = reward_train(reward, batch_at(step))
        losses[1].append(metrics["loss"])
    return apart == bits([*losses, judged, policy, reward, reference])


def resident_bytes():
    """Host memory in use (known on Linux only)."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 1


def check_memory_is_flat():
    """30 cycles of init, train, eval, drop: device memory to the byte, host memory within 2 %"""

    def cycle():
        run(3, "TE")
        return sum(array.nbytes for array in jax.live_arrays())

    # Arrays are freed without a garbage collection. The first cycles fill allocators' caches.
    on_device = [cycle() for _ in range(10)]
    gc.collect()
    before = resident_bytes()
    on_device += [cycle() for _ in range(20)]
    gc.collect()
    return len(set(on_device)) == 1 and resident_bytes() < 1.02 * before


def check_every_leaf_survives():
    """frozen, tied, scalar and empty leaves survive every stage, PyTorch and the way back"""
    start, (expected, _) = converted.params, alone(0)
    expected = bits(fz.logical(model, expected))
    for zero in STAGES:
        state, _ = alone(zero)
        params = fz.logical(model, state)
        entries = tb.state_dict(converted, state)
        module = Net()
        module.load_state_dict(entries)
        returned, _ = tb.load_state_dict(converted, module.state_dict())
        if not (
            bits(params) == expected
            and bits(returned) == bits(params)
            and bits(params["frozen.weight"]) == bits(start["frozen.weight"])
            and bits(params["embed.weight"]) != bits(start["embed.weight"])
            and bits(params["gain"]) != bits(start["gain"])
            and params["gain"].shape == ()
            and params["empty"].shape == (0, 16)
            and entries["head.weight"] is entries["embed.weight"]
            and module.head.weight is module.embed.weight
        ):
            return False
    return True


def check_both_uses_get_gradients():
    """a module used twice gets both contributions, on every stage: PyTorch's own gradient"""

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(torch.relu(self.layer(x)))

    # Small whole numbers: every order of summation is exact, so bits can be compared.
    module, rng = Twice(), np.random.default_rng(0)
    with torch.no_grad():
        for parameter in module.parameters():
            values = rng.integers(-3, 4, parameter.shape).astype(np.float32)
            parameter.copy_(torch.from_numpy(values))
    x = rng.integers(-3, 4, (16, 8)).astype(np.float32)
    module(torch.from_numpy(x)).sum().backward()
    expected = {name: p.grad.numpy().tobytes() for name, p in module.named_parameters()}
    twice = tb.convert(module, torch.zeros(2, 8))
    twice = twice.model(
        lambda forward, batch: fz.Mean(jnp.sum(forward(batch)), jnp.float32(len(batch)))
    )
    for zero in STAGES:
        plan = plan_of(zero)
        state, _ = fz.accumulate_step(twice, TX, plan)(fz.init(twice, TX, plan), x)
        if {name: np.asarray(g).tobytes() for name, g in state.grads.sums.items()} != expected:
            return False
    return True


CHECKS = (
    (check_evaluation_never_interferes, "Lightning #17523"),
    (check_nothing_wraps, "Lightning #8593"),
    (check_fit_twice, "Lightning #5007"),
    (check_three_models_at_once, "DeepSpeed #5620, Lightning #19773"),
    (check_memory_is_flat, "Lightning #2010"),
    (check_every_leaf_survives, "leaves that a wrapper loses"),
    (check_both_uses_get_gradients, "DeepSpeed #8224"),
)
failed = 0
for check, replaces in CHECKS:
    passed = check()
    failed += not passed
    print(f"{'ok  ' if passed else 'FAIL'} {check.__doc__}  (replaces: {replaces})", flush=True)
sys.exit(1 if failed else 0)
