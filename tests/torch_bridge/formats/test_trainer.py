"""Lightning's own `Trainer` reads what is written here, and writes what is read here."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import format_cases as cases
import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import fzero as fz
import torch_bridge as tb


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PLAN = fz.Plan(zero=3, data=2, min_shard_bytes=0)


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: optax trains, and leaves promotion to JAX."""


class Lit(cases.Net, pl.LightningModule):  # type: ignore[misc, unused-ignore]
    """The network of these tests as a module of Lightning, with the losses that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.batches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.mean((self(batch["x"]) - batch["y"]) ** 2)
        self.losses.append(float(loss.detach()))
        self.batches.append(self.trainer.fit_loop.total_batch_idx)
        return loss

    def configure_optimizers(self) -> Any:
        return cases.adamw(self)


def lit(seed: int) -> Lit:
    torch.manual_seed(seed)
    return Lit()


def fit(module: Lit, batches: Any, max_steps: int, ckpt_path: Path | None = None) -> pl.Trainer:
    rows = [{k: torch.from_numpy(v) for k, v in batch.items()} for batch in batches]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=max_steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def test_a_training_goes_to_the_trainer_and_back(tmp_path: Path) -> None:
    data = list(itertools.islice(cases.batches(), 21))
    converted = tb.convert(cases.net(9), torch.zeros(4, cases.FEATURES))
    model, tx = converted.model(cases.mean_square), cases.optax_adamw()
    step = fz.train_step(model, tx, PLAN)

    def here(state: Any, batches: Any) -> tuple[Any, list[float]]:
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return state, losses

    state, _ = here(fz.init(model, tx, PLAN), data[:7])
    hyper = {"lr": cases.LR, "betas": cases.BETAS, "eps": cases.EPS, "weight_decay": cases.DECAY}
    tb.save(tmp_path / "here.ckpt", converted, state, hyper=hyper)
    state, wanted = here(state, data[7:17])

    there = lit(4)
    trainer = fit(there, data[7:17], 17, tmp_path / "here.ckpt")
    np.testing.assert_allclose(there.losses, wanted, rtol=1e-5)  # 10 steps, not 17
    assert there.batches == list(range(7, 17))
    assert trainer.global_step == 17
    trainer.save_checkpoint(tmp_path / "there.ckpt")

    found = tb.checkpoint(tmp_path / "there.ckpt")
    assert found.unread is None
    assert (found.format, found.extra["global_step"]) == ("PyTorch Lightning", 17)
    back = tb.restore(tmp_path / "there.ckpt", converted, tx, PLAN)
    assert int(back.step) == 17
    _, wanted = here(state, data[17:])
    _, losses = here(back, data[17:])
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_of_two_optimizers_none_is_taken_for_that_of_all(tmp_path: Path) -> None:
    """As a module with a generator and a critic has them."""
    module = torch.nn.Linear(2, 1)
    state = torch.optim.Adam(module.parameters()).state_dict()
    content = {"state_dict": module.state_dict(), "optimizer_states": [state, state]}
    torch.save({**content, "pytorch-lightning_version": "2.5.0"}, tmp_path / "gan.ckpt")
    found = tb.checkpoint(tmp_path / "gan.ckpt")
    assert found.optimizer is None
    assert found.unread == "gan.ckpt: expected the state of one optimizer, got 2"
    assert found.extra["optimizers"] == 2
