"""A rolled module with a loss as a `fz.Sequential`: layers and stacks in turns.

The loss is a closure that calls `forward` once, in the middle of its own work. Each part traces it
and takes it apart there (`loss_call.py`). What is before the call gives the module's inputs and all
sizes, in every part anew, since the batch is at hand everywhere and costs nothing to hand on. The
last part runs what follows the call. What a compiler finds unused, it drops.

Between two links travels `{"carry": what layers hand on, "shared": what is read later}`. A stack
leaves the latter alone, so that masks, rotary tables and an encoder's output are kept once. Where
layers differ in a constant, `"number"` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
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
from torch_bridge.structure.loops import Loop, LoopedGraph, Straight
from torch_bridge.structure.loss_call import FindCall, LossCall, find_call
from torch_bridge.structure.retrace import Computed, Graphs
from torch_bridge.structure.stacked_names import Names


Arrays = Mapping[str, Any]
Nested = dict[str, dict[str, Any]]
Loss = Callable[..., Any]


# Under this name a zero of the dtype that the module computes in is handed on, where that is not
# its own; no value of a graph is called so.
_DTYPE = "computes in"


@dataclass(frozen=True, eq=False)
class Chain:
    """A converted module as links: which of them holds which leaf, and what travels between them.

    Attributes:
        graphs: each mode's graph, with loops.
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

    def model(self, loss: Loss, predicting: FindCall) -> Sequential:
        """The chain with a loss.

        Args:
            loss: `loss(forward, batch)`, which calls `forward` once.
            predicting: finds the call for what `fz.predict_step` gives.

        Returns:
            A `Sequential` whose params are `{link: {leaf: value}}`.

        Raises:
            ConversionError: a buffer is read before the link that updates it.
        """
        trained, predict = (
            [
                (_stack if index % 2 else _layer)(self, index, way)
                for index in range(len(self.links))
            ]
            for way in (partial(find_call, loss), predicting)
        )
        initial = self.by_link(self.params), self.by_link(self.buffers)
        frozen = frozenset(self.path(name) for name in self.frozen)
        shard: Shard = {self.path(str(name)): dims for name, dims in self.shard.items()}
        return Sequential(trained, None, initial, frozen, predict, shard)

    def by_link(self, values: Arrays) -> Nested:
        """Leaves as the chain has them."""
        nested: Nested = {}
        for name, value in values.items():
            nested.setdefault(self.owner[name], {})[name] = value
        return nested

    def path(self, leaf: str) -> str:
        """Where a leaf is in the chain's params or buffers."""
        return f"{self.owner[leaf]}/{leaf}"

    @cached_property
    def links(self) -> tuple[str, ...]:
        """The name of each link."""
        return _link_names(self.graphs.first)

    @cached_property
    def owner(self) -> dict[str, str]:
        """The link that holds each leaf; of a parameter outside of stacks the first reader."""
        stacks = {one.name: one.stack.name for one in self.names.stacked}
        alone = {name: self.links[readers[0]] for name, readers in self._readers.items()}
        buffers = {name: self._buffer_owner(name) for name in self.buffers if name not in stacks}
        return {**stacks, **alone, **buffers}

    @cached_property
    def reads(self) -> tuple[dict[str, str], ...]:
        """For each link, the parameters of others that it reads, with their paths."""
        alone = [name for name in self.params if name in self._readers]
        return tuple(
            {name: self.path(name) for name in alone if index in self._readers[name][1:]}
            for index in range(len(self.links))
        )

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        """The parts that read each leaf outside of stacks, or hand it to the loop after them.

        One that is never read is where it is written, or waits at the start.
        """
        stacked = {one.name for one in self.names.stacked}
        modes = self.graphs.modes
        graphs = [(modes[train], rolled) for train, rolled in self.graphs.rolled.items()]
        return {
            name: sorted(set().union(*(_readers_in(*graph, name) for graph in graphs)))
            or [max((_writer(r, name) for _, r in graphs if name in r.updates), default=0)]
            for name in (*self.params, *self.buffers)
            if name not in stacked
        }

    def _buffer_owner(self, name: str) -> str:
        """Its writer owns a buffer, or its first reader; later ones get it handed on."""
        first = self._readers[name][0]
        graphs = self.graphs.rolled.values()
        writers = [_writer(graph, name) for graph in graphs if name in graph.updates]
        owner = max(writers, default=first)
        if first < owner or min(writers, default=owner) < owner:
            raise ConversionError(
                f"buffer `{name}` is read in {self.links[first]!r} and updated in"
                f" {self.links[owner]!r}; as links of a chain they could not share it. Use"
                " model(loss, chain=False), or convert with roll=False"
            )
        return self.links[owner]

    def first_dtype(self, params: Arrays, ctx: Context) -> Computed | None:
        """What the module computes in, if it is not its own dtype, as the start knows it.

        The plan says it, or the parameters at hand; a start without any goes by the initial ones,
        which may be masters.
        """
        graphs = self.graphs
        own = set(graphs.dtypes.values())
        if ctx.dtype is not None:
            float32, dtype = self.float32(ctx), np.dtype(ctx.dtype)
            return None if own <= {dtype} and not float32 else Computed(dtype, float32)
        found = graphs.dtype_of(params)
        told = len(own) == 1 and not graphs.dtypes.keys().isdisjoint(params)
        return found if found is not None or told else graphs.dtype_of(self.params)

    def told(self, x: Any, ctx: Context) -> Computed | None:
        """What the start has found that the module computes in; None: its own dtype."""
        given = x["shared"].get(_DTYPE)
        return None if given is None else Computed(np.dtype(given.dtype), self.float32(ctx))

    def float32(self, ctx: Context) -> frozenset[str]:
        """The module's own leaves that the plan keeps in float32."""
        return self.graphs.float32(ctx, {name: self.path(name) for name in self.params})

    def call(self, find: FindCall, batch: Any, train: bool, computed: Computed | None) -> LossCall:
        """The graph for a batch, the module's inputs, and the loss of its output."""
        found = find(batch, self.graphs, train, computed)
        mode, rolled, _ = found.call
        assert rolled is not None
        if mode is not self.graphs.modes[train]:
            self._check_leaves(mode, rolled)
        return found

    def shapes(
        self, find: FindCall, batch: Any, train: bool, computed: Computed | None
    ) -> tuple[Mode, LoopedGraph, dict[str, Any]]:
        """As `call`, with the shapes of the inputs: nothing of the loss is computed."""
        graphs: list[tuple[Mode, LoopedGraph]] = []

        def inputs(batch: Any) -> dict[str, Any]:
            mode, rolled, found = self.call(find, batch, train, computed).call
            assert rolled is not None
            graphs.append((mode, rolled))
            return found

        found = jax.eval_shape(inputs, batch)
        return (*graphs[0], found)

    def _check_leaves(self, mode: Mode, rolled: LoopedGraph) -> None:
        """Whether a graph for other sizes finds its leaves where the example's graphs have them."""
        for name in sorted({*mode.params.values(), *mode.buffers.values()}):
            for index in sorted(_readers_in(mode, rolled, name)):
                link = self.links[index]
                owned = self.owner.get(name) == link or name in self.reads[index]
                if not owned or (name in rolled.updates and _writer(rolled, name) != index):
                    raise ConversionError(
                        f"for these sizes {link!r} of the chain reads `{name}`, which it does not"
                        " have; convert with an example of these sizes, or use"
                        " model(loss, chain=False)"
                    )

    def handed_on(self, mode: Mode, rolled: LoopedGraph, index: int) -> tuple[str, ...]:
        """What member `index` hands to the loop after it, and past it to later members."""
        loop = rolled.members[index + 1]
        assert isinstance(loop, Loop)
        later = self.links[index + 2 :]
        new = [value for name, value in rolled.updates.items() if self.owner[name] in later]
        wanted = set(refs((rolled.outputs, new)))
        for member in reversed(rolled.members[index + 2 :]):
            wanted -= set(member.gives())
            wanted |= set(member.reads)
        inputs = {i.placeholder for i in mode.inputs if isinstance(i, TensorInput)}
        # Members have these themselves.
        wanted -= {*inputs, *mode.params, *mode.constants, *rolled.sizes, *loop.gives()}
        wanted -= {b for b, name in mode.buffers.items() if self.owner.get(name) in later}
        return tuple(dict.fromkeys((*loop.shared, *sorted(wanted))))


def _readers_in(mode: Mode, rolled: LoopedGraph, leaf: str) -> set[int]:
    """The members of a graph that read a leaf, or hand it to the loop after them."""
    named = {p for p, name in {**mode.params, **mode.buffers}.items() if name == leaf}
    found = {i - i % 2 for i, one in enumerate(rolled.members) if named.intersection(one.reads)}
    if named.intersection(refs(rolled.outputs)):
        found.add(len(rolled.members) - 1)
    return found


def _writer(rolled: LoopedGraph, buffer: str) -> int:
    """The member in which a buffer's new value exists first."""
    names = set(refs(rolled.updates[buffer]))
    for index, member in enumerate(rolled.members):
        if names.intersection(member.gives()):
            return index + index % 2
    return 0


def _link_names(rolled: LoopedGraph) -> tuple[str, ...]:
    stacks = [member.stack.name for member in rolled.members if isinstance(member, Loop)]
    names: list[str] = []
    for index, member in enumerate(rolled.members):
        if isinstance(member, Loop):
            names.append(member.stack.name)
            continue
        own = "start" if index == 0 else "end" if index + 1 == len(rolled.members) else "between"
        own += f"_{index // 2}" if own == "between" and len(stacks) > 2 else ""
        while own in stacks:
            own += "_"
        names.append(own)
    return tuple(names)


def _layer(chain: Chain, index: int, find: FindCall) -> Layer:
    """A link that is computed once."""
    name = chain.links[index]
    buffers = [leaf for leaf in chain.buffers if chain.owner[leaf] == name]
    last = index + 1 == len(chain.links)

    def apply(params: Any, x: Any, ctx: Context) -> Any:
        computed = chain.told(x, ctx) if index else chain.first_dtype(params, ctx)
        found = chain.call(find, ctx.batch, ctx.train, computed)
        mode, rolled, env = found.call
        assert rolled is not None
        member = rolled.members[index]
        assert isinstance(member, Straight)
        state = ctx.buffers if buffers else {}
        env.update(rolled.known_sizes(mode.sizes(env)))
        env.update(mode.constants)
        read_as = frozen_dtypes(mode.param_dtypes, chain.frozen)
        for placeholder, leaf in mode.params.items():
            if leaf in params:
                param = params[leaf]
                env[placeholder] = as_leaf(param, leaf in chain.frozen, read_as.get(leaf))
        for placeholder, leaf in mode.buffers.items():
            if leaf in state:
                env[placeholder] = as_leaf(state[leaf], False, mode.buffer_dtypes.get(leaf))
        if index:
            before = rolled.members[index - 1]
            assert isinstance(before, Loop)
            env.update(x["shared"])
            env.update({given: x["carry"][position] for given, position in before.ends.items()})
        _evaluated(member, rolled, found.logits if last else (), env, ctx.rng)
        written = {leaf: rolled.updates[leaf] for leaf in buffers if leaf in rolled.updates}
        new = {**state, **in_own_dtypes(fill(written, env), state)}
        if last:
            out = found.finish(fill(list(rolled.outputs), env))
        else:
            loop = rolled.members[index + 1]
            assert isinstance(loop, Loop)
            shared = {given: env[given] for given in chain.handed_on(mode, rolled, index)}
            if computed is not None:
                shared[_DTYPE] = jnp.zeros((), computed.dtype)
            out = {"carry": tuple(env[given] for given, _ in loop.carry), "shared": shared}
            if loop.scanned:
                out["number"] = jnp.zeros((), jnp.int32)
        return (out, new) if buffers else out

    same = {leaf: chain.same[leaf] for leaf in buffers if leaf in chain.same}
    return Layer(
        name, None, apply, reads=chain.reads[index], stateful=bool(buffers), buffer_reduce=same
    )


def _evaluated(
    member: Straight, rolled: LoopedGraph, logits: Collection[int], env: dict[str, Any], rng: Any
) -> None:
    """Adds what a member computes to `env`; for logits that only a loss reads, their `Head`."""
    every = [*rolled.outputs, *rolled.updates.values()]
    found = {
        rolled.outputs[number].name: head
        for number in logits
        if (head := find_head(member.ops, rolled.outputs[number], every)) is not None
    }
    skipped = frozenset().union(*(head.skipped for head in found.values()))
    later = tuple(op for op in member.ops if op.name in skipped)
    evaluate(tuple(op for op in member.ops if op.name not in skipped), env, rng)
    heads = {name: head.head(env) for name, head in found.items()}
    if None in heads.values():
        evaluate(later, env, rng)
        return
    env.update(heads)


def _stack(chain: Chain, index: int, find: FindCall) -> Stack:
    """A link of equal layers."""
    name = chain.links[index]
    buffers = [leaf for leaf in chain.buffers if chain.owner[leaf] == name]
    stateful = bool(buffers)

    def apply(params: Any, x: Any, ctx: Context) -> Any:
        computed = chain.told(x, ctx)
        mode, rolled, shapes = chain.shapes(find, ctx.batch, ctx.train, computed)
        loop = rolled.members[index]
        assert isinstance(loop, Loop)
        state = ctx.buffers if stateful else {}
        read_as = frozen_dtypes(chain.names.of_entries(mode.param_dtypes), chain.frozen)
        leaves = {
            leaf: as_leaf(value, leaf in chain.frozen, read_as.get(leaf))
            for leaf, value in params.items()
        }
        casts = chain.names.of_entries(mode.buffer_dtypes)
        read = {leaf: as_leaf(value, False, casts.get(leaf)) for leaf, value in state.items()}
        fixed = {**mode.constants, **rolled.known_sizes(mode.sizes(shapes))}
        number = x.get("number")
        carry, new = loop.layer(number, x["carry"], x["shared"], {**leaves, **read}, fixed, ctx.rng)
        out = {"carry": carry, "shared": x["shared"]}
        if number is not None:
            out["number"] = number + 1
        return (out, {**state, **in_own_dtypes(new, state)}) if stateful else out

    loop = chain.graphs.first.members[index]
    assert isinstance(loop, Loop)
    same = {leaf: chain.same[leaf] for leaf in buffers if leaf in chain.same}
    return Stack(
        name,
        loop.stack.num,
        _given,
        apply,
        shared=("shared",),
        stateful=stateful,
        buffer_reduce=same,
    )


def _given(_: Any) -> Any:
    raise NotImplementedError("initial values are given to the Sequential")


def links_merged(tree: Any) -> dict[str, Any]:
    """Params or buffers by leaf, from those of a chain; those of a function are so already."""
    merged: dict[str, Any] = {}
    for key, value in dict(tree).items():
        merged.update(value if isinstance(value, Mapping) else {key: value})
    return merged
