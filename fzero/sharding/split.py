"""Which dim of a leaf ZeRO splits over devices, with what padding, and why.

Everything here is computed from shapes; no device is needed. Splits are decided once per
(model, plan, number of devices) and are the same for all four ZeRO stages: the stage only says
which state classes are *kept* in it between steps.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fzero.axes import shared_over
from fzero.errors import StateError
from fzero.links import Stack
from fzero.model import Model
from fzero.plan import Plan
from fzero.precision import compute_dtype
from fzero.sharding.axes import Axes, axes_of, num_ways
from fzero.sharding.patterns import require_found
from fzero.tree import PyTree, leaf_keys, matching, named_leaves, num_bytes


@dataclass(frozen=True)
class Home:
    """Which ranks of a pipeline hold a leaf.

    Args:
        ranks: the ranks; several where a stack is cut, or where all hold a small leaf.
        rows: the layers of a cut stack in the order of dim 0, rank after rank, every rank with
            equally many: -1 fills up where one has fewer. Empty for leaves that are not cut.
        label: what it is updated together with: the same in all schedules of the same stages.
    """

    ranks: tuple[int, ...]
    rows: tuple[int, ...] = ()
    label: str = ""

    @property
    def rows_per_rank(self) -> int:
        """Rows of dim 0 that each rank holds."""
        return len(self.rows) // len(self.ranks)

    @property
    def reordered(self) -> tuple[int, ...]:
        """The rows; empty if they are the layers in order."""
        return () if self.rows == tuple(range(len(self.rows))) else self.rows

    def arrange(self, leaf: Any) -> Any:
        """A stack's leaf, layers in order, as it is kept. Filling is zero."""
        if not self.reordered:
            return leaf
        return self.layers_alone(leaf[np.maximum(np.asarray(self.rows), 0)])

    def layers_alone(self, leaf: Any) -> Any:
        """A kept leaf with zeros in rows that are no layers, whatever an edit has put there."""
        if not self.rows or min(self.rows) >= 0:
            return leaf
        layers = (np.asarray(self.rows) >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(layers, leaf, jnp.zeros((), leaf.dtype))

    def restore(self, leaf: Any) -> Any:
        """A kept leaf with its layers in order."""
        if not self.reordered:
            return leaf
        return leaf[self.order]

    @property
    def order(self) -> np.ndarray[Any, Any]:
        """The row of each layer."""
        rows = np.asarray(self.rows)
        order = np.argsort(rows, kind="stable")
        return order[np.sort(rows) >= 0]


# `(path, shape)` of leaves that are kept with zeros at their ends, in their own shapes.
OwnShapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Split:
    """How one leaf is cut over devices that would all hold the same of it.

    Three things are told of it: what the leaf is; how ZeRO cuts it (`dim` to `reason`); and how it
    is divided besides, before ZeRO comes to it (`home`, `axes`, `ways`).

    Args:
        path: the leaf's name, such as `blocks/attn/w`; no other leaf of its tree has it.
        shape: logical shape; what the optimizer sees, and the model but for `home.rows`.
        dtype: dtype of the kept (master) leaf.
        compute: dtype in which a parameter is used, and travels.
        stacked: whether dim 0 counts the layers of a `Stack`.
        frozen: whether no step changes it, so that it has no gradient and no optimizer state.
        owner: the name of the parameter that a leaf of the optimizer's state belongs to, if any.
        dim: the dim that is split, or `None` for a whole leaf.
        over: the mesh axes that `dim` is split over where it is kept sharded: the data axis, then
            further ones that the leaf does not lie along.
        shards: devices along those: how many shards there are.
        reason: why, in words.
        home: the ranks that hold it, in a pipeline.
        axes: the further mesh axis that each dim lies along, as far as there are any; never `dim`.
        ways: devices along those: how many shards they divide the leaf into.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    compute: np.dtype[Any]
    _: dataclasses.KW_ONLY
    stacked: bool = False
    frozen: bool = False
    owner: str | None = None

    dim: int | None = None
    over: tuple[str, ...] = ()
    shards: int = 1
    reason: str

    home: Home | None = None
    axes: tuple[str | None, ...] = ()
    ways: int = 1

    @property
    def pad(self) -> int:
        """Zeros at the end of `dim` in a stored shard, so that it divides."""
        return 0 if self.dim is None else -self.shape[self.dim] % self.shards

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape with padding."""
        return tuple(n + self.pad if d == self.dim else n for d, n in enumerate(self.shape))

    def spec(
        self, sharded: bool, among: Collection[str] | None = None, ndim: int | None = None
    ) -> PartitionSpec:
        """How it lies over the axes of the mesh.

        Args:
            sharded: whether it is kept sharded, or whole.
            among: the axes to tell of; all by default. Within a step's `shard_map` it is `AXES`
                that cut a leaf, and `FURTHER` that XLA is told of.
            ndim: of one layer of it, which has a dim less; of the leaf by default.
        """
        dims: list[tuple[str, ...]] = [() if axis is None else (axis,) for axis in self.axes]
        if sharded and self.dim is not None:
            dims += [()] * (self.dim + 1 - len(dims))
            dims[self.dim] = self.over
        if among is not None:
            dims = [tuple(axis for axis in dim if axis in among) for dim in dims]
        first = 0 if ndim is None else len(self.shape) - ndim
        return PartitionSpec(*(dim[0] if len(dim) == 1 else dim or None for dim in dims[first:]))

    @property
    def layer_dim(self) -> int | None:
        """`dim` as one layer of a stack sees it."""
        return None if self.dim is None else self.dim - int(self.stacked)

    def elements(self, padded: bool = True) -> int:
        """How many of its elements a device has while it is whole: its part of them, along further
        axes; of a stack that is cut, of all ranks together."""
        return math.prod(self.stored_shape if padded else self.shape) // self.ways

    def num_bytes(self, dtype: np.dtype[Any], padded: bool = True) -> int:
        """Bytes of these elements in a dtype."""
        return self.elements(padded) * dtype.itemsize

    @property
    def ranks_sharing(self) -> int:
        """Ranks of a pipeline of which each holds its own rows."""
        return len(self.home.ranks) if self.home is not None and self.home.rows else 1

    def store(self, leaf: jax.Array, dim: int | None = None) -> jax.Array:
        """Adds the padding to a whole leaf, or to one layer of it, whose split dim is `dim`."""
        dim = self.dim if dim is None else dim
        if dim is None or not self.pad:
            return leaf
        return jnp.pad(leaf, [(0, self.pad if d == dim else 0) for d in range(leaf.ndim)])

    def emptied(self, leaf: jax.Array) -> jax.Array:
        """A stored leaf with zeros as its padding, whatever an edit has put there."""
        if not self.pad or leaf.shape != self.stored_shape:
            return leaf
        assert self.dim is not None
        own = jax.lax.broadcasted_iota(np.int32, leaf.shape, self.dim) < self.shape[self.dim]
        return jnp.where(own, leaf, jnp.zeros((), leaf.dtype))

    def logical(self, leaf: jax.Array, dim: int | None = None) -> jax.Array:
        """Cuts the padding off a whole leaf, or off one layer of it, whose split dim is `dim`."""
        dim = self.dim if dim is None else dim
        if dim is None or not self.pad:
            return leaf
        return jax.lax.slice_in_dim(leaf, 0, leaf.shape[dim] - self.pad, axis=dim)


def split_leaf(
    path: str,
    leaf: Any,
    sizes: Mapping[str, int],
    plan: Plan,
    stacked: bool = False,
    axes: Axes = (),
) -> Split:
    """Decides how one leaf is split, over all of ZeRO's axes that it does not lie along.

    The outermost divisible dim is taken: gathering along it concatenates whole blocks of memory.
    A leaf below `plan.min_shard_bytes` stays whole. Where no dim divides, the dim that grows the
    least is padded. Dims that lie along further axes are left alone.

    Args:
        path: its name.
        leaf: its shape and dtype.
        sizes: ZeRO's axes and how many devices are along each (`fzero.axes.zero_sizes`).
        plan: the plan.
        stacked: whether dim 0 counts layers.
        axes: the further axes that its dims lie along.
    """
    over = shared_over(sizes, axes)
    shards = math.prod(over.values())
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    first, ways = int(stacked), num_ways(plan, axes)
    compute = compute_dtype(plan, dtype, path)
    besides = "".join(
        f"; dim {dim} over {axis}={plan.further[axis]}"
        for dim, axis in enumerate(axes) if axis is not None
    )  # fmt: skip

    def whole(reason: str) -> Split:
        return Split(path, shape, dtype, compute, stacked=stacked, reason=reason + besides,
                     axes=tuple(axes), ways=ways)  # fmt: skip

    def cut(dim: int, reason: str) -> Split:
        return dataclasses.replace(whole(reason), dim=dim, over=tuple(over), shards=shards)

    own = shape[first:]
    size = num_bytes(own, compute) // ways
    if shards == 1:
        return whole("one device on the data axis")
    if not own or 0 in shape:
        return whole("scalar" if not own else "no elements")
    if size < plan.min_shard_bytes:
        return whole(f"{size} bytes: below min_shard_bytes={plan.min_shard_bytes}")
    free = [dim for dim in range(first, len(shape)) if dim >= len(axes) or axes[dim] is None]
    if max((shape[dim] for dim in free), default=0) < shards:
        return whole(f"no dim has {shards} rows to give away")
    for dim in free:
        if shape[dim] % shards == 0:
            return cut(dim, f"dim {dim} ({shape[dim]}) divides by {shards}")
    # Relative growth decides: one row of 50257 costs less than one of 25.
    dim = min(free, key=lambda d: ((-shape[d] % shards) / shape[d], d))
    pad = -shape[dim] % shards
    grown = shape[dim] + pad
    return cut(dim, f"no dim divides by {shards}: dim {dim} padded by {pad} to {grown}")


def stacked_names(model: Model) -> frozenset[str]:
    """Names of the model's stacks: their leaves count layers on dim 0."""
    return frozenset(layer.name for layer in model.layers if isinstance(layer, Stack))


def split_params(
    model: Model,
    shapes: PyTree,
    plan: Plan,
    sizes: Mapping[str, int],
    homes: Mapping[str, Home] | None = None,
) -> PyTree:
    """How a params tree is split: a `Split` for every leaf.

    Args:
        model: the model.
        shapes: its parameters' shapes.
        plan: the plan.
        sizes: ZeRO's axes and how many devices are along each.
        homes: in a pipeline, the home of each link's leaves.
    """
    stacks, axes = stacked_names(model), axes_of(model, plan, shapes)
    names = [name for name, _ in named_leaves(shapes)]
    frozen = frozen_names(model, names)
    require_found(model, plan, shapes)

    def split(keys: tuple[str, ...], name: str, leaf: Any) -> Split:
        link = keys[0] if keys else ""
        home = None if homes is None else homes[link]
        split = split_leaf(name, kept_shape(leaf, home), sizes, plan, link in stacks, axes[name])
        split = dataclasses.replace(split, home=home)
        return _frozen(split, plan) if name in frozen else split

    return map_leaves(split, shapes)


def frozen_names(model: Model, names: Sequence[str]) -> frozenset[str]:
    """Names of the parameters that a model freezes.

    Args:
        model: the model.
        names: names of all its parameters.

    Raises:
        StateError: it names, or has a pattern for, parameters that do not exist.
    """
    wanted = model.frozen
    if callable(wanted):
        return frozenset(name for name in names if wanted(name))
    found: set[str] = set()
    unknown: list[str] = []
    given = (wanted,) if isinstance(wanted, str | re.Pattern) else wanted
    names_given = isinstance(given, Collection) and not isinstance(given, Mapping)
    if not names_given or not all(map(_is_name, given)):
        raise StateError(
            f"init: frozen={wanted!r:.80}: expected paths, regular expressions of re.compile, or a"
            " function of a path that says whether it is frozen"
        )
    for one in given:
        named = matching(one, names)
        found.update(named)
        unknown += [] if named else [one if isinstance(one, str) else one.pattern]
    if unknown:
        raise StateError(
            f"init: frozen names {sorted(unknown)}, which are no parameters; there are"
            f" {list(names)[:20]}"
        )
    return frozenset(found)


def _is_name(one: Any) -> bool:
    return isinstance(one, str) or (isinstance(one, re.Pattern) and isinstance(one.pattern, str))


def _frozen(split: Split, plan: Plan) -> Split:
    """A frozen leaf's split: where passes read whole parameters it is kept as they read it."""
    if plan.gathers_at_use:
        return dataclasses.replace(split, frozen=True, reason=f"frozen; {split.reason}")
    why = f"frozen: zero={plan.zero} reads it whole"
    return dataclasses.replace(split, frozen=True, dim=None, over=(), shards=1, reason=why)


def trained(splits: PyTree, tree: PyTree = None) -> PyTree:
    """Splits, or a tree of their structure, without frozen leaves: `None` is in their place.

    That is the structure of gradients, of the compute copy, and of what an optimizer is given.
    """
    tree = splits if tree is None else tree
    return map_splits(lambda split, leaf: None if split.frozen else leaf, splits, tree)


def with_frozen(splits: PyTree, new: PyTree, whole: PyTree) -> PyTree:
    """A tree of all leaves: trained ones of `new`, frozen ones of `whole`."""
    return map_splits(lambda s, new, old: old if s.frozen else new, splits, new, whole)


def frozen_of(splits: PyTree, whole: PyTree) -> PyTree:
    """The frozen leaves of a tree of all."""
    return map_splits(lambda s, leaf: leaf if s.frozen else None, splits, whole)


def map_leaves(function: Callable[[tuple[str, ...], str, Any], Split], shapes: PyTree) -> PyTree:
    """A `Split` for each leaf, from its keys, its name and its shape."""
    found = [
        function(keys, name, leaf)
        for keys, (name, leaf) in zip(leaf_keys(shapes), named_leaves(shapes), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def kept_shape(leaf: Any, home: Home | None) -> Any:
    """A leaf's shape with a cut stack's rows instead of its layers."""
    if home is None or not home.rows:
        return leaf
    return jax.ShapeDtypeStruct((len(home.rows), *leaf.shape[1:]), leaf.dtype)


def update_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype in which parameters are updated, and optimizers initialised: at least float32."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return np.dtype(np.float32)  # (jax promotes no 8 bits)
    with jax.numpy_dtype_promotion("standard"):  # whatever a user lets their own code do
        return np.dtype(jnp.promote_types(dtype, jnp.float32))


def wide(value: Any) -> jax.Array:
    """A number or an array in the dtype that sums are kept in: at least float32."""
    array = jnp.asarray(value)
    return array.astype(update_dtype(array.dtype))


def is_split(node: Any) -> bool:
    """`is_leaf` for trees of splits."""
    return isinstance(node, Split)


def flat_splits(splits: PyTree) -> list[Split]:
    """All splits of a tree of them, in tree order."""
    return jax.tree.leaves(splits, is_leaf=is_split)


def map_splits(function: Any, splits: PyTree, *trees: PyTree) -> PyTree:
    """`jax.tree.map` over splits and trees of the same structure."""
    return jax.tree.map(function, splits, *trees, is_leaf=is_split)


def layers_alone(splits: PyTree, tree: PyTree) -> PyTree:
    """Kept leaves with zeros in rows that are no layers, whatever an edit has put there."""
    return map_splits(lambda s, leaf: s.home.layers_alone(leaf) if s.home else leaf, splits, tree)


def stored_shapes(
    splits: PyTree,
    sharding: Callable[[Home | None, PartitionSpec], NamedSharding],
    sharded: bool,
    dtype: Any = None,
) -> PyTree:
    """`ShapeDtypeStruct`s with shardings for leaves as they are kept between steps.

    Args:
        splits: a `Split` per leaf.
        sharding: the sharding at a home with a spec.
        sharded: whether the leaves are kept sharded.
        dtype: the dtype of a split's leaf, where that is not the one it is kept in.
    """

    def stored(split: Split) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            split.stored_shape if sharded else split.shape,
            split.dtype if dtype is None else dtype(split),
            sharding=sharding(split.home, split.spec(sharded)),
        )

    return map_splits(stored, splits)
