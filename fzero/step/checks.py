"""What a step refuses before anything runs, and what it need not look at again."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fzero.batch import Inputs, check_batch
from fzero.compat import switch, why_no_empty
from fzero.errors import PlanError, StateConsumedError, StateError
from fzero.hosts.activity import Steps, doing
from fzero.hosts.join import watch
from fzero.sharding.blueprint import Blueprint
from fzero.state import compute_copy
from fzero.state.fingerprint import batch_facts, compare, computed_facts
from fzero.state.init import compute_of
from fzero.state.require import (
    all_alive,
    require_alive,
    require_fits,
    require_state,
    require_unaliased,
)
from fzero.state.train_state import TrainState
from fzero.step.row_sums import with_batch
from fzero.step.scalars import with_scalars_placed
from fzero.storage.tiers import tier_of
from fzero.tree import PyTree, same_object


class Checks:
    """The checks of one step.

    A state that passed, or that the step itself returned, is looked at again only for what can
    change: whether it was given away since, and whether its dicts hold other leaves.

    Args:
        blue: the blueprint.
        name: of the step, for messages.
        reads: fields of the state that the step needs on the device.
        donate: whether the step gives the state's memory away.
        bare: whether it leaves optimizer state and accumulations alone, whatever they are.
        frozen_alone: whether it reads of the parameters those alone that are frozen.
    """

    def __init__(
        self, blue: Blueprint, name: str, reads: Sequence[str], donate: bool, bare: bool,
        frozen_alone: bool,
    ) -> None:  # fmt: skip
        self.blueprint, self.name, self.reads = blue, name, tuple(reads)
        self.frozen_alone = frozen_alone
        self.donate, self.bare = donate, bare
        self._known: tuple[weakref.ref[TrainState], list[Any]] | None = None
        self._fits: set[Any] = set()
        self._compared, self._steps = False, Steps()

    def state(self, state: TrainState, leaves: Sequence[Any] | None = None) -> TrainState:
        """The state with all leaves arrived, and a compute copy that is one of its parameters.

        Args:
            state: the state.
            leaves: its leaves, where they are at hand: of many, taking a state apart takes longer
                than looking at them.

        Raises:
            StateConsumedError: it was given away.
            StateError: it is not one of this model, optimizer and plan, or two leaves are one.
            PlacementError: a leaf that the step needs is parked.
        """
        given = jax.tree.leaves(state) if leaves is None else leaves
        if self._trusted(state, given):
            if not all_alive(given):
                require_alive(state, self.name)
            return state
        require_state(state, self.name)
        state = with_scalars_placed(state, self.blueprint, self.name)
        state = compute_copy.settled_state(state)
        require_alive(state, self.name)
        if state.compute is not None:
            back = compute_copy.put_back(state.compute, self.blueprint.shapes()["compute"])
            if back is not state.compute:
                state = dataclasses.replace(state, compute=back)
        read = self._read(state)
        leaves, structure = jax.tree.flatten(read)
        shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        if shapes or not all(hasattr(leaf, "sharding") for leaf in leaves):
            self._require_fits(read)
        key = structure, tuple((x.shape, x.dtype, x.sharding, tier_of(x)) for x in leaves)
        if key not in self._fits:
            self._require_fits(read)
        if self.donate:
            require_unaliased(state, self.name, self._suspects(leaves))
        self._fits.add(key)
        if state.compute is None or compute_copy.is_current(state.params, state.compute):
            self.trust(state)
            return state
        return dataclasses.replace(state, compute=compute_of(self.blueprint, state.params))

    def _suspects(self, leaves: Sequence[Any]) -> set[Any] | None:
        """Shapes and dtypes that leaves which share memory may have; `None` for any.

        Asking every leaf for its address takes longer than a small step. Those of the last state
        that fitted share nothing with each other; one put in since can with one of its shape.
        """
        if self._known is None or same_object(leaves):
            return None
        alive = self._known[0]() is not None
        known = {id(known if alive else known()) for known in self._known[1]}
        return {(x.shape, x.dtype) for x in leaves if id(x) not in known}

    def traced(self, state: TrainState) -> None:
        """What `state` refuses, of a traced one: other leaves, shapes, dtypes, parked leaves.

        Raises:
            PlanError: the program that it is traced for has another mesh.
            PlacementError: a leaf that the step needs is parked.
            StateError: it is not one of this model, optimizer and plan.
        """
        require_state(state, self.name)
        around, own = jax.sharding.get_abstract_mesh(), self.blueprint.mesh
        if not around.empty and dict(around.shape) != dict(own.shape):
            raise PlanError(
                f"{self.name}: jax.set_mesh has set {dict(around.shape)} for this program, but the"
                f" plan's mesh is {dict(own.shape)}: leave the program outside of it"
            )
        self._require_fits(self._read(state), abstract=True)

    def trust(self, state: TrainState) -> None:
        """Says that a state fits.

        Its leaves are kept here while it lives, as they are anyway; of those that outlive it one is
        only known. (A weak reference to each would take longer than all other checks.)
        """
        leaves = jax.tree.leaves(state)

        # At a process's end nothing is to be made any more, and modules are gone.
        def gone(_: Any, ref: Any = weakref.ref, ends: Any = sys.is_finalizing) -> None:
            leaves[:] = () if ends() else map(ref, leaves)

        self._known = weakref.ref(state, gone), leaves

    def _trusted(self, state: TrainState, leaves: Sequence[Any]) -> bool:
        """Whether this very state fitted, with the leaves that it has now."""
        if self._known is None or self._known[0]() is not state:
            return False
        had = self._known[1]
        return len(leaves) == len(had) and all(map(operator.is_, leaves, had))

    def batch(self, batch: PyTree, microbatches: int) -> None:
        """Raises `BatchError` if a batch cannot be divided evenly."""
        shares = self.blueprint.group.row_shares
        check_batch(batch, shares, microbatches, why_no_empty(self.blueprint.mesh))

    @contextlib.contextmanager
    def running(
        self, state: TrainState, batch: PyTree, apply: bool = False, outputs: bool = False
    ) -> Iterator[None]:
        """Runs programs of a step; other processes know that this one does.

        Args:
            state: the state that it takes.
            batch: its batch.
            apply: whether it takes an optimizer step.
            outputs: whether it gives the model's outputs, and no loss.

        Raises:
            HostsError: before the first time, if other processes would run something else.
            StateError: `jax.disable_jit` is on.
            StateConsumedError: what the step reads from elsewhere is a consumed state's.
        """
        step = None
        if watch() is not None:
            if not self._compared:
                rows = Inputs.of(batch).batch
                computed = computed_facts(self.blueprint, rows, not self.bare, outputs)
                compare(self.name, self.blueprint, **batch_facts(rows), **computed)
                self._compared = True
            if apply:
                step = self._steps.number(state.step)
        try:
            with doing(self.name, step), program_runs(self.name), with_batch(batch):
                yield
        except RuntimeError as error:
            if "Array has been deleted" not in str(error):
                raise
            raise StateConsumedError(
                f"{self.name}: the model, the optimizer or the batch has an array of a state that"
                " was given to a step, which reused its memory (a closure over state.params, say)."
                " Keep a copy, jax.tree.map(np.array, state.params), or build the steps with"
                " donate=False"
            ) from error

    def rows(self, batch: PyTree) -> None:
        """Raises `BatchError` if a batch is none; any number of rows will do."""
        check_batch(batch, 1, 1, why_no_empty(self.blueprint.mesh))

    def _read(self, state: TrainState) -> TrainState:
        """The state without what an evaluation leaves alone, whatever that is."""
        return state.replace(opt_state=(), grads=None) if self.bare else state

    def _require_fits(self, state: TrainState, abstract: bool = False) -> None:
        require_fits(state, self.blueprint, self.name, self.reads, abstract, self.frozen_alone)


@contextlib.contextmanager
def program_runs(name: str) -> Iterator[None]:
    """Runs programs of a step as they are, whatever jax is asked to do with others.

    Raises:
        StateError: `jax.disable_jit` is on.
    """
    if switch("jax_disable_jit"):
        raise StateError(
            f"{name}: jax.disable_jit is on, but a step is one program over a mesh of devices, with"
            " collectives that jax cannot run operation by operation. Leave the step outside of it;"
            " to look inside, call the model's own function under it:"
            " model.loss(fz.logical(model, state), state.buffers, batch, key, True)"
        )
    # jax looks for the operation by running a program that gave NaN again, operation by operation:
    # under shard_map it recurses until Python's limit, and what was donated is gone by then.
    with jax.debug_nans(False):
        yield


def require_finite(name: str, metrics: Mapping[str, jax.Array]) -> None:
    """What `jax_debug_nans` means for a step.

    Raises:
        FloatingPointError: it is on, and the loss or the gradient's norm is not a number.
    """
    if not switch("jax_debug_nans"):
        return
    found = [key for key in ("loss", "grad_norm") if key in metrics and jnp.isnan(metrics[key])]
    if found:
        raise FloatingPointError(
            f"{name}: {' and '.join(found)} became NaN (jax_debug_nans is on). To find the"
            " operation, take the step with donate=False and call the model's own function on the"
            " state that it was given, under jax.jit:"
            " model.loss(fz.logical(model, state), state.buffers, batch, key, True)"
        )
