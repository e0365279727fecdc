"""The error of the commands: `fzero` prints it without a traceback and exits with status 2."""

from __future__ import annotations

from fzero.errors import FzeroError


class CommandError(FzeroError, ValueError):
    """A command was asked for something it cannot carry out."""
