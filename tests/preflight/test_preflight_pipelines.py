"""What pipelines send and hold outside of their stages' programs."""

from __future__ import annotations

import optax
import pytest

import fzero as fz
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import Topology
from tests.support import tiny


TX = optax.adamw(1e-3)


def asked(topology, **plan):
    made = tiny.plan(**{"zero": 1, "pipe": 2, "microbatches": 2, **plan})
    return fz.preflight(tiny.chain(), TX, made, tiny.tokens(16), topology)


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
    assert there.memory.peak == max(peaks) == sum(count for _, count in there.memory.parts())
