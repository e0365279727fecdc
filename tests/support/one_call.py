"""One call of a model's loss, as a step makes it."""

import jax
import jax.numpy as jnp


def called_once(model, rows, train=True):
    """The loss, its gradients and the buffers after it."""
    init = model.init(jax.random.key(0)) if callable(model.init) else model.init
    params, buffers = jax.tree.map(jnp.asarray, init)

    @jax.jit
    def total(params, rows):
        mean, new, _ = model.loss(params, buffers, rows, jax.random.key(0), train)
        return mean.total / mean.count, new

    (value, new), grads = jax.value_and_grad(total, has_aux=True)(params, rows)
    return value, grads, new
