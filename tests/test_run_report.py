"""`fzero report`: what a run's files say is on the page, also of a run that was cut; a trace."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import matplotlib.image
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero import cli
from fzero.offload.stream import Visit
from fzero.pipeline import Cost, one_f_one_b, simulate
from fzero.report.pages import render
from fzero.runs import pictures, trace
from fzero.runs.files import TIMELINE, differences, read_run
from fzero.runs.pictures import CLASSES
from fzero.runs.trace import Copies, Copy, chrome_trace
from fzero.schedule.kinds import COLOURS
from torch_bridge.run import loop
from torch_bridge.run.about import Observed


STEPS = 8
COLLECTIVE = {"kind": "all-gather", "axes": ["data"], "dtype": "bf16", "times": 34,
              "wire_bytes": 1241088.0}  # fmt: skip


def write_run(path: Path, *, lr: float = 1e-3, pipe: bool = True) -> Path:
    """A run's directory, with numbers that a test knows."""
    path.mkdir()
    metrics = [{"step": 0, "val_loss": 5.5}]
    timings = [{"what": "validation", "step": 0, "seconds": 2.0}]
    held = {
        "device": {"params": 4096 * 3, "total": 4096 * 3},
        "host": {"opt_state": 8192, "total": 8192},
    }
    timings += [{"what": "placement", "step": 0, "bytes_per_device": held, "bytes_in_use": None,
                 "peak_bytes": 3 * 2**30}]  # fmt: skip
    for step in range(1, STEPS + 1):
        metrics.append({"step": step, "loss": 5.5 - 0.25 * step, "grad_norm": 1.0, "count": 9.0})
        what = "step" if step > 1 else "first step"
        timings.append({"what": what, "step": step, "seconds": 0.5 if step > 1 else 10.0})
    metrics.append({"step": STEPS, "val_loss": 3.25})
    timings.append(timings[1] | {"step": STEPS})
    for name, lines in (("metrics.jsonl", metrics), ("timings.jsonl", timings)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = {
        "command": "fzero train <a> & b", "host": "here", "parameters": 220544,
        "devices": {"count": 4, "platform": "gpu", "kind": "H200"}, "processes": 1,
        "versions": {"jax": "0.10.2"}, "plan": {"zero": 3, "schedule": "1f1b"},
        "flops_per_token": 1e12, "peak_flops_per_s": 4e15, "elements_gathered": 325632,
        "elements_reduced": 168000, "reduction": "one reduction", "collectives": [COLLECTIVE],
    }  # fmt: skip
    run = {"run": {"model": "hf:tiny.json", "steps": STEPS, "batch": 4, "lr": lr},
           "data": {"seq": 250}, "plan": {"zero": 3}}  # fmt: skip
    files = {"about.json": about, "run.json": run, "summary.json": {"steps": STEPS}}
    if pipe:
        timeline = simulate(one_f_one_b(2, 4), Cost(f=1e-2, b=2e-2, send=1e-2))
        files["timeline.json"] = {
            "step": 3, "schedule": json.loads(timeline.schedule.to_json()),
            "events": [[e.rank, str(e.action), e.start_s, e.end_s] for e in timeline.events],
            "copies": [["from the device", "part 0", 0.001, 0.003]],
        }  # fmt: skip
    for name, values in files.items():
        (path / name).write_text(json.dumps(values))
    return path


def report(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    before, sys.argv = sys.argv, ["fzero", "report", *map(str, args)]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    return ended.value.code or 0, *capsys.readouterr()


class Words(HTMLParser):
    """The text of a page; raises where tags do not close as they were opened."""

    VOID = ("meta", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.found.append(data.strip())


def words(path: Path) -> str:
    text = path.read_text()
    # Names of XML's own spaces are no addresses that a browser asks.
    asked = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?:|@import|<script|url\((?!#)", asked)
    return " ".join(filter(None, Words(text).found))


def test_the_page_says_what_the_files_say(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    assert report(capsys, run) == (0, f"written to {run / 'report.html'}\n", "")
    found = words(run / "report.html")
    for part in (
        "5.2500 → 3.5000 after step 8", "5.5000 → 3.2500 after step 8", "8 of 8", "220,544",
        "2,000",  # 4 x 250 tokens in half a second
        "MFU 50.0%",  # 2,000 tokens/s of 1e12 FLOPs each, of 4e15
        "first step 10.00 s (65%)", "12.0 KiB of state, 3.0 GiB at the peak",
        "opt_state 0 8,192 0", "all-gather data bf16 34 1.2 MiB", "325,632", "fzero train <a> & b",
        "4 x H200 (gpu)", "from the device 1 2.0 ms",
        'schedule "1f1b"', "measured: ", "simulated: 150.0 ms, 20% idle",
    ):  # fmt: skip
        assert part in found, part
    assert "cut" not in found
    assert read_run(run).step_seconds == [(step, 0.5) for step in range(2, STEPS + 1)]


def test_an_action_is_drawn_with_the_number_of_its_microbatch(tmp_path):
    drawn = Words(pictures.pipeline(read_run(write_run(tmp_path / "one")))).found
    # Forwards and backwards of two ranks, measured and simulated; on no axis.
    assert drawn.count("3") == 2 * 2 * 2


def test_a_page_without_jinja2_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(fz.FzeroError, match=r"jinja2 to be installed.*fzero\[report\]"):
        render("runs/page.html.jinja", "a run")


def test_settings_that_runs_share_are_no_differences(tmp_path):
    one, two = (
        read_run(write_run(tmp_path / name, lr=lr)) for name, lr in (("one", 1e-3), ("two", 3e-3))
    )
    assert differences([one, two]) == [("run.lr", ["0.001", "0.003"])]


def test_two_runs_are_compared(tmp_path, capsys):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", lr=3e-3, pipe=False)
    status, _, _ = report(capsys, one, two, "--out", tmp_path / "both.html")
    assert status == 0
    found = words(tmp_path / "both.html")
    assert "run.lr 0.001 0.003" in found
    assert "training (one)" in found
    assert "training (two)" in found
    assert "run.batch" not in found


def test_a_run_that_was_killed_is_read_as_far_as_it_goes(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    (run / "summary.json").unlink()
    text = (run / "metrics.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    status, said, _ = report(capsys, run)
    assert status == 0
    assert "the last line of metrics.jsonl is cut: read up to step 4" in said
    found = words(run / "report.html")
    assert "cut: read up to step 4" in found
    assert "killed after step 4" in found
    assert "5.2500 → 4.5000 after step 4" in found


def test_what_was_not_finite_is_no_number(tmp_path):
    run = write_run(tmp_path / "one")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": null}\n')
    (*before, (_, last)) = read_run(run).losses
    assert before[-1] == (8, 3.5)
    assert np.isnan(last)


@pytest.mark.parametrize("make", ["nothing", "a file", "another directory", "a bad line", "a list"])
def test_what_is_no_run_is_refused_by_name(tmp_path, capsys, make):
    path = tmp_path / "what"
    expected = "no such directory"
    if make == "a file":
        path.write_text("x")
        expected = "got a file"
    elif make == "another directory":
        path.mkdir()
        (path / "mine.txt").write_text("x")
        expected = "is no run: expected what `fzero train --out"
    elif make == "a bad line":
        write_run(path)
        (path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"lo\n')
        expected = "metrics.jsonl, line 2: expected a JSON object with a step"
    elif make == "a list":
        write_run(path)
        (path / "about.json").write_text("[1]")
        expected = "about.json: expected a JSON object, got list"
    status, _, error = report(capsys, path)
    assert status == 2
    assert expected in error
    assert str(path) in error
    assert error.count("\n") == 1
    assert not (path / "report.html").exists()


def test_what_a_visit_made_has_left_when_its_successor_says_so(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(trace.time, "perf_counter", lambda: next(clock))
    copies = Copies()
    for visit in (Visit(0), Visit(1, 0)):
        for event in ("fetch", "run", "leave", "gone"):
            copies(event, visit)
    there, back = "to the device, then run", "from the device"
    assert copies.spans() == [
        (there, "section 0", 0, 1), (back, "section 0", 2, 7),
        (there, "section 1, slab 0", 4, 5), (back, "section 1, slab 0", 6, 7),
    ]  # fmt: skip


def test_a_trace_has_every_action_and_copy(tmp_path, capsys):
    run, target = write_run(tmp_path / "one"), tmp_path / "trace.json"
    assert report(capsys, run, "--trace", target)[0] == 0
    events = json.loads(target.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == ["measured", "simulated", "copies, as the host sees them"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [sum(e["pid"] == pid for e in spans) for pid in names] == [16, 16, 1]
    first = next(e for e in spans if e["name"] == "backward 0" and e["args"]["stage"] == 1)
    assert first["dur"] == 20_000  # microseconds
    assert (spans[-1]["name"], spans[-1]["ts"]) == ("part 0", 1000)
    # Four microbatches go from stage 0 to 1, and their gradients back, in both timelines.
    assert sum(e["ph"] == "s" for e in events) == 16
    require_readable(events)
    status, _, error = report(capsys, write_run(tmp_path / "two", pipe=False), "--trace", target)
    assert status == 2
    assert "has no timeline: expected a run of a pipeline" in error


def require_readable(events: list[dict]) -> None:
    """The rules of the Trace Event Format, as far as Perfetto drops what breaks them."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    arrows: dict[str, list[dict]] = {}
    for e in events:
        assert isinstance(e["name"], str)
        assert all(type(e[key]) is int for key in ("pid", "tid"))
        if e["ph"] == "M":
            assert set(e["args"]) == {"name"}
            continue
        assert type(e["ts"]) is int
        assert (e["pid"], e["tid"]) in named
        if e["ph"] == "X":
            assert type(e["dur"]) is int
            assert e["dur"] >= 0
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        else:
            arrows.setdefault(e["id"], []).append(e)
    for spans in threads.values():  # side by side: a viewer leaves out what overlaps
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for start, end in arrows.values():
        assert (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert start["ts"] <= end["ts"]
        for e in (start, end):  # each end is in a span
            spans = threads[e["pid"], e["tid"]]
            assert any(a <= e["ts"] < b or a == e["ts"] for a, b in spans)


def test_copies_that_overlap_are_beside_each_other():
    when = {"a": (0, 3e-3), "b": (1e-3, 4e-3), "c": (3e-3, 5e-3), "d": (0, 1e-9)}
    copies = [Copy("to host", name, *one) for name, one in when.items()]
    events = chrome_trace((), copies)["traceEvents"]
    require_readable(events)
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [threads[e["tid"]] for e in events if e["ph"] == "X" and e["name"] in "abc"] == [
        "to host", "to host (2)", "to host",
    ]  # fmt: skip


@pytest.mark.parametrize("pipeline", [False, True])
def test_one_step_of_a_run_is_drawn(tmp_path, pipeline):
    """The third of a pipeline, or of a step that copies: by then everything is compiled."""
    if pipeline:
        model, batch, plan = tiny.chain(2), tiny.tokens(8), tiny.plan(pipe=2, microbatches=2)
    else:
        model, batch = tiny.regression(), tiny.points(4)
        plan = tiny.plan(data=1, tiers={"opt_state": "host"})
    tx = optax.sgd(1e-2, momentum=0.9)
    step = fz.train_step(model, tx, plan)
    observed, state = Observed(step, tmp_path, 8), fz.init(model, tx, plan, rng=0)
    for number in range(1, 5):
        state, _ = observed(state, batch)
        assert (tmp_path / TIMELINE).exists() == (number >= 3)
    found = json.loads((tmp_path / TIMELINE).read_text())
    assert found["step"] == 3
    assert bool(found["copies"]) != pipeline
    # Two stages, two microbatches, a forward and a backward pass of each.
    assert len(found.get("events", ())) == (8 if pipeline else 0)
    # Copies of later steps are not kept until the end of the run.
    assert pipeline or step.stream.observer is None


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="draws the page in headless Chromium")
def test_a_browser_draws_the_pictures(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    assert report(capsys, run)[0] == 0
    subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--window-size=1100,2600", f"--user-data-dir={tmp_path / 'user'}",
         f"--screenshot={tmp_path / 'page.png'}", (run / "report.html").as_uri()],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    pixels = (matplotlib.image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)

    def where(colour: str) -> np.ndarray:
        return (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(-1)

    # Backward actions take twice as long as forward ones, in two timelines.
    forward, backward = (where(COLOURS[kind]) for kind in "FB")
    rows = np.flatnonzero((backward.sum(1) > 100) & (forward.sum(1) > 50))
    assert len(rows) > 40
    ratio = backward[rows].sum() / forward[rows].sum()
    assert ratio == pytest.approx(2, rel=0.15)  # edges are white, and numbers are written in
    # Parameters are on the device, the optimizer's state beside them on the host.
    params, moments = where(CLASSES["params"]), where(CLASSES["opt_state"])
    side = np.flatnonzero((params.sum(1) > 250) & (moments.sum(1) > 250))
    assert len(side) > 30
    assert np.flatnonzero(params[side[9]]).max() < np.flatnonzero(moments[side[9]]).min()


def test_copies_that_overlap_are_on_threads_of_their_own():
    copies = [
        Copy("to host", "a", 0, 3e-3), Copy("to host", "b", 1e-3, 4e-3),
        Copy("to disk", "c", 0, 5e-3),
    ]  # fmt: skip
    events = chrome_trace((), copies)["traceEvents"]
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 3


def test_pictures_of_a_page_have_ids_of_their_own():
    def ids(name):
        drawn = pictures.figure(3, 2)
        drawn.subplots().plot([1, 3, 2])
        return set(re.findall(r"#(\w+)[)\"]", pictures.svg(drawn, name)))

    assert ids("loss") == ids("loss") != set()
    assert not ids("loss") & ids("rate")


def test_a_validation_loss_that_is_not_finite_is_null_in_the_file():
    sink, other = io.StringIO(), mock.Mock()
    recorder = loop.Recorder(sink, other, loop.History(), other, other, ())
    for loss in (math.nan, math.inf, 1.5):
        recorder.validation(2, loss)
    told = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [line["val_loss"] for line in told] == [None, None, 1.5]
