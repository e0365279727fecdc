"""A plan is checked data: what it refuses and why, JSON both ways, mesh sizes without devices."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import fzero as fz
from fzero.pipeline import check


# options, what the message must say: the value, the numbers that clash, and the remedy
REFUSED = [
    ({"zero": 4}, ["zero=4", "[0, 1, 2, 3]"]),
    ({"zero": -1}, ["zero=-1", "[0, 1, 2, 3]"]),
    ({"zero": True}, ["zero=True", "[0, 1, 2, 3]"]),
    ({"zero": "3"}, ["zero='3'", "[0, 1, 2, 3]"]),
    ({"precision": "fp4"}, ["precision='fp4'", "fp32", "bf16", "fp16"]),
    ({"remat": "all"}, ["remat='all'", "layer", "dots", "none"]),
    ({"reduce": "never"}, ["reduce='never'", "microbatch", "step"]),
    ({"data": 0}, ["data=0", "at least 1"]),
    ({"data": 2.0}, ["data=2.0", "whole number"]),
    ({"replica": 0}, ["replica=0", "at least 1"]),
    ({"replica": None}, ["replica=None", "whole number"]),
    ({"pipe": 0}, ["pipe=0", "at least 1"]),
    ({"microbatches": 0}, ["microbatches=0", "at least 1"]),
    ({"microbatches": True}, ["microbatches=True", "whole number"]),
    ({"min_shard_bytes": -1}, ["min_shard_bytes=-1", "at least 0"]),
    ({"clip_norm": 0.0}, ["clip_norm=0.0", "positive", "None"]),
    ({"clip_norm": -1.0}, ["clip_norm=-1.0", "positive", "None"]),
    ({"clip_norm": float("nan")}, ["clip_norm=nan", "positive", "None"]),
    # A quotient of two of these, or of zeros, would be no number.
    ({"clip_norm": float("inf")}, ["clip_norm=inf", "float32", "None"]),
    ({"clip_norm": 1e39}, ["clip_norm=1e+39", "float32", "None"]),
    ({"clip_norm": np.float32(0)}, ["clip_norm=0.0", "positive", "None"]),
    ({"zero": np.True_}, ["zero=True", "[0, 1, 2, 3]"]),
    ({"tiers": {"opt_state": True}}, ["tiers['opt_state']=True", "share"]),
    ({"tiers": {"opt_state": ("disk", True)}}, ["('disk', True)", "share"]),
    ({"clip_norm": 1e-39}, ["clip_norm=1e-39", "float32", "None"]),
    ({"pipe": 2, "reduce": "step"}, ["reduce='step'", "reduce='microbatch'"]),
    ({"schedule": "2f2b"}, ["schedule='2f2b'", "'gpipe', '1f1b'"]),
    ({"schedule": 3}, ["schedule=3", "a name or a fzero.pipeline.Schedule"]),
    ({"partition": (1, 0)}, ["partition=0", "at least 1"]),
    ({"prefetch": 1}, ["prefetch=1", "True or False"]),
    ({"prefetch": "auto"}, ["prefetch='auto'", "True or False"]),
    ({"sequence_parallel": True}, ["sequence_parallel=True with tensor=1", "tensor=2"]),
    ({"skip_nonfinite": None}, ["skip_nonfinite=None", "True or False"]),
    ({"zero": 2, "reduce": "step"}, ["reduce='step'", "zero=2", "'microbatch'", "zero=0 or 1"]),
    ({"zero": 3, "reduce": "step"}, ["reduce='step'", "zero=3", "'microbatch'", "zero=0 or 1"]),
    ({"reduce_dtype": "bf16"}, ["reduce_dtype='bf16'", "fp32"]),
    ({"reduce_dtype": "int8"}, ["is no more", "gather_dtype='int8'", "reduce='step'"]),
    ({"loss_scale": 1024}, ["loss_scale=1024", "fz.LossScaling(initial="]),
    ({"gather": "late"}, ["gather='late'", "eager", "lazy"]),
    ({"zero": 0, "gather": "lazy"}, ["gather='lazy'", "zero=0", "no shards", "zero=1 or 2"]),
    ({"zero": 3, "gather": "lazy"}, ["gather='lazy'", "zero=3", "as it is", "zero=1 or 2"]),
    ({"zero": 2, "pipe": 2, "gather": "lazy"}, ["gather='lazy'", "pipe=2", "gather='eager'"]),
    (
        {"zero": 1, "gather": "lazy", "precision": "bf16", "tiers": {"master": "host"}},
        ["the only parameters", "park 'params'"],
    ),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=lambda x: str(x)[:40])
def test_refuses_bad_values_with_numbers_and_remedy(options, said):
    with pytest.raises(fz.PlanError) as caught:
        fz.Plan(**options)
    for words in said:
        assert words in str(caught.value)


def test_plan_error_is_a_value_error():
    assert issubclass(fz.PlanError, ValueError)
    assert issubclass(fz.PlanError, fz.FzeroError)


SIZES = [
    ({}, 8, {"replica": 1, "data": 8}),
    ({}, 1, {"replica": 1, "data": 1}),
    ({"replica": 2}, 8, {"replica": 2, "data": 4}),
    ({"replica": 8}, 8, {"replica": 8, "data": 1}),
    ({"data": 4}, 8, {"replica": 1, "data": 4}),
    ({"data": 2, "replica": 3}, 8, {"replica": 3, "data": 2}),
    ({"data": 512, "replica": 4}, 4096, {"replica": 4, "data": 512}),
]


@pytest.mark.parametrize(("options", "devices", "sizes"), SIZES)
def test_sizes_of_the_mesh(options, devices, sizes):
    assert fz.Plan(**options).sizes(devices) == sizes


TOO_FEW = [
    ({"data": 16}, 8, ["data=16", "needs 16 devices", "there are 8", "jax_num_cpu_devices', 16"]),
    ({"data": 4, "replica": 3}, 8, ["replica=3 x data=4", "needs 12", "are 8", "lower one"]),
    ({"replica": 3}, 8, ["8 devices", "replica=3", "divisor of 8", "set data"]),
    ({"replica": 16}, 8, ["8 devices", "replica=16", "divisor of 8"]),
]


@pytest.mark.parametrize(("options", "devices", "said"), TOO_FEW)
def test_refuses_devices_that_do_not_fit(options, devices, said):
    with pytest.raises(fz.PlanError) as caught:
        fz.Plan(**options).sizes(devices)
    for words in said:
        assert words in str(caught.value)


def test_plans_are_made_checked_and_sized_without_any_device():
    # A backend that cannot start: any touch of a device would fail.
    code = (
        "import fzero as fz; plan = fz.Plan(zero=3, replica=2, precision='bf16')\n"
        "assert fz.Plan.from_json(plan.to_json()) == plan\n"
        "assert plan.sizes(8) == {'replica': 2, 'data': 4}\n"
        "import jax\n"
        "try:\n    jax.devices()\n"
        "except RuntimeError:\n    print('no device')\n"
    )
    env = {"JAX_PLATFORMS": "nothing"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout == "no device\n", run.stderr


EVERY = {
    "zero": 1,
    "data": 4,
    "pipe": 1,
    "replica": 2,
    "context": 2,
    "tensor": 2,
    "sequence_parallel": True,
    "expert": 2,
    "microbatches": 3,
    "precision": "fp16",
    "keep_fp32": (r"norm\d", "router"),
    "clip_norm": 0.5,
    "remat": "dots",
    "min_shard_bytes": 7,
    "reduce": "step",
    "reduce_dtype": "fp32",
    "gather": "lazy",
    "schedule": "gpipe",
    "partition": (2, 1),
    "prefetch": False,
    "tiers": {"opt_state": "host", "params": 0.5},
    "stream_bytes": 1000,
    "update_on": "host",
    "disk_path": "somewhere",
    "loss_scale": fz.LossScaling(initial=2**12, growth_steps=7, hysteresis=3, minimum=2.0),
    "ema": 0.999,
    "skip_nonfinite": True,
    "deterministic": True,
}
# What only zero=3 has.
SPARING = {"gather_dtype": "int8", "secondary": "host"}
# What only a precision of its own has.
EIGHT = {"precision": "fp8", "float8": fz.Float8("rowwise", keep=("head",), min_dim=64)}


@pytest.mark.parametrize(
    "plan",
    [
        fz.Plan(),
        fz.Plan(**EVERY),
        fz.Plan(**SPARING),
        fz.Plan(**EIGHT),
        fz.Plan(prefetch=True, tiers={"opt_state": ("disk", 0.5)}),
    ],
    ids=["default", "every-field", "sparing", "eight-bits", "prefetch-disk"],
)
def test_json_both_ways(plan):
    data = plan.to_json()
    assert set(data) == {field.name for field in dataclasses.fields(fz.Plan)}
    text = json.dumps(data)
    assert fz.Plan.from_json(data) == fz.Plan.from_json(text) == plan
    assert fz.Plan.from_json(text).to_json() == data


def test_a_share_of_nothing_is_no_tier():
    none = {"params": 0, "opt_state": ("disk", 0.0), "ema": ("host", 0)}
    assert fz.Plan(tiers=none) == fz.Plan()


def test_every_field_has_a_value_of_its_own_in_the_json_test():
    defaults = fz.Plan().to_json()
    every = {**EVERY, **SPARING, **EIGHT}
    assert set(every) == set(defaults)
    assert all(every[name] != defaults[name] for name in every if name != "pipe")


def test_numbers_of_numpy_are_those_of_python():
    plan = fz.Plan(
        zero=np.int64(3), data=np.int64(2), clip_norm=np.float32(0.5), ema=np.float64(0.5),
        pipe=np.int32(2), partition=np.array([2, 2]), skip_nonfinite=np.True_,
    )  # fmt: skip
    like = fz.Plan(
        zero=3, data=2, clip_norm=0.5, ema=0.5, pipe=2, partition=(2, 2), skip_nonfinite=True
    )
    assert repr(plan) == repr(like)
    assert fz.Plan.from_json(json.dumps(plan.to_json())) == like


def test_json_with_an_unknown_key_is_refused():
    with pytest.raises(fz.PlanError, match=r"unknown keys \['stage'\]; known are .*'zero'"):
        fz.Plan.from_json({"stage": 3})


def test_json_is_validated():
    with pytest.raises(fz.PlanError, match="zero=7"):
        fz.Plan.from_json('{"zero": 7}')


def test_frozen_comparable_hashable_printable():
    a, b, other = fz.Plan(zero=2, data=4), fz.Plan(zero=2, data=4), fz.Plan(zero=1, data=4)
    assert a == b
    assert hash(a) == hash(b)
    assert a != other
    assert {a: "x"}[b] == "x"
    assert eval(repr(a), {"Plan": fz.Plan}) == a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.zero = 3  # type: ignore[misc]


def test_replace_validates_again():
    plan = fz.Plan(zero=1, reduce="step")
    assert plan.replace(zero=0).zero == 0
    assert plan.zero == 1
    with pytest.raises(fz.PlanError, match="zero=3"):
        plan.replace(zero=3)


def test_mesh_axes_and_device_order():
    mesh = fz.Plan(replica=2).mesh()
    assert mesh.axis_names == ("replica", "data")
    assert dict(mesh.shape) == {"replica": 2, "data": 4}
    # Auto axes: third-party models written for automatic sharding fail under Explicit ones.
    assert set(mesh.axis_types) == {AxisType.Auto}
    # Devices of one group are neighbours.
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]


def test_mesh_takes_the_first_devices_or_those_given():
    devices = jax.devices()
    assert list(fz.Plan(data=2).mesh().devices.flat) == devices[:2]
    assert list(fz.Plan(data=2).mesh(devices[4:]).devices.flat) == devices[4:6]
    with pytest.raises(fz.PlanError, match="needs 4 devices"):
        fz.Plan(data=4).mesh(devices[:3])


# (zero, precision) -> which classes are kept sharded; the ZeRO paper's table
KEPT = [
    (0, "fp32", {"params": False, "opt_state": False}),
    (1, "fp32", {"params": False, "opt_state": True}),
    (2, "fp32", {"params": False, "opt_state": True}),
    (3, "fp32", {"params": True, "opt_state": True}),
    (0, "bf16", {"params": False, "opt_state": False, "compute": False}),
    (1, "bf16", {"params": True, "opt_state": True, "compute": False}),
    (2, "fp16", {"params": True, "opt_state": True, "compute": False}),
    (3, "bf16", {"params": True, "opt_state": True}),
]


@pytest.mark.parametrize(("zero", "precision", "kept"), KEPT)
def test_what_a_stage_keeps_sharded(zero, precision, kept):
    plan = fz.Plan(zero=zero, precision=precision)
    assert {name: plan.shards(name) for name in kept} == kept
    assert plan.keeps_compute_copy == ("compute" in kept)
    if zero in (1, 2):  # gathering lazily, they keep what stage 3 does
        lazy = plan.replace(gather="lazy")
        assert lazy.shards("params")
        assert lazy.shards("opt_state")
        assert not lazy.keeps_compute_copy


def test_devices_that_nobody_uses_are_named_once_they_are_not_chosen(recwarn):
    with pytest.warns(fz.UnusedDevicesWarning, match=r"take 2 of 8 .*data=None.*devices=") as found:
        fz.Plan(data=2).mesh()
    assert len(found) == 1
    for plan in (fz.Plan(data=1), fz.Plan(data=8), fz.Plan()):
        plan.mesh()
    for count in (2, 4):
        fz.Plan(data=2).mesh(jax.devices()[:count])
    assert not [w for w in recwarn if w.category is fz.UnusedDevicesWarning]


SCALES = {
    "no power of two": ({"initial": 1000}, "initial=1000: expected a power of two"),
    "nothing": ({"minimum": 0}, "minimum=0: expected a power of two"),
    "crossed": ({"initial": 2, "minimum": 4}, r"minimum=4.0 is above initial=2.0"),
    "steps": ({"growth_steps": 0}, "growth_steps=0: expected a whole number of at least 1"),
}


@pytest.mark.parametrize(("options", "said"), SCALES.values(), ids=SCALES)
def test_loss_scales_that_cannot_move_are_refused(options, said):
    with pytest.raises(fz.PlanError, match=f"plan: loss_scale: {said}"):
        fz.LossScaling(**options)
    with pytest.raises(fz.PlanError, match="loss_scale: unknown keys"):
        fz.Plan.from_json({"loss_scale": {"start": 1}})


def test_a_schedule_by_name_is_proven_once_for_its_sizes(monkeypatch):
    """A user's is proven for each plan."""
    asked = []
    monkeypatch.setattr("fzero.plan.check", lambda made: asked.append(made) or check(made))
    for precision in ("fp32", "bf16"):
        fz.Plan(pipe=3, microbatches=11, schedule="zb_v", precision=precision)
    assert len(asked) == 1
    own = fz.Plan(pipe=3, microbatches=11, schedule="zb_v").build_schedule()
    for precision in ("fp32", "bf16"):
        fz.Plan(pipe=3, microbatches=11, schedule=own, precision=precision)
    assert len(asked) == 3
