"""Whether an optimizer leaves rows alone that only fill up a rank.

Where a stack is cut unevenly, ranks with fewer of its layers hold rows of zeros. An update that
works element by element, or adds up rows (norms), does not see them. One that divides by how many
there are (means), or draws random numbers for a whole leaf, does, and would be another update than
the same plan's without a pipeline. Such an optimizer is refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core

from fzero.blueprint import Blueprint
from fzero.errors import PlanError
from fzero.tree import PyTree
from fzero.zero.partition import Home, Split, layout_leaves, map_splits


# Operations that mix rows in other ways than by adding them up.
_MIXING = frozenset(
    ("argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "fft", "iota",
     "random_bits", "random_gamma", "reduce_max", "reduce_min", "reduce_prod", "rev", "rng_uniform",
     "scatter", "scatter-add", "sort", "threefry2x32", "top_k")
)  # fmt: skip


def require_rows_apart(blue: Blueprint) -> None:
    """Raises `PlanError` if a plan has filling rows and the optimizer would count them."""
    filled = sorted(
        {s.path.split("/")[0] for s in layout_leaves(blue.params) if s.home and -1 in s.home.rows}
    )
    if not filled or blue.tx is None:
        return
    found = _difference(_traced(blue, _kept), _traced(blue, _logical))
    if found is None:
        return
    assert blue.stages is not None
    homes = blue.stages.homes
    held = {name: _layers_per_rank(homes[name]) for name in filled}
    raise PlanError(
        f"plan: the optimizer takes means of whole leaves, or mixes their rows in other ways (its"
        f" operation {found}), and ranks hold different numbers of a stack's layers ({held})."
        " Shorter ranks are filled up with rows of zeros, which would count. Choose a partition"
        " that gives every rank that holds some of them equally many, or an optimizer that works"
        " element by element or with norms, or pipe=1"
    )


def _layers_per_rank(home: Home) -> dict[int, int]:
    rows = np.reshape(home.rows, (len(home.ranks), -1))
    return dict(zip(home.ranks, np.sum(rows >= 0, axis=1).tolist(), strict=True))


def _kept(split: Split) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(split.shape, split.dtype)


def _logical(split: Split) -> jax.ShapeDtypeStruct:
    if split.home is None or not split.home.rows:
        return _kept(split)
    layers = sum(row >= 0 for row in split.home.rows)
    return jax.ShapeDtypeStruct((layers, *split.shape[1:]), split.dtype)


def _traced(blue: Blueprint, shape: Any) -> Any:
    """The update of leaves of some shapes, as a jaxpr."""
    assert blue.tx is not None
    tx = optax.with_extra_args_support(blue.tx)
    params = map_splits(shape, blue.params)
    state = jax.eval_shape(tx.init, params)
    loss = jax.ShapeDtypeStruct((), np.float32)

    def update(grads: PyTree, state: PyTree, params: PyTree, loss: jax.Array) -> PyTree:
        return tx.update(grads, state, params, value=loss)

    return jax.make_jaxpr(update)(params, state, params, loss)


def _difference(one: Any, other: Any) -> str | None:
    """The first operation in which two programs differ by more than the shapes they work on."""
    consts = zip(getattr(one, "consts", ()), getattr(other, "consts", ()), strict=False)
    if not all(_same(a, b) for a, b in consts):
        return "on a constant array"
    one, other = getattr(one, "jaxpr", one), getattr(other, "jaxpr", other)
    for a, b in itertools.zip_longest(one.eqns, other.eqns):
        if a is None or b is None or a.primitive.name != b.primitive.name:
            return str((a or b).primitive.name)
        name: str = a.primitive.name
        pairs = list(zip(a.invars, b.invars, strict=True))
        literals = [(x, y) for x, y in pairs if isinstance(x, core.Literal)]
        if any(not isinstance(y, core.Literal) or not _same(x.val, y.val) for x, y in literals):
            return f"{name} with a number that counts rows"
        pairs += list(zip(a.outvars, b.outvars, strict=True))
        if name in _MIXING and any(x.aval.shape != y.aval.shape for x, y in pairs):
            return name
        for x, y in zip(_bodies(a), _bodies(b), strict=True):
            found = _difference(x, y)
            if found is not None:
                return found
    return None


def _bodies(equation: Any) -> list[Any]:
    """The programs that an operation runs."""
    leaves = jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
    )
    return [x for x in leaves if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]


def _same(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()
