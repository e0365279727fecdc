"""Packed sequences, traced as padded ones with the lengths of their rows.

`pack_padded_sequence` gives arrays whose sizes depend on the lengths' values, which no compiled
program has. Here a packed sequence is its padded batch, positions first, and each recurrent layer
is told how long each row is: one operator, whose states stop at a row's end. Between packing and
unpacking nothing but recurrent layers may read it: other operations would see the padding.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import rnn as layers
from torch.nn.utils import rnn
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError
from torch_bridge.export.stand_ins.literals import read
from torch_bridge.export.stand_ins.replacement import StandIn, replaced


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_KINDS = {
    torch._VF.lstm: "lstm",
    torch._VF.gru: "gru",
    torch._VF.rnn_tanh: "rnn_tanh",
    torch._VF.rnn_relu: "rnn_relu",
}


def _packed_rnn(
    kind: str, x: torch.Tensor, lengths: torch.Tensor, states: list[torch.Tensor],
    params: list[torch.Tensor], *options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """PyTorch's own layer, on what is packed for it. Shapes: x `(T, N, I)`, lengths `(N)`."""
    packed = rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
    order: Any = packed.sorted_indices
    back: Any = packed.unsorted_indices
    hx: Any = [state.index_select(1, order) for state in states]
    run = getattr(torch._VF, kind)
    found = run(packed.data, packed.batch_sizes, hx if kind == "lstm" else hx[0], params, *options)
    out = rnn.PackedSequence(found[0], packed.batch_sizes, order, back)
    padded, _ = rnn.pad_packed_sequence(out, total_length=x.shape[0])
    return [padded, *(state.index_select(1, back) for state in found[1:])]


def _shapes(
    kind: str, x: torch.Tensor, lengths: torch.Tensor, states: list[torch.Tensor],
    params: list[torch.Tensor], *options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    directions = 2 if options[-1] else 1
    out = x.new_empty((*x.shape[:2], directions * states[0].shape[-1]))
    return [out, *(torch.empty_like(state) for state in states)]


_LIBRARY.define(
    "packed_rnn(str kind, Tensor x, Tensor lengths, Tensor[] states, Tensor[] params,"
    " bool has_biases, int num_layers, float dropout, bool train, bool bidirectional) -> Tensor[]"
)
_LIBRARY.impl("packed_rnn", _packed_rnn, "CompositeExplicitAutograd")
torch.library.register_fake("torch_bridge::packed_rnn", _shapes, lib=_LIBRARY)


_SAME_OF_ANY = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("dtype", "device"))


@dataclass(frozen=True)
class _Packed:
    """What stands for a `PackedSequence`. Shapes: padded `(T, N, I)`, lengths `(N)`.

    `data` and `sizes` have its fields' places; recurrent layers hand `sizes` on with new data.
    PyTorch raises where the lengths are not `valid`; a program cannot, and gives NaN.
    """

    padded: torch.Tensor
    lengths: torch.Tensor
    valid: torch.Tensor
    data: torch.Tensor
    sizes: torch.Tensor


def _called_by_layers() -> bool:
    """Whether what called an operation is PyTorch's recurrent layers, or `torch.export` itself."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    name = str(frame.f_globals.get("__name__"))
    return name in (rnn.__name__, layers.__name__) or name.startswith("torch._export.")


class PackedSequences:
    """What is packed while one module is exported."""

    def __init__(self) -> None:
        # By ids of `data` and `sizes`; both are held, so that no other tensor gets the same ones.
        self._data: dict[int, _Packed] = {}
        self._sizes: dict[int, _Packed] = {}
        self.table: dict[Any, Callable[..., Any]] = {
            torch._VF._pack_padded_sequence: self._pack,
            torch._VF._pad_packed_sequence: self._pad,
            torch.Tensor.__getitem__: self._index,
            **{function: self._layer(function, kind) for function, kind in _KINDS.items()},
        }

    @contextlib.contextmanager
    def told_to_layers(self) -> Iterator[None]:
        """Recurrent layers check the sizes of states against the padded batch."""

        def checked(own: Callable[..., Any]) -> Callable[..., Any]:
            def expected(layer: Any, input: torch.Tensor, batch_sizes: Any) -> Any:
                packed = self._sizes.get(id(batch_sizes))
                if packed is None:
                    return own(layer, input, batch_sizes)
                x = packed.padded
                return own(layer, x.transpose(0, 1) if layer.batch_first else x, None)

            return expected

        of = ((layers.RNNBase, "get_expected_hidden_size"), (layers.LSTM, "get_expected_cell_size"))
        own: list[StandIn] = [(kind, name, checked(vars(kind)[name])) for kind, name in of]
        with replaced(own):
            yield

    @contextlib.contextmanager
    def kept_inside(self, module: torch.nn.Module) -> Iterator[None]:
        """What a module returns is no packed sequence, nor a part of one."""

        def results(called: torch.nn.Module, _: Any, output: Any) -> None:
            if called is module:
                self.require_unread(results, output)

        hook = torch.nn.modules.module.register_module_forward_hook(results)
        try:
            yield
        finally:
            hook.remove()

    def require_unread(self, function: Any, values: Any) -> None:
        """Raises `ConversionError` if an operation reads what stands for a packed sequence.

        Args:
            function: the operation.
            values: its arguments.
        """
        name = getattr(function, "__name__", str(function))
        # PyTorch's own layers check sizes and dtypes. Anybody else would take the padded size for
        # that of the packed values, or get a view of them (`.T`).
        if not self._data or function in _SAME_OF_ANY:
            return
        if name in ("__get__", "size", "dim") and _called_by_layers():
            return
        for value in torch_pytree.tree_leaves(values):
            if id(value) in self._data or id(value) in self._sizes:
                raise ConversionError(
                    f"{name} of a packed sequence: how many values it holds depends on the lengths'"
                    " values, which XLA cannot compile. Recurrent layers may read it; for all else"
                    " say pad_packed_sequence(..., total_length=x.shape[1]), or compute it before"
                    " packing, and leave padding out by torch.arange(x.shape[1]) < lengths[:, None]"
                )

    def _made(
        self, padded: torch.Tensor, lengths: torch.Tensor, valid: torch.Tensor, sizes: torch.Tensor
    ) -> torch.Tensor:
        packed = _Packed(padded, lengths, valid, padded.flatten(0, 1), sizes)
        self._data[id(packed.data)] = self._sizes[id(sizes)] = packed
        return packed.data

    def _pack(
        self, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes, x = lengths.new_zeros((1,)), input.transpose(0, 1) if batch_first else input
        inside = (lengths >= 1) & (lengths <= x.shape[0])
        valid = (inside & (lengths == lengths.cummin(0).values)).all()  # sorted, the longest first
        return self._made(x, lengths, valid, sizes), sizes

    def _pad(
        self, data: Any, sizes: Any, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self._data.get(id(data))
        if packed is None:
            return torch._VF._pad_packed_sequence(
                data, sizes, batch_first, padding_value, total_length
            )
        x, longest = packed.padded, packed.padded.shape[0]
        if total_length < longest:  # 1, the size of `sizes`: none was given
            given = "is not given" if total_length == 1 else f"is {total_length}"
            raise ConversionError(
                f"pad_packed_sequence: total_length {given}, so that the number of positions would"
                " be that of the longest row, which depends on values; XLA cannot compile that."
                " Expected at least that of the batch which was packed: total_length=x.shape[1]"
                " with batch_first=True, x.shape[0] without"
            )
        steps = torch.arange(longest, device=packed.lengths.device).unsqueeze(1)
        inside = (steps < packed.lengths).reshape(*x.shape[:2], *[1] * (x.ndim - 2))
        x = torch.where(packed.valid, torch.where(inside, x, padding_value), torch.nan)
        if total_length > longest:
            x = torch.cat([x, x.new_full((total_length - longest, *x.shape[1:]), padding_value)])
        return (x.transpose(0, 1) if batch_first else x), packed.lengths

    def _index(self, input: torch.Tensor, index: Any) -> Any:
        packed = self._sizes.get(id(input))
        if packed is not None and isinstance(index, int) and index == 0:
            return packed.padded.shape[1]  # every row has a first position
        self.require_unread(torch.Tensor.__getitem__, (input, index))
        return read(input, index)

    def _layer(self, function: Any, kind: str) -> Callable[..., Any]:
        def layer(data: Any, sizes: Any, *rest: Any) -> Any:
            packed = self._data.get(id(data))
            if packed is None:
                return function(data, sizes, *rest)
            hx, params, *options = rest
            states = list(hx) if kind == "lstm" else [hx]
            out, *states = torch.ops.torch_bridge.packed_rnn(
                kind, packed.padded, packed.lengths, states, list(params), *options
            )
            states = [torch.where(packed.valid, state, torch.nan) for state in states]
            return (self._made(out, packed.lengths, packed.valid, packed.sizes), *states)

        return layer
