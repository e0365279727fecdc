"""What prints fits a screen, however large it is; what a notebook shows is the same, in a box."""

from __future__ import annotations

import html
import inspect
import io
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fzero as fz
import fzero.pipeline as fp
import torch_bridge as tb


# A terminal: longer lines wrap.
LINES, COLUMNS = 50, 200
# More leaves, ranks and microbatches than a screen has lines or columns.
MANY = 120
TX = optax.adamw(1e-2)
# Nothing else that is printed has these digits.
VALUE = np.float32(0.7182818)


def weights(rng):
    return {"w": jnp.full((8, 8), VALUE)}


def chain() -> fz.Sequential:
    link = lambda p, x, ctx: x @ p["w"]  # noqa: E731
    layers = [fz.Layer(f"layer_with_a_long_name_{i}", weights, link) for i in range(MANY)]
    stack = fz.Stack("blocks", MANY, weights, link)
    return fz.Sequential([*layers, stack], lambda x, batch: jnp.mean(x))


def small() -> fz.Model:
    return fz.Model(
        lambda rng: (weights(rng), {}),
        lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}),
    )


BATCH = {"x": np.ones((8, 8), np.float32)}
PLAN = fz.Plan(zero=3, data=8, min_shard_bytes=0)
LARGE = fp.one_f_one_b(64, MANY)

# A large one of every public class.
FZERO = {
    "Checkpoint": lambda: fz.Checkpoint(
        Path("a"), 3, 7, PLAN, None, {f"w{i}": ((8, 8), "float32") for i in range(MANY)}
    ),
    "Context": lambda: fz.Context(BATCH, None, True),
    "CrossEntropy": lambda: fz.CrossEntropy(label_smoothing=0.1),
    "Description": lambda: fz.describe(PLAN, chain(), TX),
    "Float8": fz.Float8,
    "Layer": lambda: chain().layers[0],
    "Layout": lambda: fz.layout(chain(), TX, PLAN),
    "LossScaling": fz.LossScaling,
    "Mean": lambda: fz.Mean(jnp.float32(VALUE), jnp.float32(2)),
    "Model": small,
    "Parts": lambda: fz.Parts("tensor", 8),
    "Phases": fz.Phases,
    "Placement": lambda: fz.placement(PLAN, chain(), TX),
    "Plan": lambda: fz.Plan(pipe=64, microbatches=MANY, schedule=LARGE, clip_norm=1.0),
    "Preflight": lambda: fz.preflight(small(), TX, fz.Plan(data=1), BATCH, "cpu:1"),
    "Rates": lambda: fz.preflight(small(), TX, fz.Plan(data=1), BATCH, "cpu:1").rates,
    "Sequential": chain,
    "Shared": lambda: fz.Shared(np.full(1000, VALUE)),
    "Stack": lambda: chain().layers[-1],
    "TrainState": lambda: fz.abstract_state(chain(), TX, PLAN),
    "World": lambda: fz.World("alone", 1, 0, {}),
}  # fmt: skip
PIPELINE = {
    "Action": lambda: fp.Action("F", 0, 0),
    "Cost": lambda: fp.Cost(per_stage=(1.0,) * 64),
    "Partition": lambda: fp.partition(chain(), 64),
    "Proof": lambda: fp.check(LARGE),
    "Schedule": lambda: LARGE,
    "Slots": lambda: fp.slots(LARGE),
    "Timeline": lambda: fp.simulate(LARGE),
}
BRIDGE = {
    "Converted": lambda: tb.convert(torch.nn.Linear(8, 8), torch.zeros(2, 8)),
    "Imported": lambda: tb.from_deepspeed({"zero_optimization": {"stage": 3}}),
    "Sampling": tb.Sampling,
}  # fmt: skip
# Made only within a call, or in a file of its own, and shown there.
ELSEWHERE = {"Pending", "Piece", "Recording"}
TABLE = {**FZERO, **PIPELINE, **BRIDGE}


def test_every_public_class_is_in_the_table():
    for module, table in ((fz, FZERO), (fp, PIPELINE)):
        names = module.__all__ if hasattr(module, "__all__") else dir(module)
        classes = {
            name
            for name in names
            if not name.startswith("_")
            and inspect.isclass(kind := getattr(module, name))
            and not issubclass(kind, Exception)
        }
        assert classes - ELSEWHERE == set(table)


@pytest.mark.parametrize("name", TABLE)
def test_it_fits_a_screen(name):
    made = TABLE[name]()
    for text in (str(made), repr(made)):
        lines = text.splitlines()
        wrapped = sum(max(1, -(-len(line) // COLUMNS)) for line in lines)
        assert wrapped <= LINES, f"{wrapped} lines, {len(text)} characters: {text[:300]}"
        assert type(made).__name__ in repr(made) or len(lines) > 1 or name == "Action"


@pytest.mark.parametrize("show", [str, repr])
def test_values_are_not_shown(show):
    shared = fz.Shared({"w": np.full(1000, VALUE), "temperature": float(VALUE)})
    for made in (fz.init(small(), TX, PLAN), shared, TABLE["Mean"]()):
        assert "0.718" not in show(made)


def test_what_cannot_be_used_prints_why():
    """Logs and debuggers show it, too."""
    assert repr(fz.Shared({1: 2.0, "b": {}})).startswith("<Shared: ")


@pytest.mark.parametrize(
    "name",
    ["TrainState", "Model", "Plan", "Schedule", "Placement", "Layout", "Description", "Preflight"],
)
def test_a_notebook_shows_what_print_shows(name):
    import xml.etree.ElementTree as ElementTree

    made = TABLE[name]()
    root = ElementTree.parse(io.StringIO(made._repr_html_())).getroot()
    assert root.tag == "pre"
    assert "".join(root.itertext()) == html.unescape(str(made))


def test_actions_are_coloured_in_a_notebook():
    text = fp.zb_h1(2, 2)._repr_html_()
    assert text.count("background:#56B4E9") == 4  # two forwards on each of two ranks
    assert len({part[:7] for part in text.split("background:")[1:]}) >= 3
