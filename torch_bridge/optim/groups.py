"""`optimizer`: a torch optimizer, its groups and its schedule as one optax transformation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
import torch

from fzero.errors import ConversionError
from fzero.tree import path_name
from torch_bridge.convert import Converted
from torch_bridge.sequential import ConvertedSequential

from .reach import reached
from .rules import find_rule
from .schedules import follow


# The label of parameters that the optimizer leaves alone.
_UNTRAINED = "untrained"


def optimizer(
    torch_optimizer: torch.optim.Optimizer,
    parameters: Converted | ConvertedSequential | Iterable[tuple[str, torch.Tensor]],
    scheduler: Any = None,
    *,
    every: int = 1,
    num_steps: int | None = None,
) -> optax.GradientTransformation:
    """A torch optimizer as the optax transformation that does the same.

    The same formulas in the same order, with the groups' own hyperparameters: AdamW, Adam, NAdam,
    RAdam, Adamax, SGD, Adagrad, RMSprop, Adadelta, and Lion. Parameters in no group, with
    `requires_grad=False`, or out of reach of any gradient are left alone, as torch does. The
    optimizer's state (`torch_optimizer.state`) is not read: the transformation starts afresh.

    Args:
        torch_optimizer: made from the parameters of the module that was converted.
        parameters: what it was converted to; or the module's `named_parameters()`, if the
            transformation is for a flat dict of arrays by these names.
        scheduler: a scheduler of `torch.optim.lr_scheduler`, of any class that needs no metrics,
            in any position. Its own arithmetic is run ahead, and its values kept (float64 on the
            host, float32 on devices).
        every: optimizer steps between two steps of the scheduler: 1, or those of an epoch.
        num_steps: optimizer steps to train for. Needed for schedules that only run to tell
            (`LambdaLR`, `MultiplicativeLR`, `CyclicLR`, restarts of growing length, classes of
            your own); after that many the last value stays. The others are followed for ever.

    Returns:
        A transformation for params of the names and structure of `parameters`, row by row, with
        one optax state per group (`optax.ScaleByAdamState` for Adam and AdamW).

    Raises:
        ConversionError: an optimizer or scheduler that is not mapped (with what to use instead),
            a tensor that is no parameter of the module, or other parameters when it is used.

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
    rule = find_rule(torch_optimizer)
    groups = follow(torch_optimizer, scheduler, every, num_steps)
    names = _Names.of(parameters)
    labels = dict.fromkeys(names.paths, _UNTRAINED)
    for number, group in enumerate(torch_optimizer.param_groups):
        for path in _paths_in(group, number, names):
            if path not in names.untrained:
                labels[path] = str(number)
    rules = {str(number): rule(group) for number, group in enumerate(groups)}
    used = {label: rules[label] for label in rules if label in labels.values()}
    if not used:
        raise ConversionError(
            f"optimizer {type(torch_optimizer).__name__}: none of its parameters can be trained;"
            " each is frozen, or gets no gradient"
        )
    if _UNTRAINED in labels.values():
        used[_UNTRAINED] = optax.set_to_zero()
    return (
        _checked(next(iter(used.values())), labels)
        if len(used) == 1
        else optax.multi_transform(used, lambda tree: _labelled(tree, labels))
    )


@dataclass(frozen=True)
class _Names:
    """Where in a params tree each tensor of a module is.

    Args:
        paths: paths of all parameters.
        of_tensor: the path of each tensor, by id. (They live in the optimizer: ids stay theirs.)
        of_name: the path of each `state_dict` name, aliases included.
        untrained: paths of those that no gradient reaches.
        what: what `paths` are of, for messages.
    """

    paths: Sequence[str]
    of_tensor: Mapping[int, str]
    of_name: Mapping[str, str]
    untrained: frozenset[str]
    what: str

    @staticmethod
    def of(parameters: Any) -> _Names:
        if not isinstance(parameters, Converted | ConvertedSequential):
            named = dict(parameters)
            frozen = frozenset(name for name, tensor in named.items() if not tensor.requires_grad)
            tensors = {id(tensor): name for name, tensor in named.items()}
            return _Names(list(named), tensors, dict(zip(named, named, strict=True)), frozen,
                          "the named parameters")  # fmt: skip
        leaves = _param_leaves(parameters)
        of_name = {name: path for path, leaf in leaves.items() for name in leaf.names}
        tensors = {}
        for name, ref in parameters.layout.tensors.items():
            tensor = ref()
            if tensor is not None and name in of_name:
                tensors[id(tensor)] = of_name[name]
        found = reached(parameters)
        frozen = frozenset(
            path for path, leaf in leaves.items() if leaf.frozen or path not in found
        )
        return _Names(list(leaves), tensors, of_name, frozen, "the converted module")


def _param_leaves(converted: Converted | ConvertedSequential) -> dict[str, Any]:
    """The leaf at every path of the params tree."""
    if isinstance(converted, ConvertedSequential):
        return {f"{p.layer}/{p.name}": p.leaf for p in converted.places if p.leaf.is_param}
    return {leaf.name: leaf for leaf in converted.layout.leaves if leaf.is_param}


def _paths_in(group: Mapping[str, Any], number: int, names: _Names) -> Iterator[str]:
    """Where the parameters of a group are."""
    given = group.get("param_names") or [None] * len(group["params"])
    for index, (tensor, name) in enumerate(zip(group["params"], given, strict=True)):
        path = names.of_tensor.get(id(tensor), names.of_name.get(name or ""))
        if path is None:
            raise ConversionError(
                f"optimizer, group {number}, parameter {index}"
                f" {name or ''}{tuple(tensor.shape)}: it is no parameter of {names.what}. Make the"
                " optimizer from the parameters of the very module that was converted, or from its"
                " named_parameters()"
            )
        if tensor.is_complex():
            raise ConversionError(
                f"optimizer: `{path}` is complex, which torch updates as pairs of real numbers;"
                " that is not mapped. Keep it as two real parameters, or write the transformation"
                " in optax"
            )
        yield path


def _labelled(tree: Any, labels: Mapping[str, str]) -> Any:
    """The label of every leaf of a params tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    have = {path_name(path) for path, _ in leaves}
    if have != set(labels):
        missing, more = sorted(set(labels) - have), sorted(have - set(labels))
        raise ConversionError(
            f"optimizer: expected params of its own module: {missing[:5]} are missing, "
            f"{more[:5]} are not known. Make it with tb.optimizer(torch_optimizer, converted) from"
            " what these params belong to"
        )
    return jax.tree_util.tree_map_with_path(lambda path, _: labels[path_name(path)], tree)


def _checked(
    tx: optax.GradientTransformation, labels: Mapping[str, str]
) -> optax.GradientTransformation:
    """A transformation for all parameters that refuses others."""

    def init(params: Any) -> Any:
        _labelled(params, labels)
        return tx.init(params)

    return optax.GradientTransformation(init, tx.update)
