"""The `small` GPT that fzero is compared with PyTorch on: numbers, PyTorch module, native chain.

6.6M parameters: vocabulary 512, width 256, 8 pre-LN blocks of 4 heads, 128 tokens, batch 16. Token
ids and initial weights come from numpy's frozen `RandomState`, so that every program that wants to
be compared starts from the same bits (the sums of `SHA256` are those of our peer programs).
"""

import hashlib
import io
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.nn import functional as F

import fzero as fz


VOCAB, WIDTH, BLOCKS, HEADS, TOKENS, BATCH, STEPS = 512, 256, 8, 4, 128, 16, 30
LR, WEIGHT_DECAY = 3e-4, 0.01
# First 16 digits: of the .npy file of all tokens, and of the bytes of all weights in order.
SHA256 = {"tokens": "942fcd4e34d82c22", "weights": "dfeded30eed5cac6"}
_SEED = 20240917


def block_shapes() -> dict[str, tuple[int, ...]]:
    """Parameters of one block, in order; Linear weights are (out, in)."""
    d = WIDTH
    return {
        "ln_1.weight": (d,),
        "ln_1.bias": (d,),
        "attn.c_attn.weight": (3 * d, d),
        "attn.c_attn.bias": (3 * d,),
        "attn.c_proj.weight": (d, d),
        "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,),
        "ln_2.bias": (d,),
        "mlp.c_fc.weight": (4 * d, d),
        "mlp.c_fc.bias": (4 * d,),
        "mlp.c_proj.weight": (d, 4 * d),
        "mlp.c_proj.bias": (d,),
    }


def weights() -> dict[str, np.ndarray]:
    """Initial weights by `state_dict` name, in order."""
    blocks = {f"h.{i}.{k}": s for i in range(BLOCKS) for k, s in block_shapes().items()}
    shapes = {
        "wte.weight": (VOCAB, WIDTH),
        "wpe.weight": (TOKENS, WIDTH),
        **blocks,
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }
    draw = np.random.RandomState(_SEED)
    out = {}
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            value = np.zeros(shape)
        elif "ln_" in name:
            value = np.ones(shape)
        else:
            # What a block adds to the residual stream is scaled down by its depth.
            residual = math.sqrt(2 * BLOCKS) if name.endswith("c_proj.weight") else 1.0
            value = draw.standard_normal(shape) * (0.02 / residual)
        out[name] = value.astype(np.float32)
    return out


def tokens() -> np.ndarray:
    """`(STEPS, BATCH, TOKENS + 1)` int32: each token has four likely successors, 90 % together."""
    draw = np.random.RandomState(_SEED + 1)
    likely = draw.randint(0, VOCAB, size=(VOCAB, 4))
    rows = STEPS * BATCH
    ids = np.empty((rows, TOKENS + 1), np.int32)
    ids[:, 0] = draw.randint(0, VOCAB, size=rows)
    for t in range(TOKENS):
        successor = likely[ids[:, t], draw.randint(0, 4, size=rows)]
        noise = draw.randint(0, VOCAB, size=rows)
        ids[:, t + 1] = np.where(draw.random_sample(rows) < 0.9, successor, noise)
    return ids.reshape(STEPS, BATCH, TOKENS + 1)


def sha256() -> dict[str, str]:
    """The sums that `SHA256` has, of what this file makes."""
    file = io.BytesIO()
    np.save(file, tokens())
    raw = b"".join(value.tobytes() for value in weights().values())
    return {
        "tokens": hashlib.sha256(file.getvalue()).hexdigest()[:16],
        "weights": hashlib.sha256(raw).hexdigest()[:16],
    }


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.c_attn(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attn = _Attention()
        self.mlp = torch.nn.Module()
        self.mlp.c_fc = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp.c_proj = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class TorchGPT(torch.nn.Module):
    """The model in PyTorch, with the initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(VOCAB, WIDTH)
        self.wpe = torch.nn.Embedding(TOKENS, WIDTH)
        self.h = torch.nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.ln_f = torch.nn.LayerNorm(WIDTH)
        self.lm_head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.load_state_dict({name: torch.from_numpy(w) for name, w in weights().items()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def torch_losses(steps: int = STEPS) -> np.ndarray:
    """Losses of plain PyTorch: one process, eager, `torch.optim.AdamW` on every parameter."""
    model = TorchGPT()
    adamw = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.999), 1e-8, WEIGHT_DECAY)
    losses = []
    for batch in torch.from_numpy(tokens()[:steps]).long():
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return np.array(losses)


def _norm(p: dict, name: str, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def _linear(p: dict, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _block(p: dict, x: jax.Array, ctx: fz.Context) -> jax.Array:
    rows, length, _ = x.shape
    qkv = _linear(p, "attn.c_attn", _norm(p, "ln_1", x))
    q, k, v = jnp.moveaxis(qkv.reshape(rows, length, 3, HEADS, WIDTH // HEADS), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS)
    seen = jnp.tril(jnp.ones((length, length), bool))
    mixed = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bhqk,bkhd->bqhd", mixed, v).reshape(rows, length, WIDTH)
    x = x + _linear(p, "attn.c_proj", y)
    hidden = jax.nn.gelu(_linear(p, "mlp.c_fc", _norm(p, "ln_2", x)), approximate=True)
    return x + _linear(p, "mlp.c_proj", hidden)


def _cross_entropy(logits: jax.Array, batch: dict) -> fz.Mean:
    targets = batch["ids"][:, 1:]
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - hit
    return fz.Mean(jnp.sum(nats), jnp.float32(nats.size))


def native_model() -> fz.Sequential:
    """The model as a chain of fzero's own, with the initial weights in PyTorch's layout."""
    given = weights()
    params = {
        "embed": {name: given[name] for name in ("wte.weight", "wpe.weight")},
        "h": {
            name: np.stack([given[f"h.{i}.{name}"] for i in range(BLOCKS)])
            for name in block_shapes()
        },
        "head": {name: given[name] for name in ("ln_f.weight", "ln_f.bias", "lm_head.weight")},
    }

    def embed(p: dict, batch: dict, ctx: fz.Context) -> jax.Array:
        return p["wte.weight"][batch["ids"][:, :-1]] + p["wpe.weight"]

    def head(p: dict, x: jax.Array, ctx: fz.Context) -> jax.Array:
        return _norm(p, "ln_f", x) @ p["lm_head.weight"].T

    return fz.Sequential(
        [
            fz.Layer("embed", lambda rng: params["embed"], embed),
            fz.Stack("h", BLOCKS, lambda rng: {}, _block),
            fz.Layer("head", lambda rng: params["head"], head),
        ],
        loss=_cross_entropy,
        init=(params, {}),
    )


def _adamw(eps: Any, decay: Any) -> optax.GradientTransformation:
    b1, b2 = 0.9, 0.999

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> Any:
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        first, second = (-jnp.expm1(count * math.log(b)) for b in (b1, b2))
        out = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), mu, nu)
        return out, optax.ScaleByAdamState(count, mu, nu)

    scale = optax.GradientTransformation(optax.scale_by_adam(b1, b2).init, update)
    return optax.chain(scale, optax.add_decayed_weights(decay), optax.scale(-LR))


def adamw() -> optax.GradientTransformation:
    """AdamW on every parameter, with PyTorch's bias correction; eps and decay lie in its state.

    `optax.adamw` computes `1 - b2**t` in float32. 0.999 there is 0.99900001, so that the result is
    1.3e-5 too small and every update 6e-6 of itself too short: over 30 steps the loss drifts away
    from PyTorch's, which computes the factor in double precision, by 5e-6. `expm1` loses nothing.
    """
    return optax.inject_hyperparams(_adamw)(eps=1e-8, decay=WEIGHT_DECAY)
