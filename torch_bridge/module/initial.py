"""Initial values of a conversion: read where they lie, when and slice by slice as they are needed.

A module of 70B parameters fits into a host once, not twice. So a conversion keeps its tensors, not
copies of them, and `fz.init` reads from them what each device keeps. Of a tensor on the `meta`
device there is no value, and whoever asks for one is told so by name: zeros would train.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fzero.errors import ConversionError, some_of
from fzero.sharding.lazy_array import Index, LazyArray, Stacked
from torch_bridge.dtypes import canonical, numpy_dtype
from torch_bridge.module.names import Layout, Leaf, named_tensors
from torch_bridge.module.weights import to_host, to_numpy, to_torch


# Up to so many bytes a module is copied at once: no host notices, and what happens to the module
# afterwards (a train step for comparison) does not matter then.
COPIED_BYTES = 256 * 2**20
# Of so many elements of a tensor that is read later it is seen whether they were changed.
_SAMPLED = 4096

Values = dict[str, Any]


class TensorValue(LazyArray):
    """A tensor of a module, read where it is: on any device, a slice at a time.

    Args:
        name: its name, for messages.
        tensor: the tensor; it is kept alive.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        # Detached, so that `module.bfloat16()` and the like leave this memory as it is.
        self.name, self.tensor = name, tensor.detach()
        self.shape, self.dtype = tuple(tensor.shape), _held(name, tensor)
        self._seen = _version(self.tensor), _sample(self.tensor)

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`.

        Raises:
            ConversionError: the tensor was written to since, or has integers of more than 32 bits.
        """
        if (_version(self.tensor), _sample(self.tensor)) != self._seen:
            raise ConversionError(
                f"`{self.name}` was changed in place after tb.convert, which reads large modules"
                " where they lie. Make the state before the module is trained or loaded again, or"
                " convert with copy=True"
            )
        try:
            return to_host(self.tensor[index])
        except (OverflowError, TypeError) as error:
            raise ConversionError(f"`{self.name}`: {error}") from error


class Absent(LazyArray):
    """A tensor on the `meta` device: a shape and a dtype, and no value.

    Args:
        leaf: the tensor.
    """

    def __init__(self, leaf: Leaf) -> None:
        self.leaf, self.shape = leaf, leaf.shape
        self.dtype = canonical(numpy_dtype(leaf.dtype))

    def __repr__(self) -> str:
        return f"<`{self.leaf.name}`: on the `meta` device, without a value>"

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """Raises ConversionError: there is nothing to read."""
        raise ConversionError(absent_text([self.leaf]))


class Widened(LazyArray):
    """The float32 master of a 16-bit value: the same numbers, widened as they are read.

    Args:
        value: an array or `LazyArray`.
    """

    def __init__(self, value: Any) -> None:
        self.value, self.shape, self.dtype = value, tuple(value.shape), np.dtype(np.float32)

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`."""
        lazy = isinstance(self.value, LazyArray)
        own = self.value.read(index) if lazy else np.asarray(self.value[index])
        return own.astype(np.float32)


def absent_text(leaves: list[Leaf]) -> str:
    """What to say of tensors that have no value."""
    names = [leaf.name for leaf in leaves]
    listed = some_of([f"`{name}`" for name in names], 8)
    lost = [leaf.name for leaf in leaves if not leaf.persistent]
    remedy = (
        "Such buffers are in no checkpoint: give their values, tb.convert(..., buffers={name:"
        " tensor})"
        if lost
        else "Load them with tb.restore(path, converted, ...), or convert a module that has values"
    )
    return f"{listed}: no value, because the module was converted on the `meta` device. {remedy}"


def is_absent(value: Any) -> bool:
    """Whether an initial value, or a layer of it, is not there."""
    return bool(absent_in(value))


def absent_in(value: Any) -> list[Leaf]:
    """The tensors of an initial value that are not there."""
    if isinstance(value, Absent):
        return [value.leaf]
    if isinstance(value, Widened):
        return absent_in(value.value)
    return [leaf for row in value.rows for leaf in absent_in(row)] if _stacked(value) else []


def require_values(params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
    """Refuse initial values that are not there, all of them at once.

    Raises:
        ConversionError: names them.
    """
    leaves = [leaf for tree in (params, buffers) for v in tree.values() for leaf in absent_in(v)]
    if leaves:
        raise ConversionError(absent_text(sorted(leaves, key=lambda leaf: leaf.persistent)))


def on_host(value: Any) -> Any:
    """An initial value as one read-only array, filled layer by layer; what is absent stays so."""
    if not isinstance(value, LazyArray) or is_absent(value):
        return value
    array = value.read(tuple(slice(0, n) for n in value.shape))
    array.flags.writeable = False
    return array


def with_masters(values: Mapping[str, Any], frozen: Collection[str] = ()) -> Values:
    """Parameters as they are trained: those of 16 bits get float32 masters, but for frozen ones."""
    wide = {name for name, v in values.items() if _is_half(v.dtype)}.difference(frozen)
    return {name: Widened(v) if name in wide else v for name, v in values.items()}


def _is_half(dtype: Any) -> bool:
    return np.dtype(dtype).name in ("bfloat16", "float16")


def read_initial(
    module: torch.nn.Module, layout: Layout, given: Mapping[str, Any] | None = None
) -> tuple[Values, Values]:
    """The initial values of a module's tensors as `(params, buffers)`, keyed by leaf name.

    Args:
        module: the module.
        layout: its leaves.
        given: values of buffers, by name, which replace those of the module.

    Returns:
        `LazyArray`s of tensors that lie in the module.

    Raises:
        ConversionError: `given` has an unknown name or another shape.
    """
    named, values = named_tensors(module), _given(layout, given or {})
    missing = {leaf.name for leaf in layout.leaves if named[leaf.name].is_meta} - {*values}
    left_out = {x.name for x in layout.leaves if x.computed or not x.persistent} & missing
    values |= recomputed(module, left_out) if left_out else {}
    params: Values = {}
    buffers: Values = {}
    for leaf in layout.leaves:
        tensor = values.get(leaf.name, named[leaf.name])
        held = Absent(leaf) if tensor.is_meta else TensorValue(leaf.name, tensor)
        (params if leaf.is_param else buffers)[leaf.name] = held
    return params, buffers


def read_values(module: torch.nn.Module, layout: Layout) -> tuple[Values, Values]:
    """Copies of a module's tensors as `(params, buffers)`, keyed by leaf name."""
    params, buffers = read_initial(module, layout)
    return (
        {name: on_host(value) for name, value in params.items()},
        {name: on_host(value) for name, value in buffers.items()},
    )


def _given(layout: Layout, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    leaf_of = layout.leaf_of()
    found: dict[str, torch.Tensor] = {}
    for name, value in given.items():
        leaf = leaf_of.get(name)
        if leaf is None or leaf.is_param:
            buffers = [one.name for one in layout.leaves if not one.is_param]
            raise ConversionError(
                f"convert: buffers has `{name}`, which is no buffer of the module; it has {buffers}"
            )
        tensor = to_torch(value, leaf.dtype)
        if tuple(tensor.shape) != leaf.shape:
            raise ConversionError(
                f"convert: buffers: `{name}` has shape {tuple(tensor.shape)}, expected {leaf.shape}"
            )
        found[leaf.name] = tensor
    return found


def recomputed(module: torch.nn.Module, wanted: set[str]) -> dict[str, torch.Tensor]:
    """Tensors of a module on the `meta` device that its own library computes when it loads one.

    transformers leaves rotary frequencies, positions and the like out of its files, and has each
    class compute them in `_init_weights`. That runs here on a copy of the submodule, in which they
    are on the CPU, twice with other contents and another seed: what comes out equal was computed.

    Args:
        module: the module.
        wanted: names of buffers and parameters.
    """
    found: dict[str, torch.Tensor] = {}
    for path, child, initialise in _submodules(module, "", None):
        own = (*child._buffers, *child._parameters)
        names = {n: full for n in own if (full := f"{path}.{n}" if path else n) in wanted}
        if initialise is None or not names:
            continue
        first, second = (_initialised(child, initialise, fill, names) for fill in (0, 1))
        for name, full in names.items():
            if name in first and name in second and torch.equal(first[name], second[name]):
                found[full] = first[name]
    return found


Initialise = Callable[[torch.nn.Module], Any]


def _submodules(
    module: torch.nn.Module, path: str, outer: Initialise | None
) -> Iterator[tuple[str, torch.nn.Module, Initialise | None]]:
    """Every submodule with the `_init_weights` of the model that it belongs to."""
    own = getattr(module, "_init_weights", None) if hasattr(module, "config") else None
    initialise = own if callable(own) and hasattr(module, "init_weights") else outer
    yield path, module, initialise
    for name, child in module.named_children():
        yield from _submodules(child, f"{path}.{name}" if path else name, initialise)


def _initialised(
    child: torch.nn.Module, initialise: Initialise, fill: int, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Some of a submodule's own tensors after its initialisation; empty if that failed."""
    memo: dict[int, Any] = {}
    for tensor in (*child.parameters(), *child.buffers()):
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    for name, own in (*child._buffers.items(), *child._parameters.items()):
        if own is not None and (name in names or name in child._buffers):
            made = torch.full_like(own, fill, device="cpu", requires_grad=False)
            is_param = isinstance(own, torch.nn.Parameter)
            memo[id(own)] = torch.nn.Parameter(made, False) if is_param else made
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(fill)
            again = copy.deepcopy(child, memo)
            initialise(again)
    except Exception:  # whatever a library's own code raises: the buffer is refused by name then
        return {}
    after = {**again._buffers, **again._parameters}
    return {n: x.detach() for n in names if (x := after.get(n)) is not None and not x.is_meta}


def _held(name: str, tensor: torch.Tensor) -> np.dtype[Any]:
    try:
        return canonical(numpy_dtype(tensor.dtype))
    except TypeError as error:
        raise ConversionError(f"`{name}`: {error}") from error


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sample(tensor: torch.Tensor) -> int:
    """A digest of some elements at equal distances, of small tensors of all.

    Writes through `.data` or NumPy have no version.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    found = tensor
    if tensor.numel() > _SAMPLED:
        indices = torch.arange(0, tensor.numel(), tensor.numel() // _SAMPLED, device=tensor.device)
        found = tensor[torch.unravel_index(indices, tensor.shape)]
    return zlib.crc32(to_numpy(found).tobytes())


def _stacked(value: Any) -> bool:
    return isinstance(value, Stacked)
