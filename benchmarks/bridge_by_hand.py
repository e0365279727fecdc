"""GPT-2, Llama and ResNet as one would write them in JAX, from the weights of transformers' own.

Each `*_params` takes a `state_dict` as numpy arrays and stacks the layers; each `*_loss` is the
mean loss of a batch in train mode. Shapes: B examples, T tokens, D width, H heads, V vocabulary;
images are (B, 3, S, S) as torch has them, and (B, S, S, C) within.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


Arrays = Mapping[str, np.ndarray[Any, Any]]


def stacked(weights: Arrays, prefix: str) -> dict[str, Any]:
    """The weights of a list of blocks, each stacked over its layers."""
    layers: dict[str, dict[int, Any]] = {}
    for name, value in weights.items():
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            layers.setdefault(rest, {})[int(number)] = value
    return {name: np.stack([rows[k] for k in sorted(rows)]) for name, rows in layers.items()}


def token_loss(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Mean cross entropy of (B, T, V) logits for the next token."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
    return losses.mean()


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention over (B, H, T, E); keys and values may have fewer heads.

    In 16 bits on a GPU cuDNN's, as anyone would.
    """
    if q.dtype.itemsize == 2 and jax.default_backend() == "gpu":
        return fused(q, k, v, is_causal=True)
    groups = q.shape[1] // k.shape[1]
    q = q.reshape(q.shape[0], k.shape[1], groups, *q.shape[2:])
    scores = jnp.einsum("bhgqe,bhke->bhgqk", q, k) / float(np.sqrt(q.shape[-1]))
    seq = scores.shape[-1]
    scores = jnp.where(np.tril(np.ones((seq, seq), bool)), scores, -jnp.inf)
    out = jnp.einsum("bhgqk,bhke->bhgqe", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(out.shape[0], -1, *out.shape[3:])


def fused(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool) -> jax.Array:
    """cuDNN's attention over (B, H, T, E); jax refuses odd T, so one more key that is not seen."""
    length = q.shape[2]
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    seen = None
    if length % 2:
        turned = [jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in turned]
        seen = jnp.full((q.shape[0],), length, jnp.int32)
    out = jax.nn.dot_product_attention(
        *turned, is_causal=is_causal, key_value_seq_lengths=seen, implementation="cudnn"
    )
    return out[:, :length].swapaxes(1, 2)


def heads(x: jax.Array, count: int) -> jax.Array:
    """(B, T, D) to (B, H, T, E)."""
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def merged(x: jax.Array) -> jax.Array:
    """(B, H, T, E) to (B, T, D)."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def rows(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix` over rows of tokens, which is faster on CPUs."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], -1)


# --- GPT-2 ---------------------------------------------------------------------------------------


def gpt2_params(weights: Arrays, config: Any) -> dict[str, Any]:
    names = ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")
    top = {name: weights[f"transformer.{name}"] for name in names}
    return {**top, "h": stacked(weights, "transformer.h.")}


def gpt2_loss(params: Any, buffers: Any, ids: jax.Array, config: Any) -> tuple[jax.Array, Any]:
    def norm(x: jax.Array, p: Any, name: str) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(variance + 1e-5)
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: jax.Array, p: Any, name: str) -> jax.Array:
        return rows(x, p[f"{name}.weight"]) + p[f"{name}.bias"]

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        qkv = jnp.split(linear(norm(x, p, "ln_1"), p, "attn.c_attn"), 3, axis=-1)
        q, k, v = (heads(part, config.n_head) for part in qkv)
        x = x + linear(merged(attend(q, k, v)), p, "attn.c_proj")
        hidden = jax.nn.gelu(linear(norm(x, p, "ln_2"), p, "mlp.c_fc"), approximate=True)
        return x + linear(hidden, p, "mlp.c_proj"), None

    x = params["wte.weight"][ids] + params["wpe.weight"][: ids.shape[1]]
    x, _ = jax.lax.scan(block, x, params["h"])
    logits = rows(norm(x, params, "ln_f"), params["wte.weight"].T)
    return token_loss(logits, ids), buffers


# --- Llama ---------------------------------------------------------------------------------------


def llama_params(weights: Arrays, config: Any) -> dict[str, Any]:
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    return {**{n: weights[n] for n in names}, "layers": stacked(weights, "model.layers.")}


def llama_loss(params: Any, buffers: Any, ids: jax.Array, config: Any) -> tuple[jax.Array, Any]:
    size = config.hidden_size // config.num_attention_heads
    rates = 1.0 / 10000.0 ** (np.arange(0, size, 2) / size)
    angles = np.concatenate([np.outer(np.arange(ids.shape[1]), rates)] * 2, axis=-1)
    cos, sin = (jnp.asarray(f(angles), params["lm_head.weight"].dtype) for f in (np.cos, np.sin))

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x: jax.Array) -> jax.Array:
        low, high = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-high, low], axis=-1) * sin

    def linear(x: jax.Array, p: Any, name: str) -> jax.Array:
        return rows(x, p[f"{name}.weight"].T)

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        inner = norm(x, p["input_layernorm.weight"])
        q = heads(linear(inner, p, "self_attn.q_proj"), config.num_attention_heads)
        k = heads(linear(inner, p, "self_attn.k_proj"), config.num_key_value_heads)
        v = heads(linear(inner, p, "self_attn.v_proj"), config.num_key_value_heads)
        x = x + linear(merged(attend(turned(q), turned(k), v)), p, "self_attn.o_proj")
        inner = norm(x, p["post_attention_layernorm.weight"])
        gate = jax.nn.silu(linear(inner, p, "mlp.gate_proj"))
        return x + linear(gate * linear(inner, p, "mlp.up_proj"), p, "mlp.down_proj"), None

    x, _ = jax.lax.scan(block, params["model.embed_tokens.weight"][ids], params["layers"])
    logits = rows(norm(x, params["model.norm.weight"]), params["lm_head.weight"].T)
    return token_loss(logits, ids), buffers


# --- ResNet --------------------------------------------------------------------------------------


def resnet_params(weights: Arrays, config: Any) -> dict[str, Any]:
    """Filters as (height, width, in, out)."""
    kept = {n: v for n, v in weights.items() if not n.endswith(BUFFERS)}
    return {n: v.transpose(2, 3, 1, 0) if v.ndim == 4 else v for n, v in kept.items()}


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def resnet_loss(
    params: Any, buffers: Any, batch: tuple[jax.Array, jax.Array], config: Any
) -> tuple[jax.Array, Any]:
    """With the new running statistics, which torch updates in train mode too."""
    images, labels = batch
    new = dict(buffers)

    def conv(x: jax.Array, name: str, stride: int = 1) -> jax.Array:
        kernel = params[f"{name}.convolution.weight"]
        pad = kernel.shape[0] // 2
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), ((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        mean, square = x.mean((0, 1, 2)), jnp.square(x).mean((0, 1, 2))
        variance = square - jnp.square(mean)
        count = x.size // x.shape[-1]
        own = f"{name}.normalization"
        new[f"{own}.running_mean"] = 0.9 * buffers[f"{own}.running_mean"] + 0.1 * mean
        unbiased = variance * count / (count - 1)
        new[f"{own}.running_var"] = 0.9 * buffers[f"{own}.running_var"] + 0.1 * unbiased
        scale = params[f"{own}.weight"] * jax.lax.rsqrt(variance + 1e-5)
        return (x - mean) * scale + params[f"{own}.bias"]

    x = jax.nn.relu(conv(images.transpose(0, 2, 3, 1), "resnet.embedder.embedder", 2))
    x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
    )
    for stage, depth in enumerate(config.depths):
        for number in range(depth):
            name = f"resnet.encoder.stages.{stage}.layers.{number}"
            stride = 2 if stage and not number else 1
            if f"{name}.layer.2.convolution.weight" in params:  # a bottleneck
                inner = jax.nn.relu(conv(x, f"{name}.layer.0"))
                inner = jax.nn.relu(conv(inner, f"{name}.layer.1", stride))
                inner = conv(inner, f"{name}.layer.2")
            else:
                inner = jax.nn.relu(conv(x, f"{name}.layer.0", stride))
                inner = conv(inner, f"{name}.layer.1")
            if f"{name}.shortcut.convolution.weight" in params:
                x = conv(x, f"{name}.shortcut", stride)
            x = jax.nn.relu(x + inner)
    pooled = x.mean((1, 2))
    logits = pooled @ params["classifier.1.weight"].T + params["classifier.1.bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new


# --- ViT -----------------------------------------------------------------------------------------


def vit_params(weights: Arrays, config: Any) -> dict[str, Any]:
    """The layers stacked."""
    top = {n: v for n, v in weights.items() if not n.startswith("vit.layers.")}
    return {**top, "layers": stacked(weights, "vit.layers.")}


def vit_loss(
    params: Any, buffers: Any, batch: tuple[jax.Array, jax.Array], config: Any
) -> tuple[jax.Array, Any]:
    images, labels = batch
    width, patch = config.hidden_size, config.patch_size

    def norm(x: jax.Array, p: Any, name: str) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(variance + config.layer_norm_eps)
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: jax.Array, p: Any, name: str) -> jax.Array:
        return rows(x, p[f"{name}.weight"].T) + p[f"{name}.bias"]

    def attend_all(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if q.dtype.itemsize == 2 and jax.default_backend() == "gpu":
            return fused(q, k, v, is_causal=False)
        scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / float(np.sqrt(q.shape[-1]))
        return jnp.einsum("bhqk,bhke->bhqe", jax.nn.softmax(scores, axis=-1), v)

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        inner = norm(x, p, "layernorm_before")
        q, k, v = (
            heads(linear(inner, p, f"attention.{n}_proj"), config.num_attention_heads)
            for n in "qkv"
        )
        x = x + linear(merged(attend_all(q, k, v)), p, "attention.o_proj")
        inner = jax.nn.gelu(linear(norm(x, p, "layernorm_after"), p, "mlp.fc1"), approximate=False)
        return x + linear(inner, p, "mlp.fc2"), None

    # Patches do not overlap: cut them out and multiply.
    b, channels, size, _ = images.shape
    side = size // patch
    cut = images.reshape(b, channels, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5)
    kernel = params["vit.embeddings.patch_embeddings.projection.weight"].reshape(width, -1)
    x = rows(cut.reshape(b, side * side, -1).astype(kernel.dtype), kernel.T)
    x = x + params["vit.embeddings.patch_embeddings.projection.bias"]
    first = jnp.broadcast_to(params["vit.embeddings.cls_token"], (b, 1, width))
    x = jnp.concatenate([first, x], 1) + params["vit.embeddings.position_embeddings"]
    x, _ = jax.lax.scan(block, x, params["layers"])
    logits = linear(norm(x, params, "vit.layernorm")[:, 0], params, "classifier")
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), buffers
