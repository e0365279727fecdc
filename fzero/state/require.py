"""What an operation requires of the state that it is given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from fzero.compat import has_explicit_axes, is_key
from fzero.errors import StateConsumedError, StateError, some_of
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.homes import StackRows
from fzero.sharding.split import frozen_of, trained
from fzero.state.array_facts import GIVEN
from fzero.state.row_order import rows_text
from fzero.state.train_state import Pending, TrainState, fields_of
from fzero.storage.tiers import is_handle, on_device, require_on_device
from fzero.tree import aliased_leaves, named_leaves, same_structure


def consumed_by(state: TrainState) -> str | None:
    """What consumed a state, in words; `None` for a live one."""
    own = state.params, state.compute, state.opt_state, state.buffers, state.ema
    for leaf in jax.tree.leaves((own, state.grads)):
        by = GIVEN.get(leaf)
        if by is not None:
            return by
        deleted = getattr(leaf, "is_deleted", None)
        if deleted is not None and deleted():
            # Steps keep the step count and the key, so a consumed state still knows.
            return (
                f"step {int(state.step) + 1} (train_step or accumulate_step), taken with it or with"
                " a state that shares its arrays (by fz.replan, replace or a copy of what is on"
                " disk)"
            )
    return None


def all_alive(leaves: Iterable[Any]) -> bool:
    """Whether no array was given away, quickly: a step asks for every leaf."""
    return not GIVEN.known and not any(leaf.is_deleted() for leaf in leaves)


def require_state(state: Any, operation: str) -> None:
    """Raises `StateError` for what is no state at all, such as its parameters, or a batch."""
    if not all(hasattr(state, name) for name in ("params", "opt_state", "buffers")):
        kind = type(state)
        raise StateError(
            f"{operation}: expected a state, as fz.init and steps return it, got"
            f" {kind.__module__}.{kind.__qualname__}; arguments are the state first, then the batch"
        )


def require_alive(state: TrainState, operation: str) -> None:
    """Raises `StateConsumedError` if the state was given away, `StateError` if it is none."""
    require_state(state, operation)
    try:
        by = consumed_by(state)
    except jax.errors.ConcretizationTypeError:
        raise StateError(
            f"{operation}: the state is traced: only steps can be part of a program (jax.jit, scan"
            " and the like); call this outside of it"
        ) from None
    if by is not None:
        raise StateConsumedError(
            f"{operation}: this state was consumed by {by}: its memory now belongs to the state"
            " which that returned, or to its error's .state. Use that one, or pass donate=False"
            " there to keep both"
        )


def require_arrays(state: TrainState, operation: str) -> None:
    """Raises `StateError` if a scalar was set to a number, which only steps take."""
    fields = {name: getattr(state, name) for name in ("step", "rng", "opt_state")}
    for path, leaf in named_leaves(fields):
        if not hasattr(leaf, "shape"):
            raise StateError(
                f"{operation}: {path} is a {type(leaf).__name__}; steps take a number there, but to"
                " move and to save it has to be an array:"
                " jax.device_put(np.asarray(number, old.dtype), old.sharding), and for rng"
                " jax.device_put(jax.random.key(seed), old.sharding)"
            )


def require_on_mesh(fields: Mapping[str, Any], operation: str) -> None:
    """Raises `StateError` if leaves of a state were put in by hand, off the devices of the others.

    All that is known of a state without its model: whoever knows that asks `require_fits`.
    """
    leaves = [(path, leaf) for path, leaf in named_leaves(fields) if not is_handle(leaf)]
    meshes = [getattr(getattr(leaf, "sharding", None), "mesh", None) for _, leaf in leaves]
    problems = [
        f"{path}: expected a jax.Array on a mesh, got {type(leaf).__module__}."
        f"{type(leaf).__qualname__} at {getattr(leaf, 'sharding', None)}"
        for (path, leaf), mesh in zip(leaves, meshes, strict=True) if mesh is None
    ]  # fmt: skip
    if problems:
        raise StateError(
            f"{operation}: leaves were put in by hand and do not lie where the plan has them:\n  "
            + "\n  ".join(problems[:8])
            + "\nPut them where the old ones are: jax.device_put(new, old.sharding); all of a state"
            " (one that was pickled): jax.device_put(state, fz.layout(model, tx, plan).shardings)"
        )


def require_fits(
    state: TrainState,
    blue: Blueprint,
    operation: str,
    reads: Sequence[str] | None = None,
    abstract: bool = False,
    frozen_alone: bool = False,
) -> None:
    """Raises `StateError` if the state is not one of this model, optimizer and plan.

    And `PlacementError` if leaves of the fields in `reads` (all by default) are parked, other than
    those which the plan parks. Of an `abstract` state only shapes and dtypes are known. Of its
    parameters may be needed those that are `frozen_alone`.
    """
    expected = TrainState(**blue.shapes(), grads=None)
    want = dict(named_leaves(expected))
    have = dict(named_leaves(state.replace(grads=None)))
    problems = [f"{path}: expected, but missing" for path in want if path not in have]
    problems += [f"{path}: not expected" for path in have if path not in want]
    problems += wrong_rows(state, blue.rows)
    if not isinstance(state.grads, Pending | None):
        kind = type(state.grads).__name__
        problems.append(f"grads: expected None or what accumulate_step left there, got {kind}")
    else:
        problems += _wrong_sums(state.grads, blue, abstract)
    for path, to in want.items():
        leaf = have.get(path)
        if leaf is None:
            continue
        if not _is_array(leaf, abstract):
            problems.append(_no_array(path, f"{to.dtype}{list(to.shape)}", leaf))
            continue
        same = leaf.dtype == to.dtype or (is_key(leaf) and is_key(to))  # keys of any kind
        if tuple(leaf.shape) != tuple(to.shape) or not same:
            problems.append(
                f"{path}: expected {to.dtype}{list(to.shape)}, got {leaf.dtype}{list(leaf.shape)}"
            )
        elif abstract:
            continue
        elif has_explicit_axes(leaf.sharding) or not on_device(leaf.sharding).is_equivalent_to(
            to.sharding, len(to.shape)
        ):
            mesh = dict(to.sharding.mesh.shape)
            problems.append(f"{path}: expected {to.sharding.spec} on {mesh}, got {leaf.sharding}")
    problems = problems or _wrong_padding(state, blue) or _wrong_structure(state, blue)
    if problems:
        raise StateError(
            f"{operation}: the state is not one of this model, optimizer and plan:\n "
            f" {some_of(problems, 8, lines=True)}"
            "\nMake it with fz.init(model, tx, plan), or bring it over: from another plan with"
            " fz.replan(state, model, tx, old_plan, new_plan), from another optimizer or a model"
            " that freezes others (model.with_frozen) with fz.with_optimizer(state, model, old_tx,"
            f" tx, plan, old_model=old_model). {_by_hand(blue.rows)}"
        )
    # What the plan parks may be anywhere: it visits the device in any case.
    fields = [
        name for name in fields_of(state)
        if not blue.parks(name) and (reads is None or name in reads)
    ]  # fmt: skip
    needed = {name: getattr(state, name) for name in fields}
    if frozen_alone and "params" in needed:
        needed["params"] = frozen_of(blue.params, state.params)
    require_on_device(named_leaves(needed), operation)


def _wrong_sums(grads: Pending | None, blue: Blueprint, abstract: bool) -> list[str]:
    """What is wrong with accumulated gradients, a line for each leaf."""
    if grads is None:
        return []
    of_parameters = named_leaves({"sums": trained(blue.params)})
    wanted = [*(path for path, _ in of_parameters), "total", "count", "calls"]
    have = dict(named_leaves(vars(grads)))
    return [f"grads/{path}: expected, but missing" for path in wanted if path not in have] + [
        _no_array(f"grads/{path}", "as accumulate_step leaves it", leaf)
        for path, leaf in have.items() if not _is_array(leaf, abstract)
    ]  # fmt: skip


def _is_array(leaf: Any, abstract: bool) -> bool:
    """Whether a leaf is an array of jax, or stands for one that is elsewhere."""
    known = hasattr(leaf, "aval" if abstract else "sharding")
    return is_handle(leaf) or (known and not isinstance(leaf, jax.ShapeDtypeStruct))


def _no_array(path: str, wanted: str, leaf: Any) -> str:
    kind = type(leaf)
    return f"{path}: expected a jax.Array {wanted}, got {kind.__module__}.{kind.__qualname__}"


def _by_hand(rows: StackRows) -> str:
    """How values come into a state that were not in one like it."""
    orders = ", ".join(f"{name!r} {rows_text(own)}" for name, own in rows)
    leaf = (
        f"This pipeline keeps the layers of a stack in its schedule's order ({orders}), which"
        " arrays do not say: put values of layers into a state of a plan without pipe=, and bring"
        " that over with fz.replan"
        if rows
        else "A leaf put in by hand goes where the old one is: jax.device_put(new, old.sharding)"
    )
    return (
        f"{leaf}; all of a state, such as one that was pickled: jax.device_put(state,"
        " fz.layout(model, tx, plan).shardings)"
    )


def wrong_rows(state: TrainState, rows: StackRows) -> list[str]:
    """What is wrong with the order in which a state's layers are kept, a line for each stack."""
    had, wanted = dict(state.rows), dict(rows)
    return [
        f"{name}: expected its layers {rows_text(wanted.get(name, ()))}, got them"
        f" {rows_text(had.get(name, ()))}, as another schedule or partition keeps them"
        for name in sorted({*had, *wanted}) if had.get(name) != wanted.get(name)
    ]  # fmt: skip


def _wrong_structure(state: TrainState, blue: Blueprint) -> list[str]:
    """Which fields have the leaves that are expected in another tree, a line for each.

    Optimizers that keep nothing differ in it alone, as do a dict and another mapping.
    """
    return [
        f"{name}: expected a tree like {jax.tree.structure(want)!s:.120},"
        f" got {jax.tree.structure(have)!s:.120}"
        for name, want in blue.shapes().items()
        if not same_structure(have := getattr(state, name), want)
    ]


def _wrong_padding(state: TrainState, blue: Blueprint) -> list[str]:
    """What is wrong with the shapes of parameters that are filled up alike, a line for each."""
    kept = dict(named_leaves({"params": blue.shapes()["params"]}))
    had, wanted = ({f"params/{p}": shape for p, shape in x.padded} for x in (state, blue))
    return [
        f"{path}: expected {list(wanted.get(path, kept[path].shape))},"
        f" got {list(had.get(path, kept[path].shape))}, both kept as {list(kept[path].shape)}"
        for path in sorted({*had, *wanted} & {*kept}) if had.get(path) != wanted.get(path)
    ]  # fmt: skip


def require_unaliased(state: TrainState, operation: str, of: Collection[Any] | None = None) -> None:
    """Raises `StateError` if two leaves of a state are one array.

    Args:
        state: the state.
        operation: what needs it, for the message.
        of: shapes and dtypes to look at; all by default.
    """
    given = state.replace(step=None, rng=None)
    if of is not None:
        given = jax.tree.map(lambda x: x if (x.shape, x.dtype) in of else None, given)
    aliased = aliased_leaves(given)
    if aliased:
        raise StateError(
            f"{operation}: these leaves are one array: "
            + "; ".join(" = ".join(paths) for paths in aliased)
            + ". Donating the state would give one buffer away twice: copy one of them"
            " (jnp.array(leaf, copy=True)), or build the step with donate=False"
        )
