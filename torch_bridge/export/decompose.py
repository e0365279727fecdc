"""Which operators of a traced program are decomposed before it is lowered, and which stay whole."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions

from torch_bridge.lower import find_lowering, registered_operators
from torch_bridge.lower.sizes import python_function


# Operators that write to a buffer although their schema does not say so.
_HIDDEN_WRITES = ("batch_norm", "instance_norm")


def needs_decomposing(program: ExportedProgram) -> bool:
    """Whether the graph as traced has an operator without a lowering, or one that writes.

    Decomposing takes as long as tracing; a transformer's graph is often fine without.
    """
    for node in program.graph.nodes:
        if node.op == "get_attr":
            return True
        if node.op != "call_function" or python_function(node.target) is not None:
            continue
        schema = getattr(node.target, "_schema", None)
        writes = schema is None or schema.is_mutable
        hidden = any(name in str(node.target) for name in _HIDDEN_WRITES) and not _only_reads(node)
        if writes or hidden or find_lowering(str(node.target)) is None:
            return True
    return False


def _only_reads(node: torch.fx.Node) -> bool:
    """Whether a batch norm uses its running statistics and leaves them alone."""
    return str(node.target) == "aten.batch_norm.default" and node.args[5] is False


# Kept whole, torch.export's second trace takes them for one number, whatever they reduce.
_KINDS = ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
_LOSSES = tuple(f"aten.{kind}.default" for kind in _KINDS)


def decompositions(program: ExportedProgram) -> Any:
    """Torch's table without what has a lowering: such operators stay whole.

    Decomposed, they would lose their gradient rule (detach), their speed (linear, attention) or
    their exact half-precision behaviour (norms, softmax).
    """
    # Operators of users' own, which the table has as well, may come at any time.
    known = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    losses = any(
        str(node.target) in _LOSSES and 0 in (node.args[3:4] or (node.kwargs.get("reduction"),))
        for node in program.graph.nodes
    )
    return _table_of(len(known), len(registered_operators()), _LOSSES if losses else ())


@lru_cache(maxsize=2)
def _table_of(num_operators: int, num_lowered: int, also: tuple[str, ...]) -> dict[Any, Any]:
    """The table where there are so many operators; it takes as long as a small module's trace."""
    table: Any = default_decompositions()
    return {
        operator: table[operator]
        for operator in table
        if find_lowering(name := str(operator)) is None
        or name in also
        or any(one in name for one in _HIDDEN_WRITES)
    }
