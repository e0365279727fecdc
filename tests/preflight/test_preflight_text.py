"""What is read off a compiled program's text, on programs small enough to count by hand."""

import dataclasses

import pytest

from fzero.preflight.bounds import bounds
from fzero.preflight.gather_memory import gathered
from fzero.preflight.hlo import Module
from fzero.preflight.kernels import Kernels, Work
from fzero.preflight.network import Network, traffic, uses
from fzero.preflight.rates import Rates


RATES = Rates(
    flops_per_s={"fp32": 1e9},
    memory_bytes_per_s=1e9,
    host_link_bytes_per_s=1e8,
    network_bytes_per_s=1e7,
    memory_bytes=10**9,
    collective_latency_s=0.0,
    launch_s=0.0,
    flops_share=0.5,
    attention_share=0.25,
    memory_share=0.5,
    link_share=0.5,
)

# 10 trips; each slices a row of a stack (64 floats), adds it, and writes it back.
LOOP = """HloModule loop, is_scheduled=true

%row (p: f32[10,64], k: s32[]) -> f32[1,64] {
  %p = f32[10,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = f32[1,64]{1,0} dynamic-slice(%p, %k, %z), dynamic_slice_sizes={1,64}
}

%write (p: f32[10,64], r: f32[1,64], k: s32[]) -> f32[10,64] {
  %p = f32[10,64]{1,0} parameter(0)
  %r = f32[1,64]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %u = f32[10,64]{1,0} dynamic-update-slice(%p, %r, %k, %z)
}

%body (t: (s32[], f32[10,64])) -> (s32[], f32[10,64]) {
  %t = (s32[], f32[10,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[10,64]{1,0} get-tuple-element(%t), index=1
  %a = f32[1,64]{1,0} fusion(%x, %i), kind=kLoop, calls=%row
  %b = f32[10,64]{1,0} fusion(%x, %a, %i), kind=kLoop, calls=%write
  ROOT %r = (s32[], f32[10,64]{1,0}) tuple(%i, %b)
}

%condition (t: (s32[], f32[10,64])) -> pred[] {
  %t = (s32[], f32[10,64]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[10,64], n: s32[]) -> f32[10,64] {
  %x = f32[10,64]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %t = (s32[], f32[10,64]{1,0}) tuple(%n, %x)
  %w = (s32[], f32[10,64]{1,0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %o = f32[10,64]{1,0} get-tuple-element(%w), index=1
}
"""  # noqa: E501

# Four devices, two hosts of two. A gather over all, with a matmul of 2*8*8*8 FLOPs beside it, and
# a sum within hosts with nothing.
LINKS = """HloModule links, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1000], y: f32[8,8]) -> f32[4000] {
  %x = f32[1000]{0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %g = (f32[1000]{0}, f32[4000]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %m = f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = f32[4000]{0} all-gather-done(%g)
  %r = f32[8,8]{1,0} all-reduce(%m), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %n = f32[4000]{0} negate(%d)
}
"""


def kernels(text):
    return Kernels(Module(text), RATES, "fp32")


def test_a_loop_over_a_stack_reads_and_writes_rows_not_the_stack():
    work = kernels(LOOP).total()
    row, index = 64 * 4, 4
    # Read a row (and where), write it; read it again with where, write it into the stack.
    per_trip = (row + index + row) + (row + index + row)
    assert work.bytes == 10 * per_trip
    assert work.best_seconds == pytest.approx(10 * per_trip / 1e9)
    assert work.likely_seconds == pytest.approx(2 * work.best_seconds)


def test_a_row_of_what_is_read_under_another_shape_is_a_row():
    sliced = "dynamic-slice(%p, %k, %z)"
    assert sliced in LOOP
    text = LOOP.replace("ROOT %s =", "%q = f32[10,64]{1,0} bitcast(%p)\n  ROOT %s =")
    assert kernels(text.replace(sliced, sliced.replace("%p", "%q"))).total() == (
        kernels(LOOP).total()
    )


def test_rows_that_are_more_than_what_they_are_rows_of_are_read_once():
    text = LOOP.replace("[10,64]", "[1,64]")
    again = "%q = f32[1,64]{1,0} dynamic-slice(%p, %k, %z), dynamic_slice_sizes={1,64}\n  ROOT %s ="
    assert "ROOT %s =" in text
    assert kernels(text.replace("ROOT %s =", again)).total() == kernels(text).total()


def test_a_fusion_that_runs_beside_others_moves_the_same_bytes():
    """jax 0.11 starts some and waits for them; what they wait with is no other kernel."""
    plain = "%b = f32[10,64]{1,0} fusion(%x, %a, %i), kind=kLoop, calls=%write"
    shapes = "((f32[10,64]{1,0}, f32[1,64]{1,0}, s32[]), f32[10,64]{1,0}, u32[])"
    began = f"%began = {shapes} fusion-start(%x, %a, %i), kind=kLoop, calls=%write"
    ended = "%b = f32[10,64]{1,0} fusion-done(%began)"
    assert plain in LOOP
    found = kernels(LOOP.replace(plain, f"{began}\n  {ended}")).total()
    assert found == kernels(LOOP).total()


def test_a_kernel_takes_the_longer_of_its_flops_and_its_bytes():
    work = kernels(LINKS).total()
    dot, negate = 2 * 8**3, 2 * 4000 * 4
    assert work.flops == dot
    assert work.bytes == 3 * 8 * 8 * 4 + negate
    assert work.best_seconds == pytest.approx((dot + negate) / 1e9)


def test_collectives_know_their_links_and_what_is_beside_them():
    gather, total = uses(kernels(LINKS), {"data": 4}, Network(RATES, (0, 0, 1, 1)))
    assert (gather.kind, gather.crosses_hosts, gather.num_matmuls) == ("all-gather", True, 1)
    assert gather.sent_bytes == 12000
    # A ring through two devices of each host: their two network cards share what it sends.
    assert gather.network_bytes == 6000
    assert gather.seconds == pytest.approx(6000 / 1e7)
    assert gather.exposed_best_seconds == pytest.approx(6000 / 1e7 - 1024 / 1e9)
    assert gather.exposed_seconds == pytest.approx(2 * (6000 / 1e7 - 1024 / 1e9))
    assert (total.kind, total.crosses_hosts, total.exposed) == ("all-reduce", False, True)
    assert total.seconds == pytest.approx(256 / 1e8)
    beside = dataclasses.replace(gather, num_matmuls=1, num_kernels=1)
    assert not beside.exposed
    sums = traffic([gather, total])
    assert sums.communicated_bytes == 12000 + 256
    assert sums.exposed_bytes == sums.without_matmul_bytes == 256
    assert (sums.cross_host_bytes, sums.network_bytes) == (12000, 6000)
    often = traffic([gather.in_program("", 3)])
    assert (often.cross_host_bytes, often.network_bytes) == (36000, 18000)
    # One after the other: what is hidden comes to what the kernels take, once.
    work = Work(1024, 0, best_seconds=1e-6, likely_seconds=2e-6)
    found = bounds(RATES, "fp32", work=work, traffic=sums, model_flops=1024)
    assert found.likely_seconds == pytest.approx(2e-6 + sums.exposed_seconds)
    assert found.best_seconds == pytest.approx(1e-6 + sums.exposed_best_seconds)
    assert found.serial_seconds == pytest.approx(2e-6 + sums.seconds / RATES.link_share)
    # A host with one device of the group has one card for it, however many the others have.
    uneven, _ = uses(kernels(LINKS), {"data": 4}, Network(RATES, (0, 1, 1, 1)))
    assert uneven.network_bytes == 12000


def test_one_host_has_no_network():
    found = uses(kernels(LINKS), {"data": 4}, Network(RATES, (0, 0, 0, 0)))
    assert not any(c.crosses_hosts for c in found)
    assert found[0].seconds == pytest.approx(12000 / 1e8)


def test_copies_hide_nothing():
    text = LINKS.replace("%m = f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, "
                         "rhs_contracting_dims={0}", "%m = f32[8,8]{1,0} copy(%y)")  # fmt: skip
    gather, _ = uses(kernels(text), {"data": 4}, Network(RATES, (0, 0, 1, 1)))
    assert (gather.exposed, gather.num_kernels) == (True, 0)


# The next layer's weight arrives while this one's is used; a third stands before the loop.
AHEAD = """HloModule ahead, is_scheduled=true, num_partitions=2

%body (t: (s32[], f32[2048], f32[1024])) -> (s32[], f32[2048], f32[1024]) {
  %t = (s32[], f32[2048]{0}, f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[2048]{0} get-tuple-element(%t), index=1
  %x = f32[1024]{0} get-tuple-element(%t), index=2
  %g = (f32[1024]{0}, f32[2048]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %u = f32[2048]{0} negate(%w)
  %d = f32[2048]{0} all-gather-done(%g)
  ROOT %r = (s32[], f32[2048]{0}, f32[1024]{0}) tuple(%i, %d, %x)
}

%condition (t: (s32[], f32[2048], f32[1024])) -> pred[] {
  %t = (s32[], f32[2048]{0}, f32[1024]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[1024], n: s32[]) -> f32[2048] {
  %x = f32[1024]{0} parameter(0)
  %n = s32[] parameter(1)
  %first = f32[2048]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
  %other = f32[2048]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
  %t = (s32[], f32[2048]{0}, f32[1024]{0}) tuple(%n, %first, %x)
  %w = (s32[], f32[2048]{0}, f32[1024]{0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %last = f32[2048]{0} get-tuple-element(%w), index=1
  ROOT %o = f32[2048]{0} add(%last, %other)
}
"""  # noqa: E501


def test_gathered_values_are_alive_from_their_start_to_their_last_reader():
    layer = 2048 * 4
    found = gathered(Module(AHEAD))
    assert found.in_loop_bytes == 2 * layer
    assert found.most_bytes == 3 * layer  # `other` waits while the loop runs
    late = AHEAD.replace("  %u = f32[2048]{0} negate(%w)\n", "")
    late = late.replace("  %g = (f32[1024]", "  %u = f32[2048]{0} negate(%w)\n  %g = (f32[1024]")
    assert gathered(Module(late)).in_loop_bytes == layer
    # What goes round the loop is alive beside what is gathered after it.
    done = "  %d = f32[2048]{0} all-gather-done(%g)\n"
    used = "  %u = f32[2048]{0} negate(%w)\n"
    another = "  %h = f32[2048]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}\n"
    both = AHEAD.replace(used + done, done + another + used.replace("%w", "%h"))
    assert gathered(Module(both)).in_loop_bytes == 2 * layer


def test_rates_are_data():
    assert Rates(**RATES.to_json()) == RATES
    assert dataclasses.replace(RATES, memory_bytes=1).memory_bytes == 1


# Batch 2, 64 positions, 4 heads of 16: forwards two products of 2 * 2 * 4 * 64 * 64 * 16 FLOPs.
ATTENTION = """HloModule attention, is_scheduled=true

ENTRY %main (q: bf16[2,64,4,16]) -> bf16[2,4,64,16] {
  %q = bf16[2,64,4,16]{3,2,1,0} parameter(0)
  %f = (bf16[2,4,64,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {CONFIG}}
  ROOT %o = bf16[2,4,64,16]{3,1,2,0} get-tuple-element(%f), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ('"mask_type": "CAUSAL", "sliding_window_length": 0', 0.5),
        ('"mask_type": "NO_MASK"', 1.0),
        # 16 of 64 keys, of which the first rows see fewer: 16 * 64 - 16 * 16 / 2 of 64 * 64.
        ('"mask_type": "CAUSAL", "sliding_window_length": 16', 0.25 - 1 / 32),
    ],
)
def test_fused_attention_takes_the_time_of_what_its_mask_shows(config, seen):
    work = kernels(ATTENTION.replace("CONFIG", config)).total()
    flops = 2 * 2 * 2 * 4 * 64 * 64 * 16
    assert work.flops == flops  # models are measured by all of it
    assert work.best_seconds == pytest.approx(seen * flops / 1e9)
    assert work.likely_seconds == pytest.approx(4 * seen * flops / 1e9)


def test_small_matmuls_reach_what_was_measured_of_their_size():
    rates = dataclasses.replace(RATES, matmul_shares={"8": 0.1, "16": 0.3})
    work = Kernels(Module(LINKS), rates, "fp32").total()
    negate = 2 * 2 * 4000 * 4 / 1e9
    assert work.likely_seconds == pytest.approx(10 * 2 * 8**3 / 1e9 + negate)


NARROW = """HloModule narrow, is_scheduled=true

%triton (a: f8e4m3fn[64,64], b: f8e4m3fn[64,64]) -> f32[64,64] {
  %a = f8e4m3fn[64,64]{1,0} parameter(0)
  %b = f8e4m3fn[64,64]{1,0} parameter(1)
  ROOT %d = f32[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}PRECISION
}

ENTRY %main (a: f8e4m3fn[64,64], b: f8e4m3fn[64,64]) -> f32[64,64] {
  %a = f8e4m3fn[64,64]{1,0} parameter(0)
  %b = f8e4m3fn[64,64]{1,0} parameter(1)
  ROOT %f = f32[64,64]{1,0} fusion(%a, %b), kind=kCustom, calls=%triton
}
"""


def test_products_in_8_bits_have_a_share_of_their_own_and_exact_sums_cost():
    rates = dataclasses.replace(
        RATES, flops_per_s={"bf16": 1e6, "fp8": 2e6}, fp8_share=0.8, fp8_exact_share=0.5
    )

    def seconds(precision):
        text = NARROW.replace("PRECISION", precision)
        return Kernels(Module(text), rates, "fp8").total().likely_seconds

    assert seconds("") == pytest.approx(2 * 64**3 / 2e6 / (0.5 * 0.8))
    assert seconds(", operand_precision={highest,highest}") == pytest.approx(2 * seconds(""))


def test_a_kernel_takes_at_least_its_launch():
    rates = dataclasses.replace(RATES, launch_s=1.0)
    assert Kernels(Module(LINKS), rates, "fp32").total().likely_seconds == 2.0
