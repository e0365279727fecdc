"""What `fzero finetune` trains: a model, or adapters beside it, on documents in rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_bridge as tb
from torch_bridge.documents.rows import Rows, batch_rows
from torch_bridge.documents.spool import Spool
from torch_bridge.documents.tokens import IGNORED, documents_of
from torch_bridge.run import models, outputs, packing_check
from torch_bridge.run.corpus import Batch, entropy, own_rows
from torch_bridge.run.errors import CommandError
from torch_bridge.run.models import LoadedModel
from torch_bridge.run.settings import TrainSettings
from torch_bridge.run.tasks import Trained
from torch_bridge.run.tuning_settings import (
    QUANTISED,
    VALIDATION_EVERY,
    LoraSettings,
    RowSettings,
)


@dataclass(frozen=True)
class RowCorpus:
    """Rows to train on and rows to validate with; see `corpus.Source`."""

    train: Rows
    validation: Rows
    num_documents: tuple[int, int]
    byte_level: bool = False

    @cached_property
    def fingerprint(self) -> str:
        """Of all rows."""
        return self.train.fingerprint + self.validation.fingerprint

    @property
    def whole(self) -> str:
        """The same: of all rows."""
        return self.fingerprint

    @cached_property
    def unigram_entropy(self) -> float:
        """Of what is learned in validation."""
        counts = np.zeros(0, np.int64)
        for chunk in self.validation.chunks():
            own = np.bincount(chunk["labels"][chunk["labels"] != IGNORED], minlength=len(counts))
            own[: len(counts)] += counts
            counts = own
        return entropy(counts)

    def describe(self) -> str:
        """One line for the reader of a run."""
        rows, other = self.train, self.validation
        room = len(rows) * rows.length
        missing = "".join(
            f"; {count:,} too long: {word}"
            for count, word in (
                (rows.left_out + other.left_out, "left out"),
                (rows.cut + other.cut, "cut"),
            )
            if count
        )
        return (
            f"data    {self.num_documents[0]:,} documents, {rows.num_tokens:,} tokens, of which"
            f" {rows.num_learned:,} are learned, in {len(rows):,} rows"
            f" ({rows.num_tokens / room:.0%} full); validation on {self.num_documents[1]:,}"
            f" documents{missing}"
        )

    def train_batch(self, seed: int, step: int, size: int, who: tuple[int, int] = (0, 1)) -> Batch:
        """See `Rows.batch`."""
        return self.train.batch(seed, step, size, own_rows(size, who))

    def validation_batches(self, size: int, who: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """See `Rows.in_order`."""
        return self.validation.in_order(size, own_rows(size, who))

    def num_tokens(self, seed: int, step: int, size: int) -> int:
        """Without what fills rows up."""
        return int(self.train.tokens[batch_rows(len(self.train), seed, step, size)].sum())


@dataclass(frozen=True)
class Tuning:
    """All parameters, or adapters, on documents; a `tasks.Task`."""

    rows: RowSettings
    lora: LoraSettings | None

    def load(self, settings: TrainSettings) -> LoadedModel:
        """The module; frozen weights in the dtype that they are kept in."""
        base = "fp32"
        if self.lora is not None:
            own = "bf16" if settings.precision == "bf16" else "fp32"
            base = own if self.lora.base in (None, *QUANTISED) else str(self.lora.base)
        loaded = models.load(settings.model, settings.seed, base)
        if loaded.tokenizer is None:
            raise CommandError(
                f"--model {loaded.spec}: expected a tokenizer beside the model (tokenizer.json),"
                " found none"
            )
        models.check_fit(loaded, self.rows.seq)
        return loaded

    def corpus(self, loaded: LoadedModel) -> RowCorpus:
        """See `Task`."""
        own = self.rows
        if own.template is not None:
            try:
                # The tokenizer's own from here on: who loads what is written talks as was learned.
                loaded.tokenizer.chat_template = Path(own.template).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CommandError(f"--template {own.template}: cannot be read: {error}") from error

        def read(sources: tuple[str, ...]) -> Spool:
            return Spool.of(documents_of(sources, loaded.tokenizer, vocabulary=loaded.vocab_size))

        train = read(own.sources)
        if own.eval_sources:
            other = read(own.eval_sources)
        else:
            other = train[VALIDATION_EVERY - 1 :: VALIDATION_EVERY] or train[-1:]
            train = train.without(other)
        rows_of = partial(Rows.of, length=own.seq, packed=own.pack, too_long=own.too_long)
        found = RowCorpus(rows_of(train), rows_of(other), (len(train), len(other)))
        given_too = bool(own.eval_sources)
        least = "a document" if given_too else "at least two documents"
        for rows, what, flag, given in (
            (found.train, "train on", "--data", train),
            (found.validation, "validate with", "--eval-data" if given_too else "--data", other),
        ):
            if not rows.num_learned:
                count = len(given) if given_too else len(train) + len(other)
                raise CommandError(
                    f"{flag}: nothing to {what}: expected {least} with tokens to learn, got {count}"
                )
        return found

    def convert(self, loaded: LoadedModel) -> tuple[tb.Converted, Callable[..., Any]]:
        """See `Task`."""
        seq = self.rows.seq
        example: dict[str, Any] = {"input_ids": models.example_ids(seq)}
        if self.rows.pack:
            packing_check.check_packs(loaded, seq)
            dtype = packing_check.dtype_of(loaded.module)
            example["attention_mask"] = torch.zeros((2, 1, seq, seq), dtype=dtype)
            example["position_ids"] = torch.arange(seq).expand(2, -1).contiguous()
        made = tb.convert(loaded.module, **example)
        if self.lora is not None:
            own = self.lora
            if own.base in QUANTISED:
                made = tb.quantize(made, str(own.base))
            targets = own.targets if isinstance(own.targets, str) else list(own.targets)
            made = tb.lora(
                made, rank=own.rank, targets=targets, alpha=own.scale, dropout=own.dropout
            )
        return made, _packed_loss if self.rows.pack else _loss

    def write(self, folder: Path, trained: Trained) -> None:
        """The adapter as PEFT has it, or the model as transformers has it; and the tokenizer."""
        state, plan = trained.state, trained.plan
        if self.lora is not None:
            tb.save(folder, trained.converted, state, plan=plan, to="peft")
            trained.loaded.tokenizer.save_pretrained(folder)
        else:
            tb.save(folder / outputs.WEIGHTS, trained.converted, state, plan=plan)
            trained.save_around(folder)


def _packed_loss(forward: Any, batch: Any) -> Any:
    """Of documents in a row, each alone."""
    output = forward(
        input_ids=batch["ids"],
        attention_mask=tb.packed_mask(batch["segments"]),
        position_ids=batch["positions"],
    )
    return tb.causal_lm_loss(models.logits_of(output), batch["labels"])


def _loss(forward: Any, batch: Any) -> Any:
    """Of one document in a row: nothing in it sees what fills the row up, which is behind it."""
    return tb.causal_lm_loss(models.logits_of(forward(input_ids=batch["ids"])), batch["labels"])
