"""A device measured once, and what predictions make of it. The figures themselves prove nothing."""

from __future__ import annotations

import json
import math
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from typer.testing import CliRunner

import fzero as fz
from fzero.cli import app
from fzero.preflight import calibrate as calibrating
from fzero.preflight.calibrate import (
    SMALL,
    Calibration,
    Effort,
    _attention,
    _launch,
    _matmuls,
    _memory,
    _narrow_matmuls,
    _seconds,
    calibrate,
    kind_of,
)
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import parse


MODEL = fz.Model(
    lambda rng: ({"w": jnp.zeros((64, 64))}, {}),
    lambda p, b, batch, rng, train: (jnp.mean(jnp.square(batch["x"] @ p["w"])), b, {}),
)
BATCH = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}


def likely(rates):
    found = fz.preflight(
        MODEL, optax.sgd(0.1), fz.Plan(zero=0, data=1), BATCH, "cpu:1", rates=rates
    )
    return found.bounds.likely_seconds


def test_the_command_writes_rates_that_predictions_take(tmp_path):
    out = tmp_path / "rates.json"
    done = CliRunner().invoke(app, ["calibrate", "--small", "--out", str(out)])
    assert done.exit_code == 0, done.output
    given = json.loads(out.read_text())
    own = default_rates(parse("cpu:1")).updated(given, str(out))
    assert "measured on" in own.source
    assert own.kind == "cpu"
    assert set(own.matmul_shares) == {str(side) for side in SMALL.sides}
    assert own.flops_share == max(own.matmul_shares.values())
    assert likely(own) > 0
    # Half as fast in all that this step does takes twice as long.
    slow = {
        "flops_per_s": {name: rate / 2 for name, rate in own.flops_per_s.items()},
        "memory_bytes_per_s": own.memory_bytes_per_s / 2,
        "launch_s": 2 * own.launch_s,
    }
    assert likely(own.updated(slow, "slower")) == pytest.approx(2 * likely(own), rel=0.01)


@pytest.mark.parametrize("out", ["nodir/rates.json", "."])
def test_where_it_writes_is_known_before_anything_is_measured(out, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "calibrate", lambda **_: pytest.fail("measured"))
    done = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / out)])
    assert isinstance(done.exception, fz.PreflightError)
    assert "expected a file in a directory that exists" in str(done.exception)


def test_a_gpus_shares_are_of_its_data_sheet():
    measured = {
        "matmul bf16/1024": 300e12, "matmul bf16/8192": 700e12, "matmul fp32/8192": 400e12,
        "attention": 500e12, "elementwise": 4.32e12, "to host": 50e9, "from host": 40e9,
        "launch": 3e-6, "matmul fp8/8192": 1200e12, "matmul fp8 exact/8192": 900e12,
    }  # fmt: skip
    sheet = default_rates(parse("h200:1"))
    found = Calibration("NVIDIA H200", "h200", sheet.flops_per_s, measured, "2026-11-22").rates()
    own = sheet.updated(found, "a file")
    assert own.matmul_shares == {"1024": round(300 / 989.4, 4), "8192": round(700 / 989.4, 4)}
    assert own.flops_share == round(700 / 989.4, 4)
    assert own.attention_share == round(500 / 989.4, 4)
    assert own.memory_share == pytest.approx(0.9)
    assert (own.pinned_bytes_per_s, own.launch_s) == (40e9, 3e-6)
    assert own.flops_per_s == sheet.flops_per_s
    # Of a peak twice as high, what 8 bits reach of the share that 16 do; exact sums, of that.
    assert own.fp8_share == pytest.approx(1200 / 1400, abs=1e-3)
    assert own.fp8_exact_share == 0.75
    measured["elementwise"] = 5e12  # what a clock made of the sheet's 4.8
    found = Calibration("NVIDIA H200", "h200", sheet.flops_per_s, measured, "2026-11-22").rates()
    assert (found["memory_share"], found["kind"]) == (1.0, "h200")


def test_products_in_8_bits_are_measured_with_both_kinds_of_sums():
    found = _narrow_matmuls(SMALL)
    assert set(found) == {"matmul fp8/256", "matmul fp8 exact/256"}
    assert min(found.values()) > 0


def test_what_a_measurement_counts(monkeypatch):
    """By clocks of our own: elementwise work reads and writes, a launch is what one link adds."""
    clock = iter([1.0, 2.0, 4.0, 0.01, 0.97, 1.0])
    monkeypatch.setitem(_memory.__globals__, "_seconds", lambda *_: next(clock))
    size = SMALL.mib * 2**20
    assert _memory(SMALL, jax.devices()[0]) == {
        "elementwise": 2 * size, "to host": size / 2, "from host": size / 4
    }  # fmt: skip
    assert _launch(SMALL) == pytest.approx(0.02)  # 64 links less 16
    # 2 products forwards, 5 backwards, of half the square.
    assert _attention(SMALL) == 7 * 2 * (1 * 2) * (128 * 128 / 2) * 32


def test_a_program_of_products_has_enough_of_them_to_be_timed(monkeypatch):
    """On a GPU a call costs more than a product of 512 x 512."""
    links, made = [], []

    def seconds(run, args, _):
        text = run.lower(*args).as_text()
        links.append(text.count("stablehlo.dot_general"))
        made.append(partial(run, *args))
        return 1.0

    monkeypatch.setitem(_matmuls.__globals__, "_seconds", seconds)
    found = _matmuls(SMALL)
    assert links == 3 * [math.ceil(SMALL.flops / (2 * 64**3)), 1]
    assert found["matmul bf16/64"] == links[0] * 2 * 64**3
    for product in made:  # of numbers that stay numbers
        assert 0.2 < float(jnp.std(product().astype(jnp.float32))) < 5
    many = Effort((64,), flops=1e12)
    assert _matmuls(many)["matmul fp32/64"] == 256 * 2 * 64**3


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [("NVIDIA A100-SXM4-40GB", 29.5, "a100-40"), ("NVIDIA A100 80GB PCIe", 59.3, "a100-80"),
     ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"), ("NVIDIA H100 80GB HBM3", 59.3, "h100"),
     ("cpu", 0, "cpu")],
)  # fmt: skip
def test_a_device_is_known_by_its_name_and_memory(name, gib, kind):
    """Jax takes three quarters of the memory, or what it is told to."""
    memory = {"bytes_limit": int(gib * 2**30)}
    platform = "cpu" if name == "cpu" else "gpu"
    device = SimpleNamespace(platform=platform, device_kind=name, memory_stats=lambda: memory)
    assert kind_of(device) == kind


def test_a_device_without_a_data_sheet_is_refused():
    class Unknown:
        platform, device_kind = "gpu", "NVIDIA T4"

    with pytest.raises(fz.PreflightError, match=r"'NVIDIA T4'.*h200.*rates of your own"):
        calibrate(Unknown())


def test_seconds_are_those_of_one_call(monkeypatch):
    clock = [0.0]

    def run():
        clock[0] += 0.25
        return 0

    monkeypatch.setattr(calibrating, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert _seconds(run, (), Effort((), 0, (0, 0, 0, 0), 0.0, 4.0, 2)) == 0.25
    assert clock[0] == (1 + 2 + 2 * 8) * 0.25, "two runs of what takes two seconds each"
