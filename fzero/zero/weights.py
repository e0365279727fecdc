"""The whole leaves that one pass over a chain reads, and the gradients that come of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fzero.links import Context, Layer, Stack, apply_layer, layer_params
from fzero.sharding.split import Split, flat_splits, map_splits, trained
from fzero.tree import PyTree
from fzero.zero.float8_weights import Narrow
from fzero.zero.replay import gather_at_use
from fzero.zero.rules import Rules
from fzero.zero.vjp import Pullback


Secondary = dict[str, jax.Array]
"""What this device keeps of whole leaves between two passes (`Plan.secondary`), by path."""


class FetchedWeights:
    """One pass's whole leaves, each fetched at most once, whoever reads it.

    Args:
        rules: how to fetch.
        kept: this device's parameters as they are kept between steps.
        secondary: in a backward pass, what the forward pass left of leaves; else `None`.
    """

    def __init__(self, rules: Rules, kept: PyTree, secondary: Secondary | None = None) -> None:
        self.rules = rules
        self.kept = kept
        self.secondary = secondary
        self.by_path: dict[str, jax.Array] = {}
        self.stacks: dict[str, PyTree] = {}
        self._taken: set[str] = set()

    def new_secondary(self, layer: Layer, pullback: Pullback) -> Secondary:
        """What to keep of the leaves that a layer's backward pass reads and nobody kept before."""
        found: Secondary = {}
        splits = flat_splits(layer_params(layer, self.rules.splits))
        for path, split in ((splits[i].path, splits[i]) for i in pullback.reads):
            if path in self.by_path and path not in self._taken:
                shard = self.rules.secondary_shard(split, self.by_path[path])
                found |= {} if shard is None else {path: shard}
        self._taken.update(found)
        return found

    def apply(self, layer: Layer, x: Any, ctx: Context) -> tuple[Any, PyTree]:
        """A layer run forward, each weight gathered at its use: its output, and its buffers."""
        treedef = jax.tree.structure(layer_params(layer, self.kept))

        def of_weights(weights: list[Any]) -> PyTree:
            return apply_layer(layer, jax.tree.unflatten(treedef, weights), x, {}, ctx)

        return self.run(layer, of_weights)

    def run(
        self,
        layer: Layer,
        function: Callable[[list[Any]], PyTree],
        after: PyTree = None,
        finish: Callable[[int, Any], Any] | None = None,
    ) -> PyTree:
        """Runs a function of a layer's whole leaves, each gathered at its use.

        Stages that keep whole parameters have nothing to gather, but run the same program, so that
        it is compiled to the same numbers, and reduce gradients as they come.

        Args:
            layer: whose leaves.
            function: takes them in tree order.
            after: what must exist before anything is gathered.
            finish: for a function that gives gradients first, one for each leaf that is trained:
                reduces the one number `i`.
        """
        rules = self.rules
        splits = flat_splits(layer_params(layer, rules.splits))
        shards = jax.tree.leaves(layer_params(layer, self.kept))
        secondary = self.secondary or {}
        shards = [secondary.get(s.path, shard) for s, shard in zip(splits, shards, strict=True)]
        if not rules.fenced:
            out = function([self._fetch(*pair) for pair in zip(splits, shards, strict=True)])
            if finish is None:
                return out
            grads, rest = out
            return [finish(i, grad) for i, grad in enumerate(grads)], rest
        if after is not None:
            shards, _ = rules.fence((shards, after))
        return gather_at_use(
            function,
            [jax.ShapeDtypeStruct(s.shape, s.compute) for s in splits],
            shards,
            lambda i, shard: self._fetch(splits[i], shard),
            [split.dim is not None and split.path not in self.by_path for split in splits],
            finish,
            lambda i, shard: self._narrow(splits[i], shard),
            rules.exact,
        )

    def _narrow(self, split: Split, shard: jax.Array) -> Narrow | None:
        """A whole leaf in 8 bits, if it may come so and nobody else has it whole."""
        if split.path in self.by_path or not self.rules.may_narrow(split):
            return None
        return self.rules.fetch_narrow([split], [shard], again=self.secondary is not None)[0]

    def whole(self) -> PyTree:
        """All parameters, after a pass that held what it gathered. (What no layer read is gathered
        here; nobody reads it, so that the compiler drops it.)"""
        splits = self.rules.splits
        stacked = {split.path: leaf
                   for name, held in self.stacks.items()
                   for split, leaf in zip(flat_splits(splits[name]), jax.tree.leaves(held),
                                          strict=True)}  # fmt: skip

        def find(split: Split, shard: jax.Array) -> jax.Array:
            return stacked[split.path] if split.path in stacked else self._fetch(split, shard)

        return map_splits(find, splits, self.kept)

    def _fetch(self, split: Split, shard: jax.Array) -> jax.Array:
        """A whole leaf from its shard, or from its secondary shard where there is one."""
        path, secondary = split.path, self.secondary
        if path not in self.by_path:
            self.by_path[path] = (
                self.rules.fetch(split, shard)
                if secondary is None
                else self.rules.refetch(split, shard, shard if path in secondary else None)
            )
        return self.by_path[path]


class Sums:
    """Gradients as they come, each reduced once every reader was here."""

    def __init__(self, rules: Rules, layers: Sequence[Layer | Stack]) -> None:
        self.rules = rules
        self.readers = Counter(
            path
            for layer in layers
            if not isinstance(layer, Stack)
            for path in _paths(layer_params(layer, rules.splits))
        )
        self.single: dict[str, jax.Array] = {}
        self.stacked: dict[str, jax.Array] = {}

    def taker(self, layer: Layer) -> Callable[[int, jax.Array], jax.Array]:
        """Takes the gradient of a layer's trained leaf number `i`."""
        splits = flat_splits(trained(layer_params(layer, self.rules.splits)))
        return lambda i, grad: self._add(splits[i], grad)

    def _add(self, split: Split, grad: jax.Array) -> jax.Array:
        path = split.path
        total = self.single[path] + grad if path in self.single else grad
        self.readers[path] -= 1
        self.single[path] = total if self.readers[path] else self.rules.scatter(split, total)
        return self.single[path]

    def add_stack(self, name: str, grads: PyTree) -> None:
        """Takes the gradients of a stack's layers, which are reduced already."""
        paths = _paths(trained(self.rules.splits[name]))
        self.stacked |= dict(zip(paths, jax.tree.leaves(grads), strict=True))

    def finish(self) -> PyTree:
        """Gradients of all trained leaves."""

        def grad_of(split: Split) -> jax.Array:
            found = [p[split.path] for p in (self.stacked, self.single) if split.path in p]
            return found[0] if len(found) == 1 else found[0] + found[1]

        grads = map_splits(grad_of, trained(self.rules.splits))
        return self.rules.finish(grads)


def trained_leaves(rules: Rules, layer: Layer | Stack) -> list[int]:
    """Which of a layer's leaves are trained, in tree order."""
    splits = flat_splits(layer_params(layer, rules.splits))
    return [i for i, split in enumerate(splits) if not split.frozen]


def _paths(splits: PyTree) -> list[str]:
    return [split.path for split in flat_splits(splits)]
