"""Text to sequences: files, their split, tokens, and batches as a function of (seed, step)."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fzero.errors import warn
from torch_bridge.documents.rows import batch_rows
from torch_bridge.documents.tokens import IGNORED
from torch_bridge.run.corpus import Batch, entropy, own_rows
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import STDLIB, DataSettings


IntArray = NDArray[np.int32]
# A file's text, by a partial of what reads it and its path.
Text = partial[bytes]

# One file in twenty validates: with the standard library's 700 files that is some half a million
# bytes.
VALIDATION_SHARE = 0.05
# Not part of the library proper, or different on every machine; tests alone are more than half of
# all bytes.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Token sequences of one text, split by file.

    `train` is [num_train, seq]. `validation` and `labels` are [num_validation, seq]; labels equal
    the tokens except for -100 where a short last sequence was filled up.
    """

    train: IntArray
    validation: IntArray
    labels: IntArray
    unigram_entropy: float  # nats per token of the validation sequences
    byte_level: bool
    num_files: tuple[int, int]  # training, validation

    @property
    def fingerprint(self) -> str:
        """Identifies the validation sequences: equal fingerprints, comparable validation losses."""
        digest = hashlib.sha256(self.validation.tobytes())
        digest.update(self.labels.tobytes())
        return digest.hexdigest()[:16]

    @property
    def whole(self) -> str:
        """Identifies all sequences."""
        digest = hashlib.sha256(self.fingerprint.encode())
        digest.update(self.train.reshape(-1).data)
        return digest.hexdigest()[:16]

    def describe(self) -> str:
        """One line for the reader of a run."""
        unit = "bytes" if self.byte_level else "tokens"
        return (
            f"text    {self.train.size:,} training {unit} from {self.num_files[0]} files; "
            f"validation on {self.validation.size:,} {unit} from {self.num_files[1]}"
        )

    def train_batch(self, seed: int, step: int, size: int, who: tuple[int, int] = (0, 1)) -> Batch:
        """The batch of step `step`, from (seed, step) alone: no step needs those before it.

        Each epoch visits every sequence once, in an order drawn from (seed, epoch).

        Args:
            seed: of the order.
            step: from 0.
            size: sequences in the batch of all processes, which divide it.
            who: this process and how many there are: only its own sequences are gathered, and those
                of all, in their order, are the batch of one.
        """
        tokens = self.train[batch_rows(len(self.train), seed, step, size)[own_rows(size, who)]]
        return {"input_ids": tokens, "labels": tokens}

    def validation_batches(self, size: int, who: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The validation sequences in batches of one size; rows that fill the last count nothing.

        Args:
            size: sequences in the batch of all processes, which divide it.
            who: as for `train_batch`.
        """
        own = own_rows(size, who)
        for start in range(0, len(self.validation), size):
            rows = slice(start + own.start, start + own.stop)
            tokens, labels = self.validation[rows], self.labels[rows]
            missing = ((0, size // who[1] - len(tokens)), (0, 0))
            yield {
                "input_ids": np.pad(tokens, missing),
                "labels": np.pad(labels, missing, constant_values=IGNORED),
            }

    def num_tokens(self, seed: int, step: int, size: int) -> int:
        """Every token counts."""
        return size * self.train.shape[1]


def load(settings: DataSettings, tokenizer: Any = None) -> Corpus:
    """Reads, splits and tokenizes the text; without a tokenizer every byte is a token.

    One file is in memory at a time. Tokens go to a file of this process's own, whose pages are in
    memory while they are read.
    """
    train_texts, validation_texts, counts = _texts(settings)
    encode, end = _encoder(tokenizer)
    train = _tokens(train_texts, encode, end)
    validation = _tokens(validation_texts, encode, end)
    seq = settings.seq
    if len(train) < seq or len(validation) < 2:
        raise CommandError(
            f"too little text: {len(train)} training and {len(validation)} validation tokens; "
            f"--seq {seq} needs at least {seq} and 2; give more text, or a smaller --seq"
        )
    rows, labels = _validation_rows(validation, seq, settings.eval_sequences)
    return Corpus(
        train=train[: len(train) // seq * seq].reshape(-1, seq),
        validation=rows,
        labels=labels,
        unigram_entropy=entropy(np.bincount(rows[labels != IGNORED])),
        byte_level=tokenizer is None,
        num_files=counts,
    )


def _texts(settings: DataSettings) -> tuple[list[Text], list[Text], tuple[int, int]]:
    """Training texts, validation texts and how many files each came from; none is read yet."""
    if settings.sources == (STDLIB,):
        root = Path(sysconfig.get_path("stdlib"))
        paths = _stdlib_files(root)
    else:
        paths = sorted(Path(source) for source in settings.sources)
        root = Path(os.path.commonpath([path.parent for path in paths]))
    named = {path.relative_to(root).as_posix(): path for path in paths}
    if len(named) == 1:
        # One file cannot be split by file: its last part validates.
        (path,) = named.values()
        return [partial(_side, path, last=False)], [partial(_side, path, last=True)], (1, 1)
    held_out = _held_out(list(named))
    train = [partial(_text, path) for name, path in named.items() if name not in held_out]
    validation = [partial(_text, path) for name, path in named.items() if name in held_out]
    return train, validation, (len(train), len(validation))


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"--data: {error.filename} cannot be read ({error.strerror})") from error


def _side(path: Path, last: bool) -> bytes:
    text = _text(path)
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    while 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:  # within a character of UTF-8
        cut -= 1
    return text[cut:] if last else text[:cut]


def _tokens(texts: Sequence[Text], encode: Callable[[Text], IntArray], end: int | None) -> IntArray:
    """Tokens of all texts, each with its end, in a file without a name: it goes with its reader."""
    mark = np.asarray([] if end is None else [end], np.int32)
    with tempfile.TemporaryFile() as file:
        for text in texts:
            tokens = encode(text)
            try:
                file.write(tokens.tobytes())
                file.write(mark.tobytes())
                file.flush()
            except OSError as error:
                raise CommandError(
                    f"--data: its tokens cannot be written to {tempfile.gettempdir()}"
                    f" ({error.strerror}); TMPDIR says where else there is room"
                ) from error
        size = file.tell() // mark.itemsize
        return np.memmap(file, np.int32, "r", shape=(size,)) if size else mark[:0]


def _stdlib_files(root: Path) -> list[Path]:
    """The standard library's own .py files, in an order that depends on their names only."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    found = [
        root / name
        for name in names
        # config-*: how this interpreter was built
        if not SKIPPED_FOLDERS.intersection(name.split("/")) and not name.startswith("config-")
    ]
    if len(found) < 2:
        raise CommandError(
            f"--data {STDLIB}: this interpreter's library at {root} holds no .py files; "
            "give paths of text files instead"
        )
    return found


def _held_out(names: list[str]) -> set[str]:
    """The files that validate: those whose name hashes low, whatever other files there are."""
    shares = {
        name: int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32 for name in names
    }
    chosen = {name for name in names if shares[name] < VALIDATION_SHARE}
    # With few files the rule can leave a side empty; then one file validates.
    return chosen if 0 < len(chosen) < len(names) else {min(names, key=lambda name: shares[name])}


def _encoder(tokenizer: Any) -> tuple[Callable[[Text], IntArray], int | None]:
    """How one text becomes tokens, and the token that ends a text."""
    if tokenizer is None:
        # NUL occurs in no source text.
        return lambda text: np.frombuffer(text(), np.uint8).astype(np.int32), 0

    def encode(text: Text) -> IntArray:
        # verbose=False: a text longer than the model's context is no mistake here, it is cut below.
        ids = tokenizer(_decoded(text), add_special_tokens=False, verbose=False)
        return np.asarray(ids["input_ids"], np.int32)

    return encode, tokenizer.eos_token_id


def _decoded(text: Text) -> str:
    """A text for a tokenizer: UTF-8, in which a damaged place here and there is let be."""
    held = text()
    found = held.decode("utf-8", "replace")
    lost = found.count("\ufffd") - held.count("\ufffd".encode())
    if lost:
        said = f"--data: {text.args[0]}: {lost} of {len(found)} characters are no UTF-8"
        if 100 * lost > len(found):
            raise CommandError(
                f"{said}: expected text in UTF-8, as `iconv -t utf-8` makes it of others"
            )
        warn(f"{said}, and become U+FFFD")
    return found


def _validation_rows(tokens: IntArray, seq: int, limit: int) -> tuple[IntArray, IntArray]:
    """At most `limit` rows spread over the text; a short last one is filled, labelled -100."""
    num = -(-len(tokens) // seq)
    chosen = np.unique(np.linspace(0, num - 1, min(limit, num)).astype(np.int64))
    rows = np.zeros((len(chosen), seq), np.int32)
    labels = np.full_like(rows, IGNORED)
    for number, row in enumerate(chosen):
        own = tokens[row * seq : (row + 1) * seq]
        rows[number, : len(own)] = labels[number, : len(own)] = own
    return rows, labels
