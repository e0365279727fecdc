"""Whether a model keeps the documents of a packed row apart: asked before anything is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import torch_bridge as tb
from torch_bridge.export.watch.forward import untouched
from torch_bridge.run import models
from torch_bridge.run.errors import CommandError
from torch_bridge.run.models import LoadedModel


_LENGTH = 8  # tokens of each of the two documents that are tried
# How far logits may be from those of the document alone, as a share of the largest.
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 3e-2
# Fields of configurations that hold a window which transformers keeps in its masks, and the kind of
# layer that has it. (GPT-Neo's `window_size` is in its layers: they keep to it with any mask.)
_WINDOWS = {
    "sliding_window": "sliding_attention",
    "attention_window_size": "attention",
    "attention_chunk_size": "chunked_attention",
}
# Parts of the names of kinds whose layers carry a state from token to token.
_CARRYING = ("conv", "linear", "mamba", "recurrent", "hybrid")


def check_packs(loaded: LoadedModel, seq: int) -> None:
    """Refuses a model that would not treat documents in a row as if each were alone.

    A window of the configuration that is shorter than a row is refused by its name (a mask of 4
    dims takes its place), and so are kinds of layers that carry a state. Everything else is tried
    in PyTorch: two short documents of random tokens in a row, and each alone, without mask and
    positions.

    Args:
        loaded: the model.
        seq: tokens of a row.

    Raises:
        CommandError: a window is shorter than a row; layers carry a state; the module does not take
            the mask or the positions; or its logits in the row are others.
    """
    carrying = [kind for kind in _kinds(loaded.config) if any(p in kind for p in _CARRYING)]
    if carrying:
        raise CommandError(
            f"--model {loaded.spec}: its layers of kind {carrying[0]} carry a state from token to"
            " token, from one document of a packed row into the next; use --no-pack"
        )
    if (window := window_of(loaded.config)) is not None and window[1] < seq:
        name, size = window
        raise CommandError(
            f"--model {loaded.spec}: its layers see {size} tokens back ({name} of its"
            f" configuration), which the mask of packed rows does not keep to in rows of {seq};"
            f" use --no-pack, or --seq {size}"
        )
    try:
        distances = _distance(loaded)
    except Exception as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise CommandError(
            f"--model {loaded.spec}: {type(loaded.module).__name__} does not take packed rows"
            f" (attention_mask of 4 dims, position_ids): {type(error).__name__}: {reason}; use"
            " --no-pack"
        ) from error
    wide = dtype_of(loaded.module) in (torch.float32, torch.float64)
    allowed = _TOLERANCE if wide else _TOLERANCE_16_BITS
    for which, found in zip(("first", "second"), distances, strict=True):
        if not found <= allowed:  # NaN, too
            raise CommandError(
                f"--model {loaded.spec}: {type(loaded.module).__name__} does not keep documents of"
                f" a packed row apart: of two, the logits of the {which} differ from those of it"
                f" alone by {found:.1e} of the largest (allowed: {allowed:.0e}), as where layers"
                " carry a state from token to token or do not read the mask; use --no-pack"
            )


def window_of(config: Any) -> tuple[str, int] | None:
    """The shortest window of attention in a configuration of transformers, and its field's name.

    Example:
        >>> from transformers import MistralConfig
        >>> window_of(MistralConfig(sliding_window=256))
        ('sliding_window', 256)
    """
    if config is None:
        return None
    own, kinds, windows = config.get_text_config(decoder=True), _kinds(config), []
    for name, kind in _WINDOWS.items():
        size = getattr(own, name, None)
        if name == "sliding_window" and not getattr(own, "use_sliding_window", True):
            continue
        # Where layers have no kinds, a sliding window is every layer's.
        if isinstance(size, int) and (kind in kinds if kinds else name == "sliding_window"):
            windows.append((name, size))
    return min(windows, key=lambda window: window[1], default=None)


def _kinds(config: Any) -> list[str]:
    """Of its layers, where the configuration says so."""
    if config is None:
        return []
    own = config.get_text_config(decoder=True)
    fields = (getattr(own, name, None) for name in ("layer_types", "layers_block_type"))
    return next((list(found) for found in fields if found), [])


def dtype_of(module: torch.nn.Module) -> torch.dtype:
    """Of its first parameter that is a float."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _distance(loaded: LoadedModel) -> list[float]:
    """How far the logits of two documents in a row are from those of each alone.

    Both begin a row of the same length when they are alone, so that products are of the same
    shapes: what is behind a document does not reach a causal model's logits.
    """
    draws = np.random.default_rng(0).integers(0, loaded.vocab_size, (2, _LENGTH))
    packed = tb.pack(draws, 2 * _LENGTH)
    mask = torch.from_numpy(np.array(tb.packed_mask(packed["segments"])))
    one, other = (torch.from_numpy(document) for document in draws)
    with untouched(loaded.module, False), torch.no_grad():
        row = models.logits_of(
            loaded.module(
                input_ids=torch.from_numpy(packed["ids"]).long(),
                attention_mask=mask.to(dtype_of(loaded.module)),
                position_ids=torch.from_numpy(packed["positions"]).long(),
            )
        )
        alone = models.logits_of(
            loaded.module(input_ids=torch.stack([torch.cat([one, other]), torch.cat([other, one])]))
        )
    found = row[0].unflatten(0, (2, _LENGTH)).double()
    wanted = alone[:, :_LENGTH].double()
    return ((found - wanted).abs().amax((1, 2)) / wanted.abs().amax()).tolist()
