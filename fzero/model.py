"""What is trained: functions plus initial values. No array is ever kept inside a model's function.

A `Model` is one loss function. A `Sequential` is a chain of `Layer`s and `Stack`s from which the
loss follows; being a chain is what lets a step gather one layer ahead, and a pipeline cut it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

from fzero.errors import PlanError
from fzero.links import BufferReduce, Shard, asked_for, loss_output, require_takes
from fzero.links import Context as Context
from fzero.links import Layer as Layer
from fzero.links import Mean as Mean
from fzero.links import Stack as Stack
from fzero.pieces import InitFn, LossFn, chain_init, chain_loss
from fzero.summary import Printed, summary
from fzero.tree import PyTree


Frozen = Collection[str | re.Pattern[str]] | re.Pattern[str] | Callable[[str], bool]
# Links of a chain that are shown where it is printed.
MOST = 16


@dataclass(frozen=True, eq=False, repr=False)
class Model(Printed):
    """A loss function and initial values.

    Args:
        init: `init(rng) -> (params, buffers)`, traced under jit so that every array is born in
            its sharding; or the concrete pair itself (arrays are copied, never aliased).
            `params` are floating-point arrays that gradients exist for (`frozen` ones may be whole
            numbers, as those of `fz.quantize`); everything else that changes while training
            (running statistics, counters) belongs into `buffers`.
        loss: `loss(params, buffers, batch, rng, train) -> (Mean or scalar, buffers, metrics)`.
            It sees one device's rows of one microbatch, as they came (`fz.all_rows` gives those of
            all devices to one that compares rows with each other): parameters have the plan's
            precision, and `fz.cast(batch["x"], like=params)` gives inputs the same. `metrics` is a
            dict of `Mean`s or scalars. A scalar, loss or metric, counts once for each device and
            microbatch: of a sum or a number of rows that is their mean. A parameter named `step`
            is given the number of optimizer steps taken.
        frozen: parameters that no step changes: their names, compiled regular expressions that are
            searched in names (`re.compile("^base/")`), or both; or a function of a name. They are
            stored and read like others, in the dtype given, and cost nothing else: no gradient, no
            part in its norm, no optimizer state, no second copy in mixed precision.
        buffer_reduce: how the devices' values of a buffer become one, by its path (or that of some
            of them together), or one word for all: `mean`; `sum`, of what each device adds to the
            old value (a decay of that would be added as often); `max`; `same`, where all have one
            value as it is (which nobody checks). Floats are averaged by default. Integers that
            depend on nothing but buffers (step counters) are the same anyway; others, those that
            count rows too, have no default, and a step that meets one says so.
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
        return self._with(init=init)

    def with_frozen(self, frozen: Frozen) -> Self:
        """The same model with other parameters that no step changes.

        A state goes over to it by `fz.with_optimizer(..., old_model=)`.
        """
        return self._with(frozen=frozen)

    def _with(self, **changes: Any) -> Self:
        new = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(new, name, value)
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
                require_takes(predict, "predict(params, buffers, batch, rng)", "model")
                args = (params, ctx.buffers, batch, ctx.rng)
                return predict(*args, **asked_for(predict, ctx)), ctx.buffers

            return (Layer("", None, apply, stateful=True),)
        if len(chain) > 1 and chain[-1].name == "loss":
            return chain[:-1]
        raise PlanError(
            "predict_step: expected a model that says what its outputs are: fz.Model(...,"
            " predict=lambda params, buffers, batch, rng: outputs), fz.from_flax(..., predict="
            "lambda forward, batch: outputs), or an fz.Sequential whose loss is given by itself"
            " (loss=...) or whose outputs are (predict=...)"
        )

    @property
    def layers(self) -> tuple[Layer | Stack, ...]:
        """The chain: one layer that reads every parameter, unless this is a `Sequential`."""

        def apply(params: PyTree, batch: PyTree, ctx: Context) -> tuple[Any, PyTree]:
            require_takes(self.loss, "loss(params, buffers, batch, rng, train)", "model")
            args = (params, ctx.buffers, batch, ctx.rng, ctx.train)
            out, buffers, metrics = loss_output(self.loss(*args, **asked_for(self.loss, ctx)))
            return (out, metrics), buffers

        return (Layer("", None, apply, stateful=True, buffer_reduce=self.buffer_reduce),)


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

    _chain: tuple[Layer | Stack, ...]
    _predict_chain: tuple[Layer | Stack, ...] | None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuses `dataclasses.replace`, which makes a model of the fields of an `fz.Model`."""
        if "buffer_reduce" in options and not args and "layers" not in options:
            raise PlanError(
                "model: dataclasses.replace makes no Sequential, whose loss follows from its"
                " layers: expected model.with_init(...) or model.with_frozen(...), or a new"
                " fz.Sequential(layers, ...)"
            )
        return super().__new__(cls)

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
        vars(self).update(
            _chain=chain, _predict_chain=links, init=init or chain_init(chain),
            loss=chain_loss(chain), frozen=frozen, shard=shard or {},
            predict=predict if callable(predict) else None,
            buffer_reduce={},  # each layer says its own
        )  # fmt: skip

    @property
    def layers(self) -> tuple[Layer | Stack, ...]:
        """The chain; a loss function given by itself is its last link."""
        return self._chain

    @property
    def predictor(self) -> tuple[Layer | Stack, ...]:
        """The chain that gives outputs for each example; see `Model.predictor`."""
        return super().predictor if self._predict_chain is None else self._predict_chain


def _loss_layer(loss: Callable[..., Any]) -> Layer:
    def apply(_: PyTree, x: Any, ctx: Context) -> Any:
        require_takes(loss, "loss(x, batch)", "model")
        return loss(x, ctx.batch, **asked_for(loss, ctx))

    return Layer("loss", None, apply)


def _check_names(chain: tuple[Layer | Stack, ...]) -> None:
    for place, layer in enumerate(chain):
        if not isinstance(layer, Layer | Stack):
            raise PlanError(
                f"model: layers[{place}] is a {type(layer).__name__}: expected an fz.Layer or an"
                " fz.Stack"
            )
    names = [layer.name for layer in chain]
    for name in names:
        if not isinstance(name, str) or not name or "/" in name or name == "loss":
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
        if isinstance(layer, Stack):
            _check_stack(layer)
        reads = getattr(layer, "reads", {})
        if not isinstance(reads, Mapping) or not all(isinstance(x, str) for x in reads.values()):
            raise PlanError(
                f"model: layer {layer.name!r} has reads={reads!r}: expected names for paths of"
                ' other layers\' parameters, such as {"table": "embed/table"}'
            )
        for key, path in reads.items():
            if path.split("/")[0] not in names:
                raise PlanError(
                    f"model: layer {layer.name!r} reads {key!r} from {path!r}, but no layer is"
                    f" named {path.split('/')[0]!r}; the chain has {names}"
                )


def _check_stack(stack: Stack) -> None:
    whole = isinstance(stack.num, Integral) and not isinstance(stack.num, bool)
    if not whole or stack.num < 1:
        raise PlanError(
            f"model: Stack {stack.name!r} has num={stack.num!r}; expected a whole number, 1 or more"
        )
    if isinstance(stack.shared, str):
        raise PlanError(
            f"model: Stack {stack.name!r} has shared={stack.shared!r}: expected a tuple of keys,"
            f" such as ({stack.shared!r},)"
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
