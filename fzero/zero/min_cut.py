"""The fewest bytes to keep from a forward pass, where what is cheap is computed again.

A backward pass reads values of the forward pass. Each of them may be kept, or follow again from
others by elementwise operations and movement of data, which cost less than to write an array and to
read it back: a layer norm of 16 bits that computes in 32 keeps its input instead of four arrays
twice as wide. Which values to keep is a minimum cut between those that must not be computed again
(results of products, sums, kernels) and those that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from fzero.programs.jaxprs import Op, Var


# A byte of a weight that only this would read: it may have to be gathered again, over a link.
_LINK = 16
# Capacities are 32-bit integers in scipy.
_MOST = 2**30


def fewest_bytes(
    ops: Sequence[Op],
    wanted: Collection[Var],
    known: Collection[Var],
    free: Collection[Var],
    is_cheap: Callable[[Op], bool],
) -> list[Var]:
    """What to keep, or to read again, so that all that is wanted follows by cheap operations.

    Of choices that are as small, the one that has the least to compute again.

    Args:
        ops: the program, in order.
        wanted: the values that the backward pass reads.
        known: values that will be there again without being kept.
        free: those of them that are read in any case.
        is_cheap: whether an operation may be run again.

    Returns:
        The values to start from, known ones among them, in the order of the program.

    Source: Ford and Fulkerson, "Maximal Flow through a Network" (1956); torch.compile's partitioner
    asks the same of a training step.
    """
    if not wanted:
        return []
    makers = {var: op for op in ops for var in op.results}
    nodes: dict[Var, int] = {}
    edges: list[tuple[int, int, int]] = []  # from, to, bytes (-1: no limit)
    source, sink = 0, 1
    stack = list(dict.fromkeys(wanted))
    ends = set(stack)
    while stack:
        var = stack.pop()
        if var in nodes:
            continue
        at = nodes[var] = 2 + 2 * len(nodes)  # where it comes in; it goes out at the next number
        edges.append((at, at + 1, _price(var, known, free)))
        if var in ends:
            edges.append((at + 1, sink, -1))
        op = makers.get(var)
        if var in known or op is None or not is_cheap(op):
            edges.append((source, at, -1))
            continue
        stack.extend(x for x in op.reads() if x not in nodes)
    for var, at in nodes.items():
        op = makers.get(var)
        if var not in known and op is not None and is_cheap(op):
            edges.extend((nodes[x] + 1, at, -1) for x in dict.fromkeys(op.reads()))
    cut = _cut(edges, 2 + 2 * len(nodes))
    order = {var: i for i, var in enumerate(makers)}
    return sorted(
        (var for var, at in nodes.items() if cut[at + 1] and not cut[at]),
        key=lambda var: order.get(var, -1),
    )


def _price(var: Var, known: Collection[Var], free: Collection[Var]) -> int:
    size = int(var.aval.size) * int(getattr(var.aval.dtype, "itemsize", 4))
    if var in free:
        return 0
    return size * (_LINK if var in known else 1)


def _cut(edges: Sequence[tuple[int, int, int]], count: int) -> list[bool]:
    """Which nodes lie on the sink's side of the minimum cut that is nearest to it."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    starts, ends, sizes = (np.array(column) for column in zip(*edges, strict=True))
    unit = max(1.0, float(sizes.clip(0).sum()) / _MOST)
    room = np.where(sizes < 0, 2**31 - 1, np.ceil(sizes / unit)).astype(np.int32)
    graph = csr_matrix((room, (starts, ends)), shape=(count, count))
    left = graph - maximum_flow(graph, 0, 1).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reach = breadth_first_order(left.T.tocsr(), 1, return_predecessors=False)
    side = np.zeros(count, bool)
    side[reach] = True
    return list(map(bool, side))
