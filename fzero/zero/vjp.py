"""Reverse mode with the weights factored out of what is kept for the backward pass.

`jax.vjp` keeps whatever its backward pass reads, gathered weights included. Here the residuals are
taken apart: leaves that *are* a weight (or another known array) are replaced by a mark, and the
backward pass is given them anew. That is what lets ZeRO-3 drop a gathered layer after its forward
pass, and a pipeline stage keep activations only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.tree import PyTree


# Recomputed rather than kept, because they only move or convert data. Keeping them would keep
# transposed or cast copies of the weights.
_MOVEMENT = frozenset(
    ("transpose", "convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "slice",
     "expand_dims", "rev", "copy", "copy_p", "split", "concatenate", "dynamic_slice")
)  # fmt: skip


def keep_all_but_movement(prim: Any, *_: Any, **__: Any) -> bool:
    """Checkpoint policy: keep every intermediate result except casts and reshapes."""
    return prim.name not in _MOVEMENT


def remat_policy(remat: str) -> Callable[..., Any]:
    """The checkpoint policy of `Plan.remat` (`layer` keeps nothing and needs none)."""
    if remat == "dots":
        policy: Callable[..., Any] = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return policy
    return keep_all_but_movement


@dataclass(frozen=True)
class Floats:
    """A pytree taken apart into what gradients flow through and the rest.

    Args:
        treedef: structure of the whole.
        mask: per leaf, whether it is floating point.
    """

    treedef: Any
    mask: tuple[bool, ...]

    @staticmethod
    def of(tree: PyTree, differentiable: bool = True) -> tuple[Floats, list[Any], list[Any]]:
        """The structure, the leaves that gradients flow through (if any may), and the others."""
        leaves, treedef = jax.tree.flatten(tree)
        mask = tuple(differentiable and bool(jnp.issubdtype(x.dtype, np.inexact)) for x in leaves)
        parts: tuple[list[Any], list[Any]] = ([], [])
        for leaf, is_float in zip(leaves, mask, strict=True):
            parts[not is_float].append(leaf)
        return Floats(treedef, mask), *parts

    def join(self, floats: Sequence[Any], rest: Sequence[Any]) -> PyTree:
        """The tree again."""
        f, r = iter(floats), iter(rest)
        return jax.tree.unflatten(self.treedef, [next(f if m else r) for m in self.mask])


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Pullback:
    """A backward pass as data: how to run it once the known arrays are back.

    A static pytree node, so that it travels through loops beside the arrays it was taken from.

    Args:
        treedef: structure of the pulled-back function with all its leaves.
        known: per leaf, its index among the known arrays, or `None` for a kept one.
    """

    treedef: Any
    known: tuple[int | None, ...]

    @property
    def reads(self) -> list[int]:
        """Which of the known arrays it reads."""
        return sorted({index for index in self.known if index is not None})

    def run(self, kept: Sequence[Any], known: Sequence[Any], cotangent: Any) -> Any:
        """Gradients of all primal inputs."""
        own = iter(kept)
        leaves = [next(own) if index is None else known[index] for index in self.known]
        return jax.tree.unflatten(self.treedef, leaves)(cotangent)


def forward(
    function: Callable[..., tuple[Any, Any]], primals: Sequence[Any], known: Sequence[Any]
) -> tuple[Any, Any, Pullback, list[Any]]:
    """Runs `function(*primals) -> (out, aux)` and takes its backward pass apart.

    Args:
        function: what to differentiate; `aux` gets no gradient.
        primals: its arguments; gradients exist for all of them.
        known: arrays that need not be kept, because the caller will have them again.

    Returns:
        `(out, aux, pullback, kept)`; `kept` holds no known array.
    """
    out, pull, aux = jax.vjp(function, *primals, has_aux=True)
    leaves, treedef = jax.tree.flatten(pull)
    index = {id(array): i for i, array in reversed(list(enumerate(known)))}
    marks = tuple(index.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, mark in zip(leaves, marks, strict=True) if mark is None]
    return out, aux, Pullback(treedef, marks), kept
