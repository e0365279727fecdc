"""Weight files: exact, atomic, and never a reason to run somebody's code."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError


X = torch.ones(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.low = nn.Parameter(torch.randn(3).bfloat16())
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x))) + self.low.sum()


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.fixture(scope="module")
def converted(net: Net) -> tb.Converted:
    return tb.convert(net, X)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.bin"])
def test_files_round_trip_exactly(
    net: Net, converted: tb.Converted, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    tb.save(path, converted, converted.params)
    loaded = tb.load(path)
    assert set(loaded) == set(net.state_dict())
    for key, want in net.state_dict().items():
        assert loaded[key].dtype == want.dtype
        assert torch.equal(loaded[key], want), key
    assert loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()
    params, buffers = tb.load_state_dict(converted, loaded)
    for key, value in {**params, **buffers}.items():
        want = {**converted.params, **converted.buffers}[key]
        assert value.dtype == want.dtype
        np.testing.assert_array_equal(value, want)
    fresh = Net()
    fresh.load_state_dict(loaded, strict=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_failed_save_leaves_the_old_file(
    converted: tb.Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.pt"
    tb.save(path, converted, converted.params)
    before = path.read_bytes()

    def torn(tensors: Any, target: Any) -> None:
        target.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        tb.save(path, converted, converted.params)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]


@pytest.mark.parametrize("name", ["m.pt", "m.ckpt", "m.safetensors", "universal"])
def test_a_full_disk_is_an_error_that_names_the_file(
    converted: tb.Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not the end of the process: what is written through a map has its room on the disk before."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state: Any = fz.init(converted.model(lambda f, b: f(b["x"]).sum()), None, fz.Plan(data=1))
    monkeypatch.setattr(os, "fsync" if name == "m.safetensors" else "posix_fallocate", full)
    path = tmp_path / name
    with pytest.raises(OSError, match=rf"No space left .*was not written.*{path}"):
        tb.save(path, converted, state, to="universal" if name == "universal" else None)
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_permissions_of_the_umask_which_stays(
    converted: tb.Converted, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        tb.save(tmp_path / "m.pt", converted, converted.params)
    finally:
        found = os.umask(before)
    assert found == 0o027
    assert (tmp_path / "m.pt").stat().st_mode & 0o777 == 0o640


def test_folders_above_a_file_are_made(converted: tb.Converted, tmp_path: Path) -> None:
    """A training is not lost for want of a folder."""
    path = tmp_path / "runs" / "one" / "m.safetensors"
    tb.save(path, converted, converted.params)
    assert set(tb.load(path)) >= {"a.weight", "a.bias"}
    with pytest.raises(CheckpointError, match=r"folders above it; \S+m.safetensors is a file"):
        tb.save(path / "below" / "m.pt", converted, converted.params)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_file_that_would_run_code_is_refused(tmp_path: Path, writer: str) -> None:
    path, trap = tmp_path / "m.pt", tmp_path / "ran"
    content = {"weight": torch.ones(2), "x": Malicious(trap)}
    if writer == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="unpickling of code are refused"):
        tb.load(path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Malicious(trap)))  # the trap itself does work
    assert trap.exists()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("m.safetensors", b"\xff" * 64, "not a readable safetensors file"),
        ("m.safetensors", b"", "not a readable safetensors file"),
        ("m.pt", b"nonsense", "is no file of torch.save"),
        ("m.pt", b"\x80\x02nonsense", "cannot be read as plain tensors"),
        ("m.onnx", b"", "unknown suffix"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        tb.load(tmp_path / name)


def test_nested_and_foreign_contents_are_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(1)}, "epoch": 3}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"say which with key='state_dict'"):
        tb.load(tmp_path / "m.pt")
    torch.save([1, 2], tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="expected a state_dict, got list"):
        tb.load(tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="no such file"):
        tb.load(tmp_path / "none.pt")


def test_everything_that_does_not_fit_is_listed_at_once(net: Net, converted: tb.Converted) -> None:
    bad = {k: v.clone() for k, v in net.state_dict().items()}
    del bad["a.bias"]
    bad["other"] = torch.ones(1)
    bad["b.bias"] = torch.ones(5)
    bad["low"] = bad["low"].float()
    bad["b.weight"] += 1
    with pytest.raises(CheckpointError) as caught:
        tb.load_state_dict(converted, bad)
    message = str(caught.value)
    assert "in 5 place(s)" in message
    for part in (
        "unexpected: `other`",
        "missing: `a.bias`",
        "shape: `b.bias` is (5,), expected (4,)",
        "dtype: `low` is torch.float32, expected torch.bfloat16",
        "tied: `a.weight` and `b.weight` are one weight but differ",
    ):
        assert part in message
    assert message.endswith("accepts missing and unexpected names.\nstrict=False casts dtypes.")
    assert "resize_token_embeddings(n)" in message
    assert "ignore_mismatched_sizes=True" in message


def test_the_count_of_batches_may_be_missing_as_in_pytorch(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module(X)
    older = {n: v for n, v in module.state_dict().items() if n != "1.num_batches_tracked"}
    torch.save(older, tmp_path / "older.pt")
    assert not module.load_state_dict(dict(older)).missing_keys
    converted = tb.convert(module, X)
    state = tb.restore(tmp_path / "older.pt", converted, None, fz.Plan(data=1))
    assert int(state.buffers["1.num_batches_tracked"]) == int(module[1].num_batches_tracked) == 1
    del older["1.running_mean"]
    with pytest.raises(CheckpointError, match=r"missing: `1.running_mean`\n *strict"):
        tb.load_state_dict(converted, older)


def test_a_file_of_nothing_and_imaginary_parts_are_not_taken(
    net: Net, converted: tb.Converted, tmp_path: Path
) -> None:
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(CheckpointError, match=r"none of its names \(there are none\)"):
        tb.restore(tmp_path / "empty.pt", converted, None, fz.Plan(data=1), strict=False)
    turned = {**net.state_dict(), "b.bias": torch.full((4,), 1j)}
    torch.save(turned, tmp_path / "complex.pt")
    with pytest.raises(CheckpointError, match=r"`b.bias` is no torch.float32: its imaginary"):
        tb.restore(tmp_path / "complex.pt", converted, None, fz.Plan(data=1), cast=True)


def test_what_is_advised_helps(net: Net, converted: tb.Converted, tmp_path: Path) -> None:
    halves = {name: value.half() for name, value in net.state_dict().items()}
    torch.save({f"net.{name}": value for name, value in halves.items()}, tmp_path / "named.pt")
    with pytest.raises(CheckpointError, match=r"none of its names, such as `net\.low`.* as `low`"):
        tb.restore(tmp_path / "named.pt", converted, None, fz.Plan(data=1), strict=False)
    torch.save(halves, tmp_path / "halves.pt")
    with pytest.raises(CheckpointError, match=r"is torch.float16, expected .*\ncast=True casts"):
        tb.restore(tmp_path / "halves.pt", converted, None, fz.Plan(data=1), strict=False)
    tb.restore(tmp_path / "halves.pt", converted, None, fz.Plan(data=1), cast=True)


def test_loose_loading_fills_in_and_casts_but_not_shapes(net: Net, converted: tb.Converted) -> None:
    part = {"a.bias": torch.arange(4), "other": torch.ones(1)}
    with pytest.warns(UserWarning, match=r"not in the file.*; in the file, .*: 1 \(`other`\)\."):
        params, _ = tb.load_state_dict(converted, part, strict=False)
    np.testing.assert_array_equal(params["a.bias"], np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(params["b.bias"], converted.params["b.bias"])
    with pytest.raises(CheckpointError, match=r"shape: `a.bias`"):
        tb.load_state_dict(converted, {"a.bias": torch.ones(9)}, strict=False)
    many = {**net.state_dict(), "norm.num_batches_tracked": torch.tensor(2**40)}
    with pytest.raises(CheckpointError, match="do not fit into int32"):
        tb.load_state_dict(converted, many, strict=False)


def test_what_a_file_does_not_set_is_told(net: Net, converted: tb.Converted) -> None:
    whole = net.state_dict()
    tb.load_state_dict(converted, whole, strict=False)  # without a word
    del whole["a.bias"], whole["norm.num_batches_tracked"]  # older files have no such count
    told = r"^strict=False: not in the file, and kept as they were: 1 \(`a\.bias`\)\.$"
    with pytest.warns(UserWarning, match=told):
        tb.load_state_dict(converted, whole, strict=False)
    within = {f"net.{name}": value for name, value in whole.items()}
    told = r"not used: 8 \(.* and 2 more\)\. The file's names begin .* prefix='net\.'\.$"
    with pytest.warns(UserWarning, match=told):
        tb.load_state_dict(converted, {**within, "a.bias": torch.ones(4)}, strict=False)


def test_averages_of_a_module_are_read(net: Net, converted: tb.Converted) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net).state_dict()
    assert "n_averaged" in averaged
    params, _ = tb.load_state_dict(converted, averaged)
    np.testing.assert_array_equal(params["a.bias"], converted.params["a.bias"])
    with pytest.raises(CheckpointError, match="unexpected: `n_averaged`"):
        tb.load_state_dict(converted, {**net.state_dict(), "n_averaged": torch.tensor(1)})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.qweight", "GPTQ or AWQ"),
        ("qzeros", "GPTQ or AWQ"),
        ("a.weight.absmax", "bitsandbytes, in 4 bits"),
        ("a.SCB", "bitsandbytes, in 8 bits"),
        ("a.weight_scale_inv", "scales, in 8 bits"),
        ("a.gate_up_proj_blocks", "MXFP4"),
    ],
)
def test_weights_that_others_quantised_are_refused_also_when_not_strict(
    net: Net, name: str, kind: str
) -> None:
    converted = tb.convert(net, X, train=False)
    tensors = {**net.state_dict(), name: torch.zeros(4)}
    with pytest.raises(CheckpointError, match=rf"(?s)`{name}`.*{kind}.*dequantize"):
        tb.load_state_dict(converted, tensors, strict=False)
