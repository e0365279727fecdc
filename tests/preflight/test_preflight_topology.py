"""Which devices a prediction is for, what they can do, and what is refused."""

import dataclasses
import json
import math
import pathlib

import optax
import pytest

import fzero as fz
from fzero.preflight import topology
from fzero.preflight.rates import default_rates
from fzero.preflight.sweep import sweep
from fzero.preflight.topology import GPUS, Topology, parse
from tests.support import tiny


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
CONFIGS = pathlib.Path(fz.__file__).parent / "preflight/topologies"


@pytest.mark.parametrize(
    ("spec", "hosts", "per_host"),
    [("h200:8", 1, 8), ("h100:8x8", 8, 8), ("a100-80:64x8", 64, 8), ("b200:1x4", 1, 4)],
)
def test_a_topology_is_read_and_written(spec, hosts, per_host):
    found = parse(spec)
    assert found == Topology(spec.split(":")[0], hosts, per_host)
    assert parse(str(found)) == found
    assert found.num_devices == hosts * per_host


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("h200", "expected <gpu>:<gpus per host>"),
        ("h200:8x", "expected <gpu>:<gpus per host>"),
        ("h200:8*8", "expected <gpu>:<gpus per host>"),
        ("v100:8", "unknown device 'v100'; known are a100-40"),
        ("h200:0", "has no device"),
        ("cpu:2x4", "use cpu:8"),
    ],
)
def test_what_is_no_topology_is_refused_with_what_to_write(spec, words):
    with pytest.raises(fz.PreflightError) as error:
        parse(spec)
    assert words in str(error.value)
    assert repr(spec) in str(error.value)


def test_every_gpu_has_a_configuration_and_rates_of_the_same_memory():
    assert {path.stem for path in CONFIGS.glob("*.txtpb")} == set(GPUS)
    for name in GPUS:
        where = parse(f"{name}:8")
        text, rates = where.config(), default_rates(where)
        fields = dict(line.strip().split(": ", 1) for line in text.splitlines() if ": " in line)
        assert int(fields["device_memory_size"]) == rates.memory_bytes
        assert int(fields["memory_bandwidth"]) == rates.memory_bytes_per_s
        assert name.split("-")[0].upper() in fields["name"]


def test_without_the_plugin_one_line_says_so_and_offers_cpus(monkeypatch):
    monkeypatch.setattr(topology, "_PLUGINS", ("jax_plugins.not_there",))
    with pytest.raises(fz.PreflightError) as error:
        fz.preflight(None, None, fz.Plan(), {}, "h200:8")
    assert "\n" not in str(error.value)
    assert 'pip install "fzero[preflight]"' in str(error.value)
    assert "--topology cpu:8" in str(error.value)


def test_more_cpu_devices_than_there_are_are_refused():
    with pytest.raises(fz.PreflightError, match=r"jax_num_cpu_devices', 64"):
        parse("cpu:64").devices()


SHARE = "expected a share, above 0 and at most 1"
SIDE = "expected a matmul's side in elements, such as '1024'"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"memory_bytes_per_s": 0}, "memory_bytes_per_s=0: expected a positive number"),
        ({"flops_per_s": {"bf16": -1.0}}, "flops_per_s['bf16']=-1.0: expected a positive number"),
        ({"memory_bytes": math.inf}, "memory_bytes=inf: expected a positive number"),
        ({"launch_s": math.nan}, "launch_s=nan: expected a positive number"),
        ({"reserve_bytes": -1}, "reserve_bytes=-1: expected a positive number or 0"),
        ({"link_share": 0.0}, f"link_share=0.0: {SHARE}"),
        ({"flops_share": 58}, f"flops_share=58: {SHARE}"),
        ({"link_share": math.inf}, f"link_share=inf: {SHARE}"),
        ({"matmul_shares": {"512": 58.0}}, f"matmul_shares['512']=58.0: {SHARE}"),
        ({"matmul_shares": {"abc": 0.5}}, f"matmul_shares: 'abc': {SIDE}"),
        ({"matmul_shares": {"0": 0.5}}, f"matmul_shares: '0': {SIDE}"),
        ({"matmul_shares": {"-4": 0.5}}, f"matmul_shares: '-4': {SIDE}"),
        ({"source": 5}, "source=5: expected text"),
        ({"kind": "h100"}, "these are of 'h100', the topology is of 'h200'"),
    ],
)
def test_rates_are_what_a_device_can_do(wrong, words):
    known = default_rates(parse("h200:8"))
    with pytest.raises(fz.PreflightError) as error:
        known.updated(wrong, "rates.json")
    assert str(error.value).startswith(f"rates: rates.json: {words}")
    if "kind" not in wrong:
        with pytest.raises(fz.PreflightError) as error:
            dataclasses.replace(known, **wrong)
        assert words in str(error.value)


def test_rates_that_were_measured_count_for_devices_of_their_kind():
    given = json.loads((BENCHMARKS / "rates_h200.json").read_text())
    found = default_rates(parse("h200:8")).updated(given, "a file")
    assert (found.kind, found.flops_share) == ("h200", given["flops_share"])
    with pytest.raises(fz.PreflightError, match=r"of 'h200', the topology is of 'cpu'.*calibrate"):
        default_rates(parse("cpu:8")).updated(given, "a file")
    about = optax.sgd(0.1), tiny.plan()
    rest = tiny.tokens(8), "cpu:8"
    for asked in (
        lambda: fz.preflight(tiny.chain(), *about, *rest, rates=found),
        lambda: sweep(lambda plan: tiny.chain(), *about, {"zero": (1,)}, *rest, rates=found),
    ):
        with pytest.raises(fz.PreflightError, match=r"of 'h200', the topology is of 'cpu'"):
            asked()
    del given["kind"]  # as one writes by hand
    assert default_rates(parse("h100:8")).updated(given, "a file").kind == "h100"


def test_a_precision_without_a_rate_is_refused():
    with pytest.raises(fz.PreflightError, match="the plan computes in 'fp4'"):
        default_rates(parse("h200:8")).flops_of("fp4")
