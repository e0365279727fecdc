"""`describe` and `placement` of pipelines: what is predicted is what is found."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict

import jax
import optax
import pytest
from execute_cases import counting, tied
from support import tiny
from support.sample import some

import fzero as fz
from fzero.preflight import hlo
from fzero.sharding.initial import initial_shapes
from fzero.tree import named_leaves


TX = optax.adamw(1e-2)


def stateful():
    """A stack with buffers, cut unevenly, beside a layer with some."""

    def init(key):
        return {"w": jax.numpy.zeros((6, 6))}, {"seen": jax.numpy.zeros(3)}

    def apply(p, x, ctx):
        return x @ p["w"], ctx.buffers

    chain = [fz.Layer("one", init, lambda p, b, ctx: apply(p, b["x"], ctx), stateful=True)]
    chain += [fz.Stack("more", 4, init, apply, stateful=True)]
    return fz.Sequential(chain, lambda x, batch: jax.numpy.sum(x))


PLANS = {
    "4x2": {"pipe": 4, "data": 2},
    "2x2x2": {"pipe": 2, "data": 2, "replica": 2, "schedule": "zb_v"},
    "3x1": {"pipe": 3, "data": 1, "schedule": "zb_h1"},
    "2x4-list": {"pipe": 2, "data": 4, "partition": (1, 4)},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("case", PLANS)
@pytest.mark.parametrize("make", [tied, stateful])
def test_described_bytes_are_those_of_the_state(make, case, zero, precision):
    options = dict(PLANS[case])
    if make is tied and "partition" in options:
        options["partition"] = (2, 4)
    plan = tiny.plan(zero=zero, precision=precision, microbatches=2, **options)
    model = make()
    about = fz.describe(plan, model, TX)
    where = fz.placement(fz.abstract_state(model, TX, plan))
    assert about.num_devices == where.num_devices == plan.pipe * plan.data * plan.replica
    classes = ("params", "compute", "opt_state", "buffers", "total")
    assert about.bytes_per_device == {name: where.bytes_per_device[name] for name in classes}
    placed = {(leaf.state_class, leaf.path): leaf for leaf in where.leaves}
    assert placed.keys() == {(leaf.state_class, leaf.path) for leaf in about.leaves}
    per_rank = plan.data * plan.replica
    params, _ = initial_shapes(model)
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(params)}
    for leaf in about.leaves:
        found = placed[leaf.state_class, leaf.path]
        assert leaf.bytes_per_device == found.bytes_per_device, leaf
        assert leaf.dtype == found.dtype
        devices = [rank * per_rank + i for rank in leaf.ranks for i in range(per_rank)]
        assert tuple(devices) == found.devices, leaf
        for name in ("spec", "bytes_in_all", "devices"):
            assert getattr(leaf, name) == getattr(found, name), leaf
        if leaf.state_class == "params":
            assert leaf.shape == shapes[leaf.path]
    assert about.num_elements == sum(map(math.prod, shapes.values()))


def test_the_state_is_where_it_is_said_to_be():
    plan = tiny.plan(pipe=4, data=2, microbatches=2)
    state = fz.init(tied(), TX, plan)
    state, _ = fz.accumulate_step(tied(), TX, plan)(state, counting(8))
    held: dict[int, Counter[str]] = defaultdict(Counter)
    for name in ("params", "opt_state", "grads"):
        for leaf in jax.tree.leaves(getattr(state, name)):
            for shard in leaf.addressable_shards:
                held[shard.device.id][name] += shard.data.nbytes
    where = fz.placement(state)
    for name in ("params", "opt_state", "grads"):
        assert where.bytes_per_device[name] == max(by[name] for by in held.values())
        assert where.bytes_all_devices[name] == sum(by[name] for by in held.values())
    assert held[0]["params"] != held[6]["params"]  # stages differ
    assert json.loads(json.dumps(where.to_json()))["num_devices"] == 8


def test_a_pipeline_needs_no_device_to_be_described():
    plan = fz.Plan(pipe=4, data=16, zero=3, microbatches=8, min_shard_bytes=0)
    about = fz.describe(plan, tied(), TX)
    assert about.num_devices == 64 > len(jax.devices())
    assert json.loads(json.dumps(about.to_json()))["num_devices"] == 64
    lines = {line.split()[0]: line.split() for line in str(about).splitlines() if line}
    assert lines["64"][2:] == ["pipe=4", "x", "replica=1", "x", "data=16;", "Ψ", "=", "1,856",
                               "parameters"]  # fmt: skip
    assert lines["params/blocks/w"][5:9] == ["0-2", "dim", "1", "/"]
    assert "layers per rank: 1, 2, 1, filled up to 2" in str(about)
    assert lines["params/head/gain"][3] == "3"
    assert fz.describe(plan.replace(data=None), tied(), num_devices=16).num_data == 4
    with pytest.raises(fz.PlanError, match="needs 64 devices, but there are 8"):
        fz.describe(plan, tied(), num_devices=8)


@pytest.mark.parametrize("zero", some([0, 2, 3], 2))
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_described_communication_is_that_of_the_programs(schedule, zero, monkeypatch):
    """Counted in the compiled programs, as often as each is run."""
    plan = tiny.plan(pipe=4, data=2, microbatches=2, zero=zero, schedule=schedule)
    step = fz.train_step(tied(), TX, plan)
    moved: dict[int, Counter[str]] = defaultdict(Counter)
    texts: dict[int, str] = {}

    def counted(rank, program):
        def run(*args):
            if id(program) not in texts:
                texts[id(program)] = program.lower(*args).compile().as_text()
            found = hlo.collectives(texts[id(program)])
            gathered = hlo.total(found, "all-gather").wire_elements
            moved[rank]["gathered"] += gathered
            moved[rank]["reduced"] += hlo.total(found).wire_elements - gathered
            return program(*args)

        return run

    for program in step.executor.programs:
        for name in ("forward", "input_backward"):
            monkeypatch.setitem(vars(program), name, counted(program.rank, getattr(program, name)))
        for name in ("backward", "weight_backward"):
            make = getattr(program, name)
            monkeypatch.setattr(
                program, name, lambda sums, make=make, rank=program.rank: counted(rank, make(sums))
            )
    step(fz.init(tied(), TX, plan), counting(8))
    about = fz.describe(plan, tied())
    fullest = max(moved.values(), key=lambda found: found.total())
    assert fullest["reduced"] == about.elements_reduced
    if zero < 3:
        assert fullest["gathered"] == 0  # the update gathers, once
        return
    # Every pass gathers what it reads; an embedding's backward pass does not read its table.
    passes = 3 if schedule == "zb_h1" else 2
    assert about.elements_gathered / passes < fullest["gathered"] <= about.elements_gathered
