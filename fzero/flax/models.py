"""flax modules as models: linen and nnx, with running statistics, dropout and the train flag.

flax is imported when a module is converted, not before, so that fzero works without it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fzero.axes import AXES, FURTHER
from fzero.compat import nnx_graphs
from fzero.errors import PlanError, StateError
from fzero.flax.nnx_calls import raw
from fzero.flax.nnx_modules import FLAGS, NnxModule, take_apart
from fzero.keys import seed_key
from fzero.links import Context, Mean, Shard, asked_for, require_takes, split_loss
from fzero.model import Model
from fzero.precision import called_with
from fzero.programs.forward_calls import ForwardCalls
from fzero.tree import PyTree, is_floating, named_leaves


# `call(params, ctx, args, kwargs) -> (output, buffers)`: one call of a module.
_Call = Callable[[PyTree, Context, tuple[Any, ...], dict[str, Any]], tuple[Any, PyTree]]


def from_flax(
    module: Any,
    loss: Callable[..., Any],
    *example_args: Any,
    rng: int | None = None,
    axes: Mapping[str, str | None] | None = None,
    predict: Callable[..., Any] | None = None,
    **example_kwargs: Any,
) -> Model:
    """A flax module with a loss, as a model.

    A linen module starts from `module.init(key, *example_args, **example_kwargs)`, with the key
    given to `fz.init`. That runs under jit, so no device ever holds the whole. Values from
    elsewhere go in with `dataclasses.replace(model, init=(params, other_collections))`. An nnx
    module starts from its own values, which are copied; the module itself is never changed.

    Parameters are linen's `params` collection, or the `nnx.Param`s by path (`layers/0/kernel`).
    Every other collection (`batch_stats`) or `nnx.Variable` is a buffer: of a random key its bits,
    while streams of keys (`nnx.Rngs`) begin in every step at that step's key. A device sees its own
    rows only: BatchNorm normalises by them, and its running statistics are averaged over devices;
    `BatchNorm(axis_name=("replica", "data"))` normalises by the whole microbatch.

    What the module says of its parameters' sharding (`with_partitioning`, logical names too) is the
    model's `shard`: dims named `tensor`, `context` or `expert` lie along that axis of a plan that
    has it. `data` and `replica` are the plan's to decide, and not read. (A linen module without
    examples shows no annotations; `dataclasses.replace(model, shard=...)` says it then.)

    Args:
        module: a `flax.linen.Module` or a `flax.nnx.Module`.
        loss: `loss(forward, batch)`, which returns a `Mean` or a scalar, or a pair of that and a
            dict of metrics. `forward(*args, **kwargs)` runs the module with the step's parameters,
            buffers, key and mode. `method="encode"` calls another method; for linen,
            `mutable=["intermediates"]` gives `(output, {"intermediates": ...})` as
            `Module.apply` does. Called several times, each call has its own randomness and sees
            the buffers that the one before left. Where the parameters have 16 bits, floats that it
            is called with are rounded to as many; what the loss reads of the batch is as it came.
            Like any model's it may ask for `step`.
        *example_args: arguments for linen's `init`, arrays or `jax.ShapeDtypeStruct`s.
        rng: seed for linen's initial values, in place of the key given to `fz.init`.
        axes: for other names in the module's annotations the mesh axis that is meant, or `None`
            for none: `{"mlp": "tensor", "embed": None}`.
        predict: `predict(forward, batch)`, which returns what `predict_step` gives: any tree with
            a row for each example. Its `forward` runs the module as in evaluation.
        **example_kwargs: keyword arguments for linen's `init`.

    Returns:
        The model. Training mode reaches the module by `train`, `training`, `is_training` or
        `deterministic` (the opposite) where the called method takes one of them and the loss does
        not pass it; by a linen module's attribute of that name otherwise; and for nnx by
        `module.train()` and `module.eval()`, and attributes of those names in all modules. How
        devices' buffers become one, `dataclasses.replace(model, buffer_reduce=...)` says (see
        `fzero.Model`).

    Raises:
        ImportError: flax is not installed.
        TypeError: `module` is not a flax module.
        StateError: examples or a seed for an nnx module, which has its values; an nnx variable of
            several arrays; or (in a step) a call that changes the structure, shapes or dtypes of
            the buffers, reads what a stream of random keys holds, or writes to an nnx module what
            would be lost: parameters, or anything that is no nnx.Variable; or buffers within a
            function that JAX transforms, such as `jax.checkpoint`.
        PlanError: an annotation has a name that is no mesh axis and not in `axes`, or `loss` or
            `predict` takes other arguments; or (in a step) the module does not take those that it
            is called with.

    Example:
        >>> import fzero as fz, jax.numpy as jnp, numpy as np, optax
        >>> from flax import linen as nn
        >>> def loss(forward, batch):
        ...     return jnp.mean((forward(batch["x"]) - batch["y"]) ** 2)
        >>> model = fz.from_flax(nn.Dense(1), loss, np.zeros((1, 3), np.float32))
        >>> plan, tx = fz.Plan(data=1), optax.sgd(0.1)
        >>> batch = {"x": np.ones((4, 3), np.float32), "y": np.ones((4, 1), np.float32)}
        >>> state, metrics = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), batch)
        >>> state.params["kernel"].shape, sorted(metrics)[:2]
        ((3, 1), ['count', 'grad_norm'])
    """
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ImportError(
            "from_flax: flax is not installed; pip install 'fzero[flax]' (or flax>=0.12)"
        ) from error
    require_takes(loss, "loss(forward, batch)", "from_flax")
    if predict is not None:
        require_takes(predict, "predict(forward, batch)", "from_flax")
    if isinstance(module, linen.Module):
        boxed = _linen_init(module, example_args, example_kwargs, rng)
        shapes = None
        if example_args or example_kwargs:
            shapes, _ = jax.eval_shape(boxed, jax.random.key(0))
        shard = _shard(named_leaves(linen.get_partition_spec(shapes)), axes or {})
        return _model(_unboxed(boxed), _linen_call(module), loss, predict, shard)
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"from_flax: expected an instance of flax.linen.Module or flax.nnx.Module, got"
            f" {module!r:.80}"
        )
    if example_args or example_kwargs or rng is not None:
        raise StateError(
            "from_flax: an nnx module brings its own initial values, so example arguments and rng="
            " would be ignored; pass only the module and the loss"
        )
    with nnx_graphs():
        found, initial = take_apart(module)
        specs = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(module, nnx.Param)))
    named = (("/".join(map(str, path)), raw(spec)) for path, spec in specs)
    return _model(initial, _nnx_call(found), loss, predict, _shard(named, axes or {}))


def _shard(
    specs: Iterable[tuple[str, PartitionSpec | None]], axes: Mapping[str, str | None]
) -> dict[str | re.Pattern[str], tuple[str | None, ...]]:
    """The further axis of each dim of each annotated parameter."""
    found: dict[str | re.Pattern[str], tuple[str | None, ...]] = {}
    for path, spec in specs:
        named = [dim if isinstance(dim, tuple) else (dim,) for dim in spec or ()]
        dims = [[axes.get(name, name) for name in dim if name is not None] for dim in named]
        known = {*FURTHER, *AXES, None}
        own = [[name for name in dim if name is not None and name not in AXES] for dim in dims]
        if any(name not in known for dim in dims for name in dim) or any(len(x) > 1 for x in own):
            raise PlanError(
                f"from_flax: {path} is annotated {tuple(spec or ())}: expected for each dim one of"
                f" {list(FURTHER)} ({' and '.join(AXES)} are the plan's to decide), or a name in"
                " axes=; say from_flax(..., axes={'mlp': 'tensor', 'embed': None}), which mesh"
                " axis such a name means, if any"
            )
        if any(own):
            found[path] = tuple(dim[0] if dim else None for dim in own)
    return found


def _model(
    init: Any, call: _Call, loss: Callable[..., Any], predict: Callable[..., Any] | None,
    shard: Shard,
) -> Model:  # fmt: skip
    """A model of a user's `loss(forward, batch)` and `predict(forward, batch)`."""

    def step_loss(
        params: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array, train: bool,
        _ctx: Context | None = None,
    ) -> tuple[Mean, PyTree, dict[str, Any]]:  # fmt: skip
        own = Context(batch, rng, train, buffers)
        forward = _calls(call, params, own, _ctx and _ctx.dtype)
        mean, metrics = split_loss(loss(forward, batch, **asked_for(loss, _ctx or own)))
        return mean, forward.left, metrics

    def outputs(
        params: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array, _ctx: Context | None = None
    ) -> Any:
        assert predict is not None
        own = Context(batch, rng, False, buffers)
        forward = _calls(call, params, own, _ctx and _ctx.dtype)
        return predict(forward, batch, **asked_for(predict, _ctx or own))

    return Model(init, step_loss, predict=None if predict is None else outputs, shard=shard)


def _calls(call: _Call, params: PyTree, ctx: Context, dtype: Any) -> ForwardCalls:
    """The module's calls in one pass."""

    def apply(
        buffers: PyTree, key: jax.Array, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, PyTree]:
        args, kwargs = called_with((args, kwargs), params, dtype)
        out, new = call(params, replace(ctx, rng=key, buffers=buffers), args, kwargs)
        return out, _as_before(buffers, new)

    return ForwardCalls(apply, ctx.buffers, ctx.rng, _refused)


def _refused(told: str) -> StateError:
    return StateError(
        f"from_flax: {told}, or have the module do neither there: deterministic=True, or random"
        " keys as an argument; a BatchNorm with use_running_average=True"
    )


def _as_before(old: PyTree, new: PyTree) -> PyTree:
    """New buffers in the dtypes of the old ones; refuses any that appeared or changed."""
    was, now = dict(named_leaves(old)), dict(named_leaves(new))

    def kind(leaf: Any) -> tuple[Any, ...]:
        # A float that was computed in bfloat16 is still kept in its own precision.
        return leaf.shape, "float" if is_floating(leaf) else leaf.dtype

    changed = [
        path
        for path in sorted(was.keys() | now.keys())
        if path not in was or path not in now or kind(was[path]) != kind(now[path])
    ]
    if not changed:
        return jax.tree.map(lambda a, b: b if b.dtype == a.dtype else b.astype(a.dtype), old, new)
    shown = "; ".join(
        f"{path}: {_told(was.get(path))} became {_told(now.get(path))}" for path in changed[:4]
    )
    raise StateError(
        f"from_flax: a call changed the structure of the buffers (by path): {shown}. Buffers"
        " stay alike from step to step: make one in the shape and dtype that the call gives, or"
        " cast what is written (.astype). What a module only reports (sow) belongs into the"
        " collection 'intermediates' (nnx.Intermediate), which is not kept;"
        " forward(..., mutable=['intermediates']) reads it from a linen module"
    )


def _told(leaf: Any) -> str:
    return "none" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _method(module: Any, name: Any) -> Callable[..., Any]:
    """The method that a call asks for."""
    function = getattr(module, name, None) if isinstance(name, str) else None
    if not callable(function):
        raise StateError(
            f"from_flax: forward(..., method={name!r:.60}) calls that method of the module, and"
            f" {type(module).__name__} has none of the name. An argument of __call__ that is named"
            " method itself is given by its position"
        )
    return function


def _with_flag(
    function: Callable[..., Any], train: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Keyword arguments with the function's own train flag set, unless the caller set it."""
    signature = inspect.signature(function)
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise PlanError(
            f"from_flax: the module is called with what it does not take: {error}; expected"
            f" {function.__qualname__}{signature}. Random keys (rngs=) are not given: each call"
            " draws from the step's key by itself, whatever the streams' names"
        ) from None
    flags = {
        name: train == in_training
        for name, in_training in FLAGS.items()
        if name in signature.parameters and name not in given
    }
    return {**kwargs, **flags}


def _linen_mode(module: Any, function: Callable[..., Any], train: bool) -> Any:
    """The module with its attribute `train` (or alike) set, where that is how it is told."""
    taken = inspect.signature(function).parameters
    flags = {
        name: train == in_training
        for name, in_training in FLAGS.items()
        if name in getattr(module, "__dataclass_fields__", {})
        and name not in taken
        and isinstance(getattr(module, name), bool | None)
    }
    return module.clone(**flags) if flags else module


def _linen_init(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None
) -> Callable[[jax.Array], tuple[PyTree, PyTree]]:
    """The initial values, in the boxes that hold their annotations."""
    from flax.core import unfreeze

    # Host copies: a model holds no device memory, and cannot see a later change of the example.
    args, kwargs = jax.tree.map(_host_copy, (args, kwargs))

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        own_args, own_kwargs = jax.tree.map(_example, (args, kwargs))
        own_kwargs = _with_flag(module.__call__, False, own_args, own_kwargs)
        key = key if seed is None else seed_key(seed)
        chosen = _linen_mode(module, module.__call__, False)
        variables = unfreeze(chosen.init(key, *own_args, **own_kwargs))
        _require_no_scales(variables)
        return variables.pop("params", {}), variables

    return init


def _require_no_scales(collections: Mapping[str, Any]) -> None:
    """Refuses the scales of 8 bits, for which linen takes gradients."""
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

    if OVERWRITE_WITH_GRADIENT in collections:
        raise StateError(
            f"from_flax: the module has the collection {OVERWRITE_WITH_GRADIENT!r} (products of 8"
            " bits, flax.linen.fp8_ops), whose scales are taken from gradients, and here they would"
            " stay as they began. Leave dot_general_cls out: Plan(precision='fp8') multiplies in 8"
            " bits and keeps its own scales"
        )


def _unboxed(
    boxed: Callable[[jax.Array], tuple[PyTree, PyTree]],
) -> Callable[[jax.Array], tuple[PyTree, PyTree]]:
    """The initial values alone: where they live is the plan's to say."""
    from flax.core import meta

    return lambda key: meta.unbox(boxed(key))


def _host_copy(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray | jax.Array) else leaf


def _example(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _linen_call(module: Any) -> _Call:
    def call(
        params: PyTree, ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, PyTree]:
        _require_no_scales(ctx.buffers)
        kwargs = dict(kwargs)
        wanted, method = kwargs.pop("mutable", None), kwargs.pop("method", "__call__")
        function = _method(module, method)
        kwargs = _with_flag(function, ctx.train, args, kwargs)
        # Streams of other names draw from "params", as linen has it.
        rngs = {
            name: jax.random.fold_in(ctx.rng, i) for i, name in enumerate(("dropout", "params"))
        }
        out, new = _linen_mode(module, function, ctx.train).apply(
            {"params": params, **ctx.buffers},
            *args,
            rngs=rngs,
            method=method,
            mutable=[*ctx.buffers, *_names(wanted)],
            **kwargs,
        )
        kept = {name: new.get(name, old) for name, old in ctx.buffers.items()}
        if wanted is None:
            return out, kept
        return (out, {name: new.get(name, {}) for name in _names(wanted)}), kept

    return call


def _names(wanted: str | Iterable[str] | None) -> tuple[str, ...]:
    if wanted is None:
        return ()
    return (wanted,) if isinstance(wanted, str) else tuple(wanted)


def _nnx_call(found: NnxModule) -> _Call:
    def call(
        params: PyTree, ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, PyTree]:
        kwargs = dict(kwargs)
        method = kwargs.pop("method", "__call__")

        def run(module: Any, arguments: PyTree) -> Any:
            args, kwargs = arguments
            function = _method(module, method)
            return function(*args, **_with_flag(function, ctx.train, args, kwargs))

        return found.call(params, ctx, run, (args, kwargs))

    return call
