"""Reverse mode with the weights factored out of what is kept for the backward pass.

`jax.vjp` keeps whatever its backward pass reads, gathered weights included. Here the residuals are
taken apart: those that *are* a weight (or another known array), or a cast, transpose or slice of
one, are replaced by how they follow from it, and the backward pass is given the weights anew. That
is what lets ZeRO-3 drop a gathered layer after its forward pass, and a pipeline stage keep
activations only.

What else is kept is decided by whoever says so first: `jax.checkpoint` in the function itself, then
the plan's policy, then everything but movement of data. Where the plan says `none`, no product and
no sum is computed again, and of what follows from them the fewest bytes are kept (`min_cut`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.errors import PlanError
from fzero.float8.products import PRODUCT
from fzero.programs.jaxprs import (
    Op,
    Program,
    Var,
    has_checkpoint,
    has_complex,
    is_elementwise,
    needed,
    read,
    run_ops,
)
from fzero.tree import PyTree
from fzero.weight_records import widens
from fzero.zero.min_cut import fewest_bytes


Policy = Callable[..., Any]

# Recomputed rather than kept, because they only move or convert data. Keeping them would keep
# transposed or cast copies of the weights.
_MOVEMENT = frozenset(
    ("transpose", "convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "slice",
     "expand_dims", "rev", "copy", "copy_p", "split", "concatenate", "dynamic_slice")
)  # fmt: skip


def keep_all_but_movement(prim: Any, *_: Any, **params: Any) -> bool:
    """Checkpoint policy: keep every intermediate result except casts, reshapes, wide weights."""
    return prim.name not in _MOVEMENT and not widens(prim, params)


def keep_fewest(prim: Any, *_: Any, **params: Any) -> bool:
    """The same to `jax.checkpoint`; then `forward` keeps the fewest bytes from which it follows."""
    return keep_all_but_movement(prim, **params)


def _keep_dots(prim: Any, *args: Any, **params: Any) -> Any:
    """Checkpoint policy: keep products with weights, in 8 bits too."""
    if prim.name == "name":
        return params["name"] == PRODUCT
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *args, **params)


def remat_policy(remat: str | Policy | None) -> Policy:
    """The checkpoint policy of `Plan.remat` (`layer` keeps nothing of a stack and needs none).

    Raises:
        PlanError: the plan was read from JSON and names a policy that only its program has.
    """
    if callable(remat):
        return remat
    if remat is not None and "." in remat:
        raise PlanError(
            f"plan: remat={remat!r} is the name of a function, as JSON keeps it; a step needs the"
            " function itself: plan.replace(remat=policy)"
        )
    return {"dots": _keep_dots, "none": keep_fewest}.get(remat or "", keep_all_but_movement)


@dataclass(frozen=True)
class Floats:
    """A pytree taken apart into what gradients flow through and the rest.

    Args:
        treedef: structure of the whole.
        mask: per leaf, whether it is floating point.
    """

    treedef: Any
    mask: tuple[bool, ...]

    @staticmethod
    def of(tree: PyTree, differentiable: bool = True) -> tuple[Floats, list[Any], list[Any]]:
        """The structure, the leaves that gradients flow through (if any may), and the others."""
        leaves, treedef = jax.tree.flatten(tree)
        mask = tuple(differentiable and bool(jnp.issubdtype(x.dtype, np.inexact)) for x in leaves)
        sides: tuple[list[Any], list[Any]] = ([], [])
        for leaf, is_float in zip(leaves, mask, strict=True):
            sides[not is_float].append(leaf)
        return Floats(treedef, mask), *sides

    def join(self, floats: Sequence[Any], rest: Sequence[Any]) -> PyTree:
        """The tree again."""
        f, r = iter(floats), iter(rest)
        return jax.tree.unflatten(self.treedef, [next(f if m else r) for m in self.mask])


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Pullback:
    """A backward pass as data: how to run it once the known arrays are back.

    A static pytree node, so that it travels through loops beside the arrays it was taken from.

    Args:
        treedef: structure of the pulled-back function with all its leaves.
        leaves: what each of them is.
        known: those that are known arrays, with their index among these.
        residuals: the others that it reads, in order.
        ops: how the others follow from both.
        zero: whether the function has primals, and its result follows from none of them.
    """

    treedef: Any
    leaves: tuple[Any, ...]
    known: dict[Var, int]
    residuals: tuple[Var, ...]
    ops: tuple[Op, ...]
    zero: bool

    @property
    def reads(self) -> list[int]:
        """Which of the known arrays it reads."""
        return sorted(set(self.known.values()))

    def run(self, residuals: Sequence[Any], known: Sequence[Any], cotangent: Any) -> Any:
        """Gradients of all primal inputs."""
        env: dict[Var, Any] = dict(zip(self.residuals, residuals, strict=True))
        env.update({var: known[index] for var, index in self.known.items()})
        run_ops(self.ops, env)
        leaves = [read(env, x) for x in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)(cotangent)


def forward(
    function: Callable[..., tuple[Any, Any]],
    primals: Sequence[Any],
    known: Sequence[Any],
    policy: Policy = keep_all_but_movement,
) -> tuple[Any, Any, Pullback, list[Any]]:
    """Runs `function(*primals) -> (out, aux)` and takes its backward pass apart.

    Args:
        function: what to differentiate; `aux` gets no gradient.
        primals: its arguments; gradients exist for all of them.
        known: arrays that need not be kept, because the caller will have them again.
        policy: what to keep of a function that does not say so itself. (An outer `jax.checkpoint`
            overrides those inside, so one that has any is left as it is.)

    Returns:
        `(out, aux, pullback, residuals)`; `residuals` holds no known array.
    """
    from jax.extend.core import jaxpr_as_fun

    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*primals)
    treedef = jax.tree.structure(shapes)
    pulled: list[Any] = []

    def run(*primals: Any) -> Any:
        return jax.tree.unflatten(treedef, jaxpr_as_fun(traced)(*jax.tree.leaves(primals)))

    says_itself = has_checkpoint(traced.jaxpr)
    keeps_all = policy in (keep_all_but_movement, keep_fewest)
    # (jax rounds what a checkpoint keeps, and cannot round complex numbers. Without one, all of
    # what a backward pass reads is kept.)
    if not says_itself and not (keeps_all and has_complex(traced.jaxpr)):
        # prevent_cse=False: what is recomputed and whether twice is up to the compiler.
        run = jax.checkpoint(run, policy=policy, prevent_cse=False)

    def with_residuals(*primals: Any) -> tuple[Any, Any, list[Any]]:
        out, pull, aux = jax.vjp(run, *primals, has_aux=True)
        leaves, treedef = jax.tree.flatten(pull)
        pulled.append(treedef)
        return out, aux, leaves

    closed, shapes = jax.make_jaxpr(with_residuals, return_shape=True)(*primals)
    program = Program(closed.jaxpr, closed.consts)
    values = program.consts | dict(zip(program.inputs, jax.tree.leaves(primals), strict=True))
    index = {id(array): i for i, array in reversed(list(enumerate(known)))}
    indices = {var: index[id(value)] for var, value in values.items() if id(value) in index}
    fewest = policy is keep_fewest and not says_itself
    if fewest:
        # Operation by operation, for any value may be one to keep.
        run_ops(program.ops, values)
        flat = [read(values, x) for x in program.outputs]
    else:
        flat = jaxpr_as_fun(closed)(*jax.tree.leaves(primals))
    out, aux, pulled_back = jax.tree.unflatten(jax.tree.structure(shapes), flat)
    given = program.outputs[: len(jax.tree.leaves(out))]
    leaves = program.outputs[len(flat) - len(pulled_back) :]
    # (A leaf of the backward pass may be a number that no array stands for.)
    values.update((x, y) for x, y in zip(leaves, pulled_back, strict=True) if isinstance(x, Var))
    ops, reads = _movement(program, indices, leaves)
    if fewest:
        free = [var for var in reads if var in indices]
        ops, reads = _from_fewest(program, indices, free, leaves)
    residuals = tuple(var for var in reads if var not in indices)
    indices = {var: i for var, i in indices.items() if var in reads}
    zero = bool(program.inputs) and not _follows(program, given)
    pullback = Pullback(pulled[-1], tuple(leaves), indices, residuals, ops, zero)
    return out, aux, pullback, [values[var] for var in residuals]


def _follows(program: Program, outputs: Sequence[Any]) -> bool:
    """Whether some outputs follow from any of a program's inputs."""
    reads = [x for i in needed(program.ops, outputs) for x in program.ops[i].reads()]
    return not set(program.inputs).isdisjoint(reads + [x for x in outputs if isinstance(x, Var)])


def _movement(
    program: Program, known: Collection[Var], wanted: Sequence[Any]
) -> tuple[tuple[Op, ...], list[Var]]:
    """How values follow from known ones by movement: the operations, and what else is read."""
    makers = {var: op for op in program.ops for var in op.results}
    follows: dict[Var, bool] = {}

    def may_follow(x: Any) -> bool:
        """Whether a value is known, or a scalar that is there, or moved from such."""
        if not isinstance(x, Var):
            return True
        if x not in follows:
            op = makers.get(x)
            if op is None:
                follows[x] = x in known or x.aval.size == 1
            else:
                follows[x] = _is_movement(op) and all(map(may_follow, op.operands))
        return follows[x]

    outputs = list(dict.fromkeys(x for x in wanted if isinstance(x, Var)))
    moved = [x for x in outputs if x in makers and may_follow(x)]
    ops = tuple(program.ops[i] for i in sorted(needed(program.ops, moved)))
    made = {var for op in ops for var in op.results}
    reads = [x for op in ops for x in op.reads()] + outputs
    return ops, list(dict.fromkeys(x for x in reads if x not in made))


def _from_fewest(
    program: Program, known: Collection[Var], free: Collection[Var], wanted: Sequence[Any]
) -> tuple[tuple[Op, ...], list[Var]]:
    """How values follow from the fewest bytes: the operations, and what they and values read."""
    outputs = list(dict.fromkeys(x for x in wanted if isinstance(x, Var)))
    reads = fewest_bytes(program.ops, outputs, known, free, _is_cheap)
    again = sorted(needed(program.ops, outputs, set(reads)))
    return tuple(program.ops[i] for i in again), reads


def _is_cheap(op: Op) -> bool:
    """Whether an operation is cheaper to do again than to keep: elementwise, or movement."""
    if _is_movement(op):
        return True
    equation = op.equation
    if equation is None or equation.effects:
        return False
    name, operands = equation.primitive.name, equation.invars
    if not operands:
        return bool(name == "iota")
    return is_elementwise(name, operands[0].aval.shape, equation.outvars[0].aval.shape)


def _is_movement(op: Op) -> bool:
    """Whether an operation is cheaper to do again than to keep, if all that it reads is there."""
    equation = op.equation
    if equation is None or equation.effects:
        return False
    # jax rounds what a checkpoint keeps once more, to its own dtype. Of indices, all is computed.
    values = [*op.reads(), *op.results]
    cheap = equation.primitive.name in (*_MOVEMENT, "reduce_precision")
    return cheap or all(x.aval.size == 1 for x in values)
