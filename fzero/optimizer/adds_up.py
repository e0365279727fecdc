"""Whether an optimizer adds up elements of leaves, read from its traced operations.

Sums round by the order they are added in, and a sum over shards has another order than one over
whole leaves. So a stage that keeps whole leaves has to know.
"""

from __future__ import annotations

from fzero.optimizer.optimizer import Optimizer
from fzero.programs.jaxprs import ELEMENTWISE, Op, Program
from fzero.tree import PyTree


# What moves, picks or draws elements, or joins them so that their order does not matter.
_EXACT = ELEMENTWISE | frozenset(
    """
    argmax argmin bitcast_convert_type broadcast_in_dim concatenate dynamic_slice
    dynamic_update_slice expand_dims gather iota pad random_bits random_fold_in random_seed
    random_split random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or reshape rev
    slice sort split squeeze threefry2x32 transpose
    """.split()  # noqa: SIM905
)


def adds_up(optimizer: Optimizer, params: PyTree) -> bool:
    """Whether an update adds up elements of an array anywhere, as global norms do.

    Args:
        optimizer: the optimizer.
        params: shapes of the parameters, which are those of the gradients.
    """
    closed = optimizer.traced(params).update
    return any(map(_adds, Program(closed.jaxpr, closed.consts).ops))


def _adds(op: Op) -> bool:
    """Whether an operation may add elements up, itself or in what it calls."""
    if op.equation is None or op.equation.primitive.name in _EXACT:
        return False
    if all(not x.aval.shape for x in op.reads()):
        return False
    if op.equation.primitive.name != "cond":
        return True
    branches = (Program(one.jaxpr, one.consts) for one in op.equation.params["branches"])
    return any(_adds(inner) for branch in branches for inner in branch.ops)
