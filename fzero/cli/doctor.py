"""Check versions, devices, memory and disk here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any

import typer

from fzero.cli import command_app
from fzero.cli.flags import JsonOption


OK, WARN, FAIL = "ok", "warn", "FAIL"
# What a command needs beyond fzero itself, and the extra that brings it.
EXTRAS = {"torch": "torch", "safetensors": "torch", "transformers": "hf", "matplotlib": "report",
          "jinja2": "report", "flax": "flax"}  # fmt: skip
NEEDED = ("jax", "jaxlib", "optax", "numpy", "ml_dtypes", "orbax-checkpoint", "tensorstore")
# Enough to be past a drive's own cache for small writes, little enough to take a second.
PROBE_BYTES = 64 * 2**20
LEAST_FREE = 2 * 2**30
LEAST_FILES = 1024


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        what: a word or two.
        state: `ok`, `warn` (something is slower, or missing and perhaps not wanted) or `FAIL`.
        found: what is there.
        mend: what to do about it; empty where nothing is.
    """

    what: str
    state: str
    found: str
    mend: str = ""


PathOption = Annotated[
    Path | None,
    typer.Option(help="Directory whose disk is measured.  [default: the temporary one]"),
]

app = command_app()


@app.command()
def doctor(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Look at versions, devices, memory kinds, processes and the disk; exit with 1 if one fails.

    Each line that is not ok says what to do.
    """
    findings = list(examine(path or Path(tempfile.gettempdir())))
    healthy = all(one.state != FAIL for one in findings)
    if as_json:
        found = [dataclasses.asdict(one) for one in findings]
        print(json.dumps({"ok": healthy, "findings": found}, indent=2))
        raise typer.Exit(0 if healthy else 1)
    width = max(len(one.what) for one in findings)
    for one in findings:
        print(f"{one.state:4}  {one.what.ljust(width)}  {one.found}")
        if one.mend:
            print(f"      {' ' * width}  {one.mend}")
    raise typer.Exit(0 if healthy else 1)


def examine(path: Path) -> Iterator[Finding]:
    """Everything that is looked at, in order.

    Args:
        path: a directory on the disk to measure.
    """
    looks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions, _variables, _processes, _devices, lambda: _disk(path), _limits,
    )  # fmt: skip
    for look in looks:
        try:
            yield from look()
        except Exception as error:
            name = getattr(look, "__name__", "disk").strip("_")
            name = "disk" if "lambda" in name else name
            first = str(error).partition("\n")[0]
            yield Finding(name, FAIL, f"{type(error).__name__}: {first}", "see the message")


def _versions() -> Iterator[Finding]:
    yield Finding("python", OK, sys.version.split()[0])
    wanted = _requirements()
    for name in NEEDED:
        try:
            here = version(name)
        except PackageNotFoundError:
            yield Finding(
                name, FAIL, "not installed", f'pip install "{name}{wanted.get(name, "")}"'
            )
            continue
        wants = wanted.get(name, "")
        if wants and not _within(here, wants):
            mend = f'pip install "{name}{wants}"'
            yield Finding(name, FAIL, f"{here}, expected {wants}", mend)
        else:
            yield Finding(name, OK, here)
    if version("jax") != version("jaxlib"):
        found = f"jax {version('jax')} with jaxlib {version('jaxlib')}"
        yield Finding("jax", WARN, found, f"pip install jaxlib=={version('jax')}")
    for name, extra in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            mend = f'pip install "fzero[{extra}]", where you want it'
            yield Finding(name, WARN, "not installed", mend)
        else:
            yield Finding(name, OK, version(name))


def _requirements() -> dict[str, str]:
    """What fzero's own metadata asks of each package, such as `>=0.10,<0.12`."""
    try:
        lines = requires("fzero") or []
    except PackageNotFoundError:  # run from a source tree
        return {}
    plain = (line.partition(";") for line in lines)
    names = [(text, text.rstrip("0123456789.,<>=! ")) for text, _, extra in plain if not extra]
    return {name: text[len(name) :] for text, name in names}


def _within(here: str, wants: str) -> bool:
    """Whether a version is in a range of `>=` and `<`; of others nothing is said."""
    for limit in wants.split(","):
        bound = _numbers(limit.lstrip("<>=! "))
        if limit.startswith(">=") and _numbers(here) < bound:
            return False
        if limit.startswith("<") and not limit.startswith("<=") and _numbers(here) >= bound:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    digits = ("".join(c for c in word if c.isdigit()) for word in text.split("+")[0].split("."))
    return tuple(int(word) for word in digits if word)


def _variables() -> Iterator[Finding]:
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags:
        mend = "unset it: --devices, or jax_num_cpu_devices, says how many there are"
        yield Finding("XLA_FLAGS", WARN, flags, mend)
    if os.environ.get("JAX_ENABLE_X64", "0").lower() in ("1", "true"):
        mend = "unset it: states and steps of fzero are of 32 and 16 bits"
        yield Finding("JAX_ENABLE_X64", WARN, "64-bit numbers are on", mend)


def _processes() -> Iterator[Finding]:
    from fzero.hosts.world import find_world

    try:
        world = find_world(os.environ)
    except Exception as error:
        yield Finding("processes", FAIL, str(error), "see docs/hosts.md")
        return
    number = "as many as jax finds" if world.num_processes is None else str(world.num_processes)
    yield Finding("processes", OK, f"{number} ({world.source})")


def _devices() -> Iterator[Finding]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        mend = "JAX_PLATFORMS=cpu works without a GPU; for NVIDIA GPUs: pip install 'fzero[cuda]'"
        yield Finding("devices", FAIL, first, mend)
        return
    first = devices[0]
    stats: dict[str, Any] = first.memory_stats() or {}
    limit = f", {stats['bytes_limit'] / 2**30:.1f} GiB for arrays" if "bytes_limit" in stats else ""
    found = f"{len(devices)} x {first.device_kind} ({first.platform}){limit}"
    if first.platform == "cpu" and _has_nvidia():
        asked = os.environ.get("JAX_PLATFORMS")
        mend = f"JAX_PLATFORMS={asked}: unset it" if asked else "pip install 'fzero[cuda]'"
        yield Finding("devices", FAIL, f"{found}, beside an NVIDIA GPU", mend)
    else:
        yield Finding("devices", OK, found)
    if first.platform == "gpu":
        yield _cudnn()
    yield from _memories(first)


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _cudnn() -> Finding:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            return Finding("cuDNN", OK, f"{version(name)} ({name})")
        except PackageNotFoundError:
            continue
    mend = "fused attention needs it: pip install 'fzero[cuda]', if the system has none"
    return Finding("cuDNN", WARN, "no package of it; the system may have it", mend)


def _memories(device: Any) -> Iterator[Finding]:
    import jax
    import jax.numpy as jnp

    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in kinds:
        mend = "offload to the host does not work here; offload to disk does"
        yield Finding("memory kinds", WARN, ", ".join(kinds), mend)
        return
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    back = jax.sharding.SingleDeviceSharding(device)
    array = jax.device_put(jnp.arange(1024, dtype=jnp.float32), back)
    returned = jax.device_put(jax.device_put(array, there), back)
    if bool(jnp.all(returned == array)):
        yield Finding("memory kinds", OK, f"{', '.join(kinds)}; a copy there is exact")
    else:
        mend = "do not offload on this device; report it with the versions above"
        yield Finding("memory kinds", FAIL, "a copy to pinned_host and back differs", mend)


def _disk(path: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(path).free
    state, mend = (OK, "") if free >= LEAST_FREE else (WARN, "checkpoints may not fit")
    yield Finding("free space", state, f"{free / 2**30:.1f} GiB in {path}", mend)
    if free < 2 * PROBE_BYTES:
        yield Finding("disk", FAIL, "no room to measure it", f"free space in {path}")
        return
    data = os.urandom(PROBE_BYTES // 16) * 16
    with tempfile.NamedTemporaryFile(dir=path, prefix="fzero-doctor-") as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        direct = _direct(Path(file.name))
    rate = PROBE_BYTES / seconds / 1e6
    slow = "offload to disk and checkpoints will be slow: use another --path" if rate < 100 else ""
    way = "direct I/O" if direct else "no direct I/O, through the page cache"
    yield Finding("disk", WARN if slow else OK, f"{rate:,.0f} MB/s written and synced; {way}", slow)


def _direct(path: Path) -> bool:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False
    try:
        os.close(os.open(path, os.O_RDONLY | flag))
    except OSError:
        return False
    return True


def _limits() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < LEAST_FILES
    mend = f"ulimit -n {hard if hard > 0 else 65536}" if few else ""
    yield Finding("open files", WARN if few else OK, f"at most {soft}", mend)
