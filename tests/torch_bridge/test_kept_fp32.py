"""Converted modules under `Plan(keep_fp32=...)`: submodules `.float()` in a 16-bit module."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import fzero as fz
import torch_bridge as tb


# Not to be had in 16 bits.
EXACT = 1 + 2**-12


class Scale(torch.nn.Module):
    """What an RMSNorm of transformers does to dtypes: its weight's promotes what it gives."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), EXACT))

    def forward(self, x):
        return x * self.weight


class Norm(Scale):
    """What it is given, if it computes in float32, and zeros in bfloat16."""

    def __init__(self):
        super().__init__()
        self.register_buffer("much", torch.full((8,), 2.0**12))

    def forward(self, x):
        much = self.much if x.dtype is self.much.dtype else 0 * self.much
        return (x * self.weight - x) * much


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = Norm(), torch.nn.Linear(8, 8, bias=False)
        with torch.no_grad():  # sums of one term, which no order rounds otherwise
            self.mix.weight.copy_(0.5 * torch.eye(8))

    def forward(self, x):
        return x + torch.relu(self.mix(self.norm(x=x)))  # keywords are widened as well


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.last = Scale()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def half(module, kept, between):
    """PyTorch's own: in bfloat16, with some submodules `.float()` again."""
    made = copy.deepcopy(module).to(torch.bfloat16)
    for name in kept:
        own = made.get_submodule(name)
        for (_, old), (_, new) in zip(
            module.get_submodule(name).state_dict().items(), own.float().state_dict().items(),
            strict=True,
        ):  # fmt: skip
            new.copy_(old)
        if between:
            own.register_forward_pre_hook(
                lambda _, args, kwargs: (args, {k: x.float() for k, x in kwargs.items()}),
                with_kwargs=True,
            )
            own.register_forward_hook(lambda _, args, out: out.bfloat16())
    return made


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "function"])
@pytest.mark.parametrize(
    ("keep", "between"),
    [("last", False), (("norm", "last"), True)],
    ids=["torch-runs-it", "torch-does-not"],
)
def test_numbers_are_those_of_torch(chain, keep, between):
    torch.manual_seed(0)
    module, x = Net().eval(), torch.randn(8, 8).bfloat16()
    kept = ["last", *(f"blocks.{k}.norm" for k in range(3) if between)]
    plain = half(module, kept, between=False)
    with torch.no_grad():
        if between:
            with pytest.raises(RuntimeError, match="same dtype"):
                plain(x)
        own = half(module, kept, between) if between else plain
        expected = own(x)
    converted = tb.convert(module, torch.zeros(8, 8))
    model = converted.model(
        lambda y, batch: jnp.mean(y.astype(jnp.float32)), inputs=lambda batch: batch["x"],
        outputs=lambda y: y, chain=chain,
    )  # fmt: skip
    plan = fz.Plan(zero=3, data=2, precision="bf16", keep_fp32=keep, min_shard_bytes=0)
    state = fz.init(model, optax.sgd(0.1), plan)
    batch = {"x": x.float().numpy().astype(jnp.bfloat16)}
    (got,) = jax.tree.leaves(fz.predict_step(model, plan)(state, batch))
    assert got.dtype == (jnp.bfloat16 if between else jnp.float32)
    # PyTorch rounds after each of three blocks and at the end, by 2**-9 at most; XLA may leave out
    # what it widens again. A norm in 16 bits would give zeros.
    np.testing.assert_allclose(
        np.asarray(got, np.float32), expected.float().numpy(), rtol=2**-7 if between else 0
    )
    if not between:  # what 16 bits cannot tell apart from what they can
        rounded = np.asarray(jnp.asarray(got).astype(jnp.bfloat16).astype(jnp.float32))
        assert np.any(np.asarray(got) != rounded)
    _, metrics = fz.train_step(model, optax.sgd(0.1), plan)(state, batch)
    assert np.isfinite(metrics["grad_norm"])


def test_a_mixtral_s_gate_chooses_as_in_float32():
    """Two experts whose scores are one in 16 bits; the first, which is then taken, gives 0."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if name.endswith("mlp.gate.weight"):
                value[1] = EXACT * value[0].copy_(value[0].bfloat16())
            elif name.endswith("down_proj"):
                value[0], value[1] = 0.0, 10 * value[1]
    converted = tb.convert(module, torch.zeros(2, 4, dtype=torch.long))
    model = converted.model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
    )
    batch, found = {"ids": np.arange(32, dtype=np.int32).reshape(4, 8)}, []
    for more in ({"precision": "fp32"}, {"keep_fp32": r"mlp\.gate\."}, {}):
        plan = fz.Plan(**{"zero": 3, "data": 2, "precision": "bf16", "min_shard_bytes": 0, **more})
        state = fz.init(model, optax.sgd(0.1), plan)
        found.append(np.asarray(fz.predict_step(model, plan)(state, batch).logits, np.float32))
    exact, kept, rounded = (np.abs(one - found[0]).max() / np.abs(found[0]).max() for one in found)
    # Sixteen bits round by 2**-9 what is added up; a token with another expert is another.
    assert exact == 0
    assert kept < 0.03
    assert rounded > 3 * kept


class Attends(torch.nn.Module):
    """Adds a mask of its own dtype, float32, which PyTorch does not add to 16 bits."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        return self.scores(x, x, x, attn_mask=mask)[0]


def test_dtypes_that_pytorch_does_not_mix_are_refused_with_a_remedy_that_holds():
    torch.manual_seed(0)
    module, x = Attends(), torch.randn(2, 5, 8)
    converted = tb.convert(module, x)
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch) ** 2))
    half = {name: jnp.asarray(value, jnp.bfloat16) for name, value in converted.params.items()}
    with pytest.raises(fz.ConversionError, match=r"in these dtypes: cast.*keep_fp32=") as refused:
        converted.apply(half, {}, x.numpy(), train=True)
    assert "train=False" not in str(refused.value)
    plan = fz.Plan(precision="bf16", data=1, keep_fp32=("scores",))
    loss = fz.eval_step(model, plan)(fz.init(model, None, plan), x.numpy())["loss"]
    want = module.eval()(x.bfloat16().float()).square().mean().item()
    assert abs(float(loss) - want) < 1e-2 * want


class Residual(nn.Module):
    """A block of Mamba's: its residual is kept in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x
        x = self.norm(x.to(dtype=self.norm.weight.dtype))
        return residual.to(torch.float32) + self.mixer(x)


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_whose_residual_is_float32_are_equal_in_16_bits() -> None:
    torch.manual_seed(0)
    module, ids = Residuals(), torch.arange(12).reshape(3, 4)
    converted = tb.convert(module, ids)
    assert converted.blocks.stacks
    params = {name: jnp.asarray(p, jnp.bfloat16) for name, p in converted.params.items()}

    def loss(params: Any) -> Any:
        out = converted.apply(params, {}, ids.numpy()).output
        assert out.dtype == jnp.float32
        return (out**2).mean(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    want = module.bfloat16()(ids)
    (want**2).mean().backward()
    np.testing.assert_allclose(out, want.detach().numpy(), rtol=2e-2, atol=2e-2)
    for name, grad in converted.by_name(grads).items():
        wanted = module.get_parameter(name).grad.float().numpy()
        np.testing.assert_allclose(np.asarray(grad, np.float32), wanted, rtol=5e-2, atol=2e-3)
