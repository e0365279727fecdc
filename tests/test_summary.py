"""What is printed: paths, shapes, splits, tiers and bytes on a screen; never values."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import treescope
from support import tiny

import fzero as fz
from fzero.pipeline import one_f_one_b
from fzero.summary import summary


MODEL, TX = tiny.chain(3), optax.adamw(1e-2)
PLAN = tiny.plan(zero=3, data=4, precision="fp16")
LINES, COLUMNS = 50, 140


def wide(num):
    """A model of many leaves with values that would be noticed."""

    def init(rng):
        return {f"layer{i:03}": jnp.full((4, 4), 123.456) for i in range(num)}, {}

    return fz.Model(init, lambda p, b, batch, rng, train: (jnp.sum(p["layer000"]), b, {}))


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """An object of every public kind."""
    path = tmp_path_factory.mktemp("run")
    model, plan = wide(100), tiny.plan(zero=3, data=4, precision="fp16")
    state = fz.init(model, TX, plan)
    fz.save(path, state, plan, asynchronous=False)
    values = ({"w": np.full((4, 4), 123.456)}, {"b": np.full(4, 123.456)})
    small = fz.init(MODEL, TX, PLAN)
    added, _ = fz.accumulate_step(MODEL, TX, PLAN)(small, tiny.tokens(16))
    return {
        "TrainState": state,
        "Pending": added.grads,
        "LossScale": state.loss_scale,
        "parked": fz.offload(state, "opt_state", to="disk", donate=False),
        "abstract": fz.abstract_state(model, TX, plan),
        "Plan": plan,
        "Model": model.with_init(values),
        "Sequential": MODEL,
        "train_step": fz.train_step(MODEL, TX, PLAN),
        "eval_step": fz.eval_step(MODEL, PLAN),
        "Description": fz.describe(plan, model, TX, num_devices=4),
        "Placement": fz.placement(state),
        "Checkpoint": fz.checkpoint(path),
        "Schedule": one_f_one_b(4, 64),
    }


NAMES = [
    "TrainState", "Pending", "LossScale", "parked", "abstract", "Plan", "Model", "Sequential",
    "train_step", "eval_step", "Description", "Placement", "Checkpoint", "Schedule",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_a_screen_and_has_no_values(name, things):
    for text in (repr(things[name]), str(things[name]) if name != "Schedule" else ""):
        lines = text.splitlines()
        assert len(lines) <= LINES, text
        assert all(len(line) <= 200 for line in lines), text
        assert "Array(" not in text
        assert "0x" not in text
        assert not re.search(r"123\.4|65536", text)


def test_a_state_says_where_everything_is(things):
    text = repr(things["parked"])
    assert text.startswith("TrainState: 307")
    rows = [line.split() for line in text.splitlines()]
    assert ["params:", "100", "leaves,"] in [row[:3] for row in rows]
    assert ["layer000", "float32[4,", "4]", "data", "device", "16", "bytes"] in rows
    assert any(row[0].endswith("mu/layer000") and "disk" in row for row in rows)
    assert ["...", "95", "more"] in rows


@pytest.mark.parametrize(
    ("plan", "parked"),
    [
        (tiny.plan(zero=3, tiers={"opt_state": "host"}), True),
        # Each rank has layers of its own, and one of them the embedding.
        (tiny.plan(zero=3, pipe=2, data=4, microbatches=4, schedule="zb_h1"), False),
    ],
    ids=["host", "pipeline"],
)
def test_bytes_are_those_that_a_device_holds(plan, parked):
    state = fz.abstract_state(MODEL, TX, plan)
    told, where = str(state).splitlines()[0], fz.placement(state)
    beside = 4 + 8  # the step's number and the key, which are no class of the state
    held = where.bytes_per_device["total"] + beside
    host = where.host_bytes_per_device["total"]
    assert told.endswith(f"{held:,} bytes on each device" + f", {host:,} on the host" * parked)
    assert bool(host) == parked


def test_a_plan_says_what_is_not_the_default():
    assert (
        repr(fz.Plan(zero=3, data=4, precision="bf16")) == "Plan(zero=3, data=4, precision='bf16')"
    )


def test_under_a_transformation_and_after_a_step_too():
    seen = []
    plan = tiny.plan(data=1)
    state = fz.init(MODEL, TX, plan)
    jax.eval_shape(lambda s: seen.append(repr(s)), state)
    assert "embed/table" in seen[0]
    repr(jax.tree.map(lambda x: x.sharding, state))
    fz.train_step(MODEL, TX, plan)(state, tiny.tokens(16))
    assert "embed/table" in repr(state)  # consumed


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_render_it(name, things):
    assert treescope.render_to_text(things[name])
    if name in ("TrainState", "Model", "Checkpoint", "parked"):
        assert things[name]._repr_html_().startswith("<pre>")


def test_an_array_on_the_host_is_on_no_tier():
    told = summary("Pair", {"a": np.zeros(3, np.float32), "b": jnp.zeros(3)}).splitlines()
    assert [line.split() for line in told[2::2]] == [
        ["a", "float32[3]", "whole", "12", "bytes"],
        ["b", "float32[3]", "whole", "device", "12", "bytes"],
    ]
