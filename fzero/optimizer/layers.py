"""A stack's leaf as its layers, and the stacks that an optimizer is told of.

Optimizers tell leaves apart by their shapes and places in a tree. To one that shall see each layer
of a `Stack`, a leaf `(L, ...)` is a node with L children: masks and labels that are trees of the
parameters' structure are prefixes of that, and functions of leaves see the layers' own shapes.
The path of a layer is that of the leaf, its number, and the last step of the leaf's path again:
each layer's differs, and the last name is that of layers written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from fzero.compat import set_within
from fzero.errors import PlanError
from fzero.tree import PyTree, key_name


class LayerKey(jax.tree_util.SequenceKey):  # type: ignore[misc]
    """The last step of a layer's path: its number (`idx`), and otherwise as that of the leaf.

    Masks and labels ask for the last name of a path (`path[-1].key.endswith("bias")`), or for how
    it is written (`jax.tree_util.keystr(path).endswith("['bias']")`).
    """

    def __init__(self, number: int, leaf: Any) -> None:
        super().__init__(number)
        self._leaf = leaf
        for word in ("key", "name"):
            if hasattr(leaf, word):
                setattr(self, word, getattr(leaf, word))

    def __str__(self) -> str:
        return str(self._leaf)


@jax.tree_util.register_pytree_with_keys_class
class _Layer:
    """A layer's value, below its number, at a key that reads as the last of its leaf's path."""

    def __init__(self, key: LayerKey, value: Any) -> None:
        self.key, self.value = key, value

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[LayerKey, Any]], LayerKey]:
        """The value with its key, and the key."""
        return ((self.key, self.value),), self.key

    def tree_flatten(self) -> tuple[tuple[Any], LayerKey]:
        """The value, and the key."""
        return (self.value,), self.key

    @classmethod
    def tree_unflatten(cls, key: LayerKey, values: Sequence[Any]) -> _Layer:
        """The inverse of `tree_flatten`."""
        return cls(key, values[0])


class _LeafOf(str):
    """A stack's name, with the last step of a leaf's path beside it; trees differ by the name."""

    last: Any = None


@jax.tree_util.register_pytree_with_keys_class
class Layers:
    """The layers of one leaf of a stack, in order, each a leaf of its own.

    Args:
        stack: the stack's name.
        layers: their values.
        last: the last step of the leaf's path, if it has a name below the stack's.
    """

    def __init__(self, stack: str, layers: Sequence[Any], last: Any = None) -> None:
        self.stack = _LeafOf(stack)
        self.layers = tuple(one.value if isinstance(one, _Layer) else one for one in layers)
        self.stack.last = last

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], str]:
        """Children with their numbers, and the stack's name."""
        children, stack = self.tree_flatten()
        return [(jax.tree_util.SequenceKey(i), one) for i, one in enumerate(children)], stack

    def tree_flatten(self) -> tuple[tuple[Any, ...], str]:
        """Children, and the stack's name."""
        last = self.stack.last
        if last is None:
            return self.layers, self.stack
        return tuple(
            _Layer(LayerKey(i, last), one) for i, one in enumerate(self.layers)
        ), self.stack

    @classmethod
    def tree_unflatten(cls, stack: _LeafOf, layers: Sequence[Any]) -> Layers:
        """The inverse of `tree_flatten`."""
        return cls(stack, layers, stack.last)


def is_layers(node: Any) -> bool:
    """`is_leaf` for trees with leaves taken apart."""
    return isinstance(node, Layers)


@dataclass(frozen=True)
class Rows:
    """Where the layers of a stack lie on dim 0 of its leaves.

    Args:
        num: rows; more than layers where a pipeline fills up shorter ranks.
        order: the row of each layer.
    """

    num: int
    order: tuple[int, ...]

    @classmethod
    def in_order(cls, num: int) -> Rows:
        """As many rows as layers, as stacks have them that no pipeline cuts."""
        return cls(num, tuple(range(num)))

    @property
    def filled(self) -> bool:
        """Whether some rows are no layers."""
        return len(self.order) < self.num

    def own(self) -> np.ndarray[Any, Any]:
        """For each row whether it is a layer."""
        return np.isin(np.arange(self.num), self.order)

    def of_leaf(self, leaf: Any) -> Rows:
        """These, or rows in order for a leaf with another number of them."""
        num = leaf.shape[0]
        return self if num == self.num else Rows.in_order(num)


@dataclass(frozen=True)
class Scope:
    """What an optimizer is told about the parameters that it is given.

    Args:
        stacks: the rows of each stack, by the first key of its leaves' paths.
        spread: asks the compiler to divide a stack's array, layers on dim 0, over devices.
        checking: whether it is only compared with the same on layers written out.
    """

    stacks: Mapping[str, Rows] = field(default_factory=dict)
    spread: Callable[[str, jax.Array], jax.Array] = lambda stack, value: value
    checking: bool = False


_SCOPE: ContextVar[Scope | None] = ContextVar("fzero_optimizer_scope", default=None)


def current_scope() -> Scope | None:
    """The scope that a transformation is called in; `None` outside of fzero."""
    return _SCOPE.get()


def scope_of(scope: Scope) -> AbstractContextManager[None]:
    """Tells transformations called inside about the parameters."""
    return set_within(_SCOPE, scope)


def stack_of(path: Sequence[Any], stacks: Mapping[str, Rows]) -> str | None:
    """The stack that a leaf of a params tree belongs to."""
    name = key_name(path[0]) if path else ""
    return name if name in stacks else None


def as_layers(tree: PyTree, stacks: Mapping[str, Rows]) -> PyTree:
    """Shapes in the parameters' structure, with stacked leaves as `Layers`.

    Args:
        tree: arrays or their shapes.
        stacks: the stacks' rows.
    """

    def of(path: Any, leaf: Any) -> Any:
        stack = stack_of(path, stacks)
        if stack is None or is_layers(leaf):
            return leaf
        layers = [one_layer(leaf)] * len(stacks[stack].of_leaf(leaf).order)
        return Layers(stack, layers, last_step(path))

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=is_layers)


def last_step(path: Sequence[Any]) -> Any:
    """The last step of the path of a stack's leaf; `None` of a stack that is one leaf itself."""
    return path[-1] if len(path) > 1 else None


def one_layer(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of a layer of a leaf."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def layers_at_leaves(tree: PyTree) -> PyTree:
    """A tree with `Layers` at its leaves alone, and only of values of one shape.

    Where an optimizer keeps a tree per leaf, a node of L trees becomes a tree of nodes of L leaves.
    Layers that it treats differently are kept as a tuple.
    """

    def of(node: Any) -> Any:
        if not is_layers(node):
            return node
        if len({jax.tree.structure(child) for child in node.layers}) > 1:
            return node.layers
        return jax.tree.map(lambda *leaves: _alike(node.stack, leaves), *node.layers)

    return jax.tree.map(of, tree, is_leaf=is_layers)


@dataclass(frozen=True, eq=False)
class Numbered:
    """A leaf's shape, and its number in its tree."""

    shape: tuple[int, ...]
    dtype: Any
    at: int


def numbered(tree: PyTree) -> PyTree:
    """A tree's leaves as their numbers, `layers_at_leaves`."""
    leaves, structure = jax.tree.flatten(tree)
    numbers = [Numbered(leaf.shape, leaf.dtype, i) for i, leaf in enumerate(leaves)]
    return layers_at_leaves(jax.tree.unflatten(structure, numbers))


def _alike(stack: str, leaves: tuple[Any, ...]) -> Any:
    kinds = {(tuple(leaf.shape), leaf.dtype) for leaf in leaves}
    return Layers(stack, leaves) if len(kinds) == 1 else leaves


def with_extra_args(tx: object, wrapper: str) -> optax.GradientTransformationExtraArgs:
    """The transformation that a wrapper is given, whose update takes any further argument.

    Raises:
        PlanError: it is none; names the wrapper.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):  # optax.MultiSteps is none by type
        raise PlanError(
            f"{wrapper}: expected an optax transformation, such as optax.adam(1e-3), got {tx!r:.60}"
        )
    return optax.with_extra_args_support(tx)
