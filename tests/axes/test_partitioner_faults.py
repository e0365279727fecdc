"""What XLA's partitioner gets wrong, or ends the process at, is that of one device."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import Mesh, PartitionSpec

import fzero as fz
import torch_bridge as tb
from fzero.programs.partitioner_faults import partitioned


TWO = {"context": 2, "tensor": 2}


def rows(*shape):
    return {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}


def stepped(model, plan, batch):
    """The loss in evaluation, and parameters after a step."""
    devices, tx = jax.devices()[: math.prod(plan.sizes(8).values())], optax.sgd(0.01)
    state = fz.init(model, tx, plan, rng=0, devices=devices)
    loss = fz.eval_step(model, plan, devices=devices)(state, batch)["loss"]
    state, _ = fz.train_step(model, tx, plan, devices=devices)(state, batch)
    return np.asarray(loss), jax.device_get(fz.logical(model, state, plan))


def agree(model, batch, **axes):
    one = fz.Plan(zero=0, data=1)
    plan = fz.Plan(**{"zero": 1, "data": 1, **axes}, min_shard_bytes=0)
    for a, b in zip(*(jax.tree.leaves(stepped(model, p, batch)) for p in (one, plan)), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)  # sums in another order


@pytest.mark.parametrize("axes", [{"context": 4}, {"data": 2, **TWO}], ids=str)
def test_a_fourier_transform_may_run_along_positions_of_any_number(axes):
    """As FNet mixes them. XLA's partitioner divides one of 16 positions; at 8 it ends all."""

    def loss(p, buffers, batch, rng, train):
        mixed = jnp.fft.fft(batch["x"] @ p["w"], axis=1).real / 8
        back = jnp.fft.irfft(jnp.fft.rfft(mixed * mixed, axis=1), n=8, axis=1)
        return jnp.mean(jnp.square(back)), buffers, {}

    agree(
        fz.Model(lambda key: ({"w": jax.random.normal(key, (8, 8))}, {}), loss),
        rows(4, 8, 8),
        **axes,
    )


def conv(x, kernel, **options):
    dims = ("NWC", "WIO", "NWC") if x.ndim == 3 else ("NHWC", "HWIO", "NHWC")
    ones = (1,) * (x.ndim - 2)
    return jax.lax.conv_general_dilated(x, kernel, ones, "SAME", dimension_numbers=dims, **options)


CONVOLUTIONS = {
    "whole": (conv, ()),
    "out": (conv, (None, None, None, "tensor")),
    "in": (conv, (None, None, "tensor")),
    "groups": (lambda x, kernel: conv(x, kernel[:, :, :2], feature_group_count=4), ()),
    "rows together": (lambda x, kernel: conv(x, kernel, batch_group_count=2), ()),
    "in a loop": (
        lambda x, kernel: jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(conv(x, kernel)), x),
        (None, None, None, "tensor"),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_over_positions_beside_another_axis_is_that_of_one_device(name):
    """XLA's own was wrong, in values too where the kernel is divided, without a word."""
    convolved, along = CONVOLUTIONS[name]

    def init(key):
        return {"kernel": jax.random.normal(key, (3, 3, 8, 8)), "out": jnp.ones((8, 2))}, {}

    def loss(p, buffers, batch, rng, train):
        x = jnp.tanh(convolved(batch["x"], p["kernel"]))
        return jnp.mean(jnp.square(x @ p["out"])), buffers, {}

    model = fz.Model(init, loss, shard={"kernel": along, "out": (None, "tensor")})
    agree(model, rows(4, 8, 8, 8), **TWO)


def test_rows_may_have_kernels_of_their_own_beside_divided_features():
    """`vmap` makes groups of them, at which XLA's partitioner ended the process."""

    def init(key):
        return dict(zip("wc", jax.random.normal(key, (2, 8, 8)), strict=True)), {}

    def loss(p, buffers, batch, rng, train):
        def own(x):
            kernel = jnp.stack([x[:4], x[4:], x[2:6], 2 * x[:4]], 2)
            return conv(x[None] @ p["c"], kernel)

        return jnp.mean(jnp.tanh(jax.vmap(own)(jnp.tanh(batch["x"] @ p["w"])))), buffers, {}

    shard = {"w": (None, "tensor"), "c": (None, "tensor")}
    agree(fz.Model(init, loss, shard=shard), rows(4, 8, 8), tensor=4)


WRITES = {
    "set": lambda x: (2 * x).at[:, 1:].set(x[:, :-1]).at[:, 0].set(3),
    "add": lambda x: (2 * x).at[:, 1:].add(x[:, :-1]).at[:, 3].add(3),
    "places": lambda x: x.at[:, jnp.arange(8)[::-1]].add(x).at[:, 0].set(3),
    "pad": lambda x: jax.lax.pad(x, jnp.float32(0), ((0, 0, 0), (-1, 0, 1), (0, 0, 0)))[:, ::2],
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_twice_along_divided_positions_is_that_of_one_device(name):
    """XLA's own was wrong, without a word; at such a pad it ended the process."""

    def loss(p, buffers, batch, rng, train):
        x = WRITES[name](batch["x"] @ p["w"])
        return jnp.mean(x * batch["x"][:, : x.shape[1]]), buffers, {}

    agree(
        fz.Model(lambda key: ({"w": jax.random.normal(key, (8, 8))}, {}), loss),
        rows(4, 8, 8),
        context=2,
    )


def held(x):
    """As a user's own constraint holds a value whole, where there are axes."""
    alone = jax.sharding.get_abstract_mesh().empty
    return x if alone else jax.lax.with_sharding_constraint(x, PartitionSpec())


EVERY = np.arange(8)


def every_third(x):
    return x[:, ::3]


STRIDES = {
    "written": ({"context": 2}, lambda x: every_third(x).at[:, 0].set(3)),
    "held": ({"context": 2}, lambda x: held(every_third(x))),
    "even": ({"context": 2}, lambda x: x[:, 1::2].at[:, 0].set(3)),
    "far": ({"context": 4}, lambda x: every_third(x).at[:, 0].set(3)),
    "convolved": (TWO, lambda x: conv(every_third(x), jnp.ones((3, 8, 8)) / 8)),
}


@pytest.mark.parametrize("name", STRIDES)
def test_steps_through_divided_positions_may_be_read_whole(name):
    """Their gradient fills between. XLA's own was wrong, without a word, or ended in its words."""
    axes, read = STRIDES[name]

    def loss(p, buffers, batch, rng, train):
        x = read(jnp.tanh(batch["x"] @ p["w"]))
        return jnp.mean(x * x * batch["x"][:, : x.shape[1]]), buffers, {}

    model = fz.Model(
        lambda key: ({"w": jax.random.normal(key, (8, 8))}, {}), loss, shard={"w": (None, "tensor")}
    )
    agree(model, rows(4, 8, 8), **axes)


INDEXED = {
    "picked": lambda x, at: x[jnp.arange(len(x))[:, None], at],
    "sorted": lambda x, at: jnp.sort(x, axis=1),
    "exponential": lambda x, at: jax.scipy.linalg.expm(x / 3, max_squarings=2),
    "taken": lambda x, at: x[:, :, EVERY[::-1]],
    "set": lambda x, at: (2 * x).at[:, ::2].set(x[:, 1::2]),
    "added": lambda x, at: (2 * x).at[:, jnp.asarray([1, 1, 6])].add(x[:, 3:6]),
    "in a loop": lambda x, at: jax.lax.fori_loop(
        1, 8, lambda t, x: x.at[:, :, t].add(x[:, :, t - 1]), x
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_along_divided_dims_beside_shared_out_rows_is_that_of_one_device(name):
    """XLA's partitioner ended the process."""

    def loss(p, buffers, batch, rng, train):
        x = INDEXED[name](jnp.tanh(batch["x"] @ p["w"]), batch["at"])
        return jnp.mean(x * x * batch["x"][:, : x.shape[1]]), buffers, {}

    model = fz.Model(
        lambda key: ({"w": jax.random.normal(key, (8, 8))}, {}), loss, shard={"w": (None, "tensor")}
    )
    at = np.random.default_rng(1).integers(0, 8, (4, 8)).astype(np.int32)
    agree(model, {**rows(4, 8, 8), "at": at}, data=2, **TWO)


@pytest.mark.parametrize("vocabulary", [4, 64])
def test_a_tokens_table_stays_divided_unless_it_is_small(vocabulary):
    """XLA divides such a gather, and its gradient, over a vocabulary and positions at once."""

    def init(key):
        return {"table": jax.random.normal(key, (vocabulary, 8)), "w": jnp.eye(8)}, {}

    def loss(p, buffers, batch, rng, train):
        return jnp.mean(jnp.square(jnp.tanh(p["table"][batch["at"]]) @ p["w"])), buffers, {}

    model = fz.Model(init, loss, shard={"table": ("tensor",), "w": (None, "tensor")})
    at = np.random.default_rng(1).integers(0, vocabulary, (4, 8)).astype(np.int32)
    agree(model, {"at": at}, data=2, **TWO)
    mesh, spec = Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", *TWO)), PartitionSpec
    picked = jax.shard_map(
        lambda table, at: table[at],
        mesh=mesh,
        in_specs=(spec(), spec("data")),
        out_specs=spec("data"),
        axis_names={"data"},
    )
    program = jax.make_jaxpr(partitioned(picked, mesh))(jnp.ones((vocabulary, 8)), at)
    assert ("sharding_constraint" in str(program)) == (vocabulary == 4)


REDUCED = {
    "exclusive or": lambda i: jax.lax.reduce(i, np.int32(0), jax.lax.bitwise_xor, (1,)),
    "own": lambda i: jax.lax.reduce(
        i, np.int32(0), lambda a, b: jnp.maximum(a & 3, b & 3) | (a & 4) | (b & 4), (1,)
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_what_cpus_do_not_reduce_between_devices_is_reduced_whole(name):
    def loss(p, buffers, batch, rng, train):
        found = REDUCED[name](batch["at"]).astype(jnp.float32)
        return jnp.mean(jnp.square(p["w"]) * found), buffers, {}

    at = np.random.default_rng(1).integers(0, 8, (4, 8)).astype(np.int32)
    model = fz.Model(lambda key: ({"w": jax.random.normal(key, ())}, {}), loss)
    agree(model, {"at": at}, context=2)


def test_labels_that_are_shifted_in_a_forward_are_those_of_pytorch():
    """As transformers' sequence-to-sequence models make their decoder's inputs."""

    class Shifts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

        def forward(self, labels):
            given = labels.new_zeros(labels.shape)
            given[:, 1:] = labels[:, :-1].clone()
            given[:, 0] = 3
            return self.head(torch.tanh(self.embed(given)))

    torch.manual_seed(0)
    module, labels = Shifts(), np.random.default_rng(0).integers(0, 16, (4, 8))
    converted = tb.convert(module, torch.from_numpy(labels))
    model = converted.model(lambda f, batch: fz.cross_entropy(f(batch["l"]), batch["l"]))
    agree(model, {"l": labels.astype(np.int32)}, context=2)
