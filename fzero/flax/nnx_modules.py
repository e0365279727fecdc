"""nnx modules taken apart: what a state holds of them, and the module put together for a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.compat import is_key, key_bits
from fzero.errors import StateError, some_of, warn
from fzero.flax.nnx_calls import Contents, NnxCall, checked_call, for_flax_alone, raw
from fzero.flax.python_state import Path, named
from fzero.links import Context
from fzero.tree import PyTree, shape_of


# What modules call the flag that tells training from evaluation, and its value in training.
FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False}


@dataclass(frozen=True)
class _NnxLeaf:
    """One leaf of an nnx module: its path, its kind, and its variable, emptied to a shape."""

    path: tuple[Any, ...]
    kind: str  # "param", "buffer", "key" or "count": the latter two of a stream of random keys
    template: Any
    impl: Any = None  # of a buffer that is a random key: a state holds its bits

    @property
    def name(self) -> tuple[str, ...]:
        """The path as keys of nested dicts."""
        return tuple(str(step) for step in self.path)

    def filled(self, value: Any) -> Any:
        """The leaf with a value."""
        if self.impl is not None:
            value = jax.random.wrap_key_data(value, impl=self.impl)
        return self.template.replace(value) if hasattr(self.template, "replace") else value


@dataclass(frozen=True, eq=False)
class NnxModule:
    """An nnx module taken apart.

    Attributes:
        graphs: its structure in both modes.
        leaves: what is known of every leaf.
        reports: names of the `nnx.Intermediate`s that it was given with, which are left out.
        switched: flags that it was given with in evaluation, and training switches.
    """

    graphs: Mapping[bool, Any]
    leaves: tuple[_NnxLeaf, ...]
    reports: frozenset[str]
    switched: tuple[str, ...]

    def call(
        self, params: PyTree, ctx: Context, run: Callable[[Any, PyTree], Any], arguments: PyTree
    ) -> tuple[Any, PyTree]:
        """Puts the module together for one call and reads its buffers back.

        Args:
            params: the parameters, as nested dicts.
            ctx: the step's key, mode and buffers.
            run: calls the module, with arguments.
            arguments: those arguments.
        """

        def filled(values: Mapping[Path, Any]) -> dict[Path, Any]:
            return {leaf.path: leaf.filled(values[leaf.path]) for leaf in self.leaves}

        if ctx.train and self.switched:
            warn(
                f"from_flax: {some_of(self.switched, 4)}: so the module was given, and a training"
                " step puts it into training mode, as module.train() does. If that is meant, put it"
                " into that mode before from_flax; what stays as it is in evaluation says so where"
                " it is called (self.norm(x, use_running_average=True)), or in a train() of the"
                " module's own"
            )
        begun = {x.path: _fill(i, x, params, ctx) for i, x in enumerate(self.leaves)}
        own = [leaf.path for leaf in self.leaves if leaf.kind == "param"]
        asked = NnxCall(self.graphs[ctx.train], filled, begun, self._run(run), arguments)
        out, held = checked_call(asked, own)
        # What went is told as any other change of the buffers.
        buffers = [leaf for leaf in self.leaves if leaf.kind == "buffer" and leaf.path in held]
        return out, _nested({x.name: key_bits(jnp.asarray(held[x.path])) for x in buffers})

    def _run(self, run: Callable[[Any, PyTree], Any]) -> Callable[[Any, PyTree], Any]:
        """`run`, where a forward that misses an `nnx.Intermediate` is told why."""

        def told(module: Any, arguments: PyTree) -> Any:
            try:
                return run(module, arguments)
            except AttributeError as error:
                if error.name not in self.reports:
                    raise
                raise StateError(
                    f"from_flax: a forward read or wrote {error.name}, an nnx.Intermediate that the"
                    " module had before: those are reports of one call, and none goes into a state."
                    f" Make it in the forward (self.{error.name} = nnx.Intermediate(x), or"
                    " self.sow); what the next call is to find is an nnx.Variable"
                ) from error

        return told


def _fill(index: int, leaf: _NnxLeaf, params: PyTree, ctx: Context) -> Any:
    """The value of a leaf in one call."""
    empty = raw(leaf.template)
    if leaf.kind == "count":
        return jnp.zeros(empty.shape, empty.dtype)
    if leaf.kind == "key":
        # Every stream has a key of its own: nnx.reseed would give all dropout layers one mask.
        key = jax.random.fold_in(ctx.rng, index)
        return jax.random.split(key, empty.shape) if empty.shape else key
    node = params if leaf.kind == "param" else ctx.buffers
    for step in leaf.name:
        node = node[step]
    return jnp.asarray(node)


def take_apart(module: Any) -> tuple[NnxModule, tuple[PyTree, PyTree]]:
    """An nnx module without values, and those as read-only host copies; it stays as it was."""
    from flax import nnx

    own = nnx.clone(module)
    popped = nnx.to_flat_state(nnx.pop(own, nnx.Intermediate))
    graphs, switched = _in_both_modes(own)
    streams = [node for _, node in nnx.iter_graph(own) if isinstance(node, nnx.RngStream)]
    drawn = {id(leaf): kind for x in streams for kind, leaf in (("key", x.key), ("count", x.count))}
    leaves: list[_NnxLeaf] = []
    values: dict[str, dict[tuple[str, ...], Any]] = {"param": {}, "buffer": {}}
    for path, leaf in nnx.to_flat_state(nnx.state(own)):
        kind = drawn.get(id(leaf), "param" if isinstance(leaf, nnx.Param) else "buffer")
        value = _array(path, leaf)
        shape = shape_of(value)
        # Only shapes stay behind: a model's functions hold no arrays.
        template: Any = leaf.replace(shape) if isinstance(leaf, nnx.Variable) else shape
        if kind not in values:
            template.set_metadata(on_get_value=for_flax_alone)
        impl = jax.random.key_impl(value) if kind == "buffer" and is_key(value) else None
        leaves.append(_NnxLeaf(path, kind, template, impl))
        if kind in values:
            copy = np.array(key_bits(value))
            copy.flags.writeable = False
            values[kind][leaves[-1].name] = copy
    initial = _nested(values["param"]), _nested(values["buffer"])
    reports = frozenset(str(path[-1]) for path, _ in popped)
    return NnxModule(graphs, tuple(leaves), reports, switched), initial


def _in_both_modes(module: Any) -> tuple[dict[bool, Any], tuple[str, ...]]:
    """A module's structure in training and in evaluation, and the flags it has of the latter."""
    from flax import nnx

    graphs, changed, shared = {}, {}, []
    began = Contents.of(module)
    for train in (True, False):
        _put_into_mode(module, train)
        graphs[train] = nnx.graphdef(module)
        now = Contents.of(module)
        changed[train] = began.python.changes(now.python)
        shared += began.written_for_all(now) + began.values_written(now)
    if shared:
        began.python.put_back()
        raise StateError(
            f"from_flax: the module's train() or eval() wrote {some_of(shared, 4)}, which both"
            " modes have: a mode is an attribute of the module itself (self.training = True) that"
            " the forward reads, and variables are the same in both (a LoRA is merged where it is"
            " used, or after the training)"
        )
    switched = [
        f"{named((*path, name))}={was}"
        for (path, name), (was, _) in changed[True].items()
        if (path, name) not in changed[False]
    ]
    return graphs, tuple(switched)


def _put_into_mode(module: Any, train: bool) -> None:
    """Sets the flags of all modules in it, and calls its own `train()` or `eval()`."""
    from flax import nnx

    for _, node in nnx.iter_graph(module):
        for name in FLAGS if isinstance(node, nnx.Module) else ():
            if isinstance(vars(node).get(name, ()), bool | None):
                setattr(node, name, train == FLAGS[name])
    # A flag may have the name of the method. (Of flags that sets `use_running_average`, too.)
    name = "train" if train else "eval"
    own = getattr(type(module), name)
    (own if callable(own) else getattr(nnx.Module, name))(module)


def _array(path: Path, leaf: Any) -> Any:
    """What a leaf of a module holds, which is one array, or a number."""
    value = raw(leaf)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value
    if isinstance(value, bool | int | float | complex):
        return np.asarray(value)
    if isinstance(value, jax.ShapeDtypeStruct):
        raise StateError(
            f"from_flax: {'/'.join(map(str, path))}: this nnx.{type(leaf).__name__} is a shape"
            " without a value, as nnx.eval_shape gives it, and an nnx module brings its initial"
            " values: make the module itself (jax.default_device(jax.devices('cpu')[0]) makes it in"
            " the host's memory)"
        )
    raise StateError(
        f"from_flax: {'/'.join(map(str, path))}: this nnx.{type(leaf).__name__} holds a"
        f" {type(value).__name__}, and what a state holds of a module are arrays by name. Give"
        " each array a Variable of its own, made in __init__: nnx.Dict(a=nnx.Param(...),"
        " b=nnx.Param(...)), or nnx.List([...])"
    )


def _nested(flat: Mapping[tuple[str, ...], Any]) -> PyTree:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = value
    return tree
