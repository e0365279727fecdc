"""Who the processes of a run are: read from arguments, or from what a scheduler left around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fzero.errors import HostsError


TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# What shows that jax.distributed would find a world by itself: any of a name's variables starts
# it, all of them make it whole.
SCHEDULERS = {
    "SLURM": (("SLURM_STEP_NODELIST",), ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS",
              "SLURM_PROCID", "SLURM_LOCALID")),
    "Open MPI": (("OMPI_MCA_orte_hnp_uri",), ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE",
                 "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")),
    "Kubernetes": (("JOB_COMPLETION_INDEX",), ("JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST")),
    "Cloud TPU": (("TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"), ()),
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Args:
        source: where that is known from: `"arguments"`, `"torchrun"`, a scheduler's name,
            `"jax.distributed"` (it was initialized before), or `"alone"`.
        num_processes: how many there are; `None` until jax's own detection has run.
        process_id: which one this is; likewise.
        arguments: what `jax.distributed.initialize` is called with.
    """

    source: str
    num_processes: int | None
    process_id: int | None
    arguments: Mapping[str, Any]


ALONE = World("alone", 1, 0, {})


def find_world(
    environ: Mapping[str, str],
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    cluster_detection_method: str | None = None,
) -> World:
    """The world that arguments, or else variables of the environment, describe.

    Args:
        environ: the environment.
        coordinator_address: and the others: as in `jax.distributed.initialize`.
        num_processes: likewise.
        process_id: likewise.
        local_device_ids: likewise.
        cluster_detection_method: likewise.

    Raises:
        HostsError: some of what makes a world is there, and some is not.
    """
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    devices = {} if local_device_ids is None else {"local_device_ids": local_device_ids}
    if cluster_detection_method is not None:
        arguments = {name: value for name, value in given.items() if value is not None}
        how = {"cluster_detection_method": cluster_detection_method}
        return World(cluster_detection_method, None, None, {**arguments, **how, **devices})
    if any(value is not None for value in given.values()):
        _require_whole("fz.join's arguments", given, "give all of them, or none")
        return _numbered("arguments", given, devices)
    if any(name in environ for name in TORCHRUN[2:]) or "MASTER_ADDR" in environ:
        return _of_torchrun(environ, devices)
    for source, (signs, needed) in SCHEDULERS.items():
        if any(name in environ for name in signs):
            have = {name: environ.get(name) for name in needed}
            _require_whole(f"{source}'s variables", have, "start all processes the same way")
            return World(source, None, None, devices)
    if int(environ.get("SLURM_NTASKS", "1")) > 1:
        have = dict.fromkeys(SCHEDULERS["SLURM"][1]) | {"SLURM_NTASKS": environ["SLURM_NTASKS"]}
        have = {name: environ.get(name) for name in have}
        _require_whole("SLURM's variables", have, "start the processes of the job with srun")
    if "JAX_COORDINATOR_ADDRESS" in environ:
        have = {"JAX_COORDINATOR_ADDRESS": "", "num_processes": None, "process_id": None}
        _require_whole("the world", have, "jax reads no variable for these: give them to fz.join")
    return ALONE


def _of_torchrun(environ: Mapping[str, str], devices: Mapping[str, Any]) -> World:
    """torchrun's world: process 0 serves jax's coordinator beside torchrun's own store."""
    have = {name: environ.get(name) for name in TORCHRUN}
    _require_whole("torchrun's variables", have, "start with torchrun or fzero launch, or set all")
    numbers = {name: _number(name, str(have[name])) for name in TORCHRUN[1:]}
    port = numbers["MASTER_PORT"]
    if "TORCHELASTIC_RUN_ID" in environ:
        port += 1 if port < 65535 else -1  # torchrun itself listens on its port
    local = environ.get("LOCAL_RANK")
    if not devices and local is not None:
        devices = {"local_device_ids": [_number("LOCAL_RANK", local)]}
    given = {
        "coordinator_address": f"{have['MASTER_ADDR']}:{port}",
        "num_processes": numbers["WORLD_SIZE"],
        "process_id": numbers["RANK"],
    }
    return _numbered("torchrun", given, devices)


def _numbered(source: str, given: Mapping[str, Any], devices: Mapping[str, Any]) -> World:
    count, process = given["num_processes"], given["process_id"]
    if count < 1 or not 0 <= process < count:
        raise HostsError(
            f"join: {source}: expected process_id from 0 to num_processes - 1, got process"
            f" {process} of {count}"
        )
    arguments = {**given, **devices, "cluster_detection_method": "deactivate"}
    return World(source, count, process, arguments)


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise HostsError(f"join: {name}={text!r}: expected a number")
    return int(text)


def _require_whole(what: str, have: Mapping[str, Any], remedy: str) -> None:
    missing = [name for name, value in have.items() if value is None]
    if missing:
        there = [name for name, value in have.items() if value is not None]
        raise HostsError(
            f"join: {what} are half set: {', '.join(there)} given, {', '.join(missing)} missing;"
            f" {remedy}"
        )
