"""The last layer of a module, found in its graph, so that its output need not be computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fzero.errors import is_number
from torch_bridge.dtypes import is_float
from torch_bridge.export.interpret import Op
from torch_bridge.losses import Head
from torch_bridge.lower.refs import Ref, fill, refs


# Steps that change no number, or only its dtype: the loss is computed in float32 either way.
_SAME = ("aten.alias.default", "aten.clone.default", "aten.contiguous.default")
_CASTS = ("aten._to_copy.default", "aten.to.dtype")


@dataclass(frozen=True)
class HeadSpot:
    """Where logits come from.

    Attributes:
        skipped: names of the ops that would compute them.
        operands: input, weight and bias of the linear layer.
        soft_cap: what they are capped by.
    """

    skipped: frozenset[str]
    operands: tuple[Any, Any, Any]
    soft_cap: float | None

    def head(self, values: Mapping[str, Any]) -> Head | None:
        """What the logits are made of, if they are what a cross entropy takes."""
        x, weight, bias = fill(list(self.operands), dict(values))
        plain = weight.ndim == 2 and (bias is None or bias.ndim == 1) and x.ndim >= 1
        return Head(x, weight, bias, self.soft_cap) if plain and is_float(x.dtype) else None


def find_head(ops: Sequence[Op], logits: Any, others: Sequence[Any]) -> HeadSpot | None:
    """The linear layer that gives some logits, if nothing else reads what is computed from it.

    Args:
        ops: the ops of the last part of a graph.
        logits: the output in question.
        others: all outputs and updates of the graph, that one included.
    """
    if not isinstance(logits, Ref):
        return None
    by_name = {op.name: op for op in ops}
    readers = Counter(name for s in ops for name in refs((s.args, s.kwargs)))
    readers.update(refs(list(others)))
    skipped: set[str] = set()
    cap: float | None = None
    value, expected = logits, ""
    while isinstance(value, Ref) and value.name in by_name and readers[value.name] == 1:
        op = by_name[value.name]
        skipped.add(op.name)
        operator, args = op.operator, op.args
        if operator == "aten.linear.default" and not expected and not op.kwargs:
            return HeadSpot(frozenset(skipped), (*args, None)[:3], cap)
        if operator in (*_SAME, *_CASTS):
            pass
        elif operator == "aten.mul.Tensor" and cap is None and is_number(args[1]) and args[1] > 0:
            cap, expected = float(args[1]), "aten.tanh.default"
        elif operator == expected == "aten.tanh.default":
            expected = "aten.div.Tensor"
        elif operator == expected == "aten.div.Tensor" and args[1] == cap:
            expected = ""
        else:
            return None
        value = args[0]
    return None
