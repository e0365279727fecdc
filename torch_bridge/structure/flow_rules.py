"""What each operator does to divided features; see `flow.py`. Unknown ones stop them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.fx import Node

from torch_bridge.structure.flow import (
    Along,
    Cut,
    Rule,
    Stop,
    Walk,
    Weight,
    is_tensor,
    kind_of,
    sizes,
)


def rule_of(node: Node) -> Rule:
    """The rule of a node."""
    if node.op == "placeholder":
        return _placeholder
    if node.op == "output":
        return Walk.returned
    return _RULES.get(kind_of(node), _unknown)


def _placeholder(walk: Walk, node: Node) -> Any:
    if node.name in walk.tokens:
        walk.ids.add(node)
    leaf = walk.leaves.get(node.name)
    return None if leaf is None else Weight(leaf, tuple(range(len(sizes(node)))))


def _unknown(walk: Walk, node: Node) -> None:
    tags = [walk.along(x) for x in node.all_input_nodes]
    sources = frozenset[str]().union(*(tag.sources for tag in tags if tag is not None))
    if sources:
        raise Stop(sources, f"its output goes into {kind_of(node)}")


def _nothing(walk: Walk, node: Node) -> None:
    """Checks, which compute nothing."""


def _item(walk: Walk, node: Node) -> Any:
    given = walk.of(node.args[0])
    number = node.args[1]
    return given[number] if isinstance(given, tuple) and isinstance(number, int) else None


def _elementwise(walk: Walk, node: Node) -> Any:
    """Operands are aligned from the right; one that is not divided has to be free to slice."""
    given = [x for x in node.all_input_nodes if is_tensor(x)]
    tags = {x: tag for x in given if (tag := walk.along(x)) is not None}
    if len(given) == 1 and given[0] in walk.ids:
        walk.ids.add(node)
    if not tags:
        only = walk.of(given[0]) if len(given) == 1 else None
        return only if isinstance(only, Weight) else None
    ndim = len(sizes(node))
    from_ends = {tag.dim - len(sizes(x)) for x, tag in tags.items()}
    sources = frozenset[str]().union(*(tag.sources for tag in tags.values()))
    if len(from_ends) > 1:
        raise Stop(sources, f"{kind_of(node)} joins other features with its")
    (from_end,) = from_ends
    heads = all(tag.heads for tag in tags.values())
    parts = max(tag.parts for tag in tags.values())
    for x in given:
        full = len(sizes(x)) >= -from_end and sizes(x)[from_end] > 1
        own = walk.of(x)
        if x in tags or not full:
            continue
        if isinstance(own, Weight) and own.dims[from_end] is not None:
            dim = own.dims[from_end]
            assert dim is not None
            walk.found.cut(own.leaf, Cut(dim, parts, "with what it scales or shifts", sources))
        elif not (heads and from_end < -1):
            raise Stop(sources, f"{kind_of(node)} joins it with features that are not divided")
    return Along(ndim + from_end, parts, sources, heads)


def _same(walk: Walk, node: Node) -> Any:
    """Casts, copies and dropout."""
    if node.args[0] in walk.ids:
        walk.ids.add(node)
    return walk.of(node.args[0])


def _view(walk: Walk, node: Node) -> Any:
    """Sizes that change and elements that stay: the leading part of the new dim at its place."""
    x: Any = node.args[0]
    if x in walk.ids:
        walk.ids.add(node)
    tag = walk.along(x)
    if tag is None:
        return None
    old, new = sizes(x), sizes(node)
    before, size = math.prod(old[: tag.dim]), old[tag.dim]
    for dim, now in enumerate(new):
        if math.prod(new[:dim]) != before or (now == 1 and size > 1):
            continue
        if now == size:
            return replace(tag, dim=dim)
        if not size % now:
            return replace(tag, dim=dim, parts=math.gcd(tag.parts, now), heads=True)
        if not now % size:
            return replace(tag, dim=dim)
    raise Stop(tag.sources, "its heads are joined with other dims", cut=True)


def _moved(walk: Walk, node: Node) -> Any:
    """Dims in another order."""
    x: Any = node.args[0]
    order = list(range(len(sizes(x))))
    if not order:
        return None
    if kind_of(node) == "permute":
        dims: Any = node.args[1]
        order = [dim % len(order) for dim in dims]
    else:
        pair: Any = node.args[1:3] if kind_of(node) != "t" else (0, 1)
        a, b = (dim % len(order) for dim in pair) if len(order) > 1 else (0, 0)
        order[a], order[b] = order[b], order[a]
    own = walk.of(x)
    if isinstance(own, Weight):
        return Weight(own.leaf, tuple(own.dims[dim] for dim in order))
    return replace(own, dim=order.index(own.dim)) if isinstance(own, Along) else None


def _expand(walk: Walk, node: Node) -> Any:
    tag = walk.along(node.args[0])
    more = len(sizes(node)) - len(sizes(node.args[0]))
    return None if tag is None else replace(tag, dim=tag.dim + more)


def _taken(walk: Walk, node: Node) -> Any:
    """`slice` and `select`: of other dims, or slices of this one."""
    x: Any = node.args[0]
    if x in walk.ids:
        walk.ids.add(node)
    tag = walk.along(x)
    if tag is None:
        return None
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    dim %= len(sizes(x))
    if kind_of(node) == "slice" and sizes(node) == sizes(x):
        return tag
    if dim == tag.dim:
        return _slice(walk, tag, node, sizes(node)[dim]) if kind_of(node) == "slice" else None
    return replace(tag, dim=tag.dim - int(kind_of(node) == "select" and dim < tag.dim))


def _slice(walk: Walk, tag: Along, node: Node, size: int, number: int = 0) -> Along | None:
    """A slice of divided features: gathered, it may be divided again, each on its own."""
    own = frozenset(s for s in tag.sources if not s.startswith("gathered "))
    if own:
        raise Stop(own, "its output is cut in pieces", cut=True)
    source = f"{node.name} {number}"
    return None if source in walk.refused else Along(tag.dim, size, frozenset({source}))


def _split(walk: Walk, node: Node) -> Any:
    x: Any = node.args[0]
    tag = walk.along(x)
    if tag is None:
        return None
    dim: Any = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    dim %= len(sizes(x))
    values: Any = node.meta["val"]
    if dim != tag.dim:
        return tuple(tag for _ in values)
    shapes = [int(getattr(v.shape[dim], "node", v.shape[dim])) for v in values]
    return tuple(_slice(walk, tag, node, size, k) for k, size in enumerate(shapes))


def _joined(walk: Walk, node: Node) -> Any:
    """`cat` and `stack` of values that lie alike, along another dim."""
    given: Any = node.args[0]
    tags = [walk.along(x) for x in given]
    known = [tag for tag in tags if tag is not None]
    if not known:
        return None
    sources = frozenset[str]().union(*(tag.sources for tag in known))
    stacked = kind_of(node) == "stack"
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim %= len(sizes(node))
    first = known[0]
    alike = all(tag.dim == first.dim for tag in known)
    free = len(known) == len(given) or all(tag.free(len(sizes(node))) for tag in known)
    if not alike or not free or (not stacked and dim == first.dim):
        raise Stop(sources, "it is joined with other features")
    lies = first.dim + int(stacked and dim <= first.dim)
    heads = all(tag.heads for tag in known)
    return Along(lies, max(tag.parts for tag in known), sources, heads)


def _over(walk: Walk, node: Node) -> Any:
    """Softmax and norms over some dims, of the same sizes afterwards."""
    tag = walk.along(node.args[0])
    if tag is None:
        return None
    if kind_of(node) == "softmax":
        dim: Any = node.args[1]
        if dim % len(sizes(node)) == tag.dim:
            raise Stop(tag.sources, "its output goes into a softmax")
        return tag
    normed: Any = node.args[1]
    if tag.dim + len(normed) >= len(sizes(node)):
        raise Stop(tag.sources, "its output goes into a norm")
    return tag


def _reduced(walk: Walk, node: Node) -> Any:
    """Sums and means over other dims."""
    x: Any = node.args[0]
    tag = walk.along(x)
    if tag is None or len(node.args) < 2:
        return None
    given: Any = node.args[1]
    ndim = len(sizes(x))
    dims = {d % ndim for d in (given if isinstance(given, list | tuple) else [given])}
    if tag.dim in dims:
        raise Stop(tag.sources, f"its output goes into a {kind_of(node)} over all of it")
    gone = 0 if len(sizes(node)) == ndim else sum(d < tag.dim for d in dims)
    return replace(tag, dim=tag.dim - gone)


def _attention(walk: Walk, node: Node) -> Any:
    """Each device attends with its heads; keys that are whole are sliced."""
    tags = [walk.along(x) for x in node.args[:3]]
    known = [tag for tag in tags if tag is not None]
    if not known:
        return None
    sources = frozenset[str]().union(*(tag.sources for tag in known))
    heads_dim = len(sizes(node)) - 3
    if any(tag.dim != heads_dim for tag in known):
        raise Stop(sources, "attention does not find its heads", cut=True)
    if tags[0] is None:
        raise Stop(sources, "attention's queries are not divided", cut=True)
    return Along(heads_dim, tags[0].parts, sources, True)


def _matmul(walk: Walk, node: Node) -> Any:
    a, b = node.args[:2]
    if isinstance(walk.of(b), Weight):
        return walk.product(node, a, b, None, last=False)
    tags = [(walk.along(x), len(sizes(x))) for x in (a, b)]
    known = [(tag, ndim) for tag, ndim in tags if tag is not None]
    if not known:
        return None
    sources = frozenset[str]().union(*(tag.sources for tag, _ in known))
    from_ends = {tag.dim - ndim for tag, ndim in known}
    (from_end,) = from_ends if len(from_ends) == 1 else (0,)
    heads = all(tag.heads for tag, _ in known)
    if from_end >= -2 or (len(known) == 1 and not heads):
        raise Stop(sources, "its output goes into a product with no weight")
    return Along(len(sizes(node)) + from_end, max(tag.parts for tag, _ in known), sources, heads)


def _linear(walk: Walk, node: Node) -> Any:
    x, weight, *rest = node.args
    return walk.product(node, x, weight, rest[0] if rest else None, last=True)


def _addmm(walk: Walk, node: Node) -> Any:
    bias, x, weight = node.args[:3]
    return walk.product(node, x, weight, bias, last=False)


def _embedding(walk: Walk, node: Node) -> None:
    weight, rows = node.args[:2]
    own = walk.of(weight)
    if isinstance(own, Weight) and rows in walk.ids:
        walk.found.cut(own.leaf, Cut(0, sizes(weight)[0], "vocabulary"))


def _experts_own(walk: Walk, node: Node) -> None:
    """A weight of which every expert of a mixture has its own; rows are not followed."""
    own = walk.of(node.args[int(kind_of(node) == "expert_dot")])
    if isinstance(own, Weight) and own.dims[0] is not None:
        walk.found.experts[own.leaf] = own.dims[0]


_NAMES: dict[Rule, str] = {
    _elementwise: "add sub mul div neg pow exp log sqrt rsqrt abs tanh sigmoid relu relu6 gelu silu"
    " elu leaky_relu softplus hardswish hardsigmoid mish clamp clamp_min clamp_max where"
    " masked_fill maximum minimum square reciprocal erf cos sin rsub type_as",
    _same: "to _to_copy clone contiguous alias detach dropout native_dropout lift_fresh_copy",
    _view: "view reshape _unsafe_view unsqueeze squeeze flatten unflatten",
    _moved: "transpose permute t",
    _expand: "expand",
    _taken: "slice select",
    _split: "split split_with_sizes chunk",
    _joined: "cat stack",
    _over: "softmax layer_norm rms_norm",
    _reduced: "mean sum amax var",
    _attention: "scaled_dot_product_attention",
    _matmul: "matmul mm bmm",
    _linear: "linear",
    _addmm: "addmm",
    _embedding: "embedding",
    _experts_own: "expert_dot expert_each",
    _nothing: "_assert_tensor_metadata",
}
_RULES = {name: rule for rule, names in _NAMES.items() for name in names.split()}
_RULES["<built-in function getitem>"] = _item
