"""Values of Python that an nnx module's forward writes: alike in every call, or refused."""

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
            self.own.a = self.own.b = jnp.zeros(())

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
def test_counts_are_refused(place):
    """Whatever they stand in, and whoever reads them, if anybody; they stay as they were."""
    add = add_to(place)

    def counts(self, x):
        add(self)
        return self.dense(x)

    module = made(counts)
    model = fz.from_flax(module, loss)
    params, buffers = model.init
    with pytest.raises(fz.StateError, match=f"{PLACES[place]}, and the next call something else"):
        model.loss(params, buffers, ROWS, jax.random.key(0), True)
    # That call of the module itself was the first one that counted.
    loss(module, ROWS)
    assert add_to(place, by=0)(module) == 1


def keeps_a_table(self, x):
    if self.table is None:
        self.table = jnp.tril(jnp.ones((WIDTH, WIDTH)))
    return self.dense(x) @ self.table


def keeps_a_width(self, x):
    self.rows = self.rows or x.shape[-1]
    return self.dense(x) / self.rows


def reports_in_objects(self, x):
    self.own.deep.last, self.named["rows"] = x, [x.shape, x.sum()]
    self.own.table, self.flag = np.zeros(x.shape), False
    return self.dense(x)


@pytest.mark.parametrize(
    "forward", [keeps_a_table, keeps_a_width, nnx.remat(keeps_a_width), reports_in_objects]
)
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


def takes_turns(self, x):
    self.flag = not self.flag
    return self.dense(x)


def hands_rows_on(self, x):
    before, self.own.before = getattr(self.own, "before", 0.0), getattr(self.own, "last", 0.0)
    self.own.last = x
    return self.dense(x) + before


def hands_arrays_on(self, x):
    """Of which only the third call reads what the first one left."""
    before, self.own.a, self.own.b = self.own.a, self.own.b, x
    return self.dense(x) + before


def keeps_rows_in_an_object(self, x):
    before, self.own.last = getattr(self.own, "last", 0), x
    return self.dense(x) + before


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (keeps_weights, "table: nothing, then Array"), (reads_once, "flag: True, then False"),
        (writes_an_array, r"own/table: an array \(2,\), then an array \(2,\)"),
        (reads_a_length, r"seen: \[\], then \[0\]"),
        (takes_turns, "flag: True, then False"), (hands_rows_on, "own/before: nothing, then 0.0"),
        (hands_arrays_on, r"own/b: an array \(\), then an array \(4, 4\)"),
        (keeps_rows_in_an_object, "own/last: nothing, then an array"),
    ],
)  # fmt: skip
def test_what_a_later_call_may_read_is_refused(forward, what):
    model = fz.from_flax(made(forward), loss)
    params, buffers = model.init
    with pytest.raises(fz.StateError, match=f"left behind {what}"):
        model.loss(params, buffers, ROWS, jax.random.key(0), True)


def test_reports_are_taken_in_steps_over_several_devices():
    def reports(self, x):
        self.n, self.own.last = x.ndim, x
        return self.norm(self.dense(x))

    found = []
    for num_devices in (1, 2):
        model = fz.from_flax(made(reports), loss)
        plan, tx = fz.Plan(zero=3, data=num_devices, min_shard_bytes=0), optax.sgd(0.1)
        state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        for _ in range(2):
            state, metrics = step(state, ROWS)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(*found, 1e-5)
