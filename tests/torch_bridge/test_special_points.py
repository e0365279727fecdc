"""Values and gradients where functions have kinks, bounds and poles: PyTorch's, point by point.

Random inputs never go there; exact zeros, saturation and equal values are ordinary in training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pointwise import Fn, agree, agree_all, all_at_once, both, require_equal

import torch_bridge as tb
from torch_bridge.lower import find_lowering


pytestmark = pytest.mark.traced_once

INF, NAN = float("inf"), float("nan")
NUMBERS = [0.0, -0.0, 1, -1, 2, -2, 3, -3, 6, -6, 0.5, -0.5, 20, 20.5, 1e-30, 1e30, INF, -INF]
POINTS = torch.tensor([*NUMBERS, NAN])
WEIGHT = torch.tensor([0.5, 1.0, 2.0])
PROBABILITIES = torch.tensor([0.0, 1.0, 0.5, 1e-7, 1 - 1e-7])
EQUAL = torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 3.0], [-1.0, 2.0, -2.0]])

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "leaky_relu": F.leaky_relu, "elu": F.elu, "celu": F.celu,
    "selu": F.selu, "softplus": F.softplus, "softsign": F.softsign, "hardshrink": F.hardshrink,
    "softshrink": F.softshrink, "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "tanhshrink": F.tanhshrink, "logsigmoid": F.logsigmoid, "abs": torch.abs, "sign": torch.sign,
    "square": torch.square, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sinc": torch.sinc,
    "reciprocal": torch.reciprocal, "log1p": torch.log1p, "tanh": torch.tanh, "erf": torch.erf,
    "sigmoid": torch.sigmoid, "exp": torch.exp, "clamp": lambda x: x.clamp(-1, 3),
    "clamp_min": lambda x: x.clamp(min=0), "round": torch.round, "floor": torch.floor,
    "nan_to_num": torch.nan_to_num, "cube": lambda x: x**3, "half": lambda x: x**0.5,
    "zeroth": lambda x: x**0, "silu": F.silu, "gelu": F.gelu, "mish": F.mish, "sin": torch.sin,
    "log": torch.log, "expm1": torch.expm1, "xlogy": lambda x: torch.xlogy(x, x),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())), "fmod": lambda x: torch.fmod(x, 3.0),
    "remainder": lambda x: torch.remainder(x, 3.0), "angle": torch.angle, "lgamma": torch.lgamma,
    "logit": torch.logit, "logit within": lambda x: torch.logit(x, 1e-3),
    "ndtri": torch.special.ndtri, "digamma": torch.digamma,
    "decimals": lambda x: torch.round(x, decimals=1), "mantissa": lambda x: torch.frexp(x)[0],
    "spherical": torch.special.spherical_bessel_j0,
}  # fmt: skip
PAIRS: dict[str, Callable[..., torch.Tensor]] = {
    "atan2": torch.atan2, "hypot": torch.hypot, "div": torch.div, "pow": torch.pow,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"), "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py, "logaddexp": torch.logaddexp, "copysign": torch.copysign,
    "logaddexp2": torch.logaddexp2, "nextafter": torch.nextafter, "fmin": torch.fmin,
}  # fmt: skip
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "std": lambda x: x.std(1), "var": lambda x: x.var(1), "norm": lambda x: x.norm(dim=1),
    "norm1": lambda x: x.norm(p=1, dim=1), "norm3": lambda x: x.norm(p=3, dim=1),
    "norm0.5": lambda x: x.norm(p=0.5, dim=1), "norminf": lambda x: x.norm(p=INF, dim=1),
    "amax": lambda x: x.amax(1), "max": lambda x: x.max(1).values,
    "softmax": lambda x: x.softmax(1), "logsumexp": lambda x: x.logsumexp(1),
    "prod": lambda x: x.prod(1), "median": lambda x: x.median(1).values,
    "median of all": torch.median, "nanmedian of all": torch.nanmedian,
    "cumprod": lambda x: x.cumprod(1), "normalize": F.normalize,
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0)), "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "all masked": lambda x: x.masked_fill(x == x, -INF).softmax(1).nan_to_num(),
}  # fmt: skip


# Where PyTorch's own kernels disagree with each other: the vectorised gelu of infinities, and the
# sign of a slope at -0.
ABOVE = ~POINTS.signbit() | (POINTS < 0)
ELSEWHERE = {"gelu": POINTS.isfinite(), "rsqrt": ~(POINTS == 0), "logit": ABOVE}


# Zeros, bounds, tiny and huge numbers, each with each other.
GRID = tuple(x.reshape(-1) for x in torch.meshgrid(*[POINTS[:-1]] * 2, indexing="ij"))
CASES = {
    **{name: (fn, (POINTS[ELSEWHERE.get(name, slice(None))],)) for name, fn in UNARY.items()},
    **{f"{name} of pairs": (fn, GRID) for name, fn in PAIRS.items()},
    **{f"{name} of rows": (fn, (EQUAL,)) for name, fn in ROWS.items()},
}


@functools.cache
def of_cases() -> Any:
    return all_at_once(CASES)


@pytest.mark.parametrize("name", UNARY)
def test_elementwise(name):
    require_equal(of_cases()[name], CASES[name][1])


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name):
    require_equal(of_cases()[f"{name} of pairs"], GRID)


@pytest.mark.parametrize("name", ["copysign", "nextafter"])
def test_what_says_the_direction_alone_has_no_tangent(name):
    """Of a constant one gradients say nothing: it is no multiple of the tangent."""
    x, y = np.float32([1, -2]), np.float32([3, -4])
    converted = tb.convert(Fn(PAIRS[name]), *map(torch.from_numpy, (x, y)), train=False)
    _, found = jax.jvp(lambda y: converted(x, y), (y,), (y,))
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("name", ["uint8", "int8", "int16"])
def test_narrow_whole_numbers_keep_the_last_bits(name):
    agree(lambda x: x.to(getattr(torch, name)), torch.tensor([-1.0, 255.9, 300, -129, 70000, 1.5]))


def test_bessel_functions_near_0_and_far_from_it():
    """The scaled ones were off by 1 % at 100, and by ten powers of ten at 1e30."""
    x = torch.tensor([1e-30, 1e-5, 0.1, 1, 11.9, 12.1, 30, 100, 1e5, 1e30, INF])
    kinds = [f"{scaled}modified_bessel_k{n}" for scaled in ("", "scaled_") for n in (0, 1)]
    for kind in kinds:
        agree(getattr(torch.special, kind), x)
    agree(lambda n: torch.special.legendre_polynomial_p(n * 0 + 0.5, n), torch.tensor([3, 2, INF]))


def test_bessel_and_airy_functions_have_no_gradient():
    names = ["bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "spherical_bessel_j0", "airy_ai"]
    names += [f"modified_bessel_{kind}{n}" for kind in "ik" for n in (0, 1)]
    names += [f"scaled_modified_bessel_k{n}" for n in (0, 1)]
    kinds = [getattr(torch.special, name) for name in names]
    x = torch.tensor([0.3, 2.5])
    assert not any(kind(x.clone().requires_grad_()).requires_grad for kind in kinds)
    agree(lambda x: sum(kind(x) for kind in kinds) + x + torch.special.erfcx(x), x)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_equal_values_and_zeros(name):
    require_equal(of_cases()[f"{name} of rows"], (EQUAL,))


def test_angles_at_the_origin():
    agree(torch.atan2, torch.tensor([0.0, 0.0, 1.0, -1.0]), torch.tensor([0.0, 1.0, 0.0, -1.0]))


def test_bounds_that_are_tensors_may_cross_be_met_or_be_none():
    x = torch.tensor([0.0, 1.0, 5.0, 5.0, 5.0, 1.0, 2.0, -1.0])
    low = torch.tensor([1.0, 1.0, 2.0, 6.0, 7.0, NAN, 2.0, 0.0])
    high = torch.tensor([3.0, 1.0, 4.0, 6.0, 3.0, 2.0, NAN, -2.0])
    without_end = torch.full_like(x, INF)
    agree_all(
        (torch.clamp, x, low, high),
        (torch.clamp_min, x, low),
        (torch.clamp_max, x, high),
        (torch.clamp_min, x, without_end),
        (torch.clamp_max, x, -without_end),
    )


def test_the_slope_of_a_size_is_the_direction_of_its_result():
    size, angle = torch.tensor([[0.0, 0.0, 1.0, -2.0], [0.0, 1.0, 2.0, 3.0]])
    agree(lambda size, angle: torch.view_as_real(torch.polar(size, angle)), size, angle)


def test_incomplete_gammas_of_any_order():
    grid = torch.meshgrid(*[torch.tensor([0.0, 1.0, INF, NAN, -1.0])] * 2, indexing="ij")
    points = [x.reshape(-1) for x in grid]
    agree_all(
        (lambda a, x: torch.igamma(a.detach(), x.detach()), *points),
        (lambda a, x: torch.igammac(a.detach(), x.detach()), *points),
    )


def test_zeta_at_its_poles():
    x, q = torch.meshgrid(
        torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, NAN]),
        torch.tensor([-3.0, -0.5, -0.0, 0.0, 0.3, 1.0, 2.0, INF, -INF]),
        indexing="ij",
    )
    zeta = torch.special.zeta
    agree_all(
        (lambda q: zeta(x.reshape(-1), q.detach()), q.reshape(-1)),
        (lambda q: zeta(torch.tensor(INF), q.detach()), torch.tensor([0.5, 1.0])),
        (lambda q: zeta(2.5, q), torch.tensor([0.3, 1.0, 4.0, 0.0])),
    )


def test_cross_entropy_of_certainties():
    x, y = torch.meshgrid(PROBABILITIES, torch.tensor([0.0, 1.0, 0.3]), indexing="ij")
    agree(F.binary_cross_entropy, x.contiguous(), y.contiguous())


def test_losses_of_exact_predictions():
    points = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    losses = F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss
    agree_all(*((loss, *points) for loss in losses))


@pytest.mark.parametrize("options", [{}, {"p": 2}, {"margin": 0.0}, {"weight": WEIGHT}], ids=str)
def test_margins_that_are_just_kept(options):
    x, each = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]), {**options, "reduction": "none"}
    agree_all(
        (lambda x: F.multi_margin_loss(x, torch.tensor([0, 2]), **options), x),
        (lambda x: F.multi_margin_loss(x, torch.tensor(1), **options), x[0]),
        (lambda x: F.multi_margin_loss(x, torch.tensor([1]), **each), x[0]),
        (lambda x: F.multi_margin_loss(x, torch.tensor(1), **each), x[:1]),
    )


@pytest.mark.parametrize("of", [torch.median, torch.nanmedian])
def test_medians_at_the_ends(of):
    rows = [-INF, -INF, 1], [NAN, NAN, 1], [INF, INF, 1], [NAN, 1, 1], []
    agree_all(*((of, torch.tensor(x, dtype=torch.float32)) for x in rows))


@pytest.mark.parametrize("padding", [None, 1])
def test_rows_whose_gradients_count_by_frequency(padding):
    ids = torch.tensor([[0, 1], [2, 1], [1, 0]])
    options = {"padding_idx": padding, "scale_grad_by_freq": True}
    table = torch.arange(12.0).reshape(4, 3)
    table[2, 0] = INF
    agree(lambda w: F.embedding(ids, w, **options), table)
    # More than bfloat16 counts, where PyTorch's sum on CPUs ends at a half.
    often, low = np.zeros((1, 600), np.int32), jnp.asarray(table.numpy(), jnp.bfloat16)
    lowering = find_lowering("aten.embedding.default")
    assert lowering is not None
    rows = functools.partial(lowering.fn, indices=often, padding_idx=-1, scale_grad_by_freq=True)
    slope = jax.grad(lambda w: jnp.sum(rows(w).astype(jnp.float32)))(low)
    # 1 / 600 is rounded to 8 bits, and so is their sum.
    want = [[1.0] * 3, *[[0.0] * 3] * 3]
    np.testing.assert_allclose(np.asarray(slope, np.float32), want, rtol=2**-7)


def test_the_divisors_slope_of_a_remainder_is_that_of_its_value():
    """0.3 is two times 0.1 and a rest in float32, though the rounded quotient is 3."""
    agree(torch.remainder, torch.arange(1.0, 40.0) / 10, torch.full((39,), 0.1))


# Entries of PyTorch's database that are left to other tests, and why.
LEFT_OUT = {
    "rrelu": "draws", "frexp": "two results, above", "mvlgamma": "an argument",
    "prelu": "weights", "polar": "complex", "complex": "complex", "cdouble": "complex",
    "cfloat": "complex", "chalf": "complex", "bfloat16": "NumPy has none",
    "float_power": "refused", "double": "refused", "int": "infinity has no whole number",
    "long": "the same", "short": "the same", "char": "the same", "byte": "the same",
    "sgn": "a gradient without memory", "chebyshev_polynomial_u": "3e-6 off in PyTorch",
    "igamma": "no gradient in PyTorch", "igammac": "the same",
    "floor_divide": "the same", "heaviside": "the same", "zeta": "the same",
}  # fmt: skip


def _is_left_out(name: str) -> bool:
    parts = name.split(".")
    return name.startswith(("jiterator", "hash")) or any(part in LEFT_OUT for part in parts)


# Quotients of 1e60 are NaN by PyTorch's fast kernels, and a number by its others.
FINITE = ("fmod", "remainder", "__rmod__")


@pytest.mark.nightly
def test_every_operator_of_one_or_two_arrays_and_of_rows():
    """PyTorch's own list of them; arrays without rows, too."""
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal.opinfo import core

    rows = torch.cat([EQUAL, torch.tensor([[INF, 1.0, 1.0], [INF, INF, INF], [-INF, 0.0, NAN]])])
    wrong, seen = [], 0
    for op in database.op_db:
        if torch.float32 not in op.dtypes or _is_left_out(op.name):
            continue
        points = POINTS[:-1]
        if op.name in FINITE:
            points = points[points.abs() != 1e30]
        if isinstance(op, core.UnaryUfuncInfo):
            _, options = op.sample_kwargs("cpu", torch.float32, POINTS)
            where = ELSEWHERE.get(op.name.rpartition(".")[2], slice(None))
            cases = [(functools.partial(op.op, **options), (x,)) for x in (POINTS[where], rows[:0])]
        elif isinstance(op, core.BinaryUfuncInfo):
            grid = torch.meshgrid(points, points, indexing="ij")
            cases = [(op.op, tuple(x.reshape(-1) for x in grid))]
        elif isinstance(op, core.ReductionOpInfo):
            cases = [(functools.partial(op.op, dim=1), (rows,))]
        else:
            continue
        seen += 1
        for fn, given in cases:
            try:
                agree(fn, *given)
            except Exception as error:
                wrong.append(f"{op.name}.{op.variant_test_name}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)
    assert seen > 100


def test_a_norm_of_negative_order_at_zero():
    x = torch.tensor([[0.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    agree(lambda x: torch.linalg.vector_norm(x, ord=-1.5, dim=-1), x)


@pytest.mark.parametrize("order", [0.5, 3.0, -1.0])
def test_norms_beside_infinity_nan_and_zeros(order):
    """NaN where PyTorch has it, at zeros beside infinity, too; of rows that `renorm` leaves, 1."""
    x = torch.tensor([[0.0, 0, INF], [INF, 1, 1], [INF, -INF, INF], [-INF, 0, NAN], [NAN, 1, 2],
                      [0, 0, 0], [0.0, -0.0, 3], [1, -2, 2]])  # fmt: skip
    bounds = (0.0, 1.0) if order > 0 else ()
    agree_all(
        (lambda x: torch.linalg.vector_norm(x, ord=order, dim=1), x),
        *((lambda x, bound=bound: torch.renorm(x, order, 0, bound), x) for bound in bounds),
        *((lambda x, bound=bound: torch.renorm(x[:, 1:], order, 1, bound), x[4:])
          for bound in bounds),
    )  # fmt: skip


def test_targets_of_binary_cross_entropy_have_a_gradient():
    p, target = torch.tensor([[0.1, 0.3, 0.5, 0.7, 0.9], [0.8, 0.2, 0.6, 0.4, 0.3]])
    agree(lambda p, target: F.binary_cross_entropy(p, target, reduction="none"), p, target)


def test_infinite_gaps_of_robust_losses_have_a_slope():
    x = torch.tensor([0.0, 1.0, INF, -INF])
    agree_all(
        (lambda x: F.smooth_l1_loss(x, torch.zeros(4), reduction="none"), x),
        (lambda x: F.huber_loss(x, torch.zeros(4), reduction="none"), x),
    )


def test_between_infinities_a_mean_begins_at_the_nearer_end():
    x, y = torch.tensor([[INF, 1.0, 0.0], [1.0, INF, 2.0]])
    weights = 0.3, 0.5, torch.tensor([0.5, 0.2, 0.7])
    agree_all(*((lambda x, y, w=w: torch.lerp(x, y, w), x, y) for w in weights))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variances_of_too_few_rows():
    x = torch.tensor([[1.0, 2.0], [3.0, 3.0]])
    for correction in (2, 4):  # of which PyTorch warns
        for of in (torch.std, torch.var):
            want, got, *slopes = both(lambda x, of=of, c=correction: of(x, 1, correction=c), x)
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(slopes[1], slopes[0])


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["amax", "amin", "prod"])
def test_values_reduced_into_places_may_be_equal_and_infinite(reduce, include_self):
    index, x = torch.tensor([0, 0, 1, 1]), torch.tensor([2.0 * (reduce == "prod"), 1.0, 5.0])
    options = {"reduce": reduce, "include_self": include_self}
    sources = [0.0, 0.0, INF, INF], [2.0, -1.0, 1.0, 1.0], [-INF, -INF, 1.0, 2.0]
    agree_all(
        *((lambda x, s: x.scatter_reduce(0, index, s, **options), x, torch.tensor(src))
          for src in sources)
    )  # fmt: skip


def test_distances_whose_largest_gaps_are_equal():
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    agree_all((lambda x: torch.cdist(x, x.flip(0), p=INF), x), (lambda x: F.pdist(x, p=INF), x))


@pytest.mark.parametrize("few", [2**24, 0], ids=["differences", "products"])
def test_rows_that_are_equal_have_no_slope_however_many(few, monkeypatch):
    """Whole numbers, of which PyTorch's product of matrices leaves no noise."""
    monkeypatch.setattr("torch_bridge.lower.distances._FEW_NUMBERS", few)
    x = torch.arange(120.0).reshape(30, 4) % 7
    agree_all(
        (lambda x: torch.cdist(x, x), x),
        (lambda x, y: torch.cdist(x[:, None, :2], y), x, x[3:6, :2]),
        (lambda x: torch.cdist(x[:3], x[:3], compute_mode="use_mm_for_euclid_dist"), x),
    )


def test_labels_that_are_certain_or_impossible_have_a_ctc_loss():
    x = torch.full((3, 1, 3), -INF)
    x[0, 0, 1] = x[1, 0, 0] = x[2, 0, 2] = 0
    lengths = torch.tensor([3]), torch.tensor([2])
    want, got, _, slopes = both(lambda x: F.ctc_loss(x, torch.tensor([[1, 2]]), *lengths), x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(slopes[0], 0)  # of -inf PyTorch's are NaN
    x[1, 0] = INF
    assert np.isnan(both(lambda x: F.ctc_loss(x, torch.tensor([[1, 2]]), *lengths), x)[1])


@pytest.mark.parametrize("zero", [False, True])
def test_labels_that_do_not_fit_have_an_infinite_ctc_loss_without_a_slope(zero):
    """PyTorch's slope of them is NaN: a step that takes one is no step."""
    labels, steps, lengths = torch.tensor([[1, 2, 1], [1, 1, 1]]), (4, 3), (3, 3)
    x = torch.linspace(-2, 1, 32).reshape(4, 2, 4).sin()
    for reduction in ("none", "mean"):
        want, got, wanted, found = both(
            lambda x, reduction=reduction: F.ctc_loss(
                x.log_softmax(2), labels, steps, lengths, zero_infinity=zero, reduction=reduction
            ),
            x,
        )
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-6)
        assert np.isnan(found[0]).any() != zero


def test_a_ctc_losss_gradient_is_nearer_to_the_true_one_than_pytorchs():
    """PyTorch's float32 kernel is up to 1e-4 off; ours not."""
    x = (torch.arange(38 * 4 * 15.0).reshape(38, 4, 15) * 1.7).sin() * 6
    given = torch.tensor([[3], [1], [7], [2]]), (38, 30, 21, 38), (1, 1, 1, 1)
    exact = x.double().requires_grad_()
    (truth,) = torch.autograd.grad(F.ctc_loss(exact.log_softmax(2), *given), exact)
    *_, (theirs,), (ours,) = both(lambda x: F.ctc_loss(x.log_softmax(2), *given), x)
    off, theirs_off = (np.abs(g - truth.numpy()).max() for g in (ours, theirs))
    assert off < 2e-5 * truth.abs().max()
    assert off < theirs_off


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("how", [{}, {"dilation": 2}, {"return_indices": True}], ids=str)
def test_the_gradient_of_a_window_of_masked_elements_goes_to_its_first_one(how, dims):
    """Not to the padding, which is -inf, too."""
    x = torch.full((1, 2, *[4] * dims), -INF)
    x[0, 1, ..., 1] = torch.finfo(torch.float32).min
    x[0, 1, ..., 3] = 5
    pool = getattr(F, f"max_pool{dims}d")
    given = {"kernel_size": 3, "stride": 2, "padding": 1, **how}
    if not how.get("return_indices"):
        return agree(lambda x: pool(x, **given), x)
    return agree_all((lambda x: pool(x, **given)[0], x), (lambda x: pool(x, **given)[1], x))


def test_a_running_sum_of_exponentials_goes_on_behind_infinity():
    x = torch.tensor([[INF, 0.0, 1.0], [1.0, INF, INF], [-INF, 1.0, INF]])
    want, got, wanted, found = both(lambda x: x.logcumsumexp(1), x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)


@pytest.mark.parametrize("upper", [False, True])
def test_which_pivot_is_not_there(upper):
    # Its largest pivot is a power of two: on any CPU what is to be zero is.
    ones, rank = torch.ones(3, 3), torch.tensor([[1.0, 2, 3], [2, 4, 6], [4, 8, 1]])
    x = torch.stack([torch.eye(3), ones, rank, -torch.eye(3), torch.zeros(3, 3)])
    z = torch.complex(x, x.tril(-1) - x.triu(1))
    agree_all(
        (lambda x: torch.linalg.cholesky_ex(x.detach(), upper=upper)[1].float(), x),
        (lambda x: torch.linalg.inv_ex(x.detach())[-1].float(), x),
        (lambda x: torch.linalg.lu_factor_ex(x.detach())[-1].float(), x),
        (lambda x: torch.linalg.solve_ex(x.detach(), torch.ones(3))[1].float(), x),
        (lambda x: torch.linalg.cholesky_ex(x.detach() * z, upper=upper)[1].float(), x),
        (lambda x: torch.linalg.matrix_norm(x, 2), torch.zeros(0, 0)),
        (lambda x: torch.linalg.cholesky_ex(x.detach())[1].float(), torch.zeros(2, 0, 0)),
    )


@pytest.mark.parametrize("how", ["bilinear", "bicubic", "smooth"])
def test_a_missing_pixel_stays_where_it_is(how):
    """In depth maps and masks; the matrices of resizing spread it over the image."""
    x = torch.arange(36.0).reshape(1, 1, 6, 6)
    x[..., 1, 2], x[..., 5, 5] = NAN, INF
    first = x.clone()
    first[..., 0, 0] = INF  # taps that an edge cuts off read the first pixel and leave it out
    smooth = {"mode": "bilinear", "antialias": True}
    options = smooth if how == "smooth" else {"mode": how, "align_corners": False}
    agree_all(
        (lambda x: F.interpolate(x, (4, 4), **options), x),
        (lambda x: F.interpolate(x, (11, 7), **options), x),
        (lambda x: F.interpolate(x, (4, 4), **options), first),
    )


def test_a_missing_pixel_stays_in_its_windows():
    x = torch.arange(40.0).reshape(1, 1, 5, 8)
    x[..., 1, 2], x[..., 4, 5] = NAN, INF
    sizes = (3, 4), (4, 5), (1, 6)
    agree_all(*((lambda x, size=size: F.adaptive_avg_pool2d(x, size), x) for size in sizes))


@pytest.mark.parametrize("kind", ["max", "min"])
def test_what_a_segment_begins_with_shares_no_gradient_with_its_equals(kind):
    x, lengths = torch.tensor([1.0, 1, 1, 2, 1, 0, 0]), torch.tensor([3, 0, 4])
    agree(lambda x: torch.segment_reduce(x, kind, lengths=lengths, initial=1.0), x)


def test_of_equal_values_the_first_is_the_maximum_of_its_window():
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # row by row, not column by column
    agree(lambda x: F.adaptive_max_pool2d(x[None], 1), x)


def test_an_infinite_maximum_goes_back_to_its_place():
    x = torch.tensor([[1.0, INF, -INF]])
    agree(lambda x: F.max_unpool1d(x, torch.tensor([[0, 2, 5]]), 2), x)


def test_an_infinite_slope_is_in_no_other_gradient():
    x = torch.tensor([[1.0, -1.0, INF, -2.0], [0.0, 2.0, -INF, 3.0]])
    agree_all((F.prelu, x, torch.tensor([0.5])), (F.prelu, x[:, :2], torch.tensor([0.5, INF])))


def test_an_infinite_variance_has_an_infinite_loss():
    var = torch.tensor([INF, 1.0, 0.0, 1e-7])
    each = {"reduction": "none"}
    x, target = torch.tensor([[1.0, 2.0, 3.0, 1.0], [0.5, 2.0, 3.0, 1.0]])
    agree(lambda x, var: F.gaussian_nll_loss(x, target, var, **each), x, var)


def test_a_missing_number_is_no_difference_that_counts():
    x = torch.tensor([[1.0, NAN, 3.0], [1.0, 2.0, 0.0], [1.0, 2.0, 3.0]])
    agree_all((lambda x: torch.cdist(x, x.flip(0), p=0.0), x), (lambda x: F.pdist(x, p=0.0), x))


def test_no_voxel_is_read_infinitely_far_away():
    grid = torch.tensor([[INF, 0.0, 0.0], [0.0, -INF, 0.5], [0.1, 0.2, 0.3]]).reshape(1, 1, 1, 3, 3)
    x = torch.arange(27.0).reshape(1, 1, 3, 3, 3)
    agree(lambda x, grid: F.grid_sample(x, grid, align_corners=False), x, grid)


def test_no_pixel_is_read_infinitely_far_away_either_but_nan():
    grid = torch.tensor([[INF, 0.0], [0.0, -INF], [NAN, 0.1], [0.1, 0.2]]).reshape(1, 1, 4, 2)
    x = torch.arange(9.0).reshape(1, 1, 3, 3)
    agree(lambda x, grid: F.grid_sample(x, grid, align_corners=False), x, grid)


def test_factors_are_solved_as_they_are():
    """Multiplied and factorised again, a pivot of 0 became a finite answer."""
    packed = torch.tensor([[2.0, 1.0, 3.0], [0.5, 0.0, 1.0], [0.25, 0.5, 4.0]])
    pivots, b = torch.tensor([2, 3, 3], dtype=torch.int32), torch.tensor([[1.0], [2.0], [3.0]])
    for given in ({}, {"left": False, "adjoint": True}, {"adjoint": True}):
        right = b if given.get("left", True) else b.t()
        solve = functools.partial(torch.linalg.lu_solve, pivots=pivots, **given)
        want, got, *_ = both(lambda lu, b, solve=solve: solve(lu, B=b), packed, right)
        finite = np.isfinite(want)
        assert not finite.all()
        np.testing.assert_allclose(got[finite], want[finite], rtol=1e-5)
        agree(lambda lu, b, solve=solve: solve(lu, B=b), packed + torch.eye(3), right)


def test_statistics_of_a_norm_have_no_gradient():
    x = torch.tensor([[1.0, 2.0, 4.0], [0.5, -1.0, 3.0]])
    for norm in (
        lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-5),
        lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    ):
        assert not any(each.requires_grad for each in norm(x.clone().requires_grad_())[1:])
        agree(lambda x, norm=norm: norm(x)[0] + norm(x)[1].sum() + norm(x)[2].sum(), x)


def test_trigamma_of_infinity_is_0():
    agree_all(
        (lambda x: torch.polygamma(1, x.detach()), torch.tensor([INF, -INF, 0.5, 2.0, 0.0])),
        (torch.digamma, torch.tensor([INF, 0.5, 0.0])),
    )


def test_quotients_by_a_divisor_that_is_spread_are_cut_as_they_are():
    """By its reciprocal, which XLA takes, 3 / 3 is less than 1."""
    y = torch.arange(1.0, 60.0)[None] / 4
    x = torch.arange(1.0, 6.0)[:, None] * y
    agree_all(
        (lambda x, y: torch.div(x.detach(), y.detach(), rounding_mode="trunc"), x, y),
        (lambda x: torch.div(x.detach(), 0.3, rounding_mode="trunc"), x),
        (torch.fmod, x, y),
    )


STEPS = {
    "floor": lambda q: q.floor(),
    "cast": lambda q: (q.mul(2).view(-1) + 1).long(),
    "half": lambda q: q.to(torch.bfloat16).ceil(),
    "compared": lambda q: q == 3,
    "quantised": lambda q: (q.round() - q.detach()) + q,
}


@pytest.mark.parametrize("step", STEPS)
def test_quotients_before_a_step_are_pytorchs(step):
    """Whole numbers of them: by a divisor that is spread, by a number, and of whole numbers."""
    y = torch.arange(1.0, 60.0)[None] / 4
    x = torch.arange(1.0, 6.0)[:, None] * y
    whole = torch.arange(300).reshape(5, 60)

    def of(q):
        return STEPS[step](q).to(torch.float32)

    agree_all(
        (lambda x, y: of(x / y) if step == "quantised" else of(x.detach() / y.detach()), x, y),
        (lambda x: of(x.detach() / 0.3), x),
        (lambda x: of(whole / 3) + x.sum() * 0, x),
    )


@pytest.mark.parametrize("upper", [False, True])
def test_a_factors_gradient_is_that_of_the_whole_factor(upper):
    """PyTorch's, though one triangle is read."""
    factor, b = torch.tensor([[2.0, 1.0], [0.5, 3.0]]), torch.tensor([[1.0], [2.0]])
    agree_all(
        (lambda b, factor: torch.cholesky_solve(b, factor, upper=upper), b, factor),
        (lambda factor: torch.cholesky_inverse(factor, upper=upper), factor),
    )


def test_values_at_the_edges_of_bins_are_counted_where_pytorch_counts_them():
    for bins, low, high in ((100, 0, 300), (30, 0, 3), (41, 0, 4.1)):
        x = torch.arange(1001) / 1000 * (high - low) + low
        agree(lambda x, given=(bins, low, high): torch.histc(x.detach(), *given), x)
