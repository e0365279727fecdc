"""A module used twice in the graph gets both gradient contributions.

Original report: DeepSpeed #8224, with ZeRO-3 the hooks of a module that the graph uses twice fire
once, and one of its two gradients is silently lost. Shown, on every ZeRO stage: a native chain (own
leaf of a link and `reads=`, two readers and a stack between them), a plain model and a converted
PyTorch module all get the gradient of an unsharded `jax.grad` (and of PyTorch).

Weights and inputs are small whole numbers and every layer is linear, so that float32 sums are exact
in any order: everything is compared bit for bit, without a tolerance.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from failure_cases import STAGES, bits, tiny_plan

import fzero as fz
import torch_bridge as tb


WIDTH, ROWS = 8, 16


def whole(shape: tuple[int, ...], seed: int, high: int = 2) -> np.ndarray:
    """Whole numbers from -high to high, as float32."""
    draw = np.random.RandomState(seed)
    return draw.randint(-high, high + 1, shape).astype(np.float32)


BATCH = {"x": whole((ROWS, WIDTH), 1), "t": whole((ROWS, WIDTH), 2)}


def product(y: jax.Array, batch: dict) -> fz.Mean:
    # A power of two as count: the division is exact, too.
    return fz.Mean(jnp.sum(y * batch["t"]), jnp.float32(y.shape[0]))


def native_model(detached: str = "") -> fz.Model:
    """`first` is used by the first link, and by two later ones through `reads`."""

    def use(name: str, weight: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(weight) if name == detached else weight

    chain = [
        fz.Layer("first", lambda rng: {"w": jnp.asarray(whole((WIDTH, WIDTH), 3))},
                 lambda p, batch, ctx: batch["x"] @ use("first", p["w"])),
        fz.Stack("blocks", 2, lambda rng: {"w": jnp.eye(WIDTH)}, lambda p, x, ctx: x @ p["w"] + x),
        fz.Layer("middle", None, lambda p, x, ctx: x @ use("middle", p["w"]),
                 reads={"w": "first/w"}),
        # One link that reads the same leaf under two names.
        fz.Layer("last", None, lambda p, x, ctx: x @ p["w"].T - x @ p["v"],
                 reads={"w": "first/w", "v": "first/w"}),
    ]  # fmt: skip
    return fz.Sequential(chain, loss=product)


def plain_model(detached: str = "") -> fz.Model:
    """One function that uses `w` twice, once transposed."""

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        once = jax.lax.stop_gradient(p["w"]) if detached else p["w"]
        return product(batch["x"] @ once @ p["w"].T, batch), buffers, {}

    return fz.Model(lambda rng: ({"w": jnp.asarray(whole((WIDTH, WIDTH), 3))}, {}), loss)


class Twice(torch.nn.Module):
    """One Linear used twice, and one that is used under two names."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.shared = torch.nn.Linear(WIDTH, WIDTH)
        self.other = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = self.other
        self.detached = detached
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = torch.from_numpy(whole(tuple(parameter.shape), 4 + seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = self.shared(x)
        x = self.other(once.detach() if self.detached else once)
        return self.again(self.shared(x))


def torch_model(detached: str = "") -> fz.Model:
    converted = tb.convert(Twice(bool(detached)), torch.zeros(ROWS, WIDTH))
    return converted.model(lambda forward, batch: product(forward(batch["x"]), batch))


MODELS = {"native": native_model, "plain": plain_model, "torch": torch_model}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[str, fz.Model, dict[str, Any]]:
    """A model with its unsharded gradient of the summed loss."""
    model = MODELS[request.param]()
    return request.param, model, unsharded(model)


def unsharded(model: fz.Model) -> dict[str, Any]:
    params, buffers = model.init(jax.random.key(0)) if callable(model.init) else model.init
    params = jax.tree.map(jnp.asarray, params)

    def total(params: Any) -> jax.Array:
        return model.loss(params, buffers, BATCH, jax.random.key(0), True)[0].total

    return jax.grad(total)(params)


@pytest.mark.parametrize("zero", STAGES)
def test_both_uses_contribute(case: tuple[str, fz.Model, dict[str, Any]], zero: int) -> None:
    _, model, expected = case
    tx, plan = optax.sgd(1.0), tiny_plan(zero, clip_norm=None)
    state = fz.init(model, tx, plan)
    before = jax.tree.map(lambda leaf: np.array(leaf), state.params)
    pending, _ = fz.accumulate_step(model, tx, plan, donate=False)(state, BATCH)
    assert pending.grads is not None
    assert bits(pending.grads.sums) == bits(expected)
    # A whole step of plain descent moves the weights by the mean of that.
    state, _ = fz.train_step(model, tx, plan)(state, BATCH)
    moved = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    mean = jax.tree.map(lambda grad: np.asarray(grad) / ROWS, expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, moved, mean))


def test_torch_agrees() -> None:
    module = Twice()
    y = module(torch.from_numpy(BATCH["x"]))
    (y * torch.from_numpy(BATCH["t"])).sum().backward()
    expected = {name: p.grad.numpy() for name, p in module.named_parameters()}
    assert bits(unsharded(torch_model())) == bits(expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_lost_use_is_seen(name: str) -> None:
    detached = {"native": "middle"}.get(name, "once")
    assert bits(unsharded(MODELS[name](detached))) != bits(unsharded(MODELS[name]()))
