"""The text of a compiled XLA module as computations, instructions and the calls between them.

Only what counting needs: shapes, operands, attributes, who runs whom and how often, and the groups
of devices. `fzero.preflight.hlo` is the public side. jax 0.10 and 0.11 print the same grammar
on CPU and GPU; a scheduled module is printed in schedule order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fzero.errors import FzeroError


_NO_DIGITS_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<= ]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_PARENTHESES = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")
_CALLED = re.compile(r"\b(calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_BRANCHES = re.compile(
    r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%[\w.\-]+))"
)


class HloError(FzeroError, ValueError):
    """The module's text does not say what was asked."""


@dataclass(frozen=True)
class Array:
    """Element type and dims of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        if self.dtype in _NO_DIGITS_BITS:
            return self.elements * _NO_DIGITS_BITS[self.dtype] // 8
        digits = re.search(r"\d+", self.dtype)  # bf16, s4, u8, f8e4m3fn, c64
        if digits is None:
            raise HloError(f"unknown element type {self.dtype!r}")
        return -(-self.elements * int(digits[0]) // 8)


@dataclass(frozen=True)
class HloInstruction:
    """One line of a computation, cut into its parts."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions it reads."""
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments))

    @cached_property
    def plain(self) -> str:
        """Attributes without quoted strings, so that metadata cannot pass for an attribute."""
        return _QUOTED.sub("", self.attributes)

    @cached_property
    def arrays(self) -> list[Array]:
        """Arrays of its result, tuples flattened; bounded dynamic dims (`<=8`) at their bound."""
        return [
            Array(dtype, tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip()))
            for dtype, dims in _ARRAY.findall(self.shape)
        ]

    @property
    def target(self) -> str:
        """Target of a custom call, or nothing."""
        match = _TARGET.search(self.attributes)
        return match[1] if match else ""

    @property
    def op_name(self) -> str:
        """The JAX name stack it came from."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def branches(self) -> list[str]:
        """Computations of a conditional, one of which runs."""
        found = ",".join(a or b for a, b in _BRANCHES.findall(self.plain))
        return [name.strip(" %") for name in found.split(",") if name]

    def called(self, attribute: str) -> str:
        """Name of the computation under `attribute` (`body`, `calls`, ...), or nothing."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.plain)
        return match[1] if match else ""

    def ints(self, attribute: str) -> list[int]:
        """`attribute={1,2}` as numbers; empty if absent."""
        match = re.search(rf"\b{attribute}=\{{([0-9,]*)\}}", self.plain)
        return [int(i) for i in match[1].split(",") if i] if match else []


@dataclass
class Computation:
    """Instructions in printed (in a scheduled module: schedule) order."""

    name: str
    instructions: list[HloInstruction] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)

    def get(self, name: str) -> HloInstruction:
        """The instruction of that name."""
        return self.instructions[self.index[name]]

    def inputs(self, i: HloInstruction) -> list[Array]:
        """Arrays that an instruction reads."""
        return [a for name in i.operands if name in self.index for a in self.get(name).arrays]

    @property
    def root(self) -> HloInstruction:
        """The instruction whose value the computation returns."""
        return next(i for i in reversed(self.instructions) if i.is_root)


class Module:
    """Computations by name and the call graph between them."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        header = next((line for line in lines if line.startswith("HloModule")), "")
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.is_scheduled = "is_scheduled=true" in header
        self.num_devices = math.prod(int(n) for n in counts)
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation | None = None
        for line in lines:
            if line[:1] not in (" ", "\t"):
                if match := _HEADER.match(line):
                    current = self.computations[match[2]] = Computation(match[2])
                    self.entry = match[2] if match[1] else self.entry
                elif line.strip() != "":
                    current = None
            elif current is not None and (match := _INSTRUCTION.match(line)):
                end = _closing(line, match.end() - 1)
                rest = (line[match.end() : end], line[end + 1 :], bool(match[1]))
                current.index[match[2]] = len(current.instructions)
                current.instructions.append(HloInstruction(match[2], match[3], match[4], *rest))
        if not self.entry:
            raise HloError("expected the text of a module (`compiled.as_text()`), found no ENTRY")

    def runs(self, comp: Computation, i: HloInstruction) -> Iterator[tuple[str, int | None]]:
        """Computations that `i` always runs, each with how often; None if that is unknown."""
        if i.opcode == "while":
            trips = self.trip_count(comp, i)
            yield i.called("body"), trips
            yield i.called("condition"), None if trips is None else trips + 1
            return
        for attribute, names in _CALLED.findall(i.plain):
            # Elsewhere than in a call, `to_apply` is the scalar function of a reduction or a sort.
            if attribute != "to_apply" or i.opcode == "call":
                for name in re.findall(r"[\w.\-]+", names):
                    if name in self.computations:
                        yield name, 1

    def trip_count(self, comp: Computation, loop: HloInstruction) -> int | None:
        """XLA's own count where it left one, else read off a counter compared with a constant."""
        known = _TRIP_COUNT.search(loop.attributes)
        return int(known[1]) if known else _derived_trip_count(self, comp, loop)


def _closing(line: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESES.finditer(line, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise HloError(f"unbalanced parentheses in {line.strip()[:120]!r}")


# A scalar: the tuple index of a loop variable (None: no variable) plus an offset.
_Scalar = tuple[int | None, int]
_Arguments = tuple[_Scalar | None, ...] | None


def _scalar(module: Module, comp: Computation, name: str, arguments: _Arguments) -> _Scalar | None:
    """A constant, or a loop variable plus a constant; None for anything else.

    `arguments` are the values of the computation's parameters; None in the body or the condition of
    the loop, whose one parameter is the tuple of loop variables.
    """
    i = comp.get(name)
    if not re.match(r"\w+\[\]", i.shape):
        return None
    if i.opcode == "constant":
        return (None, int(i.arguments)) if re.fullmatch(r"-?\d+", i.arguments) else None
    if i.opcode == "parameter":
        position = int(i.arguments)
        return arguments[position] if arguments and position < len(arguments) else None
    if i.opcode == "get-tuple-element":
        source, index = comp.get(i.operands[0]), int(i.plain.split("index=")[1].split(",")[0])
        if source.opcode == "tuple":
            return _scalar(module, comp, source.operands[index], arguments)
        return (index, 0) if source.opcode == "parameter" and arguments is None else None
    inputs = tuple(_scalar(module, comp, n, arguments) for n in i.operands if n in comp.index)
    if i.opcode in ("copy", "bitcast", "convert", "reshape"):
        return inputs[0]
    if i.opcode in ("add", "subtract"):
        a, b = inputs
        if a is None or b is None or (b[0] is not None and (a[0] is not None or i.opcode != "add")):
            return None
        sign = 1 if i.opcode == "add" else -1
        return (b[0] if a[0] is None else a[0], a[1] + sign * b[1])
    inner = module.computations.get(i.called("calls") or i.called("to_apply"))
    return _scalar(module, inner, inner.root.name, inputs) if inner else None


def _compared(
    module: Module, comp: Computation, arguments: _Arguments
) -> tuple[str, tuple[_Scalar | None, ...]] | None:
    """Direction and sides of the comparison that a computation returns."""
    root = comp.root
    sides = tuple(_scalar(module, comp, n, arguments) for n in root.operands if n in comp.index)
    if root.opcode == "compare":
        return root.called("direction"), sides
    inner = module.computations.get(root.called("calls") or root.called("to_apply"))
    return _compared(module, inner, sides) if inner else None


def _derived_trip_count(module: Module, comp: Computation, loop: HloInstruction) -> int | None:
    """Trips of `for (i = start; i < stop; i += step)`; None if the loop is anything else."""
    body = module.computations[loop.called("body")]
    compared = _compared(module, module.computations[loop.called("condition")], None)
    init = comp.get(loop.operands[0])
    if compared is None or init.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    direction, (left, right) = compared
    if left is not None and left[0] is None:  # `stop > i` is `i < stop`
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left is None or right is None or left[0] is None or right[0] is not None:
        return None
    start = _scalar(module, comp, init.operands[left[0]], ())
    after = _scalar(module, body, body.root.operands[left[0]], None)
    if start is None or start[0] is not None or after is None or after[0] != left[0]:
        return None
    stop, step = right[1] + {"LE": 1, "GE": -1}.get(direction, 0), after[1]
    if (direction in ("LT", "LE") and step > 0) or (direction in ("GT", "GE") and step < 0):
        return max(0, -((start[1] + left[1] - stop) // step))
    return None


# --- replica groups -------------------------------------------------------------------------------

Groups = tuple[tuple[int, ...], ...]
IntArray = npt.NDArray[np.int_]
_IOTA = re.compile(r"\breplica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"\breplica_groups=mesh\[([^\]]*?)(?:,\s*device_ids=\((.*?)\))?\](?:\s*\{([^}]*)\})?"
)


def replica_groups(attributes: str) -> Groups:
    """Groups in any of XLA's three spellings; nothing where one group of all is meant."""
    if iota := _IOTA.search(attributes):
        return _rows(_iota(iota[1]))
    if mesh := _MESH.search(attributes):
        return _mesh_groups(mesh[1], mesh[2] or "", mesh[3])
    return braces(attributes, "replica_groups")


def braces(attributes: str, attribute: str) -> Groups:
    """`{{0,1},{2,3}}`."""
    match = re.search(rf"\b{attribute}=\{{((?:\{{[\d,\s]*\}},?\s*)*)\}}", attributes)
    groups = re.findall(r"\{([\d,\s]*)\}", match[1]) if match else []
    return tuple(tuple(int(i) for i in group.split(",") if i.strip()) for group in groups)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _iota(text: str) -> IntArray:
    """`[2,4]<=[4,2]T(1,0)`: count up over the right shape, transpose, take the left shape."""
    shape, _, source = text.partition("<=")
    dims, _, order = source.partition("T")
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(_numbers(shape))


def _mesh_groups(axes: str, device_ids: str, over: str | None) -> Groups:
    """`mesh['x'=2,'y'=8, device_ids=(...)] {'x','y':(2)4}`: one group per coordinate of the rest.

    `'y':(2)4` is the part of size 4 of axis y that has 2 major to it. Without braces: all axes.
    """
    sizes = {name: int(n) for name, n in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    named = re.findall(
        r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", over if over is not None else ""
    )
    wanted = {
        name: (int(pre or 1), int(pre or 1) * int(size or sizes[name])) for name, pre, size in named
    } or {name: (1, n) for name, n in sizes.items()}
    dims: list[int] = []
    group_dims: dict[str, int] = {}
    for name, n in sizes.items():
        low, high = wanted.get(name, (1, 1))
        group_dims[name] = len(dims) + 1
        dims += [low, high // low, n // high]
    if "T" in device_ids or "[" in device_ids:
        shape, ids_of = f"[{math.prod(dims)}]", device_ids.rpartition("<=")[2]
        ids = _iota(f"{shape}<={ids_of}")
    else:
        ids = np.array(_numbers(device_ids)) if device_ids else np.arange(math.prod(dims))
    inner = [group_dims[name] for name in wanted]
    outer = [d for d in range(len(dims)) if d not in inner]
    size = math.prod(dims[d] for d in inner)
    return _rows(ids.reshape(dims).transpose(outer + inner).reshape(-1, size))


def _rows(groups: IntArray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in groups)
