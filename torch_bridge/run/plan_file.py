"""A run in a file: sections `run`, `data`, `plan`, `optimizer` and `schedule`, in TOML or JSON."""

from __future__ import annotations

import difflib
import inspect
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fzero as fz
from torch_bridge.run.errors import CommandError


SECTIONS = ("run", "data", "plan", "lora", "optimizer", "schedule")
RUN = (
    "model", "steps", "batch", "lr", "devices", "eval_every", "seed", "save_every", "verify",
)  # fmt: skip
PLAN = tuple(fz.Plan.__dataclass_fields__)
# Optimizers and schedules are functions of optax, named as there.
NAMED = ("optimizer", "schedule")

Sections = dict[str, dict[str, Any]]


def read_run(path: Path, fields: Mapping[str, Iterable[str]]) -> Sections:
    """The sections of a run's file.

    Args:
        path: TOML or JSON.
        fields: the keys of sections that a command has; of `run` and `plan` all are known.

    Raises:
        CommandError: no such file, no TOML or JSON, or an unknown section or key: with the nearest
            one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise CommandError(f"--plan {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise CommandError(f"--plan {path}: expected {kind}: {error}") from error
    known_keys = {**fields, "run": RUN, "plan": PLAN}
    _known(f"--plan {path}: section", values, [*known_keys, *NAMED])
    for name, section in values.items():
        if not isinstance(section, dict):
            raise CommandError(f"--plan {path}: {name} is {section!r}: expected a section [{name}]")
        known = known_keys.get(name)
        if known is not None:
            _known(f"--plan {path}: [{name}]", section, known)
        elif not isinstance(section.get("name"), str):
            raise CommandError(f"--plan {path}: [{name}] has no name of an optax function")
        if name == "optimizer" and "learning_rate" in section:
            raise CommandError(
                f"--plan {path}: [optimizer] learning_rate: the rate is [run] lr, risen and fallen,"
                ' or what a [schedule] gives: [schedule] name = "constant_schedule", value = 1e-3'
            )
    return {name: dict(values.get(name, {})) for name in SECTIONS}


def set_fields(sections: Sections, assignments: Iterable[str]) -> None:
    """Sets fields of the plan from `name=value`; values in TOML or JSON, or words."""
    for text in assignments:
        name, sign, value = text.partition("=")
        if not sign:
            raise CommandError(f"--plan-set {text}: expected name=value")
        _known("--plan-set", [name], PLAN)
        for read in (json.loads, lambda text: tomllib.loads(f"it = {text}")["it"], str):
            try:
                sections["plan"][name] = read(value)
            except ValueError:
                continue
            break


def made_by_optax(kind: str, section: Mapping[str, Any], **more: Any) -> Any:
    """What an optax function makes of a section's arguments.

    Args:
        kind: `optimizer` or `schedule`.
        section: `name` and the function's arguments.
        more: further arguments.

    Raises:
        CommandError: no such function, or arguments that it does not have.
    """
    import optax.contrib

    arguments = {key: value for key, value in section.items() if key != "name"} | more
    name = section["name"]
    function: Any = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    if not callable(function):
        names = [n for n in (*dir(optax), *dir(optax.contrib)) if n.islower()]
        _known(f"[{kind}] name", [name], names)
    known = list(inspect.signature(function).parameters)
    _known(f"[{kind}] {name}:", arguments, known)
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        raise CommandError(f"[{kind}] {name}: {error}") from error


def _known(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {sorted(known)[:40]}"
            raise CommandError(f"{where} {name!r} is unknown; {hint}")
