"""From a module to one decomposed `ExportedProgram` per mode, or one error that says why not.

The level is "selected": `no_grad` regions become `detach`, then everything is decomposed to core
ATen except the operators in `_KEPT`, for which JAX has a better whole form (attention, linear,
normalisation, softmax). At core level torch would expand a linear layer's weight over the batch,
unroll attention, and let gradients through `detach`.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError

from .lower import find_lowering
from .lower.symbolic import python_function


# Operators that stay whole: those that lose their gradient rule (detach), their speed (linear,
# matmul, attention) or their exact half-precision behaviour (norms, softmax) when decomposed.
_KEPT = (
    "detach",
    "linear",
    "matmul",
    "einsum",
    "scaled_dot_product_attention",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "gelu",
    "silu",
    "softmax",
    "log_softmax",
    "_safe_softmax",
    "pad",
    "triu",
    "tril",
    "roll",
    "repeat_interleave",
    "split",
    "transpose",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "std",
    "softplus",
    "logsumexp",
    "hardswish",
    "mish",
    "pixel_shuffle",
    "take_along_dim",
    "one_hot",
    "cumsum",
    "baddbmm",
    "floor_divide",
    "clamp_min",
    "clamp_max",
    "nan_to_num",
    "glu",
    "log_sigmoid",
    "binary_cross_entropy",
    "mse_loss",
    "huber_loss",
    "smooth_l1_loss",
    "masked_fill",
    "elu",
    "leaky_relu",
    "hardtanh",
    "hardsigmoid",
    "addcmul",
    "addcdiv",
    "lerp",
)

# Inputs up to this rank have every dim tried as dynamic (tokens, features, sequences); images
# only the batch: symbolic heights and widths make export slow and specialise anyway.
_ALL_DYNAMIC_RANK = 3


def export_program(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool
) -> ExportedProgram:
    """Export a module in train or eval mode; the module is left as it was.

    Args:
        module: any module; its parameters and buffers are read, not changed.
        args: example positional arguments (tensors of any shape, nested containers, constants).
        kwargs: example keyword arguments.
        train: which mode the graph is taken in.

    Returns:
        The decomposed program, with dynamic sizes wherever the module allows them.

    Raises:
        ConversionError: export failed, or would have lost a gradient without a word.
    """
    mode = "train" if train else "eval"
    with _untouched(module, train), _watch_functions(mode) as functions, _quiet():
        program = _export_most_dynamic(module, args, dict(kwargs), mode, functions)
        for graph_module in program.graph_module.modules():
            if isinstance(graph_module, torch.fx.GraphModule):
                _inline_grad_regions(graph_module)
        if not _needs_decomposing(program):
            return program
        try:
            decomposed: ExportedProgram = program.run_decompositions(_decompositions())
            return decomposed
        except Exception as error:
            raise ConversionError(_explain(error, mode)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own deprecation notices out of the caller's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _untouched(module: torch.nn.Module, train: bool) -> Iterator[None]:
    """Put the module into a mode and give it back as it was: modes, state, HF's cache flag."""
    modes = [(m, m.training) for m in module.modules()]
    slots = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    config = getattr(module, "config", None)
    cache = getattr(config, "use_cache", None)
    try:
        module.train(train)
        if cache is not None:  # the key-value cache is not a value that export can return
            config.use_cache = False  # type: ignore[union-attr]
        with torch.enable_grad():
            yield
    finally:
        if cache is not None:
            config.use_cache = cache  # type: ignore[union-attr]
        for m, training in modes:
            m.training = training
        for m, parameters, buffers in slots:
            m._parameters.update(parameters)
            m._buffers.update(buffers)


@contextlib.contextmanager
def _watch_functions(mode: str) -> Iterator[list[str]]:
    """Record every `torch.autograd.Function` that runs: export keeps its forward only."""
    seen: list[str] = []
    base = torch.autograd.Function
    original = base.__dict__["apply"]

    def spy(cls: type, *args: Any, **kwargs: Any) -> Any:
        seen.append(f"{cls.__module__}.{cls.__qualname__}")
        return original.__get__(None, cls)(*args, **kwargs)

    base.apply = classmethod(spy)  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        base.apply = original  # type: ignore[method-assign]


def _export_most_dynamic(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: str,
    functions: list[str],
) -> ExportedProgram:
    """Try every dim dynamic, then the batch only, then all fixed (stated when called otherwise)."""
    last: Exception | None = None
    for dynamic in ("all", "batch", "none"):
        shapes = _dynamic_shapes(module, (args, kwargs), dynamic)
        try:
            program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            last = error  # the last try fixes all sizes: its error is about the module itself
        else:
            _refuse_functions(functions, mode)
            return program
    _refuse_functions(functions, mode)
    assert last is not None
    raise ConversionError(_explain(last, mode)) from last


def _refuse_functions(functions: Sequence[str], mode: str) -> None:
    if functions:
        names = ", ".join(sorted(set(functions)))
        raise ConversionError(
            f"the {mode} forward runs custom torch.autograd.Function(s): {names}. torch.export "
            "records only their forward, so the gradient in JAX would silently differ. Write the "
            "forward in plain torch operators (for checkpointing: use_reentrant=False, or leave "
            "it to the plan's remat), then convert again."
        )


def _dynamic_shapes(
    module: torch.nn.Module, inputs: tuple[Any, dict[str, Any]], dynamic: str
) -> Any:
    """Dim.AUTO for the dims that may vary, in the structure of the inputs."""

    def dims(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or dynamic == "none":
            return None
        everything = dynamic == "all" and leaf.ndim <= _ALL_DYNAMIC_RANK
        return dict.fromkeys(range(leaf.ndim if everything else min(leaf.ndim, 1)), Dim.AUTO)

    if dynamic == "none":
        return None
    args, kwargs = inputs
    positional = torch_pytree.tree_map(dims, args)
    named = torch_pytree.tree_map(dims, kwargs)
    return _like_signature(module, positional, named)


def _like_signature(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`dynamic_shapes` by parameter name, the one form export accepts for mixed arguments."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    return dict(bound.arguments)


# Operators that write to a buffer although their schema does not say so.
_HIDDEN_WRITES = ("batch_norm", "instance_norm")


def _needs_decomposing(program: ExportedProgram) -> bool:
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
        hidden = any(name in str(node.target) for name in _HIDDEN_WRITES)
        if writes or hidden or find_lowering(str(node.target)) is None:
            return True
    return False


def _decompositions() -> Any:
    table: Any = default_decompositions()
    for name in _KEPT:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            table.pop(getattr(packet, overload), None)
    return table


def _inline_grad_regions(graph_module: torch.fx.GraphModule) -> None:
    """Replace each `no_grad` region by its contents with the gradient cut at its edges.

    Decomposing would inline the region and forget that no gradient passes through it.
    """
    region_op = torch.ops.higher_order.wrap_with_set_grad_enabled
    graph = graph_module.graph
    # Regions may hold regions: go on until none is left.
    while regions := [n for n in graph.nodes if n.op == "call_function" and n.target is region_op]:
        for node in regions:
            _inline_one(graph_module, node)
    graph.lint()
    graph_module.recompile()


def _inline_one(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    graph = graph_module.graph
    enabled, body_ref, *operands = node.args
    body = graph_module.get_submodule(str(body_ref.target))  # type: ignore[union-attr]
    assert isinstance(body, torch.fx.GraphModule)
    mapping: dict[torch.fx.Node, Any] = {}
    results: Any = None
    remaining = iter(operands)
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                mapping[inner] = next(remaining)
            elif inner.op == "output":
                results = torch.fx.map_arg(inner.args[0], lambda n: mapping[n])
            elif inner.op == "get_attr":
                mapping[inner] = _adopt(graph_module, body, inner)
            else:
                copied = graph.node_copy(inner, lambda n: mapping[n])
                mapping[inner] = copied
                if not enabled:
                    _detach_written(graph, copied)
        if not enabled:
            results = tuple(_detached(graph, r) for r in results)
    for user in list(node.users):  # regions return tuples, read with getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _adopt(graph_module: torch.fx.GraphModule, body: torch.fx.GraphModule, inner: Any) -> Any:
    """Copy an attribute (a nested region's body, a constant) of an inlined body to the outside."""
    name = f"_inlined_{len(list(graph_module.named_children()))}_{inner.target}".replace(".", "_")
    value = body
    for part in str(inner.target).split("."):
        value = getattr(value, part)
    setattr(graph_module, name, value)
    made = graph_module.graph.get_attr(name)
    made.meta = dict(inner.meta)
    return made


def _detached(graph: torch.fx.Graph, value: Any) -> Any:
    if not isinstance(value, torch.fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    made = graph.call_function(torch.ops.aten.detach.default, (value,))
    made.meta = dict(value.meta)
    return made


def _detach_written(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Inside no_grad, what an in-place operator writes into a tensor carries no gradient."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    with graph.inserting_before(node):
        node.args = (node.args[0], *(_detached(graph, a) for a in node.args[1:]))


def _explain(error: Exception, mode: str) -> str:
    """torch's message cut to what a reader can use: the cause and the user's own line."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    cause = lines[0] if lines else type(error).__name__
    code = _user_line(lines)
    where = f"\n  at: {code}" if code else ""
    hint = ""
    if "item()" in str(error) or "data-dependent" in str(error).lower():
        hint = (
            "\n  Control flow and sizes must not depend on tensor values (use torch.where, or a "
            "size that is known before). BatchNorm(momentum=None) counts batches in a tensor: "
            "give it a momentum."
        )
    return f"torch.export cannot trace the {mode} forward: {cause}{where}{hint}"


def _user_line(lines: Sequence[str]) -> str | None:
    for i, line in enumerate(lines):
        text = line.strip()
        if text.startswith("File ") and "site-packages/torch/" not in text and i + 1 < len(lines):
            return f"{text} | {lines[i + 1].strip()}"
    for i, line in enumerate(lines):
        if "caused by:" in line.lower():
            return " ".join(part.strip() for part in lines[i : i + 2])
    return None
