"""One test session: 8 virtual CPU devices, strict dtypes, programs compiled once."""

import gc
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path


# Before jax is imported. Tests never use an accelerator: those that need one say so and skip.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Programs do not say which Python lines wrote them, which no test reads: a few per cent of the
# time. (JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS=0 saves more, but takes the named scopes along.)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import pytest

from tests.support import quick


jax.config.update("jax_num_cpu_devices", 8)
# Programs for GPUs are compiled as users compile, and in a session of their own.
FOR_GPUS = any("gpu_programs" in arg for arg in sys.argv)
if not FOR_GPUS:  # here, as conftests of folders may start jax
    quick.from_now_on()


def pytest_configure(config: pytest.Config) -> None:
    # Tracing allocates much that lives: converting models, 2 % less time than every 700 objects.
    gc.set_threshold(50_000)
    # Many tests compile the same step from different function objects. XLA's cache knows programs
    # by their text, so each is compiled once a session; children spawned by tests share it. Small
    # ones, too: most are, and to read one takes a fraction of what it takes to compile it.
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None:  # the main process; its workers and children inherit the folder
        made = tempfile.TemporaryDirectory(prefix="fzero-tests-")
        config.add_cleanup(made.cleanup)
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = made.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out what takes the compiler for GPUs, unless it is asked for by name."""
    return True if collection_path.name == "gpu_programs" and not FOR_GPUS else None


NIGHTLY = Path(__file__).with_name("nightly.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what `nightly.txt` lists, and puts files with slow tests first.

    The last worker to finish should not have begun with a slow file.
    """
    lines = [line for line in NIGHTLY.read_text().splitlines() if not line.startswith("#")]
    listed = {line.split(maxsplit=1)[1] for line in lines}
    here: set[str] = set()
    for item in items:
        names = {item.nodeid, item.nodeid.partition("[")[0]}  # a case, and all of its test
        here |= names
        if listed & names:
            item.add_marker(pytest.mark.nightly)
    # What was renamed would come back into `make test` unnoticed.
    files = {name.partition("::")[0] for name in here}
    gone = sorted(name for name in listed - here if name.partition("::")[0] in files)
    if gone and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"{NIGHTLY.name}: no such tests: {', '.join(gone)}")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# Why a test may be left out, in words of its reason. Any other skip fails the run: a suite that
# leaves out what it should show must not be green.
KNOWN_SKIPS = (
    "O_DIRECT",  # the temporary folder's file system has none
    "mount",  # not root
    "Chromium",  # no browser
    "CUDA plugin",  # jax's compiler for GPUs is not installed; make test-gpu-programs has it
    "SSE4.2",  # XLA compiles no float16 there
    "another file system",
    "Ray is not installed",  # make nightly-ray has it
    "gcsfs and its emulator",  # of Google's store; make nightly-gcs has it
)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that skipped a test for a reason that nobody knows."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    unknown = [
        f"{report.nodeid}: {report.longrepr[2]}"
        for report in reporter.stats.get("skipped", ())
        if not any(known in str(report.longrepr[2]) for known in KNOWN_SKIPS)
    ]
    if unknown:
        reporter.write_line("skipped for a reason that KNOWN_SKIPS does not have:", red=True)
        for line in unknown:
            reporter.write_line(f"  {line}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_seen: set[Path] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What earlier modules left is no longer searched for garbage, from time to time.

    Imports and jax's caches are millions of objects: without this each `gc.collect()` of a test
    that counts arrays takes most of a second, and all of them together minutes. (After every file
    it took 2.6 % of the whole time itself.)
    """
    if item.path not in _seen:
        if len(_seen) % 5 == 0:
            gc.collect()
            gc.freeze()
        _seen.add(item.path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests of bits, with their fixtures, compile as users do; all others quickly."""
    plainly = any(map(item.get_closest_marker, ("bits", "as_users")))
    with quick.as_users() if plainly else nullcontext():
        return (yield)


@pytest.fixture
def in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with Python 3.12.1, which cannot write on while it ends: nothing is left to then."""
    from fzero.checkpoint import write

    monkeypatch.setattr(write, "_EXIT_IS_ABRUPT", False)
