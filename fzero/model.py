"""What is trained: functions plus initial values. No array is ever kept inside a model's function.

A `Model` is one loss function. A `Sequential` is a chain of `Layer`s and `Stack`s from which the
loss follows; being a chain is what lets a step gather one layer ahead, and a pipeline cut it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from fzero.errors import PlanError
from fzero.keys import layer_key
from fzero.summary import Printed, summary


PyTree = Any
# How devices' values of buffers become one: one word, or words by path.
BufferReduce = str | Mapping[str, str]
# For leaves by path, or by what is searched in paths: the mesh axis that each dim lies along.
Shard = Mapping[str | re.Pattern[str], Sequence[str | None]]
InitFn = Callable[[jax.Array], tuple[PyTree, PyTree]]
Frozen = Collection[str | re.Pattern[str]] | re.Pattern[str] | Callable[[str], bool]
LossFn = Callable[..., tuple[Any, PyTree, dict[str, Any]]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A mean kept as its two sums, so that it stays exact over microbatches and devices.

    Totals and counts are added over microbatches and devices before the division. Padded tokens,
    ragged microbatches and any split of a batch then give the loss and gradient of one big batch.

    Args:
        total: scalar sum of what is averaged; differentiable.
        count: scalar number of things averaged; treated as a constant by the gradient.

    Example:
        >>> import jax.numpy as jnp
        >>> parts = [Mean(jnp.float32(6), jnp.float32(3)), Mean(jnp.float32(2), jnp.float32(1))]
        >>> float(sum(p.total for p in parts) / sum(p.count for p in parts))
        2.0
    """

    total: jax.Array
    count: jax.Array

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
    half = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return value.astype(jnp.float32) if half else value


# Links of a chain that are shown where it is printed.
MOST = 16


@dataclass(frozen=True, eq=False, repr=False)
class Model(Printed):
    """A loss function and initial values.

    Args:
        init: `init(rng) -> (params, buffers)`, traced under jit so that every array is born in
            its sharding; or the concrete pair itself (arrays are copied, never aliased).
            `params` are floating-point arrays that gradients exist for; everything else that
            changes while training (running statistics, counters) belongs into `buffers`.
        loss: `loss(params, buffers, batch, rng, train) -> (Mean or scalar, buffers, metrics)`.
            It sees one device's rows of one microbatch, as they came: parameters have the plan's
            precision, and `fz.cast(batch["x"], like=params)` gives inputs the same. `metrics` is a
            dict of `Mean`s or scalars. A parameter named `step` is given the number of optimizer
            steps taken.
        frozen: parameters that no step changes: their names, compiled regular expressions that are
            searched in names (`re.compile("^base/")`), or both; or a function of a name. They are
            stored and read like others, in the dtype given, and cost nothing else: no gradient, no
            part in its norm, no optimizer state, no second copy in mixed precision.
        buffer_reduce: how the devices' values of a buffer become one, by its path (or that of some
            of them together), or one word for all: `mean`; `sum`, of what each device adds; `max`;
            `same`, where all have one value as it is. Floats are averaged by default. Integers that
            depend on nothing but buffers (step counters) are the same anyway; others have no
            default, and a step that meets one says so.
        predict: `predict(params, buffers, batch, rng) -> outputs`, for `fz.predict_step`: a pytree
            with a row for each example.
        shard: which dims of which parameters lie along which further mesh axis of a plan, by their
            names or by compiled regular expressions that are searched in names:
            `{"mlp/up": (None, "tensor")}`. What a layer says of its own goes first.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(params, buffers, batch, rng, train):
        ...     error = batch["x"] @ params["w"] - batch["y"]
        ...     return Mean(jnp.sum(error**2), jnp.float32(error.size)), buffers, {}
        >>> model = Model(lambda rng: ({"w": jnp.zeros((3, 1))}, {}), loss)
    """

    init: InitFn | tuple[PyTree, PyTree]
    loss: LossFn
    frozen: Frozen = frozenset()
    buffer_reduce: BufferReduce = field(default_factory=dict)
    predict: Callable[..., Any] | None = None
    shard: Shard = field(default_factory=dict)

    def _summary(self) -> str:
        def name(of: Any) -> str:
            return str(getattr(of, "__qualname__", type(of).__name__))

        given = "values" if isinstance(self.init, tuple) else name(self.init)
        frozen = ", some frozen" if self.frozen else ""
        lines = [f"{type(self).__name__}(init={given}, loss={name(self.loss)}{frozen})"]
        chain = [link for link in self.layers if link.name]
        shown = chain if len(chain) <= MOST else [*chain[: MOST // 2], None, *chain[-MOST // 2 :]]
        for link in shown:
            if link is None:
                lines.append(f"  ... {len(chain) - MOST} more")
                continue
            layers = f" of {link.num} layers" if isinstance(link, Stack) else ""
            lines.append(f"  {link.name}: {type(link).__name__}{layers}, {name(link.apply)}")
        if isinstance(self.init, tuple):
            lines.append(summary("values", {"params": self.init[0], "buffers": self.init[1]}))
        return "\n".join(lines)

    def with_init(self, init: InitFn | tuple[PyTree, PyTree]) -> Self:
        """The same model with other initial values; leaves of a pair may be `LazyArray`s."""
        new = copy.copy(self)
        object.__setattr__(new, "init", init)
        return new

    @property
    def predictor(self) -> tuple[Layer | Stack, ...]:
        """The chain that gives outputs for each example: all of it but the loss.

        Raises:
            PlanError: nothing says where outputs end and the loss begins.
        """
        chain, predict = self.layers, self.predict
        if predict is not None:

            def apply(params: PyTree, batch: PyTree, ctx: Context) -> tuple[Any, PyTree]:
                return predict(params, ctx.buffers, batch, ctx.rng), ctx.buffers

            return (Layer("", None, apply, stateful=True),)
        if len(chain) > 1 and chain[-1].name == "loss":
            return chain[:-1]
        raise PlanError(
            "predict_step: expected a model that says what its outputs are: fz.Model(...,"
            " predict=lambda params, buffers, batch, rng: outputs), or an fz.Sequential whose loss"
            " is given apart (loss=...) or whose outputs are (predict=...)"
        )

    @property
    def layers(self) -> tuple[Layer | Stack, ...]:
        """The chain: one layer that reads every parameter, unless this is a `Sequential`."""

        def apply(params: PyTree, batch: PyTree, ctx: Context) -> tuple[Any, PyTree]:
            args = (params, ctx.buffers, batch, ctx.rng, ctx.train)
            out, buffers, metrics = self.loss(*args, **with_step(self.loss, ctx.step))
            return (out, metrics), buffers

        return (Layer("", None, apply, stateful=True, buffer_reduce=self.buffer_reduce),)


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
    """

    batch: PyTree
    rng: jax.Array
    train: bool
    buffers: PyTree = None
    dtype: Any = None
    step: Any = None

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
            tables). They stay outside the loop: kept once, gradients summed over the layers.
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


class Sequential(Model):
    """A model that is a chain of `Layer`s and `Stack`s.

    The parameters are `{layer.name: its params}`, the buffers `{layer.name: its buffers}` for
    stateful layers. The last layer gives the loss, `Mean | scalar` or `(Mean | scalar, metrics)`;
    or gives outputs that `loss(outputs, batch)` turns into that.

    Args:
        layers: the chain, in order.
        loss: optional `loss(x, batch) -> Mean | scalar | (Mean | scalar, metrics)`; a parameter
            named `step` is given the number of optimizer steps taken.
        init: replaces the layers' own initial values: a function of a key or the concrete pair.
        frozen: parameters that no step changes; see `Model`.
        predict: what gives the outputs of `fz.predict_step`, where that is not the chain without
            its loss: links in place of `layers`, by the same names; or a function as `Model` has
            it, which reads all parameters at once and cannot be cut into a pipeline.
        shard: which dims of which parameters lie along which further mesh axis, by their whole
            names; of a stack's, the dims of one layer. See `Model`.

    Raises:
        PlanError: names are empty, repeated or contain `/`, a Stack has no layers, `reads` names a
            layer that does not exist, or the links of `predict` are others.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = Sequential(
        ...     [Layer("in", lambda rng: jnp.ones((3, 2)), lambda w, batch, ctx: batch["x"] @ w)],
        ...     loss=lambda y, batch: Mean(jnp.sum(y), jnp.float32(y.size)))
        >>> params, buffers = model.init(jax.random.key(0))
        >>> batch, key = {"x": jnp.ones((5, 3))}, jax.random.key(0)
        >>> out, _, _ = model.loss(params, buffers, batch, key, True)
        >>> float(out.total / out.count)
        3.0
    """

    def __init__(
        self,
        layers: Sequence[Layer | Stack],
        loss: Callable[[Any, PyTree], Any] | None = None,
        init: InitFn | tuple[PyTree, PyTree] | None = None,
        frozen: Frozen = frozenset(),
        predict: Sequence[Layer | Stack] | Callable[..., Any] | None = None,
        shard: Shard | None = None,
    ) -> None:
        chain = tuple(layers)
        _check_names(chain)
        links = None if predict is None or callable(predict) else tuple(predict)
        _check_predict(chain, links)
        if loss is not None:
            chain = (*chain, _loss_layer(loss))
        object.__setattr__(self, "_chain", chain)
        object.__setattr__(self, "init", init or _chain_init(chain))
        object.__setattr__(self, "loss", _chain_loss(chain))
        object.__setattr__(self, "frozen", frozen)
        object.__setattr__(self, "predict", predict if callable(predict) else None)
        object.__setattr__(self, "_predict_chain", links)
        object.__setattr__(self, "shard", shard or {})
        object.__setattr__(self, "buffer_reduce", {})  # each layer says its own

    @property
    def layers(self) -> tuple[Layer | Stack, ...]:
        """The chain; a loss function given apart is its last link."""
        chain: tuple[Layer | Stack, ...] = getattr(self, "_chain")  # noqa: B009 (frozen dataclass)
        return chain

    @property
    def predictor(self) -> tuple[Layer | Stack, ...]:
        """The chain that gives outputs for each example; see `Model.predictor`."""
        links: tuple[Layer | Stack, ...] | None = getattr(self, "_predict_chain")  # noqa: B009
        return super().predictor if links is None else links


def _loss_layer(loss: Callable[..., Any]) -> Layer:
    def apply(_: PyTree, x: Any, ctx: Context) -> Any:
        return loss(x, ctx.batch, **with_step(loss, ctx.step))

    return Layer("loss", None, apply)


def with_step(function: Callable[..., Any], step: Any) -> dict[str, Any]:
    """The keyword arguments of a user's function that may ask for the step number."""
    try:
        asks = "step" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have no signature
        asks = False
    return {"step": step} if asks else {}


def _check_names(chain: tuple[Layer | Stack, ...]) -> None:
    names = [layer.name for layer in chain]
    for name in names:
        if not name or "/" in name or name == "loss":
            raise PlanError(
                f"model: layer name {name!r}: expected a non-empty name without '/' other than"
                " 'loss' (reserved for the loss function); rename the layer"
            )
        if names.count(name) > 1:
            raise PlanError(
                f"model: two layers are named {name!r}; give each its own name and let the second"
                ' read the first one\'s weights with reads={"key": "name"} if they are tied'
            )
    for layer in chain:
        if isinstance(layer, Stack) and layer.num < 1:
            raise PlanError(f"model: Stack {layer.name!r} has num={layer.num}; expected 1 or more")
        for key, path in getattr(layer, "reads", {}).items():
            if path.split("/")[0] not in names:
                raise PlanError(
                    f"model: layer {layer.name!r} reads {key!r} from {path!r}, but no layer is"
                    f" named {path.split('/')[0]!r}; the chain has {names}"
                )


def _check_predict(
    chain: tuple[Layer | Stack, ...], links: tuple[Layer | Stack, ...] | None
) -> None:
    """Raises `PlanError` if outputs come from other links than the loss."""
    if links is None:
        return
    found, have = ([(x.name, x.num_layers) for x in some] for some in (links, chain))
    if found != have:
        raise PlanError(
            f"model: predict has the links {[name for name, _ in found]}: expected those of the"
            f" chain, {[name for name, _ in have]}, with as many layers: they read the same"
            " parameters"
        )


def _chain_init(chain: tuple[Layer | Stack, ...]) -> InitFn:
    def init(rng: jax.Array) -> tuple[PyTree, PyTree]:
        params: dict[str, PyTree] = {}
        buffers: dict[str, PyTree] = {}
        for index, layer in enumerate(chain):
            if layer.init is None:
                continue
            key = layer_key(rng, index)
            if isinstance(layer, Stack):
                values = jax.vmap(layer.init)(jax.random.split(key, layer.num))
            else:
                values = layer.init(key)
            if layer.stateful:
                params[layer.name], buffers[layer.name] = values
            else:
                params[layer.name] = values
        return params, buffers

    return init


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
    """A stack's input as what the layers carry on and what they only read."""
    if not stack.shared:
        return x, {}
    shared = {key: x[key] for key in stack.shared}
    return {key: value for key, value in x.items() if key not in shared}, shared


def apply_layer(
    layer: Layer | Stack, params: PyTree, carry: Any, shared: Any, ctx: Context
) -> tuple[Any, PyTree]:
    """One layer of a link: `(new carry, new buffers)`."""
    x = {**carry, **shared} if shared else carry
    out = layer.apply(params, x, ctx)
    y, buffers = out if layer.stateful else (out, ctx.buffers)
    if shared:
        y = {key: value for key, value in y.items() if key not in shared}
    return y, buffers


def split_loss(out: Any) -> tuple[Mean, dict[str, Any]]:
    """What a chain ends with, `Mean | scalar` or a pair with metrics, as (Mean, metrics)."""
    if isinstance(out, tuple) and not isinstance(out, Mean):
        value, metrics = out
        return Mean.of(value), dict(metrics)
    return Mean.of(out), {}


@dataclass(frozen=True)
class Piece:
    """A link of a chain, or some consecutive layers of a stack.

    Args:
        layer: the link.
        start: first layer of the stack (0 for a `Layer`).
        stop: one past the last (1 for a `Layer`).
        number: number of its first layer in the chain; random keys are folded from it.
        row: where its first layer lies on dim 0 of the arrays at hand.
    """

    layer: Layer | Stack
    start: int
    stop: int
    number: int
    row: int = 0

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return self.stop - self.start


def whole_chain(chain: Sequence[Layer | Stack]) -> tuple[Piece, ...]:
    """All links of a chain, uncut."""
    found: list[Piece] = []
    number = 0
    for layer in chain:
        found.append(Piece(layer, 0, layer.num_layers, number))
        number += layer.num_layers
    return tuple(found)


def run_chain(
    pieces: Sequence[Piece],
    x: Any,
    buffers: PyTree,
    run_piece: Callable[[Piece, Any, PyTree], tuple[Any, PyTree]],
) -> tuple[Any, PyTree]:
    """Runs a chain, or consecutive pieces of one, forward: `(output, new buffers)`.

    Args:
        pieces: what to run.
        x: what the first one gets.
        buffers: buffers of all links.
        run_piece: `run_piece(piece, x, its link's buffers) -> (x, new buffers)`.
    """
    if not pieces[0].layer.name:  # a plain Model: one link that owns everything
        return run_piece(pieces[0], x, buffers)
    new = dict(buffers)
    for piece in pieces:
        layer = piece.layer
        x, state = run_piece(piece, x, buffers.get(layer.name))
        if layer.stateful:
            new[layer.name] = state
    return x, new


def _chain_loss(chain: tuple[Layer | Stack, ...]) -> LossFn:
    pieces = whole_chain(chain)

    def loss(
        params: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array, train: bool,
        step: Any = None,
    ) -> tuple[Mean, PyTree, dict[str, Any]]:  # fmt: skip
        def run_piece(piece: Piece, x: Any, state: PyTree) -> tuple[Any, PyTree]:
            layer = piece.layer
            weights = layer_params(layer, params)
            ctx = Context(batch, rng, train, state, step=step)
            if isinstance(layer, Stack):
                return _scan_stack(layer, weights, x, ctx, piece.number)
            return apply_layer(layer, weights, x, {}, ctx.at(piece.number))

        x, new = run_chain(pieces, batch, buffers, run_piece)
        out, metrics = split_loss(x)
        return out, new, metrics

    return loss


def _scan_stack(
    stack: Stack, params: PyTree, x: Any, ctx: Context, number: int
) -> tuple[Any, PyTree]:
    carry, shared = split_shared(stack, x)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        weights, state, index = xs
        return apply_layer(stack, weights, carry, shared, ctx.at(number + index, state))

    carry, new = jax.lax.scan(body, carry, (params, ctx.buffers, jnp.arange(stack.num)))
    return ({**carry, **shared} if shared else carry), new
