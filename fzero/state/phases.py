"""Phases of a program: where every field of a state is in each of them, as one value."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fzero.errors import PlacementError
from fzero.state.offload import (
    CLASSES,
    How,
    Observer,
    fields_meant,
    move_fields,
    settled_or_back,
)
from fzero.state.train_state import TrainState
from fzero.storage.tiers import DEVICE, DISK, HOST, TIERS, lies_in, settled
from fzero.tree import is_plain


@dataclass(frozen=True)
class Phases:
    """Where a state is in each phase of a program, as one value.

    Args:
        train: the tier of each field of the state while training, such as `{"opt_state": "host"}`;
            parts that are not named are on the device.
        generate: the same, while generating.
        idle: the same, while another model has the device. Everything on the host by default.

    Example:
        >>> phases = Phases(generate={"opt_state": "host", "grads": "host"})
        >>> phases.generate["opt_state"], phases.idle["params"]
        ('host', 'host')
    """

    train: dict[str, str] = dataclasses.field(default_factory=dict)
    generate: dict[str, str] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("opt_state", "ema", "grads"), HOST)
    )
    idle: dict[str, str] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(
            ("params", "opt_state", "ema", "buffers", "grads"), HOST
        )
    )

    def __post_init__(self) -> None:
        for phase in dataclasses.fields(self):
            _require_tiers(f"Phases: {phase.name}", getattr(self, phase.name))


def _require_tiers(where: str, phase: Any) -> None:
    """Raises `PlacementError` if a phase is no tier for each of some fields."""
    if not isinstance(phase, Mapping):
        raise PlacementError(
            f"{where}: {phase!r}: expected the tier of each part, such as {{'opt_state': 'host'}}"
            " or fz.Phases().idle"
        )
    for word, tier in phase.items():
        fields_meant(word)
        if tier not in TIERS:
            raise PlacementError(f"{where}[{word!r}]={tier!r}: expected one of {list(TIERS)}")


def enter(
    state: TrainState,
    phase: dict[str, str],
    *,
    path: str | os.PathLike[str] | None = None,
    non_blocking: bool = False,
    donate: bool = True,
    observer: Observer | None = None,
) -> TrainState:
    """The state with every part where a phase wants it.

    What leaves the device goes first, so that there is room for what returns.

    Args:
        state: the state.
        phase: the tier of each part, such as `Phases().generate`.
        path: for parts on disk, the directory.
        non_blocking: as for `offload`; but what comes to a tier waits until what goes elsewhere is
            gone, so that there is room.
        donate: as for `offload`.
        observer: as for `offload`.

    Returns:
        The state. Entering the phase it is in is free.

    Raises:
        PlacementError: a part or tier has an unknown name, or the disk cannot be used.
        StateConsumedError: the state was given away.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> state = fz.init(model, optax.adam(1e-3), fz.Plan(data=1))
        >>> state = fz.enter(state, fz.Phases().idle)
        >>> fz.placement(state).bytes_per_device["total"]
        0
    """
    _require_tiers("enter: phase", phase)
    tiers = dict.fromkeys(CLASSES, DEVICE)
    for word, tier in phase.items():
        tiers.update(dict.fromkeys(fields_meant(word, state), tier))
    how = How("enter", path, non_blocking, donate, observer)
    moving = False
    for tier in (DISK, HOST, DEVICE):
        fields = [name for name, wanted in tiers.items() if wanted == tier]
        leaves = jax.tree.leaves([getattr(state, name) for name in fields])
        coming = any(is_plain(leaf) and not lies_in(leaf, tier) for leaf in leaves)
        if moving and coming:
            state = _gone(state)  # now there is room
        state = move_fields(state, fields, tier, how)
        moving |= coming
    return state


def _gone(state: TrainState) -> TrainState:
    """The state once everything that moves is where it goes, and its old memory is free."""
    try:
        return jax.block_until_ready(settled(state))
    except PlacementError as error:
        error.state = jax.tree.map(settled_or_back, state)
        raise
