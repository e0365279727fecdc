"""Every example runs as its header says and prints what it claims."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import quick


EXAMPLES = Path(__file__).parent.parent / "examples"
# The others compute for longer than they compile, or compare the bits of stages.
QUICK = (
    "flax_digits.py", "gpt2_pipeline.py", "quickstart.py", "torch_cnn_digits.py",
    "rlhf_offload.py", "offload_4b.py", "lightning_validate_then_fit.py", "zeropp.py",
    "tensor_parallel.py", "tensor_parallel_hf.py", "long_context.py", "mixture_of_experts.py",
)  # fmt: skip
# What needs a GPU can do the same in miniature.
ARGUMENTS = {"offload_4b.py": ["--tiny"]}

# A line of each example's output, with the figures that say that it did its work.
EXPECTED = {
    "alexnet_pipeline.py": r"losses of 2 and 4 stages are the same to the bit",
    "gpt2_pipeline.py": r"largest difference between the loss curves: .* \(bound 1e-05\)",
    "offload_4b.py": r"and on: loss 5\.\d+ after 2 steps",
    "tensor_parallel.py": r"largest difference between 8 devices and one: .* \(bound 1e-05\)",
    "tensor_parallel_hf.py": r"largest difference between 8 devices and one: .* \(bound 1e-05\)",
    "long_context.py": r"largest difference between 8 devices and one: .* \(bound 1e-05\)",
    "mixture_of_experts.py": r"largest difference between 8 devices and one: .* \(bound 1e-05\)",
    "rlhf_offload.py": r"rewards rise .*; the same losses, bit for bit, as without offload",
    "lightning_validate_then_fit.py": r"all 8 losses are those of fit alone, bit for bit",
    "quickstart.py": r"loss 0\.\d+ -> 0\.0\d+ after 50 steps of ZeRO-3",
    "flax_digits.py": r"held-out accuracy 0\.9[5-9]\d after 84 steps",
    "torch_cnn_digits.py": r"held-out accuracy: JAX (0\.9[7-9]\d\d), PyTorch \1",
    "gpt2_stdlib.py": r"validation loss 5\.\d+ -> [23]\.\d+",
    "zeropp.py": r"largest difference that 8 bits make to the loss: .* \(bound 2%\)",
    "validate_then_fit.py": r"ok   fit\(2 steps\) twice is fit\(4 steps\).*Lightning #5007\)",
}


def run_example(name):
    # From another folder: an example may not rely on where it is started.
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, [])],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=os.path.sep,
        env={**os.environ} if name in QUICK else quick.environment_of_users(),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name):
    out = run_example(name)
    assert re.search(rf"^{EXPECTED[name]}$", out, re.MULTILINE), out
    if name == "validate_then_fit.py":
        lines = out.splitlines()
        assert len(lines) == 7
        assert all(line.startswith("ok   ") for line in lines), out


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_header_gives_the_command(name):
    source = (EXAMPLES / name).read_text()
    assert f"\n    python examples/{name}\n" in source.split('"""')[1]
