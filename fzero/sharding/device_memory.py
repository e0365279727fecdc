"""How much memory a device has for jax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax


def device_memory(devices: Iterable[Any]) -> int | None:
    """Bytes that jax may take of each of these devices, as this process's own say.

    A process that has none of them asks its others, so that all processes come to one answer.

    `None` where none says: CPUs, whose memory is the machine's, and devices that are not here.
    Processes with other limits are refused at their first step (`fzero.state.fingerprint`).

    Source: `bytes_limit` of `jax.Device.memory_stats`.
    """
    found, every = [], list(devices)
    if any(device.platform == "cpu" for device in every):
        return None
    here = [device for device in every if device.process_index == jax.process_index()]
    for device in here or jax.local_devices():
        try:
            limit = (device.memory_stats() or {}).get("bytes_limit")
        except RuntimeError:  # a described one
            continue
        if limit is not None:
            found.append(int(limit))
    return min(found, default=None)
