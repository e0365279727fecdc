"""Predictions for CPU devices, against arrays that are there and programs that run."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import fzero as fz
from fzero.preflight.measure import compared, measure
from fzero.preflight.page import COLOURS, page
from fzero.preflight.rates import default_rates
from fzero.preflight.shapes import saved_in_a_step
from fzero.preflight.sweep import (
    FITS,
    NOT_COMPILED,
    REFUSED,
    TOO_LARGE,
    Sweep,
    Tried,
    _order,
    parse_choices,
    sweep,
)
from fzero.preflight.tables import duration
from fzero.preflight.topology import parse
from fzero.report.placement import CLASSES
from fzero.schedule.actions import Action
from tests.preflight.conftest import PLANS, ROWS, SIZE, TX
from tests.support import tiny
from tests.support.gpt import abstract_batch, batches, gpt, num_params


CONTRACT = (
    "fits", "peak_bytes", "state_bytes", "communicated_bytes", "exposed_bytes", "collectives",
    "compile_seconds",
)  # fmt: skip
ONE_PROGRAM = ["zero1_bf16", "zero3"]


@pytest.mark.parametrize("name", PLANS)
def test_state_classes_are_exact(name, model, predicted, held):
    found = predicted(name)
    state = fz.init(model, TX, PLANS[name], rng=0)
    by_class = {part: held(getattr(state, part)) for part in CLASSES}
    device = 0
    if found.pipeline is not None:  # of the rank with the highest peak
        peaks = found.pipeline.peak_bytes_per_rank
        device = peaks.index(max(peaks)) * 4
    assert found.memory.state == {part: by.get(device, 0) for part, by in by_class.items()}


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_the_peak_is_that_of_the_step_on_real_arrays(name, model, predicted):
    found, plan = predicted(name).memory, PLANS[name]
    state = fz.init(model, TX, plan, rng=0)
    step = fz.train_step(model, TX, plan)
    rows = next(batches(SIZE, ROWS))
    memory = step.lower(state, rows).compile().memory_analysis()
    real = memory.argument_size_in_bytes + memory.output_size_in_bytes
    real += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert found.peak == pytest.approx(real, rel=0.05)
    parts = found.batch + found.saved_activations + found.gradients + found.temporaries
    # Besides these: the step's number, the key and the metrics.
    assert 0 <= found.peak - found.state_total - parts <= 256
    assert found.batch * 8 == sum(x.nbytes for x in rows.values())


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_traffic_is_that_of_the_plan(name, model, predicted):
    found, plan = predicted(name), PLANS[name]
    about = fz.describe(plan, model, TX, num_devices=8)
    # The CPU backend adds 16-bit floats as float32, and gathers bits: count elements.
    small = [c for c in found.collectives if c.bytes <= 64]
    elements = sum(
        c.total_bytes / {"bf16": 2, "u16": 2}.get(c.dtype, 4)
        for c in found.collectives
        if c not in small
    )
    assert elements == pytest.approx(about.elements_communicated, rel=0.02)
    assert {c.axes for c in found.collectives} <= {"data", "replica", "replica+data"}
    assert found.traffic.exposed_bytes == found.traffic.communicated_bytes  # nothing is async


def test_flops_are_three_forward_passes_and_what_is_recomputed(predicted):
    found = predicted("zero3")
    tokens = ROWS // 8 * SIZE.seq
    weights = 12 * SIZE.d**2 * SIZE.layers + SIZE.vocab * SIZE.d
    scores = 2 * SIZE.seq * SIZE.d * SIZE.layers
    assert found.model_flops == 6 * tokens * (weights + scores)
    assert found.num_elements == num_params(SIZE)
    assert 1.0 <= found.compiled_flops / found.model_flops <= 4 / 3 + 0.01
    assert found.unknown_flops == ()


def test_a_layers_input_is_what_is_saved(predicted):
    """Of each layer its input; of the ends what their backward passes read."""
    deep = predicted("zero3").memory.saved_activations
    one_input = ROWS // 8 // 2 * SIZE.seq * SIZE.d * 4
    assert deep >= SIZE.layers * one_input
    shallow = dataclasses.replace(SIZE, layers=2)
    step = fz.train_step(gpt(shallow), TX, PLANS["zero3"])
    small = saved_in_a_step(step.passes, step.blueprint.shapes(), abstract_batch(shallow, ROWS))
    numbers = 2 * 4  # and its number
    assert deep - small.activations == pytest.approx((SIZE.layers - 2) * one_input, abs=numbers)


def test_tracing_and_compiling_take_no_longer_than_the_prediction():
    began = time.perf_counter()
    found = fz.preflight(tiny.chain(), TX, tiny.plan(data=2), tiny.tokens(4), "cpu:2")
    took = time.perf_counter() - began
    assert 0 < found.trace_seconds <= took - found.compile_seconds < took


def test_what_is_saved_along_tensor_is_among_the_temporaries():
    """XLA divides it; counted whole it would be more than the peak."""

    def block(p, x, ctx):
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def init(rng):
        return {"up": jnp.ones((8, 512)), "down": jnp.ones((512, 8))}

    model = fz.Sequential([
        fz.Layer("in", None, lambda p, batch, ctx: batch["x"]),
        fz.Stack("blocks", 3, init, block, shard={"up": (None, "tensor"), "down": ("tensor",)}),
        fz.Layer("mean", None, lambda p, x, ctx: fz.Mean(jnp.sum(x**2), jnp.float32(x.size))),
    ])  # fmt: skip
    batch = {"x": jax.ShapeDtypeStruct((1024, 8), jnp.float32)}
    plan = fz.Plan(zero=3, data=1, tensor=8, remat="none")
    found = fz.preflight(model, TX, plan, batch, "cpu:8")
    assert found.memory.saved_activations == 0
    whole = 3 * 1024 * 512 * 4
    assert 0 <= found.memory.peak - sum(count for _, count in found.memory.parts()) <= 256
    assert found.memory.peak < whole
    assert any("divided along tensor as XLA decides" in note for note in found.notes)


@pytest.mark.parametrize("name", PLANS)
def test_json_has_what_was_promised(name, predicted):
    data = json.loads(json.dumps(predicted(name).to_json()))
    assert set(CONTRACT) <= set(data)
    assert data["fits"] is True
    assert data["state_bytes"] == sum(data["state_bytes_by_class"].values())
    assert data["communicated_bytes"] == pytest.approx(
        sum(c["total_bytes"] for c in data["collectives"])
    )
    assert data["exposed_bytes"] <= data["communicated_bytes"]
    assert fz.Plan.from_json(data["plan"]) == PLANS[name]
    bounds = data["bounds"]
    assert 0 < bounds["best_seconds"] <= bounds["likely_seconds"] <= bounds["serial_seconds"]
    assert 0 < bounds["serial_mfu"] <= bounds["likely_mfu"] <= bounds["best_mfu"] < 1


@pytest.mark.parametrize("name", PLANS)
def test_it_prints_as_tables(name, predicted):
    text = str(predicted(name))
    for words in ("fits: peak", "saved activations", "all-gather", "recomputed", "likely"):
        assert words in text
    assert ("pipeline zb_h1" in text) == (name == "pipeline")
    assert all(len(line) <= 100 for line in text.splitlines())


def test_stages_that_are_alike_are_compiled_once():
    def layer(name):
        def apply(p, x, ctx):
            return jax.numpy.tanh((ctx.batch["x"] if name == "0" else x) @ p["w"])

        return fz.Layer(name, lambda key: {"w": jax.random.normal(key, (8, 8))}, apply)

    model = fz.Sequential([layer(str(n)) for n in range(4)], lambda x, batch: jax.numpy.mean(x))
    plan = fz.Plan(pipe=4, data=2, microbatches=4)
    found = fz.preflight(model, TX, plan, {"x": np.zeros((8, 8), np.float32)}, "cpu:8")
    _, second, third, _ = found.pipeline.stage_seconds
    assert second == third


def test_a_pipeline_is_simulated_with_the_costs_of_its_programs(predicted):
    found = predicted("pipeline")
    own = found.pipeline
    schedule = PLANS["pipeline"].build_schedule()
    assert len(own.events) == len(schedule.actions)
    done = {Action(kind, stage, m): (start, end) for _, kind, stage, m, start, end in own.events}
    assert done.keys() == set(schedule.actions)
    for action, (start, end) in done.items():
        assert end - start == pytest.approx(own.stage_seconds[action.stage][action.kind])
    assert own.makespan_seconds == max(end for _, end in done.values())
    # The optimizer's programs come last. (The head's copy of the table comes while others compute.)
    beside = [c for c in found.collectives if c.estimated]
    assert {c.where for c in beside} == {"update", "tied weights, rank 0 to 1"}
    likely = own.makespan_seconds + sum(c.exposed_seconds for c in beside)
    assert likely < found.bounds.likely_seconds < 1.5 * likely
    assert 1.0 <= found.compiled_flops / found.model_flops <= 2.0
    assert max(own.peak_bytes_per_rank) == found.memory.peak
    sends = [c for c in found.collectives if c.kind == "send" and not c.estimated]
    # Forwards one way or cotangents the other: a microbatch's activations each.
    assert {c.bytes for c in sends} == {ROWS // 4 // 4 * SIZE.seq * SIZE.d * 4}
    assert sum(c.times for c in sends) == PLANS["pipeline"].microbatches


def test_too_little_memory_does_not_fit(predicted):
    rates = dataclasses.replace(default_rates(parse("cpu:8")), memory_bytes=100_000)
    found = dataclasses.replace(predicted("zero3"), rates=rates)
    assert not found.fits
    assert found.spare_bytes == 100_000 - found.memory.peak
    assert "does NOT fit" in str(found)
    assert "does not fit" in page(found)


def test_a_collective_is_said_to_add_what_all_of_its_times_do(predicted):
    found = predicted("zero3")
    largest = max(found.collectives, key=lambda c: c.total_bytes)
    own = dataclasses.replace(largest, times=10, exposed_seconds=2.0)
    text = str(dataclasses.replace(found, collectives=(own,)))
    assert re.search(rf"^{own.kind} .* 10 .* 20\.00 s", text, re.M), text


@pytest.mark.parametrize(("share", "told"), [(0.7, None), (0.8, 0.81), (0.985, 0.99)])
def test_what_jax_is_told_to_take_is_more_than_the_peak(predicted, share, told):
    found, gpus = predicted("zero3"), parse("h200:8")
    size = round(found.memory.peak / share)
    rates = dataclasses.replace(default_rates(gpus), memory_bytes=size, reserve_bytes=0)
    found = dataclasses.replace(found, topology=gpus, rates=rates)
    assert found.memory_fraction_needed == told
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION" in str(found)) is (told is not None)


def test_a_batch_that_does_not_divide_is_refused(model):
    with pytest.raises(fz.BatchError, match="12 examples"):
        fz.preflight(model, TX, fz.Plan(data=8), abstract_batch(SIZE, 12), "cpu:8")


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.words = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_the_page_needs_nothing_else_and_has_the_numbers(name, predicted):
    found = predicted(name)
    text = page(found, title="a <b> & c")
    read = _Page()
    read.feed(text)
    assert not {"script", "link", "img", "iframe", "object", "b"} & set(read.tags)
    assert not [value for key, value in read.attributes if key in ("src", "href", "xlink:href")]
    assert not re.search(r"https?:|url\(|@import", text)
    words = " ".join(read.words)
    assert "a <b> & c" in words
    for count in (found.memory.peak, *filter(None, found.memory.state.values())):
        assert f"{count:,}" in words
    for c in found.collectives:
        assert c.kind in words
    alone = found.traffic.exposed_seconds
    beside = found.traffic.seconds / found.rates.link_share - alone
    kernels = found.bounds.likely_seconds - alone
    for what, long in (("kernels", kernels), ("hidden", beside), ("in the open", alone)):
        assert (f"{what}: {duration(max(0.0, long))}" in words) is (found.pipeline is None)
    if found.pipeline is not None:
        assert read.tags.count("rect") >= len(found.pipeline.events)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="draws the page in headless Chromium")
def test_a_browser_draws_the_memory_bars(predicted, tmp_path):
    """The shares of a bar's pixels are those of the bytes, in the colours of the legend."""
    found = predicted("zero3")
    (tmp_path / "page.html").write_text(page(found))
    subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--window-size=1200,900", f"--user-data-dir={tmp_path / 'user'}",
         f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "page.html").as_uri()],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    pixels = (matplotlib.image.imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    params, moments = (
        (pixels == [int(COLOURS[name][i : i + 2], 16) for i in (1, 3, 5)]).all(-1).sum(1)
        for name in ("params", "opt_state")
    )
    # The line of pixels that crosses the longer bar; no other has both.
    row = np.argmax(np.where((params > 0) & (moments > 0), params + moments, 0))
    assert params[row] > 50
    held = found.memory.state
    # Ends of a bar fall between pixels.
    assert moments[row] / params[row] == pytest.approx(held["opt_state"] / held["params"], rel=0.05)


def test_a_sweep_stops_early_sorts_and_marks_the_best(model, batch, monkeypatch):
    compiled = []
    module = sys.modules["fzero.preflight.sweep"]
    real = module.preflight
    monkeypatch.setattr(
        module, "preflight", lambda *a, **k: compiled.append(a[2].zero) or real(*a, **k)
    )
    base = fz.Plan(data=8, min_shard_bytes=256)
    kept = {
        z: fz.placement(base.replace(zero=z), model, TX, num_devices=8).bytes_per_device["total"]
        for z in (0, 3)
    }
    # Room for the state of stage 3, not for that of stage 0; for its step, plenty.
    rates = dataclasses.replace(default_rates(parse("cpu:8")), memory_bytes=kept[0] - 1)
    seen = []
    found = sweep(
        lambda plan: model, TX, base, parse_choices(["zero=0,3", "microbatches=1,3"]), batch,
        "cpu:8", rates=rates, progress=seen.append,
    )  # fmt: skip
    verdicts = {tuple(one.choice.values()): one.verdict for one in found.tried}
    assert verdicts == {
        (3, 1): FITS, (0, 1): NOT_COMPILED, (0, 3): NOT_COMPILED, (3, 3): REFUSED
    }  # fmt: skip
    assert compiled == [3, 3]  # stage 0 never came to the compiler
    assert [one.verdict for one in found.tried] == [FITS, NOT_COMPILED, NOT_COMPILED, REFUSED]
    assert found.best is found.tried[0]
    assert len(seen) == 4
    text = str(found)
    assert re.search(r"^best\s+3\s+1\s+fits", text, re.M)
    assert "refused: batch: 16 examples cannot be split" in text
    assert json.loads(json.dumps(found.to_json()))["best"] == {"zero": 3, "microbatches": 1}


def test_a_sweep_divides_layers_and_sequences_and_sums_are_by_axis():
    def loss(p, buffers, batch, rng, train):
        h = jax.lax.with_sharding_constraint(
            batch["x"] @ p["w"], PartitionSpec(None, None, "tensor")
        )
        return fz.Mean(jnp.sum(h @ p["v"]), jnp.float32(16 * 4)), buffers, {}

    shapes = {"w": (64, 512), "v": (512, 64)}
    model = fz.Model(
        lambda rng: ({name: jnp.ones(shape) for name, shape in shapes.items()}, {}), loss,
        shard={"w": (None, "tensor"), "v": ("tensor",)},
    )  # fmt: skip
    rows = {"x": jax.ShapeDtypeStruct((16, 4, 64), jnp.float32)}
    choices = parse_choices(["tensor=2,3", "context=2"])
    found = sweep(lambda plan: model, TX, fz.Plan(zero=2, data=2), choices, rows, "cpu:8")
    assert [(one.choice["tensor"], one.verdict) for one in found.tried] == [(2, FITS), (3, REFUSED)]
    best = found.best.found
    assert best.memory.batch == 16 * 4 * 64 * 4 // (2 * 2)
    assert best.memory.gradients == 2 * 64 * 512 * 4 // (2 * 2 * 2)  # data, context, tensor
    assert any("divided along tensor as XLA decides" in note for note in best.notes)
    over = best.by_axes
    assert set(over) >= {"data", "tensor"}
    assert over["data"].communicated_bytes == pytest.approx(
        sum(c.total_bytes for c in best.collectives if c.axes == "data")
    )
    assert re.search(r"^all +tensor +in a host +[\d.]+ ?% exposed", str(best), re.M)


def test_what_fits_is_sorted_by_time(predicted):
    fast, slow = predicted("zero3"), predicted("pipeline")
    tried = [Tried({"n": n}, None, v, found=f)
             for n, v, f in ((1, FITS, slow), (2, TOO_LARGE, fast), (3, FITS, fast))]  # fmt: skip
    ordered = Sweep(tuple(sorted(tried, key=_order)))
    best = [one.found.bounds.best_seconds for one in ordered.tried[:2]]
    assert best == sorted(best)
    assert ordered.tried[-1].choice == {"n": 2}


@pytest.mark.parametrize("word", ["zero", "colour=red", "zero=a", "zero=", "zero=1,,2"])
def test_a_choice_that_is_none_is_refused(word):
    with pytest.raises(fz.PreflightError, match="--sweep"):
        parse_choices([word])


def test_choices_are_of_the_kinds_that_a_plan_has():
    """A secondary group is a number of devices, or those of a host."""
    words = ["secondary=none,host,4", "microbatches=2", "schedule=none,1f1b"]
    assert parse_choices(words) == {
        "secondary": (None, "host", 4), "microbatches": (2,), "schedule": (None, "1f1b")
    }  # fmt: skip


def test_measured_beside_predicted(model, batch, predicted):
    plan = PLANS["zero3"]
    found = measure(model, TX, plan, batch, steps=1)
    assert found.state_bytes == predicted("zero3").memory.state
    assert found.seconds > 0
    assert np.isfinite(found.loss)
    text = compared(predicted("zero3"), found)
    for count in filter(None, found.state_bytes.values()):
        assert len(re.findall(f"{count:,}", text)) == 2
    assert jax.devices()[0].platform == "cpu"
    assert "not told" in text


def test_a_pipelines_update_gathers_16_bits_where_it_computes_in_them():
    sent = {}
    for precision in ("fp32", "bf16"):
        plan = tiny.plan(zero=1, data=2, pipe=2, microbatches=2, precision=precision)
        found = fz.preflight(tiny.chain(), TX, plan, tiny.tokens(8), "cpu:4")
        sent[precision] = sum(u.bytes for u in found.collectives if u.where == "update")
    assert sent["bf16"] * 2 == sent["fp32"] > 0
