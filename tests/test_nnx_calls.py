"""What an nnx module's forward writes: kept, or refused by name, never lost."""

import functools
import pathlib
import types
import warnings

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fzero as fz
from tests.support.one_call import called_once


WIDTH = 4
ROWS = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_bias=False, use_scale=False, rngs=rngs)
        self.calls, self.seen = 0, []

    def __call__(self, x):
        return self.norm(self.dense(x))


class Clips(Block):
    def __call__(self, x):
        self.dense.kernel[...] = jnp.clip(self.dense.kernel[...], -0.1, 0.1)
        return super().__call__(x)


class ClipsInRemat(Block):
    @nnx.remat
    def __call__(self, x):
        self.dense.kernel[...] = jnp.clip(self.dense.kernel[...], -0.1, 0.1)
        return self.norm(self.dense(x))


class Averages(Block):
    def __call__(self, x):
        nnx.update(self.dense, jax.tree.map(lambda w: w * 0.9, nnx.state(self.dense)))
        return super().__call__(x)


class Replaces(Block):
    def __call__(self, x):
        self.dense.kernel = nnx.Param(self.dense.kernel[...] * 2)
        return super().__call__(x)


class Counts(Block):
    def __call__(self, x):
        self.calls += 1
        return super().__call__(x) / self.calls


class CountsInAList(Block):
    def __call__(self, x):
        self.seen.append(1)
        return super().__call__(x) / len(self.seen)


class CountsInAnObject(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.own = types.SimpleNamespace(calls=0)

    def __call__(self, x):
        self.own.calls += 1
        return super().__call__(x) / self.own.calls


class Swaps(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.other = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = super().__call__(x)
        self.dense, self.other = self.other, self.dense
        return x


class SwapsBuffers(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.a, self.b = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.ones(()))

    def __call__(self, x):
        self.a, self.b = self.b, self.a
        return super().__call__(x) * self.a[...]


class Grows(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.rngs = rngs

    def __call__(self, x):
        if not hasattr(self, "more"):
            self.more = nnx.Linear(WIDTH, WIDTH, rngs=self.rngs)
        return super().__call__(self.more(x))


class KeepsATable(Block):
    def __call__(self, x):
        if not hasattr(self, "table"):
            self.table = nnx.Variable(x.sum(0))
        return super().__call__(x) + self.table[...]


class Remat(Block):
    __call__ = nnx.remat(Block.__call__)


class Jitted(Block):
    __call__ = nnx.jit(Block.__call__)


class Reports(Block):
    """Writes what is not kept."""

    def __call__(self, x):
        self.seen_by = nnx.Intermediate(x)
        return super().__call__(x)


class Alias(Block):
    """Holds its parts at another path after a call."""

    def __call__(self, x):
        self.a, self.b = self.norm, self.dense
        return self.a(self.b(x))


class SetsAMode(Block):
    def __call__(self, x):
        self.norm.eval()
        return super().__call__(x)


class ReportsInPlace(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.rows = nnx.Intermediate(jnp.zeros((3, WIDTH)))

    def __call__(self, x):
        self.rows[...] = x
        return super().__call__(x)


class Mode:
    training = True


class OwnMode(Block):
    """Keeps its mode where both modes read it."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.mode = Mode()

    def eval(self, **kwargs):
        super().eval(**kwargs)
        self.mode.training = False


class Merges(Block):
    """Writes a parameter for evaluation."""

    def eval(self, **kwargs):
        super().eval(**kwargs)
        self.dense.kernel[...] = self.dense.kernel[...] * 2


class Drops(Block):
    def eval(self, **kwargs):
        super().eval(**kwargs)
        del self.dense


@flax.struct.dataclass
class Tagged:
    value: jax.Array
    tag: str = flax.struct.field(pytree_node=False, default="")


class WritesATag(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.held = nnx.data(Tagged(jnp.ones(())))

    def __call__(self, x):
        self.held = self.held.replace(tag=self.held.tag + "a")
        return super().__call__(x)


class Config:
    """Computes what is read, once."""

    def __init__(self):
        self.path = pathlib.Path("a")

    @functools.cached_property
    def scale(self):
        return jnp.ones(()) * len(str(self.path))


class Caches(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.config = Config()

    @functools.cached_property
    def table(self):
        return self.dense.kernel.sum() * 0 + 1

    def __call__(self, x):
        return super().__call__(x) * self.config.scale * self.table


class Stacked(nnx.Module):
    """Layers in a loop, their parameters along the second dim."""

    def __init__(self, rngs, writes=False):
        axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
        make = nnx.vmap(Block, in_axes=0, out_axes=axes)
        self.layers, self.writes = nnx.split_rngs(splits=2)(make)(rngs), writes

        def layer(layer, x):
            if writes:
                layer.dense.bias[...] = layer.dense.bias[...] + 1
            return layer(x)

        self.run = nnx.scan(layer, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)

    def __call__(self, x):
        return self.run(self.layers, x)


def normed(kind):
    def make(rngs):
        return kind(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)

    return make


def loss(forward, batch):
    return jnp.mean(forward(batch) ** 2)


def called(make, loss=loss, train=True):
    return called_once(fz.from_flax(make(nnx.Rngs(0)), loss), ROWS, train)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (Clips, "dense/kernel"), (ClipsInRemat, "dense/kernel"), (Replaces, "dense/kernel"),
        (Averages, "dense/bias, dense/kernel"), (normed(nnx.WeightNorm), "layer_instance/kernel"),
        (normed(nnx.SpectralNorm), "layer_instance/kernel"),
        (lambda rngs: Stacked(rngs, writes=True), "layers/dense/bias"),
    ],
)  # fmt: skip
def test_a_write_of_a_parameter_is_refused(make, where):
    with pytest.raises(fz.StateError, match=rf"wrote the nnx.Param {where}, which would be lost"):
        called(make)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Counts, "calls: 0, then 1,"), (CountsInAList, r"seen: \[\], then \[1\]"),
        (CountsInAnObject, "own/calls: 0, then 1,"),
        (WritesATag, "held/its structure: .*'a'"),
        (Swaps, "dense/bias: its own, then that of other/bias,"),
        (SwapsBuffers, "a: its own, then that of b,"),
        (Grows, "more: nothing, then Linear,"), (KeepsATable, "table: nothing, then Variable,"),
        (Alias, "dense: Linear, then nothing,"), (SetsAMode, "norm/use_running_average: False, t"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(make, what):
    with pytest.raises(fz.StateError, match=rf"left behind {what}.*nnx.Variable\(jnp.int32"):
        called(make)


def test_modules_are_graphs_whatever_the_mode():
    with (
        nnx.set_graph_mode(False),
        pytest.raises(fz.StateError, match="left behind calls: 0, then 1"),
    ):
        called(Counts)


def test_what_an_intermediate_and_a_mode_are_is_said():
    with pytest.raises(fz.StateError, match=r"wrote rows, an nnx.Intermediate .*Make it in the"):
        called(ReportsInPlace)
    module = OwnMode(nnx.Rngs(0))
    with pytest.raises(fz.StateError, match=r"eval\(\) wrote mode/training: nothing, then False"):
        fz.from_flax(module, loss)
    assert module.mode.training
    for make, what in ((Merges, "dense/kernel: another value"), (Drops, "dense/bias: gone")):
        with pytest.raises(fz.StateError, match=rf"eval\(\) wrote {what}"):
            called(make)
    with pytest.raises(fz.StateError, match=r"bias: this nnx.Param is a shape without a value"):
        fz.from_flax(nnx.eval_shape(lambda: Block(nnx.Rngs(0))), loss)
    with pytest.raises(fz.StateError, match=r"method='sum'\) calls that method .* Block has none"):
        called(Block, lambda forward, batch: jnp.mean(forward(batch, method="sum")))


@pytest.mark.parametrize("flag", ["train", "is_training"])
def test_the_mode_reaches_flags_of_all_modules(flag):
    """Also one with the name of `train()`, and not what a `train()` of its own says."""

    class Part(nnx.Module):
        def __init__(self):
            setattr(self, flag, True)

    class Whole(Block):
        train = True  # in the place of the method

        def __init__(self, rngs):
            super().__init__(rngs)
            self.parts, self.training = nnx.List([Part()]), True

        def eval(self, **flags):
            super().eval(**flags)
            self.training = True

        def __call__(self, x):
            return self.dense(x) * (2 if getattr(self.parts[0], flag) else 3) / self.training

    np.testing.assert_allclose(called(Whole)[0] / 4, called(Whole, train=False)[0] / 9, 1e-6)


def test_flags_that_training_switches_are_said():
    """Those of a module that its maker, or its constructor, put into evaluation."""

    class Fixed(Block):
        def __init__(self, rngs, train=None):
            super().__init__(rngs)
            self.norm.use_running_average = True
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.drop.deterministic = None  # not said: both modes say it
            self.own = train

        def train(self, **flags):
            super().train(**flags)
            self.norm.use_running_average = self.own is False

    with pytest.warns(UserWarning, match=r"from_flax: norm/use_running_average=True: so the modu"):
        called(Fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(functools.partial(Fixed, train=False))
        called(Fixed, train=False)


@pytest.mark.parametrize("make", [Block, Remat, Jitted, Reports, Stacked, Caches])
def test_what_is_no_write_is_taken(make):
    """With the numbers of the module itself."""
    value, grads, new = called(make)
    module = make(nnx.Rngs(0))
    module.train()
    own, own_grads = nnx.value_and_grad(lambda m: jnp.mean(m(ROWS) ** 2))(module)
    np.testing.assert_allclose(value, own, 1e-6)

    for found, state in ((grads, own_grads), (new, nnx.state(module, nnx.BatchStat))):
        flat = {path[-1]: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            np.testing.assert_allclose(leaf, flat.pop(path[-1].key), 1e-5, 1e-6)
        assert not flat


def test_the_remedies_work():
    class Normalised(Block):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.times = nnx.Variable(jnp.int32(0))

        def __call__(self, x):
            self.times[...] += 1
            self.rows = nnx.Intermediate(x)
            x = self.norm(x, use_running_average=True)
            kernel = self.dense.kernel[...]
            return x @ (kernel / jnp.linalg.norm(kernel, axis=0)) / self.times[...]

    _, _, new = called(Normalised)
    assert int(new["times"]) == 1

    layer = nn.WeightNorm(nn.Dense(WIDTH))
    model = fz.from_flax(layer, loss, ROWS)
    plan, tx = fz.Plan(data=1), optax.sgd(0.1)
    state, variables = fz.init(model, tx, plan, rng=0), layer.init(jax.random.key(0), ROWS)
    grads = jax.grad(lambda p: jnp.mean(layer.apply({"params": p}, ROWS) ** 2))(variables["params"])
    state, _ = fz.train_step(model, tx, plan)(state, ROWS)
    after = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), state.params, after)
