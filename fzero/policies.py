"""What `Plan.remat` may be given as, and the names of policies for JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fzero.errors import PlanError


REMATS = ("layer", "dots", "none", "offload")
PREFIX = "jax.checkpoint_policies."


def as_remat(given: Any) -> Any:
    """What `Plan.remat` may be given as: a word, a policy, or the name of one that JSON kept."""
    if given is None:
        return None
    if callable(given):
        name = public_name(given)
        if name.startswith(("save_", "offload_")):
            raise PlanError(f"plan: remat={PREFIX}{name}: this makes a policy: call it first")
        return given
    if isinstance(given, str) and given.startswith(PREFIX):
        return getattr(jax.checkpoint_policies, given.removeprefix(PREFIX), given)
    if isinstance(given, str) and "." in given:
        return given  # a step will ask for the function
    if not isinstance(given, str) or given not in REMATS:
        raise PlanError(
            f"plan: remat={given!r}: expected one of {list(REMATS)}, None, or a policy such"
            " as jax.checkpoint_policies.dots_saveable"
        )
    return given


def public_name(policy: Callable[..., Any]) -> str:
    """The name of a policy in `jax.checkpoint_policies`; empty if it has none."""
    names = [name for name in dir(jax.checkpoint_policies) if not name.startswith("_")]
    return next((n for n in names if getattr(jax.checkpoint_policies, n) is policy), "")


def policy_name(policy: Callable[..., Any]) -> str:
    """The qualified name of a policy; jax's own by the names under which they are public."""
    name = public_name(policy)
    if name:
        return PREFIX + name
    kind = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{kind.__module__}.{kind.__qualname__}"
