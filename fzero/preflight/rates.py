"""How fast a device computes, reads its memory and talks, and how much memory it has."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from fzero.errors import PreflightError
from fzero.preflight.topology import Topology


# Fields that are numbers by something.
_KEYED = {"flops_per_s": "precision", "matmul_shares": "side"}
_WORDS = ("source", "kind")
_MAY_BE_ZERO = ("reserve_bytes", "collective_latency_s", "launch_s")

# What a process takes besides XLA's arrays: the CUDA context (about 0.5 GB), NCCL's channels (about
# 1 GB for 8 peers) and what a best-fit allocator cannot use between blocks.
RESERVE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Rates:
    """Rates of one device: peaks from data sheets, and shares of them that programs reach.

    Args:
        flops_per_s: dense matmul peak by precision (`fp32` is TF32, what jax multiplies float32
            in on these GPUs).
        memory_bytes_per_s: device memory, reads and writes together.
        host_link_bytes_per_s: to other devices of the host, in one direction.
        network_bytes_per_s: of the device's own network card, in one direction.
        memory_bytes: device memory.
        reserve_bytes: of it, not for arrays.
        collective_latency_s: what a collective takes at least.
        launch_s: what a kernel takes at least.
        pinned_bytes_per_s: between the device and pinned memory of its host, in one direction.
        disk_bytes_per_s: between that memory and the host's drive, this device's part of it.
        flops_share: part of the matmul peak that large matmuls reach; depends on the GPU and on the
            watts that it may draw.
        matmul_shares: the same by size, as `fzero calibrate` measures it: of square matmuls, by
            their side. One of another shape is taken as the square one of as many FLOPs; between
            two sizes, and beyond, the share is interpolated. Empty: `flops_share` for all.
        fp8_share: products of 8-bit operands have a peak twice as high; of the share of it that the
            above says, the part that they reach.
        fp8_exact_share: of that, the part left where sums are exact, as a backward pass asks for.
        attention_share: part of that peak that fused attention reaches, of the products that it
            computes: what a causal mask or a window hides, it leaves out.
        memory_share: part of the memory's rate that elementwise kernels reach.
        link_share: part of the links' rate that large collectives reach.
        source: where the numbers are from.
        kind: the device that they are of, as topologies name it; empty where nobody said.
    """

    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    host_link_bytes_per_s: float
    network_bytes_per_s: float
    memory_bytes: int
    reserve_bytes: int = RESERVE_BYTES
    collective_latency_s: float = 20e-6
    launch_s: float = 2e-6
    pinned_bytes_per_s: float = 25e9
    disk_bytes_per_s: float = 2e9
    flops_share: float = 0.6
    matmul_shares: dict[str, float] = field(default_factory=dict)
    fp8_share: float = 0.88
    fp8_exact_share: float = 0.87
    attention_share: float = 0.55
    memory_share: float = 0.85
    link_share: float = 0.8
    source: str = "given by the caller"
    kind: str = ""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            wrong = _wrong(one.name, getattr(self, one.name))
            if wrong:
                raise PreflightError(f"rates: {wrong}")

    def flops_of(self, precision: str) -> float:
        """Matmul peak of a precision, in FLOP/s.

        Raises:
            PreflightError: it is not among `flops_per_s`.
        """
        if precision not in self.flops_per_s:
            raise PreflightError(
                f"rates: flops_per_s has {sorted(self.flops_per_s)}, the plan computes in"
                f" {precision!r}; add it"
            )
        return self.flops_per_s[precision]

    def matmul_share(self, flops: float) -> float:
        """Part of the matmul peak that one matmul of so many FLOPs reaches.

        Example:
            >>> from fzero.preflight.topology import parse
            >>> own = {"matmul_shares": {"1024": 0.3, "4096": 0.7}}
            >>> rates = default_rates(parse("h200:8")).updated(own, "ours")
            >>> [round(rates.matmul_share(2 * side**3), 2) for side in (512, 2048, 8192)]
            [0.3, 0.5, 0.7]
        """
        if not self.matmul_shares or not flops:
            return self.flops_share
        known = sorted((math.log2(float(s)), share) for s, share in self.matmul_shares.items())
        side = math.log2(flops / 2) / 3
        for (low, below), (high, above) in itertools.pairwise(known):
            if low <= side <= high:
                return below + (above - below) * (side - low) / (high - low)
        return known[0][1] if side < known[0][0] else known[-1][1]

    def to_json(self) -> dict[str, Any]:
        """The rates as a JSON-able dict."""
        return dataclasses.asdict(self)

    def updated(self, given: Any, source: str) -> Rates:
        """These rates, with some of one's own.

        Args:
            given: values by field, as JSON has them; of `flops_per_s` the precisions that differ.
            source: where they are from.

        Raises:
            PreflightError: it is no dict, a field is unknown, a value is none that a device has, or
                they are of another kind of device.

        Example:
            >>> from fzero.preflight.topology import parse
            >>> default_rates(parse("h100:8")).updated({"flops_share": 0.5}, "ours").flops_share
            0.5
        """
        known = [one.name for one in dataclasses.fields(self)]
        if not isinstance(given, dict):
            raise PreflightError(f"rates: {source}: expected an object of {known}, got {given!r}")
        for name, value in given.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise PreflightError(
                    f"rates: {source}: unknown field {name!r}{hint} Expected some of {known}"
                )
            wrong = _wrong(name, value)
            if wrong:
                raise PreflightError(f"rates: {source}: {wrong}")
        kind = given.get("kind") or self.kind
        if self.kind:
            _require_kind(kind, self.kind, f"rates: {source}")
        names = ", ".join(name for name in given if name != "kind")
        changes = {"source": f"{self.source}; {names} from {source}", **given, "kind": kind}
        if "flops_per_s" in given:
            changes["flops_per_s"] = self.flops_per_s | given["flops_per_s"]
        return dataclasses.replace(self, **changes)


def rates_of(topology: Topology, given: Rates | None) -> Rates:
    """The rates that a topology is asked about with: those given, or its own.

    Raises:
        PreflightError: those given are of another kind of device.
    """
    if given is None:
        return default_rates(topology)
    if given.kind:
        _require_kind(given.kind, topology.kind, f"rates: {given.source}")
    return given


def _require_kind(kind: str, asked: str, where: str) -> None:
    if kind != asked:
        raise PreflightError(
            f"{where}: these are of {kind!r}, the topology is of {asked!r}: expected what `fzero"
            f" calibrate` measured there; ask about {kind!r}, or leave `kind` empty if they shall"
            " count all the same"
        )


def _wrong(name: str, value: Any) -> str | None:
    """What a field cannot be, with what was expected; `None` where it can."""
    if name in _WORDS:
        return None if isinstance(value, str) else f"{name}={value!r}: expected text"
    if name not in _KEYED:
        return _wrong_number(name, name, value)
    if not isinstance(value, dict):
        return f"{name}={value!r}: expected numbers by {_KEYED[name]}"
    for key, number in value.items():
        if name == "matmul_shares" and not _is_side(key):
            return f"{name}: {key!r}: expected a matmul's side in elements, such as '1024'"
        wrong = _wrong_number(name, f"{name}[{key!r}]", number)
        if wrong:
            return wrong
    return None


def _wrong_number(name: str, where: str, value: Any) -> str | None:
    if not isinstance(value, Real) or isinstance(value, bool):
        return f"{where}={value!r}: expected a number"
    number = float(value)
    if name.endswith(("_share", "_shares")):
        right, expected = 0 < number <= 1, "a share, above 0 and at most 1"
    else:
        zero = name in _MAY_BE_ZERO
        right = math.isfinite(number) and (number > 0 or (number == 0 and zero))
        expected = "a positive number or 0" if zero else "a positive number"
    return None if right else f"{where}={value!r}: expected {expected}"


def _is_side(key: Any) -> bool:
    return isinstance(key, str) and key.isdecimal() and int(key) > 0


def default_rates(topology: Topology) -> Rates:
    """Rates of a known device.

    Example:
        >>> from fzero.preflight.topology import parse
        >>> default_rates(parse("h200:8")).memory_bytes_per_s
        4800000000000

    Source: NVIDIA's data sheets of A100 (2021), H100 SXM (2023), H200 SXM (2024), HGX B200 (2024):
    dense Tensor Core peaks, NVLink (half of the bidirectional rate), memory. Network: one card of
    200 Gbit/s per A100, of 400 Gbit/s per H100, H200 and B200, as in DGX machines; PCIe at what
    copies to pinned memory reach. `flops_share`: from published training runs (docs/published.md):
    0.64 for A100, from torchtitan's Llama 3 8B on 64; 0.58 for Hoppers of 700 W, between MaxText's
    Llama 2 7B on 8 and its 70B on 64. (Hoppers limited to 500 W: 0.43.) B200s are assumed to be
    like A100s. `fp8_share`: of the best products measured on an H100, 1402.6 TFLOP/s in 8 bits and
    794.5 in bf16, and 3432.5 and 1745 on a B200 (Bekman, Machine Learning Engineering, "Maximum
    Achievable Matmul FLOPS"). `fp8_exact_share`: without fast accumulation an H100's products take
    1.1 to 1.2 times as long (torchao, issue 2377); a B200's are assumed not to. `attention_share`:
    of FlashAttention 2 on A100s and 3 on H100s, causal, width 128, forwards and back
    (arXiv:2307.08691, arXiv:2407.08608).
    """
    return dataclasses.replace(_RATES[topology.kind], kind=topology.kind)


# Of the dense peak, and that of Hoppers at 700 W; see `default_rates`.
_SHARE, _HOPPER_SHARE = 0.64, 0.58


def _gpu(
    bf16_tflops: float, memory_tb_per_s: float, nvlink_gb_per_s: float, network_gbit_per_s: float,
    pcie_gb_per_s: float, memory_gib: int, sheet: str, flops_share: float = _SHARE,
) -> Rates:  # fmt: skip
    peak = bf16_tflops * 1e12
    # From Hopper on, 8-bit operands double it; an A100 has no such products.
    in_8_bits = {} if "A100" in sheet else {"fp8": 2 * peak}
    return Rates(
        flops_per_s={"bf16": peak, "fp16": peak, "fp32": peak / 2, **in_8_bits},
        memory_bytes_per_s=round(memory_tb_per_s * 1e12),
        host_link_bytes_per_s=nvlink_gb_per_s * 1e9,
        network_bytes_per_s=network_gbit_per_s * 1e9 / 8,
        memory_bytes=memory_gib * 2**30,
        pinned_bytes_per_s=pcie_gb_per_s * 1e9,
        flops_share=flops_share,
        source=f"{sheet}: dense peaks; NVLink and network in one direction",
    )  # fmt: skip


_RATES = {
    "a100-40": _gpu(312, 1.555, 300, 200, 25, 40, "NVIDIA A100 40GB SXM data sheet"),
    "a100-80": _gpu(312, 2.039, 300, 200, 25, 80, "NVIDIA A100 80GB SXM data sheet"),
    "h100": _gpu(989.4, 3.35, 450, 400, 50, 80, "NVIDIA H100 SXM data sheet", _HOPPER_SHARE),
    "h200": _gpu(989.4, 4.8, 450, 400, 50, 141, "NVIDIA H200 SXM data sheet", _HOPPER_SHARE),
    "b200": dataclasses.replace(
        _gpu(2250, 8.0, 900, 400, 50, 180, "NVIDIA HGX B200 data sheet"),
        # Blackwell's tensor cores sum products of 8 bits in float32 either way.
        fp8_share=0.98,
        fp8_exact_share=1.0,
    ),
    # Virtual devices share the machine's cores and its memory, so no number is right: these only
    # let a plan be read. Give rates of your own (or --measure) for more.
    "cpu": Rates(
        flops_per_s={"bf16": 1e10, "fp16": 1e10, "fp8": 1e10, "fp32": 5e10},
        memory_bytes_per_s=1e10,
        host_link_bytes_per_s=2e9,
        network_bytes_per_s=1e9,
        memory_bytes=8 * 2**30,
        reserve_bytes=0,
        source="order of magnitude of one core of a server CPU; measure or give your own",
    ),
}
