"""GPT-2 decoding by hand in JAX: a list of layers, a cache for each, a loop on the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def parameters(state_dict: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The weights of transformers' GPT-2 as nested dicts of arrays."""
    arrays = {
        name.removeprefix("transformer."): jnp.asarray(value.numpy())
        for name, value in state_dict.items()
    }

    def part(prefix: str) -> dict[str, Any]:
        own = (name for name in arrays if name.startswith(f"{prefix}."))
        return {name.removeprefix(f"{prefix}."): arrays[name] for name in own}

    layers = [part(f"h.{number}") for number in range(num_layers)]
    return {"wte": arrays["wte.weight"], "wpe": arrays["wpe.weight"], "layers": layers,
            "ln_f": part("ln_f")}  # fmt: skip


def norm(x: Any, weight: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * weight + (
        bias
    )


def layer(p: dict[str, Any], x: Any, cache: Any, start: Any, heads: int) -> Any:
    """One block on new columns from `start`; the cache is `(keys, values)`, `(B, H, S, E)`."""
    rows, new, width = x.shape
    y = norm(x, p["ln_1.weight"], p["ln_1.bias"]) @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]
    q, k, v = (
        part.reshape(rows, new, heads, -1).swapaxes(1, 2) for part in jnp.split(y, 3, axis=-1)
    )
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, part, start, 2)
        for old, part in zip(cache, (k, v), strict=True)
    )
    scores = q @ keys.swapaxes(-1, -2) / (width // heads) ** 0.5
    visible = jnp.arange(keys.shape[2]) <= start + jnp.arange(new)[:, None]
    attended = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1) @ values
    merged = attended.swapaxes(1, 2).reshape(rows, new, width)
    x = x + merged @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
    y = norm(x, p["ln_2.weight"], p["ln_2.bias"]) @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"]
    y = jax.nn.gelu(y, approximate=True) @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]
    return x + y, (keys, values)


def forward(params: Any, ids: Any, caches: Any, start: Any, heads: int) -> Any:
    """The likeliest token after each row, and the caches."""
    positions = start + jnp.arange(ids.shape[1])
    x, new = params["wte"][ids] + params["wpe"][positions], []
    for p, cache in zip(params["layers"], caches, strict=True):
        x, cache = layer(p, x, cache, start, heads)
        new.append(cache)
    x = norm(x[:, -1], params["ln_f"]["weight"], params["ln_f"]["bias"])
    return jnp.argmax(x @ params["wte"].T, -1).astype(jnp.int32), new


@partial(jax.jit, static_argnames=("new", "heads"))
def prefill(params: Any, ids: Any, *, new: int, heads: int) -> Any:
    """The first new token, and caches for all that follow."""
    rows, length = ids.shape
    width = params["wte"].shape[1]
    empty = jnp.zeros((rows, heads, length + new, width // heads))
    return forward(params, ids, [(empty, empty)] * len(params["layers"]), 0, heads)


@partial(jax.jit, static_argnames=("start", "new", "heads"), donate_argnames=("caches",))
def decode(params: Any, tokens: Any, caches: Any, *, start: int, new: int, heads: int) -> Any:
    """All new tokens, `(B, new)`."""

    def step(number: Any, carry: Any) -> Any:
        tokens, out, caches = carry
        tokens, caches = forward(params, tokens[:, None], caches, start + number - 1, heads)
        return tokens, jax.lax.dynamic_update_slice_in_dim(out, tokens[:, None], number, 1), caches

    out = jnp.zeros((len(tokens), new), jnp.int32).at[:, 0].set(tokens)
    _, out, caches = jax.lax.fori_loop(1, new, step, (tokens, out, caches))
    return out, caches


def generate(params: Any, ids: Any, new: int, heads: int) -> Any:
    """Greedy tokens after prompts `(B, T)` of one length."""
    tokens, caches = prefill(params, ids, new=new, heads=heads)
    return decode(params, tokens, caches, start=ids.shape[1], new=new, heads=heads)[0]
