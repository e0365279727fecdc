"""Training as a PyTorch user writes it first: a module, a loader, an optimizer, and one call."""

from __future__ import annotations

import itertools
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
import torch

from fzero.errors import CheckpointError, ConversionError, warn
from fzero.plan import Plan
from fzero.report.layout import layout
from fzero.sharding.relayout import TO_ONE_RANK, over_ranks
from fzero.state.init import init
from fzero.state.replan import on_one_rank, replan
from fzero.state.require import require_alive
from fzero.state.selection import read_from
from fzero.state.train_state import TrainState
from fzero.step import train_step
from fzero.step.row_sums import looked_at
from fzero.tree import named_leaves
from torch_bridge.convert import convert
from torch_bridge.converted import Converted
from torch_bridge.dtypes import torch_dtype
from torch_bridge.export.watch.counts import moved, of_loss, reachable
from torch_bridge.export.watch.forward import HARMLESS
from torch_bridge.loss_module import with_loss
from torch_bridge.losses import called_with_batch, module_loss, of_output
from torch_bridge.mean_loss import require_mean
from torch_bridge.module.names import identity, named_tensors
from torch_bridge.module.weights import to_host, to_torch
from torch_bridge.module.wrappers import unwrapped
from torch_bridge.optim import optimizer as as_optax
from torch_bridge.optim.schedules import position
from torch_bridge.optim.unused import require_unused
from torch_bridge.structure.chain import links_merged


def batch(tree: Any) -> Any:
    """A batch of a `DataLoader` as a batch for a step: numpy arrays instead of tensors.

    Args:
        tree: tensors (copied) and arrays in lists, tuples and mappings (what transformers returns
            becomes a dict).

    Raises:
        ConversionError: a tensor that no array can hold (numbers beyond 32 bits, sparse, nested,
            packed); it is named.

    Example:
        >>> x, y = batch([torch.ones(2, 3), torch.arange(2)])
        >>> x.shape, y.dtype.name
        ((2, 3), 'int32')
    """
    return _arrays(tree, "batch")


def _arrays(tree: Any, path: str) -> Any:
    if isinstance(tree, torch.Tensor):
        try:
            return to_host(tree)
        except (OverflowError, TypeError, NotImplementedError, ConversionError) as error:
            raise ConversionError(f"{path}: {error}") from error
    if isinstance(tree, torch.nn.utils.rnn.PackedSequence):
        raise ConversionError(
            f"{path} is a PackedSequence, in which rows are joined: give padded rows and their"
            " lengths, and pack them in the forward (pack_padded_sequence)"
        )
    if isinstance(tree, Mapping):
        return {key: _arrays(value, f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        made = [_arrays(value, f"{path}[{number}]") for number, value in enumerate(tree)]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return tree


def fit(
    module: torch.nn.Module,
    loader: Iterable[Any],
    loss: Callable[..., Any] | str = "module",
    *,
    optimizer: torch.optim.Optimizer | optax.GradientTransformation,
    plan: Plan | None = None,
    epochs: int = 1,
    scheduler: Any = None,
    rng: int = 0,
    on_step: Callable[[int, dict[str, Any]], None] | None = None,
    trained_module: bool = False,
    roll: bool | int = True,
    buffer_reduce: Mapping[str, str] | None = None,
    padding_side: str | None = None,
) -> Any:
    """Train a PyTorch module in JAX, on all devices.

    Args:
        module: the module; it is not changed, unless `trained_module` says so.
        loader: gives batches, anew for each epoch: mappings of keyword arguments, or tuples and
            lists, or tensors, all of as many rows. The first one is the example that the module is
            converted with. Rows at the end of a batch that the devices cannot share evenly are left
            out, with a warning.
        loss: `"module"`: the module returns its loss for a batch (transformers, with `labels`).
            Otherwise a torch loss, function or module: `loss(module(*batch[:-1]), batch[-1])`.
            Either is a mean over the rows of one device and microbatch, and these means count
            alike, as under DDP: a sum over rows is refused, and where the first batch shows that
            rows count differently (`ignore_index`, weights of classes), a warning says so.
        optimizer: of the module's parameters, as torch has it (its classes are known, see
            `tb.optimizer`), or an optax transformation. It has not stepped yet, and is not stepped:
            another call starts anew.
        plan: how the state is laid out and stepped; ZeRO-3 over all devices by default.
        epochs: how often the loader is run through.
        scheduler: a learning rate scheduler of the torch optimizer, stepped with every step. Rates
            that `on_step` changes in the optimizer are refused. One whose values do not say how
            they go on (`LambdaLR`) wants a loader that has a length.
        rng: seed of initial keys, and of dropout.
        on_step: called with the number of each step, from 1, and its metrics, which are device
            values: reading one waits for the step. What it changes in the module or the loss does
            not reach the compiled step; a warning says so at the end. Nor does the module have the
            trained values meanwhile: averages of them are `Plan(ema=)`.
        trained_module: also load the trained values into the module.
        roll: as in `tb.convert`; `False` where layers of a stack have learning rates of their own.
        buffer_reduce: how devices' values of a buffer become one, by its name: `"sum"` for a count
            of examples, for one.
        padding_side: as in `tb.convert`.

    Returns:
        The final state; with `trained_module` the pair of it and the module.

    Raises:
        ConversionError: the module, loss or optimizer cannot be converted, the loader is empty, in
            a later epoch too, or the optimizer has begun or is changed meanwhile.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> module = torch.nn.Linear(3, 1)
        >>> data = TensorDataset(torch.ones(16, 3), torch.zeros(16, 1))
        >>> sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        >>> state = fit(module, DataLoader(data, 8), torch.nn.MSELoss(), optimizer=sgd)
        >>> int(state.step)
        2
    """
    given_module, module, plan = module, unwrapped(module), plan or Plan()
    _refuse_empty(module)
    require_unused(optimizer, scheduler)
    batches = _begun(loader, epochs, on_step)
    first = _first(batches)
    traced = _with_its_loss(module, loss, first)
    options = {} if padding_side is None else {"padding_side": padding_side}
    converted = _converted(traced, first, roll=roll, **options)
    model = converted.model("module", buffer_reduce=buffer_reduce)
    tx: Any = optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        own_loss = of_output(module_loss, called_with_batch)
        unread = converted.unread(own_loss, batch(first))
        steps = _most_steps(loader, epochs, scheduler)
        tx = as_optax(optimizer, converted, scheduler, num_steps=steps, unread=unread)
    state, step = init(model, tx, plan, rng), train_step(model, tx, plan)
    times = layout(model, tx, plan).batch_multiple
    looked = callable(loss) and require_mean(module, loss, called_with_batch(first), times)
    hyper, began = _hyper(optimizer), None
    done = 0
    for epoch in range(epochs):
        given = None
        for given in itertools.chain([first], batches) if epoch == 0 else loader:
            whole = _whole_rows(batch(given), times)
            if whole is None:
                continue
            with looked_at(looked):
                state, metrics = step(state, whole)
            done += 1
            began = began or _told(module, traced)
            if on_step is not None:
                on_step(done, metrics)
            if _hyper(optimizer) != hyper:
                raise ConversionError(
                    f"fit: the optimizer's hyperparameters were changed in step {done}, but the"
                    " compiled step has those that it began with: give a scheduler="
                )
        if given is None:
            raise ConversionError(
                f"fit: the loader gave no batch in epoch {epoch + 1} of {epochs}: it has to give"
                " them anew for each epoch"
            )
    _end(began, _told(module, traced), times)
    return (state, _loaded(given_module, state, model, tx, plan)) if trained_module else state


def _loaded(module: torch.nn.Module, state: TrainState, model: Any, tx: Any, plan: Plan) -> Any:
    flat = state if plan.pipe == 1 else replan(state, model, tx, plan, on_one_rank(plan))
    return load_into(module, flat)


def _refuse_empty(module: torch.nn.Module) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ConversionError(
            "fit: the module has no values (`meta`): fill it first (module.to_empty, then its own"
            " initialisation), or read them into a state: tb.restore(path, tb.convert(module, ...))"
        )


def _end(began: Any, ended: Any, times: int) -> None:
    """Refuse to have taken no step, and warn of what changed since the first one."""
    if began is None:
        raise ConversionError(
            f"fit: no step was taken: no batch has {times} rows, one for each device and"
            " microbatch: make batches larger, or Plan(microbatches=) smaller"
        )
    if changed := sorted(moved(began, ended)):
        warn(
            f"fit: {', '.join(changed[:4])} changed while it ran, but the compiled step has what"
            " there was when it began. Give what changes in each batch, or keep it in a buffer"
        )


def _with_its_loss(module: torch.nn.Module, loss: Any, first: Any) -> torch.nn.Module:
    """A module that returns its loss; which of a mapping is a torch loss's target, nobody knows."""
    if loss != "module" and isinstance(first, Mapping):
        raise ConversionError(
            f"fit: the loader gives mappings ({', '.join(map(str, first))}), and a torch loss takes"
            " tuples: loss(module(*batch[:-1]), batch[-1]). Give (*inputs, target); or let the"
            ' module\'s forward take these names and return its loss, and say loss="module"'
        )
    return module if loss == "module" else with_loss(module, loss)


def _told(module: torch.nn.Module, traced: torch.nn.Module) -> dict[str, Any]:
    """What a module and its loss compute with besides a batch, to see whether somebody changes it.

    `traced` is the same module with a loss.
    """
    told = reachable(module, HARMLESS)[0] | of_loss(traced, HARMLESS)
    for name, tensor in named_tensors(module).items():
        told[f"`{name}`"] = tensor._version, _some_bytes(tensor)
        told[f"`{name}.requires_grad`"] = tensor.requires_grad
    for path, part in module.named_modules():
        name = path or type(module).__name__
        told[f"`{name}.training`"] = part.training
        told[f"the parts of `{name}`"] = tuple(map(id, part.children()))
        told[f"the hooks of `{name}`"] = len(part._forward_hooks), len(part._forward_pre_hooks)
    return told


def _some_bytes(tensor: torch.Tensor) -> bytes:
    """Of about a thousand elements: what is written through `.data` counts no version."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_meta or tensor.is_quantized:
        return b""
    some = tensor.detach().flatten()[:: max(tensor.numel() // 1024, 1)]
    return some.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _begun(loader: Any, epochs: Any, on_step: Any) -> Iterator[Any]:
    """The batches of the first epoch."""
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ConversionError(
            f"fit: the loader is a {type(loader).__name__}: expected what gives batches, anew for"
            " each epoch, such as a DataLoader or a list; a function of batches has to be called"
        )
    whole = isinstance(epochs, numbers.Integral) and not isinstance(epochs, bool)
    if not whole or epochs < 1:
        raise ConversionError(f"fit: epochs={epochs!r:.60}: expected a number, 1 or more")
    if on_step is not None and not callable(on_step):
        raise ConversionError(
            f"fit: on_step={on_step!r:.60}: expected a function of a step's number and its metrics"
        )
    batches = iter(loader)
    if epochs > 1 and batches is loader:
        raise ConversionError(
            f"fit: the loader is an iterator, which gives its batches once, but epochs={epochs}:"
            " give a DataLoader or a list"
        )
    return batches


def _first(batches: Iterator[Any]) -> Any:
    """The first batch; numbers and texts in it are refused before they are traced."""
    first = next(batches, None)
    if first is None:
        raise ConversionError("fit: the loader gave no batch")
    for path, leaf in named_leaves(batch(first)):
        if not isinstance(leaf, np.ndarray | jax.Array) or not leaf.ndim:
            of = f"`{path}` of " if path else ""
            raise ConversionError(
                f"fit: {of}a batch is {leaf!r:.60}: expected a tensor with a row for each example."
                " Leave it out where batches are made (collate_fn); what is alike in all"
                " batches is set in the module"
            )
    return first


def _most_steps(loader: Any, epochs: int, scheduler: Any) -> int | None:
    """At which step a scheduler ends at most, where the loader knows its length."""
    try:
        return epochs * len(loader) + (0 if scheduler is None else position(scheduler))
    except TypeError:
        return None


def _hyper(optimizer: Any) -> list[dict[str, Any]]:
    """The hyperparameters of a torch optimizer's groups, as values."""
    return [
        {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in g.items() if k != "params"}
        for g in getattr(optimizer, "param_groups", ())
    ]


def _converted(traced: torch.nn.Module, first: Any, **options: Any) -> Converted:
    """The module with its loss, converted with a batch."""
    given = called_with_batch(first)
    if isinstance(given, Mapping):
        return convert(traced, **options, **given)
    args = given if isinstance(given, tuple) else (given,)
    return convert(traced, *args, **options)


def _whole_rows(tree: Any, times: int) -> Any:
    """A batch without the rows at its end that devices could not share; None if none are left."""
    if times == 1:
        return tree
    sizes = {len(leaf) if np.ndim(leaf) else None for leaf in jax.tree.leaves(tree)}
    if len(sizes) != 1 or None in sizes:
        shapes = jax.tree.map(np.shape, tree)
        raise ConversionError(
            f"fit: a batch holds arrays of shapes {shapes}: devices share rows, of which each has"
            " to have as many. Give what belongs to no row to the module (a buffer)"
        )
    rows = sizes.pop() or 0
    kept = rows - rows % times
    if kept != rows:
        warn(
            f"fit: {rows - kept} of {rows} rows of a batch are left out: devices and microbatches"
            f" take multiples of {times}. Use DataLoader(..., drop_last=True), or another size"
        )
    if kept == rows:
        return tree
    return jax.tree.map(lambda leaf: leaf[:kept], tree) if kept else None


# `[1:12]` or `[0:26:2]` in the name of a stacked leaf; `*` stands for all blocks.
_BLOCKS = re.compile(r"\*|\[(\d+):(\d+)(?::(\d+))?\]")


def load_into(module: torch.nn.Module, state: Any, *, which: str = "params") -> torch.nn.Module:
    """Write a state's parameters and buffers into the module that it was converted from.

    Args:
        module: the module; its tensors keep their memory, dtypes and devices.
        state: a `TrainState`, or anything with `.params` and `.buffers`, on devices or the host.
        which: of a `TrainState`, the `params` or their moving averages (`ema`).

    Returns:
        The module.

    Raises:
        CheckpointError: the module has other tensors, more of them or other ties, or dtypes that
            cannot hold the values; or the state is one of a pipeline (bring it to one rank with
            `fz.replan` first). Nothing is written then.

    Example:
        >>> import jax.numpy as jnp
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> class State:
        ...     params, buffers = {"weight": jnp.ones((2, 3)), "bias": jnp.zeros(2)}, {}
        >>> load_into(torch.nn.Linear(3, 2), State()).weight.sum().item()
        6.0
    """
    if isinstance(state, TrainState):
        require_alive(state, "load_into")
    elif not (hasattr(state, "params") and hasattr(state, "buffers")):
        raise CheckpointError(
            f"load_into: expected a state, got a {type(state).__name__}; for values by name there"
            " is module.load_state_dict(tb.state_dict(converted, params))"
        )
    state = read_from(state, which, "load_into")
    given, module = module, unwrapped(module)
    tensors = named_tensors(module)
    values: dict[str, Any] = {}
    for name, value in {**links_merged(state.params), **links_merged(state.buffers)}.items():
        if over_ranks(value):
            raise CheckpointError(
                f"load_into: the layers of `{name}` are spread over the ranks of a pipeline:"
                f" {TO_ONE_RANK}"
            )
        values |= _rows(name, value, tensors)
    wrong = [n for n, v in values.items() if n not in tensors or not _fits(v, tensors[n])]
    if wrong:
        raise CheckpointError(
            f"load_into: the module has no such tensors, or of other shapes: {wrong[:8]}. It is not"
            " the one that was converted; a state of tb.sequential goes back with"
            " module.load_state_dict(tb.state_dict(chain, state))"
        )
    _refuse_others(values, tensors)
    with torch.no_grad():
        for name, value in values.items():
            own = tensors[name]
            own.copy_(to_torch(_cut(value, own), own.dtype))
    return given


def _cut(value: Any, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A value without padding."""
    return np.asarray(value)[tuple(slice(n) for n in tensor.shape)]


def _refuse_others(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a module that a state's values would fill in part, twice, or not as they are."""
    names: dict[Any, str] = {}
    problems: list[str] = []
    for name, value in values.items():
        own = tensors[name]
        first = names.setdefault(identity(own), name)
        if own.is_meta:
            problems.append(f"`{name}` is on the meta device: module.to_empty(device=...) first")
        if own.is_inference():
            problems.append(
                f"`{name}` was made under torch.inference_mode(), and cannot be written: make the"
                " module outside of it"
            )
        if first != name and not np.array_equal(
            _cut(value, own), _cut(values[first], own), equal_nan=True
        ):
            problems.append(f"`{first}` and `{name}` are one tensor, but have two values")
        if tuple(own.shape) != tuple(value.shape):  # padding is zeros
            host = np.asarray(value)
            if np.count_nonzero(host) != np.count_nonzero(_cut(host, own)):
                problems.append(f"`{name}` is {tuple(own.shape)}, smaller than {host.shape}")
        if torch_dtype(value.dtype) != own.dtype and not _holds(own.dtype, _cut(value, own)):
            problems.append(f"`{name}`: {own.dtype} cannot hold the values of {value.dtype}")
    missing = [n for n, own in tensors.items() if identity(own) not in names]
    problems += [f"`{name}`: the state has no value for it" for name in missing]
    if problems:
        raise CheckpointError(
            "load_into: the module is not as the converted one (layers, ties, dtypes):\n  "
            + "\n  ".join(problems[:20])
        )


def _holds(dtype: torch.dtype, values: np.ndarray[Any, Any]) -> bool:
    """Whether values fit into a dtype: floats may be rounded, but not become infinite."""
    plain = to_torch(values)
    cast = plain.to(dtype)
    if dtype.is_complex or (dtype.is_floating_point and not plain.is_complex()):
        return bool((cast.isfinite() | ~plain.isfinite()).all())
    return bool((cast.to(plain.dtype) == plain).all())


def _fits(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a value has a tensor's shape, but for padding at its end."""
    return len(value.shape) == tensor.ndim and all(
        n >= m for n, m in zip(value.shape, tensor.shape, strict=True)
    )


def _rows(name: str, value: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A leaf by the names of the module's own tensors: the layers of a stacked one each alone."""
    found = None if name in tensors else _BLOCKS.search(name)
    if found is None:
        return {name: value}
    start, stop, step = (int(n) if n else None for n in (found[1], found[2], found[3]))
    numbers = range(start or 0, value.shape[0] if stop is None else stop, step or 1)
    host = np.asarray(value)
    return {
        f"{name[: found.start()]}{number}{name[found.end() :]}": host[row]
        for row, number in enumerate(numbers)
    }
