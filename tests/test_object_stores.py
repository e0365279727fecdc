"""Checkpoints in an object store: whole or not there, as in directories."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import tensorstore
from support import tiny
from support.object_store import object_store

import fzero as fz
from fzero.checkpoint import objects, shards
from fzero.checkpoint.urls import kvstore
from torch_bridge.formats import remote
from torch_bridge.formats.staging import staged_directory
from torch_bridge.formats.turns import ToldError, Turns


EMULATED = all(map(importlib.util.find_spec, ("gcsfs", "gcp_storage_emulator")))
GS = pytest.param(
    "gs",
    marks=pytest.mark.skipif(
        not EMULATED, reason="gcsfs and its emulator are not installed: make nightly-gcs has them"
    ),
)


@pytest.fixture(scope="module", params=["s3", GS])
def bucket(request):
    """One that this process's environment leads to."""
    with object_store(request.param) as environ, pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield f"{request.param}://bucket"


@pytest.fixture(scope="module")
def store(bucket):
    """The same, as tensorstore opens it."""
    return tensorstore.KvStore.open({**kvstore(f"{bucket}/x"), "path": ""}).result()


def keys(store, prefix: str) -> list[str]:
    return [key.decode() for key in store.list().result() if key.decode().startswith(prefix)]


@pytest.mark.nightly
def test_a_state_goes_to_an_object_store_and_comes_back_under_another_plan(store, bucket):
    """A pipeline's leaves, bf16 and keys too; the newest that is whole counts."""
    url = f"{bucket}/runs/one"
    model, tx = tiny.chain(), optax.adamw(1e-2)
    plan = tiny.plan(zero=3, data=2, pipe=2, microbatches=2, precision="bf16")
    other = tiny.plan(zero=1, data=4, precision="bf16")
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    state, _ = step(state, tiny.tokens(16))
    assert fz.save(url, state, plan, data_position={"row": 7}) == 0
    expected = jax.device_get(fz.logical(model, state, plan))
    again, _ = step(state, tiny.tokens(16))  # which takes the state: it was copied
    fz.wait(url)
    about = fz.checkpoint(url)
    assert (about.number, about.step, about.plan) == (0, 1, plan)
    assert about.data_position == {"row": 7}
    assert url in str(about)
    restored = fz.restore(url, model, tx, other)
    tiny.same_bits(fz.logical(model, restored, other), expected)

    # One that was killed while it was written: never there, its number is not used again.
    store.write("runs/one/marks/1/meta", b"{}").result()
    store.write("runs/one/1/parts/000000/0.0", b"half").result()
    assert fz.checkpoint(url).number == 0
    assert fz.save(f"{url}/", again, plan, keep=1, asynchronous=False) == 2
    assert fz.checkpoint(url).step == 2
    assert not keys(store, "runs/one/1/")
    assert not keys(store, "runs/one/0/")
    assert not keys(store, "runs/one/marks/0/")
    with pytest.raises(fz.CheckpointError, match=f"expected a checkpoint 0 in {url}"):
        fz.restore(url, model, tx, plan, number=0)


@pytest.mark.nightly
def test_checkpoints_of_pytorch_go_to_an_object_store(bucket):
    import torch

    import torch_bridge as tb

    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    converted = tb.convert(module, torch.zeros(2, 4))
    model = converted.model(lambda forward, batch: forward(batch["x"]).mean())
    plan, tx = fz.Plan(zero=3, data=2), optax.adam(1e-2)
    state, _ = fz.train_step(model, tx, plan)(
        fz.init(model, tx, plan), {"x": np.ones((4, 4), np.float32)}
    )
    expected = {name: np.asarray(x) for name, x in tb.state_dict(converted, state).items()}
    file, folder = f"{bucket}/torch/model.safetensors", f"{bucket}/torch/dcp"
    tb.save(file, converted, state)
    tb.save(folder, converted, state, to="dcp")
    loaded = tb.load(file)
    assert all(expected[name].tobytes() == x.numpy().tobytes() for name, x in loaded.items())
    again = tb.restore(folder, converted, tx, plan)
    tiny.same_shards(again.opt_state, state.opt_state)
    with pytest.raises(fz.CheckpointError, match=r"torch/dcp: is a folder that is there"):
        tb.save(folder, converted, state, to="dcp")
    with pytest.raises(fz.CheckpointError, match=rf"^{bucket}/torch/other\.pt: no such file"):
        tb.restore(f"{bucket}/torch/other.pt", converted, tx, plan)
    if not EMULATED:
        with pytest.raises(fz.CheckpointError, match=r"gs://.* takes the package gcsfs"):
            tb.load("gs://bucket/model.pt")


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_processes_write_their_parts_of_one_checkpoint_into_a_store(store, bucket, tmp_path):
    """It is whole when both have written; one process restores it."""
    worker = Path(__file__).parent / "multiprocess" / "hosts_worker.py"
    url = f"{bucket}/two"
    done = subprocess.run(
        [sys.executable, "-m", "fzero.cli", "launch", "--processes", "2", "--logs",
         tmp_path / "logs", "--", worker, tmp_path, "stores"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "STORE": url},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"stores-{p}.json").read_text()) for p in range(2)]
    assert found[0] == found[1]
    assert (found[0]["numbers"], found[0]["whole"]) == ([0, 1], 1)
    assert found[0]["losses"][0] == found[0]["losses"][1]
    marks = sorted(key.rpartition("/")[2] for key in keys(store, "two/marks/"))
    assert marks == ["begun", "done-0-of-2", "done-1-of-2", "meta"]
    assert fz.checkpoint(url).step == 1


@pytest.mark.nightly
def test_what_the_store_refuses_is_said_and_nothing_is_whole(store, bucket):
    model, plan = tiny.chain(), fz.Plan(data=1)
    state = fz.init(model, None, plan)
    nobody = bucket.replace("//bucket", "//nobody")
    # Google's emulator answers with nothing.
    said = "NoSuchBucket" if bucket.startswith("s3") else "Failed to parse response"
    with pytest.raises(fz.CheckpointError, match=rf"{nobody}/run(.|\n)*{said}"):
        fz.save(f"{nobody}/run", state, plan, asynchronous=False)
    with pytest.raises(fz.CheckpointError, match="found none"):
        fz.checkpoint(f"{bucket}/never")
    number = fz.save(f"{bucket}/lost", state, plan, asynchronous=False)
    lost = next(key for key in keys(store, "lost/0/parts/") if key.endswith("/.zarray"))
    store.write(lost, None).result()
    with pytest.raises(fz.CheckpointError, match=rf"params/\S+ of checkpoint 0 in {bucket}/lost"):
        fz.restore(f"{bucket}/lost", model, None, plan, number=number)


@pytest.mark.nightly
def test_a_number_whose_parts_a_kill_left_is_not_used_again(store, bucket):
    """The next run lays its leaves out in another way: it cannot write over them."""
    model, url = tiny.chain(), f"{bucket}/killed"
    plan, other = tiny.plan(zero=3, data=4), tiny.plan(zero=3, data=2)
    state = fz.init(model, None, plan)
    assert fz.save(url, state, plan, asynchronous=False) == 0
    fz.save(url, state, plan)
    assert "killed/marks/1/begun" in keys(store, "killed/marks/1/")  # before anything else
    # What a kill leaves that comes before a process has written all its parts.
    fz.wait(url)
    for name in ("meta", "done-0-of-1"):
        store.write(f"killed/marks/1/{name}", None).result()
    assert keys(store, "killed/1/parts/")
    assert fz.checkpoint(url).number == 0
    with pytest.raises(fz.CheckpointError, match="expected a checkpoint 1 "):
        fz.restore(url, model, None, plan, number=1)
    there = fz.restore(url, model, None, other)
    assert fz.save(url, there, other, asynchronous=False) == 2
    assert fz.checkpoint(url).plan == other
    assert not keys(store, "killed/1/")
    assert not keys(store, "killed/marks/1/")


@pytest.mark.nightly
def test_after_one_that_failed_the_next_is_written_into_a_store(store, bucket):
    model, url = tiny.chain(), f"{bucket}/failed"
    plan = fz.Plan(data=1)
    state = fz.init(model, None, plan)
    for key in range(40):  # no array that anybody could write into
        store.write(f"failed/0/parts/{key:06}/.zarray", b"{}").result()
    assert fz.save(url, state, plan) == 0
    with pytest.warns(UserWarning, match=r"checkpoint 0 to .*/failed failed: "):
        assert fz.save(url, state, plan, data_position="next") == 1
    fz.wait(url)
    assert fz.checkpoint(url).data_position == "next"
    assert not keys(store, "failed/0/")


@pytest.mark.nightly
def test_a_process_that_never_writes_its_part_is_named(bucket, monkeypatch):
    """One of two that lives on, and says nothing: no other waits for ever."""
    url = f"{bucket}/runs/silent"
    monkeypatch.setattr(objects, "WAIT_S", 0.5)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    writer = objects.Writer(url, objects.begin(url), {"000000": np.ones(3)}, {}, None)
    with pytest.raises(
        OSError, match=r"no word of process 1 \(of 2\) for \d s after .* process 0,"
    ):
        writer.wait_until_finished()
    monkeypatch.undo()
    with pytest.raises(fz.CheckpointError, match="found none"):
        fz.checkpoint(url)


def write(folder: Path, keep: int | None = None) -> int:
    """A checkpoint as stores have them, in a directory: what is said of marks holds there, too."""
    url, number = str(folder), objects.begin(str(folder))
    objects.Writer(url, number, {"0": np.arange(3)}, {"of": number}, keep).wait_until_finished()
    return number


def test_marks_say_which_checkpoints_are_whole(tmp_path):
    url = str(tmp_path)
    assert [write(tmp_path), write(tmp_path), objects.begin(url), objects.begin(url)] == [
        0,
        1,
        2,
        3,
    ]
    (tmp_path / "marks/2/meta").write_text("{}")  # but no process has written its part
    (tmp_path / "marks/3/done-0-of-1").touch()  # but `meta` is to come
    assert objects.numbers(url) == [0, 1]
    assert write(tmp_path, keep=2) == 4
    assert objects.numbers(url) == [1, 4]
    assert objects.read_meta(url, 4) == {"of": 4}
    left = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {("marks", "1"), ("marks", "4"), ("1", "parts"), ("4", "parts")}
    assert objects.begin(url) == 5  # the newest, however few are left


def test_a_checkpoint_is_whole_when_the_last_process_has_written(tmp_path):
    marks = tmp_path / "marks" / str(objects.begin(str(tmp_path)))
    for name, whole in (("meta", []), ("done-1-of-2", []), ("done-0-of-2", [0])):
        (marks / name).write_text("{}")
        assert objects.numbers(str(tmp_path)) == whole


def test_a_process_that_cannot_write_its_part_tells_the_others(tmp_path, monkeypatch):
    """One that waits for it ends with its words; nobody waits for the time that a lost one has."""
    url, number = str(tmp_path), objects.begin(str(tmp_path))
    (tmp_path / f"{number}/parts").mkdir(parents=True)
    (tmp_path / f"{number}/parts/0").write_text("no directory")
    monkeypatch.setattr(objects, "WAIT_S", 1.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process, said in ((0, "parts/0"), (1, "^process 0 could not write its part: .*parts/0")):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        writer = objects.Writer(url, number, {"0": np.arange(3)}, {}, None)
        with pytest.raises(OSError, match=said):
            writer.wait_until_finished()
    assert objects.numbers(url) == []


def test_a_process_that_says_nothing_is_waited_for_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "WAIT_S", 0.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    url = str(tmp_path)
    writer = objects.Writer(url, objects.begin(url), {"0": np.arange(3)}, {}, None)
    with pytest.raises(OSError, match=r"no word of process 1 \(of 2\) .* process 0,"):
        writer.wait_until_finished()
    assert objects.numbers(url) == []


def test_of_each_piece_one_copy_is_written_in_chunks_that_are_small_enough(monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    mesh = jax.make_mesh((2, 4), ("cut", "copies"))
    for spec, chunk, starts in (((), (4, 4), [0]), (("cut",), (4, 4), [0, 8])):
        to = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        found = shards.shards_of(jax.device_put(np.zeros((16, 4), np.float32), to))
        assert (found.shape, found.chunk) == ((16, 4), chunk)
        assert sorted(index[0].start or 0 for index, _ in found.shards) == starts
    assert shards.shards_of(np.zeros((6, 8), np.float32)).chunk == (
        3,
        8,
    )  # odd: as small as it gets


class Second(Turns):
    """What process 1 of two sees, where process 0 has another run's name."""

    def told(self, value):
        return ["s3://bucket/run-0/" if value == "s3://bucket/run-1" else value, value]


class Listed:
    """A store, as fsspec has it; what was put."""

    def __init__(self):
        self.urls = []

    def isdir(self, url):
        return False

    def put_file(self, path, url):
        self.urls.append(url)


def test_every_process_sends_to_the_url_of_process_0(monkeypatch):
    """One with the time of its start in a run's name would send its shards elsewhere."""
    store = Listed()
    monkeypatch.setattr(remote, "_store", lambda url: store)
    with remote.sent("s3://bucket/run-1", Second()) as local:
        assert local.name == "run-0"
        local.mkdir()
        (local / "model.safetensors").write_bytes(b"x")
    assert store.urls == ["s3://bucket/run-0/model.safetensors"]


def test_what_another_process_told_is_not_told_once_more(monkeypatch):
    """As any other failure it would be, and processes were out of step from then on."""
    monkeypatch.setattr(remote, "_store", lambda url: Listed())
    with (
        pytest.raises(ToldError, match="disk of 1"),
        remote.sent("s3://bucket/run-1", Second()),
    ):
        raise ToldError("disk of 1 (in process 1)")


@pytest.mark.parametrize("kind", [fz.CheckpointError, ToldError])
def test_what_cannot_be_written_is_said_of_the_url(monkeypatch, kind):
    """Not of the folder on this host's disk, which nobody has asked for, nor on another's."""
    monkeypatch.setattr(remote, "_store", lambda url: Listed())
    with (
        pytest.raises(kind, match=r"^s3://bucket/run-0/model\.safetensors: full$") as raised,
        remote.sent("s3://bucket/run-1", Second()) as local,
        staged_directory(local, merge=False, turns=Turns()) as folder,
    ):
        raise kind(f"{folder / 'model.safetensors'}: full")
    assert type(raised.value) is kind
    with (
        pytest.raises(fz.CheckpointError, match=r"^s3://bucket/w\.pt: expected .* under w\.pt$"),
        remote.sent("s3://bucket/w.pt", Turns()) as local,
    ):
        raise fz.CheckpointError(f"{local}: expected no tensor under w.pt")


@pytest.mark.parametrize("path", ["gs://bucket", "http://host/run", "s3:/bucket/run"])
def test_other_urls_are_refused_by_name(path):
    """A pathlib.Path takes a slash out of a url, and would become a directory here."""
    plan = fz.Plan(data=1)
    model = fz.Model(lambda rng: ({"w": np.ones(2)}, {}), lambda *_: None)
    with pytest.raises(fz.CheckpointError, match=r"expected a directory, or gs:// or s3://"):
        fz.save(path, fz.init(model, None, plan), plan)
    with pytest.raises(fz.CheckpointError, match=r"expected a directory, or gs:// or s3://"):
        fz.checkpoint(path)


def test_an_emulator_that_only_googles_clients_would_find_is_refused(monkeypatch):
    """tb.save would go to it, and fz.save to Google."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    with pytest.raises(fz.CheckpointError, match="expected TENSORSTORE_GCS_HTTP_URL with the same"):
        fz.checkpoint("gs://bucket/run")


def test_a_kill_while_old_checkpoints_are_removed_leaves_nothing_unknown():
    """What is left of one is known by its mark, and removed by the next."""
    real = tensorstore.KvStore.open("memory://").result()
    for number in (0, 1):
        for key in ("marks/{}/begun", "marks/{}/meta", "marks/{}/done-0-of-1", "{}/parts/x"):
            real.write(key.format(number), b"1").result()

    class Killed:
        left = 1

        def __getattr__(self, name):
            return getattr(real, name)

        def delete_range(self, keys):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return real.delete_range(keys)

    with pytest.raises(KeyboardInterrupt):
        objects._remove_old(Killed(), 1, 1)
    left = [key for key in real.list().result() if key.startswith(b"0/")]
    assert not left or 0 in objects._known(real)
    assert len(real.list().result()) < 8
