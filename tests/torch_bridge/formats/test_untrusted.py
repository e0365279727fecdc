"""Files from strangers, and other threads: nothing is run, advised or taken from them."""

from __future__ import annotations

import argparse
import os
import pickle
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_bridge as tb
from fzero.errors import CheckpointError


class Stranger:
    def __reduce__(self) -> object:
        return (os.getcwd, ())


@pytest.mark.parametrize("zipped", [True, False])
def test_an_error_never_advises_to_run_the_file(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(2), "x": Stranger()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError) as caught:
        tb.checkpoint(path)
    error: BaseException | None = caught.value
    while error is not None:  # tracebacks show causes, too
        for advice in ("weights_only", "safe_globals", "trust"):
            assert advice not in str(error)
        error = error.__cause__


def test_arguments_and_numpys_numbers_beside_the_weights_are_passed_over(tmp_path: Path) -> None:
    beside = {"args": argparse.Namespace(out=tmp_path), "best": np.float64(0.5), "all": np.ones(3)}
    for zipped in (True, False):
        torch.save(
            {"model": {"w": torch.ones(2)}, **beside},
            tmp_path / "m.pt",
            _use_new_zipfile_serialization=zipped,
        )
        found = tb.checkpoint(tmp_path / "m.pt", "model")
        assert list(found.tensors) == ["w"]
    torch.save({"w": np.ones(2)}, tmp_path / "numpy.pt")
    with pytest.raises(CheckpointError, match="expected only tensors by name"):
        tb.checkpoint(tmp_path / "numpy.pt")


def test_an_index_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.write(pickle.dumps({}))
        file.truncate(129 * 2**20)
    with pytest.raises(CheckpointError, match="are not read"):
        tb.checkpoint(tmp_path)


def test_another_thread_trains_while_a_module_is_exported() -> None:
    """What is put in the place of torch's functions is seen by the exporting thread only."""
    found: list[float] = []

    def train() -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda g: g * 3)
        y.sum().backward()
        assert x.grad is not None
        found.append(float(x.grad[0]))

    class Meanwhile(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            return x + 1

    tb.convert(Meanwhile(), torch.ones(2, 3), train=False)
    assert set(found) == {6.0}


def test_a_conversion_leaves_pytorchs_fast_attention_on() -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    tb.convert(torch.nn.Linear(3, 2), torch.ones(2, 3), train=False)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_small_file_that_becomes_a_large_one_is_not_read(tmp_path: Path) -> None:
    """Of brackets alone: 65 MiB of them are 64 KiB in the file, and five GiB as objects."""
    with zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m/data.pkl", b"(" * (65 * 2**20))
        file.writestr("m/version", "3")
    with pytest.raises(CheckpointError, match=r"m\.pt: has 68,157,440 bytes beside its tensors"):
        tb.checkpoint(tmp_path / "m.pt")


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"weights", "is no file of")])
def test_what_torch_never_wrote_is_told(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"m.pt: {said}"):
        tb.checkpoint(tmp_path / "m.pt")
