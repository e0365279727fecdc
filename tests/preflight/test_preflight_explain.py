"""Where a step's time goes and what would change it; plans whose state is elsewhere."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import optax
import pytest

import fzero as fz
from fzero.preflight.costs import Change, Explanation, costs_of, explain
from fzero.preflight.measure import measure
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import parse
from tests.support import tiny


TX = optax.adamw(1e-3)
RATES = dataclasses.replace(
    default_rates(parse("cpu:2")), pinned_bytes_per_s=1e6, disk_bytes_per_s=5e5
)


@pytest.fixture(scope="module")
def asked():
    """The prediction of the tiny chain under a plan; compiled once each."""
    known = {}

    def get(rates=RATES, **plan):
        key = str(plan), rates.source, rates.pinned_bytes_per_s, rates.memory_bytes
        if key not in known:
            made = tiny.plan(**{"zero": 3, "data": 2, **plan})
            known[key] = fz.preflight(tiny.chain(), TX, made, tiny.tokens(8), "cpu:2", rates=rates)
        return known[key]

    return get


def test_costs_are_all_of_the_step(asked):
    for plan in ({}, {"tiers": {"opt_state": "host"}}):
        found = asked(**plan)
        costs = found.explain(most=0).costs
        assert sum(cost.seconds for cost in costs) == pytest.approx(found.bounds.likely_seconds)
        assert [cost.seconds for cost in costs] == sorted((c.seconds for c in costs), reverse=True)
    kinds = {cost.kind for cost in costs}
    assert {"products", "recomputed", "elementwise", "gathers", "reductions", "parked"} <= kinds


def test_plans_against_the_largest_costs_are_compiled_and_ranked(asked):
    found = asked(microbatches=2)
    said = found.explain(most=3)
    largest = [cost.kind for cost in said.costs[:3]]
    assert len(said.changes) == 3
    assert {change.against for change in said.changes} <= set(largest)
    compiled = [change.found for change in said.changes if change.found is not None]
    seconds = [one.bounds.likely_seconds for one in compiled]
    assert seconds == sorted(seconds)
    # Each is what asking for that plan gives.
    first = next(change for change in said.changes if change.found is not None)
    again = asked(microbatches=2, **first.fields) if "microbatches" not in first.fields else None
    if again is not None:
        assert again.bounds.likely_seconds == first.found.bounds.likely_seconds
    fewer = next(c for c in said.changes if c.fields == {"microbatches": 1})
    assert fewer.found.traffic.communicated_bytes < found.traffic.communicated_bytes
    text = str(said)
    assert "microbatches=1" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert len(said.to_json()["changes"]) == 3


def test_what_is_computed_again_is_its_share_of_the_products(asked):
    found = asked(remat="layer")
    seconds = {cost.kind: cost.seconds for cost in costs_of(found)}
    assert found.recomputed_fraction > 0.1
    assert seconds["recomputed"] == pytest.approx(found.recomputed_fraction * seconds["products"])


def test_where_nothing_fits_yet_a_slower_plan_that_fits_is_the_best():
    def stand_in(fits, seconds):
        return SimpleNamespace(fits=fits, bounds=SimpleNamespace(likely_seconds=seconds))

    slower = Change({"remat": "layer"}, "memory", found=stand_in(True, 2.0))
    assert Explanation(stand_in(False, 1.0), (), (slower,)).best is slower
    assert Explanation(stand_in(True, 1.0), (), (slower,)).best is None


def test_a_plan_that_does_not_fit_is_answered_with_smaller_ones(asked):
    found = asked(remat="none", rates=dataclasses.replace(RATES, memory_bytes=1000))
    said = found.explain(most=1)
    (change,) = said.changes
    assert (change.against, change.fields) == ("memory", {"remat": "layer"})
    assert said.best is None  # nor does that fit


def test_a_parked_optimizer_state_leaves_the_device_and_takes_the_link(asked):
    here, there = asked(), asked(tiers={"opt_state": "host"})
    parked = there.parked
    assert parked.host_bytes == here.memory.state["opt_state"] - there.memory.state["opt_state"]
    assert parked.host_bytes > 0.9 * here.memory.state["opt_state"]
    assert there.memory.peak == here.memory.peak - parked.host_bytes + parked.visiting_bytes
    assert there.memory.temporaries == here.memory.temporaries + parked.visiting_bytes
    # The first piece arrives, and the last one leaves, beside nothing.
    seconds = (parked.host_bytes + parked.visiting_bytes) / 1e6
    assert parked.seconds == pytest.approx(seconds)
    likely = there.bounds.likely_seconds
    assert likely == pytest.approx(here.bounds.likely_seconds + seconds)
    assert there.bounds.likely_mfu == pytest.approx(
        here.bounds.likely_mfu * here.bounds.likely_seconds / likely
    )
    assert there.bounds.limit == "parked"
    assert "kept elsewhere" in str(there)
    assert there.to_json()["parked"]["host_bytes"] == parked.host_bytes
    assert here.to_json()["parked"] is None
    assert there.plan.tiers


def test_a_drive_does_one_at_a_time(asked):
    parked = asked(tiers={"opt_state": "disk"}).parked
    assert parked.host_bytes == 0
    assert parked.seconds == pytest.approx(
        2 * parked.disk_bytes / 5e5 + parked.visiting_bytes / 1e6
    )


def test_an_update_on_the_host_sends_gradients_and_parameters(asked):
    found = asked(tiers={"opt_state": "host"}, update_on="host")
    assert found.parked.seconds == pytest.approx(2 * found.memory.gradients / 1e6)
    assert found.parked.visiting_bytes == 0
    assert "host's cores is not known" in found.notes[-1]


def test_parked_parameters_come_for_every_pass_and_hide_behind_it(asked):
    slow = asked(tiers={"params": "host"}).parked
    fast = asked(
        tiers={"params": "host"}, rates=dataclasses.replace(RATES, pinned_bytes_per_s=1e15)
    )
    assert slow.hidden_seconds == pytest.approx(asked().work.likely_seconds)
    assert slow.up_seconds == pytest.approx(3 * slow.host_bytes / 1e6)
    assert 0 <= fast.parked.seconds < 1e-6


def test_pipelines_and_tiers_are_asked_about_together():
    plan = tiny.plan(zero=3, data=1, pipe=2, microbatches=2, tiers={"opt_state": "host"})
    found = fz.preflight(tiny.chain(), TX, plan, tiny.tokens(8), "cpu:2", rates=RATES)
    assert found.pipeline is not None
    assert found.parked.host_bytes > 0
    costs = found.explain(most=0).costs
    assert sum(cost.seconds for cost in costs) == pytest.approx(found.bounds.likely_seconds)


def test_what_is_parked_is_not_measured_on_the_device():
    plan = tiny.plan(zero=3, data=1, tiers={"opt_state": "disk"})
    measured = measure(tiny.chain(), TX, plan, tiny.tokens(8), devices=jax.devices()[:1], steps=1)
    where = fz.placement(plan, tiny.chain(), TX)
    assert where.disk_bytes["opt_state"] > 0
    assert measured.state_bytes["opt_state"] == where.bytes_per_device["opt_state"]


def test_parameters_on_the_host_come_for_every_microbatch(asked):
    """Twice for each, forwards and back, and the updated ones once."""
    found = asked(tiers={"params": "host"}, microbatches=2).parked
    assert found.up_seconds == pytest.approx(5 * found.host_bytes / RATES.pinned_bytes_per_s)


def test_layer_inputs_on_the_host_leave_and_come_back_for_every_microbatch(asked):
    slow, none = asked(remat="offload", microbatches=2), asked(remat="layer", microbatches=2)
    link = RATES.pinned_bytes_per_s
    own, computed = slow.parked, none.work.likely_seconds
    # Of three layers, in either of two microbatches, each layer's input. (Ends stay here.)
    one_way = 2 * 3 * (8 // 2 // 2) * tiny.TOKENS * tiny.D * 4 / link
    assert (own.up_seconds, own.down_seconds) == pytest.approx((one_way, one_way))
    assert own.seconds == pytest.approx(2 * one_way - min(2 * one_way, computed))
    assert own.seconds > 0
    likely = none.bounds.likely_seconds + own.seconds
    assert slow.bounds.likely_seconds == pytest.approx(likely)
    assert slow.memory.state == none.memory.state
    fast = dataclasses.replace(RATES, pinned_bytes_per_s=1e15)
    assert asked(remat="offload", microbatches=2, rates=fast).parked.seconds == 0


def in_short(plan, fits=True):
    """A prediction as far as ideas against its costs read it."""
    return SimpleNamespace(
        plan=plan, fits=fits, topology=SimpleNamespace(num_hosts=1, per_host=8), parked_seconds=0,
        recomputed_fraction=0.0, work=SimpleNamespace(product_seconds=0, likely_seconds=0,
                                                      attention_seconds=0),
        bounds=SimpleNamespace(bubble_seconds=0, likely_seconds=1.0),
        collectives=[SimpleNamespace(kind=kind, axes="data", times=1, exposed_seconds=1.0)
                     for kind in ("reduce-scatter", "all-gather")],
    )  # fmt: skip


def test_plans_that_exclude_themselves_are_not_tried():
    """`reduce="step"` and `gather="lazy"` of a pipeline, whatever the model."""
    found = in_short(tiny.plan(zero=1, pipe=2, data=4, microbatches=2))
    tried = explain(found, lambda plan: in_short(plan), most=20).changes
    assert tried
    assert not [change for change in tried if change.why]
    assert not [c for c in tried if "reduce" in c.fields or "gather" in c.fields]
    alone = in_short(tiny.plan(zero=1, data=8))
    tried = explain(alone, lambda plan: in_short(plan), most=20).changes
    assert {"reduce": "step"} in [change.fields for change in tried]


def test_a_tier_against_memory_is_one_more():
    found = in_short(tiny.plan(zero=3, data=8, ema=0.9, tiers={"ema": ("host", 0.5)}), fits=False)
    tried = explain(found, lambda plan: in_short(plan), most=20).changes
    (change,) = [change for change in tried if "tiers" in change.fields]
    assert change.fields == {"tiers": {"ema": ("host", 0.5), "opt_state": "host"}}
    assert change.found.plan.tiers == (("ema", "host", 0.5), ("opt_state", "host", 1.0))


def test_a_step_that_waits_longest_for_its_links_is_limited_by_them_parked_or_not(asked):
    slow = dataclasses.replace(RATES, host_link_bytes_per_s=1.0, source="slow links")
    here, there = (asked(rates=slow, **more) for more in ({}, {"tiers": {"opt_state": "host"}}))
    assert here.bounds.limit == there.bounds.limit != "parked"
