"""`convert`: a PyTorch module becomes pure functions over flat dicts of named arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError
from fzero.model import Model

from .dtypes import is_complex, is_float, jax_dtype
from .export import export_program
from .interpret import (
    Graph,
    build_graph,
    missing_operators,
    refuse_data_dependent,
    refuse_missing,
)
from .layout import Layout, read_layout, read_values
from .lower.spectral import torch_gradient
from .shapes import ShapeRules, shape_rules
from .structure import CallForm, build_output, check_constant, check_output_spec
from .weights import to_host, to_torch


Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class _TensorInput:
    placeholder: str
    path: str
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class _ConstantInput:
    path: str
    value: Any


@dataclass(frozen=True)
class _Mode:
    """One graph with all it needs to be called: where each placeholder's value comes from."""

    graph: Graph
    params: Mapping[str, str]  # placeholder -> leaf name
    buffers: Mapping[str, str]
    constants: Mapping[str, np.ndarray[Any, Any]]
    inputs: tuple[_TensorInput | _ConstantInput, ...]
    shapes: ShapeRules
    call: CallForm
    out_spec: Any


class Applied(NamedTuple):
    """What a converted module gives back: its output and the buffers after the call."""

    output: Any
    buffers: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Converted:
    """A PyTorch module as a pure function.

    Attributes:
        params: initial values of what is trained, keyed by `state_dict` name, as read-only host
            arrays of the module's dtypes. Tied weights are one entry, under their first name.
        buffers: running statistics, integer and other untrained tensors, keyed the same way.
        frozen: names in `params` with `requires_grad=False`; no gradient reaches them, and no step
            of `model(...)` changes them.
        layout: names, ties and torch dtypes of every leaf.
    """

    params: dict[str, np.ndarray[Any, Any]]
    buffers: dict[str, np.ndarray[Any, Any]]
    frozen: frozenset[str]
    layout: Layout
    _modes: Mapping[bool, _Mode] = field(repr=False)

    def apply(
        self,
        params: Arrays,
        buffers: Arrays,
        *args: Any,
        rng: Any = None,
        train: bool = False,
        **kwargs: Any,
    ) -> Applied:
        """Run the module's forward.

        Args:
            params: values for `self.params`, same names and shapes, any float dtype.
            buffers: values for `self.buffers`.
            *args: the module's own arguments: arrays (or tensors, which are copied) where the
                example had tensors, the example's value where it had anything else.
            rng: a JAX key; needed when the mode draws random numbers (dropout in train mode).
            train: which of the two graphs runs.
            **kwargs: the module's own keyword arguments.

        Returns:
            `(output, buffers)`: the output in the module's structure, and all buffers with the
            ones that the forward updates replaced.

        Raises:
            ConversionError: other arguments, sizes, names or shapes than the module was converted
                with, or a missing `rng`.

        Example:
            >>> module = torch.nn.Linear(3, 2)
            >>> converted = convert(module, torch.zeros(4, 3))
            >>> out, buffers = converted.apply(converted.params, {}, np.ones((5, 3), np.float32))
            >>> out.shape
            (5, 2)
        """
        mode = self._modes[bool(train)]
        values = self._bind(mode, params, buffers, args, kwargs)
        if mode.graph.num_draws and rng is None:
            raise ConversionError(
                f"the {'train' if train else 'eval'} forward draws random numbers in "
                f"{mode.graph.num_draws} place(s) (dropout and the like): pass "
                "rng=jax.random.key(...)"
            )
        leaves, changed = mode.graph.run(values, rng)
        names = self.layout.leaf_of()
        updated = {names[name].name: value for name, value in changed.items()}
        return Applied(build_output(mode.out_spec, leaves), {**buffers, **updated})

    def _bind(
        self, mode: _Mode, params: Arrays, buffers: Arrays, args: Any, kwargs: Any
    ) -> dict[str, Any]:
        """A value for each placeholder of a mode's graph."""
        values = _bind_inputs(mode, mode.call.flatten(args, kwargs))
        values.update(_bind_state(mode.params, params, self.params, "params", self.frozen))
        values.update(_bind_state(mode.buffers, buffers, self.buffers, "buffers", frozenset()))
        values.update(mode.constants)
        return values

    def fixed_dims(self) -> tuple[str, ...]:
        """The dims of tensor arguments that must be as in the example; all others are free.

        Returns:
            Names such as "`input` dim 1", in the order of the arguments.

        Example:
            >>> convert(torch.nn.Linear(3, 2), torch.zeros(4, 3)).fixed_dims()
            ('`input` dim 1',)
        """
        found: dict[str, None] = {}
        for mode in self._modes.values():
            found.update(dict.fromkeys(mode.shapes.fixed()))
        return tuple(found)

    def model(self, loss: Callable[..., Any]) -> Model:
        """The module with a loss, as fzero trains and evaluates it.

        Args:
            loss: `loss(forward, batch)`, which returns an `fzero.Mean` or a scalar, or a pair of
                that and a dict of metrics. `forward(*args, **kwargs)` is the module with the
                step's parameters, buffers, key and mode bound; called several times, each call
                has its own randomness and sees the buffers that the one before left.

        Returns:
            A `Model` whose initial values are this module's.

        Example:
            >>> converted = convert(torch.nn.Linear(3, 1), torch.zeros(4, 3))
            >>> model = converted.model(lambda forward, batch: jnp.mean(forward(batch) ** 2))
            >>> value, buffers, metrics = model.loss(*model.init, jnp.ones((2, 3)), None, True)
            >>> value.shape, buffers, metrics
            ((), {}, {})
        """

        def step_loss(
            params: Arrays, buffers: Arrays, batch: Any, rng: Any, train: bool
        ) -> tuple[Any, Any, dict[str, Any]]:
            current: list[Arrays] = [buffers]
            calls = 0

            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                key = None if rng is None else jax.random.fold_in(rng, calls)
                calls += 1
                out, current[0] = self.apply(
                    params, current[0], *args, rng=key, train=train, **kwargs
                )
                return out

            result = loss(forward, batch)
            value, metrics = result if isinstance(result, tuple) else (result, {})
            return value, current[0], metrics

        initial = dict(self.params), dict(self.buffers)
        return Model(init=initial, loss=step_loss, frozen=self.frozen)


def convert(
    module: torch.nn.Module,
    *example_args: Any,
    batch_dim: int | None = None,
    **example_kwargs: Any,
) -> Converted:
    """Convert a PyTorch module for training and evaluation in JAX.

    The module is exported twice, in train and in eval mode, and is left as it was. Sizes of the
    example stay free where the module allows it; give an example with a batch of at least 2.
    `fixed_dims()` of the result lists those that are not free.

    Args:
        module: any `torch.nn.Module`; transformers models are exported without key-value cache.
        *example_args: arguments for its forward: tensors (shapes as in use), and constants, which
            become part of the result.
        batch_dim: the dim of all tensor arguments (where they have it) that has to stay free:
            a module that ties it to the example is refused here, and not at the first call with
            another batch.
        **example_kwargs: keyword arguments for its forward.

    Returns:
        The module as a pure function with its initial values.

    Raises:
        ConversionError: the module cannot be converted without changing what it computes: missing
            operators (all of them, with module paths), data-dependent sizes or control flow,
            custom autograd functions without a rule (`register_function`), Python state or random
            numbers that would be frozen, writes to parameters, float64 without x64; or
            `batch_dim` cannot be kept free.

    Example:
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> sorted(converted.params)
        ['bias', 'weight']
    """
    layout = read_layout(module)
    params, buffers = read_values(module, layout)
    args, kwargs = torch_pytree.tree_map(_example_leaf, (example_args, example_kwargs))
    programs = {
        train: export_program(module, args, kwargs, train, batch_dim or 0)
        for train in (True, False)
    }
    for program in programs.values():
        refuse_data_dependent(program)
    refuse_missing([missing_operators(program) for program in programs.values()])
    modes = {
        train: _mode(program, layout, CallForm.of(module, args, kwargs, program.call_spec.in_spec))
        for train, program in programs.items()
    }
    frozen = frozenset(leaf.name for leaf in layout.leaves if leaf.frozen)
    converted = Converted(params, buffers, frozen, layout, modes)
    if batch_dim is not None:
        _refuse_fixed(converted, batch_dim)
    return converted


def _refuse_fixed(converted: Converted, batch_dim: int) -> None:
    fixed = [name for name in converted.fixed_dims() if name.endswith(f"dim {batch_dim}")]
    if fixed:
        raise ConversionError(
            f"batch_dim={batch_dim}: the module ties {', '.join(fixed)} to the size in the example "
            "(a size of 1 always is). Compute with x.shape instead of a number, give an example "
            "with a batch of at least 2, or leave out batch_dim and convert once for each size."
        )


def _example_leaf(leaf: Any) -> Any:
    is_array = isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, torch.Tensor)
    return to_torch(leaf) if is_array else leaf


def _mode(program: torch.export.ExportedProgram, layout: Layout, call: CallForm) -> _Mode:
    check_output_spec(program.call_spec.out_spec)
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
            constants[spec.arg.name] = to_host(_constant(program, str(spec.target)))
        else:
            raise ConversionError(f"the module holds a {spec.kind.name}, which has no JAX form")
    inputs = _inputs(program, call, arguments)
    tensors = [i for i in inputs if isinstance(i, _TensorInput)]
    rules = shape_rules(program, [i.path for i in tensors], [i.placeholder for i in tensors])
    return _Mode(
        build_graph(program),
        params,
        buffers,
        constants,
        inputs,
        rules,
        call,
        program.call_spec.out_spec,
    )


def _constant(program: torch.export.ExportedProgram, name: str) -> torch.Tensor:
    value = program.constants[name]
    assert isinstance(value, torch.Tensor)
    return value


def _inputs(
    program: torch.export.ExportedProgram, call: CallForm, arguments: list[Any]
) -> tuple[_TensorInput | _ConstantInput, ...]:
    paths = _leaf_paths(call)
    fakes = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    inputs: list[_TensorInput | _ConstantInput] = []
    for path, argument in zip(paths, arguments, strict=True):
        if isinstance(argument, TensorArgument):
            fake: Any = fakes[argument.name]
            inputs.append(_TensorInput(argument.name, path, jax_dtype(fake.dtype)))
        elif isinstance(argument, ConstantArgument):
            inputs.append(_ConstantInput(path, argument.value))
        else:
            raise ConversionError(f"argument `{path}`: {type(argument).__name__} is not supported")
    return tuple(inputs)


def _leaf_paths(call: CallForm) -> list[str]:
    args_spec, kwargs_spec = call.spec.children()
    placeholder_args = torch_pytree.tree_unflatten([None] * args_spec.num_leaves, args_spec)
    placeholder_kwargs = torch_pytree.tree_unflatten([None] * kwargs_spec.num_leaves, kwargs_spec)
    return [path for path, _ in call.flatten(tuple(placeholder_args), placeholder_kwargs)]


def _bind_inputs(mode: _Mode, leaves: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    shapes: list[tuple[int, ...]] = []
    for expected, (path, value) in zip(mode.inputs, leaves, strict=True):
        if isinstance(expected, _ConstantInput):
            check_constant(path, value, expected.value)
        else:
            array = _as_input(path, value, expected.dtype)
            shapes.append(array.shape)
            values[expected.placeholder] = array
    mode.shapes.check(shapes)
    return values


def _as_input(path: str, value: Any, dtype: np.dtype[Any]) -> jax.Array:
    if isinstance(value, torch.Tensor):
        value = to_host(value)
    if value is None or isinstance(value, str | Mapping | list | tuple):
        raise ConversionError(
            f"argument `{path}`: expected an array of {dtype.name} as in the example, got "
            f"{value!r:.60}"
        )
    array = jnp.asarray(value)
    if is_float(array) != is_float(dtype):
        raise ConversionError(
            f"argument `{path}`: expected {dtype.name} as in the example, got {array.dtype.name}"
        )
    # Floats keep their precision (a bfloat16 step feeds bfloat16); integers take the example's.
    return array if is_float(array) else array.astype(dtype)


def _bind_state(
    wanted: Mapping[str, str], given: Arrays, example: Arrays, kind: str, frozen: frozenset[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for placeholder, name in wanted.items():
        if name not in given:
            raise ConversionError(f"{kind}: `{name}` is missing; expected the names of .{kind}")
        value = given[name]
        if tuple(value.shape) != example[name].shape:
            raise ConversionError(
                f"{kind}: `{name}` has shape {tuple(value.shape)}, expected {example[name].shape}"
            )
        if is_complex(value):
            value = torch_gradient(value)
        values[placeholder] = jax.lax.stop_gradient(value) if name in frozen else value
    return values
