"""Masks of transformers, which are not the same in PyTorch and where a module is exported.

Where nothing is padded its `sdpa` attention goes by `is_causal` of each attention, without a mask.
One that looks both ways (PaliGemma, a Llama made an encoder) has no mask at all then; exported, it
would have a causal one. Where something is padded it has that in PyTorch, too.

An encoder without padding has no mask; exported, it would have one in which everything is seen, of
a length that is not that of layers behind one that halves it (Informer's).
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from fzero.errors import warn
from torch_bridge.export.stand_ins.replacement import StandIn, imported, replaced
from torch_bridge.export.watch.questions import TracedBranchWarning


_MASKS = "transformers.masking_utils"
_SKIPS, _PACKED = "_ignore_causal_mask_sdpa", "find_packed_sequence_indices"
_SKIPS_BOTH = "_ignore_bidirectional_mask_sdpa"
# Attention to another sequence, and to images or sounds before a text, has no causal mask.
_OF_OTHERS = re.compile(r"cross|encoder_attn|EncDec|vision|visual|audio|tower")


@contextlib.contextmanager
def causal_masks() -> Iterator[None]:
    """While a module is exported: no mask where there is none in PyTorch, no causal one where
    attention looks both ways."""
    skips, packed = imported(_MASKS, _SKIPS), imported(_MASKS, _PACKED)
    if skips is None or packed is None:
        yield
        return

    def skips_here(padding: Any, q: Any, kv: Any, *rest: Any, **named: Any) -> bool:
        window = rest[2] if len(rest) > 2 else named.get("local_attention_size")
        both = _looks_both_ways(_asking())
        if both and padding is None and window is None and q == kv:
            return True
        _warn(both)
        return bool(skips(padding, q, kv, *rest, **named))

    def packed_here(position_ids: torch.Tensor) -> Any:
        asking = _asking()
        both = _looks_both_ways(asking)
        if both and not _was_given("position_ids"):
            return None  # one row after the other: nothing is packed
        _warn(both)
        return packed(position_ids)

    masks = sys.modules[_MASKS]
    instead: list[StandIn] = [(masks, _SKIPS, skips_here), (masks, _PACKED, packed_here)]
    if (skips_both := imported(_MASKS, _SKIPS_BOTH)) is not None:

        def skips_both_here(padding: Any, kv: Any, window: Any = None, *more: Any) -> bool:
            seen = padding is None and window is None
            return seen or bool(skips_both(padding, kv, window, *more))

        instead.append((masks, _SKIPS_BOTH, skips_both_here))
    with replaced(instead):
        yield


def _warn(both_ways: str | None) -> None:
    if both_ways:
        warn(
            f"{both_ways} looks both ways (is_causal=False), and has a causal mask: in PyTorch only"
            " where a row is padded, or several are packed, which depends on values. tb.parity"
            " compares them. For attention both ways give no attention_mask and no position_ids, or"
            " a mask of four dims",
            TracedBranchWarning,
        )


def _looks_both_ways(asking: FrameType | None) -> str | None:
    """Which attention does, of the module whose forward asks for a causal mask."""
    if asking is None:
        return None
    module = asking.f_locals["self"]
    for path, child in module.named_modules():
        if getattr(child, "is_causal", None) is False and not _OF_OTHERS.search(path):
            return f"{type(module).__name__}: `{path}`"
    return None


def _asking() -> FrameType | None:
    """The forward of a module that asks for a mask."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return frame
        frame = frame.f_back
    return None


def _was_given(argument: str) -> bool:
    """Whether transformers was called with an argument, which forwards have filled in by now."""
    frame: FrameType | None = sys._getframe(1)
    given = True
    while frame is not None:
        own = frame.f_locals
        module: Any = own.get("self")
        if frame.f_code.co_name == "_call_impl" and _is_transformers(module):
            bound = inspect.signature(module.forward).bind_partial(*own["args"], **own["kwargs"])
            named = {**bound.arguments, **bound.arguments.get("kwargs", {})}
            given = named.get(argument) is not None  # the outermost decides
        frame = frame.f_back
    return given


def _is_transformers(module: Any) -> bool:
    return type(module).__module__.startswith("transformers.")
