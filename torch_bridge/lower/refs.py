"""Names of values in the arguments of a graph's ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ref:
    """A value computed earlier, by its name in the graph."""

    name: str


def template_of(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Arguments of an fx node with `leaf` of everything in them that holds nothing else."""
    if isinstance(value, list | tuple):  # fx has list and tuple types of its own
        items = [template_of(item, leaf) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: template_of(item, leaf) for key, item in value.items()}
    return leaf(value)


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """Arguments with every `Ref` replaced by its value."""
    if isinstance(template, Ref):
        return values[template.name]
    if isinstance(template, list | tuple):
        return type(template)(fill(item, values) for item in template)
    if isinstance(template, Mapping):
        return {key: fill(item, values) for key, item in template.items()}
    return template


def refs(template: Any) -> Iterator[str]:
    """The names of all values in some arguments, in order."""
    if isinstance(template, Ref):
        yield template.name
    elif isinstance(template, list | tuple):
        for item in template:
            yield from refs(item)
    elif isinstance(template, Mapping):
        for item in template.values():
            yield from refs(item)
