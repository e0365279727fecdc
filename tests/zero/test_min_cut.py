"""What to keep for a backward pass: the fewest bytes, by trying all there are."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.programs.jaxprs import Op, Var
from fzero.zero.min_cut import fewest_bytes
from fzero.zero.vjp import forward, keep_fewest


def var(size):
    return Var(jax.ShapeDtypeStruct((size,), np.int8))


@st.composite
def programs(draw):
    """Steps of up to two operands each, some not cheap; sizes; what is wanted; what is known."""
    values = [var(draw(st.integers(1, 9))) for _ in range(draw(st.integers(1, 3)))]
    inputs, ops, cheap = list(values), [], set()
    for _ in range(draw(st.integers(1, 6))):
        reads = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))  # x * x, too
        made = var(draw(st.integers(1, 9)))
        ops.append(Op(None, reads, [made]))
        if draw(st.booleans()):
            cheap.add(made)
        values.append(made)
    wanted = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
    known = draw(st.lists(st.sampled_from(inputs), max_size=2, unique=True))
    free = [x for x in known if draw(st.booleans())]
    return ops, values, wanted, known, free, cheap


def follows(ops, kept, cheap):
    """What can be computed from values by cheap operations."""
    there = set(kept)
    for op in ops:
        if op.results[0] in cheap and there.issuperset(op.operands):
            there.update(op.results)
    return there


@given(programs())
@settings(max_examples=300, deadline=None)
def test_nothing_smaller_would_do(program):
    ops, values, wanted, known, free, cheap = program

    def price(kept):
        sizes = (0 if x in free else x.aval.size * (16 if x in known else 1) for x in kept)
        return sum(sizes)

    found = fewest_bytes(ops, wanted, known, free, lambda op: op.results[0] in cheap)
    assert follows(ops, found, cheap).issuperset(wanted)
    enough = (
        price(kept)
        for number in range(len(values) + 1)
        for kept in itertools.combinations(values, number)
        if follows(ops, kept, cheap).issuperset(wanted)
    )
    assert price(found) == min(enough)


def test_of_choices_as_small_the_least_is_computed_again():
    """A chain of equal sizes: its end. (Its beginning would do as well, and all of them again.)"""
    chain = [var(4) for _ in range(4)]
    ops = [Op(None, [a], [b]) for a, b in itertools.pairwise(chain)]
    assert fewest_bytes(ops, [chain[-1]], (), (), lambda _: True) == [chain[-1]]
    assert fewest_bytes(ops, [], (), (), lambda _: True) == []


def test_sizes_beyond_32_bits():
    """Of a layer whose scores alone are gigabytes."""
    wide, narrow = Var(jax.ShapeDtypeStruct((2**33,), np.float32)), var(2**33)
    ops = [Op(None, [narrow], [wide])]
    assert fewest_bytes(ops, [wide], (), (), lambda _: True) == [narrow]


def norm(p, x):
    """A layer norm of 16 bits that computes in 32, then a product."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return (scaled * p["scale"] + p["bias"]).astype(x.dtype) @ p["w"], ()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_layer_norm_keeps_its_input_and_what_it_summed(dtype):
    """In 16 bits it kept four arrays of 32 for each of 16."""
    rng = np.random.default_rng(0)
    p = {"scale": jnp.asarray(rng.standard_normal(64), jnp.float32), "bias": jnp.ones(64),
         "w": jnp.asarray(rng.standard_normal((64, 8)), dtype)}  # fmt: skip
    x = jnp.asarray(rng.standard_normal((32, 64)), dtype)
    y, _, pullback, kept = forward(norm, (p, x), jax.tree.leaves(p), keep_fewest)
    wide = [leaf for leaf in kept if leaf.size == x.size]
    assert [leaf.dtype for leaf in wide] == [dtype]
    assert sum(leaf.nbytes for leaf in kept) <= x.nbytes + 4 * 2 * 4 * 32
    # The same values by the same operations.
    expected, pull, _ = jax.vjp(norm, p, x, has_aux=True)
    np.testing.assert_array_equal(y, expected)
    back = jnp.ones_like(y)
    got = pullback.run(kept, jax.tree.leaves(p), back)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(pull(back)), strict=True):
        # XLA compiles them apart, one operation at a time, and so as they stand.
        np.testing.assert_array_equal(a, b)
