"""Prompts of any lengths as one array, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fzero.errors import BatchError, warn
from torch_bridge.generation.sampling import is_whole


# What a generation config may have that changes the likeliest tokens, with what changes none.
_NOT_DONE: dict[str, Any] = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "token_healing": False,
    **dict.fromkeys(
        ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
         "forced_eos_token_id", "min_new_tokens", "sequence_bias", "penalty_alpha",
         "exponential_decay_length_penalty", "guidance_scale", "stop_strings",
         "force_words_ids", "constraints", "dola_layers", "watermarking_config")
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Prompts:
    """Rows that end in the same column.

    Attributes:
        ids: int32 `(B, P)`, each prompt at the end of its row, zeros before it.
        pads: int32 `(B,)`, how many zeros.
        num: how many rows are prompts; others fill up.
    """

    ids: np.ndarray[Any, Any]
    pads: np.ndarray[Any, Any]
    num: int


@dataclass(frozen=True)
class Limits:
    """What a decoder takes: tokens from 0 up to `vocabulary`, and so many `positions`, if it is
    known. Past `switch` positions of any row it has other rotary frequencies for all (longrope)."""

    vocabulary: int
    positions: int | None
    switch: int | None = None

    @classmethod
    def of(cls, module: Any) -> Limits:
        """Those of a transformers model."""
        config = module.config.get_text_config(decoder=True)
        positions = getattr(config, "max_position_embeddings", None)
        table = module.get_input_embeddings()
        rows = getattr(table, "num_embeddings", None) or config.vocab_size
        return cls(int(rows), None if positions is None else int(positions), _switch(config))


def read_prompts(given: Any, new: int, limits: Limits, multiple: int, step: int) -> Prompts:
    """Check prompts and put them into one array.

    Args:
        given: sequences of token numbers, or one array `(B, T)`.
        new: how many tokens are to follow.
        limits: what the decoder takes.
        multiple: the number of rows is one of this, as devices share them.
        step: the number of columns is one of this, so that few sizes come up.

    Raises:
        BatchError: names the first prompt that is none, and where.
    """
    if isinstance(given, Mapping):
        raise BatchError(
            f"generate: prompts are a dict of {', '.join(map(str, given))}: expected rows of token"
            " numbers alone, as tokenizer(texts).input_ids"
        )
    if not isinstance(given, str) and not hasattr(given, "__len__"):
        raise BatchError(
            f"generate: prompts are a {type(given).__name__}: expected a list of rows of token"
            " numbers, or one array (B, T)"
        )
    if isinstance(given, str) or (len(given) and isinstance(given[0], str)):
        raise BatchError(
            "generate: prompts are text: expected token numbers, as tokenizer(text).input_ids"
        )
    rows = [_row(number, row, limits.vocabulary) for number, row in enumerate(given)]
    if not rows:
        raise BatchError("generate: there are no prompts")
    if limits.positions is not None:
        number = max(range(len(rows)), key=lambda n: len(rows[n]))
        length = len(rows[number])
        room = limits.positions - length
        if new > room:
            less = f", or give max_new_tokens={room} or less" if room > 0 else ""
            raise BatchError(
                f"generate: prompt {number} has {length} tokens, and {new} are to follow, but the"
                f" model has {limits.positions} positions; shorten the prompt{less}"
            )
    if limits.switch is not None:
        _require_one_side([len(row) for row in rows], new, limits.switch)
    columns = -(-max(map(len, rows)) // step) * step
    if limits.positions is not None:
        columns = max(min(columns, limits.positions - new), max(map(len, rows)))
    num = -(-len(rows) // multiple) * multiple
    ids = np.zeros((num, columns), np.int32)
    pads = np.full((num,), columns - 1, np.int32)
    for number, row in enumerate(rows):
        ids[number, columns - len(row) :] = row
        pads[number] = columns - len(row)
    return Prompts(ids, pads, len(rows))


def _switch(config: Any) -> int | None:
    """At how many positions transformers' longrope takes its other frequencies, if a layer has it.

    Source: transformers' modeling_rope_utils.
    """
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given, *(one for one in given.values() if isinstance(one, Mapping))]
    own = [one for one in kinds if one.get("rope_type") == "longrope"]
    return min((int(one["original_max_position_embeddings"]) for one in own), default=None)


def _require_one_side(lengths: Sequence[int], new: int, switch: int) -> None:
    """Refuse rows of which one would decide for others, or for what it has cached itself."""
    # (The last new token is not read any more.)
    within = [length + new - 1 <= switch for length in lengths]
    if all(within) or all(length > switch for length in lengths):
        return
    number = within.index(False)
    length = lengths[number]
    fits = f", or give max_new_tokens={switch + 1 - length}" if length <= switch else ""
    raise BatchError(
        f"generate: past {switch} positions of any row this model has other rotary frequencies for"
        f" all rows (longrope): prompt {number} has {length} tokens, and {new} are to follow."
        f" Generate prompts that are longer by themselves{fits}"
    )


def _row(number: int, row: Any, vocabulary: int) -> np.ndarray[Any, Any]:
    try:
        array = row.numpy() if isinstance(row, torch.Tensor) else np.asarray(row)
    except ValueError as error:  # rows within a row
        raise BatchError(f"generate: prompt {number}: expected a row of numbers: {error}") from None
    if array.size == 0:
        raise BatchError(
            f"generate: prompt {number} is empty; give at least one token, such as the tokenizer's"
            " bos_token_id"
        )
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(
            f"generate: prompt {number}: expected a row of token numbers, got {array.dtype.name}"
            f" of shape {array.shape}"
        )
    wrong = np.flatnonzero((array < 0) | (array >= vocabulary))
    if wrong.size:
        position = int(wrong[0])
        raise BatchError(
            f"generate: prompt {number} has token {int(array[position])} at position {position},"
            f" but the vocabulary of the model is 0 to {vocabulary - 1}"
        )
    return array.astype(np.int32)


def stop_array(stop: Sequence[int] | None, module: Any, vocabulary: int) -> np.ndarray[Any, Any]:
    """Tokens that end a row; by default those of the module's own generation config.

    Raises:
        BatchError: one is not in the vocabulary.
    """
    if stop is None:
        config = getattr(module, "generation_config", None)
        found = getattr(config, "eos_token_id", None)
        stop = [] if found is None else [found] if isinstance(found, int) else list(found)
        stop = [token for token in stop if 0 <= token < vocabulary]
    stop = stop.tolist() if hasattr(stop, "tolist") else stop
    if isinstance(stop, str) or not hasattr(stop, "__len__"):
        raise BatchError(f"generate: stop={stop!r}: expected a list of tokens, as [{stop!r}]")
    for token in stop:
        if not is_whole(token) or not 0 <= token < vocabulary:
            raise BatchError(
                f"generate: stop token {token!r}: the vocabulary of the model is 0 to"
                f" {vocabulary - 1}"
            )
    return np.asarray(sorted(set(stop)), np.int32)


def warn_of_padding(module: Any, prompts: Prompts) -> None:
    """Says that a prompt begins or ends with what transformers' `generate` takes for padding."""
    config = getattr(module, "generation_config", None)
    pad, ends = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or pad in (ends if isinstance(ends, list) else [ends]):
        return
    for number in range(prompts.num):
        row = prompts.ids[number, prompts.pads[number] :]
        if pad in (row[0], row[-1]) and len(row) > 1:
            warn(
                f"generate: prompt {number} begins or ends with token {pad}, the model's"
                " pad_token_id, which is read like any other here, and left out by transformers'"
                " generate: give prompts without padding, as rows of their own lengths"
            )
            return


def warn_of_settings(module: Any) -> None:
    """Names what transformers' `generate` would do by the module's generation config, too."""
    config = getattr(module, "generation_config", None)
    given = {name: getattr(config, name, None) for name in _NOT_DONE}
    found = [f"{k}={v}" for k, v in given.items() if v not in (None, [], _NOT_DONE[k])]
    if found:
        warn(
            f"generate: the model's generation config says {', '.join(found)}, by which"
            " transformers' generate gives other tokens; here tokens are those of the logits alone"
        )
