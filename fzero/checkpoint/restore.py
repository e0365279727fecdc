"""`restore`: a state out of a checkpoint, under any plan, whole or in part.

Both layouts are worked out from shapes: how the leaves were kept (from the checkpoint's plan) and
how they shall be. Every leaf is then read shard by shard, straight into its sharding.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import all_leaves

from fzero.axes import DATA, zero_sizes
from fzero.checkpoint.metadata import Checkpoint, array_key, array_path, checkpoint, instead
from fzero.checkpoint.seal import read_matching
from fzero.checkpoint.write import first_says, wait
from fzero.compat import outside_of_meshes
from fzero.errors import CheckpointError, some_of, warn
from fzero.hosts.activity import doing
from fzero.loss_scaling import LossScale, initial_loss_scale
from fzero.model import Model
from fzero.plan import Plan
from fzero.processes import from_host
from fzero.sharding.blueprint import Blueprint, blueprint, planned
from fzero.sharding.buckets import OWNED
from fzero.sharding.lazy_array import Index, LazyArray
from fzero.sharding.relayout import Kept, copy_leaf, filled_up, place, relayout
from fzero.sharding.split import flat_splits, map_splits, stored_shapes, trained, update_dtype
from fzero.state import compute_copy
from fzero.state.fingerprint import compare
from fzero.state.init import compute_of, init, key_of, parked_field, parked_leaf, state_of
from fzero.state.replan import averages_at
from fzero.state.train_state import Pending, TrainState
from fzero.tree import PyTree, map_named, named_leaves, owner_of, owners_by_place


# What may be taken out of a checkpoint.
FIELDS = ("params", "opt_state", "ema", "buffers", "step", "rng", "loss_scale", "grads")
# How a leaf was kept, and how it shall be.
Want = tuple[Kept, Kept, Any]


@outside_of_meshes()
def restore(
    path: str | os.PathLike[str],
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    *,
    number: int | None = None,
    devices: Sequence[Any] | None = None,
    fields: Collection[str] | None = None,
    fresh: Collection[str] = (),
    rng: int | jax.Array = 0,
) -> TrainState:
    """A state from a checkpoint, under any plan: other stage, devices, pipeline, tiers, precision.

    Values are bit-identical. Everything in the checkpoint must fit the model and the optimizer,
    leaf by leaf, in path, shape and dtype; what shall not is named in `fields` or `fresh`. A host
    holds at most the shards of one leaf at a time. What 8-bit reductions of fzero 0.1 still owed
    (`state.error`) is left out, with a `UserWarning`; so are values that a leaf has where this
    model's is only filled up.

    Args:
        path: what `save` was given.
        model: the model of the state.
        tx: its optimizer; `None` restores a state that is only evaluated.
        plan: the plan wanted.
        number: which checkpoint; the newest by default.
        devices: devices to use; all by default.
        fields: those of the state that are taken, of `FIELDS`; all by default. The others are new,
            as `fz.init` makes them: `("params", "buffers")` starts another training, with any
            optimizer, from these weights. Averages (`ema`) that the checkpoint has not begin at its
            parameters; those that the plan has not are left out.
        fresh: paths of parameters and buffers, or of subtrees of them (`"head"`), that stay new:
            they may differ, or be on one side only. So do their moments, but for what an optimizer
            counts (its steps, and those of a turn of `optax.MultiSteps` that is under way).
            Gradients of an accumulation in progress have to be left out then.
        rng: seed or key for whatever is new, as for `fz.init`.

    Returns:
        The state.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not one of this model and optimizer;
            lists leaves by path, what was expected and what is there.
        PlanError: the plan does not fit the devices.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, optax, fzero as fz
        >>> def model(classes):
        ...     def init(rng):
        ...         head = jax.random.normal(rng, (2, classes))
        ...         return {"body": jnp.ones((8, 2)), "head": head}, {}
        ...     return fz.Model(init, lambda p, b, batch, rng, train: (
        ...         jnp.mean(batch["x"] @ p["body"] @ p["head"]), b, {}))
        >>> plan = fz.Plan(data=1)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     number = fz.save(path, fz.init(model(10), None, plan), plan)
        ...     state = fz.restore(path, model(3), optax.adam(1e-3), plan,
        ...                        fields=("params",), fresh=("head",))
        >>> state.params["head"].shape, float(state.params["body"][0, 0])
        ((2, 3), 1.0)
    """
    wait(path)
    number = first_says(lambda: checkpoint(path, number).number)
    about = checkpoint(path, number)
    blue = blueprint(model, tx, plan, devices)
    stored = _StoredState(about, blue, _checked_fields(fields), _roots(fresh))
    stored.require_fit()
    key = key_of(rng)
    compare("restore", blue, seed=key, checkpoint=about.number, step=about.step)
    with doing("restore"):
        return _restored(stored, model, plan, key, devices)


def _restored(
    stored: _StoredState, model: Model, plan: Plan, key: jax.Array, devices: Sequence[Any] | None
) -> TrainState:
    """The state, read."""
    blue = stored.blue
    new: dict[str, PyTree] = {}
    if not stored.has_all("params", "buffers"):
        made = init(model, None, plan.replace(tiers={}, update_on="device"), key, devices=devices)
        new = {"params": made.params, "buffers": made.buffers}
    params, buffers = (stored.field(name, new.get(name)) for name in ("params", "buffers"))
    if stored.has_all("opt_state"):
        state = _derived(blue, params, buffers, key)
        opt_state = stored.field("opt_state")
    else:
        state = state_of(blue, params, buffers, key)
        opt_state = stored.field("opt_state", state.opt_state)
    begun = () if stored.has_all("ema") else averages_at(blue, state.params)
    averages = stored.field("ema", begun)
    return dataclasses.replace(state, opt_state=opt_state, ema=averages, **stored.rest(state))


def _derived(blue: Blueprint, params: PyTree, buffers: PyTree, key: jax.Array) -> TrainState:
    """A state at step 0 without an optimizer's state."""
    shapes = blue.shapes()

    def put(value: Any, to: Any) -> jax.Array:
        return place(value, to.sharding)

    compute = compute_of(blue, params)
    params = parked_field(blue, "params", params)
    compute_copy.pair(params, compute)
    return TrainState(
        step=put(jnp.zeros((), jnp.int32), shapes["step"]),
        params=params,
        compute=compute,
        opt_state=(),
        buffers=buffers,
        rng=put(key, shapes["rng"]),
        loss_scale=jax.tree.map(put, initial_loss_scale(blue.plan), shapes["loss_scale"]),
        **blue.statics,
    )


def _checked_fields(fields: Collection[str] | None) -> tuple[str, ...]:
    if fields is None:
        return FIELDS
    unknown = sorted(set(fields) - set(FIELDS))
    if isinstance(fields, str) or unknown:
        raise CheckpointError(f"restore: fields={fields!r}: expected some of {FIELDS}")
    return tuple(fields)


def _roots(fresh: Collection[str]) -> tuple[str, ...]:
    if isinstance(fresh, str):
        raise CheckpointError(f"restore: fresh={fresh!r}: expected paths, such as ({fresh!r},)")
    if wrong := [path for path in fresh if not isinstance(path, str)]:
        raise CheckpointError(f"restore: fresh has {wrong[0]!r}: expected paths, such as ('head',)")
    return tuple(path.strip("/") for path in fresh)


class _StoredState:
    """The leaves of one checkpoint, as a blueprint keeps them.

    Args:
        about: the checkpoint.
        blue: how leaves shall be kept.
        fields: what is taken.
        fresh: roots of what is not.
    """

    def __init__(
        self, about: Checkpoint, blue: Blueprint, fields: tuple[str, ...], fresh: tuple[str, ...]
    ) -> None:
        import tensorstore

        self.about, self.blue, self.fields, self.fresh = about, blue, fields, fresh
        self.meta = read_matching(about.path, about.number)
        self.numbers = {path: number for number, path in enumerate(about.leaves)}
        self.context = tensorstore.Context()
        if fresh and about.plan.pipe > 1:
            raise CheckpointError(
                "restore: fresh= needs a checkpoint of a state without a pipeline, because where a"
                " chain was cut depends on all of its layers: restore this one with its own model"
                f" and pipe=1, save that, and use it (this one has pipe={about.plan.pipe})"
            )
        if fresh and "grads" in fields and "grads/total" in self.numbers:
            raise CheckpointError(
                f"restore: checkpoint {about.number} in {about.path} has gradients of an"
                f" accumulation in progress, of another fresh={fresh}: leave them out,"
                f" fields={tuple(name for name in fields if name != 'grads')}"
            )
        if any(path.startswith("error/") for path in about.leaves):
            warn(
                f"restore: checkpoint {about.number} in {about.path} has what 8-bit reductions"
                " (reduce_dtype='int8' of fzero 0.1) had not sent yet: less than a step's"
                " rounding. It is left out; everything else is restored"
            )
        # A key may be empty, and then a path is, as that of a tree that is a leaf itself.
        self.bare = {name for name, tree in blue.shapes().items() if all_leaves([tree])}
        self.owners = {
            self._at(field, split.path): split.owner
            for field in OWNED if getattr(blue, field) is not None
            for split in flat_splits(getattr(blue, field))
        }  # fmt: skip
        if fresh and "opt_state" in fields:
            self._find_owners()
        paths = (path.partition("/") for path in about.leaves)
        self.params = {inner for field, _, inner in paths if field == "params"}
        self.wants = self._wants()
        self._require_roots({*about.leaves, *self.wants})
        self.want = {path: want for path, want in self.wants.items() if self._takes(path)}

    def _at(self, field: str, path: str) -> str:
        """The name of a leaf in a checkpoint; a field may be a leaf itself."""
        bare = ("params" if field == "grads/sums" else field) in self.bare
        return field if bare else f"{field}/{path}"

    def _find_owners(self) -> None:
        """Finds whose moments those are that paths do not tell of.

        Raises:
            CheckpointError: of some moments nothing tells whose they are.
        """
        params = trained(self.blue.params)
        learned = [f"{split.path}/" for split in flat_splits(params)]
        if not any(path.startswith(f"{root}/") for path in learned for root in self.fresh):
            return
        places = owners_by_place(self.blue.shapes()["opt_state"], params)
        for split, owner in zip(flat_splits(self.blue.opt_state), places, strict=True):
            path, size = self._at("opt_state", split.path), math.prod(split.shape)
            self.owners[path] = found = self.owners[path] or owner
            if found is None and size > 1 and jnp.issubdtype(split.dtype, jnp.floating):
                raise CheckpointError(
                    f"restore: {path} {list(split.shape)} is of no parameter by its path, so that"
                    f" nothing says whether it has values of fresh={self.fresh}: leave the"
                    " optimizer's state out, fields=('params', 'buffers')"
                )

    def _require_roots(self, paths: Collection[str]) -> None:
        """Raises `CheckpointError` if what shall stay new is neither here nor there."""
        split = [path.partition("/") for path in paths]
        known = sorted({inner for field, _, inner in split if field in ("params", "buffers")})
        for root in self.fresh:
            if not any(f"{path}/".startswith(f"{root}/") for path in known):
                raise CheckpointError(
                    f"restore: fresh names {root!r}, which is no parameter or buffer, nor a subtree"
                    f" of them, of the model or the checkpoint; there are {known[:20]}"
                )

    def _wants(self) -> dict[str, Want]:
        """How each leaf of the model's and the optimizer's was kept, and shall be."""
        new, meta = self.blue, self.meta
        # Earlier states were shared out over the data axis alone.
        sizes = zero_sizes(meta.get("zero") or {DATA: meta["data"]})
        # Of an earlier version it is not known in which rows layers lie: in those of its plan.
        old = planned(new.model, new.tx, self._plan(), sizes, meta.get("rows"))
        sums = stored_shapes(
            trained(new.params), new.sharding, True, lambda s: update_dtype(s.compute)
        )
        shapes = new.shapes() | {"grads": sums}
        names = {name: name for name in ("params", *OWNED, "buffers")}
        if new.ema is None or old.ema is None:
            del names["ema"]
        if "grads/total" in self.numbers:
            names["grads"] = "grads/sums"
        found: dict[str, Want] = {}
        for name, prefix in names.items():
            if name == "buffers":
                paths = [path for path, _ in named_leaves(shapes[name])]
            else:
                paths = [split.path for split in flat_splits(new.splits(name))]
            trees = old.kept(name), new.kept(name), shapes[name]
            kept = map(jax.tree.leaves, trees)
            for path, was, *want in zip(paths, *kept, strict=True):
                full = self._at(prefix, path)
                found[full] = (self._as_written(full, was), want[0], want[1])
        if "grads" in names:
            for name in ("total", "count", "calls"):
                # A loss's sums have its own dtype: float64, say, where 64 bits are enabled.
                dtype = jax.dtypes.canonicalize_dtype(self.about.leaves[f"grads/{name}"][1])
                to = new.replicated(jax.ShapeDtypeStruct((), dtype))
                found[f"grads/{name}"] = Kept.whole(()), Kept.whole(()), to
        return found

    def _plan(self) -> Plan:
        """The plan that the state was saved with, with averages where it has some."""
        plan, ema = self.about.plan, self.blue.plan.ema
        has = any(path.startswith("ema/") for path in self.numbers)
        return plan.replace(ema=ema) if has and ema and not plan.ema else plan

    def _as_written(self, path: str, kept: Kept) -> Kept:
        """How a leaf was kept: with the padding of its own ways, whatever plan `save` was given.

        How many ways, earlier versions did not write: those of the plan.
        """
        found = self.about.leaves.get(path)
        by_hand = path not in self.meta.get("ways", ()) and found and found[0] == kept.stored
        if "ways" not in self.meta or by_hand:  # filled up as the plan has it, but not divided
            return kept
        ways = self.meta["ways"].get(path, (1,) * len(kept.shape))
        return dataclasses.replace(kept, stored=filled_up(kept.shape, ways))

    def _takes(self, path: str) -> bool:
        """Whether a leaf is taken out of the checkpoint."""
        field, _, inner = path.partition("/")
        if field not in self.fields or (field == "opt_state" and self.blue.tx is None):
            return False
        # Averages of a run that had none begin at its parameters; a plan without them leaves them.
        if field == "ema" and (self.blue.ema is None or path not in self.numbers):
            return False
        owner = inner if field in ("params", "buffers") else self._owner(path)
        return not any(f"{owner}/".startswith(f"{root}/") for root in self.fresh)

    def _owner(self, path: str) -> str:
        """The parameter that moments, averages or sums belong to; empty if none."""
        found = self.owners.get(path) if path in self.owners else owner_of(path, self.params)
        return found or ""

    def has_all(self, *names: str) -> bool:
        """Whether no leaf of some fields stays new."""
        paths = [
            self._at(n, path) for n in names for path, _ in named_leaves(self.blue.shapes()[n])
        ]
        return all(map(self._takes, paths))

    def require_fit(self) -> None:
        """Raises `CheckpointError` if a leaf that is taken does not fit model and optimizer."""
        compared = ("params", *OWNED, "buffers", "grads")
        have = {p for p in self.numbers if self._takes(p) and p.split("/")[0] in compared}
        # Moments from before a parameter was frozen stay where they are.
        frozen = {split.path for split in flat_splits(self.blue.params) if split.frozen}
        extra = {
            path for path in have - set(self.want)
            if path.startswith("params/") or owner_of(path, frozen) is None
        }  # fmt: skip
        problems = [f"{path}: in the checkpoint only" for path in sorted(extra)]
        for path, (old, now, to) in self.want.items():
            found = self.about.leaves.get(path)
            if found is None:
                problems.append(f"{path}: not in the checkpoint")
            elif found != (old.stored, str(to.dtype)):
                problems.append(
                    f"{path}: expected {to.dtype}{list(old.stored)}, the checkpoint has"
                    f" {found[1]}{list(found[0])}"
                )
            elif old.logical != now.logical:  # layers of a stack, which a pipeline fills up
                problems.append(
                    f"{path}: expected {to.dtype}{list(now.logical)}, the checkpoint has"
                    f" {found[1]}{list(old.logical)}"
                )
        problems = problems or self._filled_up_alike()
        if problems:
            raise CheckpointError(
                f"restore: checkpoint {self.about.number} in {self.about.path} is not one of this"
                f" model and optimizer:\n  {some_of(problems, 8, lines=True)}\n"
                "Restore with the model and optimizer that it was saved with (to freeze others,"
                " then fz.with_optimizer(..., old_model=)), or a part: fields=('params', 'buffers')"
                " leaves out the optimizer's state, fresh=('layer/w', ...) parameters with moments"
            )

    def _filled_up_alike(self) -> list[str]:
        """Parameters that only their padding makes those of this model, a line for each.

        Earlier versions did not write what was filled up.
        """
        problems: list[str] = []
        shapes, taken = self.meta.get("padded"), {self._owner(path) for path in self.want}
        if shapes is None:
            return problems
        for split in flat_splits(self.blue.params):
            path = self._at("params", split.path)
            if split.path not in taken or path not in self.numbers:
                continue
            old, new = self.wants[path][0], Kept.of(split).logical
            kept = self.about.leaves[path][0]
            own = shapes.get(split.path, (*old.logical[:1], *kept[1:]) if old.rows else kept)
            if tuple(own) != new:
                problems.append(f"{path}: expected {list(new)}, the checkpoint has {list(own)}")
        return problems

    def field(self, name: str, new: PyTree = ()) -> PyTree:
        """A field of the state; leaves that are not taken are those of `new`."""

        def leaf(path: str, to: Any, *kept: Any) -> Any:
            if not self._takes(self._at(name, path)):
                return kept[0]
            value = self._leaf(self._at(name, path))
            # Parameters are cast and make the optimizer's state before they are parked.
            return parked_leaf(self.blue, name, path, value) if name in OWNED else value

        shapes = self.blue.shapes()[name]
        return map_named(leaf, shapes, *([new] if jax.tree.leaves(new) else []))

    def rest(self, state: TrainState) -> dict[str, Any]:
        """The fields that are taken and are not split; `state` is a new one."""
        shapes = self.blue.shapes()
        found: dict[str, Any] = {}
        if "step" in self.fields:
            found["step"] = copy_leaf(np.asarray(self.about.step), shapes["step"])
        if "rng" in self.fields:
            impl, data = self.meta["rng"]
            key = from_host(np.asarray(data, np.uint32), shapes["rng"].sharding)
            found["rng"] = jax.random.wrap_key_data(key, impl=impl)
        if "loss_scale" in self.fields and state.loss_scale is not None:
            found["loss_scale"] = self._loss_scale(state.loss_scale)
        if "grads" in self.fields and "grads/total" in self.numbers:
            sums = map_splits(
                lambda split: self._leaf(self._at("grads/sums", split.path)),
                trained(self.blue.params),
            )
            found["grads"] = Pending(
                sums, *(self._leaf(f"grads/{name}") for name in ("total", "count", "calls"))
            )
        return found

    def _loss_scale(self, new: LossScale) -> LossScale:
        """The loss scale; of another precision only the skipped steps, which count in any."""
        same = self.about.plan.precision == self.blue.plan.precision

        def value(path: str, fresh: jax.Array) -> jax.Array:
            full = f"loss_scale/{path}"
            if full not in self.numbers or not (same or path == "skipped"):
                return fresh
            return self._read(full, Kept.whole(()), Kept.whole(()), fresh)

        found: LossScale = map_named(value, new)
        return found

    def _leaf(self, path: str) -> jax.Array:
        return self._read(path, *self.want[path])

    def _read(self, path: str, old: Kept, new: Kept, to: Any) -> jax.Array:
        shape, dtype = self.about.leaves[path]
        if 0 in shape:
            return copy_leaf(np.zeros(to.shape, to.dtype), to)
        number = self.numbers[path]
        try:
            file = self._file(number, shape, dtype)
            if any(np.any(file.read(index) != 0) for index in old.padding):
                warn(
                    f"restore: {path}: expected {dtype}{list(old.shape)}, filled up with zeros;"
                    f" checkpoint {self.about.number} in {self.about.path} has {list(shape)} with"
                    " other values at the end, which are left out: those of a larger model, or of"
                    " an edit of all elements, as x + 0.01 is, in which case nothing is lost"
                )
            return relayout(file, old, new, to)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"restore: {path} of checkpoint {self.about.number} in {self.about.path} cannot be"
                f" read: {error}{instead(self.about.path, self.about.number)}"
            ) from error

    def _file(self, number: int, shape: tuple[int, ...], dtype: str) -> _File:
        where = self.about.path, self.about.number, array_key(number), self.meta.get("parts", ())
        return _File(array_path(*where), shape, dtype, self.context)


class _File(LazyArray):
    """An array of a checkpoint, of which slices are read."""

    def __init__(
        self, where: dict[str, Any], shape: tuple[int, ...], dtype: str, context: Any
    ) -> None:
        import tensorstore

        self._array = tensorstore.open(where, open=True, read=True, context=context).result()
        if tuple(self._array.shape) != shape or self._array.dtype.name != dtype:
            raise ValueError(
                f"expected {dtype}{list(shape)}, the file has {self._array.dtype.name}"
                f"{list(self._array.shape)}"
            )
        self.shape, self.dtype = shape, self._array.dtype.numpy_dtype

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`."""
        return np.asarray(self._array[index].read().result())
