"""Losses that look across rows: right with the rows of all devices, named without them."""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from fzero import Plan
from tests.support import tiny


RNG = np.random.RandomState(0)
BATCH = {"x": RNG.randn(16, 12).astype("f"), "y": RNG.randn(16, 12).astype("f")}
TX = optax.adam(1e-2)


def labelled(scores, labels):
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, labels)


def both(p, batch):
    return batch["x"] @ p["u"], batch["y"] @ p["v"]


def squares(p, batch):
    return jnp.square(batch["x"] @ p["u"] - 1)


def contrastive(p, batch):
    u, v = both(p, batch)
    return fz.Mean(labelled(u @ v.T, jnp.arange(len(u))).sum(), jnp.float32(len(u)))


def contrastive_of_all(p, batch):
    u, v = fz.all_rows(both(p, batch))
    return labelled(u @ v.T, jnp.arange(len(u))).mean()


def contrastive_beside_all(p, batch):
    u, v = both(p, batch)
    v = fz.all_rows(v)
    return labelled(u @ v.T, fz.own_rows(jnp.arange(len(v)))).mean()


def summed_beside_all(p, batch):
    return contrastive_beside_all(p, batch) * len(batch["x"])


def distances(p, batch):
    u, _ = both(p, batch)
    far = jnp.square(u[:, None] - u[None]).sum(-1)
    return jnp.maximum(far.max(1) - far.min(1), 0).mean()


def decorrelated(p, batch, rows=lambda x: x):
    u, v = rows(both(p, batch))
    u, v = ((x - x.mean(0)) / x.std(0) for x in (u, v))
    return jnp.square(u.T @ v / len(u) - jnp.eye(u.shape[1])).sum()


def share_of_masked(p, batch):
    mask = (batch["y"][:, :1] > 0).astype(jnp.float32)
    return (squares(p, batch) * mask).sum() / mask.sum()


def masked(p, batch):
    mask = (batch["y"][:, :1] > 0).astype(jnp.float32)
    return fz.Mean((squares(p, batch) * mask).sum(), mask.sum())


def masked_at_least_one(p, batch):
    given = masked(p, batch)
    return fz.Mean(given.total, jnp.maximum(given.count, 1))


def normed(p, batch):
    u, _ = both(p, batch)
    return jnp.mean(jnp.tanh((u - u.mean(0)) * jax.lax.rsqrt(u.var(0) + 1e-5)))


def penalized(p, batch):
    by_row = jax.vmap(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["u"]))))(batch["x"])
    return jnp.mean(jnp.square(by_row)) + 0.1 * jnp.sum(jnp.square(p["v"])) ** 2


def in_a_loop(p, batch):
    return jnp.mean(jax.lax.map(lambda x: jnp.sum(jnp.square(x @ p["u"])), batch["x"]))


A_SUM = r"is a sum over rows, of which a mean over devices is taken"
LOSSES = {
    contrastive: r"compares rows with each other \(dot_general in test_row_sums.py:",
    distances: r"compares rows with each other \(sub in test_row_sums.py:",
    decorrelated: r"is no sum over rows \(integer_pow|is no sum over rows \(square",
    share_of_masked: r"is no sum over rows \(div in test_row_sums.py:",
    masked_at_least_one: r"is no sum over rows \(max in test_row_sums.py:",
    (lambda p, b: jnp.sqrt(squares(p, b).mean())): r"is no sum over rows \(sqrt",
    (lambda p, b: squares(p, b).max()): r"is no sum over rows \(reduce_max",
    (lambda p, b: jnp.log(jnp.mean(jnp.exp(both(p, b)[0]))) + 1): r"is no sum over rows \(log",
    (lambda p, b: squares(p, b).mean() * both(p, b)[1].mean()): r"is no sum over rows \(mul",
    (lambda p, b: 1 / squares(p, b).mean()): r"is no sum over rows \(div",
    contrastive_of_all: None,
    contrastive_beside_all: None,
    summed_beside_all: A_SUM,
    (lambda p, b: decorrelated(p, b, fz.all_rows)): None,
    masked: None,
    normed: None,  # as anywhere per device
    penalized: None,
    in_a_loop: None,
    (lambda p, b: -jnp.stack([x.mean() for x in both(p, b)]).sum() / (1 + p["u"].sum())): None,
    (lambda p, b: -jnp.stack([x.sum() for x in both(p, b)]).sum() / (1 + p["u"].sum())): A_SUM,
    (lambda p, b: squares(p, b).sum() / 16): A_SUM,  # by the whole batch's rows
    (lambda p, b: fz.Mean(squares(p, b).sum(), jnp.float32(6))): A_SUM,
    (lambda p, b: fz.Mean(squares(p, b).mean(), jnp.float32(len(b["x"])))): r"by their number once",
    (lambda p, b: (squares(p, b) * (0.5 / len(b["x"]))).sum() + jnp.sum(p["v"])): None,
    (lambda p, b: squares(p, b).sum() / jnp.ones_like(b["x"]).sum()): None,
    (lambda p, b: jnp.einsum("ij->j", squares(p, b)).sum() / len(b["x"]) / 1e-3): None,
    (lambda p, b: jnp.sum(p["v"])): None,
    (lambda p, b: both(p, b)[0][jnp.arange(len(b["x"])), 0].mean()): None,  # places are no amounts
    (lambda p, b: jnp.where(jnp.arange(len(b["x"])) < len(b["x"]), both(p, b)[0][:, 0], 0).mean()):
        None,
    (lambda p, b: both(p, b)[0][jnp.arange(len(b["x"])), 0].sum()): A_SUM,
    (lambda p, b: fz.Mean(squares(p, b).sum() + p["v"].sum(), jnp.float32(len(b["x"])))):
        r"adds to a sum over rows what is none \(add in test_row_sums.py:.*by the count",
    (lambda p, b: fz.Mean(squares(p, b).sum() + p["v"].sum() * len(b["x"]) + jnp.zeros(()) + 1e-6,
                          jnp.float32(len(b["x"])))): None,
    (lambda p, b: fz.Mean(squares(p, b).sum() + len(b["x"]) * 0.1 * p["v"].sum(),
                          jnp.float32(len(b["x"])))): None,  # by the count, in Python
    # Labels (rows,) beside (rows, 4): with the 4 rows of a device, one for each class.
    (lambda p, b: jnp.square(both(p, b)[0][:, :4] - b["y"][:, 0]).mean()):
        r"takes the 4 rows of one share, and cannot take all 16 \(.*\(16, 4\), \(16,\)",
    (lambda p, b: squares(p, b).reshape(4, -1).mean(1).mean()): None,  # of fixed sizes
    (lambda p, b: squares(p, b).reshape(4, 6).mean()): None,  # those of a device
}  # fmt: skip


def weights(_=None):
    keys = jax.random.split(jax.random.key(1))
    return {n: jax.random.normal(k, (12, 6)) for n, k in zip("uv", keys, strict=True)}, {}


def model_of(loss):
    return fz.Model(weights, lambda p, b, batch, rng, train: (loss(p, batch), b, {}))


@contextlib.contextmanager
def said(problem):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in found if str(w.message).startswith("loss: it ")]
    assert len(texts) == (problem is not None), texts
    if problem is not None:
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(texts[0])


def trained(model, plan, devices, steps=2):
    state = fz.init(model, TX, plan, devices=devices)
    step, metrics = fz.train_step(model, TX, plan, devices=devices), {}
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return fz.logical(model, state), metrics


def traced(model, plan, devices):
    """What a step says while it is traced; it need not run."""
    state = fz.abstract_state(model, TX, plan, devices=devices)
    jax.eval_shape(fz.train_step(model, TX, plan, devices=devices), state, BATCH)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_no_sum_over_rows_is_named(loss):
    with said(LOSSES[loss]):
        traced(model_of(loss), tiny.plan(zero=1, data=4), jax.devices()[:4])


@pytest.mark.parametrize("loss", [contrastive, share_of_masked])
def test_it_is_named_once(loss):
    model, devices = model_of(loss), jax.devices()[:4]
    plan = tiny.plan(zero=1, data=4)
    with said(LOSSES[loss]):
        state = fz.init(model, TX, plan, devices=devices)
        step = fz.train_step(model, TX, plan, devices=devices)
        state, _ = step(state, BATCH)
        fz.train_step(model, TX, plan, devices=devices)(state, BATCH)


def test_on_one_device_a_loss_may_be_anything():
    plan, devices = fz.Plan(data=1), jax.devices()[:1]
    for loss in (contrastive, share_of_masked):
        with said(None):
            trained(model_of(loss), plan, devices, 1)
    with said("no sum over rows .*2 microbatches"):
        trained(model_of(share_of_masked), plan.replace(microbatches=2), devices, 1)


@pytest.mark.parametrize("loss", [contrastive, contrastive_of_all, contrastive_beside_all])
@pytest.mark.parametrize("data", [1, 2])
def test_no_microbatch_has_the_rows_of_another(loss, data):
    """The rows of all devices are those of one microbatch: the remedy for devices is none here."""
    model, devices = model_of(loss), jax.devices()[:data]
    with said(r"compares rows .*2 microbatches.* wants microbatches=1"):
        traced(model, Plan(data=data, microbatches=2), devices)
    with said(None if data == 1 or loss is not contrastive else r"\(fz\.all_rows\), or give"):
        traced(model, Plan(data=data), devices)  # the same model again, which is right here
    with said(None):
        traced(model_of(masked), Plan(data=data, microbatches=2), devices)


def share_of_labelled(p, batch):
    counts = (batch["labels"] >= 0).astype(jnp.float32)
    return (squares(p, batch).sum(-1) * counts).sum() / counts.sum()


EVEN, ODD = np.arange(16) % 2 - 1, np.arange(16) - 5  # every second row counts, or the later ones


@pytest.mark.parametrize(
    ("loss", "labels", "named"),
    [
        (share_of_labelled, EVEN, False),
        (share_of_labelled, ODD, True),
        (lambda p, b: share_of_labelled(p, b) + squares(p, b).mean() ** 2, EVEN, True),
        (lambda p, b: share_of_labelled(p, b) ** 2, EVEN, True),
        (lambda p, b: share_of_labelled(p, b) + squares(p, b).mean() * 2, EVEN, False),
        (lambda p, b: squares(p, b).mean() / (p["v"].sum() + b["labels"].max()), EVEN, True),
        (lambda p, b: squares(p, b).mean() / squares(p, b).mean(), EVEN, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("plan", [Plan(data=4), Plan(data=2, microbatches=2)])
def test_a_quotient_by_what_all_count_alike_is_a_mean_of_rows(loss, labels, named, plan):
    batch, devices = {**BATCH, "labels": labels}, jax.devices()[: plan.data]
    model = model_of(loss)
    with said("no sum over rows" if named else None):  # of the batch's values: it has to run
        state = fz.init(model, TX, plan, devices=devices)
        state, metrics = fz.train_step(model, TX, plan, devices=devices)(state, batch)
    if not named:
        one = Plan(data=1), jax.devices()[:1]
        state = fz.init(model, TX, one[0], devices=one[1])
        _, want = fz.train_step(model, TX, one[0], devices=one[1])(state, batch)
        np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-6)


def otherwise_of_one_row(p, batch):
    return share_of_labelled(p, batch) + (0 if len(batch["x"]) > 1 else jnp.sum(p["v"] * 0))


@pytest.mark.parametrize(("labels", "named"), [(np.zeros(16, int), False), (EVEN, True)])
def test_a_row_on_each_device_may_be_another_program(labels, named):
    plan = Plan(data=8, microbatches=2)
    with said("no sum over rows" if named else None):
        model = model_of(otherwise_of_one_row)
        step, state = fz.train_step(model, TX, plan), fz.init(model, TX, plan)
        step(state, {**BATCH, "labels": labels})


def test_metrics_are_looked_at_each_by_itself():
    def loss(p, b, batch, rng, train):
        error, counts = squares(p, batch), batch["y"][:, :1] > 0
        return error.mean(), b, {
            "right": fz.Mean(error.sum(), counts.sum()), "mean": error.mean(), "rate": p["u"][0, 0],
            "worst": error.max(), "rmse": jnp.sqrt(error.mean()), "all": fz.all_rows(error).max(),
            "hits": counts.sum(), "rows": fz.Mean(counts.sum(), 1),
        }  # fmt: skip

    plan, devices = tiny.plan(data=4), jax.devices()[:4]
    model = fz.Model(weights, loss)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        metrics = fz.eval_step(model, plan, devices=devices)(
            fz.init(model, None, plan, devices=devices), BATCH
        )
    told = [str(w.message).partition(". Rows")[0].partition(" (")[0] for w in found]
    is_sum = "it is a sum over rows, of which a mean over devices is taken"
    assert told == [
        "metric 'rmse': it is no sum over rows",
        "metric 'worst': it is no sum over rows",
        f"metric 'hits': {is_sum}",
        f"metric 'rows': {is_sum}",
    ]
    assert metrics["all"] > metrics["worst"]


def test_what_counts_is_not_known_of_a_traced_batch():
    plan, devices = tiny.plan(data=4), jax.devices()[:4]
    model = model_of(share_of_labelled)
    step = fz.train_step(model, TX, plan, devices=devices)
    state = fz.init(model, TX, plan, devices=devices)
    with said(r"no sum over rows \(div in test_row_sums.py:\d+\), which is the same only where"):
        jax.jit(step)(state, {**BATCH, "labels": EVEN})


def test_evaluation_and_programs_of_ones_own_name_it_too():
    model, plan, devices = model_of(contrastive), tiny.plan(data=4), jax.devices()[:4]
    with said("compares rows"):
        state = fz.init(model, TX, plan, devices=devices)
        jax.jit(fz.eval_step(model, plan, devices=devices))(state, BATCH)
    with said("compares rows"):
        jax.eval_shape(fz.train_step(model, TX, plan, devices=devices), state, BATCH)


@functools.cache
def trained_alone(loss):
    return trained(model_of(loss), Plan(data=1), jax.devices()[:1])


@pytest.mark.parametrize(
    "plan",
    [
        *(Plan(zero=zero, data=4, min_shard_bytes=0) for zero in range(4)),
        Plan(zero=3, data=2, replica=2, min_shard_bytes=0, remat="layer"),
        Plan(zero=2, data=1, replica=4),
    ],
)
@pytest.mark.parametrize("loss", [contrastive_of_all, contrastive_beside_all])
def test_with_the_rows_of_all_a_loss_is_that_of_one_device(loss, plan):
    want, wanted = trained_alone(loss)
    got, found = trained(model_of(loss), plan, jax.devices()[:4])
    # The sums over rows are made in another order, and Adam's first steps divide by gradients.
    tiny.close(got, want, rtol=1e-4, atol=1e-5)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)


@pytest.mark.parametrize("right", [False, True])
def test_a_chain_in_a_pipeline_is_looked_at_as_a_whole(right):
    rows = fz.all_rows if right else lambda x: x

    def last(p, x, ctx):
        u = rows(x @ p["w"])
        return labelled(u @ u.T, jnp.arange(len(u))).mean()

    chain = [
        fz.Layer("in", lambda key: {"w": jax.random.normal(key, (12, 6))},
                 lambda p, batch, ctx: batch["x"] @ p["w"]),
        fz.Layer("last", lambda key: {"w": jax.random.normal(key, (6, 6))}, last),
    ]  # fmt: skip
    model = fz.Sequential(chain)
    want, _ = trained(model, Plan(data=1), jax.devices()[:1])
    plan = tiny.plan(pipe=2, data=2, microbatches=1)
    with said(None if right else "compares rows"):
        state = fz.init(model, TX, plan, devices=jax.devices()[:4])
        step = fz.train_step(model, TX, plan, devices=jax.devices()[:4])
        state, _ = step(step(state, BATCH)[0], BATCH)
    with said(r"compares rows .*2 microbatches"):  # in evaluation, too, and on one device a rank
        devices, parts = jax.devices()[:2], tiny.plan(pipe=2, data=1, microbatches=2)
        fz.eval_step(model, parts, devices=devices)(
            fz.init(model, None, parts, devices=devices), BATCH
        )
    if right:  # (another order of sums, as above)
        tiny.close(fz.logical(model, state, plan), want, rtol=1e-4, atol=1e-5)


def test_ranks_with_different_numbers_of_layers_change_nothing_of_it():
    chain = [
        fz.Layer("first", None, lambda p, batch, ctx: batch["x"]),
        fz.Stack("layers", 3, lambda key: {"w": jnp.eye(12)}, lambda p, x, ctx: x @ p["w"]),
        fz.Layer("last", None, lambda p, x, ctx: jnp.sum(x)),
    ]
    model, plan = fz.Sequential(chain), tiny.plan(pipe=2, data=2)
    with said("sum over rows, of which a mean"):
        state = fz.init(model, TX, plan, devices=jax.devices()[:4])
        fz.eval_step(model, plan, devices=jax.devices()[:4])(state, BATCH)


def test_rows_are_those_of_the_batch_in_its_order():
    def loss(p, batch):
        every = fz.all_rows({"i": batch["i"], "flag": batch["i"] > 3})
        right = (every["i"] == jnp.arange(16)).all() & (every["flag"] == (every["i"] > 3)).all()
        back = (fz.own_rows(every)["i"] == batch["i"]).all()
        return jnp.where(right & back, 0.0, 1.0) + 0 * p["u"].sum()

    plan = tiny.plan(zero=3, data=4, replica=2)
    batch = {"i": np.arange(16, dtype=np.int32)}
    state = fz.init(model_of(loss), TX, plan)
    assert float(fz.eval_step(model_of(loss), plan)(state, batch)["loss"]) == 0


def test_outside_of_steps_the_rows_are_what_there_is():
    x = jnp.arange(6.0).reshape(3, 2)
    for same in (fz.all_rows(x), fz.own_rows(x), jax.jit(fz.all_rows)(x)):
        np.testing.assert_array_equal(same, x)
    with pytest.raises(fz.BatchError, match=r"^all_rows: b: expected .* got float32\[\]"):
        fz.all_rows({"a": x, "b": jnp.float32(1)})
    plan, devices = tiny.plan(data=4), jax.devices()[:4]
    model = model_of(lambda p, batch: fz.own_rows(p["u"][:6]).sum())
    state = fz.init(model, TX, plan, devices=devices)
    with pytest.raises(fz.BatchError, match=r"^own_rows: .* of 4 devices, got float32\[6, 6\]"):
        fz.eval_step(model, plan, devices=devices)(state, BATCH)


def test_rows_may_have_random_keys_of_their_own():
    keys = jax.random.split(jax.random.key(0), 16)

    def terms(p, batch):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (12,)))(batch["key"])
        return (jnp.square(batch["x"] * kept) @ p["u"]).sum(), kept.sum()

    batch, devices = {**BATCH, "key": keys}, jax.devices()[:4]
    for loss in (lambda *x: fz.Mean(*terms(*x)), lambda *x: terms(*x)[0] / terms(*x)[1]):
        model, plan = model_of(loss), tiny.plan(data=4)
        state = fz.init(model, TX, plan, devices=devices)
        own = fz.logical(model, state)
        by_hand = [terms(own, jax.tree.map(lambda x, at=at: x[at], batch)) for at in
                   np.arange(16).reshape(4, 4)]  # fmt: skip
        right = isinstance(loss(own, batch), fz.Mean)
        with said(None if right else "is no sum over rows"):
            found = fz.eval_step(model, plan, devices=devices)(state, batch)["loss"]
        totals, counts = np.float64(by_hand).T
        want = totals.sum() / counts.sum() if right else (totals / counts).mean()
        np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize("pipe", [1, 2])
def test_outputs_of_all_rows_count_no_filling(pipe):
    """Copies of the first row were among those of all."""
    centred = fz.Layer("centred", None, lambda p, x, ctx: x - fz.all_rows(x).mean(0))
    first = fz.Layer("w", lambda key: jnp.eye(12), lambda w, batch, ctx: batch["x"] @ w)
    model = fz.Sequential([first, centred], loss=lambda x, batch: jnp.mean(x))
    plan, devices = tiny.plan(data=2, pipe=pipe, microbatches=pipe), jax.devices()[: 2 * pipe]
    predict = fz.predict_step(model, plan, devices=devices)
    state = fz.init(model, None, plan, devices=devices)
    x = BATCH["x"][:6]
    np.testing.assert_allclose(predict(state, {"x": x}), x - x.mean(0), rtol=1e-6, atol=1e-6)
    with pytest.raises(fz.BatchError, match=r"5 rows, filled up to 6, .*multiple of 2 rows;.*mask"):
        predict(state, {"x": x[:5]})
    again = fz.predict_step(model, plan, devices=devices)
    with pytest.raises(fz.BatchError, match="5 rows, filled up to 6"):
        again(state, {"x": x[:5]})
