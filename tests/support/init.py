"""The program that makes a new state, for reading its memory before it runs."""

from __future__ import annotations

from typing import Any

import jax
import optax

import fzero as fz
from fzero.sharding.blueprint import blueprint
from fzero.state.init import born_fields, compiled_fields


def lower_init(model: fz.Model, tx: optax.GradientTransformation | None, plan: fz.Plan) -> Any:
    """What `fz.init` runs for a model whose `init` is a function, lowered; not of a pipeline."""
    blue = blueprint(model, tx, plan)
    key = jax.random.key(0)
    return compiled_fields(blue, "born", born_fields(blue), key).lower(key)
