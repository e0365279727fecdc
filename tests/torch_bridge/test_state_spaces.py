"""Mamba's recurrence is one loop in JAX, whatever the number of positions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

import torch_bridge as tb
from torch_bridge.export.stand_ins.state_spaces import _selective_scan


pytestmark = pytest.mark.traced_once

SMALL = {"vocab_size": 11, "hidden_size": 8, "state_size": 3, "num_hidden_layers": 1,
         "time_step_rank": 2}  # fmt: skip


def _primitives(jaxpr: Any) -> list[str]:
    found = []
    for equation in jaxpr.eqns:
        found.append(equation.primitive.name)
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            found += _primitives(inner) if hasattr(inner, "eqns") else []
    return found


def test_a_program_does_not_grow_with_positions() -> None:
    torch.manual_seed(0)
    module = transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL)).eval()
    ids = torch.randint(0, 11, (2, 9))
    converted = tb.convert(module, input_ids=ids[:, :5], use_cache=False, train=False)
    assert not converted.fixed_dims()

    def logits(params: Any, length: int) -> Any:
        given = np.resize(ids.numpy(), (2, length)).astype(np.int32)
        return converted.apply(params, {}, input_ids=given, use_cache=False).output["logits"]

    short, long = (
        _primitives(jax.make_jaxpr(lambda p, n=n: logits(p, n))(converted.params).jaxpr)
        for n in (9, 2048)
    )
    assert short == long
    assert short.count("scan") == 1
    with torch.no_grad():
        want = module(input_ids=ids, use_cache=False).logits
    np.testing.assert_allclose(logits(converted.params, 9), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_for_the_loop_is_the_loop(family: str, dtype: torch.dtype) -> None:
    """Bit for bit, in PyTorch: the same operations, position by position or all at once."""
    module = getattr(getattr(transformers.models, family), f"modeling_{family}")
    make = torch.Generator().manual_seed(0)
    x, dt, z = torch.randn(3, 2, 4, 6, generator=make).to(dtype)
    a, d, bias = -torch.rand(4, 3, generator=make), *torch.randn(2, 4, generator=make)
    b, c = torch.randn(2, 2, 3, 6, generator=make).to(dtype)
    more: dict[str, Any] = {"delta_bias": bias, "delta_softplus": True, "return_last_state": True}
    want = module.mamba_selective_scan(x, dt, a, b, c, d, z, **more)
    for got, wanted in zip(_selective_scan(x, dt, a, b, c, d, z, **more), want, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


class Delta(torch.nn.Module):
    """A gated delta rule of transformers, which unrolls loops over rows where it is exported."""

    def forward(self, q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
        decay, beta = -decay.abs(), beta.sigmoid()
        return torch_chunk_gated_delta_rule(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True)[0]


def test_a_delta_rule_solves_its_system() -> None:
    """Qwen3-Next, Qwen3.5 and OLMo-hybrid: 130 s of conversion were such loops."""
    make = torch.Generator().manual_seed(0)
    shapes = [(2, 70, 2, 4)] * 3 + [(2, 70, 2)] * 2
    inputs = [torch.randn(shape, generator=make) for shape in shapes]
    converted = tb.convert(Delta(), *inputs, train=False)
    given = [x.numpy() for x in inputs]
    np.testing.assert_allclose(converted(*given), Delta()(*inputs), rtol=2e-5, atol=2e-6)
    names = _primitives(jax.make_jaxpr(lambda *x: converted(*x))(*given).jaxpr)
    assert names.count("triangular_solve") == 2
    assert len(names) < 300
