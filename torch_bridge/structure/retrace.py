"""Sizes and dtypes that a graph was not made for: the module is traced again when they first come.

torch.export takes a size of 1 as fixed and any other as at least 2, and a module may take another
path through its Python code for some sizes. A batch of one row per device is ordinary, though: so
a conversion keeps the module, without its weights, and traces it for what its graph refuses.

A module computes otherwise in another dtype: casts that did nothing do something, and what it asks
of a dtype (its lowest number) has another answer. A step in bfloat16 therefore runs the graph of
`module.to(torch.bfloat16)`, traced as such; where a plan keeps some parameters in float32, of that
with their submodules `.float()`.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError
from fzero.links import Context
from fzero.tree import found_in
from torch_bridge.dtypes import canonical, is_float, numpy_dtype, torch_dtype
from torch_bridge.export.export import export_program
from torch_bridge.export.interpret import (
    Op,
    missing_operators,
    refuse_data_dependent,
    refuse_missing,
    refuse_mixed,
)
from torch_bridge.export.mode import Mode, build_mode
from torch_bridge.export.shapes import SizeError
from torch_bridge.export.watch.constants import refuse_nameless
from torch_bridge.module.copied import untouched_like, without_weights
from torch_bridge.module.names import Layout
from torch_bridge.structure.loops import LoopedGraph
from torch_bridge.structure.stacked_names import BlockStack, Names
from torch_bridge.structure.widened import roll_widened


class Call(NamedTuple):
    """What runs for one call's sizes.

    Attributes:
        mode: the graph.
        rolled: the same with its equal blocks rolled; None where none are.
        inputs: the call's arrays, by placeholder.
    """

    mode: Mode
    rolled: LoopedGraph | None
    inputs: dict[str, Any]


class Computed(NamedTuple):
    """What a module's parameters are in, where that is not their own dtypes.

    Attributes:
        dtype: that of all, such as bfloat16.
        float32: names of the module's own leaves that are in float32 all the same.
    """

    dtype: Any
    float32: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Graphs:
    """The graphs of a module: those of its example, and others for sizes that they refuse.

    Attributes:
        modes: the example's graphs.
        rolled: the same, rolled; empty where nothing is.
        again: traces the module for other sizes and dtypes.
        dtypes: the dtype of every floating-point parameter of the conversion.
        names: which of those are stacked.
    """

    modes: Mapping[bool, Mode]
    rolled: Mapping[bool, LoopedGraph]
    again: Again
    dtypes: Mapping[str, Any]
    names: Names

    def call(
        self,
        train: bool,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        computed: Computed | None = None,
    ) -> Call:
        """The graph for a call's sizes and dtypes, with its inputs bound.

        Args:
            train: which mode.
            args: what the module is called with.
            kwargs: likewise.
            computed: what its parameters are in, where that is not their own dtype.

        Raises:
            ConversionError: other arguments than the example's, or sizes for which neither the
                example's graph holds nor the module can be traced.
        """
        if train not in self.modes:
            raise ConversionError(
                "the module was converted with train=False, and can only be evaluated; convert it"
                " without that"
            )
        mode, rolled = self.modes[train], self.rolled.get(train)
        leaves = mode.call.flatten(tuple(args), kwargs)
        refused = f"computing in {computed.dtype}, not the module's own dtype" if computed else ""
        if not computed and mode.takes_dtypes(leaves):
            try:
                return Call(mode, rolled, mode.bind_inputs(leaves))
            except SizeError as error:
                refused = str(error)
        mode, rolled = self.again.find(mode, rolled, train, computed, leaves, refused)
        return Call(mode, rolled, mode.bind_inputs(leaves))

    def dtype_of(self, params: Mapping[str, Any]) -> Computed | None:
        """What parameters are in, if it is not their own.

        Raises:
            ConversionError: they are in several dtypes.
        """
        given = {n: canonical(v.dtype) for n, v in params.items() if n in self.dtypes}
        if all(dtype == self.dtypes[name] for name, dtype in given.items()):
            return None
        if len(set(given.values())) > 1:
            raise ConversionError(
                f"params are in {sorted({d.name for d in given.values()})}: expected the module's"
                " own dtypes, or one for all, in which the module is then traced"
            )
        return Computed(next(iter(given.values())))

    def float32(self, ctx: Context, paths: Mapping[str, str]) -> frozenset[str]:
        """The module's own leaves that a plan keeps in float32.

        Args:
            ctx: a link's, of which it knows the plan.
            paths: the path of each parameter of the conversion in the model.
        """
        if not ctx.keep_fp32:
            return frozenset()
        own = {one.name: tuple(leaf.name for leaf in one.leaves) for one in self.names.stacked}
        found = (name for name, path in paths.items() if found_in(ctx.keep_fp32, path))
        return frozenset(leaf for name in found for leaf in own.get(name, (name,)))

    @property
    def first(self) -> LoopedGraph:
        """One of the rolled graphs; all have the same blocks."""
        return next(iter(self.rolled.values()))

    def map_ops(self, change: Callable[[Op], Op]) -> Graphs:
        """The same graphs with every op changed; they then draw no random numbers."""
        modes = {train: _changed(mode, change) for train, mode in self.modes.items()}
        rolled = {train: graph.map_ops(change) for train, graph in self.rolled.items()}
        return Graphs(modes, rolled, self.again.changed(change), self.dtypes, self.names)

    def unrolled(self) -> Graphs:
        """The same graphs, block by block."""
        return replace(self, rolled={})


def _changed(mode: Mode, change: Callable[[Op], Op]) -> Mode:
    ops = tuple(map(change, mode.graph.ops))
    return replace(mode, graph=replace(mode.graph, ops=ops, num_draws=0))


class Again:
    """Traces a module for sizes that its first graphs do not accept, once for each kind of sizes.

    Args:
        module: a module, of which a copy without weights is kept.
        args: the example's arguments, of which the form is kept.
        kwargs: its keyword arguments.
        batch_dim: see `export_program`.
        layout: the module's leaves.
        min_layers: see `roll_blocks`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        batch_dim: int,
        layout: Layout,
        min_layers: int,
    ) -> None:
        self.example = torch_pytree.tree_map(_form, (args, dict(kwargs)))
        self.batch_dim, self.layout, self.min_layers = batch_dim, layout, min_layers
        self.change: Callable[[Op], Op] | None = None
        self._copies: dict[Any, torch.nn.Module] = {}
        # Where, and of what, the module's forward makes tensors that it does not say it of.
        self.device, self.dtype = torch.get_default_device(), torch.get_default_dtype()
        self.module: torch.nn.Module | None = None
        self.problem = ""
        try:
            self.module = without_weights(module)
        except Exception as error:  # whatever a module's own attributes raise when copied
            self.problem = (
                f"no copy of the {type(module).__name__} could be kept when it was converted"
                f" ({error}). Convert it with an example of these sizes."
            )
        self._found: dict[Any, list[tuple[Mode, LoopedGraph | None]]] = {}
        self._lock = threading.RLock()

    def changed(self, change: Callable[[Op], Op]) -> Again:
        """The same, with every op of what it traces changed."""
        other = copy.copy(self)
        other.change, other._found = change, {}
        return other

    def find(
        self,
        first: Mode,
        rolled: LoopedGraph | None,
        train: bool,
        computed: Computed | None,
        leaves: Sequence[tuple[str, Any]],
        refused: str,
    ) -> tuple[Mode, LoopedGraph | None]:
        """The graph for a call, traced now if there is none that accepts it.

        Floating-point arguments keep the dtype that they are given in where the module takes them
        so, and have the parameters' dtype otherwise.

        Args:
            first: the example's graph, which refuses the call.
            rolled: the same with the blocks that have to be rolled.
            train: which mode.
            computed: what the parameters are in, where that is not their own dtype.
            leaves: the call's, as `first.call.flatten` gives them.
            refused: why `first` refuses.

        Raises:
            ConversionError: the module cannot be traced for these sizes either.
        """
        given = tuple(map(_float_dtype, (value for _, value in leaves)))
        with self._lock, torch.inference_mode(False):
            stacks = () if rolled is None else rolled.stacks
            known = self._found.setdefault((train, computed, given, stacks), [])
            for traced in known:
                with contextlib.suppress(SizeError):
                    traced[0].bind_inputs(list(leaves))
                    return traced
            try:
                traced = self._trace_any((first, rolled), train, computed, leaves, stacks)
            except ConversionError as error:
                raise ConversionError(
                    f"{refused}\nTracing the module for this failed: {error}"
                ) from error
            known.append(traced)
            return traced

    def _trace_any(
        self,
        own: tuple[Mode, LoopedGraph | None],
        train: bool,
        computed: Computed | None,
        leaves: Sequence[tuple[str, Any]],
        stacks: tuple[BlockStack, ...],
    ) -> tuple[Mode, LoopedGraph | None]:
        """Trace with arguments of the dtypes given, or else of the parameters'."""
        first, dtype = own[0], computed and computed.dtype
        as_given = self._like(first, leaves, dtype, keep=True)
        as_params = self._like(first, leaves, dtype, keep=False)
        if _dtypes(as_given) != _dtypes(as_params):
            with contextlib.suppress(ConversionError):
                return self._trace(first, train, computed, as_given, stacks, strict=True)
            if computed is None:  # the example's own graph may take them, cast
                with contextlib.suppress(SizeError):
                    first.bind_inputs(list(leaves))
                    return own
        return self._trace(first, train, computed, as_params, stacks)

    def _trace(
        self,
        first: Mode,
        train: bool,
        computed: Computed | None,
        example: Any,
        stacks: tuple[BlockStack, ...],
        strict: bool = False,
    ) -> tuple[Mode, LoopedGraph | None]:
        if self.module is None:
            raise ConversionError(self.problem)
        program = self._exported(train, computed, example)
        if strict:
            refuse_mixed(program)
        refuse_data_dependent(program)
        refuse_missing([missing_operators(program)])
        converted = ((name, reference()) for name, reference in self.layout.tensors.items())
        # A function that the copy holds may read the module itself.
        refuse_nameless(program, [(name, t) for name, t in converted if t is not None])
        mode = build_mode(program, self.layout, first.call)
        rolled = None
        if stacks:
            mode, rolled = roll_widened(program, mode, self.layout, self.min_layers, stacks)
        if self.change is not None:
            mode = _changed(mode, self.change)
            rolled = rolled and rolled.map_ops(self.change)
        return mode, rolled

    def _exported(self, train: bool, computed: Computed | None, example: Any) -> Any:
        args, kwargs = example

        def export(module: torch.nn.Module) -> Any:
            own = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            try:
                with self.device:
                    return export_program(module, args, kwargs, train, self.batch_dim, False)
            finally:
                torch.set_default_dtype(own)

        if computed is None or not computed.float32:
            return export(self._copy(computed))
        with contextlib.suppress(ConversionError):
            program = export(self._copy(computed))
            refuse_mixed(program)
            return program
        # PyTorch does not multiply 32 bits with 16: what is kept hands 16 on.
        return export(self._copy(computed, between=True))

    def original(self) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
        """A copy of the module without weights, and arguments like the example's.

        Raises:
            ConversionError: no copy could be kept.
        """
        if self.module is None:
            raise ConversionError(self.problem)
        forms, spec = torch_pytree.tree_flatten(self.example)
        made = [form.zeros(form.shape, None) if isinstance(form, _Form) else form for form in forms]
        args, kwargs = torch_pytree.tree_unflatten(made, spec)
        return without_weights(self.module), args, kwargs

    def _copy(self, computed: Computed | None, between: bool = False) -> torch.nn.Module:
        """The module without its weights, in a dtype.

        Args:
            computed: the dtype, and what stays in float32 as after `submodule.float()`.
            between: whether submodules with such leaves take what they are called with in float32,
                and give it back in 16 bits.
        """
        assert self.module is not None
        if computed is None:
            return self.module
        if (computed, between) not in self._copies:
            dtype = torch_dtype(computed.dtype)
            made = without_weights(self.module, dtype)
            for submodule in _owners(made, computed.float32):
                for tensor in (*submodule._parameters.values(), *submodule._buffers.values()):
                    if tensor is not None and tensor.is_floating_point():
                        tensor.data = untouched_like(tensor.data, torch.float32)
                if between:
                    submodule.register_forward_pre_hook(
                        lambda _, args, kwargs: _floats_in(torch.float32, (args, kwargs)),
                        with_kwargs=True,
                    )
                    submodule.register_forward_hook(lambda *given: _floats_in(dtype, given[-1]))
            self._copies[computed, between] = made
        return self._copies[computed, between]

    def _like(
        self, first: Mode, leaves: Sequence[tuple[str, Any]], dtype: Any, keep: bool
    ) -> tuple[Any, dict[str, Any]]:
        """The example with the sizes of a call, and with its dtypes or those of the parameters."""
        args, kwargs = self.example
        example = (args, {name: kwargs[name] for name in first.call.keyword})
        forms, spec = torch_pytree.tree_flatten(example)
        made = []
        for form, (_, value) in zip(forms, leaves, strict=True):
            if isinstance(form, _Form):
                floats = form.dtype.is_floating_point
                wanted = (_float_dtype(value) if keep else None) or dtype if floats else None
                form = form.zeros(value.shape, wanted and torch_dtype(wanted))
            made.append(form)
        found: tuple[Any, dict[str, Any]] = torch_pytree.tree_unflatten(made, spec)
        return found


@dataclass(frozen=True)
class _Form:
    """A tensor of the example, but for its sizes and values."""

    dtype: torch.dtype
    device: torch.device
    learns: bool
    shape: tuple[int, ...]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
        return torch.zeros(
            tuple(shape), dtype=dtype or self.dtype, device=self.device, requires_grad=self.learns
        )


def _owners(module: torch.nn.Module, names: Collection[str]) -> list[torch.nn.Module]:
    """The submodules whose own parameters, not those of their children, are among some."""
    wanted = {id(p) for name, p in module.named_parameters() if name in names}
    return [m for m in module.modules() if any(id(p) in wanted for p in m._parameters.values())]


def _floats_in(dtype: torch.dtype, values: Any) -> Any:
    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return torch_pytree.tree_map(cast, values)


def _form(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return _Form(leaf.dtype, leaf.device, leaf.requires_grad, tuple(leaf.shape))


def _float_dtype(value: Any) -> Any:
    """The dtype of a floating-point array or tensor, as JAX has it; None of anything else."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or (isinstance(value, torch.Tensor) and not value.is_floating_point()):
        return None
    found = numpy_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype
    return canonical(found) if is_float(found) else None


def _dtypes(example: Any) -> list[Any]:
    return [getattr(leaf, "dtype", None) for leaf in torch_pytree.tree_leaves(example)]
