"""What one process compiles and writes, for `tests/test_same_programs.py`: run as a script.

    python one_run.py KIND FOLDER

JAX_DUMP_IR_TO says where the programs go; the checkpoint's own files go to FOLDER.
"""

from __future__ import annotations

import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz
from support import tiny


def native() -> tuple[Any, Any, Any]:
    """A chain with dropout, tied weights and frozen leaves, in stages of a pipeline."""
    model = tiny.chain(4, tiny.dropped_block)
    model = fz.Sequential(model.layers[:-1], tiny.token_loss, frozen={"embed/up", "head/gain"})
    options = {"pipe": 2, "data": 2, "zero": 3, "microbatches": 2, "schedule": "zb_h1"}
    return model, tiny.plan(**options, clip_norm=1.0), tiny.tokens(8)


def converted() -> tuple[Any, Any, Any]:
    """Blocks of PyTorch with dropout, rolled, under ZeRO-3."""
    import torch

    import torch_bridge as tb

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.norm, self.drop = torch.nn.LayerNorm(8), torch.nn.Dropout(0.5)

        def forward(self, x: Any, scale: Any) -> Any:
            return x + self.drop(self.two(torch.tanh(self.one(self.norm(x))))) * scale

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
            self.scale = torch.nn.Parameter(torch.ones(8))
            self.head = torch.nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            scale = self.scale * 2
            sine, cosine, cube = torch.sin(x), torch.cos(x), x**3  # past the blocks
            for block in self.blocks:
                x = block(x, scale)
            return self.head(x * sine + cosine * cube)

    torch.manual_seed(0)
    module = tb.convert(Net(), torch.zeros(2, 8))
    model = module.model(lambda forward, batch: jnp.mean(forward(batch["x"]) ** 2))
    x = np.ones((8, 8), np.float32)
    return model, tiny.plan(zero=3, data=2, microbatches=2, precision="bf16"), {"x": x}


if __name__ == "__main__":
    model, plan, batch = {"native": native, "converted": converted}[sys.argv[1]]()
    tx = optax.adamw(1e-2)
    state = fz.init(model, tx, plan)
    state, _ = fz.train_step(model, tx, plan)(state, batch)
    fz.eval_step(model, plan)(state, batch)
    fz.save(sys.argv[2], state, plan, asynchronous=False)
