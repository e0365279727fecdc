"""A head and its cross entropy as one function: the numbers of whole logits, without them."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
import torch_bridge as tb
from fzero.compat import auto_mesh


N, D, V = (2, 7), 5, 11


def values(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    x, w, b = rng.normal(size=(*N, D)), rng.normal(size=(V, D)), rng.normal(size=V)
    labels = rng.integers(0, V, N)
    labels[0, 2] = labels[1, 6] = -100
    return [jnp.asarray(v, dtype) for v in (x, w, b)], jnp.asarray(labels, jnp.int32)


def reference(terms, x, w, b, labels):
    """In optax's and plain terms; nothing of it is shared with what is tested."""
    logits = x.astype(jnp.float32) @ w.astype(jnp.float32).T + b.astype(jnp.float32)
    if terms.soft_cap:
        logits = terms.soft_cap * jnp.tanh(logits / terms.soft_cap)
    target = optax.smooth_labels(jax.nn.one_hot(labels, V), terms.label_smoothing)
    losses = optax.softmax_cross_entropy(logits, target)
    losses += terms.z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum(jnp.where(labels == -100, 0.0, losses))


TERMS = [
    fz.CrossEntropy(),
    fz.CrossEntropy(label_smoothing=0.1),
    fz.CrossEntropy(z_loss=1e-2),
    fz.CrossEntropy(soft_cap=2.0),
    fz.CrossEntropy(label_smoothing=0.2, z_loss=1e-2, soft_cap=3.0),
]


@pytest.mark.parametrize("chunk", [None, 3, 14])  # one chunk; filled up; exactly one
@pytest.mark.parametrize("terms", TERMS)
def test_values_and_gradients_are_those_of_whole_logits(terms, chunk):
    args, labels = values()

    def own(*args):
        x, w, b = args
        return fz.linear_cross_entropy(x, w, labels, bias=b, terms=terms, chunk=chunk).total

    with jax.numpy_dtype_promotion("strict"):
        got = jax.jit(jax.value_and_grad(own, argnums=(0, 1, 2)))(*args)
    want = jax.jit(jax.value_and_grad(partial(reference, terms), (0, 1, 2)))(*args, labels)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
    assert float(jax.jit(own)(*args)) == pytest.approx(float(want[0]), rel=1e-6)  # no gradient
    mean = fz.linear_cross_entropy(args[0], args[1], labels)
    assert float(mean.count) == 12


def test_a_seed_scales_gradients_and_16_bits_keep_small_ones():
    args, labels = values(np.float16)
    x, w, _ = args

    def scaled(x, w, seed):
        return fz.linear_cross_entropy(x * 1e-4, w * 1e-4, labels, chunk=4).total * seed

    slopes = jax.jit(jax.grad(scaled, argnums=(0, 1)))
    got = slopes(x, w, jnp.float32(2**12))
    wide = slopes(x.astype(jnp.float32), w.astype(jnp.float32), jnp.float32(2**12))
    for one, other in zip(got, wide, strict=True):
        assert one.dtype == jnp.float16
        # float16 keeps 11 bits; the small numbers before the seed are below what it has at all
        np.testing.assert_allclose(np.asarray(one, np.float32), other, rtol=3e-2, atol=2e-4)
        assert np.count_nonzero(one) > 0.9 * np.count_nonzero(other)

    def nearly_sure(x, w):
        bias = jnp.zeros(V, x.dtype).at[3].set(8.0)
        total = fz.linear_cross_entropy(x, w * 2**-12, jnp.full(N, 3), bias=bias).total
        return total * jnp.float32(2**14)

    both = ((x.astype(to), w.astype(to)) for to in ("float16", "float32"))
    one, other = (jax.grad(nearly_sure)(*given) for given in both)
    np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2e-2, atol=1e-5)


def test_frozen_heads_cost_no_gradient():
    args, labels = values()
    x, w, _ = args

    def loss(x):
        return fz.linear_cross_entropy(x, w, labels, chunk=4).total

    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    products = text.count("dot_general")
    both = str(
        jax.make_jaxpr(
            jax.grad(lambda x, w: fz.linear_cross_entropy(x, w, labels, chunk=4).total, (0, 1))
        )(x, w)
    )
    assert products == both.count("dot_general") - 1


def test_no_array_of_logits_is_made():
    vocabulary, tokens = 4096, 512
    x = jax.ShapeDtypeStruct((tokens, 64), jnp.float32)
    w = jax.ShapeDtypeStruct((vocabulary, 64), jnp.float32)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def chunked(x, w, labels):
        return fz.linear_cross_entropy(x, w, labels, chunk=64).total

    def whole(x, w, labels):
        return fz.cross_entropy(x @ w.T, labels).total

    def peak(loss):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, w, labels).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(whole) >= tokens * vocabulary * 4
    # As a step has it: neither logits nor a copy of the weight's gradient for each chunk are kept.
    saved = jax.checkpoint(chunked, policy=lambda prim, *_, **__: prim.name != "reshape")
    assert peak(saved) < tokens * vocabulary * 4
    assert peak(chunked) < tokens * vocabulary * 4 // 2


def test_divided_sequences_need_no_jit():
    (x, w, b), labels = values()
    mesh = auto_mesh(np.array(jax.devices()[:2]), ("context",))
    with jax.set_mesh(mesh):
        found = fz.linear_cross_entropy(x, w, labels, bias=b)
    want = reference(fz.CrossEntropy(), x, w, b, labels)
    np.testing.assert_allclose(found.total, want, rtol=1e-6)


def of(name, x, w, labels, **terms):
    """The summed loss in one of three ways to write it."""
    if name == "linear_cross_entropy":
        return fz.linear_cross_entropy(x, w, labels, terms=fz.CrossEntropy(**terms)).total
    if name == "cross_entropy":
        return fz.cross_entropy(x @ w.T, labels, fz.CrossEntropy(**terms)).total
    return tb.causal_lm_loss(x @ w.T, labels, shift=False, **terms).total


WAYS = "linear_cross_entropy", "cross_entropy", "causal_lm_loss"


@pytest.mark.parametrize("name", WAYS)
def test_no_label_of_a_narrow_dtype_is_taken_for_the_ignored_one(name):
    """Among bytes -100 is 156, which is a word like any other."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    w = jax.random.normal(jax.random.key(1), (2**16, 4))
    for dtype, word in (("uint8", 156), ("uint16", 2**16 - 100)):
        labels = np.array([[word, 1, 2], [3, word, 4]])
        want = -jax.nn.log_softmax(x @ w.T)[[0, 0, 0, 1, 1, 1], [0, 1, 2] * 2, labels.ravel()]
        got = of(name, x, w, labels.astype(dtype))
        np.testing.assert_allclose(got, jnp.sum(want), rtol=1e-6)  # sums in another order
        assert got == of(name, x, w, labels)
        shifted = tb.causal_lm_loss(x @ w.T, labels.astype(dtype))  # filled up with -100
        assert (shifted.count, shifted.total) == (4, tb.causal_lm_loss(x @ w.T, labels).total)


@pytest.mark.parametrize("axes", [(), ("tensor",)])
@pytest.mark.parametrize("name", WAYS)
def test_labels_that_are_no_words_are_seen(name, axes):
    """Negative ones do not count from the end, as an array's index would: torch refuses them."""
    (x, w, _), labels = values()
    labels = np.array(labels)
    mesh = auto_mesh(np.array(jax.devices()[:2]), axes) if axes else None
    for word, bad in ((-1, True), (len(w), True), (-100, False), (len(w) - 1, False)):
        labels[0, 1] = word
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            total = jax.jit(partial(of, name))(x, w, labels)
        assert bool(jnp.isnan(total)) == bad, word
    labels[labels < 0] = -1
    assert jnp.isfinite(of(name, x, w, labels, ignore_index=-1))
    for other in (labels.astype(np.float32), labels > 2):
        with pytest.raises(fz.PlanError, match="expected integers, numbers of words; got"):
            of(name, x, w, other)


def test_shapes_that_do_not_belong_together_are_refused():
    args, labels = values()
    x, w, b = args
    with pytest.raises(fz.PlanError, match=r"expected x .* got \(2, 7, 5\), \(5, 11\), \(2, 7\)"):
        fz.linear_cross_entropy(x, w.T, labels)
    with pytest.raises(fz.PlanError, match=r"and \(5,\)"):
        fz.linear_cross_entropy(x, w, labels, bias=b[:5])
    with pytest.raises(fz.PlanError, match="chunk=0: expected at least one token"):
        fz.linear_cross_entropy(x, w, labels, chunk=0)
    for call in (lambda: fz.linear_cross_entropy(x, w, labels, terms=-100),
                 lambda: fz.cross_entropy(x, labels, -100)):  # fmt: skip
        with pytest.raises(fz.PlanError, match=r"terms=-100: .*CrossEntropy\(ignore_index=-100\)"):
            call()
    with pytest.raises(fz.PlanError, match="label_smoothing=2: expected 0 to 1"):
        fz.CrossEntropy(label_smoothing=2)
    for name, value in (
        ("ignore_index", None), ("ignore_index", 1.5), ("label_smoothing", True),
        ("z_loss", np.nan), ("z_loss", np.inf), ("soft_cap", np.nan), ("soft_cap", np.inf),
    ):  # fmt: skip
        with pytest.raises(fz.PlanError, match=f"{name}={value}.*: expected"):
            fz.CrossEntropy(**{name: value})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_a_wide_weight_nor_a_sum_is_rounded_to_its_input(dtype):
    (x, w, _), labels = values()
    x, w = x.astype(jnp.bfloat16), w.astype(dtype)
    found = fz.linear_cross_entropy(x, w, labels, chunk=3).total
    np.testing.assert_allclose(
        found, reference(fz.CrossEntropy(), x, w, jnp.zeros(V), labels), 2e-6
    )


@pytest.mark.parametrize("shape", [(2, 1), (1, 5), (5,), (2, 5, 1), (2, 5, 11)])
def test_labels_are_not_broadcast_over_logits(shape):
    logits, labels = jnp.zeros((2, 5, 11)), jnp.ones(shape, jnp.int32)
    with pytest.raises(fz.PlanError, match=r"an integer for each row of logits; got \(2, 5, 11\)"):
        fz.cross_entropy(logits, labels)
    assert fz.cross_entropy(logits, jnp.ones((2, 5), jnp.int32)).count == 10


def test_a_gradient_penalty_is_that_of_the_logits_at_hand():
    rng = np.random.default_rng(5)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 4), (11, 4)))
    labels = jnp.asarray([3, 0, 7, -100, 2, 1])

    def penalty(loss):
        def squared(x, w):
            return sum(jnp.sum(g**2) for g in jax.grad(lambda x, w: loss(x, w).total, (0, 1))(x, w))

        return jax.jit(jax.grad(squared, (0, 1)))(x, w)

    found = penalty(lambda x, w: fz.linear_cross_entropy(x, w, labels, chunk=4))
    expected = penalty(lambda x, w: fz.cross_entropy(x @ w.T, labels))
    for one, other in zip(found, expected, strict=True):  # chunks add up in another order
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_bias_is_rounded_once():
    """Not in each of 256 chunks."""
    one, two, three = map(np.random.default_rng, range(3))
    x = jnp.asarray(one.normal(size=(4096, 4)), jnp.bfloat16)
    w = jnp.asarray(two.normal(size=(8, 4)), jnp.bfloat16)
    labels = jnp.asarray(three.integers(0, 8, 4096))

    def slope(x, w, bias, **options):
        return jax.grad(
            lambda bias: fz.linear_cross_entropy(x, w, labels, bias=bias, **options).total
        )(bias).astype(jnp.float32)

    found = slope(x, w, jnp.zeros(8, jnp.bfloat16), chunk=16)
    wide = slope(x.astype(jnp.float32), w.astype(jnp.float32), jnp.zeros(8))
    np.testing.assert_allclose(found, wide, rtol=2**-8)  # bfloat16's rounding


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(2, 3, 0, 5), (2, 3, 4, 0), (0, 3, 4, 5), (2, 3, 0, 0)], ids=str)
def test_nothing_has_a_loss_too(shape, smoothing):
    """No features, no vocabulary (no label is a word of it: NaN), no tokens."""
    *tokens, features, words = shape
    given = jnp.ones((*tokens, features)), jnp.ones((words, features)), jnp.arange(float(words))
    terms = fz.CrossEntropy(label_smoothing=smoothing)
    for label in (0, -100):
        labels = jnp.full(tokens, label)

        def own(x, w, b, labels=labels):
            return fz.linear_cross_entropy(x, w, labels, bias=b, terms=terms).total

        def whole(x, w, b, labels=labels):
            return terms.total(x @ w.T + b, labels)

        got, want = (jax.jit(jax.value_and_grad(fn, (0, 1, 2)))(*given) for fn in (own, whole))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, want)
        assert bool(jnp.isnan(got[0])) == (label == 0 and not words)
