"""Whether buffers of which devices' additions are added up scale the value before, too.

`buffer_reduce="sum"` adds up what each device adds to the old value. Of `0.9 * old + rows.sum(0)`
each adds the decay as well, which is then taken as often as there are devices. So old values are
looked for among the terms of new ones: there they may stand by themselves, or beside what follows
rows, but not multiplied. What goes other ways (loops, a `Stack`, products of matrices) is let be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fzero.errors import warn
from fzero.model import Model
from fzero.programs.jaxprs import Op, Program, Var
from fzero.sharding.initial import initial_shapes
from fzero.step.row_kept import declared_of
from fzero.tree import named_leaves


# What gives the terms of its first operand, of all its operands, and of what it selects from.
_FIRST = frozenset(
    """
    broadcast_in_dim convert_element_type copy copy_p expand_dims name reduce_precision reshape
    scatter-add sharding_constraint squeeze stop_gradient transpose
    """.split()  # noqa: SIM905
)
_ADDED = frozenset(("add", "add_any"))


def warn_of_decays(
    model: Model, program: Program, rows: Sequence[Var], old: Sequence[Var], new: Sequence[Any]
) -> None:
    """Warns of buffers that are declared as sums, and in which the value before is multiplied.

    Args:
        model: the model.
        program: its loss.
        rows: the program's inputs that have a row for each example.
        old: its inputs that are buffers.
        new: its outputs that are their new values.
    """
    names = [path for path, _ in named_leaves(initial_shapes(model)[1])]
    added = [path for path in names if declared_of(model, path) == "sum"]
    if not added:
        return
    own = _following(program, rows)
    makers = {var: (op, i) for op in program.ops for i, var in enumerate(op.results)}
    for path, before, after in zip(names, old, new, strict=True):
        if path in added and _scales(before, after, makers, own):
            warn(
                f"buffers/{path}: buffer_reduce='sum' adds up what each device adds to the old"
                " value, and this multiplies that, as a decay does: it decays once for each"
                " device. Have the rows of all devices first (fz.all_rows): the new value is the"
                " same anywhere, which buffer_reduce='same' says"
            )


def _following(program: Program, rows: Sequence[Var]) -> set[Var]:
    """All values that depend on rows."""
    found = {*rows}
    for op in program.ops:
        if not found.isdisjoint(op.reads()):
            found.update(op.results)
    return found


def _scales(
    before: Var, after: Any, makers: Mapping[Var, tuple[Op, int]], own: Collection[Var]
) -> bool:
    """Whether a value is a term of another one, multiplied by what is the same on all devices."""
    todo, seen = [(after, False)], set[tuple[Var, bool]]()
    while todo:
        value, scaled = todo.pop()
        if not isinstance(value, Var) or (value, scaled) in seen:
            continue
        if value is before and scaled:
            return True
        seen.add((value, scaled))
        if value in makers:
            op, index = makers[value]
            todo += [(term, scaled or more) for term, more in _terms(op, index, own)]
    return False


def _terms(op: Op, index: int, own: Collection[Var]) -> Iterator[tuple[Any, bool]]:
    """Operands that a result is made up of, and whether each is multiplied."""
    given = op.operands
    name = "" if op.equation is None else op.equation.primitive.name
    if not name:  # a fence: each result is an operand
        yield given[index], False
    elif name in _ADDED:
        yield from ((term, False) for term in given)
    elif name == "select_n":
        yield from ((term, False) for term in given[1:])
    elif name in _FIRST:
        yield given[0], False
    elif name == "neg":
        yield given[0], True
    elif name == "sub":
        yield from ((given[0], False), (given[1], True))
    elif name in ("mul", "div"):
        pairs = [(given[0], given[1]), (given[1], given[0])][: 2 if name == "mul" else 1]
        yield from ((term, True) for term, by in pairs if not (isinstance(by, Var) and by in own))
