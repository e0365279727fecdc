"""Values of Python that an nnx module's forward writes are refused, wherever they stand."""

import collections
import functools
import random
import threading
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
    __slots__ = ("__own", "n")

    def count(self):
        self.__own = getattr(self, "_Slots__own", 0) + 1


def counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


def counting(function):
    @functools.wraps(function)
    def wrapped(*args):
        wrapped.n += 1
        return function(*args)

    wrapped.n = 0
    return wrapped


class Tally:
    """A descriptor that counts who reads it."""

    def __init__(self):
        self.n = 0

    def __get__(self, owner, kind=None):
        self.n += 1
        return self.n


class Kind:
    n = 0


class Named(dict):
    n = 0


class Counted:
    """Something that a set may hold."""

    def __init__(self):
        self.n = 0


class Holds(nnx.Module):
    """A module that holds all kinds of things."""

    shared, tally = types.SimpleNamespace(n=0), Tally()

    @counting
    def counted(self):
        pass

    @counting
    def __neg__(self):
        pass

    def noted(self, notes=[]):  # noqa: B006
        notes.append(1)

    def of_all(self):
        """Objects that several hold, and kinds of their own."""
        own = self.own
        own.one, own.other = types.SimpleNamespace(n=0), types.SimpleNamespace(n=0)
        own.again, own.kind, own.bytes = own.one, Kind, bytearray(1)
        own.within, own.keys = {Counted()}, {Counted(): 0}
        own.view, own.local, own.sub = types.MappingProxyType({"a": []}), threading.local(), Named()
        own.local.n, own.sub.n = 0, 0

    def __init__(self, forward):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(WIDTH, axis_name=("replica", "data"), rngs=nnx.Rngs(0))
        self.held, self.n, self.flag = nnx.BatchStat(jnp.ones(()), tag=0), 0, True
        self.nan, self.zero = float("nan"), 0.0
        self.table, self.seen, self.named = nnx.data(None), [], {"deep": {"n": 0}}
        self.slots, self.count, self.part = Slots(), counter(), functools.partial(dict, a=[])
        self.slots.n = 0
        self.own = types.SimpleNamespace(n=0, deep=types.SimpleNamespace(n=0), table=np.ones(2))
        self.own.order = collections.OrderedDict(a=1, b=2)
        self.own.last, self.hook = jnp.zeros(()), self.own.deep.__setattr__
        self.drawn, self.legacy = np.random.default_rng(0), np.random.RandomState(0)
        self.python = random.Random(0)
        self.forward = forward
        self.of_all()

    def __call__(self, x):
        self.forward(self, x)
        return self.dense(x)


def loss(forward, batch):
    return jnp.mean(forward(batch) ** 2)


def called(module, loss=loss):
    model = fz.from_flax(module, loss)
    params, buffers = model.init
    value, *_ = model.loss(params, buffers, ROWS, jax.random.key(0), True)
    return value.total / value.count


def add(owner, name="n"):
    setattr(owner, name, getattr(owner, name) + 1)


WRITES = {
    "n: 0, then 1": lambda self, x: add(self),
    "own/n: 0, then 1": lambda self, x: add(self.own),
    "own/deep/n: 0, then 1": lambda self, x: add(self.own.deep),
    "slots/n: 0, then 1": lambda self, x: add(self.slots),
    "slots/_Slots__own: nothing, then 1": lambda self, x: self.slots.count(),
    "named/deep/n: 0, then 1": lambda self, x: self.named["deep"].update(n=1),
    r"own/order: \{'a': 1, 'b': 2\}, then \{'b': 2, 'a': 1\}": lambda self, x: (
        self.own.order.move_to_end("a")
    ),
    r"seen: \[\], then \[1\]": lambda self, x: self.seen.append(1),
    "held/tag: 0, then 1": lambda self, x: self.held.set_metadata(tag=1),
    "class Holds/shared/n: 0, then 1": lambda self, x: add(Holds.shared),
    "count/n: 0, then 1": lambda self, x: self.count(),
    r"part/keywords/a: \[\], then \[1\]": lambda self, x: self.part()["a"].append(1),
    "hook/__self__/n: 0, then 1|own/deep/n: 0, then 1": lambda self, x: self.hook("n", 1),
    "zero: 0.0, then -0.0": lambda self, x: setattr(self, "zero", -self.zero),
    "flag: True, then False": lambda self, x: setattr(self, "flag", False),
    "table: nothing, then Array": lambda self, x: setattr(self, "table", x + 1),
    r"own/last: an array \(\), then an array \(4, 4\)": lambda self, x: setattr(
        self.own, "last", x
    ),
    r"own/table: an array \(2,\)": lambda self, x: self.own.table.__iadd__(1),
    "drawn: its next random number, then another": lambda self, x: self.drawn.random(),
    "drawn: its next random number, then .*": lambda self, x: self.drawn.spawn(1),
    "legacy: its next random number": lambda self, x: self.legacy.rand(),
    "python: its next random number": lambda self, x: self.python.random(),
    "class Holds/counted/__dict__/n: 0, then 1": lambda self, x: self.counted(),
    "class Holds/__neg__/__dict__/n: 0, then 1": lambda self, x: -self,
    r"class Holds/noted/__defaults__/0: \[\], then \[1\]": lambda self, x: self.noted(),
    "class Holds/tally/n: 0, then 1": lambda self, x: self.tally,
    "class Kind/n: 0, then 1": lambda self, x: add(self.own.kind),
    "own/other: SimpleNamespace, then the same as own/one": lambda self, x: setattr(
        self.own, "other", self.own.one
    ),
    "own/again: the same as own/one, then SimpleNamespace": lambda self, x: setattr(
        self.own, "again", types.SimpleNamespace(n=0)
    ),
    r"own/bytes: b'\\x00', then b'\\x01'": lambda self, x: self.own.bytes.__setitem__(0, 1),
    "own/within/its elements/0/n: 0, then 1": lambda self, x: add(*self.own.within),
    "own/keys/its elements/0/n: 0, then 1": lambda self, x: add(*self.own.keys),
    r"own/view/a: \[\], then \[1\]": lambda self, x: self.own.view["a"].append(1),
    "own/local/n: 0, then 1": lambda self, x: add(self.own.local),
    "own/sub/its/attributes/n: 0, then 1": lambda self, x: add(self.own.sub),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_a_forward_writes_is_refused(what):
    """Whoever reads it, if anybody; and it stays as it was."""
    module = Holds(WRITES[what])
    for _ in range(2):
        with pytest.raises(fz.StateError, match=f"left behind ({what}).*would be lost: here"):
            called(module)


def writes_what_there_is(self, x):
    self.n, self.nan, self.own.n = 0, float("nan"), self.own.n
    self.named["deep"], self.own.deep.gone = {"n": 0}, 1
    del self.own.deep.gone


def test_what_is_as_it_was_is_taken_in_steps_over_several_devices():
    found = []
    for num_devices in (1, 2):
        module = Holds(writes_what_there_is)
        model = fz.from_flax(module, lambda forward, batch: jnp.mean(forward(batch) ** 2))
        plan, tx = fz.Plan(zero=3, data=num_devices, min_shard_bytes=0), optax.sgd(0.1)
        state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        for _ in range(2):
            state, metrics = step(state, ROWS)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(*found, 1e-5)


def test_a_call_that_fails_leaves_nothing():
    def fails(self, x):
        self.own.n, self.flag = 1, False
        raise ValueError("shapes")

    module = Holds(fails)
    with pytest.raises(ValueError, match="shapes"):
        called(module)
    assert module.own.n == 0


class Tells(nnx.Module):
    """Tells its caller of a term, and gives its parameters back as new ones (`remat`)."""

    def __init__(self):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    @nnx.remat
    def inner(self, x):
        return self.dense(x)

    def __call__(self, batch, tell, terms):
        terms.n += 1
        terms.scale = jnp.exp(0 * self.dense.bias[0])
        tell(batch.pop("x").shape[0])
        return self.inner(batch["y"])


def test_what_a_call_does_to_its_arguments_is_done_once():
    """Although a module whose parameters come back as new values is called once more."""

    def loss(forward, batch):
        told, terms = [], types.SimpleNamespace(n=0)
        rows = {"x": batch, "y": batch}
        out = forward(rows, told.append, terms)
        assert told == [4]
        assert list(rows) == ["y"]
        return jnp.mean(out**2) / terms.n * terms.scale

    module = Tells()
    value = jax.jit(lambda: called(module, loss))()
    np.testing.assert_allclose(value, jnp.mean(module.dense(ROWS) ** 2), 1e-6)
