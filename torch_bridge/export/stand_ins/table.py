"""What torch.export cannot trace although its sizes are fixed, traced in another form.

Some of PyTorch's own functions ask for a value on their way (a check of an argument, a hint, a
count of batches), or have no rule for their shapes. While a module is exported, the same in other
operators stands in for each of them, or one operator of this package that has a lowering.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import vmap
from torch.nn import functional as F
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fzero.errors import ConversionError
from torch_bridge.export.stand_ins.adapters import adapter_stand_ins
from torch_bridge.export.stand_ins.arrays import OF_ARRAYS
from torch_bridge.export.stand_ins.assigned import ASSIGNMENTS, assignments_written
from torch_bridge.export.stand_ins.causal_masks import causal_masks
from torch_bridge.export.stand_ins.checks_of_values import (
    NUMBERS,
    note_of_a_trace,
    note_of_a_try,
    truth_of,
)
from torch_bridge.export.stand_ins.distributions import unchecked_distributions
from torch_bridge.export.stand_ins.embedding_norms import RewrittenRows
from torch_bridge.export.stand_ins.experts import experts_stand_ins
from torch_bridge.export.stand_ins.gradient_modes import regions_without_gradients
from torch_bridge.export.stand_ins.gradients_asked import gradients_asked
from torch_bridge.export.stand_ins.known_masks import KnownMasks
from torch_bridge.export.stand_ins.literals import LITERALS, OF_SIZES
from torch_bridge.export.stand_ins.older_experts import older_experts
from torch_bridge.export.stand_ins.packed_sequences import PackedSequences
from torch_bridge.export.stand_ins.random_numbers import (
    RANDOM_NUMBERS,
    drawn_whole,
    refuse_own_generator,
    unseeded,
)
from torch_bridge.export.stand_ins.replacement import StandIn, replaced
from torch_bridge.export.stand_ins.slopes import functional_gradients, record_grad
from torch_bridge.export.stand_ins.state_spaces import state_space_stand_ins
from torch_bridge.export.stand_ins.strides import STRIDES
from torch_bridge.export.stand_ins.synchronized_norms import synchronized_batch_norms


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_TABLE: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: record_grad,
    torch.Tensor.random_: drawn_whole,
    torch.Tensor.__bool__: truth_of,
    **LITERALS,
    **STRIDES,
}


def _instead_of(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        _TABLE.update(dict.fromkeys(functions, fn))
        return fn

    return add


class _Mode(TorchFunctionMode):
    def __init__(
        self, packed: PackedSequences, rows: RewrittenRows, asked: dict[Any, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.packed, self.rows, self.masks = packed, rows, KnownMasks()
        self.table = {**_TABLE, **packed.table, **rows.table, **self.masks.table, **asked}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self.packed.table:
            self.packed.require_unread(func, (args, kwargs))
        args, kwargs = self.rows.as_they_are((args, kwargs or {}))
        refuse_own_generator(kwargs)
        note_of_a_try(func)
        made = self.masks.made_by(func, args, kwargs)
        if func is torch.Tensor.__getitem__:
            args = (args[0], self.masks.places(args[1]))
        try:
            out = self.table.get(func, func)(*args, **kwargs)
        except Exception as error:
            note_of_a_trace(error)
            raise
        if made is not None:
            self.masks.note(out, made)
        if isinstance(func, torch._ops.HigherOrderOperator) and not torch.is_grad_enabled():
            # torch.export forgets a no_grad region around what has graphs of its own.
            detach = torch.Tensor.detach
            return torch.utils._pytree.tree_map_only(torch.Tensor, detach, out)
        return out


@contextlib.contextmanager
def stand_ins(module: torch.nn.Module) -> Iterator[None]:
    """While a module is exported: each function of the table is traced as what stands for it."""
    forward, fast = _BatchNorm.forward, torch.backends.mha.get_fastpath_enabled()

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.track_running_stats and self.momentum is None:
            return _batch_norm_of_all(self, x)
        return forward(self, x)

    def hint(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
        """No more than that: the mask itself is applied either way."""
        return is_causal is True

    unmapped, packed = vmap._maybe_remove_batch_dim, PackedSequences()
    rows = RewrittenRows(module.training)

    def moved(name: str, x: Any, level: int, count: int, dim: int | None) -> Any:
        """Rows first, then a move of their own: PyTorch would move them unseen by torch.export."""
        found = unmapped(name, x, level, count, None if dim is None else 0)
        return found.movedim(0, dim) if dim else found

    own: tuple[StandIn, ...] = (
        (_BatchNorm, "forward", counted),
        (transformer, "_detect_is_causal_mask", hint),
        (vmap, "_maybe_remove_batch_dim", moved),
        (torch.nn.Module, "to", _to_what_it_is),
        (torch.nn.Parameter, "__deepcopy__", _deep_copy),
        *ASSIGNMENTS,
        *RANDOM_NUMBERS,
        OF_SIZES,
        *NUMBERS,
        *OF_ARRAYS,
        *regions_without_gradients(),
        *((torch.nn.Module, name, _cast_to(dtype)) for name, dtype in _CASTS.items()),
    )
    # Inference's own kernel, which takes ragged tensors where there is padding.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            gradients_asked(module.training) as asked, _Mode(packed, rows, asked),
            packed.told_to_layers(), packed.kept_inside(module),
            replaced(own), experts_stand_ins(), older_experts(), state_space_stand_ins(),
            adapter_stand_ins(), causal_masks(), functional_gradients(), unseeded(),
            synchronized_batch_norms(), assignments_written(module), unchecked_distributions(),
        ):  # fmt: skip
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _to_what_it_is(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Module.to` within a forward, which torch.export cannot trace even where nothing changes."""
    _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    named = itertools.chain(self.named_parameters(), self.named_buffers())
    others = [name for name, t in named if dtype and t.is_floating_point() and t.dtype != dtype]
    if others:
        raise ConversionError(
            f"the forward casts parameters or buffers of a {type(self).__name__} to {dtype}"
            f" ({', '.join(others[:3])}), and PyTorch keeps them so from its first call on. Call"
            " .to(dtype) on that part once before tb.convert, or cast what it computes with."
        )
    return self


# Methods of a module that cast it.
_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip


def _cast_to(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda self: _to_what_it_is(self, dtype)


def _batch_norm_of_all(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`BatchNorm(momentum=None)`: running statistics are averages over all batches so far."""
    self._check_input_dim(x)
    out = F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
    with torch.no_grad():
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        rest = [d for d in range(x.ndim) if d != 1]
        var, mean = torch.var_mean(x.to(self.running_mean.dtype), rest)
        self.running_mean.copy_(self.running_mean + (mean - self.running_mean) * share)
        self.running_var.copy_(self.running_var + (var - self.running_var) * share)
    return out


@_instead_of(torch.Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(x: torch.Tensor) -> torch.Tensor:
    return x.detach()


@_instead_of(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(x: torch.Tensor, value: torch.Tensor) -> None:
    raise ConversionError(
        "the forward assigns to .data of a tensor, of which torch.export records nothing. Compute a"
        " new tensor, or write with x.copy_(value) under torch.no_grad()."
    )


@_instead_of(torch.Tensor.requires_grad_)
def _requires_grad(x: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    if isinstance(x, torch.nn.Parameter) and x.requires_grad != requires_grad:
        raise ConversionError(
            f"the forward sets requires_grad={requires_grad} of a parameter {list(x.shape)}, which"
            " PyTorch keeps from its first call on and torch.export does not record. Set it before"
            " tb.convert; .detach() keeps the gradient from one use of a parameter."
        )
    return x.requires_grad_(requires_grad)


@_instead_of(torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _set_requires_grad(x: torch.Tensor, value: bool) -> None:
    _requires_grad(x, value)


@_instead_of(F.gaussian_nll_loss)
def _gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: Any, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    if isinstance(var, float):
        var = var * torch.ones_like(input)
    elif var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    # The bound has no gradient of its own.
    var = torch.where(var < eps, var + (eps - var).detach(), var)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return _reduced(loss, reduction)


def _reduced(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


@_instead_of(*([F.linear_cross_entropy] if hasattr(F, "linear_cross_entropy") else []))
def _linear_cross_entropy(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *,
    linear_bias: Any = None, ignore_index: int | None = None, options: Any = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    sizes = linear_weight.shape[1:-1]
    weight = linear_weight.reshape(-1, linear_weight.shape[-1])
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(input, weight, bias)
    if sizes:
        logits = logits.reshape(*logits.shape[:-1], linear_weight.shape[0], *sizes)
    if ignore_index is not None:
        kwargs["ignore_index"] = ignore_index
    return F.cross_entropy(logits, target, **kwargs)


@_instead_of(torch.take, torch.Tensor.take)
def _take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return input.reshape(-1)[index.reshape(-1)].reshape(index.shape)


@_instead_of(torch.clamp, torch.clip, torch.Tensor.clamp, torch.Tensor.clip)
def _clamp(input: torch.Tensor, min: Any = None, max: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.clamp(input, *_bounds(input, min, max), **kwargs)


@_instead_of(torch.clamp_, torch.clip_, torch.Tensor.clamp_, torch.Tensor.clip_)
def _clamp_in_place(input: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    return torch.clamp_(input, *_bounds(input, min, max))


def _bounds(input: torch.Tensor, *bounds: Any) -> tuple[Any, ...]:
    """A number beside a tensor of one: PyTorch takes both for numbers, and asks the tensor."""
    tensors = [b for b in bounds if isinstance(b, torch.Tensor)]
    if len(tensors) != 1 or tensors[0].ndim or tensors[0].requires_grad or None in bounds:
        return bounds
    floats = any(isinstance(b, float) for b in bounds) or tensors[0].is_floating_point()
    dtype = torch.result_type(input.new_empty(1), 1.0 if floats else 1)
    return tuple(torch.as_tensor(b).to(dtype) for b in bounds)


@_instead_of(torch.Tensor.__deepcopy__)
def _deep_copy(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Other memory, which nothing of the original learns of."""
    if not x.is_leaf:
        return x.__deepcopy__(memo)  # which PyTorch refuses
    return memo.setdefault(id(x), x.detach().clone())


@_instead_of(torch.Tensor.polygamma_)
def _polygamma_in_place(x: torch.Tensor, n: int) -> torch.Tensor:
    """PyTorch's own functionalisation does not know it."""
    return x.copy_(torch.polygamma(n, x))


@_instead_of(torch.resize_as_, torch.Tensor.resize_as_)
def _resize_as_(input: torch.Tensor, the_template: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    if input.shape == the_template.shape:  # nothing changes, of which torch.export has no trace
        return input
    return torch.ops.aten.resize_as_(input, the_template, **kwargs)


@_instead_of(torch.linalg.cond)
def _cond(A: torch.Tensor, p: Any = None) -> torch.Tensor:
    """With norms of an inverse PyTorch counts elements, which are not known while it is traced."""
    if p not in ("fro", "nuc"):
        return torch.linalg.cond(A, p)
    inverse, info = torch.linalg.inv_ex(A)
    found = torch.linalg.matrix_norm(A, p) * torch.linalg.matrix_norm(inverse, p)
    return torch.where(info == 0, found, torch.inf)


@_instead_of(torch.conv_tbc)
def _conv_tbc(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, pad: int = 0
) -> torch.Tensor:
    """Shapes: input `(time, rows, C)`, weight `(kernel, C, O)`."""
    rows, kernel = input.permute(1, 2, 0), weight.permute(2, 1, 0)
    return torch.nn.functional.conv1d(rows, kernel, bias, padding=pad).permute(2, 0, 1)


@_instead_of(torch.cov, torch.Tensor.cov)
def _cov(
    input: torch.Tensor, *, correction: int = 1, fweights: Any = None, aweights: Any = None
) -> torch.Tensor:
    """Without the checks of the weights' values."""
    x = input if input.ndim > 1 else input.reshape(1, -1)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    weights = [w for w in (fweights, aweights) if w is not None]
    if not weights:
        y = x - x.mean(1, keepdim=True)
        return (y @ y.mH / max(x.shape[1] - correction, 0)).squeeze()
    w = math.prod(weights[1:], start=weights[0])
    total = w.sum()
    y = x - (x * w).sum(1, keepdim=True) / total
    lost = correction if aweights is None else correction * (w * aweights).sum() / total
    return ((y * w) @ y.mH / (total - lost).clamp(min=0)).squeeze()


@_instead_of(torch.corrcoef, torch.Tensor.corrcoef)
def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    c = _cov(input)
    if c.ndim == 0:
        return c / c
    spread = (c.diag().real if c.is_complex() else c.diag()).sqrt()
    c = c / spread.unsqueeze(1) / spread.unsqueeze(0)
    if c.is_complex():
        return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1))
    return c.clip(-1, 1)


@_instead_of(torch.linalg.lstsq)
def _lstsq(
    A: torch.Tensor, B: torch.Tensor, *, rcond: float | None = None, driver: str | None = None
) -> Any:
    rows, columns = A.shape[-2:]
    vectors = B.ndim == A.ndim - 1 and B.shape == A.shape[:-1] and B.ndim != A.ndim
    right = B.unsqueeze(-1) if vectors else B
    cut = None if driver == "gels" else rcond
    solution = torch.linalg.pinv(A, rtol=cut) @ right
    residuals = solution.new_empty((0,))
    if rows > columns and driver in ("gels", "gelsd", "gelss"):
        residuals = (A @ solution - right).abs().square().sum(-2)
    # The driver of full ranks does not ask for one.
    empty = A.new_empty((0,), dtype=torch.int64)
    rank = empty if driver == "gels" else torch.linalg.matrix_rank(A, rtol=cut)
    sizes = torch.linalg.svdvals(A) if driver in ("gelsd", "gelss") else A.real.new_empty((0,))
    made = (solution.squeeze(-1) if vectors else solution, residuals, rank, sizes)
    kinds: Any = torch.return_types
    return kinds.linalg_lstsq(made)


@_instead_of(torch.combinations)
def _combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    rows = range(int(input.shape[0]))
    kind = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    indices = torch.tensor(list(kind(rows, r)), dtype=torch.int64).reshape(-1, r)
    return input[indices] if r else input[:0]


_LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths,"
    " int blank, bool zero_infinity) -> Tensor"
)


def _ctc_shape(log_probs: torch.Tensor, targets: torch.Tensor, *rest: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


def _ctc_losses(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any,
    blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's own, with which `parity` compares."""
    lengths = input_lengths, target_lengths
    return torch.ctc_loss(log_probs, targets, *lengths, blank, 0, zero_infinity)


_LIBRARY.impl("ctc_loss", _ctc_losses, "CompositeExplicitAutograd")
torch.library.register_fake("torch_bridge::ctc_loss", _ctc_shape, lib=_LIBRARY)


@_instead_of(F.ctc_loss, torch.ctc_loss)
def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any,
    blank: int = 0, reduction: Any = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    lengths = [
        n if isinstance(n, torch.Tensor) else torch.tensor(n, dtype=torch.int64)
        for n in (input_lengths, target_lengths)
    ]
    losses = torch.ops.torch_bridge.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    reduction = reduction if isinstance(reduction, str) else ("none", "mean", "sum")[reduction]
    if reduction == "mean":
        losses = losses / lengths[1].reshape(losses.shape).clamp(min=1).to(losses.dtype)
    return _reduced(losses, reduction)


@_instead_of(torch.Tensor.numel)
def _numel(input: torch.Tensor) -> int:
    """Under `torch.vmap` a product: PyTorch has no count of a row of a size that is free."""
    batched = torch._C._functorch.is_batchedtensor(input)
    return math.prod(input.shape) if batched else input.numel()


@_instead_of(torch.narrow, torch.Tensor.narrow)
def _narrow(input: torch.Tensor, dim: int, start: Any, length: int) -> torch.Tensor:
    if isinstance(start, torch.Tensor):  # negative ones count from the end
        first = torch.where(start < 0, start + input.shape[dim], start)
        return input.index_select(dim, first + torch.arange(length))
    return torch.ops.aten.narrow(input, dim, start, length)


def _edges(x: torch.Tensor, bins: Sequence[int], range_: Sequence[float] | None) -> list[Any]:
    """Equal bins of every column, over its values where no range is given."""
    found = []
    for i, count in enumerate(bins):
        if range_ is not None:
            low, high = (x.new_tensor(v) for v in range_[2 * i : 2 * i + 2])
        else:
            low, high = x[:, i].min(), x[:, i].max()
        flat = low == high
        low, high = torch.where(flat, low - 0.5, low), torch.where(flat, high + 0.5, high)
        steps = torch.arange(count + 1, dtype=x.dtype) / count
        found.append(torch.cat([low + (high - low) * steps[:-1], high.reshape(1)]))
    return found


def _counted(x: torch.Tensor, edges: Sequence[torch.Tensor], weight: Any, density: bool) -> Any:
    """How many rows (or how much weight) each box of the edges holds."""
    sizes = [e.shape[0] - 1 for e in edges]
    index = torch.zeros(x.shape[0], dtype=torch.int64)
    inside = torch.ones(x.shape[0], dtype=torch.bool)
    for i, (bounds, size) in enumerate(zip(edges, sizes, strict=True)):
        column = x[:, i].contiguous()
        inside = inside & (column >= bounds[0]) & (column <= bounds[-1])
        bin_ = (torch.searchsorted(bounds.contiguous(), column, right=True) - 1).clamp(0, size - 1)
        index = index * size + bin_
    amounts = torch.ones_like(x[:, 0]) if weight is None else weight.reshape(-1)
    amounts = torch.where(inside, amounts, torch.zeros_like(amounts))
    counts = x.new_zeros(math.prod(sizes)).index_add(0, index, amounts).reshape(sizes)
    if density:
        counts = counts / counts.sum()
        for i, bounds in enumerate(edges):
            shape = [1] * len(sizes)
            shape[i] = sizes[i]
            counts = counts / bounds.diff().reshape(shape)
    return counts


@_instead_of(torch.histogramdd)
def _histogramdd(
    input: torch.Tensor, bins: Any, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    x = input.detach().reshape(-1, input.shape[-1])
    if isinstance(bins, int):
        bins = [bins] * x.shape[-1]
    tensors = isinstance(bins[0], torch.Tensor)
    edges = list(bins) if tensors else _edges(x, bins, range)
    return torch.return_types.histogramdd((_counted(x, edges, weight, density), tuple(edges)))


@_instead_of(torch.histogram, torch.Tensor.histogram)
def _histogram(
    input: torch.Tensor, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False
) -> Any:
    x = input.detach().reshape(-1, 1)
    edges = [bins] if isinstance(bins, torch.Tensor) else _edges(x, [bins], range)
    return torch.return_types.histogram((_counted(x, edges, weight, density), edges[0]))
