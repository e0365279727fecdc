"""Where a node of an exported graph comes from: its module, and its line of Python."""

from __future__ import annotations

import torch


def module_path(node: torch.fx.Node) -> str:
    """The path of the submodule that a node belongs to, `(root)` for the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    # Nodes that torch itself added (sizes) carry a note instead of a module.
    paths = [entry[0] for entry in stack.values() if not entry[0].startswith("_empty_nn_module")]
    return (paths[-1] if paths else "") or "(root)"


def source_line(node: torch.fx.Node, unknown: str = "unknown line") -> str:
    """The innermost line of Python that made a node, outside torch itself where possible."""
    frames = (node.meta.get("stack_trace") or "").strip().split("File ")[1:]
    own = [f for f in frames if "site-packages/torch/" not in f] or frames
    return " | ".join(line.strip() for line in own[-1].splitlines()) if own else unknown
