"""How much memory a device has for jax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def device_memory(devices: Iterable[Any]) -> int | None:
    """Bytes that jax may take of each of these devices, as this process's own say.

    `None` where none says: CPUs, whose memory is the machine's, and devices that are not here.
    Processes with other limits are refused at their first step (`fzero.state.fingerprint`).

    Source: `bytes_limit` of `jax.Device.memory_stats`.
    """
    found = []
    for device in devices:
        if device.platform == "cpu":
            return None
        try:
            limit = (device.memory_stats() or {}).get("bytes_limit")
        except RuntimeError:  # another process's, or a described one
            continue
        if limit is not None:
            found.append(int(limit))
    return min(found, default=None)
