"""A stack trains as the same layers written out, or its optimizer is refused.

The transformation is traced twice: on the stacked leaves, as steps call it, and on a tree in which
every layer is a leaf of its own. Where all results are the same terms, it is the same optimizer;
they also start from the same state. Nothing is known of any optimizer by name.

Where a pipeline fills up shorter ranks, there are rows that are no layers, all zeros. Written out
there are none of these, so that means are others; sums are the same if what is added up is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from fzero.errors import PlanError
from fzero.optimizer.follow import Follow, TermValue, program_of
from fzero.optimizer.layers import Rows, Scope, as_layers, is_layers, numbered, scope_of
from fzero.optimizer.optimizer import Traced, shape_key, traced
from fzero.optimizer.terms import OWN, Terms
from fzero.optimizer.zeros import Zeros
from fzero.tree import PyTree, path_name


def require_layers_apart(
    tx: optax.GradientTransformation, params: PyTree, stacks: Mapping[str, Rows], operation: str
) -> None:
    """Raises `PlanError` if stacks would train otherwise than the same layers written out.

    Args:
        tx: the optimizer.
        params: shapes of the parameters, stacked leaves with their rows on dim 0.
        stacks: the rows of each stack.
        operation: who asks, for messages.
    """
    if not stacks:
        return
    key = id(tx), shape_key(params), tuple(sorted(stacks.items()))
    if key not in _FOUND:
        while len(_FOUND) > 16:  # the last few optimizers of a process; each holds its closures
            del _FOUND[next(iter(_FOUND))]
        _FOUND[key] = tx, _Comparison(tx, params, stacks).difference()
    _, found = _FOUND[key]
    if found is not None:
        raise PlanError(
            f"{operation}: the optimizer would train a Stack otherwise than the same layers written"
            f" out: {found}. Say fz.per_layer(tx), for the whole optimizer or for the part of its"
            " chain that looks at more than single elements: each layer is then a leaf of its own."
            " If it is meant for leaves that stack layers, say fz.as_stacked(tx)"
        )


# With the optimizers themselves: an id is one's own as long as it lives.
_FOUND: dict[Any, tuple[Any, str | None]] = {}


@dataclass(frozen=True)
class _Leaf:
    """A leaf of a tree of results, and where its values are.

    Args:
        path: its path.
        shape: its shape in the stacked program.
        stacked: its number there.
        written: its number written out, or those of its layers.
        stack: the stack, if it has layers.
        dim: the dim that they are on.
        odd: why it is not the same in both, in words. That matters if anything else reads it.
    """

    path: str
    shape: tuple[int, ...]
    stacked: int
    written: tuple[int, ...]
    stack: str | None = None
    dim: int = 0
    odd: str = ""


class _Differs(Exception):
    """What is not the same, in words."""


class _Comparison:
    """An optimizer on stacked leaves, and on layers written out."""

    def __init__(
        self, tx: optax.GradientTransformation, params: PyTree, stacks: Mapping[str, Rows]
    ) -> None:
        self.tx, self.params, self.stacks = tx, params, stacks
        self.written = as_layers(params, stacks)
        self.terms = Terms(
            {name: len(rows.order) for name, rows in stacks.items()},
            [name for name, rows in stacks.items() if rows.num == 1],
        )
        self.follow = Follow(self.terms)

    def difference(self) -> str | None:
        """How they differ, in words; `None` if they do not."""
        try:
            with scope_of(Scope(checking=True)):
                self._compare()
        except _Differs as found:
            return str(found)
        return None

    def _compare(self) -> None:
        one, other = self._traced(self.params), self._traced(self.written, written=True)
        params = self._leaves(self.params, self.written, "params")
        state = self._leaves(one.state, other.state, "opt_state")
        start = self._inputs(params, "input", 0)
        born = self.follow.run(program_of(one.init), start[0])
        self._same(state, born, self.follow.run(program_of(other.init), start[1]),
                   "its initial value")  # fmt: skip
        kept, grads = self._inputs(state, "state", 0), self._inputs(params, "input", 1)
        loss = [TermValue(self.terms.of(("loss",), ()))] * one.takes_value
        values = [
            self.follow.run(program_of(x.update), [*g, *s, *p, *loss])
            for x, g, s, p in zip((one, other), grads, kept, start, strict=True)
        ]
        num, many = len(jax.tree.leaves(self.params)), len(jax.tree.leaves(self.written))
        try:
            self._same(params, values[0][:num], values[1][:many], "its update")
            self._same(state, values[0][num:], values[1][many:], "its new value")
        except _Differs as found:
            raise next((_Differs(leaf.odd) for leaf in state if leaf.odd), found) from None
        if any(rows.filled for rows in self.stacks.values()):
            self._require_zeros(state, born, values[0][num:])

    def _traced(self, params: PyTree, written: bool = False) -> Traced:
        try:
            return traced(self.tx, params)
        except _Differs:
            raise
        except Exception as error:
            if not written:
                raise
            own = error.__cause__ or error  # of what `traced` says, what the optimizer itself said
            raise _Differs(
                f"it cannot be called with layers written out ({type(own).__name__}: {own})"
            ) from error

    def _leaves(self, stacked: PyTree, written: PyTree, field: str) -> list[_Leaf]:
        """The leaves of both programs' trees beside each other."""
        nodes = jax.tree_util.tree_flatten_with_path(numbered(written), is_leaf=is_layers)[0]
        leaves = jax.tree_util.tree_flatten_with_path(stacked)[0]
        names = [[path_name(path) for path, _ in one] for one in (leaves, nodes)]
        if names[0] != names[1]:
            # In an order of its own: of a set, each process would name another leaf.
            differ = sorted(set(names[0]) ^ set(names[1]))
            other = sorted(differ, key=self._is_of_parameter) or names[0]
            raise _Differs(f"{field}/{other[-1]} is kept for the one, not for the other")
        return [
            self._leaf(f"{field}/{name}", i, leaf, node)
            for i, (name, (_, leaf), (_, node)) in enumerate(
                zip(names[0], leaves, nodes, strict=True)
            )
        ]

    def _is_of_parameter(self, path: str) -> bool:
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.params)
        return any(f"/{path}".endswith(f"/{path_name(own)}") for own, _ in leaves)

    def _leaf(self, path: str, number: int, leaf: Any, node: Any) -> _Leaf:
        shape = tuple(leaf.shape)
        if not is_layers(node):
            if shape != tuple(node.shape):
                odd = f"{path} has shape {list(shape)}, not {list(node.shape)}"
                return _Leaf(path, shape, number, (node.at,), odd=odd)
            return _Leaf(path, shape, number, (node.at,))
        rows, own = self.stacks[node.stack].num, tuple(node.layers[0].shape)
        positions = tuple(one.at for one in node.layers)
        for dim, size in enumerate(shape):
            if size == rows and shape[:dim] + shape[dim + 1 :] == own:
                return _Leaf(path, shape, number, positions, node.stack, dim)
        odd = f"{path} has shape {list(shape)}, where {len(positions)} layers have {list(own)} each"
        return _Leaf(path, shape, number, positions, odd=odd)

    def _inputs(self, leaves: Sequence[_Leaf], kind: str, group: int) -> list[list[TermValue]]:
        """The values of leaves in both programs."""
        one: list[TermValue] = []
        other: dict[int, TermValue] = {}
        for leaf in leaves:
            if leaf.odd:
                one.append(TermValue(self.terms.of(("odd", leaf.stacked), leaf.shape)))
                for at in leaf.written:
                    other[at] = TermValue(self.terms.of(("odd", leaf.stacked, at), ()))
                continue
            if leaf.stack is None:
                term = self.terms.of((kind, group, leaf.stacked), leaf.shape)
                one.append(TermValue(term))
                other[leaf.written[0]] = TermValue(term)
                continue
            shape = leaf.shape[: leaf.dim] + leaf.shape[leaf.dim + 1 :]
            term = self.terms.of((kind, group, leaf.stacked), shape)
            rows = self.stacks[leaf.stack].num
            one.append(TermValue(term, stack=leaf.stack, dim=leaf.dim, rows=rows))
            for layer, at in enumerate(leaf.written):
                named = self.terms.own(leaf.stack) and (leaf.stack, layer)
                other[at] = TermValue(term, layer=named)
        return [one, [other[i] for i in range(len(other))]]

    def _same(
        self,
        leaves: Sequence[_Leaf],
        one: Sequence[TermValue],
        other: Sequence[TermValue],
        what: str,
    ) -> None:
        for leaf in leaves:
            if leaf.odd:
                continue
            value, layers = one[leaf.stacked], [other[at] for at in leaf.written]
            if leaf.stack is None:
                if value != layers[0]:
                    raise _Differs(self._explain(leaf.path, what, value, layers[0]))
                continue
            for number, layer in enumerate(layers):
                if self._of_layer(value, leaf) != (layer.term, layer.layer and OWN) or (
                    layer.layer and layer.layer != (leaf.stack, number)
                ):
                    raise _Differs(self._explain(leaf.path, what, value, layer))

    def _of_layer(self, value: TermValue, leaf: _Leaf) -> Any:
        """One layer's term of a stacked leaf, and whose."""
        if value.stack is not None:
            where = value.stack, value.dim, value.inner
            if where != (leaf.stack, leaf.dim, 0):
                return None
            return value.term, self.terms.own(leaf.stack)
        number = self.terms.source((value.term, None), "full")
        if number is None:
            return None
        shape = leaf.shape[: leaf.dim] + leaf.shape[leaf.dim + 1 :]
        return self.terms.full(number, shape)

    def _explain(self, path: str, what: str, one: TermValue, other: TermValue) -> str:
        mixing = self._mixing(one.term) or self._mixing(other.term)
        mixing = mixing or self._joined(one.term, other.term)
        if mixing:
            return f"{path}: {what} takes an operation ({mixing}) on several layers at once"
        found = self.terms.first_difference(one.term, other.term)
        return f"{path}: {what} is computed otherwise ({found})"

    def _mixing(self, term: int) -> str | None:
        mixing = self.follow.mixing
        return next((mixing[t] for t in sorted(self.terms.reads(term)) if t in mixing), None)

    def _joined(self, one: int, other: int) -> str | None:
        """The operation by which a term joins all layers of a stack, and another does not."""
        more = self.terms.reads(one) - self.terms.reads(other)
        return next((str(self.terms.keys[t][1]) for t in sorted(more)
                     if self.terms.joins_layers(t)), None)  # fmt: skip

    def _require_zeros(
        self, state: Sequence[_Leaf], born: Sequence[TermValue], new: Sequence[TermValue]
    ) -> None:
        terms = [(born[leaf.stacked].term, new[leaf.stacked].term) for leaf in state]
        zeros = Zeros(self.terms, terms)
        for term, stack, kind in self.follow.sums:
            if self.stacks[stack].filled and not zeros.harmless(kind, term):
                raise _Differs(
                    f"ranks hold different numbers of layers of {stack!r}, and the rows of zeros"
                    f" that fill up shorter ones would count in its operation {kind}"
                )
