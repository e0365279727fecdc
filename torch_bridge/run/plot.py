"""The loss of a run as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torch_bridge.run.loop import History


# Wide enough to take the noise of single batches out of 200 steps, narrow enough to follow the
# fall.
SMOOTHING_SHARE = 0.05


def save_loss(path: Path, history: History, title: str, byte_entropy: float | None) -> None:
    """Draws training and validation loss, and the entropy of single bytes where it applies."""
    from matplotlib.figure import Figure  # half a second to import: only here

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    if history.losses:
        steps, losses = np.asarray(history.losses, dtype=np.float64).T
        axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="training, each step")
        axes.plot(
            steps, _smooth(losses), color="#2171b5", linewidth=1.8, label="training, smoothed"
        )
    steps, losses = np.asarray(history.validation, dtype=np.float64).T
    # The line only guides the eye: nothing was measured between two evaluations.
    axes.plot(steps, losses, ":", color="#d94801", linewidth=1.2)
    label = f"validation, {losses[-1]:.3f} at the end"
    axes.plot(steps, losses, "o", color="#d94801", markersize=5, label=label)
    if byte_entropy is not None:
        label = f"entropy of single bytes, {byte_entropy:.2f}"
        axes.axhline(byte_entropy, color="#636363", linestyle="--", linewidth=1.0, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A running mean: centred, with a window that grows at the steep start and stops at the end."""
    half = max(1, int(len(values) * SMOOTHING_SHARE / 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    centre = np.arange(len(values))
    before = np.minimum(half, centre)
    after = np.minimum(before, len(values) - 1 - centre)
    means: NDArray[np.float64] = (sums[centre + after + 1] - sums[centre - before]) / (
        before + after + 1
    )
    return means
