"""PyTorch's side of a comparison: the module itself, and the exported graph value by value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError
from torch_bridge.converted import Converted
from torch_bridge.export.export import export_program
from torch_bridge.export.interpret import Op, live_nodes
from torch_bridge.export.origins import module_path, source_line
from torch_bridge.export.stand_ins.slopes import SLOPES
from torch_bridge.export.watch.forward import untouched


@dataclass(frozen=True)
class NodeValue:
    """What one operator of the exported graph computed in PyTorch."""

    name: str
    path: str
    operator: str
    source: str
    value: Any


@dataclass(frozen=True)
class Reference:
    """One run in PyTorch.

    Attributes:
        outputs: the module's output leaves in order, arrays or constants.
        weights: for each output that has a gradient, what it is multiplied with in the loss.
        loss: the sum of these products.
        gradients: of the loss, by parameter name (tied ones once); of `requires_grad` ones only.
        buffers: after the forward.
        nodes: the values in between, in order.
    """

    outputs: list[Any]
    weights: dict[int, np.ndarray[Any, Any]]
    loss: float
    gradients: dict[str, np.ndarray[Any, Any]]
    buffers: dict[str, np.ndarray[Any, Any]]
    nodes: list[NodeValue]


# Where each operator that drops values has its probability.
_PROBABILITY = {
    "aten.native_dropout.default": (1, "p"),
    "aten.dropout.default": (1, "p"),
    "aten.scaled_dot_product_attention.default": (4, "dropout_p"),
    "aten.lstm.input": (5, "dropout"),
    "aten.gru.input": (5, "dropout"),
    "aten.rnn_tanh.input": (5, "dropout"),
    "aten.rnn_relu.input": (5, "dropout"),
}


def _silenced(operator: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operator with its dropout probability set to 0."""
    index, name = _PROBABILITY.get(operator, (0, ""))
    args, kwargs = list(args), dict(kwargs)
    if name in kwargs:
        kwargs[name] = 0.0
    elif name and len(args) > index:
        args[index] = 0.0
    return tuple(args), kwargs


def without_dropout(converted: Converted) -> Converted:
    """The same converted module with all dropout probabilities 0, in both modes.

    Raises:
        ConversionError: it draws random numbers in another way, which cannot be turned off here.
    """
    return replace(converted, _graphs=converted._graphs.map_ops(_silent))


def _silent(op: Op) -> Op:
    args, kwargs = _silenced(op.operator, op.args, op.kwargs)
    if op.draw is not None and op.operator not in _PROBABILITY:
        raise ConversionError(
            f"{op.operator} in {op.where} draws random numbers, which PyTorch and JAX draw "
            "differently; turn it off for the comparison (drop_path_rate=0.0 and the like)"
        )
    return replace(op, args=args, kwargs=kwargs, draw=None)


class _NoDropout(TorchFunctionMode):
    """torch's own functions with their dropout off, in train mode too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else given["input"]
        if name == "multi_head_attention_forward":
            given["training"] = False  # it means nothing but dropout there
        if name == "scaled_dot_product_attention":
            args, given = _silenced("aten.scaled_dot_product_attention.default", args, given)
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            args, given = _silenced(f"aten.{name}.input", args, given)
        return func(*args, **given)


def run_torch(
    module: torch.nn.Module,
    converted: Converted,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
) -> Reference:
    """Run a module and its exported graph in PyTorch, with dropout off; the module is left alone.

    Args:
        module: the module.
        converted: what it was converted to, without dropout.
        args: positional arguments of the forward.
        kwargs: its keyword arguments.
        train: the mode.

    Returns:
        The outputs, a loss with its gradients, the buffers, and every value in between.

    Raises:
        ConversionError: the module cannot be exported, or not to the graph of `converted`.
    """
    nodes = _node_values(module, converted, args, kwargs, train)
    with _restored(module), untouched(module, train):
        with _NoDropout():
            outputs = torch_pytree.tree_leaves(module(*args, **kwargs))
        generator = np.random.default_rng(0)
        weights: dict[int, np.ndarray[Any, Any]] = {}
        terms = []
        for number, leaf in enumerate(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                drawn = generator.normal(size=tuple(leaf.shape)) / max(leaf.numel(), 1) ** 0.5
                weights[number] = np.asarray(drawn, np.float32)  # of a scalar, numpy draws a float
                real = leaf.abs() if leaf.is_complex() else leaf
                terms.append((real * torch.from_numpy(weights[number])).sum().double())
        loss = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)
        if terms:
            loss.backward()
        gradients = {
            name: _array(torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in module.named_parameters()
            if p.requires_grad
        }
        buffers = {name: _array(b) for name, b in module.named_buffers()}
    leaves = [_array(x) if isinstance(x, torch.Tensor) else x for x in outputs]
    return Reference(leaves, weights, float(loss.detach()), gradients, buffers, nodes)


@contextlib.contextmanager
def _restored(module: torch.nn.Module) -> Iterator[None]:
    """Give the contents of all tensors, and the gradients, back as they were."""
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    # An embedding with `max_norm=` writes to its weight.
    written = [(p, p._version, p.detach().clone()) for p in module.parameters()]
    gradients = [(p, p.grad) for p in module.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for p, version, value in written:
                if p._version != version:
                    p.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype in (torch.bfloat16, torch.float16):
        plain = plain.float()
    array: np.ndarray[Any, Any] = plain.numpy().copy()
    return array


class _Recorder(torch.fx.Interpreter):
    """Runs a graph in PyTorch and keeps the value of every operator.

    A graph does not hold what `torch.autograd.grad` computes: what depends on it is not kept.
    """

    def __init__(self, graph_module: torch.fx.GraphModule, names: Mapping[str, str]) -> None:
        super().__init__(graph_module)
        self._names = names
        self.seen: list[NodeValue] = []
        self._unknown: set[torch.fx.Node] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if str(n.target) == SLOPES or not self._unknown.isdisjoint(n.all_input_nodes):
            self._unknown.add(n)
        elif n.op == "call_function":
            kept = torch_pytree.tree_map(
                lambda v: _array(v) if isinstance(v, torch.Tensor) else v, value
            )
            if name := self._names.get(n.name):
                where = module_path(n), str(n.target), source_line(n)
                self.seen.append(NodeValue(name, *where, kept))
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target) == "aten.view.default":  # decomposing does not keep torch's strides
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def _node_values(
    module: torch.nn.Module,
    converted: Converted,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
) -> list[NodeValue]:
    program = export_program(module, args, kwargs, train, check=False)
    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    remaining = iter(torch_pytree.tree_leaves((args, dict(kwargs))))
    values = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            values.append(next(remaining))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            values.append(program.constants[str(spec.target)])
        else:
            values.append(named[str(spec.target)])
    ops = converted._graphs.call(train, args, kwargs).mode.graph.ops
    names = _names_in(program.graph, ops)
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = _silenced(str(node.target), node.args, node.kwargs)
    recorder = _Recorder(program.graph_module, names)
    with torch.no_grad():
        recorder.run(*values)
    return recorder.seen


def _names_in(graph: torch.fx.Graph, ops: Sequence[Op]) -> dict[str, str]:
    """What a graph's operators are called in the graph that a module was converted to.

    Their names count what a trace threw away, too, and torch's checks of values do not come alike
    in each: operators that have other names are the same by their order.

    Raises:
        ConversionError: they are not the same operators.
    """
    calls = [node for node in live_nodes(graph) if node.op == "call_function"]
    operators = {node.name: str(node.target) for node in calls}
    other = next((op for op in ops if operators.get(op.name) != op.operator), None)
    if other is None:
        return {name: name for name in operators}
    if [str(node.target) for node in calls] == [op.operator for op in ops]:
        return {node.name: op.name for node, op in zip(calls, ops, strict=True)}
    raise ConversionError(
        f"the module does not trace to the graph that it was converted to ({other.operator} in"
        f" {other.where} is another operator now); convert it again"
    )
