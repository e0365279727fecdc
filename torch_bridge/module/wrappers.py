"""Modules in wrappers: taken out of what only runs them, refused in what has changed them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch

from fzero.errors import ConversionError


# What data-parallel wrappers put before the names of the module inside.
_PREFIX = re.compile(r"^(module\.)+")
# What `torch.optim.swa_utils.AveragedModel` counts beside them.
_COUNT = "n_averaged"
# What `torch.nn.utils.weight_norm` calls what is a parametrization now.
_WEIGHT_NORM = re.compile(r"(?<![^.])(\w+)_([gv])$")
# What wrappers that may stand anywhere put into names, and adapters around a layer.
_WITHIN = re.compile(
    r"(?<![^.])(base_layer|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)"
)

# Where modules are from that hold packed weights and compute with kernels of their own.
_QUANTISERS = re.compile(
    r"(bitsandbytes|auto_gptq|gptqmodel|awq|hqq|optimum\.quanto|eetq|aqlm|vptq|compressed_tensors"
    r"|torch\.ao\.nn(\.intrinsic)?\.quantized"
    r"|transformers\.integrations\.(finegrained_fp8|bitnet|mxfp4|higgs|fbgemm_fp8|spqr))(\.|$)"
)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`.

    What they add (a compiler, several devices) is XLA's and the plan's to do.

    Raises:
        ConversionError: what was given is no module.

    Example:
        >>> inner = torch.nn.Linear(3, 2)
        >>> unwrapped(torch.compile(inner)) is inner
        True
    """
    while True:
        if isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        elif isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(module, torch.nn.Module):
            return module
        else:
            kind = f"the class {module.__name__}" if isinstance(module, type) else f"{module!r:.60}"
            raise ConversionError(
                f"expected a torch.nn.Module, got {kind}: make one of the class, or put a function"
                " into a module's forward"
            )


def refuse_wrapped(module: torch.nn.Module) -> None:
    """Refuse modules whose parameters or submodules a library has replaced by its own.

    Raises:
        ConversionError: sharded (FSDP) or quantised tensors, or compiled submodules, by name.
    """
    for path, child in module.named_modules():
        if isinstance(child, torch._dynamo.OptimizedModule):
            raise ConversionError(
                f"submodule `{path}` is compiled by torch.compile, which fixes names and sizes;"
                " convert the module before it is compiled, or put `_orig_mod` of it back"
            )
        if type(child).__name__ == "FullyShardedDataParallel":
            raise ConversionError(_sharded(f"submodule `{path or '(root)'}`"))
        kind = type(child)
        if _QUANTISERS.match(kind.__module__):
            raise ConversionError(
                f"submodule `{path or '(root)'}` is quantised ({kind.__module__}.{kind.__name__}):"
                " its weights and products are that library's. Widen it first (transformers:"
                " model.dequantize()), or convert the module as it was before; tb.quantize (nf4,"
                " nf4-double or int8) quantises what was converted"
            )
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise ConversionError(
                f"`{name}` has layout {tensor.layout}, which JAX has no form for; keep"
                " .to_dense(), or indices and values as buffers"
            )
        kind = type(tensor.data) if isinstance(tensor, torch.nn.Parameter) else type(tensor)
        if kind in (torch.Tensor, torch.nn.Parameter) or not issubclass(kind, torch.Tensor):
            continue
        if kind.__name__ == "DTensor":
            raise ConversionError(_sharded(f"`{name}`"))
        if kind.__module__.startswith("torchao"):
            raise ConversionError(
                f"`{name}` is quantised by torchao ({kind.__name__}), which has no JAX form;"
                " convert the module before it is quantised, or with .dequantize() of each such"
                " weight"
            )


def _sharded(what: str) -> str:
    return (
        f"{what} is sharded by FSDP, so that no process has the whole of it. Save the weights"
        " (torch.distributed.checkpoint), convert the module as it was before it was sharded, on"
        " the `meta` device if it is large, and load them with tb.restore(folder, converted, tx,"
        " plan)"
    )


def module_names(names: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """By the names of a checkpoint those of the module, without what wrappers put into either.

    The count of averages that stands beside the names of a wrapper is left out.

    Args:
        names: the checkpoint's.
        known: the module's.

    Example:
        >>> module_names(["module.0._orig_mod.weight"], {"0.weight"})
        {'module.0._orig_mod.weight': '0.weight'}
    """
    plain = {_without_wrappers(name): name for name in known}
    found = {name: name if name in known else _without_wrappers(name) for name in names}
    within = {name: inner for name, inner in found.items() if name != _COUNT}
    if plain.keys().isdisjoint(found.values()) and all(map(_PREFIX.match, within.values())):
        shorter = {name: _PREFIX.sub("", inner) for name, inner in within.items()}
        found = found if plain.keys().isdisjoint(shorter.values()) else shorter
    for name, inner in found.items():  # as a hook of torch's own renames them
        if inner not in plain and (new := _WEIGHT_NORM.sub(_parametrized, inner)) in plain:
            found[name] = new
    if len(set(found.values())) < len(found):  # of two that would be one nobody knows which
        return {name: name for name in found}
    return {name: plain.get(inner, inner) for name, inner in found.items()}


def _parametrized(name: re.Match[str]) -> str:
    return f"parametrizations.{name[1]}.original{'gv'.index(name[2])}"


def _without_wrappers(name: str) -> str:
    return _WITHIN.sub("", name)
