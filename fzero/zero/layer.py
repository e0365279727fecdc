"""A layer outside of stacks: its forward pass, and its backward pass, whole or in halves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from fzero.errors import warn
from fzero.links import Context, Layer, Mean, apply_layer, layer_params, split_loss
from fzero.programs.halves import Rest, first_half, unfenced
from fzero.sharding.buffers import require_reductions
from fzero.tree import PyTree
from fzero.zero.vjp import Floats, Pullback, forward, remat_policy
from fzero.zero.weights import FetchedWeights, Secondary, Sums, trained_leaves


_NO_GRADIENT = (
    "training step: the loss follows from no parameter that is trained, so that all gradients are"
    " 0. It has to compute with what it is given: loss(params, ...) with these params, and"
    " loss(forward, ...) with this forward. A module or arrays from outside are constants"
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["residuals", "secondary"],
    meta_fields=["layer", "pullback"],
)
@dataclass(frozen=True, eq=False)
class LayerSaved:
    """What a layer leaves for its backward pass: never a gathered weight.

    Args:
        layer: the layer.
        pullback: its backward pass.
        residuals: what that reads besides weights.
        secondary: of the leaves that this layer is the first to read again.
    """

    layer: Layer
    pullback: Pullback
    residuals: list[Any]
    secondary: Secondary


@dataclass(frozen=True)
class End:
    """What the last link of a chain gives: the loss and the model's own metrics."""

    mean: Mean
    metrics: dict[str, Any]


def layer_forward(
    layer: Layer,
    fetched: FetchedWeights,
    x: Any,
    ctx: Context,
    differentiable: bool,
    end: list[End] | None,
) -> tuple[LayerSaved, Any, PyTree]:
    """Runs a layer in training mode: `(saved, x, new buffers)`; the last one puts its `End` in."""
    structure, floats, rest = Floats.of(x, differentiable)
    cell: dict[str, Any] = {}  # static facts learnt while tracing
    treedef = jax.tree.structure(layer_params(layer, fetched.kept))
    learnt = trained_leaves(fetched.rules, layer)

    def run(weights: list[Any], own: list[Any], floats: list[Any]) -> tuple[Any, Any]:
        weights = list(weights)
        for i, weight in zip(learnt, own, strict=True):
            weights[i] = weight
        params = jax.tree.unflatten(treedef, weights)
        own = structure.join(floats, rest)
        if not fetched.rules.one_device:
            require_reductions(layer, params, own, ctx)
        y, buffers = apply_layer(layer, params, own, {}, ctx)
        if end is not None:
            mean, metrics = split_loss(y)
            return mean.total, (mean.count, metrics, buffers)
        cell["out"], y_floats, y_rest = Floats.of(y)
        return y_floats, (y_rest, buffers)

    def of_weights(weights: list[Any]) -> PyTree:
        policy = remat_policy(fetched.rules.plan.remat)
        primals = [weights[i] for i in learnt], floats
        y, aux, cell["pullback"], residuals = forward(
            partial(run, weights), primals, weights, policy
        )
        return y, aux, residuals

    y, aux, residuals = fetched.run(layer, of_weights)
    saved = LayerSaved(
        layer, cell["pullback"], residuals, fetched.new_secondary(layer, cell["pullback"])
    )
    if end is not None:
        count, metrics, buffers = aux
        if cell["pullback"].zero:
            warn(_NO_GRADIENT)
        end.append(End(Mean(y, count), metrics))
        return saved, None, buffers
    y_rest, buffers = aux
    return saved, cell["out"].join(y, y_rest), buffers


def layer_backward(
    fetched: FetchedWeights, saved: LayerSaved, cotangent: Any, sums: Sums, rng: jax.Array | None
) -> Any:
    """The cotangent of a layer's input; the gradients of its leaves go to `sums`."""
    rules = fetched.rules
    if rules.halves:
        half, cotangent = layer_input_backward(fetched, saved, cotangent, rng)
        layer_weight_backward(fetched, half, sums, rng)
        return cotangent
    # The fence keeps what the forward pass computes out of the backward pass's fusions, and the
    # gathers from starting before there is anything to differentiate.
    residuals, cotangent = rules.fence((saved.residuals, cotangent))

    def of_weights(weights: list[Any]) -> PyTree:
        return saved.pullback.run(residuals, weights, cotangent)

    finish = sums.taker(saved.layer)
    _, cotangent = fetched.run(saved.layer, of_weights, residuals, finish)
    return cotangent


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "rest", "secondary"],
    meta_fields=["layer"],
)
@dataclass(frozen=True, eq=False)
class SecondHalf:
    """What the weights' gradients of a layer take, once its input's gradient is known."""

    layer: Layer
    values: list[Any]
    rest: Rest
    secondary: Secondary


def layer_input_backward(
    fetched: FetchedWeights, saved: LayerSaved, cotangent: Any, rng: jax.Array | None
) -> tuple[SecondHalf, Any]:
    """The first half of `layer_backward`: the cotangent of the input, and what is left to do."""
    rules = fetched.rules
    assert rng is not None
    residuals, cotangent = rules.fence((saved.residuals, cotangent))
    cell: list[Rest] = []

    def of_weights(weights: list[Any]) -> PyTree:
        def whole(weights: list[Any]) -> Any:
            grads, dx = saved.pullback.run(residuals, weights, cotangent)
            return list(grads), dx

        dx, values, rest = first_half(whole, weights, lambda run: rules.apart(run, rng))
        cell.append(rest)
        return dx, values

    cotangent, values = fetched.run(saved.layer, of_weights, residuals)
    values = unfenced(values, residuals, saved.residuals)
    return SecondHalf(saved.layer, values, cell[-1], saved.secondary), cotangent


def layer_weight_backward(
    fetched: FetchedWeights, half: SecondHalf, sums: Sums, rng: jax.Array | None
) -> None:
    """The second half of `layer_backward`: gradients of the layer's leaves, which go to `sums`."""
    rules = fetched.rules
    assert rng is not None
    values = rules.fence(half.values)

    def of_weights(weights: list[Any]) -> tuple[list[Any], tuple[()]]:
        return rules.apart(lambda: half.rest.run(values, weights), rng), ()

    fetched.run(half.layer, of_weights, values, sums.taker(half.layer))
