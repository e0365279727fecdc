"""A rolled module with a loss as a `fz.Sequential`: parts and stacks in turns.

The loss is a closure that calls `forward` once, in the middle of its own work. Each part traces it
and takes its two halves apart (`loss_halves.py`). From the first come the module's inputs and all
sizes, in every part anew, since the batch is at hand everywhere and costs nothing to hand on. The
last part runs the second. What a compiler finds unused, it drops.

Between two links travels `{"carry": what layers hand on, "shared": what is read later}`. A stack
leaves the latter alone, so that masks, rotary tables and an encoder's output are kept once. Where
layers differ in a constant, `"number"` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.errors import ConversionError
from fzero.links import Context, Layer, Shard, Stack
from fzero.model import Sequential
from torch_bridge.export.interpret import evaluate
from torch_bridge.export.mode import Mode, TensorInput, as_leaf, frozen_dtypes, in_own_dtypes
from torch_bridge.lower.refs import fill, refs
from torch_bridge.structure.heads import find_head
from torch_bridge.structure.loss_halves import Halves, Halving, halve
from torch_bridge.structure.retrace import Computed, Graphs
from torch_bridge.structure.rolled import Loop, Part, Rolled
from torch_bridge.structure.stacked import Names


Arrays = Mapping[str, Any]
Nested = dict[str, dict[str, Any]]
Loss = Callable[..., Any]


@dataclass(frozen=True)
class ChainSource:
    """What a chain is made of: a converted module's graphs and initial values.

    Attributes:
        graphs: each mode's graph, rolled.
        params: initial values, as they lie in the conversion.
        buffers: likewise.
        names: the stacked leaves among them.
        frozen: parameters that no step changes.
        same: `fz.Model`'s `buffer_reduce` for its buffers.
        shard: which dims of its parameters lie along which axis of a plan.
    """

    graphs: Graphs
    params: Arrays
    buffers: Arrays
    names: Names
    frozen: frozenset[str]
    same: Mapping[str, str]
    shard: Shard


# Under this name a zero of the dtype that the module computes in is handed on, where that is not
# its own; no value of a graph is called so.
_DTYPE = "computes in"


def make_chain(source: ChainSource, loss: Loss, predicting: Halving) -> Sequential:
    """The chain of a converted module.

    Args:
        source: the module.
        loss: `loss(forward, batch)`, which calls `forward` once.
        predicting: the halves of what `fz.predict_step` gives.

    Returns:
        A `Sequential` whose params are `{link: {leaf: value}}`.

    Raises:
        ConversionError: a buffer is read before the link that updates it.
    """
    plan = _Plan(source)
    params, buffers = plan.by_link(source.params), plan.by_link(source.buffers)
    frozen = frozenset(f"{plan.owner[name]}/{name}" for name in source.frozen)
    trained, predict = (_links(plan, way) for way in (partial(halve, loss), predicting))
    shard: Shard = {f"{plan.owner[str(k)]}/{k}": dims for k, dims in source.shard.items()}
    return Sequential(trained, None, (params, buffers), frozen, predict, shard)


def _links(plan: _Plan, halving: Halving) -> list[Layer | Stack]:
    return [
        (_stack if index % 2 else _layer)(plan, index, name, halving)
        for index, name in enumerate(plan.links)
    ]


def chain_values(source: ChainSource, params: Arrays, buffers: Arrays) -> tuple[Nested, Nested]:
    """Params and buffers as the module's chain has them: `{link: {leaf: value}}`."""
    plan = _Plan(source)
    return plan.by_link(params), plan.by_link(buffers)


class _Plan:
    """Which link holds which leaf, and what travels between links."""

    def __init__(self, source: ChainSource) -> None:
        self.source = source
        self.links = _link_names(source.graphs.first)
        self.stacked = {one.name: one for one in source.names.stacked}
        self.owner = {
            one.name: self.links[self._loop_of(one.name)] for one in self.stacked.values()
        }
        self.reads: list[dict[str, str]] = [{} for _ in self.links]  # leaf -> path, of parts
        for name in source.params:
            if name not in self.stacked:
                self._place_param(name)
        for name in source.buffers:
            if name not in self.stacked:
                self._place_buffer(name)

    def _loop_of(self, stacked: str) -> int:
        run = self.stacked[stacked].run
        return next(
            index
            for index, part in enumerate(self.source.graphs.first.parts)
            if isinstance(part, Loop) and part.run == run
        )

    def _readers(self, leaf: str) -> list[int]:
        """The parts that read a leaf, or hand it to the loop after them, in any mode."""
        graphs = self.source.graphs
        found = [
            _readers(graphs.modes[train], graph, leaf) for train, graph in graphs.rolled.items()
        ]
        return sorted(set().union(*found))

    def _place_param(self, name: str) -> None:
        """The first reader owns a parameter; one that is never read waits at the start."""
        first, *others = self._readers(name) or [0]
        self.owner[name] = self.links[first]
        for index in others:
            self.reads[index][name] = f"{self.links[first]}/{name}"

    def _place_buffer(self, name: str) -> None:
        """Its writer owns a buffer, or its first reader; later ones get it handed on."""
        readers = self._readers(name) or [0]
        writers = [
            _writer(rolled, name)
            for rolled in self.source.graphs.rolled.values()
            if name in rolled.updates
        ]
        owner = max(writers, default=readers[0])
        if readers[0] < owner or min(writers, default=owner) < owner:
            raise ConversionError(
                f"buffer `{name}` is read in {self.links[readers[0]]!r} and updated in"
                f" {self.links[owner]!r}; as links of a chain they could not share it. Use"
                " model(loss, chain=False), or convert with roll=False"
            )
        self.owner[name] = self.links[owner]

    def by_link(self, values: Arrays) -> Nested:
        """Leaves as the chain has them."""
        nested: Nested = {}
        for name, value in values.items():
            nested.setdefault(self.owner[name], {})[name] = value
        return nested

    def first_dtype(self, params: Arrays, ctx: Context) -> Computed | None:
        """What the module computes in, if it is not its own dtype, as the start knows it.

        The plan says it, or the parameters at hand; a start without any goes by the initial ones,
        which may be masters.
        """
        graphs = self.source.graphs
        own = set(graphs.dtypes.values())
        if ctx.dtype is not None:
            float32, dtype = self.float32(ctx), np.dtype(ctx.dtype)
            return None if own <= {dtype} and not float32 else Computed(dtype, float32)
        found = graphs.dtype_of(params)
        told = len(own) == 1 and not graphs.dtypes.keys().isdisjoint(params)
        return found if found is not None or told else graphs.dtype_of(self.source.params)

    def told(self, x: Any, ctx: Context) -> Computed | None:
        """What the start has found that the module computes in; None: its own dtype."""
        given = x["shared"].get(_DTYPE)
        return None if given is None else Computed(np.dtype(given.dtype), self.float32(ctx))

    def float32(self, ctx: Context) -> frozenset[str]:
        """The module's own leaves that the plan keeps in float32."""
        paths = {name: f"{self.owner[name]}/{name}" for name in self.source.params}
        return self.source.graphs.float32(ctx, paths)

    def call(self, halving: Halving, batch: Any, train: bool, computed: Computed | None) -> Halves:
        """The graph for a batch, the module's inputs, and the loss of its output."""
        halves = halving(batch, self.source.graphs, train, computed)
        mode, rolled, _ = halves.call
        assert rolled is not None
        if mode is not self.source.graphs.modes[train]:
            self._check_places(mode, rolled)
        return halves

    def shapes(
        self, halving: Halving, batch: Any, train: bool, computed: Computed | None
    ) -> tuple[Mode, Rolled, dict[str, Any]]:
        """As `call`, with the shapes of the inputs: nothing of the loss is computed."""
        graphs: list[tuple[Mode, Rolled]] = []

        def inputs(batch: Any) -> dict[str, Any]:
            mode, rolled, found = self.call(halving, batch, train, computed).call
            assert rolled is not None
            graphs.append((mode, rolled))
            return found

        found = jax.eval_shape(inputs, batch)
        return (*graphs[0], found)

    def _check_places(self, mode: Mode, rolled: Rolled) -> None:
        """Whether a graph for other sizes finds its leaves where the example's graphs have them."""
        for name in sorted({*mode.params.values(), *mode.buffers.values()} - {*self.stacked}):
            for index in sorted(_readers(mode, rolled, name)):
                link = self.links[index]
                owned = self.owner.get(name) == link or name in self.reads[index]
                if not owned or (name in rolled.updates and _writer(rolled, name) != index):
                    raise ConversionError(
                        f"for these sizes {link!r} of the chain reads `{name}`, which it does not"
                        " have; convert with an example of these sizes, or use"
                        " model(loss, chain=False)"
                    )

    def handed_on(self, mode: Mode, rolled: Rolled, index: int) -> tuple[str, ...]:
        """What part `index` hands to the loop after it, and past it to later parts."""
        loop = rolled.parts[index + 1]
        assert isinstance(loop, Loop)
        later = self.links[index + 2 :]
        new = [value for name, value in rolled.updates.items() if self.owner[name] in later]
        wanted = set(refs((rolled.outputs, new)))
        for part in reversed(rolled.parts[index + 2 :]):
            wanted -= set(part.gives())
            wanted |= set(part.reads)
        inputs = {i.placeholder for i in mode.inputs if isinstance(i, TensorInput)}
        # Parts have these themselves.
        wanted -= {*inputs, *mode.params, *mode.constants, *rolled.sizes, *loop.gives()}
        wanted -= {b for b, name in mode.buffers.items() if self.owner.get(name) in later}
        return tuple(dict.fromkeys((*loop.shared, *sorted(wanted))))


def _readers(mode: Mode, rolled: Rolled, leaf: str) -> set[int]:
    """The parts of a graph that read a leaf, or hand it to the loop after them."""
    named = {p for p, name in {**mode.params, **mode.buffers}.items() if name == leaf}
    found = {i - i % 2 for i, part in enumerate(rolled.parts) if named.intersection(part.reads)}
    if named.intersection(refs(rolled.outputs)):
        found.add(len(rolled.parts) - 1)
    return found


def _writer(rolled: Rolled, buffer: str) -> int:
    """The part in which a buffer's new value exists first."""
    names = set(refs(rolled.updates[buffer]))
    for index, part in enumerate(rolled.parts):
        if names.intersection(part.gives()):
            return index + index % 2
    return 0


def _link_names(rolled: Rolled) -> tuple[str, ...]:
    stacks = [part.run.name for part in rolled.parts if isinstance(part, Loop)]
    names: list[str] = []
    for index, part in enumerate(rolled.parts):
        if isinstance(part, Loop):
            names.append(part.run.name)
            continue
        own = "start" if index == 0 else "end" if index + 1 == len(rolled.parts) else "between"
        own += f"_{index // 2}" if own == "between" and len(stacks) > 2 else ""
        while own in stacks:
            own += "_"
        names.append(own)
    return tuple(names)


def _layer(plan: _Plan, index: int, name: str, halving: Halving) -> Layer:
    """A link that is computed once."""
    source = plan.source
    buffers = [
        leaf for leaf, owner in plan.owner.items() if owner == name and leaf in source.buffers
    ]
    last = index + 1 == len(plan.links)

    def apply(params: Any, x: Any, ctx: Context) -> Any:
        computed = plan.told(x, ctx) if index else plan.first_dtype(params, ctx)
        halves = plan.call(halving, ctx.batch, ctx.train, computed)
        mode, rolled, env = halves.call
        assert rolled is not None
        part = rolled.parts[index]
        assert isinstance(part, Part)
        state = ctx.buffers if buffers else {}
        env.update(rolled.known_sizes(mode.sizes(env)))
        env.update(mode.constants)
        read_as = frozen_dtypes(mode.param_dtypes, source.frozen)
        for placeholder, leaf in mode.params.items():
            if leaf in params:
                param = params[leaf]
                env[placeholder] = as_leaf(param, leaf in source.frozen, read_as.get(leaf))
        for placeholder, leaf in mode.buffers.items():
            if leaf in state:
                env[placeholder] = as_leaf(state[leaf], False, mode.buffer_dtypes.get(leaf))
        if index:
            before = rolled.parts[index - 1]
            assert isinstance(before, Loop)
            env.update(x["shared"])
            env.update({given: x["carry"][place] for given, place in before.ends.items()})
        _evaluated(part, rolled, halves.logits if last else (), env, ctx.rng)
        written = {leaf: rolled.updates[leaf] for leaf in buffers if leaf in rolled.updates}
        new = {**state, **in_own_dtypes(fill(written, env), state)}
        if last:
            out = halves.finish(fill(list(rolled.outputs), env))
        else:
            loop = rolled.parts[index + 1]
            assert isinstance(loop, Loop)
            shared = {given: env[given] for given in plan.handed_on(mode, rolled, index)}
            if computed is not None:
                shared[_DTYPE] = jnp.zeros((), computed.dtype)
            out = {"carry": tuple(env[given] for given, _ in loop.carry), "shared": shared}
            if loop.scanned:
                out["number"] = jnp.zeros((), jnp.int32)
        return (out, new) if buffers else out

    same = {leaf: source.same[leaf] for leaf in buffers if leaf in source.same}
    return Layer(
        name, None, apply, reads=plan.reads[index], stateful=bool(buffers), buffer_reduce=same
    )


def _evaluated(
    part: Part, rolled: Rolled, logits: Collection[int], env: dict[str, Any], rng: Any
) -> None:
    """Adds what a part computes to `env`; for logits that only a loss reads, their `Head`."""
    every = [*rolled.outputs, *rolled.updates.values()]
    found = {
        rolled.outputs[place].name: head
        for place in logits
        if (head := find_head(part.steps, rolled.outputs[place], every)) is not None
    }
    skipped = frozenset().union(*(head.skipped for head in found.values()))
    later = tuple(step for step in part.steps if step.name in skipped)
    evaluate(tuple(step for step in part.steps if step.name not in skipped), env, rng)
    heads = {name: head.head(env) for name, head in found.items()}
    if None in heads.values():
        evaluate(later, env, rng)
        return
    env.update(heads)


def _stack(plan: _Plan, index: int, name: str, halving: Halving) -> Stack:
    """A link of equal layers."""
    source = plan.source
    buffers = [leaf for leaf in source.buffers if plan.owner[leaf] == name]
    stateful = bool(buffers)

    def apply(params: Any, x: Any, ctx: Context) -> Any:
        computed = plan.told(x, ctx)
        mode, rolled, shapes = plan.shapes(halving, ctx.batch, ctx.train, computed)
        loop = rolled.parts[index]
        assert isinstance(loop, Loop)
        state = ctx.buffers if stateful else {}
        read_as = frozen_dtypes(source.names.of_entries(mode.param_dtypes), source.frozen)
        leaves = {
            leaf: as_leaf(value, leaf in source.frozen, read_as.get(leaf))
            for leaf, value in params.items()
        }
        casts = source.names.of_entries(mode.buffer_dtypes)
        read = {leaf: as_leaf(value, False, casts.get(leaf)) for leaf, value in state.items()}
        fixed = {**mode.constants, **rolled.known_sizes(mode.sizes(shapes))}
        number = x.get("number")
        carry, new = loop.layer(number, x["carry"], x["shared"], {**leaves, **read}, fixed, ctx.rng)
        out = {"carry": carry, "shared": x["shared"]}
        if number is not None:
            out["number"] = number + 1
        return (out, {**state, **in_own_dtypes(new, state)}) if stateful else out

    loop = source.graphs.first.parts[index]
    assert isinstance(loop, Loop)
    same = {leaf: source.same[leaf] for leaf in buffers if leaf in source.same}
    return Stack(
        name, loop.run.num, _given, apply, shared=("shared",), stateful=stateful, buffer_reduce=same
    )


def _given(_: Any) -> Any:
    raise NotImplementedError("initial values are given to the Sequential")


def links_merged(tree: Any) -> dict[str, Any]:
    """Params or buffers by leaf, from those of a chain; those of a function are so already."""
    merged: dict[str, Any] = {}
    for key, value in dict(tree).items():
        merged.update(value if isinstance(value, Mapping) else {key: value})
    return merged
