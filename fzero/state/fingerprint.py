"""What processes must have in common to train one state: compared before their first program."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from fzero.compat import is_key
from fzero.hosts.agree import require_same
from fzero.hosts.join import watch
from fzero.pieces import chain_forward
from fzero.programs.digest import digest
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.initial import initial_shapes
from fzero.sharding.split import trained
from fzero.tree import named_leaves, shapes_of


WHOLE = (
    "a host array is the whole global batch, the same in every process; fz.local_batch takes a"
    " process's own rows"
)
PACKAGES = ("fzero", "jax", "jaxlib", "optax", "numpy")
# What one version of fzero consists of.
SOURCES = ("fzero", "torch_bridge")


def compare(operation: str, blue: Blueprint, initial: Any = None, **also: Any) -> None:
    """Refuses to begin where processes would not run the same programs on the same devices.

    Args:
        operation: what begins, such as `"init"`.
        blue: the blueprint of the state.
        initial: a model's initial values, or what makes them.
        **also: further JSON-able facts by name; keys are compared by their bits.

    Raises:
        HostsError: in every process; names the first difference and who has what.
    """
    if watch() is None:
        return
    facts: dict[str, Any] = {f"the version of {name}": _version(name) for name in PACKAGES}
    facts |= {f"the source of {name}": _source(name) for name in SOURCES}
    facts |= {f"plan.{name}": value for name, value in blue.plan.to_json().items()}
    if blue.plan.remat is None:
        what = "the memory that jax may take of a device (Plan(remat=None) goes by it; name one)"
        facts[what] = blue.memory
    facts["devices"] = [f"{d.id}: {d.device_kind}" for d in blue.mesh.devices.flat]
    facts |= {name: _plain(value) for name, value in also.items()}
    shapes = blue.shapes()
    for field in ("params", "buffers", "opt_state"):
        for path, leaf in named_leaves(shapes[field]):
            facts[f"{field}/{path}"] = f"{leaf.dtype}{list(leaf.shape)}"
    if not callable(initial):
        facts |= {f"the initial value of {p}": _hash(x) for p, x in named_leaves(initial)}
    require_same(operation, facts)


@functools.cache
def _source(package: str) -> str | None:
    """Of all its modules, which are not imported: a checkout that is behind has the same version.

    Args:
        package: its name.
    """
    found = importlib.util.find_spec(package)
    if found is None:
        return None
    digest = xxhash.xxh3_64()
    for folder in map(Path, found.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def batch_facts(batch: Any) -> dict[str, Any]:
    """What is the same in all processes of a batch: shapes, and every value of host arrays."""
    facts: dict[str, Any] = {}
    for path, leaf in named_leaves(batch):
        shape = f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else str(type(leaf))
        facts[f"batch {path}"] = shape
        facts[f"the values of batch {path} ({WHOLE})"] = _hash(leaf)
    return facts


def computed_facts(blue: Blueprint, batch: Any, train: bool, outputs: bool) -> dict[str, Any]:
    """What the model and the optimizer compute, as numbers that equal programs share.

    Each is traced once more for it, alone: neither learning rates nor losses have a shape.

    Args:
        blue: the blueprint of the state.
        batch: a batch.
        train: whether the step trains.
        outputs: whether it gives the model's outputs, and no loss.
    """
    compute = chain_forward(blue.model.predictor) if outputs else blue.model.loss
    params, buffers = initial_shapes(blue.model)
    facts = {"what the model computes (its functions, and numbers in them)": _digest(
        lambda p, b, rows, rng: compute(p, b, rows, rng, train),
        params, buffers, shapes_of(batch), jax.eval_shape(lambda: jax.random.key(0)),
    )}  # fmt: skip
    if blue.tx is not None and train:
        tx, own = blue.tx, trained(blue.params, params)
        what = "what the optimizer computes (its learning rate and other numbers)"
        facts[what] = _digest(lambda p: tx.update(p, tx.init(p), p), own)
    return facts


def _digest(function: Any, *shapes: Any) -> str | None:
    try:
        with jax.numpy_dtype_promotion("standard"):
            traced = jax.make_jaxpr(function)(*shapes)
    except Exception:  # it wants more than that, such as a mesh: the step will say so, if it does
        return None
    return digest(traced)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source tree
        return "unknown"


def _plain(value: Any) -> Any:
    if isinstance(value, jax.Array) and is_key(value):
        return f"{jax.random.key_impl(value)} {np.asarray(jax.random.key_data(value)).tolist()}"
    return value


def _hash(leaf: Any) -> str | None:
    """Of a value that this process has in memory, whole."""
    here = isinstance(leaf, jax.Array) and leaf.is_fully_addressable and not is_key(leaf)
    if not here and not isinstance(leaf, np.ndarray | np.generic):
        return None
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(np.asarray(leaf)).tobytes())
