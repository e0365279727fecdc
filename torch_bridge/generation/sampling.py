"""Which token comes next: greedy, or drawn with a temperature from the likeliest ones."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.keys import seed_key


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool | complex)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, of Python's or NumPy's kinds."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampling:
    """How `tb.generate` takes a token from the logits.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens may be drawn; None: all.
        top_p: only the likeliest ones, as few as reach this probability together; of those that
            `top_k` leaves.
        seed: of the random numbers, for all prompts or one for each. A token's are those of its
            prompt's seed and number and of its position in the row: they do not depend on the
            other prompts, nor on how rows are padded. With a seed for each, not on the number
            either.

    Raises:
        ValueError: a value out of its range.

    Example:
        >>> Sampling(temperature=0.8, top_k=50).greedy
        False
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | Sequence[int] | np.ndarray[Any, Any] = 0

    def __post_init__(self) -> None:
        low, high = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        if not (_is_real(temperature) and (temperature == 0 or low <= temperature <= high)):
            raise ValueError(
                f"Sampling: temperature={temperature!r}: expected 0 or more, as float32 holds it"
            )
        if top_k is not None and not (is_whole(top_k) and top_k >= 1):
            raise ValueError(
                f"Sampling: top_k={top_k!r}: expected a whole number, 1 or more, or None"
            )
        if not (_is_real(top_p) and low <= top_p <= 1):
            raise ValueError(
                f"Sampling: top_p={top_p!r}: expected more than 0, as float32 holds it, and at most"
                " 1"
            )
        if np.asarray(self.seed).dtype.kind not in "iu":
            raise ValueError(
                f"Sampling: seed={self.seed!r}: expected a whole number of at most 64 bits, or one"
                " for each prompt"
            )

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def keys(self, rows: int) -> np.ndarray[Any, Any]:
        """A key for each prompt, as its bits; nothing where nothing is drawn.

        Raises:
            ValueError: there are seeds for another number of prompts.
        """
        if self.greedy:
            return np.zeros((rows, 0), np.uint32)
        if not np.ndim(self.seed):
            key = seed_key(self.seed)  # type: ignore[arg-type]
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))
        else:
            seeds = np.asarray(self.seed)
            if seeds.shape != (rows,):
                raise ValueError(f"Sampling: {len(seeds)} seeds for {rows} prompts")
            keys = jnp.stack([seed_key(seed) for seed in seeds.tolist()])
        return np.asarray(jax.random.key_data(keys))


GREEDY = Sampling()


@dataclass(frozen=True)
class Draw:
    """What of a `Sampling` a program is compiled for; the rest are arguments of it."""

    greedy: bool
    top_k: int | None
    nucleus: bool

    @classmethod
    def of(cls, sampling: Sampling) -> Draw:
        """The form of a sampling."""
        if sampling.greedy:
            return cls(True, None, False)
        return cls(False, sampling.top_k, sampling.top_p < 1)

    def __call__(self, logits: Any, keys: Any, positions: Any, numbers: Any) -> Any:
        """The next token of each row, int32 `(B,)`.

        Args:
            logits: `(B, V)`.
            keys: bits of each row's key.
            positions: of each row's new token.
            numbers: temperature and top-p.
        """
        if self.greedy:
            return jnp.argmax(logits, -1).astype(np.int32)
        temperature, top_p = numbers
        wide = logits.astype(np.float32)
        # From the largest: what a small temperature takes beyond float32 is then not the likeliest.
        scaled = (wide - jnp.max(wide, -1, keepdims=True)) / temperature
        if self.top_k is not None or self.nucleus:
            scaled = self._likeliest(scaled, top_p)
        own = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), positions)
        return jax.vmap(jax.random.categorical)(own, scaled).astype(np.int32)

    def _likeliest(self, logits: Any, top_p: Any) -> Any:
        """Logits without the tokens that are not to be drawn."""
        count = min(self.top_k or logits.shape[-1], logits.shape[-1])
        top, tokens = jax.lax.top_k(logits, count)
        if not self.nucleus:
            return jnp.where(logits < top[:, -1:], -jnp.inf, logits)
        probs = jax.nn.softmax(top, -1)
        before = jnp.cumsum(probs, -1) - probs  # of all likelier ones: always 0 for the first
        # By index: of tokens that are equally likely, as in 16 bits many are, some are left out.
        rows = jnp.arange(len(logits))[:, None]
        none = jnp.full_like(logits, -jnp.inf)
        return none.at[rows, tokens].set(jnp.where(before < top_p, top, -jnp.inf))
