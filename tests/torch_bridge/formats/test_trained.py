"""Lightning and torch.distributed.checkpoint: weights, moments and step; trainings that go on."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import format_cases as cases
import jax
import numpy as np
import optax
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zero_files
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError
from torch_bridge.formats import mapped_tensors
from torch_bridge.formats.adam import groups_like
from torch_bridge.moments import moments_of


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
DATA = Path(__file__).parents[2] / "data" / "checkpoints"
PLAN = fz.Plan(zero=3, min_shard_bytes=0)


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: optax trains, and leaves promotion to JAX."""


@pytest.fixture(scope="module")
def converted() -> tb.Converted:
    return tb.convert(cases.net(9), torch.zeros(4, cases.FEATURES))


@pytest.fixture(scope="module")
def step(converted: tb.Converted) -> Any:
    return fz.train_step(converted.model(cases.mean_square), cases.optax_adamw(), PLAN)


def save_lightning(path: Path, module: Any, optimizer: Any) -> None:
    """As Lightning writes it, with a few of the things that it puts beside the weights."""
    state = {f"net.{name}": value for name, value in module.state_dict().items()}
    torch.save(
        {
            "epoch": 2, "global_step": 7, "pytorch-lightning_version": "2.5.0",
            "state_dict": state, "loops": {}, "callbacks": {"x": {"best": torch.tensor(0.5)}},
            "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [],
        },
        path,
    )  # fmt: skip


def save_fsdp(path: Path, module: Any, optimizer: Any) -> None:
    model, optim = get_state_dict(module, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=path)


FORMATS = {
    "m.ckpt": (save_lightning, {"prefix": "net."}),
    "dcp": (save_fsdp, {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_of_pytorch_goes_on_here(
    converted: tb.Converted, step: Any, name: str, tmp_path: Path
) -> None:
    write, options = FORMATS[name]
    module, data = cases.net(), cases.batches()
    optimizer = cases.adamw(module)
    cases.torch_steps(module, optimizer, data, 7)
    write(tmp_path / name, module, optimizer)
    ahead, data = itertools.tee(data)
    wanted = cases.torch_steps(module, optimizer, ahead, 20)
    state = tb.restore(tmp_path / name, converted, cases.optax_adamw(), PLAN, **options)
    assert int(state.step) == 7
    losses = []
    for _ in range(20):
        state, metrics = step(state, next(data))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_groups_and_schedules_go_on(tmp_path: Path) -> None:
    """`tb.optimizer` of a fresh optimizer and scheduler, moments and counts from a file."""

    def make(module: Any) -> tuple[Any, Any, list[str]]:
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        wide = {n: p for n, p in named.items() if p.ndim > 1}
        rest = {n: p for n, p in named.items() if p.ndim < 2}
        groups = [{"params": wide.values()}, {"params": rest.values(), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=cases.LR, weight_decay=cases.DECAY)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.3)
        return optimizer, schedule, [*wide, *rest]

    module, fresh, data = cases.net(), cases.net(1), cases.batches()
    optimizer, schedule, names = make(module)
    converted = tb.convert(fresh, torch.zeros(4, cases.FEATURES))
    new_optimizer, new_schedule, _ = make(fresh)
    tx = tb.optimizer(new_optimizer, converted, new_schedule)
    for _ in range(7):
        cases.torch_steps(module, optimizer, data, 1)
        schedule.step()
    save_lightning(tmp_path / "m.ckpt", module, optimizer)
    with pytest.raises(CheckpointError, match=r"pass names=\[\.\.\.\]"):
        tb.restore(tmp_path / "m.ckpt", converted, tx, PLAN, prefix="net.")
    state = tb.restore(tmp_path / "m.ckpt", converted, tx, PLAN, prefix="net.", names=names)
    step = fz.train_step(converted.model(cases.mean_square), tx, PLAN)
    for batch in itertools.islice(data, 10):
        state, metrics = step(state, batch)
        (wanted,) = cases.torch_steps(module, optimizer, iter([batch]), 1)
        schedule.step()
        np.testing.assert_allclose(float(metrics["loss"]), wanted, rtol=1e-5)


def load_lightning(path: Path, module: Any, optimizer: Any) -> None:
    content = torch.load(path, weights_only=True)
    assert content["pytorch-lightning_version"]
    assert content["global_step"] == 7
    assert content["loops"]["fit_loop"]["epoch_loop.state_dict"] == {"_batches_that_stepped": 7}
    module.load_state_dict(content["state_dict"])
    optimizer.load_state_dict(content["optimizer_states"][0])


def load_fsdp(path: Path, module: Any, optimizer: Any, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(module, optimizer, options=options)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
    set_state_dict(
        module, optimizer, model_state_dict=model, optim_state_dict=optim, options=options
    )


LOADS = [
    ("m.ckpt", load_lightning), ("dcp", load_fsdp), ("dcp-flat", partial(load_fsdp, flat=True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "load"), LOADS)
def test_a_run_from_here_goes_on_in_pytorch(
    converted: tb.Converted, step: Any, name: str, load: Any, tmp_path: Path
) -> None:
    state = fz.init(converted.model(cases.mean_square), cases.optax_adamw(), PLAN)
    data = cases.batches()
    for _ in range(7):
        state, _ = step(state, next(data))
    hyper = {"lr": cases.LR, "betas": cases.BETAS, "eps": cases.EPS, "weight_decay": cases.DECAY}
    to = None if "." in name else name
    tb.save(tmp_path / name, converted, state, to=to, hyper=hyper)
    with pytest.raises(CheckpointError, match=r"unknown hyperparameters \['learning_rate'\]"):
        tb.save(tmp_path / "other", converted, state, to="dcp", hyper={"learning_rate": 1})
    module = cases.net(4)
    learned = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned)  # its hyperparameters come with the checkpoint
    load(tmp_path / name, module, optimizer)
    ahead, data = itertools.tee(data)
    wanted = []
    for _ in range(20):
        state, metrics = step(state, next(ahead))
        wanted.append(float(metrics["loss"]))
    losses = cases.torch_steps(module, optimizer, data, 20)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def grouped(module: Any) -> torch.optim.AdamW:
    """Two groups in an order of their own, one of which has a frozen parameter."""
    own = list(module.parameters())
    groups = [
        {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0, "lr": 2 * cases.LR},
        {"params": [p for p in own if p.ndim > 1], "lr": torch.tensor(cases.LR)},
    ]
    return torch.optim.AdamW(groups, betas=cases.BETAS, eps=cases.EPS, weight_decay=cases.DECAY)


@pytest.mark.parametrize(("name", "load"), LOADS)
def test_a_run_of_several_groups_goes_on_in_pytorch(name: str, load: Any, tmp_path: Path) -> None:
    module, data = cases.net(4), cases.batches()
    own = grouped(module)
    converted = tb.convert(module, torch.zeros(4, cases.FEATURES))
    tx = tb.optimizer(own, converted)
    model = converted.model(cases.mean_square)
    state, step = fz.init(model, tx, PLAN), fz.train_step(model, tx, PLAN)
    for _ in range(7):
        state, _ = step(state, next(data))
    asked: dict[str, Any] = {"to": None if "." in name else name, "optimizer": own}
    tb.save(tmp_path / name, converted, state, **asked)
    back = tb.restore(tmp_path / name, converted, tx, PLAN, names=own)
    kept, there = moments_of(converted, state.opt_state), moments_of(converted, back.opt_state)
    for name_of, value in kept.exp_avg_sq.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(there.exp_avg_sq[name_of]))

    if name == "dcp-flat":  # what was groups is read as such
        name, load = "m.ckpt", load_lightning
        tb.write(tb.checkpoint(tmp_path / "dcp-flat"), tmp_path / name)

    other = cases.net(5)
    optimizer = grouped(other)
    for group in optimizer.param_groups:  # they come with the file
        group.update(lr=1.0, weight_decay=1.0)
    load(tmp_path / name, other, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, cases.DECAY]
    ahead, data = itertools.tee(data)
    wanted = []
    for _ in range(10):
        state, metrics = step(state, next(ahead))
        wanted.append(float(metrics["loss"]))
    losses = cases.torch_steps(other, optimizer, data, 10)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_an_optimizer_that_cannot_take_a_file_is_refused(
    converted: tb.Converted, tmp_path: Path
) -> None:
    module = cases.net(9)
    own = tb.convert(module, torch.zeros(4, cases.FEATURES))
    state = fz.init(own.model(cases.mean_square), cases.optax_adamw(), PLAN)
    refused = {
        "expected an Adam or AdamW": torch.optim.SGD(module.parameters()),
        # Of a group alone: the defaults of the optimizer say nothing of it.
        "without amsgrad": torch.optim.Adam([{"params": module.parameters(), "amsgrad": True}]),
        "group 0, parameter 0: it is no parameter of": torch.optim.AdamW(cases.net().parameters()),
        "moments of .*'inner.weight'": torch.optim.AdamW([module.again.weight]),
    }
    for message, optimizer in refused.items():
        with pytest.raises(CheckpointError, match=f"save: .*{message}"):
            tb.save(tmp_path / "m.ckpt", own, state, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="one group over all that learn"):
        tb.save(tmp_path / "u", own, state, to="universal", optimizer=cases.adamw(module))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["m.ckpt", "dcp", "universal"])
def test_states_come_back_bit_by_bit(
    converted: tb.Converted, step: Any, name: str, tmp_path: Path
) -> None:
    state = fz.init(converted.model(cases.mean_square), cases.optax_adamw(), PLAN)
    state, _ = step(state, next(cases.batches()))
    tb.save(tmp_path / name, converted, state, to=None if "." in name else name, optimizer=True)
    found = tb.checkpoint(tmp_path / name)
    assert found.ties == {"outer.weight": "inner.weight"}
    back = tb.restore(tmp_path / name, converted, cases.optax_adamw(), fz.Plan(zero=0))
    assert int(back.step) == 1
    want = tb.state_dict(converted, state)
    assert all(torch.equal(v, want[n]) for n, v in tb.state_dict(converted, back).items())
    one, two = (moments_of(converted, s.opt_state) for s in (state, back))
    assert one.step == two.step
    for name in one.exp_avg:
        np.testing.assert_array_equal(one.exp_avg[name], two.exp_avg[name])
        np.testing.assert_array_equal(one.exp_avg_sq[name], two.exp_avg_sq[name])
    with pytest.raises(CheckpointError, match="is not empty"):
        tb.save(tmp_path, converted, state, to="dcp")


def test_a_directory_is_written_where_an_empty_one_is(tmp_path: Path) -> None:
    converted = tb.convert(torch.nn.Linear(2, 2), torch.zeros(4, 2))
    tb.save(tmp_path, converted, converted.params, to="dcp")
    assert set(tb.checkpoint(tmp_path).tensors) == {"weight", "bias"}


@pytest.mark.parametrize("name", ["m.ckpt", "dcp", "universal"])
def test_masters_of_a_16_bit_module_come_back(name: str, tmp_path: Path) -> None:
    module = torch.nn.Linear(8, 8).bfloat16()
    module.bias.requires_grad_(False)
    converted = tb.convert(module, torch.zeros(4, 8, dtype=torch.bfloat16))
    model = converted.model(cases.mean_square)
    state = fz.init(model, optax.adam(1e-5), PLAN)
    x = jax.random.normal(jax.random.key(0), (8, 8), "bfloat16")
    state, _ = fz.train_step(model, optax.adam(1e-5), PLAN)(state, {"x": x, "y": -x})
    to = None if "." in name else name
    tb.save(tmp_path / name, converted, state, to=to)
    back = tb.restore(tmp_path / name, converted, optax.adam(1e-5), PLAN)
    for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(back.params), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    one, two = (moments_of(converted, s.opt_state) for s in (state, back))
    np.testing.assert_array_equal(one.exp_avg["weight"], two.exp_avg["weight"])
    tensors = tb.checkpoint(tmp_path / name).tensors
    assert tensors["weight"].torch_dtype == torch.float32  # and not what of it 16 bits hold
    assert not torch.equal(tensors["weight"].tensor(), module.weight.float())
    tb.save(tmp_path / "m.pt", converted, state)
    assert tb.load(tmp_path / "m.pt")["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["m.ckpt", "dcp"])
def test_weights_alone_are_those_that_a_16_bit_module_computes_with(
    name: str, tmp_path: Path
) -> None:
    """Without the optimizer nobody trains on from a file: the module loads it as it is."""
    module = torch.nn.Linear(8, 8).bfloat16()
    converted = tb.convert(module, torch.zeros(4, 8, dtype=torch.bfloat16))
    state = fz.init(converted.model(cases.mean_square), optax.adam(1e-5), PLAN)
    to = None if "." in name else name
    tb.save(tmp_path / name, converted, state, to=to, optimizer=False)
    written = tb.checkpoint(tmp_path / name)
    assert {tensor.torch_dtype for tensor in written.tensors.values()} == {torch.bfloat16}
    assert written.optimizer is None


def test_universal_files_of_a_16_bit_module_without_masters_come_back(tmp_path: Path) -> None:
    """They have float32 for all that learns; another format's float32 is another weight."""
    module = torch.nn.Linear(8, 8).bfloat16()
    converted = tb.convert(module, torch.zeros(4, 8, dtype=torch.bfloat16), masters=False)
    state = fz.init(converted.model(cases.mean_square), optax.adam(1e-5), PLAN)
    tb.save(tmp_path / "universal", converted, state, to="universal")
    back = tb.restore(tmp_path / "universal", converted, optax.adam(1e-5), PLAN)
    jax.tree.map(np.testing.assert_array_equal, back.params, state.params)
    assert {leaf.dtype.name for leaf in back.params.values()} == {"bfloat16"}
    written = tb.checkpoint(tmp_path / "universal").tensors.values()
    assert {tensor.torch_dtype for tensor in written} == {torch.float32}
    torch.save(module.float().state_dict(), tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"dtype: `bias` is torch\.float32"):
        tb.restore(tmp_path / "m.pt", converted, None, PLAN)


@pytest.mark.parametrize("options", [{}, {"update_on": "host"}])
def test_moments_go_where_the_plan_parks_them(converted: tb.Converted, options: Any) -> None:
    plan = fz.Plan(zero=1, min_shard_bytes=0, tiers={"opt_state": "host"}, **options)
    state = tb.restore(DATA / "zero1", converted, cases.optax_adamw(), plan, cast=True)
    fz.placement(state).require(opt_state="host")
    moments = moments_of(converted, fz.reload(state).opt_state)
    want = torch.load(DATA / "zero1" / "want.pt", weights_only=True)
    for name, values in want.items():
        np.testing.assert_array_equal(moments.exp_avg[name], values["exp_avg"].numpy())


def test_lightnings_own_file() -> None:
    found = tb.checkpoint(DATA / "lightning.ckpt")
    assert (found.format, found.version) == ("PyTorch Lightning", "2.6.6")
    assert found.ties == {"net.outer.weight": "net.inner.weight"}
    assert found.extra["global_step"] == 8
    assert found.extra["hyper_parameters"] == {"lr": 0.003, "width": 13}
    assert found.optimizer is not None
    assert found.optimizer.step == 8
    with pytest.raises(CheckpointError, match=r"pass names=\[\.\.\.\]"):
        found.optimizer.moments()
    with pytest.raises(CheckpointError, match=r"it has \d+: 2 names were"):
        found.optimizer.moments(["a", "b"])


def test_known_objects_beside_the_weights_are_let_go(tmp_path: Path) -> None:
    name = "lightning.fabric.utilities.data.AttributeDict"
    with zero_files.foreign_class(name, dict) as attributes:
        content = {
            "state_dict": {"w": torch.ones(2)}, "hyper_parameters": attributes(lr=0.5),
            "callbacks": {"x": {"dirpath": Path("somewhere")}}, "global_step": 3,
        }  # fmt: skip
        torch.save(content, tmp_path / "m.ckpt")
    found = tb.checkpoint(tmp_path / "m.ckpt")
    assert found.extra == {"global_step": 3, "hyper_parameters": {"lr": 0.5}}
    assert found.tensors["w"].tensor().tolist() == [1, 1]


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    torch.save({"state_dict": {}, "callbacks": Malicious(trap)}, tmp_path / "m.ckpt")
    with pytest.raises(CheckpointError, match=r"objects of posix\.mkdir|nt\.mkdir"):
        tb.checkpoint(tmp_path / "m.ckpt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Malicious(trap)))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir, which does not belong there"):
        tb.checkpoint(tmp_path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Malicious(trap)))  # the trap itself does work
    assert trap.exists()


def two_ranks(folder: Path, change: Any = None) -> None:
    """A directory as two FSDP2 ranks write it: rows 0 to 4 and 4 to 7 of one tensor."""
    folder.mkdir(exist_ok=True)
    value = torch.arange(21.0).reshape(7, 3)
    storage, chunks = {}, []
    for rank, (low, high) in enumerate([(0, 4), (4, 7)]):
        buffer = io.BytesIO(b"other things")
        buffer.seek(0, io.SEEK_END)
        torch.save(value[low:high].clone(), buffer)
        (folder / f"__{rank}_0.distcp").write_bytes(buffer.getvalue())
        offset, size = torch.Size([low, 0]), torch.Size([high - low, 3])
        chunks.append(md.ChunkStorageMetadata(offset, size))
        where = _StorageInfo(f"__{rank}_0.distcp", 12, len(buffer.getvalue()) - 12)
        storage[md.MetadataIndex("model.w", offset, rank)] = where
    entry = md.TensorStorageMetadata(md.TensorProperties(), torch.Size([7, 3]), chunks)
    about = md.Metadata({"model.w": entry}, {"model.w": ("model", "w")}, storage)
    if change is not None:
        change(about, entry, storage)
    (folder / ".metadata").write_bytes(pickle.dumps(about))


def test_chunks_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    lazy = tb.checkpoint(tmp_path).tensors["w"]
    value = torch.arange(21.0).reshape(7, 3)
    assert torch.equal(lazy.tensor(), value)
    assert torch.equal(lazy.tensor((slice(3, 6), slice(1, 3))), value[3:6, 1:3])
    (tmp_path / "__1_0.distcp").unlink()
    assert torch.equal(lazy.tensor((slice(0, 4), slice(0, 3))), value[:4])
    with pytest.raises(CheckpointError, match="missing or truncated"):
        lazy.tensor()


def test_each_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    module = torch.nn.Sequential(*(copy.deepcopy(block) for _ in range(4)))
    converted = tb.convert(module, torch.zeros(4, 16))
    save_fsdp(tmp_path / "dcp", module, torch.optim.AdamW(module.parameters()))
    read: Counter[str] = Counter()
    copied = mapped_tensors.Mapped.copy_to

    def counting(self: Any, out: Any, to: Any, index: Any) -> None:
        read["bytes"] += self.content[index].nbytes
        copied(self, out, to, index)

    monkeypatch.setattr(mapped_tensors.Mapped, "copy_to", counting)
    state = tb.restore(tmp_path / "dcp", converted, cases.optax_adamw(), PLAN)
    want = module.state_dict()
    assert all(torch.equal(v, want[n]) for n, v in tb.state_dict(converted, state).items())
    numbers = sum(p.numel() for p in module.parameters())
    assert read["bytes"] == 4 * (3 * numbers + len(want))  # and a step for each
    assert len(jax.tree.leaves(state.params)) == 2  # stacks: every device reads of every layer


def moved(about: Any, entry: Any, storage: Any) -> None:
    entry.chunks[1] = md.ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([3, 3]))


def overlapping(about: Any, entry: Any, storage: Any) -> None:
    """As many elements as there should be, but rows 1 to 4 twice and the last never."""
    last = next(key for key in storage if key.offset[0])
    storage[md.MetadataIndex("model.w", torch.Size([1, 0]), 1)] = storage.pop(last)
    entry.chunks[1] = md.ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([3, 3]))


def elsewhere(about: Any, entry: Any, storage: Any) -> None:
    for info in storage.values():
        info.relative_path = "../x.distcp"


def elsewhere_in_windows(about: Any, entry: Any, storage: Any) -> None:
    for info in storage.values():
        info.relative_path = "..\\x.distcp"


def beyond(about: Any, entry: Any, storage: Any) -> None:
    for info in storage.values():
        info.length = 2**40


def nowhere(about: Any, entry: Any, storage: Any) -> None:
    storage.clear()


def other_dtype(about: Any, entry: Any, storage: Any) -> None:
    entry.properties = md.TensorProperties(dtype=torch.float64)


def huge(about: Any, entry: Any, storage: Any) -> None:
    entry.size = torch.Size([2**40, 3])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (moved, "lies outside of it"),
        (overlapping, "overlap, and leave gaps"),
        (elsewhere, "a file of the directory itself"),
        (elsewhere_in_windows, "a file of the directory itself"),
        (beyond, "missing or truncated"),
        (nowhere, "is nowhere"),
        (other_dtype, "is not torch.float64"),
        (huge, "do not make up"),
    ],
)
def test_metadata_that_lies_is_found(tmp_path: Path, change: Any, match: str) -> None:
    two_ranks(tmp_path, change)
    with pytest.raises(CheckpointError, match=match):
        tb.checkpoint(tmp_path).tensors["w"].tensor()


def test_the_groups_of_a_folder_are_in_order_and_all_its_steps_are_looked_at(tmp_path):
    def save(name, steps):
        one = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(2))
        state = {key: {"step": torch.tensor(float(step)), **one} for key, step in steps.items()}
        groups = [{"params": ["a"], "lr": 0.1}, {"params": ["b"], "lr": 0.2}]
        model = {key: torch.ones(2) for key in steps}
        optim = {"state": state, "param_groups": groups}
        dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / name)
        return tb.checkpoint(tmp_path / name)

    found = save("alike", {"a": 3, "b": 3}).optimizer
    assert (found.step, [group["lr"] for group in found.groups]) == (3, [0.1, 0.2])
    assert "different steps [3, 4]" in save("apart", {"a": 3, "b": 4}).unread


def test_numbers_beside_the_weights_of_a_folder_are_read(tmp_path):
    dcp.save({"model": {"w": torch.ones(2)}, "run": {"epoch": 3}}, checkpoint_id=tmp_path)
    assert tb.checkpoint(tmp_path).extra == {"run.epoch": 3}


@pytest.mark.parametrize("name", ["model", "state_dict", "module"])
def test_a_weight_may_be_called_what_its_folder_often_is(tmp_path, name):
    weights = {name: torch.arange(3.0), "bias": torch.arange(2.0)}
    for number, written in enumerate((weights, {"app": weights}, {"model": weights})):
        dcp.save(written, checkpoint_id=tmp_path / str(number))
        found = tb.load(tmp_path / str(number))
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_any_tensor_that_torch_writes_is_read(tmp_path):
    """Also whose elements are not those in the file: a conjugate is a flag beside them."""
    z = torch.randn(3, 4, dtype=torch.complex64)
    written = {
        "conjugate": z.conj(), "negative": z.conj().imag, "rows": torch.randn(4, 6)[:, 1:5:2],
        "turned": torch.randn(4, 6).T, "expanded": torch.randn(1, 3).expand(4, 3),
        "none": torch.zeros(0, 3), "number": torch.tensor(2.5), "bits": torch.tensor([True, False]),
        "half": torch.randn(3, dtype=torch.bfloat16),
    }  # fmt: skip
    dcp.save(written, checkpoint_id=tmp_path / "dcp")
    found = tb.load(tmp_path / "dcp")
    for name, tensor in written.items():
        assert torch.equal(found[name], tensor.resolve_conj().resolve_neg()), name
    for name, layout in (("negative", True), ("rows", False), ("rows", True)):
        torch.save(written[name], tmp_path / name, _use_new_zipfile_serialization=layout)
        pages = mapped_tensors.map_file(tmp_path / name)
        one, out = (
            mapped_tensors.find_tensor(pages, 0, len(pages)),
            torch.empty(written[name].shape),
        )
        one.copy_to(out, (slice(None),) * 2, (slice(None),) * 2)
        assert torch.equal(out, written[name].resolve_neg()), name


class _Named(torch.nn.Module):
    """One whose child is called as the optimizer's entries are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.state = torch.nn.ModuleDict({"linear": torch.nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.state["linear"](torch.tanh(self.linear(x)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_child_called_state_is_no_optimizers(tmp_path: Path, flat: bool) -> None:
    module, x = _Named(), torch.randn(4, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.5))
    module(x).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = get_state_dict(module, optimizer, options=options)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "dcp")
    kept = tb.checkpoint(tmp_path / "dcp").optimizer
    assert kept is not None
    assert [group["lr"] for group in kept.groups] == [0.5]
    assert list(kept.groups[0].get("params", ())) == list(dict(module.named_parameters()))
    converted = tb.convert(module, x)
    state = tb.restore(tmp_path / "dcp", converted, optax.adamw(1e-3), fz.Plan(data=1))
    moments = tb.moments_of(converted, state.opt_state)
    for name, parameter in module.named_parameters():
        own = optimizer.state[parameter]["exp_avg"]
        np.testing.assert_array_equal(moments.exp_avg[name], own, err_msg=name)


def test_hyperparameters_that_are_given_go_before_the_optimizers_own() -> None:
    module = torch.nn.Linear(3, 2)
    layout = tb.convert(module, torch.zeros(4, 3)).layout
    own = torch.optim.AdamW(module.parameters(), lr=0.5)
    (group,) = groups_like(own, layout, "save", {"lr": 0.25})
    assert (group["lr"], group["eps"]) == (0.25, 1e-8)
