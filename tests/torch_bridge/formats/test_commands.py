"""`fzero convert` and `fzero inspect`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import format_cases as cases
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import torch_bridge as tb
from torch_bridge.cli import convert, inspect


DATA = Path(__file__).parents[2] / "data" / "checkpoints"


def shown(*args: object) -> str:
    done = CliRunner().invoke(inspect.app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.exception
    return done.stdout


def converted(*args: object) -> str:
    done = CliRunner().invoke(convert.app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_inspect_shows_what_is_there() -> None:
    text = shown(DATA / "zero3")
    assert "DeepSpeed ZeRO-3 (0.19.8)" in text
    assert "inner.weight, also outer.weight" in text
    assert "13 x 5" in text
    assert "Adam at step 3, moments of 7 parameters" in text
    assert '"weight_decay": 0.05' in text
    assert "Adam at step 8, moments of 7 numbered parameters" in shown(DATA / "lightning.ckpt")


def test_inspect_as_json(tmp_path: Path) -> None:
    found = json.loads(shown(DATA / "zero1", "--json"))
    assert found["format"] == "DeepSpeed ZeRO-1/2"
    assert found["tensors"]["inner.weight"] == {"dtype": "float32", "shape": [13, 5]}
    assert found["ties"] == {"outer.weight": "inner.weight"}
    assert found["optimizer"]["step"] == 3
    assert len(found["optimizer"]["parameters"]) == 7
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")
    assert json.loads(shown(tmp_path / "m.pt", "--json"))["optimizer"] is None


def test_names_cannot_talk_to_the_terminal(tmp_path: Path) -> None:
    torch.save({"\x1b[2J[red]w": torch.ones(1)}, tmp_path / "m.pt")
    text = shown(tmp_path / "m.pt")
    assert "\x1b" not in text
    assert r"\x1b[2J[red]w" in text


@pytest.mark.parametrize(
    ("name", "to"),
    [("m.safetensors", None), ("hf", None), ("m.pt", None), ("d", "dcp"), ("f", "dcp-flat"),
     ("u", "universal"), ("m.ckpt", None), ("odd.name", "safetensors")],
)  # fmt: skip
def test_convert_keeps_every_bit(tmp_path: Path, name: str, to: str | None) -> None:
    text = converted(
        DATA / "zero1", tmp_path / name, *(("--to", to) if to else ()), "--max-shard-size", 600
    )
    assert "10 tensors" in text
    assert ("no place for the optimizer state" in text) == (name in ("m.safetensors", "hf", "m.pt",
                                                                     "odd.name"))  # fmt: skip
    before, after = tb.load(DATA / "zero1"), tb.load(tmp_path / name)
    assert before.keys() == after.keys()
    for key, want in before.items():
        assert after[key].dtype == want.dtype
        assert torch.equal(after[key], want), key
    one, two = tb.checkpoint(DATA / "zero1").optimizer, tb.checkpoint(tmp_path / name).optimizer
    if two is not None:
        assert one is not None
        assert one.step == two.step
        order = list(one.exp_avg) if two.named else sorted(two.exp_avg, key=int)
        names = [n for n in tb.checkpoint(tmp_path / name).tensors if n in one.exp_avg]
        for number, key in enumerate(order):
            want = one.exp_avg_sq[key if two.named else names[number]].tensor()
            assert torch.equal(two.exp_avg_sq[key].tensor(), want)


def test_convert_casts_floats_alone(tmp_path: Path) -> None:
    torch.save(cases.net().state_dict(), tmp_path / "m.pt")
    converted(tmp_path / "m.pt", tmp_path / "m.safetensors", "--dtype", "bf16")
    loaded = tb.load(tmp_path / "m.safetensors")
    assert loaded["inner.weight"].dtype == torch.bfloat16
    assert loaded["seen"].dtype == torch.int64
    want = cases.net().state_dict()["inner.weight"].bfloat16()
    assert torch.equal(loaded["inner.weight"], want)


@pytest.mark.parametrize(
    ("target", "to", "said"),
    [
        ("x.safetensors", "pt", "x.safetensors: its suffix is not of 'pt'"),
        ("y.pt", "safetensors", "y.pt: its suffix is not of 'safetensors'"),
        ("folder", "pt", "folder: expected a file, and it is a directory"),
    ],
)
def test_a_name_that_says_another_format_is_refused(
    tmp_path: Path, target: str, to: str, said: str
) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "m.pt")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    args = [str(tmp_path / "m.pt"), str(tmp_path / target), "--to", to]
    done = CliRunner().invoke(convert.app, args)
    assert done.exit_code
    assert said in str(done.exception) + done.output
    assert sorted(tmp_path.iterdir()) == before


def test_numbers_that_float16_does_not_hold_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1e5, 2.0])}, tmp_path / "m.pt")
    args = [str(tmp_path / "m.pt"), str(tmp_path / "h.safetensors"), "--dtype"]
    done = CliRunner().invoke(convert.app, [*args, "fp16"])
    assert done.exit_code
    assert (
        "m.pt: `w` has 100000, which is infinite in torch.float16"
        in str(done.exception) + done.output
    )
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]
    assert CliRunner().invoke(convert.app, [*args, "bf16"]).exit_code == 0
    held = {"w": torch.tensor([math.inf, 2.0])}
    torch.save(held, tmp_path / "m.pt")
    assert CliRunner().invoke(convert.app, [*args, "fp16"]).exit_code == 0
    assert torch.equal(safetensors.torch.load_file(args[1])["w"], held["w"].half())
