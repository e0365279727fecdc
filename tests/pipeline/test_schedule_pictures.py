"""Drawings, plots and the command line."""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from schedule_cases import TRAINING, all_sizes, build
from typer.testing import CliRunner

import fzero.errors
from fzero.cli.schedule import app
from fzero.errors import ScheduleError
from fzero.pipeline import Cost, Schedule, draw, one_f_one_b, plot, schedule, simulate


needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="plots need matplotlib"
)


def test_drawing():
    assert draw(simulate(build("zb_h1", 2, 2), Cost(f=1, i=1, w=1))).split("\n") == [
        "rank 0 |F0=F1=...I0-W0~I1-W1~| idle 14.3 %, peak 2",
        "rank 1 |...F0=I0-F1=I1-W0~W1~| idle 14.3 %, peak 2",
        "makespan 7, bubble 14.3 %, peak 2",
    ]


def test_drawing_keeps_its_width_and_every_rank():
    for name, ranks, microbatches, chunks in all_sizes(3, 5):
        timeline = simulate(build(name, ranks, microbatches, chunks))
        for width in (20, 100):
            lines = draw(timeline, width=width).split("\n")
            bars = [line.split("|")[1] for line in lines[:-1]]
            assert len(bars) == ranks
            assert len({len(bar) for bar in bars}) == 1
            assert len(bars[0]) <= width
            assert all("F" in bar for bar in bars)
    with pytest.raises(ScheduleError, match="expected a width of at least 20, got 5"):
        draw(timeline, width=5)


def test_narrow_drawing_shows_kinds():
    bar = draw(simulate(one_f_one_b(2, 30), Cost(f=1, b=1)), width=64).split("|")[1]
    assert "FBFBFB" in bar
    assert "F3" not in bar


def png_pixels(path):
    from matplotlib.image import imread

    return imread(path)


def colours_of(pixels):
    from collections import Counter

    rows = (pixels[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return Counter(f"#{r:02X}{g:02X}{b:02X}" for r, g, b in rows[::3].tolist())


@needs_matplotlib
def test_plot_has_a_colour_for_every_kind_and_the_bubble(tmp_path):
    from fzero.schedule.kinds import COLOURS

    timeline = simulate(build("dualpipe_v", 2, 6), Cost(f=1, i=1, w=1, activation_bytes=1 << 20))
    plot(timeline, tmp_path / "t.png", title="dualpipe_v")
    found = colours_of(png_pixels(tmp_path / "t.png"))
    for colour in [*COLOURS.values(), "#ECECEC"]:
        assert found[colour] > 50, colour


@needs_matplotlib
def test_plot_as_svg_has_the_numbers(tmp_path):
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        plot(
            simulate(one_f_one_b(2, 3), Cost(f=1, b=2, activation_bytes=3 << 20)),
            tmp_path / "t.svg",
        )
    text = (tmp_path / "t.svg").read_text()
    assert "rank 1" in text
    assert "live activations [MiB]" in text
    assert "rank 0: peak 6<" in text
    assert "makespan 12, bubble 25.0 %" in text
    # Every microbatch number once per action.
    assert sum(f">{number}</text>" in line for line in text.split("\n") for number in (2,)) >= 4


@needs_matplotlib
def test_plot_refuses_unknown_endings(tmp_path):
    with pytest.raises(ScheduleError, match=r"cannot write .*t.foo"):
        plot(simulate(one_f_one_b(1, 1)), tmp_path / "t.foo")


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ScheduleError, match="expected matplotlib to be installed"):
        plot(simulate(one_f_one_b(1, 1)), tmp_path / "t.png")


def test_schedules_need_no_device_and_no_plotting():
    """Nothing in the package imports jax, torch or matplotlib by itself."""
    root = Path(fzero.errors.__file__).parent
    code = (
        "import sys, types\n"
        "for name in ('jax', 'torch', 'matplotlib', 'numpy'): sys.modules[name] = None\n"
        # The facade of fzero imports jax; its subpackage must not need that.
        "sys.modules['fzero'] = types.ModuleType('fzero')\n"
        f"sys.modules['fzero'].__path__ = [{str(root)!r}]\n"
        "import fzero.pipeline as p\n"
        "print(p.draw(p.simulate(p.zb_v(4, 4))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "makespan" in done.stdout


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.mark.parametrize("name", [*TRAINING, "inference"])
def test_cli_builds_every_schedule(name):
    out = call(name, "--stages", 4, "--microbatches", 8).output
    assert out.strip() == draw(simulate(schedule(name, stages=4, microbatches=8), Cost(f=1, b=2)))


@needs_matplotlib
def test_cli_options(tmp_path):
    csv, png = tmp_path / "s.csv", tmp_path / "s.png"
    out = call(
        "interleaved", "--stages", 6, "--microbatches", 4, "--chunks", 3, "--csv", csv,
        "--plot", png, "--cost", "f=1,b=2,send=0.5", "--json",
    ).output  # fmt: skip
    built = schedule("interleaved", stages=6, microbatches=4, chunks=3)
    data = json.loads(out)
    timeline = simulate(built, Cost(f=1, b=2, send=0.5))
    assert data["makespan_s"] == timeline.makespan_s
    assert data["peak_live_per_rank"] == list(timeline.peak_live_per_rank)
    assert Schedule.from_csv(csv) == built
    assert png.read_bytes().startswith(b"\x89PNG")


def test_cli_check(tmp_path):
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    one_f_one_b(4, 8).to_csv(good)
    out = call("check", good).output
    assert "legal. 4 ranks, 4 stages, 8 microbatches, 64 actions" in out
    assert "slots per stage [4, 3, 2, 1]; no deadlock with buffered or batched sends" in out
    bad.write_text(good.read_text().replace("2B0", "2B7", 1))
    result = call("check", bad, code=1)
    assert ">2B7<" in result.output
    call("check", tmp_path / "none.csv", code=1)


def test_cli_compare():
    lines = call("compare", "--stages", 8, "--microbatches", 32).output.split("\n")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert [name for name in rows if name in TRAINING] == TRAINING
    assert all(len(line.rstrip()) <= 80 for line in lines)
    # chunks, bubble %, idle within the span %, peak, makespan, lock step, strictest sends
    assert rows["1f1b"] == ["1", "17.9", "17.9", "8", "117", "148", "batched"]
    assert rows["zb_h1"] == ["1", "6.8", "6.8", "8", "103", "103", "batched"]
    assert rows["zb_v"] == ["2", "3.5", "0.0", "8", "99.5", "99.5", "buffered"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nope", "--stages", 4], 2, "got 'nope'"),
        (["1f1b", "--stages", 4, "--microbatches", 0], 1, "microbatches: expected a whole number"),
        (["zb_v", "--stages", 3, "--microbatches", 1], 1, "stages (3) must be divisible"),
        (["1f1b", "--stages", 4, "--microbatches", 1, "--chunks", 2], 1, "expected chunks=1"),
        (["gpipe", "--stages", 2, "--microbatches", 1, "--cost", "x=1"], 1, "got 'x=1'"),
        (["gpipe", "--stages", 2, "--microbatches", 1, "--cost", "f=a"], 1, "got 'f=a'"),
        (["gpipe", "--stages", 2, "--microbatches", 1, "--cost", "f=-1"], 1, "Cost.f"),
    ],
)
def test_cli_errors(arguments, code, message):
    output = call(*arguments, code=code).output
    assert message in output
    assert "Traceback" not in output


def test_the_colours_of_actions_are_far_apart():
    from fzero.schedule.kinds import COLOURS

    points = [tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in COLOURS.values()]
    assert min(math.dist(a, b) for a, b in itertools.combinations(points, 2)) > 80
