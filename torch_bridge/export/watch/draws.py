"""Draws of Python's own generators, made small and made large.

A forward that draws a number and compares it (`random.random() < 0.1`) mostly computes the same in
two calls. With the smallest draws and the largest ones it goes both ways.
"""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np


class Draws(IntEnum):
    """What the next draws are: words of the Mersenne Twister's state that come out of it as they
    are named, 2**-20 from the ends of [0, 1). Nought itself has no logarithm."""

    SMALLEST = 0x0C099132
    LARGEST = 0x1ED40A81


# Words of 32 bits that are set, two a float; then come ordinary ones, so that a loop which draws
# until it likes what it gets has an end.
_WORDS = 128


def set_draws(draws: Draws) -> None:
    """Let Python's `random` and numpy's global generator draw these numbers next.

    Args:
        draws: which.
    """
    version, words, _ = random.getstate()
    random.setstate((version, (int(draws),) * _WORDS + words[_WORDS:-1] + (0,), None))
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":  # of another one nothing is known
        state["state"]["key"][:_WORDS], state["state"]["pos"], state["has_gauss"] = draws, 0, 0
        np.random.set_state(state)
