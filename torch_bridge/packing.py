"""Documents packed into rows of one length: who belongs to which, and what may see what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.errors import BatchError


def pack(
    documents: Iterable[Sequence[int]],
    length: int,
    *,
    pad: int = 0,
    ignore_index: int = -100,
    vocabulary: int | None = None,
    rows: int | None = None,
    labels: Iterable[Sequence[int]] | None = None,
    alone: bool = False,
) -> dict[str, np.ndarray[Any, Any]]:
    """Documents as rows of one length, several in a row where they fit.

    Each document goes into the first row that has room for it, whole. Positions begin at 0 in every
    document; no label asks a document's last token for the next one's first. With
    `tb.packed_mask` and `tb.causal_lm_loss` the loss is that of the documents one by one.

    Args:
        documents: token ids of each.
        length: tokens in a row.
        pad: the token that fills rows up.
        ignore_index: the label of what does not count.
        vocabulary: number of tokens there are, to find others, in labels and `pad` as well.
        rows: how many rows there shall be, the last ones perhaps empty; as many as needed if not
            given. So batches of one shape can be made, and rows divide over the devices.
        labels: of each document, where they are not its tokens: `ignore_index` where a token is not
            to be learned.
        alone: give every document a row of its own.

    Returns:
        int32 arrays `(rows, length)`: `ids`; `segments`, the number of the document within its row
        from 1 on, 0 where the row is filled up; `positions`; and `labels` for
        `tb.causal_lm_loss(logits, labels)`, which shifts them itself.

    Raises:
        BatchError: a document is longer than a row, has a token or label outside the vocabulary (of
            int32, where none is given), or labels of another number; or they do not fit into
            `rows`. Names the document.

    Example:
        >>> packed = pack([[5, 6, 7], [8, 9], [3, 4]], length=5)
        >>> packed["ids"].tolist()
        [[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]]
        >>> packed["segments"].tolist(), packed["labels"][0].tolist()
        ([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], [-100, 6, 7, -100, 9])
    """
    _require_whole(length=length, pad=pad, ignore_index=ignore_index, rows=rows or 0)
    if vocabulary is not None and not 0 <= pad < vocabulary:
        raise BatchError(f"pack: pad={pad} is outside the vocabulary of {vocabulary}")
    kept = []
    for number, (document, own) in enumerate(_with_labels(documents, labels)):
        ids = _checked(number, np.asarray(document), length, vocabulary)
        wanted = ids
        if own is not None:
            wanted = _labels(number, np.asarray(own), ids, vocabulary, ignore_index)
        if ids.size:
            kept.append((ids, wanted))
    found = rows_of([ids.size for ids, _ in kept], length, alone)
    if rows is not None and len(found) > rows:
        raise BatchError(
            f"pack: the documents take {len(found)} rows of {length} tokens, but rows={rows}; give"
            " fewer documents, or longer rows"
        )
    whole = [[kept[number] for number in row] for row in found]
    whole += [[]] * ((rows or 0) - len(whole))
    return filled(whole, length, pad, ignore_index)


def rows_of(sizes: Iterable[int], length: int, alone: bool = False) -> list[list[int]]:
    """Which documents are in which row: each in the first one that has room for it.

    Args:
        sizes: tokens of each document, at most `length`.
        length: of a row.
        alone: give every document a row of its own.

    Returns:
        The documents' numbers, in their order, for each row.
    """
    found: list[list[int]] = []
    # How much room each row has. Grown by doubling: a list would be searched in Python.
    room = np.zeros(64, np.int64)
    for number, size in enumerate(sizes):
        fits = room[: len(found)] >= size
        row = len(found) if alone or not fits.any() else int(np.argmax(fits))
        if row == len(found):
            room = np.pad(room, (0, len(room))) if row == len(room) else room
            found.append([])
            room[row] = length
        found[row].append(number)
        room[row] -= size
    return found


def filled(
    rows: Sequence[Iterable[tuple[Any, Any]]], length: int, pad: int = 0, ignore_index: int = -100
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of rows, as `pack` gives them.

    Args:
        rows: the documents of each, `(ids, labels)`, which fit.
        length: of a row.
        pad: the token that fills rows up.
        ignore_index: the label of what does not count.
    """
    shape = len(rows), length
    out = {
        "ids": np.full(shape, pad, np.int32),
        "segments": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "labels": np.full(shape, ignore_index, np.int32),
    }
    for row, documents in enumerate(rows):
        start = 0
        for number, (ids, labels) in enumerate(documents, 1):
            there = row, slice(start, start + len(ids))
            out["ids"][there], out["labels"][there] = ids, labels
            out["labels"][row, start] = ignore_index
            out["segments"][there] = number
            out["positions"][there] = np.arange(len(ids))
            start += len(ids)
    return out


def packed_mask(segments: Any, dtype: Any = jnp.float32, window: int | None = None) -> jax.Array:
    """What may see what in packed rows: itself and what is before it in the same document.

    What fills a row up sees only what fills it up, and nothing else sees that. It is a mask to add
    to scores, as transformers' own: layers that add it would add 1 for True, and hide nothing.

    Args:
        segments: `(B, T)`, as `pack` gives them.
        dtype: floats, as in the example that a module was converted with; or bool, True where
            position i may attend to position j, for a module of yours that does not add it.
        window: how many tokens each sees at most, itself included, where all layers have a sliding
            window (Mistral's `sliding_window`). Layers of several kinds need a mask each.

    Returns:
        `(B, 1, T, T)`: 0 where position i may attend to position j, elsewhere the lowest number of
        `dtype` (of float32: of bfloat16, so that it stays finite when it is cast). It is what
        `scaled_dot_product_attention` takes, and the `attention_mask` of transformers' decoders,
        which use one of 4 dims as it is: windows of theirs are in it only if `window` says so.
        Layers that carry a state from token to token do not read it.

    Raises:
        BatchError: a window that is no whole number of at least 1.

    Example:
        >>> (packed_mask(np.array([[1, 1, 2]]))[0, 0] == 0).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    given = jnp.asarray(segments)
    order = jnp.arange(given.shape[-1])
    same = given[:, :, None] == given[:, None, :]
    back = order[:, None] - order[None, :]
    near = back >= 0
    if window is not None:
        if not isinstance(window, int | np.integer) or window < 1:
            raise BatchError(f"packed_mask: window={window}: expected at least 1, a token itself")
        near &= back < window
    seen = (same & near)[:, None]
    if dtype in (bool, jnp.bool_):
        return seen
    lowest = max(float(jnp.finfo(kind).min) for kind in (dtype, jnp.bfloat16))
    return jnp.where(seen, 0.0, lowest).astype(dtype)


def _with_labels(
    documents: Iterable[Sequence[int]], labels: Iterable[Sequence[int]] | None
) -> Iterator[tuple[Any, Any]]:
    """Documents with the labels of each, `None` where there are none."""
    if labels is None:
        yield from zip(documents, itertools.repeat(None), strict=False)
        return
    nothing = object()
    for number, pair in enumerate(itertools.zip_longest(documents, labels, fillvalue=nothing)):
        if any(one is nothing for one in pair):
            which = "no labels" if pair[1] is nothing else "labels, but is none"
            raise BatchError(f"pack: document {number} has {which}; expected labels for each")
        yield pair


def _labels(
    number: int,
    labels: np.ndarray[Any, Any],
    ids: np.ndarray[Any, Any],
    vocabulary: int | None,
    ignore_index: int,
) -> np.ndarray[Any, Any]:
    """A document's labels, if each token has one."""
    if labels.shape != ids.shape:
        raise BatchError(
            f"pack: document {number} has {ids.size} tokens, but labels of shape"
            f" {list(labels.shape)}; expected one for each"
        )
    return _whole(number, "label", labels, vocabulary, labels == ignore_index)


def _checked(
    number: int, ids: np.ndarray[Any, Any], length: int, vocabulary: int | None
) -> np.ndarray[Any, Any]:
    """A document's tokens, if they are some and fit."""
    found = _whole(number, "token", ids, vocabulary)
    if ids.size > length:
        raise BatchError(
            f"pack: document {number} has {ids.size} tokens, but rows have {length}; cut it, or"
            " make rows longer"
        )
    return found


def _whole(
    number: int,
    what: str,
    values: np.ndarray[Any, Any],
    vocabulary: int | None,
    besides: np.ndarray[Any, Any] | bool = False,
) -> np.ndarray[Any, Any]:
    """A document's tokens or labels as int32, if that changes none of them.

    Args:
        number: of the document.
        what: "token" or "label".
        values: one for each position.
        vocabulary: see `pack`.
        besides: where a value is none of the vocabulary, and may be.
    """
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise BatchError(
            f"pack: document {number}: expected a list of {what} ids, got {values.dtype} of shape"
            f" {list(values.shape)}"
        )
    last = _INT32.max if vocabulary is None else min(vocabulary - 1, _INT32.max)
    first = _INT32.min if vocabulary is None else 0
    wrong = np.flatnonzero(((values < first) | (values > last)) & ~np.asarray(besides))
    if wrong.size:
        which = "int32" if vocabulary is None else f"the vocabulary of {vocabulary}"
        raise BatchError(
            f"pack: document {number}, position {wrong[0]}: {what} {values[wrong[0]]} is outside"
            f" {which}"
        )
    return values.astype(np.int32)


_INT32 = np.iinfo(np.int32)


def _require_whole(**options: Any) -> None:
    """Refuse options that int32 would change."""
    for name, value in options.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not _INT32.min <= value <= _INT32.max:
            raise BatchError(
                f"pack: {name}={value!r:.60}: expected a whole number that int32 holds"
            )
