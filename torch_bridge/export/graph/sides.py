"""Tensors that share memory and not a gradient: `detach`, `.data`, what `no_grad` gives.

A write is seen by all that share its memory, and its gradient by those alone that it was written
through: one side of the memory. Which sides there are, which have a gradient, and who reads them.
"""

from __future__ import annotations

import torch

from torch_bridge.export.graph.memory import chain, read_by, storages, writes, written_by


# Noted of a node that was within no_grad.
_UNDER_NO_GRAD = "made_under_no_grad"


def mark_as_without_gradient(node: torch.fx.Node) -> None:
    """Note of an operator that it ran within `no_grad`."""
    node.meta[_UNDER_NO_GRAD] = True


def is_without_gradient(node: torch.fx.Node) -> bool:
    """Whether an operator ran within `no_grad`."""
    return _UNDER_NO_GRAD in node.meta


def detaches(node: torch.fx.Node) -> bool:
    """Whether an operator gives the same memory without its gradient."""
    return str(node.target) == "aten.detach.default"


def begins(node: torch.fx.Node) -> bool:
    """Whether a value is the first of a side."""
    # What is written to under no_grad is still the tensor that it was.
    return detaches(node) or (is_without_gradient(node) and not writes(node))


def side_of(node: torch.fx.Node) -> torch.fx.Node:
    """The first value of a tensor's side."""
    passed = chain(node)
    return next((one for one in passed if begins(one)), passed[-1])


def sides_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The first values of all sides of a tensor's memory."""
    root = chain(node)[-1]
    return [root, *(one for one in in_memory(root, storages(node)) if begins(one))]


def in_memory(
    start: torch.fx.Node, own: set[int], but: torch.fx.Node | None = None, side: bool = False
) -> list[torch.fx.Node]:
    """What is in a memory by way of one of its values.

    Args:
        start: the value, which comes first.
        own: the memory.
        but: what is not followed.
        side: only of this value's side.
    """
    found = {start: None}
    pending = [start]
    while pending:
        for user in pending.pop().users:
            if user is but or user in found or (side and begins(user)):
                continue
            if not own.isdisjoint(storages(user)):
                found[user] = None
                pending.append(user)
    return list(found)


def is_read(values: list[torch.fx.Node], after: torch.fx.Node, by_gradients: bool) -> bool:
    """Whether something reads one of the values of a memory.

    Args:
        values: what is in that memory, as far as it counts.
        after: later than this operator.
        by_gradients: only what a gradient comes back from.
    """
    return any(
        user > after and _reads(user, value, by_gradients)
        for value in values
        for user in value.users
    )


def _reads(user: torch.fx.Node, value: torch.fx.Node, by_gradients: bool) -> bool:
    """Whether an operator reads a value: what only looks at its memory, or its size, does not."""
    found = user.meta.get("val")
    if user.op == "output":
        return True
    if found is None or isinstance(found, int | float | torch.SymInt | torch.SymFloat):
        return not by_gradients and ".item." in str(user.target)
    if by_gradients and (detaches(user) or is_without_gradient(user)):
        return False
    if by_gradients and isinstance(found, torch.Tensor) and not _is_differentiable(found):
        return False
    if into := written_by(user):
        return value in read_by(user) or value not in into
    return storages(user).isdisjoint(storages(value))


def _is_differentiable(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def has_gradient(node: torch.fx.Node, inputs: set[str], at: torch.fx.Node) -> bool:
    """Whether a parameter or an argument of the module reaches a value by differentiable ops.

    Args:
        node: the value.
        inputs: names of the module's arguments.
        at: an operator; what is written into the value's side before it counts.
    """
    seen: set[torch.fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        value = current.meta.get("val")
        number = isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
        if current in seen or number:
            continue
        seen.add(current)
        if isinstance(value, torch.Tensor) and not _is_differentiable(value):
            continue
        pending += _written_before(current, at)
        if begins(current) or _is_new(current):
            continue
        if isinstance(value, torch.Tensor) and current.op == "placeholder":
            if current.name in inputs:
                return True
            # A module's own tensors may be written to (what becomes of parameters is decided
            # later), and have a gradient otherwise.
            if value.requires_grad and current is not node:
                return True
        pending.extend(current.all_input_nodes)
    return False


def _is_new(node: torch.fx.Node) -> bool:
    """Whether an operator takes no more than size, dtype and device of what it is given."""
    name = str(node.target)
    return name.startswith("aten.new_") or name.partition("_like.")[0] != name


def _written_before(node: torch.fx.Node, at: torch.fx.Node) -> list[torch.fx.Node]:
    """What operators write into a side, of which this is the first value, before one of them."""
    if side_of(node) is not node:
        return []
    found: list[torch.fx.Node] = []
    for value in in_memory(node, storages(node), side=True):
        for user in value.users:
            if user < at and value in written_by(user):
                found += read_by(user)
    return found
