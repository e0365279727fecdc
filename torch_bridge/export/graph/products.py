"""Products that are rounded before they are added or subtracted, as PyTorch rounds them.

A compiler contracts a product and the sum that follows into one operation (a fused multiply-add),
which rounds once. Elsewhere the same product is another number, in the last bit: less its own
maximum it is not 0, and of scores at the end of float32 the softmax is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from torch_bridge.export.graph.float64 import operator_name
from torch_bridge.export.graph.steps import STEADY, is_before_a_step, is_view, leads_to_a_step
from torch_bridge.export.origins import source_line


# What ends in a product, or in a quotient: XLA makes products of these.
_PRODUCTS = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d
    batch_norm deg2rad div dropout einsum _fused_rms_norm gelu glu group_norm hardsigmoid
    hardswish instance_norm kron layer_norm log10 log2 mean mish mul native_dropout
    native_group_norm native_layer_norm outer pow rad2deg rms_norm silu softmax _softmax square
    var _weight_norm
    """.split()  # noqa: SIM905
)
# Of these only without a bias, which has this place among the arguments.
_BIASES = {
    "batch_norm": 2, "group_norm": 3, "instance_norm": 2, "layer_norm": 3, "native_group_norm": 2,
    "native_layer_norm": 3,
}  # fmt: skip
_DRAWN = frozenset(("dropout", "native_dropout"))
# Products of a number, `alpha`, to which nothing need be added.
_SCALED = frozenset("addbmm addmm addmv addr baddbmm".split())  # noqa: SIM905
_CONTRACTIONS = frozenset("addmm baddbmm bmm einsum linear matmul mm".split())  # noqa: SIM905
# Through these and through views a value stays as it is, but for its place, sign and dtype.
_MOVES = frozenset(
    """
    cat clone copy flip gather index index_select lift_fresh_copy neg pixel_shuffle pixel_unshuffle
    repeat repeat_interleave roll stack tile _to_copy type_as _unsafe_view upsample_nearest1d
    upsample_nearest2d upsample_nearest3d
    """.split()  # noqa: SIM905
)
# Of these the value is the very one, so that what is made of it is equal, too.
_SAME = frozenset("alias clone contiguous detach lift_fresh lift_fresh_copy".split())  # noqa: SIM905
_DIFFERENCES = frozenset("rsub sub".split())  # noqa: SIM905
_SUMS = _DIFFERENCES | frozenset(
    """
    add addcdiv addcmul cdist diff dist huber_loss l1_loss lerp mse_loss pairwise_distance
    smooth_l1_loss
    """.split()  # noqa: SIM905
)
# From a value these take its own maximum, or its mean.
_CENTRED = frozenset(
    """
    batch_norm cross_entropy_loss group_norm instance_norm layer_norm log_softmax _log_softmax
    logcumsumexp logsumexp native_group_norm native_layer_norm _safe_softmax softmax _softmax std
    std_mean var var_mean
    """.split()  # noqa: SIM905
)


def rounded_products(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The products of floats in a graph of which something tells whether they were rounded.

    Those that are added or subtracted and read elsewhere, too; from which their own maximum or mean
    is taken; of whose sum something with steps is made; and two whose difference is taken. What one
    line of Python makes is alike, so that equal blocks stay equal.
    """
    products = [node for node in graph.nodes if _is_product(node)]
    if not products:
        return set()
    numbers = _numbers(graph)
    reads: dict[int, list[torch.fx.Node]] = {}
    for node in products:
        reads.setdefault(numbers[node], []).extend(_reads(node))
    differences = Counter(
        one for found in reads.values() for one in set(found) if operator_name(one) in _DIFFERENCES
    )
    masked = {numbers[node] for node in products if not _is_of_contractions(node)}
    kept = {
        number for number, found in reads.items() if _decides(found, differences, number in masked)
    }
    lines = {_line(node) for node in products if numbers[node] in kept}
    return {x for x in products if numbers[x] in kept or _line(x) in lines - {None}}


def _decides(
    reads: Sequence[torch.fx.Node], differences: Counter[torch.fx.Node], masked: bool
) -> bool:
    """Whether what reads a product tells whether it was rounded.

    Args:
        reads: what reads it, or an equal one.
        differences: how many products each difference reads.
        masked: whether it may be of numbers at the end of float32.
    """
    if masked and any(operator_name(one) in _CENTRED for one in reads):
        return True
    sums = [one for one in reads if operator_name(one) in _SUMS]
    return any(len(reads) > 1 or differences[one] > 1 or leads_to_a_step(one) for one in sums)


def _is_product(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return False
    name = operator_name(node)
    if name in _SCALED:
        return bool(node.kwargs.get("alpha", 1) != 1)
    if name not in _PRODUCTS or _is_off(node) or is_before_a_step(node):
        return False  # (what is before a step is a quotient already)
    place = _BIASES.get(name, len(node.args))
    return place >= len(node.args) or node.args[place] is None


def _is_of_contractions(node: torch.fx.Node) -> bool:
    """Whether a product is of what was contracted alone, as of scores that are scaled before they
    are masked. A softmax of these is the same but for the last bit, and a third faster on CPUs."""
    for of in node.all_input_nodes:
        while _moves(of):
            of = of.all_input_nodes[0]
        if of.op != "call_function" or operator_name(of) not in _CONTRACTIONS:
            return False
    return bool(node.all_input_nodes)


def _moves(node: torch.fx.Node) -> bool:
    return is_view(node) or (node.op == "call_function" and operator_name(node) in _MOVES)


def _is_off(node: torch.fx.Node) -> bool:
    """Whether a node drops nothing: an evaluation."""
    return operator_name(node) in _DRAWN and False in node.args[2:]


def _reads(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What reads a value, itself or through views; twice, what reads it twice."""
    todo = [node]
    while todo:
        one = todo.pop()
        for user in one.users:
            if _moves(user) or _is_off(user):
                todo.append(user)
            else:
                found: list[torch.fx.Node] = []
                torch.fx.node.map_arg((user.args, user.kwargs), found.append)
                yield from (user for x in found if x is one)


def _numbers(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """A number for each node; equal ones for equal values, which a compiler computes once."""
    numbers: dict[torch.fx.Node, int] = {}
    known: dict[str, int] = {}
    for node in graph.nodes:
        name = operator_name(node)
        if name in _SAME:
            numbers[node] = numbers[node.all_input_nodes[0]]
        elif name in STEADY or (name in _PRODUCTS and name not in _DRAWN):
            args = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: f"#{numbers[one]}")
            numbers[node] = known.setdefault(f"{node.target} {args}", len(numbers))
        else:
            numbers[node] = len(numbers)
    return numbers


def _line(node: torch.fx.Node) -> tuple[str, str] | None:
    """A product's operator, and its line of Python; None: that is not known."""
    line = source_line(node, "")
    return (str(node.target), line) if line else None
