"""Writes small_losses.json beside itself: what plain PyTorch makes of the `small` run.

python tests/data/peers/make_small_losses.py [steps]      (20 s to 6 min, as busy as the CPU is)

`float32` is the reference of tests/failures/test_against_pytorch.py. `float64` shows how far
PyTorch's own rounding takes it from the exact result.
"""

import json
import sys
from pathlib import Path

import torch


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "failures"))

from peers_small import STEPS, sha256, torch_losses  # noqa: E402


def main(steps: int = STEPS) -> None:
    torch.set_num_threads(2)
    losses = {}
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        losses[str(dtype).removeprefix("torch.")] = torch_losses(steps).tolist()
    made = {"torch": torch.__version__, "threads": 2, "sha256": sha256(), "losses": losses}
    (HERE / "small_losses.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
