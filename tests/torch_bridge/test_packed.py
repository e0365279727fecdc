"""Packed sequences: recurrent layers stop at the end of each row, as PyTorch's do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_bridge as tb
from fzero import ConversionError


pytestmark = pytest.mark.traced_once

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([3, 6, 1])


class Tagger(nn.Module):
    """Embeds, packs, runs two layers, unpacks. `reads`: what else it does with what is packed."""

    def __init__(self, kind: str = "GRU", reads: str = "", **options: Any) -> None:
        super().__init__()
        self.embed, self.reads = nn.Embedding(11, 4), reads
        self.recurrent = getattr(nn, kind)(4, 5, batch_first=True, **options)
        self.sorted = options.get("num_layers") == 1
        self.start = nn.Parameter(torch.randn(2, 1, 5) if kind == "GRU" else torch.zeros(0))

    def forward(self, ids: torch.Tensor, lengths: Any) -> Any:
        x = self.embed(ids)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.sorted)
        if self.reads == "data":
            return packed.data.sum()
        if self.reads == "item":
            return packed.data[0]
        if self.reads == "rows":
            return x.sum() / packed.data.shape[0]
        if self.reads == "size":
            return x.sum() / packed.data.size(0)
        if self.reads == "view":
            return packed.data.T.sum()
        if self.reads == "longest":
            return x.sum() / packed.batch_sizes.size(0)
        if self.reads == "values returned":
            return ids, packed.data
        if self.reads == "sizes returned":
            return {"sizes": packed.batch_sizes}
        if self.reads == "sizes":
            return packed.batch_sizes.cumsum(0)
        assert packed.data.dtype == x.dtype
        start = self.start.repeat(1, ids.shape[0], 1) if self.start.numel() else None
        out, state = self.recurrent(packed, start)
        if self.reads == "returned":
            return out
        total = {"shorter": 4, "no length": None, "longer": 9}.get(self.reads, ids.shape[1])
        padded, found = pad_packed_sequence(out, True, padding_value=-1.5, total_length=total)
        if self.reads == "features":  # how many there are is known while it is traced
            padded = padded.unflatten(-1, (padded.shape[-1] // 5, 5)).tanh().flatten(-2)
        state = torch.cat(state, -1) if isinstance(state, tuple) else state
        return padded, state, found


CASES = {
    "its own first states": ("GRU", {"num_layers": 2}, LENGTHS),
    "both directions": (
        "LSTM",
        {"num_layers": 2, "bidirectional": True, "reads": "features"},
        LENGTHS,
    ),
    "projected": ("LSTM", {"num_layers": 1, "proj_size": 2}, torch.tensor([6, 4, 2])),
    "plain": ("RNN", {"num_layers": 2, "nonlinearity": "relu", "bidirectional": True}, LENGTHS),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_pytorchs(case: str) -> None:
    torch.manual_seed(0)
    kind, options, lengths = CASES[case]
    module = Tagger(kind, **options).eval()
    converted = tb.convert(module, IDS, lengths)
    assert not converted.fixed_dims()
    other = torch.randint(0, 11, (4, 9)), torch.tensor([9, 7, 7, 1])
    for given in ((IDS, lengths), other):
        want, got = module(*given), converted(*given)
        for one, another in zip(got, want, strict=True):
            # Products in another order.
            np.testing.assert_allclose(one, another.detach(), rtol=2e-5, atol=1e-6)
    padded, state, _ = module(IDS, lengths)
    (padded.square().sum() + state.sum()).backward()

    def loss(params: Any) -> jax.Array:
        padded, state, _ = converted.apply(params, {}, IDS.numpy(), lengths.numpy()).output
        return jnp.square(padded).sum() + state.sum()

    grads = jax.grad(loss)(converted.params)
    for name, p in module.named_parameters():
        if p.grad is not None:
            np.testing.assert_allclose(grads[name], p.grad, rtol=2e-5, atol=5e-6, err_msg=name)


def test_what_is_beside_the_rows() -> None:
    """Lengths of the module's own, more positions than were packed, the graph run in PyTorch."""
    torch.manual_seed(0)
    module = Tagger(num_layers=2, reads="longer").eval()
    lengths = [3, 6, 1]
    padded, state, found = tb.convert(module, IDS, lengths)(IDS, lengths)
    want = module(IDS, lengths)
    assert padded.shape == (3, 9, 5)
    np.testing.assert_array_equal(found, want[2])
    np.testing.assert_array_equal(np.asarray(padded[:, 6:]), -1.5)
    np.testing.assert_allclose(padded, want[0].detach(), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state, want[1].detach(), rtol=2e-5, atol=1e-6)
    run = torch.ops.torch_bridge.packed_rnn
    x, hx = torch.randn(6, 3, 4), torch.zeros(1, 3, 5)
    weights = list(nn.LSTM(4, 5).parameters())
    options = True, 1, 0.0, False, False
    out, h, c = run("lstm", x, LENGTHS, [hx, hx], weights, *options)
    for row, length in enumerate(LENGTHS.tolist()):
        one = x[:length, row : row + 1]
        alone = torch._VF.lstm(one, (hx[:, :1], hx[:, :1]), weights, *options, False)
        torch.testing.assert_close(out[:length, row], alone[0][:, 0])
        torch.testing.assert_close(torch.stack([h, c])[:, 0, row], torch.stack(alone[1:])[:, 0, 0])


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        ("data", r"sum of a packed sequence: .* pad_packed_sequence\(\.\.\., total_length="),
        ("item", r"__getitem__ of a packed sequence"),
        ("sizes", r"cumsum of a packed sequence"),
        ("rows", r"__get__ of a packed sequence"),
        ("size", r"size of a packed sequence"),
        ("view", r"__get__ of a packed sequence"),
        ("longest", r"size of a packed sequence"),
        ("no length", r"total_length is not given, .* total_length=x\.shape\[1\]"),
        ("shorter", r"total_length is 4, .* total_length=x\.shape\[1\]"),
        ("returned", r"results of a packed sequence: .* pad_packed_sequence"),
        ("values returned", r"results of a packed sequence: .* pad_packed_sequence"),
        ("sizes returned", r"results of a packed sequence: .* pad_packed_sequence"),
    ],
)
def test_what_has_as_many_values_as_the_lengths_say_is_refused(reads: str, said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        tb.convert(Tagger(num_layers=2, reads=reads), IDS, LENGTHS)


@pytest.mark.parametrize("lengths", [[6, 4, 0], [7, 4, 2], [4, 6, 2], [0, 0, 0]])
def test_lengths_that_pytorch_refuses_give_nan(lengths: list[int], projected: Any) -> None:
    """Of no position, of more than there are, not sorted where the module says that they are."""
    module, converted = projected
    with pytest.raises(RuntimeError, match=r"[Ll]ength"):
        module(IDS, torch.tensor(lengths))
    padded, state, _ = converted(IDS, torch.tensor(lengths))
    assert np.isnan(padded).all()
    assert np.isnan(state).all()


def test_lengths_that_are_sorted_as_the_module_says_are_taken(projected: Any) -> None:
    module, converted = projected
    lengths = torch.tensor([6, 4, 4])
    padded, *_ = converted(IDS, lengths)
    np.testing.assert_allclose(padded, module(IDS, lengths)[0].detach(), rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def projected() -> tuple[nn.Module, tb.Converted]:
    kind, options, lengths = CASES["projected"]
    module = Tagger(kind, **options).eval()
    return module, tb.convert(module, IDS, lengths, train=False)
