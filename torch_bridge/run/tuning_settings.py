"""What `fzero finetune` was asked for besides a run: documents, and what is trained of a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch_bridge.documents.rows import TOO_LONG
from torch_bridge.run.errors import CommandError


# Every twentieth document validates where no file is given for it.
VALIDATION_EVERY = 20
QUANTISED = ("nf4", "nf4-double", "int8")
BASES = ("fp32", "bf16", *QUANTISED)
DEFAULT_ALPHA_PER_RANK = 2


def check_seq(seq: int) -> None:
    """Refuses sequences in which no token could be predicted."""
    if seq < 2:
        raise CommandError(
            f"--seq must be at least 2 (a token is predicted from earlier ones), got {seq}"
        )


@dataclass(frozen=True)
class RowSettings:
    """Which documents, in which rows."""

    sources: tuple[str, ...]  # absolute paths of JSONL files, and of folders of datasets
    seq: int  # tokens of a row
    eval_sources: tuple[str, ...] = ()  # empty: every twentieth document validates
    pack: bool = True
    too_long: str = "error"
    template: str | None = None  # a file with a chat template instead of the tokenizer's

    def check(self) -> None:
        """Refuses rows that hold nothing, and files that are not there."""
        check_seq(self.seq)
        if self.too_long not in TOO_LONG:
            raise CommandError(f"--too-long {self.too_long}: expected one of {', '.join(TOO_LONG)}")
        if not self.sources:
            raise CommandError("--data is missing: expected JSONL files, or folders of datasets")
        for flag, paths in (("--data", self.sources), ("--eval-data", self.eval_sources)):
            for path in paths:
                if not Path(path).exists():
                    raise CommandError(f"{flag} {path}: no such file or folder")

    def to_json(self) -> dict[str, Any]:
        """As `[data]` of a run's file has it."""
        values = asdict(self) | {n: list(getattr(self, n)) for n in ("sources", "eval_sources")}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank updates beside frozen layers; see `tb.lora`."""

    rank: int
    targets: str | tuple[str, ...] = "all-linear"
    alpha: float | None = None  # None: twice the rank
    dropout: float = 0.0
    base: str | None = None  # what frozen weights are kept in; None: as the plan computes

    @classmethod
    def of(cls, values: dict[str, Any]) -> LoraSettings | None:
        """From `[lora]` of a run's file; None without a rank."""
        if values.get("rank") is None:
            return None
        known = {name: value for name, value in values.items() if value is not None}
        if isinstance(known.get("targets"), list):
            known["targets"] = tuple(known["targets"])
        return cls(**known)

    def check(self) -> None:
        """Refuses what no adapter could have."""
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise CommandError(f"--lora {self.rank}: expected a rank of at least 1")
        if not 0 <= self.dropout < 1:
            raise CommandError(f"--dropout {self.dropout}: expected a probability below 1")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise CommandError(f"--alpha {self.alpha}: expected a positive number")
        if self.base not in (None, *BASES):
            raise CommandError(f"--base {self.base}: expected one of {', '.join(BASES)}")

    @property
    def scale(self) -> float:
        """`alpha`, or what stands for it."""
        return DEFAULT_ALPHA_PER_RANK * self.rank if self.alpha is None else self.alpha

    def to_json(self) -> dict[str, Any]:
        """As `[lora]` of a run's file has it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not isinstance(self.targets, str):
            values["targets"] = list(self.targets)
        return {name: value for name, value in values.items() if value is not None}
