"""`tb.generate` on one small GPT-2: layouts of states, sampling, stops, and what is refused."""

from __future__ import annotations

import copy
import functools
import threading
import types
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from bridge_cases import make_gpt2
from transformers import GenerationConfig, GPT2LMHeadModel, TopKLogitsWarper, TopPLogitsWarper

import fzero as fz
import torch_bridge as tb
from fzero.errors import BatchError, ConversionError, PlacementError, StateConsumedError
from torch_bridge.generation.generate import _decoder, _leaves
from torch_bridge.generation.key_value_cache import Sizes, find_spots
from torch_bridge.generation.prompts import Limits, read_prompts, stop_array, warn_of_padding
from torch_bridge.generation.sampling import Draw
from torch_bridge.structure.chain import links_merged


# As many rows as devices, and of a few sizes in all: each is traced and compiled apart.
PROMPTS = ([5, 9, 4], [7, 3, 8, 20, 21], [30], [2, 2], [11, 60], [8], [9, 1, 33, 7], [17])
NEW = 8


@pytest.fixture(scope="module")
def module() -> GPT2LMHeadModel:
    """One whose tokens vary: its matrices are large."""
    found = make_gpt2(0.0).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.ndim > 1:
                size = 3 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return found


@pytest.fixture(scope="module")
def converted(module: GPT2LMHeadModel) -> tb.Converted:
    return tb.convert(module, torch.zeros(2, 8, dtype=torch.long), roll=2)


@functools.cache
def model_of(converted: tb.Converted) -> fz.Model:
    return converted.model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
    )


@pytest.fixture(scope="module")
def greedy(converted: tb.Converted) -> list[list[int]]:
    """New tokens of the conversion's own parameters."""
    return _lists(tb.generate(converted, converted.params, PROMPTS, NEW, stop=()))


def _lists(found: tb.Generated) -> list[list[int]]:
    return [tokens.tolist() for tokens in found.tokens]


def test_rows_of_any_lengths_are_those_of_transformers(
    module: GPT2LMHeadModel, greedy: list[list[int]]
) -> None:
    assert greedy[:3] == [_reference(module, prompt) for prompt in PROMPTS[:3]]
    assert max(len(set(row)) for row in greedy) > 3


def _reference(module: GPT2LMHeadModel, prompt: list[int]) -> list[int]:
    found = module.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "plan",
    [
        fz.Plan(zero=3, data=5, min_shard_bytes=0),  # which divide no dim: leaves are padded
        fz.Plan(zero=1, replica=2, data=4),
        fz.Plan(zero=3, data=4, tensor=2),
    ],
    ids=str,
)
def test_any_layout_of_a_state_gives_the_same_tokens(
    plan: fz.Plan, converted: tb.Converted, greedy: list[list[int]]
) -> None:
    state = fz.init(model_of(converted), optax.adamw(1e-3), plan)
    assert _lists(tb.generate(converted, state, PROMPTS, NEW, stop=())) == greedy


def test_what_training_changed_is_what_generates(
    module: GPT2LMHeadModel, converted: tb.Converted
) -> None:
    """A state goes through steps and generations in turn; PyTorch gets its weights and agrees."""
    plan, tx = fz.Plan(zero=3), optax.sgd(0.3)
    state = fz.init(model_of(converted), tx, plan)
    step = fz.train_step(model_of(converted), tx, plan)
    ids = np.random.default_rng(0).integers(1, 61, (16, 8), dtype=np.int32)
    before = _lists(tb.generate(converted, state, PROMPTS, NEW, stop=()))
    consumed, (state, _) = state, step(state, {"ids": ids})
    after = _lists(tb.generate(converted, state, PROMPTS, NEW, stop=()))
    trained = GPT2LMHeadModel(module.config).eval()
    trained.load_state_dict(tb.state_dict(converted, state))
    assert after[:3] == [_reference(trained, prompt) for prompt in PROMPTS[:3]]
    assert after != before
    with pytest.raises(StateConsumedError):
        tb.generate(converted, consumed, PROMPTS, NEW)


def test_the_optimizer_may_be_parked_meanwhile(
    converted: tb.Converted, greedy: list[list[int]]
) -> None:
    state = fz.init(model_of(converted), optax.adamw(1e-3), fz.Plan(zero=3))
    parked = fz.offload(state, "opt_state", to="host")
    assert _lists(tb.generate(converted, parked, PROMPTS, NEW, stop=())) == greedy
    everything = fz.offload(parked, "params", to="host")
    with pytest.raises(PlacementError, match="generate"):
        tb.generate(converted, everything, PROMPTS, NEW)


def test_a_stop_token_ends_its_row_only(converted: tb.Converted, greedy: list[list[int]]) -> None:
    stop = greedy[0][2]
    found = tb.generate(converted, converted.params, PROMPTS, NEW, stop=[stop])
    for row, tokens, stopped in zip(greedy, _lists(found), found.stopped, strict=True):
        end = row.index(stop) + 1 if stop in row else NEW
        assert tokens == row[:end]
        assert stopped == (stop in row)
    assert len(found.tokens[0]) <= 3
    assert found.sequences[1].tolist() == [*PROMPTS[1], *_lists(found)[1]]


def test_the_modules_own_stop_token_is_the_default(
    module: GPT2LMHeadModel, converted: tb.Converted
) -> None:
    """transformers stops there, too (`eos_token_id` of its generation config)."""
    assert module.generation_config.eos_token_id == 0
    bias = {**converted.params}
    table = np.array(bias["transformer.wte.weight"])
    table[0] = 50 * np.mean(np.abs(table)) * np.sign(table[1])
    loud = {**bias, "transformer.wte.weight": table}
    free = tb.generate(converted, loud, PROMPTS, NEW, stop=())
    found = tb.generate(converted, loud, PROMPTS, NEW)
    for row, tokens in zip(_lists(free), _lists(found), strict=True):
        assert tokens == (row[: row.index(0) + 1] if 0 in row else row)
    assert any(found.stopped)
    assert {*map(len, free.tokens)} == {NEW}  # nothing ends a row where no token does
    # Llama 3 and others name several.
    several = types.SimpleNamespace(generation_config=GenerationConfig(eos_token_id=[3, 0]))
    assert stop_array(None, several, 61).tolist() == [0, 3]


def test_settings_that_would_give_other_tokens_are_named(module: GPT2LMHeadModel) -> None:
    """Before anything is compiled, so that an error of the warning is all that this waits for."""
    module = copy.deepcopy(module)
    module.generation_config.repetition_penalty, module.generation_config.num_beams = 1.5, 1
    module.generation_config.watermarking_config = {"seeding_scheme": "lefthash"}
    module.generation_config.token_healing = False
    converted = tb.convert(module, torch.zeros(2, 4, dtype=torch.long), train=False, roll=False)
    said = r"config says repetition_penalty=1\.5, watermarking_config=\{.*\}, by which"
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning, match=said):
        tb.generate(converted, converted.params, PROMPTS, 2)


SAMPLED = tb.Sampling(temperature=1.5, seed=7)


def test_a_seed_gives_the_same_tokens_whatever_the_batch(converted: tb.Converted) -> None:
    """Numbers are of a prompt's seed and the token's position: not of padding, rows or devices."""
    seeds = tuple(range(40, 48))
    first = tb.Sampling(temperature=1.5, seed=seeds)
    whole = tb.generate(converted, converted.params, PROMPTS, NEW, sampling=first, stop=())
    others = [[1, 2, 3, 4, 5, 6, 7], *PROMPTS[1:4][::-1], *([[3]] * 4)]
    second = tb.Sampling(temperature=1.5, seed=np.array([0, *seeds[1:4][::-1], 1, 2, 3, 4]))
    moved = tb.generate(converted, converted.params, others, NEW, sampling=second, stop=())
    assert _lists(moved)[1:4] == _lists(whole)[1:4][::-1]


def test_other_seeds_and_other_prompts_draw_other_numbers(converted: tb.Converted) -> None:
    same = [PROMPTS[1]] * 8
    first = tb.generate(converted, converted.params, same, NEW, sampling=SAMPLED, stop=())
    again = tb.generate(converted, converted.params, same, NEW, sampling=SAMPLED, stop=())
    long = tb.Sampling(temperature=1.5, seed=np.array([2**32 + 1, 1, 2**40, -1]))
    assert len({tuple(key) for key in long.keys(4).tolist()}) == 4
    other = tb.Sampling(temperature=1.5, seed=8)
    second = tb.generate(converted, converted.params, same, NEW, sampling=other, stop=())
    assert _lists(first) == _lists(again)
    assert _lists(first)[0] != _lists(first)[1]
    assert _lists(first) != _lists(second)


def test_drawn_tokens_follow_the_softmax(module: GPT2LMHeadModel, converted: tb.Converted) -> None:
    """Of 1024 rows: top-k and top-p leave out the tokens that transformers' processors leave out,
    and what is left comes as often as it should."""
    rows, prompt = 1024, [5, 9, 4]
    with torch.no_grad():
        logits = module(torch.tensor([prompt])).logits[0, -1] / 2.0
    for top_k, top_p in ((None, 1.0), (5, 1.0), (None, 0.6), (99, 0.7)):
        sampling = tb.Sampling(temperature=2.0, top_k=top_k, top_p=top_p)
        prompts = [prompt] * rows
        found = tb.generate(converted, converted.params, prompts, 1, sampling=sampling, stop=())
        counts = np.bincount(np.concatenate(found.tokens), minlength=61) / rows
        expected = torch.softmax(_processed(logits, top_k, top_p), -1).numpy()
        assert not counts[expected == 0].any()
        # five standard deviations of a count
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected / rows) + 1e-9)


def test_logits_of_16_bits_are_divided_by_the_temperature_in_float32() -> None:
    """Near 100 numbers in bfloat16 lie half a unit apart: quotients rounded there are alike."""
    rows, draw = 64, Draw(greedy=False, top_k=None, nucleus=False)
    logits = jnp.broadcast_to(100 + jnp.arange(8) / 2, (rows, 8)).astype(jnp.bfloat16)
    keys = tb.Sampling(temperature=0.7, seed=range(rows)).keys(rows)
    given = keys, jnp.zeros(rows, np.int32), (np.float32(0.7), np.float32(1))
    found = draw(logits, *given)
    assert len(set(found.tolist())) > 3
    assert found.tolist() == draw(logits.astype(np.float32), *given).tolist()


def _processed(logits: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    scores, ids = logits[None], torch.zeros(1, 1, dtype=torch.long)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    return TopPLogitsWarper(top_p)(ids, scores)[0] if top_p < 1 else scores[0]


@pytest.mark.nightly
def test_other_precisions(module: GPT2LMHeadModel, converted: tb.Converted) -> None:
    """In bfloat16 the module runs as PyTorch runs it in bfloat16."""
    found = tb.generate(converted, converted.params, PROMPTS[:1], 2, stop=(), dtype="bfloat16")
    half = copy.deepcopy(module).bfloat16()
    assert _lists(found) == [_reference(half, PROMPTS[0])[:2]]


def test_each_dtype_has_a_decoder_of_its_own(converted: tb.Converted) -> None:
    """What was traced in one must not compute what is asked for in another."""
    dtypes = (None, np.dtype("float16"), jnp.dtype("bfloat16"))
    made = [_decoder(converted, dtype) for dtype in dtypes]
    assert [one.dtype for one in made] == list(dtypes)
    assert made == [_decoder(converted, dtype) for dtype in dtypes]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[3], [4, 61]], r"prompt 1 has token 61 at position 1, .* 0 to 60"),
        ([[3, -1]], r"prompt 0 has token -1 at position 1"),
        ([[3], []], r"prompt 1 is empty"),
        ([], r"there are no prompts"),
        ([[3], [1] * 25], r"prompt 1 has 25 tokens, and 8 .* 32 positions; .*max_new_tokens=7"),
        ([[1] * 32], r"32 positions; shorten the prompt$"),
        ([[0.5]], r"prompt 0: expected a row of token numbers, got float64"),
        (["a text"], r"prompts are text"),
        ({"input_ids": [[3]], "attention_mask": [[1]]}, r"a dict of input_ids, attention_mask"),
    ],
)
def test_bad_prompts_are_named(converted: tb.Converted, prompts: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        tb.generate(converted, converted.params, prompts, NEW)


def test_bad_settings_are_named(converted: tb.Converted) -> None:
    for given, told in (
        (5, "a int: expected a list of rows"),
        ([[5, [6]]], r"prompt 0: .* row of num"),
    ):
        with pytest.raises(BatchError, match=told):
            read_prompts(given, 3, Limits(61, 32), 8, 16)
    for stop in ([1.5], [True], ["a"], [[3]]):
        with pytest.raises(BatchError, match=r"stop token .*: the vocabulary of the model is"):
            stop_array(stop, None, 61)
    assert stop_array({4, 3}, None, 61).tolist() == stop_array(jnp.array([4, 3]), None, 61).tolist()
    with pytest.raises(BatchError, match=r"sampling=0.7: expected a tb.Sampling"):
        tb.generate(converted, converted.params, [[3]], 3, sampling=0.7)
    with pytest.raises(BatchError, match="stop token 99"):
        tb.generate(converted, converted.params, PROMPTS, NEW, stop=[99])
    with pytest.raises(BatchError, match=r"stop=5: expected a list of tokens, as \[5\]"):
        tb.generate(converted, converted.params, PROMPTS, NEW, stop=5)  # type: ignore[arg-type]
    for number in (0, 2.0, "3"):
        with pytest.raises(BatchError, match=f"max_new_tokens={number!r}"):
            tb.generate(converted, converted.params, PROMPTS, number)  # type: ignore[arg-type]
    for dtype in ("bf16", "int8", torch.int32, 3):
        with pytest.raises(ConversionError, match="expected one of floats, as 'bfloat16'"):
            tb.generate(converted, converted.params, PROMPTS, NEW, dtype=dtype)
    sampling = tb.Sampling(temperature=1.0, seed=(1, 2))
    with pytest.raises(ValueError, match="2 seeds for 8 prompts"):
        tb.generate(converted, converted.params, PROMPTS, NEW, sampling=sampling)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1.0, 1e-46, 1e39, float("nan"), "1", None)),
        ("top_k", (0, 2.5, "3", True)),
        ("top_p", (0.0, 1e-45, 1.1, None)),
        ("seed", (None, 1.5, 2**70, [2**70], "a")),
    ],
)
def test_values_of_a_sampling_that_are_none_are_named(name: str, values: Sequence[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"Sampling: {name}=.*: expected"):
            tb.Sampling(**{name: value})


def test_a_tiny_temperature_draws_the_likeliest_token() -> None:
    """Quotients beyond float32 would all be infinite, and the first of them drawn."""
    rows, draw = 16, Draw(greedy=False, top_k=None, nucleus=False)
    logits = jnp.broadcast_to(jnp.array([5.0, 7.0, 9.0, 1.0]), (rows, 4))
    keys = tb.Sampling(temperature=2e-38).keys(rows)
    found = draw(logits, keys, jnp.zeros(rows, np.int32), (np.float32(2e-38), np.float32(1)))
    assert set(found.tolist()) == {2}


def test_of_equally_likely_tokens_top_p_keeps_as_few_as_reach_it() -> None:
    """As transformers does: of eight alike four reach one half, and the others are left out."""
    rows, draw = 256, Draw(greedy=False, top_k=None, nucleus=True)
    keys = tb.Sampling(temperature=1.0).keys(rows)
    given = keys, jnp.zeros(rows, np.int32), (np.float32(1), np.float32(0.5))
    assert len(set(draw(jnp.zeros((rows, 8), jnp.bfloat16), *given).tolist())) == 4


def test_modules_without_a_cache_are_named() -> None:
    plain = tb.convert(torch.nn.Embedding(5, 5), torch.zeros(2, 3, dtype=torch.long), train=False)
    with pytest.raises(ConversionError, match="Embedding: it is no model of transformers"):
        tb.generate(plain, plain.params, [[1]], 2)
    locked = make_gpt2(0.0).eval()
    locked.lock = threading.Lock()
    kept = tb.convert(locked, torch.zeros(2, 3, dtype=torch.long), train=False)
    with pytest.raises(ConversionError, match="generate: no copy of the GPT2LMHeadModel"):
        tb.generate(kept, kept.params, [[1]], 2)


def test_a_second_call_of_the_same_sizes_compiles_nothing(
    converted: tb.Converted, greedy: list[list[int]]
) -> None:
    tb.generate(converted, converted.params, PROMPTS, NEW, stop=())  # in the settings of a test
    with jax.no_tracing(True):
        assert _lists(tb.generate(converted, converted.params, PROMPTS, NEW, stop=())) == greedy


def test_rows_on_two_sides_of_other_rotary_frequencies_are_refused() -> None:
    """transformers' longrope decides by the longest row, for all, and for keys that are cached."""
    long = {"rope_type": "longrope", "original_max_position_embeddings": 24}
    for given in (long, {"full_attention": long, "sliding_attention": {"rope_type": "default"}}):
        config = types.SimpleNamespace(
            get_text_config=lambda decoder, given=given: types.SimpleNamespace(
                rope_parameters=given, max_position_embeddings=96, vocab_size=64
            )
        )
        module = types.SimpleNamespace(config=config, get_input_embeddings=lambda: None)
        limits = Limits.of(module)
        assert limits.switch == 24
        short, longer = [1] * 12, [1] * 30
        for rows, new in (([short, [1]], 13), ([longer], 8), ([longer, [1] * 25], 8)):
            read_prompts(rows, new, limits, 1, 8)
        for rows, new, said in (
            ([[1], longer], 8, "prompt 1 has 30 tokens.*by themselves$"),
            ([[1], short], 14, "prompt 1 has 12 tokens.*max_new_tokens=13"),
            ([longer, [1] * 24], 2, "prompt 0 has 30 tokens"),
            ([[1] * 24], 2, "prompt 0 has 24 tokens.*max_new_tokens=1$"),
        ):
            with pytest.raises(BatchError, match=said):
                read_prompts(rows, new, limits, 1, 8)


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    draw = Draw.of(tb.Sampling(temperature=1.0, top_k=2, top_p=0.5))
    logits = jnp.log(jnp.asarray([[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]]))
    assert np.isfinite(draw._likeliest(logits, 0.5)).tolist() == [[True] + [False] * 6]


def test_padding_in_a_prompt_is_read_and_said_to_be() -> None:
    module = types.SimpleNamespace(generation_config=GenerationConfig(pad_token_id=0))
    given = np.array([[3, 0, 4], [0, 5, 6]])  # (within a row it may be a word)
    with pytest.warns(UserWarning, match=r"prompt 1 begins or ends with token 0, .* left out by"):
        warn_of_padding(module, read_prompts(given, 3, Limits(61, 32), 2, 16))
    module.generation_config.eos_token_id = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_padding(module, read_prompts(given, 3, Limits(61, 32), 2, 16))


def test_another_precision_is_that_of_parameters_and_of_what_is_kept() -> None:
    """Rotary frequencies stay as they are: rounded, positions far out would be others."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    ids = torch.zeros(2, 4, dtype=torch.long)
    converted = tb.convert(module, ids, train=False)
    state = {**links_merged(converted.params), **links_merged(converted.buffers)}
    half = jnp.dtype("bfloat16")
    found = _leaves(converted.names, converted.layout, half, state)
    assert found["lm_head.weight"].dtype == half
    assert found["model.rotary_emb.inv_freq"].dtype == np.float32
    kept = _decoder(converted, half).empty(Sizes(2, 1, 8, False))
    assert {value.dtype for value in kept.values()} == {half}


def test_the_parameters_of_another_model_are_refused(converted: tb.Converted) -> None:
    table = "transformer.wpe.weight"
    shorter = {**converted.params, table: converted.params[table][:-4]}
    with pytest.raises(fz.CheckpointError, match=rf"`{table}`: expected shape \(\d+"):
        tb.generate(converted, shorter, PROMPTS, NEW)
    with pytest.raises(fz.CheckpointError, match=r"\['lm_head.weight'\] are of one of the two"):
        tb.generate(converted, {**converted.params, "lm_head.weight": 0}, PROMPTS, NEW)


def test_a_layer_that_writes_to_its_cache_twice_is_named(module: GPT2LMHeadModel) -> None:
    twice = copy.deepcopy(module)
    layer = twice.transformer.h[1].attn
    once = layer.forward
    layer.forward = lambda *args, **kwargs: [once(*args, **kwargs) for _ in range(2)][-1]
    with pytest.raises(ConversionError, match=r"layers \[1\] do not write .* once in a call"):
        find_spots(twice)
