"""Where the figures in sentences of the pages come from: files in `benchmarks/results`, or no run.

`SAID` has sentences with their figures computed from those files: a file that changed makes the
sentence wrong, and `tests/docs/test_figures.py` says what it should be. `GIVEN` has what was not
measured: bounds that a test holds, settings, arithmetic, and what others have published.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import float8_curves, large_models, published
from benchmarks.on_gpu import table as gpu_table
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import parse


ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "benchmarks/results", ROOT / "docs"
GIB = 2**30


def read(name: str) -> Any:
    """What a benchmark wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name: str, *keys: str) -> dict[Any, Any]:
    """The rows that a benchmark wrote, by some of their fields."""
    return {tuple(row[key] for key in keys): row for row in read(name)["rows"]}


pages, divided, runs = read("pages"), read("divided"), read("published")
small = large_models.LlamaSize(vocab=32000, hidden=14336)  # Mixtral 8x7B with one expert
experts_8x7b = 3 * small.d * small.hidden * small.layers
dense_8x7b = large_models.num_params(small) - experts_8x7b
ring = divided["long-ring"][0]["over"]["context"]
# Keys and values of a device's 16,384 positions, 8 heads of 128 features, in 16 bits.
ring_mib = 2 * 16384 * 8 * 128 * 2 / 2**20
mixtral = {tuple(row["choice"].values()): row for row in divided["mixtral-8x22b"]}
speed = {
    key: row["ratio"]["by hand"] for key, row in rows_of("bridge_speed", "model", "what").items()
}
forwards = [speed[f"resnet-{images}", "forward"] for images in (8, 32)]
steps = [ratio for (_, what), ratio in speed.items() if what == "train step"]
torchax = {
    key: row["ratio"]["torchax"] for key, row in rows_of("bridge_torchax", "model", "what").items()
}
depth = rows_of("bridge_depth", "layers")
logits_time, logits_124m, logits_gpu, logits_memory = (
    read(f"logits_{name}") for name in ("time", "time_124m", "gpu", "memory")
)
gathers, curves = read("gathers")["normal"], read("float8_curves")["losses"]
one_mesh = read("one_mesh")
hosts = {row["what"].strip(): row for row in read("hosts")["rows"]}
sleeping = [
    [one / row["simulated_s"] for one in (statistics.median(row["seconds"]), min(row["seconds"]))]
    for row in hosts.values()
    if "simulated_s" in row
]
generated = rows_of("generate", "rows")
by_hand = rows_of("step", "zero")
peers = {name: row["tok_per_cpu_s"] for (name,), row in rows_of("peers", "name").items()}
piped = {name: 1e3 * row["step_s_median"]
         for (name,), row in rows_of("pipeline_peers", "name").items()}  # fmt: skip
pipeline = rows_of("pipeline", "schedule", "ranks")
offload = read("offload")["rows"]
moves = offload["moves"]
disk = {case["number"]: case for case in read("offload_disk")["cases"]}
overhead = read("host_overhead")


def percent(share: float) -> float:
    return 100 * share


def adds(choice: tuple[int, int]) -> float:
    return mixtral[choice]["over"]["data"]["adds_s"]


def last_hundred(name: str) -> float:
    """How much a precision's mean loss is above bf16's at the end, in percent."""
    return percent(statistics.fmean(float8_curves.differences(curves, name)[-100:]))


def share(topology: str) -> float:
    return default_rates(parse(topology)).flops_share


def serial(name: str) -> float:
    """A run without overlap, beside what was published, in percent."""
    return percent(abs(runs[name]["serial_s"] / published.RUNS[name].seconds - 1))


def of_pairs(found: dict[str, Any]) -> list[float]:
    """The ratio of seconds with its interval, and that of CPU seconds."""
    wall = found["seconds"]
    return [wall["ratio"], *wall["interval"], found["CPU seconds"]["ratio"]]


def of_disk(number: int) -> list[Any]:
    """Of a number of arrays: GB/s and shares of bare threads and tensorstore, written and read."""
    found: list[Any] = []
    for what in ("write", "read"):
        rates = disk[number][what]["gb_per_s"]
        found += [rates["fzero"], disk[number][what]["of_raw"]]
        found += [rates["fzero"] / rates["tensorstore"]]
    return found


hybrid, llama_8b, gpt2 = (
    pages[name] for name in ("70B, replica=8, data=8", "Llama 8B", "GPT-2 1.5B")
)
fitted = [name for name, run in published.RUNS.items() if run.fitted]
ratios = [
    row["likely_s"] / published.RUNS[name].seconds
    for name, row in runs.items()
    if name not in fitted
]
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
           "eleven", "twelve", "thirteen", "fourteen", "fifteen")  # fmt: skip
bubbles = [piped[f"fzero_{ours}_2"] / piped[f"tp2_{theirs}"]
           for ours, theirs in (("gpipe", "gpipe"), ("1f1b", "1f1b"), ("interleaved", "int1f1b"),
                                ("zb_v", "zbv"))]  # fmt: skip

# Page, a sentence with its figures left out, the figures.
SAID: list[tuple[Any, ...]] = [
    ("docs/limits.md", "({:.2f} on A100, {:.2f} on Hoppers of 700 W)",
     share("a100-80:8"), share("h100:8")),
    ("docs/limits.md", "{:.1f} % (GPT-2 1.5B) and {:.1f} % (Llama 8B) of the bytes have no matmul",
     percent(gpt2["without_matmul"]), percent(llama_8b["without_matmul"])),
    ("docs/limits.md", "fits ({:.0f} of {:.0f} GiB), but its scheduler then saves memory and"
     " exposes {:.0f} % of the bytes", hybrid["peak_bytes"] / GIB, hybrid["memory_bytes"] / GIB,
     percent(hybrid["exposed"])),
    ("docs/limits.md", "takes {:.2f} to {:.2f} times that of one written by hand (train steps at"
     " most {:.2f}; `benchmarks/README.md`)", min(forwards), max(forwards), max(steps)),
    ("docs/axes.md", "Of Mixtral 8x7B's {:.1f} billion parameters {:.1f} are dense",
     (dense_8x7b + 8 * experts_8x7b) / 1e9, dense_8x7b / 1e9),
    ("docs/axes.md", "Of all that a ring sends here {:.0f} % are beside kernels, of what passes"
     " between neighbours {:.0f} %; where heads are exchanged {:.0f} % of all",
     *(percent(one["hidden"]) for one in
       (ring, ring["kinds"]["collective-permute"], divided["longer"][0]["over"]["context"]))),
    ("docs/axes.md", "A round sends {:.0f} MiB forward ({:.0f} back, with gradients in float32),"
     " which NVLink carries in {:.1f} ({:.1f}) ms, beside {:.1f} ({:.1f}) TFLOP of attention",
     ring_mib, 3 * ring_mib, *(1e3 * n * ring_mib * 2**20 / 450e9 for n in (1, 3)),
     *(n * 4 * 2 * 8192**2 * 4096 / 1e12 for n in (1, 2.5))),
    ("docs/axes.md", "There it is {:.0f} % of what passes between neighbours",
     percent(divided["two-layers-ring"][0]["over"]["context"]["kinds"]["collective-permute"]
             ["hidden"])),
    ("docs/axes.md", "wait longer for it ({:.1f} s and {:.1f}", adds((2, 1)), adds((4, 1))),
    ("docs/axes.md", "12 bytes a parameter, {:.0f} GiB,", 12 * large_models.num_params() / GIB),
    ("docs/finetuning.md", "a peak of {:.2f} GiB instead of {:.2f} GiB",
     *(logits_gpu[name]["peak_bytes"] / GIB for name in ("without", "with"))),
    ("docs/finetuning.md", "takes {:.2f} of the time that it takes with its logits",
     logits_124m["seconds"]["ratio"]),
    ("docs/finetuning.md", "a smaller one {:.2f}", logits_time["seconds"]["ratio"]),
    ("docs/generate.md", "decodes in {:.2f} (one row) and {:.2f} (eight rows) of the time",
     generated[1,]["ratio"], generated[8,]["ratio"]),
    ("docs/design.md", "{:.2f} GB come to each device", one_mesh["arrives_bytes"] / 1e9),
    ("docs/design.md", "{:.2f} GB leave it, {:.0f} ms or {:.1f} % of the step",
     one_mesh["leaves_bytes"] / 1e9, 1e3 * one_mesh["seconds"], 100 * one_mesh["of_step"]),
    ("docs/design.md", "for {:.2f} GiB less on the first",
     (one_mesh["state_bytes_at_home"] - one_mesh["state_bytes_spread"]) / 2**30),
    ("docs/design.md", "Of 16 weights of 2048 x 2048, for 8 H200s, at most {:.0f} are whole",
     pages["16 weights"]["gathered_bytes"] / (4 * 2048**2)),
    ("docs/published.md", "`flops_share`: {:.2f} for A100 (its first row), {:.2f} for Hoppers of"
     " 700 W (between what MaxText's 7B and 70B want), {:.2f} for those of 500 W",
     share("a100-80:8"), share("h100:8"), published.GRAND_TETON["flops_share"]),
    ("docs/published.md", "The other {} rows are predictions: {} are within 10 %",
     NUMBERS[len(ratios)], NUMBERS[sum(abs(ratio - 1) <= 0.1 for ratio in ratios)]),
    ("docs/published.md", "*Llama 3.1 8B, FP8 on H200* ({:.2f}, {:.2f})", *ratios[-2:]),
    ("docs/published.md", "beside collectives would take {:.2f} and {:.2f} of the published time",
     *(runs[f"trainy-8b-{n}-h200-fp8"]["serial_s"] / runs[f"trainy-8b-{n}-h200-fp8"]["published_s"]
       for n in (32, 64))),
    ("docs/published.md", "in 8 bits reach {:.2f} of the share",
     default_rates(parse("h100:8")).fp8_share),
    ("docs/published.md", "*MaxText's 7B on several hosts* ({:.2f}, {:.2f})",
     *(runs[name]["likely_s"] / runs[name]["published_s"]
       for name in ("maxtext-7b-2-hosts", "maxtext-7b-16-hosts"))),
    ("docs/published.md", "add {:.2f} s and {:.2f} s where nothing is computed beside them",
     *(runs[name]["serial_s"] - runs[name]["likely_s"]
       for name in ("maxtext-7b-2-hosts", "maxtext-7b-16-hosts"))),
    ("docs/published.md", "within {:.0f} % and {:.0f} % of MaxText's",
     serial("maxtext-7b-2-hosts"), serial("maxtext-7b-16-hosts")),
    ("docs/stages.md", "| bf16 | 2 | {:.2f} % | 0 | 0 |", percent(gathers["bf16"]["weight"])),
    ("docs/stages.md", "| `int8`, blocks of 256 | {:.3f} | {:.2f} % | {:.2f} % | {:.2f} % |",
     gathers["int8 blocks"]["bytes"],
     *(percent(gathers["int8 blocks"][name]) for name in ("weight", "bf16", "fp8"))),
    ("docs/stages.md", "| 8-bit floats, one scale | 1 | {:.2f} % | {:.2f} % | 0 |",
     *(percent(gathers["float8, one scale"][name]) for name in ("weight", "bf16"))),
    ("docs/stages.md", "the mean loss is {:.1f} % above bf16's with `tensorwise`, {:.1f} % below"
     " with `rowwise`", last_hundred("tensorwise"), -last_hundred("rowwise")),
    ("docs/stages.md", "above bf16's: about {:.0f} % at first, below half a percent at the end",
     percent(statistics.fmean(float8_curves.differences(curves, "tensorwise")[:100]))),
    ("docs/hosts.md", "| hand-over of 1 KiB, alone | {:.2f} ms | raw socket {:.2f} ms |",
     *(1e3 * hosts["transfer of 1 KiB, and back, half of it"][name]
       for name in ("send_s", "socket_s"))),
    ("docs/hosts.md", "| hand-overs of 1 KiB in a row, each | {:.2f} ms, {:.0f} us of it the call",
     1e3 * hosts["transfer of 1 KiB, 8 in a row, each"]["send_s"],
     1e6 * hosts["the call itself"]["send_s"]),
    *(("docs/hosts.md", f"| each MiB more, {words} | {{:.1f}} ms | raw socket {{:.1f}} ms |",
       *(1e3 * hosts[f"of it for each MiB ({name})"][field] for field in ("send_s", "socket_s")))
      for words, name in (("alone", "alone"), ("in a row", "streamed"))),
    ("docs/hosts.md", "four ranks in two processes | {:.2f} | of the same step in one | | the same"
     " in four | {:.2f} |",
     *(hosts[f"step of a pipeline of four ranks, {number} processes"]["cpu_seconds"]
       / hosts["step of a pipeline of four ranks, 1 process"]["cpu_seconds"]
       for number in (2, 4))),
    ("docs/hosts.md", "the end of all others | {:.1f} s of two, {:.1f} s of four | {:.1f} s at"
     " most |", *(statistics.median(hosts[f"SIGKILL of one of {number} to the end of the others"]
                                   ["seconds"]) for number in (2, 4)),
     max(hosts["SIGKILL of one of 2 to the end of the others"]["seconds"])),
    ("docs/hosts.md", "the end of the other | {:.1f} s | `limit_s=6` |",
     statistics.median(hosts["SIGSTOP of one of 2 to the end of the others"]["seconds"])),
    ("docs/hosts.md", "took {:.2f} (`1f1b`), {:.2f} (`zb_h1`) and {:.2f} (`interleaved`, `zb_v`) of"
     " their simulation", *(median for median, _ in sleeping[:3])),
    ("docs/hosts.md", "and {:.2f} to {:.2f} at best", min(best for _, best in sleeping),
     max(best for _, best in sleeping)),
]  # fmt: skip
BENCH = "benchmarks/README.md"
SAID += [
    (BENCH, "ratios {:.3f}, {:.3f}, {:.3f} and {:.3f} for stages 0 to 3",
     *(by_hand[zero,]["ratio"] for zero in range(4))),
    (BENCH, "PyTorch eager {:.0f}, DDP {:.0f}, FSDP2 {:.0f}, DeepSpeed ZeRO 1 to"
     " 3 {:.0f}, {:.0f}, {:.0f};",
     *(peers[name]
       for name in ("plain_2thr", "ddp", "fsdp2", "ds_zero1", "ds_zero2", "ds_zero3"))),
    *((BENCH, words, *(pick(peers[f"fzero_zero{zero}_{devices}"]
                                             for zero in range(4)) for pick in (min, max)))
      for devices, words in ((1, "fzero {:.0f} to {:.0f} on one device"),
                             (2, "{:.0f} to {:.0f} on two"))),
    (BENCH, "within {:.1e} of PyTorch's",
     max(row["largest_loss_difference"] for row in read("peers")["rows"])),
    (BENCH, "one large leaf {:.2f} of a raw copy;",
     moves["one leaf"]["of_raw_out"]),
    (BENCH, "of 64 KiB {:.2f} and {:.2f}; {} bytes stay",
     moves["64 KiB leaves"]["of_raw_out"], moves["64 KiB leaves"]["of_raw_back"],
     offload["residue"]["bytes_left"]),
    (BENCH, "takes {:.3f} of the same step", offload["step"]["host"]["of_device"]),
    (BENCH, "with 2 ranks 1F1B takes {:.2f} and ZB-H1 {:.2f} of the simulated time,"
     " with 4 on the two cores {:.2f} and {:.2f}, with 8 {:.2f} and {:.2f}, where the limit is the"
     " cores ({:.2f} to {:.2f} of it)",
     *(pipeline[schedule, ranks]["ratio"] for ranks in (2, 4, 8) for schedule in ("1f1b", "zb_h1")),
     *(pick(row["of_limit"] for (_, ranks), row in pipeline.items() if ranks > 2)
       for pick in (min, max))),
    (BENCH, "{:.0f} us per action", read("pipeline")["dispatch"]["us_per_action"]),
    (BENCH, "1F1B holds {:.2f} of GPipe's", pipeline["1f1b", 2]["of_gpipe"]),
    (BENCH, "| torch.distributed.pipelining | {:.0f} | {:.0f} | {:.0f} | {:.0f} |"
     " interleaved zero bubble {:.0f} |",
     *(piped[f"tp2_{name}"] for name in ("gpipe", "1f1b", "int1f1b", "zbv", "intzb"))),
    (BENCH, "| DeepSpeed's PipelineEngine | | {:.0f} | | | |", piped["ds_pipe2"]),
    (BENCH, "| fzero | {:.0f} | {:.0f} | {:.0f} | {:.0f} | ZB-H1 {:.0f} |",
     *(piped[f"fzero_{name}_2"] for name in ("gpipe", "1f1b", "interleaved", "zb_v", "zb_h1"))),
    (BENCH, "fzero takes {:.1f} to {:.1f} of PyTorch's time", min(bubbles),
     max(bubbles)),
    *((BENCH, f"| {words} | write | {{:.2f}} | {{:.2f}} | {{:.1f}} | | | read |"
       " {:.2f} | {:.2f} | {:.1f} |", *of_disk(number))
      for words, number in (("1 x 256 MiB", 1), ("64 x 4 MiB", 64), ("4096 x 64 KiB", 4096))),
    (BENCH, "48 layers convert in {:.1f} s, of which torch.export takes {:.1f} s; 4"
     " in {:.1f} s", depth[48,]["convert"], depth[48,]["of_it_torch"], depth[4,]["convert"]),
    (BENCH, "in the time of 4, {:.1f} s; unrolled in {:.1f} s and {:.1f} s, after"
     " {:.1f} s and {:.1f} s of tracing", depth[48,]["compile_rolled"],
     *(depth[layers,][f"{what}_unrolled"]
       for what in ("compile", "trace") for layers in (48, 4))),
    (BENCH, "GPT-2 {:.3f} and {:.3f}, Llama {:.3f} and {:.3f}, ResNet with 8 images"
     " {:.3f} and {:.3f}, with 32 {:.3f} and {:.3f}.",
     *(speed[model, what] for model in ("gpt2", "llama", "resnet-8", "resnet-32")
       for what in ("forward", "train step"))),
    (BENCH, "take {:.2f} (GPT-2) and {:.2f} (Llama) of PyTorch's time, and {:.2f} and"
     " {:.2f} of torch.compile's",
     *(rows_of("bridge_speed", "model", "what")[model, "train step"]["ratio"][other]
       for other in ("torch", "torch.compile") for model in ("gpt2", "llama"))),
    (BENCH, "the forward passes take {:.2f}, {:.2f} and {:.2f} of its time for"
     " GPT-2, Llama and ResNet, the train steps {:.2f}, {:.2f} and {:.2f}.",
     *(torchax[model, what] for what in ("forward", "train step")
       for model in ("gpt2", "llama", "resnet"))),
    (BENCH, "logits takes {:.3f} of the time of the one with them (95 %: {:.3f} to {:.3f}), and"
     " {:.3f} of its CPU seconds", *of_pairs(logits_124m)),
    (BENCH, "{:.3f} ({:.3f} to {:.3f}), and {:.3f} of the CPU seconds", *of_pairs(logits_time)),
    (BENCH, "{:.2f} GiB with logits and {:.2f} GiB without in float32, {:.2f} GiB and {:.2f} GiB in"
     " bfloat16", *(logits_memory[dtype][which] / GIB for dtype in ("fp32", "bf16")
                    for which in ("with", "without"))),
    (BENCH, "likely {:.1f} ms and {:.1f} ms with and without, at a peak of {:.2f}"
     " GiB and {:.2f} GiB", *(1e3 * logits_gpu[name]["likely_seconds"] for name in
                              ("with", "without")),
     *(logits_gpu[name]["peak_bytes"] / GIB for name in ("with", "without"))),
    (BENCH, "{} tiny leaves", overhead["leaves"]),
    (BENCH, "{:.1f} ms and {:.1f} ms, a ratio of {:.2f}.",
     1e3 * overhead["fzero_s"], 1e3 * overhead["bare_s"], overhead["ratio"]),
]  # fmt: skip

# Page: what was not measured. Bounds stand beside the test that holds them, settings beside what
# they set, arithmetic with its formula.
on_gpu = read("gpu")
first = [on_gpu["before"][name] for name in gpu_table.FIGURES]
measured = [on_gpu["parts"][name]["rows"]["step"] for name in gpu_table.FIGURES]
foretold = [
    [row["predicted"][key] / row["seconds_a_step"]["fzero"] for row in measured]
    for key in ("likely_with_rates_s", "likely_s")
]
SAID += [
    ("docs/gpu.md", "took {:.1f} and {:.1f} ms, at peaks of {:.1f} and {:.1f} GiB",
     *(1e3 * row["fzero_s"] for row in first), *(row["peak_bytes"] / GIB for row in first)),
    ("docs/gpu.md", "({:.2f} and {:.2f} of it)", *foretold[0]),
    ("docs/gpu.md", "it is {:.2f} and {:.2f}.", *foretold[1]),
]  # fmt: skip
GIVEN: dict[str, tuple[str, ...]] = {
    "docs/limits.md": ("up to 64 MiB each",),
    "README.md": ("Python >= 3.11",),
    "docs/gpu.md": (
        "(jax 0.11.2, torch 2.11.0, 2026-11-27;",
        "The goals are 1.0 of the step by hand and 1.1 of torch.compile", "under torch 2.11;",
        "moves of 12 GiB",
    ),
    "benchmarks/README.md": (
        "a 95 % bootstrap interval; the goal is at most 1.03.",
        "quiet, 256 MiB)", "leaves of 4 MiB are faster", "requests of 4 MiB in flight",
        "The goal is 0.9 of the bare", "with a 95 % interval of 15 rounds",
        "The goal by hand, at most 1.03,",
    ),
    "docs/axes.md": (
        "Losses agree to 1e-5, parameters after a step to 2e-5 of their size (tests:",
        "compiles quickly, holds all of them within 2e-5)",
        "within 1e-6 of one device's", "rounds of 1.5 times an even share",
        "take 1.25 times its even share", "scheduler counts with 80 % of a GPU's memory",
        "agree with one device's to 1e-5, gradients to 1e-4 (converted: parameters after a step to"
        " 2e-5)",
    ),
    "docs/design.md": ("arXiv:2306.10209",),
    "docs/finetuning.md": (
        "within 1e-5 (`tests/torch_bridge/test_lora.py`)",
        "4 + 32/64 = 4.5 bits an element, `nf4-double` 4 + (8 + 64/256)/64 = 4.13, `int8` 8.5",
        "within 1 % (bf16) and 5 % (int8) of float32's (`tests/optimizers/test_small_moments.py`)",
    ),
    "docs/hosts.md": (
        "plan.clip_norm: 1.0 in process 0; 2.0 in process 1", "waits 20 minutes for the",
        "actions of 50 ms that hand on 1 MiB",
    ),
    "docs/published.md": (
        "96 GB at 2.4 TB/s, limited to 500 W", "from 492 to 375 TFLOP/s", "(100 Gbit/s a GPU)",
        "1402.6 of 1979 TFLOP/s beside 794.5 of 989 on an H100", "take 1.1 to 1.2 times as long",
    ),
    "docs/stages.md": ("hold the table to 1 % and 2 %", "takes 1.1 to 1.2 times as long"),
    "docs/tutorials/hugging_face.md": ("--lr 4e-3",),
}  # fmt: skip
