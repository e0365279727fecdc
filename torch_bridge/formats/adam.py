"""The `state_dict` of a torch optimizer: parameters by number, hyperparameters by group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fzero.errors import CheckpointError, is_number
from torch_bridge.formats.content import Optimizer
from torch_bridge.formats.torch_files import is_dense
from torch_bridge.module.lazy_tensor import LazyTensor, in_memory
from torch_bridge.module.names import Layout


MOMENTS = ("exp_avg", "exp_avg_sq")
# What torch's AdamW writes for a group where nothing else is known: its own defaults.
_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
# And what torch's schedulers keep in a group beside them, and miss where a file replaces it.
_KNOWN = (*_DEFAULTS, "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


def step_of(value: Any, file: str) -> int:
    """A step count, which torch keeps as a tensor and others as a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not is_number(value) or not float(value).is_integer():
        raise CheckpointError(f"{file}: expected a number of steps, got {value!r:.60}")
    return int(value)


def at_one_step(
    steps: Sequence[int], file: str, moments: Mapping[str, Mapping[str, LazyTensor]],
    groups: tuple[Mapping[str, Any], ...], named: bool = True,
) -> Optimizer | str:  # fmt: skip
    """The state of an optimizer whose parameters are all at one step; in words, if they are not.

    (One that was frozen for a while is behind; a state here corrects all for the same bias.)
    """
    if len(set(steps)) != 1:
        return f"{file}: parameters are at different steps {sorted(set(steps))[:5]}"
    return Optimizer(steps[0], moments["exp_avg"], moments["exp_avg_sq"], groups, named)


def unaccounted(entry: Any) -> str | None:
    """What is wrong with the state that Adam keeps for a parameter, in words; None if nothing is.

    A tensor that no reader knows (`max_exp_avg_sq` of AMSGrad, another optimizer's momentum) would
    be lost without a word.
    """
    if not isinstance(entry, Mapping):
        return f"is a {type(entry).__name__}"
    known = {"step", *MOMENTS}
    missing = known - set(entry)
    if missing:
        return f"has no {', '.join(sorted(missing))}, but {', '.join(map(str, entry)) or 'nothing'}"
    more = [str(k) for k, v in entry.items() if isinstance(v, torch.Tensor) and k not in known]
    return f"has {', '.join(more)} as well" if more else None


def read_optimizer(state: Any, file: str) -> Optimizer | str | None:
    """Adam's moments in an optimizer's `state_dict`.

    Returns:
        The moments; None if there is no state yet; or, in words, why they cannot be read in full:
        it is another optimizer's, or holds more than Adam's. Parameters are numbered, unless the
        optimizer was made with names.

    Raises:
        CheckpointError: it has Adam's keys, and something else behind them.
    """
    if not state:
        return None
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    entries = state.get("state") if isinstance(state, Mapping) else None
    fine = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    if not fine or not isinstance(groups, list) or not isinstance(entries, Mapping):
        keys = list(state)[:6] if isinstance(state, Mapping) else type(state).__name__
        return f"{file}: expected state and param_groups of a torch optimizer, got {keys}"
    if not entries:
        return _without_steps(groups, file)
    for number, entry in entries.items():
        wrong = unaccounted(entry)
        if wrong is not None:
            return f"{file}: expected Adam's state, but that of parameter {number!r:.60} {wrong}"
    labels = labelled(groups, entries, file)
    if isinstance(labels, str):
        return labels
    names, plain, named = labels
    found: dict[str, dict[str, LazyTensor]] = {key: {} for key in MOMENTS}
    for number, entry in entries.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise CheckpointError(f"{file}: the optimizer has state for a parameter {number!r:.60}")
        name = names[number]
        for key in MOMENTS:
            if not is_dense(entry[key]) or not entry[key].is_floating_point():
                raise CheckpointError(
                    f"{file}: {key} of parameter {name} is not a dense tensor of floats"
                )
            found[key][name] = in_memory(f"{key}.{name}", entry[key], file)
    steps = [step_of(entry["step"], file) for entry in entries.values()]
    return at_one_step(steps, file, found, plain, named)


def labelled(
    groups: Sequence[Mapping[str, Any]], numbers: Iterable[Any], file: str
) -> tuple[dict[int, str], tuple[dict[str, Any], ...], bool] | str:
    """What the numbers of an optimizer's parameters mean.

    Args:
        groups: its `param_groups`.
        numbers: those that have a state.
        file: for messages.

    Returns:
        By number the parameter's name, if the optimizer was made with names, or its place in the
        groups; the groups with these; whether they are names. Or, in words, what is wrong.
    """
    listed = [n for group in groups for n in group.get("params", ())]
    # A parameter is its place in the groups, as torch goes by, whatever its number is.
    places = {number: place for place, number in enumerate(listed) if isinstance(number, int)}
    if strays := [number for number in numbers if number not in places]:
        return f"{file}: has state for parameters {strays[:5]}, which are in no group"
    if len(places) < len(listed):
        return f"{file}: expected every number once in its groups, got {listed[:20]}"
    names = _names(groups)
    plain = tuple({k: v for k, v in group.items() if k != "param_names"} for group in groups)
    plain = tuple(
        {**g, "params": [names.get(n, places[n]) for n in g.get("params", ())]} for g in plain
    )
    return {n: names.get(n, str(place)) for n, place in places.items()}, plain, bool(names)


def _without_steps(groups: Sequence[Mapping[str, Any]], file: str) -> str | None:
    """What is lost of SGD without momentum, which keeps no state: where its scheduler was."""
    for group in groups:
        if "initial_lr" in group and "nesterov" in group and not group.get("momentum"):
            return (
                f"{file}: SGD without momentum keeps no number of steps, by which its scheduler"
                " would go on (tb.optimizer takes a scheduler in its position)"
            )
    return None


def read_beside(content: Mapping[str, Any], file: str) -> Optimizer | str | None:
    """The same of the one entry of a file that has an optimizer's `state_dict`, if there is one."""
    found = {k: states for k, v in content.items() if (states := _states_in(v, str(k)))}
    states = [state for several in found.values() for state in several]
    if len(states) > 1:
        got = list(found) if len(found) > 1 else f"{len(states)} in {next(iter(found))!r}"
        return f"{file}: expected the state of one optimizer, got {got}"
    return read_optimizer(states[0], file) if states else None


def _states_in(value: Any, name: str) -> list[Any]:
    """What an entry holds of optimizers; of one with their name also tensors that are in no
    `state_dict`, so that a state which cannot be read is not taken for none."""
    if isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys():
        return [value]
    if isinstance(value, list | tuple):
        return [state for one in value for state in _states_in(one, "")]
    if isinstance(value, Mapping):
        found = [state for one in value.values() for state in _states_in(one, "")]
        return found or ([value] if "optim" in name.lower() and _has_tensors(value) else [])
    return []


def _has_tensors(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value
    is_list = isinstance(value, Mapping | list | tuple)
    return isinstance(value, torch.Tensor) or (is_list and any(map(_has_tensors, inner)))


def _names(groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Names by number, which an optimizer has that was given `named_parameters()`."""
    names: dict[int, str] = {}
    for group in groups:
        numbers, own = group.get("params"), group.get("param_names")
        if not (isinstance(numbers, list) and isinstance(own, list) and len(own) == len(numbers)):
            return {}
        names.update(zip(numbers, own, strict=True))
    return names


def optimizer_state(optimizer: Optimizer, order: Sequence[str]) -> dict[str, Any]:
    """What `torch.optim.AdamW.load_state_dict` takes, with parameters numbered in an order.

    Args:
        optimizer: moments by name.
        order: all parameters that the optimizer would be given, in order, where its groups do not
            say which they have.

    Whether decay is decoupled is left to the class that loads it, where nobody said so: it is in
    AdamW, and not in Adam.
    """
    state: dict[int, Any] = {}
    groups, count = groups_of(optimizer, list(order)), itertools.count()
    for group in groups:
        # The names first: `zip` takes one number more of what it asks first.
        numbers = {n: str(name) for name, n in zip(group["params"], count, strict=False)}
        group["params"] = list(numbers)
        for number, name in numbers.items():
            if name in optimizer.exp_avg:
                step = torch.tensor(float(optimizer.step))
                state[number] = {
                    "step": in_memory("step", step),
                    "exp_avg": optimizer.exp_avg[name],
                    "exp_avg_sq": optimizer.exp_avg_sq[name],
                }
    if not any("decoupled_weight_decay" in group for group in optimizer.groups):
        groups = [{k: v for k, v in g.items() if k != "decoupled_weight_decay"} for g in groups]
    return {"state": state, "param_groups": groups}


def require_known(hyper: Mapping[str, Any]) -> Mapping[str, Any]:
    """Hyperparameters, all of which torch's AdamW or a scheduler has."""
    if unknown := set(hyper) - set(_KNOWN):
        raise CheckpointError(
            f"save: unknown hyperparameters {sorted(unknown)}; torch's AdamW and schedulers have"
            f" {list(_KNOWN)}"
        )
    return dict(hyper)


def groups_of(optimizer: Optimizer, params: list[Any]) -> list[dict[str, Any]]:
    """The groups with their parameters; hyperparameters as known, else torch's defaults.

    Args:
        optimizer: what is known.
        params: what one group has, where the groups do not say which of these each has.
    """
    listed = [str(one) for group in optimizer.groups for one in group.get("params", ())]
    say = len(listed) == len(set(listed)) and {str(one) for one in params} <= set(listed)
    if not say:
        known = optimizer.groups[0] if len(optimizer.groups) == 1 else {}
        return [{**_hyper(known), "params": params}]
    return [{**_hyper(g), "params": list(g.get("params", ()))} for g in optimizer.groups]


def require_all(optimizer: Optimizer, to: str) -> Optimizer:
    """An optimizer whose groups, where they say which parameters they have, have all with moments.

    Raises:
        CheckpointError: one is missing, or the format `to` has no place for several groups.
    """
    listed = {name for group in optimizer.groups for name in group.get("params", ())}
    missing = [name for name in optimizer.exp_avg if name not in listed]
    if listed and missing:
        raise CheckpointError(
            f"save: the state has moments of {missing[:4]}, which are in no group of the optimizer"
            " that was given: expected one over all parameters that were trained"
        )
    if listed and to == "universal":
        raise CheckpointError(
            'save: optimizer=: to="universal" has one group over all that learn; say optimizer=True'
        )
    return optimizer


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """What torch's AdamW would have in a group: its own defaults where this one says nothing."""
    return {**_DEFAULTS, **{key: value for key, value in group.items() if key in _KNOWN}}


def groups_like(
    given: torch.optim.Optimizer, layout: Layout, where: str, hyper: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """The groups of a torch optimizer, by parameters' names, as a file has them.

    Args:
        given: an Adam or AdamW over parameters of the module that was converted.
        layout: of the converted module.
        where: the call and its argument, for messages.
        hyper: hyperparameters that stand in every group in the place of its own.

    Raises:
        CheckpointError: another optimizer, or one of other parameters.
    """
    given = getattr(given, "optimizer", given)  # as accelerate wraps it
    if not isinstance(given, torch.optim.Adam) or any(g["amsgrad"] for g in given.param_groups):
        raise CheckpointError(
            f"{where}={type(given).__name__}: expected an Adam or AdamW of torch, without"
            " amsgrad, whose state PyTorch's formats have here"
        )
    found, names = [], layout.params_by_id()
    for number, group in enumerate(given.param_groups):
        strange = [i for i, one in enumerate(group["params"]) if id(one) not in names]
        if strange:
            raise CheckpointError(
                f"{where}, group {number}, parameter {strange[0]}: it is no parameter of the"
                " converted module. Make the optimizer from those of the very module that was"
                " converted"
            )
        plain = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        found.append({**plain, **hyper, "params": [names[id(one)] for one in group["params"]]})
    return tuple(found)
