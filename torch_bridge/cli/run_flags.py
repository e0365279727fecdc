"""A training run from its flags: what `fzero train` and `fzero finetune` make of them alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from torch_bridge.cli.errors import CommandError
from torch_bridge.cli.plan_file import SECTIONS, Sections, read_run, set_fields
from torch_bridge.cli.settings import DataSettings, TrainSettings
from torch_bridge.cli.tuning_settings import LoraSettings, RowSettings


# Fields that flags have other names than.
_FIELDS = {
    "clip": "clip_norm", "lora": "rank", "data": "sources", "eval_data": "eval_sources",
}  # fmt: skip


def sections_of(given: Mapping[str, Any], flags: Mapping[str, Sequence[str]]) -> Sections:
    """A run's sections: defaults, below the file, below flags that were given, below --plan-set.

    Args:
        given: the arguments of the command, by name; `context` among them says which were given.
        flags: the names of those that belong to each section.

    Raises:
        CommandError: the file cannot be read, or sets what is unknown.
    """
    own = {name: [_FIELDS.get(flag, flag) for flag in names] for name, names in flags.items()}
    own["data"] = [*dict.fromkeys(["sources", *own["data"]])]
    file = given["plan"]
    sections = {name: {} for name in SECTIONS} if file is None else read_run(file, own)
    for name, names in flags.items():
        for flag in names:
            source = given["context"].get_parameter_source(flag)
            field, value = _FIELDS.get(flag, flag), given[flag]
            if field not in sections[name] or getattr(source, "name", "") == "COMMANDLINE":
                sections[name][field] = value.value if isinstance(value, Enum) else value
    set_fields(sections, given["plan_set"] or [])
    return sections


def settings_of(
    given: Mapping[str, Any],
    sections: Sections,
    data: DataSettings | RowSettings,
    lora: LoraSettings | None = None,
) -> TrainSettings:
    """The run that the sections describe.

    Raises:
        CommandError: there is no model.
    """
    if sections["run"]["model"] is None:
        raise CommandError("--model is missing: give it, or [run] model in --plan's file")
    return TrainSettings(
        data=data,
        lora=lora,
        out=given["out"],
        plan_fields=sections["plan"],
        optimizer=sections["optimizer"] or None,
        schedule=sections["schedule"] or None,
        overwrite=given["overwrite"],
        resume=given["resume"],
        log=tuple(given["log"] or ()),
        **sections["run"],
    )
