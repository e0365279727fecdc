"""The training step that a JAX user would write by hand for one ZeRO stage, without fzero.

`lax.scan` over stacked layers with `jax.checkpoint`, everything inside one `jax.shard_map`, optax
on the shards that a device owns, state donated. Kept between steps is exactly what fzero keeps:

- stage 0: everything whole, gradients summed;
- stage 1: gradients reduce-scattered at the end, one shard updated, parameters gathered;
- stage 2: the same, but each layer's gradient is reduce-scattered as soon as it exists;
- stage 3: parameters are shards, gathered in the body of the scan and again in its recomputation.
  Autodiff turns each gather into the reduce-scatter of the gradient.

With microbatches, stages 0 and 1 add whole gradients up and reduce once; stages 2 and 3 add shards.
It promises less than fzero does: stages need not agree bit for bit, nothing is checked, and nothing
is arranged so that a GPU can communicate behind its matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Config, block, embed, head
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


PyTree = Any
AXIS = "data"
SMALLEST_SHARDED = 16 * 1024  # bytes of one layer's part; fzero's default


@dataclass(frozen=True)
class Pieces:
    """How leaves are cut over the devices.

    Args:
        num: number of devices.
        dims: per leaf, the dim that is cut, or -1 for a whole leaf.
    """

    num: int
    dims: PyTree

    def specs(self) -> PyTree:
        """Partition specs of shards."""
        return jax.tree.map(lambda d: P() if d < 0 else P(*(None,) * d, AXIS), self.dims)

    def gather(self, shards: PyTree, dims: PyTree) -> PyTree:
        """Whole leaves."""
        return jax.tree.map(
            lambda x, d: x if d < 0 else lax.all_gather(x, AXIS, axis=d, tiled=True), shards, dims
        )

    def scatter(self, grads: PyTree, dims: PyTree) -> PyTree:
        """Shards of sums over devices; whole leaves stay what they are."""
        return jax.tree.map(lambda g, d: g if d < 0 else _scatter(g, d), grads, dims)

    def sum_whole(self, grads: PyTree) -> PyTree:
        """Sums over devices of the leaves that are not cut."""
        if self.num == 1:
            return grads
        return jax.tree.map(lambda g, d: lax.psum(g, AXIS) if d < 0 else g, grads, self.dims)

    def own(self, whole: PyTree) -> PyTree:
        """This device's shards of whole leaves."""

        def cut(x: jax.Array, d: int) -> jax.Array:
            rows = x.shape[d] // self.num
            return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * rows, rows, d)

        return jax.tree.map(lambda x, d: x if d < 0 else cut(x, d), whole, self.dims)

    def square_norm(self, shards: PyTree) -> jax.Array:
        """Squared norm of gradients of which each device has its shards."""
        squares = [
            (jnp.sum(jnp.square(g)), d)
            for g, d in zip(jax.tree.leaves(shards), jax.tree.leaves(self.dims), strict=True)
        ]
        cut = sum((s for s, d in squares if d >= 0), jnp.float32(0))
        cut = cut if self.num == 1 else lax.psum(cut, AXIS)
        return cut + sum(s for s, d in squares if d < 0)


def _scatter(grad: jax.Array, dim: int) -> jax.Array:
    return lax.psum_scatter(grad, AXIS, scatter_dimension=dim, tiled=True)


def cut(params: PyTree, num: int) -> Pieces:
    """The first dim that divides, of every leaf large enough; a stack's dim 0 counts layers."""

    def dim(path: tuple[Any, ...], leaf: Any) -> int:
        first = int(path[0].key == "blocks")
        if num == 1 or 4 * int(np.prod(leaf.shape[first:])) < SMALLEST_SHARDED:
            return -1
        return next(d for d in range(first, leaf.ndim) if leaf.shape[d] % num == 0)

    return Pieces(num, jax.tree_util.tree_map_with_path(dim, params))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _reduced_behind(shard: jax.Array, whole: jax.Array, dim: int) -> jax.Array:
    """The whole leaf, whose gradient arrives reduce-scattered at the shard."""
    return whole


_reduced_behind.defvjp(
    lambda shard, whole, dim: (whole, None), lambda dim, _, grad: (_scatter(grad, dim), None)
)


def local_gradients(
    config: Config, zero: int, pieces: Pieces, params: PyTree, ids: jax.Array
) -> tuple[jax.Array, PyTree]:
    """Sum of one device's losses over its (B, T + 1) ids, and its gradients.

    Cut leaves' gradients are reduced in stages 2 and 3, all others are local sums.
    """
    layer_dims = jax.tree.map(lambda d: d - 1 if d > 0 else d, pieces.dims["blocks"])

    def use(own: PyTree, kept: PyTree, dims: PyTree) -> PyTree:
        if zero == 3:
            return pieces.gather(own, dims)
        if zero == 2:
            return jax.tree.map(
                lambda o, k, d: o if d < 0 else _reduced_behind(o, k, d), own, kept, dims
            )
        return own

    def loss(own: PyTree) -> jax.Array:
        def layer(x: jax.Array, p: tuple[PyTree, PyTree]) -> tuple[jax.Array, None]:
            return block(use(*p, layer_dims), x, config.heads), None

        ends = {name: use(own[name], params[name], pieces.dims[name]) for name in ("embed", "head")}
        x = embed(ends["embed"], ids[:, :-1])
        # prevent_cse=False: within a scan nothing can be merged with the forward pass anyway.
        layer = jax.checkpoint(layer, prevent_cse=False)
        x, _ = lax.scan(layer, x, (own["blocks"], params["blocks"]))
        return head(ends["head"], x, ids[:, 1:])

    return jax.value_and_grad(loss)(pieces.own(params) if zero == 2 else params)


def train_step(
    config: Config,
    tx: optax.GradientTransformation,
    zero: int,
    devices: Sequence[Any],
    params: PyTree,
    microbatches: int = 1,
) -> tuple[Callable[..., Any], tuple[PyTree, PyTree], NamedSharding]:
    """Builds the step, its first state, and the sharding of its batch.

    Returns:
        `step(params, opt_state, ids) -> (params, opt_state, loss, gradient norm)`, jit-compiled and
        donating; `(params, opt_state)`; where ids go.
    """
    mesh = Mesh(np.asarray(devices), (AXIS,))
    pieces = cut(params, mesh.size)
    whole = jax.tree.map(lambda _: P(), params)
    specs = pieces.specs() if zero == 3 else whole
    shapes = jax.eval_shape(tx.init, params)
    opt_specs = optax.tree.map_params(
        tx, lambda _, spec: spec, shapes, pieces.specs() if zero else whole,
        transform_non_params=lambda _: P(),
    )  # fmt: skip

    def add_up(params: PyTree, ids: jax.Array) -> tuple[jax.Array, PyTree]:
        run = partial(local_gradients, config, zero, pieces, params)
        if microbatches == 1:
            return run(ids)
        rows = ids.reshape(microbatches, -1, ids.shape[-1])
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(run, rows[0]))
        sums, _ = lax.scan(lambda sums, r: (jax.tree.map(jnp.add, sums, run(r)), None), zeros, rows)
        return sums

    def step(params: PyTree, opt_state: PyTree, ids: jax.Array) -> Any:
        loss, grads = add_up(params, ids)
        loss = loss if pieces.num == 1 else lax.psum(loss, AXIS)
        if zero == 0:
            grads = jax.tree.map(lambda g: lax.psum(g, AXIS) if pieces.num > 1 else g, grads)
        else:
            grads = pieces.sum_whole(grads if zero > 1 else pieces.scatter(grads, pieces.dims))
        grads = jax.tree.map(lambda g: g / config.tokens, grads)
        norm = optax.tree.norm(grads) if zero == 0 else jnp.sqrt(pieces.square_norm(grads))
        shards = pieces.own(params) if zero in (1, 2) else params
        updates, opt_state = tx.update(grads, opt_state, shards)
        shards = optax.apply_updates(shards, updates)
        params = pieces.gather(shards, pieces.dims) if zero in (1, 2) else shards
        return params, opt_state, loss / config.tokens, norm

    # check_vma=False: the check would insert sums of its own for gradients of whole parameters.
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, opt_specs, P(AXIS)),
        out_specs=(specs, opt_specs, P(), P()), check_vma=False,
    )  # fmt: skip
    put = partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    state = jax.jit(lambda p: (p, tx.init(p)), out_shardings=(put(specs), put(opt_specs)))(params)
    return jax.jit(mapped, donate_argnums=(0, 1)), state, NamedSharding(mesh, P(AXIS))
