"""Blocks of 8-bit integers: what comes back, and what must not be hidden."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fzero.zero.quantize import BLOCK, decode, encode, encoded_bytes
from tests.support.zeropp import image


def there_and_back(values):
    rows = jnp.asarray(values).reshape(1, -1)
    sent = jax.jit(encode)(rows)
    assert sent.dtype == jnp.int8
    assert sent.shape == (1, encoded_bytes(rows.size))
    return np.asarray(jax.jit(decode, static_argnums=1)(sent, rows.size))[0]


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
def test_every_value_is_within_half_a_step_of_its_block(size):
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    values *= np.repeat(np.float32(10.0) ** np.arange(-8, 8, 4), BLOCK)[:size]
    found = there_and_back(values)
    for start in range(0, size, BLOCK):
        own = slice(start, start + BLOCK)
        step = np.abs(values[own]).max() / 127
        assert np.abs(found[own] - values[own]).max() <= step / 2 * (1 + 1e-5)
        largest = np.abs(values[own]).argmax()
        np.testing.assert_allclose(found[own][largest], values[own][largest], 3e-7)
    assert found.tobytes() == image(values).tobytes()


def test_blocks_of_zeros_and_rows_are_apart():
    rows = np.zeros((2, 2 * BLOCK), np.float32)
    rows[0, 0], rows[1, BLOCK] = 5.0, -3e-9
    found = np.asarray(decode(encode(jnp.asarray(rows)), 2 * BLOCK))
    np.testing.assert_allclose(found, rows, 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_hidden(bad):
    values = np.ones(2 * BLOCK + 3, np.float32)
    values[BLOCK + 5] = bad
    found = there_and_back(values)
    assert np.isnan(found[BLOCK : 2 * BLOCK]).all()
    assert (found[:BLOCK] == 1).all()
    assert (found[2 * BLOCK :] == 1).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_largest_finite_numbers_stay_finite_in_their_dtype(dtype):
    largest = jnp.finfo(dtype).max
    found = there_and_back(np.array([largest, 0, -largest], dtype))
    # float32's own maximum may be one step away, beyond which there is none.
    back = np.asarray(jnp.asarray(found).astype(dtype).astype(jnp.float32))
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back, [float(largest), 0, -float(largest)], 3e-7)
