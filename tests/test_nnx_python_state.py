"""Values of Python that an nnx module's forward writes: nobody's, or refused."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fzero as fz


WIDTH = 4
ROWS = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)


class Slots:
    __slots__ = ("n",)


def made(forward):
    """A module that holds all kinds of things, and has this forward."""

    class Holds(nnx.Module):
        shared = 0

        def __init__(self):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(WIDTH, axis_name=("replica", "data"), rngs=nnx.Rngs(0))
            self.held, self.n, self.flag = nnx.BatchStat(jnp.ones(()), tag=0), 0, True
            self.table, self.rows, self.pair = nnx.data(None), None, (0, [0])
            self.slots, self.seen, self.named = Slots(), [], {"deep": {"n": 0}}
            self.slots.n = 0
            self.own = types.SimpleNamespace(n=0, deep=types.SimpleNamespace(n=0), table=np.ones(2))

        __call__ = forward

    return Holds()


def loss(forward, batch):
    return jnp.mean(forward(batch) ** 2)


def add_to(path, by=1):
    """Counts at a place: attributes, items and metadata on the way to it."""
    *way, last = path.split(".")

    def add(module):
        owner = module
        for name in way:
            owner = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        if isinstance(owner, dict):
            owner[last] += by
            return owner[last]
        if isinstance(owner, nnx.Variable):
            owner.set_metadata(tag=owner.get_metadata()["tag"] + by)
            return owner.get_metadata()["tag"]
        setattr(owner, last, getattr(owner, last) + by)
        return getattr(owner, last)

    return add


PLACES = {
    "n": "n: 0, then 1", "own.n": "own/n: 0, then 1", "own.deep.n": "own/deep/n: 0, then 1",
    "slots.n": "slots/n: 0, then 1", "named.deep.n": "named/deep/n: 0, then 1",
    "held.tag": "held/tag: 0, then 1", "__class__.shared": "class Holds/shared: 0, then 1",
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_counts_are_taken_if_nobody_reads_them(place):
    """Whatever they stand in; one that matters from the third call on is refused."""
    add = add_to(place)

    def counts(self, x):
        add(self)
        return self.dense(x)

    def waits(self, x):
        return self.dense(x) * (1 if add(self) < 3 else 5)

    module = made(counts)
    model = fz.from_flax(module, loss)
    params, buffers = model.init
    value, *_ = model.loss(params, buffers, ROWS, jax.random.key(0), True)
    np.testing.assert_allclose(value.total / value.count, loss(module, ROWS), 1e-6)
    # That call of the module itself was the first one that counted.
    assert add_to(place, by=0)(module) == 1

    model = fz.from_flax(made(waits), loss)
    with pytest.raises(fz.StateError, match=rf"left behind {PLACES[place]}, and a later call read"):
        model.loss(params, buffers, ROWS, jax.random.key(0), True)


def keeps_a_table(self, x):
    if self.table is None:
        self.table = jnp.tril(jnp.ones((WIDTH, WIDTH)))
    return self.dense(x) @ self.table


def keeps_a_width(self, x):
    self.rows = self.rows or x.shape[-1]
    self.seen.append(x.shape)
    return self.dense(x) / self.rows


def counts_in_remat(self, x):
    self.n += 1
    return self.dense(x)


@pytest.mark.parametrize("forward", [keeps_a_table, keeps_a_width, nnx.remat(counts_in_remat)])
def test_what_all_calls_make_alike_is_taken(forward):
    model = fz.from_flax(made(forward), loss)
    params, buffers = model.init
    module = made(forward)
    value, _, _ = model.loss(params, buffers, ROWS, jax.random.key(0), True)
    for _ in range(2):
        np.testing.assert_allclose(value.total / value.count, loss(module, ROWS), 1e-6)


def keeps_weights(self, x):
    if self.table is None:
        self.table = 2 * self.dense.kernel[...]
    return x @ self.table


def reads_once(self, x):
    first, self.flag = self.flag, False
    return self.dense(x) * (2 if first else 1)


def writes_an_array(self, x):
    self.own.table += 1
    return self.dense(x) * float(self.own.table[0])


def reads_a_length(self, x):
    self.seen.append(0)
    return self.dense(x) if len(self.seen) % 3 else x


def chooses_by_index(self, x):
    self.n += 1
    return self.dense(x) * [1.0, 1.0, 1.0, 5.0][min(self.n, 3)]


def catches(self, x):
    self.n += 1
    try:
        return self.dense(x) * jnp.float32(self.n)
    except Exception:
        return self.dense(x)


def keeps_rows_in_an_object(self, x):
    before, self.own.last = getattr(self.own, "last", 0), x
    return self.dense(x) + before


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (keeps_weights, "table: nothing, then Array"), (reads_once, "flag: True, then False"),
        (writes_an_array, "own/table: array"), (reads_a_length, r"seen: \[\], then \[0\]"),
        (chooses_by_index, "n: 0, then 1"), (catches, "n: 0, then 1"),
        (keeps_rows_in_an_object, "own/last: nothing, then array"),
    ],
)  # fmt: skip
def test_what_a_later_call_may_read_is_refused(forward, what):
    model = fz.from_flax(made(forward), loss)
    params, buffers = model.init
    with pytest.raises(fz.StateError, match=f"left behind {what}"):
        model.loss(params, buffers, ROWS, jax.random.key(0), True)


def test_counts_are_taken_in_steps_over_several_devices():
    def counts(self, x):
        self.n += 1
        return self.norm(self.dense(x))

    found = []
    for num_devices in (1, 2):
        model = fz.from_flax(made(counts), loss)
        plan, tx = fz.Plan(zero=3, data=num_devices, min_shard_bytes=0), optax.sgd(0.1)
        state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        for _ in range(2):
            state, metrics = step(state, ROWS)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(*found, 1e-5)
