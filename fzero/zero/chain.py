"""One microbatch through a chain on one device: forward, and backward with reduced gradients.

The chain is differentiated link by link, by hand. That is what decides when a leaf is gathered and
dropped, and when its gradient is reduced; autodiff of the whole would keep every gathered layer.

- A leaf outside a stack is gathered once for the forward pass, whoever reads it, dropped, and
  gathered once more for the backward pass. Its gradient is reduced once, when all readers are done.
- A stack's layers are gathered and reduced one by one (`fzero.zero.stack`).

All stages run this code. Where parameters are kept whole, gathering is the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from fzero.model import (
    Context,
    Layer,
    Mean,
    Model,
    Stack,
    apply_layer,
    layer_params,
    run_chain,
    split_loss,
)
from fzero.tree import PyTree
from fzero.zero.partition import Split, is_split, layout_leaves
from fzero.zero.rules import Rules
from fzero.zero.stack import StackLink, stack_backward, stack_eval, stack_forward
from fzero.zero.vjp import Floats, Pullback, forward, keep_all_but_movement


class Fetched:
    """One pass's whole leaves, each fetched at most once."""

    def __init__(self, rules: Rules, kept: PyTree) -> None:
        self.rules = rules
        self.kept = kept
        self.by_path: dict[str, jax.Array] = {}

    def layer(self, layer: Layer) -> PyTree:
        """What a layer's `apply` reads."""
        return self._fetch(layer, layer_params(layer, self.kept), again=False)

    def layer_again(self, link: Link) -> tuple[list[Any], list[Any]]:
        """A layer's whole leaves and residuals for its backward pass.

        The fence keeps the compiler from reusing the forward pass's gathered leaves, and from
        gathering before the residuals exist.
        """
        if not self.rules.sharded:
            weights, residuals = self.rules.fence((link.weights, link.residuals))
            return weights, residuals
        shards = layer_params(link.layer, self.kept)
        shards, residuals = self.rules.fence((shards, link.residuals))
        return jax.tree.leaves(self._fetch(link.layer, shards, again=True)), residuals

    def _fetch(self, layer: Layer, shards: PyTree, again: bool) -> PyTree:
        def fetch(split: Split, shard: jax.Array) -> jax.Array:
            if split.path not in self.by_path:
                self.by_path[split.path] = self.rules.fetch(split, shard, again)
            return self.by_path[split.path]

        splits = layer_params(layer, self.rules.layout)
        return jax.tree.map(fetch, splits, shards, is_leaf=is_split)


@dataclass
class Link:
    """What a layer leaves for its backward pass."""

    layer: Layer
    pullback: Pullback
    residuals: list[Any]
    weights: list[Any]


@dataclass
class Tape:
    """What a forward pass leaves: the loss's count and metrics, new buffers, links to go back."""

    rules: Rules
    kept: PyTree
    links: list[Link | StackLink]
    mean: Mean
    metrics: dict[str, Any]
    buffers: PyTree


def train_forward(
    model: Model, rules: Rules, kept: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array
) -> Tape:
    """Runs the chain in training mode and keeps what the backward pass needs.

    Args:
        model: the model.
        rules: how to fetch.
        kept: this device's parameters as they are kept between steps.
        buffers: buffers before this microbatch.
        batch: this device's rows.
        rng: the microbatch's key.
    """
    fetched = Fetched(rules, kept)
    links: list[Link | StackLink] = []
    out: dict[str, Any] = {}
    chain = model.layers

    def run_link(layer: Layer | Stack, x: Any, state: PyTree, number: int) -> tuple[Any, PyTree]:
        ctx = Context(batch, rng, True, state)
        link: Link | StackLink
        if isinstance(layer, Stack):
            link, x, state = stack_forward(rules, layer, kept[layer.name], x, ctx, number)
        else:
            link, x, state = _layer_forward(
                layer, fetched.layer(layer), x, ctx.at(number),
                differentiable=layer is not chain[0], out=out if layer is chain[-1] else None,
            )  # fmt: skip
        links.append(link)
        return x, state

    _, new = run_chain(chain, batch, buffers, run_link)
    return Tape(rules, kept, links, out["mean"], out["metrics"], new)


def _layer_forward(
    layer: Layer,
    weights: PyTree,
    x: Any,
    ctx: Context,
    differentiable: bool,
    out: dict[str, Any] | None,
) -> tuple[Link, Any, PyTree]:
    structure, floats, rest = Floats.of(x, differentiable)
    cell: dict[str, Any] = {}

    def run(weights: PyTree, floats: list[Any]) -> tuple[Any, Any]:
        y, buffers = apply_layer(layer, weights, structure.join(floats, rest), {}, ctx)
        if out is not None:
            mean, metrics = split_loss(y)
            return mean.total, (mean.count, metrics, buffers)
        cell["out"], y_floats, y_rest = Floats.of(y)
        return y_floats, (y_rest, buffers)

    # prevent_cse=False: nothing is recomputed but movement, which may be shared freely.
    run = jax.checkpoint(run, policy=keep_all_but_movement, prevent_cse=False)
    known = jax.tree.leaves(weights)
    y, aux, pullback, kept = forward(run, (weights, floats), known)
    link = Link(layer, pullback, kept, known)
    if out is not None:
        count, out["metrics"], buffers = aux
        out["mean"] = Mean(y, count)
        return link, None, buffers
    y_rest, buffers = aux
    return link, cell["out"].join(y, y_rest), buffers


def train_backward(tape: Tape, seed: jax.Array) -> PyTree:
    """Gradients of `seed * total` for every parameter, reduced as the rules say.

    Args:
        tape: the forward pass.
        seed: scalar cotangent of the loss's total, in its dtype.

    Returns:
        Gradients in the compute dtype: shards for split leaves if reduced now, otherwise whole.
    """
    rules = tape.rules
    fetched = Fetched(rules, tape.kept)
    local: dict[str, jax.Array] = {}
    stacks: dict[str, PyTree] = {}
    cotangent: Any = seed
    for link in reversed(tape.links):
        if isinstance(link, StackLink):
            stacks[link.stack.name], cotangent = stack_backward(rules, link, cotangent)
            continue
        weights, residuals = fetched.layer_again(link)
        grads, cotangent = link.pullback.run(residuals, weights, cotangent)
        paths = _paths(layer_params(link.layer, rules.layout))
        for path, grad in zip(paths, jax.tree.leaves(grads), strict=True):
            local[path] = local[path] + grad if path in local else grad
    return rules.finish(_assemble(rules, stacks, local))


def _assemble(rules: Rules, stacks: dict[str, PyTree], local: dict[str, jax.Array]) -> PyTree:
    """One tree of gradients from those of the stacks (reduced) and of the other links (local)."""
    whole: dict[str, jax.Array] = {}
    for name, grads in stacks.items():
        whole |= dict(zip(_paths(rules.layout[name]), jax.tree.leaves(grads), strict=True))

    def grad_of(split: Split) -> jax.Array:
        parts = [whole[split.path]] if split.path in whole else []
        if split.path in local:
            parts.append(rules.scatter(split, local[split.path]))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    return jax.tree.map(grad_of, rules.layout, is_leaf=is_split)


def _paths(layout: PyTree) -> list[str]:
    return [split.path for split in layout_leaves(layout)]


def eval_forward(
    model: Model, rules: Rules, kept: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array
) -> tuple[Mean, dict[str, Any]]:
    """Runs the chain in evaluation mode; new buffers are dropped."""
    fetched = Fetched(rules, kept)

    def run_link(layer: Layer | Stack, x: Any, state: PyTree, number: int) -> tuple[Any, PyTree]:
        ctx = Context(batch, rng, False, state)
        if isinstance(layer, Stack):
            return stack_eval(rules, layer, kept[layer.name], x, ctx, number)
        return apply_layer(layer, fetched.layer(layer), x, {}, ctx.at(number))

    out, _ = run_chain(model.layers, batch, buffers, run_link)
    return split_loss(out)
