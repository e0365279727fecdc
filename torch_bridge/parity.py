"""`parity`: does a converted module compute what PyTorch computes, and where does it first not?"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_map

from fzero.errors import ConversionError
from torch_bridge.converted import Converted
from torch_bridge.dtypes import is_array
from torch_bridge.export.example import example_tensors
from torch_bridge.module.initial import read_values
from torch_bridge.module.names import read_layout
from torch_bridge.module.weights import to_torch
from torch_bridge.module.wrappers import unwrapped
from torch_bridge.reference import NodeValue, Reference, run_torch, without_dropout


# fp32: values differ in the order of sums only; gradients go through twice as many.
FORWARD_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-4
# Gradients that are zero in exact arithmetic hold only rounding: they are judged against the
# largest gradient of the module.
NEGLIGIBLE = 3e-3
# Of biases before a batch norm, which are sums of large terms, it was up to 2.2e-6 of the largest:
# where PyTorch has no more than this share of it, more of what is there may be rounding.
ALL_ROUNDING, OF_ROUNDING = 1e-5, 3e-2


@dataclass(frozen=True)
class Difference:
    """The first value of a forward that is not as in PyTorch.

    Attributes:
        mode: "train" or "eval".
        path: the submodule that computed it, "(root)" for the module itself.
        operator: the ATen operator.
        source: the line of Python that called it.
        error: largest difference, relative to the largest value.
    """

    mode: str
    path: str
    operator: str
    source: str
    error: float


@dataclass(frozen=True)
class ModuleParity:
    """One submodule: the largest relative errors of what it computes itself.

    Attributes:
        path: as in `named_modules`, "(root)" for the module itself.
        num_values: values that its own operators computed, in both modes.
        eval_error: over the values of the forward in eval mode; None: there are none.
        train_error: likewise in train mode.
        gradient_error: over its own parameters; None: it has none.
    """

    path: str
    num_values: int
    eval_error: float | None
    train_error: float | None
    gradient_error: float | None


@dataclass(frozen=True)
class Parity:
    """How far a converted module is from PyTorch. All errors are relative, dropout is off.

    Attributes:
        modules: every submodule, in the order in which they are called.
        output_eval: error of the module's outputs in eval mode.
        output_train: error of its outputs in train mode.
        loss_torch: a fixed random projection of the outputs in train mode, by PyTorch.
        loss_jax: the same by the converted module.
        gradients: error of that loss's gradient for each parameter.
        statistics: error of each buffer after a forward in train mode.
        first: the first value that differs by more than the tolerance; None: all agree.
        forward_tolerance: up to which values agree.
        gradient_tolerance: up to which gradients agree.
    """

    modules: tuple[ModuleParity, ...]
    output_eval: float
    output_train: float
    loss_torch: float
    loss_jax: float
    gradients: Mapping[str, float]
    statistics: Mapping[str, float]
    first: Difference | None
    forward_tolerance: float
    gradient_tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether outputs, loss, statistics and gradients are all within the tolerances."""
        loss = _relative(self.loss_jax, self.loss_torch, 1.0)
        forward = (self.output_eval, self.output_train, *self.statistics.values(), loss)
        return all(e <= self.forward_tolerance for e in forward) and all(
            e <= self.gradient_tolerance for e in self.gradients.values()
        )

    def to_json(self) -> str:
        """All figures as JSON."""
        return json.dumps({**dataclasses.asdict(self), "agrees": self.agrees}, indent=2)

    def __str__(self) -> str:
        table = Table(title="relative error against PyTorch, by submodule", title_justify="left")
        for name in ("module", "values", "forward eval", "forward train", "gradient"):
            table.add_column(name, justify="left" if name == "module" else "right")
        for row in self.modules:
            errors = (row.eval_error, row.train_error, row.gradient_error)
            table.add_row(row.path, str(row.num_values), *(_number(e) for e in errors))
        out = io.StringIO()
        Console(file=out, width=100).print(table)
        for line in self._summary():
            print(line, file=out)
        return out.getvalue()

    def _summary(self) -> list[str]:
        worst = max(self.gradients.values(), default=0.0)
        lines = [
            f"outputs: {self.output_eval:.1e} eval, {self.output_train:.1e} train; loss "
            f"{self.loss_jax:.8g} (PyTorch {self.loss_torch:.8g}); gradients up to {worst:.1e}",
        ]
        if self.statistics:
            moved = max(self.statistics.values())
            lines.append(f"{len(self.statistics)} buffer(s) after a train step: up to {moved:.1e}")
        if self.first is not None:
            found = self.first
            lines.append(
                f"first difference: {found.error:.1e} in {found.path} ({found.mode}), "
                f"{found.operator}\n  {found.source}"
            )
        elif not self.agrees:
            lines.append("every single value agrees: differences add up, or only gradients differ")
        lines.append("agrees" if self.agrees else "DOES NOT AGREE")
        return lines


def parity(
    module: torch.nn.Module,
    converted: Converted,
    inputs: Any,
    *,
    forward_tolerance: float | None = None,
    gradient_tolerance: float | None = None,
) -> Parity:
    """Compare a module with what it was converted to, value by value.

    Both run with the module's present weights, in both modes, with dropout off. PyTorch runs the
    module itself (for outputs, statistics and gradients) and the exported graph (for the values in
    between). The module is left as it was.

    Args:
        module: the module that was converted.
        converted: the result of `convert`.
        inputs: its arguments: a tuple of positional ones, a dict of keyword ones, or one tensor.
        forward_tolerance: up to which relative error values agree; by default 2e-5, and four
            roundings of the lowest dtype where parameters have 16 bits.
        gradient_tolerance: likewise for gradients; 1e-4, and 16 roundings.

    Returns:
        A frozen report; `print` shows it as a table.

    Raises:
        ConversionError: the module is not the one that was converted, or draws random numbers in
            another way than by dropout.

    Example:
        >>> import torch_bridge as tb
        >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
        >>> x = torch.ones(2, 3)
        >>> report = parity(module, tb.convert(module, x), x)
        >>> report.agrees, [row.path for row in report.modules]
        (True, ['0', '1'])
    """
    if len(converted._modes) < 2:
        raise ConversionError(
            "parity compares both modes; the module was converted with train=False"
        )
    if converted.within_capacity:
        raise ConversionError(
            "parity compares with PyTorch, whose experts take all their tokens, and this conversion"
            " has a capacity; compare one without"
        )
    args, kwargs = example_tensors(_call(inputs))
    module = unwrapped(module)
    layout = read_layout(module)
    if layout != converted.layout:
        raise ConversionError(
            "the module has other tensors than the one that was converted: give that one, or"
            " convert this one"
        )
    rounding = max((torch.finfo(x.dtype).eps for x in module.parameters()
                    if x.is_floating_point() and x.itemsize == 2), default=0.0)  # fmt: skip
    if forward_tolerance is None:
        forward_tolerance = max(FORWARD_TOLERANCE, 4 * rounding)
    if gradient_tolerance is None:
        gradient_tolerance = max(GRADIENT_TOLERANCE, 16 * rounding)
    state = read_values(module, layout)
    silent = without_dropout(converted)
    runs = {}
    for train in (False, True):
        reference = run_torch(module, silent, args, kwargs, train)
        runs[train] = reference, _run_jax(silent, state, args, kwargs, train, reference)
    errors = {train: _node_errors(*run) for train, run in runs.items()}
    # Values in between may cancel, as a difference of two nearly equal ones does.
    limit = max(forward_tolerance, gradient_tolerance)
    first = [
        Difference("train" if train else "eval", node.path, node.operator, node.source, error)
        for train, found in errors.items()
        for node, error in found
        if error > limit
    ]
    reference, computed = runs[True]
    gradients = _gradient_errors(computed.gradients, reference.gradients)
    return Parity(
        modules=_module_rows(errors, gradients),
        output_eval=_output_error(*runs[False]),
        output_train=_output_error(*runs[True]),
        loss_torch=reference.loss,
        loss_jax=float(computed.loss),
        gradients=gradients,
        statistics=_statistics(computed.buffers, reference.buffers, converted),
        first=first[0] if first else None,
        forward_tolerance=forward_tolerance,
        gradient_tolerance=gradient_tolerance,
    )


class _Computed(NamedTuple):
    """The same as a `Reference`, by the converted module."""

    outputs: list[Any]
    loss: Any
    gradients: dict[str, Any]
    buffers: dict[str, Any]
    nodes: dict[str, Any]


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    else:
        args, kwargs = (inputs if isinstance(inputs, tuple) else (inputs,)), {}
    return tuple(tree_map(_tensor, args)), tree_map(_tensor, kwargs)


def _tensor(leaf: Any) -> Any:
    return to_torch(leaf) if is_array(leaf) else leaf


def _run_jax(
    converted: Converted, state: Any, args: Any, kwargs: Any, train: bool, reference: Reference
) -> _Computed:
    def outputs_of(params: Any, buffers: Any, nodes: dict[str, Any]) -> tuple[list[Any], Any]:
        """The output leaves and all buffers, with every value in between if blocks are unrolled."""
        mode, rolled, inputs = converted._graphs.call(train, args, kwargs)
        values = converted._bind_leaves(mode, params, buffers) | inputs
        leaves, changed = mode.graph.run(values, None, nodes.__setitem__)
        if rolled is not None:  # what is trained; the values in between are those of its blocks
            stacked = converted.by_layer(params, buffers)
            leaves, updated = converted._run_rolled(mode, rolled, inputs, *stacked, None)
            return leaves, converted.by_name({**stacked[1], **updated})
        names = converted.layout.leaf_of()
        return leaves, {**buffers, **{names[name].name: value for name, value in changed.items()}}

    def loss_of(params: Any, buffers: Any) -> Any:
        nodes: dict[str, Any] = {}
        leaves, new = outputs_of(params, buffers, nodes)
        total = jnp.zeros((), jnp.float32)
        for number, weight in reference.weights.items():
            leaf = leaves[number]
            real = jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf
            total = total + jnp.sum(real.astype(jnp.float32) * weight)
        arrays = [leaf if is_array(leaf) else None for leaf in leaves]
        return total, (arrays, new, jax.tree.map(_only_array, nodes))

    run = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    (loss, (outputs, buffers, nodes)), gradients = jax.device_get(run(*state))
    return _Computed(outputs, loss, gradients, buffers, nodes)


def _only_array(value: Any) -> Any:
    return value if is_array(value) else None


def _relative(got: Any, want: Any, scale: float = 0.0) -> float:
    """Largest difference relative to the largest value (or `scale`, if that is larger)."""
    kind = np.complex128 if np.iscomplexobj(want) else np.float64
    if np.asarray(got).dtype.kind == "i":  # 32 bits saturate where torch's 64 do (a cast infinity)
        limits = np.iinfo(got.dtype)
        want = np.clip(want, limits.min, limits.max)
    a, b = np.asarray(got).astype(kind), np.asarray(want).astype(kind)
    if a.shape != b.shape:
        return float("inf")
    if not b.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        size = np.abs(b)
    # Beside what masks hold, the lowest number there is or -1e9, every difference would vanish.
    most = float(size[(gap > 0) & np.isfinite(size)].max(initial=0.0))
    ordinary = size[np.isfinite(size) & (size < 1e30) & ((gap > 0) | (size <= 100 * most))]
    scale = max(scale, float(ordinary.max()) if ordinary.size else 0.0, 1e-6)
    return float(np.nan_to_num(gap, nan=np.inf).max()) / scale


Errors = list[tuple[NodeValue, float]]


def _node_errors(reference: Reference, computed: _Computed) -> Errors:
    found: Errors = []
    for node in reference.nodes:
        if node.name not in computed.nodes:
            continue  # nothing that is returned depends on it
        # A tuple of results: what an operator returns for its backward only is left out in JAX.
        pairs = zip(_items(computed.nodes[node.name]), _items(node.value), strict=False)
        values = [_relative(g, w) for g, w in pairs if is_array(g) and is_array(w)]
        if values:
            found.append((node, max(values)))
    return found


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _output_error(reference: Reference, computed: _Computed) -> float:
    pairs = zip(computed.outputs, reference.outputs, strict=True)
    return max((_relative(g, w) for g, w in pairs if is_array(w)), default=0.0)


def _gradient_errors(
    got: Mapping[str, Any], want: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, float]:
    sizes = {n: float(np.abs(w[np.isfinite(w)]).max(initial=0.0)) for n, w in want.items()}
    largest = max(sizes.values(), default=0.0)

    def floor(name: str) -> float:
        rounding = sizes[name] <= ALL_ROUNDING * largest
        return (OF_ROUNDING if rounding else NEGLIGIBLE) * largest

    return {name: _relative(got[name], w, floor(name)) for name, w in want.items()}


def _statistics(got: Mapping[str, Any], want: Any, converted: Converted) -> dict[str, float]:
    names = converted.layout.leaf_of()
    return {name: _relative(got[names[name].name], value) for name, value in want.items()}


def _module_rows(
    errors: Mapping[bool, Errors], gradients: Mapping[str, float]
) -> tuple[ModuleParity, ...]:
    paths: dict[str, None] = {}
    for train in (True, False):  # dropout is called in train mode only
        paths.update(dict.fromkeys(node.path for node, _ in errors[train]))
    owners = {name: name.rpartition(".")[0] or "(root)" for name in gradients}
    paths.update(dict.fromkeys(owners.values()))
    rows = []
    for path in paths:
        values = {t: [e for node, e in found if node.path == path] for t, found in errors.items()}
        own = [error for name, error in gradients.items() if owners[name] == path]
        rows.append(
            ModuleParity(
                path=path,
                num_values=len(values[False]) + len(values[True]),
                eval_error=max(values[False], default=None),
                train_error=max(values[True], default=None),
                gradient_error=max(own, default=None),
            )
        )
    return tuple(rows)


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"
