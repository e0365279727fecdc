"""Names: which tensor of a module is which leaf, and under which other names it is known."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.errors import ConversionError
from torch_bridge.dtypes import x64_enabled
from torch_bridge.module.quantized_linear import Dense, QuantizedLinear


# Libraries that change what is loaded only where it is of an older version, or of other names.
_WITHOUT_CHANGES = {
    "torch", "transformers", "diffusers", "timm", "torchvision", "torchaudio", "peft", "lightning",
    "pytorch_lightning", "torchmetrics",
}  # fmt: skip
# What transformers leaves out of files of models that have such a buffer, wherever it is in them.
_ONCE_KEPT = {
    "rotary_emb.inv_freq": r"rotary_emb\.inv_freq",
    "position_ids": r"(^|\.)position_ids$",
}


@dataclass(frozen=True)
class Leaf:
    """One tensor of the module.

    `names` are all the names it has, in `state_dict` order; the first is the leaf's own.
    """

    names: tuple[str, ...]
    saved_name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_param: bool
    persistent: bool
    frozen: bool
    dense: Dense | None = None  # what it stands for, where it is in blocks of few bits
    computed: bool = False  # its library leaves it out of files, and computes it

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def cut(self) -> tuple[slice, ...]:
        """Of what is kept for it the part without padding."""
        return tuple(slice(n) for n in self.shape)

    @property
    def expected(self) -> bool:
        """Whether every file has it."""
        return self.persistent and not self.computed and not self.counts_batches

    @property
    def counts_batches(self) -> bool:
        """Whether it is batch norm's count, which files of older versions do not have."""
        return self.name.split(".")[-1] == "num_batches_tracked" and self.shape == ()


@dataclass(frozen=True)
class Layout:
    """All leaves of a module, and the order of its `state_dict`.

    `tensors` are the module's own, by name: to recognise them where they turn up without a name,
    as in an optimizer. They are not kept alive. `written_otherwise` are entries of the `state_dict`
    that hooks of the module rename or change, `read_otherwise` its submodules that change what
    they load. `overlaps` are pairs of buffers in memory that they share, which none may write to.
    `ignored` are patterns of names that files of other versions have, and what stands before them;
    `kind` is the name of the module's class.
    """

    leaves: tuple[Leaf, ...]
    order: tuple[str, ...]
    written_otherwise: tuple[str, ...] = ()
    read_otherwise: tuple[str, ...] = ()
    overlaps: tuple[tuple[str, str], ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()
    kind: str = ""
    tensors: Mapping[str, weakref.ref[torch.Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def leaf_of(self) -> dict[str, Leaf]:
        """Every name, aliases included, with its leaf."""
        return {name: leaf for leaf in self.leaves for name in leaf.names}

    def ignores(self, name: str) -> bool:
        """Whether the module's own library leaves a name that is not here out of a file."""
        return any(
            name.startswith(before) and re.search(pattern, name[len(before) :])
            for before, pattern in self.ignored
        )

    def params_by_id(self) -> dict[int, str]:
        """The leaf's name of each parameter of the module that is still alive, by its `id`."""
        own = {name: leaf.name for leaf in self.leaves if leaf.is_param for name in leaf.names}
        kept = ((name, ref()) for name, ref in self.tensors.items() if name in own)
        return {id(tensor): own[name] for name, tensor in kept if tensor is not None}


def read_layout(module: torch.nn.Module) -> Layout:
    """Find the leaves of a module, with ties recognised by identity and by shared memory.

    Args:
        module: any module.

    Returns:
        The layout; it keeps no tensor alive.

    Raises:
        ConversionError: a parameter overlaps in memory with another tensor, a float64 tensor
            while x64 is off, a parameter without a shape yet, or a state_dict entry that is not a
            tensor.
    """
    named = named_tensors(module)
    for name, tensor in named.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise ConversionError(
                f"`{name}` has no shape yet: run one batch through the module, then convert it"
            )
    try:
        state = module.state_dict(keep_vars=True)
        written: tuple[str, ...] = ()
    except TypeError:  # one of its own, which takes other arguments than torch's
        state = torch.nn.Module.state_dict(module, keep_vars=True)
        written = tuple(state)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConversionError(
                f"state_dict entry `{name}` is a {type(value).__name__}, not a tensor; modules "
                "with extra state cannot be converted: keep it in buffers, or take "
                "get_extra_state() away"
            )
    order = tuple(name for name in state if name in named)
    names = [*order, *(name for name in named if name not in state)]
    by_memory: dict[Any, list[str]] = {}
    for name in names:
        by_memory.setdefault(identity(named[name]), []).append(name)
    overlaps = _overlaps({tuple(own): named[own[0]] for own in by_memory.values()})
    tied, computed = _hf_tied_patterns(module), _hf_computed(module)
    dense = {id(m.weight): m.dense for m in module.modules() if isinstance(m, QuantizedLinear)}
    leaves = tuple(
        dataclasses.replace(
            _leaf(tuple(own), named[own[0]], state, tied, dense.get(id(named[own[0]]))),
            computed=not computed.isdisjoint(own),
        )
        for own in by_memory.values()
    )
    written += tuple(
        name
        for name, value in state.items()
        if not name.endswith("_extra_state") and value is not named.get(name)
    )
    tensors = {name: weakref.ref(named[name]) for name in names}
    otherwise, ignored = _that_read_otherwise(module), _hf_ignored(module)
    kind = type(module).__name__
    return Layout(leaves, order, written, otherwise, overlaps, ignored, kind, tensors)


def _that_read_otherwise(module: torch.nn.Module) -> tuple[str, ...]:
    """Submodules whose own code changes what `load_state_dict` gives them."""
    return tuple(
        f"`{path or '(root)'}` ({type(m).__name__})"
        for path, m in module.named_modules()
        if any(
            (getattr(code, "__module__", None) or "").partition(".")[0] not in _WITHOUT_CHANGES
            for code in (
                type(m)._load_from_state_dict,
                type(m).load_state_dict,
                *(getattr(h, "hook", h) for h in m._load_state_dict_pre_hooks.values()),
            )
        )
    )


def find_leaves(module: torch.nn.Module, layout: Layout, child: torch.nn.Module) -> dict[str, Leaf]:
    """Which leaf of a module each tensor of a child of it is.

    Args:
        module: the module that `layout` was read off.
        layout: its leaves.
        child: a module that has tensors of it, under names of its own.

    Returns:
        A leaf for every tensor name of `child`.

    Raises:
        ConversionError: `child` has a tensor that `module` does not have.
    """
    leaf_of = layout.leaf_of()
    by_memory = {identity(t): leaf_of[name] for name, t in named_tensors(module).items()}
    found: dict[str, Leaf] = {}
    for name, tensor in named_tensors(child).items():
        leaf = by_memory.get(identity(tensor))
        if leaf is None:
            raise ConversionError(
                f"`{name}` of a {type(child).__name__} is no tensor of the {type(module).__name__} "
                "that it should be a part of; pass the module that holds it"
            )
        found[name] = leaf
    return found


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a module, under all their names."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    return named


def identity(tensor: torch.Tensor) -> Any:
    """What two names of one tensor share: the object, or exactly the same memory."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def refuse_overlaps(layout: Layout, written: Collection[str] | None = None) -> None:
    """Refuses buffers that share memory, where a forward writes to one: it would change both.

    Args:
        layout: of the module.
        written: names of the buffers that a forward writes to; any of them if not given.
    """
    names = layout.leaf_of()
    changed = None if written is None else {names[name].name for name in written}
    for pair in layout.overlaps:
        if changed is None or not changed.isdisjoint(pair):
            raise _overlapping(*pair)


def _overlapping(first: str, second: str) -> ConversionError:
    return ConversionError(
        f"`{first}` and `{second}` share memory without being the same tensor; as values "
        "they would drift apart. Make one a copy (.clone()), or use one tensor for both."
    )


def _overlaps(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Buffers that share memory, each in a pair at least; parameters that do are refused."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _extent_bytes(t), names[0])
        for names, t in tensors.items()
        if t.numel() and t.layout is torch.strided and not t.is_meta
    )
    learned = {names[0] for names, t in tensors.items() if isinstance(t, torch.nn.Parameter)}
    found: list[tuple[str, str]] = []
    last, before = 0, ""  # where memory that was seen ends, and whose it is
    for begin, end, name in spans:
        if begin < last:
            found.append((before, name))
        if end > last:
            last, before = end, name
    for pair in found:
        if not learned.isdisjoint(pair):
            raise _overlapping(*pair)
    return tuple(found)


def refuse_shared(layout: Layout) -> None:
    """Refuses to train a parameter in whose memory another tensor is.

    PyTorch's optimizers write into that memory: a buffer or a frozen parameter in it changes with
    the other, and of two trained ones each has a gradient and a moment of its own.

    Raises:
        ConversionError: such a parameter, and what shares its memory.
    """
    for leaf in layout.leaves:
        found = {id(tensor): (name, tensor) for name in leaf.names
                 if (tensor := layout.tensors[name]()) is not None}  # fmt: skip
        trained = [name for name, tensor in found.values() if tensor.requires_grad]
        if len(found) > 1 and trained:
            first = trained[0]
            other = next(name for name, _ in found.values() if name != first)
            raise ConversionError(
                f"`{other}` and `{first}` are two tensors in the same memory, which a step of an"
                f" optimizer for `{first}` changes for both. Use one tensor under both names"
                " (self.a.weight = self.b.weight), or make one a copy (.clone()); to evaluate only,"
                " convert with train=False"
            )


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _leaf(
    names: tuple[str, ...],
    tensor: torch.Tensor,
    state: Mapping[str, Any],
    tied: tuple[str, ...],
    dense: Dense | None,
) -> Leaf:
    if tensor.dtype in (torch.float64, torch.complex128) and not x64_enabled():
        raise ConversionError(
            f"`{names[0]}` is {tensor.dtype}, which JAX holds only with 64-bit values enabled: "
            "jax.config.update('jax_enable_x64', True), or convert module.float()"
        )
    learns = tensor.is_floating_point() or tensor.is_complex()
    is_param = isinstance(tensor, torch.nn.Parameter) and (learns or dense is not None)
    kept = [n for n in names if not any(fnmatch.fnmatch(n, p) for p in tied)]
    return Leaf(
        names=names,
        saved_name=(kept or list(names))[0],
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        is_param=is_param,
        persistent=any(n in state for n in names),
        frozen=is_param and not tensor.requires_grad,
        dense=dense,
    )


def _hf_tied_patterns(module: torch.nn.Module) -> tuple[str, ...]:
    """Names that transformers itself leaves out of a file, because it ties them after loading."""
    keys: Any = getattr(module, "_tied_weights_keys", None)
    return tuple(str(k) for k in keys) if isinstance(keys, dict | list | tuple) else ()


def _hf_computed(module: torch.nn.Module) -> set[str]:
    """Names that transformers leaves out of files, as it computes them: sinusoidal positions."""
    return {
        f"{path}.{key}" if path else str(key)
        for path, child in module.named_modules()
        for key in getattr(child, "_keys_to_ignore_on_save", None) or ()
    }


def _hf_ignored(module: torch.nn.Module) -> tuple[tuple[str, str], ...]:
    """What transformers leaves out as it reads a file: masks, angles and places of older versions.

    Its models name patterns, and it has two of its own for what each layer kept once.
    """
    found: list[tuple[str, str]] = []
    for path, child in module.named_modules():
        if hasattr(child, "_keys_to_ignore_on_load_unexpected"):
            patterns = [*(child._keys_to_ignore_on_load_unexpected or ())]
            buffers = [name for name, _ in child.named_buffers()]
            patterns += [
                p for end, p in _ONCE_KEPT.items() if any(b.endswith(end) for b in buffers)
            ]
            found += [(f"{path}." if path else "", str(pattern)) for pattern in sorted(patterns)]
    return tuple(found)
