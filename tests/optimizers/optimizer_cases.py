"""Every optimizer of optax and optax.contrib, and a model to try them on in a second."""

from __future__ import annotations

import functools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import tiny

import fzero as fz


D, NUM = 8, 3
contrib = optax.contrib


def matrices(params: Any) -> Any:
    """The mask that everybody writes: no decay of biases and gains."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def momentum_after(tx: Any) -> Any:
    """Applied every second step."""
    return optax.MultiSteps(tx, 2).gradient_transformation()


def scaled(of: Any, join: Any) -> Any:
    """Gradients divided by one number, which comes from all of them."""

    def update(updates: Any, params: Any) -> Any:
        number = functools.reduce(join, map(of, jax.tree.leaves(updates)))
        return jax.tree.map(lambda leaf: -0.1 * leaf / number, updates)

    return optax.stateless(update)


def by_the_others(updates: Any, params: Any) -> Any:
    """Gradients times the norm of all other leaves of the same shape: another sum for each."""
    leaves, tree = jax.tree.flatten(updates)
    norms = [jnp.linalg.norm(leaf) for leaf in leaves]

    def others(at: int) -> Any:
        alike = (n for i, n in enumerate(norms) if leaves[i].shape == leaves[at].shape and i != at)
        return sum(alike, jnp.float32(0.1))

    new = [-0.1 * leaf * others(i) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, new)


def from_the_next(updates: Any, params: Any) -> Any:
    """Each matrix of one shape takes the next one's gradient, normalised; the last the first's."""
    leaves, tree = jax.tree.flatten(updates)

    def next_of(at: int) -> Any:
        alike = [i for i, leaf in enumerate(leaves) if leaf.shape == leaves[at].shape]
        taken = leaves[alike[(alike.index(at) + 1) % len(alike)]]
        return -0.1 * taken / jnp.linalg.norm(taken)

    return jax.tree.unflatten(tree, [next_of(i) for i in range(len(leaves))])


def of_every_second(updates: Any, params: Any) -> Any:
    """Every second leaf is normalised: the layers of a stack are not alike."""
    leaves, tree = jax.tree.flatten(updates)
    new = [
        -0.1 * (leaf / jnp.linalg.norm(leaf) if i % 2 else leaf) for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, new)


def by_written_path() -> optax.GradientTransformation:
    """Keeps the largest gradient of each leaf in a dict, by how the leaf's path is written."""

    def largest(tree: Any) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): jnp.max(jnp.abs(leaf)) for path, leaf in leaves}

    def update(updates: Any, seen: Any, params: Any = None) -> tuple[Any, Any]:
        new = jax.tree.map(jnp.maximum, seen, largest(updates))
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x / (1e-3 + new[jax.tree_util.keystr(path)]), updates
        ), new

    by_path = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, largest(p)), update
    )
    return optax.chain(by_path, optax.sgd(1e-2))


def by_first_norm() -> Any:
    """Gradients times the norm that their parameter began with: one number, element by element."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.full_like(p, jnp.linalg.norm(p)), params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda x, s: -0.1 * x * s, updates, state), state

    return optax.GradientTransformation(init, update)


# By whether an optimizer sees single elements, and norms of all leaves, alone ...
BY_ELEMENT = {
    "adabelief": lambda: optax.adabelief(1e-2),
    "adadelta": lambda: optax.adadelta(1.0),
    "adagrad": lambda: optax.adagrad(1e-1),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "adamax": lambda: optax.adamax(1e-2),
    "adamaxw": lambda: optax.adamaxw(1e-2),
    "adan": lambda: optax.adan(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "optimistic-adam": lambda: optax.optimistic_adam_v2(1e-2),
    "optimistic-adam-1": lambda: optax.optimistic_adam(1e-2),
    "optimistic-descent": lambda: optax.optimistic_gradient_descent(1e-1),
    "polyak": lambda: optax.polyak_sgd(0.1),
    "radam": lambda: optax.radam(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "rprop": lambda: optax.rprop(1e-3),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign": lambda: optax.sign_sgd(1e-3),
    "signum": lambda: optax.signum(1e-3),
    "yogi": lambda: optax.yogi(1e-2),
    "acprop": lambda: contrib.acprop(1e-3),
    "ademamix": lambda: contrib.ademamix(1e-2),
    "simplified-ademamix": lambda: contrib.simplified_ademamix(1e-2),
    "adopt": lambda: contrib.adopt(1e-2),
    "cocob": lambda: contrib.cocob(),
    "dadapt": lambda: contrib.dadapt_adamw(),
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(1.0),
    "madgrad": lambda: contrib.madgrad(1e-2),
    "mechanic": lambda: contrib.mechanize(optax.adam(1e-2)),
    "momo": lambda: contrib.momo(0.1),
    "momo-adam": lambda: contrib.momo_adam(1e-2),
    "prodigy": lambda: contrib.prodigy(),
    "sam": lambda: contrib.sam(
        optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))
    ),
    "schedule-free": lambda: contrib.schedule_free_adamw(1e-2),
    "schedule-free-any": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
    "schedule-free-sgd": lambda: contrib.schedule_free_sgd(1e-1),
    "clip-adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "clip-value": lambda: optax.chain(optax.clip(0.01), optax.sgd(0.1)),
    "plateau": lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1)),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "multi-steps": lambda: momentum_after(optax.adam(1e-2)),
    "skipping": lambda: optax.MultiSteps(
        optax.adam(1e-2), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "if-finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
    "by-name": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"first": "a", "blocks": "b", "last": "a"}
    ),
    "masked-by-name": lambda: optax.adamw(
        1e-2, weight_decay=0.5, mask={"first": True, "blocks": {"w": True, "b": False},
                                      "last": False}
    ),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "largest-of-all": lambda: scaled(lambda leaf: jnp.max(jnp.abs(leaf)), jnp.maximum),
    "mean-of-all": lambda: scaled(lambda leaf: jnp.sum(jnp.abs(leaf)) / 300, jnp.add),
    "zero-nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
}  # fmt: skip
# ... or leaves: norms, means, factors, shapes, random numbers for each.
BY_LEAF = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, weight_decay_rate=1e-3),
    "agc": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "block-rms": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(0.1)),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "fromage": lambda: optax.fromage(1e-1),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "lars": lambda: optax.lars(1e-1, weight_decay=0.1),
    "masked-by-shape": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=matrices),
    "muon": lambda: contrib.muon(1e-2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "noisy-sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(1)),
    "novograd": lambda: optax.novograd(1e-2),
    "param-norm": lambda: optax.chain(optax.scale_by_param_block_norm(), optax.sgd(0.1)),
    "sm3": lambda: optax.sm3(1e-1),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
    "galore": lambda: contrib.galore(1e-2, rank=2),
    "multi-steps-lamb": lambda: momentum_after(optax.lamb(1e-2)),
    "largest": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda x: -0.1 * x / jnp.max(jnp.abs(x)), updates)
    ),
    "summed-along": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda x: -0.1 * jnp.cumsum(x, 0), updates)
    ),
    "by-first-norm": by_first_norm,
    "by-the-others": lambda: optax.stateless(by_the_others),
    "from-the-next": lambda: optax.stateless(from_the_next),
    "of-every-second": lambda: optax.stateless(of_every_second),
    "by-written-path": by_written_path,
    "by-row": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda x: -0.1 * x * jnp.arange(1.0, x.shape[0] + 1).reshape(-1, *(1,) * (x.ndim - 1)),
            updates,
        )
    ),
    "reversed": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda x: -0.1 * x[::-1], updates)
    ),
    "counted": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda x: -0.1 * x / x.shape[0], updates)
    ),
    "sorted": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda x: -0.1 * jnp.sort(x, 0), updates)
    ),
}
ALL = BY_ELEMENT | BY_LEAF


def first(p: Any, batch: Any, ctx: Any) -> jax.Array:
    return batch["x"] @ p


def block(p: Any, x: jax.Array, ctx: Any = None) -> jax.Array:
    return x + jnp.tanh(x @ p["w"] + p["b"])


def squares(x: jax.Array, batch: Any) -> fz.Mean:
    error = jnp.square(x - batch["y"])
    return fz.Mean(jnp.sum(error), jnp.float32(error.size))


@cache
def values() -> Any:
    rng = np.random.default_rng(0)

    def value(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    return {
        "first": value(5, D),
        "blocks": {"w": value(NUM, D, D), "b": value(NUM, D)},
        "last": value(D, 4),
    }


def stacked(frozen: frozenset[str] = frozenset()) -> fz.Sequential:
    """Three layers as a stack."""
    return fz.Sequential(
        [
            fz.Layer("first", lambda key: values()["first"], first),
            fz.Stack("blocks", NUM, lambda key: {"w": np.zeros((D, D), np.float32),
                                                 "b": np.zeros(D, np.float32)}, block),
            fz.Layer("last", lambda key: values()["last"], lambda p, x, ctx: x @ p),
        ],
        squares,
        init=(values(), {}), frozen=frozen,
    )  # fmt: skip


def written_out(params: Any) -> Any:
    """The same parameters with a leaf for each layer. (A list, so that labels by name fit.)"""
    layers = {
        name: [leaf[number] for number in range(NUM)] for name, leaf in params["blocks"].items()
    }
    return {**params, "blocks": layers}


def batch(seed: int, rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, 5)).astype(np.float32),
        "y": rng.standard_normal((rows, 4)).astype(np.float32),
    }


def loss_of(params: Any, data: Any) -> jax.Array:
    """The loss of layers written out."""
    x = data["x"] @ params["first"]
    for w, b in zip(params["blocks"]["w"], params["blocks"]["b"], strict=True):
        x = block({"w": w, "b": b}, x)
    return jnp.mean(jnp.square(x @ params["last"] - data["y"]))


@cache
def by_hand(name: str, steps: int = 3) -> Any:
    """Parameters after the plain loop of jax and optax, layers written out."""
    tx = optax.with_extra_args_support(ALL[name]())
    params = jax.tree.map(jnp.asarray, written_out(values()))
    state = tx.init(params)
    takes_value = name != "sam"  # which has no **extra_args

    @jax.jit
    def step(params: Any, state: Any, data: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, data)
        extra = {"value": loss} if takes_value else {}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for seed in range(steps):
        params, state = step(params, state, batch(seed))
    return jax.device_get(params)


def trained(tx: Any, plan: fz.Plan, steps: int = 3) -> tuple[Any, fz.TrainState]:
    """Parameters after the same steps of fzero, layers written out; and the state."""
    model = stacked()
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    for seed in range(steps):
        state, _ = step(state, batch(seed))
    whole = fz.reload(state, donate=False)  # a plan may park parameters
    return written_out(jax.device_get(fz.logical(model, whole, plan))), state


def plan(**options: Any) -> fz.Plan:
    return tiny.plan(**options)
