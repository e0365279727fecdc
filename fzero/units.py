"""Units in which numbers read best."""

from __future__ import annotations


def byte_unit(most: float) -> tuple[int, str]:
    """The unit in which a number of bytes reads best, and how many bytes it is.

    Example:
        >>> byte_unit(1536), byte_unit(12)
        ((1024, 'KiB'), (1, 'bytes'))
    """
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(most) >= scale:
            return scale, unit
    return 1, "bytes"
