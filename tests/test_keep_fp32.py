"""`Plan(keep_fp32=...)`: parameters that are used and sent in float32 under 16-bit precisions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from support import tiny
from support.sample import some

import fzero as fz
from fzero.errors import PlanError


TX = optax.adam(1e-2)
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
SEEN: list[dict[str, jnp.dtype]] = []


def block_init(key):
    return {"w": jax.random.normal(key, (16, 16)) * 0.3, "norm": jnp.ones((16, 4)) / 4}


def block(p, x, ctx):
    """A layer that normalises in what its scale is in, and says where it goes back."""
    SEEN.append({name: leaf.dtype for name, leaf in p.items()})
    wide = x.astype(p["norm"].dtype)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5) * p["norm"].sum(-1)
    return x + jnp.tanh(wide.astype(x.dtype) @ p["w"])


@functools.cache
def model():
    """A chain with a stack, of which the norms are to be kept."""

    def start(p, batch, ctx):
        return batch["x"] @ p["up"]

    def loss(x, batch):
        error = x.astype(F32).sum(-1, keepdims=True) - batch["y"]
        return fz.Mean(jnp.sum(error**2), jnp.float32(error.size))

    up = fz.Layer("up", lambda key: {"up": jax.random.normal(key, (3, 16)) / 2}, start)
    return fz.Sequential([up, fz.Stack("blocks", 4, block_init, block)], loss)


def batch(rows=16):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": x[:, :1] * 2}


def plan(**values):
    return tiny.plan(precision="bf16", keep_fp32="norm", **values)


@functools.cache
def trained(**values):
    """Two steps: logical parameters, metrics, and what the layers saw."""
    SEEN.clear()
    one = plan(**values)
    state = fz.init(model(), TX, one)
    step = fz.train_step(model(), TX, one)
    for _ in range(2):
        state, metrics = step(state, batch())
    seen = list(SEEN)
    loss = fz.eval_step(model(), one)(state, batch())["loss"]
    return fz.logical(model(), state, one), float(metrics["loss"]), float(loss), seen


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_uses_them_in_float32_and_has_the_same_bits(zero):
    params, *losses, seen = trained(zero=zero)
    assert seen
    assert all(one == {"w": BF16, "norm": F32} for one in seen)
    first, *others, _ = trained(zero=3)
    assert losses == others
    tiny.same_bits(params, first)


def test_in_a_pipeline():
    """Losses have no reason to differ: stages run the same functions."""
    _, *losses, seen = trained(zero=3, pipe=2, data=4, microbatches=2)
    assert seen
    assert all(one == {"w": BF16, "norm": F32} for one in seen)
    _, *plain, _ = trained(zero=3, data=4, microbatches=2)
    np.testing.assert_allclose(losses, plain, rtol=1e-5)  # gradients are added in another order


# Not to be had in 16 bits, nor in 8.
EXACT = np.float32(1 + 2**-12)


def sums(p, buffers, batch, rng, train):
    """What parameters are when they are used; every sum is exact."""
    norm, w = jnp.min(p["norm"].astype(F32)), jnp.max(p["w"].astype(F32))
    return fz.Mean(0.0 * jnp.sum(batch["x"]) + norm, jnp.float32(1)), buffers, {"w": w}


WAYS = {
    **{f"zero {zero}, {kind}": {"zero": zero, "precision": kind}
       for zero in range(4) for kind in ("bf16", "fp16")},
    "lazy": {"zero": 1, "gather": "lazy"},
    "lazy, microbatches": {"zero": 2, "gather": "lazy", "microbatches": 2},
    "int8": {"zero": 3, "gather_dtype": "int8"},
    "secondary": {"zero": 3, "secondary": 2},
    "ahead": {"zero": 3, "prefetch": True},
    "replicas": {"zero": 3, "data": 2, "replica": 2},
    "master on the host": {"zero": 2, "tiers": {"master": "host"}},
    "master on disk": {"zero": 1, "tiers": {"master": "disk"}, "stream_bytes": 300},
    "params on the host": {"zero": 3, "tiers": {"params": "host"}},
    "updated on the host": {"zero": 2, "tiers": {"opt_state": "host"}, "update_on": "host"},
    "fp8": {"zero": 3, "precision": "fp8"},
    "pipeline": {"zero": 1, "pipe": 2, "microbatches": 2},
    "pipeline, zero 3": {"zero": 3, "pipe": 2, "microbatches": 2, "schedule": "zb_h1"},
}  # fmt: skip
AT_NIGHT = ("zero 0, fp16", "zero 1, bf16", "zero 1, fp16", "zero 2, bf16", "zero 3, bf16",
            "lazy, microbatches", "ahead", "replicas", "master on disk", "params on the host",
            "updated on the host", "pipeline, zero 3")  # fmt: skip


def exact():
    values = {name: np.full((64, 8), EXACT) for name in ("norm", "w")}
    values["norm"][:, 0] = 2  # of a block's largest 8 bits have all
    return values


def summed(p, x, ctx):
    """The same in a chain: `norm` and `w` of its layers, in every row."""
    own = jnp.stack([jnp.min(p["norm"].astype(F32)), jnp.max(p["w"].astype(F32))])
    return own + (0 * x["x"] if isinstance(x, dict) else x)


@pytest.mark.parametrize("way", some(WAYS, *AT_NIGHT))
def test_no_way_to_a_device_rounds_them(way, tmp_path):
    values, initial = WAYS[way], exact()
    own = fz.Model((initial, {}), sums)
    if "pipe" in values:  # a layer on each rank
        links = [fz.Layer(name, lambda key: exact(), summed) for name in "ab"]

        def loss(x, batch):
            half = 0.5 * x
            return fz.Mean(jnp.sum(half[:, 0]), jnp.float32(len(x))), {"w": jnp.max(half[:, 1])}

        own = fz.Sequential(links, loss, init=({"a": exact(), "b": exact()}, {}))
    one = tiny.plan(**{"precision": "bf16", "keep_fp32": ("norm",), **values})
    one = one.replace(disk_path=str(tmp_path)) if way == "master on disk" else one
    given = {"x": np.ones((16, 1), np.float32)}
    tx = optax.sgd(0.0, momentum=0.9)  # with a state, which may be parked
    evaluate, step, state = (fz.eval_step(own, one), fz.train_step(own, tx, one),
                             fz.init(own, tx, one))  # fmt: skip
    found = [evaluate(state, given)]
    state, metrics = step(state, given)
    found += [metrics, evaluate(state, given)]  # from the copy that an update makes, too
    for metrics in found:
        assert float(metrics["loss"]) == EXACT, "rounded"
        assert float(metrics["w"]) == 1.0


def test_what_is_stored_in_16_bits_is_used_in_32():
    """A frozen leaf is kept as it was given; the model sees it widened."""
    initial = {name: np.ones((64, 8), BF16) for name in ("norm", "w")}
    own, one = fz.Model((initial, {}), sums), tiny.plan(precision="bf16", keep_fp32="norm")
    found = {}

    def seen(p, *given):
        found.update({name: leaf.dtype for name, leaf in p.items()})
        return sums(p, *given)

    own = dataclasses.replace(own, loss=seen, frozen={"norm"})
    state = fz.init(own, TX, one)
    assert state.params["norm"].dtype == BF16
    fz.eval_step(own, one)(state, {"x": np.ones((8, 1), np.float32)})
    assert found == {"norm": F32, "w": BF16}


def test_the_copy_follows_when_a_plan_keeps_more():
    initial = {name: np.full((64, 8), EXACT) for name in ("norm", "w")}
    own, less = fz.Model((initial, {}), sums), tiny.plan(zero=1, precision="bf16")
    more = less.replace(keep_fp32="norm")
    state = fz.replan(fz.init(own, TX, less), own, TX, less, more)
    assert state.compute["norm"].dtype == F32
    assert state.compute["w"].dtype == BF16
    assert np.asarray(state.compute["norm"])[0, 0] == EXACT
    edited = state.replace(params=jax.tree.map(lambda x: x * 2, state.params))
    assert np.asarray(edited.compute["norm"])[0, 0] == 2 * EXACT
    back = fz.replan(edited, own, TX, more, less)
    assert back.compute["norm"].dtype == BF16


def test_a_flax_module_is_called_with_the_precision_of_the_plan():
    seen = []

    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
            seen.append((x.dtype, scale.dtype))
            return (x.astype(scale.dtype) * scale).astype(x.dtype)

    module = nn.Sequential([nn.Dense(4), Norm(), nn.Dense(1)])
    own = fz.from_flax(
        module, lambda forward, b: jnp.mean(forward(b["x"]).astype(F32)), np.ones((1, 3), "f4")
    )
    one = tiny.plan(zero=3, precision="bf16", keep_fp32="scale")
    state = fz.init(own, TX, one)
    seen.clear()
    fz.eval_step(own, one)(state, batch())
    assert seen
    assert set(seen) == {(BF16, F32)}


def test_it_is_said():
    one = plan(zero=3)
    assert "float32: 1 leaves, 256 elements" in str(fz.describe(one, model(), TX))
    shapes = {leaf.path: leaf.dtype for leaf in fz.describe(one.replace(zero=1), model()).leaves
              if leaf.state_class == "compute"}  # fmt: skip
    assert shapes["blocks/norm"] == "float32"
    assert shapes["blocks/w"] == "bfloat16"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"precision": "fp32", "keep_fp32": "norm"}, "would do nothing"),
        ({"precision": "bf16", "keep_fp32": ("nor[m",)}, "regular expression"),
        ({"precision": "bf16", "keep_fp32": (3,)}, "regular expression"),
        ({"precision": "bf16", "keep_fp32": None}, "a string, got NoneType"),
        ({"precision": "bf16", "keep_fp32": {"norm", "router"}}, "a string, got set"),
    ],
)
def test_what_a_plan_refuses(values, said):
    with pytest.raises(PlanError, match=said):
        fz.Plan(**values)


def test_a_pattern_that_finds_nothing_is_named():
    with pytest.raises(PlanError, match=r"\['nrom'\] are found in no parameter.*blocks/norm"):
        fz.init(model(), TX, tiny.plan(precision="bf16", keep_fp32=("norm", "nrom")))


@pytest.mark.parametrize(
    ("layer", "keep", "said"),
    [
        (
            lambda p, x, ctx: (x @ p["w"]).astype(p["norm"].dtype) + p["norm"][:, 0],
            "norm",
            r"expected bfloat16\[2, 16\], got float32\[2, 16\]; keep_fp32=\('norm',\) .*astype\(x",
        ),
        (lambda p, x, ctx: x.astype(F32), (), r"got float32\[2, 16\](?!;)"),
        (lambda p, x, ctx: {"a": x, "b": x}, (), r"expected PyTreeDef\(\*\), got PyTreeDef\(\{"),
        (lambda p, x, ctx: x[:, :8] @ p["w"][:8, :8], (), r"got bfloat16\[2, 8\]"),
    ],
    ids=["wide", "wide by itself", "structure", "shape"],
)
def test_a_layer_that_gives_something_else_than_it_takes_is_named(layer, keep, said):
    """A bias in float32 widens what a layer gives: the next one would take something else."""
    chain = dataclasses.replace(model().layers[1], apply=layer)
    own = fz.Sequential([model().layers[0], chain], lambda x, batch: jnp.sum(x.astype(F32)))
    one = tiny.plan(zero=3, precision="bf16", keep_fp32=keep)
    state = fz.abstract_state(own, TX, one)
    with pytest.raises(PlanError, match=rf"stack 'blocks': a layer gives what the next .*{said}"):
        fz.train_step(own, TX, one).lower(state, batch())


def test_what_numpy_makes_of_64_bits_is_taken_as_jax_takes_it():
    def numbered(params, carry, ctx):
        return {"x": carry["x"] + params["w"][0], "numbers": np.arange(16)}

    first, stack, *_ = model().layers

    def begin(params, x, ctx):
        return {"x": first.apply(params, x, ctx), "numbers": jnp.arange(16)}

    layers = [dataclasses.replace(first, apply=begin), dataclasses.replace(stack, apply=numbered)]
    own = fz.Sequential(layers, lambda out, batch: jnp.mean(out["x"] * out["numbers"]))
    one = tiny.plan(zero=3)
    fz.train_step(own, TX, one).lower(fz.abstract_state(own, TX, one), batch())


def test_whoever_else_reads_a_kept_leaf_has_it_in_float32():
    """A tied weight: one leaf, and both of its readers."""
    seen = []

    def start(p, batch, ctx):
        seen.append(p["up"].dtype)
        return batch["x"].astype(BF16) @ p["up"].astype(BF16)

    def end(p, x, ctx):
        seen.append(p["again"].dtype)
        return jnp.sum((x.astype(F32) @ p["again"].astype(F32).T) ** 2)

    first = dataclasses.replace(model().layers[0], apply=start)
    own = fz.Sequential([first, fz.Layer("head", None, end, reads={"again": "up/up"})])
    one = tiny.plan(zero=3, precision="bf16", keep_fp32="up")
    fz.train_step(own, TX, one).lower(fz.abstract_state(own, TX, one), batch())
    assert set(seen) == {F32}


def test_a_plan_that_keeps_other_leaves_gets_their_own_copies():
    """The same two dtypes, of which each leaf has the other one."""
    draw = jax.random.normal(jax.random.key(0), (2, 16, 16))

    def sums(p, buffers, batch, rng, train):
        return jnp.mean((batch["x"] @ p["one"]) @ p["two"]), buffers, {}

    own = fz.Model(({"one": draw[0], "two": draw[1]}, {}), sums)
    old = tiny.plan(zero=0, data=2, precision="bf16", keep_fp32="one")
    new = old.replace(keep_fp32="two")
    batch = {"x": np.ones((4, 16), np.float32)}
    moved = fz.replan(fz.init(own, TX, old), own, TX, old, new)
    fresh = fz.init(own, TX, new)
    tiny.same_bits(moved.compute, fresh.compute)
    assert fz.eval_step(own, new)(moved, batch) == fz.eval_step(own, new)(fresh, batch)
