"""Operators one by one: whatever PyTorch runs is computed beside it, in JAX, without a conversion.

The samples are those that PyTorch tests itself with. An operator that is made of others is seen as
those.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.errors import ConversionError
from torch_bridge.lower.features_last import call, in_order
from torch_bridge.lower.registry import find_lowering


pytestmark = pytest.mark.traced_once

# The results that are compared; others are scratch space, vectors of which any sign is right, or
# say which of several equal values it was.
COMPARED = {
    "aten._embedding_bag_forward_only.default": [0],
    "aten._linalg_eigh.default": [0],
    "aten._linalg_svd.default": [1],
    "aten.linalg_eig.default": [0],
    "aten.kthvalue.default": [0],
    "aten.log_sigmoid_forward.default": [0],
    "aten.mode.default": [0],
    "aten.nanmedian.dim": [0],
    "aten.nll_loss_forward.default": [0],
    "aten.sort.default": [0],
    "aten.topk.default": [0],
}
# Whose result is in any order along its last dim: that of LAPACK's steps, of which each library has
# its own.
UNORDERED = ("aten.linalg_eig.default", "aten._linalg_eigvals.default")
# Entries of PyTorch's database, and which of their samples, in the order in which it makes them:
# those that run what no other test does.
CHOSEN = {
    torch.float32: """
_upsample_bilinear2d_aa:3 aminmax:3,4 argmax:2 argmin:2 cholesky_inverse:5 cummin:2 cumsum:2,3
diagonal_scatter:5 div.trunc_rounding:5 fft.ifft:4 fft.ifftshift:1 fft.rfftn:0 fmax:0 fmin:0
frexp:1 gather:4,5 histc:4,5 index_copy:0,1,2 index_select:0,2 ldexp:3 linalg.eigvals:5
linalg.eigvalsh:4
linalg.lu_factor_ex:2 linalg.lu_solve:3 linalg.pinv:2 linalg.solve_ex:0 linalg.svd:2 masked.prod:5
masked.sum:4 masked_scatter:3 median:2 min.reduction_with_dim:3 mode:4 mvlgamma.mvlgamma_p_3:5
nanmedian:2 native_group_norm:12 native_layer_norm:3 nn.functional.bilinear:5
nn.functional.fractional_max_pool3d:26 nn.functional.group_norm:5
nn.functional.interpolate.bicubic:5 nn.functional.interpolate.linear:5,7
nn.functional.interpolate.nearest-exact:4 nn.functional.max_unpool2d:5
nn.functional.multilabel_margin_loss:0 nn.functional.pixel_shuffle:1 nonzero_static:5 norm.inf:0,3
ormqr:5,12 scatter:21 scatter_add:6 scatter_reduce.sum:18 slice:0 slice_scatter:3
special.bessel_y1:2 special.erfcx:2 special.log_ndtr:2 special.shifted_chebyshev_polynomial_w:0
topk:7 trace:0 transpose:4 triangular_solve:1 unfold:0,5
""",
    torch.complex64: "cumprod:0 cumsum:0 logaddexp:2 logcumsumexp:0 lu_unpack:2 prod:1 var:0",
    torch.float16: "var:1",
    torch.uint8: "all:1 any:0 cumprod:0 prod:1",
    torch.bool: """
all:9 any:8,10 heaviside:0 index_add:0 put:1 scatter_reduce.amax:0 scatter_reduce.prod:0 sign:0
""",
}
# What has no values to compare, or needs a GPU.
WITHOUT_VALUES = ("empty", "rand", "normal", "dropout", "jiterator", "as_strided", "multinomial")
# What begins with memory that nobody wrote.
UNWRITTEN = {"nn.functional.pad.circular"}
# Of complex numbers PyTorch itself computes another one within a `TorchDispatchMode`.
OTHERWISE = {"pinverse", "linalg.pinv"}
PARTS = 6
SAMPLES = {
    torch.float32: 6, torch.complex64: 3, torch.int64: 3, torch.uint8: 3, torch.bool: 3,
}  # fmt: skip


def entries() -> dict[str, Any]:
    """PyTorch's database of operators."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    named = {
        entry.name + (entry.variant_test_name and f".{entry.variant_test_name}"): entry
        for entry in op_db
        if not any(w in entry.name for w in WITHOUT_VALUES)
    }
    return {name: entry for name, entry in named.items() if name not in UNWRITTEN}


def to_jax(x: Any) -> Any:
    return jnp.asarray(to_numpy(x)) if isinstance(x, torch.Tensor) else x


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.dtype == torch.bfloat16:  # numpy knows it by its name only
        return x.view(torch.int16).numpy().view(jnp.bfloat16.dtype)
    return np.asarray(x.numpy())


class InJax(TorchDispatchMode):
    """Computes each operator that has a lowering in JAX, too, and compares.

    Attributes:
        seen: the operators that were compared.
        refused: those that were refused by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, lowering = str(func), find_lowering(str(func))
        if lowering is None or lowering.draws or any(w in name for w in WITHOUT_VALUES):
            return func(*args, **(kwargs or {}))
        given = pytree.tree_map(to_jax, (args, kwargs or {}))  # before PyTorch writes into them
        expected = func(*args, **(kwargs or {}))
        try:
            found = computed(lowering.fn, *given)
        except (ConversionError, NotImplementedError):
            self.refused.append(name)
            return expected
        tensors = [x for x in pytree.tree_leaves(expected) if isinstance(x, torch.Tensor)]
        for number in COMPARED.get(name, range(len(tensors))):
            agrees(name, found[number], to_numpy(tensors[number]))
        self.seen.append(name)
        return expected


def computed(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The results, from one program: one by one, its operations take longer to compile."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}

    def run(arrays: dict[int, jax.Array]) -> Any:
        own = [arrays.get(i, x) for i, x in enumerate(leaves)]
        return in_order(call(function, *jax.tree.unflatten(treedef, own)))

    return jax.tree.leaves(jax.jit(run)(arrays))


def agrees(name: str, found: Any, expected: np.ndarray) -> None:
    found = np.asarray(found)
    if name in UNORDERED:
        found, expected = np.sort(found, -1), np.sort(expected, -1)
    assert found.shape == expected.shape, name
    assert found.dtype.kind == expected.dtype.kind, name
    if expected.dtype == np.float16:
        assert found.dtype == np.float16, name
    largest = np.max(np.abs(expected[np.isfinite(expected)]), initial=0.05)
    # Sums are in another order, and functions are other polynomials: of the largest, as in the
    # table of `make operators`.
    share = 0 if found.dtype.kind in "iub" else 2e-5
    np.testing.assert_allclose(found, expected, rtol=share, atol=share * largest, err_msg=name)


def samples_of(entry: Any, dtype: torch.dtype) -> Iterator[Any]:
    from torch.testing._internal.common_utils import set_rng_seed

    set_rng_seed(0)
    # `entry.sample_inputs` looks through all modules for the running test's name, each time.
    return iter(entry.sample_inputs_func(entry, "cpu", dtype, requires_grad=False))


@pytest.mark.parametrize(
    ("dtype", "chosen"),
    [(dtype, one) for dtype, chosen in CHOSEN.items() for one in chosen.split()],
    ids=str,
)
def test_what_pytorch_runs_is_what_jax_computes(dtype: torch.dtype, chosen: str) -> None:
    name, _, numbers = chosen.partition(":")
    entry, wanted = entries()[name], [int(n) for n in numbers.split(",")]
    for number, sample in enumerate(islice(samples_of(entry, dtype), max(wanted) + 1)):
        if number in wanted:
            with InJax() as mode:
                entry.op(sample.input, *sample.args, **sample.kwargs)
            assert mode.seen, "no operator of this sample has a lowering: choose another"
            assert not mode.refused


@pytest.mark.parametrize("name", ["bessel_j0", "bessel_j1", "scaled_modified_bessel_k0"])
def test_bessel_functions_far_from_0(name: str) -> None:
    with InJax() as mode:
        getattr(torch.special, name)(torch.tensor([12.5, 30.0, 1e3]))
    assert mode.seen
    assert not mode.refused


def test_statistics_of_batches_move_by_the_momentum() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    weight, bias, mean, var = torch.linspace(0.5, 2, 12).reshape(4, 3)
    with InJax() as mode:
        torch.ops.aten._native_batch_norm_legit_functional(
            x, weight, bias, mean, var, True, 0.2, 1e-5
        )
    assert mode.seen


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", SAMPLES, ids=str)
def test_every_operator_of_pytorchs_database(dtype: torch.dtype, part: int) -> None:
    seen, wrong = set(), set()
    own = [
        entry
        for entry in entries().values()
        if dtype in entry.dtypes and not (dtype.is_complex and entry.name in OTHERWISE)
    ]
    for entry in own[part::PARTS]:
        for number, sample in enumerate(islice(samples_of(entry, dtype), SAMPLES[dtype])):
            with InJax() as mode:
                try:
                    entry.op(sample.input, *sample.args, **sample.kwargs)
                except NotImplementedError:  # PyTorch's own; ours are counted as refused
                    continue
                except Exception as error:
                    wrong.add(f"{entry.name}:{number}: {type(error).__name__} {error}")
            seen.update(mode.seen)
    assert not wrong
    assert len(seen) > 20


@pytest.mark.parametrize("ends", [(0, -8.000001, -4.0), (0, 5.000001, 2.0), (0.5, 3.7, 1)])
def test_ends_of_a_range_of_whole_numbers_are_cut_as_pytorch_does(ends: tuple[float, ...]) -> None:
    with InJax() as mode:
        torch.arange(*ends, dtype=torch.int64)
    assert mode.seen == ["aten.arange.start_step"]
