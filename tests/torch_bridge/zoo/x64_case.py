"""Run in a process with 64-bit values: models in float64, values and gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from parity import leaves_of, numpy_of
from zoo_entries import livelier
from zoo_torch import ENTRIES as TORCH
from zoo_transformers import ENTRIES as TRANSFORMERS

import torch_bridge as tb


ENTRIES = TORCH | TRANSFORMERS
NAMES = ("mlp", "cnn_batch_norm", "recurrent", "spectra", "ordering", "gpt2")


class State(NamedTuple):
    params: Any
    buffers: Any


def main() -> None:
    for name in NAMES:
        entry = ENTRIES[name]
        torch.manual_seed(3)
        module = livelier(entry.make()).double().train()
        call = entry.call(3)
        args = [a.double() if a.is_floating_point() else a for a in call.args]
        converted = tb.convert(module, *args, **call.kwargs)

        def loss(params, converted=converted, args=args, call=call):
            out, _ = converted.apply(
                params, converted.buffers, *numpy_of(args), train=True, **numpy_of(call.kwargs)
            )
            leaves = [x for x in leaves_of(out) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.sin(x)) for x in leaves), leaves_of(out)

        (_, got), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(converted.params)
        gradients = converted.by_name(gradients)
        want = leaves_of(module(*args, **call.kwargs))
        for g, w in zip(got, want, strict=True):
            assert g.dtype == np.dtype(str(w.dtype).removeprefix("torch.")), (
                name,
                g.dtype,
                w.dtype,
            )
            np.testing.assert_allclose(g, w.detach().numpy(), rtol=1e-10, atol=1e-11, err_msg=name)
        evaluated = jax.jit(lambda p, c=converted, a=args, k=call: leaves_of(
            c.apply(p, c.buffers, *numpy_of(a), **numpy_of(k.kwargs)).output
        ))(converted.params)  # fmt: skip
        floats = [w for w in want if w.is_floating_point()]
        torch.stack([w.sin().sum() for w in floats]).sum().backward()
        for key, parameter in module.named_parameters():
            reference = parameter.grad if parameter.grad is not None else 0 * parameter
            np.testing.assert_allclose(
                gradients[key], reference.detach().numpy(), rtol=1e-8, atol=1e-10, err_msg=name
            )
        # Converted before the batch above moved the running statistics.
        module.load_state_dict(tb.state_dict(converted, State(converted.params, converted.buffers)))
        for g, w in zip(evaluated, leaves_of(module.eval()(*args, **call.kwargs)), strict=True):
            np.testing.assert_allclose(g, w.detach().numpy(), rtol=1e-10, atol=1e-11, err_msg=name)
        print(name)
    print("done")


if __name__ == "__main__":
    main()
