"""How parameters are fetched for use and their gradients reduced, under one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fzero import compat
from fzero.axes import FURTHER
from fzero.float8.scaling import E4M3, by_largest
from fzero.links import Context
from fzero.plan import Plan
from fzero.precision import COMPUTE_DTYPES, round_to
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.group import Group
from fzero.sharding.split import Split, flat_splits, map_splits, trained
from fzero.tree import PyTree, found_in, is_floating
from fzero.zero import bits
from fzero.zero.collectives import (
    agreed_largest,
    all_reduce_tree,
    dealt,
    gather,
    gather_int8,
    gather_secondary,
    reduce_scatter,
    secondary_shard,
    split_dim,
)
from fzero.zero.float8_weights import Narrow


@dataclass(frozen=True)
class Rules:
    """How parameters are fetched and gradients reduced.

    Args:
        plan: the plan.
        splits: a `Split` per parameter.
        group: the devices.
        sharded: whether the parameters at hand are shards.
        reduce: whether gradients are reduced now (or stay local sums).
        prefetch: whether a stack gathers one layer ahead and reduces one behind.
        halves: whether a backward pass is compiled as the two halves that some pipeline schedules
            run at different times, so that all schedules give the same bits.
        exact: whether gathers send all bits, whatever the plan says: in evaluation.
        room: bytes that what a forward pass leaves may take, where the plan leaves that open
            (`fzero.zero.keeping`); `None` where they are not known.
    """

    plan: Plan
    splits: PyTree
    group: Group
    sharded: bool
    reduce: bool
    prefetch: bool = False
    halves: bool = False
    exact: bool = False
    room: int | None = None

    @staticmethod
    def of(blue: Blueprint, splits: PyTree = None) -> Rules:
        """The rules of a step.

        Args:
            blue: the layout.
            splits: in a pipeline, those of a stage.
        """
        plan, group = blue.plan, blue.group
        return Rules(
            plan,
            blue.params if splits is None else splits,
            group,
            sharded=plan.gathers_at_use and group.shards > 1,
            reduce=plan.reduce == "microbatch",
            prefetch=blue.prefetch,
            halves=plan.pipe > 1,
        )

    @property
    def hold(self) -> bool:
        """Whether what the first forward pass gathers is kept for the rest of the step."""
        return self.sharded and self.plan.gather == "lazy"

    def context(
        self, inputs: tuple[PyTree, Any], rng: jax.Array, train: bool, buffers: PyTree
    ) -> Context:
        """What a layer may read beside parameters and input; `inputs`: the batch and the step."""
        (batch, step), plan = inputs, self.plan
        dtype = COMPUTE_DTYPES[plan.precision]
        return Context(batch, rng, train, buffers, dtype, step, plan.products, plan.keep_fp32)

    def held(self) -> Rules:
        """The rules for parameters that are whole by now."""
        return replace(self, sharded=False)

    def fetch(self, split: Split, leaf: jax.Array, again: bool = False) -> jax.Array:
        """A leaf ready for use: cast, then gathered, so that the compute dtype travels.

        A leaf on the host comes to the device first. `again` marks a backward pass.
        """
        fetch = partial(self._fetch, split, again=again)
        return self._on_shards(split, fetch, compat.to_device(leaf), self.sharded)

    def _on_shards(
        self, split: Split, function: Callable[..., Any], leaf: jax.Array, sharded: bool = False
    ) -> jax.Array:
        """A whole leaf, or one layer of it, by a function of each device's shard of what is given:
        `sharded`, or as whole."""
        given, to = (split.spec(shard, FURTHER, leaf.ndim) for shard in (sharded, False))
        found: jax.Array = self.group.on_shards(function, (given,), to)(leaf)
        return found

    def _fetch(self, split: Split, leaf: jax.Array, again: bool) -> jax.Array:
        exact = self.exact or not is_floating(leaf) or found_in(self.plan.keep_fp32, split.path)
        if self.sharded and self.plan.gather_dtype == "int8" and not exact:
            return self.fence(gather_int8(leaf, split, split.compute, again))
        leaf = round_to(leaf, split.compute)
        return self.fence(gather(leaf, split, self.group, again) if self.sharded else leaf)

    def may_narrow(self, split: Split) -> bool:
        """Whether a parameter could be gathered in 8 bits, if nothing reads it in another way."""
        # Not in evaluations, which users differentiate: bits in 8 have no derivative.
        narrows = self.sharded and self.plan.gathers_float8 and not self.exact
        return narrows and split.dim is not None and split.compute == jnp.bfloat16

    def fetch_narrow(
        self, splits: Sequence[Split], leaves: Sequence[jax.Array], again: bool = False
    ) -> list[Narrow]:
        """Leaves as every product will scale them: their largest values are agreed in one
        reduction, then each device scales its shards and gathers them in 8 bits."""
        own = [round_to(compat.to_device(x), s.compute).astype(jnp.float32)
               for s, x in zip(splits, leaves, strict=True)]  # fmt: skip
        largest = agreed_largest([jnp.max(jnp.abs(x), initial=0.0) for x in own])
        found = []
        for split, wide, most in zip(splits, own, largest, strict=True):
            bits, unit = by_largest(wide, most, E4M3)
            whole = self._on_shards(
                split, partial(gather, split=split, group=self.group, again=again), bits, True
            )
            found.append(Narrow(self.fence(whole), unit))
        return found

    def secondary_shard(self, split: Split, whole: jax.Array) -> jax.Array | None:
        """What this device keeps of a fetched leaf for its backward pass; `None` for nothing."""
        kept = self.sharded and self.group.secondary > 0 and split.dim is not None
        if not kept:
            return None
        return self._on_shards(split, lambda leaf: secondary_shard(leaf, split, self.group), whole)

    def refetch(self, split: Split, leaf: jax.Array, secondary: jax.Array | None) -> jax.Array:
        """A leaf ready for use in a backward pass: from its secondary shards, or again."""
        if secondary is None:
            return self.fetch(split, leaf, again=True)

        def join(secondary: jax.Array) -> jax.Array:
            return self.fence(gather_secondary(secondary, split, self.group))

        return self._on_shards(split, join, secondary)

    def scatter(self, split: Split, grad: jax.Array) -> jax.Array:
        """The reduced shard of a split leaf's gradient. Whole leaves wait for `finish`."""
        if not self.reduce or split.dim is None:
            return self.fence(grad)
        dim, to = split_dim(grad, split), split.spec(True, FURTHER, grad.ndim)
        assert dim is not None
        cut, spec = dealt(grad, split, self.group)
        cut = self.fence(cut)
        cut = cut.astype(self.reduced_dtype(split, cut.dtype))

        def scatter(cut: jax.Array) -> jax.Array:
            return round_to(reduce_scatter(cut, dim, split, self.group), cut.dtype)

        shard: jax.Array = self.group.on_shards(scatter, (spec,), to)(cut)
        return shard

    def reduced_dtype(self, split: Split, dtype: Any) -> Any:
        """The dtype in which `scatter` adds the terms of devices, and of what it gives."""
        now = self.reduce and split.dim is not None
        return jnp.float32 if now and self.plan.reduce_dtype == "fp32" else dtype

    def fence(self, value: PyTree) -> PyTree:
        """The same value; what lies between a fetch and a scatter is compiled alike in all stages,
        wherever weights come from and gradients go (`fzero.zero.bits`)."""
        return bits.fence(value) if self.fenced else value

    def apart(self, function: Callable[[], PyTree], rng: jax.Array) -> PyTree:
        """Runs a function that is compiled alike wherever it stands (`fzero.zero.bits`)."""
        if not self.group.bits:
            return bits.fence(function())
        return bits.apart(function, jax.random.key_data(rng).reshape(-1)[0])

    @property
    def fenced(self) -> bool:
        """Whether fences stand; where nothing is gathered or reduced, in float32, all stages are
        one program anyway."""
        return self.group.shards * self.group.replica > 1 or self.plan.mixed

    @property
    def one_device(self) -> bool:
        """Whether one device has all rows: nothing of theirs is to be reduced."""
        return self.group.row_shares == 1

    def finish(self, grads: PyTree) -> PyTree:
        """Reduces the gradients of all whole leaves, in one collective per dtype."""
        if not self.reduce:
            return grads
        whole: dict[str, jax.Array] = {}

        def collect(split: Split, grad: jax.Array) -> None:
            if split.dim is None:
                wide = self.plan.reduce_dtype == "fp32"
                whole[split.path] = grad.astype(jnp.float32) if wide else grad

        splits = trained(self.splits)
        map_splits(collect, splits, grads)
        specs = {s.path: s.spec(False) for s in flat_splits(splits) if s.path in whole}
        summed = self.group.on_shards(
            lambda whole: all_reduce_tree(whole, self.group), (specs,), specs
        )(self.fence(whole))  # fmt: skip
        done = {path: round_to(leaf, leaf.dtype) for path, leaf in summed.items()}
        return map_splits(lambda split, grad: done.get(split.path, grad), splits, grads)
