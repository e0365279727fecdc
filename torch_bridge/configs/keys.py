"""A configuration read key by key: nothing in it is passed over without a word."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fzero.errors import ConversionError, is_number, warn
from torch_bridge.configs.outcome import Note


AUTO = "auto"
_MISSING: Any = object()


class Given(dict[str, Any]):
    """Values for keys that say `auto`, by their dotted names, and which of them were asked for."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value, which counts as asked for."""
        self.asked.add(key)
        return super().get(key, default)

    def unasked(self) -> list[str]:
        """The names for which a file has no `auto`."""
        return sorted(self.keys() - self.asked)

    def warn_of_unasked(self, source: str) -> None:
        """Warns of values that a file does not ask for: misspelt, or it says them itself."""
        if unasked := self.unasked():
            warn(
                f"{source}: auto gives {', '.join(unasked)}, and the file has no 'auto' there, so"
                " its own values count: see its keys"
            )


class Keys:
    """The keys of a (nested) configuration, each of which must be accounted for.

    Args:
        source: the file's name, for messages.
        values: its content.
        auto: values for keys that say `auto`, by their dotted names.
        prefix: of these keys' names.
        notes: what became of keys so far; shared with the parts.
    """

    def __init__(
        self,
        source: str,
        values: Mapping[str, Any],
        auto: Mapping[str, Any],
        prefix: str = "",
        notes: list[Note] | None = None,
    ) -> None:
        self.source, self.auto, self.prefix = source, auto, prefix
        self.left = dict(values)
        self.known: set[str] = set()
        self.notes: list[Note] = [] if notes is None else notes

    def take(self, key: str, default: Any = None) -> Any:
        """A key's value, or the default where it is not there (or `auto` that may be)."""
        self.known.add(key)
        value = self.left.pop(key, _MISSING)
        if value is _MISSING:
            return default
        if value != AUTO:
            return value
        return self.auto.get(self.prefix + key, AUTO)

    def number(
        self,
        key: str,
        default: Any = None,
        kind: type = float,
        auto_is: Any = _MISSING,
        least: float = -math.inf,
    ) -> Any:
        """A key's value as a number.

        Args:
            key: the key.
            default: where it is not there.
            kind: `int` or `float`.
            auto_is: what `auto` means that `auto=` does not say; an error if not given.
            least: the smallest that it may be.
        """
        value = self.take(key, default)
        if value == AUTO and auto_is is not _MISSING:
            self.note(key, AUTO, why="filled in by the Hugging Face Trainer")
            return auto_is
        if value is default:
            return value
        if value == AUTO:
            raise self.error(
                key, "'auto', which the Hugging Face Trainer fills in",
                f"write a number, or pass auto={{{self.prefix + key!r}: ...}}",
            )  # fmt: skip
        if not is_number(value):
            raise self.error(key, repr(value), "expected a number")
        if kind is int and value != int(value):
            raise self.error(key, repr(value), "expected a whole number")
        if value < least:
            raise self.error(key, repr(value), f"expected {least:g} or more")
        return kind(value)

    def count(self, key: str, default: Any = None, auto_is: Any = _MISSING) -> Any:
        """A key's value as how many there are of something, at least one."""
        return self.number(key, default, int, auto_is, least=1)

    def below(self, key: str) -> Keys | None:
        """The keys below a key; `None` where there are none."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, repr(value), "expected keys and values")
        return self.made(key, value)

    def made(self, key: str, values: Mapping[str, Any]) -> Keys:
        """Keys below a key that the file does not have, as if it had these."""
        return Keys(self.source, values, self.auto, f"{self.prefix}{key}.", self.notes)

    def note(self, key: str, value: Any, became: str = "", why: str = "") -> None:
        """Notes what became of a key."""
        self.notes.append(Note(self.prefix + key, value, became, why))

    def without_effect(self, keys: Mapping[str, str]) -> None:
        """Takes keys that say nothing here, each with the reason."""
        self.known.update(keys)
        for key in [key for key in self.left if key in keys]:
            self.note(key, _short(self.left.pop(key)), why=keys[key])

    def refuse(self, keys: Mapping[str, str], harmless: Iterable[Any] = (None, False)) -> None:
        """Refuses keys that would change numbers, unless they are switched off."""
        self.known.update(keys)
        for key, remedy in keys.items():
            value = self.left.pop(key, None)
            enabled = value.get("enabled", True) if isinstance(value, Mapping) else value
            if enabled in harmless or value == {}:
                if value is not None:
                    self.note(key, _short(value), why="off")
                continue
            raise self.error(key, repr(_short(value)), remedy)

    def done(self) -> None:
        """Raises `ConversionError` for a key that nothing here knows."""
        for key, value in self.left.items():
            near = difflib.get_close_matches(key, sorted(self.known), 1)
            hint = f"did you mean {near[0]!r}?" if near else "take it out if it changes no numbers"
            raise self.error(key, repr(_short(value)), f"unknown key; {hint}")

    def error(self, key: str, got: str, what: str) -> ConversionError:
        """The error about one key."""
        return ConversionError(f"{self.source}: {self.prefix}{key} is {got}: {what}")


def read(config: str | PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A configuration's name and content: a mapping, or a JSON or YAML file.

    Raises:
        ConversionError: no such file, no such format, or no mapping.
    """
    if isinstance(config, Mapping):
        return "config", dict(config)
    path = Path(config)
    try:
        text = path.read_text()
        values = _yaml(path, text) if path.suffix in (".yaml", ".yml") else json.loads(text)
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConversionError(f"{path}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConversionError(f"{path}: expected keys and values, got {type(values).__name__}")
    return path.name, values


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConversionError(f"{path}: YAML files need the package PyYAML") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConversionError(f"{path}: expected YAML: {error}") from error


def _short(value: Any) -> Any:
    return "{...}" if isinstance(value, Mapping) and value else value
