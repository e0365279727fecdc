"""Reverse mode with the weights taken out of what is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fzero.zero.vjp import Floats, forward, keep_all_but_movement, keep_fewest, remat_policy


def weights(seed=0, rows=12, columns=20):
    """A matrix whose size nothing else here has, and a bias."""
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.standard_normal((rows, columns)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal(columns), jnp.float32),
    }


X = jnp.asarray(np.random.default_rng(9).standard_normal((3, 12)), jnp.float32)
BACK = jnp.asarray(np.random.default_rng(8).standard_normal((3, 20)), jnp.float32)


def plain(p, x):
    return jnp.tanh(x @ p["w"] + p["b"]), ()


def transposed(p, x):
    # As PyTorch's Linear: the stored weight is the transpose of the one that multiplies.
    return jnp.tanh((p["w"].T @ x.T).T + p["b"]), ()


def cast(p, x):
    out = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16)
    return jnp.tanh(out.astype(jnp.float32)), ()


def reshaped(p, x):
    # As attention: heads are cut out of one matrix.
    heads = p["w"].reshape(12, 4, 5)
    return jnp.tanh(jnp.einsum("bi,ihd->bhd", x, heads).reshape(3, 20) + p["b"]), ()


def pieces(p, x):
    # As a fused projection: three pieces of one matrix.
    q, k = jnp.split(p["w"], 2, axis=1)
    return jnp.concatenate([jnp.sin(x @ q), jnp.cos(x @ k)], axis=1) + p["b"], ()


def twice(p, x):
    return jnp.tanh(jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T @ p["w"]), ()


LAYERS = [plain, transposed, cast, reshaped, pieces, twice]


def is_weight_sized(leaf):
    """Whether an array could be the matrix, whole or in halves, in any arrangement."""
    return leaf.size in (12 * 20, 12 * 10)


@pytest.mark.parametrize("policy", [keep_all_but_movement, keep_fewest])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_no_weight_is_kept_in_any_disguise(layer, policy):
    """Neither itself nor its transpose, cast or pieces: activations only."""
    p = weights()
    known = jax.tree.leaves(p)
    _, _, pullback, kept = forward(layer, (p, X), known, policy)
    assert [leaf.shape for leaf in kept if is_weight_sized(leaf)] == []
    assert not any(leaf is weight for leaf in kept for weight in known)
    assert pullback.reads


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_a_checkpoint_of_the_layers_own_keeps_no_weight_either(layer, policy):
    """Its policy is followed, but a weight is read again, and so is what is only moved from it."""
    p = weights()
    known = jax.tree.leaves(p)

    def own(p, x):
        # What the checkpoint is given is a disguise, too.
        moved = jax.tree.map(lambda leaf: leaf[::-1][::-1], p)
        return jax.checkpoint(layer, policy=policy)(moved, x)

    _, _, pullback, kept = forward(own, (p, X), known)
    assert [leaf.shape for leaf in kept if is_weight_sized(leaf)] == []
    want = jax.vjp(layer, p, X, has_aux=True)[1](BACK)
    got = pullback.run(kept, [jnp.array(leaf, copy=True) for leaf in known], BACK)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("looped", [False, True])
def test_blocks_with_checkpoints_keep_their_inputs_as_in_plain_jax(looped):
    """12 of them: 13 arrays, and each weight is known again (191 arrays without checkpoints)."""
    blocks = [jnp.eye(8) * (1 + 0.01 * i) for i in range(12)]

    @jax.checkpoint
    def block(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w) + jnp.sin(x)
        return x

    def run(blocks):
        x = jnp.ones((3, 8))
        if looped:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, blocks)
        else:
            for w in blocks:
                x = block(x, w)
        return jnp.mean(x**2), ()

    given = jnp.stack(blocks) if looped else blocks
    _, _, pullback, kept = forward(run, (given,), jax.tree.leaves(given))
    _, pull, _ = jax.vjp(run, given, has_aux=True)
    own = {id(leaf) for leaf in jax.tree.leaves(given)}
    plain_jax = [leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in own]
    assert sum(leaf.size for leaf in kept) <= sum(leaf.size for leaf in plain_jax) <= 13 * 24
    assert len(kept) <= 13
    assert len(pullback.reads) == len(jax.tree.leaves(given))


def test_without_known_arrays_weights_would_be_kept():
    """What the tests above would see."""
    p = weights()
    _, _, pullback, kept = forward(plain, (p, X), [])
    assert any(is_weight_sized(leaf) for leaf in kept)
    assert pullback.reads == []


@pytest.mark.parametrize("policy", [keep_all_but_movement, keep_fewest])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_pullback_equals_vjp_with_the_same_weights(layer, policy):
    p = weights()
    known = jax.tree.leaves(p)
    out, _, pullback, kept = forward(layer, (p, X), known, policy)
    want, pull, _ = jax.vjp(layer, p, X, has_aux=True)
    np.testing.assert_array_equal(out, want)
    got = pullback.run(kept, [jnp.array(leaf, copy=True) for leaf in known], BACK)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(pull(BACK)), strict=True):
        # The same operations one by one; only casts and reshapes are done twice.
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", [keep_all_but_movement, keep_fewest])
@pytest.mark.parametrize("layer", [plain, transposed, reshaped], ids=lambda f: f.__name__)
def test_pullback_reads_the_weights_it_is_given(layer, policy):
    """Other weights in the backward pass give what `jax.vjp` gives with their values there.

    The layer is linear in its weights before tanh, so that the gradient of the input is the
    cotangent before tanh times the new matrix.
    """
    p, other = weights(), weights(seed=5)
    _, _, pullback, kept = forward(layer, (p, X), jax.tree.leaves(p), policy)
    dp, dx = pullback.run(kept, jax.tree.leaves(other), BACK)
    inner = X @ p["w"] + p["b"]
    slope = BACK * (1 - jnp.tanh(inner) ** 2)
    # A matmul of 20 terms in fp32, written another way.
    np.testing.assert_allclose(dx, slope @ other["w"].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dp["w"], X.T @ slope, rtol=1e-5, atol=1e-5)


def test_a_number_of_activations_is_not_computed_again():
    def scaled(p, x):
        out = jnp.sin(x @ p["w"])
        return out * (2.0 * jnp.sum(out)), ()

    p = weights()
    _, _, pullback, _ = forward(scaled, (p, X), jax.tree.leaves(p))
    assert "dot_general" not in {op.equation.primitive.name for op in pullback.ops}


def test_travels_through_loops_as_static_data():
    """Residuals of every layer are stacked by a scan; the pullback rides along."""
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[square(k) for k in range(3)])

    @jax.jit
    def by_hand(stack, x):
        def go(x, p):
            y, _, pullback, kept = forward(plain, (p, x), jax.tree.leaves(p))
            return y, (pullback, kept)

        y, (pullback, kept) = jax.lax.scan(go, x, stack)

        def back(ct, xs):
            kept, p = xs
            dp, dx = pullback.run(kept, jax.tree.leaves(p), ct)
            return dx, dp

        return jax.lax.scan(back, jnp.ones_like(y), (kept, stack), reverse=True)

    def loss(stack, x):
        return jnp.sum(jax.lax.scan(lambda x, p: (plain(p, x)[0], None), x, stack)[0])

    dx, dp = by_hand(stack, X)
    want_p, want_x = jax.jit(jax.grad(loss, (0, 1)))(stack, X)
    # Fused differently by the compiler.
    np.testing.assert_allclose(dx, want_x, rtol=1e-5, atol=1e-6)
    for name in dp:
        np.testing.assert_allclose(dp[name], want_p[name], rtol=1e-5, atol=1e-6)


def square(seed):
    """Weights that keep the width."""
    return jax.tree.map(lambda leaf: leaf * 0.3, weights(seed, 12, 12))


def test_aux_comes_back_untouched():
    p = weights()

    def with_aux(p, x):
        return plain(p, x)[0], {"ids": jnp.arange(3), "norm": jnp.sum(x)}

    _, aux, pullback, kept = forward(with_aux, (p, X), jax.tree.leaves(p))
    np.testing.assert_array_equal(aux["ids"], [0, 1, 2])
    dp, dx = pullback.run(kept, jax.tree.leaves(p), BACK)
    assert dx.shape == X.shape
    assert set(dp) == {"w", "b"}


def test_dots_policy_keeps_products_and_nothing_of_the_weights():
    p = weights()
    known = [*jax.tree.leaves(p), X]
    _, _, _, kept = forward(plain, (p, X), known, remat_policy("dots"))
    assert [leaf.shape for leaf in kept] == [(3, 20)]
    assert remat_policy("none") is keep_fewest
    assert remat_policy("layer") is remat_policy(None) is keep_all_but_movement


class TestFloats:
    """Trees taken apart into what gradients flow through and the rest."""

    TREE = ({"x": jnp.ones(2), "ids": jnp.arange(3)}, [jnp.ones(1, jnp.bfloat16), jnp.bool_(True)])

    def test_apart_and_together(self):
        structure, floats, rest = Floats.of(self.TREE)
        assert [leaf.dtype for leaf in floats] == ["float32", "bfloat16"]
        assert [leaf.dtype for leaf in rest] == ["int32", "bool"]
        again = structure.join(floats, rest)
        assert jax.tree.structure(again) == jax.tree.structure(self.TREE)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(self.TREE), strict=True):
            assert a is b

    def test_nothing_flows_when_nothing_may(self):
        structure, floats, rest = Floats.of(self.TREE, differentiable=False)
        assert floats == []
        assert len(rest) == 4
        assert structure.mask == (False,) * 4

    def test_comparable(self):
        assert Floats.of(self.TREE)[0] == Floats.of(self.TREE)[0]
        assert Floats.of(self.TREE)[0] != Floats.of(self.TREE[0])[0]
