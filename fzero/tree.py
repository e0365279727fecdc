"""Paths, sizes and aliases of pytree leaves."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves

from fzero.errors import PlanError, StateError


PyTree = Any


def key_name(entry: Any) -> str:
    """The bare name of one step of a tree path: a dict key, a field name or an index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def path_name(path: Iterable[Any]) -> str:
    """A tree path as users write it: `blocks/attn/w`."""
    return "/".join(key_name(entry) for entry in path)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """All leaves with their names, in tree order; no two leaves of a tree have one name.

    A name is the leaf's path. Where two paths are written alike, because keys have slashes, such
    keys are quoted; so whatever is looked up by name is looked up by position.

    Raises:
        StateError: a dict of the tree has keys of several kinds.

    Example:
        >>> named_leaves({"b": 1, "a": {"w": 2}})
        [('a/w', 2), ('b', 1)]
        >>> named_leaves({"a": {"b/c": 1}, "a/b": {"c": 2}})
        [("a/'b/c'", 1), ("'a/b'/c", 2)]
    """
    leaves = _with_paths(tree)
    names = _names([path for path, _ in leaves])
    return [(name, leaf) for name, (_, leaf) in zip(names, leaves, strict=True)]


def leaf_keys(tree: PyTree) -> list[tuple[str, ...]]:
    """The bare keys on the way to each leaf, in tree order."""
    return [tuple(map(key_name, path)) for path, _ in _with_paths(tree)]


def leaves_of(tree: PyTree) -> list[Any]:
    """`jax.tree.leaves`; what keys it cannot put in order, by name.

    Raises:
        StateError: a dict of the tree has keys of several kinds.
    """
    try:
        return jax.tree.leaves(tree)
    except ValueError:
        _require_order(tree)
        raise


def _with_paths(tree: PyTree) -> list[tuple[Any, Any]]:
    try:
        return jax.tree_util.tree_flatten_with_path(tree)[0]
    except ValueError:
        _require_order(tree)
        raise


def _require_order(tree: PyTree) -> None:
    """That the keys of every dict can be compared: their order is the order of the leaves."""
    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_no_order)[0]:
        if _has_no_order(node):
            kinds = {type(key).__name__: key for key in reversed(node)}
            raise StateError(
                f"the dict {path_name(path) or 'at the top'} has keys of several kinds"
                f" ({', '.join(f'{key!r}: {kind}' for kind, key in sorted(kinds.items()))}), which"
                " cannot be put in order, and the order of keys is that of the leaves; write all"
                " as strings"
            )


def _has_no_order(node: Any) -> bool:
    if not isinstance(node, dict) or isinstance(node, OrderedDict):
        return False
    try:
        sorted(node)
    except TypeError:
        return True
    return False


def map_named(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` of `function(name, leaf, *leaves of rest)`, names as in `named_leaves`."""
    names = jax.tree.unflatten(jax.tree.structure(tree), [name for name, _ in named_leaves(tree)])
    return jax.tree.map(function, names, tree, *rest)


def _names(paths: Sequence[Sequence[Any]]) -> list[str]:
    names = [path_name(path) for path in paths]
    many = Counter(names)
    if len(many) == len(names):
        return names
    names = [
        name if many[name] == 1 else "/".join(map(_quoted, path))
        for name, path in zip(names, paths, strict=True)
    ]
    # Nodes of users' own may give two children one key.
    taken: Counter[str] = Counter()
    for index, name in enumerate(names):
        taken[name] += 1
        names[index] = name if taken[name] == 1 else f"{name} ({taken[name]})"
    return names


def _quoted(entry: Any) -> str:
    name = key_name(entry)
    return repr(name) if "/" in name else name


def same_structure(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same nodes and as many leaves in each."""
    here: Any = jax.tree.structure(one)
    return bool(here == jax.tree.structure(other))


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array-like, in the dtype jax would give it."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if is_plain(leaf) else leaf.dtype
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def shape_at(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf, in a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf has an ordinary dtype (not a typed random key)."""
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def shapes_of(tree: PyTree) -> PyTree:
    """The tree with every leaf replaced by its `jax.ShapeDtypeStruct`."""
    return jax.tree.map(shape_of, tree)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is a floating-point array (gradients exist for it)."""
    return bool(jnp.issubdtype(leaf.dtype, np.floating))


def num_bytes(shape: Iterable[int], dtype: Any) -> int:
    """Bytes of an array of a shape and dtype."""
    return math.prod(shape) * int(dtype.itemsize)


def leaf_bytes(leaf: Any, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of a leaf, or of a shard of it that has `shape`."""
    return num_bytes(leaf.shape if shape is None else shape, leaf.dtype)


def device_bytes(leaf: Any) -> int:
    """Bytes that one device holds of a leaf; the whole leaf if it has no sharding."""
    sharding = getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape) if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    return leaf_bytes(leaf, shape)


def added(sums: PyTree, more: PyTree) -> PyTree:
    """Sums with more added to them, in the dtypes of the sums."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)


def aliased_leaves(tree: PyTree) -> list[list[str]]:
    """Lists of paths whose leaves are one object or share one buffer; empty when none do.

    Donating such a tree would give one buffer away twice. Zero-size leaves own no memory and
    never alias.

    Example:
        >>> import jax.numpy as jnp
        >>> w = jnp.ones(3)
        >>> aliased_leaves({"a": w, "b": w, "c": jnp.ones(3)})
        [['a', 'b']]
    """
    owners: dict[Any, list[str]] = {}
    for path, leaf in named_leaves(tree):
        if not hasattr(leaf, "shape") or 0 in leaf.shape:
            continue
        owners.setdefault(next(iter(memory(leaf)), id(leaf)), []).append(path)
    return [paths for paths in owners.values() if len(paths) > 1]


def memory(leaf: Any) -> list[tuple[int, int]]:
    """Where the shards of an array lie, by device and address; of what is no array, nothing."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    if not concrete or not is_plain(leaf) or not leaf.size:
        return []
    return [(x.device.id, x.data.unsafe_buffer_pointer()) for x in leaf.addressable_shards]


def same_object(leaves: Iterable[Any]) -> bool:
    """Whether any two leaves are one Python object (a check cheap enough for every step)."""
    ids = [id(leaf) for leaf in leaves]
    return len(set(ids)) != len(ids)


def owner_of(path: str, params: Container[str]) -> str | None:
    """The parameter that a leaf of the optimizer state belongs to: its path ends with that one's.

    Example:
        >>> owner_of("0/mu/blocks/w", {"blocks/w"}), owner_of("0/count", {"blocks/w"})
        ('blocks/w', None)
    """
    steps = path.split("/")
    ends = ("/".join(steps[start:]) for start in range(len(steps)))
    return next((end for end in ends if end in params), None)


def owners_by_place(tree: PyTree, like: PyTree) -> list[str | None]:
    """For each leaf of a tree the leaf of `like` that it stands for, where a node is built alike.

    So are found several arrays for each parameter, whose paths go on behind the parameter's.

    Example:
        >>> owners_by_place({"mu": {"w": (1, 2), "b": 3}, "count": 4}, {"w": 5, "b": 6})
        [None, 'b', 'w', 'w']
    """
    treedef: Any = jax.tree.structure(like)
    names = [name for name, _ in named_leaves(like)]
    # A single leaf is like everything, and a bare tuple may be like a chain of optimizers.
    known = not all_leaves([like]) and type(like) is not tuple

    def is_like(node: Any) -> bool:
        try:
            treedef.flatten_up_to(node)
        except ValueError:
            return False
        return known

    owners: list[str | None] = []
    for node in jax.tree.leaves(tree, is_leaf=is_like):
        if not is_like(node):
            owners.append(None)
            continue
        for name, part in zip(names, treedef.flatten_up_to(node), strict=True):
            owners += [name] * len(jax.tree.leaves(part))
    return owners


def path_patterns(name: str, given: Any) -> tuple[str, ...]:
    """Regular expressions on parameters' paths, in one form that can be compared and hashed.

    Args:
        name: the plan's field, for messages.
        given: one, or a list or tuple of several (a set has another order in every process).

    Raises:
        PlanError: one of them is none; it says which.
    """
    patterns = tuple(given) if isinstance(given, list | tuple) else (given,)
    for one in patterns:
        try:
            if not isinstance(one, str):
                raise TypeError(f"a string, got {type(one).__name__}")
            re.compile(one)
        except (re.error, TypeError) as error:
            raise PlanError(
                f"plan: {name}={one!r}: expected a regular expression on parameters' paths"
                f" ({error})"
            ) from None
    return patterns


def found_in(patterns: Iterable[str], path: str) -> bool:
    """Whether one of some regular expressions is found in a path."""
    return any(re.search(one, path) for one in patterns)


def matching(key: str | re.Pattern[str], names: Iterable[str]) -> list[str]:
    """Of some names the one that a key is, or those that it is found in, if it is a pattern."""
    if isinstance(key, re.Pattern):
        return [name for name in names if key.search(name)]
    return [name for name in names if name == key]


def is_traced(leaves: Iterable[Any]) -> bool:
    """Whether a leaf is being traced: by a transformation of jax, or to become a program."""
    kinds = set(map(type, leaves))  # few, of many leaves
    return any(issubclass(kind, jax.core.Tracer) for kind in kinds)
