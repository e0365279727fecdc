"""Numbers of stages and microbatches, schedules of one's own, and what is refused."""

from __future__ import annotations

from functools import cache

import numpy as np
import optax
import pytest
from execute_cases import counting, gradients, plan_for, tied, train, untied
from schedule_cases import TRAINING, read_rows
from support import tiny
from support.sample import some

import fzero as fz
from fzero.pipeline import schedule


# Kinds of schedules with programs of their own: whole backward passes, passes in halves, and both
# with two stages on a rank.
SIZES = [
    (2, 1, ("1f1b", "zb_h1")),
    (2, 3, ("1f1b", "zb_h2")),
    (2, 16, ("1f1b", "zb_h1")),
    (4, 1, ("gpipe", "interleaved")),
    (4, 2, ("eager_1f1b", "zb_v")),
    (4, 3, ("dualpipe_v", "looped_bfs")),
    (3, 2, ("1f1b", "zb_h2")),
]


@cache
def whole(microbatches):
    return gradients(tied(), tiny.plan(data=1), counting(2 * microbatches))


@pytest.mark.parametrize(
    ("stages", "microbatches", "names"), some(SIZES, SIZES[0], SIZES[2], SIZES[4])
)
def test_schedules_of_one_size_agree(stages, microbatches, names):
    batch = counting(2 * microbatches)
    runs = [gradients(tied(), plan_for(n, stages, microbatches=microbatches), batch) for n in names]
    for run in runs[1:]:
        tiny.same_bits(run, runs[0])
    # Exact by totals and counts: the gradient of one big batch, however it is cut.
    tiny.close(runs[0], whole(microbatches), rtol=0, atol=2e-6)


@pytest.mark.parametrize("remat", ["dots", "none"])
def test_what_is_kept_of_a_stack_changes_no_schedule(remat):
    model = untied(2, tiny.dropped_block)
    runs = [
        gradients(model, plan_for(name, 2, microbatches=2, remat=remat, data=2), counting(8))
        for name in ("1f1b", "zb_h1")
    ]
    tiny.same_bits(*runs)


def test_one_stage_is_no_pipeline():
    runs = [train(tied(), tiny.plan(data=2, pipe=1, schedule=name), 2) for name in TRAINING[:2]]
    tiny.same_bits(runs[0].params, runs[1].params)
    assert type(runs[0].step).__name__ == "TrainStep"


OWN = {
    # Microbatches forwards as 2, 0, 1 and backwards as 1, 2, 0.
    "out-of-order": ["0F2,0F0,0F1,,,0B1,0B2,0B0", ",1F2,1F0,1F1,1B1,1B2,1B0,"],
    # Each stage in another order.
    "orders-differ": ["0F0,0F1,0F2,,,,0B2,0B0,0B1", ",,1F1,1F0,1B0,1F2,1B2,1B1,"],
    # Whole passes beside halves, weight gradients last and backwards.
    "halves": ["0F0,0F1,0F2,,0I1,0B0,0I2,0W2,0W1", ",1F1,1F0,1I1,1B0,1F2,1I2,1W2,1W1"],
}


@pytest.fixture(scope="module")
def three():
    plan = plan_for("gpipe", 2, microbatches=3, clip_norm=1.0)
    return train(tied(), plan, 3, tx=optax.adam(1e-2))


@pytest.mark.parametrize("rows", OWN.values(), ids=OWN)
def test_schedules_of_ones_own(rows, three):
    plan = plan_for("gpipe", 2, microbatches=3, clip_norm=1.0).replace(schedule=read_rows(rows))
    assert fz.Plan.from_json(plan.to_json()) == plan
    run = train(tied(), plan, 3, tx=optax.adam(1e-2))
    assert run.trace == three.trace
    tiny.same_bits(run.params, three.params)


def test_a_schedule_by_name_and_as_data_is_the_same(three):
    own = schedule("1f1b", stages=2, microbatches=3)
    plan = plan_for("gpipe", 2, microbatches=3, clip_norm=1.0).replace(schedule=own)
    tiny.same_bits(train(tied(), plan, 3, tx=optax.adam(1e-2)).params, three.params)


# What is refused


def refused(match, model=None, **options):
    def build():
        plan = tiny.plan(**{"pipe": 2, "data": 1, "microbatches": 3, **options})
        fz.train_step(model or tied(), optax.sgd(0.1), plan)

    with pytest.raises(fz.PlanError, match=match):
        build()


def test_more_stages_than_layers():
    refused(r"8 stages, but the model has 6 layers.*at most 6", pipe=4, schedule="zb_v")
    refused(
        r"7 stages, but the model has 6",
        pipe=7,
    )


def test_schedules_of_other_sizes():
    made = schedule("gpipe", stages=4, microbatches=8)
    refused(r"4 ranks and 8 microbatches, the plan for pipe=2 and microbatches=3", schedule=made)
    refused(r"no backward actions", schedule="inference")
    refused(r"expected one of gpipe, 1f1b, .*got 'zb'", schedule="zb")
    refused(r"schedule='zb': expected one of \['gpipe', '1f1b', ", schedule="zb", pipe=1)


def test_unsafe_schedules_show_their_grid():
    rows = ["0F0,0F1,0F2,,0B0,0B1,0B2", ",1F0,1F1,1F2,1B0,1B1,1B1"]
    refused(r"(?s)rank 1:.*>1B1<", schedule=read_rows(rows))


def test_lists_that_do_not_fit():
    refused(r"sum 5", partition=(2, 3))
    refused(r"partition=0", partition=(0, 6))


def test_a_plain_model():
    refused(r"expected a fz\.Sequential, got a Model.*pipe=1", model=tiny.regression())


def test_reducing_once_a_step():
    refused(r"reduce='step'", reduce="step", zero=1)


def test_too_few_devices():
    refused(r"pipe=2 x replica=1 x data=8 needs 16 devices, but there are 8", data=8)


def test_batches_that_do_not_divide():
    plan = tiny.plan(pipe=2, data=2, microbatches=3)
    tx = optax.sgd(0.1)
    state, step = fz.init(tied(), tx, plan), fz.train_step(tied(), tx, plan)
    with pytest.raises(fz.BatchError, match=r"16.*(6|2 devices.*3 microbatches)"):
        step(state, counting(16))
    with pytest.raises(fz.PlanError, match=r"lower.*none of which is the step.*pipe=1"):
        step.lower(state, counting(12))
    state, metrics = step(state, counting(12))
    assert np.isfinite(float(metrics["loss"]))
