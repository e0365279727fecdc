"""Text to sequences: a stable split, batches from (seed, step) alone, exact validation."""

from __future__ import annotations

import math
import random
import re
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest

from torch_bridge.documents import rows
from torch_bridge.documents.rows import Rows
from torch_bridge.documents.tokens import IGNORED, Document
from torch_bridge.run import data
from torch_bridge.run.corpus import entropy
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import DataSettings
from torch_bridge.run.tuning_task import RowCorpus


def corpus_of(paths: list[Path], seq: int = 16, limit: int = 1000) -> data.Corpus:
    return data.load(DataSettings(tuple(map(str, paths)), seq, limit))


def test_every_byte_of_a_file_is_on_one_side_of_the_split(texts: list[Path]) -> None:
    corpus = corpus_of(texts)
    kept = bytes(corpus.validation[corpus.labels != IGNORED].astype(np.uint8))
    (held_out,) = [path for path in texts if path.read_bytes() + b"\0" == kept]
    train = bytes(corpus.train.reshape(-1).astype(np.uint8))
    rest = b"".join(path.read_bytes() + b"\0" for path in sorted(texts) if path != held_out)
    assert train == rest[: len(rest) // 16 * 16]
    assert corpus.num_files == (2, 1)
    assert re.fullmatch(r"text .* from 2 files; .* from 1", corpus.describe())


def test_the_split_does_not_depend_on_the_order_of_the_arguments(texts: list[Path]) -> None:
    assert corpus_of(texts).fingerprint == corpus_of(texts[::-1]).fingerprint
    assert corpus_of(texts).fingerprint != corpus_of([texts[0], texts[2]]).fingerprint


def test_a_run_knows_all_of_its_text_and_not_only_what_validates(tmp_path: Path) -> None:
    """`--resume` refuses another text; `fzero eval` compares losses of one that validates alike."""
    path, corpora = tmp_path / "one.txt", []
    for begins in (b"a", b"a", b"b"):
        path.write_bytes(begins * 100 + bytes(range(97, 117)) * 100)
        corpora.append(corpus_of([path]))
    first, same, other = corpora
    assert first.fingerprint == same.fingerprint == other.fingerprint
    assert first.whole == same.whole != other.whole


def test_a_new_file_never_moves_another_file_between_the_sides() -> None:
    names = [f"module_{number}.py" for number in range(400)]
    held_out = data._held_out(names)
    assert 5 <= len(held_out) <= 40  # 5 % of 400, give or take
    assert data._held_out([*names, "one_more.py"]) - {"one_more.py"} == held_out


def test_one_file_is_split_into_its_first_and_last_part(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(97, 117)) * 100)
    corpus = corpus_of([path])
    assert corpus.train.size + corpus.validation.size >= 2000
    assert corpus.train[0, 0] == 97
    assert corpus.validation.size >= 100


class Tokenizer:
    """A token for each character."""

    eos_token_id = 0

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def test_text_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    settings = DataSettings((str(path),), 16, 1000)
    path.write_bytes(("größer als \ufffd " * 40).encode("utf-16"))
    with pytest.raises(CommandError, match=r"one.txt: \d+ of \d+ characters are no UTF-8: "):
        data.load(settings, Tokenizer())
    path.write_bytes(b"plain text, and a lot of it. " * 400 + b"\xff")
    with pytest.warns(UserWarning, match="1 of 581 characters are no UTF-8, and become"):
        data.load(settings, Tokenizer())
    path.write_text("\u4e2d\ufffd" * 41)  # split within no character, wherever the cut falls
    with warnings.catch_warnings(action="error"):
        corpus = data.load(settings, Tokenizer())
    assert set(np.unique(corpus.train)) <= {0, 0x4E2D, 0xFFFD}


def test_no_more_than_one_file_is_in_memory(tmp_path: Path) -> None:
    """Tokens are in a file; a batch is in memory, and nothing of what is around it."""
    paths = [tmp_path / f"{number}.txt" for number in range(16)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([97 + number]) * 2**17)
    tracemalloc.start()
    corpus = corpus_of(paths, seq=128, limit=8)
    batch = corpus.train_batch(0, 0, 4)["input_ids"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert corpus.train.nbytes > 6 * 2**20
    assert peak < 2.5 * 2**20  # a file of 1/8 MiB, its tokens, and once more to be written
    assert type(batch) is np.ndarray
    assert batch.base is None or batch.base.nbytes <= batch.nbytes


def test_the_standard_library_is_split_by_file_and_leaves_its_tests_out() -> None:
    corpus = data.load(DataSettings(("stdlib",), 128, 64))
    num_train, num_validation = corpus.num_files
    assert num_train > 300
    assert 0.02 < num_validation / num_train < 0.1
    assert corpus.validation.shape == (64, 128)
    assert 2.0 < corpus.unigram_entropy < math.log(256)


def test_a_batch_follows_from_seed_and_step(texts: list[Path]) -> None:
    corpus = corpus_of(texts)
    steps = list(range(30))
    straight = [corpus.train_batch(5, step, 8)["input_ids"] for step in steps]
    rows._order.cache_clear()
    for step in random.Random(0).sample(steps, len(steps)):
        again = corpus.train_batch(5, step, 8)["input_ids"]
        np.testing.assert_array_equal(again, straight[step])
    other_seed = corpus.train_batch(6, 0, 8)["input_ids"]
    assert (other_seed != straight[0]).any()


def test_an_epoch_visits_every_sequence_once(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_bytes(np.arange(0, 250, dtype=np.uint8).repeat(4).tobytes())
    corpus = corpus_of([path], seq=4)
    num_sequences = len(corpus.train)
    size = 7  # does not divide it: a batch lies in two epochs
    steps = -(-2 * num_sequences // size)
    rows = np.concatenate([corpus.train_batch(0, step, size)["input_ids"] for step in range(steps)])
    first, second = rows[:num_sequences, 0], rows[num_sequences : 2 * num_sequences, 0]
    assert sorted(first) == sorted(second) == sorted(corpus.train[:, 0])
    assert (first != second).any()


def test_validation_batches_have_one_size_and_count_every_label_once(texts: list[Path]) -> None:
    corpus = corpus_of(texts, limit=21)
    assert len(corpus.validation) == 21
    for size in (1, 4, 8, 64):
        batches = list(corpus.validation_batches(size))
        assert {batch["input_ids"].shape for batch in batches} == {(size, 16)}
        labels = np.concatenate([batch["labels"] for batch in batches])
        np.testing.assert_array_equal(labels[:21], corpus.labels)
        assert (labels[21:] == IGNORED).all()


def test_processes_have_as_many_validation_batches_each(texts: list[Path]) -> None:
    """Also where the last one has rows of the first alone: a step waits for all of them."""
    corpus = corpus_of(texts, limit=21)
    for size in (2, 4, 16, 64):
        whole = list(corpus.validation_batches(size))
        parts = [list(corpus.validation_batches(size, (process, 2))) for process in (0, 1)]
        for batch, *own in zip(whole, *parts, strict=True):
            for name, rows_of_all in batch.items():
                np.testing.assert_array_equal(
                    np.concatenate([one[name] for one in own]), rows_of_all
                )


def test_a_short_last_sequence_is_kept_and_its_filling_ignored(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"a" * 400)
    corpus = corpus_of([path])
    # A twentieth of 400 bytes and the mark at the end of a text: 21 tokens in sequences of 16.
    assert corpus.validation.shape == (2, 16)
    assert (corpus.labels[1] != IGNORED).sum() == 5


def test_files_of_the_standard_library_are_its_own(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "a/test/d.py", "site-packages/e.py", "config-3/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert data._stdlib_files(tmp_path) == [tmp_path / "a/c.py", tmp_path / "b.py"]


def test_entropy_of_single_bytes() -> None:
    assert entropy(np.full(8, 5)) == pytest.approx(math.log(8), rel=1e-12)
    assert entropy(np.asarray([0, 9, 0])) == 0.0
    assert entropy(np.asarray([3, 1])) == pytest.approx(0.5623351446, abs=1e-9)


def test_the_entropy_of_rows_is_of_all_that_is_learned_in_them() -> None:
    """They are looked at some at a time."""
    ids = [np.full(4, number % 8, np.int32) for number in range(40)]
    documents = [
        Document(own, np.where(np.arange(4) < 2, IGNORED, own), f"{number}")
        for number, own in enumerate([*ids, np.full(4, 9, np.int32)])
    ]
    found = Rows.of(documents[:-1], 4, packed=False)
    assert RowCorpus(found, found, (40, 40)).unigram_entropy == pytest.approx(math.log(8))
    more = RowCorpus(found, Rows.of(documents, 4, packed=False), (40, 41))
    counts = np.asarray([10] * 8 + [0, 2])
    assert more.unigram_entropy == pytest.approx(entropy(counts))


def test_too_little_text_is_refused_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text("too short")
    with pytest.raises(CommandError, match=r"9 training and 2 validation tokens; --seq 16"):
        corpus_of([path])
