"""Steps: pure functions `(state, batch) -> (state, metrics)`, built once and compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optax

from fzero.model import Model
from fzero.plan import Plan
from fzero.sharding.blueprint import blueprint
from fzero.step.steps import EvalStep, PredictStep, TrainStep


def train_step(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    donate: bool = True,
    devices: Sequence[Any] | None = None,
) -> TrainStep:
    """Builds a training step.

    Args:
        model: what to train.
        tx: any optax transformation. It sees the mean gradient, clipped as the plan says, and the
            float32 parameters, as global arrays.
        plan: how the state is laid out and stepped.
        donate: whether a step may reuse its input state's memory. The input is consumed then:
            all that takes a state raises `StateConsumedError` for it,
            and jax says of its arrays that they were deleted.
        devices: devices to use; all by default.

    Returns:
        `step(state, batch) -> (state, metrics)`. `batch` is a pytree of arrays with a common
        leading dim of examples, a multiple of devices times microbatches. Metrics are float32
        scalars: `loss` and its `count`, `grad_norm` (before clipping), `nonfinite` (1 when a
        gradient was not finite), `skipped` and `loss_scale` where the plan has them, and the
        model's own. A state with an accumulation in progress (`accumulate_step`) is stepped with
        the accumulated gradient included: `loss`, `count` and `grad_norm` are then those of all its
        batches, the model's own metrics those of this call.

    Raises:
        PlanError: the plan does not fit the devices.
        StateError: (when called) the state is not one of this model, optimizer and plan.
        StateConsumedError: (when called) the state was given to an earlier step.
        BatchError: (when called) the batch does not fit; the state is left as it was.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, fzero as fz
        >>> model = fz.Model(
        ...     lambda rng: ({"w": jnp.zeros((2, 1))}, {}),
        ...     lambda p, b, batch, rng, train: (jnp.mean((batch["x"] @ p["w"] - 1) ** 2), b, {}))
        >>> plan, tx = fz.Plan(data=1), optax.sgd(0.1)
        >>> step = fz.train_step(model, tx, plan)
        >>> state, metrics = step(fz.init(model, tx, plan), {"x": np.ones((4, 2), np.float32)})
        >>> float(metrics["loss"]), int(state.step)
        (1.0, 1)
    """
    return TrainStep(blueprint(model, tx, plan, devices), donate, apply=True)


def accumulate_step(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    donate: bool = True,
    devices: Sequence[Any] | None = None,
) -> TrainStep:
    """Builds a step that adds a batch's gradient to the state and applies nothing.

    `train_step(accumulate_step(state, a), b)` steps with the gradient of `a` and `b` together,
    exact by totals and counts. The accumulation is part of the state (`state.grads`): evaluation,
    offload and checkpoints in between see it and leave it alone. Where a gradient in it is not
    finite, a plan that skips (fp16, `skip_nonfinite`) keeps the buffers of before that batch, and
    skips the step that follows.

    Args, Returns and Raises as for `train_step`.
    """
    return TrainStep(blueprint(model, tx, plan, devices), donate, apply=False)


def eval_step(
    model: Model,
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
    which: str = "params",
) -> EvalStep:
    """Builds an evaluation step.

    Args:
        model: the model.
        plan: the plan of the states to evaluate.
        devices: devices to use; all by default.
        which: the parameters it reads: those trained (`params`), or with `Plan(ema=0.999)` their
            moving averages (`ema`), laid out as parameters for each call.

    Returns:
        `step(state, batch) -> metrics`, with `loss`, its `count` and the model's own metrics as
        float32 scalars. The state is untouched. To average over batches, weight `loss` by `count`.

    Raises:
        As `train_step`.
    """
    return EvalStep(blueprint(model, None, plan, devices), which)


def predict_step(
    model: Model,
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
    which: str = "params",
) -> PredictStep:
    """Builds a step that gives the model's outputs for each example, in evaluation mode.

    Outputs are those of `predict=` of the model (`Model`, `Sequential`, `from_flax`), or what a
    `Sequential`'s chain gives before its loss. Of a PyTorch module (`converted.model`) they are
    what its forward gives.

    Args:
        model: the model.
        plan: the plan of the states.
        devices: devices to use; all by default.
        which: the parameters it reads: those trained (`params`), or with `Plan(ema=0.999)` their
            moving averages (`ema`), laid out as parameters for each call.

    Returns:
        `step(state, batch) -> outputs`: a pytree whose leaves have a row for each example, spread
        over the devices as the batch is. Any number of rows will do: a batch that does not divide
        is filled up on the way, and its outputs lie whole on every device.

    Raises:
        PlanError: the plan does not fit the devices, nothing says what the model's outputs are, or
            only one function does and the plan is a pipeline.
        StateError: (when called) the state is not one of this model and plan, or an output has
            another number of rows.
        BatchError: (when called) leaves have different numbers of rows, or the outputs need the
            rows of all (`fz.all_rows`) of a batch that does not divide.

    Example:
        >>> import jax.numpy as jnp, numpy as np, fzero as fz
        >>> model = fz.Sequential(
        ...     [fz.Layer("out", lambda rng: {"w": jnp.ones((2, 3))},
        ...               lambda p, batch, ctx: batch["x"] @ p["w"])],
        ...     loss=lambda y, batch: jnp.mean(y))
        >>> plan = fz.Plan(data=1)
        >>> predict = fz.predict_step(model, plan)
        >>> predict(fz.init(model, None, plan), {"x": np.ones((5, 2), np.float32)}).shape
        (5, 3)
    """
    return PredictStep(blueprint(model, None, plan, devices), which)
