"""Adam's moments in a state of optax: read out of it, and put into it."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from fzero.errors import CheckpointError, StateConsumedError
from fzero.optimizer.small_moments import SmallMomentsState
from fzero.sharding.lazy_array import Index, LazyArray, Stacked
from fzero.sharding.relayout import TO_ONE_RANK, copy_leaf, over_ranks
from fzero.state.array_facts import GIVEN
from fzero.storage.tiers import require_on_device
from fzero.tree import named_leaves, owner_of, path_name, shape_at
from torch_bridge.converted import Converted
from torch_bridge.module.moments import Moments
from torch_bridge.module.names import Leaf
from torch_bridge.sequential import ConvertedSequential
from torch_bridge.statedict import ends_in_zeros, has_whole


# States whose `count` is the number of updates done. (Others count failures, or microbatches.)
_COUNTING = (
    optax.ScaleByAdamState,
    optax.ScaleByScheduleState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def moments_of(converted: Converted | ConvertedSequential, opt_state: Any) -> Moments:
    """Adam's moments in an optax state.

    Args:
        converted: the module or chain that the state was made from.
        opt_state: the state of any transformation that contains Adam once, however wrapped
            (`chain`, `masked`, `inject_hyperparams`), or several times for different parameters
            (`multi_transform`). Leaves may be sharded and padded.

    Returns:
        The moments of all parameters that Adam updates, frozen ones left out. A value is copied
        to the host when it is looked up, and not kept.

    Raises:
        CheckpointError: there is no Adam in the state, or its parts disagree.
        PlacementError: a moment is parked on the host or on disk.
        StateConsumedError: the state was given to a step.

    Example:
        >>> import torch
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> moments = moments_of(converted, optax.adamw(1e-3).init(converted.params))
        >>> moments.step, sorted(moments.exp_avg), moments.exp_avg["weight"].shape
        (0, ['bias', 'weight'], (2, 3))
    """
    found = _Found(converted, opt_state, "moments_of")
    return Moments(found.step(), _OnDemand(found.mu), _OnDemand(found.nu))


def with_moments(
    converted: Converted | ConvertedSequential, opt_state: Any, moments: Moments
) -> Any:
    """An optax state with other moments; everything stays in its sharding and dtype.

    Adam's count becomes `moments.step`, and with it the counts of learning-rate schedules
    (`scale_by_schedule`, `inject_hyperparams`): they go on where the other training stopped.

    Args:
        converted: the module or chain that the state was made from.
        opt_state: as for `moments_of`; it stays as it is.
        moments: values for exactly the parameters that Adam updates. Frozen ones may be missing:
            they keep what they have.

    Returns:
        A state of the same structure that shares what was not replaced.

    Raises:
        CheckpointError: lists everything that does not fit.
        PlacementError: a moment is parked on the host or on disk.
        StateConsumedError: the state was given to a step.

    Example:
        >>> import torch
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> ones = {name: np.ones_like(value) for name, value in converted.params.items()}
        >>> tx = optax.adamw(optax.linear_schedule(1.0, 0.0, 10))
        >>> state = with_moments(converted, tx.init(converted.params), Moments(7, ones, ones))
        >>> moments_of(converted, state).step, int(state[-1].count)
        (7, 7)
    """
    found = _Found(converted, opt_state, "with_moments")
    given = _given(found.leaves, moments)
    new: dict[str, Any] = {path: np.asarray(moments.step) for path in found.counts}
    for own, values in ((found.mu, moments.exp_avg), (found.nu, moments.exp_avg_sq)):
        for path, moment in own.items():
            rows = [values[given[leaf.name]] for leaf in moment.leaves if leaf.name in given]
            if rows:
                new[path] = Stacked(rows) if moment.stacked else rows[0]
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _replaced(leaf, new[at]) if (at := path_name(path)) in new else leaf,
        opt_state,
    )


def holds_adam(opt_state: Any) -> bool:
    """Whether an optax state has Adam in it."""
    return any(isinstance(node, optax.ScaleByAdamState) for _, node in _nodes(opt_state))


def is_adam(tx: optax.GradientTransformation) -> bool:
    """Whether what a transformation keeps in a `ScaleByAdamState` may be Adam's moments.

    `optax.adamax` and `yogi` keep other numbers there. Tried with four numbers: a second moment
    `nu' = b2 nu + c g**2` with 0 < b2 < 1 and c > 0 is Adam's, whatever scales gradients before. A
    transformation that wants parameters of its own names is believed.
    """
    params = {"w": np.ones(4, np.float32)}
    grads = np.asarray([[1, -20, 3, 7], [0.5, 1, -2, 0.1], [-3, 0.2, 0.4, 1]], np.float32)
    try:
        state, seen = tx.init(params), [np.zeros(4)]
        for grad in grads:
            _, state = tx.update({"w": grad}, state, params)
            (found,) = [x for _, x in _nodes(state) if isinstance(x, optax.ScaleByAdamState)]
            seen.append(np.asarray(found.nu["w"], np.float64))
    except Exception:  # whatever it says of parameters that are not its own
        return True
    for old, new, grad in zip(seen[1:], seen[2:], grads[1:], strict=False):
        terms = np.stack([old, np.float64(grad) ** 2], 1)
        (decay, share), *_ = np.linalg.lstsq(terms, new, rcond=None)
        like = np.allclose(terms @ (decay, share), new, 1e-5)  # float32's roundings
        if not (like and 0 < decay < 1 - 1e-6 and share > 0):
            return False
    return True


def follows_schedule(opt_state: Any) -> bool:
    """Whether an optax state counts the steps of a schedule."""
    return any(
        isinstance(node, optax.ScaleByScheduleState)
        or (isinstance(node, optax.InjectStatefulHyperparamsState) and node.hyperparams_states)
        for _, node in _nodes(opt_state)
    )


def num_waiting(opt_state: Any) -> int:
    """How many batches' gradients wait in an `optax.MultiSteps` for its next update."""
    found = (x for _, x in _nodes(opt_state) if isinstance(x, optax.MultiStepsState))
    return max((int(node.mini_step) for node in found), default=0)


def other_state(converted: Converted | ConvertedSequential, opt_state: Any, beside: bool) -> str:
    """What an optax state keeps of parameters that is not of Adam: Muon's momentum, say.

    Args:
        converted: the module or chain that the state was made from.
        opt_state: the state.
        beside: also of parameters that have Adam's moments: slow weights, say. (Not gradients that
            wait for a step of `optax.MultiSteps`.)

    Returns:
        `opt_state/path` of the first, and whether there are others; empty if there is nothing.
    """
    params, adam = _param_paths(converted), {}
    names: set[str] = set()
    if holds_adam(opt_state):
        found = _Found(converted, opt_state, "save" if beside else "restore")
        adam, names = {**found.mu, **found.nu}, set(() if beside else found.leaves)
    others = []
    for path, leaf in named_leaves(opt_state):
        own = owner_of(path, params) if leaf.shape and path not in adam else None
        if own and params[own].leaves[0].name not in names and "acc_grads" not in path:
            others.append(f"opt_state/{path}")
    return f"{others[0]}{' and others' * (len(others) > 1)}" if others else ""


@dataclass(frozen=True)
class _Moment:
    """A leaf of the optimizer state: moments of a parameter, or of one in each layer of a stack."""

    leaves: tuple[Leaf, ...]
    stacked: bool
    value: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.leaves[0].shape
        return (len(self.leaves), *shape) if self.stacked else shape


class _Name(LazyArray):
    """Stands for a parameter where only its place is of interest."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf, self.shape, self.dtype = leaf, leaf.shape, np.dtype(np.float32)

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        raise NotImplementedError


class _Found:
    """The Adam states in an optimizer state, leaf by leaf.

    `mu` and `nu` give what is kept at each path, `counts` all step counts by path, `leaves` the
    parameters by name.
    """

    def __init__(
        self, converted: Converted | ConvertedSequential, opt_state: Any, operation: str
    ) -> None:
        if not isinstance(converted, Converted | ConvertedSequential):
            raise CheckpointError(
                f"{operation}: expected what tb.convert or tb.sequential returned, then an"
                f" optimizer state, got {type(converted).__name__} first"
            )
        params = _param_paths(converted)
        self.leaves: dict[str, Leaf] = {}
        self.mu: dict[str, _Moment] = {}
        self.nu: dict[str, _Moment] = {}
        self.counts: dict[str, Any] = {}
        self.steps: dict[str, Any] = {}
        for path, node in _nodes(opt_state):
            if isinstance(node, optax.ScaleByAdamState):
                self.steps[f"{path}/count"] = node.count
                self._add(path, node, params)
            if isinstance(node, _COUNTING):
                self.counts[f"{path}/count"] = node.count
            if isinstance(node, optax.InjectStatefulHyperparamsState):
                for inner, leaf in named_leaves(node.hyperparams_states):
                    if inner.endswith("/count"):
                        self.counts[f"{path}/hyperparams_states/{inner}"] = leaf
        self.counts = {path.removeprefix("/"): leaf for path, leaf in self.counts.items()}
        if not self.steps:
            raise CheckpointError(
                f"{operation}: expected an optimizer state with Adam in it (optax.adam,"
                f" optax.adamw, optax.scale_by_adam), got {type(opt_state).__name__} without"
            )
        both = [(path, moment.value) for path, moment in (*self.mu.items(), *self.nu.items())]
        for path, leaf in both:
            if GIVEN.get(leaf) or (isinstance(leaf, jax.Array) and leaf.is_deleted()):
                raise StateConsumedError(
                    f"{operation}: opt_state/{path} was consumed by a step; use the state that"
                    " the step returned"
                )
            if over_ranks(leaf):
                raise CheckpointError(
                    f"{operation}: the layers of opt_state/{path} are spread over the ranks of a"
                    f" pipeline: {TO_ONE_RANK}"
                )
        require_on_device([(f"opt_state/{path}", leaf) for path, leaf in both], operation)

    def _add(self, path: str, node: optax.ScaleByAdamState, params: Mapping[str, _Moment]) -> None:
        """The moments of one Adam; parameters that it does not update have none."""
        for field, tree, into in (("mu", node.mu, self.mu), ("nu", node.nu, self.nu)):
            for inner, value in named_leaves(tree):
                where = f"{path}/{field}/{inner}".removeprefix("/")
                moment = params.get(inner)
                if moment is None:
                    raise CheckpointError(
                        f"opt_state/{where} belongs to no parameter of the converted module; was"
                        " the state made from another one?"
                    )
                if field == "mu" and moment.leaves[0].name in self.leaves:
                    raise CheckpointError(
                        f"opt_state/{where}: `{moment.leaves[0].name}` has other moments, too:"
                        " expected Adam once for each parameter"
                    )
                long_enough = len(value.shape) == len(moment.shape) and all(
                    have >= want for have, want in zip(value.shape, moment.shape, strict=True)
                )
                if not long_enough or not ends_in_zeros(value, moment.shape):
                    raise CheckpointError(
                        f"opt_state/{where}: expected shape {moment.shape},"
                        f" got {tuple(value.shape)}"
                    )
                into[where] = dataclasses.replace(moment, value=value)
                self.leaves.update({leaf.name: leaf for leaf in moment.leaves})

    def step(self) -> int:
        """The count of all Adams."""
        found = {path: int(np.asarray(count)) for path, count in self.steps.items()}
        if len(set(found.values())) != 1:
            raise CheckpointError(f"moments_of: Adam counts different steps: {found}")
        return next(iter(found.values()))


def _param_paths(converted: Converted | ConvertedSequential) -> dict[str, _Moment]:
    """What is kept at every path of a params tree."""
    names: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for leaf in converted.layout.leaves:
        names[not leaf.is_param][leaf.name] = _Name(leaf)
    trees = [converted.by_layer(*names)]
    if isinstance(converted, Converted) and converted.blocks.stacks:
        chain, (params, buffers) = converted._chain(), trees[0]
        trees.append((chain.by_link(params), chain.by_link(buffers)))
    found: dict[str, _Moment] = {}
    for path, name in (pair for params, _ in trees for pair in named_leaves(params)):
        rows = name.rows if isinstance(name, Stacked) else (name,)
        found[path] = _Moment(tuple(row.leaf for row in rows), isinstance(name, Stacked))
    return found


def _nodes(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every inner node of a tree with its path, from the root on; none of moments kept small."""
    if isinstance(tree, SmallMomentsState):
        return
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and not children[0][0]:
        return
    yield path, tree
    for key, child in children:
        yield from _nodes(child, f"{path}/{path_name(key)}".removeprefix("/"))


def _given(leaves: Mapping[str, Leaf], moments: Moments) -> dict[str, str]:
    """For every parameter the name under which its moments are given."""
    problems: list[str] = []
    step = moments.step
    whole = isinstance(step, numbers.Integral) and not isinstance(step, bool)
    if not whole or not 0 <= step < 2**31:  # optax counts in int32
        problems.append(f"step: expected at least 0 and less than 2**31, got {step!r:.60}")
    one_sided = sorted(set(moments.exp_avg) ^ set(moments.exp_avg_sq))
    problems += [f"`{name}`: exp_avg and exp_avg_sq must both be given" for name in one_sided]
    known = {alias: name for name, leaf in leaves.items() for alias in leaf.names}
    found: dict[str, str] = {}
    for name in moments.exp_avg:
        if name not in known:
            problems.append(f"`{name}`: not a parameter that Adam updates here")
            continue
        if known[name] in found:
            problems.append(f"`{name}` and `{found[known[name]]}` are one parameter")
        found[known[name]] = name
        shape = leaves[known[name]].shape
        for values in (moments.exp_avg, moments.exp_avg_sq):
            if name in values and tuple(values[name].shape) != shape:
                problems.append(f"`{name}`: expected {shape}, got {tuple(values[name].shape)}")
    problems += [
        f"`{name}`: missing" for name, leaf in leaves.items()
        if name not in found and not leaf.frozen
    ]  # fmt: skip
    if problems:
        shown = "\n  ".join(problems[:20])
        raise CheckpointError(
            f"with_moments: the moments do not fit the optimizer in {len(problems)} place(s):\n"
            f"  {shown}"
        )
    return found


def _replaced(old: Any, value: Any) -> Any:
    """A value in the shape, dtype and sharding of a leaf of the optimizer state."""
    if isinstance(old, jax.Array):
        return copy_leaf(value, shape_at(old, old.sharding))
    host = np.asarray(value)
    widths = [(0, new - had) for had, new in zip(host.shape, np.shape(old), strict=True)]
    return np.pad(host, widths).astype(np.asarray(old).dtype)


class _OnDemand(Mapping[str, np.ndarray[Any, Any]]):
    """Arrays that are copied to the host, without padding, when they are looked up."""

    def __init__(self, moments: Mapping[str, _Moment]) -> None:
        self._rows = {
            leaf.name: (leaf, one, row)
            for one in moments.values()
            for row, leaf in enumerate(one.leaves)
            if not leaf.frozen
        }

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        leaf, moment, row = self._rows[name]
        value = moment.value
        if isinstance(value, jax.Array) and not has_whole(value):
            raise CheckpointError(
                f"the moments of `{name}` live partly on other processes' devices; gather them"
                " first (jax.experimental.multihost_utils.process_allgather)"
            )
        whole = np.asarray(value[row] if moment.stacked else value)
        return np.array(whole[leaf.cut])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
