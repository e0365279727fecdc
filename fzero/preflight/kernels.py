"""What the kernels of a compiled module cost: FLOPs, bytes of device memory, seconds at best.

Read from the text of the scheduled module. A kernel reads its operands and writes its results once;
where a fusion takes a slice of an operand, or updates a slice of it in place, only the slice counts
(a loop over stacked layers would otherwise seem to read all of them each time).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fzero.preflight.hlo.counts import Matmuls, Module, launches
from fzero.preflight.hlo.module import Computation, HloInstruction
from fzero.preflight.rates import Rates


_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATE = "dynamic-update-slice"
_ATTENTION = "__cudnn$fmha"
# Of a `dot`, of a Triton kernel's, and in a cuBLASLt call's configuration.
_EXACT = re.compile(r"operand_precision\W+highest", re.I)


@dataclass(frozen=True)
class Work:
    """Work of kernels, one device; seconds are of one kernel after the other.

    Each kernel takes the longer of its FLOPs and its bytes.

    Args:
        flops: of matmuls.
        bytes: of device memory read and written.
        best_seconds: at the peaks.
        likely_seconds: at the shares of them that programs reach.
        product_seconds: of them, of matmuls other than fused attention.
        attention_seconds: of them, of fused attention.
    """

    flops: int = 0
    bytes: int = 0
    best_seconds: float = 0.0
    likely_seconds: float = 0.0
    product_seconds: float = 0.0
    attention_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.best_seconds + other.best_seconds,
            self.likely_seconds + other.likely_seconds,
            self.product_seconds + other.product_seconds,
            self.attention_seconds + other.attention_seconds,
        )

    def times(self, count: int) -> Work:
        """The work done so often."""
        return Work(
            count * self.flops,
            count * self.bytes,
            count * self.best_seconds,
            count * self.likely_seconds,
            count * self.product_seconds,
            count * self.attention_seconds,
        )


class Kernels:
    """Counts the work of a module's instructions, loops multiplied out.

    Args:
        module: a compiled module.
        rates: of the device.
        precision: what matmuls compute in.
    """

    def __init__(self, module: Module, rates: Rates, precision: str) -> None:
        self.module, self.matmuls, self.rates = module, Matmuls(module), rates
        self.flops_per_s = rates.flops_of("bf16" if precision == "fp8" else precision)
        # Of products whose operands have 8 bits.
        self.flops8_per_s = rates.flops_of("fp8") if precision == "fp8" else self.flops_per_s
        self._known: dict[str, Work] = {}

    def total(self) -> Work:
        """Work of one call of the module."""
        return self.computation(self.module.entry)

    def computation(self, name: str) -> Work:
        """Work of one execution of a computation."""
        if name not in self._known:
            comp = self.module.computations[name]
            self._known[name] = sum((self.at(comp, i) for i in comp.instructions), Work())
        return self._known[name]

    def at(self, comp: Computation, i: HloInstruction) -> Work:
        """Work of one execution of an instruction; of a conditional, its costliest branch."""
        if not launches(i):
            return Work()
        if i.branches:
            return max(map(self.computation, i.branches), key=lambda work: work.best_seconds)
        if i.opcode in ("while", "call", "async-start"):
            # A loop of unknown length counts once; `hlo.matmul_flops` names it as unknown.
            inside = [self.computation(n).times(t or 1) for n, t in self.module.runs(comp, i)]
            return sum(inside, Work())
        flops = self.matmuls.flops_at(comp, i).flops
        moved = self._bytes(comp, i)
        rates, seen = self.rates, seen_share(comp, i)
        share = rates.matmul_share(flops) if seen is None else rates.attention_share
        peak = self.flops_per_s
        if flops and any(a.dtype.startswith("f8") for a in comp.inputs(i)):
            peak = self.flops8_per_s
            share *= rates.fp8_share * (rates.fp8_exact_share if self._exact(i) else 1.0)
        computing = flops * (1.0 if seen is None else seen) / peak
        moving = moved / rates.memory_bytes_per_s
        likely = max(computing / share, moving / rates.memory_share, rates.launch_s)
        products = likely if flops and seen is None else 0.0
        attention = 0.0 if seen is None else likely
        return Work(flops, moved, max(computing, moving), likely, products, attention)

    def _exact(self, i: HloInstruction) -> bool:
        """Whether a product's sums are asked for in float32's bits."""
        inside = (
            self.module.computations[i.called("calls")].instructions if i.opcode == "fusion" else ()
        )
        return any(_EXACT.search(one.attributes) for one in (i, *inside))

    def _bytes(self, comp: Computation, i: HloInstruction) -> int:
        results = sum(a.bytes for a in i.arrays)
        if i.opcode in _SLICES:
            return 2 * results
        if i.opcode == _UPDATE:
            return 2 * sum(a.bytes for a in comp.get(i.operands[1]).arrays)
        if i.opcode not in ("fusion", "fusion-start"):  # from jax 0.11 on some are asynchronous
            return results + sum(a.bytes for a in comp.inputs(i))
        inner = self.module.computations[i.called("calls")]
        return _read(inner) + _written(inner)


def seen_share(comp: Computation, i: HloInstruction) -> float | None:
    """The part of its products that a fused attention computes; `None` for any other kernel.

    What a causal mask or a window hides is left out, block by block: half of them, or a window's
    width of each row.
    """
    if _ATTENTION not in i.target:
        return None
    config = i.attributes.replace("\\", "")
    keys = comp.inputs(i)[1].dims[1]
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', config)
    width = min(int(window[1]), keys) if window and int(window[1]) else keys
    causal = re.search(r'"mask_type":\s*"[A-Z_]*CAUSAL', config) is not None
    return width / keys * (1 - width / (2 * keys)) if causal else width / keys


def _read(fused: Computation) -> int:
    """Bytes that a fusion reads of its parameters."""
    readers: dict[str, list[HloInstruction]] = {}
    for i in fused.instructions:
        for name in i.operands:
            readers.setdefault(name, []).append(i)
    moved = 0
    for parameter in fused.instructions:
        if parameter.opcode != "parameter":
            continue
        users = _through_bitcasts(readers, parameter.name)
        sizes = [_bytes_needed(user, name) for name, user in users]
        whole = sum(a.bytes for a in parameter.arrays)
        found = [size for size in sizes if size is not None]
        moved += min(whole, sum(found)) if len(found) == len(sizes) else whole
    return moved


def _through_bitcasts(
    readers: dict[str, list[HloInstruction]], name: str
) -> list[tuple[str, HloInstruction]]:
    """Who reads a value, with the name that they know it by."""
    found: list[tuple[str, HloInstruction]] = []
    for user in readers.get(name, []):
        if user.opcode == "bitcast":
            found += _through_bitcasts(readers, user.name)
        else:
            found.append((name, user))
    return found


def _bytes_needed(user: HloInstruction, name: str) -> int | None:
    """Bytes that an instruction needs of a value; None if all of it."""
    if user.opcode in _SLICES and user.operands[0] == name:
        return sum(a.bytes for a in user.arrays)
    if user.opcode == _UPDATE and user.operands[0] == name and user.operands[1] != name:
        return 0  # updated in place
    return None


def _written(fused: Computation) -> int:
    """Bytes that a fusion writes."""
    root = fused.root
    results = [fused.get(name) for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(_result_bytes(fused, result) for result in results)


def _result_bytes(fused: Computation, result: HloInstruction) -> int:
    while result.opcode == "bitcast" and result.operands:
        result = fused.get(result.operands[0])
    if result.opcode == _UPDATE:
        return sum(a.bytes for a in fused.get(result.operands[1]).arrays)
    return sum(a.bytes for a in result.arrays)
