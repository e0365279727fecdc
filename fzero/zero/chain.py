"""One microbatch through a chain on one device: forward, and backward with reduced gradients.

The chain is differentiated link by link, by hand. That is what decides when a leaf is gathered and
dropped, and when its gradient is reduced; autodiff of the whole would keep every gathered layer.

- A leaf outside a stack is gathered once for the forward pass, whoever reads it, dropped, and
  gathered once more for the backward pass. Its gradient is reduced once, when all readers are done.
- A stack's layers are gathered and reduced one by one (`fzero.zero.stack`).
- With `Plan(gather="lazy")` the first forward pass of a step (`holding_forward`) gathers so, and
  hands out what it gathered: all other passes read that.

All stages run this code. Where parameters are kept whole, gathering is the identity.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax

from fzero.batch import opened
from fzero.links import (
    Context,
    Layer,
    Mean,
    Stack,
    apply_layer,
    layer_params,
    split_loss,
)
from fzero.pieces import Piece, run_chain
from fzero.precision import COMPUTE_DTYPES, cast_input, compute_dtype
from fzero.programs.halves import Rest, first_half, unfenced
from fzero.sharding.buffers import require_reductions
from fzero.sharding.split import Split, layout_leaves, map_splits, trained
from fzero.tree import PyTree
from fzero.zero.at_use import gather_at_use
from fzero.zero.rules import Rules
from fzero.zero.stack import StackLink, stack_backward, stack_eval, stack_forward
from fzero.zero.stack_halves import StackHalf, stack_input_backward, stack_weight_backward
from fzero.zero.vjp import Floats, Pullback, forward, remat_policy


Parts = dict[str, jax.Array]
"""What this device keeps of whole leaves between two passes (`Plan.secondary`), by path."""


class Fetched:
    """One pass's whole leaves, each fetched at most once, whoever reads it.

    Args:
        rules: how to fetch.
        kept: this device's parameters as they are kept between steps.
        parts: in a backward pass, what the forward pass kept of leaves; `None` in a forward pass.
    """

    def __init__(self, rules: Rules, kept: PyTree, parts: Parts | None = None) -> None:
        self.rules = rules
        self.kept = kept
        self.parts = parts
        self.by_path: dict[str, jax.Array] = {}
        self.stacks: dict[str, PyTree] = {}
        self._taken: set[str] = set()

    def new_parts(self, layer: Layer, pullback: Pullback) -> Parts:
        """What to keep of the leaves that a layer's backward pass reads and nobody kept before."""
        found: Parts = {}
        splits = layout_leaves(layer_params(layer, self.rules.layout))
        for path, split in ((splits[i].path, splits[i]) for i in pullback.reads):
            if path in self.by_path and path not in self._taken:
                part = self.rules.part(split, self.by_path[path])
                found |= {} if part is None else {path: part}
        self._taken.update(found)
        return found

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
        splits = layout_leaves(layer_params(layer, rules.layout))
        shards = jax.tree.leaves(layer_params(layer, self.kept))
        parts = self.parts or {}
        shards = [parts.get(s.path, shard) for s, shard in zip(splits, shards, strict=True)]
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
            [jax.ShapeDtypeStruct(s.shape, compute_dtype(rules.plan, s.dtype)) for s in splits],
            shards,
            lambda i, shard: self._fetch(splits[i], shard),
            [split.dim is not None and split.path not in self.by_path for split in splits],
            finish,
        )

    def whole(self) -> PyTree:
        """All parameters, after a pass that held what it gathered. (What no layer read is gathered
        here; nobody reads it, so that the compiler drops it.)"""
        layout = self.rules.layout
        stacked = {split.path: leaf
                   for name, held in self.stacks.items()
                   for split, leaf in zip(layout_leaves(layout[name]), jax.tree.leaves(held),
                                          strict=True)}  # fmt: skip

        def find(split: Split, shard: jax.Array) -> jax.Array:
            return stacked[split.path] if split.path in stacked else self._fetch(split, shard)

        return map_splits(find, layout, self.kept)

    def _fetch(self, split: Split, shard: jax.Array) -> jax.Array:
        """A whole leaf from its shard, or from its part where there is one."""
        path, parts = split.path, self.parts
        if path not in self.by_path:
            self.by_path[path] = (
                self.rules.fetch(split, shard)
                if parts is None
                else self.rules.refetch(split, shard, shard if path in parts else None)
            )
        return self.by_path[path]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["residuals", "parts"],
    meta_fields=["layer", "pullback"],
)
@dataclass(frozen=True, eq=False)
class Link:
    """What a layer leaves for its backward pass: never a gathered weight.

    Args:
        layer: the layer.
        pullback: its backward pass.
        residuals: what that reads besides weights.
        parts: of the leaves that this layer is the first to read again.
    """

    layer: Layer
    pullback: Pullback
    residuals: list[Any]
    parts: Parts


Links = list[Link | StackLink]


@dataclass(frozen=True)
class End:
    """What the last link of a chain gives: the loss and the model's own metrics."""

    mean: Mean
    metrics: dict[str, Any]


def train_forward(
    pieces: Sequence[Piece],
    rules: Rules,
    kept: PyTree,
    x: Any,
    buffers: PyTree,
    batch: PyTree,
    rng: jax.Array,
    *,
    first: bool = True,
    last: bool = True,
) -> tuple[Any, Links, PyTree]:
    """Runs a chain, or a stage of one, in training mode and keeps what the backward pass needs.

    Args:
        pieces: what to run.
        rules: how to fetch.
        kept: this device's parameters as they are kept between steps.
        x: what the first piece gets; the batch at the start of the chain.
        buffers: buffers before this microbatch.
        batch: this device's rows, or `Inputs`.
        rng: the microbatch's key.
        first: whether the chain starts here, so that `x` needs no gradient.
        last: whether it ends here, with the loss.

    Returns:
        `(out, links, new buffers)`; `out` is an `End` where the chain ends.
    """
    fetched = Fetched(rules, kept)
    return _train_forward(pieces, fetched, x, buffers, batch, rng, first, last)


def holding_forward(
    pieces: Sequence[Piece],
    rules: Rules,
    kept: PyTree,
    x: Any,
    buffers: PyTree,
    batch: PyTree,
    rng: jax.Array,
) -> tuple[End, Links, PyTree, PyTree]:
    """`train_forward` of a whole chain, for rules that hold what is gathered.

    Returns:
        `(end, links, new buffers, whole)`. `whole` is every parameter as the pass gathered it. What
        follows, the backward pass first, reads it with `rules.held()`.
    """
    fetched = Fetched(rules, kept)
    end, links, new = _train_forward(pieces, fetched, x, buffers, batch, rng, True, True)
    return end, links, new, fetched.whole()


def _train_forward(
    pieces: Sequence[Piece],
    fetched: Fetched,
    x: Any,
    buffers: PyTree,
    batch: PyTree,
    rng: jax.Array,
    first: bool,
    last: bool,
) -> tuple[Any, Links, PyTree]:
    rules, kept = fetched.rules, fetched.kept
    x, (rows, step) = _entered(rules, pieces[0], x), opened(batch)
    links: Links = []
    end: list[End] = []
    # Whether a gradient is to go further back than the piece at hand.
    before = not first

    def run_piece(piece: Piece, x: Any, state: PyTree) -> tuple[Any, PyTree]:
        nonlocal before
        dtype = COMPUTE_DTYPES[rules.plan.precision]
        ctx, layer = Context(rows, rng, True, state, dtype, step), piece.layer
        learns = bool(_trained(rules, layer))
        link: Link | StackLink
        if isinstance(layer, Stack):
            link, x, state, held = stack_forward(rules, piece, kept[layer.name], x, ctx)
            if rules.hold:
                fetched.stacks[layer.name] = held
        else:
            link, x, state = _layer_forward(
                layer, fetched, x, ctx.at(piece.number),
                differentiable=before,
                end=end if last and piece is pieces[-1] else None,
            )  # fmt: skip
        if before or learns:  # otherwise all so far is frozen, and has no backward pass
            links.append(link)
        before = before or learns
        return x, state

    out, new = run_chain(pieces, x, buffers, run_piece)
    return end[0] if last else out, links, new


def _entered(rules: Rules, first: Piece, x: Any) -> Any:
    """A chain's input in the compute dtype. A plain model reads its batch as it is."""
    x, _ = opened(x)
    starts = first.number == 0 and bool(first.layer.name)
    return cast_input(rules.plan, x) if starts else x


def _layer_forward(
    layer: Layer,
    fetched: Fetched,
    x: Any,
    ctx: Context,
    differentiable: bool,
    end: list[End] | None,
) -> tuple[Link, Any, PyTree]:
    structure, floats, rest = Floats.of(x, differentiable)
    cell: dict[str, Any] = {}  # static facts learnt while tracing
    treedef = jax.tree.structure(layer_params(layer, fetched.kept))
    learnt = _trained(fetched.rules, layer)

    def run(weights: list[Any], own: list[Any], floats: list[Any]) -> tuple[Any, Any]:
        weights = list(weights)
        for i, weight in zip(learnt, own, strict=True):
            weights[i] = weight
        params = jax.tree.unflatten(treedef, weights)
        own = structure.join(floats, rest)
        if not fetched.rules.alone:
            require_reductions(layer, params, own, ctx)
        y, buffers = apply_layer(layer, params, own, {}, ctx)
        if end is not None:
            mean, metrics = split_loss(y)
            return mean.total, (mean.count, metrics, buffers)
        cell["out"], y_floats, y_rest = Floats.of(y)
        return y_floats, (y_rest, buffers)

    def of_weights(weights: list[Any]) -> PyTree:
        policy = remat_policy(fetched.rules.plan.remat)
        primals = [weights[i] for i in learnt], floats
        y, aux, cell["pullback"], kept = forward(partial(run, weights), primals, weights, policy)
        return y, aux, kept

    y, aux, kept = fetched.run(layer, of_weights)
    link = Link(layer, cell["pullback"], kept, fetched.new_parts(layer, cell["pullback"]))
    if end is not None:
        count, metrics, buffers = aux
        end.append(End(Mean(y, count), metrics))
        return link, None, buffers
    y_rest, buffers = aux
    return link, cell["out"].join(y, y_rest), buffers


def _trained(rules: Rules, layer: Layer | Stack) -> list[int]:
    """Which of a layer's leaves are trained, in tree order."""
    splits = layout_leaves(layer_params(layer, rules.layout))
    return [i for i, split in enumerate(splits) if not split.frozen]


def kept_parts(links: Links) -> list[jax.Array]:
    """What this device keeps of weights for the backward pass (`Plan.secondary`)."""
    own = [link.parts if isinstance(link, Link) else link.parts() for link in links]
    return jax.tree.leaves(own)


_Kept = TypeVar("_Kept", bound=Sequence[Any])


def without_inputs(links: _Kept) -> _Kept:
    """Links or halves without the microbatch's rows and key, which live as long anyway."""
    return with_inputs(links, None, None)


def with_inputs(links: _Kept, batch: PyTree, rng: jax.Array | None) -> _Kept:
    """Links or halves with the microbatch's rows and key, as they were traced."""
    known = None if batch is None else opened(batch)
    found: Any = [
        link.with_inputs(known, rng) if isinstance(link, StackLink | StackHalf) else link
        for link in links
    ]
    return found


class _Sums:
    """Gradients as they come, each reduced once every reader was here."""

    def __init__(self, rules: Rules, layers: Sequence[Layer | Stack]) -> None:
        self.rules = rules
        self.readers = Counter(
            path
            for layer in layers
            if not isinstance(layer, Stack)
            for path in _paths(layer_params(layer, rules.layout))
        )
        self.single: dict[str, jax.Array] = {}
        self.stacked: dict[str, jax.Array] = {}

    def taker(self, layer: Layer) -> Callable[[int, jax.Array], jax.Array]:
        """Takes the gradient of a layer's trained leaf number `i`."""
        splits = layout_leaves(trained(layer_params(layer, self.rules.layout)))
        return lambda i, grad: self._add(splits[i], grad)

    def _add(self, split: Split, grad: jax.Array) -> jax.Array:
        path = split.path
        total = self.single[path] + grad if path in self.single else grad
        self.readers[path] -= 1
        self.single[path] = total if self.readers[path] else self.rules.scatter(split, total)
        return self.single[path]

    def add_stack(self, name: str, grads: PyTree) -> None:
        """Takes the gradients of a stack's layers, which are reduced already."""
        paths = _paths(trained(self.rules.layout[name]))
        self.stacked |= dict(zip(paths, jax.tree.leaves(grads), strict=True))

    def finish(self) -> PyTree:
        """Gradients of all trained leaves."""

        def grad_of(split: Split) -> jax.Array:
            parts = [p[split.path] for p in (self.stacked, self.single) if split.path in p]
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

        grads = map_splits(grad_of, trained(self.rules.layout))
        return self.rules.finish(grads)


def train_backward(
    links: Links, rules: Rules, kept: PyTree, cotangent: Any, rng: jax.Array | None = None
) -> tuple[PyTree, list[Any]]:
    """Gradients of every trained parameter read, reduced as the rules say.

    Args:
        links: what the forward pass left.
        rules: those of the forward pass; `rules.layout` has the parameters that these links read.
        kept: as in the forward pass.
        cotangent: of the chain's output: a scalar for the loss's total where the chain ends, else
            one array per floating-point leaf.
        rng: the microbatch's key, where the backward pass is compiled in halves.

    Returns:
        `(gradients, cotangents of the input's floating-point leaves)`. Gradients are in the
        compute dtype: shards for split leaves if reduced now, otherwise whole.
    """
    fetched = Fetched(rules, kept, _parts(links))
    sums = _Sums(rules, [_layer_of(link) for link in links])
    for link in reversed(links):
        if isinstance(link, StackLink):
            name = link.program.static.piece.layer.name
            grads, cotangent = stack_backward(link, kept[name], cotangent)
            sums.add_stack(name, grads)
        else:
            cotangent = _layer_backward(fetched, link, cotangent, sums, rng)
    return sums.finish(), cotangent


def _parts(links: Sequence[Link | StackLink | Half | StackHalf]) -> Parts:
    """What a pass before kept of leaves outside stacks."""
    own = [link.parts for link in links if isinstance(link, Link | Half)]
    return {path: part for parts in own for path, part in parts.items()}


def _layer_of(link: Link | StackLink) -> Layer | Stack:
    return link.layer if isinstance(link, Link) else link.program.static.piece.layer


def _layer_backward(
    fetched: Fetched, link: Link, cotangent: Any, sums: _Sums, rng: jax.Array | None
) -> Any:
    """The cotangent of a layer's input; the gradients of its leaves go to `sums`."""
    rules = fetched.rules
    if rules.halves:
        half, cotangent = _layer_input_backward(fetched, link, cotangent, rng)
        _layer_weight_backward(fetched, half, sums, rng)
        return cotangent
    # The fence keeps what the forward pass computes out of the backward pass's fusions, and the
    # gathers from starting before there is anything to differentiate.
    residuals, cotangent = rules.fence((link.residuals, cotangent))

    def of_weights(weights: list[Any]) -> PyTree:
        return link.pullback.run(residuals, weights, cotangent)

    finish = sums.taker(link.layer)
    _, cotangent = fetched.run(link.layer, of_weights, residuals, finish)
    return cotangent


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "rest", "parts"],
    meta_fields=["layer"],
)
@dataclass(frozen=True, eq=False)
class Half:
    """What the weights' gradients of a layer take, once its input's gradient is known."""

    layer: Layer
    values: list[Any]
    rest: Rest
    parts: Parts


Halves = list[Half | StackHalf]


def _layer_input_backward(
    fetched: Fetched, link: Link, cotangent: Any, rng: jax.Array | None
) -> tuple[Half, Any]:
    rules = fetched.rules
    assert rng is not None
    residuals, cotangent = rules.fence((link.residuals, cotangent))
    cell: list[Rest] = []

    def of_weights(weights: list[Any]) -> PyTree:
        def whole(weights: list[Any]) -> Any:
            grads, dx = link.pullback.run(residuals, weights, cotangent)
            return list(grads), dx

        dx, values, rest = first_half(whole, weights, lambda run: rules.apart(run, rng))
        cell.append(rest)
        return dx, values

    cotangent, values = fetched.run(link.layer, of_weights, residuals)
    values = unfenced(values, residuals, link.residuals)
    return Half(link.layer, values, cell[-1], link.parts), cotangent


def _layer_weight_backward(
    fetched: Fetched, half: Half, sums: _Sums, rng: jax.Array | None
) -> None:
    rules = fetched.rules
    assert rng is not None
    values = rules.fence(half.values)

    def of_weights(weights: list[Any]) -> tuple[list[Any], tuple[()]]:
        return rules.apart(lambda: half.rest.run(values, weights), rng), ()

    fetched.run(half.layer, of_weights, values, sums.taker(half.layer))


def input_backward(
    links: Links, rules: Rules, kept: PyTree, cotangent: Any, rng: jax.Array
) -> tuple[Halves, list[Any]]:
    """The first half of `train_backward`: cotangents of the input, and what is left to do."""
    fetched = Fetched(rules, kept, _parts(links))
    halves: Halves = []
    half: Half | StackHalf
    for link in reversed(links):
        if isinstance(link, StackLink):
            shards = kept[link.program.static.piece.layer.name]
            half, cotangent = stack_input_backward(link, shards, cotangent)
        else:
            half, cotangent = _layer_input_backward(fetched, link, cotangent, rng)
        halves.append(half)
    return halves, cotangent


def weight_backward(halves: Halves, rules: Rules, kept: PyTree, rng: jax.Array) -> PyTree:
    """The second half of `train_backward`: gradients of every parameter read, reduced."""
    fetched = Fetched(rules, kept, _parts(halves))
    layers = [h.layer if isinstance(h, Half) else h.program.static.piece.layer for h in halves]
    sums = _Sums(rules, layers)
    for half in halves:
        if isinstance(half, StackHalf):
            name = half.program.static.piece.layer.name
            sums.add_stack(name, stack_weight_backward(half, kept[name]))
        else:
            _layer_weight_backward(fetched, half, sums, rng)
    return sums.finish()


def _paths(layout: PyTree) -> list[str]:
    return [split.path for split in layout_leaves(layout)]


def eval_forward(
    pieces: Sequence[Piece],
    rules: Rules,
    kept: PyTree,
    x: Any,
    buffers: PyTree,
    batch: PyTree,
    rng: jax.Array,
) -> Any:
    """Runs a chain, or a stage of one, in evaluation mode; new buffers are dropped.

    Returns:
        What the last piece gives; `split_loss` takes it apart where the chain ends.
    """
    # An evaluation is of the weights that are saved and exported, not of their 8-bit image.
    rules = dataclasses.replace(rules, exact=True)
    fetched = Fetched(rules, kept)
    x, (rows, step) = _entered(rules, pieces[0], x), opened(batch)

    def run_piece(piece: Piece, x: Any, state: PyTree) -> tuple[Any, PyTree]:
        dtype = COMPUTE_DTYPES[rules.plan.precision]
        ctx, layer = Context(rows, rng, False, state, dtype, step), piece.layer
        if isinstance(layer, Stack):
            return stack_eval(rules, piece, kept[layer.name], x, ctx)
        treedef = jax.tree.structure(layer_params(layer, kept))

        def of_weights(weights: list[Any]) -> PyTree:
            params = jax.tree.unflatten(treedef, weights)
            return apply_layer(layer, params, x, {}, ctx.at(piece.number))

        return fetched.run(layer, of_weights)

    out, _ = run_chain(pieces, x, buffers, run_piece)
    return out
