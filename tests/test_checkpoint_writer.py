"""Checkpoints are written in the background: threads, forks, what fails, and kills."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl import logging as absl_logging
from support import tiny

import fzero as fz
from fzero.checkpoint import manager, write


MODEL, TX, BATCH = tiny.chain(3), optax.adamw(1e-2), tiny.tokens(16)
PLANS = {"zero 0": tiny.plan(zero=0, data=8), "zero 3": tiny.plan(zero=3, data=8)}
KILLS = 200 if os.environ.get("FZERO_NIGHTLY") else 6


pytestmark = pytest.mark.usefixtures("in_the_background")


@pytest.fixture(scope="module")
def states():
    return tiny.stepped(PLANS, MODEL, TX, BATCH)


def test_reading_what_there_is_waits_for_nobody(states, tmp_path, monkeypatch):
    """`fz.checkpoint` neither waits for a writer nor ends it."""
    plan = PLANS["zero 3"]
    fz.save(tmp_path, states("zero 3"), plan, data_position="first", asynchronous=False)
    go = threading.Event()

    finalize = ocp.PyTreeCheckpointHandler.finalize

    def slowly(self, *args, **more):
        assert go.wait(600)
        return finalize(self, *args, **more)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", slowly)
    fz.save(tmp_path, states("zero 3"), plan, data_position="second")
    assert fz.checkpoint(tmp_path).data_position == "first"
    go.set()
    fz.wait(tmp_path)
    assert fz.checkpoint(tmp_path).data_position == "second"


def test_a_directory_that_another_process_writes_is_refused(states, tmp_path):
    """Both would fill one unfinished checkpoint. A lock belongs to who opened the file."""
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(fz.CheckpointError, match="another process is writing a checkpoint into"):
        fz.save(tmp_path, states("zero 3"), PLANS["zero 3"])
    assert not list(tmp_path.iterdir())
    os.close(other)
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is given back when all is written
    os.close(other)


def test_checkpoints_of_another_run_in_between_are_told(states, tmp_path):
    for _ in range(2):
        fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False)
    (tmp_path / "1").rename(tmp_path / "4")
    with pytest.warns(UserWarning, match="wrote none after 1: two runs write into one directory"):
        assert fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False) == 5
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False)


def full_disk(patch, times: int) -> None:
    """The next checkpoints cannot be finished in the background."""
    finalize, left = ocp.PyTreeCheckpointHandler.finalize, [None] * times

    def fails(self, *args, **more):
        if left:
            left.pop()
            raise OSError("no space left")
        return finalize(self, *args, **more)

    patch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fails)


@pytest.mark.parametrize("warnings_are", ["shown", "errors"])
def test_after_one_that_failed_in_the_background_the_next_is_written(
    states, tmp_path, monkeypatch, warnings_are
):
    """As at the end of a run: what was due at step 20 fails, SIGTERM comes at 29."""
    plan, state = PLANS["zero 3"], states("zero 3")
    fz.save(tmp_path, state, plan, data_position="first", asynchronous=False)
    full_disk(monkeypatch, 1)
    fz.save(tmp_path, state, plan, data_position="lost")
    said = r"checkpoint 1 to .* failed: (.|\n)*no space left"
    if warnings_are == "shown":
        with pytest.warns(UserWarning, match=said):
            fz.save(tmp_path, state, plan, data_position="last")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with pytest.raises(UserWarning, match=said):
                fz.save(tmp_path, state, plan, data_position="last")
    fz.wait(tmp_path)
    assert fz.checkpoint(tmp_path).data_position == "last"
    assert fz.checkpoint(tmp_path, 0).data_position == "first"
    tiny.same_shards(fz.restore(tmp_path, MODEL, TX, plan).params, state.params)


def test_each_failure_in_the_background_is_told_once(states, tmp_path, monkeypatch, caplog):
    """Nor does orbax's log tell it again, in some ten tracebacks; other lines of it stay."""
    plan, state = PLANS["zero 3"], states("zero 3")
    full_disk(monkeypatch, 2)
    fz.save(tmp_path, state, plan)
    with (
        pytest.warns(UserWarning, match=r"checkpoint 0 to .* failed"),
        pytest.raises(fz.CheckpointError, match=r"checkpoint 0 to .* failed"),
    ):
        fz.save(tmp_path, state, plan, asynchronous=False)
    assert "no space left" not in caplog.text
    absl_logging.error("one of the user's own", exc_info=OSError("no room"))
    assert "no room" in caplog.text
    full_disk(monkeypatch, 1)
    own = ocp.CheckpointManager(tmp_path / "own")
    own.save(0, args=ocp.args.StandardSave({"x": np.ones(3)}))
    with pytest.raises(OSError, match="no space left"):
        own.wait_until_finished()
    assert "no space left" in caplog.text  # orbax's, of a checkpoint that is not fzero's
    fz.save(tmp_path, state, plan)
    fz.wait(tmp_path)
    assert fz.checkpoint(tmp_path).number == 0


def test_after_a_path_that_is_no_folder_others_logs_of_orbax_stay(states, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises((fz.CheckpointError, OSError)):
        fz.save(tmp_path / "file" / "run", states("zero 3"), PLANS["zero 3"])
    logger, error = logging.getLogger("absl"), (OSError, OSError("of another"), None)
    where = "orbax/checkpoint_manager.py"
    logger.handle(logger.makeRecord("absl", logging.ERROR, where, 1, "lost", (), error))
    assert "of another" in caplog.text


def test_a_folder_that_cannot_be_made_leaves_no_thread_behind(states, tmp_path):
    """They would wait for it for ten minutes, and the end of the process for them."""
    plan, state = PLANS["zero 3"], states("zero 3")
    fz.save(tmp_path / "run", state, plan, asynchronous=False)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").write_text("in its place")
    fz.save(tmp_path / "run", state, plan)
    with pytest.raises(fz.CheckpointError, match=r"checkpoint 0 to .* failed"):
        fz.wait(tmp_path / "run")
    assert not [x.name for x in threading.enumerate() if type(x).__module__.startswith("orbax")]


def test_where_a_write_failed_is_one_frame(states, tmp_path, monkeypatch):
    """Orbax hands an error on from thread to thread, in a hundred lines."""
    full_disk(monkeypatch, 1)
    with pytest.raises(fz.CheckpointError) as caught:
        fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False)
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert [frame.name for frame in frames] == ["fails"]


def test_among_processes_what_failed_is_raised_before_the_others_are_waited_for(
    states, tmp_path, monkeypatch
):
    """orbax would let this process wait for those that wait for its part."""
    state, plan = states("zero 3"), PLANS["zero 3"]
    fz.save(tmp_path, state, plan, asynchronous=False)
    job: Future = Future()
    job.set_exception(OSError("no space left"))
    failed: list[BaseException] = []
    with pytest.raises(OSError, match="no space left"):
        manager._Noticed(job, failed).result()
    writer = manager.Manager(str(tmp_path), None)
    monkeypatch.setattr(writer, "_failed", failed)
    saves = iter([True, True])
    monkeypatch.setattr(writer._manager, "is_saving_in_progress", lambda: next(saves, False))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(OSError, match="no space left"):
        writer.wait_until_finished()
    monkeypatch.undo()
    writer.close()


def test_what_each_process_writes_its_own_shards_of_is_read_again(states, tmp_path, monkeypatch):
    """As of leaves that are at home on the devices of one process."""
    state, plan = states("zero 3"), PLANS["zero 3"]
    monkeypatch.setattr(write, "is_elsewhere", lambda leaf: isinstance(leaf, jax.Array))
    fz.save(tmp_path, state, plan)
    fz.wait(tmp_path)
    tiny.same_bits(fz.restore(tmp_path, MODEL, TX, plan).params, state.params)


def test_threads_save_to_two_paths_at_once(states, tmp_path, recwarn):
    plan, state = PLANS["zero 0"], states("zero 0")
    with ThreadPoolExecutor(4) as threads:
        numbers = threads.map(lambda n: fz.save(tmp_path / f"{n % 2}", state, plan), range(4))
        assert sorted(numbers) == [0, 0, 1, 1]
    for path in (tmp_path / "0", tmp_path / "1"):
        fz.wait(path)
        assert fz.checkpoint(path).number == 1
    assert not [w for w in recwarn if "failed" in str(w.message)]


def test_threads_save_to_one_path_one_after_another(states, tmp_path):
    plan, state = PLANS["zero 0"], states("zero 0")
    with ThreadPoolExecutor(4) as threads:
        numbers = threads.map(lambda _: fz.save(tmp_path / "new", state, plan), range(4))
        assert sorted(numbers) == [0, 1, 2, 3]
    fz.wait(tmp_path / "new")
    assert sorted(os.listdir(tmp_path / "new")) == ["0", "1", "2", "3"]


@pytest.mark.skipif(write._EXIT_IS_ABRUPT, reason="saves wait, so that none is the last")
def test_a_process_whose_last_checkpoint_was_lost_fails(tmp_path):
    """And waits for the others, and calls what was registered to be called."""
    code = """
import atexit, sys, fzero as fz
from tests.support import tiny

def full(self):
    wait(self)
    waited.append(self)
    if len(waited) == 1:
        raise OSError("no room")

plan = fz.Plan(data=1)
state = fz.init(tiny.chain(), None, plan)
fz.save(sys.argv[1], state, plan, asynchronous=False)
atexit.register(print, "called")
manager = sys.modules["fzero.checkpoint.manager"].Manager
wait, waited = manager.wait_until_finished, []
manager.wait_until_finished = full
for path in sys.argv[1:]:
    fz.save(path, state, plan)
"""
    paths = [str(tmp_path / name) for name in ("lost", "kept")]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (1, "called\n"), done.stderr
    assert f"writing checkpoint 1 to {paths[0]} failed: no room" in done.stderr
    assert fz.checkpoint(paths[1]).number == 0


@pytest.mark.filterwarnings("ignore:os.fork")  # jax's, of its threads
def test_a_forked_process_waits_for_nobody(tmp_path):
    """A data loader's worker, say, that begins while another thread saves."""
    with write._one_writer(write.absolute_path(tmp_path)):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends it where it hangs
            thread = threading.Thread(target=fz.wait, args=(tmp_path,))
            thread.start()
            thread.join()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert status == 0


def test_a_directory_has_one_writer_by_whatever_name(states, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for number, name in enumerate(("run", "link", "other/../run")):
        assert fz.save(tmp_path / name, states("zero 0"), PLANS["zero 0"]) == number
    fz.wait(tmp_path / "link")
    assert fz.checkpoint(tmp_path / "run").number == 2


def test_a_handler_within_a_save_is_refused_and_the_checkpoint_is_written(
    states, tmp_path, monkeypatch
):
    """It would close what the save has opened; and a lock would wait for its own thread."""
    plan, state, begun = PLANS["zero 0"], states("zero 0"), manager.items

    def interrupted(*args):
        for act in (lambda: fz.wait(tmp_path), lambda: fz.save(tmp_path / "other", state, plan)):
            with pytest.raises(fz.CheckpointError, match="by a signal's handler"):
                act()
        return begun(*args)

    monkeypatch.setattr(manager, "items", interrupted)
    assert [fz.save(tmp_path, state, plan) for _ in range(2)] == [0, 1]
    fz.wait(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "other") == ["0", "1"]


EXIT = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
from tests.support import tiny
import fzero as fz
model, plan = tiny.chain(3), tiny.plan(zero=3, data=4)
fz.save(sys.argv[1], fz.init(model, None, plan), plan, data_position="last words")
"""


def python(code, path, **options):
    """A process with our paths."""
    root = Path(__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True,
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, **options,
    )  # fmt: skip


def test_the_end_of_the_process_waits_for_the_writer(tmp_path):
    child = python(EXIT, tmp_path, stderr=subprocess.PIPE)
    _, said = child.communicate(timeout=600)
    assert child.returncode == 0, said
    assert fz.checkpoint(tmp_path).data_position == "last words"


# Starts a writer whenever it is told to: a fork of a process that has imported everything and
# started nothing. The writer goes on from the newest checkpoint until it is killed.
NURSERY = """
import os, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import optax
from tests.support import tiny
import fzero as fz

def write():
    model, tx, plan = tiny.chain(3), optax.adamw(1e-2), tiny.plan(zero=3, data=4)
    state = fz.restore(sys.argv[1], model, tx, plan)
    while True:
        state = state.replace(step=state.step + 1)
        fz.save(sys.argv[1], state, plan, data_position=int(state.step), keep=3)
        print(int(state.step), flush=True)

for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        write()
    print("writer", child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def said(child, word):
    """Lines of a process up to the first that begins with a word."""
    lines = [child.stdout.readline().split()]
    while lines[-1][0] != word:
        lines.append(child.stdout.readline().split())
    return lines


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """A killed process leaves complete checkpoints only, and the next one goes on after them.

    Every other writer is killed after it has begun a second checkpoint: the first is there then,
    however fast or slow the machine is. The others may be killed within their first one.
    """
    random = np.random.default_rng(0)
    model, plan = tiny.chain(3), tiny.plan(zero=3, data=4)
    first = fz.init(model, TX, plan, rng=3)
    expected, newest = tiny.host(first.params), fz.save(tmp_path, first, plan, data_position=0)
    fz.wait(tmp_path)
    nursery = python(NURSERY, tmp_path, stdin=subprocess.PIPE)
    reached = 0
    for kill in range(KILLS):
        nursery.stdin.write("another\n")
        nursery.stdin.flush()
        writer = int(said(nursery, "writer")[-1][1])
        begun = int(nursery.stdout.readline())  # the first is being written
        if kill % 2:
            begun = int(nursery.stdout.readline())
        time.sleep(float(random.uniform(0, 0.1)))
        os.kill(writer, signal.SIGKILL)
        steps = [begun, *(int(line[0]) for line in said(nursery, "gone")[:-1])]
        about = fz.checkpoint(tmp_path)
        # `save` waits for the one before, so all but the last one begun are there.
        assert about.number >= newest + kill % 2
        assert max(steps) - 1 <= about.step <= max(steps) + 1
        assert about.step == about.data_position >= reached
        newest, reached = about.number, about.step
        state = fz.restore(tmp_path, model, TX, plan)
        assert int(state.step) == about.step
        found = tiny.host(state.params)
        assert all(expected[path].tobytes() == found[path].tobytes() for path in expected)
    nursery.stdin.close()
    assert nursery.wait(timeout=600) == 0
