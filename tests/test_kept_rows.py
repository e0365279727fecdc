"""Float buffers that are averaged over devices and are no means: rows that are kept, and sums."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from fzero import Plan


TX = optax.sgd(0.1)
BATCH = {"x": np.random.RandomState(0).randn(16, 4, 6).astype("f")}


def weights(rng):
    return {"w": jax.random.normal(rng, (6, 6))}


def noted(rng):
    return weights(rng), {"kept": jnp.zeros((32, 6))}


def queue(x, kept):
    return jnp.concatenate([x, kept[: len(kept) - len(x)]])


KEEPS = {
    "beside those before": queue,
    "in their place": lambda x, kept: jax.lax.dynamic_update_slice(kept, x, (2, 0)),
    "by index": lambda x, kept: kept.at[jnp.arange(len(x))].set(x),
    "of unit length": lambda x, kept: queue(x / jnp.linalg.norm(x, axis=1, keepdims=True), kept),
    "a part": lambda x, kept: kept.at[:2].set(jnp.flip(jnp.tanh(x), 0)[:2]),
    "the last": lambda x, kept: kept.at[0].set(x[-1]),
    "one, averaged": lambda x, kept: kept.at[0].set(0.9 * kept[0] + 0.1 * x[0]),
    "each spread": lambda x, kept: queue(jnp.max(x, 1, keepdims=True) * jnp.ones((1, 6)), kept),
    "moved": lambda x, kept: queue(jnp.pad(x.reshape(len(x), 2, 3)[:, 0], ((0, 0), (3, 0))), kept),
}
LARGEST = {
    "the largest": lambda x, kept: jnp.maximum(kept, x.max(0)),
    "of the absolute": lambda x, kept: 0.9 * kept + 0.1 * jnp.max(jnp.abs(x)),
}
ADDS = {
    "how many": lambda x, kept: kept + len(x),
    "how many elements": lambda x, kept: 0.99 * kept + x.size,
    "a sum": lambda x, kept: 0.9 * kept + 0.1 * x.sum(0),
    "of products": lambda x, kept: 0.9 * kept + jnp.pad(x.T @ x, ((0, 26), (0, 0))),
    "of some": lambda x, kept: kept + jnp.where(x > 0, x, 0).sum(0, keepdims=True),
}
MEANS = {
    "a mean": lambda x, kept: 0.9 * kept + 0.1 * x.mean(0),
    "the larger": lambda x, kept: jnp.maximum(kept, x.mean(0)),
    "products": lambda x, kept: kept.at[:6].set(x.T @ x / len(x)),
    "a covariance": lambda x, kept: kept.at[:6].set(jnp.einsum("ri,rj->ij", x, x) / len(x)),
    "a variance": lambda x, kept: 0.9 * kept + x.var(0) * (len(x) / max(len(x) - 1, 1)),
    "one beside those before": lambda x, kept: jnp.concatenate(
        [x.mean(0, keepdims=True), kept[1:]]
    ),
    "of all": lambda x, kept: queue(fz.all_rows(x), kept),
    "some of all": lambda x, kept: kept.at[:2].set(fz.all_rows(x)[:2]),
    "a sum of all": lambda x, kept: kept + fz.all_rows(x).sum(0),
    "none": lambda x, kept: kept * 0.5,
}


DECAYS = {
    "a decay": lambda x, kept: 0.9 * kept + 0.1 * x.sum(0),
    "towards a sum": lambda x, kept: kept + 0.1 * (x.sum(0) - kept),
    "a quotient": lambda x, kept: (kept + x.sum(0)) / 1.1,
    "where some are": lambda x, kept: jnp.where(x.sum(0) > 0, kept * 0.5 + x.sum(0), kept),
    "counts": lambda x, kept: (kept * 0.9).at[jnp.argmax(x, 1)].add(0.1),
}
COUNTS = {
    "a sum": lambda x, kept: kept + x.sum(0),
    "by index": lambda x, kept: kept.at[jnp.argmax(x, 1)].add(1.0),
    "of some": lambda x, kept: jnp.where(x.sum(0) > 0, kept + x.sum(0), kept),
    "of what is nearest before": lambda x, kept: (
        kept + jax.nn.one_hot(jnp.argmax(x @ kept.T * 0.5, 1), 32).T @ jnp.ones((len(x), 6))
    ),
    "of products with those before": lambda x, kept: (
        kept.at[0].add((x * (kept[0] * 0.5)).sum(0)) - 0.1 * jnp.sum(x)
    ),
}


def said(model, plan=None, step=fz.train_step):
    plan = plan or Plan(data=8)
    devices = jax.devices()[: plan.data]
    state = fz.abstract_state(model, TX, plan, devices=devices)
    given = (model, TX, plan) if step is fz.train_step else (model, plan)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):  # it is said while a step is traced, which need not run
            jax.eval_shape(step(*given, devices=devices), state, BATCH)
    texts = [str(w.message) for w in found if str(w.message).startswith("buffers/")]
    return [text.partition(" rows of the batch")[0] for text in texts]


def plain(note, **options):
    def loss(params, buffers, batch, rng, train):
        x = batch["x"][:, 0] @ params["w"]
        return jnp.mean(x**2), {"kept": note(x, buffers["kept"])}, {}

    return fz.Model(noted, loss, **options)


@pytest.mark.parametrize("note", KEEPS.values(), ids=KEEPS)
def test_rows_that_a_buffer_keeps_are_named_once(note):
    assert said(plain(note)) == ["buffers/kept keeps"]


def test_a_step_that_runs_says_it():
    model = plain(queue)
    state = fz.init(model, TX, Plan(data=8))
    with pytest.warns(match="buffers/kept keeps rows of the batch") as found:
        state, _ = fz.train_step(model, TX, Plan(data=8))(state, BATCH)
    assert len([w for w in found if str(w.message).startswith("buffers/")]) == 1


@pytest.mark.parametrize("note", ADDS.values(), ids=ADDS)
def test_sums_over_rows_are_named(note):
    assert said(plain(note)) == ["buffers/kept adds up"]


@pytest.mark.parametrize("note", LARGEST.values(), ids=LARGEST)
def test_the_largest_of_rows_is_named(note):
    assert said(plain(note)) == ["buffers/kept has the largest or smallest of"]
    assert said(plain(note, buffer_reduce="max")) == []


@pytest.mark.parametrize("note", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_means_and_the_rows_of_all_are_not(note, microbatches):
    assert said(plain(note), Plan(data=8, microbatches=microbatches)) == []


def test_nothing_is_said_where_a_model_says_it_or_rows_are_not_shared_out():
    assert said(plain(queue, buffer_reduce={"kept": "same"})) == []
    assert said(plain(queue, buffer_reduce="mean")) == []
    assert said(plain(DECAYS["a decay"], buffer_reduce="same")) == []
    assert said(plain(queue), plan=Plan(data=1, microbatches=2)) == []
    assert said(plain(queue), step=fz.eval_step) == []


@pytest.mark.parametrize("note", DECAYS.values(), ids=DECAYS)
def test_a_declared_sum_that_decays_is_named(note):
    found = said(plain(note, buffer_reduce={"kept": "sum"}))
    assert [text.partition(" adds up")[0] for text in found] == [
        "buffers/kept: buffer_reduce='sum'"
    ]


@pytest.mark.parametrize("note", COUNTS.values(), ids=COUNTS)
def test_a_declared_sum_of_what_rows_add_is_not(note):
    assert said(plain(note, buffer_reduce={"kept": "sum"})) == []


def test_with_the_rows_of_all_and_one_word_a_queue_is_that_of_one_device():
    model = plain(MEANS["of all"], buffer_reduce={"kept": "same"})
    kept = []
    for plan in (Plan(data=1), Plan(data=8)):
        devices = jax.devices()[: plan.data]
        state = fz.init(model, TX, plan, devices=devices)
        for _ in range(2):
            state, _ = fz.train_step(model, TX, plan, devices=devices)(state, BATCH)
        kept.append(np.asarray(state.buffers["kept"]))
    # Gradients are added up in another order.
    np.testing.assert_allclose(*kept, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("declared", "named"), [({}, ["buffers/head/kept keeps"]), ({"kept": "same"}, [])]
)
def test_layers_of_a_chain_say_it_of_their_own(declared, named):
    def head(p, x, ctx):
        return jnp.mean(x**2), {"kept": queue(x, ctx.buffers["kept"])}

    chain = [
        fz.Layer("in", weights, lambda p, batch, ctx: jax.nn.relu(batch["x"][:, 0] @ p["w"])),
        fz.Layer("norm", lambda rng: ({}, {"mean": jnp.zeros(6)}),
                 lambda p, x, ctx: (x, {"mean": 0.9 * ctx.buffers["mean"] + x.mean(0)}),
                 stateful=True),
        fz.Layer("head", lambda rng: ({}, {"kept": jnp.zeros((32, 6))}), head, stateful=True,
                 buffer_reduce=declared),
    ]  # fmt: skip
    assert said(fz.Sequential(chain)) == named


def test_images_and_tokens_are_followed_through_what_flattens_them():
    def loss(keep, params, buffers, batch, rng, train):
        image = jnp.pad(batch["x"], ((0, 0), (0, 0), (0, 2)))[:, None]  # (rows, 1, 4, 8)
        image = jax.lax.conv(image, jnp.ones((3, 1, 2, 3)), (1, 1), "VALID")  # (rows, 3, 3, 6)
        tokens = image.reshape(-1, 6) @ params["w"]
        new = queue(tokens[:4], buffers["kept"]) if keep else buffers["kept"] + tokens.mean(0)
        return jnp.mean(tokens**2), {"kept": new}, {}

    for keep in (True, False):
        model = fz.Model(noted, lambda *args, keep=keep: loss(keep, *args))
        assert said(model) == ["buffers/kept keeps"] * keep
