"""Directories of one process below a shared path, and what crashed processes left there.

    path/fzero-offload-<host>-<pid>-<token>/     made by a process when it first needs one
        owner.json                               who; locked (flock) for as long as it lives
        000000/                                  one call of `write`
            00000-000.shard ...                  one shard each
            manifest.json                        written last

A directory is removed with the last of its files. After a crash it is removed by `sweep`, at the
next start on the same machine, if everything proves that nobody can need it: the name, the user,
the owner file, the host, a free lock, and no process that is still the one written down. Anything
else, also inside such a directory, is left alone.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import itertools
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fzero.errors import PlacementError
from fzero.offload import files


OWNER = "owner.json"
MANIFEST = "manifest.json"
FORMAT, VERSION = "fzero-offload", 1

_NAME = re.compile(rf"{FORMAT}-(?P<host>[\w.-]+)-(?P<pid>\d+)-[0-9a-f]{{16}}")
_CALL = re.compile(r"\d{6,}")
_FILE = re.compile(rf"(\d{{5,}}-\d{{3,}}\.shard|{re.escape(MANIFEST)})(\.tmp)?")
# File systems of this machine alone. On others, a free lock and another boot prove little: the
# directory may belong to a machine of the same name.
_LOCAL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}


@dataclass(frozen=True)
class Identity:
    """Which process: no other one, before or after, has the same.

    Args:
        host: the machine's name.
        boot: identifies the time since the machine was started.
        pid: of the process.
        start: when the process started, in clock ticks after the boot.
    """

    host: str
    boot: str
    pid: int
    start: int


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start(pid: int) -> int:
    """Start time of a process; 0 if there is none (or no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The second field is the command in parentheses, which may contain anything.
    return int(stat.rpartition(")")[2].split()[19])


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname()) or "unknown"


def identity() -> Identity:
    """Of this process."""
    return Identity(_host(), _boot(), os.getpid(), _start(os.getpid()))


class Owner:
    """This process's directory below one path.

    Args:
        base: the path, absolute.
    """

    def __init__(self, base: Path) -> None:
        self.base, self.pid, self.users = base, os.getpid(), 0
        self.numbers = itertools.count()
        self.directory, self._fd = _claim(base)
        try:
            self.mode = files.probe(self.directory)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Removes the owner file and the directory, and unlocks."""
        with contextlib.suppress(OSError):
            os.unlink(self.directory / OWNER)
            os.rmdir(self.directory)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _claim(base: Path) -> tuple[Path, int]:
    """Makes a directory with a locked owner file; returns it and the file that holds the lock."""
    who = identity()
    # A sweep of another process may take away a directory that is not yet complete.
    for attempt in itertools.count():
        token = secrets.token_hex(8)
        directory = base / f"{FORMAT}-{who.host}-{who.pid}-{token}"
        made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        text = {"format": FORMAT, "version": VERSION, **asdict(who), "token": token, "made": made}
        temporary, fd = directory / f"{OWNER}.tmp", -1
        try:
            os.mkdir(directory, 0o700)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _lock(fd)
            os.write(fd, json.dumps(text).encode())
            os.rename(temporary, directory / OWNER)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                if fd >= 0:
                    os.unlink(temporary)
                os.rmdir(directory)
            if not isinstance(error, FileNotFoundError | BlockingIOError) or attempt == 2:
                raise
        else:
            return directory, fd
    raise AssertionError("unreachable")


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # no locks on this file system: then nobody's sweep gets one either


# One owner per path; `_GUARD` protects it and all counts. Files are also let go by the garbage
# collector, at any point, even where this thread holds the lock: such releases wait in `_RELEASED`
# until whoever holds it is done.
_OWNERS: dict[Path, Owner] = {}
_SWEPT: set[Path] = set()
_GUARD = threading.Lock()
_RELEASED: SimpleQueue[Call] = SimpleQueue()


class Call:
    """The directory of one call of `write`.

    Args:
        owner: the process's directory that it lies in.
        num_leaves: how many times `release` is called until it goes.
    """

    def __init__(self, owner: Owner, num_leaves: int) -> None:
        self.owner, self.mode, self.left = owner, owner.mode, num_leaves
        self.directory = owner.directory / f"{next(owner.numbers):06d}"

    def identity(self, file: str) -> str:
        """A name of one of its files that no other file anywhere has."""
        return f"{self.owner.directory.name}/{self.directory.name}/{file}"

    def write_manifest(self, content: dict[str, Any], leaves: Sequence[dict[str, Any]]) -> None:
        """Writes the manifest, whole or not at all.

        Args:
            content: what all leaves have in common.
            leaves: one each.

        Raises:
            PlacementError: it cannot be written.
        """
        path = self.directory / MANIFEST
        head = json.dumps({"format": FORMAT, "version": VERSION, **content})
        # A leaf on a line: with `indent` the encoder is slower than the disk.
        lines = ",\n".join(json.dumps(leaf) for leaf in leaves)
        text = f'{head[:-1]}, "leaves": [\n{lines}\n]}}\n'
        try:
            Path(f"{path}.tmp").write_text(text)
            os.rename(f"{path}.tmp", path)
        except OSError as error:
            raise PlacementError(
                f"offload to disk: cannot write {path}: {error.strerror}. {files.advice(error)}"
                " Nothing was moved: all arrays are in memory, unchanged."
            ) from error

    def release(self, names: Sequence[str]) -> None:
        """Removes the files of one leaf, and with the last leaf the directory."""
        if os.getpid() != self.owner.pid:
            return  # a fork's copy of the handle; the files are its parent's
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(self.directory / name)
        _RELEASED.put(self)
        _settle()

    def abandon(self) -> None:
        """Removes everything written so far."""
        self.left = 1
        _remove_call(self.directory)
        self.release(())


def _settle() -> None:
    """Counts released leaves, unless somebody holds the lock, who then does it."""
    while not _RELEASED.empty() and _GUARD.acquire(blocking=False):
        try:
            while not _RELEASED.empty():
                call = _RELEASED.get()
                call.left -= 1
                if call.left == 0:
                    _remove_call(call.directory)
                    _leave(call.owner)
        finally:
            _GUARD.release()


def _leave(owner: Owner) -> None:
    owner.users -= 1
    if owner.users == 0:
        if _OWNERS.get(owner.base) is owner:
            del _OWNERS[owner.base]
        owner.remove()


def begin(path: str | os.PathLike[str], num_leaves: int) -> Call:
    """A fresh directory for one call of `write`.

    Args:
        path: where. It or its parent has to exist: a mistyped mount point must not silently fill
            the system's disk.
        num_leaves: leaves that the call writes.

    Raises:
        PlacementError: nothing can be written there.
    """
    base = Path(os.path.realpath(path))
    if not base.exists() and not base.parent.exists():
        raise PlacementError(
            f"offload to disk: {base} does not exist, nor does its parent {base.parent}; expected"
            " `path` to be a directory, or a new one in an existing directory. Is the disk"
            " mounted? Nothing was moved: all arrays are in memory, unchanged."
        )
    try:
        if not base.is_dir():
            base.mkdir(exist_ok=True)
        return _begin(base, num_leaves)
    except OSError as error:
        wrong = "is no directory" if isinstance(error, FileExistsError | NotADirectoryError) else ""
        raise PlacementError(
            f"offload to disk: cannot write in {base}: {wrong or error.strerror}."
            f" {'Pass the path of a directory.' if wrong else files.advice(error)} Nothing was"
            " moved: all arrays are in memory, unchanged."
        ) from error


def _begin(base: Path, num_leaves: int) -> Call:
    with _GUARD:
        if base not in _SWEPT:
            sweep(base)
            _SWEPT.add(base)
        owner = _OWNERS.get(base)
        if owner is None or not owner.directory.is_dir():
            owner = _OWNERS[base] = Owner(base)
        owner.users += 1
    _settle()
    call = Call(owner, num_leaves)
    try:
        os.mkdir(call.directory, 0o700)
    except BaseException:
        call.abandon()
        raise
    return call


def sweep(path: str | os.PathLike[str]) -> list[Path]:
    """Removes what processes of this machine left below `path` when they crashed.

    Called by `write` when a process first uses a path.

    Args:
        path: as given to `write`; need not exist.

    Returns:
        The directories that were removed.
    """
    base, removed = Path(os.path.realpath(path)), []
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match and match["host"] == _host() and _sweep_one(base / name, int(match["pid"])):
            removed.append(base / name)
    return removed


def _sweep_one(directory: Path, pid: int) -> bool:
    try:
        status = os.lstat(directory)
        if not os.path.isdir(directory) or os.path.islink(directory):
            return False
        if status.st_uid != os.geteuid():
            return False
        inside = set(os.listdir(directory))
        if not inside - {f"{OWNER}.tmp"}:  # killed while it made it; no data is in there
            return not _start(pid) and _unlocked(directory, f"{OWNER}.tmp", lambda fd: True)
        if OWNER not in inside:
            return False
        return _unlocked(directory, OWNER, lambda fd: _is_dead(_read(fd), directory))
    except OSError:
        return False  # somebody else is sweeping, or it cannot be removed: leave it


def _unlocked(directory: Path, lock: str, dead: Callable[[int], bool]) -> bool:
    """Removes a directory if nobody holds its lock and its owner is dead; whether it is gone."""
    if not (directory / lock).exists():
        os.rmdir(directory)
        return True
    fd = os.open(directory / lock, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not dead(fd):
            return False
        for name in os.listdir(directory):
            if _CALL.fullmatch(name) and not (directory / name).is_symlink():
                _remove_call(directory / name)
            elif name == "probe.tmp":
                os.unlink(directory / name)
        if set(os.listdir(directory)) != {lock}:
            return False  # something unknown is in there
        os.unlink(directory / lock)
        os.rmdir(directory)
        return True
    finally:
        os.close(fd)


def _read(fd: int) -> Any:
    try:
        return json.loads(os.pread(fd, 1 << 16, 0))
    except ValueError:
        return None


def _is_dead(owner: Any, directory: Path) -> bool:
    """Whether an owner file says, in our own words, that a process of this machine is no more."""
    try:
        if (owner["format"], owner["version"]) != (FORMAT, VERSION):
            return False
        who = Identity(*(owner[name] for name in ("host", "boot", "pid", "start")))
        name = f"{FORMAT}-{who.host}-{who.pid}-{owner['token']}"
    except (KeyError, TypeError):
        return False
    if name != directory.name or not who.boot:  # the name's host was compared before
        return False
    if who.boot != _boot():
        return _file_system(directory) in _LOCAL
    return _start(who.pid) != who.start


def _file_system(directory: Path) -> str:
    """Type of the file system that a directory is on, or nothing where nobody says."""
    found, longest = "", -1
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        # Blanks and such are written as octal numbers.
        mount = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields.split()[4])
        if len(mount) >= longest and directory.is_relative_to(mount):
            found, longest = rest.split()[0], len(mount)
    return found


def _remove_call(directory: Path) -> None:
    """Removes a call's files and directory; whatever else is in it stays, and keeps it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if _FILE.fullmatch(name):
                with contextlib.suppress(OSError):
                    os.unlink(directory / name)
        os.rmdir(directory)
