"""Models and the two trainers that every part compares: converted by fzero, and torch itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import bridge
import jax
import numpy as np
import optax
import torch
import transformers

import fzero as fz
import torch_bridge as tb


LEARNING_RATE = 1e-3
DECAY = 1e-4
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2(batch: int, seq: int, **sizes: int) -> bridge.Case:
    """A GPT-2 of transformers on random tokens."""
    config = transformers.GPT2Config(
        n_positions=seq, bos_token_id=0, eos_token_id=0, **NO_DROPOUT, **sizes
    )
    return bridge._language(transformers.GPT2LMHeadModel(config), "gpt2", batch, seq)


def llama(batch: int, seq: int, **sizes: int) -> bridge.Case:
    """A Llama of transformers, its head not tied to its table."""
    config = transformers.LlamaConfig(max_position_embeddings=seq, **sizes)
    return bridge._language(transformers.LlamaForCausalLM(config), "llama", batch, seq)


def images(module: torch.nn.Module, hand: str, batch: int, size: int) -> bridge.Case:
    """An image classifier of transformers on random images."""
    case = bridge.resnet(1)
    count = module.config.num_labels
    pixels = {"images": torch.randn(batch, 3, size, size)}
    by_hand = bridge.by_hand
    return bridge.Case(
        module, pixels | {"labels": torch.randint(0, count, (batch,))},
        case.torch_loss, case.jax_loss,
        getattr(by_hand, f"{hand}_params"), getattr(by_hand, f"{hand}_loss"),
    )  # fmt: skip


def tiny(name: str) -> bridge.Case:
    """The smallest model of a kind that has everything that the kind has."""
    if name == "gpt2":
        return gpt2(4, 32, n_layer=2, n_embd=64, n_head=2, vocab_size=128)
    if name == "llama":
        return llama(4, 32, num_hidden_layers=2, hidden_size=64, intermediate_size=128,
                     num_attention_heads=2, num_key_value_heads=1, vocab_size=128)  # fmt: skip
    if name == "vit":
        config = transformers.ViTConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128,
            image_size=32, patch_size=8, num_labels=10, hidden_dropout_prob=0.0,
        )  # fmt: skip
        return images(transformers.ViTForImageClassification(config), "vit", 4, 32)
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_labels=10,
    )  # fmt: skip
    return images(transformers.ResNetForImageClassification(config), "resnet", 4, 32)


def model_of(case: bridge.Case) -> fz.Model:
    """The module converted, with the case's loss."""
    arguments = [value for name, value in case.batch.items() if name != "labels"]
    return tb.convert(case.module, *arguments).model(case.jax_loss)


def adamw() -> optax.GradientTransformation:
    """What torch's AdamW does by default, with the decay that is given to it here."""
    return optax.adamw(LEARNING_RATE, weight_decay=DECAY)


class Fzero:
    """Steps of a model under a plan."""

    def __init__(self, model: fz.Model, plan: fz.Plan, batch: Any) -> None:
        tx = adamw()
        self.state = fz.init(model, tx, plan, 0)
        self.run = fz.train_step(model, tx, plan)
        self.batch = batch

    def step(self) -> Any:
        """One step, its loss as an array that may not be there yet."""
        self.state, metrics = self.run(self.state, self.batch)
        return metrics["loss"]

    def wait(self) -> None:
        """Until all of it is done."""
        jax.block_until_ready(self.state.params)


class Torch:
    """Steps of the module itself: autocast in 16 bits, scaled losses in fp16, fused AdamW."""

    def __init__(self, case: bridge.Case, precision: str, device: str, module: Any = None) -> None:
        self.case, self.device = case, device
        self.module = copy.deepcopy(case.module).to(device) if module is None else module
        self.module.train()
        self.batch = {name: value.to(device) for name, value in case.batch.items()}
        self.tx = torch.optim.AdamW(
            self.module.parameters(), lr=LEARNING_RATE, weight_decay=DECAY, fused=True
        )
        self.dtype = TORCH_DTYPES.get(precision)
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
        self.loss: Callable[..., torch.Tensor] = case.torch_loss

    def compiled(self) -> Torch:
        """The same module and optimizer through torch's compiler."""
        other = copy.copy(self)
        other.loss = torch.compile(self.case.torch_loss)
        return other

    def step(self) -> torch.Tensor:
        """One step, its loss on the device."""
        self.tx.zero_grad(set_to_none=True)
        enabled = self.dtype is not None
        with torch.autocast(self.device, dtype=self.dtype or torch.bfloat16, enabled=enabled):
            value = self.loss(self.module, self.batch)
        self.scaler.scale(value).backward()
        self.scaler.step(self.tx)
        self.scaler.update()
        return value.detach()

    def wait(self) -> None:
        """Until all of it is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def torch_device() -> str:
    """Where torch runs: on the GPU, if jax does."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def numpy_batch(case: bridge.Case) -> dict[str, np.ndarray[Any, Any]]:
    """The case's batch for jax."""
    return bridge._numpy(case.batch)
