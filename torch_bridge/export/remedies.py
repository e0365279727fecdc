"""What to write instead of a function of PyTorch that has no form in JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


_OF_FIXED_SIZE = (
    "Keep the size: torch.where(mask, x, 0) and sums that are divided by mask.sum(), or topk with"
    " a number that is known before."
)
_A_QUESTION = (
    "Its answer is a Python bool, which a compiled program does not have. Compare element by"
    " element (torch.isclose, ==), keep the answer as a tensor (.all()), and choose with"
    " torch.where."
)
_BY_REPEATS = (
    "Sort, and compare neighbours: torch.sort(x).values, then x[1:] != x[:-1] marks the first of"
    " each value; torch.where keeps the size."
)
_DENSE = (
    "JAX has no sparse layouts: keep the tensor dense, or keep indices and values and compute with"
    " index_add and gather."
)
_RAGGED = "JAX has no arrays of several lengths: fill up to one (pad_sequence), and give a mask."
_IN_PLACE_SIZE = (
    "An array keeps its size: make another one with reshape, x[:n] or torch.nn.functional.pad."
)
_SYMMETRIC = (
    "torch.linalg.solve, lu_factor and cholesky have one; a symmetric matrix is factorised by"
    " torch.linalg.eigh, too."
)

_CACHES = (
    "A graph returns tensors only. Turn the cache off (use_cache=False), or convert a module whose"
    " forward returns .logits; tb.generate keeps caches of its own."
)

_CONSTANT = (
    "What it writes to is no buffer of the module: a buffer of a loss, a tensor in an attribute, a"
    " list or a closure. Make it a buffer of the module that is converted: of a loss with a state,"
    ' one whose forward returns the loss (tb.fit(loss="module")).'
)
_FAKE_QUANTIZED = (
    "Write it out: q = (x / scale).round() + zero; y = (q.clamp(low, high) - zero) * scale; then"
    " torch.where((low <= q) & (q <= high), x + (y - x).detach(), y.detach()) has its gradient."
)
_TYPES = "Return a dict, a tuple or a NamedTuple in the place of a type of your own."

_ARGUMENTS = (
    "Arguments are tensors, Python's numbers and strings, None, and lists, tuples and dicts of"
    " these: float(x) for a number of NumPy; what else a forward takes, give it in a module around"
    " it whose forward passes it on."
)
_OF_MEMORY = (
    "A tensor has no memory while a forward is traced: compute with torch's operators; what NumPy"
    " or a kernel computes, make an operator (torch.library.custom_op) and say with"
    " torch_bridge.register_operator what it is in JAX."
)
# What PyTorch says, and what to do then.
_SAID = {
    "Unsupported input type": _ARGUMENTS,
    ".numpy() is not supported": _OF_MEMORY,
    "Cannot access data pointer": _OF_MEMORY,
    "its data is not allocated yet": "torch.tensor takes numbers; of tensors, torch.stack.",
    "autocast must exit": "Say `with torch.autocast(...):` around what is to be cast.",
}

# By names of functions, without their overloads.
_TABLE: dict[str, str] = {
    **dict.fromkeys(("allclose", "equal", "is_nonzero"), _A_QUESTION),
    **dict.fromkeys(("nonzero", "argwhere", "index"), _OF_FIXED_SIZE),
    "masked_select": f"{_OF_FIXED_SIZE} Labels of CTC: call the model without them, and in a module"
    " around it F.ctc_loss, which takes them padded, with their lengths.",
    "index_put": "x[mask] = y is torch.where(mask, y, x), where y has the size of x.",
    "index_put_": "x[mask] = y is torch.where(mask, y, x), where y has the size of x.",
    **dict.fromkeys(("_unique2", "unique_consecutive", "unique_dim"), _BY_REPEATS),
    "bincount": "F.one_hot(x, n).sum(0) counts n values, known before; of weights: zeros(n)"
    ".index_add(0, x, weights).",
    "one_hot": "Say how many classes there are: F.one_hot(x, num_classes=n).",
    "repeat_interleave": "Say how long the result is: repeat_interleave(x, repeats,"
    " output_size=n).",
    "tensor_split": "Give the places as Python numbers: tensor_split(x, [2, 5]).",
    **dict.fromkeys(
        ("_to_sparse", "to_sparse", "to_sparse_csr", "_sparse_mm", "_sparse_addmm"), _DENSE
    ),
    "_nested_tensor_from_tensor_list": _RAGGED,
    "_nested_tensor_from_mask": _RAGGED,
    **dict.fromkeys(("resize_", "resize_as_"), _IN_PLACE_SIZE),
    **dict.fromkeys(
        (
            "fake_quantize_per_tensor_affine_cachemask",
            "fake_quantize_per_channel_affine_cachemask",
            "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        ),
        _FAKE_QUANTIZED,
    ),
    "geqrf": "torch.linalg.qr gives both factors.",
    **dict.fromkeys(("linalg_ldl_factor_ex", "linalg_ldl_factor", "linalg_ldl_solve"), _SYMMETRIC),
    "hash_tensor": "A hash is of bits, which no gradient needs: take it outside of the model.",
    "embedding_renorm": "max_norm= writes to the weights within a forward: leave it out, and scale"
    " rows that are too long after a step (state.replace(params=...)), or what the forward reads"
    " (F.embedding, then rows / rows.norm(dim=-1, keepdim=True).clamp(min=1)).",
    "nms": "Let the module return boxes and scores, and call torchvision.ops.nms on them"
    " afterwards; or say which boxes stay by a mask over all, with an operator of your own"
    " (torch_bridge.register_operator).",
    "jiterator": "It compiles CUDA while the model runs: write the same with torch's operators.",
}
_ANY = "Write it with other operators, or add it with torch_bridge.register_operator(name)."
_VALUES = (
    "Sizes and branches must not depend on tensor values: torch.where or a mask of fixed size"
    " instead of boolean indexing, nonzero or .item(), or a size that is known before. What is"
    " asserted of values: torch._assert_async(condition), which a compiled program leaves out, or"
    " an `if` of its own that does nothing but raise."
)
_PLACES = (
    f"{_VALUES} Rows from a tensor's number on: torch.narrow(x, 0, i, 2) for x[i : i + 2]; one row"
    " beside other tensors: x.index_select(0, i.reshape(1)).squeeze(0)."
)
_DEVICES = (
    "Tensors that meet in a forward have to be on one device: bring the example to the module's,"
    ' x.to(device); to that of a module without values, x.to("meta"). What a forward makes without'
    " saying where is on the CPU: torch.arange(n, device=x.device). A module is on one device as a"
    ' whole: one of which a part has no values, module.to("meta"), or load the rest before.'
)
_NO_VALUE = (
    "On the `meta` device a tensor has no value to ask for (.item(), float(), if): ask the Python"
    " number that it is made of, or convert a module on the CPU."
)

# What PyTorch says of dtypes that it does not compute in, or not together.
_OF_DTYPES = re.compile(
    r"[Uu]nsupported dtype|same dtype|dtypes must be the same|expected scalar type|not implemented"
    r" for '(BFloat16|Half)'"
)
_DTYPES = (
    "PyTorch does not compute this in these dtypes: cast in the forward (x.float() before it,"
    " .to(x.dtype) after it), or keep the submodule that computes it in float32,"
    ' fz.Plan(keep_fp32=("its_name",)).'
)


def remedy(function: str) -> str | None:
    """What to do about a function, or None where nothing is known of it.

    Args:
        function: its name, with or without a library and an overload: `aten.equal.default`.

    Example:
        >>> remedy("aten.geqrf.default")
        'torch.linalg.qr gives both factors.'
        >>> remedy("mylib.fused.default") is None
        True
    """
    words = function.split(".")
    return _TABLE.get(words[1] if len(words) > 1 else words[0])


def remedy_of_missing(function: str) -> str:
    """What to do about an operator without a lowering."""
    return remedy(function) or _ANY


def remedy_of_values(function: str) -> str:
    """What to do about an operator whose result's size depends on values."""
    read = "_local_scalar_dense" in function
    return remedy(function) or (_PLACES if read else _VALUES)


def remedy_of_example(args: Sequence[Any]) -> str:
    """How an example is given, where it is one object; empty where it is several."""
    if len(args) == 1 and isinstance(args[0], tuple):  # as torch.export.export takes them
        return "Arguments of the example come one by one: tb.convert(module, *example)."
    if len(args) == 1 and isinstance(args[0], Mapping):  # as a tokenizer returns them
        return (
            "The example is one argument, a mapping. Where its keys name those of the forward:"
            " tb.convert(module, **example)."
        )
    return ""


def remedy_of_trace(text: str, called: str | None) -> str:
    """What to do where PyTorch could not trace a forward.

    Args:
        text: what it said.
        called: the function that the forward called then, if that is known.

    Returns:
        A sentence; empty where nothing is known.
    """
    if re.search(r"Cache'> in output", text):
        return _CACHES
    for said, what_to_do in _SAID.items():
        if said in text:
            return what_to_do
    if "is not a known type" in text or "unhashable type" in text:  # torch 2.11
        return _TYPES
    if "is mutated in the forward" in text:
        return _CONSTANT
    if re.search("on the same device|not on the expected device", text):
        return _DEVICES
    if re.search(r"Cannot cast tensor\(.*\) to number", text):
        return _NO_VALUE
    if _OF_DTYPES.search(text):
        return _DTYPES
    names = [*re.findall(r"\baten\.\w+", text), *([called] if called else [])]
    if "jiterator" in text.lower():
        names.insert(0, "jiterator")
    for name in names:
        known = remedy(name)
        if known is not None:
            return known
    if "Could not extract specialized integer" in text:
        return _PLACES
    return _VALUES if "item()" in text or "data-dependent" in text.lower() else ""
