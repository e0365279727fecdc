"""What stands for an array that is elsewhere: it has its shape, and refuses to be its values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fzero.errors import PlacementError
from fzero.tree import leaf_bytes


# What arrays can do by name: `leaf.at[0].set(1)`, `leaf.mean()`, `leaf.T`.
_OF_ARRAYS = frozenset(name for name in dir(jax.Array) if not name.startswith("_"))
_VALUES = jax.Array, np.ndarray, np.generic, int, float, complex


class _NotThere(PlacementError, AttributeError):
    """Python asks for attributes to find out what something is; it is no array."""


class Handle:
    """What stands for an array that is not, or not whole, in one memory: it has its shape.

    A leaf to `jax.tree`. Whatever would need the values is refused, and so is a comparison with
    values, which Python would otherwise answer by identity. Handles differ by identity.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return leaf_bytes(self)

    @property
    def __jax_array__(self) -> Any:
        """Asked for by `jax.jit`, `jax.lax.scan` and the like, where one is among the arguments."""
        return self._used()

    def _used(self, *_: Any, **__: Any) -> Any:
        raise PlacementError(self._where())

    def _where(self) -> str:
        """What is expected where the values are wanted, and how to bring them back."""
        return (
            f"a leaf {typed(self.shape, self.dtype)} is on disk, in slabs or on its way; expected"
            " an array in device memory. `fz.reload(state)` brings it back."
        )

    def _computed(self, *_: Any, **__: Any) -> Any:
        """Python's operators and what arrays can do: `jax.tree.map(lambda x: x / 2, state)`."""
        return self._used()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _computed
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = _computed
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _computed
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __float__ = __int__ = _computed
    __len__ = __iter__ = __bool__ = __round__ = __index__ = __array__ = _computed

    def __eq__(self, other: object) -> bool:
        return self._used() if isinstance(other, _VALUES) else self is other

    __hash__ = object.__hash__

    if not TYPE_CHECKING:  # to a type checker it has what it has

        def __getattr__(self, name: str) -> Any:
            if name in _OF_ARRAYS:
                raise _NotThere(self._where())
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __copy__(self) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise PlacementError(
            f"a leaf {typed(self.shape, self.dtype)} is on disk, in slabs or on its way: a handle"
            " cannot be pickled. Reload the state first (fz.reload), or save a checkpoint."
        )


def typed(shape: Sequence[int], dtype: Any) -> str:
    """A shape and a dtype as messages say them."""
    return f"{dtype}[{','.join(map(str, shape))}]"
