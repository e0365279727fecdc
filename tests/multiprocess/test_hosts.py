"""Processes find each other, compare what they run, and end together: real ones, on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hosts_worker
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.hosts.agree import require_equal
from fzero.hosts.world import find_world


pytestmark = pytest.mark.multiprocess

WORKER = Path(__file__).with_name("hosts_worker.py")
TORCHRUN = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "2"}
LIMIT_S = 4.0
# On a machine that does other things, too.
START_S = 1800


def launch(folder: Path, what: str, processes: int = 2, **env: str):
    """Runs the worker under `fzero launch`; returns (exit code, what it printed, seconds)."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fzero.cli", "launch", "--processes", str(processes), "--logs",
         folder / "logs", "--", WORKER, folder, what],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", **env},
        capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def log(folder: Path, process: int) -> str:
    return (folder / "logs" / f"process-{process}.log").read_text()


@pytest.mark.parametrize(
    ("environ", "arguments", "expected"),
    [
        ({}, {}, ("alone", 1, 0)),
        (TORCHRUN, {}, ("torchrun", 4, 2)),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, {}, ("torchrun", 4, 2)),
        (TORCHRUN, {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1},
         ("arguments", 2, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2",
          "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, {}, ("SLURM", None, None)),
        # A shell within an allocation of one task is no step of it.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, {}, ("alone", 1, 0)),
        ({"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {},
         ("Kubernetes", None, None)),
        ({}, {"cluster_detection_method": "mpi4py"}, ("mpi4py", None, None)),
    ],
)  # fmt: skip
def test_a_world_is_found_in_arguments_and_environment(environ, arguments, expected):
    world = find_world(environ, **arguments)
    assert (world.source, world.num_processes, world.process_id) == expected


def test_a_named_method_is_given_what_was_said_and_nothing_else():
    world = find_world({}, num_processes=2, cluster_detection_method="mpi4py")
    assert world.arguments == {"num_processes": 2, "cluster_detection_method": "mpi4py"}


def test_torchruns_devices_and_its_own_port_are_respected():
    world = find_world({**TORCHRUN, "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"})
    assert world.arguments["coordinator_address"] == "node-0:29501"
    assert world.arguments["local_device_ids"] == [1]


@pytest.mark.parametrize(
    ("environ", "arguments", "missing"),
    [
        ({"MASTER_ADDR": "node-0", "RANK": "1"}, {}, "MASTER_PORT, WORLD_SIZE missing"),
        ({"WORLD_SIZE": "2"}, {}, "MASTER_ADDR, MASTER_PORT, RANK missing"),
        ({}, {"coordinator_address": "a:1"}, "num_processes, process_id missing"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, {}, "SLURM_PROCID, SLURM_LOCALID missing"),
        ({"OMPI_MCA_orte_hnp_uri": "x"}, {}, "OMPI_COMM_WORLD_SIZE"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, {}, "num_processes, process_id missing"),
    ],
)
def test_half_a_world_is_refused_with_what_is_missing(environ, arguments, missing):
    with pytest.raises(fz.HostsError, match=re.escape(missing)):
        find_world(environ, **arguments)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"RANK": "4"}, "got process 4 of 4"), ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four'")],
)
def test_a_wrong_world_is_refused(changed, said):
    with pytest.raises(fz.HostsError, match=re.escape(said)):
        find_world({**TORCHRUN, **changed})


def results(folder: Path, what: str, processes: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{what}-{p}.json").read_text()) for p in range(processes)]


@pytest.mark.slow
def test_what_only_another_process_has_differs_too():
    said = r"a point: processes differ in mask: nothing in process 0; 3 in process 1\."
    with pytest.raises(fz.HostsError, match=said):
        require_equal("a point", [{"rows": 8}, {"rows": 8, "mask": 3}])


def test_processes_that_differ_are_refused_in_every_one_by_what_differs(tmp_path):
    """And rows of one process each make a batch: all in one start, which is what costs."""
    code, shown, _ = launch(tmp_path, "agrees")
    assert code == 0, shown
    said, other = results(tmp_path, "agrees")
    assert said == other  # the same message in both
    assert said["asked"] == ["SIGTERM"]  # jax has a handler of its own, which would take its place
    assert "Address already in use" in said["port"]
    differ = "HostsError: init: processes differ in "
    assert said["seed"].startswith(differ + "seed: "), said["seed"]
    assert said["seed"].endswith("in process 1. Expected the same in every process")
    assert said["plan"].startswith(differ + "plan.clip_norm: 1.0 in process 0; 2.0 in process 1")
    assert said["model"].startswith(differ + "params/w: float32[4, 2] in process 0; float32[5, 2]")
    assert said["devices"].startswith(differ + "devices: ['0: cpu'"), said["devices"]
    assert "process 0 to 'check_same', process 1 to 'init'" in said["order"]
    assert re.match(
        r"HostsError: train_step: processes differ in the values of batch x \(a host array is the"
        r" whole global batch.*fz\.local_batch",
        said["rows as a batch"],
    )
    assert "processes differ in the values of batch by (a host" in said["shared"], said["shared"]
    number = "StateError: train_step: processes differ in opt_state/hyperparams/learning_rate: 0.5"
    assert said["rate in the state"].startswith(number), said["rate in the state"]
    assert "replan: params/w lies on 4 devices, and the new plan keeps it on 2" in said["elsewhere"]
    step = "HostsError: train_step: processes differ in what the "
    # Shapes would not tell.
    assert said["rate"].startswith(step + "optimizer computes (its learning rate"), said["rate"]
    assert said["loss function"].startswith(step + "model computes"), said["loss function"]
    assert said["derivative"].startswith(step + "model computes"), said["derivative"]
    # Its loss wants labels, which the batch has not.
    outputs = "HostsError: predict_step: processes differ in what the model computes"
    assert said["outputs"].startswith(outputs), said["outputs"]
    assert said["bridge"].startswith(differ + "the source of torch_bridge: "), said["bridge"]
    assert said["version"].startswith(differ + "the version of fzero: 0.2 in process 0; 0.1 in")
    assert "process 0: 3, process 1: 1" in said["uneven"]
    assert "differ in batch y: float32[2] for each row in process 0; float16[2]" in said["dtype"]
    assert said["mask"].startswith("BatchError: local_batch: processes differ in what is wrong")
    rows = [hosts_worker.batch(3, seed=0), hosts_worker.batch(1, seed=1)]
    whole = {name: np.concatenate([r[name] for r in rows]) for name in ("x", "y")}
    plan = fz.Plan(zero=1, data=4)
    state = fz.init(hosts_worker.model(), optax.adam(1e-2), plan)
    loss = fz.eval_step(hosts_worker.model(), plan)(state, whole)["loss"]
    # Two more rows are padding, and the sum is taken over other devices' rows.
    np.testing.assert_allclose(said["loss"], float(loss), rtol=1e-6)
    assert (said["count"], said["last"], said["over"]) == (4, 1, True)
    # Two of one device each would meet in gloo; of more, XLA runs one after the other.
    assert said["in turn"] == [True, False]
    # Process 1's directory showed no checkpoint at all, and the one of step 1 is the newest.
    assert said["numbers"] == [0, 1, 1]
    assert said["same"] == said["finite"] == "nothing"
    assert re.match(
        r"DivergenceError: check_same: params/w float32\[4, 2\] is not the same on devices that"
        r" should hold the same: [0-9a-f]{8} on .*; [0-9a-f]{8} on \S+ of process 1\.",
        said["other"],
    ), said["other"]
    assert re.match(
        r"NonFiniteError: check_finite: params/w float32\[4, 2\] has values that are not finite,"
        r" first in row 2; on \S+ of process 1$",
        said["nan"],
    ), said["nan"]
    assert re.match(
        r"NonFiniteError: check_finite: microbatch 0: the loss is not finite, while all before it"
        r" is; on \S+ of process 1, \S+ of process 1$",
        said["step"],
    ), said["step"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_state_over_processes_is_written_for_pytorch(tmp_path):
    """Each writes files in its turn, leaf by leaf; what one cannot write, all processes say."""
    code, shown, _ = launch(tmp_path, "exports")
    assert code == 0, shown
    wrote = []
    for one in results(tmp_path, "exports"):
        assert ".metadata is a file" in one["said"]
        assert "File too large" in one["said full"]
        assert re.match(
            r"CheckpointError: tb\.save: processes differ in what path ends with, or its scheme:"
            r" \.ckpt in process 0; \.pt in process 1",
            one["said other"],
        ), one["said other"]
        same, ending, failed, after = one["said store"]
        assert same == after == "nothing"
        assert "s3://.ckpt in process 0; s3://.pt in process 1" in ending
        assert "model-00003-of-00003.safetensors: disk of 1" in failed
        wrote.append(one["wrote"])
        assert one["losses"][0] == one["losses"][1]
        assert one["step"] == 1
    # Process 1 would not have ended where it was not told of the other's failure.
    assert not (tmp_path / "full").exists()
    assert [path.name for path in (tmp_path / "store" / "bucket").iterdir()] == ["run-0"]
    files = [f"model-{n:05}-of-00003.safetensors" for n in range(1, 4)]
    stack = [f"model-{n:05}-of-00003.safetensors" for n in range(1, 4)]
    assert wrote == [[*files[:2], *stack[:2]], [*files[2:], *stack[2:]]]
    assert {p.name for p in (tmp_path / "dcp").glob("*.distcp")} == {
        "__0_0.distcp", "__1_0.distcp"
    }  # fmt: skip
    import torch

    import torch_bridge as tb

    torch.manual_seed(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6)]
    expected = torch.nn.Sequential(*blocks).state_dict()
    found = tb.load(tmp_path / "stack")
    assert all(found[name].numpy().tobytes() == x.numpy().tobytes() for name, x in expected.items())
    weights = tb.load(tmp_path / "model.safetensors")
    for name in ("dcp", "hf", "store/bucket/run-0", *hosts_worker.FORMATS):
        other = tb.load(tmp_path / name)
        assert other.keys() == weights.keys(), name
        for path, value in other.items():
            np.testing.assert_array_equal(value.numpy(), weights[path].numpy(), err_msg=path)
    adapter = tb.load(tmp_path / "peft" / "adapter_model.safetensors")
    assert sorted(tuple(x.shape) for x in adapter.values()) == [(2, 6), (2, 64), (64, 2), (64, 2)]
    module = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    module.load_state_dict(weights)
    x = torch.tensor(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
    loss = torch.mean((module(x) - 1) ** 2)
    np.testing.assert_allclose(loss.item(), one["losses"][0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_in_the_middle_of_an_export_leaves_nothing_under_its_name(tmp_path, victim):
    code, shown, _ = launch(tmp_path, "dies_exporting", VICTIM=str(victim))
    assert code == 137, shown
    (sentence,) = lost(log(tmp_path, 1 - victim))
    assert re.search(rf"process {victim} of 2 .* was lost: killed.*tb\.save", sentence), sentence
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_the_example_runs_under_launch_and_under_torchrun(tmp_path):
    """The same losses, of two processes that read their own rows; a third start goes on."""
    script = Path(__file__).parents[2] / "examples" / "cluster" / "train.py"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launched = [sys.executable, "-m", "fzero.cli", "launch", "--processes", "2", "--"]
    shown = {}
    for name, command in (("launch", launched), ("torchrun", torchrun)):
        done = subprocess.run(
            [*command, script, tmp_path / name],
            env=env,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        shown[name] = re.findall(r"step \d+: loss \d+\.\d+", done.stdout)
        assert fz.checkpoint(tmp_path / name / "checkpoints").step == 20
    assert shown["launch"] == shown["torchrun"]
    assert [line.split(":")[0] for line in shown["launch"]] == ["step 10", "step 20"]


def lost(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("fzero: process")]


KILLS = [
    ("SIGKILL", 1, 137, r"was lost: killed, out of memory, or its host went down; last heard of"),
    ("SIGKILL", 0, 137, r"was lost: killed, out of memory, or its host went down; last heard of"),
    ("SIGSTOP", 1, 75, r"has said nothing for 4 s: stopped, or its host or network is down"),
    ("SIGSTOP", 0, 75, r"has said nothing for 4 s: stopped, or its host or network is down"),
    ("raise", 1, 1, r"failed at step 5, .*: ValueError: row 7 of the data is no number"),
    # A process may have a GiB more than it has; the kernel's own killer sends SIGKILL.
    ("numpy", 1, 1, r"failed at step 5, .*: MemoryError: Unable to allocate 512. GiB for"),
    ("jax", 0, 1, r"failed at step 5, .*: .*RESOURCE_EXHAUSTED: Out of memory allocating"),
]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("how", "victim", "code", "said"), KILLS)
def test_one_lost_process_ends_all_with_a_sentence_that_names_it(tmp_path, how, victim, code, said):
    found, shown, _ = launch(tmp_path, "dies", HOW=how, VICTIM=str(victim), LIMIT_S=str(LIMIT_S))
    other = log(tmp_path, 1 - victim)
    sentence = lost(other)
    assert len(sentence) == 1, other
    assert re.search(rf"process {victim} of 2 \(host \S+, pid \d+\) {said}", sentence[0]), sentence
    assert re.search(r"step [45], (after )?train_step", sentence[0])
    assert found == code, shown
    # Shown by the launcher, too; nothing is left running, and the checkpoint of step 3 is whole.
    assert f"process {victim} of 2 ended first" in shown or how == "SIGSTOP"
    assert "Traceback" not in other
    assert fz.checkpoint(tmp_path / "checkpoints").step == 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_cannot_write_its_part_ends_those_that_wait_for_it(tmp_path, victim):
    """Not after orbax's twenty minutes, and the checkpoint before is whole."""
    code, shown, seconds = launch(tmp_path, "writes", VICTIM=str(victim))
    assert code == 1, shown
    other = log(tmp_path, 1 - victim)
    (sentence,) = lost(other)
    assert re.search(
        rf"process {victim} of 2 \(host \S+, pid \d+\) failed at save: CheckpointError: save:"
        r" writing checkpoint 1 to .* failed: ",
        sentence,
    ), sentence
    assert "File too large" in log(tmp_path, victim)
    assert seconds < 600
    assert fz.checkpoint(tmp_path / "checkpoints").number == 0


def test_devices_that_one_names_go_before_torchruns():
    world = find_world({**TORCHRUN, "LOCAL_RANK": "1"}, local_device_ids=[2, 3])
    assert world.arguments["local_device_ids"] == [2, 3]
