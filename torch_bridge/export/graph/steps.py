"""Quotients whose last bit decides: what is made of them jumps (a floor, a cast, a comparison)."""

from __future__ import annotations

import torch


_QUOTIENTS = ("aten.div.Tensor", "aten.div.Scalar")
# Of these a value goes on, or what is made of it steadily; they are followed.
_STEADY = frozenset(
    """
    abs add alias broadcast_to clamp clone contiguous copy detach div expand index_select lift_fresh
    lift_fresh_copy maximum minimum mul neg permute repeat reshape rsub select slice squeeze stack
    sub t transpose unsqueeze unsqueeze_ view _unsafe_view
    """.split()  # noqa: SIM905
)
_STEPS = frozenset(
    """
    bucketize ceil eq floor floor_divide fmod frac ge gt le lt ne remainder round searchsorted sign
    trunc
    """.split()  # noqa: SIM905
)
_CASTS = frozenset(("_to_copy", "to"))


def is_before_a_step(node: torch.fx.Node) -> bool:
    """Whether a node is a quotient of floats that something with steps is made of."""
    if str(node.target) not in _QUOTIENTS or not node.meta["val"].is_floating_point():
        return False
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            name = _name(user)
            if name in _STEPS or (name in _CASTS and not user.meta["val"].is_floating_point()):
                return True
            if user not in seen and (name in _STEADY or name in _CASTS):
                seen.add(user)
                todo.append(user)
    return False


def _name(node: torch.fx.Node) -> str:
    parts = str(node.target).split(".")
    return parts[1] if node.op == "call_function" and parts[0] == "aten" else ""
