"""`optimizer`: a torch optimizer, its groups and its schedule as one optax transformation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax
import torch

from fzero.errors import ConversionError
from fzero.optimizer.layers import is_layers
from fzero.optimizer.per_layer import per_layer
from fzero.tree import key_name, path_name
from torch_bridge.converted import Converted
from torch_bridge.optim.rules import find_rule, sees_matrices
from torch_bridge.optim.schedules import follow
from torch_bridge.sequential import ConvertedSequential


# The label of parameters that the optimizer leaves alone.
_UNTRAINED = "untrained"


def optimizer(
    torch_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    parameters: Converted | ConvertedSequential | Iterable[tuple[str, torch.Tensor]],
    scheduler: Any = None,
    *,
    every: int = 1,
    num_steps: int | None = None,
    unread: Collection[str] = (),
) -> optax.GradientTransformation:
    """A torch optimizer as the optax transformation that does the same.

    The same formulas in the same order, with the groups' own hyperparameters: AdamW, Adam, NAdam,
    RAdam, Adamax, SGD, Adagrad, RMSprop, Adadelta, Muon, and Lion. Parameters in no group, with
    `requires_grad=False`, or out of reach of any gradient are left alone, as torch does. The
    optimizer's state (`torch_optimizer.state`) is not read: the transformation starts afresh.

    Args:
        torch_optimizer: made from the parameters of the module that was converted. Or several,
            each for other parameters (Muon for matrices, AdamW for the rest), which are stepped
            together.
        parameters: what it was converted to; or the module's `named_parameters()`, if the
            transformation is for a flat dict of arrays by these names.
        scheduler: a scheduler of `torch.optim.lr_scheduler`, of any class that needs no metrics,
            in any position. Its own arithmetic is run ahead, and its values kept (float64 on the
            host, float32 on devices). For several optimizers a list, with one (or `None`) for each.
        every: optimizer steps between two steps of the scheduler: 1, or those of an epoch.
        num_steps: optimizer steps to train for, with those that the scheduler has made. Needed for
            schedules that only run to tell (`LambdaLR`, `MultiplicativeLR`, `CyclicLR`, restarts of
            growing length, classes of your own); after that many the last value stays. The others
            are followed for ever.
        unread: names of parameters that only outputs read which the loss does not, and which torch
            therefore leaves alone; a warning of the step says them.

    Returns:
        A transformation for params of the names and structure of `parameters`, row by row (Muon
        takes a row of a stack as its matrix), with one optax state per group
        (`optax.ScaleByAdamState` for Adam and AdamW).

    Raises:
        ConversionError: an optimizer or scheduler that is not mapped (with what to use instead),
            a tensor that is no parameter of the module or is in two optimizers, or other parameters
            when it is used.

    Example:
        >>> from torch_bridge import convert
        >>> module = torch.nn.Linear(3, 2)
        >>> groups = [{"params": [module.weight]},
        ...           {"params": [module.bias], "weight_decay": 0.0}]
        >>> adamw = torch.optim.AdamW(groups, lr=1e-3)
        >>> cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, T_max=100)
        >>> converted = convert(module, torch.zeros(4, 3))
        >>> tx = optimizer(adamw, converted, cosine)
        >>> updates, state = tx.update(converted.params, tx.init(converted.params),
        ...                            converted.params)
        >>> sorted(updates)
        ['bias', 'weight']

    Source: torch/optim, version 2.13.
    """
    several = _several(torch_optimizer, scheduler)
    names = _Names.of(parameters)
    unknown = sorted(set(unread) - set(names.aliases))
    if unknown:
        raise ConversionError(
            f"optimizer: unread has {unknown}, which are no parameters:"
            " expected names as in module.named_parameters()"
        )
    names = replace(names, untrained=names.untrained | {names.aliases[name] for name in unread})
    rules = [
        (find_rule(one), group)
        for one, schedule in several
        for group in follow(one, schedule, every, num_steps)
    ]
    labels = _labels([group for one, _ in several for group in one.param_groups], names)
    used = {
        str(number): rule(group)
        for number, (rule, group) in enumerate(rules)
        if str(number) in labels.values()
    }
    if not used:
        kinds = " and ".join(type(one).__name__ for one, _ in several)
        raise ConversionError(
            f"optimizer {kinds}: none of its parameters can be trained; each is frozen, or gets no"
            " gradient"
        )
    if _UNTRAINED in labels.values():
        used[_UNTRAINED] = optax.set_to_zero()
    if len(used) > 1:
        tx: Any = optax.multi_transform(used, lambda tree: _labelled(tree, labels))
    else:
        tx = _checked(next(iter(used.values())), labels)
    if not any(sees_matrices(one) for one, _ in several):
        return tx
    return per_layer(tx, stacks=[entry for entry, held in names.entries.items() if len(held) > 1])


def _several(optimizers: Any, schedulers: Any) -> list[tuple[Any, Any]]:
    """Optimizers with their schedulers."""
    if isinstance(optimizers, torch.optim.Optimizer):
        return [(optimizers, schedulers)]
    optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    wrong = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if wrong or not optimizers:
        kinds = ", ".join(sorted({type(one).__name__ for one in wrong})) or "none"
        raise ConversionError(
            "optimizer: expected a torch optimizer, or several, and then what its parameters were"
            f" converted to, got {kinds}. Say"
            " tb.optimizer(torch.optim.AdamW(module.parameters()), converted)"
        )
    if schedulers is None:
        schedulers = [None] * len(optimizers)
    if not isinstance(schedulers, Sequence) or len(schedulers) != len(optimizers):
        raise ConversionError(
            f"optimizer: expected a list of {len(optimizers)} schedulers, one (or None) for each"
            f" optimizer, got {schedulers!r}"
        )
    return list(zip(optimizers, schedulers, strict=True))


@dataclass(frozen=True)
class _Names:
    """The entries of a params tree, and which tensors they hold.

    An entry is known by its path, or by the last key of it where that is a `state_dict` name.

    Args:
        entries: for each entry the names of the tensors in it.
        of_tensor: the name of each tensor, by id. (They live in the optimizer: ids stay theirs.)
        aliases: the name of each tensor, by any of its names.
        untrained: names of those that no gradient reaches.
        frozen: names of those that were frozen when the module was converted.
        what: what they are of, for messages.
    """

    entries: Mapping[str, tuple[str, ...]]
    of_tensor: Mapping[int, str]
    aliases: Mapping[str, str]
    untrained: frozenset[str]
    frozen: frozenset[str]
    what: str

    @staticmethod
    def of(parameters: Any) -> _Names:
        if not isinstance(parameters, Converted | ConvertedSequential):
            named = dict(parameters)
            return _Names(
                entries={name: (name,) for name in named},
                of_tensor={id(tensor): name for name, tensor in named.items()},
                aliases={name: name for name in named},
                untrained=frozenset(n for n, tensor in named.items() if not tensor.requires_grad),
                frozen=frozenset(),
                what="the named parameters",
            )
        leaves = [leaf for leaf in parameters.layout.leaves if leaf.is_param]
        aliases = {name: leaf.name for leaf in leaves for name in leaf.names}
        learning = parameters.reached()
        return _Names(
            entries=parameters.entries(),
            of_tensor=parameters.layout.params_by_id(),
            aliases=aliases,
            untrained=frozenset(
                leaf.name for leaf in leaves if leaf.frozen or leaf.name not in learning
            ),
            frozen=frozenset(leaf.name for leaf in leaves if leaf.frozen),
            what="the converted module",
        )


def _labels(groups: Sequence[Mapping[str, Any]], names: _Names) -> dict[str, str]:
    """The group of each entry."""
    group_of: dict[str, str] = {}
    for number, group in enumerate(groups):
        for tensor, name in zip(group["params"], _names_in(group, number, names), strict=True):
            if tensor.requires_grad and name in names.frozen:
                raise ConversionError(
                    f"optimizer: `{name}` learns now, but was frozen when the module was converted:"
                    " set requires_grad before tb.convert, or convert again"
                )
            if name in group_of:
                raise ConversionError(
                    f"optimizer: `{name}` is in groups {group_of[name]} and {number}, of two"
                    " optimizers; give each its own parameters"
                )
            if name not in names.untrained and tensor.requires_grad:
                group_of[name] = str(number)
    labels: dict[str, str] = {}
    for entry, held in names.entries.items():
        found = {group_of.get(name, _UNTRAINED) for name in held}
        if len(found) > 1:
            raise ConversionError(
                f"optimizer: `{entry}` holds {list(held)[:4]}, which are in different groups"
                f" ({sorted(found)}); an entry has one. Convert the module with one entry for each"
                " of its parameters (roll=False)"
            )
        labels[entry] = found.pop()
    return labels


def _names_in(group: Mapping[str, Any], number: int, names: _Names) -> Iterator[str]:
    """The names of the parameters of a group."""
    given = group.get("param_names") or [None] * len(group["params"])
    for index, (tensor, name) in enumerate(zip(group["params"], given, strict=True)):
        found = names.of_tensor.get(id(tensor), names.aliases.get(name or ""))
        if found is None:
            raise ConversionError(
                f"optimizer, group {number}, parameter {index}"
                f" {name or ''}{tuple(tensor.shape)}: it is no parameter of {names.what}. Make the"
                " optimizer from the parameters of the very module that was converted, or from its"
                " named_parameters()"
            )
        if tensor.is_complex():
            raise ConversionError(
                f"optimizer: `{found}` is complex, and parameters here are real. Keep the pairs of"
                " real numbers that torch updates, Parameter(torch.view_as_real(w)), and compute"
                " with torch.view_as_complex(w)"
            )
        yield found


def _labelled(tree: Any, labels: Mapping[str, str]) -> Any:
    """The label of every leaf of a params tree."""

    def entry(path: Any) -> str:
        whole = path_name(path)
        return whole if whole in labels or not path else key_name(path[-1])

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_layers)
    have = {entry(path) for path, _ in leaves}
    # A step hands over what it trains: frozen parameters are not among it.
    wanted = {name for name, label in labels.items() if label != _UNTRAINED}
    if not wanted <= have <= set(labels):
        missing, more = sorted(wanted - have), sorted(have - set(labels))
        raise ConversionError(
            f"optimizer: expected params of its own module: {missing[:5]} are missing, "
            f"{more[:5]} are not known. Make it with tb.optimizer(torch_optimizer, converted) from"
            " what these params belong to"
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: labels[entry(path)], tree, is_leaf=is_layers
    )


def _checked(
    tx: optax.GradientTransformation, labels: Mapping[str, str]
) -> optax.GradientTransformation:
    """A transformation for all parameters that refuses others."""

    def init(params: Any) -> Any:
        _labelled(params, labels)
        return tx.init(params)

    return optax.GradientTransformation(init, tx.update)
