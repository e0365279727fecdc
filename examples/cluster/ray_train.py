"""`train.py` under Ray Train, which starts, watches and restarts it: `python ray_train.py OUT 2`.

Takes `pip install "ray[train]"`, and RAY_TRAIN_V2_ENABLED=1 in the environment. OUT is a directory
that all workers see. Where a worker is lost, the others end by themselves, Ray starts all of them
again, and they go on from the newest checkpoint.
"""

import socket
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


HERE = Path(__file__).parent


def loop(config):
    """What each worker runs; Ray shows it its own GPUs only."""
    sys.path.insert(0, config["here"])
    import train

    import fzero as fz

    context = ray.train.get_context()
    with socket.socket() as probe:
        probe.bind(("", 0))
        own = f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"
    address = broadcast_from_rank_zero(own)
    fz.join(address, context.get_world_size(), context.get_world_rank())
    train.main(Path(config["out"]), config["num_steps"])


def main(out, workers, num_steps=20, gpu=False):
    """Starts the workers, and waits for them."""
    out = Path(out).absolute()
    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"out": str(out), "here": str(HERE), "num_steps": int(num_steps)},
        scaling_config=ScalingConfig(num_workers=int(workers), use_gpu=bool(gpu)),
        run_config=RunConfig(
            name="ray", storage_path=str(out), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
