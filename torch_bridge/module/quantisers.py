"""Weights that others have quantised: known by what lies beside them, and refused by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fzero.errors import CheckpointError


# Endings of names that hold no weight, and who writes them.
_SIGNS = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".absmax": "bitsandbytes, in 4 bits",
    ".quant_map": "bitsandbytes, in 4 bits",
    ".SCB": "bitsandbytes, in 8 bits",
    ".weight_scale": "scales, in 8 bits",
    ".weight_scale_inv": "scales, in 8 bits",
    ".weight_packed": "compressed-tensors",
    "_proj_blocks": "MXFP4, as gpt-oss comes",
}


def refuse_quantised(names: Iterable[str], own: Collection[str]) -> None:
    """Refuse a file of quantised weights: read as they are they would be other numbers.

    Args:
        names: of the file's tensors.
        own: of the module's.

    Raises:
        CheckpointError: the first name that tells, who wrote it, and what to do.
    """
    for name in names:
        kind = next((kind for end, kind in _SIGNS.items() if f".{name}".endswith(end)), None)
        if kind is not None and name not in own:
            raise CheckpointError(
                f"`{name}`: these weights are quantised ({kind}), and are not read so. Widen them"
                " first (transformers: model.dequantize(), then save_pretrained) or take the"
                " checkpoint they were made of; tb.quantize (nf4, nf4-double or int8) quantises"
                " what was converted."
            )
