"""`torch.autograd.grad` and `torch.func.grad` in a forward: one operator, which JAX differentiates.

torch.export records what a forward computes, not what autograd does. While a module is exported the
call (forces of an energy, say) is one operator of this package; when the graph runs, the steps
before it are differentiated with respect to the values that it names.

`torch.func.grad(f)(x)` names a copy of `x` that only `f` is given, since what `f` reads of `x` by
itself is a constant to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fzero.errors import ConversionError
from torch_bridge.export.stand_ins.replacement import replaced


SLOPES = "torch_bridge.slopes.default"


def _shapes(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    further: bool,
) -> list[torch.Tensor]:
    return [torch.zeros_like(x) for x in inputs]


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_LIBRARY.define(
    "slopes(Tensor[] outputs, Tensor[] inputs, Tensor[] seeds, bool further) -> Tensor[]"
)
_LIBRARY.impl("slopes", _shapes, "CompositeExplicitAutograd")
torch.library.register_fake("torch_bridge::slopes", _shapes, lib=_LIBRARY)


def _mapped(
    info: Any, dims: Any, outputs: Any, inputs: Any, seeds: Any, further: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """Under `torch.vmap`: all rows at once where each has inputs of its own, else row by row."""
    of_outputs, of_inputs, of_seeds, _ = dims
    rows = range(info.batch_size)
    if all(d is None for d in (*of_outputs, *of_inputs)):
        found = [
            torch.ops.torch_bridge.slopes(outputs, inputs, _row(seeds, of_seeds, i), further)
            for i in rows
        ]
        return [torch.stack(each) for each in zip(*found, strict=True)], [0] * len(inputs)
    if any(d is None for d in of_inputs):
        raise ConversionError(
            "torch.func.grad under torch.vmap in the forward: with respect to a value that all"
            " rows share. Expand it first, x.expand(rows, *x.shape), and map over it, too."
        )
    pairs = zip(outputs, of_outputs, seeds, of_seeds, strict=True)
    # No row's output depends on another row's input: the gradient of the sum is each row's own.
    whole = [(x, _rows(seed, at, x, d, info.batch_size)) for x, d, seed, at in pairs]
    found = torch.ops.torch_bridge.slopes(
        [x for x, _ in whole], inputs, [seed for _, seed in whole], further
    )
    # Rows first: PyTorch would move them unseen by torch.export.
    return [x.movedim(d, 0) for x, d in zip(found, of_inputs, strict=True)], [0] * len(inputs)


def _row(values: Any, dims: Any, i: int) -> list[torch.Tensor]:
    return [x if d is None else x.select(d, i) for x, d in zip(values, dims, strict=True)]


def _rows(seed: torch.Tensor, at: int | None, x: torch.Tensor, d: int | None, rows: int) -> Any:
    """A seed with the rows of its output where the output has them."""
    if d is None:  # the same output in each row: it is counted once for each
        return seed * rows if at is None else seed.sum(at)
    return seed.unsqueeze(d).expand(x.shape) if at is None else seed.movedim(at, d)


torch.library.register_vmap("torch_bridge::slopes", _mapped, lib=_LIBRARY)


def record_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor, ...]:
    """What stands for `torch.autograd.grad` while a module is exported."""
    outs, ins, seeds = _listed(outputs), _listed(inputs), _listed(grad_outputs)
    if is_grads_batched or (allow_unused and not materialize_grads):
        raise ConversionError(
            "torch.autograd.grad in the forward: is_grads_batched is not converted, and"
            " allow_unused only with materialize_grads=True (zeros, not None). Of several outputs"
            " or in place of torch.autograd.functional: torch.func.vjp, jacrev"
        )
    if any(x.is_complex() for x in (*outs, *ins)):
        raise ConversionError(
            "torch.autograd.grad in the forward: of complex numbers; use real ones"
        )
    if not seeds:
        seeds = [None] * len(outs)
    given = [
        torch.ones_like(x) if seed is None else seed for x, seed in zip(outs, seeds, strict=True)
    ]
    return tuple(torch.ops.torch_bridge.slopes(outs, ins, given, bool(create_graph)))


@contextlib.contextmanager
def functional_gradients() -> Iterator[None]:
    """While a module is exported: `torch.func.grad` and the like are recorded."""
    functions = [(eager_transforms, name, fn) for name, fn in _FUNCTIONAL.items()]
    with replaced([*functions, (forward_ad, "enter_dual_level", _no_dual_level)]):
        yield


def _grad_and_value(
    func: Callable[..., Any], argnums: Any, has_aux: bool, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """What stands for `torch.func.grad_and_value(func, argnums, has_aux)(*args, **kwargs)`."""
    args, chosen = _own_copies(args, argnums)
    with torch.inference_mode(False):  # whatever stands around it, as in PyTorch
        given = func(*args, **kwargs)
        out = given[0] if has_aux else given
        if not isinstance(out, torch.Tensor) or out.ndim:
            raise ConversionError(
                "torch.func.grad in the forward: of a function that gives one number, got"
                f" {tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__};"
                " use torch.func.vjp or jacrev"
            )
    leaves, spec = pytree.tree_flatten(chosen)
    found = record_grad(out, leaves, create_graph=torch.is_grad_enabled())
    return pytree.tree_unflatten(list(found), spec), _outward(given)


def _vjp(
    func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False
) -> tuple[Any, ...]:
    """What stands for `torch.func.vjp(func, *primals)`."""
    primals, chosen = _own_copies(
        primals, tuple(range(len(primals))) if argnums is None else argnums
    )
    with torch.inference_mode(False):
        given = func(*primals)
    out, aux = given if has_aux else (given, None)
    leaves, spec = pytree.tree_flatten(chosen)

    def pull(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        further = torch.is_grad_enabled() if create_graph is None else create_graph
        seeds = pytree.tree_leaves(cotangents)
        found = record_grad(pytree.tree_leaves(out), leaves, seeds, create_graph=further)
        return pytree.tree_unflatten(list(found), spec)

    return (_outward(out), pull, _outward(aux)) if has_aux else (_outward(out), pull)


def _jvp_but_of_columns(
    function: Any,
    primals: Any,
    tangents: Any,
    argnums: Any = None,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> tuple[Any, ...]:
    """What stands for `torch.func.jvp`; `jacfwd`, which alone says `argnums`, has no trace.

    What `vjp` gives is linear in what it is given, and its gradient by that is the tangent. (Traced
    as it is, torch.export would lose the tangents of all that is made of other operators: matmul.)
    """
    if argnums is not None:
        raise ConversionError(
            "torch.func.jacfwd (or hessian) in the forward is not converted: torch.func.jacrev has"
            " the same values, and jacrev(jacrev(f)) is the hessian"
        )
    given, spec = pytree.tree_flatten(tangents)
    if any(map(torch._C._functorch.is_batchedtensor, pytree.tree_leaves((primals, given)))):
        raise ConversionError(
            "torch.func.jvp under torch.vmap in the forward: turn them around,"
            " torch.func.jvp(torch.vmap(f), (x,), (tangents,)) has the same values"
        )
    if pytree.tree_structure(primals) != spec:
        raise ConversionError(
            "torch.func.jvp in the forward: primals and tangents are tuples of one structure"
        )
    out, pull, *aux = _vjp(function, *primals, has_aux=has_aux)
    outs, spec = pytree.tree_flatten(out)
    weights = [torch.zeros_like(x) for x in outs]
    pulled = pytree.tree_leaves(pull(pytree.tree_unflatten(weights, spec), create_graph=True))
    found = record_grad(pulled, weights, given, create_graph=torch.is_grad_enabled())
    return out, pytree.tree_unflatten(list(found), spec), *aux


def _no_graph(_: Any) -> Any:
    """In place of `torch.func.linearize`'s own tracing, which nobody else asks for there."""
    raise ConversionError(
        "torch.func.linearize in the forward is not converted: torch.func.jvp(f, primals, tangents)"
        " has the same values, called for each of the tangents"
    )


def _no_dual_level() -> int:
    """A level that is in a graph is left open where decomposing that fails."""
    raise ConversionError(
        "torch.autograd.forward_ad in the forward is not converted: torch.func.jvp(f, primals,"
        " tangents) has the same values"
    )


def _as_it_is(function: Any) -> Any:
    return function


_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "grad_and_value_impl": _grad_and_value,
    "_vjp_with_argnums": _vjp,
    "_jvp_with_argnums": _jvp_but_of_columns,
    "make_fx": _no_graph,
    "lazy_dynamo_disallow": _as_it_is,
}


def _outward(given: Any) -> Any:
    """What a function gave, without gradient if `no_grad` stands around the whole."""
    return (
        given
        if torch.is_grad_enabled()
        else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given)
    )


def _own_copies(args: Sequence[Any], argnums: Any) -> tuple[tuple[Any, ...], Any]:
    """The arguments, those of `argnums` as copies; and these alone."""
    copied, numbers = list(args), (argnums,) if isinstance(argnums, int) else argnums
    for i in numbers:
        copied[i] = pytree.tree_map(torch.clone, copied[i])
    chosen = tuple(copied[i] for i in numbers)
    return tuple(copied), chosen[0] if isinstance(argnums, int) else chosen


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def slopes(
    run: Callable[[dict[str, Any]], Sequence[Any]],
    inputs: Sequence[str],
    values: Sequence[Any],
    seeds: Sequence[Any],
    further: bool,
) -> list[jax.Array]:
    """Gradients of `run(inputs by name)`, times `seeds`, with respect to some values.

    Args:
        run: the outputs, from values of the inputs.
        inputs: their names.
        values: their values.
        seeds: what each output's gradient is multiplied by.
        further: whether the result may be differentiated.
    """

    def outputs(*chosen: Any) -> list[Any]:
        return [jnp.asarray(x) for x in run(dict(zip(inputs, chosen, strict=True)))]

    found, pull = jax.vjp(outputs, *map(jnp.asarray, values))
    made = pull([jnp.asarray(s).astype(x.dtype) for s, x in zip(seeds, found, strict=True)])
    return [x if further else jax.lax.stop_gradient(x) for x in made]
