"""DeepSpeed's optimizers as optax transformations."""

from __future__ import annotations

from typing import Any

import optax

from fzero.errors import is_number
from torch_bridge.configs.keys import Keys


OTHERS = {
    "lamb": "DeepSpeed's clamps the ratio of norms, optax.lamb does not: choose it yourself",
    "adagrad": "use tb.optimizer(torch.optim.Adagrad(...), converted), which has torch's formula",
    "muon": "say which parameters are its own: tb.optimizer([torch.optim.Muon(...), AdamW])",
    "onebitadam": "its compressed reductions have no counterpart: use AdamW",
    "zerooneadam": "its compressed reductions have no counterpart: use AdamW",
    "onebitlamb": "its compressed reductions have no counterpart: choose another",
    "muadam": "scale the rates of your layers with optax.multi_transform",
    "muadamw": "scale the rates of your layers with optax.multi_transform",
    "musgd": "scale the rates of your layers with optax.multi_transform",
}
_NO_EFFECT = dict.fromkeys(
    ("torch_adam", "fused", "foreach", "legacy_fusion", "fp32_optimizer_states"),
    "how it is computed, not what",
)


def transformation(name: str, keys: Keys, lr: Any) -> optax.GradientTransformation:
    """The transformation of an optimizer's name and parameters.

    Args:
        name: DeepSpeed's name, in lower case.
        keys: its `params`; `lr` is taken already.
        lr: rate or schedule.
    """
    if "max_grad_norm" in keys.left:
        raise keys.error("max_grad_norm", "set", "DeepSpeed refuses it, too: gradient_clipping")
    if name in ("adam", "adamw"):
        return _adam(name, keys, lr)
    if name == "lion":
        b1, b2 = _betas(keys, (0.9, 0.99))
        return optax.lion(lr, b1, b2, weight_decay=keys.number("weight_decay", 0.0, least=0))
    if name == "sgd":
        momentum = keys.number("momentum", 0.0, least=0)
        decay = keys.number("weight_decay", 0.0, least=0)
        keys.refuse({"dampening": "optax.sgd has none: write 0"}, (None, False, 0))
        sgd = optax.sgd(lr, momentum or None, bool(keys.take("nesterov", False)))
        return optax.chain(optax.add_decayed_weights(decay), sgd) if decay else sgd
    hint = OTHERS.get(name, "expected AdamW, Adam, Lion or SGD; pass your own to train_step")
    raise keys.error("type", repr(name), hint)


def _adam(name: str, keys: Keys, lr: Any) -> optax.GradientTransformation:
    b1, b2 = _betas(keys, (0.9, 0.999))
    eps = keys.number("eps", 1e-8, least=0)
    decoupled = keys.take("adam_w_mode", True) or name == "adamw"
    # torch.optim.AdamW decays by itself, DeepSpeed's own kernels do not.
    torch_adamw = bool(keys.left.get("torch_adam")) and decoupled
    decay = keys.number("weight_decay", 0.01 if torch_adamw else 0.0, least=0)
    keys.refuse({"amsgrad": "use optax.amsgrad"})
    if not keys.take("bias_correction", True):
        raise keys.error("bias_correction", "false", "optax's Adam always corrects: write true")
    keys.without_effect(_NO_EFFECT)
    if decoupled:
        return optax.adamw(lr, b1, b2, eps, weight_decay=decay)
    adam = optax.adam(lr, b1, b2, eps)
    return optax.chain(optax.add_decayed_weights(decay), adam) if decay else adam


def _betas(keys: Keys, default: tuple[float, float]) -> tuple[float, float]:
    betas = keys.take("betas", default)
    two = isinstance(betas, list | tuple) and len(betas) == 2 and all(map(is_number, betas))
    if not two or not all(0 <= beta < 1 for beta in betas):
        raise keys.error("betas", repr(betas), "expected two numbers below 1 (auto: pass auto=)")
    return float(betas[0]), float(betas[1])
