"""The house rules, read from the source: downward imports, no torch in fzero, no private jax."""

import ast
import functools
import graphlib
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

# Folders (or single modules) of each package, lowest first: each may import from lines above its
# own here, and from its own line.
LAYERS = {
    "fzero": [
        ["errors", "tree", "units", "compat", "keys", "axes"],
        ["programs", "schedule", "exchange", "processes", "hosts"],
        [
            "storage",
            "optimizer",
            "float8",
            "policies",
            "summary",
        ],
        [
            "plan",
            "plan_values",
            "plan_exclusions",
            "links",
            "pieces",
            "model",
            "losses",
            "precision",
            "loss_scaling",
            "batch",
            "host_arrays",
        ],
        ["sharding", "weight_records"],
        ["zero", "offload"],
        ["state"],
        ["checkpoint", "pipeline"],
        ["step"],
        ["report", "preflight", "runs", "flax", "cli", "__main__"],
    ],
    "torch_bridge": [
        ["dtypes", "losses", "packing"],
        ["module", "lower", "documents"],
        ["export"],
        ["structure", "loss_module"],
        ["converted", "convert", "sequential"],
        ["reference", "statedict", "moments", "parity"],
        ["formats", "optim", "training", "mean_loss", "wrap", "configs"],
        ["adapters", "generation", "lightning"],
        ["run"],
        ["cli"],
    ],
}
RANK = {
    f"{package}.{name}": rank
    for package, layers in LAYERS.items()
    for rank, names in enumerate(layers)
    for name in names
}


def module_name(path):
    relative = path.relative_to(ROOT).with_suffix("")
    return ".".join(relative.parts).removesuffix(".__init__")


@functools.cache
def nodes(path):
    """All that a file's syntax tree has."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imported(path):
    """Absolute names of everything a file imports, wherever in the file it does."""
    names = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def rank_of(name):
    """Rank of the layer that a dotted name lies in, or `None` for a bare package."""
    return RANK.get(".".join(name.split(".")[:2]))


def within(package, path):
    """What a file imports of a package, but for the package itself."""
    return [name for name in imported(path) if name.startswith(f"{package}.")]


def test_every_module_has_a_layer_and_every_layer_a_module():
    names = {".".join(module_name(path).split(".")[:2]) for path in SOURCES}
    assert names - set(LAYERS) == set(RANK)
    assert max(map(len, LAYERS.values())) <= 10


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_downward(package):
    upward = [
        f"{module_name(path)} imports {name}, which lies above it"
        for path in SOURCES
        if module_name(path).startswith(f"{package}.")
        for name in within(package, path)
        if (rank_of(name) or 0) > rank_of(module_name(path))
    ]
    assert not upward


def folder_edges(package):
    """Which folders import from which, and modules likewise, as sets of pairs."""
    files = {module_name(path) for path in SOURCES}
    edges = set()
    for path in SOURCES:
        here = module_name(path)
        for name in within(package, path) if here.startswith(f"{package}.") else []:
            target = name if name in files else name.rpartition(".")[0]
            if target in files and target != here and rank_of(target) is not None:
                edges.add((here, target))
    return edges


@pytest.mark.parametrize("package", LAYERS)
@pytest.mark.parametrize("parts", [2, 3, 9], ids=["folders", "folders in them", "modules"])
def test_no_import_leads_back(package, parts):
    names = {
        tuple(".".join(end.split(".")[:parts]) for end in edge) for edge in folder_edges(package)
    }
    later = graphlib.TopologicalSorter()
    for here, target in names:
        if here != target:
            later.add(here, target)
    later.prepare()  # raises CycleError, which names the way round


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "4.0", done.stderr


# Modules that name an axis along which layers, sequences or experts are divided, and why they may.
NAMING_AXES = {
    "where leaves, batches and values between layers lie": [
        "fzero/axes.py", "fzero/batch.py", "fzero/sharding/axes.py",
        "fzero/zero/sequence_parallel.py", "torch_bridge/structure/divide.py",
    ],
    "attention and experts": [
        "fzero/exchange/attention.py", "fzero/exchange/experts.py", "fzero/exchange/cudnn.py",
    ],
    "what `sequence_parallel` is about": [
        "fzero/plan_exclusions.py", "fzero/report/description.py",
    ],
}  # fmt: skip


def names_an_axis(path):
    """Whether code reads the name of a further axis, or a plan's size of it."""
    for node in nodes(path):
        if isinstance(node, ast.Name) and node.id in ("TENSOR", "CONTEXT", "EXPERT"):
            return True
        read = isinstance(node, ast.Attribute) and node.attr in ("tensor", "context", "expert")
        if read and ast.unparse(node.value).split(".")[-1] in ("plan", "p"):
            return True
    return False


def test_nothing_but_layout_and_exchange_knows_the_further_axes():
    known = {name for names in NAMING_AXES.values() for name in names}
    assert {str(path.relative_to(ROOT)) for path in SOURCES if names_an_axis(path)} == known


# What takes long to import, and is imported when it is first used.
LATE = {
    "flax", "jax.experimental.topologies", "jax.extend", "matplotlib", "orbax", "rich",
    "scipy.sparse", "tensorstore", "torch", "transformers", "typer",
}  # fmt: skip


def test_fzero_imports_nothing_slow():
    code = "import sys, fzero; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert "fzero" in done.stdout.split(), done.stderr
    assert not (LATE | set(fzero._LATE.values()) | {"fzero.pipeline"}) & set(done.stdout.split())


def test_the_bridge_imports_beside_an_older_torch():
    """torch 2.11, as GPU machines had it, has no such function to stand in for."""
    code = "import torch; del torch.nn.functional.linear_cross_entropy; import torch_bridge"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_names_imported_late_are_those_that_checkers_see():
    body = ast.parse(pathlib.Path(fzero.__file__).read_text()).body
    (checked,) = (node.body for node in body if isinstance(node, ast.If))
    assert {node.names[0].asname: node.module for node in checked} == fzero._LATE
    assert {*fzero._LATE, "pipeline", "Plan"} <= {*fzero.__all__} & {*dir(fzero)}  # import *, too
    # A user's `from fzero import *` must not take `batch`, `step` or `plan` from them.
    modules = [name for name in fzero.__all__ if isinstance(getattr(fzero, name), type(sys))]
    assert modules == ["pipeline"]
    with pytest.raises(AttributeError, match="no attribute 'placements'"):
        fzero.placements  # noqa: B018


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


def test_warnings_are_said_in_one_way():
    said = {path for path in SOURCES if "warnings.warn(" in path.read_text()}
    assert [path.name for path in said] == ["errors.py"]


def test_modules_and_functions_stay_small():
    large = [str(path) for path in SOURCES if len(path.read_text().splitlines()) > 500]
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=False) or ""
                lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
                if lines > 60:
                    large.append(f"{path}:{node.lineno} {node.name} has {lines} lines")
    assert not large


# More than eight parameters, and why that is better than a dataclass of them.
MANY_PARAMETERS = {
    "a command's options are the parameters of its function": [
        "torch_bridge/cli/evaluate.py evaluate",
        "torch_bridge/cli/finetune.py finetune",
        "torch_bridge/cli/generate.py generate",
        "torch_bridge/cli/preflight.py preflight",
        "torch_bridge/cli/train.py train",
    ],
    "an operator of torch has them": [
        "torch_bridge/export/stand_ins/slopes.py record_grad",
        "torch_bridge/lower/attention.py attention",
        "torch_bridge/lower/conv.py convolution",
        "torch_bridge/lower/detection.py deform_conv2d",
        "torch_bridge/lower/norm.py batch_norm",
        "torch_bridge/lower/segments.py embedding_bag",
    ],
    "users call it with keywords, of which most are left out": [
        "fzero/checkpoint/restore.py restore",
        "fzero/state/offload.py offload",
        "torch_bridge/convert.py convert",
        "torch_bridge/formats/files.py save",
        "torch_bridge/formats/restore.py restore",
        "torch_bridge/training.py fit",
    ],
}


def test_parameter_lists_stay_short():
    known = {name for names in MANY_PARAMETERS.values() for name in names}
    found = set()
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [arg.arg for arg in given if arg.arg not in ("self", "cls")]
                if len(names) > 8:
                    found.add(f"{path.relative_to(ROOT)} {node.name}")
    assert found == known


def test_the_glossary_has_words_of_the_code_each_once():
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    words = [word for row in rows if row != "word" for word in row.split(", ")]
    assert len(words) == len(set(words)) > 30
    text = " ".join(path.read_text() for path in FZERO).lower().replace("\n", " ")
    text = re.sub(r"\s+", " ", text)
    assert not [word for word in words if word.lower() not in text]


def quoted(text):
    """The words between backticks."""
    return {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", code)}


def test_the_map_of_a_folder_names_all_that_is_in_it():
    """Every folder has one; of the packages themselves it is in docs/design.md."""
    missing = {}
    for init in (path for path in SOURCES if path.name == "__init__.py"):
        if init.parent.parent == ROOT:
            continue
        modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
        unnamed = modules - quoted(ast.get_docstring(ast.parse(init.read_text())) or "")
        if unnamed:
            missing[str(init.parent.relative_to(ROOT))] = sorted(unnamed)
    assert missing == {}


@pytest.mark.parametrize("package", LAYERS)
def test_the_design_says_where_everything_is(package):
    design = (ROOT / "docs/design.md").read_text()
    table = design.split(f"| `{package}/` |")[1].split("\n\n")[0]
    assert {name for layer in LAYERS[package] for name in layer} - quoted(table) == set()


@pytest.mark.parametrize("package", LAYERS)
def test_no_two_classes_have_one_name(package):
    found = {}
    for path in SOURCES:
        if path.is_relative_to(ROOT / package):
            for node in nodes(path)[0].body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(module_name(path))
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


@pytest.mark.parametrize("package", [fzero, torch_bridge], ids=["fzero", "torch_bridge"])
def test_public_names_are_documented_and_the_facade_only_imports(package):
    public = [name for name in dir(package) if not name.startswith("_")]
    for name in public:
        value = getattr(package, name)
        if inspect.ismodule(value):
            continue
        assert inspect.getdoc(value), f"{package.__name__}.{name} has no docstring"
    body = ast.parse(pathlib.Path(package.__file__).read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
    late = {"__getattr__", "__dir__", "_typing.TYPE_CHECKING"}  # imports that wait
    names = {
        ast.unparse(node.test) if isinstance(node, ast.If) else getattr(node, "name", "?")
        for node in body
        if not isinstance(node, allowed)
    }
    assert names <= late


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


def test_test_files_have_names_of_their_own():
    """pytest imports them by these; `gpu_programs` runs in a session of its own."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py") if p.parent.name != "gpu_programs"]
    assert sorted(names) == sorted(set(names))
