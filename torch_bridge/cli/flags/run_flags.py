"""A training run from its flags: what `fzero train` and `fzero finetune` make of them alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fzero.errors import is_number
from torch_bridge.run.errors import CommandError
from torch_bridge.run.plan_file import PLAN, RUN, SECTIONS, Sections, read_run, set_fields
from torch_bridge.run.settings import DataSettings, TrainSettings
from torch_bridge.run.tuning_settings import LoraSettings, RowSettings


# Fields that flags have other names than.
_FIELDS = {
    "clip": "clip_norm", "lora": "rank", "data": "sources", "eval_data": "eval_sources",
}  # fmt: skip


def sections_of(given: Mapping[str, Any], **own: type[Any]) -> Sections:
    """A run's sections: defaults, below the file, below flags that were given, below --plan-set.

    Args:
        given: the arguments of the command, by name; `context` among them says which were given.
        own: the dataclasses of the sections that this command has besides run and plan.

    Raises:
        CommandError: the file cannot be read, or sets what is unknown.
    """
    known = {name: tuple(field.name for field in fields(of)) for name, of in own.items()}
    file, context = given["plan"], given["context"]
    sections = {name: {} for name in SECTIONS} if file is None else read_run(file, known)
    types = {"run": TrainSettings, **own}
    for name, values in sections.items():
        hints = get_type_hints(types[name]) if name in types else {}  # (a plan checks its own)
        for field, value in values.items():
            if not _fits(value, hints.get(field, Any)):
                raise CommandError(
                    f"--plan {file}: [{name}] {field} is {value!r}: expected {_words(hints[field])}"
                )
    for flag in context.params:
        field, value = _FIELDS.get(flag, flag), given[flag]
        name = next((n for n, of in {"run": RUN, "plan": PLAN, **known}.items() if field in of), "")
        told = getattr(context.get_parameter_source(flag), "name", "") == "COMMANDLINE"
        if name and (told or field not in sections[name]):
            sections[name][field] = value.value if isinstance(value, Enum) else value
    set_fields(sections, given["plan_set"] or [])
    return sections


def _fits(value: Any, hint: Any) -> bool:
    """Whether a file's value has the type of a field."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:
        one = get_args(hint)[0]
        return isinstance(value, list | tuple) and all(_fits(x, one) for x in value)
    if hint is float:
        return is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_words(one) for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:
        return "a list of texts"
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[hint]


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
