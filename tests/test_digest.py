"""Programs as numbers: what differs has another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fzero.compat import auto_mesh
from fzero.programs.digest import digest


def own_vjp(factor: float) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def tanh(x: Any) -> Any:
        return jnp.tanh(x)

    tanh.defvjp(lambda x: (tanh(x), x), lambda x, g: (factor * g * (1 - tanh(x) ** 2),))
    return tanh


def own_jvp(factor: float) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def tanh(x: Any) -> Any:
        return jnp.tanh(x)

    @tanh.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        y = tanh(*primals)  # its own derivative calls it
        return y, factor * tangents[0] * (1 - y**2)

    return tanh


def scanned(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.lax.scan(lambda c, _: (function(c), None), x, None, length=3)[0]


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint, scanned])
@pytest.mark.parametrize("own", [own_vjp, own_jvp])
def test_derivatives_of_ones_own_are_part_of_a_program(own, around):
    """Though they are in none until it is differentiated."""
    one, same, other = (
        digest(jax.make_jaxpr(around(own(factor)))(jnp.ones(3))) for factor in (1.0, 1.0, 2.0)
    )
    assert one == same
    assert one != other


def test_what_a_program_has_closed_over_is_part_of_it():
    tables = [np.arange(4.0), np.arange(4.0), np.arange(4.0)[::-1]]
    programs = [jax.make_jaxpr(lambda x, t=t: x * jnp.asarray(t))(jnp.ones(4)) for t in tables]
    one, same, other = map(digest, programs)
    assert one == same
    assert one != other


def test_whole_numbers_beside_them_have_no_derivative():
    def loss(factor: float) -> Callable[[Any, Any], Any]:
        @jax.custom_vjp
        def rows(x: Any, index: Any) -> Any:
            return x[index], index

        def back(given: Any, g: Any) -> Any:
            x, index = given
            return factor * jnp.zeros_like(x).at[index].add(g[0]), None

        rows.defvjp(lambda x, index: (rows(x, index), (x, index)), back)
        return lambda x, index: rows(x, index)[0].sum()

    programs = [jax.make_jaxpr(loss(k))(jnp.ones(4), jnp.arange(2)) for k in (1.0, 2.0)]
    assert digest(programs[0]) != digest(programs[1])


def test_a_derivative_that_names_a_meshs_axes_is_part_of_a_program():
    """Nothing traces it outside: its collectives would have no axis."""

    def loss(factor: float) -> Callable[[Any], Any]:
        @jax.custom_vjp
        def total(x: Any) -> Any:
            return jax.lax.psum(x, "data")

        total.defvjp(lambda x: (total(x), None), lambda _, g: (factor * jax.lax.psum(g, "data"),))
        mesh = auto_mesh(np.array(jax.devices()[:2]), ("data",))
        spec = jax.sharding.PartitionSpec
        return jax.shard_map(
            total, mesh=mesh, in_specs=spec("data"), out_specs=spec(), check_vma=False
        )

    programs = [jax.make_jaxpr(loss(k))(jnp.ones(4)) for k in (1.0, 2.0)]
    assert digest(programs[0]) != digest(programs[1])
