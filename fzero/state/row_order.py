"""In which rows an array keeps a stack's layers: in another order they are arrays of the same look.

`TrainState.rows` says it of a state. But fields of a state are handed on, as in
`state.replace(params=other.params)`, and a step would run the layers in a wrong order. So an array
is known by its identity to lie as the first state said that had it, and no state takes it where
another order is meant. What is computed of such arrays is new, and believed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from fzero.axes import PIPE
from fzero.errors import StateError
from fzero.state.array_facts import ByIdentity
from fzero.tree import PyTree, key_name, path_name


# Of an array (or what stands for one elsewhere): the rows of its stack.
_ROWS: ByIdentity[tuple[int, ...]] = ByIdentity()


def require_alike(state: Any, fields: dict[str, PyTree]) -> None:
    """Notes how the layers of a pipeline's arrays lie.

    Args:
        state: the state that has them.
        fields: its fields, by name.

    Raises:
        StateError: names arrays that a state of another order had first.
    """
    if not _is_pipelined(state.step):
        return
    leaves, treedef = jax.tree.flatten(fields)
    wrong = []
    for leaf, (path, wanted) in zip(leaves, meant(treedef, state.rows), strict=True):
        if isinstance(leaf, jax.core.Tracer) or PIPE not in _spec(leaf):
            continue
        found = _first_said(leaf, wanted)
        if found != wanted:
            wrong.append(f"{path}: expected layers {rows_text(wanted)}, got {rows_text(found)}")
    if wrong:
        raise StateError(
            "TrainState: these arrays are of a state whose schedule or partition keeps layers in"
            " another order: " + "; ".join(wrong[:6]) + (" and more" if wrong[6:] else "")
            + ". Bring that state to this one's plan first, with fz.replan"
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def meant(treedef: Any, rows: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Of each leaf of a tree: its path, and the rows of its stack where it is one's."""
    of, found = dict(rows), []
    tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        # Of an optimizer's leaf, the last: groups of leaves may have a stack's name as well.
        named = [key for key in map(key_name, path) if key in of]
        found.append((path_name(path), of[named[-1]] if named else ()))
    return found


def is_of_a_state(leaf: Any) -> bool:
    """Whether some pipeline's state has, or had, this very array."""
    return _ROWS.get(leaf) is not None


def _first_said(leaf: Any, rows: tuple[int, ...]) -> tuple[int, ...]:
    """How an array's layers lie; as is said now if nobody did."""
    known = _ROWS.get(leaf)
    if known is None:
        _ROWS.note(leaf, rows)
    return rows if known is None else known


def _is_pipelined(step: Any) -> bool:
    """Whether a state is a pipeline's, by where its step count lies."""
    if isinstance(step, jax.core.Tracer):
        return False
    mesh = getattr(getattr(step, "sharding", None), "mesh", None)
    return mesh is not None and mesh.shape.get(PIPE, 1) > 1


def _spec(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return ()
    return tuple(getattr(getattr(leaf, "sharding", None), "spec", ()))


def rows_text(rows: tuple[int, ...]) -> str:
    """As a message says them."""
    return f"in the rows {list(rows)}" if rows else "in order"
