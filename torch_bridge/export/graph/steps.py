"""Values whose last bit decides: what is made of them jumps (a floor, a cast, a comparison).

Of quotients, and of functions that XLA rounds otherwise where it computes them while compiling.
"""

from __future__ import annotations

import math
import operator

import torch
from torch.export.graph_signature import InputKind


# Elements of a constant that is computed while a program is traced.
_MOST = 4096
_QUOTIENTS = ("aten.div.Tensor", "aten.div.Scalar")
# Of these a value goes on, or what is made of it steadily; they are followed.
STEADY = frozenset(
    """
    abs add alias amax amin broadcast_to cat clamp clone contiguous copy detach div
    expand flip gather index_select lift_fresh lift_fresh_copy maximum minimum mul neg permute
    relu repeat reshape roll rsub select slice sort squeeze stack sub t topk transpose
    _unsafe_view unsqueeze unsqueeze_ view where
    """.split()  # noqa: SIM905
)
# Functions that are no sums and products; they are followed, too.
_CURVES = frozenset(
    """
    acos acosh asin asinh atan atanh cos cosh erf erfc exp exp2 expm1 log log10 log1p log2 pow rsqrt
    sigmoid sin sinh sqrt tan tanh
    """.split()  # noqa: SIM905
)
# Of what else constants are made that are computed before.
_OF_VALUES = (
    STEADY
    | _CURVES
    | {
        "_to_copy",
        "to",
        "arange",
        "full",
        "ones",
        "scalar_tensor",
        "zeros",
    }
)
_STEPS = frozenset(
    """
    any argmax argmin argsort bucketize ceil count_nonzero eq floor floor_divide fmod frac ge gt
    heaviside histc isin le logical_and logical_not logical_or logical_xor lt ne remainder round
    searchsorted sgn sign signbit trunc
    """.split()  # noqa: SIM905
)
# Of these the second result says where the values were.
_PLACES = frozenset("cummax cummin kthvalue max median min mode sort topk".split())  # noqa: SIM905
_CASTS = frozenset(("_to_copy", "to", "view"))


def is_before_a_step(node: torch.fx.Node) -> bool:
    """Whether a node is a quotient of floats that something with steps is made of."""
    return str(node.target) in _QUOTIENTS and leads_to_a_step(node)


def constants_before_a_step(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Nodes of constants alone, of known and small sizes, that something with steps is made of.

    Two equal logarithms are equal in PyTorch: their quotient is 1, and its `ceil` is, too. What XLA
    knows before it rounds otherwise than what it computes as it runs.
    """
    given = {spec.arg.name for spec in program.graph_signature.input_specs
             if spec.kind is InputKind.CONSTANT_TENSOR}  # fmt: skip
    known = {n for n in program.graph.nodes if n.op == "placeholder" and n.name in given}
    found: set[torch.fx.Node] = set()
    for node in program.graph.nodes:
        if _name(node) in _OF_VALUES and all(one in known for one in node.all_input_nodes):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and _is_small(value):
                known.add(node)
                if leads_to_a_step(node):
                    found.add(node)
    for node in reversed(program.graph.nodes):  # whole numbers of which they are made, too
        if node in known and node.op == "call_function" and not found.isdisjoint(node.users):
            found.add(node)
    return found


def _is_small(value: torch.Tensor) -> bool:
    sizes = list(value.shape)
    return all(isinstance(n, int) for n in sizes) and math.prod(sizes) <= _MOST


def leads_to_a_step(node: torch.fx.Node) -> bool:
    """Whether something with steps is made of a float, steadily up to there."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            name = _name(user)
            if name in _STEPS or (name in _PLACES and _tells_places(user)):
                return True
            if name in _CASTS and not user.meta["val"].is_floating_point():
                return True
            goes_on = name in STEADY or name in _CURVES or name in _CASTS or is_view(user)
            if user not in seen and goes_on:
                seen.add(user)
                todo.append(user)
    return False


def _tells_places(node: torch.fx.Node) -> bool:
    return any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)


def is_view(node: torch.fx.Node) -> bool:
    """Whether an operator gives what it is given seen otherwise, or one of several such."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    seen = [given.alias_info for given in schema.returns] if schema is not None else []
    return bool(seen) and all(one is not None and not one.is_write for one in seen)


def _name(node: torch.fx.Node) -> str:
    parts = str(node.target).split(".")
    return parts[1] if node.op == "call_function" and parts[0] == "aten" else ""
