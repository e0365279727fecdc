"""What `fzero preflight` was asked, as frozen data, and the checks that need no model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import fzero as fz
from fzero.preflight.rates import default_rates
from fzero.preflight.sweep import parse_choices
from fzero.preflight.topology import parse, require_plugin
from torch_bridge.run.errors import CommandError


# Flags that are fields of the plan as they are.
_OF_PLAN = (
    "zero", "gather", "data", "replica", "pipe", "schedule", "microbatches", "remat", "reduce",
    "reduce_dtype", "gather_dtype", "precision",
)  # fmt: skip


@dataclass(frozen=True)
class PreflightSettings:
    """One `fzero preflight` as data; the fields are the flags of the command."""

    model: str
    topology: str
    zero: int
    gather: str
    data: int | None
    replica: int
    pipe: int
    schedule: str | None
    microbatches: int
    remat: str | None
    reduce: str
    reduce_dtype: str | None
    gather_dtype: str | None
    secondary: str | None
    batch: int  # sequences per step, over all devices and microbatches
    seq: int
    precision: str
    clip: float | None
    as_json: bool = False
    html: Path | None = None
    sweep: tuple[str, ...] = ()
    measure: bool = False
    rates: Path | None = None
    explain: bool = False

    def check(self) -> None:
        """Refuses what cannot work, before anything is imported or loaded.

        Raises:
            PreflightError: the topology or the sweep cannot be read, or cannot be compiled for.
            PlanError: the plan excludes itself.
            CommandError: other flags do.
        """
        topology = parse(self.topology)
        if topology.is_gpu:
            require_plugin(topology)
        choices = parse_choices(self.sweep)
        if not choices:
            plan = self.plan()
            plan.sizes(topology.num_devices)
        for flag, number, least in (("--batch", self.batch, 1), ("--seq", self.seq, 2)):
            if number < least:
                raise CommandError(f"{flag} must be at least {least}, got {number}")
        if choices and (self.measure or self.explain or self.html is not None):
            other = "--measure" if self.measure else "--explain" if self.explain else "--html"
            raise CommandError(
                f"{other} is about one plan, --sweep about many; first find the plan, then ask"
            )
        if self.html is not None and not self.html.absolute().parent.is_dir():
            raise CommandError(f"--html {self.html}: there is no directory {self.html.parent}")
        if self.html is not None and self.html.is_dir():
            raise CommandError(
                f"--html {self.html}: expected a file, this is a directory; name one in it, such as"
                f" {self.html / 'report.html'}"
            )
        self.read_rates()

    def read_rates(self) -> fz.Rates:
        """The topology's rates, with those of `--rates`.

        Raises:
            CommandError: there is no such file, or it is no JSON.
            PreflightError: it says something else than rates.
        """
        known = default_rates(parse(self.topology))
        if self.rates is None:
            return known
        try:
            given = json.loads(self.rates.read_text())
        except (OSError, ValueError) as error:
            raise CommandError(
                f"--rates {self.rates}: expected a JSON file of fz.Rates' fields: {error}"
            ) from error
        return known.updated(given, str(self.rates))

    def plan(self) -> fz.Plan:
        """The plan of the flags."""
        secondary = self.secondary
        number = secondary is not None and secondary.isdecimal()
        same = {name: getattr(self, name) for name in _OF_PLAN}
        kept = int(secondary) if secondary and number else secondary
        return fz.Plan(**same, secondary=kept, clip_norm=self.clip)
