"""A link of a chain: what a `Layer` and a `Stack` are, and how one of their layers is run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from fzero.axes import Parts
from fzero.errors import PlanError, StateError
from fzero.float8.products import in_float8
from fzero.float8.recipe import Float8
from fzero.keys import layer_key
from fzero.programs.jaxprs import Program
from fzero.tree import PyTree, named_leaves


# How devices' values of buffers become one: one word, or words by path.
BufferReduce = str | Mapping[str, str]
# For leaves by path, or by what is searched in paths: the mesh axis that each dim lies along.
Shard = Mapping[str | re.Pattern[str], Sequence[str | Parts | None]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A mean kept as its two sums, so that it stays exact over microbatches and devices.

    Totals and counts are added over microbatches and devices before the division. Padded tokens,
    ragged microbatches and any split of a batch then give the loss and gradient of one big batch.

    Args:
        total: scalar sum of what is averaged; differentiable.
        count: scalar number of things averaged; treated as a constant by the gradient of
            `train_step`, since only all of a step's microbatches and devices have the whole. A
            gradient of one's own through `eval_step` goes through it too, as that of the quotient
            does in plain jax: the two differ where a count depends on parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> parts = [Mean(jnp.float32(6), jnp.float32(3)), Mean(jnp.float32(2), jnp.float32(1))]
        >>> float(sum(p.total for p in parts) / sum(p.count for p in parts))
        2.0
    """

    total: jax.Array
    count: jax.Array

    def __repr__(self) -> str:
        """What they are, without their values: under a trace, or on devices, there are none."""
        numbers = (f"{name}: {jnp.result_type(x).name}{list(jnp.shape(x))}"
                 for name, x in (("total", self.total), ("count", self.count)))  # fmt: skip
        return f"Mean({', '.join(numbers)})"

    @property
    def divisor(self) -> jax.Array:
        """The count; 1 where nothing was counted, so that a mean over nothing is 0."""
        return jnp.where(self.count == 0, jnp.ones_like(self.count), self.count)

    @staticmethod
    def of(value: Any) -> Mean:
        """A `Mean` from a `Mean` or a scalar (which counts once per device and microbatch).

        Sums have at least 32 bits, so that what is added to them later is not lost.
        """
        if isinstance(value, Mean):
            return Mean(_wide(value.total), _wide(value.count))
        return Mean(_wide(value), jnp.ones((), jnp.float32))


def _wide(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return value.astype(jnp.float32) if narrow else value


@dataclass(frozen=True)
class Context:
    """What a layer may read besides its parameters and its input.

    Args:
        batch: this device's rows of the microbatch, as they came.
        rng: this layer's own key, folded from (step, microbatch, layer).
        train: whether this is a training pass.
        buffers: this layer's buffers (`None` unless the layer is stateful).
        dtype: what the plan's precision casts parameters to; `None`: they keep their own.
        step: int32 scalar, optimizer steps taken (for schedules in a loss); `None` outside steps.
        products: which products with parameters run in 8 bits; `None`: none.
        keep_fp32: patterns of paths whose parameters the plan keeps in float32.
    """

    batch: PyTree
    rng: jax.Array
    train: bool
    buffers: PyTree = None
    dtype: Any = None
    step: Any = None
    products: Float8 | None = None
    keep_fp32: tuple[str, ...] = ()

    def at(self, number: Any, buffers: PyTree = None) -> Context:
        """The context of layer `number` of the chain, from that of the microbatch."""
        buffers = self.buffers if buffers is None else buffers
        return replace(self, rng=layer_key(self.rng, number), buffers=buffers)


ApplyFn = Callable[[PyTree, Any, Context], Any]


@dataclass(frozen=True, eq=False)
class Layer:
    """One link of a chain: `apply(params, x, ctx) -> x`.

    The first layer of a chain gets the batch as `x`, its floats in the plan's precision; in
    `ctx.batch` they are as they came, for whatever needs all bits (targets, times, weights).

    Args:
        name: key of its parameters in the params tree; unique in the chain.
        init: `init(rng) -> params`, or `-> (params, buffers)` when stateful; `None` for a layer
            without parameters of its own.
        apply: `apply(params, x, ctx) -> x`, or `-> (x, buffers)` when stateful.
        reads: other layers' parameters that this one reads too, as `{name: "layer/path/in/it"}`;
            they appear in `params` under `name`. This is how weights are tied: one leaf, several
            readers, gradients summed.
        stateful: whether the layer has buffers, such as running statistics.
        buffer_reduce: how devices' values of its buffers become one; see `Model`.
        shard: which dims of its own parameters lie along which further mesh axis of a plan, by
            path or compiled regular expression: `{"up": (None, "tensor")}`. An axis that a plan
            does not have is no split, so that one model runs under all plans.

    Example:
        >>> import jax.numpy as jnp
        >>> embed = Layer("embed", lambda rng: {"table": jnp.ones((10, 4))},
        ...               lambda p, batch, ctx: p["table"][batch["ids"]])
        >>> head = Layer("head", None, lambda p, x, ctx: x @ p["table"].T,
        ...              reads={"table": "embed/table"})
    """

    name: str
    init: Callable[[jax.Array], Any] | None
    apply: ApplyFn
    reads: Mapping[str, str] = field(default_factory=dict)
    stateful: bool = False
    buffer_reduce: BufferReduce = field(default_factory=dict)
    shard: Shard = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """How many layers this link counts for when random keys are folded."""
        return 1


@dataclass(frozen=True, eq=False)
class Stack:
    """`num` identical layers in a row, with their parameters stacked on a leading dim.

    One layer's program is compiled and looped over; ZeRO-3 gathers its parameters one layer
    ahead of their use.

    Args:
        name: key of its parameters; every leaf there has shape `(num, ...)`.
        num: number of layers.
        init: `init(rng) -> params` of one layer, or `-> (params, buffers)` when stateful.
        apply: `apply(params, x, ctx) -> x` of one layer; output and input have the same structure,
            shapes and dtypes. `-> (x, buffers)` when stateful.
        shared: keys of a dict `x` that every layer reads and none changes (masks, position
            tables): a layer gives them back as they came, or leaves them out. They stay outside
            the loop: kept once, gradients summed over the layers.
        stateful: whether each layer has buffers.
        buffer_reduce: how devices' values of its buffers become one; see `Model`.
        shard: which dims of one layer's parameters lie along which further mesh axis; see `Layer`.

    Example:
        >>> import jax.numpy as jnp
        >>> stack = Stack("blocks", 12, lambda rng: {"w": jnp.eye(4)}, lambda p, x, ctx: x @ p["w"])
    """

    name: str
    num: int
    init: Callable[[jax.Array], Any]
    apply: ApplyFn
    shared: tuple[str, ...] = ()
    stateful: bool = False
    buffer_reduce: BufferReduce = field(default_factory=dict)
    shard: Shard = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """How many layers this link counts for when random keys are folded."""
        return self.num


def asked_for(function: Callable[..., Any], ctx: Context) -> dict[str, Any]:
    """What a model's function may ask for by keyword: the step number, or (ours) the context."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return {}
    known = {"step": ctx.step, "_ctx": ctx}
    return {name: value for name, value in known.items() if name in parameters}


def of_link(link: Layer | Stack) -> str:
    """Which link a message is about."""
    return f"{type(link).__name__} {link.name!r}"


def require_takes(function: Any, call: str, where: str) -> None:
    """Refuses what cannot be called as `call`, such as `apply(params, x, ctx)`, says.

    Raises:
        PlanError: it is no function, or one of other arguments.
    """
    name, given = call.rstrip(")").split("(")
    if not callable(function):
        raise PlanError(
            f"{where}: {name} is of type {type(function).__name__}: expected a function {call}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables have no signature
        return
    by_name = {word: None for word in ("step", "_ctx") if word in signature.parameters}
    try:
        signature.bind(*given.split(", "), **by_name)
    except TypeError as error:
        raise PlanError(
            f"{where}: expected a function {call}, got {name}{signature}: {error}"
        ) from None


def subtree(params: PyTree, path: str) -> PyTree:
    """The part of a tree of dicts under `a/b/c`.

    Raises:
        PlanError: the path does not exist; says which keys do.
    """
    node = params
    for step in path.split("/"):
        if not isinstance(node, Mapping) or step not in node:
            have = sorted(node) if isinstance(node, Mapping) else type(node).__name__
            raise PlanError(f"model: no parameter {path!r}: {step!r} is not among {have}")
        node = node[step]
    return node


def layer_params(layer: Layer | Stack, params: PyTree) -> PyTree:
    """What a layer's `apply` gets: its own parameters and those it reads from others."""
    if not layer.name:
        return params
    own = params.get(layer.name, {})
    reads = getattr(layer, "reads", {})
    if not reads:
        return own
    return {**own, **{key: subtree(params, path) for key, path in reads.items()}}


def split_shared(stack: Stack, x: Any) -> tuple[Any, Any]:
    """A stack's input as what the layers carry on and what they only read.

    Raises:
        PlanError: the input has no such keys.
    """
    if not stack.shared:
        return x, {}
    missing = [key for key in stack.shared if not isinstance(x, Mapping) or key not in x]
    if missing:
        got = f"the keys {sorted(x)}" if isinstance(x, Mapping) else _kinds([x])
        raise PlanError(
            f"{of_link(stack)}: shared= names {missing}: expected a dict x with these keys, got"
            f" {got}"
        )
    shared = {key: x[key] for key in stack.shared}
    return {key: value for key, value in x.items() if key not in shared}, shared


def apply_layer(
    layer: Layer | Stack, params: PyTree, carry: Any, shared: Any, ctx: Context
) -> tuple[Any, PyTree]:
    """One layer of a link: `(new carry, new buffers)`.

    Raises:
        PlanError: its `apply` takes other arguments, or changes what `shared` says none does.
        StateError: it gives something that is no array.
    """
    require_takes(layer.apply, "apply(params, x, ctx)", of_link(layer))
    x = {**carry, **shared} if shared else carry

    def apply(params: PyTree, x: Any) -> Any:
        return layer.apply(params, x, ctx)

    if ctx.products is not None:
        apply = in_float8(apply, layer.name, ctx.products, getattr(layer, "reads", {}))
    out = apply(params, x)
    y, buffers = with_buffers(layer, out, "apply", "x") if layer.stateful else (out, ctx.buffers)
    if layer.stateful and ctx.train:
        require_buffers(layer, ctx.buffers, buffers)
    _require_arrays(layer, y)
    if shared:
        _require_unchanged(layer, params, x, y, ctx, shared)
        y = {key: value for key, value in y.items() if key not in shared}
    return y, buffers


def with_buffers(layer: Layer | Stack, out: Any, function: str, what: str) -> tuple[Any, PyTree]:
    """What a function of a stateful layer gave: something, and buffers.

    Raises:
        PlanError: it is no pair.
    """
    if not isinstance(out, tuple | list) or len(out) != 2:
        got = _kinds(out if isinstance(out, tuple | list) else [out])
        raise PlanError(
            f"{of_link(layer)}: {function} gives {got}: expected ({what}, buffers), as the layer is"
            " stateful"
        )
    first, buffers = out
    return first, buffers


def _require_unchanged(
    layer: Layer | Stack, params: PyTree, x: Any, y: Any, ctx: Context, shared: Collection[str]
) -> None:
    """Raises `PlanError` if a layer changes what the other layers read too: it would be lost."""
    if not isinstance(y, Mapping):
        raise PlanError(
            f"{of_link(layer)}: a layer gives what the next one takes: expected a dict, as it gets"
            f" and shared= needs, got {_kinds([y])}"
        )
    if not _changed(x, y, shared):
        return
    # What came through a call, such as `jax.checkpoint`, is another value of the same numbers.
    closed, shapes = jax.make_jaxpr(
        lambda params, x: layer.apply(params, x, ctx), return_shape=True
    )(params, x)
    program = Program(closed.jaxpr, closed.consts)
    given = jax.tree.unflatten(jax.tree.structure((params, x)), program.inputs)[1]
    out = jax.tree.unflatten(jax.tree.structure(shapes), program.outputs)
    changed = _changed(given, out[0] if layer.stateful else out, shared)
    if changed:
        raise PlanError(
            f"{of_link(layer)}: a layer changes {changed[0]!r}, which shared= says none does:"
            " expected it as it came, or not at all; leave it out of shared="
        )


def _changed(x: Any, y: Any, keys: Collection[str]) -> list[str]:
    """Which of some keys of `x` hold other leaves in `y`, where they are there."""
    return [key for key in keys if key in y and not _same(x[key], y[key])]


def _same(x: Any, y: Any) -> bool:
    """Whether two trees have the very same leaves."""
    trees: list[Any] = [jax.tree.structure(x), jax.tree.structure(y)]
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=False)
    return trees[0] == trees[1] and all(a is b for a, b in leaves)


def _require_arrays(layer: Layer | Stack, y: Any) -> None:
    for path, leaf in named_leaves(y):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            if isinstance(y, tuple) and len(y) == 2 and isinstance(y[1], Mapping):
                split_loss(y)
            where = f"layer {layer.name!r}" if layer.name else "the model"
            raise StateError(f"{where}: {path or 'it'} is {_kinds([leaf])}: expected arrays")


def split_loss(out: Any) -> tuple[Mean, dict[str, Any]]:
    """What a chain ends with, `Mean | scalar` or a pair with metrics, as (Mean, metrics)."""
    value: Any = out
    metrics: Mapping[str, Any] = {}
    if isinstance(out, tuple) and not isinstance(out, Mean):
        if len(out) != 2 or not isinstance(out[1], Mapping):
            raise StateError(f"loss: expected a loss, or (loss, metrics), got {_kinds(out)}")
        value, metrics = out
    numbers = (value.total, value.count) if isinstance(value, Mean) else (value,)
    if not all(_is_real(number) and jnp.shape(number) == () for number in numbers):
        raise StateError(
            f"loss: expected a real scalar, or fz.Mean of two, got {_kinds(numbers)}; of a loss for"
            " each example, fz.Mean(jnp.sum(losses), jnp.float32(losses.size))"
        )
    for name, metric in metrics.items():
        numbers = (metric.total, metric.count) if isinstance(metric, Mean) else (metric,)
        if not isinstance(name, str) or not all(map(_is_real, numbers)):
            raise StateError(
                f"loss: metric {name!r} is {_kinds(numbers)}: expected a name, and a real scalar or"
                " fz.Mean of two"
            )
    return Mean.of(value), dict(metrics)


def _is_real(value: Any) -> bool:
    """Whether a value is a real number, or an array of some."""
    if isinstance(value, int | float):
        return True
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return hasattr(value, "shape") and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _kinds(values: Sequence[Any]) -> str:
    """What some values are, in a few words."""
    return ", ".join(
        f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype")
        else type(x).__name__ for x in values
    )  # fmt: skip


def loss_output(out: Any) -> tuple[Any, PyTree, Any]:
    """What a model's loss function gave: loss, buffers and metrics.

    Raises:
        StateError: it is something else.
    """
    if not isinstance(out, tuple) or isinstance(out, Mean) or len(out) != 3:
        given = _kinds(out) if isinstance(out, tuple) else _kinds([out])
        raise StateError(
            f"loss: expected (loss, buffers, metrics), as fz.Model says, got {given}; without"
            " buffers and metrics, return loss, buffers, {}"
        )
    return out


def require_buffers(layer: Layer | Stack, old: PyTree, new: PyTree) -> None:
    """Raises `StateError` if a training pass leaves other buffers than it found.

    Floats may have another precision: they are kept in the buffer's own.
    """
    had, have = (dict(named_leaves(tree)) for tree in (old, new))
    wrong = [f"{name}: expected, but missing" for name in had if name not in have]
    wrong += [f"{name}: not expected" for name in have if name not in had]
    for name in had.keys() & have.keys():
        pair = old_leaf, leaf = had[name], jnp.asarray(have[name])
        floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in pair)
        if leaf.shape != old_leaf.shape or not (floats or leaf.dtype == old_leaf.dtype):
            wrong.append(f"{name}: expected {_kinds([old_leaf])}, got {_kinds([leaf])}")
    trees: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
    if not wrong and trees[0] != trees[1]:
        wrong.append(f"expected a tree like {trees[0]}, got {trees[1]}")
    if wrong:
        where = f"layer {layer.name!r}" if layer.name else "loss"
        raise StateError(f"{where}: the buffers that it returns are not those it was given:"
                         f" {'; '.join(sorted(wrong))}")  # fmt: skip
