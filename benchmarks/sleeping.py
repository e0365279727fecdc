"""A pipeline whose actions take known seconds, whatever else a machine does: they sleep.

Its layers hand on real arrays and run as any model's do, but for an XLA custom call that sleeps. So
processes overlap as if each had a machine of its own, and the seconds of a step beside its
simulation say what dispatching and transfers cost. (Not a Python callback: jax runs that at
dispatch.)
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fzero as fz


SOURCE = """
#include <chrono>
#include <cstring>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Sleep(double seconds, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(fall_asleep, Sleep,
    ffi::Ffi::Bind().Attr<double>("seconds").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


def build(folder: Path) -> Path:
    """The custom call as a library. Takes g++."""
    source, library = folder / "sleep.cc", folder / "sleep.so"
    source.write_text(SOURCE)
    command = ["g++", "-w", "-O1", "-shared", "-fPIC", "-std=c++17", "-I", jax.ffi.include_dir()]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return library


def register(library: Path) -> None:
    """Tells XLA of it, once a process."""
    handler = ctypes.CDLL(str(library)).fall_asleep
    jax.ffi.register_ffi_target("fall_asleep", jax.ffi.pycapsule(handler), platform="cpu")


def model(layers: int, width: int, seconds: float) -> fz.Sequential:
    """Layers whose forwards, input gradients and weight gradients sleep for `seconds` each.

    A row is `width` float32 numbers, which is what layers hand on.
    """

    def asleep(x: jax.Array) -> jax.Array:
        one = x.ravel()[:1]
        slept = jax.ffi.ffi_call("fall_asleep", jax.ShapeDtypeStruct(one.shape, one.dtype))
        # tanh: what has few operations XLA would run at dispatch, too.
        return jnp.tanh(x) + 0 * slept(one, seconds=np.float64(seconds))

    @jax.custom_vjp
    def busy(x: jax.Array) -> jax.Array:
        return asleep(x)

    @jax.custom_vjp
    def kept(w: jax.Array) -> jax.Array:
        return w

    busy.defvjp(lambda x: (asleep(x), None), lambda _, g: (asleep(g),))
    kept.defvjp(lambda w: (w, None), lambda _, g: (asleep(g),))

    def init(rng: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.ones(width)}

    def layer(p: Any, x: jax.Array, ctx: Any) -> jax.Array:
        return busy(x) + kept(p["w"])

    first = fz.Layer("rows", init, lambda p, x, ctx: ctx.batch["x"] * p["w"])
    return fz.Sequential(
        [first, fz.Stack("layers", layers, init, layer)], lambda x, batch: jnp.mean(x**2)
    )
