"""Whether loss and metrics are sums over rows, as they have to be where devices share these out.

Each device computes the loss of its own rows of a microbatch, and a step adds these up. A loss that
compares rows with each other, or that is no sum over them (a ratio of sums, a root of one), is
another number there than on one device. So the loss is traced once more, with a number of rows by
which dims of rows are known, and its values are followed. Where rows go ways that are not known
here (loops, sorting, slices, shifts), nothing is said; nor where statistics of rows come back to
rows, as in a batch norm, which is per device as anywhere.
"""

from __future__ import annotations

import contextvars
import math
import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fzero.errors
from fzero.batch import Inputs
from fzero.compat import set_within
from fzero.errors import warn
from fzero.exchange.rows import AGREED
from fzero.pieces import chain_loss
from fzero.programs.jaxprs import ELEMENTWISE, Op, Program, Var, needed, run_ops
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.buffers import has_mean
from fzero.sharding.initial import initial_shapes, memo, tracing_context
from fzero.step.row_counts import Growth
from fzero.step.row_decays import warn_of_decays
from fzero.step.row_kept import kept_rows, warn_of_averages
from fzero.step.row_traces import row_numbers, traced_with_rows
from fzero.tree import PyTree, is_plain, is_traced, leaf_keys, shapes_of


class Kind(IntEnum):
    """What a value is made of; of several operands the last of these decides."""

    FREE = 0  # nothing of rows, or the same on all devices
    ROWS = 1  # each row of its own row
    SUM = 2  # sums over rows
    UNKNOWN = 3
    OTHER = 4  # of rows together, and no sum over them
    PAIRS = 5  # of each row with each other


# What of sums over rows is a sum over rows; so is a product or a quotient with what is free, and
# what is chosen by whether a sum is finite: of finite ones it is always the same.
_LINEAR = frozenset(
    """
    add add_any broadcast_in_dim concatenate convert_element_type copy cumsum dynamic_slice
    expand_dims gather imag is_finite mul name neg optimization_barrier pad real reduce_precision
    reduce_sum reshape rev select_n sharding_constraint slice squeeze stack stop_gradient sub
    transpose
    """.split()  # noqa: SIM905
)
_SUMS = frozenset(("reduce_sum", "dot_general"))
_LARGEST = frozenset(("reduce_max", "reduce_min"))
_EXTREMES = _LARGEST | {"reduce_prod", "reduce_and", "reduce_or"}
# Of two sums no sum comes of these; of one only if the other operand is free.
_PRODUCTS = frozenset(("mul", "dot_general"))


# Whether a caller has looked at the loss itself.
_LOOKED_AT: contextvars.ContextVar[bool] = contextvars.ContextVar("looked at", default=False)


# The batch that a step runs with, where it is at hand.
_BATCH: contextvars.ContextVar[PyTree] = contextvars.ContextVar("batch", default=None)


def with_batch(batch: PyTree) -> AbstractContextManager[None]:
    """While this is open a step runs, and may be traced, with a batch of a user's."""
    return set_within(_BATCH, batch)


def looked_at(done: bool) -> AbstractContextManager[None]:
    """While this is open steps do not look at losses, as somebody has who knows more of them."""
    return set_within(_LOOKED_AT, done)


def warn_of_rows_together(
    blue: Blueprint, batch: Inputs, train: bool, microbatches: int = 1
) -> None:
    """Warns, once of a model and a kind of batch, of loss and metrics that are no sums over rows,
    and of buffers that are no means over them.

    Args:
        blue: the blueprint of the step.
        batch: its batch: arrays or shapes.
        train: whether the step trains.
        microbatches: that its rows come in.
    """
    devices = blue.group.row_shares
    losses = not _LOOKED_AT.get()
    # Where losses are looked at, so are buffers. For these alone a trace is worth it where they are
    # tables, of examples or codes: one dim is a running statistic nearly always.
    tables = [x for x in jax.tree.leaves(blue.buffers) if len(x.shape) > 1 and has_mean(x)]
    buffers = train and devices > 1 and bool(tables)
    if devices * microbatches == 1 or not (losses or buffers):
        return
    leaves, structure = jax.tree.flatten(batch.at(None))
    kinds = tuple((x.shape[1:], str(x.dtype)) for x in leaves)
    in_parts = microbatches > 1
    key = ("row sums", structure, kinds, train, in_parts, losses, tracing_context())
    known = memo(blue.model)
    if key not in known:
        known[key] = True
        over = {"devices": devices, "microbatches": microbatches}
        shared = " and ".join(f"{num} {name}" for name, num in over.items() if num > 1)
        problems = _problems(blue, batch, train, devices * microbatches, in_parts)
        for name, problem in problems if losses else ():
            what = f"metric {name!r}" if name else "loss"
            too = "" if name else ", and so is its gradient"
            warn(
                f"{what}: it {problem}. Rows are shared out over {shared}, and each computes with"
                f" its own: it is another number than that of the whole batch on one device{too}."
                f" {_OF_DEVICES if not in_parts else _IN_PARTS}"
            )


_SUMS_HELP = "sums over rows, fz.Mean(total, count), of which a step makes the quotient"
_OF_DEVICES = f"Have the rows of all first (fz.all_rows), or give {_SUMS_HELP}"
_IN_PARTS = (
    f"Give {_SUMS_HELP}; what compares rows wants microbatches=1 (no microbatch has another's"
    " rows, and fz.all_rows those of all devices)"
)


def _problems(
    blue: Blueprint, batch: Inputs, train: bool, shares: int, in_parts: bool
) -> list[tuple[str, str]]:
    """By the names of metrics (`""`: the loss), what of them is no sum over rows, in words.

    Args:
        blue: the blueprint of the step.
        batch: its batch.
        train: whether the step trains.
        shares: into how many equal ones rows are shared out.
        in_parts: whether rows come in microbatches: then what all devices have is of one of them.
    """
    row_shapes, shared = jax.tree.leaves(batch.rows), jax.tree.leaves(batch.shared)
    shapes = initial_shapes(blue.model), shapes_of(batch.shared)
    rows, of_all = row_numbers(shapes, batch.rows)
    every = None if in_parts else of_all
    traced = _traced(blue, batch, train, rows, every)
    if isinstance(traced, Exception):
        return _of_a_share_alone(blue, batch, train, shares)
    program, names = traced
    outputs = program.outputs[: len(names)]
    follow, kinds = _followed(program, rows, set(), in_parts)
    # What all shares divide by alike are sums; another reason may lie behind one that is none.
    while alike := {
        id(op)
        for op in map(follow.blamed.get, filter(_is_var, outputs))
        if op is not None
        and op.equation.primitive.name == "div"
        and _count_alike(blue, train, shares, program, op, rows)
    }:
        follow, kinds = _followed(program, rows, alike | follow.alike, in_parts)
    found: dict[str, str] = {}
    for name, out in zip(names, outputs, strict=True):
        kind = kinds.get(out, Kind.FREE) if isinstance(out, Var) else Kind.FREE
        if kind < Kind.OTHER or name in found:
            continue
        op = follow.blamed[out]
        does = op.equation.primitive.name
        what = "compares rows with each other" if kind is Kind.PAIRS else "is no sum over rows"
        same = ", which is the same only where all count equally many" if does == "div" else ""
        found[name] = f"{what} ({does}{_line(op)}){same}"
    others = {*program.inputs} - {*program.inputs[len(row_shapes) :][: len(shared)]}
    growth = Growth(program, rows, dict.fromkeys(others, 0))
    # A number that follows from how many rows there are (`0.1 * len(x)`) may be the count already.
    again = partial(_traced, blue, batch, train, of_all, None if in_parts else rows)
    told = partial(_has_numbers_of_rows, program, growth, again)
    for name, problem in _miscounted(program, names, kinds, growth, told).items():
        found.setdefault(name, problem)
    _look_at_buffers(blue, batch, train, traced, rows, growth)
    return list(found.items())


def _of_a_share_alone(
    blue: Blueprint, batch: Inputs, train: bool, shares: int
) -> list[tuple[str, str]]:
    """What can be computed of a share's rows, and not of all: labels (B,) beside (B, classes), say.

    With as many rows as there are classes these are one label for each class, without an error.
    (Kernels and reshapes that are written for one number of rows are taken to mean a share's.)
    """
    every = jax.tree.leaves(batch.rows)[0].shape[0]
    share = every // shares
    whole = _traced(blue, batch, train, every, every)
    if not isinstance(whole, Exception):
        _look_at_buffers(blue, batch, train, whole)
        return []
    if "broadcast" not in str(whole) or isinstance(
        _traced(blue, batch, train, share, every), Exception
    ):
        return []
    said = f"{type(whole).__name__}: {str(whole).strip().partition(chr(10))[0]}"
    return [("", f"takes the {share} rows of one share, and cannot take all {every} ({said})")]


def _look_at_buffers(
    blue: Blueprint, batch: Inputs, train: bool, traced: tuple[Program, list[str]],
    num_rows: int = 0, growth: Growth | None = None,
) -> None:  # fmt: skip
    """Warns of float buffers that are averaged and are no means, and of sums that decay.

    Args:
        blue: the blueprint of the step.
        batch: its batch.
        train: whether the step trains.
        traced: the loss, and what it gives before its new buffers.
        num_rows: with how many rows, where `growth` is given.
        growth: how values grow with the number of rows, where that is known.
    """
    if not train or blue.group.row_shares == 1:
        return
    program, names = traced
    new, rows = program.outputs[len(names) :], program.inputs[: len(jax.tree.leaves(batch.rows))]
    notes = ["keeps" if kept else "" for kept in kept_rows(program, rows, new)]
    if growth is not None:
        follow, kinds = _followed(program, num_rows, set(), False)  # those of all are alike
        # (What is made of the rows of all grows with those of a trace that has no others.)
        told = any(map(_agrees, program.ops))
        for i, out in enumerate(new):
            kind = kinds.get(out, Kind.FREE) if _is_var(out) else Kind.UNKNOWN
            if growth(out) == 1 and (kind is Kind.SUM or (kind is Kind.FREE and not told)):
                notes[i] = "adds up"
            elif kind is Kind.OTHER and follow.blamed[out].equation.primitive.name in _LARGEST:
                notes[i] = "has the largest or smallest of"
    warn_of_averages(blue.model, notes)
    old = program.inputs[-2 - len(new) : -2]  # before the key and the step
    warn_of_decays(blue.model, program, rows, old, new)


def _is_var(value: Any) -> bool:
    return isinstance(value, Var)


def _followed(
    program: Program, rows: int, alike: set[int], in_parts: bool
) -> tuple[_Follow, dict[Any, Kind]]:
    follow = _Follow(rows, alike, in_parts)
    env = {var: Kind.ROWS if follow.has(var) else Kind.FREE for var in program.inputs}
    return follow, follow.run(program, env)


def _miscounted(
    program: Program, names: Sequence[str], kinds: Mapping[Any, Kind], growth: Growth,
    counted: Callable[[], bool],
) -> dict[str, str]:  # fmt: skip
    """By names, what is a sum over rows but counts as a mean, or the other way round; in words.

    Args:
        program: the loss and metrics.
        names: their names.
        kinds: what they are made of.
        growth: how they grow with the number of rows.
        counted: tells whether some number in it is made of that number.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        total, *count = (out for of, out in zip(names, program.outputs, strict=False) if of == name)
        if isinstance(total, Var) and kinds.get(total, Kind.FREE) is Kind.SUM:
            powers = growth(total), growth(count[0]) if count else 0
            if powers == (1, 0):
                found[name] = "is a sum over rows, of which a mean over devices is taken"
            elif powers == (1, 1) and (op := growth.mixed(total)) and not counted():
                where = f"{op.equation.primitive.name}{_line(op)}"
                found[name] = (
                    f"adds to a sum over rows what is none ({where}), which counts once for each"
                    " share: multiply it by the count"
                )
            elif powers == (0, 1):
                found[name] = "is a mean over rows, and is divided by their number once more"
    return found


def _has_numbers_of_rows(
    program: Program, growth: Growth, again: Callable[[], tuple[Program, list[str]] | Exception]
) -> bool:
    """Whether numbers in a program are others with other rows, as a part of these is.

    Args:
        program: the program.
        growth: knows the number of rows, and its multiples.
        again: traces it with other rows.
    """
    other = again()
    if isinstance(other, Exception) or _names(other[0]) != _names(program):
        return True
    pairs = (
        (a, b)
        for one, two in zip(program.ops, other[0].ops, strict=True)
        for a, b in zip(one.operands, two.operands, strict=True)
        if not isinstance(a, Var) and np.ndim(getattr(a, "val", a)) == 0
    )
    return any(growth(a) == 0 and getattr(a, "val", a) != getattr(b, "val", b) for a, b in pairs)


def _traced(
    blue: Blueprint, batch: Inputs, train: bool, rows: int, every: int | None
) -> tuple[Program, list[str]] | Exception:
    """Loss and metrics as a program of so many rows, and what it gives; or why it takes others."""

    def made(chain: Any, **about: Any) -> Any:
        loss = chain_loss(chain, **about)

        def total(*args: Any, step: Any) -> tuple[dict[str, Any], PyTree]:
            out, buffers, metrics = loss(*args, train, step)
            return {"": out, **metrics}, buffers

        return total

    traced = traced_with_rows(blue, batch, rows, every, made)
    if isinstance(traced, Exception):
        return traced
    return traced[0], [keys[0] for keys in leaf_keys(traced[1][0])]


def _count_alike(
    blue: Blueprint, train: bool, shares: int, program: Program, op: Op, num_rows: int
) -> bool:
    """Whether all shares of the batch at hand are divided by the same: labels, say, that all count.

    Args:
        blue: the blueprint.
        train: whether the step trains.
        shares: into how many equal ones rows are shared out.
        program: the loss.
        op: its operation that divides.
        num_rows: with how many rows it was traced.
    """
    given = _BATCH.get()
    if given is None or jax.process_count() > 1 or is_traced(jax.tree.leaves(given)):
        return False
    batch = Inputs.of(given)
    size = jax.tree.leaves(batch.rows)[0].shape[0] // shares
    here, divides = program, op
    if size > 1:
        traced = _traced(blue, batch, train, size, size)
        if isinstance(traced, Exception) or _names(traced[0]) != _names(program):
            return False
        here = traced[0]
        divides = next(b for a, b in zip(program.ops, here.ops, strict=True) if a is op)
    divisor = divides.operands[1]
    ops = [here.ops[i] for i in sorted(needed(here.ops, [divisor]))]
    read = {var for one in ops for var in one.reads()}
    own = dict(zip(here.inputs, jax.tree.leaves(batch.at(None)), strict=False))
    drawn = {var for var, leaf in own.items() if not is_plain(leaf)}
    if read & ({*here.inputs} - {*own} | drawn):
        return False  # by something computed of parameters, or drawn
    whole = {var: np.asarray(own[var]) for var in read & {*own}}
    with_rows = {*here.inputs[: len(jax.tree.leaves(batch.rows))]}
    # A loss of one row is often another program; of that row again and again it is not.
    times = 1 if size > 1 else num_rows

    def of(share: int) -> float:
        env = dict(here.consts)
        for var, leaf in whole.items():
            if var in with_rows:
                leaf = leaf[share * size : (share + 1) * size].repeat(times, 0)
            env[var] = jnp.asarray(leaf, var.aval.dtype)
        run_ops(ops, env)
        return float(env[divisor])

    with jax.ensure_compile_time_eval():
        return len({of(share) for share in range(shares)}) == 1


def _names(program: Program) -> list[str]:
    return ["" if op.equation is None else op.equation.primitive.name for op in program.ops]


class _Follow:
    """Works out what the values of a program are made of.

    Args:
        rows: how many rows there are: a prime number that no other dim is a multiple of.
        alike: quotients (`id` of the operation) by what is the same for each share of the rows.
        in_parts: whether what all devices have is of one microbatch alone.

    Attributes:
        blamed: for values that are no sums over rows, the operation that made them so.
    """

    def __init__(self, rows: int, alike: set[int], in_parts: bool) -> None:
        self.rows, self.alike, self.in_parts = rows, alike, in_parts
        self.blamed: dict[Any, Op] = {}

    def has(self, value: Var, times: int = 1) -> bool:
        """Whether a value has a dim of rows, or two."""
        size = math.prod(value.aval.shape)
        return size > 0 and size % self.rows**times == 0

    def run(self, program: Program, env: dict[Any, Kind]) -> dict[Any, Kind]:
        """The kind of each value, given those of the inputs."""
        for op in program.ops:
            operands = [x for x in op.operands if isinstance(x, Var)]
            kinds = [env.get(x, Kind.FREE) for x in operands]
            for index, result in enumerate(op.results):
                if op.equation is None:  # a fence: each result is an operand
                    behind = op.operands[index]
                    kind = env.get(behind, Kind.FREE) if isinstance(behind, Var) else Kind.FREE
                else:
                    kind = self._kind(op, kinds, result)
                env[result] = kind
                if kind >= Kind.OTHER:
                    before = [x for x, k in zip(operands, kinds, strict=True) if k is kind]
                    self.blamed[result] = self.blamed[before[0]] if before else op
        return env

    def _kind(self, op: Op, kinds: Sequence[Kind], result: Var) -> Kind:
        name, has = op.equation.primitive.name, self.has(result)
        worst = max(kinds, default=Kind.FREE)
        if worst is Kind.FREE or (_agrees(op) and not self.in_parts):
            return Kind.FREE
        if self.has(result, 2) and kinds.count(Kind.ROWS) > 1:
            return Kind.PAIRS
        if worst is Kind.PAIRS or (worst is Kind.ROWS and has):
            return worst
        if worst is Kind.ROWS:
            if name in _SUMS:
                return Kind.SUM
            return Kind.OTHER if name in _EXTREMES else Kind.UNKNOWN
        if has and Kind.ROWS in kinds:  # statistics of rows come back to rows
            return Kind.ROWS
        if Kind.UNKNOWN in kinds and worst is not Kind.OTHER:
            return Kind.UNKNOWN
        if id(op) in self.alike:
            return Kind.SUM
        return worst if worst is Kind.OTHER else _of_sums(op, kinds)


def _agrees(op: Op) -> bool:
    """Whether an operation names what is the same on all devices."""
    named = op.equation is not None and op.equation.primitive.name == "name"
    return named and op.equation.params["name"] == AGREED


def _of_sums(op: Op, kinds: Sequence[Kind]) -> Kind:
    """The kind of what an operation makes of sums over rows, and of what is free."""
    name = op.equation.primitive.name
    if name in _PRODUCTS:
        return Kind.SUM if kinds.count(Kind.SUM) == 1 else Kind.OTHER
    if name == "div":
        fixed = not isinstance(op.operands[1], Var) or kinds[-1] is Kind.FREE
        return Kind.SUM if fixed else Kind.OTHER
    if name in _LINEAR:
        return Kind.SUM
    return Kind.OTHER if name in ELEMENTWISE | _EXTREMES else Kind.UNKNOWN


def _line(op: Op) -> str:
    """Where an operation was written, outside of packages: ` in FILE:LINE`."""
    found = getattr(op.equation.source_info, "traceback", None)
    frames = [] if found is None else traceback.extract_tb(found.as_python_traceback())
    own = os.path.dirname(fzero.errors.__file__), sysconfig.get_path("stdlib")
    packages = {"site-packages", "dist-packages", "torch_bridge"}
    for frame in reversed(frames):
        elsewhere = packages.isdisjoint(frame.filename.split(os.sep))
        if elsewhere and not frame.filename.startswith(own):
            return f" in {os.path.basename(frame.filename)}:{frame.lineno}"
    return ""
