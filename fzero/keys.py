"""Random keys: which key a state's operations fold for what, in one place.

A state has one key, `state.rng`, which never changes. Every use folds its own way down from it:

    link of the chain / layer of a stack                  initial values
    TRAIN / step / call / block of rows / layer           a training pass
    EVAL / block of rows / layer                          an evaluation

`call` counts the batches of an accumulation. Blocks of rows are numbered over devices and
microbatches, so that draws follow rows, however a batch is divided. A model's `init` gets the key
itself, so that `fz.init(model, ..., rng)` has the values of `model.init(rng)`; passes start with a
constant that no link's number reaches. Ways of one use are equally long: no key is another one's.
Several draws within one layer fold further from the layer's key: those of a converted module by
number (`torch_bridge.export.interpret`), flax's by stream (`fzero.flax.nnx_modules`).
"""

from __future__ import annotations

from typing import Any

import jax


# Numbers that nobody counts up to, or splits a key into.
TRAIN, EVAL = 0x665A_0001, 0x665A_0002


def seed_key(seed: int) -> jax.Array:
    """The key of a seed of at most 64 bits: `jax.random.key` looks at the last 32 of them.

    Raises:
        ValueError: the seed has more.
    """
    seed = int(seed)
    if -(2**31) <= seed < 2**32:
        return jax.random.key(seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed of at most 64 bits is expected, got {seed}")
    high, low = seed >> 32 & 0xFFFF_FFFF, seed & 0xFFFF_FFFF
    return jax.random.fold_in(jax.random.key(low), high)


def step_key(rng: jax.Array, step: Any, call: Any = 0) -> jax.Array:
    """The key of one batch of a training step.

    Args:
        rng: the state's key.
        step: optimizer steps taken before.
        call: batches accumulated before.
    """
    key = jax.random.fold_in(jax.random.fold_in(rng, TRAIN), step)
    return jax.random.fold_in(key, call)


def eval_key(rng: jax.Array) -> jax.Array:
    """The key of evaluations: the same at every step."""
    return jax.random.fold_in(rng, EVAL)


def block_key(key: jax.Array, block: Any) -> jax.Array:
    """The key of one block of rows: those of one microbatch on one device."""
    return jax.random.fold_in(key, block)


def layer_key(key: jax.Array, number: Any) -> jax.Array:
    """The key of a layer, by its number in the chain (or of a link, for initial values)."""
    return jax.random.fold_in(key, number)
