"""Masks that follow from sizes alone, as indices: `sim[~torch.eye(n, dtype=torch.bool)]`.

How many places a mask has depends on its values, and so does the shape of what it picks, which XLA
cannot compile. Of a mask that a forward makes of sizes the values are known while it is traced with
these sizes, and its places are numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_bridge.export.stand_ins.literals import LITERALS


# By name, a method of a tensor's or not: what makes a tensor of numbers; of another one's shape and
# dtype; and of the values of others.
_OF_NUMBERS = frozenset("arange eye full ones tensor zeros".split())  # noqa: SIM905
_OF_SHAPES = frozenset(
    "full_like new_full new_ones new_zeros ones_like zeros_like".split()  # noqa: SIM905
)
_OF_VALUES = frozenset(
    """
    add and bitwise_and bitwise_not bitwise_or bitwise_xor block_diag bool broadcast_to cat clone
    contiguous diag eq expand fill_diagonal flatten flip float floor_divide ge getitem gt int invert
    kron le logical_and logical_not logical_or logical_xor long lt mod mul ne or permute remainder
    repeat repeat_interleave reshape roll rsub squeeze stack sub tile t to transpose tril triu
    unsqueeze view xor
    """.split()  # noqa: SIM905
)
_NAMED = _OF_NUMBERS | _OF_SHAPES | _OF_VALUES
_TURNED = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT")}
_PLAIN = (int, float, type(None), type(...), torch.dtype, torch.memory_format, torch.layout)
_FREE = (torch.SymInt, torch.SymFloat, torch.SymBool)


class FreeSizesError(Exception):
    """The places of a mask are known where sizes are fixed, and these are free."""


@dataclass(frozen=True)
class _Made:
    """How a tensor came about: a function, and its arguments with such in place of tensors."""

    function: Callable[..., Any]
    arguments: Any
    free: bool  # whether it takes sizes that are not fixed

    def value(self, computed: dict[int, torch.Tensor]) -> torch.Tensor:
        """The tensor, where some are computed (by id)."""

        def known(leaf: Any) -> Any:  # a copy: functions may write to it
            return leaf.value(computed).clone() if isinstance(leaf, _Made) else leaf

        if id(self) not in computed:
            args, kwargs = torch_pytree.tree_map(known, self.arguments)
            computed[id(self)] = self.function(*args, **kwargs)
        return computed[id(self)]


class KnownMasks:
    """The tensors of one export that follow from sizes alone."""

    def __init__(self) -> None:
        # By id: the tensor, so that no other has its id; the version of its memory then, as what is
        # written there since is not known; and how it came about.
        self._known: dict[int, tuple[torch.Tensor, int, _Made]] = {}
        self.table: dict[Any, Callable[..., Any]] = {
            torch.masked_select: self._selected, torch.Tensor.masked_select: self._selected
        }  # fmt: skip

    def made_by(self, function: Any, args: Any, kwargs: Any) -> _Made | None:
        """How what a function is about to give comes about, if that is known."""
        name = getattr(function, "__name__", "").strip("_")
        free = False

        def known(leaf: Any) -> Any:
            nonlocal free
            if isinstance(leaf, torch.Tensor | _Made):
                made = leaf if isinstance(leaf, _Made) else self._of(leaf)
                if made is None:
                    raise _UnknownError
                free = free or made.free
                return made
            if isinstance(leaf, slice):
                return slice(*map(known, (leaf.start, leaf.stop, leaf.step)))
            if isinstance(leaf, str | torch.device):
                return "cpu"
            free = free or isinstance(leaf, _FREE)
            if not isinstance(leaf, _PLAIN + _FREE):
                raise _UnknownError
            return leaf

        if args and isinstance(args[0], torch.Tensor) and self._of(args[0]) is None:  # most calls
            if name not in _OF_SHAPES:
                return None
            args = (_of_shape(args[0]), *args[1:])
        elif name not in _NAMED and function not in _TURNED:
            return None
        try:
            arguments = torch_pytree.tree_map(known, (args, kwargs))
        except _UnknownError:
            return None
        return _Made(function, arguments, free)

    def note(self, tensor: Any, made: _Made) -> None:
        """Notes how a tensor came about."""
        if isinstance(tensor, torch.Tensor):
            self._known[id(tensor)] = tensor, tensor._version, made

    def places(self, index: Any) -> Any:
        """An index with numbers of places for masks whose values are known.

        Raises:
            FreeSizesError: they would be, if sizes were fixed.
        """
        if not isinstance(index, tuple):
            index = (index,)
        found: list[Any] = []
        for one in index:
            made = self._of(one) if isinstance(one, torch.Tensor) and one.ndim else None
            if made is None or one.dtype is not torch.bool:
                found.append(one)
                continue
            if made.free:
                raise FreeSizesError
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                numbers = made.value({}).nonzero().T.tolist()
            tensor = LITERALS[torch.tensor]
            found += [tensor(each, dtype=torch.int64, device=one.device) for each in numbers]
        return tuple(found) if len(found) != 1 else found[0]

    def _selected(self, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = self._of(mask)
        if made is None:
            return torch.masked_select(input, mask)
        values, alike = torch.broadcast_tensors(input, mask)
        self.note(alike, _Made(torch.broadcast_to, ((made, tuple(alike.shape)), {}), made.free))
        found: torch.Tensor = values[self.places(alike)]
        return found

    def _of(self, tensor: torch.Tensor) -> _Made | None:
        known = self._known.get(id(tensor))
        return known[2] if known and known[1] == tensor._version else None


def _of_shape(x: torch.Tensor) -> _Made:
    """A tensor of another's shape and dtype, whatever it holds."""
    free = any(isinstance(size, _FREE) for size in x.shape)
    return _Made(torch.empty, ((tuple(x.shape),), {"dtype": x.dtype}), free)


class _UnknownError(Exception):
    """A value is known only where a program runs."""
