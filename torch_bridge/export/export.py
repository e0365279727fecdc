"""From a module to one decomposed `ExportedProgram` per mode, or one error that says why not.

The level is "selected": `no_grad` regions become `detach`, then everything is decomposed to core
ATen except the operators that have a lowering, a better whole form (attention, linear,
normalisation, softmax). At core level torch would expand a linear layer's weight over the batch,
unroll attention, and let gradients through `detach`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError, warn
from torch_bridge.export.decompose import decompositions, needs_decomposing
from torch_bridge.export.graph.default_dtype import say_default_dtype
from torch_bridge.export.graph.detached import separate_detached
from torch_bridge.export.graph.in_place import (
    cast_what_is_copied,
    remove_hidden_aliases,
    replace_fresh_writes,
)
from torch_bridge.export.graph.memory import forget_failed_calls, name_all_users
from torch_bridge.export.graph.no_grad import inline_no_grad
from torch_bridge.export.graph.places import places_of_tensors
from torch_bridge.export.graph.slices import tidy_slices
from torch_bridge.export.remedies import remedy_of_example, remedy_of_trace
from torch_bridge.export.shapes import same_rules
from torch_bridge.export.stand_ins.checks_of_values import LeftOutCheckWarning, asked_in_vain
from torch_bridge.export.stand_ins.experts import OwnLossWarning
from torch_bridge.export.stand_ins.table import stand_ins
from torch_bridge.export.unread import nothing_unread
from torch_bridge.export.watch.attribute_caches import (
    Attribute,
    follow_from_sizes,
    kept_by_the_next_call,
    made_while_traced,
    returned_as_well,
)
from torch_bridge.export.watch.constants import (
    keep_values,
    line_that_reads_earlier,
    refuse_nameless,
    refuse_shared,
    refuse_without_values,
    refuse_written_copies,
)
from torch_bridge.export.watch.copies import Copies, noted_copies
from torch_bridge.export.watch.counts import Memory
from torch_bridge.export.watch.draws import Draws, set_draws
from torch_bridge.export.watch.forward import (
    PythonState,
    PythonStateWarning,
    failing_call,
    failing_line,
    first_difference,
    refuse_python_random,
    refuse_python_state,
    same_but_for_modes,
    same_program,
    untouched,
    warn_of_caches,
    warn_of_counts,
    watch_state,
)
from torch_bridge.export.watch.functions import refuse_functions, watch_functions
from torch_bridge.export.watch.hooks import watch_gradients
from torch_bridge.export.watch.questions import TracedBranchWarning
from torch_bridge.module.signature import bind


# Inputs up to this rank have every dim tried as dynamic (tokens, features, sequences); images
# only the batch: symbolic heights and widths make export slow and specialise anyway.
_ALL_DYNAMIC_RANK = 3
# Every dim free, then the batch only, then all fixed (which is said when it is called otherwise).
_DYNAMIC = ("all", "batch", "none")


# What this package says of a module while it is exported.
_SAID = (LeftOutCheckWarning, OwnLossWarning, PythonStateWarning, TracedBranchWarning)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's deprecation notices, and the graphs it prints when a try fails, to itself.

    What this package has to say is said when it is over.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    # A traceback of its own for each try, beside the error that it raises.
    of_operators = logging.getLogger("torch._subclasses.fake_tensor")
    before, of_operators.disabled = of_operators.disabled, True
    try:
        with (
            warnings.catch_warnings(record=True) as seen,
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            for kind in _SAID:
                warnings.simplefilter("always", kind)
            yield
    finally:
        logging.disable(level)
        of_operators.disabled = before
    for said, category in dict.fromkeys((str(one.message), one.category) for one in seen):
        warn(said, category)


def export_program(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
    batch_dim: int = 0,
    check: bool = True,
    free: Sequence[str] = _DYNAMIC,
) -> ExportedProgram:
    """Export a module in train or eval mode; the module is left as it was.

    Args:
        module: any module; its parameters and buffers are read, not changed.
        args: example positional arguments (tensors of any shape, nested containers, constants).
        kwargs: example keyword arguments.
        train: which mode the graph is taken in.
        batch_dim: the dim of every tensor that is kept free if not all can be.
        check: whether the graph of a second call is compared; a module that was, need not be again.
        free: which sizes are free, of which the first that works is taken: "all", "batch", "none".

    Returns:
        The decomposed program, with dynamic sizes wherever the module allows them.

    Raises:
        ConversionError: export failed, or would have lost a gradient without a word.
    """
    inputs, mode = _apart(args, kwargs), _mode(train)
    with untouched(module, train), quiet():
        trace = _export_pure(module, inputs, mode, (batch_dim, free), check)
        return _tidied(module, trace, mode)


@quiet()  # what both say is said once
def export_both(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: int
) -> dict[bool, ExportedProgram]:
    """The programs of a module in train and in eval mode; one, where the mode changes nothing.

    Then the trace in the other mode also is the second call, which shows whether a forward depends
    on what changes from call to call: two traces instead of four. Where the modes differ only in
    operators that are told of them, as dropout is, three: eval's second one shows whether it was
    the mode that told them.

    Args:
        module: as for `export_program`.
        args: example positional arguments.
        kwargs: example keyword arguments.
        batch_dim: the dim of every tensor that is kept free if not all can be.

    Raises:
        ConversionError: as of `export_program`.
    """
    inputs = _apart(args, kwargs)
    traces: dict[bool, _Trace] = {}
    for train in (True, False):
        with untouched(module, train), quiet():
            traces[train] = _export_pure(
                module, inputs, _mode(train), (batch_dim, _DYNAMIC), check=False
            )
    one, other = traces[True].program, traces[False].program
    same = same_rules(one, other)  # also where a size makes one of them take another path
    alike = same and same_program(one, other)
    again: tuple[bool, ...] = ()
    if not alike:
        # The mode that was traced last comes first: an odd number of calls lies between a trace and
        # its second one, so that what changes to and fro is seen.
        again = (False,) if same and same_but_for_modes(module, one, other) else (False, True)
    for train in again:
        if not traces[train].checked:
            with untouched(module, train), quiet():
                _require_same(module, inputs, _mode(train), batch_dim, traces[train])

    def tidied(train: bool) -> ExportedProgram:
        with untouched(module, train), quiet():
            return _tidied(module, traces[train], _mode(train))

    if alike:
        return dict.fromkeys((True, False), tidied(True))
    return {train: tidied(train) for train in (True, False)}


def _apart(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example's arguments, views of other tensors copied: torch.export would note the sizes of
    those as well, and ask for them where a program is decomposed."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf._base is None:
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    found: tuple[tuple[Any, ...], dict[str, Any]]
    found = torch_pytree.tree_map(own, (args, dict(kwargs)))
    return found


def _mode(train: bool) -> str:
    return "train" if train else "eval"


def _tidied(module: torch.nn.Module, trace: _Trace, mode: str) -> ExportedProgram:
    """The program as it is lowered: in place of what writes, what gives a value; decomposed."""
    program = trace.program
    refuse_nameless(program, (*module.named_parameters(), *module.named_buffers()))
    inline_no_grad(program)
    refuse_written_copies(program, trace.copies, trace.arrays)
    remove_hidden_aliases(program.graph_module)
    separate_detached(program)
    say_default_dtype(program.graph_module)
    tidy_slices(program.graph_module)
    cast_what_is_copied(program.graph_module)
    replace_fresh_writes(program.graph_module)
    try:
        if needs_decomposing(program):
            with nothing_unread():
                program = program.run_decompositions(decompositions(program))
    except Exception as error:
        raise ConversionError(_explain(error, mode, module)) from error
    places_of_tensors(program)
    return program


@dataclass(frozen=True)
class _Trace:
    """What a forward was traced as, the sizes that are free, and whether a second call agreed.

    Beside it the copies that stood in for arrays, and the arrays that the forward leads to.
    """

    program: ExportedProgram
    dynamic: str
    checked: bool
    copies: Copies
    arrays: Mapping[str, Memory]


def _export_pure(
    module: torch.nn.Module,
    inputs: tuple[Any, dict[str, Any]],
    mode: str,
    sizes: tuple[int, Sequence[str]],
    check: bool,
) -> _Trace:
    """Export, and refuse what the graph would silently lose: gradients, and Python's own state.

    The forward is traced a second time, in the state that the first one left. Whatever it depends
    on and changes itself (an attribute, a counter in some object, an iterator, a global, numbers
    from `random` or numpy) then gives another graph. A forward that drew such numbers is traced
    with the smallest and the largest ones as well: what it does one time in ten is seen, too.
    """
    before, (batch_dim, free) = PythonState(module), sizes
    try:
        with watch_state(module) as states, noted_copies() as copies:
            program, dynamic = _export_most_dynamic(module, inputs, mode, batch_dim, free)
        if (line := line_that_reads_earlier(program)) is not None:
            refuse_python_state([], [], mode, line, kept=True)
        refuse_without_values(program)
        after = states[-1] if states else before
        before.require_no_more_tensors(after)
        tensors = (*module.named_parameters(), *module.named_buffers())
        refuse_shared(before.written(after), tensors, mode)
        changed, drew = before.changed(after), before.drew_numbers(after)
        counts = before.moved(after) or before.leaves(after)
        checked = bool(check or changed or drew or counts)
        trace = _Trace(program, dynamic, checked, copies, before.arrays)
        if trace.checked:
            after.put(module, changed)
            try:
                later = _require_same(module, inputs, mode, batch_dim, trace, changed, drew)
            except ConversionError:
                caches = made_while_traced(changed, after.values.get)
                before.put(module, changed)
                if not caches or not _only_save_time(
                    module, inputs, mode, batch_dim, dynamic, caches
                ):
                    raise
                # The next call computes them anew, as a converted one does.
                before.put(module, caches)
                others = [one for one in changed if one not in caches]
                after.put(module, others)
                later = _require_same(module, inputs, mode, batch_dim, trace, others, drew)
                warn_of_caches(caches)
            warn_of_counts(before.counted(after, later or after))
        for draws in Draws if drew else ():
            set_draws(draws)
            _require_same(module, inputs, mode, batch_dim, trace, drew=True)
    finally:
        before.restore_random()
    return trace


def _only_save_time(
    module: torch.nn.Module,
    inputs: tuple[Any, dict[str, Any]],
    mode: str,
    batch_dim: int,
    dynamic: str,
    caches: Sequence[Attribute],
) -> bool:
    """Whether what a forward keeps in attributes is what it would compute again."""
    if not kept_by_the_next_call(module, inputs, caches):
        return False
    with contextlib.suppress(ConversionError), returned_as_well(module, caches):
        program, _ = _export_most_dynamic(module, inputs, mode, batch_dim, (dynamic,))
        inline_no_grad(program)
        return follow_from_sizes(program)
    return False


def _require_same(
    module: torch.nn.Module,
    inputs: tuple[Any, dict[str, Any]],
    mode: str,
    batch_dim: int,
    first: _Trace,
    changed: Any = (),
    drew: bool = False,
) -> PythonState | None:
    """Python's state after a second call, if it was seen.

    Args:
        module: the module, in the state that the first call left.
        inputs: the example's arguments.
        mode: "train" or "eval", which the module is in.
        batch_dim: the dim of every tensor that is kept free if not all can be.
        first: the trace of the first call.
        changed: what the first call is known to have changed.
        drew: whether it took numbers from Python's or numpy's generators.

    Raises:
        ConversionError: the second call gives another graph than the first.
    """
    again: ExportedProgram | None = None
    before = PythonState(module)
    with contextlib.suppress(ConversionError), watch_state(module) as states:
        again = _export_most_dynamic(module, inputs, mode, batch_dim, (first.dynamic,))[0]
    if again is None or not same_program(first.program, again):
        if drew and not changed:
            refuse_python_random(mode)
        line = None if again is None else line_that_reads_earlier(again)
        kept = line is not None
        if again is not None and not kept:
            line = first_difference(first.program, again)
        moved = before.moved(states[-1]) if states else []
        refuse_python_state(changed, moved, mode, line, kept)
    return states[-1] if states else None


def _export_most_dynamic(
    module: torch.nn.Module,
    inputs: tuple[Any, dict[str, Any]],
    mode: str,
    batch_dim: int,
    kinds: Sequence[str],
) -> tuple[ExportedProgram, str]:
    """The program with the first kind of free dims that works, and that kind."""
    last: Exception | None = None
    asked: list[str] = []
    with (
        watch_functions() as functions, watch_gradients(), asked_in_vain(asked), stand_ins(module),
        _tolerant(), nothing_unread(),
    ):  # fmt: skip
        for dynamic in kinds:
            asked.clear()
            shapes = _dynamic_shapes(module, inputs, dynamic, batch_dim)
            try:
                with _unmarked(inputs):
                    program = torch.export.export(
                        module, *inputs, dynamic_shapes=shapes, strict=False
                    )
            except ConversionError as error:
                raise ConversionError(f"{error}{_where(error, module)}") from error
            except Exception as error:
                last = error  # the last try fixes all sizes: its error is about the module itself
            else:
                refuse_functions(functions, mode)
                _refuse_asked(asked, mode)
                name_all_users(program)
                forget_failed_calls(program)
                keep_values(program, (*module.named_parameters(), *module.named_buffers()))
                return program, dynamic
    refuse_functions(functions, mode)
    assert last is not None
    args, kwargs = inputs
    raise ConversionError(_explain(last, mode, module, None if kwargs else args)) from last


@contextlib.contextmanager
def _unmarked(inputs: Any) -> Iterator[None]:
    """Tensors stay as they are: where a try fails, torch.export leaves marks of sizes that are free
    on them, which the next one would go by."""
    tensors = [x for x in torch_pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    attributes = [dict(vars(x)) for x in tensors]
    try:
        yield
    finally:
        for x, own in zip(tensors, attributes, strict=True):
            vars(x).clear()
            vars(x).update(own)


def _refuse_asked(places: Sequence[str], mode: str) -> None:
    """Refuses a trace that went on although a tensor was asked for a value that it has not."""
    if places:
        raise ConversionError(
            f"the {mode} forward depends on values: {places[0]}. What that raises, in a call"
            " or while it is traced, is caught there or in a caller (try, a context that swallows"
            " exceptions), so that the graph would be one way alone. Write both with torch.where"
        )


def _tolerant() -> contextlib.AbstractContextManager[Any]:
    """What an earlier call left in an object is said by this package, and not by PyTorch."""
    try:
        from torch._export import config
    except ImportError:  # older than that error
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any]
    found = config.patch(error_on_lifted_constant_tensors=False)
    return found


def _dynamic_shapes(
    module: torch.nn.Module, inputs: tuple[Any, dict[str, Any]], dynamic: str, batch_dim: int
) -> Any:
    """Dim.AUTO for the dims that may vary, in the structure of the inputs."""

    def dims(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or dynamic == "none":
            return None
        if dynamic == "all" and leaf.ndim <= _ALL_DYNAMIC_RANK:
            return dict.fromkeys(range(leaf.ndim), Dim.AUTO)
        return {batch_dim: Dim.AUTO} if batch_dim < leaf.ndim else {}

    if dynamic == "none":
        return None
    args, kwargs = inputs
    positional = torch_pytree.tree_map(dims, args)
    named = torch_pytree.tree_map(dims, kwargs)
    return _like_signature(module, positional, named)


def _like_signature(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`dynamic_shapes` by parameter name, the one form export accepts for mixed arguments."""
    return dict(bind(inspect.signature(module.forward), args, kwargs).arguments)


def _explain(
    error: Exception, mode: str, module: torch.nn.Module, args: tuple[Any, ...] | None = None
) -> str:
    """torch's message cut to what a reader can use: the cause, the submodule and its line."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    cause = lines[0] if lines else type(error).__name__
    cause = cause.partition(" If this type holds tensors")[0]  # how to tell PyTorch of a type
    hint = remedy_of_trace(str(error), failing_call(error))
    if args is not None and (given := remedy_of_example(args)):
        hint += f" {given}"
    elif mode == "train" and "dtypes" not in hint:  # it may draw, or check values, as eval does not
        hint += " For a model that is only evaluated: tb.convert(..., train=False)."
    said = f"torch.export cannot trace the {mode} forward: {cause.rstrip('.')}. {hint.strip()}"
    return said.rstrip() + _where(error, module)


def _where(error: Exception, module: torch.nn.Module) -> str:
    found = failing_line(error, module)
    return f"\n  in {found[0]} at: {found[1]}" if found else ""
