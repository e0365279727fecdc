"""Random sequences of everything that can happen to a state, against a run that never moved.

After every operation the state, wherever its leaves are, equals the reference's, bit for bit.
`FZERO_NIGHTLY=1` runs 500 sequences, otherwise 5 of fewer plans.
"""

import functools
import os
import tempfile

import jax
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import tiny

import fzero as fz
from fzero.sharding.park import unpark
from fzero.tree import named_leaves


NIGHT = bool(os.environ.get("FZERO_NIGHTLY"))
SEQUENCES = 500 if NIGHT else 5
MODEL, TX = tiny.chain(2), optax.adamw(1e-2)
PLANS = {
    **{f"zero {zero}": tiny.plan(zero=zero, data=4) for zero in (range(4) if NIGHT else (0, 3))},
    "bf16": tiny.plan(zero=2, data=4, precision="bf16"),
    "pipeline": tiny.plan(zero=3, pipe=2, data=2, microbatches=2),
}
BATCHES = [tiny.tokens(16, seed=seed) for seed in range(3)]
PARTS = st.lists(
    st.sampled_from(["params", "master", "compute", "opt_state", "buffers", "grads"]), unique=True,
    min_size=1,
)  # fmt: skip
WHERE = st.sampled_from([None, "mu", "blocks", "table|w$", "nothing"])


@functools.cache
def steps(name):
    """The steps of a plan, compiled once. They donate, as users' do."""
    plan = PLANS[name]
    return (
        fz.train_step(MODEL, TX, plan),
        fz.accumulate_step(MODEL, TX, plan),
        fz.eval_step(MODEL, plan),
    )


@functools.cache
def first(name):
    """A state after one step, so that no two leaves are alike."""
    state, _ = steps(name)[0](fz.init(MODEL, TX, PLANS[name], rng=0), BATCHES[0])
    return state


def copied(state):
    def copy(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.numpy.array(leaf, copy=True)

    return jax.tree.map(copy, state)


class Machine(RuleBasedStateMachine):
    """A state that is moved about, and one that is not."""

    @initialize(name=st.sampled_from(sorted(PLANS)))
    def begin(self, name):
        self.folder = tempfile.TemporaryDirectory()
        self.name = name
        self.state, self.still = copied(first(name)), copied(first(name))
        self.saved = None

    def teardown(self):
        if hasattr(self, "folder"):
            self.state = self.saved = None
            fz.wait(f"{self.folder.name}/saved")
            self.folder.cleanup()

    def use(self, operation, needed):
        """Runs an operation; parked leaves that it needs are refused, and then brought back."""
        parked = {x.state_class for x in fz.placement(self.state).leaves if x.tier != "device"}
        if parked & set(needed):
            with pytest.raises(fz.PlacementError):
                operation(self.state)
            self.state = fz.reload(self.state)
        return operation(self.state)

    @rule(batch=st.sampled_from(BATCHES))
    def train(self, batch):
        step = steps(self.name)[0]
        self.state, metrics = self.use(
            lambda s: step(s, batch), ["params", "compute", "opt_state", "buffers", "grads"]
        )
        self.still, expected = step(self.still, batch)
        assert {k: float(v) for k, v in metrics.items()} == {
            k: float(v) for k, v in expected.items()
        }

    @rule(batch=st.sampled_from(BATCHES))
    def accumulate(self, batch):
        step = steps(self.name)[1]
        self.state, _ = self.use(lambda s: step(s, batch), [self.forward, "buffers", "grads"])
        self.still, _ = step(self.still, batch)

    @rule(batch=st.sampled_from(BATCHES))
    def evaluate(self, batch):
        step = steps(self.name)[2]
        found = self.use(lambda s: step(s, batch), [self.forward, "buffers"])
        assert float(found["loss"]) == float(step(self.still, batch)["loss"])

    @property
    def forward(self):
        return "compute" if PLANS[self.name].keeps_compute_copy else "params"

    @rule(
        include=st.none() | PARTS,
        where=WHERE,
        fraction=st.sampled_from([1.0, 0.5, 0.1]),
        to=st.sampled_from(["host", "disk"]),
        non_blocking=st.booleans(),
    )
    def offload(self, include, where, fraction, to, non_blocking):
        self.state = fz.offload(
            self.state, include, to, where=where, fraction=fraction, path=self.folder.name,
            non_blocking=non_blocking,
        )  # fmt: skip

    @rule(include=st.none() | PARTS, where=WHERE, non_blocking=st.booleans())
    def reload(self, include, where, non_blocking):
        self.state = fz.reload(self.state, include, where=where, non_blocking=non_blocking)

    @precondition(lambda self: self.still.grads is None and self.name.startswith("zero"))
    @rule(name=st.sampled_from([name for name in sorted(PLANS) if name.startswith("zero")]))
    def replan(self, name):
        old, new = PLANS[self.name], PLANS[name]
        self.state = fz.replan(self.state, MODEL, TX, old, new)  # what is parked stays there
        self.still = fz.replan(self.still, MODEL, TX, old, new)
        self.name = name

    @rule()
    def save(self):
        """From wherever the leaves are."""
        fz.save(f"{self.folder.name}/saved", self.state, PLANS[self.name], keep=1)
        self.saved = self.name, copied(self.still)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self):
        self.name, self.still = self.saved[0], copied(self.saved[1])
        self.state = fz.restore(f"{self.folder.name}/saved", MODEL, TX, PLANS[self.name])

    @rule()
    def read(self):
        found = fz.placement(self.state)
        sizes = [found.bytes_all_devices, found.host_bytes]
        assert all(size >= 0 for by in sizes for size in by.values())
        assert len(found.leaves) == len(fz.placement(self.still).leaves)

    @invariant()
    def same(self):
        if not hasattr(self, "state"):
            return
        assert jax.tree.structure(self.state) == jax.tree.structure(self.still)
        found = {path: unpark(leaf) for path, leaf in named_leaves(self.state)}
        for path, leaf in named_leaves(self.still):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                continue
            assert np.asarray(found[path]).tobytes() == np.asarray(leaf).tobytes(), path


@pytest.mark.slow
class TestMachine(Machine.TestCase):
    settings = settings(
        max_examples=SEQUENCES,
        stateful_step_count=20 if NIGHT else 14,
        deadline=None,
        # A sequence is short enough to read, and slow to shrink.
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        derandomize=not NIGHT,
        suppress_health_check=list(HealthCheck),
    )
