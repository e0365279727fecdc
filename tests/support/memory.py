"""How much memory this process has."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int:
    """Its resident set."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
