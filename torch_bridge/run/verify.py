"""Checks a written directory in plain PyTorch; run as a script that never imports jax.

    python verify.py DIRECTORY CASE.npz [FILE.py:FACTORY]

CASE.npz holds `input_ids` [batch, seq] with the `logits` that JAX computed for them, and the
validation sequences `validation` and `labels` [num_sequences, seq]. Prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


IGNORED = -100
# Sequences per forward: any number gives the same result, this one bounds the memory.
ROWS = 16


def main(directory: str, case_file: str, factory: str | None = None) -> None:
    """Loads the directory, compares, prints."""
    module = load(Path(directory), factory).float().eval()
    with np.load(case_file) as case, torch.no_grad():
        logits = logits_of(module(torch.from_numpy(case["input_ids"]).long()))
        difference = (logits - torch.from_numpy(case["logits"])).abs().max()
        loss = mean_loss(
            module,
            torch.from_numpy(case["validation"]).long(),
            torch.from_numpy(case["labels"]).long(),
        )
    result = {
        "torch_val_loss": loss,
        "logits_max_abs_diff": float(difference),
        "jax_imported": "jax" in sys.modules,
        "fzero_imported": "fzero" in sys.modules,
    }
    print(json.dumps(result))


def load(directory: Path, factory: str | None) -> torch.nn.Module:
    """The module with the written weights: by transformers, or by a factory and safetensors."""
    if factory is None:
        from transformers import AutoModelForCausalLM

        loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, dtype=torch.float32
        )
        return loaded
    from safetensors.torch import load_model

    path, _, name = factory.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    namespace = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(namespace)
    module: torch.nn.Module = getattr(namespace, name)()
    load_model(module, str(directory / "model.safetensors"))
    return module


def mean_loss(module: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Nats per predicted token; position t predicts the label at t + 1, -100 counts nothing."""
    total, count = 0.0, 0
    for start in range(0, len(tokens), ROWS):
        logits = logits_of(module(tokens[start : start + ROWS]))[:, :-1].flatten(0, 1)
        targets = labels[start : start + ROWS, 1:].flatten()
        # fp64 sum: the comparison must show the model's difference, not this sum's rounding.
        losses = torch.nn.functional.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="none"
        )
        total += float(losses.double().sum())
        count += int((targets != IGNORED).sum())
    return total / count


def logits_of(output: Any) -> Any:
    """The logits in what a forward returns."""
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple | list) else output["logits"]


if __name__ == "__main__":
    main(*sys.argv[1:])
