"""The calls of `forward` in a loss: what each leaves to the next, within functions of JAX, too.

Buffers go from call to call beside the values that `forward` returns. A function that JAX traces
once and runs several times (`jax.vmap`, a loop), or keeps for another call (`jax.jit`,
`jax.checkpoint`), hands on nothing but what it returns, and has one key: within one a call may
neither write buffers nor draw random numbers. A derivative runs its function once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fzero.compat import current_trace, derivatives_since, primal, read_inputs
from fzero.errors import some_of
from fzero.tree import PyTree, named_leaves


class ForwardCalls:
    """`forward` of one loss: each call has a key of its own, and what the one before left.

    Args:
        apply: `(left, key, args, kwargs)` to an output and what is left, the very leaves that came
            where nothing was written.
        left: what the first call finds.
        rng: the step's key, if there is one.
        refused: the error that says what a call would do within a function that JAX transforms.
    """

    def __init__(
        self,
        apply: Callable[..., tuple[Any, PyTree]],
        left: PyTree,
        rng: jax.Array | None,
        refused: Callable[[str], Exception],
    ) -> None:
        self._apply, self.left, self._rng, self._refused = apply, left, rng, refused
        self._num_calls, self._kept = 0, False
        self._began = current_trace()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = None if self._rng is None else jax.random.fold_in(self._rng, self._num_calls)
        self._num_calls += 1
        derivatives = derivatives_since(self._began)
        if derivatives is None and key is not None and self._draws(key, args, kwargs):
            raise self._within("draws random numbers, which each row, turn and call would share")
        out, left = self._apply(self.left, key, args, kwargs)
        was = dict(named_leaves(self.left))
        written = [path for path, leaf in named_leaves(left) if leaf is not was.get(path)]
        if written and derivatives is None:
            raise self._within(f"writes {some_of(written, 4)}, which would be lost there")
        if written and self._kept:
            raise self._within(
                f"writes {some_of(written, 4)} afterwards, of which the next call of that function,"
                " which JAX keeps, would not learn: let the calls that write come first"
            )
        self._kept = self._kept or derivatives is None
        self.left = jax.tree.map(partial(primal, derivatives=derivatives or ()), left)
        return out

    def _draws(self, key: jax.Array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what a call gives depends on its key."""

        def given(key: jax.Array) -> list[Any]:
            # Containers of its own: the call is made once more.
            own_args, own_kwargs = jax.tree.map(lambda leaf: leaf, (args, kwargs))
            out = self._apply(self.left, key, own_args, own_kwargs)
            return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

        return read_inputs(jax.make_jaxpr(given)(key))[0]

    def _within(self, what: str) -> Exception:
        return self._refused(
            "the loss calls forward within a function that JAX transforms (jax.checkpoint, jax.jit,"
            f" jax.vmap, a loop), and forward {what}. Call it as it is, on all rows (what is kept"
            " for the backward pass, a plan says: Plan(remat='dots'))"
        )
