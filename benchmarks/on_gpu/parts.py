"""What there is to run, in order; imports neither jax nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """A process's work.

    Args:
        name: what `--only` takes.
        kind: `check` or `figure`.
        where: `module:function` that gives its rows.
        what: in words.
        seconds: what it takes on an H200, about; of what has not run there, a guess.
        environment: further variables.
    """

    name: str
    kind: str
    where: str
    what: str
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """After so many seconds it hangs."""
        return max(120.0, 4 * self.seconds)


# Both frameworks on one GPU: neither may take all of its memory.
SHARED = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.60"}
ALONE = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
GROWING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

PARTS = (
    Part(
        "torch", "check", "checks:losses", "losses beside torch in fp32, bf16, fp16", 130, GROWING
    ),
    Part("attention", "check", "checks:attention", "cuDNN's attention against products", 190),
    Part("tiers", "check", "checks:tiers", "parked and streamed states train alike", 90),
    Part("encode", "check", "checks:encoding", "8-bit blocks: as on the CPU, but for ties", 10),
    Part("float8", "check", "narrow:products", "products in 8 bits beside the CPU's", 50),
    Part("bits", "check", "checks:deterministic", "deterministic plans: the same bits twice", 60),
    Part("memory", "check", "memory:plans", "peaks beside preflight's", 110, ALONE),
    Part("processes", "check", "checks:processes", "two processes share the GPU", 55, GROWING),
    Part("calibrate", "figure", "moves:calibration", "rates of this device", 60),
    Part("gpt2-124m", "figure", "training:gpt2_124m", "GPT-2 124M beside its peers", 120, SHARED),
    Part("llama-1b", "figure", "training:llama_1b", "Llama 1.1B beside its peers", 190, SHARED),
    Part("llama-1b-fp8", "figure", "narrow:llama_1b", "Llama 1.1B in 8 bits and bf16", 90, ALONE),
    Part("resnet-50", "figure", "training:resnet_50", "ResNet-50 beside its peers", 180, SHARED),
    Part("vit-b", "figure", "training:vit_b", "ViT-B beside its peers", 180, SHARED),
    Part("moves", "figure", "moves:moves", "12 GiB to the host and back, beside raw copies", 60),
    Part(
        "offload-4b", "figure", "disks:table_4b", "4.3B parameters parked, as reported", 90, ALONE
    ),
    Part("disk", "figure", "disks:disk", "the disk beside raw I/O; GPUDirect", 60),
    Part("host-optimizer", "figure", "moves:parked", "optimizer state on the host", 90, ALONE),
    Part("gpt2-1.5b", "figure", "training:gpt2_15b", "GPT-2 1.5B beside its peers", 140, SHARED),
    Part(
        "llama-8b-host", "figure", "moves:llama_8b", "Llama 8B, optimizer on the host", 150, ALONE
    ),
    Part("llama-8b-lora", "figure", "finetuning:lora_8b", "Llama 8B with LoRA", 180, ALONE),
    Part(
        "generate",
        "figure",
        "finetuning:generation",
        "tokens beside a loop by hand",
        60,
        SHARED,
    ),
    Part("tests", "check", "suite:tests", "the tests that need no second device", 220, GROWING),
)
