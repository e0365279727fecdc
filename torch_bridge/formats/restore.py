"""`restore`: a training state out of a PyTorch checkpoint, read straight into its sharding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch

from fzero.checkpoint.urls import is_url
from fzero.errors import CheckpointError, ConversionError
from fzero.links import Mean
from fzero.model import Model, Sequential
from fzero.plan import Plan
from fzero.sharding.relayout import copy_leaf
from fzero.state.init import init
from fzero.state.replan import on_one_rank, replan
from fzero.state.train_state import TrainState
from fzero.tree import shape_at
from torch_bridge.converted import Converted
from torch_bridge.formats.adam import groups_like
from torch_bridge.formats.content import Checkpoint, Optimizer
from torch_bridge.formats.names_in_files import named_as_in_the_module
from torch_bridge.formats.peft import fit_adapter, is_adapter
from torch_bridge.formats.read import checkpoint
from torch_bridge.formats.remote import fetched
from torch_bridge.module.initial import require_values
from torch_bridge.module.moments import Moments
from torch_bridge.module.names import Leaf
from torch_bridge.module.wrappers import module_names
from torch_bridge.moments import is_adam, other_state, with_moments
from torch_bridge.sequential import ConvertedSequential
from torch_bridge.statedict import fit_leaves, missing_names


def restore(
    path: str | os.PathLike[str],
    converted: Converted | ConvertedSequential,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    *,
    rng: int | jax.Array = 0,
    devices: Sequence[Any] | None = None,
    optimizer: bool | None = None,
    names: Sequence[str] | torch.optim.Optimizer | None = None,
    prefix: str = "",
    strict: bool = True,
    cast: bool = False,
    chain: bool | None = None,
    key: str | None = None,
) -> TrainState:
    """A state with the weights of a PyTorch checkpoint, and Adam's moments where it has them.

    Every device's slice is read by its byte range, so that the host never holds more than one shard
    beside the state.

    Args:
        path: as for `checkpoint`; or, for a module with adapters, a folder with one as PEFT writes
            it, beside which all weights keep their initial values. From an object store (`s3://`,
            `gs://`) every process copies it to its host's disk first.
        converted: the module or chain that the checkpoint is of.
        tx: the optimizer; `None` for a state that is only evaluated. Its rates, betas and decay are
            those that count: unlike torch's `load_state_dict`, the file's are neither taken over
            nor compared (`checkpoint(path).optimizer.groups` has them).
        plan: how to lay the state out.
        rng: seed or `jax.random.key`, as for `fz.init`.
        devices: devices to use; all by default.
        optimizer: whether Adam's moments and the step count are taken over: by default if the
            checkpoint has them and there is a `tx`; what cannot be taken over in full (another
            optimizer's state) is refused then. False starts the optimizer anew, at step 0.
        names: for formats that number parameters: their names in the order in which the optimizer
            was given them, or an Adam or AdamW of torch over the module's parameters in the same
            groups. Needed only where that was not `module.parameters()` in one group.
        prefix: what the names in the checkpoint begin with in addition ("model." for a module that
            was an attribute of a LightningModule; so does "model"); others are left out. What
            `torch.compile` and `DistributedDataParallel` put before names is found without it.
        strict: refuse missing and unexpected names. Else what is missing keeps its initial value,
            and a warning names it, and what of the file is not used.
        cast: accept other dtypes of the weights, and convert them as they are read. Float32 values
            of a parameter of 16 bits are its master, and need none; nor do those of DeepSpeed's
            files, which have nothing else, where the module has no masters.
        key: as for `checkpoint`.
        chain: as it was given to `converted.model`, if it was.

    Returns:
        The state, as `fz.init` gives it.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit, or has no value for what
            the module has none for either (it was converted on the `meta` device); says everything
            that does not. Nothing is put on a device then.
        PlanError: the plan does not fit the devices.

    Example:
        >>> import tempfile, torch, fzero as fz, torch_bridge as tb
        >>> module = torch.nn.Linear(3, 2)
        >>> converted = tb.convert(module, torch.zeros(4, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(module.state_dict(), folder + "/model.pt")
        ...     state = restore(folder + "/model.pt", converted, optax.adam(1e-3), fz.Plan(data=1))
        >>> state.params["weight"].shape, int(state.step)
        ((2, 3), 0)
    """
    if is_url(path):
        with fetched(str(path)) as local:
            return restore(
                local, converted, tx, plan, rng=rng, devices=devices, optimizer=optimizer,
                names=names, prefix=prefix, strict=strict, cast=cast, chain=chain, key=key,
            )  # fmt: skip
    moments = None
    if isinstance(converted, Converted) and converted.adapters and is_adapter(path):
        where, leaves = str(path), fit_adapter(converted, path)
    else:
        found = checkpoint(path, key)
        if prefix and any(name.startswith(f"{prefix}.") for name in found.by_name()):
            prefix += "."
        found = found.named_as({prefix + name for name in converted.layout.leaf_of()})
        where, tensors = found.path, _without_prefix(found.by_name(), prefix, found.path)
        if missing_names(converted, tensors):
            tensors = named_as_in_the_module(Path(path), tensors, converted.layout)
        leaves = fit_leaves(converted, tensors, strict, cast, masters=True, wide=found.is_wide)
        moments = _moments(found, converted, tx, optimizer, names, prefix)
    params, buffers = converted.by_initial()
    for leaf in converted.layout.leaves:
        if leaf.name in leaves:
            (params if leaf.is_param else buffers)[leaf.name] = leaves[leaf.name]
    try:
        require_values(params, buffers)
    except ConversionError as error:
        raise CheckpointError(f"{where}: not everything is in it; {error}") from None
    values = converted.by_layer(params, buffers)
    trained = converted.trained(values[0]), values[1]
    if isinstance(converted, ConvertedSequential):
        model: Model = converted.model.with_init(trained)
    else:
        model = converted.model(_no_loss, chain=chain)
        linked = isinstance(model, Sequential)
        model = model.with_init(converted.by_link(*values) if linked else trained)
    if moments is None:
        return init(model, tx, plan, rng, devices=devices)
    there = on_one_rank(plan)
    state = _with_moments(converted, init(model, tx, there, rng, devices=devices), moments, where)
    return state if there is plan else replan(state, model, tx, there, plan, devices=devices)


def _with_moments(
    converted: Converted | ConvertedSequential, state: TrainState, moments: Moments, where: str
) -> TrainState:
    """A new state with Adam's moments out of a file, and its step."""
    if others := other_state(converted, state.opt_state, beside=False):
        raise CheckpointError(
            f"restore: {where} has moments of Adam, but not {others}, which would begin anew beside"
            " them. Pass optimizer=False to take the weights alone, and start the optimizer anew"
        )
    return state.replace(
        opt_state=with_moments(converted, state.opt_state, moments),
        step=copy_leaf(np.asarray(moments.step), shape_at(state.step, state.step.sharding)),
    )


def _no_loss(*_: Any) -> tuple[Mean, Any, dict[str, Any]]:
    """The loss of a model of which only the layout is needed."""
    raise CheckpointError("restore: the model of a restored state has no loss of its own")


def _without_prefix(tensors: dict[str, Any], prefix: str, path: str) -> dict[str, Any]:
    if not prefix:
        return tensors
    found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    if not found:
        raise CheckpointError(
            f"{path}: no name begins with {prefix!r}; there are {list(tensors)[:5]}"
        )
    return found


def _moments(
    found: Checkpoint,
    converted: Converted | ConvertedSequential,
    tx: Any,
    wanted: bool | None,
    names: Sequence[str] | torch.optim.Optimizer | None,
    prefix: str,
) -> Moments | None:
    if tx is not None and wanted is not False and found.unread is not None:
        raise CheckpointError(
            f"restore: the optimizer's state cannot be taken over in full: {found.unread}. Pass"
            " optimizer=False to take the weights alone, and start the optimizer anew"
        )
    if wanted and (tx is None or found.optimizer is None):
        raise CheckpointError(
            "restore: optimizer=True, but "
            + ("tx is None" if tx is None else f"{found.path} holds no Adam state")
        )
    if wanted is False or tx is None or found.optimizer is None:
        return None
    if not is_adam(tx):
        raise CheckpointError(
            f"restore: {found.path} has moments of Adam, and the optimizer keeps others where optax"
            " keeps Adam's, as optax.adamax does. Pass optimizer=False to take the weights alone"
        )
    optimizer = found.optimizer
    if isinstance(names, torch.optim.Optimizer):
        groups = groups_like(names, converted.layout, "restore: names", {})
        names = [name for group in groups for name in group["params"]]
    if optimizer.named:
        moments = optimizer.moments()
        within = {n.removeprefix(prefix): n for n in moments.exp_avg if n.startswith(prefix)}
        own = module_names(within, converted.layout.leaf_of())
        return Moments(
            moments.step,
            {own[short]: moments.exp_avg[name] for short, name in within.items()},
            {own[short]: moments.exp_avg_sq[name] for short, name in within.items()},
        )
    return optimizer.moments(_numbered(found, optimizer, converted) if names is None else names)


def _numbered(
    found: Checkpoint, optimizer: Optimizer, converted: Converted | ConvertedSequential
) -> list[str] | None:
    """The names of `module.parameters()`, if that is what an optimizer was given."""
    params = [leaf for leaf in converted.layout.leaves if leaf.is_param]
    learned = [leaf for leaf in params if not leaf.frozen]
    total = sum(len(group.get("params", ())) for group in optimizer.groups)
    for leaves in (params, learned):
        if len(optimizer.groups) == 1 and total == len(leaves):
            return _in_one_order(found, optimizer, converted, leaves)
    return None


def _in_one_order(
    found: Checkpoint,
    optimizer: Optimizer,
    converted: Converted | ConvertedSequential,
    leaves: Sequence[Leaf],
) -> list[str]:
    """The names of parameters in the order that the numbers of an optimizer mean.

    The module that wrote the file may have registered them in another order than this one, in
    which the file lists its weights.

    Raises:
        CheckpointError: either order fits the shapes of the moments.
    """
    known = converted.layout.leaf_of()
    written = module_names(found.by_name(), known).values()
    listed = [known[name].name for name in written if name in known]
    place = {name: number for number, name in reversed(list(enumerate(listed)))}
    shapes = {leaf.name: tuple(leaf.shape) for leaf in leaves}
    ours = list(shapes)
    theirs = sorted(ours, key=lambda name: place.get(name, len(listed)))
    fits = [
        order
        for order in (ours, theirs)
        if all(shapes[order[int(k)]] == tuple(m.shape) for k, m in optimizer.exp_avg.items())
    ]
    if len(fits) == 2 and ours != theirs:
        here, there = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
        raise CheckpointError(
            f"restore: {found.path} numbers the optimizer's parameters, and lists its weights in"
            f" another order than the module registers them ({there} where it has {here}): either"
            " order fits. Pass names=[...], in the order in which the optimizer was given its"
            " parameters: that of named_parameters() of the module that wrote it"
        )
    return fits[0] if fits else ours
