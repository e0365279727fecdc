"""Programs for GPUs that are not here: each compiled once a session, by jax's CUDA plugin."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import optax
import pytest

import fzero as fz
from fzero.preflight.topology import has_plugin
from tests.support.gpt import Size
from tests.support.large import GPT2_XL, LLAMA_8B, LlamaSize, abstract_batch, gpt2, llama


HERE = Path(__file__).parent
TX = optax.adamw(3e-4)
# Rows that each device sees at once.
ROWS = {"gpt2": 4, "llama": 1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = 'compiling for GPUs takes jax\'s CUDA plugin: pip install "fzero[preflight]"'
    # The hook of a folder gets all items of the session, those of other folders too.
    for item in items if not has_plugin() else ():
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="package", autouse=True)
def compiled_anew() -> Iterator[None]:
    """A described GPU cannot read a cached program back, and compile times are measured."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


@dataclasses.dataclass(frozen=True)
class Case:
    """What to compile.

    Args:
        model: `gpt2` (1.5B) or `llama` (8B).
        topology: the devices.
        plan: fields of the plan.
        layers: another depth than the model's.
    """

    model: str
    topology: str
    plan: tuple[tuple[str, object], ...]
    layers: int | None = None

    @property
    def size(self) -> Size | LlamaSize:
        """The model's sizes."""
        size = GPT2_XL if self.model == "gpt2" else LLAMA_8B
        return size if self.layers is None else dataclasses.replace(size, layers=self.layers)

    def run(self) -> tuple[fz.Preflight, float]:
        """The prediction, and the CPU seconds that it took."""
        made = fz.Plan(
            **{"precision": "bf16", "clip_norm": 1.0, "remat": "layer"} | dict(self.plan)
        )
        size = self.size
        model = gpt2(size) if isinstance(size, Size) else llama(size)
        parts = (made.data or 1) * made.replica * made.microbatches
        batch = abstract_batch(size, ROWS[self.model] * parts)
        started = time.process_time()
        found = fz.preflight(model, TX, made, batch, self.topology)
        return found, time.process_time() - started


def case(model: str, topology: str, layers: int | None = None, **plan: object) -> Case:
    """A case; see `Case`."""
    return Case(model, topology, tuple(sorted(plan.items())), layers)


@pytest.fixture(scope="session")
def timed():
    """The prediction of a case, and the CPU seconds that it took."""
    known: dict[Case, tuple[fz.Preflight, float]] = {}

    def get(case: Case) -> tuple[fz.Preflight, float]:
        if case not in known:
            known[case] = case.run()
        return known[case]

    return get


@pytest.fixture(scope="session")
def compiled(timed):
    """The prediction of a case."""
    return lambda case: timed(case)[0]
