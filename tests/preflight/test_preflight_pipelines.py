"""What pipelines send and hold outside of their stages' programs."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import optax
import pytest

import fzero as fz
from fzero.batch import Inputs, abstract_batch
from fzero.preflight.pipeline import StageCompiler, tied_gradients, tied_weights
from fzero.preflight.program import Target
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import Topology, parse
from fzero.tree import shape_of
from tests.support import tiny


TX = optax.adamw(1e-3)


def asked(topology, rates=None, **plan):
    made = tiny.plan(**{"zero": 1, "pipe": 2, "microbatches": 2, **plan})
    return fz.preflight(tiny.chain(), TX, made, tiny.tokens(16), topology, rates=rates)


@pytest.mark.parametrize(("hosts", "cards"), [(1, None), (2, None), (4, 2), (8, 1)])
def test_the_updates_gather_takes_the_links_that_it_runs_over(hosts, cards):
    """Groups of 4 devices: within a host, or through as many cards as a host has of them."""
    where = Topology("cpu", hosts, 8 // hosts)
    rates = default_rates(where)
    (update,) = [c for c in asked(where, data=4).collectives if c.where == "update"]
    assert update.axes == "data"
    assert update.sent_bytes == pytest.approx(update.bytes * 3 / 4)
    carried = 0 if cards is None else update.sent_bytes / cards
    assert (update.crosses_hosts, update.network_bytes) == (cards is not None, carried)
    seconds = max(
        update.sent_bytes / rates.host_link_bytes_per_s, carried / rates.network_bytes_per_s
    )
    assert update.seconds == pytest.approx(seconds + rates.collective_latency_s)


def test_what_a_rank_parks_is_taken_off_its_own_peak():
    here = asked("cpu:2", data=1)
    there = asked("cpu:2", data=1, stream_bytes=256, tiers={"opt_state": "host"})
    state = fz.placement(here.plan, tiny.chain(), TX, num_devices=2)
    own = [0, 0]
    for leaf in state.leaves:
        for rank in leaf.ranks if leaf.state_class == "opt_state" else ():
            own[rank] += leaf.bytes_per_device
    assert own[0] != own[1]
    peaks = there.pipeline.peak_bytes_per_rank
    for rank, before in enumerate(here.pipeline.peak_bytes_per_rank):
        assert peaks[rank] == pytest.approx(before - own[rank] + 2 * 256, abs=64), rank
    assert here.memory.saved_activations > 0
    assert there.memory.peak == max(peaks) == sum(count for _, count in there.memory.parts())


@pytest.mark.parametrize(("zero", "shards"), [(1, 1), (3, 2)])
def test_tied_weights_go_to_their_reader_and_their_gradients_back(zero, shards):
    """The head reads the embedding's table: the first rank's, whole or in shards."""
    plan = tiny.plan(zero=zero, pipe=2, data=2, microbatches=2)
    step, where = fz.train_step(tiny.chain(), TX, plan), parse("cpu:4")
    blue = step.blueprint
    target = Target(where, where.devices(), default_rates(where), plan.precision)
    compiler = StageCompiler(step.executor, target)
    batch = abstract_batch(jax.tree.map(shape_of, Inputs.of(tiny.tokens(16))), blue.rank_mesh(0))
    run = compiler.run(blue.shapes(), batch)
    (there,), (back,) = tied_weights(compiler, run, 0), tied_gradients(compiler, run, 1)
    assert not tied_weights(compiler, run, 1)
    assert not tied_gradients(compiler, run, 0)
    rows = tiny.VOCAB + tiny.VOCAB % 2  # padded, so that it divides
    assert there.bytes == (rows if zero == 3 else tiny.VOCAB) * tiny.WIDTH * 4 / shards
    assert back.bytes == rows * tiny.WIDTH * 4 / 2
    rates = target.rates
    seconds = there.bytes / rates.host_link_bytes_per_s + rates.collective_latency_s
    assert there.seconds == pytest.approx(seconds)
    # Nobody waits for the weights while the first stage computes.
    computed = run.timeline.rank_events[0][0].end_s
    assert there.exposed_seconds == pytest.approx(max(0, seconds / rates.link_share - computed))
    # Nothing hides behind links that are taken by what a stage hands over.
    with mock.patch.object(StageCompiler, "handing_s", return_value=1e3):
        (back,) = tied_gradients(compiler, run, 1)
    assert back.exposed_seconds == pytest.approx(back.seconds / rates.link_share)


def test_a_tied_weight_that_takes_longer_than_the_first_stage_makes_the_step_longer():
    rates = dataclasses.replace(default_rates(parse("cpu:2")), launch_s=0, collective_latency_s=0)
    slow = dataclasses.replace(rates, host_link_bytes_per_s=1e4)
    found = asked("cpu:2", data=1, rates=slow)
    (tied,) = [c for c in found.collectives if c.where == "tied weights, rank 0 to 1"]
    assert tied.exposed_seconds > 0
    assert found.bounds.likely_seconds > found.pipeline.makespan_seconds + tied.exposed_seconds
    assert sum(cost.seconds for cost in found.explain(most=0).costs) == pytest.approx(
        found.bounds.likely_seconds
    )
