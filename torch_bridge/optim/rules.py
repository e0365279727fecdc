"""Which optax transformation each of torch's optimizers is, for the hyperparameters of a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fzero.errors import ConversionError
from torch_bridge.optim.rates import Rates
from torch_bridge.optim.scaling import (
    scale_by_adagrad,
    scale_by_adam,
    scale_by_adamax,
    scale_by_muon,
    scale_by_nadam,
    scale_by_radam,
)


Group = Mapping[str, Any]
Rule = Callable[[Group], optax.GradientTransformation]

# Hyperparameters that say how torch computes, not what.
_NO_EFFECT = ("foreach", "fused", "capturable", "differentiable", "initial_lr", "param_names")


def find_rule(optimizer: Any) -> Rule:
    """The rule of an optimizer.

    Args:
        optimizer: a torch optimizer.

    Returns:
        `rule(group) -> optax transformation`; items of a group are numbers (also as tensors of one
        element), or `Rates` where a schedule changes them.

    Raises:
        ConversionError: an optimizer that is not mapped, or has hooks.
    """
    kind = type(optimizer)
    rule = _RULES.get(kind)
    if rule is None and kind.__name__ == "Lion":
        _refuse_other_lions(optimizer)
        rule = _lion
    if rule is None:
        known = ", ".join(sorted(one.__name__ for one in _RULES))
        raise ConversionError(
            f"optimizer {kind.__module__}.{kind.__qualname__} is not mapped; {known} and Lion are"
            " (their subclasses may compute anything, and are not). Make one of these with the"
            f" same hyperparameters{_ADVICE.get(kind.__name__, '')}, or write the transformation"
            " in optax"
        )
    # Learning-rate schedulers put a wrapper there, and PyTorch one around that of the class.
    step = inspect.unwrap(vars(optimizer).get("step", kind.step))
    if getattr(step, "__func__", step) is not inspect.unwrap(kind.step):
        raise ConversionError(
            f"optimizer {kind.__name__} has a step() of its own (it was replaced on the object),"
            " which a pure update would leave out; clip by fz.Plan(clip_norm=), and do in optax"
            " what else it does"
        )
    hooks = [
        name
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if getattr(optimizer, name, None)
    ]
    if hooks:
        raise ConversionError(
            f"optimizer {kind.__name__} has step hooks (register_step_{hooks[0].split('_')[3]}_hook"
            "), which a pure update would leave out; remove them, and do in optax what they do"
        )
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise ConversionError(
            "all optimizers of this process have step hooks (register_optimizer_step_pre_hook or"
            " _post_hook of torch.optim.optimizer), which a pure update would leave out; remove"
            " them, and do in optax what they do"
        )
    return rule


_ADVICE = {
    "AcceleratedOptimizer": " (give its `.optimizer`, and fz.Plan what the Accelerator was told)",
    "Adafactor": " (optax.adafactor is another variant: it has no equal here)",
    "SparseAdam": " (gradients are dense here: torch.optim.Adam)",
    "FusedAdam": " (torch.optim.AdamW; Adam if adam_w_mode=False)",
    "DeepSpeedCPUAdam": " (torch.optim.AdamW, and Plan(tiers={'opt_state': 'host'}))",
    "LBFGS": " (it evaluates the loss several times a step, and no step here does)",
}


def _adam(group: Group) -> optax.GradientTransformation:
    b1, b2 = group["betas"]
    b2 = _constant(b2, "betas[1]")
    rest = {"b2": b2, "eps": float(group["eps"]), "amsgrad": bool(group["amsgrad"])}
    return _decayed(group, _cycled(scale_by_adam, "b1", b1, rest))


def _nadam(group: Group) -> optax.GradientTransformation:
    decay = float(group["momentum_decay"])
    return _decayed(group, scale_by_nadam(*_betas(group), float(group["eps"]), decay))


def _radam(group: Group) -> optax.GradientTransformation:
    return _decayed(group, scale_by_radam(*_betas(group), float(group["eps"])))


def _adamax(group: Group) -> optax.GradientTransformation:
    return _decayed(group, scale_by_adamax(*_betas(group), float(group["eps"])))


def _sgd(group: Group) -> optax.GradientTransformation:
    momentum = group["momentum"]
    if not isinstance(momentum, Rates) and momentum == 0:
        return _decayed(group)
    dampening = float(group["dampening"])
    blocks = []
    if dampening:
        # The first gradient starts the trace undamped.
        blocks.append(
            optax.scale_by_schedule(lambda count: jnp.where(count == 0, 1.0, 1.0 - dampening))
        )
    rest = {"nesterov": bool(group["nesterov"]), "accumulator_dtype": None}
    return _decayed(group, *blocks, _cycled(optax.trace, "decay", momentum, rest))


def _adagrad(group: Group) -> optax.GradientTransformation:
    blocks = [scale_by_adagrad(float(group["initial_accumulator_value"]), float(group["eps"]))]
    slower = float(group["lr_decay"])
    if slower:
        blocks.append(
            optax.scale_by_schedule(lambda count: 1.0 / (1.0 + slower * count.astype(jnp.float32)))
        )
    return _decayed(group, *blocks)


def _rmsprop(group: Group) -> optax.GradientTransformation:
    scale = optax.scale_by_stddev if group["centered"] else optax.scale_by_rms
    decay, eps = float(group["alpha"]), float(group["eps"])
    blocks = [scale(decay=decay, eps=eps, eps_in_sqrt=False)]
    momentum = group["momentum"]
    if isinstance(momentum, Rates) or momentum > 0:
        blocks.append(_cycled(optax.trace, "decay", momentum, {"accumulator_dtype": None}))
    return _decayed(group, *blocks)


def _adadelta(group: Group) -> optax.GradientTransformation:
    return _decayed(group, optax.scale_by_adadelta(float(group["rho"]), float(group["eps"])))


def _lion(group: Group) -> optax.GradientTransformation:
    b1, b2 = _betas(group)
    return _decayed({**group, "decoupled_weight_decay": True}, optax.scale_by_lion(b1, b2))


def _refuse_other_lions(optimizer: Any) -> None:
    """Lion is not torch's own: packages differ in what they add to it."""
    usual = {"params", "lr", "betas", "weight_decay", "maximize", *_NO_EFFECT}
    for number, group in enumerate(optimizer.param_groups):
        missing = {"lr", "betas", "weight_decay"} - set(group)
        # cautious_factor=1 leaves every element as it is.
        more = {
            k: v
            for k, v in group.items()
            if k not in usual and v is not None and v is not False
            if (k, v) != ("cautious_factor", 1.0)
        }
        if getattr(optimizer, "decoupled_wd", False):
            more["decoupled_wd"] = True
        if missing or more:
            raise ConversionError(
                f"optimizer Lion, group {number}: expected lr, betas and weight_decay and nothing"
                f" else, got {more or f'no {sorted(missing)}'}; its arithmetic is not known. Turn"
                " that off, or write the transformation in optax"
            )


def _muon(group: Group) -> optax.GradientTransformation:
    scale = scale_by_muon(
        _constant(group["momentum"], "momentum"),
        bool(group["nesterov"]),
        tuple(map(float, group["ns_coefficients"])),  # type: ignore[arg-type]
        float(group["eps"]),
        int(group["ns_steps"]),
        group["adjust_lr_fn"],
    )
    return _decayed({**group, "decoupled_weight_decay": True}, scale)


def _decayed(group: Group, *blocks: optax.GradientTransformation) -> optax.GradientTransformation:
    """A rule with what all have in common: the sign, weight decay and the learning rate."""
    decay = float(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    chain = [optax.scale(-1.0)] if group.get("maximize") else []
    if decay and not decoupled:
        chain.append(optax.add_decayed_weights(decay))
    chain.extend(blocks)
    if decay and decoupled:
        chain.append(optax.add_decayed_weights(decay))
    return optax.chain(*chain, _scale_by_rate(group["lr"]))


def _scale_by_rate(lr: Any) -> optax.GradientTransformation:
    if not isinstance(lr, Rates):
        return optax.scale(-float(lr))
    scaled = optax.scale_by_learning_rate(lr)

    def init(params: Any) -> Any:
        return scaled.init(params)._replace(count=jnp.asarray(lr.start, jnp.int32))

    return optax.GradientTransformation(init, scaled.update)


def _cycled(
    make: Callable[..., optax.GradientTransformation],
    name: str,
    value: Any,
    rest: Mapping[str, Any],
) -> optax.GradientTransformation:
    """A transformation one of whose hyperparameters a schedule may change."""
    if not isinstance(value, Rates):
        return make(**{name: float(value)}, **rest)
    if value.start:
        own = {"b1": "betas[0]", "decay": "momentum"}[name]
        raise ConversionError(
            f"the scheduler changes {own} as well as the learning rate, and has made"
            f" {value.start} step(s) already; pass it as it was before its first step"
        )
    injected = optax.inject_hyperparams(make, static_args=tuple(rest))
    return injected(**{name: value}, **rest)


def _betas(group: Group) -> tuple[float, float]:
    b1, b2 = group["betas"]
    return _constant(b1, "betas[0]"), _constant(b2, "betas[1]")


def _constant(value: Any, name: str) -> float:
    if isinstance(value, Rates):
        raise ConversionError(
            f"the scheduler changes {name} of an optimizer where that is not mapped; give it"
            " cycle_momentum=False, or use AdamW, Adam, SGD or RMSprop"
        )
    return float(value)


_RULES: dict[type, Rule] = {
    torch.optim.AdamW: _adam,
    torch.optim.Adam: _adam,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.Adamax: _adamax,
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Muon: _muon,
}


def sees_matrices(optimizer: Any) -> bool:
    """Whether an optimizer sees a matrix, not its elements: each layer of a stack is one."""
    return isinstance(optimizer, torch.optim.Muon)
