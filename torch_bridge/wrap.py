"""A JAX function inside PyTorch: called with tensors, differentiated by `backward()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from torch_bridge.dtypes import canonical, jax_dtype, numpy_dtype
from torch_bridge.module.weights import to_host, to_torch


def wrap(jax_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as one of PyTorch, through which gradients flow.

    Tensors become arrays and results tensors without a copy where both libraries use the device
    (DLPack); a result that JAX hands on in an argument's memory is copied. It is compiled once for
    each structure and shapes of its arguments, and for each value of a constant.

    Args:
        jax_fn: a function of arrays, in nested containers, and of constants: numbers, strings,
            functions, types and arrays that are no tensors. With objects of other kinds, which may
            change from call to call, it runs without being compiled. What it reads from elsewhere
            (a global, a closure) stays as it was, as under `jax.jit`.

    Returns:
        A function of tensors in the same containers, which gives tensors of the dtypes that JAX
        gives: of float64 tensors float32, unless `jax_enable_x64` is set. Floating-point tensors
        that require gradients get them from `jax_fn`'s own derivatives, of any order.

    Raises:
        RuntimeError: (in a call) within `torch.func`, or for a derivative forwards.
        TypeError: it is no function; or (in a call) a tensor is sparse, or a result is no array.

    Example:
        >>> import jax.numpy as jnp, torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> wrap(lambda x: jnp.sum(x**2))(x).backward()
        >>> x.grad
        tensor([2., 4.])
    """
    if not callable(jax_fn):
        raise TypeError(f"tb.wrap: expected a function of arrays, got {jax_fn!r:.60}")
    compiled: dict[Any, Callable[..., Any]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it is no graph of torch's
    def function(*args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "tb.wrap: called within a transformation of torch.func, which does not look into"
                " JAX. Transform in JAX, within the function that is wrapped (jax.vmap, jax.grad,"
                " jax.jvp)"
            )
        leaves, spec = torch_pytree.tree_flatten((args, kwargs))
        numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if any(leaves[i].layout != torch.strided for i in numbers):
            raise TypeError("tb.wrap: expected dense tensors, got a sparse one: x.to_dense()")
        constants = {i: leaf for i, leaf in enumerate(leaves) if i not in numbers}
        values_of = tuple(map(_value, constants.values()))
        key = (spec, tuple(numbers), values_of)
        run: Any = None if None in values_of else compiled.get(key)
        if run is None:
            # An array may be written to later, and the function traced again.
            kept = {i: x.copy() if isinstance(x, np.ndarray) else x for i, x in constants.items()}

            def run(arrays: Sequence[Any]) -> Any:
                found: dict[int, Any] = {**kept, **dict(zip(numbers, arrays, strict=True))}
                values = [found[i] for i in range(len(found))]
                given, named = torch_pytree.tree_unflatten(values, spec)
                return jax.tree.map(_result, jax_fn(*given, **named))

            if None not in values_of:
                run = compiled[key] = jax.jit(run)
        structure: list[Any] = []
        call: Any = _BridgedCall.apply
        made = call(run, structure, *(leaves[i] for i in numbers))
        return jax.tree.unflatten(structure[0], made)

    return function


def _result(leaf: Any) -> Any:
    """What a function returned, as an array."""
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    if isinstance(leaf, bool | int | float | complex | np.generic):
        return jnp.asarray(leaf)
    raise TypeError(
        f"tb.wrap: the function returned {leaf!r:.60}, a {type(leaf).__name__}: expected arrays,"
        " numbers or None, in containers of jax.tree. Return what else there is beside it, from a"
        " function around the wrapped one"
    )


def _value(constant: Any) -> Any:
    """Something to tell a constant's value by; None of an object that may change."""
    if isinstance(constant, jax.Array) and jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        return (str(constant.dtype), _value(jax.random.key_data(constant)))
    if type(constant) is np.ndarray or isinstance(constant, np.generic | jax.Array):
        host = np.asarray(constant)
        plain = host.dtype != object
        return (type(constant), host.dtype, host.shape, host.tobytes()) if plain else None
    if constant is None or type(constant) in (bool, int, float, complex, str, bytes):
        return (type(constant), repr(constant))
    fixed = type | FunctionType | BuiltinFunctionType | Enum | torch.dtype | torch.device | np.dtype
    return constant if isinstance(constant, fixed) else None


class _BridgedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, structure: list[Any], *tensors: torch.Tensor) -> Any:
        arrays = [_array(tensor) for tensor in tensors]
        wanted = [i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs]

        def of_wanted(*chosen: Any) -> Any:
            given = dict(enumerate(arrays)) | dict(zip(wanted, chosen, strict=True))
            return run([given[i] for i in range(len(arrays))])

        if wanted:
            out, ctx.pullback = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
        else:
            out = of_wanted()
        leaves, treedef = jax.tree.flatten(out)
        structure.append(treedef)
        # An object's own arrays may come back, which nobody may write to.
        foreign = not isinstance(run, jax.stages.Wrapped)
        results = _of_their_own([_tensor(leaf, tensors) for leaf in leaves], tensors, foreign)
        ctx.wanted, ctx.shapes = wanted, [(leaf.shape, leaf.dtype) for leaf in leaves]
        ctx.run, ctx.treedef, ctx.num = run, treedef, len(tensors)
        # Memory may be shared: torch then finds out if it was written to before the backward pass.
        ctx.save_for_backward(*tensors, *results)
        ctx.mark_non_differentiable(*(r for r in results if not _differentiable(r)))
        return results

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "tb.wrap: no derivative forwards (torch.autograd.forward_ad); take it in JAX, within"
            " the function that is wrapped (jax.jvp)"
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved, out = ctx.saved_tensors, [None] * ctx.num
        for number, gradient in zip(ctx.wanted, _pulled(ctx, saved, gradients), strict=True):
            out[number] = gradient.to(saved[number].dtype)
        return (None, None, *out)


def _pulled(ctx: Any, saved: Sequence[torch.Tensor], gradients: Sequence[Any]) -> Sequence[Any]:
    """The gradients of the arguments that want one, of those of the results."""
    if torch.is_grad_enabled():  # they may be differentiated in turn: a call like any other
        given = [g for g in gradients if g is not None]

        def of_all(arrays: Sequence[Any]) -> list[Any]:
            own, rest = list(arrays[: ctx.num]), iter(arrays[ctx.num :])

            def of_wanted(*chosen: Any) -> Any:
                some = dict(enumerate(own)) | dict(zip(ctx.wanted, chosen, strict=True))
                return ctx.run([some[i] for i in range(ctx.num)])

            _, pullback = jax.vjp(of_wanted, *(own[i] for i in ctx.wanted))
            arrived = [None if g is None else next(rest) for g in gradients]
            return list(map(_turned, pullback(_cotangents(ctx, arrived))))

        call: Any = _BridgedCall.apply
        return call(of_all, [], *saved[: ctx.num], *given)
    arrived = [None if g is None else _array(g) for g in gradients]
    found = ctx.pullback(_cotangents(ctx, arrived))
    made = [_tensor(_turned(g), [saved[i]]) for i, g in zip(ctx.wanted, found, strict=True)]
    return _of_their_own(made, [*saved, *(g for g in gradients if g is not None)])


def _of_their_own(
    made: Sequence[torch.Tensor], given: Sequence[torch.Tensor], foreign: bool = False
) -> tuple[torch.Tensor, ...]:
    """Results that share no memory with what was given, or with each other.

    JAX, whose arrays nobody writes to, hands on an argument's buffer as a result; torch would not
    know that a write to one changes the other.
    """
    taken = {x.data_ptr() for x in given}
    out: list[torch.Tensor] = []
    for x in made:
        own = x.clone() if foreign or x.data_ptr() in taken else x
        taken.add(own.data_ptr())
        out.append(own)
    return tuple(out)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _cotangents(ctx: Any, arrived: Sequence[Any]) -> Any:
    """What a pullback takes, of the gradients of the results as arrays, or `None`."""

    def of(gradient: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if not jnp.issubdtype(dtype, jnp.inexact):
            return np.zeros(shape, jax.dtypes.float0)
        return jnp.zeros(shape, dtype) if gradient is None else _turned(gradient.astype(dtype))

    cotangents = [of(g, *about) for g, about in zip(arrived, ctx.shapes, strict=True)]
    return jax.tree.unflatten(ctx.treedef, cotangents)


def _turned(gradient: jax.Array) -> jax.Array:
    """A gradient of one library as the other has it: of complex numbers, conjugates."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


def _array(tensor: torch.Tensor) -> jax.Array:
    """A tensor as an array, in its own memory where JAX can use that."""
    plain = tensor.detach().contiguous().resolve_conj().resolve_neg()
    kind = "gpu" if plain.is_cuda else plain.device.type
    exact = canonical(numpy_dtype(plain.dtype)) == numpy_dtype(plain.dtype)
    if exact and plain.numel() and kind in {device.platform for device in jax.local_devices()}:
        return jax.dlpack.from_dlpack(plain)
    return jnp.asarray(to_host(plain), dtype=jax_dtype(plain.dtype))


def _tensor(array: Any, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """An array as a tensor where the arguments are."""
    device = like[0].device if like else torch.device("cpu")
    one = isinstance(array, jax.Array) and len(array.devices()) == 1
    if one and array.size and next(iter(array.devices())).platform == _platform(device):
        return torch.utils.dlpack.from_dlpack(array)
    return to_torch(array).to(device)


def _platform(device: torch.device) -> str:
    return "gpu" if device.type == "cuda" else device.type
