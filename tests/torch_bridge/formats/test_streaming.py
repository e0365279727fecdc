"""How much memory a restored checkpoint takes while it is read, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[3]
CODE = """
import gc, sys, tempfile, threading, time
import tests.conftest
import jax, torch
import fzero as fz, torch_bridge as tb
from safetensors.torch import save_file


def anonymous():
    # Pages of a mapped file are the kernel's to take back; they are not counted.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def written(*shapes):
    folder = tempfile.mkdtemp(dir=sys.argv[1])
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(*shape, bias=False) for shape in shapes))
    named = enumerate(module.named_parameters())
    tensors = {name: torch.full(value.shape, 1.0 + i) for i, (name, value) in named}
    save_file(tensors, folder + "/model.safetensors")
    return folder, tb.convert(module, torch.zeros(2, shapes[0][0], device="meta"))


def restored(case):
    state = tb.restore(*case, None, fz.Plan(zero=3, data=8))
    return jax.block_until_ready(state)


restored(written((8, 8)))  # what jax and torch load once
case, highest, done = written((4096, 8192), (8192, 4096)), 0, False
gc.collect()


def watch():
    global highest
    while not done:
        highest = max(highest, anonymous())
        time.sleep(0.0005)


before, thread = anonymous(), threading.Thread(target=watch)
thread.start()
state = restored(case)
done = True
thread.join()
assert [float(leaf[0, 0]) for leaf in jax.tree.leaves(state.params)] == [1.0, 2.0]
print("grown:", highest - before)
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_no_more_than_shards_beside_the_state(tmp_path: Path) -> None:
    """256 MiB in two leaves, whose shards are of 16 MiB. Read leaf by leaf it took 384 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.partition("grown: ")[2]) / 1024
    # One shard is being read and one on its way; the rest is the allocators'.
    assert 250 < grown < 256 + 3 * 16
