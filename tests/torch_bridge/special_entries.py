"""Entries of PyTorch's `op_db` at special points: what is put into their samples, and compared."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

import torch_bridge as tb


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import beside  # noqa: E402
import operators  # noqa: E402


INF, NAN = float("inf"), float("nan")
SAMPLES = 2
# What all tensors of a sample are filled with, again and again.
FILLED = {
    "zeros": [0.0], "negative zeros": [-0.0], "ones": [1.0], "equal": [2.0],
    "ties": [0, 1, -1, 1, 1, 0, -1, 2.0], "bounds": [0.5, -0.5, 3, -3, 6, -6, 20.5, -1, 1],
}  # fmt: skip
# What one element of one tensor is.
PLANTED = {"inf": INF, "-inf": -INF, "nan": NAN, "zero": 0.0}

# Entries that are left to other tests, and why.
LEFT_OUT = {
    "svd_lowrank": "draws", "pca_lowrank": "draws",
    "nn.functional.ctc_loss": "its own tests are beside this one; PyTorch's slope is 1e-4 off",
    "sparse.mm.reduce": "refused", "to": "refused",
}  # fmt: skip
# Which of equals has the index, and so the gradient, is left open by PyTorch: sums are compared.
WHICH_OF_EQUALS = ("topk", "kthvalue", "sort", "msort", "argsort", "median", "nanmedian", "mode")
# What a factorisation of a matrix is that has none, or several, is left open: of zeros, ones, equal
# columns. PyTorch raises for most matrices that are not finite; of the rest LAPACK decides.
_SUMS = "cross|vecdot|multi_dot|diagonal|norm.*|vector_norm|vander|matrix_power"
FACTORS = re.compile(
    rf"linalg\.(?!({_SUMS})$).*|lu|lu_solve|qr|ormqr|svd|pinverse|cholesky.*|logdet|triangular_solve"
)
# By entry: the points (a regular expression) that are left open, and why.
_FOURIER = ("inf|nan", "which of a spectrum's numbers become NaN depends on the algorithm")
_INFINITE_WEIGHT = ("inf", "a sum of infinities of both signs, in the order of the kernel")
_WELFORD = ("inf", "a mean of infinity is NaN or infinite by the order of the running sum")
_PADDING = ("inf|nan", "zeros that a kernel fills up with, times infinity or NaN")
_POLES = ("ties|bounds", "whole numbers below 0 are poles, which PyTorch rounds to large numbers")
_SIGN = ("negative zeros", "PyTorch's kernels differ in the sign of an infinite slope at -0")
_SINGULAR = ("zero in", "a pivot of 0: infinities and NaN in the order of the substitution")
_CASTS = ("inf|nan", "what a float becomes that a whole number cannot hold is undefined in C++")
_DEGREES = ("nan in 0", "what a polynomial of degree NaN is")
_POLYNOMIALS = (
    "chebyshev_polynomial_u", "chebyshev_polynomial_w", "laguerre_polynomial_l",
    "legendre_polynomial_p", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_w",
)  # fmt: skip
OPEN: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("byte", "char", "short", "int", "long"), _CASTS),
    **{f"special.{name}": _DEGREES for name in _POLYNOMIALS},
    "special.zeta": ("inf in 0", "PyTorch's sum is NaN there; ours is the limit"),
    "cumprod": ("inf", "PyTorch's slope divides by the factor; ours is the function's"),
    "prod": ("inf", "the same"), "masked.cumprod": ("inf", "the same"),
    "masked.prod": ("inf", "the same"),
    "linalg.cholesky_ex": ("zero in", "what is left where a matrix has no factor"),
    "rsqrt": _SIGN, "logit": _SIGN,
    **{f"mvlgamma.mvlgamma_p_{p}": _SIGN for p in (1, 3, 5)},
    **{f"polygamma.polygamma_n_{n}": _POLES for n in range(5)},
    "special.polygamma.special_polygamma_n_0": _POLES,
    "stft": _FOURIER, "istft": _FOURIER,
    "lu_solve": _SINGULAR, "linalg.lu_solve": _SINGULAR,
    "var_mean": _WELFORD, "var_mean.unbiased": _WELFORD,
    "std_mean": _WELFORD, "std_mean.unbiased": _WELFORD, "native_group_norm": _WELFORD,
    "_softmax_backward_data": ("inf", "what it is given as a softmax is none"),
    "nn.functional.linear_cross_entropy.chunked": _INFINITE_WEIGHT,
    "nn.functional.linear_cross_entropy.chunked_none": _INFINITE_WEIGHT,
    "nn.functional.layer_norm": _INFINITE_WEIGHT, "native_layer_norm": _INFINITE_WEIGHT,
    "nn.functional.group_norm": _INFINITE_WEIGHT, "nn.functional.bilinear": _INFINITE_WEIGHT,
    "nn.functional.conv_transpose1d": _PADDING, "nn.functional.conv_transpose2d": _PADDING,
    "nn.functional.conv_transpose3d": _PADDING,
    "nn.functional.scaled_dot_product_attention": (
        "inf|nan", "PyTorch's kernels differ in what a row of scores of -inf is"
    ),
}  # fmt: skip
# Of nothing: what PyTorch's slope or reshape of no elements is, which no model waits for, and
# what ends its process.
OF_NONE = {
    "native_batch_norm": "PyTorch divides by the number of rows, and dies (SIGFPE)",
    "_native_batch_norm_legit": "the same",
    "nn.functional.pdist": "PyTorch's slope of no rows is a segmentation fault",
    "nn.functional.group_norm": "PyTorch's slope of a weight without elements of its own is NaN",
    "nn.functional.linear_cross_entropy": "no classes, by which its pieces cannot be divided",
    "nn.functional.linear_cross_entropy.chunked": "the same",
    "nn.functional.linear_cross_entropy.chunked_none": "the same",
}
# Entries that are rounded more than once: how far they may be off, of the largest value.
LOOSE = {"matrix_exp": 1e-4}


@dataclass(frozen=True)
class Case:
    """One sample of an entry: a function as a module, and its tensors.

    Args:
        module: the function.
        tensors: its arguments.
        smooth: which of them are differentiated.
    """

    module: torch.nn.Module
    tensors: Sequence[torch.Tensor]
    smooth: Sequence[int]

    def points(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Names of special points, and the arguments there."""
        floats = [i for i, t in enumerate(self.tensors) if t.dtype == torch.float32]
        for name, values in FILLED.items():
            filled = {i: _filled(self.tensors[i], values) for i in floats}
            yield name, [filled.get(i, t) for i, t in enumerate(self.tensors)]
        for at, (name, value) in itertools.product(floats[:3], PLANTED.items()):
            given = [t.clone() for t in self.tensors]
            given[at].view(-1)[given[at].numel() // 2 :][:1] = value
            yield f"{name} in {at}", given

    def emptied(self) -> Iterator[tuple[str, Case]]:
        """The case without elements: none in the first dim, and none in the last."""
        first = next((t for t in self.tensors if t.ndim), None)
        for dim in () if first is None else (0, -1)[: first.ndim]:
            cut = [
                t.narrow(dim, 0, 0) if t.ndim and t.shape[dim] == first.shape[dim] else t
                for t in self.tensors
            ]
            yield f"none in dim {dim}", replace(self, tensors=[t.clone() for t in cut])


def _filled(t: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values).repeat(t.numel() // len(values) + 1)[: t.numel()].reshape(t.shape)


@functools.cache
def _rows() -> dict[str, list[Any]]:
    stored = json.loads((ROOT / "benchmarks/results/operators.json").read_text())
    return dict(stored["float32"])


def reason_to_leave_out(op: Any) -> str | None:
    """Why an entry has no special points here, or None."""
    name = operators.name_of(op)
    rows = _rows()
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    if torch.float32 not in op.dtypes or name not in rows:
        return "no float32"
    if operators.RANDOM.search(name):
        return "draws"
    return "refused" if rows[name][0] == "refused" else None


def cases(op: Any) -> Iterator[Case]:
    """The first samples of an entry."""
    from torch.testing._internal import common_methods_invocations as database

    torch.manual_seed(0)
    with mock.patch.object(database, "wrapper_set_seed", operators._unseeded):
        learns = op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
        made = operators.samples_of(op, torch.float32, learns)
        for sample in itertools.islice(made, SAMPLES):

            def function(*args: Any, sample: Any = sample, **kwargs: Any) -> Any:
                return sample.output_process_fn_grad(op.op(*args, **kwargs))

            args = (sample.input, *sample.args)
            module, tensors = operators._call(function, args, sample.kwargs)
            smooth = [
                i for i, t in enumerate(tensors) if t.requires_grad and t.dtype == torch.float32
            ]
            own = [t.detach().clone().contiguous() for t in tensors]
            if any(t.is_floating_point() for t in own):
                yield Case(module.eval(), own, smooth)


def differences(op: Any) -> list[str]:
    """Where an entry's values, and gradients if it has any, are not PyTorch's at special points."""
    name, found = operators.name_of(op), []
    for number, case in enumerate(cases(op)):
        run = _converted(case)
        for point, given in case.points():
            if _is_open(name, point):
                continue
            try:
                want = _theirs(case, given)
            except (RuntimeError, ValueError, IndexError):  # what PyTorch does not take is no point
                continue
            for what, why in _apart(name, case, given, run(given), want):
                found.append(f"{name}, sample {number}, {point}, {what}: {why}")
    return found


def differences_of_none(op: Any) -> list[str]:
    """Where values and gradients of arrays without elements are not PyTorch's, if it has any."""
    name, found = operators.name_of(op), []
    for number, case in enumerate(cases(op)):
        for point, empty in case.emptied() if name not in OF_NONE else ():
            try:
                want = _theirs(empty, empty.tensors)
            except (RuntimeError, ValueError, IndexError):
                continue
            try:
                got = _converted(empty)(empty.tensors)
            except Exception as error:
                found.append(f"{name}, sample {number}, {point}: {type(error).__name__}: {error}")
                continue
            for what, why in _apart(name, empty, empty.tensors, got, want):
                found.append(f"{name}, sample {number}, {point}, {what}: {why}")
    return found


def _is_open(name: str, point: str) -> bool:
    if FACTORS.fullmatch(name) and not point.startswith("zero in"):
        return True
    known = _FOURIER if name.startswith("fft.") else OPEN.get(name)
    return known is not None and re.search(known[0], point) is not None


Results = tuple[list[Any], list[Any]]


def _seed(shape: tuple[int, ...]) -> Any:
    """Of each output another share: of equal shares the gradient of a softmax is 0."""
    return np.linspace(0.5, 1.5, math.prod(shape), dtype=np.float32).reshape(shape)


def _converted(case: Case) -> Any:
    tracked = [t.clone().requires_grad_(i in case.smooth) for i, t in enumerate(case.tensors)]
    converted = tb.convert(case.module, *tracked, train=False)

    @jax.jit
    def sloped(arrays: list[jax.Array]) -> Results:
        def run(chosen: list[jax.Array]) -> tuple[list[Any], list[Any]]:
            given = dict(zip(case.smooth, chosen, strict=True))
            full = [given.get(i, x) for i, x in enumerate(arrays)]
            out = list(jax.tree.leaves(converted.apply({}, converted.buffers, *full).output))
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)], out

        smooth, pull, out = jax.vjp(run, [arrays[i] for i in case.smooth], has_aux=True)
        return out, pull([jnp.asarray(_seed(x.shape), x.dtype) for x in smooth])[0]

    def run(given: Sequence[torch.Tensor]) -> Results:
        return jax.tree.map(np.asarray, sloped([jnp.asarray(t.numpy()) for t in given]))

    return run


def _theirs(case: Case, given: Sequence[torch.Tensor], wide: bool = False) -> Results:
    own = [
        (t.double() if wide and t.is_floating_point() else t.clone()).requires_grad_(
            i in case.smooth
        )
        for i, t in enumerate(given)
    ]
    module = copy.deepcopy(case.module).double() if wide else case.module
    out = list(module(*(t.clone() for t in own)))
    smooth = [x for x in out if x.requires_grad]
    tracked = [own[i] for i in case.smooth]
    seeds = [torch.from_numpy(_seed(tuple(x.shape))).to(x.dtype) for x in smooth]
    grads = torch.autograd.grad(smooth, tracked, seeds, allow_unused=True) if tracked else ()
    slopes = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, tracked, strict=True)]
    return [beside._numpy(x) for x in out], [beside._numpy(g) for g in slopes]


def _apart(
    name: str, case: Case, given: Sequence[torch.Tensor], got: Results, want: Results
) -> Iterator[tuple[str, str]]:
    """What differs, and how. Where an output is NaN so is the loss, whatever the gradient says."""
    places = name in WHICH_OF_EQUALS
    lost = False
    for i, (a, b) in enumerate(zip(got[0], want[0], strict=True)):
        lost = lost or bool(np.isnan(b).any())
        if not np.issubdtype(b.dtype, np.inexact):
            if not places and not np.array_equal(a, b):
                yield f"output {i}", beside._first(a, b)
        elif why := _far(name, a, b, lambda i=i: _theirs(case, given, True)[0][i]):
            yield f"output {i}", why
    for k, (at, a, b) in enumerate(zip(case.smooth, *(r[1] for r in (got, want)), strict=True)):
        if lost:
            continue
        truth = (lambda k=k: _theirs(case, given, True)[1][k]) if not places else None
        if places:
            a, b = (_of_equals(x, given[at].numpy()) for x in (a, b))
        if why := _far(name, a, b, truth):
            yield f"gradient {at}", why


def _of_equals(slopes: Any, x: Any) -> Any:
    """The sum of the gradients of each value."""
    _, place = np.unique(x, return_inverse=True)
    return np.bincount(place.ravel(), slopes.ravel()).astype(slopes.dtype)


def _far(name: str, a: Any, b: Any, truth: Any) -> str | None:
    """How far an array is from PyTorch's, and from its float64 one, or None."""
    if a.shape != b.shape:
        return f"shape {a.shape}, torch {b.shape}"
    largest = float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0))
    # Of less than 1 the terms that it is the difference of are not small.
    rtol = LOOSE.get(name, 2e-5) / min(max(largest, 1e-3), 1.0)
    why = beside._apart(a.astype(b.dtype), b, rtol)
    if why is None or truth is None:
        return why
    exact = truth()
    return why if beside._apart(a.astype(exact.dtype), exact, rtol) else None
