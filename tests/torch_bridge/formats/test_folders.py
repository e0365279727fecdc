"""What a folder holds already, where something else is written into it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import format_cases as cases
import pytest
import torch
import zero_files
from safetensors.torch import save_file

import torch_bridge as tb
from fzero.errors import CheckpointError
from torch_bridge.formats.write import write


@pytest.fixture(scope="module")
def adapted() -> tb.Converted:
    converted = tb.convert(cases.net(), torch.zeros(2, cases.FEATURES))
    return tb.lora(converted, rank=2, targets=["again"])


@pytest.mark.parametrize("there", ["dcp", "universal", "peft"])
def test_weights_are_not_written_where_something_else_would_be_read(
    adapted: tb.Converted, tmp_path: Path, there: str
) -> None:
    """What reads the folder takes the older checkpoint, and says nothing."""
    folder = tmp_path / "run"
    tb.save(folder, adapted, adapted.params, to=there)
    before = sorted(folder.rglob("*"))
    said = {"dcp": r"\.metadata", "universal": "DeepSpeed", "peft": "an adapter"}[there]
    with pytest.raises(CheckpointError, match=f"{said}.* in the place of these weights"):
        tb.save(folder, adapted, adapted.params)
    assert sorted(folder.rglob("*")) == before
    assert sorted(tmp_path.iterdir()) == [folder]


def test_an_adapter_leaves_the_weights_that_a_folder_has(
    adapted: tb.Converted, tmp_path: Path
) -> None:
    torch.save(cases.net().state_dict(), tmp_path / "m.pt")
    write(tb.checkpoint(tmp_path / "m.pt"), tmp_path / "base", max_shard_size=300)
    before = {path.name for path in (tmp_path / "base").iterdir()}
    tb.save(tmp_path / "base", adapted, adapted.params, to="peft")
    after = {path.name for path in (tmp_path / "base").iterdir()}
    assert after == before | {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_damaged_adapter_is_told_with_its_folder(
    adapted: tb.Converted, tmp_path: Path, file: str
) -> None:
    tb.save(tmp_path / "mine", adapted, adapted.params, to="peft")
    (tmp_path / "mine" / "adapter_model.safetensors").unlink()
    (tmp_path / "mine" / file).write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=rf"mine: {file}: (not|is no file)"):
        tb.lora(adapted.base, tmp_path / "mine")


def test_an_index_that_leaves_out_a_whole_file_is_refused(tmp_path: Path) -> None:
    """Files say how many they are; numbers begin at 0 or 1, and others may lie beside them."""
    files = [f"model-0000{number}-of-00003.safetensors" for number in (0, 1, 2)]
    for name, file in zip("abcd", (*files, "more.safetensors"), strict=True):
        save_file({name: torch.ones(2)}, tmp_path / file)
    listed = dict(zip("abcd", (*files, "more.safetensors"), strict=True))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    assert sorted(tb.checkpoint(tmp_path).tensors) == ["a", "b", "c", "d"]
    del listed["b"]
    index.write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointError, match=r"index.json: lists 2 of the 3 files model-\.\.\."):
        tb.checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_two_saves_give_no_weights(tmp_path: Path, stage: int) -> None:
    """A save over an older one that was cut short: each rank has a part of every weight."""
    names = ["one", "two"]
    for step in (5, 6):
        weights = {name: torch.full((3, 4), float(step)) for name in names}
        state = dict.fromkeys(("fp32", "exp_avg", "exp_avg_sq"), weights)
        zero_files.write_zero(tmp_path / str(step), state, [names], 2, stage, step, {})
    new = tmp_path / "6/global_step6"
    (last,) = new.glob("*pp_rank_1_*optim_states.pt")
    shutil.copy(tmp_path / "5/global_step5" / last.name, last)
    with pytest.raises(CheckpointError, match=r"pp_rank_1_.* is of step 5, .*pp_rank_0_.* of 6: a"):
        tb.checkpoint(new)


def test_a_suffix_in_capitals_is_that_of_a_file(adapted: tb.Converted, tmp_path: Path) -> None:
    tb.save(tmp_path / "RUN.SAFETENSORS", adapted, adapted.params, to="safetensors")
    assert (tmp_path / "RUN.SAFETENSORS").is_file()


def test_a_folder_may_have_a_dot_in_its_name(adapted: tb.Converted, tmp_path: Path) -> None:
    (tmp_path / "llama-3.1").mkdir()
    tb.save(tmp_path / "llama-3.1", adapted, adapted.params)
    assert list((tmp_path / "llama-3.1").glob("*.safetensors"))
