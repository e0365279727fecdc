"""Products of rows that are sorted by group, each with the matrix of its group.

XLA computes `jax.lax.ragged_dot` on CPUs and (jaxlib 0.10.2) GPUs as one dense product with zeros
where a row is of another group: as many times the work as there are groups. Here rows are laid out
in blocks of one group each, and a loop multiplies block after block; what is wasted is the filling
of each group's last block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


# Rows of a block: a quarter of an even group, so that filling is about an eighth of the rows; no
# more than this, at which a product runs at full speed.
MOST_ROWS = 1024


@dataclass(frozen=True)
class Grouped:
    """Rows sorted by group, as `fz.experts` hands them out.

    Args:
        sizes: int32 `(groups,)`: how many rows each has; rows behind them belong to none.
        rows: how many rows there are.
    """

    sizes: jax.Array
    rows: int

    def dot(self, rows: jax.Array, weight: jax.Array) -> jax.Array:
        """Rows `(rows, inputs)` times their own matrix of `(groups, inputs, outputs)`.

        Rows of no group give 0.
        """
        dtype = np.promote_types(rows.dtype, weight.dtype)
        return grouped_dot(rows.astype(dtype), weight.astype(dtype), self.sizes)

    def each(self, values: jax.Array) -> jax.Array:
        """For each row, its own of `(groups, ...)`, such as a bias."""
        of = jnp.searchsorted(jnp.cumsum(self.sizes), jnp.arange(self.rows), side="right")
        return values[jnp.minimum(of, values.shape[0] - 1)]


@jax.custom_vjp
def grouped_dot(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each row times the matrix of its group.

    Args:
        rows: `(rows, inputs)`, sorted by group.
        weight: `(groups, inputs, outputs)`, of the same dtype.
        sizes: integers `(groups,)`; rows behind the last group are of none and give 0.

    Returns:
        `(rows, outputs)`; products are accumulated in float32 at least.

    Example:
        >>> import jax.numpy as jnp
        >>> weight = jnp.array([[[1.0]], [[10.0]]])
        >>> grouped_dot(jnp.ones((4, 1)), weight, jnp.array([1, 2])).ravel().tolist()
        [1.0, 10.0, 10.0, 0.0]
    """
    return _forward(rows, weight, sizes)[0]


def _forward(rows: jax.Array, weight: jax.Array, sizes: jax.Array) -> Any:
    blocks = _Blocks.of(rows.shape[0], sizes)
    return blocks.times(rows, weight), (rows, weight, sizes)


def _backward(residuals: Any, given: jax.Array) -> Any:
    rows, weight, sizes = residuals
    blocks = _Blocks.of(rows.shape[0], sizes)
    by_rows = blocks.times(given, jnp.swapaxes(weight, 1, 2))
    return by_rows, blocks.outer(rows, given, weight.shape).astype(weight.dtype), None


grouped_dot.defvjp(_forward, _backward)


@dataclass(frozen=True)
class _Blocks:
    """Where rows lie in blocks of one group each.

    Args:
        group: of each block, its group: `(blocks,)`.
        row: of each position in a block, its row: `(blocks, rows of a block)`.
        filled: whether there is one.
        position: of each row, its position: `(rows,)`.
        held: whether a row is of any group.
    """

    group: jax.Array
    row: jax.Array
    filled: jax.Array
    position: jax.Array
    held: jax.Array

    @classmethod
    def of(cls, num: int, sizes: jax.Array) -> _Blocks:
        """Blocks for so many rows."""
        groups, sizes = sizes.shape[0], sizes.astype(jnp.int32)
        size = min(max(num // (4 * groups), 1), MOST_ROWS) if groups > 1 else max(num, 1)
        most = num // size + min(groups, num) if groups > 1 else 1
        ends = jnp.cumsum(sizes)
        first = jnp.cumsum(-(-sizes // size)) - -(-sizes // size)  # block of each group
        group = jnp.searchsorted(first, jnp.arange(most), side="right") - 1
        # (Empty groups begin where the next one does: the last that begins there has the rows.)
        within = (jnp.arange(most) - first[group])[:, None] * size + jnp.arange(size)
        filled = within < sizes[group][:, None]
        row = jnp.where(filled, (ends - sizes)[group][:, None] + within, 0)
        rows = jnp.arange(num)
        own = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), groups - 1)
        held = rows < ends[-1]
        position = first[own] * size + rows - (ends - sizes)[own]
        return cls(group, row, filled, jnp.where(held, position, 0), held)

    def times(self, rows: jax.Array, weight: jax.Array) -> jax.Array:
        """Each row times its group's matrix."""
        wide = _wide(rows)

        def one(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            own, group = block
            out = jnp.dot(own, weight[group], preferred_element_type=wide)
            return None, out.astype(rows.dtype)

        out = jax.lax.scan(one, None, (self._laid(rows), self.group))[1]
        found = out.reshape(-1, out.shape[-1])[self.position]
        return jnp.where(self.held[:, None], found, jnp.zeros((), rows.dtype))

    def outer(self, rows: jax.Array, given: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """For each group, its rows' products with what is given for them: `shape`, summed wide."""
        wide = _wide(rows)

        def one(sums: jax.Array, block: Any) -> tuple[jax.Array, None]:
            own, back, group = block
            product = jnp.dot(own.T, back, preferred_element_type=wide)
            return sums.at[group].add(product), None

        laid = self._laid(rows), self._laid(given), self.group
        return jax.lax.scan(one, jnp.zeros(shape, wide), laid)[0]

    def _laid(self, rows: jax.Array) -> jax.Array:
        return jnp.where(self.filled[..., None], rows[self.row], jnp.zeros((), rows.dtype))


def _wide(rows: jax.Array) -> jnp.dtype:
    """In what products are accumulated."""
    return np.promote_types(rows.dtype, jnp.float32)
