"""How far the results of ATen's operators on whole numbers can go, from the ranges of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


Range = tuple[int, int]
RangeOf = Callable[[Any], Range | None]
Rule = Callable[[torch.fx.Node, RangeOf], Any]
ALL: Range = (-(2**63), 2**63 - 1)
SIZE: Range = (-(2**29), 2**29)  # a size, or what is computed from sizes
INDEX: Range = (-1, 2**30)


def hull(*ranges: Range | None) -> Range:
    """The least range with all of these; what is None (not given) does not count."""
    given = [one for one in ranges if one is not None]
    if not given:
        return ALL
    return min(low for low, _ in given), max(high for _, high in given)


def rule_of(operator: str) -> Rule | None:
    """The rule for an operator such as `add.Tensor`, or None."""
    name, _, overload = operator.partition(".")
    return _RULES.get(f"{name}.{overload}") or _RULES.get(name.removesuffix("_copy"))


def _corners(combine: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """The range of what is monotone in each of two numbers."""

    def of(a: Range, b: Range) -> Range:
        found = [combine(x, y) for x in a for y in b]
        return min(found), max(found)

    return of


_SUM = _corners(lambda x, y: x + y)
_DIFFERENCE = _corners(lambda x, y: x - y)
_PRODUCT = _corners(lambda x, y: x * y)
_LEAST = _corners(min)
_MOST = _corners(max)


def _pair(of: Callable[[Range, Range], Range]) -> Rule:
    """A rule for an operator of two numbers, of which the second may be multiplied by `alpha`."""

    def rule(node: torch.fx.Node, range_of: RangeOf) -> Range:
        a, b = _known(range_of(node.args[0])), _known(range_of(node.args[1]))
        return of(a, _PRODUCT(b, _known(range_of(node.kwargs.get("alpha", 1)))))

    return rule


def _subtracted(node: torch.fx.Node, range_of: RangeOf) -> Range:
    """The second number less the first, which may be multiplied by `alpha`."""
    a, b = _known(range_of(node.args[0])), _known(range_of(node.args[1]))
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return _DIFFERENCE(b, _PRODUCT(a, _known(range_of(alpha))))


def _known(found: Range | None) -> Range:
    return ALL if found is None else found


def _size(one: Range) -> int:
    return max(abs(one[0]), abs(one[1]))


def _quotient(a: Range, b: Range) -> Range:
    most = _size(a)
    return (0 if a[0] >= 0 and b[0] >= 0 else -most), most


def _remainder(a: Range, b: Range) -> Range:
    return (0 if b[0] >= 0 else -_size(b)), max(b[1], 0)


def _fmod(a: Range, b: Range) -> Range:
    most = min(_size(a), _size(b))
    return (0 if a[0] >= 0 else -most), most


def _bits(a: Range, b: Range) -> Range:
    """Bitwise: no result has more bits than the arguments."""
    most = 2 ** max((x if x >= 0 else ~x).bit_length() for x in (*a, *b))
    return (0 if a[0] >= 0 and b[0] >= 0 else -most), most - 1


def _both(a: Range, b: Range) -> Range:
    """Bitwise and: not beyond what is known to be no less than 0."""
    ends = [high for low, high in (a, b) if low >= 0]
    return (0, min(ends)) if ends else _bits(a, b)


def _inverted(node: torch.fx.Node, range_of: RangeOf) -> Range:
    low, high = _known(range_of(node.args[0]))
    return ~high, ~low


def _power(node: torch.fx.Node, range_of: RangeOf) -> Range:
    exponent: Any = node.args[1] if len(node.args) > 1 else 2
    if not isinstance(exponent, int) or not 0 <= exponent < 64:
        return ALL
    low, high = _known(range_of(node.args[0]))
    least = 0 if low < 0 < high else min(abs(low), abs(high))
    ends = [x**exponent for x in (low, high, least)]
    return min(ends), max(ends)


def _absolute(node: torch.fx.Node, range_of: RangeOf) -> Range:
    return 0, _size(_known(range_of(node.args[0])))


def _negative(node: torch.fx.Node, range_of: RangeOf) -> Range:
    low, high = _known(range_of(node.args[0]))
    return -high, -low


def _clamped(node: torch.fx.Node, range_of: RangeOf) -> Range:
    given = [range_of(x) for x in (*node.args, None, None)[:3]]
    named = [range_of(node.kwargs.get(n)) for n in ("min", "max")]
    low, high = (a or b for a, b in zip(given[1:], named, strict=True))
    found = _known(given[0])
    found = found if low is None else _MOST(found, low)
    return found if high is None else _LEAST(found, high)


def _arange(node: torch.fx.Node, range_of: RangeOf) -> Range:
    ends = node.args[:2] if len(node.args) > 1 else (0, *node.args)
    return hull(*map(range_of, ends))


def _total(node: torch.fx.Node, range_of: RangeOf) -> Range:
    """As many as are added, times one of them; and nothing at all."""
    source: Any = node.args[0]
    count = _reduced(source.meta["val"], node.args[1] if len(node.args) > 1 else None)
    low, high = _known(range_of(source))
    return min(low * count, 0), max(high * count, 0)


def _reduced(value: Any, dims: Any) -> int:
    """How many elements some dims have, None: all."""
    chosen = (dims,) if isinstance(dims, int) else dims or range(value.ndim)
    sizes = [value.shape[d] for d in chosen] if value.ndim else ()
    return _count(sizes)


def _count(sizes: Iterable[Any]) -> int:
    """How many elements these sizes make; free ones make less than 2**29 of them in all."""
    sizes = list(sizes)
    known = math.prod(n for n in sizes if isinstance(n, int))
    return known if all(isinstance(n, int) for n in sizes) else max(known, SIZE[1])


def _running(node: torch.fx.Node, range_of: RangeOf) -> Range:
    source, dim = node.args[0], node.args[1]
    value: Any = source.meta["val"]  # type: ignore[union-attr]
    count = _reduced(value, dim)
    low, high = _known(range_of(source))
    return min(low * count, low), max(high * count, high)


def _arguments(*numbers: int, also: Range | None = None) -> Rule:
    """A rule for what moves or chooses between some of its arguments."""

    def rule(node: torch.fx.Node, range_of: RangeOf) -> Range:
        given = [node.args[i] for i in numbers if i < len(node.args)]
        fills = [node.kwargs[n] for n in ("value", "fill_value", "src") if n in node.kwargs]
        return hull(also, *map(range_of, (*given, *fills)))

    return rule


def _put(node: torch.fx.Node, range_of: RangeOf) -> Range:
    adds = len(node.args) > 3 and node.args[3]
    if adds:
        indices: Any = node.args[1]
        given = [x for x in indices if x is not None]
        return _gathered(range_of(node.args[0]), range_of(node.args[2]), given)
    return hull(range_of(node.args[0]), range_of(node.args[2]))


def _gathered(start: Range | None, added: Range | None, indices: list[Any]) -> Range:
    """A number to which another one is added as often as there are indices."""
    times = _count(n for index in indices for n in index.meta["val"].shape)
    low, high = _known(added)
    return _SUM(_known(start), (min(low * times, 0), max(high * times, 0)))


def _scatter_add(node: torch.fx.Node, range_of: RangeOf) -> Range:
    added, alpha = range_of(node.args[3]), range_of(node.kwargs.get("alpha", 1))
    return _gathered(range_of(node.args[0]), _PRODUCT(_known(added), _known(alpha)), [node.args[2]])


def _scatter_reduce(node: torch.fx.Node, range_of: RangeOf) -> Range:
    reduce = node.args[4] if len(node.args) > 4 else node.kwargs.get("reduce")
    if reduce in ("sum", "add", "mean"):  # a mean is a sum on the way
        return _scatter_add(node, range_of)
    if reduce in ("amax", "amin"):
        return hull(range_of(node.args[0]), range_of(node.args[3]), (0, 0))
    return ALL


def _drawn(node: torch.fx.Node, range_of: RangeOf) -> Range:
    """Whole numbers below the last of one or two ends."""
    given = [x for x in node.args if isinstance(x, int | torch.SymInt | torch.fx.Node)]
    ends = [x for x in given if not _is_tensor(x)]
    if not ends:
        return INDEX
    return hull(range_of(ends[0]) if len(ends) > 1 else (0, 0), range_of(ends[-1]))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _fixed(found: Any) -> Rule:
    return lambda node, range_of: found


def _with_index(node: torch.fx.Node, range_of: RangeOf) -> Any:
    """Values and their indices."""
    count = len(node.meta["val"])
    return (_known(range_of(node.args[0])), *(INDEX,) * (count - 1))


def _split(node: torch.fx.Node, range_of: RangeOf) -> Any:
    return (_known(range_of(node.args[0])),) * len(node.meta["val"])


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: dict[str, Rule] = {
    **_named(
        "view reshape _unsafe_view expand slice select permute transpose t squeeze unsqueeze clone"
        " contiguous alias detach detach_ flatten unflatten flip roll repeat expand_as view_as"
        " movedim diagonal unfold as_strided narrow lift lift_fresh gather index index_select"
        " repeat_interleave amax amin ravel reshape_as rot90 swapaxes moveaxis take"
        " take_along_dim max.default min.default median.default _reshape_alias tile numpy_T mT"
        " positive masked_select _unsafe_index to _to_copy type_as long",
        _arguments(0),
    ),
    "view.dtype": lambda *_: ALL,  # the same bits, another number
    **_named("cat concat concatenate stack hstack vstack", _arguments(0)),
    **_named("where", _arguments(1, 2)),
    **_named("masked_fill fill slice_scatter select_scatter copy", _arguments(0, 1, 2)),
    **_named("scatter.src scatter.value masked_scatter index_copy", _arguments(0, 2, 3)),
    **_named("index_put _unsafe_index_put", _put),
    **_named("index_fill", _arguments(0, 3)),
    **_named("constant_pad_nd", _arguments(0, 2, also=(0, 0))),
    **_named("pad", _arguments(0, 3, also=(0, 0))),
    **_named("tril triu diag_embed diag", _arguments(0, also=(0, 0))),
    **_named("unbind split split_with_sizes chunk tensor_split", _split),
    **_named("zeros zeros_like new_zeros empty empty_like new_empty", _fixed((0, 0))),
    **_named("ones ones_like new_ones one_hot", _fixed((0, 1))),
    **_named("full full_like", _arguments(1)),
    **_named("new_full", _arguments(2)),
    **_named("scalar_tensor", _arguments(0)),
    **_named("arange linspace", _arange),
    **_named("sign eye", _fixed((-1, 1))),
    **_named("argmax argmin argsort count_nonzero randperm searchsorted bucketize", _fixed(INDEX)),
    **_named("tril_indices triu_indices nonzero multinomial", _fixed(INDEX)),
    **_named("sort topk max.dim min.dim cummax cummin kthvalue median.dim mode", _with_index),
    **_named("add", _pair(_SUM)),
    **_named("sub", _pair(_DIFFERENCE)),
    **_named("rsub", _subtracted),
    **_named("mul", _pair(_PRODUCT)),
    **_named("floor_divide div", _pair(_quotient)),
    **_named("remainder", _pair(_remainder)),
    **_named("fmod", _pair(_fmod)),
    **_named("bitwise_or bitwise_xor __or__ __xor__", _pair(_bits)),
    **_named("bitwise_and __and__", _pair(_both)),
    **_named("bitwise_not", _inverted),
    **_named("square pow.Tensor_Scalar", _power),
    **_named("randint randint_like", _drawn),
    **_named("scatter_add index_add", _scatter_add),
    **_named("scatter_reduce scatter.reduce scatter.value_reduce", _scatter_reduce),
    **_named("minimum clamp_max min.other", _pair(_LEAST)),
    **_named("maximum clamp_min max.other", _pair(_MOST)),
    **_named("clamp", _clamped),
    **_named("abs", _absolute),
    **_named("neg", _negative),
    **_named("sum", _total),
    **_named("cumsum", _running),
}
