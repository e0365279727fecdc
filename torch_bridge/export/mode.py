"""One mode (train or eval) of a converted module: its graph, and what to bind to its inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError
from torch_bridge.dtypes import canonical, is_complex, is_float, jax_dtype, numpy_dtype
from torch_bridge.export.graph.ranges import Ranges, find_ranges
from torch_bridge.export.interpret import Graph, build_graph
from torch_bridge.export.shapes import ShapeRules, as_dim, shape_rules
from torch_bridge.lower.spectral import torch_gradient
from torch_bridge.module.initial import absent_in, absent_text
from torch_bridge.module.names import Layout
from torch_bridge.module.signature import CallForm, check_constant, check_output_spec
from torch_bridge.module.weights import to_host, to_numpy


Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class TensorInput:
    """An argument of the forward that is an array."""

    placeholder: str
    path: str
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class ConstantInput:
    """An argument that export made a part of the graph."""

    path: str
    value: Any


@dataclass(frozen=True)
class Mode:
    """One graph with all it needs to be called: where each placeholder's value comes from."""

    graph: Graph
    params: Mapping[str, str]  # placeholder -> leaf name
    buffers: Mapping[str, str]
    constants: Mapping[str, np.ndarray[Any, Any]]
    inputs: tuple[TensorInput | ConstantInput, ...]
    shapes: ShapeRules
    call: CallForm
    out_spec: Any
    buffer_dtypes: Mapping[str, Any]  # leaf name -> what it is cast to before it is read
    outputs: tuple[Any, ...]  # (shape, dtype) of each output that is a tensor
    param_dtypes: Mapping[str, Any]  # leaf name -> what the graph reads it in

    def output_shapes(self, inputs: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the tensors that the module returns for some inputs, by placeholder."""
        sizes = self.sizes(inputs)
        return tuple(
            jax.ShapeDtypeStruct(
                [n if isinstance(n, int) else int(n.subs(sizes)) for n in shape], dtype
            )
            for shape, dtype in self.outputs
        )

    def takes_dtypes(self, leaves: list[tuple[str, Any]]) -> bool:
        """Whether the floating-point arguments of a call have the dtypes of the graph's."""
        pairs = zip(self.inputs, leaves, strict=True)
        return all(_same_float(e, v) for e, (_, v) in pairs if isinstance(e, TensorInput))

    def bind_inputs(self, leaves: list[tuple[str, Any]]) -> dict[str, Any]:
        """Values of the placeholders of a call's leaves (as `call.flatten` gives them).

        Raises:
            ConversionError: other constants, kinds of value or sizes than the graph was made for.
        """
        values: dict[str, Any] = {}
        for expected, (path, value) in zip(self.inputs, leaves, strict=True):
            if isinstance(expected, ConstantInput):
                check_constant(path, value, expected.value)
            else:
                values[expected.placeholder] = _as_input(path, value, expected.dtype)
        self.sizes(values)
        return values

    def sizes(self, inputs: Mapping[str, Any]) -> dict[Any, int]:
        """The free sizes, from arrays (or their shapes) of the inputs by placeholder.

        Raises:
            ConversionError: sizes that the graph was not made for.
        """
        tensors = [i.placeholder for i in self.inputs if isinstance(i, TensorInput)]
        return self.shapes.check([tuple(inputs[name].shape) for name in tensors])


def build_mode(program: torch.export.ExportedProgram, layout: Layout, call: CallForm) -> Mode:
    """What is needed to run an exported program in JAX.

    Raises:
        ConversionError: it holds, takes or returns something that JAX has no form for.
    """
    check_output_spec(program.call_spec.out_spec)
    ranges = find_ranges(program)
    wide = {node.name for node in ranges.wide}
    leaf_of = layout.leaf_of()
    params: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, np.ndarray[Any, Any]] = {}
    arguments: list[Any] = []
    used = {n.name for n in program.graph.nodes if n.op == "placeholder" and n.users}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(spec.arg)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            leaf = leaf_of[str(spec.target)]
            if spec.arg.name in used:
                (params if leaf.is_param else buffers)[spec.arg.name] = leaf.name
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            if spec.arg.name in used:
                exact = spec.arg.name in wide
                constants[spec.arg.name] = _constant(program, str(spec.target), exact)
        else:
            raise ConversionError(
                f"the module holds a {spec.kind.name}, which has no JAX form: keep tensors, numbers"
                " and strings in it"
            )
    inputs = _inputs(program, call, arguments)
    tensors = [i for i in inputs if isinstance(i, TensorInput)]
    rules = shape_rules(program, [i.path for i in tensors], [i.placeholder for i in tensors])
    return Mode(
        build_graph(program, ranges, call.padded),
        params,
        buffers,
        constants,
        inputs,
        rules,
        call,
        program.call_spec.out_spec,
        _buffer_dtypes(program, buffers),
        _output_forms(program, ranges),
        _dtypes(program, params),
    )


def _output_forms(program: torch.export.ExportedProgram, ranges: Ranges) -> tuple[Any, ...]:
    (node,) = (n for n in program.graph.nodes if n.op == "output")
    returned: Any = node.args[0]
    pairs = zip(program.graph_signature.output_specs, returned, strict=True)
    own = [value for spec, value in pairs if spec.kind is OutputKind.USER_OUTPUT]
    nodes = [value for value in own if isinstance(value, torch.fx.Node)]
    return tuple(
        (
            tuple(map(as_dim, node.meta["val"].shape)),
            (numpy_dtype if node in ranges.wide else jax_dtype)(node.meta["val"].dtype),
        )
        if isinstance(node.meta["val"], torch.Tensor)
        else ((), canonical(np.asarray(0).dtype))
        for node in nodes
    )


def _dtypes(program: torch.export.ExportedProgram, leaves: Mapping[str, str]) -> dict[str, Any]:
    """Dtypes of placeholders, by leaf."""
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    return {leaf: jax_dtype(values[name].dtype) for name, leaf in leaves.items()}


# What hands a tensor on as it is, but for its shape.
_VIEWS = ("unsqueeze", "squeeze", "expand", "view", "reshape", "slice", "select", "permute",
          "transpose", "alias", "detach", "clone", "contiguous")  # fmt: skip
_CASTS = ("to", "_to_copy")
_NORMS = ("batch_norm", "instance_norm")


def _buffer_dtypes(
    program: torch.export.ExportedProgram, buffers: Mapping[str, str]
) -> dict[str, Any]:
    """The dtype of each floating-point buffer that some operator computes with as it is.

    Buffers stay in their own dtype in a state whose parameters compute in 16 bits. Running
    statistics, which norms take in any dtype and would lose their small steps in 16 bits, and what
    is widened before it is used (rotary frequencies), are read as they are.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: dict[str, Any] = {}
    for placeholder, name in buffers.items():
        value: Any = nodes[placeholder].meta["val"]
        if value.is_floating_point() and not _read_wide(nodes[placeholder]):
            found[name] = jax_dtype(value.dtype)
    return found


def _read_wide(node: torch.fx.Node) -> bool:
    dtype: Any = node.meta["val"].dtype
    for user in node.users:
        name = str(user.target).removeprefix("aten.").partition(".")[0]
        if name in _VIEWS:
            if not _read_wide(user):
                return False
        elif name in _CASTS:
            if user.meta["val"].dtype.itemsize <= dtype.itemsize:
                return False
        elif user.op != "output" and not any(norm in name for norm in _NORMS):
            return False
    return True


def _same_float(expected: TensorInput, value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or not is_float(expected.dtype):
        return True
    given = canonical(numpy_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype)
    return given == expected.dtype or not is_float(given)


def _constant(
    program: torch.export.ExportedProgram, name: str, exact: bool
) -> np.ndarray[Any, Any]:
    """A constant as JAX holds it, or with all of its bits."""
    value = program.constants[name]
    assert isinstance(value, torch.Tensor)
    return to_numpy(value) if exact else to_host(value)


def _inputs(
    program: torch.export.ExportedProgram, call: CallForm, arguments: list[Any]
) -> tuple[TensorInput | ConstantInput, ...]:
    paths = _leaf_paths(call)
    fakes = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    inputs: list[TensorInput | ConstantInput] = []
    for path, argument in zip(paths, arguments, strict=True):
        if isinstance(argument, TensorArgument):
            fake: Any = fakes[argument.name]
            inputs.append(TensorInput(argument.name, path, jax_dtype(fake.dtype)))
        elif isinstance(argument, ConstantArgument):
            inputs.append(ConstantInput(path, argument.value))
        else:
            raise ConversionError(
                f"argument `{path}`: {type(argument).__name__} is not supported: give tensors,"
                " numbers, strings, None, and containers of them"
            )
    return tuple(inputs)


def _leaf_paths(call: CallForm) -> list[str]:
    args_spec, kwargs_spec = call.spec.children()
    placeholder_args = torch_pytree.tree_unflatten([None] * args_spec.num_leaves, args_spec)
    placeholder_kwargs = torch_pytree.tree_unflatten([None] * kwargs_spec.num_leaves, kwargs_spec)
    return [path for path, _ in call.flatten(tuple(placeholder_args), placeholder_kwargs)]


def _as_input(path: str, value: Any, dtype: np.dtype[Any]) -> jax.Array:
    if isinstance(value, torch.Tensor):
        value = to_numpy(value) if value.dtype == torch.int64 else to_host(value)
    _refuse_cut(path, value)
    if value is None or callable(value) or isinstance(value, str | Mapping | list | tuple):
        loss = " (a loss is given to `converted.model(loss)`)" if callable(value) else ""
        raise ConversionError(
            f"argument `{path}`: expected an array of {dtype.name} as in the example, got "
            f"{value!r:.60}{loss}"
        )
    array = jnp.asarray(value)
    if is_float(array) != is_float(dtype):
        raise ConversionError(
            f"argument `{path}`: expected {dtype.name} as in the example, got {array.dtype.name}"
        )
    _refuse_wrapped(path, array, np.dtype(dtype))
    return array.astype(dtype)


def _refuse_wrapped(path: str, array: jax.Array, dtype: np.dtype[Any]) -> None:
    """Refuse whole numbers that are no longer the same in the example's dtype."""
    if dtype.kind not in "iub" or not array.size or np.can_cast(array.dtype, dtype):
        return
    if isinstance(array, jax.core.Tracer):
        raise ConversionError(
            f"argument `{path}`: expected {dtype.name} as in the example, got {array.dtype.name},"
            f" of which some may not fit: give .astype(np.{dtype.name}), or convert with an example"
            f" of {array.dtype.name}"
        )
    low, high = int(array.min()), int(array.max())
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if low < least or high > most:
        raise ConversionError(
            f"argument `{path}`: {low} to {high} do not fit into {dtype.name}, the example's dtype;"
            " convert with an example of the dtype that is given"
        )


def _refuse_cut(path: str, value: Any) -> None:
    """Refuse whole numbers that JAX would cut to 32 bits without a word."""
    whole = isinstance(value, np.ndarray | jax.Array) and value.dtype.kind in "iu" and value.size
    if not whole or canonical(value.dtype) == value.dtype:
        return
    if isinstance(value, jax.core.Tracer):
        raise ConversionError(
            f"argument `{path}`: whole numbers of 64 bits, of which the graph takes 32:"
            " jax.config.update('jax_enable_x64', True), or give .astype(jnp.int32)"
        )
    value = np.asarray(value)
    limits = np.iinfo(canonical(value.dtype))
    low, high = int(value.min()), int(value.max())
    if low < limits.min or high > limits.max:
        raise ConversionError(
            f"argument `{path}`: {low} to {high} do not fit into {limits.dtype.name}, which JAX"
            " holds instead of 64 bits; jax.config.update('jax_enable_x64', True), or hash them"
            " to a smaller range first"
        )


def bind_state(
    wanted: Mapping[str, str],
    given: Arrays,
    example: Arrays,
    kind: str,
    frozen: frozenset[str],
    dtypes: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Values of a mode's parameters or buffers, by placeholder.

    Args:
        wanted: the leaf of each placeholder.
        given: values by leaf name.
        example: arrays of the right shapes by leaf name.
        kind: "params" or "buffers", for messages.
        frozen: leaves through which no gradient goes.
        dtypes: what some leaves are cast to; of parameters, those that are frozen.

    Raises:
        ConversionError: a leaf is missing, or has another shape.
    """
    values: dict[str, Any] = {}
    for placeholder, name in wanted.items():
        if name not in given:
            raise ConversionError(f"{kind}: `{name}` is missing; expected the names of .{kind}")
        value = given[name]
        if absent := absent_in(value):
            raise ConversionError(absent_text(absent))
        if tuple(value.shape) != example[name].shape:
            raise ConversionError(
                f"{kind}: `{name}` has shape {tuple(value.shape)}, expected {example[name].shape}"
            )
        values[placeholder] = as_leaf(value, name in frozen, dtypes.get(name))
    return values


def frozen_dtypes(dtypes: Mapping[str, Any], frozen: Collection[str]) -> dict[str, Any]:
    """What frozen parameters are cast to before they are read: what the graph reads them in."""
    return {name: dtype for name, dtype in dtypes.items() if name in frozen}


def as_leaf(value: Any, frozen: bool, dtype: Any = None) -> Any:
    """A parameter or buffer as a graph reads it: frozen ones get no gradient."""
    if dtype is not None and value.dtype != dtype:
        value = jnp.asarray(value).astype(dtype)
    if is_complex(value):
        value = torch_gradient(value)
    return jax.lax.stop_gradient(value) if frozen else value


def in_own_dtypes(new: Mapping[str, Any], old: Arrays) -> dict[str, Any]:
    """New values of buffers, in the dtypes in which they are kept."""
    return {name: jnp.asarray(value).astype(old[name].dtype) for name, value in new.items()}
