"""Chains cut into stages: contiguous, complete, and as even as brute force can make them."""

from __future__ import annotations

import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import gpt, tiny

import fzero as fz
import fzero.pipeline
from fzero.pipeline import Partition, partition
from fzero.programs.flops import flops
from fzero.sharding.homes import cut_into_stages
from fzero.sharding.stages import balance


def layer(name, *shape, apply=None, **options):
    """A layer with one leaf of a shape, or with none."""
    init = (lambda rng: {"w": jnp.zeros(shape)}) if shape else None
    return fz.Layer(name, init, apply or (lambda p, x, ctx: x), **options)


def stack(name, num, *shape, apply=None):
    """A stack whose layers have one leaf of a shape."""
    return fz.Stack(name, num, lambda rng: {"w": jnp.zeros(shape)}, apply or (lambda p, x, ctx: x))


def units(num):
    """A chain of `num` layers without parameters."""
    return fz.Sequential([layer(f"l{i}") for i in range(num)])


def mixed(loss=True):
    """Layers and stacks in turn: 9 units."""
    chain = [layer("in", 4), stack("a", 3, 2), layer("mid"), stack("b", 3, 5), layer("out", 3)]
    return fz.Sequential(chain, (lambda x, batch: jnp.sum(x)) if loss else None)


def labels(cut):
    return [[(p.layer.name, p.start, p.stop, p.number) for p in stage] for stage in cut.stages]


# What a partition is


@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("stages", range(1, 10))
def test_pieces_are_the_chain_in_order(stages, loss):
    model = mixed(loss)
    cut = partition(model, stages)
    assert cut.num_stages == len(cut.stages) == len(cut.sizes) == stages
    pieces = [piece for stage in cut.stages for piece in stage]
    seen = [(p.layer, i) for p in pieces for i in range(p.start, p.stop)]
    assert seen == [(link, i) for link in model.layers for i in range(link.num_layers)]
    for stage in cut.stages:
        assert len({id(piece.layer) for piece in stage}) == len(stage)  # neighbours are joined
    number = 0
    for piece in pieces:  # as run_chain counts
        assert piece.number == number
        number += piece.stop - piece.start


def test_the_loss_belongs_to_the_last_stage_and_is_no_unit():
    cut = partition(mixed(), 9)
    assert cut.sizes == (1,) * 9
    assert labels(cut)[-1] == [("out", 0, 1, 8), ("loss", 0, 1, 9)]
    assert [piece.layer.name for piece in partition(mixed(loss=False), 9).stages[-1]] == ["out"]


def test_a_stack_is_cut_at_any_layer():
    cut = partition(mixed(), 3, [2, 5, 2])
    assert labels(cut) == [
        [("in", 0, 1, 0), ("a", 0, 1, 1)],
        [("a", 1, 3, 2), ("mid", 0, 1, 4), ("b", 0, 2, 5)],
        [("b", 2, 3, 7), ("out", 0, 1, 8), ("loss", 0, 1, 9)],
    ]
    assert cut.sizes == cut.loads == (2, 5, 2)


@pytest.mark.parametrize(
    ("num", "stages"), [(num, stages) for num in range(1, 14) for stages in range(1, 7)
                        if stages <= num],
)  # fmt: skip
def test_uniform_gives_the_first_stages_the_extra_layers(num, stages):
    cut = partition(units(num), stages)
    assert cut.sizes == cut.loads
    assert sum(cut.sizes) == num
    assert max(cut.sizes) - min(cut.sizes) <= 1
    assert list(cut.sizes) == sorted(cut.sizes, reverse=True)


def test_a_partition_is_a_value():
    model = mixed()
    one, two = partition(model, 3), partition(model, 3)
    assert one == two
    assert hash(one) == hash(two)
    assert one != partition(model, 2)
    assert partition(model, 3, list(one.sizes)) == one


def test_facade():
    assert fzero.pipeline.partition is partition
    assert fzero.pipeline.Partition is Partition
    assert fzero.pipeline.Piece is type(partition(units(1), 1).stages[0][0])
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fzero.pipeline.nothing  # noqa: B018


def test_table():
    assert str(partition(mixed(), 3, "parameters")).splitlines() == [
        "stage  layers  parameters  links",
        "    0       4          10  in, a",
        "    1       3          10  mid, b[0:2]",
        "    2       2           8  b[2:3], out, loss",
    ]
    assert str(partition(mixed(), 2)).splitlines()[0] == "stage  layers  links"


# Balance, against brute force


def every_cut(loads, parts):
    """All ways to cut `loads` into non-empty contiguous parts, as sums."""
    for inner in itertools.combinations(range(1, len(loads)), parts - 1):
        ends = (0, *inner, len(loads))
        yield [sum(loads[a:b]) for a, b in itertools.pairwise(ends)], np.diff(ends)


def badness(sums, lengths):
    """What the best cut has least of."""
    return max(sums), sum(s * s for s in sums), sum(int(n) ** 2 for n in lengths)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_balance_is_optimal(data):
    # Many zeros: layers without parameters, or that a pattern does not match.
    weights = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 10**12))
    loads = data.draw(st.lists(weights, min_size=1, max_size=9))
    parts = data.draw(st.integers(1, len(loads)))
    sizes = balance(loads, parts)
    assert len(sizes) == parts
    assert min(sizes) >= 1
    assert sum(sizes) == len(loads)
    ends = list(itertools.accumulate(sizes, initial=0))
    found = [sum(loads[a:b]) for a, b in itertools.pairwise(ends)]
    assert badness(found, sizes) == min(badness(*cut) for cut in every_cut(loads, parts))


def test_four_small_loads_are_cut_best():
    """All of them: a limit that is too wide by one shows in few, as in 1, 6, 2, 4 among three."""
    for loads in itertools.product(range(7), repeat=4):
        for parts in (2, 3):
            sizes = balance(loads, parts)
            ends = np.cumsum([0, *sizes])
            found = badness([sum(loads[a:b]) for a, b in itertools.pairwise(ends)], sizes)
            assert found == min(badness(*cut) for cut in every_cut(loads, parts)), (loads, parts)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4), st.data())
def test_parameters_is_optimal(links, data):
    """Over random chains of layers (num 1) and stacks."""
    chain = [
        stack(f"s{i}", num, size) if num > 1 else layer(f"s{i}", size)
        for i, (num, size) in enumerate(links)
    ]
    loads = [size for num, size in links for _ in range(num)]
    stages = data.draw(st.integers(1, len(loads)))
    cut = partition(fz.Sequential(chain), stages, "parameters")
    assert sum(cut.loads) == sum(loads)
    assert max(cut.loads) == min(max(sums) for sums, _ in every_cut(loads, stages))


@pytest.mark.parametrize(("num", "stages"), [(7, 3), (9, 4), (12, 5), (6, 6)])
def test_equal_loads_are_cut_uniformly(num, stages):
    for load in (0, 1, 10**15):
        assert tuple(balance([load] * num, stages)) == partition(units(num), stages).sizes


def test_balance_of_a_thousand_layers():
    """Every layer once, and no stage above the average by more than one layer."""
    rng = np.random.default_rng(0)
    loads = [int(n) for n in rng.integers(0, 10**9, 1000)]
    sizes = balance(loads, 64)
    assert len(sizes) == 64
    assert sum(sizes) == 1000
    ends = np.cumsum(sizes)
    largest = max(sum(loads[end - size : end]) for size, end in zip(sizes, ends, strict=True))
    assert largest <= sum(loads) / 64 + max(loads)


def test_a_tied_leaf_counts_once_for_its_owner():
    size = gpt.Size(layers=2)
    cut = partition(gpt.gpt(size), 4, "parameters")
    assert cut.loads[0] == (size.vocab + size.seq) * size.d
    assert cut.loads[-1] == 2 * size.d  # the head's norm, not the table it reads
    assert sum(cut.loads) == gpt.num_params(size)


def test_parameters_of_concrete_values_and_buffers():
    model = fz.Sequential(
        [
            fz.Layer("norm", lambda rng: None, lambda p, x, ctx: (x, ctx.buffers), stateful=True),
            layer("out", 2),
        ],
        init=({"norm": {"w": np.ones(3)}, "out": {"w": np.ones(2)}}, {"norm": {"m": np.ones(99)}}),
    )
    assert partition(model, 2, "parameters").loads == (3, 2)


# Cost


def test_cost_of_a_gpt_is_its_matmuls():
    size, rows = gpt.Size(layers=4), 6
    model = gpt.gpt(size, dropout=0.1)
    cut = partition(model, 6, "cost", batch=gpt.abstract_batch(size, rows))
    tokens = rows * size.seq
    block = tokens * (24 * size.d**2 + 4 * size.seq * size.d)
    assert cut.loads == (0, block, block, block, block, 2 * tokens * size.d * size.vocab)


def test_cost_moves_the_cut_where_parameters_would_not():
    size = gpt.Size(vocab=2000, layers=4)
    batch = gpt.abstract_batch(size, 4)
    model = gpt.gpt(size)
    assert partition(model, 2, "parameters").sizes == (1, 5)  # the table is all there is
    assert partition(model, 2, "cost", batch=batch).sizes == (5, 1)  # the head that reads it


def test_cost_takes_arrays_and_allocates_nothing():
    batch = {"ids": np.zeros((2, 9), np.int32), "unused": np.zeros((2, 3), np.float64)}
    gc.collect()
    before = len(jax.live_arrays())
    partition(gpt.gpt(), 2, "cost", batch=batch)
    assert len(jax.live_arrays()) <= before


def test_cost_follows_shared_inputs_and_buffers():
    def attend(p, x, ctx):
        return {**x, "h": x["h"] @ p["w"] + x["mask"]}

    model = fz.Sequential(
        [
            fz.Layer(
                "in",
                lambda rng: ({"w": jnp.ones((4, 4))}, {"n": jnp.zeros(())}),
                lambda p, b, ctx: ({"h": b["x"] @ p["w"], "mask": b["x"]}, {"n": ctx.buffers["n"]}),
                stateful=True,
            ),
            fz.Stack("s", 3, lambda rng: {"w": jnp.ones((4, 4))}, attend, shared=("mask",)),
            fz.Stack(
                "t",
                2,
                lambda rng: ({"w": jnp.ones((4, 4))}, {"n": jnp.zeros(())}),
                lambda p, x, ctx: ({**x, "h": x["h"] @ p["w"]}, {"n": ctx.buffers["n"] + 1}),
                stateful=True,
            ),
        ],
        loss=lambda x, batch: jnp.sum(x["h"]),
    )
    batch = {"x": jax.ShapeDtypeStruct((5, 4), jnp.float32)}
    assert partition(model, 6, "cost", batch=batch).loads == (5 * 2 * 16,) * 6


X, W = jnp.ones((4, 8)), jnp.ones((8, 16))
MATMUL = 2 * 4 * 8 * 16


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda x, w: jnp.sin(x @ w).sum(), MATMUL, id="matmul"),
        pytest.param(lambda x, w: jnp.einsum("bi,ij->jb", x, w), MATMUL, id="einsum"),
        pytest.param(lambda x, w: jax.vmap(lambda r: r @ w)(x), MATMUL, id="vmap"),
        pytest.param(jax.jit(lambda x, w: jax.jit(jnp.matmul)(x, w)), MATMUL, id="jit"),
        pytest.param(jax.checkpoint(jnp.matmul), MATMUL, id="checkpoint"),
        pytest.param(
            lambda x, w: jax.lax.scan(lambda c, _: (c, x @ w), 0.0, None, 7)[1],
            7 * MATMUL,
            id="scan",
        ),
        pytest.param(
            lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w.T, lambda: x + 0),
            2 * MATMUL,
            id="cond",
        ),
        pytest.param(
            lambda x, w: jax.lax.while_loop(lambda c: c.sum() > 0, lambda c: c @ w @ w.T, x),
            2 * MATMUL,
            id="while",
        ),
        pytest.param(lambda x, w: jax.nn.relu(x @ w), MATMUL, id="custom_jvp"),
        pytest.param(lambda x, w: custom(x, w), MATMUL, id="custom_vjp"),
    ],
)
def test_flops(function, expected):
    assert flops(jax.make_jaxpr(function)(X, W)) == expected


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_flops_of_a_convolution(groups, layout):
    n, c, out, size, k = 2, 4, 8, 9, 3
    x = (n, c, size, size) if layout == "NCHW" else (n, size, size, c)
    w = (out, c // groups, k, k) if layout == "NCHW" else (k, k, c // groups, out)
    numbers = (layout, "OIHW" if layout == "NCHW" else "HWIO", layout)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=numbers, feature_group_count=groups
        )

    jaxpr = jax.make_jaxpr(convolve)(jnp.ones(x), jnp.ones(w))
    assert flops(jaxpr) == 2 * n * out * 4 * 4 * (c // groups) * k * k


# Matches


def test_type_balances_what_the_expression_finds():
    names = ["embed", "Block_0", "block_1", "act", "act2", "block_2", "block_3", "head"]
    model = fz.Sequential([layer(name) for name in names])
    cut = partition(model, 2, "type:BLOCK")
    assert cut.loads == (2, 2)
    assert cut.sizes == (4, 4)  # among the cuts between blocks 1 and 2
    assert partition(model, 4, r"type:^block_\d$").loads == (1, 1, 1, 1)
    assert partition(mixed(), 3, "type:^b$").loads == (1, 1, 1)  # each layer of a stack


# What is updated together


def test_the_same_leaves_are_updated_together_in_all_schedules_of_the_same_stages():
    """Otherwise they are compiled, and round, otherwise. In a V one rank has stages 1 and 2."""
    model = fz.Sequential(
        [layer("in", 4), layer("mid", 4), stack("a", 2, 2), layer("out", 3)],
        lambda x, batch: jnp.sum(x),
    )

    def together(schedule, pipe):
        plan = fz.Plan(pipe=pipe, schedule=schedule, microbatches=4, partition=(1, 2, 1, 1))
        groups = {}
        for name, home in cut_into_stages(model, plan).homes.items():
            groups.setdefault((home.ranks, home.label), set()).add(name)
        return sorted(map(sorted, groups.values()))

    assert together("zb_v", 2) == together("interleaved", 2) == together("1f1b", 4)


# Errors


def test_a_plain_model_cannot_be_cut():
    with pytest.raises(fz.PlanError, match=r"expected a fz\.Sequential, got a Model.*pipe=1"):
        partition(tiny.regression(), 2)


@pytest.mark.parametrize("stages", [0, -1, 2.0, True, "2", None])
def test_stages_are_a_positive_integer(stages):
    with pytest.raises(fz.PlanError, match=r"stages=.*expected an integer of 1 or more"):
        partition(units(3), stages)


def test_more_stages_than_units():
    with pytest.raises(fz.PlanError, match=r"10 stages, but the model has 9 layers.*at most 9"):
        partition(mixed(), 10)


@pytest.mark.parametrize(
    "method", ["", "even", "type", "Parameters", "typed:x", None, 3, [], [3], [0, 3], [4, -1],
               [1.0, 2.0], [True, 2], ["1", "2"], [1, 1, 1]],
    ids=repr,
)  # fmt: skip
def test_bad_methods_say_what_there_is(method):
    with pytest.raises(fz.PlanError, match=r"expected .*uniform.*|expected a list of 2.*sum to 3"):
        partition(units(3), 2, method)


def test_a_list_that_does_not_sum_up_says_its_sum():
    with pytest.raises(fz.PlanError, match=r"\(2 of them, sum 5\).*2 positive .* sum to 3"):
        partition(units(3), 2, [2, 3])


def test_bad_expressions():
    with pytest.raises(fz.PlanError, match=r"matches none of the layer names \['l0', 'l1'\]"):
        partition(units(2), 2, "type:conv")
    with pytest.raises(fz.PlanError, match="expected a regular expression"):
        partition(units(2), 2, "type:(")


def test_cost_needs_its_batch():
    with pytest.raises(fz.PlanError, match="pass batch="):
        partition(units(2), 2, "cost")
