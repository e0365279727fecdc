"""Steps that are skipped: what they leave as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fzero.programs.jaxprs import Program, Var, read, run_ops
from fzero.tree import PyTree


def chosen(taken: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """The new values of a step that is taken, else the old ones."""
    return jax.tree.map(partial(jnp.where, taken), new, old)


def updated(
    update: Callable[..., tuple[PyTree, PyTree]],
    taken: jax.Array,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    loss: jax.Array,
) -> tuple[PyTree, PyTree]:
    """An optimizer's updates, and its new state, which is the old one unless the step is `taken`.

    A leaf of the state is chosen where it is computed, and updates are made of what was chosen.
    Chosen when all is done, new moments would be there beside those that are kept.

    Args:
        update: gives updates and a new state of all that follows.
        taken: whether the step is taken. The updates of one that is not are of no use.
        grads: mean gradients.
        state: the optimizer's state.
        params: the parameters.
        loss: the mean loss.
    """
    given = grads, state, params, loss
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(*given)
    program = Program(closed.jaxpr, closed.consts, differentiable=True)
    env = {**program.consts, **dict(zip(program.inputs, jax.tree.leaves(given), strict=True))}
    num_updates = len(jax.tree.leaves(shapes[0]))
    pairs = list(zip(program.outputs[num_updates:], jax.tree.leaves(state), strict=True))
    computed = Counter(x for x, _ in pairs if isinstance(x, Var) and x not in env)
    # One value that is several leaves is chosen for each of them, in the end.
    early = {x: old for x, old in pairs if isinstance(x, Var) and computed[x] == 1}
    for op in program.ops:
        run_ops([op], env)
        env.update({x: jnp.where(taken, env[x], early[x]) for x in op.results if x in early})
    updates = [read(env, x) for x in program.outputs[:num_updates]]
    new = [
        env[x] if isinstance(x, Var) and x in early else jnp.where(taken, read(env, x), old)
        for x, old in pairs
    ]
    found: tuple[PyTree, PyTree] = jax.tree.unflatten(jax.tree.structure(shapes), updates + new)
    return found
