"""The fields of a plan in groups, with what the docstring of `fz.Plan` says of each."""

from __future__ import annotations

import dataclasses
import inspect
import re

from fzero.plan import Plan


GROUPS = {
    "layout": ("zero", "data", "replica", "pipe", "tensor", "context", "expert",
        "sequence_parallel", "min_shard_bytes",
    ),
    "memory": (
        "microbatches", "remat", "tiers", "stream_bytes", "update_on", "disk_path",
    ),
    "communication": (
        "reduce", "reduce_dtype", "gather", "gather_dtype", "secondary", "prefetch",
    ),
    "pipeline": ("schedule", "partition"),
    "numerics": (
        "precision", "keep_fp32", "clip_norm", "loss_scale", "skip_nonfinite", "deterministic",
        "ema", "float8",
    ),
}  # fmt: skip


def descriptions() -> dict[str, str]:
    """Of each field what the docstring says, on one line."""
    text = inspect.cleandoc(Plan.__doc__ or "").partition("Args:")[2].partition("\nRaises:")[0]
    parts = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    return {
        name: " ".join(words.split()) for name, words in zip(parts[::2], parts[1::2], strict=True)
    }


def table(group: str) -> str:
    """A definition list of one group's fields."""
    have = {field.name: field for field in dataclasses.fields(Plan)}
    lost = set(have) - {name for names in GROUPS.values() for name in names}
    if lost:
        raise ValueError(
            f"fields of Plan that no group has: {sorted(lost)}; add them to {__file__}"
        )
    said, lines = descriptions(), []
    for name in GROUPS[group]:
        if name in have:
            lines += [f"### `{name}`", "", f"Default: `{_default(have[name])}`", "", said[name], ""]
    return "\n".join(lines)


def _default(field: dataclasses.Field[object]) -> object:
    make = field.default_factory
    return repr(field.default if make is dataclasses.MISSING else make())
