"""Frozen, tied, scalar and zero-size leaves: every stage, and the way to PyTorch and back.

The odd leaves are what breaks code that flattens parameters into buffers or assumes a gradient for
each: FSDP and DeepSpeed pad, reject or silently train them. Shown, on every ZeRO stage: after AdamW
steps a frozen leaf has its first bits, tied weights are one leaf that moved with both gradients,
scalars moved, leaves without elements kept their shape, a leaf that no dim divides lost its padding
on the way out; all of it is bit-identical to stage 0 (native chain) and close to PyTorch's own
AdamW (converted module), and comes back through `state_dict`, files, and `replan`.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from failure_cases import STAGES, bits, differing, tiny_plan

import fzero as fz
import torch_bridge as tb
from fzero.compat import why_no_empty
from tests.support.sample import some


VOCAB, WIDTH, ROWS, STEPS = 24, 8, 16, 3


def batch_at(step: int) -> dict[str, np.ndarray]:
    ids = np.random.RandomState(step).randint(0, VOCAB, (ROWS, 4)).astype(np.int32)
    return {"ids": ids}


def frozen_tx(frozen: Any, style: str) -> optax.GradientTransformation:
    """AdamW for what trains and nothing for the rest, as optax says it in two ways."""
    adamw = optax.adamw(1e-2, weight_decay=0.1)
    if style == "multi_transform":
        labels = jax.tree.map(lambda stays: "stays" if stays else "moves", frozen)
        return optax.multi_transform({"stays": optax.set_to_zero(), "moves": adamw}, labels)
    moves = jax.tree.map(lambda stays: not stays, frozen)
    # `masked` lets the other leaves' gradients through as they are: zero them, too.
    return optax.chain(optax.masked(adamw, moves), optax.masked(optax.set_to_zero(), frozen))


def train(
    model: fz.Model, tx: Any, plan: fz.Plan, state: fz.TrainState | None = None
) -> tuple[fz.TrainState, list[float]]:
    state = fz.init(model, tx, plan) if state is None else state
    step, losses = fz.train_step(model, tx, plan), []
    for number in range(STEPS):
        state, metrics = step(state, batch_at(number))
        losses.append(float(metrics["loss"]))
    return state, losses


class Odd(torch.nn.Module):
    """A language model whose every leaf is odd in some way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(VOCAB, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, 11).requires_grad_(False)
        self.padded = torch.nn.Linear(11, 9)  # 9 x 11 on 8 devices
        self.back = torch.nn.Linear(9, WIDTH, bias=False)
        self.gain = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, WIDTH))
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("limit", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(2, 0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.gain + self.empty.sum(0) + self.nothing.sum()
        y = self.back(torch.tanh(self.padded(torch.tanh(self.frozen(x)))))
        return self.head(x + y).clamp(max=self.limit)


@pytest.fixture(autouse=True)
def leaves_without_elements() -> None:
    if why := why_no_empty(tiny_plan(0).mesh()):
        pytest.skip(why)


@pytest.fixture(scope="module")
def converted() -> tb.Converted:
    return tb.convert(Odd(), torch.zeros(ROWS, 4, dtype=torch.int64))


@pytest.fixture(scope="module")
def from_torch() -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps in PyTorch."""
    module, losses = Odd(), []
    moving = [p for p in module.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(moving, lr=1e-2, weight_decay=0.1)
    for number in range(STEPS):
        ids = torch.from_numpy(batch_at(number)["ids"]).long()
        logits = module(ids)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return module.state_dict(), losses


def lm_loss(forward: Any, batch: dict) -> fz.Mean:
    return tb.causal_lm_loss(forward(batch["ids"]), batch["ids"])


@pytest.mark.parametrize("zero", STAGES)
def test_to_torch_and_back(zero: int, converted: Any, from_torch: Any, tmp_path: Path) -> None:
    assert converted.frozen == {"frozen.weight", "frozen.bias"}
    frozen = {name: name in converted.frozen for name in converted.params}
    tx = frozen_tx(frozen, "masked" if zero == 3 else "multi_transform")
    state, losses = train(converted.model(lm_loss), tx, tiny_plan(zero, clip_norm=None))
    back, (expected, expected_losses) = tb.state_dict(converted, state), from_torch

    start = Odd().state_dict()
    assert list(back) == list(expected) == list(start)
    assert back["head.weight"] is back["table.weight"]
    assert {k: (v.shape, v.dtype) for k, v in back.items()} == {
        k: (v.shape, v.dtype) for k, v in start.items()
    }
    same = {name for name in back if torch.equal(back[name], start[name])}
    assert same == {*converted.frozen, "empty", "limit", "nothing"}
    # Adam divides by the root of tiny squares, which magnifies the last bit of a gradient; a lost
    # contribution of the tied table, a scalar that stays or a decayed frozen leaf show as 1e-3.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    off = {name: float((back[name] - expected[name]).abs().max()) for name in back
           if back[name].numel()}  # fmt: skip
    assert max(off.values()) < 2e-6, off

    module = Odd()
    module.load_state_dict(back, strict=True)
    assert module.head.weight is module.table.weight
    for suffix in ("safetensors", "pt"):
        tb.save(tmp_path / f"odd.{suffix}", converted, state)
        params, buffers = tb.load_state_dict(converted, tb.load(tmp_path / f"odd.{suffix}"))
        logical = fz.logical(converted.model(lm_loss), state)
        assert differing(bits(params), bits(logical)) == []
        assert differing(bits(buffers), bits(state.buffers)) == []


def chain() -> fz.Sequential:
    """The same oddities in a native chain; in a stack, too."""

    def embed(rng: jax.Array) -> dict:
        table = jax.random.normal(rng, (VOCAB, WIDTH))
        return {"table": table, "gain": jnp.float32(1.5), "none": jnp.zeros((0, 3))}

    def block(rng: jax.Array) -> dict:
        frozen, padded = jax.random.split(rng)
        return {"frozen": jax.random.normal(frozen, (WIDTH, 11)) / 4,
                "padded": jax.random.normal(padded, (11, 9)) / 4,
                "gain": jnp.float32(0.5), "none": jnp.zeros((3, 0))}  # fmt: skip

    def run_block(p: dict, x: jax.Array, ctx: fz.Context) -> jax.Array:
        y = jnp.tanh(x @ p["frozen"]) @ p["padded"]
        return x + p["gain"] * y[..., :WIDTH] + jnp.sum(p["none"])

    def run_head(p: dict, x: jax.Array, ctx: fz.Context) -> fz.Mean:
        return tb.causal_lm_loss(x @ p["table"].T + jnp.sum(p["none"]), ctx.batch["ids"])

    return fz.Sequential(
        [
            fz.Layer("embed", embed, lambda p, b, ctx: p["table"][b["ids"]] * p["gain"]),
            fz.Stack("blocks", 2, block, run_block),
            fz.Layer("head", None, run_head, reads={"table": "embed/table", "none": "embed/none"}),
        ]
    )


NATIVE = [*((zero, "fp32") for zero in STAGES), (1, "bf16"), (3, "bf16")]


@pytest.fixture(scope="module")
def results() -> dict[Any, Any]:
    """Logical values of each run so far."""
    return {}


@pytest.mark.parametrize(("zero", "precision"), some(NATIVE, (1, "fp32"), (1, "bf16")))
def test_native_chain(zero: int, precision: str, results: dict[Any, Any]) -> None:
    model = chain()
    first, _ = model.init(jax.random.key(0))
    frozen = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "frozen", first)
    tx, plan = frozen_tx(frozen, "multi_transform"), tiny_plan(zero, precision=precision)
    state = fz.init(model, tx, plan)
    start = bits(fz.logical(model, state))
    state, losses = train(model, tx, plan, state)
    final = bits(fz.logical(model, state))
    assert {path: value[:2] for path, value in final.items()} == {
        path: value[:2] for path, value in start.items()
    }
    moved = differing(start, final)
    assert moved == [
        "['blocks']['gain']",
        "['blocks']['padded']",
        "['embed']['gain']",
        "['embed']['table']",
    ]
    stage_0 = results.setdefault(precision, (final, losses))
    assert differing(final, stage_0[0]) == []
    assert losses == stage_0[1]
    # Round about through every other layout.
    there, old = state, plan
    for stage in (3, 0, 2, 1, zero):
        new = plan.replace(zero=stage, data=8 if stage != 2 else 4)
        there, old = fz.replan(there, model, tx, old, new), new
        assert bits(fz.logical(model, there)) == final
    there = fz.replan(there, model, tx, old, plan)
    assert differing(bits(there), bits(state)) == []
