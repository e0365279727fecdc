"""`sequential`: torch modules called one after the other become a chain of layers.

It converts nothing itself: each module is one `convert`, with what the one before it gives as the
example. `convert` of the whole would not do: its graph is divided where equal blocks are, and into
parts that read each other's values, while here a plan may cut between any two modules, each has its
leaves under its own names, and what is called may be a list without a forward. So what is here is
only what lies between modules: who holds a weight that several have, and what takes what.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError
from fzero.keys import layer_key
from fzero.links import Context, Layer, Shard, layer_params
from fzero.model import Sequential
from fzero.summary import Printed
from torch_bridge.convert import convert
from torch_bridge.converted import Applied, Converted
from torch_bridge.export.watch.forward import untouched
from torch_bridge.module.initial import read_values, with_masters
from torch_bridge.module.names import (
    Layout,
    Leaf,
    find_leaves,
    read_layout,
    refuse_overlaps,
    refuse_shared,
)
from torch_bridge.module.weights import to_torch


Arrays = Mapping[str, Any]
Nested = dict[str, dict[str, Any]]


@dataclass(frozen=True, eq=False, repr=False)
class ConvertedSequential(Printed):
    """PyTorch modules in a row as a chain that can be cut into pipeline stages.

    Attributes:
        model: the `fz.Sequential`, one `fz.Layer` per module, with the loss.
        params: initial values, `{layer: {name in its module: read-only host array}}`. A weight
            that several modules share is one entry, in the first of them; the others read it.
        buffers: running statistics and other untrained tensors, likewise.
        layout: names, ties and dtypes of every leaf, as in the original module's `state_dict`.
        masters: whether `model` gives parameters of 16 bits float32 masters.
        modules: what each layer's module was converted to.
        places: which leaf of the original module is at each path (`layer/name`) of `params` and
            `buffers`, in the order of `layout`.
    """

    model: Sequential
    params: Nested
    buffers: Nested
    layout: Layout
    masters: bool
    modules: Mapping[str, Converted] = field(repr=False)
    places: Mapping[str, Leaf] = field(repr=False)

    def _summary(self) -> str:
        return f"ConvertedSequential of {self.model!r}"

    def apply(
        self, params: Any, buffers: Any, *args: Any, rng: Any = None, train: bool = False
    ) -> Applied:
        """Run all modules, without the loss.

        Args:
            params: values for `self.params`, same structure and shapes.
            buffers: values for `self.buffers`.
            *args: what the first module takes.
            rng: a JAX key; needed when a module draws random numbers.
            train: which mode the modules run in.

        Returns:
            `(output, buffers)`: what the last module gives, and all buffers with the ones that
            the modules update replaced.

        Raises:
            ConversionError: other arguments, names or shapes than in the example.

        Example:
            >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
            >>> chain = sequential(module, torch.zeros(2, 3))
            >>> chain.apply(chain.params, chain.buffers, np.ones((5, 3), np.float32)).output.shape
            (5, 4)
        """
        new, given = dict(buffers), args
        for number, (name, converted) in enumerate(self.modules.items()):
            layer, key = self.model.layers[number], None if rng is None else layer_key(rng, number)
            weights, state = layer_params(layer, params), buffers.get(name, {})
            out, state = converted.apply(weights, state, *given, rng=key, train=train)
            given = (out,)
            if layer.stateful:
                new[name] = state
        return Applied(given[0], new)

    def by_name(self, tree: Any) -> dict[str, Any]:
        """Params or buffers of the chain under the names of the original module's leaves."""
        found: dict[str, Any] = {}
        for path, leaf in self.places.items():
            layer, name = path.split("/", 1)
            if name in tree.get(layer, {}):
                found.setdefault(leaf.name, tree[layer][name])
        return found

    def by_initial(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Initial values under the names of the original module's leaves."""
        return self.by_name(self.params), self.by_name(self.buffers)

    def trained(self, params: Nested) -> Nested:
        """Parameters as `model` trains them: with `masters`, those of 16 bits are widened."""
        return _trained(params, self.places) if self.masters else params

    def by_layer(self, params: Arrays, buffers: Arrays) -> tuple[Nested, Nested]:
        """Leaves under their names in the original module as the chain's params and buffers."""
        return _by_layer(self.places, params, buffers)

    def entries(self) -> dict[str, tuple[str, ...]]:
        """Names of the original module's leaves at each path of `params`."""
        return {path: (leaf.name,) for path, leaf in self.places.items() if leaf.is_param}

    def reached(self) -> frozenset[str]:
        """As `Converted.reached`, of the original module's leaves."""
        found: set[str] = set()
        for layer, (name, one) in zip(self.model.layers, self.modules.items(), strict=False):
            reads = getattr(layer, "reads", {})
            found.update(self.places[reads.get(own, f"{name}/{own}")].name for own in one.reached())
        return frozenset(found)


def sequential(
    modules: torch.nn.Sequential | Iterable[torch.nn.Module],
    *example_args: Any,
    names: Sequence[str] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    inputs: str | Sequence[str] | None = "x",
    root: torch.nn.Module | None = None,
    masters: bool = True,
) -> ConvertedSequential:
    """Convert modules that are called one after the other into a chain of layers.

    Every module becomes one `fz.Layer`, converted as `convert` does it with what the module before
    it gives (in eval mode) as the example; so a plan can gather and pipeline them one by one.

    Args:
        modules: a `torch.nn.Sequential`, or the modules in the order of their calls. Each takes
            what the one before it returns, as one argument.
        *example_args: arguments for the first module; a batch of at least 2.
        names: a name for each layer. The default are the names in the `Sequential`, or numbers.
        loss: `loss(outputs, batch)`, as for `fz.Sequential`; without one the last module's output
            is the loss.
        inputs: key of the batch whose value the first module takes, or one key for each of its
            arguments; `None` if it takes the batch itself.
        root: the module that a list was taken out of. Weights then go back under its names; it
            must hold every tensor of the list, and the list every one that its `state_dict` has.
        masters: as for `convert`.

    Returns:
        The chain with its initial values; `state_dict`, `load_state_dict` and `save` take it.

    Raises:
        ConversionError: a module cannot be converted or does not take what comes before it (which
            one is said), names are not as many or not allowed, modules update one buffer together,
            or `root` does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        >>> chain = sequential(module, torch.zeros(2, 3), loss=lambda y, batch: jnp.mean(y))
        >>> [layer.name for layer in chain.model.layers], sorted(chain.params["0"])
        (['0', '1', 'loss'], ['bias', 'weight'])
    """
    children = _children(modules, names)
    source = root  # what gives the leaves their names in a `state_dict`
    if source is None and isinstance(modules, torch.nn.Sequential):
        source = modules
    elif source is None:
        source = torch.nn.Sequential(OrderedDict(children))
    layout = read_layout(source)
    refuse_shared(layout)
    refuse_overlaps(layout)
    converted = _convert_each(children, example_args)
    found = [find_leaves(source, layout, child) for child in children.values()]
    places = _places(layout, converted, found)
    if root is not None:
        _check_root(layout, places)
    kept = {leaf.name: path for path, leaf in places.items() if leaf.is_param}
    layers: list[Layer] = []
    for (name, one), leaves in zip(converted.items(), found, strict=True):
        paths = {own: kept[leaves[own].name] for own in one.params}
        reads = {own: path for own, path in paths.items() if path != f"{name}/{own}"}
        layers.append(_layer(name, one, reads, _taker(None if layers else inputs)))
    params, buffers = _by_layer(places, *read_values(source, layout))
    frozen = frozenset(path for path, leaf in places.items() if leaf.frozen)
    trained = _trained(params, places) if masters else params
    model = Sequential(layers, loss, init=(trained, buffers), frozen=frozen)
    return ConvertedSequential(model, params, buffers, layout, masters, converted, places)


def _children(modules: Any, names: Sequence[str] | None) -> dict[str, torch.nn.Module]:
    """The modules, by a legal layer name for each."""
    own: list[str] | None = None
    if isinstance(modules, torch.nn.Sequential):
        _refuse_own_forward(modules)
        own = list(modules._modules)  # named_children() leaves out a module that comes again
    elif isinstance(modules, torch.nn.Module) and not isinstance(modules, torch.nn.ModuleList):
        raise ConversionError(
            f"sequential: expected a torch.nn.Sequential or a list of modules, got a"
            f" {type(modules).__name__}, whose forward may do anything. Pass the modules that it"
            " calls one after the other, or use tb.convert"
        )
    children = list(modules)
    for index, child in enumerate(children):
        if not isinstance(child, torch.nn.Module):
            raise ConversionError(
                f"sequential: item {index} is a {type(child).__name__}, expected a torch.nn.Module;"
                " put functions into the forward of one"
            )
    if not children:
        raise ConversionError("sequential: expected at least one module, got none")
    keys = list(names) if names is not None else own or [str(i) for i in range(len(children))]
    if len(keys) != len(children):
        raise ConversionError(
            f"sequential: {len(keys)} names for {len(children)} modules; expected one for each"
        )
    bad = [n for n in keys if not n or n == "loss" or "/" in n or (own is None and "." in n)]
    if bad or len(set(keys)) < len(keys):
        raise ConversionError(
            f"sequential: layer names {keys}: expected different, non-empty names without '/'"
            " and '.', none of them 'loss'; pass names=[...]"
        )
    return dict(zip(keys, children, strict=True))


def _refuse_own_forward(module: torch.nn.Sequential) -> None:
    hooks = module._forward_hooks or module._forward_pre_hooks
    if type(module).forward is not torch.nn.Sequential.forward or hooks:
        what = "forward hooks" if hooks else "a forward of its own"
        raise ConversionError(
            f"sequential: the {type(module).__name__} has {what}, which a chain of its children"
            " would leave out; pass list(module) if that is what you want, or use tb.convert"
        )


def _convert_each(
    children: Mapping[str, torch.nn.Module], example_args: tuple[Any, ...]
) -> dict[str, Converted]:
    """Each module converted with what the one before it gives."""
    # Copies, because a module may write to what it is given.
    args = torch_pytree.tree_map_only(torch.Tensor | np.ndarray | jax.Array, to_torch, example_args)
    found: dict[str, Converted] = {}
    for layer, child in children.items():
        where = f"module {layer!r} ({type(child).__name__})"
        try:
            found[layer] = convert(child, *args, roll=False)
        except ConversionError as error:
            raise ConversionError(f"{where}: {error}") from error
        if len(found) == len(children):
            break
        try:
            with untouched(child, False), torch.no_grad():
                args = (child(*args),)
        except Exception as error:
            raise ConversionError(f"{where} cannot run on the example: {error}") from error
    return found


def _places(
    layout: Layout, converted: Mapping[str, Converted], found: Sequence[Mapping[str, Leaf]]
) -> dict[str, Leaf]:
    """Where every leaf is kept.

    A parameter is kept once, by the first layer that has it. A buffer that nobody updates is a
    constant, of which every layer keeps a copy.
    """
    places: dict[str, Leaf] = {}
    keepers: dict[str, list[str]] = {}
    for (layer, one), leaves in zip(converted.items(), found, strict=True):
        for own in one.layout.leaves:
            leaf = leaves[own.name]
            if leaf.is_param != own.is_param:
                raise ConversionError(
                    f"`{own.name}` of module {layer!r} is a buffer that shares its memory with a"
                    " parameter; make one of them a copy (.clone())"
                )
            if not (leaf.is_param and leaf.name in keepers):
                places[f"{layer}/{own.name}"] = leaf
                keepers.setdefault(leaf.name, []).append(layer)
    for (layer, one), leaves in zip(converted.items(), found, strict=True):
        for name in sorted(one.written):
            others = [keeper for keeper in keepers[leaves[name].name] if keeper != layer]
            if others:
                raise ConversionError(
                    f"module {layer!r} updates the buffer `{name}`, which it shares with"
                    f" {others}; as layers they would each have their own. Give each module its"
                    " own buffer, or put them into one module"
                )
    order = {leaf.name: index for index, leaf in enumerate(layout.leaves)}
    return dict(sorted(places.items(), key=lambda item: order[item[1].name]))


def _check_root(layout: Layout, places: Mapping[str, Leaf]) -> None:
    """Every leaf that a `state_dict` of the root has must be in the chain."""
    placed = {leaf.name for leaf in places.values()}
    lost = [leaf.name for leaf in layout.leaves if leaf.persistent and leaf.name not in placed]
    if lost:
        raise ConversionError(
            f"sequential: root has {lost[:10]}, which no module of the list holds; they would be"
            " neither trained nor saved. Add the modules that use them, or leave root out"
        )


def _layer(
    name: str,
    converted: Converted,
    reads: Mapping[str, str],
    take: Callable[[Any], tuple[Any, ...]],
) -> Layer:
    stateful = bool(converted.buffers)

    def apply(params: Any, x: Any, ctx: Context) -> Any:
        state = ctx.buffers if stateful else {}
        out, new = converted.apply(params, state, *take(x), rng=ctx.rng, train=ctx.train)
        return (out, new) if stateful else out

    # The initial values of all layers are given to the Sequential at once.
    same = converted._reduced()
    shard: Shard = {own: d for own, d in converted.parallel.shard.items() if own not in reads}
    return Layer(name, None, apply, reads, stateful, same, shard)


def _taker(keys: str | Sequence[str] | None) -> Callable[[Any], tuple[Any, ...]]:
    """The arguments of a module: what comes before it, or, of the first one, parts of the batch."""
    if keys is None:
        return lambda x: (x,)
    wanted = [keys] if isinstance(keys, str) else list(keys)

    def take(batch: Any) -> tuple[Any, ...]:
        if not isinstance(batch, Mapping) or any(key not in batch for key in wanted):
            kind = type(batch).__name__
            have = f"has {list(batch)}" if isinstance(batch, Mapping) else f"is a {kind}"
            raise ConversionError(
                f"the first module takes {wanted} out of the batch, which {have}; say which"
                " with tb.sequential(..., inputs=...)"
            )
        return tuple(batch[key] for key in wanted)

    return take


def _by_layer(places: Mapping[str, Leaf], params: Arrays, buffers: Arrays) -> tuple[Nested, Nested]:
    nested: tuple[Nested, Nested] = ({}, {})
    for path, leaf in places.items():
        values, tree = (params, nested[0]) if leaf.is_param else (buffers, nested[1])
        layer, name = path.split("/", 1)
        tree.setdefault(layer, {})[name] = values[leaf.name]
    return nested


def _trained(params: Nested, places: Mapping[str, Leaf]) -> Nested:
    """Parameters with float32 masters of those of 16 bits, but for frozen ones."""

    def widened(layer: str, own: dict[str, Any]) -> dict[str, Any]:
        return with_masters(own, {name for name in own if places[f"{layer}/{name}"].frozen})

    return {layer: widened(layer, own) for layer, own in params.items()}
