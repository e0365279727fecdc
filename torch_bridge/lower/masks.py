"""Attention masks that are computed from sizes, recognised as what they are when JAX traces.

transformers computes the mask of every call from `arange`s. Sizes are plain numbers while JAX
traces, so such a mask is computed there, once, by PyTorch's own operators, and compared with what a
fused attention kernel knows by itself: nothing hidden, causal, causal within a window. It is then
no array at all, and blocks need not hand it on.

Where rows were declared to end in their padding (`convert(padding_side="right")`), a mask may read
what says so, too: it is then a pattern and the length of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.lower.refs import Ref, fill, refs, template_of


ATTENTION = "aten.scaled_dot_product_attention.default"
MASK = 3  # its index among the arguments
# Added to a score, less than this leaves no weight in any precision.
_HIDDEN = -3e4
# Element by element, too, although torch does not tag them so.
_POINTWISE = (
    "aten.to.",
    "aten._to_copy.",
    "aten.type_as.",
    "aten.clone.",
    "aten.contiguous.",
    "aten.__and__.",
    "aten.__or__.",
    "aten.where.",
    "aten.masked_fill.",
)
# These go by where elements lie in memory: after one another, in the graph.
_OF_MEMORY = ("aten.view.", "aten.as_strided.")


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees.

    Args:
        causal: none after itself, rows and columns counted from the first.
        window: only so many, the last of which is itself; causal too.
    """

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class MaskOp:
    """One operator of a mask: in PyTorch (`target`) and in JAX (`fn`)."""

    name: str
    target: Any
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Padding:
    """What a mask reads to know which positions are padding: an argument of the module.

    Args:
        name: of the argument in the graph.
        ndim: 2 for `(B, S)`, a value for each position; 1 for `(B)`, the rows' lengths.
        dtype: as the module takes it.
    """

    name: str
    ndim: int
    dtype: torch.dtype

    def of_none(self, rows: int, keys: int) -> Iterator[torch.Tensor]:
        """What it may be where nothing is padding, the likelier first."""
        if self.ndim == 1:
            yield torch.full((1,), keys, dtype=self.dtype).expand(rows)
        else:
            for value in (1, 0):
                yield torch.full((1, 1), value, dtype=self.dtype).expand(rows, keys)


class EndedRows(NamedTuple):
    """What a mask is for rows that end in their padding.

    Args:
        pattern: where nothing is padding.
        lengths: int32 `(B)`, how many keys of a row are none.
        right: bool `(B)`, whether the row's mask is what these two say.
    """

    pattern: Pattern
    lengths: jax.Array
    right: jax.Array


class ComputedMask:
    """A mask as a function of sizes, and perhaps of what says which positions are padding.

    Args:
        ops: what computes it, in order; the last one gives it.
        sizes: names of the sizes that the ops read.
        padding: the array that they read.
    """

    def __init__(
        self, ops: Sequence[MaskOp], sizes: Sequence[str], padding: Padding | None = None
    ) -> None:
        self.ops, self.sizes, self.padding = tuple(ops), tuple(sizes), padding
        self._patterns: dict[tuple[Any, ...], Pattern | None] = {}

    def __repr__(self) -> str:
        """The same for masks that are computed in the same way: how blocks are compared."""
        return self._text

    @cached_property
    def _text(self) -> str:
        number = {name: f"%{n}" for n, name in enumerate(self._given)}
        lines = []
        for op in self.ops:
            named = {name: number[name] for name in refs((op.args, op.kwargs))}
            lines.append(f"{op.target}{fill((op.args, op.kwargs), named)}")
            number[op.name] = f"%{len(number)}"
        return "; ".join(lines)

    @cached_property
    def _given(self) -> tuple[str, ...]:
        return self.sizes if self.padding is None else (*self.sizes, self.padding.name)

    def pattern(self, sizes: Sequence[Any], scores: Sequence[int]) -> Pattern | None:
        """What it is for these sizes, or None if it is none of the known patterns.

        Of a mask that depends on padding: what it is where nothing is padding.

        Args:
            sizes: values of `self.sizes`.
            scores: the shape `(..., T, S)` of what it masks.
        """
        key = tuple(sizes), tuple(scores)
        if key not in self._patterns:
            rows, keys = scores[0], scores[-1]
            given = [()] if self.padding is None else zip(self.padding.of_none(rows, keys))
            found = (self._pattern((*key[0], *more), torch.Size(scores)) for more in given)
            self._patterns[key] = next((one for one in found if one is not None), None)
        return self._patterns[key]

    def _pattern(self, given: Sequence[Any], scores: torch.Size) -> Pattern | None:
        mask = self._in_torch(given)
        fits = torch.broadcast_shapes(mask.shape, scores) == scores
        return pattern_of(mask.expand(scores)) if fits else None

    def array(self, given: Sequence[Any]) -> Any:
        """The mask, computed in JAX of sizes and what says which positions are padding."""
        values = dict(zip(self._given, given, strict=True))
        for op in self.ops:
            values[op.name] = op.fn(*fill(op.args, values), **fill(op.kwargs, values))
        return values[self.ops[-1].name]

    def _in_torch(self, given: Sequence[Any]) -> torch.Tensor:
        values = dict(zip(self._given, given, strict=True))
        last = {name: op for op in self.ops for name in refs((op.args, op.kwargs))}
        with torch.no_grad():
            for op in self.ops:
                args, kwargs = fill(op.args, values), fill(op.kwargs, values)
                values[op.name] = _call(op.target, args, kwargs)
                for name in [name for name in values if last.get(name) is op]:
                    del values[name]
        result: torch.Tensor = values[self.ops[-1].name]
        return result


def pattern_of(mask: torch.Tensor) -> Pattern | None:
    """The pattern of a mask, or None.

    Args:
        mask: `(..., T, S)`, True (or 0 if it is added to the scores) where a key is seen; the same
            for all leading dims.

    Example:
        >>> pattern_of(torch.ones(2, 1, 4, 4, dtype=torch.bool).tril())
        Pattern(causal=True, window=None)
        >>> pattern_of(torch.ones(3, 3).tril())  # adds 1 to scores, which hides nothing
    """
    own = _narrow(_collapsed(mask))  # of a mask for all examples, one
    if own.ndim < 2 or any(n > 1 for n in own.shape[:-2]):
        return None
    if own.dtype == torch.bool:
        seen = own
    elif own.is_floating_point() and bool(((own == 0) | (own <= _HIDDEN)).all()):
        seen = own == 0
    else:
        return None
    if bool(seen.all()):
        return Pattern()
    length, keys = mask.shape[-2:]
    seen = seen.reshape(seen.shape[-2:]).expand(length, keys)
    row, column = torch.arange(length)[:, None], torch.arange(keys)
    causal = column <= row
    if torch.equal(seen, causal):
        return Pattern(causal=True)
    window = int(seen[-1].sum())
    if not window or length != keys or not torch.equal(seen, causal & (column > row - window)):
        return None
    return Pattern(causal=True, window=window)


def rows_of(mask: Any, pattern: Pattern, scores: Sequence[int]) -> EndedRows | None:
    """Of a mask that is this pattern where nothing is padding, the rows' lengths.

    Every value is compared, and none is stored: a row with anything but the pattern, and padding
    at its right end, is not `right`.

    Args:
        mask: True, or 0 if it is added to scores, where a key is seen.
        pattern: what it is where nothing is padding.
        scores: the shape `(B, H, T, S)` of what it masks.
    """
    if len(scores) != 4 or mask.ndim != 4:
        return None
    rows, _, queries, keys = scores
    mask = jnp.broadcast_to(mask, (rows, *mask.shape[1:3], keys))
    seen = mask if mask.dtype == bool else mask == 0
    known = seen | (~seen if mask.dtype == bool else mask <= _HIDDEN)
    # The query at its own position sees a key, if any does.
    lengths = jnp.sum(jnp.any(seen, axis=(1, 2)), axis=-1, dtype=np.int32)
    query = jax.lax.broadcasted_iota(np.int32, (queries, 1), 0)
    key = jax.lax.broadcasted_iota(np.int32, (1, keys), 1)
    expected = key < lengths[:, None, None, None]
    if pattern.causal:
        expected &= key <= query
    if pattern.window is not None:
        expected &= key > query - pattern.window
    return EndedRows(pattern, lengths, jnp.all((seen == expected) & known, axis=(1, 2, 3)))


class Folded(NamedTuple):
    """An attention's mask as a function, and what the attention then reads."""

    mask: ComputedMask
    reads: tuple[torch.fx.Node, ...]


def computed_masks(
    program: torch.export.ExportedProgram,
    resolve: Callable[[torch.fx.Node], Callable[..., Any]],
    padded: bool = False,
) -> dict[torch.fx.Node, Folded]:
    """The mask of each attention in a graph, where it depends on sizes only.

    Args:
        program: the decomposed program.
        resolve: the JAX function of a node.
        padded: whether it may depend on an argument, too, that says where rows end.
    """
    reads: dict[torch.fx.Node, frozenset[torch.fx.Node] | None] = {}
    arguments = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if padded and _may_say_padding(node, arguments):
            reads[node] = frozenset([node])
        else:
            reads[node] = _read(node, reads)
    made: dict[torch.fx.Node, Folded] = {}
    found: dict[torch.fx.Node, Folded] = {}
    for node in program.graph.nodes:
        mask = _mask_of(node)
        read = None if mask is None else reads[mask]
        if mask is not None and read is not None and len(read) <= 1:
            if mask not in made:
                made[mask] = _computed_mask(mask, resolve, read)
            others = (given for given in node.all_input_nodes if given is not mask)
            found[node] = made[mask]._replace(reads=(*others, *made[mask].reads))
    return found


def _read(
    node: torch.fx.Node, reads: dict[torch.fx.Node, frozenset[torch.fx.Node] | None]
) -> frozenset[torch.fx.Node] | None:
    """The arguments that a node depends on besides sizes, or None: on something else, too."""
    if _is_size(node):
        return frozenset()
    of = [reads[n] for n in node.all_input_nodes]
    if not _is_deterministic(node) or any(one is None for one in of):
        return None
    return frozenset().union(*(one for one in of if one is not None))


def _may_say_padding(node: torch.fx.Node, arguments: set[Any]) -> bool:
    """Whether a node is an argument with a value for each position, or the length of each row."""
    given = node.meta.get("val")
    return (
        node.op == "placeholder"
        and node.name in arguments
        and isinstance(given, torch.Tensor)
        and (given.ndim == 2 or (given.ndim == 1 and not given.dtype.is_floating_point))
    )


def _mask_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The mask of an attention, None for other nodes and where there is none."""
    if node.op != "call_function" or str(node.target) != ATTENTION:
        return None
    mask = node.args[MASK] if len(node.args) > MASK else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, torch.fx.Node) else None


def _computed_mask(
    mask: torch.fx.Node,
    resolve: Callable[[torch.fx.Node], Callable[..., Any]],
    read: frozenset[torch.fx.Node],
) -> Folded:
    """The mask, and the nodes of the sizes and of the argument that it reads."""
    ops: dict[torch.fx.Node, MaskOp] = {}
    sizes: dict[torch.fx.Node, None] = {}
    ancestors = {mask}
    for node in reversed(mask.graph.nodes):
        if node in ancestors and not _is_size(node):
            ancestors.update(node.all_input_nodes)
    for node in mask.graph.nodes:
        if node in ancestors and _is_size(node):
            sizes[node] = None
        elif node in ancestors and node not in read:
            args, kwargs = template_of(node.args, _on_host), template_of(node.kwargs, _on_host)
            ops[node] = MaskOp(node.name, node.target, resolve(node), args, kwargs)
    given = [Padding(n.name, n.meta["val"].ndim, n.meta["val"].dtype) for n in read]
    folded = ComputedMask(tuple(ops.values()), tuple(n.name for n in sizes), *given)
    return Folded(folded, (*sizes, *read))


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, torch.device):  # of the example, perhaps `meta`
        return torch.device("cpu")
    return value


def _is_size(node: torch.fx.Node) -> bool:
    numbers = torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
    return node.op == "call_function" and isinstance(node.meta.get("val"), numbers)


def _is_deterministic(node: torch.fx.Node) -> bool:
    """Whether a node computes one tensor, the same one each time."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _call(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """One operator; what is the same along a dim is computed and stored once."""
    elementwise = torch.Tag.pointwise in target.tags or str(target).startswith(_POINTWISE)
    if not elementwise:
        if str(target).startswith(_OF_MEMORY):
            args = (args[0].contiguous(), *args[1:])
        result: torch.Tensor = target(*args, **kwargs)
        return _collapsed(result)
    shape = torch.broadcast_shapes(*(x.shape for x in _tensors((args, kwargs))))
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, _narrow, (args, kwargs))
    narrow: torch.Tensor = target(*args, **kwargs)
    return narrow.expand(shape)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """With size 1 in the dims along which it is one value repeated in memory."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _collapsed(x: torch.Tensor) -> torch.Tensor:
    """The same values, with those that are equal along a whole dim repeated without memory."""
    own = _narrow(x)
    for dim, size in enumerate(own.shape):
        first = own.narrow(dim, 0, min(size, 1))
        if size > 1 and bool((own == first).all()):
            own = first
    return own.expand(x.shape)
