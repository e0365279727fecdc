"""A loss that calls a converted module's forward within a function that JAX transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge as tb
from fzero.errors import ConversionError


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("within", [jax.checkpoint, jax.jit, jax.vmap])
@pytest.mark.parametrize(
    ("module", "what"),
    [
        (nn.BatchNorm1d(4), "writes num_batches_tracked, running_mean, running_var, which"),
        (nn.Dropout(0.5), "draws random numbers, which each row, turn and call would share"),
    ],
    ids=["writes", "draws"],
)
def test_what_a_transformed_function_would_lose_or_repeat_is_refused(
    module: nn.Module, what: str, within: Any
) -> None:
    """A buffer would be a tracer that outlives its trace; all rows would have one mask."""
    model = tb.convert(module, X).model(
        lambda forward, batch: jnp.mean(within(forward)(batch) ** 2)
    )
    batch = X.numpy() if within is not jax.vmap else np.stack([X.numpy()] * 2)
    with pytest.raises(ConversionError, match=f"JAX transforms.*forward {what}"):
        model.loss(*model.init, batch, jax.random.key(0), True)
    value, *_ = model.loss(*model.init, batch, None, False)  # nothing is written or drawn
    assert np.isfinite(value)


def test_a_gradient_keeps_the_buffers_that_are_written_within_it() -> None:
    def penalty(forward: Any, batch: Any) -> Any:
        slopes = jax.grad(lambda x: jnp.sum(forward(x) ** 3))(batch)
        return jnp.mean(slopes**2) + jnp.mean(forward(batch) ** 2)

    module = nn.BatchNorm1d(4)
    model = tb.convert(module, X).model(penalty)
    value, buffers, _ = jax.jit(model.loss, static_argnums=4)(*model.init, X.numpy(), None, True)

    x = X.clone().requires_grad_()
    (slopes,) = torch.autograd.grad((module(x) ** 3).sum(), x, create_graph=True)
    expected = (slopes**2).mean() + (module(X) ** 2).mean()
    np.testing.assert_allclose(value, expected.item(), 1e-5)  # another order of sums
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(buffers[name], buffer, 1e-6)  # another order of sums
