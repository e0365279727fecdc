"""Operators that torch.export cannot trace, or that JAX has no function for: equal to torch."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from parity import check_parity, relative_error
from torch import nn

import torch_bridge as tb
from fzero.errors import ConversionError
from tests.support.sample import some


pytestmark = pytest.mark.traced_once


class Fn(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fn = fn

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        return self.fn(x * self.scale, *rest)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("driver", [None, "gels", "gelsd"])
def test_what_a_driver_of_least_squares_returns_beside_the_solution(driver: str | None) -> None:
    for rows in (4, 3) if driver else (4,):
        given = draw(rows, 3), draw(rows, 2, seed=1)
        solve = functools.partial(torch.linalg.lstsq, driver=driver)
        found = jax.tree.leaves(tb.convert(Fn(solve), *given, train=False)(*given))
        for got, want in zip(found, solve(1.5 * given[0], given[1]), strict=True):
            # Solved by another factorisation, of matrices that are far from singular.
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_a_driver_cuts_small_singular_values() -> None:
    given = torch.diag(torch.tensor([1.0, 0.5, 0.01])), torch.ones(3, 1)
    cut = functools.partial(torch.linalg.lstsq, driver="gelsd", rcond=0.1)
    found = jax.tree.leaves(tb.convert(Fn(cut), *given, train=False)(*given))
    want = cut(1.5 * given[0], given[1])
    np.testing.assert_allclose(found[0], want.solution, rtol=1e-6, atol=1e-6)
    assert int(found[2]) == int(want.rank) == 2


def test_of_nothing_and_of_numbers() -> None:
    for training in (True, False):
        check_parity(Fn(lambda x, on=training: F.batch_norm(x, x, x, training=on)), torch.zeros(0))
    check_parity(Fn(lambda x: x.flip(0) + torch.flip(x, (-1,))), torch.tensor(1.5))


def test_a_power_of_two_of_16_bits_is_rounded_once() -> None:
    x, y = (3 * draw(300, seed=i).bfloat16() for i in (0, 1))
    module = Fn(torch.ldexp).bfloat16()
    nn.init.ones_(module.scale)
    want = module(x, y).float().detach().numpy()
    np.testing.assert_array_equal(tb.convert(module, x, y, train=False)(x, y), want)


def test_what_pytorch_raises_for_is_lost() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    for lengths in ([1, 9], [-1, 4], [1, 1]):
        module = Fn(lambda x, n: torch.segment_reduce(x, "sum", lengths=n))
        converted = tb.convert(module, x, torch.tensor([1, 2]), train=False)
        assert np.isnan(converted(x, torch.tensor(lengths))).all()
    converted = tb.convert(
        Fn(lambda x, i: F.max_unpool1d(x, i, 2)), x[None], torch.tensor([[0, 2, 5]]), train=False
    )
    for index in ([[0, 2, 6]], [[0, 2, -1]]):
        assert np.isnan(converted(x[None], torch.tensor(index))).all()


def test_grids_are_read_as_torch_reads_them() -> None:
    grid = draw(2, 3, 4, 2, seed=1)  # some positions lie outside [-1, 1]

    def every_kind(x: torch.Tensor) -> Any:
        kinds = itertools.product(
            ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
        )
        return tuple(  # corners are aligned in every second one: each mode and padding has both
            F.grid_sample(x, grid, mode=m, padding_mode=p, align_corners=n % 2 == 0)
            for n, (m, p) in enumerate(kinds)
        )

    check_parity(Fn(every_kind), draw(2, 3, 5, 6))


def test_signs_of_complex_numbers_have_gradients() -> None:
    """`x / abs(x)`, 0 at 0: JAX's own sign has none."""

    def signs(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.sgn(torch.complex(x, 2 * x - x * x)))

    check_parity(Fn(signs), draw(3, 4))
    check_parity(Fn(signs), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("owner", [torch, torch.random], ids=["torch", "torch.random"])
def test_a_forward_that_seeds_its_numbers_is_refused(owner: Any) -> None:
    """Silently, numbers that PyTorch draws alike in each call were new ones."""
    torch.manual_seed(3)

    def seeded(x: torch.Tensor) -> torch.Tensor:
        owner.manual_seed(3)
        return x + torch.randn_like(x)

    def forked(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng([]):
            return seeded(x)

    for forward in (seeded, forked):
        with pytest.raises(ConversionError, match=r"torch.manual_seed\(3\).*register_buffer"):
            tb.convert(Fn(forward), draw(2, 4))
    assert owner.manual_seed(0) is torch.default_generator


def test_a_generator_of_a_forward_s_own_is_refused() -> None:
    """Seeded, it would draw new numbers all the same; and the caller's is as it was."""

    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(3)
        return x + torch.randn_like(x)

    own, state = torch.Generator().manual_seed(1), torch.get_rng_state()
    with pytest.raises(ConversionError, match=r"torch.manual_seed\(3\).*register_buffer"):
        tb.convert(Fn(seeded), draw(2, 4))
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ConversionError, match=r"torch.Generator of its own.*hand the numbers in"):
        tb.convert(Fn(lambda x: x + torch.rand(x.shape, generator=own)), draw(2, 4))


def test_a_forward_that_draws_numbers_again_is_refused() -> None:
    def forked(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng([]):
            return x + torch.randn_like(x)

    def twice(x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        first = torch.randn_like(x)
        torch.set_rng_state(state)
        return first - torch.randn_like(x)

    with pytest.raises(ConversionError, match=r"torch.set_rng_state.*use them twice"):
        tb.convert(Fn(twice), draw(2, 4), train=False)
    converted = tb.convert(Fn(forked), draw(2, 4), train=False)
    x = np.zeros((2, 4), np.float32)
    noise = converted.apply(converted.params, {}, x, rng=jax.random.key(0)).output
    assert len(set(np.asarray(noise).ravel().tolist())) == 8


@pytest.mark.parametrize(
    "bounds", [{}, {"rtol": 0.5}, {"atol": 0.3}, {"atol": 0.2, "rtol": torch.tensor(0.3)}], ids=str
)
def test_pseudoinverses_train(bounds: Any) -> None:
    """With a bound that is computed JAX's own could not be differentiated inside a program."""
    module = Fn(lambda x: torch.linalg.pinv(x, **bounds))
    x = draw(5, 4) * torch.tensor([1.0, 0.5, 0.3, 0.1])  # some are below each bound
    converted = tb.convert(module, x)
    np.testing.assert_allclose(converted(x), module(x).detach(), rtol=1e-4, atol=1e-5)

    @jax.jit
    def loss(params: Any) -> jax.Array:
        return jnp.sum(converted.apply(params, {}, x.numpy()).output)

    found = jax.grad(loss)(converted.params)
    (wanted,) = torch.autograd.grad(module(x).sum(), module.scale)
    np.testing.assert_allclose(found["scale"], wanted, rtol=1e-4)


@pytest.mark.parametrize("bounds", [{}, {"rtol": 0.3}, {"atol": torch.tensor(0.5)}], ids=str)
def test_hermitian_pseudoinverses_have_pytorchs_gradient(bounds: Any) -> None:
    """That of the whole matrix, though only the lower triangle is read."""
    inverse = functools.partial(torch.linalg.pinv, hermitian=True, **bounds)

    def both(x: torch.Tensor) -> Any:
        z = torch.complex(x, x.tril(-1) - x.tril(-1).t())
        return inverse(x), torch.view_as_real(inverse(z @ z.mH)), inverse(x @ x.t() * 0)

    check_parity(Fn(both), draw(4, 4), gradient_rtol=1e-4)


def test_elements_are_repeated_as_often_as_a_tensor_says() -> None:
    class Regulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor, times: torch.Tensor) -> Any:
            x = x * self.scale
            places = torch.repeat_interleave(times, output_size=7)
            return x.repeat_interleave(times, 0, output_size=7), x[places] * 2

    x, times = draw(3, 4), torch.tensor([1, 4, 2])
    converted = tb.convert(Regulated(), x, times)
    assert tb.parity(Regulated(), converted, (x, times)).agrees
    longer = torch.repeat_interleave(x * 1.5, torch.tensor([0, 0, 7]), 0)
    np.testing.assert_allclose(converted(x, torch.tensor([0, 0, 7]))[0], longer)
    # PyTorch raises where they are not seven in all.
    assert np.isnan(np.asarray(converted(x, torch.tensor([1, 1, 1]))[0])).any()


def test_labels_of_a_margin_loss_end_at_the_first_negative_one() -> None:
    rows = [[0, 2, -1, 1], [1, -1, 0, 0], [-1, 0, 0, 0], [3, 2, 1, 0], [3, 0, -1, 2]]
    x, targets = draw(5, 4), torch.tensor(rows)
    for reduction in ("none", "mean", "sum"):
        check_parity(
            Fn(lambda x, r=reduction: F.multilabel_margin_loss(x, targets, reduction=r)), x
        )
    check_parity(Fn(lambda x: F.multilabel_margin_loss(x[0], targets[0])), x)
    beyond = tb.convert(Fn(lambda x: F.multilabel_margin_loss(x, targets + 1, reduction="none")), x)
    assert np.isnan(beyond(x.numpy())).tolist() == [False, False, False, True, True]
    below = tb.convert(Fn(lambda x: F.multilabel_margin_loss(x, targets - 1, reduction="none")), x)
    assert np.isnan(below(x.numpy())).tolist() == [True, True, True, False, True]


def test_distributions_are_those_of_torch() -> None:
    """What they assert about values is left out, unless it is asked for."""

    def densities(x: torch.Tensor, asked: bool | None = None) -> torch.Tensor:
        normal = D.Normal(x, x.exp(), validate_args=asked)
        unit = D.Normal(torch.zeros_like(x), torch.ones_like(x))
        kinds = D.Categorical(logits=x)
        mixed = D.MixtureSameFamily(kinds, D.Laplace(x, torch.ones_like(x)))
        return (normal.log_prob(x * 2) + D.kl_divergence(normal, unit)
                + D.StudentT(torch.tensor(3.0), x).log_prob(x + 1)
                + (kinds.entropy() + mixed.log_prob(x[:, 0])).unsqueeze(1))  # fmt: skip

    begin = D.Distribution.__init__
    check_parity(Fn(densities), draw(3, 4))
    assert D.Distribution.__init__ is begin
    with pytest.raises(ConversionError, match="must not depend on tensor values"):
        tb.convert(Fn(lambda x: densities(x, True)), draw(3, 4))


def test_a_distribution_that_a_module_holds_is_as_one_that_its_forward_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # which others may switch off
    given = draw(3, 2)
    unit = D.Normal(0.0, 1.0)
    held = (
        D.MultivariateNormal(torch.zeros(2), torch.eye(2)),
        D.Independent(D.Normal(torch.zeros(2), 1.0), 1),
    )
    check_parity(Fn(lambda x: held[0].log_prob(x) + held[1].log_prob(x) + unit.cdf(x[:, 0])), given)
    with pytest.raises(ValueError, match="within the support"):
        unit.log_prob(torch.tensor(torch.nan))
    asked = D.Normal(0.0, 1.0, validate_args=True)
    with pytest.raises(ConversionError, match="must not depend on tensor values"):
        tb.convert(Fn(lambda x: asked.log_prob(x)), given)


def test_positions_of_a_grid_have_gradients() -> None:
    image = draw(2, 3, 5, 6)
    check_parity(
        Fn(lambda g: tuple(
            F.grid_sample(image, g, padding_mode=p, align_corners=False)
            for p in ("zeros", "border", "reflection")
        )),
        draw(2, 3, 4, 2, seed=1),
    )  # fmt: skip


def test_of_no_dims_truth_is_not_reduced() -> None:
    """Where sums of no dims are those of all."""
    x = draw(3, 4)
    every_kind = Fn(lambda x: [
        x * (x > 0).any(dim=()), x * (x > -9).all(dim=[]), x * (x > 0).any(), x.sum(dim=()),
        x * (x > 0).any((0, 1)),
    ])  # fmt: skip
    check_parity(every_kind, x)


def test_parts_of_conjugates_and_convolutions_in_time() -> None:
    z, kernel = torch.complex(draw(3, 4), draw(3, 4, seed=1)), draw(3, 4, 2)
    check_parity(Fn(lambda x, k: (
        2 * torch.complex(x, x).conj().imag, 2 * (z + x).mH.imag, 2 * torch.fft.fft(x).conj().imag,
        F.conv_tbc(x[:, None], k, k[0, 0], 1),
    )), draw(3, 4), kernel)  # fmt: skip


def test_segments_bags_and_places() -> None:
    lengths = torch.tensor([2, 0, 3, 1])
    bags, offsets = torch.tensor([1, 3, 3, 0, 2, 5]), torch.tensor([0, 2, 2])
    index = torch.tensor([0, 2, 2])
    samples = torch.rand(1, 6, 2, generator=torch.Generator().manual_seed(2))

    def every_kind(x: torch.Tensor) -> Any:
        reduced = [
            torch.segment_reduce(x, kind, lengths=lengths, initial=start)
            for kind, start in (
                ("sum", None),
                ("max", None),
                ("min", None),
                ("mean", None),
                ("mean", 2.0),
                ("sum", 2.0),
                ("prod", 2.0),
            )
        ]
        bagged = [
            F.embedding_bag(bags, x, offsets, mode=m, padding_idx=p)
            for m in ("sum", "mean", "max")
            for p in (None, 3)
        ]
        ends = torch.tensor([0, 2, 2, 6])
        bagged += [F.embedding_bag(bags, x, ends, include_last_offset=True, padding_idx=-3)]
        folded = [
            x.index_reduce(0, index, x[:3] * 2, kind, include_self=own)
            for kind in ("prod", "mean", "amax", "amin")
            for own in (True, False)
        ]
        equal = x - x.detach()  # of equal values, some or all have the gradient
        tied = [equal.index_reduce(0, index, equal[:3] * 2, "amax"), equal.cummax(0)[0]]
        # torch leaves out a last window that begins behind the input
        tied += [F.max_pool1d(x[:3].t()[None], 1, 3, ceil_mode=True)]
        image = x.reshape(1, 6, 4, 1).expand(1, 6, 4, 5).cumsum(3)
        pooled = F.fractional_max_pool2d(
            image, 2, output_size=(2, 3), return_indices=True, _random_samples=samples
        )
        return (
            *reduced, *bagged, *folded, *tied, *pooled, x.take(bags), x.put(bags[:2], x[0, :2]),
            x.round().mode(0), x.nanmedian(0), x.contiguous().clone().as_strided((3, 3), (2, 4), 1),
            torch.logcumsumexp(x * 30, 0), F.pdist(x), torch.combinations(x[:, 0], 2),
            x.narrow(0, torch.tensor(2), 3), torch.linalg.lstsq(x, x[:, :1] + 1).solution,
            torch.histogram(x.detach(), 5)[0], torch.searchsorted(x.detach().sort(1)[0], x[:, :2]),
        )  # fmt: skip

    check_parity(Fn(every_kind), draw(6, 4), gradient_rtol=2e-4)


def test_values_go_where_a_mask_is_true() -> None:
    """As images' features replace the embeddings of their tokens: `x[mask] = features`."""
    mask = torch.tensor([[True, False, True], [False, False, True]])

    def put(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> Any:
        written = x * 2
        written[mask] = rows
        same = (x * 2).index_put((mask,), rows[0], accumulate=True)
        return written, same, x.index_put((mask,), rows, accumulate=True)

    converted = check_parity(Fn(put), draw(2, 3, 4), mask, draw(3, 4, seed=1))
    fewer = np.asarray(mask) & [True, True, False]
    out, _, _ = converted(draw(2, 3, 4).numpy(), fewer, draw(3, 4, seed=1).numpy())
    assert np.array_equal(np.isnan(out).all(-1), fewer), "other values than places: PyTorch raises"


def test_a_view_has_no_strides_here() -> None:
    size, src = ((2, 2), (1, 2)), torch.zeros(2, 2)
    with pytest.raises(ConversionError, match="as_strided of a view"):
        tb.convert(Fn(lambda x: x.t().as_strided(*size)), torch.ones(4, 6))
    with pytest.raises(ConversionError, match="as_strided of a view"):  # it begins elsewhere
        tb.convert(Fn(lambda x: x[1:].as_strided(*size)), torch.ones(4, 6))
    with pytest.raises(ConversionError, match="as_strided_scatter of a view"):
        tb.convert(Fn(lambda x: x.detach().t().as_strided_scatter(src, *size)), torch.ones(4, 6))


def test_what_is_written_by_strides_has_pytorchs_gradient() -> None:
    """Of the input PyTorch's is that of the places that are replaced, and 0 in the others."""

    def write(x: torch.Tensor, src: torch.Tensor) -> Any:
        z, into = torch.complex(x, x * x), ((2, 3), (4, 1), 2)
        written = torch.as_strided_scatter(z, torch.complex(src, -src), *into)
        return x.as_strided_scatter(src, *into), torch.view_as_real(written)

    check_parity(Fn(write), draw(4, 5), draw(2, 3, seed=1))
    overlap = Fn(lambda x: x.as_strided_scatter(torch.ones(2, 3), (2, 3), (1, 1)))
    with pytest.raises(ConversionError, match=r"places that overlap.*leaves open"):
        tb.convert(overlap, draw(4, 5))(draw(4, 5).numpy())


class CastsWithin(nn.Module):
    """As Switch Transformers' router does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.part, self.dtype = nn.Linear(4, 3), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part = self.part.to(self.dtype)
        return self.part(x.to(self.dtype)).float()


class CastsByName(CastsWithin):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.part.float() if self.dtype == torch.float32 else self.part.bfloat16()
        return part(x.to(self.dtype)).float()


@pytest.mark.parametrize("casting", [CastsWithin, CastsByName])
def test_a_part_that_has_its_dtype_is_cast_to_it(casting: type[CastsWithin]) -> None:
    check_parity(casting(torch.float32), draw(2, 4), train=True)
    said = (
        r"of a Linear to torch.bfloat16 \(weight, bias\).*\n  in \(root\) at: .*self\.part\.(to|bf)"
    )
    with pytest.raises(ConversionError, match=said):
        tb.convert(casting(torch.bfloat16), draw(2, 4))


@pytest.mark.parametrize("kind", ["padded", "joined"])
def test_ctc_loss(kind: str) -> None:
    targets = torch.tensor([[1, 2, 2], [3, 1, 0]])
    targets = targets if kind == "padded" else torch.tensor([1, 2, 2, 3])
    lengths = torch.tensor([3, 1])

    def losses(x: torch.Tensor) -> Any:
        logs = x.log_softmax(-1)
        # The second sequence cannot be emitted in no step at all: infinite, or 0 where asked.
        hopeless = torch.tensor([6, 0])
        return (
            F.ctc_loss(logs, targets, torch.tensor([6, 4]), lengths),
            F.ctc_loss(logs, targets, (6, 4), (3, 1), reduction="none"),
            F.ctc_loss(logs, targets, hopeless, lengths, reduction="none", zero_infinity=True),
        )

    check_parity(Fn(losses), draw(6, 2, 4))


def test_running_averages_over_all_batches() -> None:
    module = nn.BatchNorm1d(3, momentum=None)
    module(draw(5, 3, seed=4))  # a batch before the conversion counts
    converted = tb.convert(module, draw(4, 3))
    buffers = converted.buffers
    for seed in (1, 2):
        x = draw(4, 3, seed=seed)
        out, buffers = converted.apply(converted.params, buffers, x.numpy(), train=True)
        want = module.train()(x).detach()
        assert relative_error(out, want) < 2e-5
    for name, value in module.named_buffers():
        assert relative_error(buffers[name], value) < 2e-6, name


def test_transformers_with_padding() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    padding = torch.tensor([[False, False, True], [False, True, True]])

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            out = self.inner(x, src_key_padding_mask=padding)
            return torch.where(padding[..., None], 0.0, out)  # torch's eval mode leaves it out

    for train in (False, True):
        check_parity(Padded(), draw(2, 3, 8), padding, train=train)


def test_gaussian_loss_of_bounded_variances() -> None:
    var = torch.tensor([[1e-9, 0.5, 2.0]] * 2)
    check_parity(Fn(lambda x: F.gaussian_nll_loss(x, x.detach() * 0.5, var, full=True)), draw(2, 3))


BESSEL = ["bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_k0",
          "modified_bessel_k1", "scaled_modified_bessel_k0", "airy_ai"]  # fmt: skip


@pytest.mark.parametrize("name", some(BESSEL, *BESSEL[1:4], *BESSEL[4::2]))
def test_bessel_functions(name: str) -> None:
    x = torch.linspace(-30, 30, 601)
    fn = getattr(torch.special, name)
    got = np.asarray(tb.convert(Plain(fn), x, train=False)(x.numpy()))
    want = fn(x.double()).numpy()
    narrow = fn(x).numpy()  # what overflows in float32 does so here
    known = np.isfinite(want) & np.isfinite(narrow)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(narrow))
    # Of values of size one, in single precision; the largest argument is rounded to 2e-6.
    gap = np.abs(got[known] - want[known]) / np.maximum(np.abs(want[known]), 1)
    assert gap.max() < 5e-6


class Plain(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(x)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_polygamma_left_of_zero(order: int) -> None:
    x = torch.tensor([-8.478374, -3.001, -0.5, 0.3, 4.0])
    module = Plain(lambda x: torch.polygamma(order, x))
    converted = tb.convert(module, x, train=False)
    value, slope = jax.vjp(lambda x: converted(x), jnp.asarray(x.numpy()))
    wide = x.double().requires_grad_()
    want = torch.polygamma(order, wide)
    # x has 24 bits: near the pole at -3 that leaves about 4 digits of the distance to it.
    assert np.allclose(value, want.detach(), rtol=2e-5)
    slopes = torch.autograd.grad(want.sum(), wide)[0]
    assert np.allclose(slope(jnp.ones(5))[0], slopes, rtol=2e-5)


def test_polygamma_at_its_pole() -> None:
    class Polygamma(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.polygamma(order, x) for order in (1, 2, 3)])

    x = torch.tensor([0.0, 0.5])
    found = tb.convert(Polygamma(), x)(x)
    np.testing.assert_allclose(found, Polygamma()(x), rtol=1e-5)


class Bounded(nn.Module):
    """Looks at one weight with bounds of several kinds, and as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=1, max_norm=1.5)
        self.bags = nn.EmbeddingBag(7, 4, max_norm=2.0, norm_type=1.0, mode="sum")
        self.bags.weight = self.words.weight
        with torch.no_grad():
            self.words.weight.copy_(draw(7, 4) * torch.arange(7.0)[:, None])

    def forward(self, ids: torch.Tensor) -> Any:
        whole, first = self.words.weight.sum(0), self.words(ids)
        summed = self.bags(ids[:, :2])
        plain = F.embedding(ids + 1, self.words.weight)
        again = F.embedding(ids, self.words.weight, None, 0.5, float("inf"))
        return whole, first, summed, plain, again, again @ self.words.weight.t()


def test_rows_that_are_too_long_are_scaled_before_they_are_read() -> None:
    """What reads the weight later sees them scaled; their gradient does not."""
    ids = torch.tensor([[1, 5, 3], [5, 4, 3]])
    check_parity(Bounded().eval(), ids, train=False)
    torch.manual_seed(0)
    half = nn.Embedding(7, 4, max_norm=1.0).bfloat16().eval()
    with torch.no_grad():
        half.weight[5] = float("inf")
    got = tb.convert(half, ids, train=False)(ids.numpy())
    np.testing.assert_array_equal(got.astype(np.float32), half(ids).float().detach())


def test_a_training_that_scales_rows_is_refused_by_name() -> None:
    ids = torch.tensor([[0, 1]])
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ConversionError, match=r"max_norm= .*train=False.*state\.replace"):
            tb.convert(kind(3, 4, max_norm=1.0), ids)
    frozen = nn.Embedding.from_pretrained(draw(3, 4), max_norm=1.0)  # which no optimizer moves
    converted = tb.convert(frozen, ids)
    np.testing.assert_allclose(converted(ids.numpy()), frozen(ids), rtol=1e-6)


@pytest.mark.parametrize("order", ["nuc", 2, -2])
def test_norms_of_matrices_lie_along_any_dims(order: Any) -> None:
    check_parity(Fn(lambda x: torch.linalg.matrix_norm(x, order, dim=(0, 2))), draw(3, 2, 4))


def test_condition_numbers_are_those_of_every_norm() -> None:
    """Their values alone: PyTorch's gradient of the largest sum's raises."""
    orders = [None, 2, -2, 1, -1, math.inf, -math.inf, "fro", "nuc"]
    module, x = Fn(lambda x: [torch.linalg.cond(x, order) for order in orders]), draw(2, 3, 3)
    for found, expected in zip(tb.convert(module, x)(x.numpy()), module(x), strict=True):
        np.testing.assert_allclose(found, expected.detach(), rtol=1e-5)


def test_covariances_are_weighted_by_counts_and_by_importance() -> None:
    often, much = torch.tensor([1, 3, 2, 1]), torch.tensor([0.5, 1.0, 0.25, 2.0])
    kinds: Any = [{"fweights": often}, {"aweights": much}, {"fweights": often, "aweights": much}]
    kinds += [one | {"correction": 0} for one in kinds]
    check_parity(Fn(lambda x: [torch.cov(x, **one) for one in kinds]), draw(3, 4))


def test_a_covariance_of_complex_numbers_is_complex() -> None:
    turned = Fn(lambda x: torch.view_as_real(torch.cov(torch.complex(x, x.cos()))))
    check_parity(turned, draw(3, 4))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="of newer PyTorch")
def test_the_first_class_may_be_the_one_that_is_ignored() -> None:
    weight, target = draw(3, 4, seed=1), torch.tensor([0, 2, 0, 1])
    loss = Fn(lambda x: F.linear_cross_entropy(x, weight, target, ignore_index=0))
    check_parity(loss, draw(4, 4))
