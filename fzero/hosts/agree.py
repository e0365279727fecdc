"""What every process must have in common, compared before it matters."""

from __future__ import annotations

from typing import Any

import jax

from fzero.errors import FzeroError, HostsError, some_of
from fzero.hosts.join import watch


def exchange(name: str, value: Any) -> list[Any]:
    """What every process gives under a name, in their order; only its own where it is alone.

    Args:
        name: of the point that all processes come to.
        value: anything JSON-able.

    Raises:
        HostsError: another process came to another point, or there are others that did not join.
    """
    others = watch()
    if others is not None:
        return others.exchange(name, value)
    if jax.process_count() > 1:
        raise HostsError(
            f"{name}: expected that all {jax.process_count()} processes have joined each other:"
            " fz.join() in every process, before the first use of a device (also where"
            " jax.distributed.initialize was called)"
        )
    return [value]


def require_same(name: str, facts: dict[str, Any], error: type[FzeroError] = HostsError) -> None:
    """Refuses, in every process alike, facts that differ between processes.

    Args:
        name: of the point that all processes come to.
        facts: JSON-able values by what they are.
        error: what is raised.

    Raises:
        FzeroError: names what differs first, and who has what.
    """
    require_equal(name, exchange(name, facts), error)


def require_equal(
    name: str, everyone: list[dict[str, Any]], error: type[FzeroError] = HostsError
) -> None:
    """Refuses facts that differ; as `require_same`, of what was exchanged already."""
    if all(one == everyone[0] for one in everyone):
        return
    for what in dict.fromkeys(what for one in everyone for what in one):
        values = [one.get(what) for one in everyone]
        if any(value != values[0] for value in values):
            raise error(
                f"{name}: processes differ in {what}: {_who_has(values)}. Expected the same in"
                " every process"
            )


def _who_has(values: list[Any]) -> str:
    """Values with the processes that have them, the two most common ones in full."""
    groups: dict[str, list[str]] = {}
    for process, value in enumerate(values):
        groups.setdefault("nothing" if value is None else str(value), []).append(str(process))
    shown = sorted(groups.items(), key=lambda item: -len(item[1]))[:4]
    return "; ".join(f"{value} in process {some_of(who, 4)}" for value, who in shown)
