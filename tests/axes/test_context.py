"""Sequences divided over a `context` axis: attention, steps, and what is exchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fzero as fz
from fzero.compat import auto_mesh
from fzero.exchange.cudnn import fused_attention
from fzero.exchange.ring import Ring
from fzero.preflight import hlo
from tests.support.cudnn import answered


ROWS, LENGTH, HEADS, GROUPS, FEATURES, OUT = 2, 24, 4, 2, 4, 3


def exact(q, k, v, causal, window, segments):
    """Attention as it is written down, in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, HEADS // GROUPS, 2) for x in (k, v))
    far = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
    seen = np.ones((ROWS, 1, LENGTH, LENGTH), bool)
    seen &= far >= 0 if causal else True
    seen &= np.abs(far) <= window if window is not None else True
    if segments is not None:
        seen &= (segments[:, :, None] == segments[:, None, :])[:, None]
    scores = np.where(seen, np.einsum("bqhf,bkhf->bhqk", q, k) / np.sqrt(FEATURES), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhf->bqhf", weights, v), weights


def exact_grads(q, k, v, given, weights):
    """The gradients of `sum(attention * given)`."""
    share = HEADS // GROUPS
    q, k, v, given = (x.astype(np.float64) for x in (q, k, v, given))
    wide_k, wide_v = (np.repeat(x, share, 2) for x in (k, v))
    pulled = np.einsum("bqhf,bkhf->bhqk", given, wide_v)
    slope = weights * (pulled - (weights * pulled).sum(-1, keepdims=True)) / np.sqrt(FEATURES)
    dq = np.einsum("bhqk,bkhf->bqhf", slope, wide_k)
    dk = np.einsum("bhqk,bqhf->bkhf", slope, q)
    dv = np.einsum("bhqk,bqhf->bkhf", weights, given)
    together = [x.reshape(ROWS, LENGTH, GROUPS, share, -1).sum(3) for x in (dk, dv)]
    return dq, *together


def values():
    rng = np.random.default_rng(0)
    shapes = [(ROWS, LENGTH, HEADS, FEATURES), (ROWS, LENGTH, GROUPS, FEATURES),
              (ROWS, LENGTH, GROUPS, OUT), (ROWS, LENGTH, HEADS, OUT)]  # fmt: skip
    segments = np.sort(rng.integers(0, 3, (ROWS, LENGTH))).astype(np.int32)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes], segments


def divided_attention(context, tensor, **options):
    """`(result, gradients)` on a mesh of both axes."""
    (q, k, v, given), segments = values()
    mesh = auto_mesh(
        np.array(jax.devices()[: context * tensor]).reshape(context, tensor), ("context", "tensor")
    )
    segments = segments if options.pop("documents") else None

    def run(q, k, v):
        out = fz.attention(q, k, v, segments=segments, **options)
        return jnp.sum(out * given), out

    with jax.set_mesh(mesh):
        grads, out = jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))(q, k, v)
    return out, grads


# Masks: (causal, window, documents).
MASKS = [
    (True, None, False), (False, None, True), (True, 7, True), (False, 5, False),
]  # fmt: skip
MORE = [(True, None, True), (False, None, False), (True, 3, False), (True, 100, False)]


@pytest.mark.parametrize(
    ("causal", "window", "documents"),
    [*MASKS, *(pytest.param(*mask, marks=pytest.mark.nightly) for mask in MORE)],
)
@pytest.mark.parametrize(
    ("context", "tensor", "exchange"),
    [
        (4, 2, "ring"),
        (2, 1, "heads"),
        pytest.param(3, 1, "ring", marks=pytest.mark.nightly),
        pytest.param(1, 1, "auto", marks=pytest.mark.nightly),
    ],
)
def test_divided_attention_is_attention(causal, window, documents, context, tensor, exchange):
    (q, k, v, given), segments = values()
    wanted, weights = exact(q, k, v, causal, window, segments if documents else None)
    out, grads = divided_attention(
        context, tensor, causal=causal, window=window, documents=documents, exchange=exchange
    )
    for found, want in zip((out, *grads), (wanted, *exact_grads(q, k, v, given, weights)),
                           strict=True):  # fmt: skip
        assert np.max(np.abs(found - want)) < 1e-6 * np.max(np.abs(want))


@pytest.mark.parametrize("exchange", ["ring", "heads"])
def test_scores_of_16_bits_are_not_rounded_to_them(exchange):
    (q, k, v, _), _ = values()
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (8 * q, k, v))
    wanted, _ = exact(*(np.asarray(x, np.float32) for x in (q, k, v)), False, None, None)
    with jax.set_mesh(auto_mesh(np.array(jax.devices()[:2]), ("context",))):
        found = jax.jit(lambda *x: fz.attention(*x, causal=False, exchange=exchange))(q, k, v)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2**-8, atol=1e-5)


def exchanged(length=64, heads=4, groups=4, size=4, **options):
    """Collectives of one attention's forward pass, by kind."""
    mesh = auto_mesh(np.array(jax.devices()[:size]), ("context",))
    q, k = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (heads, groups))
    with jax.set_mesh(mesh):
        program = jax.jit(
            lambda q, k, v: fz.attention(q, k, v, **options),
            in_shardings=P(None, "context"),
            out_shardings=P(None, "context"),
        )
        text = program.lower(q, k, k).compile().as_text()
    found = {}
    for c in hlo.collectives(text, mesh_axes={"context": size}):
        found[c.kind] = found.get(c.kind, 0) + c.times * c.elements
    return found  # fmt: skip


@pytest.mark.parametrize("exchange", ["ring", "heads"])
def test_a_scale_may_be_learned_and_segments_may_be_a_mask(exchange):
    (q, k, v, _), segments = values()
    mask, root = segments > 0, np.float32(FEATURES**-0.5)
    mesh = auto_mesh(np.array(jax.devices()[:2]), ("context",))

    def run(scale, segments, exchange="auto"):
        out = fz.attention(q, k, v, scale=scale, segments=segments, exchange=exchange)
        return jnp.sum(out**2)

    wanted, slope = jax.value_and_grad(run)(root, mask.astype(np.int32))
    with jax.set_mesh(mesh):
        divided = jax.jit(jax.value_and_grad(lambda scale: run(scale, mask, exchange)))
        found, own = divided(root)
        constant = jax.jit(lambda: run(jnp.float32(root), mask, exchange))()
        with pytest.raises(fz.PlanError, match=r"scale has shape \(4,\): expected one number"):
            divided(np.full(4, root))
    # A learned scale multiplies queries, not scores; parts are added in another order.
    np.testing.assert_allclose([found, constant, own], [wanted, wanted, slope], rtol=1e-5)


def test_a_window_of_all_positions_but_the_farthest_is_one():
    (q, k, v, _), _ = values()
    for window in (LENGTH - 2, LENGTH - 1):
        wanted, _ = exact(q, k, v, False, window, None)
        found = fz.attention(*map(jnp.asarray, (q, k, v)), window=window)
        assert np.max(np.abs(found - wanted)) < 1e-6 * np.max(np.abs(wanted))


def test_what_each_exchange_sends():
    piece = 64 // 4 * 8 * 4  # elements of all heads of a device's positions
    ring = exchanged(exchange="ring")
    assert set(ring) == {"collective-permute"}
    assert ring["collective-permute"] == 2 * 3 * piece  # keys and values, three times on
    # A window of 20 reaches into two pieces before one's own, not three.
    near = exchanged(exchange="ring", causal=True, window=20)
    assert near["collective-permute"] == 2 * 2 * piece
    # Dealing out halves: queries, keys, values and the result, once.
    causal = exchanged(exchange="ring", causal=True)
    assert causal["collective-permute"] == (2 * 3 + 4) * piece
    heads = exchanged(exchange="heads")
    assert set(heads) == {"all-to-all"}


def test_auto_takes_what_sends_less_of_what_is_possible():
    assert set(exchanged(heads=4, groups=4)) == {"all-to-all"}
    assert set(exchanged(heads=4, groups=2)) == {"collective-permute"}  # 2 groups, 4 devices
    assert set(exchanged(heads=32, groups=4)) == {"collective-permute"}  # 6 against 13.5
    assert set(exchanged(heads=4, groups=4, causal=True, window=3)) == {"collective-permute"}


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "window": 2}, {"window": 2}, {}]
)
def test_documents_are_the_fused_kernels_too(options):
    (q, k, _, _), segments = values()
    half, given = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, k[..., ::-1])], jnp.asarray(q)

    def loss(*x):
        return jnp.sum(fz.attention(*x, segments=segments, **options) * given, dtype=jnp.float32)

    with jax.numpy_dtype_promotion("standard"):
        want = jax.value_and_grad(loss, (0, 1, 2))(*half)
        with answered():
            assert "checkpoint" not in str(jax.make_jaxpr(loss)(*half))  # what products have
            got = jax.value_and_grad(loss, (0, 1, 2))(*half)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        # Weights are rounded to 8 bits of mantissa in one of the two.
        np.testing.assert_allclose(one, other, rtol=0.03, atol=0.03 * np.abs(other).max())


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 2])
def test_biases_of_heads_go_to_the_kernel_with_all_keys(length):
    """Each device has its own queries; what does not divide into even lengths is products."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = [jax.random.normal(key, (ROWS, length, HEADS, 8), jnp.bfloat16) for key in keys[:3]]
    bias = jax.random.normal(keys[3], (1, HEADS, length, length), jnp.bfloat16)
    mesh = auto_mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("context", "tensor"))

    def loss(*given):
        options = {"causal": False, "window": None, "scale": 0.3}
        out = fused_attention(*given[:3], mask=given[3], **options)
        return None if out is None else jnp.sum(jnp.sin(out.astype(jnp.float32)))

    with answered(), jax.numpy_dtype_promotion("standard"):
        want = jax.grad(loss, (0, 1, 2, 3))(*x, bias)
        with jax.set_mesh(mesh):
            if length != LENGTH:
                assert jax.eval_shape(loss, *x, bias) is None
                return
            compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*x, bias).compile()
            got = compiled(*x, bias)
    half = f"{ROWS},{HEADS // 2},{LENGTH // 2},{LENGTH}]"
    assert half in compiled.as_text(), "scores of a device: half of the heads, half of the queries"
    assert f"{LENGTH},{LENGTH}]" not in compiled.as_text().replace(f"{LENGTH // 2},{LENGTH}]", "")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (one, other)), atol=0.03)


def test_the_kernel_multiplies_scores_by_the_scale_that_is_given():
    keys = jax.random.split(jax.random.key(0), 3)
    x = [jax.random.normal(key, (2, 6, 2, 8), jnp.bfloat16) for key in keys]
    with jax.numpy_dtype_promotion("standard"):
        want = jax.nn.dot_product_attention(*x, scale=0.9, implementation="xla")
        with answered():
            out = fused_attention(*x, causal=False, window=None, scale=0.9)
    np.testing.assert_array_equal(*(np.asarray(one, np.float32) for one in (out, want)))


def test_lengths_of_rows_lie_along_their_axis():
    """Each device has those of its own rows; a row of none is 0, and divided keys have none."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = [jax.random.normal(key, (4, 6, 2, 8), jnp.bfloat16) for key in keys]
    lengths = jnp.array([6, 1, 0, 4], jnp.int32)

    def loss(*given):
        options = {"causal": True, "window": None, "scale": 0.3, "lengths": lengths}
        out = fused_attention(*given, **options)
        return None if out is None else (jnp.sum(jnp.sin(out.astype(jnp.float32))), out)

    seen = (np.arange(6) < np.asarray(lengths)[:, None])[:, None, None] & np.tri(6, dtype=bool)
    slope = jax.grad(loss, (0, 1, 2), has_aux=True)
    with answered(), jax.numpy_dtype_promotion("standard"):
        options = {"causal": False, "window": None, "scale": 0.3, "mask": jnp.asarray(seen)}
        want = fused_attention(*x, **options)
        for names, found in ((("expert", "tensor"), True), (("context", "tensor"), False)):
            with jax.set_mesh(auto_mesh(np.array(jax.devices()[:4]).reshape(2, 2), names)):
                if not found:
                    assert jax.eval_shape(loss, *x) is None
                    continue
                compiled = jax.jit(slope).lower(*x).compile()
                slopes, got = compiled(*x)
        alone, _ = slope(*x)
    assert "s32[2]" in compiled.as_text(), "lengths of a device's rows"
    # Weights are rounded to 8 bits of mantissa.
    pairs = zip([got, *slopes], [want, *alone], strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (one, other)), atol=0.03)
    assert not np.asarray(got[2], np.float32).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 62}, r"context=4 with 62 positions and 4 groups"),
        ({"groups": 2, "exchange": "heads"}, r"2 groups .* 'heads' positions and groups that"),
        ({"length": 60, "causal": True, "exchange": "ring"}, r"positions that divide by 8"),
        ({"exchange": "star"}, r"exchange='star': expected one of \['auto', 'ring', 'heads'\]"),
        ({"groups": 3}, r"heads a multiple of groups; got \(1, 64, 4, 8\), \(1, 64, 3, 8\)"),
        ({"length": 0}, r"no size of them 0, .* got \(1, 0, 4, 8\)"),
        ({"window": -1}, r"window=-1: expected at least 0"),
        ({"segments": jnp.zeros((1, 3), jnp.int32)}, r"segments are \(1, 3\): .* \(1, 64\)"),
    ],
)
def test_what_attention_cannot_take_is_refused(options, message):
    sizes = {"length": 64, "groups": 4}
    length, groups = (options.get(name, size) for name, size in sizes.items())
    own = {name: value for name, value in options.items() if name not in sizes}
    q, k = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.float32) for n in (4, groups))
    mesh = auto_mesh(np.array(jax.devices()[:4]), ("context",))
    with jax.set_mesh(mesh), pytest.raises(fz.PlanError, match=message):
        jax.eval_shape(lambda q, k, v: fz.attention(q, k, v, **own), q, k, k)


VOCAB, D = 29, 16


def language_model(causal=True, shard=None, places=64):
    """One token after the other: positions, attention, shifted labels, written for one device."""

    def embed_init(rng):
        a, b = jax.random.split(rng)
        return {"tokens": 0.3 * jax.random.normal(a, (VOCAB, D)),
                "places": 0.3 * jax.random.normal(b, (places, D))}  # fmt: skip

    def embed(p, batch, ctx):
        return p["tokens"][batch["ids"]] + p["places"][: batch["ids"].shape[1]]

    def block_init(rng):
        a, b = jax.random.split(rng)
        return {"qkv": 0.3 * jax.random.normal(a, (D, 3, 4, D // 4)),
                "out": 0.3 * jax.random.normal(b, (4, D // 4, D))}  # fmt: skip

    def block(p, x, ctx):
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchf->btchf", x, p["qkv"]), 2, 0)
        y = fz.attention(q, k, v, causal=causal, segments=ctx.batch["documents"])
        return x + jnp.einsum("bthf,hfd->btd", y, p["out"])

    def loss(logits, batch):
        found = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
        counts = (batch["documents"][:, 1:] == batch["documents"][:, :-1]).astype(jnp.float32)
        return fz.Mean(jnp.sum(found * counts), jnp.sum(counts))

    return fz.Sequential(
        [
            fz.Layer("embed", embed_init, embed),
            fz.Stack("blocks", 2, block_init, block, shard=shard or {}),
            fz.Layer("head", None, lambda p, x, ctx: x @ p["tokens"].T,
                     reads={"tokens": "embed/tokens"}),
        ],
        loss,
    )  # fmt: skip


def text(seed=0, rows=8, length=32):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, (rows, length), dtype=np.int32)
    return {"ids": ids, "documents": np.sort(rng.integers(0, 3, (rows, length))).astype(np.int32)}


def trained(plan, model, steps=2, devices=None):
    tx = optax.adamw(1e-2)
    state = fz.init(model, tx, plan, rng=0, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    numbers = []
    for seed in range(steps):
        state, metrics = step(state, text(seed))
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    found = fz.eval_step(model, plan, devices=devices)(state, text())
    return np.array(numbers), jax.tree.map(np.asarray, fz.logical(model, state)), found["loss"]


@pytest.fixture(scope="module")
def alone():
    return trained(fz.Plan(zero=0, data=1), language_model(), devices=jax.devices()[:1])


HEADS_DIVIDED = {"qkv": (None, None, "tensor"), "out": ("tensor",)}


@pytest.mark.parametrize(
    ("options", "shard"),
    [
        ({"zero": 3, "data": 2, "context": 4}, None),
        ({"zero": 1, "data": 2, "context": 2, "tensor": 2, "microbatches": 2}, HEADS_DIVIDED),
        pytest.param({"zero": 0, "data": 1, "context": 8}, None, marks=pytest.mark.nightly),
        pytest.param({"zero": 2, "gather": "lazy", "data": 4, "context": 2, "remat": "none"}, None,
                     marks=pytest.mark.nightly),
        pytest.param({"zero": 3, "data": 2, "context": 2, "tensor": 2, "remat": "dots",
                      "tiers": {"opt_state": "host"}}, HEADS_DIVIDED, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_sequence_divided_over_devices_trains_as_on_one(options, shard, alone):
    """Positions, labels and documents are those of whole sequences."""
    plan = fz.Plan(**{"min_shard_bytes": 0, **options})
    found = trained(plan, language_model(shard=shard))
    for a, b in zip(found, alone, strict=True):
        # Adam's first steps have the length of the rate, 1e-2, whatever the gradient: what differs
        # by a rounding in a gradient near zero may differ by more in the step.
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), a, b)
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-6)


@pytest.mark.nightly
def test_4096_tokens_over_8_devices_have_the_loss_and_gradients_of_one():
    """The ring, balanced. Momentum's first sum is the gradient."""
    batch, tx, found = text(rows=1, length=4096), optax.sgd(0.1, momentum=0.9), []
    model = language_model(places=4096)
    for plan in (fz.Plan(zero=3, data=1, context=8), fz.Plan(zero=0, data=1)):
        devices = jax.devices()[: plan.context]
        state = fz.init(model, tx, plan, rng=0, devices=devices)
        state, metrics = fz.train_step(model, tx, plan, devices=devices)(state, batch)
        found.append((metrics["loss"], jax.device_get(state.opt_state[0].trace)))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    for a, b in zip(*(jax.tree.leaves(grads) for _, grads in found), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b)))


def test_batches_are_divided_along_sequences_where_that_goes():
    plan = fz.Plan(data=2, context=4)
    placed = fz.train_step(language_model(), optax.sgd(0.1), plan).passes.place(
        {**text(), "one": np.zeros(8), "odd": np.zeros((8, 5))}
    )
    specs = {name: leaf.sharding.spec for name, leaf in placed.rows.items()}
    rows = ("replica", "data")
    assert specs == {
        "ids": P(rows, "context"), "documents": P(rows, "context"), "one": P(rows), "odd": P(rows),
    }  # fmt: skip


def test_activations_stay_divided_and_attention_alone_exchanges_them():
    """Counted in the compiled program: no layer's activation is gathered to whole sequences. (XLA
    gathers the rows that are added into the token table's gradient, once a step.)"""
    model, tx, plan = language_model(), optax.adamw(1e-2), fz.Plan(data=2, context=4)
    step = fz.train_step(model, tx, plan)
    batch = {name: jax.ShapeDtypeStruct((8, 64), jnp.int32) for name in ("ids", "documents")}
    compiled = step.lower(fz.abstract_state(model, tx, plan), batch).compile()
    found = hlo.collectives(compiled.as_text(), mesh_axes={"replica": 1, "data": 2, "context": 4})
    moved = [c for c in found if "context" in c.axes and c.kind != "all-reduce"]
    assert any(c.kind in ("all-to-all", "collective-permute") for c in moved)
    whole = 4 * 64 * D  # of a device's rows
    gathered = [c for c in moved if c.kind == "all-gather" and c.elements >= whole]
    assert all("scatter-add" in c.op_name and c.times == 1 for c in gathered)
    assert len(gathered) <= 1


DIVIDED = fz.Plan(zero=3, data=2, context=4, min_shard_bytes=0)


def stepped(model, plan, batch):
    devices, tx = jax.devices()[: plan.data * plan.context], optax.sgd(0.01)
    state = fz.init(model, tx, plan, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    state, _ = step(state, batch)
    return jax.tree.map(np.asarray, dict(state.params))


def hold(x, spec):
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


@pytest.mark.parametrize(
    ("before", "after"), [(None, None), (P(None, "context"), P()), (P(), None), (P(), P())]
)
def test_a_model_s_own_max_pooling_is_right_or_refused(before, after):
    """XLA's own gradient of it was 19 % off where positions are divided, without a word."""

    def init(rng):
        keys = jax.random.split(rng, 2)
        return {
            k: jax.random.normal(key, (8, 8)) for k, key in zip(("in", "out"), keys, strict=True)
        }, {}

    def loss(p, buffers, batch, rng, train):
        x = jax.jit(lambda x: hold(x @ p["in"], before))(batch["x"])  # (calls are seen through)

        @jax.checkpoint
        def pooled(x):
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")
            return hold(x, after)

        x = pooled(x)
        return jnp.mean((x @ p["out"]) ** 2), buffers, {}

    model = fz.Model(init, loss)
    batch = {"x": np.random.default_rng(0).normal(size=(4, 16, 8)).astype(np.float32)}

    def slope(plan):
        """A gradient of one's own, through an evaluation."""
        devices = jax.devices()[: plan.data * plan.context]
        state = fz.init(model, optax.sgd(0.1), plan, rng=0, devices=devices)
        evaluate = fz.eval_step(model, plan, devices=devices)
        assert np.isfinite(evaluate(state, batch)["loss"])  # what is not differentiated is right
        grad = jax.grad(lambda p: evaluate(state.replace(params=p), batch)["loss"])
        return jax.device_get(fz.logical(model, state.replace(params=grad(state.params)), plan))

    if before != P() or after != P():  # a constraint that divides positions holds nothing
        for run in (lambda: stepped(model, DIVIDED, batch), lambda: slope(DIVIDED)):
            with pytest.raises(
                fz.PlanError, match=r"context=4: .*overlap \(max pooling\), of float"
            ):
                run()
        return
    for run in (lambda plan: stepped(model, plan, batch), slope):  # sums in another order
        found = [run(plan) for plan in (fz.Plan(data=1), DIVIDED)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6), *found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 9, 100])
def test_keys_of_each_device_come_by_once_if_a_window_reaches_them(causal, window):
    length, size = 4, 4
    ring = Ring("context", size, causal, window, 1.0)
    rounds = ring.rounds(length)
    assert len(set(rounds)) == len(rounds)
    # Keys that have been moved on r times are r devices before, or size - r behind.
    reach = size if window is None else -(-window // length)
    seen = {r for r in range(size) if r <= reach or (not causal and size - r <= reach)}
    assert set(rounds) == (set(range(size)) if window is None else seen)
