"""What an object holds, in lines that fit a screen: paths, shapes, dtypes, shardings, tiers, bytes.

Never values: to print a state must not wait for its devices, nor fill a notebook.
"""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fzero.errors import FzeroError
from fzero.storage.tiers import DEVICE, TIERS, tier_of
from fzero.tree import PyTree, device_bytes, named_leaves


# Leaves that are shown of each field; of longer ones the first and the last.
ROWS = 6


def summary(title: str, fields: Mapping[str, PyTree]) -> str:
    """A table of the leaves of some trees.

    Args:
        title: what they are.
        fields: trees of arrays, shapes, handles of parked leaves or anything else, by name.

    Returns:
        Lines: `title`, and for each field the number of its leaves, their bytes on one device (the
        fullest, where ranks of a pipeline hold different ones), what of a device is parked on the
        host or on disk, and some of the leaves.

    Example:
        >>> import jax.numpy as jnp
        >>> print(summary("Pair", {"a": {"w": jnp.zeros((2, 3))}, "b": None}))
        Pair: 1 leaf, 24 bytes on each device
          a: 1 leaf, 24 bytes
            w  float32[2, 3]  whole  device  24 bytes
    """
    everything: list[Any] = []
    blocks: list[tuple[str, list[tuple[str, ...]]]] = []
    for name, tree in fields.items():
        leaves = named_leaves(tree)
        everything += [leaf for _, leaf in leaves]
        if leaves:
            head = f"  {name}: {_count(len(leaves))}, {_bytes([leaf for _, leaf in leaves])}"
            blocks.append((head, _rows([(path or name, leaf) for path, leaf in leaves])))
    rows = [row for _, block in blocks for row in block if len(row) > 1]
    widths = [max(len(row[col]) for row in rows) for col in range(5)] if rows else []
    size = _bytes(everything, " on each device")
    lines = [f"{title}: {_count(len(everything))}, {size}"]
    for head, block in blocks:
        lines.append(head)
        for row in block:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append(f"    {'  '.join(cells).rstrip()}")
    return "\n".join(lines)


def _bytes(leaves: Sequence[Any], of: str = "") -> str:
    """What a device holds of some leaves, and what of it is parked: of the fullest one each."""
    alike: Counter[tuple[str, Any]] = Counter()
    for leaf in filter(_is_array, leaves):
        sharding = getattr(leaf, "sharding", None)
        alike[DEVICE if sharding is None else tier_of(leaf), sharding] += device_bytes(leaf)
    held: defaultdict[str, Counter[Any]] = defaultdict(Counter)
    for (tier, sharding), size in alike.items():
        for device in (None,) if sharding is None else sharding.device_set:
            held[tier][device] += size
    # What has no sharding counts on all.
    most = {tier: sizes.pop(None, 0) + max(sizes.values(), default=0)
            for tier, sizes in held.items()}  # fmt: skip
    parked = [
        f", {most[tier]:,} on the {tier}" for tier in TIERS if tier != DEVICE and most.get(tier)
    ]
    return f"{most.get(DEVICE, 0):,} bytes{of}{''.join(parked)}"


def _rows(leaves: Sequence[tuple[str, Any]]) -> list[tuple[str, ...]]:
    if len(leaves) <= ROWS:
        return [_row(path, leaf) for path, leaf in leaves]
    first, last = ROWS // 2, ROWS - ROWS // 2 - 1
    more = f"... {len(leaves) - first - last} more"
    return [*(_row(*leaf) for leaf in leaves[:first]), (more,),
            *(_row(*leaf) for leaf in leaves[-last:])]  # fmt: skip


def _row(path: str, leaf: Any) -> tuple[str, ...]:
    """Path, shape, split, tier and bytes of a leaf."""
    if not _is_array(leaf):
        return path, type(leaf).__name__, "", "", ""
    # None for values under a transformation, and arrays on the host.
    sharding = getattr(leaf, "sharding", None)
    here = "" if sharding is None else tier_of(leaf)
    size = f"{device_bytes(leaf):,} bytes"
    return path, f"{leaf.dtype}{list(leaf.shape)}", axes_in_words(sharding), here, size


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def axes_in_words(sharding: Any) -> str:
    """The mesh axes that each dim of a leaf lies along."""
    axes = ["-" if axis is None else axis if isinstance(axis, str) else "+".join(axis)
            for axis in getattr(sharding, "spec", None) or ()]  # fmt: skip
    return ", ".join(axes) or "whole"


def _count(number: int) -> str:
    return f"{number:,} leaf" if number == 1 else f"{number:,} leaves"


class Boxed:
    """A class whose objects a notebook shows as they print."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Printed(Boxed):
    """A class whose objects print as the lines of `_summary`."""

    def _summary(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        try:
            return self._summary()
        except FzeroError as error:  # logs and debuggers show what cannot be used, too
            return f"<{type(self).__name__}: {error}>"
