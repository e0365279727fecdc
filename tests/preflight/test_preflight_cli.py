"""`fzero preflight`: what it prints, and what it refuses before anything is imported."""

import json
import math
import re
from types import SimpleNamespace

import jax
import pytest
from typer.testing import CliRunner

import fzero as fz
from fzero.preflight import topology
from torch_bridge.cli.preflight import _devices, app
from torch_bridge.run.errors import CommandError


FACTORY = """
from __future__ import annotations

from dataclasses import dataclass

import jax, jax.numpy as jnp, fzero as fz, torch


@dataclass
class Size:  # dataclasses look for their module
    width: int = 64


def native():
    def init(rng):
        return {"w": jax.random.normal(rng, (64, 128)), "v": jnp.zeros((128, 8))}, {}

    def loss(params, buffers, batch, rng, train):
        out = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
        return fz.Mean(jnp.sum(out**2), jnp.float32(out.size)), buffers, {}

    return fz.Model(init, loss), lambda rows, seq: {
        "x": jax.ShapeDtypeStruct((rows, seq, 64), jnp.float32)
    }


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4_096, 16_384, bias=False)
        self.down = torch.nn.Linear(16_384, 4_096, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Huge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50_000, 4_096)
        # 32 GB, were they there; rolled into one loop, which must not make them either.
        self.blocks = torch.nn.ModuleList(Block() for _ in range(60))
        self.head = torch.nn.Linear(4_096, 256, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def huge():
    return Huge()


def small():
    return torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256, bias=False))


def neither():
    return 3
"""


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    path = tmp_path_factory.mktemp("preflight") / "models.py"
    path.write_text(FACTORY)
    return path


def run(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_for_a_native_model(factory, tmp_path):
    page = tmp_path / "report.html"
    out = run(
        "--model", f"{factory}:native", "--topology", "cpu:4", "--batch", 8, "--seq", 4,
        "--precision", "fp32", "--json", "--measure", "--html", page,
    )  # fmt: skip
    data = json.loads(out)
    for name in ("fits", "peak_bytes", "state_bytes", "communicated_bytes", "exposed_bytes",
                 "collectives", "compile_seconds"):  # fmt: skip
        assert name in data
    assert data["num_devices"] == 4
    assert data["state_bytes_by_class"] == data["measured"]["state_bytes"]
    assert f"{data['peak_bytes']:,}" in page.read_text()


def test_what_travels_between_devices_is_asked_for_by_flags(factory):
    data = json.loads(
        run(
            "--model", f"{factory}:native", "--topology", "cpu:4", "--batch", 8, "--seq", 4,
            "--gather-dtype", "int8", "--secondary", 2, "--json",
        )
    )  # fmt: skip
    assert (data["plan"]["gather_dtype"], data["plan"]["secondary"]) == ("int8", 2)
    gathers = {(c["dtype"], c["axes"]) for c in data["collectives"] if c["kind"] == "all-gather"}
    assert gathers == {("s8", "data")}
    # The only weight that is split is the first layer's: its gradient does not read it again.
    assert data["secondary_bytes"] == 0


def test_reductions_are_asked_for_by_flags(factory):
    data = json.loads(
        run(
            "--model", f"{factory}:native", "--topology", "cpu:4", "--batch", 8, "--seq", 4,
            "--zero", 1, "--reduce", "step", "--reduce-dtype", "fp32", "--json",
        )
    )  # fmt: skip
    assert (data["plan"]["reduce"], data["plan"]["reduce_dtype"]) == ("step", "fp32")
    sent = {(c["dtype"], c["axes"]) for c in data["collectives"] if c["kind"] == "reduce-scatter"}
    assert sent == {("f32", "data")}


def test_a_sweep_from_the_command_line(factory):
    out = run(
        "--model", f"{factory}:native", "--topology", "cpu:4", "--batch", 8, "--seq", 4,
        "--precision", "fp32", "--sweep", "zero=0,3", "data=4", "pipe=1,2", "secondary=none",
        "reduce_dtype=none",
    )  # fmt: skip
    assert len(re.findall(r"^best ", out, re.M)) == 1
    assert out.count(" fits ") == 2
    assert "needs 8 devices" in out


def test_a_torch_model_of_any_size_allocates_nothing(factory):
    """8.3 billion parameters: 33 GB in float32, of which not one is made."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = json.loads(
        run(
            "--model", f"{factory}:huge", "--topology", "cpu:8", "--batch", 16, "--seq", 8, "--json"
        )
    )
    parameters = (50_000 + 256) * 4_096 + 60 * 2 * 4_096 * 16_384
    assert data["num_elements"] == parameters
    assert data["state_bytes"] == pytest.approx(12 * parameters / 8, rel=0.001)
    assert data["fits"] is False  # in 8 GiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 2**20  # KiB


@pytest.mark.parametrize("spec", ["{}:small", pytest.param("hf:{}", marks=pytest.mark.nightly)])
def test_a_torch_model_is_measured_with_random_weights(spec, factory, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2}'
    )
    model = spec.format(config if spec.startswith("hf:") else factory)
    data = json.loads(
        run(
            "--model", model, "--topology", "cpu:2", "--batch", 4, "--seq", 8,
            "--precision", "fp32", "--json", "--measure",
        )
    )  # fmt: skip
    assert data["state_bytes_by_class"] == data["measured"]["state_bytes"]
    assert data["measured"]["loss"] == pytest.approx(math.log(256), abs=2)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--topology", "v100:8"], "unknown device 'v100'"),
        (["--topology", "cpu:8", "--data", "16"], "needs 16 devices"),
        (["--topology", "cpu:8", "--seq", "1"], "--seq must be at least 2"),
        (["--topology", "cpu:8", "--sweep", "zeros=1"], "expected field=value"),
        (["--topology", "cpu:8", "--sweep", "zero=1", "--measure"], "--measure is about one plan"),
        (["--topology", "cpu:8", "--html", "/not/there/x.html"], "there is no directory"),
        (["--topology", "cpu:8", "--html", "/tmp"], "expected a file, this is a directory; name"),
        (["--topology", "cpu:8", "--remat", "some"], "remat='some'"),
        (["--topology", "cpu:8", "--gather-dtype", "int4"], "gather_dtype='int4'"),
        (["--topology", "cpu:8", "--secondary", "rack"], "secondary='rack'"),
        (["--topology", "cpu:8", "--secondary", "3"], "secondary=3 does not divide data=8"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_looked_at(args, words):
    with pytest.raises(fz.FzeroError, match=re.escape(words)):
        run("--model", "hf:/not/there.json", *args)


def test_rates_of_ones_own(factory, tmp_path):
    own = tmp_path / "rates.json"
    ask = ("--model", f"{factory}:native", "--topology", "cpu:2", "--batch", 8, "--seq", 4,
           "--json", "--rates", own)  # fmt: skip
    own.write_text('{"flops_share": 0.5, "flops_per_s": {"bf16": 2e12}}')
    rates = json.loads(run(*ask))["rates"]
    assert (rates["flops_share"], rates["flops_per_s"]["bf16"]) == (0.5, 2e12)
    assert rates["flops_per_s"]["fp32"] == 5e10
    assert rates["source"].endswith(f"flops_share, flops_per_s from {own}")
    for text, words in (
        ('{"flop_share": 0.5}', "unknown field 'flop_share'; did you mean 'flops_share'?"),
        ('{"flops_share": "half"}', "flops_share='half': expected a number"),
        ('{"flops_share": 0}', "flops_share=0: expected a share, above 0 and at most 1"),
        ('{"flops_per_s": 1e12}', "expected numbers by precision"),
        ("[1]", "expected an object of ['flops_per_s'"),
        ("{", "expected a JSON file of fz.Rates' fields"),
    ):
        own.write_text(text)
        with pytest.raises(fz.FzeroError, match=re.escape(words)):
            run(*ask)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("hf:/not/there.json", "does not exist"),
        ("models.txt", "expected hf:DIR"),
        ("{}:absent", "has no function named 'absent'"),
        ("{}:neither", "must return a torch.nn.Module, or a pair"),
    ],
)
def test_a_model_that_is_none_is_refused(model, words, factory):
    with pytest.raises(CommandError, match=re.escape(words)):
        run("--model", model.format(factory), "--topology", "cpu:4")


def test_without_the_plugin_it_says_so_and_offers_cpus(monkeypatch):
    monkeypatch.setattr(topology, "_PLUGINS", ())
    with pytest.raises(fz.PreflightError, match=r"fzero\[preflight\].*--topology cpu:8"):
        run("--model", "hf:/not/there.json", "--topology", "h200:8x8")


def test_devices_that_are_not_here_cannot_be_measured(monkeypatch):
    with pytest.raises(CommandError, match="h200:8 needs 8 devices of that kind, there are 0"):
        _devices(topology.parse("h200:8"))


def test_devices_of_another_kind_are_not_measured(monkeypatch):
    here = [SimpleNamespace(device_kind="NVIDIA A100-SXM4-80GB")] * 8
    monkeypatch.setattr(jax, "devices", lambda kind: here)
    with pytest.raises(CommandError, match="8 devices of that kind, there are 0 here"):
        _devices(topology.parse("h200:8"))
