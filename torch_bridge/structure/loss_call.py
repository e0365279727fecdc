"""The one call of `forward` in a loss: what it is given, and what follows from its results.

The loss is traced with an operation of its own where `forward` is called. What that operation reads
is what the module is called with; what depends on its results is the loss proper. Neither runs what
belongs to the other only. (Several links of a chain ask for either; the loss's Python runs once in
the trace of a step.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching

from fzero import compat
from fzero.errors import ConversionError
from fzero.programs.jaxprs import inner_jaxprs
from fzero.programs.trace_memo import once
from torch_bridge.export.mode import TensorInput
from torch_bridge.export.stand_ins.capacity import counts, told
from torch_bridge.loss_module import tensors_told
from torch_bridge.losses import LOSS, Head, marked, total_of
from torch_bridge.lower.refs import Ref
from torch_bridge.module.signature import build_output
from torch_bridge.structure.retrace import Call, Graphs
from torch_bridge.structure.unread_parameters import (
    may_be_unread,
    num_values,
    unread_parameters,
    warn_of_unread,
)


Loss = Callable[..., Any]
# `(batch, graphs, train, dtype) -> LossCall`.
FindCall = Callable[[Any, Graphs, bool, Any], "LossCall"]


class NotOneCallError(ConversionError):
    """A loss does not call `forward` once, as it is."""


_INPUTS = (
    "Say what the module is called with: converted.model(loss, inputs=lambda batch: ...), with"
    " a loss(output, batch). It has the parameters of any other model of `converted` with the same"
    " chain=, so one that is only made to predict may have any loss"
)
_REMEDY = (
    "Use model(loss, chain=False), which runs the module as one function, without pipelines and"
    " without gathering layer by layer"
)


@dataclass(frozen=True)
class _Traced:
    """A loss as it was traced.

    Attributes:
        of: the loss and the graphs, which outlive it so.
        closed: its program, with the call of `forward` as one operation.
        op: that operation.
        shapes: of what it gives.
        call: the graph that it calls; its inputs are of no use.
        names: the inputs that the operation reads.
    """

    of: tuple[Any, Any]
    closed: Any
    op: Any
    shapes: Any
    call: Call
    names: list[str]


@dataclass(frozen=True)
class LossCall:
    """A traced loss, taken apart at its call of `forward`.

    Attributes:
        call: the graph that runs, and its inputs: what the loss calls `forward` with.
        finish: the loss, given the module's output leaves.
        logits: indices of output leaves that nothing but a cross entropy reads: `finish` takes a
            `Head` in their stead.
        unread: names of parameters that only outputs read which the loss does not.
    """

    call: Call
    finish: Callable[[Sequence[Any]], Any]
    logits: frozenset[int] = frozenset()
    unread: frozenset[str] = frozenset()


def find_call(loss: Loss, batch: Any, graphs: Graphs, train: bool, dtype: Any) -> LossCall:
    """Trace a loss, and find its call of `forward`.

    Args:
        loss: `loss(forward, batch)`, which calls `forward` once.
        batch: what it is given.
        graphs: the module's graphs.
        train: which of them.
        dtype: what its parameters are in, where that is not their own dtype.

    Raises:
        ConversionError: the loss calls `forward` not at all, more than once, or transformed.
    """
    leaves, structure = jax.tree.flatten(batch)
    kinds = tuple((np.shape(x), jnp.result_type(x), getattr(x, "weak_type", False)) for x in leaves)
    key = (
        "loss",
        id(loss),
        id(graphs),
        structure,
        kinds,
        train,
        dtype,
        jax.sharding.get_abstract_mesh(),
    )
    traced: _Traced = once(key, lambda: _trace(loss, batch, graphs, train, dtype))
    return _taken_apart(traced, leaves, graphs, train)


def _trace(loss: Loss, batch: Any, graphs: Graphs, train: bool, dtype: Any) -> _Traced:
    calls: list[tuple[Call, list[str]]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if calls:
            raise NotOneCallError(
                "the loss calls forward a second time, but a chain of layers runs the module once."
                f" Join the inputs into one call (concatenate them, split the output). {_REMEDY}"
            )
        call = graphs.call(train, args, kwargs, dtype)
        names = [i.placeholder for i in call.mode.inputs if isinstance(i, TensorInput)]
        results = _forward.bind(*(call.inputs[n] for n in names), avals=_avals(call))
        calls.append((call, names))
        found = iter(results)
        leaves = [
            next(found) if isinstance(leaf, Ref) else leaf for leaf in call.mode.graph.outputs
        ]
        out = build_output(call.mode.out_spec, leaves)
        return out.output if counts(call.mode) else out

    with marked(), tensors_told():
        closed, shapes = jax.make_jaxpr(lambda b: loss(forward, b), return_shape=True)(batch)
    if not calls:
        raise NotOneCallError(
            "the loss did not call forward, so that there is nothing to run; expected"
            " loss(forward, batch) to call it once"
        )
    (call, names) = calls[0]
    closed = _inlined(closed)
    op = next((e for e in closed.jaxpr.eqns if e.primitive is _forward), None)
    if op is None:
        raise NotOneCallError(f"the loss calls forward within a loop or a condition. {_REMEDY}")
    return _Traced((loss, graphs), closed, op, shapes, call, names)


def _taken_apart(traced: _Traced, leaves: Sequence[Any], graphs: Graphs, train: bool) -> LossCall:
    """A traced loss with the leaves of a batch."""
    closed, op, call, shapes = traced.closed, traced.op, traced.call, traced.shapes
    given = _evaluate(closed, leaves, op.invars, {})

    def finish(outputs: Sequence[Any]) -> Any:
        results = [x for x, leaf in zip(outputs, call.mode.graph.outputs, strict=True)
                   if isinstance(leaf, Ref)]  # fmt: skip
        known = {
            var: x if isinstance(x, Head) else jnp.asarray(x).astype(var.aval.dtype)
            for var, x in zip(op.outvars, results, strict=True)
        }
        out = _evaluate(closed, leaves, closed.jaxpr.outvars, known)
        result = jax.tree.unflatten(jax.tree.structure(shapes), out)
        return told(result, outputs[-1]) if counts(call.mode) else result

    inputs = dict(zip(traced.names, given, strict=True))
    arrays = [i for i, leaf in enumerate(call.mode.graph.outputs) if isinstance(leaf, Ref)]
    logits = {i for i, var in zip(arrays, op.outvars, strict=True) if _is_logits(closed, var)}
    unread: set[str] = set()
    if train and may_be_unread(call.mode):
        learns = {leaf.name for leaf in graphs.again.layout.leaves if not leaf.frozen}
        unread = unread_parameters(call.mode, closed, op.outvars, num_values(shapes)) & learns
        warn_of_unread(unread)
    given_call = call._replace(inputs={**call.inputs, **inputs})
    return LossCall(given_call, finish, frozenset(logits), frozenset(unread))


def _is_logits(closed: Any, var: Any) -> bool:
    """Whether cross entropies are all that reads a value, and reads it as their logits."""
    readers = [e for e in closed.jaxpr.eqns if any(a is var for a in e.invars)]
    returned = any(a is var for a in closed.jaxpr.outvars)
    return bool(readers) and not returned and all(
        e.primitive is LOSS and e.invars[0] is var and e.invars[1] is not var for e in readers
    )  # fmt: skip


def predicted(
    loss: Loss,
    told: bool,
    outputs: Callable[[Any], Any],
    batch: Any,
    graphs: Graphs,
    train: bool,
    dtype: Any,
) -> LossCall:
    """As `find_call`, with the module's own output in place of the loss.

    Args:
        loss: `loss(forward, batch)`; what it calls `forward` with is wanted of it.
        told: whether that was said (`inputs=`), and is not the user's loss.
        outputs: what of the module's output is wanted.
        batch: as for `find_call`.
        graphs: likewise.
        train: likewise.
        dtype: likewise.

    Returns:
        A call of which `finish` gives the arrays in what `outputs` gives; else nothing.

    Raises:
        ConversionError: the loss does not say what the module is called with, or there is no array.
    """
    try:
        one = find_call(loss, batch, graphs, train, dtype)
    except NotOneCallError as error:
        raise ConversionError(
            f"predict_step: no single call of forward gives the outputs: {error}\n{_INPUTS}"
        ) from error
    except ConversionError:
        raise
    except Exception as error:
        if told:
            raise
        raise ConversionError(
            "predict_step: what the module is called with is read off the loss, which fails for"
            f" this batch ({type(error).__name__}: {error}). {_INPUTS}"
        ) from error

    def finish(leaves: Sequence[Any]) -> Any:
        found = outputs(build_output(one.call.mode.out_spec, list(leaves)))
        arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, found)
        if not jax.tree.leaves(arrays):
            raise ConversionError(
                "predict_step: the module's output has no array with a row for each example"
            )
        return arrays

    return replace(one, finish=finish, logits=frozenset())


def _avals(call: Call) -> tuple[Any, ...]:
    """What an abstract evaluation of the module gives, hashable."""
    return tuple(
        jax.core.ShapedArray(x.shape, x.dtype) for x in call.mode.output_shapes(call.inputs)
    )


_forward = core.Primitive("module_forward")
_forward.multiple_results = True
_forward.def_abstract_eval(lambda *_, avals: list(avals))


def _refuse(transformation: str) -> Callable[..., Any]:
    def rule(*_: Any, **__: Any) -> Any:
        raise NotOneCallError(
            f"the loss {transformation} forward, but a chain of layers runs the module once, as it"
            f" is. {_REMEDY}"
        )

    return rule


batching.primitive_batchers[_forward] = _refuse("maps (jax.vmap)")
ad.primitive_jvps[_forward] = _refuse("differentiates (jax.grad)")


def _holds(jaxpr: Any) -> bool:
    return any(e.primitive is _forward or any(map(_holds, inner_jaxprs(e))) for e in jaxpr.eqns)


# What only says how something is to be compiled or kept; the plan says that for the module.
_PLAIN = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2")


def _inlined(closed: Any) -> Any:
    """The same program with those calls inlined that `forward` is called in."""
    if not any(e.primitive is not _forward and any(map(_holds, inner_jaxprs(e)))
               for e in closed.jaxpr.eqns):  # fmt: skip
        return closed

    def run(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        for equation in jaxpr.eqns:
            operands = [_value(env, atom) for atom in equation.invars]
            if equation.primitive.name in _PLAIN and any(map(_holds, inner_jaxprs(equation))):
                body = equation.params["jaxpr"]
                inner = getattr(body, "jaxpr", body)
                results = run(inner, getattr(body, "consts", ()), operands)
            else:
                results = compat.run_equation(equation, operands, ())
            env.update(zip(equation.outvars, results, strict=True))
        return [_value(env, atom) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *values: run(closed.jaxpr, closed.consts, values))(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in closed.in_avals)
    )


def _value(env: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def _evaluate(
    closed: Any, leaves: Sequence[Any], wanted: Sequence[Any], known: Mapping[Any, Any]
) -> list[Any]:
    """Values of a program, computed from its inputs and from values that are known."""
    jaxpr = closed.jaxpr
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *leaves), strict=True))
    env.update(known)
    needed = {atom for atom in wanted if not isinstance(atom, core.Literal) and atom not in env}
    taken = []
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        taken.append(equation)
        needed.update(
            a for a in equation.invars if not isinstance(a, core.Literal) and a not in env
        )
    for equation in reversed(taken):
        operands = [_value(env, atom) for atom in equation.invars]
        if equation.primitive is LOSS:
            env[equation.outvars[0]] = total_of(*operands, **equation.params)
            continue
        results = compat.run_equation(equation, operands, ())
        env.update(zip(equation.outvars, results, strict=True))
    return [_value(env, atom) for atom in wanted]
