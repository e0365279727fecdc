"""torchvision's own kernels beside their conversion: values and gradients.

    python benchmarks/detection.py [--json benchmarks/results/detection.json]

In an environment with torchvision (PyPI's is built for PyTorch with CUDA; a GPU is not needed). The
cases are those of `tests/torch_bridge/test_detection.py`, which has the operators' definitions
instead: boxes within, over the borders, outside, of no size and turned around; groups, steps,
masks; and random ones. Prints the largest difference as a share of the largest value.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision


sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "torch_bridge"))
from test_detection import Calls, arguments, both

import torch_bridge as tb
from fzero.errors import ConversionError


BAR = 1e-5
Case = tuple[str, list[torch.Tensor], tuple[Any, ...], tuple[int, ...]]


def cases() -> dict[str, Case]:
    """Operator, its tensors, its options, and which of the tensors have a gradient."""
    found: dict[str, Case] = {}
    for aligned in (True, False):
        given, options = arguments("roi_align")
        found[f"roi_align, aligned={aligned}"] = "roi_align", given, (*options, aligned), (0,)
        make = torch.Generator().manual_seed(5)
        boxes = torch.rand(64, 4, generator=make) * 40 - 4
        boxes = torch.cat([(torch.arange(64) % 2)[:, None].float(), boxes], 1)
        image = torch.randn(2, 8, 24, 32, generator=make)
        random = "roi_align", [image, boxes], (0.7, 7, 7, 2, aligned), (0,)
        found[f"roi_align, aligned={aligned}, 64 random boxes"] = random
    for use_mask in (True, False):
        given, options = arguments("deform_conv2d", use_mask)
        learned = (0, 1, 2, 3, 4) if use_mask else (0, 1, 2, 4)
        found[f"deform_conv2d, mask={use_mask}"] = "deform_conv2d", given, options, learned
    return found


def compare(case: Case) -> dict[str, float]:
    """The largest difference of the output and of each gradient, beside the largest value."""
    name, given, options, learned = case
    pairs = both(Calls(name), name, given, options, learned)
    return {
        what: float(np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), 1e-6))
        for what, (a, b) in pairs.items()
    }


def refuses_nms() -> str:
    """What a module that suppresses boxes is told: how many stay depends on the data."""
    try:
        tb.convert(Calls("nms", 0.5), torch.rand(4, 4), torch.rand(4))
    except ConversionError as error:
        return str(error).splitlines()[0]
    raise SystemExit("nms was converted")


def main() -> None:
    """Prints the table; fails if a difference is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {name: compare(case) for name, case in cases().items()}
    for name, differences in found.items():
        print(name, *(f"{what} {value:.1e}" for what, value in differences.items()), sep=", ")
    worst = max(max(differences.values()) for differences in found.values())
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    report = {"versions": versions, "bar": BAR, "differences": found, "nms": refuses_nms()}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if worst > BAR:
        sys.exit(f"off by {worst:.1e}")


if __name__ == "__main__":
    main()
