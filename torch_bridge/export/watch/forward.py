"""What a forward does besides computing: it may change its module, or depend on Python's state.

torch.export runs the forward once and keeps what it saw. A counter in Python, or a number from
`random` or numpy, would be a constant of the graph from then on. It is therefore run twice.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from fzero.errors import ConversionError, warn
from torch_bridge.export.calls import around_calls
from torch_bridge.export.origins import source_line
from torch_bridge.export.watch.constants import line_that_reads_other, same_constant
from torch_bridge.export.watch.counts import LEFT, Memory, moved, reachable
from torch_bridge.export.watch.function_caches import computed_anew
from torch_bridge.export.watch.leftovers import no_leftovers


_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, deque, set, *_DICTS)
# Attributes that say nothing about the next call: torch.nn.Module's own, the note of transformers
# that its hooks are there, and the lists in which torch's recurrent layers repeat their weights.
HARMLESS = {
    *vars(torch.nn.Module()),
    "_output_capturing_hooks_installed",
    "_flat_weights",
    "_flat_weight_refs",
}


# What an export puts in the place of PyTorch's own functions is of one export at a time.
_RUNNING = threading.RLock()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """One export at a time, and none of Python's collections meanwhile.

    A collection may end any generator of the process: one that waited inside `torch.no_grad()`
    switches gradients as it ends, and in the midst of a trace that is part of the graph.
    """
    with _RUNNING:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


@contextlib.contextmanager
def untouched(module: torch.nn.Module, train: bool) -> Iterator[None]:
    """Put a module into a mode and give it back as it was: modes, tensors, attributes, HF's cache.

    Whatever runs a module's forward to see what it does runs it in here: undisturbed, too.

    Args:
        module: the module that a forward will run on.
        train: which mode it is in meanwhile.
    """
    with (
        _undisturbed(), _given_back(module), no_leftovers(module, HARMLESS), computed_anew(module)
    ):  # fmt: skip
        module.train(train)
        with torch.inference_mode(False), torch.enable_grad():
            yield


@contextlib.contextmanager
def _given_back(module: torch.nn.Module) -> Iterator[None]:
    kept = [(m, _snapshot(m)) for m in module.modules()]
    # The parts of an encoder-decoder have copies of the config.
    configs = {id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None}
    caching = [(c, c.use_cache) for c in configs.values() if hasattr(c, "use_cache")]
    try:
        for config, _ in caching:  # the key-value cache is not a value that export can return
            config.use_cache = False
        yield
    finally:
        for config, cache in caching:
            config.use_cache = cache
        for m, (attributes, contents) in kept:
            m.__dict__.clear()
            m.__dict__.update(attributes)
            for name, copy in contents.items():
                _refill(attributes[name], copy)


def _snapshot(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's attributes, and copies of those that can change in place."""
    attributes = dict(module.__dict__)
    contents = {
        name: value.copy() for name, value in attributes.items() if type(value) in _CONTAINERS
    }
    return attributes, contents


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(contents)
    else:
        container.update(contents)


class PythonState:
    """The Python values that a forward can depend on and change, at one moment."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.random = random.getstate()
        self.numpy: Any = np.random.get_state()
        self.values = {
            (path, name): value.copy() if type(value) in _CONTAINERS else value
            for path, m in module.named_modules()
            for name, value in m.__dict__.items()
            if name not in HARMLESS
        }
        self.tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        self.attributes = {key: _comparable(value) for key, value in self.values.items()}
        self.counts, self.arrays = reachable(module, HARMLESS)

    def require_no_more_tensors(self, later: PythonState) -> None:
        """Raises `ConversionError` if a parameter or buffer was not there before."""
        if new := sorted(later.tensors - self.tensors):
            raise ConversionError(
                f"the forward itself registers `{new[0]}`: a state has the parameters and buffers"
                " that a module has before its first call. Register it in __init__, or call the"
                " module once before tb.convert"
            )

    def drew_numbers(self, later: PythonState) -> bool:
        """Whether random numbers were drawn outside torch until `later`."""
        now = later.numpy
        same = np.array_equal(now[1], self.numpy[1]) and now[2:] == self.numpy[2:]
        return not same or later.random != self.random

    def changed(self, later: PythonState) -> list[tuple[str, str]]:
        """The attributes that have other values in `later`, as (submodule path, name)."""
        old, new = self.attributes, later.attributes
        names = {*old, *new}
        return sorted(k for k in names if old.get(k, _MISSING) != new.get(k, _MISSING))

    def moved(self, later: PythonState) -> list[str]:
        """What a forward can count in that stands elsewhere in `later`, by name."""
        return moved(self.counts, later.counts)

    def leaves(self, later: PythonState) -> bool:
        """Whether a tensor was left outside of modules until `later`; it is taken out again."""
        new = {name for name, value in later.counts.items() if value is LEFT}
        return any(self.counts.get(name) is not LEFT for name in new)

    def written(self, later: PythonState) -> dict[str, Memory]:
        """The arrays that have other values in `later`, by name."""
        return {n: later.arrays[n] for n in self.moved(later) if n in later.arrays}

    def counted(self, after: PythonState, later: PythonState) -> list[str]:
        """What moved in each of two calls, in words: `path.name: 0, then 1`."""
        found = []
        for name in after.moved(later):
            old, new = self.counts.get(name), after.counts[name]
            if old is None:
                old, new = new, later.counts[name]
            plain = all(isinstance(x, int | float | str) for x in (old, new))
            found.append(f"{name}: {old!r}, then {new!r}" if plain else name)
        return sorted(found)

    def put(self, module: torch.nn.Module, names: list[tuple[str, str]]) -> None:
        """Give attributes the values that they have here."""
        for path, name in names:
            attributes = module.get_submodule(path).__dict__
            if (path, name) in self.values:
                value = self.values[path, name]
                attributes[name] = value.copy() if type(value) in _CONTAINERS else value
            else:
                attributes.pop(name, None)

    def restore_random(self) -> None:
        """Put the random generators back."""
        random.setstate(self.random)
        np.random.set_state(self.numpy)


@contextlib.contextmanager
def watch_state(module: torch.nn.Module) -> Iterator[list[PythonState]]:
    """Record Python's state at the end of each call (torch.export puts attributes back)."""
    seen: list[PythonState] = []
    with around_calls(module, lambda _: seen.append(PythonState(module))):
        yield seen


_MISSING = object()


def _comparable(value: Any) -> Any:
    """Something to compare by: numbers and strings by value, containers by what they hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return (type(value), value)
    if type(value) in (list, tuple, deque):
        return (type(value), tuple(_comparable(v) for v in value))
    if type(value) in _DICTS:
        return (type(value), tuple((k, _comparable(v)) for k, v in value.items()))
    if type(value) is set:
        return (set, frozenset(value))
    return (type(value), _Same(value))


class _Same:
    """Equal to that of the same object, which lives as long: no other can take its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def same_program(a: ExportedProgram, b: ExportedProgram) -> bool:
    """Whether two exports of a module compute and return the same, with the same constants."""
    return _codes(a) == _codes(b) and _same_ends(a, b)


def _same_ends(a: ExportedProgram, b: ExportedProgram) -> bool:
    """Whether two programs return the same tree, and have the same constants."""
    return (
        a.call_spec.out_spec == b.call_spec.out_spec
        and a.constants.keys() == b.constants.keys()
        and all(same_constant(value, b.constants[name]) for name, value in a.constants.items())
    )


# Arguments that are on in train mode and off in eval mode; an operator's overloads are one row.
_OF_MODES: dict[Any, str] = {
    torch.ops.aten.dropout: "train",
    torch.ops.aten.feature_dropout: "train",
    torch.ops.aten.alpha_dropout: "train",
    torch.ops.aten.feature_alpha_dropout: "train",
    torch.ops.aten.scaled_dot_product_attention: "dropout_p",
    torch.ops.aten.batch_norm: "training",
}


def same_but_for_modes(
    module: torch.nn.Module, train: ExportedProgram, evaluate: ExportedProgram
) -> bool:
    """Whether two exports are one program, except for what operators are told of the mode."""
    one, other = _operations(train), _operations(evaluate)
    # A rate that no module has comes from somewhere else, and may be another in the next call.
    rates = {v for m in module.modules() for v in vars(m).values() if isinstance(v, float)}
    return (
        _same_ends(train, evaluate)
        and len(one) == len(other)
        and all(_same_but_for_mode(*both, rates) for both in zip(one, other, strict=True))
    )


_Operation = tuple[str, Any, dict[str, Any]]


def _operations(program: ExportedProgram) -> list[_Operation]:
    """The kind, target and arguments of all nodes, those of regions too.

    Left out is what goes with a mode: a kernel without dropout leaves contiguous what one with it
    need not, and a batch norm in training counts its calls in a buffer.
    """
    modules = program.graph_module.modules()
    graphs = [m.graph for m in modules if isinstance(m, torch.fx.GraphModule)]
    numbers: dict[torch.fx.Node, str] = {}  # names count what a trace threw away, too
    found: list[_Operation] = []
    for node in (node for graph in graphs for node in graph.nodes):
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
        if node.target is torch.ops.aten.contiguous.default or _counts_batches(node):
            numbers[node] = args[0]
            continue
        numbers[node] = f"%{len(found)}"
        schema = getattr(node.target, "_schema", None)
        defaults = {a.name: a.default_value for a in schema.arguments} if schema else {}
        given = dict(zip(defaults or map(str, range(len(args))), args, strict=False))
        found.append((node.op, node.target, {**defaults, **given, **kwargs}))
    return found


def _counts_batches(node: torch.fx.Node) -> bool:
    """Whether this is a batch norm's count of its calls, which nothing of the forward reads."""
    adds_one = node.target is torch.ops.aten.add_.Tensor and node.args[1] == 1 and not node.users
    return bool(adds_one) and str(node.args[0]).endswith("num_batches_tracked")


def _same_but_for_mode(train: _Operation, evaluate: _Operation, rates: Collection[float]) -> bool:
    (*what, on), (*other, off) = train, evaluate
    told = _OF_MODES.get(getattr(train[1], "overloadpacket", None))
    if told is not None and on.get(told) and not off.get(told):
        # `dropout(x, self.rate if self.training else 0.0, self.training)` says the mode twice.
        both = {told, "p"} if on.get("p") in rates else {told}
        on, off = ({k: v for k, v in one.items() if k not in both} for one in (on, off))
    return what == other and str(on) == str(off)


def _codes(program: ExportedProgram) -> list[str]:
    modules = program.graph_module.modules()
    return [m.code for m in modules if isinstance(m, torch.fx.GraphModule)]


def first_difference(a: ExportedProgram, b: ExportedProgram) -> str:
    """The line of Python whose operator, or constant, two exports have differently, or nothing."""
    for one, other in zip(a.graph.nodes, b.graph.nodes, strict=False):
        if (one.op, str(one.target), str(one.args)) != (
            other.op,
            str(other.target),
            str(other.args),
        ):
            return source_line(one, unknown="")
    return line_that_reads_other(a, b)


def refuse_python_random(mode: str) -> None:
    """Say that a forward depends on random numbers which export would freeze.

    Raises:
        ConversionError: always.
    """
    raise ConversionError(
        f"the {mode} forward depends on random numbers from Python's `random` or numpy. They would"
        " be drawn once, at conversion, and be constants from then on. Draw them with torch, or"
        " turn off what needs them (in transformers: layerdrop=0.0, apply_spec_augment=False). For"
        " a model that is only evaluated: tb.convert(..., train=False)."
    )


class PythonStateWarning(UserWarning):
    """A forward counts in Python's own values, which nobody counts any more."""


def warn_of_counts(counted: list[str]) -> None:
    """Say that a forward counts in values of Python (given in words) on which its next call does
    not depend."""
    if counted:
        warn(
            f"the forward counts in values of Python ({'; '.join(counted)}), on which its"
            " next call does not depend. A converted graph has what the first calls compute: if a"
            " later one computes something else (every fourth call, say), it is not that. Keep the"
            " count in a buffer (register_buffer) and decide with torch.where; a count that nothing"
            " reads may stay",
            PythonStateWarning,
        )


def warn_of_caches(names: list[tuple[str, str]]) -> None:
    """Say that what a forward keeps for its next call is computed in each."""
    listed = ", ".join(f"{path}.{name}" if path else name for path, name in sorted(names))
    warn(
        f"the forward keeps {listed}, which follows from sizes, constants and buffers alone. A"
        " converted graph computes it in each call, as PyTorch does where sizes are new. If an"
        " older one should count for other sizes, too, make it a buffer (register_buffer)",
        PythonStateWarning,
    )


def refuse_python_state(
    names: list[tuple[str, str]],
    moved: list[str],
    mode: str,
    line: str | None,
    kept: bool = False,
) -> None:
    """Say that a forward depends on Python values that it changes.

    Args:
        names: attributes of submodules that it changed.
        moved: what else it counts in, in words.
        mode: "train" or "eval".
        line: where the graph of the next call is another one, if it has one.
        kept: whether it reads a tensor there that an earlier call has computed.

    Raises:
        ConversionError: always, with the names.
    """
    listed = ", ".join(f"{path}.{name}" if path else name for path, name in names)
    what = (
        f"Python attributes that it changes itself: {listed}"
        if names
        else "tensors that an earlier call computed and left outside of its modules (in an object,"
        " a closure or a global)"
        if kept
        else f"Python values that it changes itself: {', '.join(sorted(moved))}"
        if moved
        else "Python values that it changes itself (a counter in an object or an array, an"
        " iterator, a global)"
    )
    where = f"\n  at: {line}\n " if line else ""
    raise ConversionError(
        f"the {mode} forward depends on {what}.{where} Their values would be constants of the"
        " converted graph. Keep what changes in a buffer (register_buffer), which is returned after"
        " every call. What is kept to save time only (a mask for this length), compute in each call"
        " or in a function under functools.lru_cache. What the first call makes and later ones keep"
        " (transformers' longrope): call the module once, then convert it."
    )


# Methods that all modules have, and what stands in for a module's own.
_NOT_THE_USERS = (torch.nn.modules.module.__file__, str(Path(__file__).parents[2]))


def failing_line(error: BaseException, module: torch.nn.Module) -> tuple[str, str] | None:
    """The submodule path and the Python line in which a forward failed.

    Args:
        error: what export raised.
        module: the module that was exported.

    Returns:
        `(path, line)` of the innermost frame that belongs to a submodule, or None.
    """
    paths = {id(m): path or "(root)" for path, m in module.named_modules()}
    found: tuple[str, str] | None = None
    for frame, line in _frames(error):
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        path, file = paths.get(id(first)), code.co_filename
        if path is not None and not file.startswith(_NOT_THE_USERS):
            found = path, f'File "{file}", line {line} | {linecache.getline(file, line).strip()}'
    return found


def failing_call(error: BaseException) -> str | None:
    """The name of the function of PyTorch that a forward called when it failed, or None."""
    name: str | None = None
    for frame, _ in _frames(error):
        if frame.f_code.co_name == "__torch_function__":
            name = getattr(frame.f_locals.get("func"), "__name__", name)
    return name


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """All frames of an error and of those it came from, the outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for link in chain:
        trace = link.__traceback__
        while trace is not None:
            yield trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
