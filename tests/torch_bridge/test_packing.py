"""Packed rows: the loss and the gradients of the documents one by one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers

import fzero as fz
import torch_bridge as tb


V, D = 23, 8


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Ordinary promotion instead, as in training."""


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(D, 3 * D)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + out.transpose(1, 2).flatten(-2)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(V, D), torch.nn.Embedding(16, D)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(D, V)

    def forward(self, ids, positions, mask):
        x = self.embed(ids) + self.place(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def loss(forward, batch):
    mask = tb.packed_mask(batch["segments"])
    return tb.causal_lm_loss(forward(batch["ids"], batch["positions"], mask), batch["labels"])


def test_the_loss_of_packed_rows_is_that_of_the_documents_one_by_one():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, V, n).tolist() for n in (7, 4, 9, 2, 3, 10, 1)]
    packed = tb.pack(documents, length=12, rows=8, vocabulary=V)
    assert sum(map(len, documents)) == np.count_nonzero(packed["segments"])
    assert packed["segments"].shape == (8, 12)
    assert packed["segments"].max() > 1  # some rows have several
    ids = torch.zeros(2, 12, dtype=torch.long)
    module = Decoder()
    made = tb.convert(module, ids, ids, torch.zeros(2, 1, 12, 12))
    model, tx = made.model(loss), optax.sgd(1.0)
    plan = fz.Plan(zero=3, data=4, min_shard_bytes=0)  # rows with few and with many real tokens
    state = fz.init(model, tx, plan)
    state, metrics = fz.train_step(model, tx, plan)(state, packed)
    total = count = 0
    for document in documents:  # in PyTorch, each alone
        own = torch.tensor([document])
        causal = torch.ones(1, 1, own.shape[1], own.shape[1], dtype=torch.bool).tril()
        logits = module(own, torch.arange(own.shape[1])[None], causal)[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, own[0, 1:], reduction="sum")
        count += len(document) - 1
    (total / count).backward()
    assert float(metrics["count"]) == count
    assert float(metrics["loss"]) == pytest.approx((total / count).item(), rel=1e-5)
    stepped = tb.state_dict(made, state)
    for name, parameter in module.named_parameters():
        want = (parameter - parameter.grad).detach()
        torch.testing.assert_close(stepped[name], want, rtol=1e-4, atol=1e-5)


def test_a_sliding_window_within_documents_is_that_of_transformers():
    """Logits of each document alone, which is longer than the window: to float32's rounding."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=3, initializer_range=0.5,
    )  # fmt: skip
    module = transformers.MistralForCausalLM(config).eval()
    documents = [list(range(1, 9)), list(range(9, 14))]
    packed = tb.pack(documents, length=14)
    ids, positions = (torch.tensor(packed[name]).long() for name in ("ids", "positions"))

    def logits(window):
        mask = torch.tensor(np.asarray(tb.packed_mask(packed["segments"], window=window)))
        return module(ids, attention_mask=mask, position_ids=positions).logits[0]

    with torch.no_grad():
        alone = torch.cat([module(torch.tensor([one])).logits[0] for one in documents])
        torch.testing.assert_close(logits(3)[: len(alone)], alone, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(logits(None)[: len(alone)], alone, atol=1e-2)
    for window in (0, 2.5):
        with pytest.raises(fz.BatchError, match=f"window={window}: expected at least 1"):
            tb.packed_mask(packed["segments"], window=window)


def test_what_cannot_be_packed_is_named():
    with pytest.raises(fz.BatchError, match="document 1 has 5 tokens, but rows have 4"):
        tb.pack([[1], [1, 2, 3, 4, 5]], length=4)
    with pytest.raises(fz.BatchError, match="document 0, position 1: token 9 is outside"):
        tb.pack([[1, 9]], length=4, vocabulary=9)
    with pytest.raises(fz.BatchError, match="take 2 rows of 4 tokens, but rows=1"):
        tb.pack([[1, 2, 3], [1, 2]], length=4, rows=1)
    with pytest.raises(fz.BatchError, match=r"document 0: expected a list of token ids"):
        tb.pack([["a"]], length=4)
    with pytest.raises(fz.BatchError, match="document 0, position 1: token -1 is outside"):
        tb.pack([[1, -1]], length=4, vocabulary=9)
    with pytest.raises(fz.BatchError, match=r"document 1 has 2 tokens, but labels of shape \[1\]"):
        tb.pack([[1], [1, 2]], length=4, labels=[[1], [1]])
    with pytest.raises(fz.BatchError, match="document 1 has no labels"):
        tb.pack([[1], [1, 2]], length=4, labels=[[1]])
    with pytest.raises(fz.BatchError, match="document 1 has labels, but is none"):
        tb.pack([[1]], length=4, labels=iter([[1], [1, 2]]))


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[1], [2**40, 5]], {}, "document 1, position 0: token 1099511627776 is outside int32"),
        ([np.array([2, 2**63 + 5], np.uint64)], {}, "document 0, position 1: token 92233"),
        ([[1, 2]], {"labels": [[1, 2**31]]}, "position 1: label 2147483648 is outside int32"),
        ([[1, 2]], {"labels": [[1.0, 2.7]]}, "expected a list of label ids, got float64"),
        (
            [[1, 2]],
            {"labels": [[-7, 9]], "vocabulary": 9, "ignore_index": -7},
            "position 1: label 9 is outside the vocabulary of 9",
        ),
        ([[1, 2]], {"pad": 9, "vocabulary": 9}, "pad=9 is outside the vocabulary of 9"),
        ([[1, 2]], {"pad": 1.5}, "pad=1.5: expected a whole number"),
        ([[1, 2]], {"ignore_index": 2**31}, "ignore_index=2147483648: expected a whole number"),
        ([[1, 2]], {"rows": 2.5}, "rows=2.5: expected a whole number"),
    ],
)
def test_what_int32_would_change_is_refused(documents, options, message):
    """It would be another token, or a label that is another word."""
    with pytest.raises(fz.BatchError, match=message):
        tb.pack(documents, length=4, **options)


def test_what_is_left_of_a_row_is_the_padding_that_is_asked_for():
    assert tb.pack([[3, 4]], length=4, pad=9)["ids"].tolist() == [[3, 4, 9, 9]]


def test_no_document_is_taught_the_first_token_of_the_next():
    rows = tb.pack([[3, 4], [5, 6]], length=5)
    assert rows["labels"].tolist() == [[-100, 4, -100, 6, -100]]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_what_a_mask_hides_is_a_number_in_its_dtype_and_in_bfloat16(dtype):
    """An infinity would make a row that sees nothing NaN."""
    mask = tb.packed_mask(jnp.asarray([[1, 1, 2]]), dtype=dtype)
    assert mask.dtype == dtype
    assert np.isfinite(np.asarray(mask.astype(jnp.bfloat16), np.float32)).all()
    assert np.isfinite(np.asarray(mask, np.float32)).all()
    assert np.unique(np.asarray(mask, np.float32)).size == 2
