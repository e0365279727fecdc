"""Weights: safetensors files, shards, Hugging Face directories and torch files, both ways."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import format_cases as cases
import jax
import numpy as np
import optax
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError
from fzero.tree import named_leaves
from torch_bridge.formats.content import Checkpoint
from torch_bridge.formats.staging import staged_directory
from torch_bridge.formats.turns import Turns
from torch_bridge.formats.write import write
from torch_bridge.module.lazy_tensor import LazyTensor, in_memory


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: optax trains, and leaves promotion to JAX."""


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
PLANS = {
    "zero3": fz.Plan(zero=3, min_shard_bytes=0),
    "zero0": fz.Plan(zero=0),
    "zero2 bf16": fz.Plan(zero=2, min_shard_bytes=0, precision="bf16"),
}


def every_dtype() -> dict[str, torch.Tensor]:
    """Random bits in every dtype, and shapes that are easily forgotten."""
    random = np.random.default_rng(0)
    found = {}
    for dtype in DTYPES:
        high = 2 if dtype is torch.bool else 256
        raw = torch.from_numpy(random.integers(0, high, 15 * dtype.itemsize, np.uint8))
        found[str(dtype)] = raw.view(dtype).reshape(3, 5)
    return {
        **found,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "é/\"'": torch.ones(1),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and bits(one) == bits(two)


def content(tensors: dict[str, torch.Tensor], ties: dict[str, str] | None = None) -> Checkpoint:
    return Checkpoint(
        "", "", {n: in_memory(n, t) for n, t in tensors.items()}, ties=ties or {}
    )  # fmt: skip


@pytest.mark.parametrize("target", ["m.safetensors", "m.pt", "folder", "sharded"])
def test_every_dtype_goes_both_ways_bit_by_bit(tmp_path: Path, target: str) -> None:
    tensors = every_dtype()
    size = 200 if target == "sharded" else "1GB"
    write(content(tensors, {"again": "scalar"}), tmp_path / target, max_shard_size=size)
    files = sorted(p.name for p in tmp_path.rglob("*") if p.is_file())
    assert len(files) == {"sharded": 7}.get(target, 1), files
    found = tb.checkpoint(tmp_path / target)
    assert set(found.tensors) == set(tensors)
    assert found.ties == {"again": "scalar"}
    loaded = tb.load(tmp_path / target)
    assert loaded["again"].data_ptr() == loaded["scalar"].data_ptr()
    for name, want in tensors.items():
        assert same(loaded[name], want), name
        lazy = found.tensors[name]
        assert (lazy.torch_dtype, lazy.shape) == (want.dtype, tuple(want.shape))
        if want.ndim == 2 and want.numel():
            piece = (slice(1, 3), slice(2, 4))
            assert same(lazy.tensor(piece), want[1:3, 2:4]), name
            assert lazy.tensor((slice(1, 1), slice(0, 5))).shape == (0, 5)


def test_conjugates_that_torch_computes_later_are_written_as_values(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    write(content({"c": value, "n": value.imag}), tmp_path / "m.safetensors")
    found = tb.load(tmp_path / "m.safetensors")
    assert found["c"].tolist() == [1 - 2j, 3 + 4j]
    assert found["n"].tolist() == [-2, 4]


def test_files_are_those_that_the_libraries_write(tmp_path: Path) -> None:
    tensors = every_dtype()
    write(content(tensors), tmp_path / "own.safetensors")
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    own = (tmp_path / "own.safetensors").read_bytes()
    assert own == (tmp_path / "library.safetensors").read_bytes()
    write(content(tensors, {"tied": "scalar"}), tmp_path / "own.pt")
    loaded = torch.load(tmp_path / "own.pt", weights_only=True)
    assert all(same(loaded[name], want) for name, want in tensors.items())
    assert loaded["tied"].data_ptr() == loaded["scalar"].data_ptr()
    with zipfile.ZipFile(tmp_path / "own.pt") as archive:
        assert archive.testzip() is None  # checksums of what was filled in afterwards


def test_torch_files_without_a_zip_are_read(tmp_path: Path) -> None:
    square = torch.randn(3, 3)
    tensors = {"w": torch.randn(3, 4), "b": torch.arange(3), "one": square, "turned": square.T}
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    loaded = tb.load(tmp_path / "old.pt")
    assert all(same(loaded[name], want) for name, want in tensors.items())


@pytest.fixture(scope="module")
def module() -> cases.Net:
    return cases.net()


@pytest.fixture(scope="module")
def converted(module: cases.Net) -> tb.Converted:
    return tb.convert(cases.net(seed=8), torch.zeros(4, cases.FEATURES))


@pytest.fixture(scope="module")
def saved(module: cases.Net, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with shards of 300 bytes."""
    folder = tmp_path_factory.mktemp("saved") / "hf"
    given = tb.convert(module, torch.zeros(4, cases.FEATURES))
    tb.save(folder, given, given.params, max_shard_size=300)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("plan", PLANS)
def test_weights_go_straight_into_their_sharding(
    module: cases.Net, converted: tb.Converted, saved: Path, plan: str
) -> None:
    tx = cases.optax_adamw()
    state = tb.restore(saved, converted, tx, PLANS[plan])
    model = converted.model(cases.mean_square)
    wanted = fz.init(model, tx, PLANS[plan])
    for (path, have), (_, want) in zip(named_leaves(state), named_leaves(wanted), strict=True):
        assert have.shape == want.shape, path
        assert have.dtype == want.dtype, path
        assert have.sharding == want.sharding, path
    back = tb.state_dict(converted, state)
    for name, want in module.state_dict().items():
        assert same(back[name], want), name
    assert int(state.step) == 0
    fz.train_step(model, tx, PLANS[plan])(state, next(cases.batches()))


def test_a_pipeline_reads_its_own_layers(tmp_path: Path) -> None:
    def chain() -> torch.nn.Sequential:
        return torch.nn.Sequential(*[torch.nn.Linear(5, 5) for _ in range(4)])

    module = chain()
    torch.save(module.state_dict(), tmp_path / "m.pt")
    converted = tb.sequential(chain(), torch.zeros(4, 5), loss=lambda y, batch: (y**2).mean())
    plan = fz.Plan(pipe=2, data=4, zero=3, microbatches=2, min_shard_bytes=0)
    state = tb.restore(tmp_path / "m.pt", converted, None, plan)
    assert len(state.params["0"]["weight"].sharding.device_set) == 4
    back = tb.state_dict(converted, state)
    assert all(same(back[name], want) for name, want in module.state_dict().items())


def test_moments_of_layers_that_are_spread_over_ranks_are_read(tmp_path: Path) -> None:
    """Adam's moments go into the rows of a stack, which a pipeline has on several ranks."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    converted = tb.convert(Net(), torch.zeros(4, 4))
    assert converted.names.stacked, converted.blocks
    tx, one = optax.adam(1e-2), fz.Plan(zero=0, data=1)
    alone = jax.devices()[:1]
    model = converted.model(lambda forward, batch: (forward(batch) ** 2).mean())
    state = fz.init(model, tx, one, devices=alone)
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    state, _ = fz.train_step(model, tx, one, devices=alone)(state, x)
    tb.save(tmp_path / "dcp", converted, state, to="dcp")
    plan = fz.Plan(pipe=2, data=4, zero=1, microbatches=2, min_shard_bytes=0)
    read = tb.restore(tmp_path / "dcp", converted, tx, plan)
    back = fz.replan(read, model, tx, plan, one, devices=alone)
    wanted, found = ((one.params, one.opt_state, one.step) for one in (state, back))
    assert int(back.step) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def test_each_device_reads_its_rows_and_nothing_else(
    converted: tb.Converted, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[str, list[tuple[int, ...]]] = {}
    real = LazyTensor.tensor

    def counting(self: LazyTensor, index: Any = None) -> torch.Tensor:
        found = real(self, index)
        read.setdefault(self.name, []).append(tuple(found.shape))
        return found

    monkeypatch.setattr(LazyTensor, "tensor", counting)
    tb.restore(saved, converted, None, PLANS["zero3"])
    # 13 rows over 8 devices: padded to 16, two each, the seventh has one, the last none.
    assert read["inner.weight"] == [(2, 5)] * 6 + [(1, 5)]
    assert read["scale"] == [(2,)] * 6 + [(1,)]


def test_saving_holds_one_tensor_at_a_time(
    converted: tb.Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor is read when the one before has been written, in every format."""
    alive: list[Any] = []
    real = LazyTensor.tensor

    def watched(self: LazyTensor, index: Any = None) -> torch.Tensor:
        import weakref

        found = real(self, index)
        assert sum(other() is not None for other in alive) <= 1, self.name
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(LazyTensor, "tensor", watched)
    for target in ("m.safetensors", "m.pt", "hf"):
        alive.clear()
        tb.save(tmp_path / target, converted, converted.params, max_shard_size=300)
        assert len(alive) == len(converted.layout.leaves)


def test_a_directory_keeps_its_other_files_and_loses_old_weights(
    converted: tb.Converted, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    tb.save(folder, converted, converted.params, max_shard_size=300)
    (folder / "config.json").write_text("{}")
    tb.save(folder, converted, converted.params)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_dtypes_and_names_are_taken_over_only_on_demand(
    module: cases.Net, converted: tb.Converted, tmp_path: Path
) -> None:
    low = {"net." + n: v.bfloat16() if v.is_floating_point() else v
           for n, v in module.state_dict().items()}  # fmt: skip
    torch.save({**low, "head.bias": torch.ones(3)}, tmp_path / "m.pt")
    plan = PLANS["zero0"]
    with pytest.raises(CheckpointError, match=r"unexpected: `net\.inner\.weight`") as refused:
        tb.restore(tmp_path / "m.pt", converted, None, plan)
    assert "Its names begin with 'net.': tb.restore(..., prefix='net.')" in str(refused.value)
    with pytest.raises(CheckpointError, match=r"dtype: `inner.weight` is torch.bfloat16"):
        tb.restore(tmp_path / "m.pt", converted, None, plan, prefix="net.")
    with pytest.raises(CheckpointError, match=r"no name begins with 'model\.'"):
        tb.restore(tmp_path / "m.pt", converted, None, plan, prefix="model.")
    want = module.state_dict()["again.weight"].bfloat16().float()
    for prefix in ("net.", "net"):
        state = tb.restore(tmp_path / "m.pt", converted, None, plan, prefix=prefix, cast=True)
        assert same(tb.state_dict(converted, state)["again.weight"], want)
    some = {"net.inner.bias": low["net.inner.bias"]}
    torch.save(some, tmp_path / "some.pt")
    given = {"prefix": "net.", "cast": True, "strict": False}
    with pytest.warns(UserWarning, match="not in the file, and kept as they were"):
        state = tb.restore(tmp_path / "some.pt", converted, None, plan, **given)
    np.testing.assert_array_equal(state.params["again.weight"], converted.params["again.weight"])


def test_what_does_not_fit_is_refused_before_anything_is_read(
    module: cases.Net, converted: tb.Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = dict(module.state_dict())
    bad["again.bias"] = torch.zeros(4)
    bad["outer.weight"] = bad["outer.weight"] + 1
    bad["seen"] = torch.tensor([1, 2**40])
    torch.save(bad, tmp_path / "m.pt")
    with pytest.raises(CheckpointError) as caught:
        tb.restore(tmp_path / "m.pt", converted, None, PLANS["zero0"])
    assert "shape: `again.bias` is (4,), expected (5,)" in str(caught.value)
    assert "`inner.weight` and `outer.weight` are one weight but differ" in str(caught.value)
    bad |= {"again.bias": torch.zeros(5), "outer.weight": bad["inner.weight"]}
    torch.save(bad, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"`seen`: integers .* do not fit into int32"):
        tb.restore(tmp_path / "m.pt", converted, None, PLANS["zero0"])
    with pytest.raises(CheckpointError, match=r"optimizer=True, but .* no Adam state"):
        tb.restore(
            tmp_path / "m.pt", converted, cases.optax_adamw(), PLANS["zero0"], optimizer=True
        )


def index(folder: Path, **weight_map: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


OUTSIDE = ["../a.safetensors", "/a.safetensors", "x/a.safetensors", "..\\a.safetensors",
           "a.bin", "a\0.safetensors", "", 3, None, "C:a.safetensors"]  # fmt: skip


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_names_files_beside_it_only(tmp_path: Path, file: Any) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="expected the bare name"):
        tb.checkpoint(index(inner, a=file))


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"disagree about \['a'\]"):
        tb.checkpoint(index(tmp_path, b="2.safetensors"))
    with pytest.raises(CheckpointError, match=r"disagree about \['c'\]"):
        tb.checkpoint(index(tmp_path, a="1.safetensors", c="1.safetensors"))
    with pytest.raises(CheckpointError, match="not beside it"):
        tb.checkpoint(index(tmp_path, a="3.safetensors"))
    with pytest.raises(CheckpointError, match="expected a weight_map"):
        tb.checkpoint(index(tmp_path))
    for text in ("[" * 100_000, "{", "\xff"):
        (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin1")
        with pytest.raises(CheckpointError, match="not a readable index"):
            tb.checkpoint(tmp_path)


@pytest.mark.parametrize("one", ["model.safetensors", "pytorch_model.bin"])
def test_one_file_goes_before_an_index_as_in_transformers(tmp_path: Path, one: str) -> None:
    """`save_pretrained` of one file leaves the index of an older one's shards, which are gone."""
    gone = {"weight_map": {"a": f"1{Path(one).suffix}"}}
    (tmp_path / f"{one}.index.json").write_text(json.dumps(gone))
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    tb.write(tb.checkpoint(tmp_path / "a.safetensors"), tmp_path / one)
    assert tb.load(tmp_path)["a"].tolist() == [1, 1]


def test_torch_files_in_shards(tmp_path: Path) -> None:
    """As older `save_pretrained` wrote large models; weights are tied within a file."""
    tied, low = torch.ones(2), torch.arange(3).to(torch.bfloat16)
    torch.save({"a": tied, "b": tied}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"c": low}, tmp_path / "pytorch_model-00002-of-00002.bin")
    first, second = sorted(p.name for p in tmp_path.iterdir())
    listed = tmp_path / "pytorch_model.bin.index.json"
    listed.write_text(json.dumps({"weight_map": {"a": first, "b": first, "c": second}}))
    found = tb.load(tmp_path)
    assert sorted(found) == ["a", "b", "c"]
    assert found["b"].tolist() == [1, 1]
    assert found["c"].dtype == torch.bfloat16
    assert torch.equal(found["c"], low)
    assert tb.checkpoint(tmp_path).ties in ({"a": "b"}, {"b": "a"})
    listed.write_text(json.dumps({"weight_map": {"a": first, "b": first, "c": first}}))
    with pytest.raises(CheckpointError, match=r"index.json.*`?c`?"):
        tb.load(tmp_path)


def test_a_tensor_counts_more_than_another_files_name_for_it(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors", {"format": "pt", "b": "a"})
    save_file({"b": torch.ones(2)}, tmp_path / "2.safetensors", {"format": "pt"})
    found = tb.checkpoint(index(tmp_path, a="1.safetensors", b="2.safetensors"))
    assert found.by_name()["b"].tensor().tolist() == [1, 1]


def test_directories_with_other_names(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert list(tb.load(tmp_path)) == ["a"]
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="may be one checkpoint or several"):
        tb.checkpoint(tmp_path)
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert tb.load(tmp_path)["a"].tolist() == [0, 0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint that can be read"):
        tb.checkpoint(tmp_path / "empty")


def safetensors(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN: dict[str, tuple[Any, bytes, int | None]] = {
    "an absurd header": ({"a": ONE}, bytes(8), 2**62),
    "a header longer than the file": ({"a": ONE}, bytes(8), 4096),
    "truncated": ({"a": ONE}, bytes(7), None),
    "too long": ({"a": ONE}, bytes(9), None),
    "overlapping": ({"a": ONE, "b": ONE}, bytes(8), None),
    "a gap": ({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, bytes(20), None),
    "another size": ({"a": {**ONE, "shape": [3]}}, bytes(8), None),
    "no such dtype": ({"a": {**ONE, "dtype": "F31"}}, bytes(8), None),
    "a negative size": ({"a": {**ONE, "shape": [-2]}}, bytes(8), None),
    "an overflow": ({"a": {**ONE, "shape": [2**62, 8]}}, bytes(8), None),
    "reversed": ({"a": {**ONE, "data_offsets": [8, 0]}}, bytes(8), None),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), None),
    "a list": ([1], bytes(8), None),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_safetensors_are_refused(tmp_path: Path, what: str) -> None:
    path = safetensors(tmp_path / "m.safetensors", *BROKEN[what])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        tb.checkpoint(path)


def test_a_fine_file_made_the_same_way_is_read(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "m.safetensors", {"a": ONE}, struct.pack("<2f", 1, 2))
    assert tb.load(path)["a"].tolist() == [1, 2]
    with pytest.raises(CheckpointError, match="max_shard_size='5 parsecs'"):
        write(content({"a": torch.ones(1)}), tmp_path / "x", max_shard_size="5 parsecs")
    with pytest.raises(CheckpointError, match="cannot hold"):
        write(content({"a": torch.ones(1, dtype=torch.complex128)}), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["link", "copy"])
def test_a_kill_while_as_many_shards_are_replaced_leaves_all_old_or_all_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Killed(BaseException): ...

    def save(value: float) -> None:
        tensors = {f"t{n}": torch.full((64,), value) for n in range(3)}
        write(content(tensors), tmp_path / "hf", max_shard_size=256)

    def refuses(*_: Any) -> None:
        raise PermissionError("one name for a file")

    def killed_after(number: int) -> None:
        left, replace = [number], Path.replace

        def until(path: Path, target: Path) -> Path:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return replace(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", until)
            with pytest.raises(Killed):
                save(2.0)

    if name == "copy":
        monkeypatch.setattr(os, "link", refuses)
    seen = []
    for number in range(5):  # the old index, three shards, the new index
        save(1.0)
        killed_after(number)
        found = tb.checkpoint(tmp_path / "hf").tensors.values()
        seen.append({float(tensor.tensor().mean()) for tensor in found})
    assert seen == [{1.0}] * 5
    save(2.0)
    assert {float(t.tensor()[0]) for t in tb.checkpoint(tmp_path / "hf").tensors.values()} == {2.0}
    shards = {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    assert set(os.listdir(tmp_path / "hf")) == {*shards, "model.safetensors.index.json"}


def test_the_index_says_the_size_of_all_shards(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    converted = tb.convert(module, torch.zeros(2, 8))
    tb.save(tmp_path / "hf", converted, converted.params, max_shard_size=300)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.ckpt", "hf", "dcp", "universal"])
def test_what_has_its_name_is_on_the_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is synced before it (or its directory) is renamed, and the new name after that."""
    converted = tb.convert(nn.Linear(8, 4), torch.zeros(2, 8))
    synced: set[tuple[int, int]] = set()
    sync, rename = os.fsync, os.replace

    def identity(path: Any) -> tuple[int, int]:
        found = os.stat(path)
        return found.st_dev, found.st_ino

    def fsync(number: int) -> None:
        synced.add(identity(number))
        sync(number)

    def replace(source: Any, target: Any, **more: Any) -> None:
        parts = [source, *Path(source).rglob("*")]
        assert all(identity(path) in synced for path in parts)
        synced.discard(identity(Path(target).parent))
        rename(source, target, **more)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    to = name if name in ("dcp", "universal") else None
    tb.save(tmp_path / "run" / name if to else tmp_path / name, converted, converted.params, to=to)
    assert identity(tmp_path / "run" if to else tmp_path) in synced


class Renamed(torch.nn.Linear):
    """In files its weight is doubled, or has another name."""

    def __init__(self, name: str) -> None:
        super().__init__(3, 2)
        self.register_state_dict_post_hook(lambda _, state, *__: doubled(state, name))


def doubled(state: dict[str, Any], name: str) -> None:
    state[name] = 2 * state.pop("weight")


class Own(torch.nn.Linear):
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"w": self.weight}


@pytest.mark.parametrize(
    ("module", "name"),
    [(Renamed("weight"), "weight"), (Renamed("w"), "w"), (Own(3, 2, False), "weight")],
)
def test_files_that_a_hook_would_write_otherwise_are_not_written(
    tmp_path: Path, module: torch.nn.Module, name: str
) -> None:
    converted = tb.convert(module, torch.zeros(4, 3))
    for given in (tb.state_dict, partial(tb.save, tmp_path / "model.safetensors"), tb.stream):
        with pytest.raises(CheckpointError, match=rf"hook of .* \['{name}'\].*load_into"):
            given(converted, converted.params)


class Halved(torch.nn.Linear):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, *args)


def hooked() -> torch.nn.Module:
    module = torch.nn.Linear(3, 2)
    module.register_load_state_dict_pre_hook(lambda _, state, *__: doubled(state, "weight"))
    return module


@pytest.mark.parametrize("inner", [Halved(3, 2), hooked()])
def test_code_that_changes_what_is_loaded_is_named(tmp_path: Path, inner: Any) -> None:
    module = torch.nn.Sequential(inner, torch.nn.BatchNorm1d(2))
    torch.save(module.state_dict(), tmp_path / "model.pt")
    converted = tb.convert(module, torch.zeros(4, 3))
    with pytest.warns(UserWarning, match=r"`0` \(\w+\): its own code in load_state_dict"):
        tb.restore(tmp_path / "model.pt", converted, None, fz.Plan(data=1))


def test_shards_are_on_disk_before_the_index_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a folder that is there gets new ones: a power loss may come between."""
    target, events = tmp_path / "model", []
    target.mkdir()
    (target / "README.md").write_text("mine")
    sync, move = os.fsync, os.replace

    def synced(file: int) -> None:
        events.append(("sync", os.fstat(file).st_ino))
        sync(file)

    def moved(one: Any, other: Any, **more: Any) -> None:
        events.append(("to", Path(other).name))
        move(one, other, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    with staged_directory(target, merge=True, turns=Turns()) as folder:
        for name in (*names, "model.safetensors.index.json"):
            (folder / name).write_text("{}")
    last = events.index(("to", "model.safetensors.index.json"))
    assert events[last - 1] == ("sync", target.stat().st_ino)
    assert {("to", name) for name in names} <= {*events[:last]}
