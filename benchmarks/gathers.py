"""What 8-bit gathers round: blocks of integers beside floats with one scale a weight.

    JAX_PLATFORMS=cpu python -m benchmarks.gathers

Errors are root mean squares over those of the exact values: of a weight, and of its product with
normal rows, beside that product with the weight that is not rounded. `results/gathers.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.float8.scaling import E4M3, Scaled, scaled_weight
from fzero.zero.quantize import decode, encode, encoded_bytes


RESULTS = Path(__file__).parent / "results" / "gathers.json"
SIZE, ROWS, SHARDS = 2048, 256, 8
GATHERS = ("bf16", "int8 blocks", "float8, one scale")


def gathered(how: str, weight: jax.Array) -> jax.Array:
    """A weight as every device has it, in bf16 where 8 bits can be widened."""
    if how == "int8 blocks":
        shards = weight.reshape(SHARDS, -1)
        return decode(encode(shards), shards.shape[1]).reshape(weight.shape).astype(jnp.bfloat16)
    narrow = weight.astype(jnp.bfloat16)
    if how == "bf16":
        return narrow
    scaled = scaled_weight(narrow, 0, "tensorwise")
    return (scaled.bits.astype(jnp.float32) * scaled.unit).astype(jnp.bfloat16)


def product(x: jax.Array, weight: jax.Array, how: str, in_8_bits: bool) -> jax.Array:
    """A product with a gathered weight, which in 8 bits takes the bits that came."""
    if not in_8_bits:
        return jnp.dot(x, gathered(how, weight), preferred_element_type=jnp.float32)
    came = weight.astype(jnp.bfloat16) if how == "float8, one scale" else gathered(how, weight)
    scaled = scaled_weight(came, 0, "tensorwise")
    return Scaled.of(x, 1, E4M3, "tensorwise").times(scaled, jnp.float32)


def error(found: jax.Array, exact: jax.Array) -> float:
    """The root mean square of a difference over that of the exact values."""
    exact = exact.astype(jnp.float32)
    return float(jnp.sqrt(jnp.mean((found.astype(jnp.float32) - exact) ** 2) / jnp.mean(exact**2)))


def measure(weight: jax.Array, x: jax.Array) -> dict[str, dict[str, float]]:
    """Bytes and errors of each gather."""
    found = {}
    for how in GATHERS:
        sent = encoded_bytes(weight.size // SHARDS) * SHARDS if how == "int8 blocks" else 0
        size = {"bf16": 2 * weight.size, "int8 blocks": sent}.get(how, weight.size + 4)
        found[how] = {
            "bytes": size / weight.size,
            "weight": error(gathered(how, weight), weight),
            "bf16": error(product(x, weight, how, False), product(x, weight, "bf16", False)),
            "fp8": error(product(x, weight, how, True), product(x, weight, "bf16", True)),
        }
    return found


def main() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, SIZE)), jnp.bfloat16)
    weights: dict[str, Any] = {
        "normal": rng.normal(size=(SIZE, SIZE)),
        "Student's t, 4": rng.standard_t(4, size=(SIZE, SIZE)),
    }
    rows = {name: measure(jnp.asarray(w, jnp.float32), x) for name, w in weights.items()}
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print("| weights | gathered as | bytes an element | weight | bf16 product | fp8 product |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, each in rows.items():
        for how, one in each.items():
            errors = " | ".join(f"{one[key]:.2%}" for key in ("weight", "bf16", "fp8"))
            print(f"| {name} | {how} | {one['bytes']:.3f} | {errors} |")


if __name__ == "__main__":
    main()
