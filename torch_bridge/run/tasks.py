"""What a run trains, on what, and what it leaves: `fzero train`'s, and `fzero finetune`'s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fzero as fz
import torch_bridge as tb
from torch_bridge.run import data, models, outputs
from torch_bridge.run.corpus import Source
from torch_bridge.run.models import LoadedModel
from torch_bridge.run.settings import DataSettings, TrainSettings


class Task(Protocol):
    """The parts of a run in which commands differ."""

    def load(self, settings: TrainSettings) -> LoadedModel:
        """The module in PyTorch."""

    def corpus(self, loaded: LoadedModel) -> Source:
        """What it is trained on."""

    def convert(self, loaded: LoadedModel) -> tuple[tb.Converted, Callable[..., Any]]:
        """The module in JAX and its loss."""

    def write(self, folder: Path, trained: Trained) -> None:
        """What other programs load, into an empty folder."""


@dataclass(frozen=True)
class Trained:
    """What there is to write after a run."""

    loaded: LoadedModel
    converted: tb.Converted
    state: fz.TrainState
    plan: fz.Plan
    record: Callable[..., outputs.RunRecord]  # all of it but `data`

    def save_around(self, folder: Path) -> None:
        """The configuration of whole weights, and the tokenizer."""
        loaded = self.loaded
        if loaded.config is not None:
            loaded.config.architectures = [type(loaded.module).__name__]
            # Of what is saved, not of the files it came from: transformers loads in this dtype.
            loaded.config.dtype = next(loaded.module.parameters()).dtype
            loaded.save_config(folder)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder)


class Pretraining:
    """All parameters, on the text of `fzero train`."""

    def __init__(self, text: DataSettings) -> None:
        self._text = text

    def load(self, settings: TrainSettings) -> LoadedModel:
        """See `Task`."""
        return models.load(settings.model, settings.seed)

    def corpus(self, loaded: LoadedModel) -> data.Corpus:
        """See `Task`."""
        models.check_fit(loaded, self._text.seq)
        return data.load(self._text, loaded.tokenizer)

    def convert(self, loaded: LoadedModel) -> tuple[tb.Converted, Callable[..., Any]]:
        """See `Task`."""
        made = tb.convert(loaded.module, models.example_ids(self._text.seq))
        return made, models.next_token_loss

    def write(self, folder: Path, trained: Trained) -> None:
        """Weights, configuration, tokenizer and the record for `fzero eval`."""
        tb.save(folder / outputs.WEIGHTS, trained.converted, trained.state, plan=trained.plan)
        trained.save_around(folder)
        outputs.write_json(folder / outputs.RECORD, trained.record(data=self._text).to_json())
