"""Which devices a prediction is for, what they can do, and what is refused."""

import dataclasses
import pathlib

import pytest

import fzero as fz
from fzero.preflight import topology
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import GPUS, Topology, parse


CONFIGS = pathlib.Path(fz.__file__).parent / "topologies"


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


@pytest.mark.parametrize(
    "wrong", [{"memory_bytes_per_s": 0}, {"flops_per_s": {"bf16": -1.0}}, {"link_share": 0.0}]
)
def test_rates_are_positive(wrong):
    with pytest.raises(fz.PreflightError, match=next(iter(wrong))):
        dataclasses.replace(default_rates(parse("h200:8")), **wrong)


def test_a_precision_without_a_rate_is_refused():
    with pytest.raises(fz.PreflightError, match="the plan computes in 'fp4'"):
        default_rates(parse("h200:8")).flops_of("fp4")
