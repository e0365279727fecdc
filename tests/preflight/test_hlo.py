"""`fzero.preflight.hlo` against programs and texts whose communication and FLOPs are known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from fzero.preflight import hlo
from fzero.preflight.hlo.module import Array, replica_groups


P = PartitionSpec
AXES = {"pipe": 2, "data": 4}
DATA = Path(__file__).parents[1] / "data" / "hlo"
needs_8_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")

# One device holds x of 64 rows by 32 columns: the sizes below follow from it.
ROWS, COLS = 64, 32
SIZE = ROWS * COLS


@dataclass(frozen=True)
class Overlap:
    """A collective, and what runs between its start and its done: products, and other kernels."""

    collective: hlo.Collective
    is_async: bool
    num_matmuls: int
    num_compute: int
    flops: int


def overlaps(text: str) -> list[Overlap]:
    module = hlo.Module(text)
    matmuls, found = hlo.Matmuls(module), []
    for window in hlo.windows(module):
        at = [(window.computation, i) for i in window.between]
        inside = [matmuls.instructions_at(*one) for one in at]
        flops = sum(matmuls.flops_at(*one).flops for one in at)
        numbers = sum(inside), inside.count(0), flops
        found.append(Overlap(window.collective, window.is_async, *numbers))
    return found


def _compile(body: Callable[[Any], Any]) -> str:
    """Text of `body`, on one device's (ROWS, COLS) float32, over a mesh of 2 x 4 CPU devices."""
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = Mesh(devices, tuple(AXES), axis_types=(AxisType.Auto,) * 2)
    spec = P(("pipe", "data"))
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(f).lower(jax.ShapeDtypeStruct((8 * ROWS, COLS), jnp.float32)).compile().as_text()
    assert text is not None
    return text


def _loop(f: Callable[[Any], Any], length: int) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, None, length=length)[0]


def _gather(x: Any) -> Any:
    return jnp.tanh(lax.all_gather(x, "data", tiled=True)[:ROWS])


def _scatter(x: Any) -> Any:
    return jnp.tile(lax.psum_scatter(x, "data", tiled=True), (4, 1))


def _reduce(x: Any) -> Any:
    return lax.psum(x, "data") / 4


def _reduce_all(x: Any) -> Any:
    return lax.psum(x, ("pipe", "data")) / 8


def _permute(x: Any) -> Any:
    return lax.ppermute(x, "pipe", [(0, 1), (1, 0)]) + 1


def _exchange(x: Any) -> Any:
    return lax.all_to_all(x, "data", 0, 0, tiled=True) + 1


# (operation, kind, full size, sent by one device, devices in a group, axes)
OPERATIONS = [
    (_gather, "all-gather", 4 * SIZE, 3 * SIZE, 4, ("data",)),
    (_scatter, "reduce-scatter", SIZE, 3 * SIZE / 4, 4, ("data",)),
    (_reduce, "all-reduce", SIZE, 2 * 3 * SIZE / 4, 4, ("data",)),
    (_reduce_all, "all-reduce", SIZE, 2 * 7 * SIZE / 8, 8, ("pipe", "data")),
    (_permute, "collective-permute", SIZE, SIZE, 2, ("pipe",)),
    (_exchange, "all-to-all", SIZE, 3 * SIZE / 4, 4, ("data",)),
]
# How the operation runs, and how often.
LOOPS: list[tuple[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]], int]] = [
    ("once", lambda f: f, 1),
    ("scan", lambda f: _loop(f, 5), 5),
    ("nested", lambda f: _loop(_loop(f, 3), 7), 21),
    ("unequal", lambda f: lambda x: _loop(f, 4)(jnp.sin(_loop(f, 9)(x))), 13),
    ("fori", lambda f: lambda x: lax.fori_loop(2, 11, lambda _, x: f(x), x), 9),
]


@needs_8_devices
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o[0].__name__.strip("_"))
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop[0])
def test_counts_sizes_and_executions(operation: Any, loop: Any) -> None:
    f, kind, full, wire, group_size, axes = operation
    name, around, times = loop
    text = _compile(around(f))
    found = hlo.collectives(text, mesh_axes=AXES)

    assert {c.kind for c in found} == {kind}
    assert {(c.dtype, c.elements, c.bytes) for c in found} == {("f32", full, 4 * full)}
    assert {(c.group_size, c.axes) for c in found} == {(group_size, axes)}
    assert all(c.in_loop == (name != "once") for c in found)
    sums = hlo.total(found, kind)
    assert sums == hlo.Total(times * full, 4 * times * full, times * wire, 4 * times * wire, times)
    assert sums == hlo.total(found)
    assert not any(o.num_matmuls or o.is_async for o in overlaps(text))


@needs_8_devices
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop[0])
def test_trip_counts_without_annotation(loop: Any) -> None:
    """Without XLA's annotation the count comes from the counter, and is the same."""
    text = _compile(loop[1](_gather))
    bare = re.sub(r", backend_config=\{[^\n]*known_trip_count[^\n]*", "", text)
    assert ("known_trip_count" in text) == (loop[0] != "once")
    assert "known_trip_count" not in bare
    assert hlo.collectives(bare) == hlo.collectives(text)


def _while(x: Any) -> Any:
    """A loop of unknown length."""
    return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: _gather(x @ x[:COLS]), x)


@needs_8_devices
def test_a_loop_of_unknown_length_is_not_one() -> None:
    text = _compile(_while)
    (gather,) = hlo.collectives(text)
    assert gather.times is None
    assert gather.in_loop
    with pytest.raises(hlo.HloError, match="trip count is not in the module"):
        hlo.total([gather])
    assert hlo.total([gather], "all-reduce").executions == 0
    flops = hlo.matmul_flops(text)
    assert flops.flops == 0
    assert "loop of unknown length" in flops.unknown[0]


@needs_8_devices
def test_conditional_counts_the_branch_that_communicates_most() -> None:
    def body(x: Any) -> Any:
        x = lax.cond(x[0, 0] > 0, _loop(_reduce, 3), _gather, x)
        x = lax.switch(x[0, 1].astype(jnp.int32), [jnp.sin, _permute, _loop(_gather, 2)], x)
        # What may go on for ever is more than all that is counted.
        return lax.cond(x[0, 2] > 0, _loop(_reduce, 3), _while, x)

    found = hlo.collectives(_compile(body))
    assert [(c.kind, c.times, c.conditional) for c in found] == [
        ("all-reduce", 3, True),
        ("all-gather", 2, True),
        ("all-gather", None, True),
    ]


@needs_8_devices
def test_zero3_loop_communicates_three_times_its_parameters() -> None:
    """Gather forward, gather backward, scatter: (n-1)/n of 3 times the elements of all layers."""
    num_layers, dim = 6, 32

    def body(x: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, shard: Any) -> tuple[Any, None]:
            return jnp.tanh(x @ lax.all_gather(shard, "data", tiled=True)), None

        def loss(shards: Any) -> Any:
            return jnp.sum(lax.scan(layer, x, shards)[0] ** 2)

        grads = jax.grad(loss)(jnp.ones((num_layers, dim // 4, dim)) * x[0, 0])
        return jnp.broadcast_to(grads.sum(), (1,))

    text = _compile(body)
    sums = hlo.total(hlo.collectives(text, mesh_axes=AXES))
    assert sums.wire_elements == 3 * num_layers * dim * dim * 3 / 4
    # Forward, the same again for the backward pass, and two products of gradients.
    assert hlo.matmul_flops(text).flops == 4 * num_layers * 2 * ROWS * dim * dim


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0, 1, 2}}", ((0, 1, 2),)),
        ("{}", ()),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=8] {'x'}", (tuple(range(8)),)),
        ("mesh['x'=8]", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=8] {'a':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2, device_ids=(3,2,1,0)] {'b'}", ((3, 2), (1, 0))),
        ("mesh['a'=2,'b'=4, device_ids=([4,2]T(1,0))] {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
    ],
)
def test_replica_groups_in_every_spelling(spelling: str, groups: Any) -> None:
    assert replica_groups(f", channel_id=1, replica_groups={spelling}, dimensions={{0}}") == groups


@pytest.mark.parametrize(
    ("dtype", "size"), [("bf16", 12), ("f8e4m3fn", 6), ("s4", 3), ("pred", 6), ("c64", 48)]
)
def test_bytes_of_dtypes(dtype: str, size: int) -> None:
    assert Array(dtype, (2, 3)).bytes == size


# `step` of these two samples, on a 4 x 2 mesh: one gather ahead of a scan of 5, and in it three
# products of 512 x 256 x 256, a permute over `pipe`, a reduce-scatter and the next gather; after it
# one product, an all-to-all and the sum of a scalar. XLA peeled one iteration off the scan.
@pytest.mark.parametrize("gemm", ["triton", "cublas"])
def test_program_for_8_h200(gemm: str) -> None:
    text = (DATA / f"h200_8_{gemm}.txt").read_text()
    found = hlo.collectives(text, mesh_axes={"data": 4, "pipe": 2})
    whole, activations = 256 * 256, 512 * 256

    def counted(kind: str) -> tuple[int, int, float]:
        sums = hlo.total(found, kind)
        return sums.executions, sums.elements, sums.wire_elements

    # Of the 6 gathers, two (before the loop and of the peeled iteration) are one instruction.
    assert counted("all-gather") == (5, 6 * whole, 6 * whole * 3 / 4)
    assert counted("reduce-scatter") == (5, 5 * activations, 5 * activations * 3 / 4)
    assert counted("collective-permute") == (5, 5 * activations, 5 * activations)
    assert counted("all-to-all") == (1, activations, activations * 3 / 4)
    assert counted("all-reduce") == (1, 1, 2 * 7 / 8)
    assert {c.dtype for c in found} == {"bf16", "f32"}
    axes = {(c.kind, c.axes, c.group_size) for c in found}
    assert ("all-gather", ("data",), 4) in axes
    assert ("collective-permute", ("pipe",), 2) in axes
    assert ("all-reduce", ("data", "pipe"), 8) in axes
    assert hlo.matmul_flops(text) == hlo.Flops(16 * 2 * 512 * 256 * 256, 16)


@pytest.mark.parametrize(("gemm", "around_scatter"), [("triton", 1), ("cublas", 2)])
def test_overlap_of_program_for_8_h200(gemm: str, around_scatter: int) -> None:
    """The numbers were counted by eye in the samples' loop bodies."""
    found = overlaps((DATA / f"h200_8_{gemm}.txt").read_text())
    in_loop = {o.collective.kind: o for o in found if o.collective.in_loop}
    assert all(o.is_async and o.collective.times == 4 for o in in_loop.values())
    assert in_loop["all-gather"].num_matmuls == 1
    assert in_loop["all-gather"].flops == 2 * 512 * 256 * 256
    assert in_loop["reduce-scatter"].num_matmuls == around_scatter
    assert not in_loop["collective-permute"].num_matmuls
    combined = next(o for o in found if o.collective.name == "all-gather-start.1")
    assert not combined.is_async  # start and done are there, but XLA marked them is_sync


ASYNC = """HloModule m, is_scheduled=true, num_partitions=4

%wrapped (p: f32[4,4]) -> f32[16,4] {{
  %p = f32[4,4]{{1,0}} parameter(0)
  ROOT %gather = f32[16,4]{{1,0}} all-gather(%p), replica_groups={{}}, dimensions={{0}}
}}

%body (state: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %state = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[4,4]{{1,0}} get-tuple-element(%state), index=1
  %two = s32[] constant(2)
  %next = s32[] {step}
  %dot.in.body = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %out = (s32[], f32[4,4]{{1,0}}) tuple(%next, %dot.in.body)
}}

%condition (state.1: (s32[], f32[4,4])) -> pred[] {{
  %state.1 = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %stop = s32[] constant(10)
  ROOT %more = pred[] compare(%i.1, %stop), direction={direction}
}}

ENTRY %main (x.1: f32[4,4]) -> f32[16,4] {{
  %x.1 = f32[4,4]{{1,0}} parameter(0)
  %start = s32[] constant(1)
  %init = (s32[], f32[4,4]{{1,0}}) tuple(%start, %x.1)
  %async-start = ((f32[4,4]{{1,0}}), f32[16,4]{{1,0}}, u32[]) async-start(%x.1), calls=%wrapped
  %negated = f32[4,4]{{1,0}} negate(%x.1)
  %async-update = ((f32[4,4]{{1,0}}), f32[16,4]{{1,0}}, u32[]) async-update(%async-start)
  %loop = (s32[], f32[4,4]{{1,0}}) while(%init), condition=%condition, body=%body
  ROOT %async-done = f32[16,4]{{1,0}} async-done(%async-update)
}}
"""


@pytest.mark.parametrize(
    ("direction", "step", "trips"),
    [
        ("LT", "add(%two, %i)", 5),
        ("LE", "add(%two, %i)", 5),
        ("GT", "add(%two, %i)", None),
        ("NE", "add(%two, %i)", None),
        ("LT", "subtract(%two, %i)", None),
    ],
)
def test_generic_async_pair_around_a_loop(direction: str, step: str, trips: int | None) -> None:
    """for (i = 1; i < 10; i += 2) runs 5 times; loops that never end so are not guessed."""
    text = ASYNC.format(direction=direction, step=step)
    (found,) = overlaps(text)
    assert found.collective.name == "gather"
    assert (found.collective.computation, found.collective.bytes) == ("main", 256)
    assert found.collective.replica_groups == ((0, 1, 2, 3),)
    assert (found.is_async, found.num_matmuls, found.num_compute) == (True, 1, 1)
    assert found.flops == (trips or 0) * 2 * 4 * 4 * 4
    flops = hlo.matmul_flops(text)
    assert (flops.num_matmuls, bool(flops.unknown)) == (trips or 0, trips is None)


@needs_8_devices
@pytest.mark.parametrize(
    ("f", "flops"),
    [
        (lambda x: x @ jnp.ones((COLS, 48)) * x[0, 0], 2 * ROWS * COLS * 48),
        (lambda x: jnp.einsum("bik,bjk->bij", *2 * [x.reshape(8, 8, COLS)]), 2 * 8 * 8 * 8 * COLS),
        (_loop(_loop(lambda x: jnp.tanh(x @ x[:COLS]), 3), 2), 6 * 2 * ROWS * COLS * COLS),
        (
            lambda x: lax.conv_general_dilated(
                x.reshape(1, 8, 8, COLS), jnp.ones((3, 3, COLS, 16)) * x[0, 0], (1, 1), "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            ).reshape(-1, 16),
            2 * 6 * 6 * 3 * 3 * COLS * 16,
        ),
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x[:COLS], jnp.sin, x), 2 * ROWS * COLS**2),
    ],
    ids=["dot", "batched", "loops", "convolution", "conditional"],
)  # fmt: skip
def test_flops(f: Callable[[Any], Any], flops: int) -> None:
    found = hlo.matmul_flops(_compile(f))
    assert (found.flops, found.unknown) == (flops, ())


@needs_8_devices
def test_matmuls_of_each_branch_are_counted() -> None:
    module = hlo.Module(
        _compile(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x[:COLS], jnp.sin, x))
    )
    assert hlo.Matmuls(module).instructions(module.entry) == 1


def test_flops_of_library_calls() -> None:
    text = """HloModule m
ENTRY %main (a: f32[2,3], b: f32[3,5]) -> f32[2,5] {
  %a = f32[2,3]{1,0} parameter(0)
  %b = f32[3,5]{1,0} parameter(1)
  %attention = f32[2,3]{1,0} custom-call(%a, %a, %a), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %c = f32[2,5]{1,0} custom-call(%attention, %b), custom_call_target="__onednn$matmul"
}"""
    found = hlo.matmul_flops(text)
    assert (found.flops, found.num_matmuls) == (60, 2)
    assert found.unknown == ("`attention` (__cudnn$fmhaSoftmax): the text does not show its FLOPs",)


def test_flops_of_library_convolutions() -> None:
    """Each of the three, for a kernel 3 x 3 from 4 to 16 features with stride 2, costs the same."""
    shape = "window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f"
    text = f"""HloModule m
ENTRY %main (x: bf16[2,9,9,4], w: bf16[16,3,3,4]) -> bf16[2,9,9,4] {{
  %x = bf16[2,9,9,4]{{3,2,1,0}} parameter(0)
  %w = bf16[16,3,3,4]{{3,2,1,0}} parameter(1)
  %y = (bf16[2,4,4,16]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%x, %w), {shape}, custom_call_target="__cudnn$convForward"
  %g = bf16[2,4,4,16]{{3,2,1,0}} get-tuple-element(%y), index=0
  %v = (bf16[16,3,3,4]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%x, %g), {shape}, custom_call_target="__cudnn$convBackwardFilter"
  %u = (bf16[2,9,9,4]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%g, %w), {shape}, custom_call_target="__cudnn$convBackwardInput"
  ROOT %o = bf16[2,9,9,4]{{3,2,1,0}} get-tuple-element(%u), index=0
}}"""  # noqa: E501
    found = hlo.matmul_flops(text)
    one = 2 * (2 * 4 * 4 * 16) * (3 * 3 * 4)
    assert (found.flops, found.num_matmuls, found.unknown) == (3 * one, 3, ())


def test_flops_of_fused_attention() -> None:
    """Two products of (T, S) scores a head forwards, five backwards; keys may have fewer heads."""
    text = """HloModule m
ENTRY %main (q: bf16[2,8,4,16], k: bf16[2,6,2,16]) -> bf16[2,4,8,16] {
  %q = bf16[2,8,4,16]{3,2,1,0} parameter(0)
  %k = bf16[2,6,2,16]{3,2,1,0} parameter(1)
  %f = (bf16[2,4,8,16]{3,1,2,0}, f32[2,4,8]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"
  %stat = f32[2,4,8]{2,1,0} get-tuple-element(%f), index=1
  %b = (bf16[2,4,8,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k, %stat, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %o = bf16[2,4,8,16]{3,1,2,0} get-tuple-element(%b), index=0
}"""  # noqa: E501
    found = hlo.matmul_flops(text)
    product = 2 * 2 * 4 * 8 * 6 * 16
    assert (found.flops, found.num_matmuls, found.unknown) == (7 * product, 2, ())


def test_refuses_what_it_cannot_read() -> None:
    with pytest.raises(hlo.HloError, match="found no ENTRY"):
        hlo.collectives("module @jit_f {}")
    with pytest.raises(hlo.HloError, match="is_scheduled=true"):
        overlaps(ASYNC.replace(", is_scheduled=true", "").format(direction="LT", step="copy(%i)"))
