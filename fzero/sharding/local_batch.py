"""A global batch of the rows that each process has read."""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fzero.batch import Inputs, check_batch, is_shared, require_held, taken
from fzero.compat import auto_mesh, is_key, key_bits
from fzero.errors import BatchError
from fzero.hosts.agree import exchange, require_equal
from fzero.processes import in_turn
from fzero.tree import PyTree, named_leaves


POINT = "local_batch"


class BatchLayout(Protocol):
    """What is known of batches; `fz.Layout` has it."""

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of every leaf with rows."""

    @property
    def batch_multiple(self) -> int:
        """What the number of rows is a multiple of."""


def local_batch(rows: PyTree, layout: BatchLayout, mask: str | None = None) -> PyTree:
    """One global batch, of which each process passes the rows that it has read.

    Rows are in the order of the processes. Every process calls this at the same point, with leaves
    of the same names, dtypes and shapes; it is what keeps a loader per process in step.

    Args:
        rows: a pytree of host arrays with a leading dim of examples, this process's own.
        layout: `fz.layout(model, tx, plan)`.
        mask: where processes may have read different numbers of rows, or none, as at the end of the
            data: the name of a leaf that is added to the batch (a dict), True for rows that were
            read. Processes with fewer rows are filled up. Leave the filling out of the loss's total
            and count, as with `fz.pad_batch`.

    Returns:
        The batch as global arrays; with `mask`, `None` once no process has any row.

    Raises:
        BatchError: in every process alike: names, dtypes or shapes differ between processes; or,
            without `mask`, numbers of rows do, or do not divide.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, fzero as fz
        >>> def loss(p, buffers, batch, rng, train):
        ...     error = (batch["x"] @ p["w"]) * batch["real"]
        ...     return fz.Mean(jnp.sum(error), batch["real"].sum()), buffers, {}
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones(2)}, {}), loss)
        >>> plan = fz.Plan(data=1)
        >>> rows = {"x": np.ones((3, 2), np.float32)}
        >>> batch = fz.local_batch(rows, fz.layout(model, None, plan), mask="real")
        >>> float(fz.eval_step(model, plan)(fz.init(model, None, plan), batch)["loss"])
        2.0

    Source: jax.make_array_from_process_local_data.
    """
    if not hasattr(layout, "batch_sharding"):
        raise BatchError(
            f"local_batch: layout is a {type(layout).__name__}: expected fz.layout(model, tx, plan)"
        )
    rows = taken(rows)
    own = Inputs.of(rows).rows
    sharding = layout.batch_sharding
    counts = _alike(own, mask)
    devices = sharding.mesh.devices.reshape(-1)
    each = len(devices) // len(counts)
    whole = math.lcm(layout.batch_multiple, len(devices))
    step = whole // math.gcd(whole, len(counts))
    if mask is None:
        _require_even(counts, step)
        size = counts[0]
    elif not any(counts):
        return None
    else:
        size = step * math.ceil(max(counts) / step)
        rows = {**rows, mask: np.ones(_count(own), bool)}
    # Rows lie in the order of the processes; devices in that of the plan, as programs want them.
    flat = NamedSharding(auto_mesh(devices, ("rows",)), PartitionSpec("rows"))
    owners = [device.process_index for device in devices]
    order = tuple(int(index) for index in np.argsort(owners, kind="stable"))
    if {owners.count(process) for process in range(len(counts))} != {each}:
        raise BatchError("local_batch: expected the plan to use equally many devices of every one")

    def placed(leaf: Any) -> jax.Array:
        host = _filled(np.asarray(key_bits(leaf)), size)
        whole = jax.make_array_from_process_local_data(
            flat, host, (size * len(counts), *host.shape[1:])
        )
        moved: jax.Array = _moved(sharding, order)(whole)
        if not is_key(leaf):
            return moved
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(leaf))

    return jax.tree.map(lambda x: x if is_shared(x) else placed(x), rows, is_leaf=is_shared)


def _alike(rows: PyTree, mask: str | None) -> list[int]:
    """The number of rows of every process; refuses leaves that differ in more than that."""
    problem = None
    if mask is not None and not isinstance(mask, str):
        problem = f"mask={mask!r}: expected a name for the leaf that says which rows are real"
    elif mask is not None and (not isinstance(rows, dict) or mask in rows):
        problem = f"mask={mask!r}: expected a dict of arrays without this name"
    try:
        if mask is None or _count(rows):
            check_batch(rows, 1, 1)
        elif any(np.shape(x)[:1] != (0,) for _, x in named_leaves(rows)):
            problem = problem or "leaves have different numbers of rows"
        for path, leaf in named_leaves(rows) if problem is None else ():
            require_held(np.asarray(key_bits(leaf)), path)
    except BatchError as error:
        problem = problem or str(error)
    facts: dict[str, Any] = {"what is wrong with the rows": problem}
    for path, leaf in named_leaves(rows) if problem is None else ():
        facts[f"batch {path}"] = f"{leaf.dtype}{list(leaf.shape[1:])} for each row"
    everyone = exchange(POINT, {"facts": facts, "count": _count(rows)})
    require_equal(POINT, [one["facts"] for one in everyone], BatchError)
    if problem is not None:
        raise BatchError(f"local_batch: {problem}")
    return [one["count"] for one in everyone]


def _count(rows: PyTree) -> int:
    leaves = jax.tree.leaves(rows)
    return int(np.shape(leaves[0])[0]) if leaves and np.shape(leaves[0]) else 0


def _require_even(counts: list[int], step: int) -> None:
    if len(set(counts)) == 1 and counts[0] and counts[0] % step == 0:
        return
    each = ", ".join(f"process {p}: {n}" for p, n in enumerate(counts))
    raise BatchError(
        f"local_batch: expected the same positive multiple of {step} rows from every process, got"
        f" {each}. With mask='name' shorter ones are filled up, and batch['name'] says which rows"
        " are real: leave the others out of the loss's fz.Mean"
    )


def _filled(host: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Copies of the first row at the end; zeros (False) where there is no row, and in a mask."""
    if len(host) == size:
        return host
    copies = len(host) and host.dtype != bool
    like = host[:1] if copies else np.zeros((1, *host.shape[1:]), host.dtype)
    return np.concatenate([host, np.repeat(like, size - len(host), axis=0)])


@functools.lru_cache(maxsize=16)
def _moved(to: NamedSharding, order: tuple[int, ...]) -> Any:
    """A program that takes rows to where the plan has them.

    Args:
        to: the plan's sharding of rows.
        order: for each block of rows of the result, which one it is of those on the devices.
    """

    def move(x: jax.Array) -> jax.Array:
        if order == tuple(range(len(order))):
            return x
        blocks = x.reshape(len(order), -1, *x.shape[1:])
        return blocks[np.array(order)].reshape(x.shape)

    return in_turn(to.device_set, jax.jit(move, out_shardings=to))
