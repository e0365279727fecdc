"""A model's initial values: traced once, and the check that no two of them are one array."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.compat import switch
from fzero.errors import StateError
from fzero.host_arrays import require_held
from fzero.links import Layer, Stack, of_link, require_takes
from fzero.model import Model
from fzero.pieces import InitFn
from fzero.tree import PyTree, aliased_leaves, named_leaves, shapes_of


class _Memo:
    """What was worked out for one model; copies of the model do not inherit it."""

    def __init__(self, owner: Model) -> None:
        self.owner = weakref.ref(owner)
        self.known: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # a pickled or deeply copied model starts anew


def memo(model: Model) -> dict[Any, Any]:
    """What is known of a model, for as long as the model lives.

    Keys name what was worked out and all that it depends on besides the model. Values must not hold
    the model's initial arrays: they would outlive it until the next garbage collection.
    """
    found = vars(model).get("_memo")
    if not isinstance(found, _Memo) or found.owner() is not model:
        found = _Memo(model)
        object.__setattr__(model, "_memo", found)
    return found.known


def tracing_context() -> tuple[Any, ...]:
    """Settings of jax that shapes and dtypes depend on."""
    return switch("jax_enable_x64"), switch("jax_default_prng_impl")


def initial_shapes(model: Model) -> tuple[PyTree, PyTree]:
    """Shapes of a model's (params, buffers), without computing them.

    Raises:
        StateError: two leaves are the same array, or leaves are not those of the model's links.
    """
    known, key = memo(model), ("shapes", tracing_context())
    if key not in known:
        if callable(model.init):
            shapes = _traced(model)[1]
        else:
            shapes = shapes_of(_checked(model.init))
        _require_of_links(model, *shapes)
        known[key] = shapes
    found: tuple[PyTree, PyTree] = known[key]
    return found


def initializer(model: Model) -> InitFn:
    """A model's `init`, which must be a function; however often it is used, it is traced once.

    Raises:
        StateError: (when traced) two leaves are the same array.
    """
    closed, shapes, init = _traced(model)

    def born(rng: jax.Array) -> tuple[PyTree, PyTree]:
        if rng.dtype != closed.in_avals[0].dtype:
            return init(rng)  # a key of another kind draws other numbers, in another program
        from jax.extend.core import jaxpr_as_fun

        leaves = map(jnp.asarray, jaxpr_as_fun(closed)(rng))  # constants come as numbers of Python
        values: tuple[PyTree, PyTree] = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        return values

    return born


def _traced(model: Model) -> tuple[Any, Any, InitFn]:
    """A model's `init` as a jaxpr, the shapes of what it gives, and itself."""
    known, key = memo(model), ("traced", tracing_context())
    if key not in known:
        init = model.init
        assert callable(init)
        require_takes(init, "init(rng)", "model")

        def checked(rng: jax.Array) -> tuple[PyTree, PyTree]:
            return _checked(init(rng))

        make = jax.make_jaxpr(checked, return_shape=True)
        closed, shapes = make(jax.eval_shape(lambda: jax.random.key(0)))
        known[key] = closed, shapes_of(shapes), init
    found: tuple[Any, Any, InitFn] = known[key]
    return found


def _checked(made: Any) -> tuple[PyTree, PyTree]:
    """What a model's `init` gave: parameters and buffers, arrays that share no memory.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(made, tuple) or len(made) != 2:
        raise StateError(
            f"init: expected the model's init to return (params, buffers), got a"
            f" {type(made).__name__}; without buffers, return params, {{}}"
        )
    params, buffers = made
    for path, leaf in named_leaves({"params": params, "buffers": buffers}):
        _require_array(path, leaf)
        if isinstance(leaf, np.ndarray | np.generic):
            _require_held(path, leaf)
    _require_not_shared(params, buffers)
    return params, buffers


def _require_array(path: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if hasattr(leaf, "shape") and isinstance(dtype, np.dtype):
        return
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        raise StateError(
            f"init: {path} is a random key ({dtype}). Steps fold keys of their own (ctx.rng, or rng"
            " of a loss); to carry one along, keep its bits among the buffers:"
            " jax.random.key_data(key)"
        )
    kind = type(leaf)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    raise StateError(
        f"init: {path} is a {name}: expected an array of numpy or jax (jnp.asarray; of a tensor of"
        " torch, tensor.numpy())"
    )


def _require_held(path: str, leaf: Any) -> None:
    """Raises `StateError` if jax has no such numbers as an array of NumPy's, or would cut them."""
    try:
        require_held(leaf)
    except ValueError as error:
        raise StateError(f"init: {path} {error}") from None


def _require_of_links(model: Model, params: PyTree, buffers: PyTree) -> None:
    """Raises `StateError` if a chain's values are those of other links, or of more or fewer layers.

    A loop over a stack reads rows by number: it would run some of too many, and one of too few
    several times.
    """
    links = {link.name: link for link in model.layers}
    if "" in links:  # one function reads all of them
        return
    for field, tree in (("params", params), ("buffers", buffers)):
        if not isinstance(tree, Mapping):
            raise StateError(
                f"init: {field} are a {type(tree).__name__}: expected a dict with the values of"
                f" each layer under its name, of {list(links)}"
            )
        for name, values in tree.items():
            if name not in links:
                raise StateError(
                    f"init: {field}/{name}: no layer is named {name!r}; the chain has"
                    f" {list(links)}. Leave it out, or give the layer that it is of this name"
                )
            link = links[name]
            if isinstance(link, Stack):
                _require_rows(link, f"{field}/{name}", values)
    for name, link in links.items():
        _require_seen(link, params.get(name, {}))
        for field, tree, has in (
            ("buffers", buffers, link.stateful), ("params", params, isinstance(link, Stack))
        ):  # fmt: skip
            if name not in tree and (has or (field == "params" and _has_values(link))):
                raise StateError(
                    f"init: {field}/{name}: {of_link(link)} has none: expected those that its init"
                    " gives, or init= of the model"
                )


def _has_values(link: Layer | Stack) -> bool:
    """Whether a layer's own `init` gives parameters."""
    if link.init is None:
        return False
    made = jax.eval_shape(link.init, jax.eval_shape(lambda: jax.random.key(0)))
    return bool(jax.tree.leaves(made[0] if isinstance(made, tuple) else made))


def _require_seen(link: Layer | Stack, own: PyTree) -> None:
    """Raises `StateError` if what a layer reads from others would hide its own parameters."""
    reads = getattr(link, "reads", {})
    if reads and not isinstance(own, Mapping):
        raise StateError(
            f"init: params/{link.name} are a {type(own).__name__}: expected a dict, as"
            f" {of_link(link)} reads {sorted(reads)} beside them"
        )
    for key in reads:
        if key in own:
            raise StateError(
                f"init: params/{link.name}/{key}: {of_link(link)} reads {reads[key]!r} as {key!r},"
                " which hides its own parameter; rename one of them"
            )


def _require_rows(stack: Stack, where: str, values: PyTree) -> None:
    for path, leaf in named_leaves(values):
        if tuple(leaf.shape[:1]) != (stack.num,):
            raise StateError(
                f"init: {where}{path and '/'}{path} has shape {list(leaf.shape)}, and Stack"
                f" {stack.name!r} has num={stack.num}: expected a first dim of {stack.num}, with a"
                " row for each layer; give the values of as many layers, or another num"
            )


def _require_not_shared(params: PyTree, buffers: PyTree) -> None:
    found = aliased_leaves({"params": params, "buffers": buffers})
    if found:
        raise StateError(
            "init: these leaves are one array: "
            + "; ".join(" = ".join(paths) for paths in found)
            + ". A step gives its input's memory away, and one buffer cannot be given away twice."
            " Keep tied weights as one leaf that several layers read"
            ' (fz.Layer(..., reads={"table": "embed/table"})), or copy the array'
        )
