"""Damaged files: a reader says `CheckpointError`, or reads what is there, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import format_cases as cases
import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import torch_bridge as tb
from fzero.errors import CheckpointError
from torch_bridge.formats import read
from torch_bridge.formats.write import write


EXAMPLES = 300 if os.environ.get("FZERO_NIGHTLY") else 8
DATA = Path(__file__).parents[2] / "data" / "checkpoints"


def sources(folder: Path) -> dict[str, Path]:
    """One checkpoint of each format."""
    torch.save(cases.net().state_dict(), folder / "m.pt")
    weights = tb.checkpoint(folder / "m.pt")
    trained = tb.checkpoint(DATA / "zero1")
    write(weights, folder / "m.safetensors")
    write(weights, folder / "sharded", max_shard_size=300)
    write(trained, folder / "dcp", "dcp")
    write(trained, folder / "universal", "universal")
    write(trained, folder / "m.ckpt")
    torch.save(cases.net().state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    names = ("m.pt", "old.pt", "m.safetensors", "m.ckpt", "sharded", "dcp", "universal")
    return {name: folder / name for name in names} | {
        "zero1": DATA / "zero1", "zero3": DATA / "zero3", "pipe": DATA / "pipe"
    }  # fmt: skip


FORMATS = ("m.pt", "old.pt", "m.safetensors", "m.ckpt", "sharded", "dcp", "universal", "zero1",
           "zero3", "pipe")  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return sources(tmp_path_factory.mktemp("originals"))


def read_everything(path: Path) -> None:
    found = tb.checkpoint(path)
    for tensor in found.tensors.values():
        tensor.tensor()
        tensor.tensor(tuple(slice(n // 3, n // 2 + 1) if n else slice(0, 0) for n in tensor.shape))
    if found.optimizer is not None:
        for values in (found.optimizer.exp_avg, found.optimizer.exp_avg_sq):
            for value in values.values():
                value.tensor()


def flip(data: bytearray, at: float, value: int) -> bytearray:
    data[int(at * len(data))] ^= value
    return data


def truncate(data: bytearray, at: float, value: int) -> bytearray:
    return data[: int(at * len(data))]


def insert(data: bytearray, at: float, value: int) -> bytearray:
    place = int(at * len(data))
    return data[:place] + bytes([value]) * value + data[place:]


def overwrite(data: bytearray, at: float, value: int) -> bytearray:
    """Eight bytes that a size or an offset may be made of."""
    place = int(at * len(data))
    data[place : place + 8] = bytes([value]) * len(data[place : place + 8])
    return data


@pytest.mark.parametrize("name", FORMATS)
@hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
@hypothesis.given(
    damage=st.sampled_from((flip, flip, truncate, insert, overwrite)),
    which=st.floats(0, 1, exclude_max=True),
    # Headers stand at the beginning, directories at the end.
    at=st.one_of(
        st.floats(0, 1, exclude_max=True), st.floats(0, 0.15), st.floats(0.85, 1, exclude_max=True)
    ),
    value=st.integers(1, 255),
)
def test_damage_is_found_or_harmless(
    originals: dict[str, Path],
    name: str,
    damage: Callable[[bytearray, float, int], bytearray],
    which: float,
    at: float,
    value: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / originals[name].name
        if originals[name].is_dir():
            shutil.copytree(originals[name], target)
            files = sorted(p for p in target.rglob("*") if p.is_file() and p.stat().st_size)
            files = [p for p in files if p.name != "want.pt"]
        else:
            shutil.copy(originals[name], target)
            files = [target]
        file = files[int(which * len(files))]
        file.write_bytes(damage(bytearray(file.read_bytes()), at, value))
        with contextlib.suppress(CheckpointError):
            read_everything(target)


def test_what_no_reader_expected_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> None:
        raise KeyError("storage")

    monkeypatch.setattr(read, "read_file", fails)
    (tmp_path / "a.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: damaged: KeyError: 'storage'"):
        tb.checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_undamaged_files_are_read(originals: dict[str, Path], name: str) -> None:
    read_everything(originals[name])


@pytest.mark.parametrize("name", ["sharded", "dcp", "zero1", "zero3"])
def test_missing_files_are_found(originals: dict[str, Path], name: str, tmp_path: Path) -> None:
    files = [p.relative_to(originals[name]) for p in originals[name].rglob("*")
             if p.suffix in (".pt", ".distcp", ".safetensors") and p.name != "want.pt"]  # fmt: skip
    for number, relative in enumerate(files):
        target = tmp_path / str(number)
        shutil.copytree(originals[name], target)
        (target / relative).unlink()
        with pytest.raises(CheckpointError):
            read_everything(target)
