"""What does not fit between a file and a module: every place at once, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch

from fzero.errors import CheckpointError, some_of, warn
from torch_bridge.module.lazy_tensor import LazyTensor
from torch_bridge.module.names import Leaf


# Of so many names a warning tells each.
_TOLD = 6
_SIZES = (
    "Other shapes are never taken: give the module the file's sizes before tb.convert (another"
    " vocabulary in transformers: module.resize_token_embeddings(n)). A head that is to begin anew:"
    " leave its names out of the file, and pass strict=False; or load the module itself, by"
    " from_pretrained(..., ignore_mismatched_sizes=True), and convert it with its values."
)


def misfits(leaf: Leaf, given: Mapping[str, LazyTensor], cast: bool, widened: bool) -> list[str]:
    """What of a file does not fit a leaf.

    Args:
        leaf: the leaf.
        given: the file's tensors for it, by its names.
        cast: accept other dtypes.
        widened: accept float32.
    """
    problems: list[str] = []
    for name, tensor in given.items():
        same = tensor.torch_dtype == leaf.dtype or (widened and tensor.torch_dtype == torch.float32)
        if tensor.shape != leaf.shape:
            problems.append(f"shape: `{name}` is {tensor.shape}, expected {leaf.shape}")
        elif tensor.torch_dtype.is_complex and not leaf.dtype.is_complex:
            problems.append(f"complex: `{name}` is no {leaf.dtype}: its imaginary part would go")
        elif not same and (leaf.dense or not cast):
            problems.append(f"dtype: `{name}` is {tensor.torch_dtype}, expected {leaf.dtype}")
    if problems:
        return problems
    (name, first), *others = given.items()
    return [
        f"tied: `{name}` and `{other}` are one weight but differ"
        for other, tensor in others
        if tensor.fetch is not first.fetch and not _same_bits(tensor.tensor(), first.tensor())
    ]


def refuse_misfits(problems: list[str], casts: str = "strict=False", before: str = "") -> None:
    """Says what does not fit, and which argument would have it so.

    Args:
        problems: what does not.
        casts: the argument for dtypes.
        before: what names have in addition to the module's.
    """
    if not problems:
        return
    kinds = {problem.partition(":")[0] for problem in problems}
    remedies = [f"{casts} casts dtypes."] if "dtype" in kinds else []
    if kinds & {"missing", "unexpected"}:
        remedies.insert(0, "strict=False accepts missing and unexpected names.")
    if "shape" in kinds:
        remedies.insert(0, _SIZES)
    if before and "missing" in kinds:
        remedies.insert(0, f"Its names begin with {before!r}: tb.restore(..., prefix={before!r}).")
    raise CheckpointError(
        f"the state_dict does not fit the module in {len(problems)} place(s):\n  "
        + "\n".join(["\n  ".join(problems), *remedies])
    )


def tell_left_out(kept: Collection[str], unused: Collection[str], before: str) -> None:
    """Warns of what a file did not set, and of what is in it for nothing.

    Args:
        kept: the module's names of which it has no value.
        unused: its names of which the module has none.
        before: what its names have in addition to the module's.
    """
    told = [
        f"{what}: {len(names)} ({some_of([f'`{name}`' for name in names], _TOLD)})"
        for what, names in (
            ("not in the file, and kept as they were", kept),
            ("in the file, but not used", unused),
        )
        if names
    ]
    if told:
        hint = f" The file's names begin with {before!r}: prefix={before!r}." if before else ""
        warn(f"strict=False: {'; '.join(told)}.{hint}")


def most_begin_with(names: Iterable[str], known: Collection[str]) -> str:
    """What most names of a file begin with in addition to the module's, if most do."""
    names = list(names)
    ends = (((words := name.split("."))[:i], words[i:]) for name in names
            for i in range(1, name.count(".") + 1))  # fmt: skip
    found = Counter(".".join(head) for head, tail in ends if ".".join(tail) in known)
    (prefix, count), *_ = found.most_common(1) or [("", 0)]
    return f"{prefix}." if 2 * count > len(names) else ""


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0 or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()):
        return True
    raw = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(raw[0], raw[1])  # bits, so that NaN equals itself
