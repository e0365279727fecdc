"""Whether what a plan says by path is about any parameter of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fzero.errors import PlanError, warn
from fzero.float8.recipe import KEEP, Float8
from fzero.links import Stack
from fzero.model import Model
from fzero.plan import Plan
from fzero.tree import PyTree, found_in, named_leaves


def require_found(model: Model, plan: Plan, shapes: PyTree) -> None:
    """Refuses a pattern that is found in no parameter's path; names fp8 that is about none.

    Args:
        model: the model.
        plan: the plan.
        shapes: its parameters' shapes.

    Raises:
        PlanError: one of `keep_fp32`, or one of `Float8(keep=)` that is no default, is found in
            none.
    """
    names = [name for name, _ in named_leaves(shapes)]
    _require("keep_fp32", plan.keep_fp32, names)
    products = plan.products
    if products is None:
        return
    own = [one for one in plan.float8.keep if one not in KEEP]
    _require("float8: keep", own, [*names, *_names_where_read(model, names)])
    if not any(_may_take(model, products, shapes)):
        warn(
            "plan: precision='fp8', but no parameter of the model is for a product in 8 bits: all"
            f" are kept in 16 by name (keep={list(products.keep)}), are stored in blocks (a"
            " quantised base, read in 16 bits), or have dims that are no multiples of 16 or under"
            f" {plan.float8.min_dim}. Change float8=fz.Float8(...), or say precision='bf16'"
        )


def _require(field: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    idle = [one for one in patterns if not any(found_in((one,), name) for name in names)]
    if idle:
        raise PlanError(
            f"plan: {field}: {idle} are found in no parameter's path; there are {list(names)[:20]}"
        )


def _names_where_read(model: Model, names: Sequence[str]) -> Iterator[str]:
    """What the layers that read others' parameters call them."""
    for layer in model.layers:
        for key, path in getattr(layer, "reads", {}).items():
            for name in names:
                if name == path or name.startswith(f"{path}/"):
                    yield f"{layer.name}/{key}{name.removeprefix(path)}"


def _may_take(model: Model, products: Float8, shapes: PyTree) -> Iterator[bool]:
    """Of each parameter, whether any division of its dims gives a product in 8 bits."""
    stacks = tuple(f"{layer.name}/" for layer in model.layers if isinstance(layer, Stack))
    for name, leaf in named_leaves(shapes):
        dims = leaf.shape[1:] if name.startswith(stacks) else leaf.shape
        ways = range(1, 2 ** len(dims) - 1)
        yield any(
            products.takes(
                name,
                math.prod(n for d, n in enumerate(dims) if way >> d & 1),
                math.prod(n for d, n in enumerate(dims) if not way >> d & 1),
            )
            for way in ways
        )
