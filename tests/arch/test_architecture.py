"""The house rules, read from the source: downward imports, no torch in fzero, no private jax."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import fzero
import torch_bridge


ROOT = pathlib.Path(__file__).parents[2]
FZERO = sorted((ROOT / "fzero").rglob("*.py"))
SOURCES = FZERO + sorted((ROOT / "torch_bridge").rglob("*.py"))

# Each module may import from lines above its own, or from its own line.
LAYERS = [
    ["errors", "tree", "compat", "consumed", "keys"],
    ["loss_scaling"],
    ["offload.scratch", "offload.requests", "offload.disk"],
    ["offload.tiers"],
    ["summary"],
    ["pipeline", "jaxprs"],  # schedules are data, which plans are made of
    ["plan"],
    ["batch", "model", "processes"],
    ["precision", "initial", "zero.quantize"],
    ["pipeline.flops", "zero.partition"],
    ["pipeline.cut", "zero.halves", "zero.vjp"],
    ["pipeline.homes"],
    ["zero.collectives", "zero.at_use", "flags", "places", "copies"],
    ["relayout"],
    ["zero.rules", "offload.chunks", "offload.park", "offload.piecewise", "offload.stream"],
    ["compute_copy", "buffers"],
    ["zero.stack"],
    ["zero.chain"],
    ["optimizer"],
    ["blueprint", "grads"],
    ["state", "pipeline.programs", "pipeline.spmd"],
    ["update", "pipeline.gather", "offload.move", "checkpoint"],
    ["restore", "replan"],
    ["surgery"],
    ["pipeline.execute"],
    ["step.passes", "step.checks", "step.updates", "step.host_update"],
    ["step.runners"],
    ["step.steps"],
    ["step", "layout", "report", "flax"],
    ["placement"],
    ["preflight.topology", "preflight.hlo"],
    ["preflight.rates"],
    ["preflight.kernels", "preflight.gathered"],
    ["preflight.links"],
    ["preflight.program", "preflight.shapes", "preflight.bounds"],
    ["preflight.stages"],
    ["preflight.result", "preflight.tables"],
    ["preflight.predict", "preflight.measure"],
    ["preflight.sweep", "preflight.html"],
    ["pipeline.cli"],
    ["cli"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def module_name(path):
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


def imported(path):
    """Absolute names of everything a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rank_of(name):
    """Rank of the layer that a dotted name of fzero lies in, or `None` for the bare package."""
    parts = name.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in RANK:
            return RANK[".".join(parts[:end])]
    return None


def test_every_module_of_fzero_has_a_layer():
    names = {module_name(path) for path in (ROOT / "fzero").rglob("*.py")}
    unknown = {name for name in names if rank_of(name) is None}
    assert not unknown - {"fzero", "fzero.zero", "fzero.offload", "fzero.preflight"}


def test_imports_go_downward():
    upward = [
        f"{module_name(path)} imports {name}, which lies above it"
        for path in FZERO
        if path != ROOT / "fzero/__init__.py" and rank_of(module_name(path)) is not None
        for name in imported(path)
        if name.startswith("fzero.") and (rank_of(name) or 0) > rank_of(module_name(path))
    ]
    assert not upward


def test_fzero_knows_nothing_of_torch():
    outside = ("torch", "torch_bridge", "transformers")
    named = [(module_name(path), name) for path in FZERO for name in imported(path)]
    assert not [pair for pair in named if pair[1].split(".")[0] in outside]


def test_fzero_works_where_torch_cannot_be_imported():
    code = """
import sys
sys.modules["torch"] = None
sys.modules["torch_bridge"] = None
sys.modules["flax"] = None
import jax, jax.numpy as jnp, numpy as np, optax, fzero as fz
model = fz.Model(lambda rng: ({"w": jnp.ones(4)}, {}),
                 lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
plan, tx = fz.Plan(data=1), optax.sgd(0.1)
_, metrics = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), {"x": np.ones((2, 4), "f")})
print(float(metrics["loss"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "4.0", done.stderr


def test_no_private_jax_and_version_tests_in_one_place():
    private = [str(path) for path in SOURCES if "jax._src" in path.read_text()]
    versions = [
        str(path)
        for path in SOURCES
        if path.name != "compat.py"
        and re.search(r"jax(lib)?\.(__version|version)", path.read_text())
    ]
    assert not private
    assert not versions


def test_modules_and_functions_stay_small():
    large = [str(path) for path in SOURCES if len(path.read_text().splitlines()) > 600]
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
                if lines > 60:
                    large.append(f"{path}:{node.lineno} {node.name} has {lines} lines")
    assert not large


@pytest.mark.parametrize("package", [fzero, torch_bridge], ids=["fzero", "torch_bridge"])
def test_public_names_are_documented_and_the_facade_only_imports(package):
    public = [name for name in vars(package) if not name.startswith("_")]
    for name in public:
        value = getattr(package, name)
        if inspect.ismodule(value):
            continue
        assert inspect.getdoc(value), f"{package.__name__}.{name} has no docstring"
    body = ast.parse(pathlib.Path(package.__file__).read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
    assert all(isinstance(node, allowed) for node in body)


CONTRACT = [
    "Plan",
    "TrainState",
    "Model",
    "Layer",
    "Stack",
    "Sequential",
    "Mean",
    "init",
    "train_step",
    "eval_step",
    "replan",
    "placement",
    "describe",
    "PlanError",
    "StateConsumedError",
    "from_flax",
]


def test_names_promised_to_users_exist():
    assert not [name for name in CONTRACT if not hasattr(fzero, name)]
