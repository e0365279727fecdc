"""One process at a time writes into a directory: two would fill one unfinished checkpoint."""

from __future__ import annotations

import fcntl
import os

from fzero.errors import CheckpointError


_HELD: dict[str, int] = {}  # the directories that this process writes into, open and locked


def take(folder: str) -> int:
    """Keeps other processes from writing into a directory, which is made if it is not there.

    The lock is the kernel's, and goes with the process, killed or not. On a file system without
    locks (some NFS) nobody is kept away.

    Returns:
        0, as `first_says` tells it to all processes.

    Raises:
        CheckpointError: another process is writing into it.
    """
    if folder in _HELD:
        return 0
    try:
        os.makedirs(folder, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # the writer meets it, too, and says so
        return 0
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _HELD[folder] = opened
    except OSError as error:
        os.close(opened)
        if isinstance(error, BlockingIOError):
            raise CheckpointError(
                f"save: another process is writing a checkpoint into {folder}. Two runs may not"
                " write into one directory: give each its own path, or end the other one"
            ) from error
    return 0


def give(folder: str) -> None:
    """Lets others write into a directory."""
    opened = _HELD.pop(folder, None)
    if opened is not None:
        fcntl.flock(opened, fcntl.LOCK_UN)  # at once, also where a child has the file open
        os.close(opened)


def _forget() -> None:
    for opened in _HELD.values():
        os.close(opened)
    _HELD.clear()


os.register_at_fork(after_in_child=_forget)
