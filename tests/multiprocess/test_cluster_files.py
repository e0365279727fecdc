"""What starts fzero on clusters: parsed, and held against what it starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from fzero.hosts.world import find_world
from torch_bridge.cli.train import app


FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
# sbatch's own; --signal's form is [B:]NAME@SECONDS.
SBATCH = {"nodes", "ntasks-per-node", "gpus-per-node", "time", "requeue", "signal"}


def flags_of_train() -> set[str]:
    command = typer.main.get_command(app)
    return {option for param in command.params for option in param.opts}


def flags(command: str) -> set[str]:
    return set(re.findall(r"(?<!\S)--[a-z][a-z-]*", command))


@pytest.mark.parametrize("name", ["slurm.sh", "torchrun.sh"])
def test_scripts_are_bash(name):
    environ = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        ["bash", "-n", FOLDER / name], capture_output=True, text=True, env=environ
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_asks_for_what_sbatch_has_and_fzero_takes():
    text = (FOLDER / "slurm.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert set(asked) == SBATCH
    assert len(asked) == text.count("\n#SBATCH")
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]  # a process for each GPU
    assert re.fullmatch(r"TERM@\d+", asked["signal"])
    command = text.replace("\\\n", "").rpartition("fzero train")[2]
    assert flags(command)
    assert flags(command) | {"--resume"} <= flags_of_train()
    # What srun sets in every process is a world.
    world = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_NTASKS": "16",
             "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_NUM_NODES": "2"}  # fmt: skip
    assert find_world(world).source == "SLURM"


def test_torchrun_takes_the_scripts_flags_and_its_variables_are_a_world():
    from torch.distributed.run import get_args_parser

    text = (FOLDER / "torchrun.sh").read_text().replace("\\\n", "")
    line = next(line for line in text.splitlines() if line.startswith("exec torchrun"))
    filled = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", line).replace('"$@"', "train.py OUT")
    found = get_args_parser().parse_args(shlex.split(filled)[2:])
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("1", "8", 3)
    assert (found.training_script, found.training_script_args) == ("train.py", ["OUT"])


def test_the_jobset_gives_every_pod_a_world_and_a_command_that_fzero_takes():
    job = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    pods = spec["parallelism"]
    assert (spec["completions"], spec["completionMode"]) == (pods, "Indexed")
    assert spec["backoffLimit"] == 0  # one lost pod ends the job; the JobSet starts all again
    (container,) = spec["template"]["spec"]["containers"]
    environ = {one["name"]: one.get("value", "1") for one in container["env"]}
    # JobSet's name of the first pod: JOBSET-JOB-REPLICA-POD.JOBSET.
    name, part = job["metadata"]["name"], replicated["name"]
    assert environ["MASTER_ADDR"] == f"{name}-{part}-0-0.{name}"
    world = find_world(environ)
    assert (world.source, world.num_processes, world.process_id) == ("torchrun", pods, 1)
    rank = next(one for one in container["env"] if one["name"] == "RANK")
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert flags(container["command"][-1]) <= flags_of_train()
    assert subprocess.run(["bash", "-n", "-c", container["command"][-1]]).returncode == 0
