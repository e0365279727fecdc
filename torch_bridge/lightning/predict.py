"""Lightning's `predict_step` beside the steps that train, on the same parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import torch

from fzero.errors import ConversionError
from fzero.model import Model, Sequential
from torch_bridge.convert import convert
from torch_bridge.converted import Converted
from torch_bridge.lightning.hooks import own_method
from torch_bridge.lightning.steps import as_prediction


def predicting(
    module: torch.nn.Module, example_batch: Any, converted: Converted, loss: Callable[..., Any]
) -> Model:
    """The model of a module's steps, which predicts what `predict_step` gives.

    Args:
        module: the module.
        example_batch: what it is converted with.
        converted: its steps.
        loss: the loss of these.
    """
    model = converted.model(loss)
    try:
        with as_prediction(module):
            found = convert(module, example_batch, batch_dim=0, train=False)
    except Exception as error:  # whatever the module raises: it can be trained all the same
        return _with_predict(model, _refusing(type(module), error))
    if isinstance(model, Sequential) and found.blocks.stacks:
        chain = _predictor(found, chain=True)
        if _form(chain) == _form(model):
            return _with_predict(model, chain.predictor)
    plain = _predictor(found, chain=False)
    assert plain.predict is not None
    predict = plain.predict

    def apply(params: Any, buffers: Any, batch: Any, rng: Any) -> Any:
        own = found.by_layer(converted.by_name(params), converted.by_name(buffers))
        return predict(*own, batch, rng)

    return _with_predict(model, apply)


def _predictor(found: Converted, chain: bool) -> Model:
    return found.model(lambda *_: 0.0, inputs=lambda batch: (batch,), chain=chain)


def _form(model: Model) -> Any:
    """What two chains that read the same parameters have alike."""
    links = [(link.name, link.num_layers) for link in model.layers]
    return links, jax.tree.map(lambda x: x.shape, model.init)


def _with_predict(model: Model, predict: Any) -> Model:
    if isinstance(model, Sequential):
        layers, given = model.layers, model.init
        return Sequential(layers, None, given, model.frozen, predict, model.shard)
    return dataclasses.replace(model, predict=predict)


def _refusing(kind: type, error: Exception) -> Callable[..., NoReturn]:
    """A `predict` that says why there is none."""
    own = own_method(kind, "predict_step") is not None
    what = "predict_step" if own else "forward, called with the batch as Lightning does by default,"
    text = (
        f"predict_step: {what} of {kind.__name__} could not be converted:"
        f" {type(error).__name__}: {error}\nGive the module a predict_step(batch, batch_idx) that"
        " returns tensors with a row for each example"
    )

    def predict(*_: Any) -> NoReturn:
        raise ConversionError(text)

    return predict
