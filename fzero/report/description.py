"""What a plan will do with a model, as a value.

`describe` works from shapes alone, so a plan for 64 devices can be read on a laptop. All sizes are
bytes unless a name says elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optax

from fzero.axes import DATA, REPLICA
from fzero.model import Model
from fzero.plan import Plan
from fzero.report.communication import communication, secondary_bytes
from fzero.report.report import LeafReport, Report, planned_on, table
from fzero.sharding.buckets import OWNED
from fzero.sharding.group import secondary_size
from fzero.storage.tiers import DEVICE, TIERS
from fzero.summary import Boxed
from fzero.tree import found_in
from fzero.zero.quantize import BLOCK, encoded_bytes


# Leaves that a printed description shows; `Description.leaves` has all.
ROWS = 30


@dataclass(frozen=True, repr=False)
class Description(Boxed):
    """What a plan does with a model; prints as a table.

    Args:
        plan: the plan.
        num_devices: devices it is for.
        num_data: devices along the mesh axis `data`.
        num_replica: sharding groups (mesh axis `replica`).
        num_elements: elements in all parameters, Ψ.
        leaves: a row for every leaf (`fzero.report.report.LeafReport`), as in a `Placement`.
        bytes_per_device: kept on the device between steps, by state class (`opt_state` if known)
            and in `total`; in a pipeline by the device that keeps the most of it.
        parked_bytes: the same for other tiers that the plan uses: `{"host": {"total": 123, ...}}`.
        reduction: when gradients are reduced, in words.
        secondary_bytes: of the weights, what a device keeps from a forward to its backward pass
            (`Plan.secondary`), per microbatch under way; at most, as a backward pass may not read
            all. `host` is a number only where `devices` say which are on one host, and counts as
            none otherwise.
        elements_gathered: elements that one device receives in all-gathers, per step; at most,
            as a compiled step may keep for the backward pass what the forward pass ends with.
        elements_reduced: elements that one device sends to reduce gradients, per step. (What XLA
            sends along further axes, such as `tensor`, follows from activations: `fz.preflight`.)

    In a pipeline the last two are those of the device with the most of both. What stages send to
    each other is not among them: activations, their gradients, and tied weights.
    """

    plan: Plan
    num_devices: int
    num_data: int
    num_replica: int
    num_elements: int
    leaves: tuple[LeafReport, ...]
    bytes_per_device: dict[str, int]
    parked_bytes: dict[str, dict[str, int]]
    reduction: str
    secondary_bytes: int
    elements_gathered: int
    elements_reduced: int

    @property
    def elements_communicated(self) -> int:
        """Elements that one device sends, or receives, per step; scalars aside."""
        return self.elements_gathered + self.elements_reduced

    def to_json(self) -> dict[str, Any]:
        """The description as a JSON-able dict."""
        # Ranks say as much as their devices, of which there may be many.
        leaves = tuple(dataclasses.replace(leaf, devices=()) for leaf in self.leaves)
        said = dataclasses.asdict(dataclasses.replace(self, leaves=leaves))
        return said | {"elements_communicated": self.elements_communicated}

    def __repr__(self) -> str:
        kept = ", ".join(f"{name} {size:,}" for name, size in self.bytes_per_device.items())
        return (
            f"Description({self.plan!r}, {self.num_devices} devices, {len(self.leaves)} leaves,"
            f" {self.num_elements:,} parameters; bytes per device: {kept})"
        )

    def __str__(self) -> str:
        cut = self.plan.pipe > 1
        ranks = ("ranks",) if cut else ()
        rows = [("leaf", "shape", "dtype", *ranks, "kept", "bytes/device", "why")]
        for leaf in _shown(self.leaves):
            if leaf is None:
                rows.append((f"... {len(self.leaves) - ROWS:,} more", *[""] * (len(rows[0]) - 1)))
                continue
            over = "" if leaf.over in ((), (DATA,)) else f" ({', '.join(leaf.over)})"
            cuts = [] if leaf.dim is None else [f"dim {leaf.dim} / {leaf.shards}{over}"]
            cuts += [f"dim {dim} / {self.plan.further[axis]} ({axis})"
                      for dim, axis in enumerate(leaf.axes) if axis is not None]  # fmt: skip
            kept = ", ".join(cuts) or "whole"
            kept += "" if leaf.tier == "device" else f", {leaf.tier}"
            name, shape = f"{leaf.state_class}/{leaf.path}", str(list(leaf.shape))
            ranks = (_ranges(leaf.ranks),) if cut else ()
            size = f"{leaf.bytes_per_device:,}"
            rows.append((name, shape, leaf.dtype, *ranks, kept, size, leaf.why))
        totals = [("kept between steps, per device", "bytes")]
        totals += [(name, f"{size:,}") for name, size in self.bytes_per_device.items()]
        if "opt_state" not in self.bytes_per_device:
            totals.insert(-1, ("opt_state", "unknown: pass tx to count it"))
        for tier, sizes in self.parked_bytes.items():
            totals += [(f"{name} ({tier})", f"{size:,}") for name, size in sizes.items() if size]
        ratio = self.elements_communicated / max(self.num_elements, 1)
        pipe = f"pipe={self.plan.pipe} x " if cut else ""
        inner = "".join(f" x {name}={size}" for name, size in self.plan.further.items())
        return (
            f"{self.plan}\n{self.num_devices} devices: {pipe}replica={self.num_replica} x"
            f" data={self.num_data}{inner}; Ψ = {self.num_elements:,} parameters\n\n"
            f"{table(rows, right=(4 + cut,))}\n\n{table(totals, right=(1,))}\n\n"
            f"gradients: {self.reduction} (reduce={self.plan.reduce!r})\n"
            f"communication per step and device: {ratio:.3f} Ψ = {self.elements_communicated:,}"
            f" elements ({self.elements_gathered:,} gathered, {self.elements_reduced:,} reduced)"
            f"{self._sent_as()}"
        )

    def _sent_as(self) -> str:
        """What the plan changes about what is sent and computed, in words."""
        lines = ""
        if self.plan.tensor > 1 and self.plan.sequence_parallel is not False:
            where = (
                "where they divide"
                if self.plan.sequence_parallel
                else ("where tokens are many (sequence_parallel=None)")
            )
            lines += f"\npositions between layers of a stack: shared out over tensor, {where}"
        if self.plan.further:
            lines += (
                f"\nover {', '.join(self.plan.further)}: what a layer's work asks for, not counted"
                " here; fz.preflight counts it, for each axis, its links and what waits for it"
            )
        if self.plan.remat is None:
            lines += (
                "\nkept for the backward pass (remat=None): layers' inputs on CPUs; on GPUs the"
                " most of all, products, layers' inputs that memory has room for with the batch"
            )
        if self.plan.deterministic:
            lines += "\ndeterministic: on GPUs, kernels of fixed order, none picked by timing"
        if self.plan.keep_fp32:
            kept = [
                leaf
                for leaf in self.leaves
                if leaf.state_class == "params" and found_in(self.plan.keep_fp32, leaf.path)
            ]
            count = sum(math.prod(leaf.shape) for leaf in kept)
            lines += (
                f"\nused and sent in float32: {len(kept)} leaves, {count:,} elements (keep_fp32)"
            )
        if self.plan.gather_dtype is not None:
            ratio = encoded_bytes(BLOCK) / BLOCK
            lines += f"\ngathers send int8: {ratio:.3f} bytes an element"
        if self.plan.gathers_float8 and any(leaf.shards > 1 for leaf in self.leaves):
            lines += "\ngathers of what only products in 8 bits read send float8: 1 byte an element"
        if self.plan.reduce_dtype is not None:
            lines += "\nreductions send and add float32: 4 bytes an element"
        if self.secondary_bytes:
            lines += f"\nkept for the backward pass (secondary): {self.secondary_bytes:,} bytes"
        return lines


def describe(
    plan: Plan,
    model: Model,
    tx: optax.GradientTransformation | None = None,
    *,
    devices: Sequence[Any] | None = None,
    num_devices: int | None = None,
) -> Description:
    """What a plan will do with a model: layout, bytes and communication, from shapes alone.

    Args:
        plan: the plan.
        model: the model; nothing of it is computed.
        tx: the optimizer, to count its state too.
        devices: devices to plan for.
        num_devices: how many devices to plan for; they need not exist. By default as many as
            the plan names, or else as many as there are.

    Returns:
        The description; `str()` of it is a table.

    Raises:
        PlanError: the plan does not fit that many devices.
        StateError: two initial leaves share memory.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((1024, 512)), "b": jnp.zeros(512)}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
        >>> about = fz.describe(fz.Plan(zero=3), model, optax.adam(1e-3), num_devices=64)
        >>> about.bytes_per_device["params"] == 1024 * 512 * 4 // 64 + 512 * 4
        True
        >>> about.reduction
        'one reduction per step (a step is one microbatch)'

    Source: ZeRO, arXiv:1910.02054, sections 5 (bytes kept) and 7 (elements communicated).
    """
    blue = planned_on(plan, model, tx, devices, num_devices)
    sizes, report = dict(blue.mesh.shape), Report.of_plan(blue)
    trains = {"opt_state": tx is not None, "ema": plan.ema is not None}
    counted = ["params", "compute", *(x for x in OWNED if trains[x]), "buffers", "total"]
    most = {tier: report.fullest(tier) for tier in TIERS}
    held = {tier: {name: sizes[name] for name in counted} for tier, sizes in most.items()}
    used = {leaf.tier for leaf in report.leaves} - {DEVICE}
    known = plan.secondary != "host" or devices is not None
    secondary = secondary_size(plan, sizes[DATA], devices) if known else 0
    gathered, reduced = communication(blue, secondary)
    return Description(
        plan=plan,
        num_devices=blue.mesh.size,
        num_data=sizes[DATA],
        num_replica=sizes[REPLICA],
        num_elements=sum(math.prod(x.shape) for x in report.leaves if x.state_class == "params"),
        leaves=report.leaves,
        bytes_per_device=held[DEVICE],
        parked_bytes={tier: held[tier] for tier in sorted(used)},
        reduction=_reduction(plan),
        secondary_bytes=secondary_bytes(blue, secondary),
        elements_gathered=gathered,
        elements_reduced=reduced,
    )


def _shown(leaves: Sequence[LeafReport]) -> Sequence[LeafReport | None]:
    """The leaves of a table; of a long one the first and the last."""
    return leaves if len(leaves) <= ROWS else [*leaves[: ROWS // 2], None, *leaves[-ROWS // 2 :]]


def _ranges(ranks: tuple[int, ...]) -> str:
    """Ranks in words: `0-3`, `0,2`."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _reduction(plan: Plan) -> str:
    if plan.reduce == "step":
        return f"one reduction per step, of {plan.microbatches} microbatches' whole local sums"
    if plan.microbatches == 1:
        return "one reduction per step (a step is one microbatch)"
    return f"one reduction per microbatch, {plan.microbatches} per step; only shards accumulate"
