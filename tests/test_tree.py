"""Paths, sizes and aliases of leaves."""

from __future__ import annotations

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fzero as fz
from fzero.tree import (
    aliased_leaves,
    device_bytes,
    is_floating,
    leaf_bytes,
    leaf_keys,
    named_leaves,
    owner_of,
    same_object,
    shape_of,
)
from tests.support import tiny


def test_paths_through_dicts_lists_tuples_and_dataclasses():
    mean = fz.Mean(1, 2)
    tree = {"a": [10, (11, 12)], "m": mean, "z": {"y": None, "x": 13}}
    assert named_leaves(tree) == [
        ("a/0", 10), ("a/1/0", 11), ("a/1/1", 12), ("m/total", 1), ("m/count", 2), ("z/x", 13),
    ]  # fmt: skip


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node of a user's own, whose children have one key."""

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("twin")
        return [(key, 1), (key, 2)], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()


def test_children_of_one_key_are_counted():
    assert named_leaves({"a": Twins()}) == [("a/twin", 1), ("a/twin (2)", 2)]


def test_a_moment_is_of_the_parameter_with_the_longest_path():
    assert owner_of("0/mu/blocks/w", {"w", "blocks/w"}) == "blocks/w"


def test_a_bare_leaf_has_an_empty_path():
    assert named_leaves(5) == [("", 5)]


class TestAliases:
    """Two leaves that share memory; donating them would give one buffer away twice."""

    def test_the_same_object_twice(self):
        w = jnp.ones(3)
        assert aliased_leaves({"a": w, "b": {"c": w}, "d": jnp.ones(3)}) == [["a", "b/c"]]

    def test_three_paths_and_two_groups(self):
        v, w = jnp.ones(3), jnp.zeros(2)
        assert aliased_leaves([v, w, v, w, v]) == [["0", "2", "4"], ["1", "3"]]

    def test_different_objects_over_one_buffer(self):
        w = jnp.ones(3)
        # The same array placed where it already is: a new object over the old memory.
        other = jax.device_put(w, w.sharding)
        view = jax.make_array_from_single_device_arrays(w.shape, w.sharding, [w])
        assert view is not w
        assert other is not w or view is not w
        assert aliased_leaves([w, view]) == [["0", "1"]]

    def test_a_copy_is_no_alias(self):
        w = jnp.ones(3)
        assert aliased_leaves([w, jnp.array(w, copy=True)]) == []

    def test_equal_values_are_no_alias(self):
        assert aliased_leaves([jnp.ones(3), jnp.ones(3)]) == []

    def test_one_numpy_array_twice(self):
        w = np.ones(3)
        assert aliased_leaves([w, w]) == [["0", "1"]]
        assert aliased_leaves([w, w.copy()]) == []

    def test_zero_size_leaves_own_no_memory(self):
        empty = jnp.zeros((0, 4))
        assert aliased_leaves([empty, empty]) == []

    def test_tracers_are_told_apart_by_identity(self):
        found = []

        def trace(x):
            found.append(aliased_leaves({"a": x, "b": x, "c": x + 1}))
            return x

        jax.eval_shape(trace, jax.ShapeDtypeStruct((2,), jnp.float32))
        assert found == [[["a", "b"]]]

    def test_random_keys(self):
        key = jax.random.key(0)
        assert aliased_leaves([key, key]) == [["0", "1"]]
        assert aliased_leaves([key, jax.random.key(0)]) == []


def test_same_object_is_by_identity():
    w = jnp.ones(3)
    assert same_object([w, jnp.ones(3), w])
    assert not same_object([w, jnp.ones(3)])


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [(np.ones(2, np.float64), "float32"), (np.ones(2, np.int64), "int32"),
     (np.ones(2, np.float16), "float16"), (np.ones(2, bool), "bool")],
)  # fmt: skip
def test_shapes_have_the_dtype_that_jax_would_give(leaf, dtype):
    assert shape_of(leaf).dtype == dtype
    assert shape_of(leaf).shape == (2,)


@pytest.mark.parametrize(
    ("dtype", "floating"),
    [("float32", True), ("bfloat16", True), ("float16", True), ("int32", False), ("bool", False)],
)
def test_what_is_floating(dtype, floating):
    assert is_floating(jnp.zeros(2, dtype)) == floating


def test_a_key_is_not_floating():
    assert not is_floating(jax.random.key(0))


def test_bytes_whole_in_part_and_per_device():
    leaf = jnp.ones((16, 6), jnp.bfloat16)
    assert leaf_bytes(leaf) == 192
    assert leaf_bytes(leaf, (2, 6)) == 24
    mesh = fz.Plan(data=8).mesh()
    split = jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("data")))
    assert device_bytes(split) == 24
    assert device_bytes(jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))) == 192
    assert device_bytes(jnp.zeros(())) == 4


class TestKeysOfSeveralKinds:
    """A dict's leaves are in the order of its keys, and 1 and "a" have none."""

    MIXED = {"layers": [{"b": np.ones((4, 4)), 1: np.ones((4, 4))}]}  # noqa: RUF012
    WORDS = (
        r"the dict layers/0 has keys of several kinds \(1: int, 'b': str\), .* write all as strings"
    )

    def test_named(self):
        with pytest.raises(fz.StateError, match=self.WORDS):
            named_leaves(self.MIXED)
        ordered = OrderedDict({"b": 1, 1: 2})  # which has an order of its own
        assert named_leaves(ordered) == [("b", 1), ("1", 2)]
        with pytest.raises(fz.StateError, match="the dict at the top has"):
            leaf_keys({1: 1, "b": ordered})

    @pytest.mark.parametrize("given", ["values", "function"])
    def test_of_a_model(self, given):
        init = (self.MIXED, {}) if given == "values" else lambda rng: (self.MIXED, {})
        model = fz.Model(init, lambda params, buffers, batch, rng, train: None)
        with pytest.raises(fz.StateError, match=self.WORDS.replace("layers", "params/layers")):
            fz.init(model, optax.sgd(0.1), fz.Plan(data=1))

    @pytest.mark.parametrize("make", [fz.train_step, fz.eval_step])
    def test_of_a_batch(self, make):
        model, tx, plan = tiny.chain(), optax.sgd(0.1), fz.Plan(data=1)
        state = fz.init(model, tx, plan)
        step = make(model, *([tx] if make is fz.train_step else []), plan)
        with pytest.raises(fz.StateError, match=self.WORDS):
            step(state, {**self.MIXED, "ids": np.ones((4, 4))})
