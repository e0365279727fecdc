"""Whether buffers keep single rows, of which each device has others.

Running statistics are means over rows, and devices' values of them are averaged. A queue of the
last examples is none: the mean of several devices' queues holds no example. So rows are followed
through a program, on the first dim, where a batch has them, until something adds them up. Where
they go ways that are not known here (another dim, loops, sorting) nothing is said.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fzero.errors import warn
from fzero.exchange.rows import AGREED
from fzero.model import Model
from fzero.programs.jaxprs import ELEMENTWISE, Op, Program, Var
from fzero.sharding.buffers import declared_reduction, has_mean
from fzero.sharding.initial import initial_shapes
from fzero.tree import named_leaves


# Of what has rows on its first dim, some or all of these on the first dim, moved or beside others.
_MOVED = frozenset(
    """
    add_any concatenate cumsum dynamic_slice dynamic_update_slice gather name pad rev scatter slice
    """.split()  # noqa: SIM905
)


def warn_of_averages(model: Model, notes: Sequence[str]) -> None:
    """Warns of float buffers that are averaged over devices, and are no means.

    Args:
        model: the model.
        notes: of each buffer what it does with rows of the batch, in a word; `""`: nothing else.
    """
    buffers = named_leaves(initial_shapes(model)[1])
    for (path, leaf), does in zip(buffers, notes, strict=True):
        if does and has_mean(leaf) and declared_of(model, path) is None:
            warn(
                f"buffers/{path} {does} rows of the batch, of which each device has its own:"
                " devices' values are averaged, as those of running means are. Have the rows of"
                " all devices first (fz.all_rows): they are the same anywhere, which"
                " buffer_reduce='same' says"
                + (" (of the largest alone: buffer_reduce='max')" if "largest" in does else "")
            )


def declared_of(model: Model, path: str) -> str | None:
    """What a model says of how devices' values of a buffer become one, if anything."""
    for layer in model.layers:
        own = path.removeprefix(f"{layer.name}/") if layer.name else path
        if not layer.name or own != path:
            return declared_reduction(layer, own)
    return None


def kept_rows(program: Program, rows: Collection[Var], outputs: Sequence[Any]) -> list[bool]:
    """Which outputs of a program hold single rows on their first dim.

    Args:
        program: the program.
        rows: its inputs that have a row for each example.
        outputs: some of its outputs.
    """
    held = {*rows}
    for op in program.ops:
        if op.equation is None:  # a fence: each result is an operand
            pairs = zip(op.operands, op.results, strict=True)
            held.update(result for operand, result in pairs if _is(operand, held))
        else:
            held.update(var for var in op.results if var.aval.shape and _holds(op, var, held))
    return [_is(out, held) for out in outputs]


def _holds(op: Op, result: Var, held: set[Var]) -> bool:
    name, params = op.equation.primitive.name, op.equation.params
    where = [i for i, operand in enumerate(op.operands) if _is(operand, held)]
    if not where or (name == "name" and params["name"] == AGREED):
        return False
    first, shape = where[0], result.aval.shape
    given = op.operands[first].aval.shape
    if name in ELEMENTWISE:
        return any(len(op.operands[i].aval.shape) == len(shape) for i in where)
    if name in _MOVED:
        return True
    if name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        return bool(dims) and dims[0] == 0 and shape[0] == given[0] > 1
    if name == "transpose":
        return bool(params["permutation"][0] == 0)
    if name in ("reshape", "squeeze", "expand_dims"):  # one row, or some and their positions
        return bool(shape[0] and shape[0] % given[0] == 0)
    if name == "dot_general":
        return _free_first(params["dimension_numbers"], first)
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        return first == 0 and numbers.lhs_spec[0] == numbers.out_spec[0] == 0
    axes = params.get("axes")
    return name.startswith(("reduce_", "arg")) and axes is not None and 0 not in axes


def _free_first(numbers: Any, operand: int) -> bool:
    """Whether the first dim of an operand of a product is the first one of the result."""
    contracted, batch = numbers
    if batch[operand]:
        return bool(batch[operand][0] == 0)
    return operand == 0 and 0 not in contracted[0]


def _is(value: Any, held: set[Var]) -> bool:
    return isinstance(value, Var) and value in held
