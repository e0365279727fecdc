"""What values of two programs are, so that equal ones can be told.

A term is a value's expression: an operation on terms, down to inputs and constants. Equal terms are
one number. Sums and the like are bags of terms, whatever the order they were added in; what is one
number in every element is that number; and what reads the layers of a stack says so for a layer
in general: `OWN`. So an array with layers on one dim, one layer by itself, and a sum over all
layers written out or not, are the same terms where they are the same numbers. The layer of a stack
of one is all there are: what reads it reads nothing in general.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from fzero.programs.jaxprs import is_elementwise


OWN: Literal["own"] = "own"
# Whose layer a term is read of: none's, the one in question, one by its number, or all there are.
Tag = None | Literal["own"] | tuple[str, int | Literal["all"]]
Ref = tuple[int, Tag]
Shape = tuple[int, ...]

# Operations whose order does not matter, by name, and the reductions that apply them. Adding up is
# exact but for roundings.
_BAGS = {
    "add": "reduce_sum", "add_any": "reduce_sum", "max": "reduce_max", "min": "reduce_min",
    "and": "reduce_and", "or": "reduce_or",
}  # fmt: skip
_REDUCTIONS = frozenset(_BAGS.values())
_NEUTRAL = {"reduce_sum": 0.0, "reduce_and": True, "reduce_or": False}


class Terms:
    """All terms of the programs that are compared.

    Args:
        layers: the number of layers of each stack.
        single: the stacks that are one row.
    """

    def __init__(self, layers: Mapping[str, int], single: Collection[str] = ()) -> None:
        self.layers = layers
        self.single = single
        self.keys: list[tuple[Any, ...]] = []
        self.shapes: list[Shape] = []
        self._numbers: dict[Any, int] = {}

    def of(self, key: tuple[Any, ...], shape: Shape) -> int:
        """The number of a term."""
        found = self._numbers.get((key, shape))
        if found is None:
            found = self._numbers[key, shape] = len(self.keys)
            self.keys.append(key)
            self.shapes.append(shape)
        return found

    def own(self, stack: str | None) -> Tag:
        """How a term is read of a layer of a stack (`None`: of none) in general."""
        return None if stack is None or stack in self.single else OWN

    def every(self, stack: str) -> Tag:
        """How a term is read of all layers of a stack."""
        return None if stack in self.single else (stack, "all")

    def made(self, key: tuple[Any, ...], refs: Sequence[Ref], shape: Shape) -> Ref:
        """A term that reads others, and whether it is that of a layer in general."""
        tags = {tag for _, tag in refs}
        return self.of((*key, tuple(refs)), shape), OWN if OWN in tags else None

    def inside(self, ref: Ref, inner: Ref) -> Ref:
        """What a term reads, as one who reads that term sees it."""
        return inner if inner[1] != OWN else (inner[0], ref[1])

    def source(self, ref: Ref, kind: str) -> Ref | None:
        """What a term of some kind (`full`, `reshape`) is made of."""
        key = self.keys[ref[0]]
        return self.inside(ref, key[-1][0]) if key[0] == kind else None

    def operation(self, name: str, params: Any, number: int, refs: Sequence[Ref],
                  shape: Shape) -> Ref:  # fmt: skip
        """Any operation."""
        like = self.shapes[refs[0][0]] if refs else None
        alone = like is not None and is_elementwise(name, like, shape)
        if alone or name in _BAGS or name == "cond":
            return self.elementwise((name, params, number), refs, shape)
        if name == "concatenate" and len(shape) == 1:
            return self.made(("concatenate",), refs, shape)
        return self.made((name, params, number), refs, shape)

    def elementwise(self, key: tuple[Any, ...], refs: Sequence[Ref], shape: Shape) -> Ref:
        """An operation on corresponding elements; operands may be scalars."""
        if key[0] == "copy":
            return refs[0]
        scalars = [self.source(ref, "full") or ref for ref in refs]
        if all(self.shapes[term] == () for term, _ in scalars):
            return self.full(self._applied(key, scalars, ()), shape)
        unshaped = [self.source(ref, "reshape") or ref for ref in scalars]
        inner = {self.shapes[term] for term, _ in unshaped} - {()}
        moved = [self.shapes[a[0]] == () or a != b for a, b in zip(scalars, unshaped, strict=True)]
        if len(inner) == 1 and all(moved):
            (was,) = inner
            return self.reshape(self._applied(key, unshaped, was), shape)
        return self._applied(key, scalars, shape)

    def _applied(self, key: tuple[Any, ...], refs: Sequence[Ref], shape: Shape) -> Ref:
        if key[0] in _BAGS:
            return self.bag(_BAGS[key[0]], refs, shape)
        found = self._distributed(key, refs, shape)
        if found is not None:
            return found
        if key[0] == "mul":
            refs = sorted(refs, key=str)
        return self.made(key, refs, shape)

    def _distributed(self, key: tuple[Any, ...], refs: Sequence[Ref], shape: Shape) -> Ref | None:
        """A sum over layers times (or divided by) something else, as the sum of such products."""
        sums = [i for i, (term, _) in enumerate(refs) if self._sums_layers(term)]
        if key[0] not in ("mul", "div") or len(sums) != 1 or (key[0] == "div" and sums != [0]):
            return None
        (at,) = sums
        if any(tag is not None for i, (_, tag) in enumerate(refs) if i != at):
            return None
        items: Counter[Ref] = Counter()
        for item, count in self.keys[refs[at][0]][2]:
            own = (item[0], OWN) if isinstance(item[1], tuple) else item
            term, tag = self._applied(key, [own if i == at else r for i, r in enumerate(refs)],
                                      shape)  # fmt: skip
            items[term, item[1] if isinstance(item[1], tuple) else tag] += count
        return self.bag("reduce_sum", items, shape)

    def _sums_layers(self, term: int) -> bool:
        key = self.keys[term]
        return key[:2] == ("bag", "reduce_sum") and any(
            isinstance(tag, tuple) for (_, tag), _ in key[2]
        )

    def names_layers(self, term: int) -> bool:
        """Whether a term joins single layers, each by its number."""
        key = self.keys[term]
        return key[0] == "bag" and any(
            isinstance(tag, tuple) and isinstance(tag[1], int) for (_, tag), _ in key[2]
        )

    def joins_layers(self, term: int) -> bool:
        """Whether a term joins all layers of a stack."""
        key = self.keys[term]
        return key[0] == "bag" and any(
            isinstance(tag, tuple) and tag[1] == "all" for (_, tag), _ in key[2]
        )

    def bag(self, op: str, refs: Iterable[Ref] | Mapping[Ref, int], shape: Shape) -> Ref:
        """Values (so many times each) joined by an operation whose order does not matter."""
        items: Counter[Ref] = Counter()
        for ref, times in Counter(refs).items():
            key = self.keys[ref[0]]
            if key[:2] == ("bag", op):
                for item, count in key[2]:
                    items[self.inside(ref, item)] += count * times
            elif not self._neutral(op, key):
                items[ref] += times
        items = self._collapsed(items)
        if op != "reduce_sum":
            items = Counter(dict.fromkeys(items, 1))
        if not items and op in _NEUTRAL:
            return self.of(("literal", float(_NEUTRAL[op])), ()), None
        if len(items) == 1:
            ((ref, count),) = items.items()
            if count == 1 and ref[1] in (OWN, None):
                return ref
        key = "bag", op, frozenset(items.items())
        return self.of(key, shape), OWN if any(tag == OWN for _, tag in items) else None

    def _neutral(self, op: str, key: tuple[Any, ...]) -> bool:
        return key[0] == "literal" and op in _NEUTRAL and key[1] == _NEUTRAL[op]

    def _collapsed(self, items: Counter[Ref]) -> Counter[Ref]:
        """One item for all layers instead of one for each."""
        found: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
        for (term, tag), count in items.items():
            if isinstance(tag, tuple) and isinstance(tag[1], int):
                found[term, tag[0]][tag[1]] = count
        for (term, stack), counts in found.items():
            if len(counts) != self.layers[stack]:
                continue
            least = min(counts.values())
            for layer in counts:
                items[term, (stack, layer)] -= least
            items[term, (stack, "all")] += least
        return +items

    def reduce(self, op: str, axes: Sequence[int], ref: Ref) -> Ref:
        """A reduction over some dims."""
        shape = self.shapes[ref[0]]
        rest = tuple(n for dim, n in enumerate(shape) if dim not in axes)
        if all(shape[dim] == 1 for dim in axes):
            return self.reshape(ref, rest)
        number = self.source(ref, "full")
        if number is not None and op in _REDUCTIONS:
            times = math.prod(shape[dim] for dim in axes)
            return self.full(self.bag(op, {number: times}, ()), rest)
        if not rest:
            joined = self.keys[ref[0]]
            if joined[0] == "concatenate":
                inner = (self.inside(ref, item) for item in joined[-1])
                return self.bag(op, [self.reduce(op, (0,), item) for item in inner], ())
            ref = self.source(ref, "reshape") or ref
            axes = range(len(self.shapes[ref[0]]))
        return self.made((op, tuple(axes)), [ref], rest)

    def reshape(self, ref: Ref, shape: Shape) -> Ref:
        """The same elements in another shape."""
        number = self.source(ref, "full")
        if number is not None:
            return self.full(number, shape)
        ref = self.source(ref, "reshape") or ref
        if self.shapes[ref[0]] == shape:
            return ref
        return self.made(("reshape",), [ref], shape)

    def full(self, ref: Ref, shape: Shape) -> Ref:
        """One number in every element."""
        if shape == ():
            return ref
        return self.made(("full",), [ref], shape)

    def broadcast(self, ref: Ref, shape: Shape, dims: tuple[int, ...]) -> Ref:
        """`lax.broadcast_in_dim`."""
        number = self.source(ref, "full") or ref
        if self.shapes[number[0]] == ():
            return self.full(number, shape)
        if math.prod(shape) == math.prod(self.shapes[ref[0]]):
            return self.reshape(ref, shape)
        return self.made(("broadcast_in_dim", dims), [ref], shape)

    def dot(self, params: Any, refs: Sequence[Ref], shape: Shape) -> Ref:
        """A product; the inner product of vectors is a sum of products."""
        (left, right), (batch, _) = params["dimension_numbers"]
        dims = len(left)
        one = [self.shapes[term] for term, _ in refs]
        if not batch and shape == () and tuple(left) == tuple(right) == tuple(range(dims)):
            product = self.elementwise(("mul", (), 0), refs, one[0])
            return self.reduce("reduce_sum", range(len(self.shapes[product[0]])), product)
        kind = str(params["dimension_numbers"]), str(params["precision"])
        return self.made(("dot_general", kind), refs, shape)

    def operands(self, term: int) -> list[Ref]:
        """What a term reads."""
        key = self.keys[term]
        if key[0] == "bag":
            return sorted((ref for ref, _ in key[2]), key=str)
        reads_nothing = key[0] in ("input", "state", "odd", "loss", "literal", "constant", "mixed")
        return [] if reads_nothing else list(key[-1])

    def reads(self, term: int) -> set[int]:
        """A term and all that it reads."""
        found, pending = {term}, [term]
        while pending:
            more = {read for read, _ in self.operands(pending.pop())} - found
            found |= more
            pending += more
        return found

    def first_difference(self, one: int, other: int) -> str:
        """The operations by which two terms differ, in words."""
        while True:
            names = [_name(self.keys[term]) for term in (one, other)]
            a, b = self.operands(one), self.operands(other)
            if names[0] != names[1]:
                return f"{names[0]}, not {names[1]}"
            unequal = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
            if len(a) != len(b) or not unequal or unequal[0][0][0] == unequal[0][1][0]:
                return f"{names[0]} of other values"
            (one, _), (other, _) = unequal[0]


def _name(key: tuple[Any, ...]) -> str:
    return str(key[1] if key[0] == "bag" else key[0])


def is_reduction(name: str) -> bool:
    """Whether an operation is one of `Terms.reduce`."""
    return name in _REDUCTIONS
