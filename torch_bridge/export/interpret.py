"""The converted graph: a flat list of ops, evaluated by ordinary (traceable) JAX calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import torch
from torch.export.graph_signature import OutputKind

from fzero.errors import ConversionError
from torch_bridge.export.graph.mixtures import with_mixtures
from torch_bridge.export.graph.products import rounded_products
from torch_bridge.export.graph.ranges import Ranges
from torch_bridge.export.graph.steps import is_before_a_step
from torch_bridge.export.origins import module_path, source_line
from torch_bridge.export.remedies import remedy_of_missing, remedy_of_values
from torch_bridge.export.shapes import unbacked
from torch_bridge.export.stand_ins.slopes import SLOPES, slopes
from torch_bridge.lower import find_lowering, register_operator
from torch_bridge.lower.arithmetic import div_before_a_step
from torch_bridge.lower.features_last import call, in_order, takes_last
from torch_bridge.lower.masks import MASK, ComputedMask, Folded, computed_masks
from torch_bridge.lower.refs import Ref, fill, refs, template_of
from torch_bridge.lower.rounding import as_it_runs, with_rounded_result
from torch_bridge.lower.sizes import python_function


_Reads = Callable[[torch.fx.Node], Sequence[torch.fx.Node]]


@dataclass(frozen=True)
class Op:
    """One operator call; `draw` numbers the random ones, `drop` names what is not needed after."""

    name: str
    operator: str
    where: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    draw: int | None
    drop: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Nested:
    """A graph that an operator runs (a branch, the body of a loop), as a function of arrays."""

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]

    def __call__(self, *values: Any) -> list[Any]:
        given = dict(zip(self.inputs, values, strict=True))
        evaluate(self.ops, given, None)
        return fill(list(self.outputs), given)


@dataclass(frozen=True)
class Graph:
    """Everything that is computed in one mode.

    `outputs` are the module's own leaves in order; `mutations` maps a buffer's name to its new
    value; `wide` names what is held in 64 bits while JAX has 32.
    """

    ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    mutations: Mapping[str, Any]
    num_draws: int
    wide: frozenset[str] = frozenset()

    def run(
        self,
        inputs: Mapping[str, Any],
        rng: Any,
        observe: Callable[[str, Any], None] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Evaluate the graph.

        Args:
            inputs: a value for each placeholder.
            rng: a JAX key; each random node gets `fold_in(rng, its number)`. May be None when
                `num_draws` is 0.
            observe: called with the name and value of every node, as they are computed.

        Returns:
            The module's output leaves, and the new value of each buffer it writes.
        """
        values = dict(inputs)
        evaluate(self.ops, values, rng, observe)
        return fill(list(self.outputs), values), fill(dict(self.mutations), values)


def evaluate(
    ops: Sequence[Op],
    values: dict[str, Any],
    rng: Any,
    observe: Callable[[str, Any], None] | None = None,
) -> None:
    """Run ops; their results are added to `values`, and dropped as they say."""
    start = dict(values) if any(op.operator == SLOPES for op in ops) else {}
    for number, op in enumerate(ops):
        args, kwargs = fill(op.args, values), fill(op.kwargs, values)
        if op.operator == SLOPES:
            kwargs["ops"] = partial(_again, ops[:number], start, op.args[0], rng)
            kwargs["names"] = [x.name for x in op.args[1]]
        if op.draw is not None:
            kwargs["key"] = jax.random.fold_in(rng, op.draw)
        try:
            values[op.name] = call(op.fn, args, kwargs)
        except NotImplementedError as error:
            raise ConversionError(f"{op.operator} in {op.where}: {error}") from error
        except Exception as error:
            error.add_note(f"while evaluating {op.operator} in {op.where}")
            raise
        if observe is not None:
            observe(op.name, in_order(values[op.name]))
        for name in op.drop:
            del values[name]
    values.update({name: in_order(value) for name, value in values.items()})


def _again(
    ops: Sequence[Op],
    start: Mapping[str, Any],
    outputs: Any,
    rng: Any,
    chosen: Mapping[str, Any],
) -> Any:
    """Values that the first ops compute, once some of them are given."""
    values = {**start, **chosen}
    wanted, needed = set(refs(outputs)), []
    for op in reversed(ops):  # not every earlier derivative: each would run those before it
        if op.name in wanted and op.name not in chosen:
            needed.append(_keeping_all(op))
            wanted.update(refs((op.args, op.kwargs)))
    evaluate(needed[::-1], values, rng)
    return fill(outputs, values)


def _keeping_all(op: Op) -> Op:
    return replace(op, drop=())


@register_operator(SLOPES)
def _slopes(
    outputs: Any, inputs: Any, seeds: Any, further: bool, *, ops: Any, names: Sequence[str]
) -> list[Any]:
    return slopes(ops, names, inputs, seeds, further)


def missing_operators(program: torch.export.ExportedProgram) -> Mapping[str, frozenset[str]]:
    """All operators of a program that have no lowering, with the modules that call them."""
    found: dict[str, set[str]] = {}
    for node in _all_live(program.graph):
        if node.op == "call_function" and _resolve(node.target) is None:
            found.setdefault(str(node.target), set()).add(module_path(node))
    return {name: frozenset(paths) for name, paths in found.items()}


def refuse_missing(found: Sequence[Mapping[str, frozenset[str]]]) -> None:
    """Raise one error for everything that cannot be lowered, over all graphs of a module.

    Raises:
        ConversionError: lists each operator once, with all its module paths.
    """
    merged: dict[str, set[str]] = {}
    for operators in found:
        for name, paths in operators.items():
            merged.setdefault(name, set()).update(paths)
    if merged:
        lines = [
            f"  {name}  in {', '.join(sorted(merged[name]))}. {remedy_of_missing(name)}"
            for name in sorted(merged)
        ]
        raise ConversionError(
            f"{len(merged)} operator(s) have no JAX lowering:\n" + "\n".join(lines)
        )


def refuse_data_dependent(program: torch.export.ExportedProgram) -> None:
    """Refuse sizes that depend on tensor values: XLA compiles fixed sizes only.

    Raises:
        ConversionError: names the operator, the module path and the source line.
    """
    for node in _all_live(program.graph):
        if node.op == "call_function" and unbacked(node.meta.get("val")):
            raise ConversionError(
                f"{node.target} in {module_path(node)} has a size or number that depends on "
                f"tensor values, which XLA cannot compile. {remedy_of_values(str(node.target))}"
                f"\n  at: {source_line(node)}"
            )


# Operators that take one dtype only, though an export of them does not mind.
_ONE_DTYPE = ("linear", "matmul", "mm", "conv", "einsum", "dot", "lstm", "gru", "rnn", "norm")


def refuse_mixed(program: torch.export.ExportedProgram) -> None:
    """Refuse what PyTorch itself would, were it called with these dtypes.

    Raises:
        ConversionError: an operator of one dtype got several.
    """
    for node in program.graph.nodes:
        name = str(node.target)
        if node.op != "call_function" or not any(word in name for word in _ONE_DTYPE):
            continue
        values = [source.meta.get("val") for source in node.all_input_nodes]
        tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ConversionError(
                f"{name} in {module_path(node)} got {[str(t.dtype) for t in tensors]}: cast them to"
                " one dtype in the forward, or the module and its example (.float())"
            )


def _resolve(target: Any) -> Callable[..., Any] | None:
    plain = python_function(target)
    if plain is not None:
        return plain
    lowering = find_lowering(str(target))
    return None if lowering is None else lowering.fn


def build_graph(
    program: torch.export.ExportedProgram, ranges: Ranges, padded: bool = False
) -> Graph:
    """Turn a decomposed program into ops; every operator must have a lowering.

    Args:
        program: what `export_program` returned.
        ranges: which of its values need 64 bits.
        padded: whether rows are declared to end in their padding; see `computed_masks`.

    Returns:
        A graph that holds no torch tensors.

    Raises:
        ConversionError: the module writes to one of its parameters.
    """
    masks = computed_masks(program, partial(_lowered, ranges), padded)

    def reads(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
        return masks[node].reads if node in masks else node.all_input_nodes

    ops, draws = _ops_of(program.graph, ranges, masks, reads)
    outputs, mutations = _outputs(program)
    wide = frozenset(node.name for node in ranges.wide)
    return Graph(ops, outputs, mutations, draws, wide)


def _ops_of(
    graph: torch.fx.Graph,
    ranges: Ranges,
    masks: Mapping[torch.fx.Node, Folded],
    reads: _Reads,
) -> tuple[tuple[Op, ...], int]:
    """The calls of a graph, and how many of them draw random numbers."""
    live = live_nodes(graph, reads)
    last_use = _last_uses(live, reads)
    rounded = rounded_products(graph)
    ops: list[Op] = []
    draws = 0
    for node in live:
        if node.op != "call_function":
            continue
        args, kwargs = _arguments(node, masks[node].mask if node in masks else None)
        draw = None
        if _draws(node, args, kwargs):
            draw, draws = draws, draws + 1
        ops.append(
            Op(
                node.name,
                str(node.target),
                _where(node),
                _lowered(
                    ranges, node, masks[node].mask if node in masks else None, node in rounded
                ),
                args,
                kwargs,
                draw,
                last_use.get(node.name, ()),
            )
        )
    return with_mixtures(ops, live), draws


def _nested(node: torch.fx.Node) -> Nested:
    """The graph that a node stands for."""
    body: Any = getattr(node.graph.owning_module, str(node.target))
    ops, draws = _ops_of(body.graph, Ranges(), {}, _inputs_of)
    if draws:
        raise ConversionError(
            f"random numbers inside torch.cond, scan, while_loop or map, in {_where(node)}: draw"
            " them before, and hand them in"
        )
    inputs = tuple(n.name for n in body.graph.nodes if n.op == "placeholder")
    (out,) = (n for n in body.graph.nodes if n.op == "output")
    results: Any = out.args[0]
    many = isinstance(results, list | tuple)
    return Nested(ops, inputs, template_of(tuple(results) if many else (results,), _named))


def _all_live(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """What is live in a graph and in those within it."""
    for node in live_nodes(graph):
        yield node
        if node.op == "get_attr":
            body: Any = getattr(graph.owning_module, str(node.target))
            yield from _all_live(body.graph)


def _lowered(
    ranges: Ranges, node: torch.fx.Node, mask: ComputedMask | None = None, rounded: bool = False
) -> Callable[..., Any]:
    """What computes a node in JAX."""
    fn = _pass_through if _keeps_dtype(node) else _resolve(node.target)
    if is_before_a_step(node):
        fn = div_before_a_step
    assert fn is not None, node.target
    if rounded:
        fn = with_rounded_result(fn)
    if node in ranges.before_steps:
        fn = as_it_runs(fn)
    args, kwargs = _arguments(node, mask)
    if _draws(node, args, kwargs):
        kwargs["key"] = "a key"
    return ranges.lowered(node, fn, (args, kwargs), _where(node))


def _draws(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes random numbers."""
    lowering = find_lowering(str(node.target))
    return lowering is not None and lowering.draws is not None and lowering.draws(*args, **kwargs)


def _where(node: torch.fx.Node) -> str:
    return f"{module_path(node)} ({source_line(node)})"


def _arguments(
    node: torch.fx.Node, mask: ComputedMask | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments; a mask that is computed stands there itself, beside what it reads."""
    args, kwargs = list(template_of(node.args, _named)), template_of(node.kwargs, _named)
    if mask is not None:
        if len(args) > MASK:
            args[MASK] = mask
        else:
            kwargs["attn_mask"] = mask
        kwargs["mask_sizes"] = tuple(map(Ref, mask.sizes))
        if mask.padding is not None:
            kwargs["mask_padding"] = Ref(mask.padding.name)
    return tuple(args), kwargs


_CASTS = ("aten.to.", "aten._to_copy.", "aten.type_as.")


def _keeps_dtype(node: torch.fx.Node) -> bool:
    """Whether a cast changes nothing (`.to(device)`, `.to(x.dtype)`)."""
    if not str(node.target).startswith(_CASTS):
        return False
    source: Any = node.args[0]
    if not isinstance(source, torch.fx.Node):  # a number
        return False
    return bool(source.meta["val"].dtype == node.meta["val"].dtype)


@takes_last
def _pass_through(x: Any, *_: Any, **__: Any) -> Any:
    return x


_CHECKS = ("aten._assert_scalar.default",)


def _inputs_of(node: torch.fx.Node) -> Sequence[torch.fx.Node]:
    return node.all_input_nodes


def live_nodes(graph: torch.fx.Graph, reads: _Reads = _inputs_of) -> list[torch.fx.Node]:
    """Nodes that an output needs, and checks of sizes.

    The rest is dropped: asserts about metadata, and those about values (a mask that must hold as
    many tokens as there are features), which a compiled program cannot raise.
    """
    wanted: set[torch.fx.Node] = set()
    nodes = list(graph.nodes)
    of_values = _numbers_of_values(nodes)
    for node in reversed(nodes):
        checks = str(node.target) in _CHECKS and of_values.isdisjoint(node.all_input_nodes)
        if node.op == "output" or node in wanted or checks:
            wanted.add(node)
            wanted.update(reads(node))
    return [n for n in nodes if n in wanted]


def _numbers_of_values(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """Numbers that are made from a tensor's values (`.item()`), or from such numbers.

    What torch knows of one does not always tell: once it is asserted to be 1, it is known as 1.
    """
    found: set[torch.fx.Node] = set()
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor | tuple | list):
            continue
        read = str(node.target).startswith("aten._local_scalar_dense")
        if read or unbacked(value) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _last_uses(nodes: Sequence[torch.fx.Node], reads: _Reads) -> dict[str, tuple[str, ...]]:
    """For each node, the computed values that nothing after it reads (inputs are kept)."""
    final: dict[str, str] = {}
    for node in nodes:
        for used in reads(node):
            kept = node.op == "output" or used.op == "get_attr"
            final[used.name] = "" if kept else node.name
    drops: dict[str, list[str]] = {}
    for name, user in final.items():
        if user:
            drops.setdefault(user, []).append(name)
    return {user: tuple(names) for user, names in drops.items()}


def _named(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return _nested(value) if value.op == "get_attr" else Ref(value.name)
    return value


def _outputs(
    program: torch.export.ExportedProgram,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (node,) = (n for n in program.graph.nodes if n.op == "output")
    returned: Any = node.args[0]
    outputs: list[Any] = []
    mutations: dict[str, Any] = {}
    for spec, value in zip(program.graph_signature.output_specs, returned, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(template_of(value, _named))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            mutations[str(spec.target)] = template_of(value, _named)
        elif spec.kind is OutputKind.PARAMETER_MUTATION:
            raise ConversionError(
                f"the forward writes to the parameter `{spec.target}`; a step's parameters are "
                "inputs only. Keep what changes in a buffer (register_buffer)."
            )
        elif spec.kind is not OutputKind.USER_INPUT_MUTATION:
            raise ConversionError(
                f"the module returns {spec.kind.name}, which has no JAX form: return tensors,"
                " numbers and containers of them"
            )
    return tuple(outputs), mutations
