"""How many bytes of gathered weights a compiled module holds at once.

A gathered value is alive from the start of its all-gather until its last reader, however it is
handed on: through tuples, casts of layout, fences and the variables of loops. Values that a kernel
computes from it are not gathered values.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fzero.preflight.hlo.counts import Module
from fzero.preflight.hlo.module import Computation, HloInstruction


# What hands a value on without computing: the same bytes under another name.
_SAME = ("bitcast", "opt-barrier", "all-gather-done", "get-tuple-element", "tuple", "copy-done")
# Gathers of fewer bytes (sums of squares, counters) are no weights.
_LEAST_BYTES = 4096

_Sizes = dict[int, int]
"""Bytes of gathered values by position in a tuple; a plain value has position 0."""


@dataclass(frozen=True)
class Gathered:
    """The most bytes of gathered values alive at once.

    Args:
        most_bytes: anywhere.
        in_loop_bytes: in a trip of any loop: those of a stack's layers.
    """

    most_bytes: int
    in_loop_bytes: int


def gathered(module: Module) -> Gathered:
    """The most bytes of gathered values that a scheduled module holds at once.

    Example:
        >>> text = '''HloModule m, is_scheduled=true, num_partitions=4
        ... ENTRY %main (x: f32[512,4]) -> f32[2048,4] {
        ...   %x = f32[512,4]{1,0} parameter(0)
        ...   %g = f32[2048,4]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
        ...   ROOT %n = f32[2048,4]{1,0} negate(%g)
        ... }'''
        >>> gathered(Module(text))
        Gathered(most_bytes=32768, in_loop_bytes=0)
    """
    walk = _Walk(module)
    most = walk.peak(module.entry, {})
    return Gathered(most, max(walk.in_loops, default=0))


class _Walk:
    def __init__(self, module: Module) -> None:
        self.module = module
        self._carried: dict[str, _Sizes] = {}
        self.in_loops: list[int] = []

    def peak(self, name: str, given: _Sizes) -> int:
        """Most bytes alive in a computation whose parameters (or loop variables) hold `given`."""
        comp = self.module.computations[name]
        held = self._held(comp, given)
        last = self._last_reads(comp, held)
        alive: dict[tuple[str, int], int] = {}
        most = 0
        for position, i in enumerate(comp.instructions):
            # What runs inside a loop holds what the loop is given, in place.
            most = max(most, self._inside(comp, i, held) + self._beside(i, held, alive))
            if i.opcode == "while":  # its variables take the places of what it was given
                taken = {s for s, _ in held.get(i.operands[0], {}).values()}
                alive = {s: n for s, n in alive.items() if s not in taken or last[s] > position}
            for source, size in held.get(i.name, {}).values():
                alive[source] = size
            most = max(most, sum(alive.values()))
            for source in [s for s in alive if last.get(s, -1) <= position]:
                del alive[source]
        return most

    def _beside(
        self, i: HloInstruction, held: dict[str, _Values], alive: dict[tuple[str, int], int]
    ) -> int:
        """Bytes alive that an instruction is not given."""
        given = {s for name in i.operands for s, _ in held.get(name, {}).values()}
        return sum(size for source, size in alive.items() if source not in given)

    def _held(self, comp: Computation, given: _Sizes) -> dict[str, _Values]:
        """The gathered values that each instruction's result holds, by tuple position."""
        held: dict[str, _Values] = {}
        for i in comp.instructions:
            own = self._values(comp, i, held, given)
            if own:
                held[i.name] = own
        return held

    def _values(
        self, comp: Computation, i: HloInstruction, held: dict[str, _Values], given: _Sizes
    ) -> _Values:
        kind = i.opcode
        if kind == "parameter":
            number = int(i.arguments)
            single = len(_parameters(comp)) == 1
            return {
                (at if single else 0): ((i.name, at), size)
                for at, size in given.items()
                if single or at == number
            }
        if kind in ("all-gather", "all-gather-start"):
            # Several at once give a tuple; the shape of a start holds the operands too.
            results = i.arrays[-len(i.operands) :]
            sizes = {at: a.bytes for at, a in enumerate(results) if a.bytes >= _LEAST_BYTES}
            return {at: ((i.name, at), size) for at, size in sizes.items()}
        if kind == "tuple":
            return {
                at: held[name][0] for at, name in enumerate(i.operands) if 0 in held.get(name, {})
            }
        if kind == "get-tuple-element":
            at = int(i.plain.split("index=")[1].split(",")[0])
            source = held.get(i.operands[0], {})
            return {0: source[at]} if at in source else {}
        if kind == "while":
            carried = self._loop(i, held)
            return {at: ((i.name, at), size) for at, size in carried.items()}
        if kind == "copy" and 0 in held.get(i.operands[0], {}):
            return {0: ((i.name, 0), held[i.operands[0]][0][1])}
        if kind in _SAME and i.operands:
            return dict(held.get(i.operands[0], {}))
        return {}

    def _loop(self, i: HloInstruction, held: dict[str, _Values]) -> _Sizes:
        """What the variables of a loop hold: on entry, or after any trip."""
        carried = {at: size for at, (_, size) in held.get(i.operands[0], {}).items()}
        body = self.module.computations[i.called("body")]
        known: _Sizes = {}
        while known != carried:
            known = dict(carried)
            after = self._held(body, carried).get(body.root.name, {})
            for at, (_, size) in after.items():
                carried[at] = max(size, carried.get(at, 0))
        self._carried[i.name] = carried
        return carried

    def _inside(self, comp: Computation, i: HloInstruction, held: dict[str, _Values]) -> int:
        """Most bytes alive inside an instruction that runs others, those it is given included."""
        if i.opcode == "while":
            self.in_loops.append(self.peak(i.called("body"), self._carried.get(i.name, {})))
            return self.in_loops[-1]
        if i.opcode in ("call", "conditional", "async-start"):
            names = [*(name for name, _ in self.module.runs(comp, i)), *i.branches]
            given = {
                n: held[name][0][1] for n, name in enumerate(i.operands) if 0 in held.get(name, {})
            }
            return max((self.peak(name, given) for name in names), default=0)
        return 0

    def _last_reads(
        self, comp: Computation, held: dict[str, _Values]
    ) -> dict[tuple[str, int], int]:
        """Position of the last instruction that reads each gathered value for its own use."""
        last: dict[tuple[str, int], int] = defaultdict(lambda: -1)
        for position, i in enumerate(comp.instructions):
            passes = i.opcode in _SAME and not i.is_root
            for name in i.operands:
                for source, _ in held.get(name, {}).values():
                    if not passes:
                        last[source] = position
        return last


_Values = dict[int, tuple[tuple[str, int], int]]
"""By tuple position: which gathered value (where it came from), and its bytes."""


def _parameters(comp: Computation) -> list[HloInstruction]:
    return [i for i in comp.instructions if i.opcode == "parameter"]
