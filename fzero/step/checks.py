"""What a step refuses before anything runs, and what it need not look at again."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from fzero import compute_copy
from fzero.batch import check_batch
from fzero.blueprint import Blueprint
from fzero.offload.tiers import tier_of
from fzero.state import (
    TrainState,
    compute_of,
    require_alive,
    require_fits,
    require_unaliased,
)
from fzero.surgery import with_scalars_placed
from fzero.tree import PyTree, same_object


class Checks:
    """The checks of one step.

    A state that passed, or that the step itself returned, is looked at again only for what can
    change: whether it was given away since.

    Args:
        blue: the blueprint.
        name: of the step, for messages.
        reads: fields of the state that the step needs on the device.
        donate: whether the step gives the state's memory away.
        bare: whether it leaves optimizer state and accumulations alone, whatever they are.
    """

    def __init__(
        self, blue: Blueprint, name: str, reads: Sequence[str], donate: bool, bare: bool
    ) -> None:
        self.blueprint, self.name, self.reads = blue, name, tuple(reads)
        self.donate, self.bare = donate, bare
        self._known: weakref.ref[TrainState] | None = None
        self._fits: set[Any] = set()

    def state(self, state: TrainState) -> TrainState:
        """The state with all leaves arrived, and a compute copy that is one of its parameters.

        Raises:
            StateConsumedError: it was given away.
            StateError: it is not one of this model, optimizer and plan, or two leaves are one.
            PlacementError: a leaf that the step needs is parked.
        """
        state = with_scalars_placed(state, self.blueprint)
        if self._known is not None and self._known() is state:
            require_alive(state, self.name)
            return state
        state = compute_copy.settled_state(state)
        require_alive(state, self.name)
        leaves, structure = jax.tree.flatten(state)
        key = structure, tuple((x.shape, x.dtype, x.sharding, tier_of(x)) for x in leaves)
        new = key not in self._fits
        if new:
            self._require_fits(state)
        if self.donate and (new or same_object(leaves)):
            require_unaliased(state, self.name)
        self._fits.add(key)
        if state.compute is None or compute_copy.is_current(state.params, state.compute):
            self.trust(state)
            return state
        return dataclasses.replace(state, compute=compute_of(self.blueprint, state.params))

    def traced(self, state: TrainState) -> None:
        """Raises `StateError` if a traced state has other leaves, shapes or dtypes."""
        self._require_fits(state, abstract=True)

    def trust(self, state: TrainState) -> None:
        """Says that a state fits."""
        self._known = weakref.ref(state)

    def batch(self, batch: PyTree, microbatches: int) -> None:
        """Raises `BatchError` if a batch cannot be divided evenly."""
        group = self.blueprint.group
        check_batch(batch, group.data * group.replica, microbatches)

    def _require_fits(self, state: TrainState, abstract: bool = False) -> None:
        if self.bare:
            state = state.replace(opt_state=(), grads=None)
        require_fits(state, self.blueprint, self.name, self.reads, abstract)


def is_traced(*trees: PyTree) -> bool:
    """Whether a leaf is being traced: by a transformation of jax, or to become a program."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))
