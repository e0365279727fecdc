"""Records to tokens: the tokenizer's chat template, and which tokens are learned."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fzero.errors import BatchError
from torch_bridge.documents.records import Record, kind_of, read_records


IntArray = NDArray[np.int32]
# torch's convention for "no prediction here"; `torch_bridge.causal_lm_loss` follows it.
IGNORED = -100
# What templates get that ask for today's date (Llama 3, gpt-oss): tokens of a file are the same on
# every day, so that a run goes on tomorrow. It is the one that Llama 3.1's writes without a clock.
_TODAY = datetime.datetime(2024, 7, 26)
# A template that says itself which of its text the assistant wrote.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Document:
    """One example in tokens.

    Attributes:
        ids: int32 `(T,)`.
        labels: the same where a token is learned, -100 elsewhere; not shifted.
        where: what it was made of, for messages.
    """

    ids: IntArray
    labels: IntArray
    where: str


def read_documents(
    sources: str | Path | Iterable[str | Path],
    tokenizer: Any,
    *,
    template: str | None = None,
    vocabulary: int | None = None,
) -> list[Document]:
    """Examples in tokens, with what is not to be learned marked.

    - `{"messages": [{"role": ..., "content": ...}, ...]}`, and `"tools"` beside it: as the chat
      template has them. Learned is what the assistant says, with what the template puts behind it
      until the next turn begins. Where a template marks that itself (`{% generation %}`), that.
      Templates that ask for the date are told 26 July 2024.
    - `{"prompt": ..., "completion": ...}`: the completion is learned, and the end token.
    - `{"text": ...}`: all of it, and the end token.

    Args:
        sources: JSONL files, and folders that `datasets.Dataset.save_to_disk` wrote.
        tokenizer: one of transformers, of the kind that knows offsets (with a tokenizer.json).
        template: a chat template instead of the tokenizer's own.
        vocabulary: number of tokens that the model knows, to find others.

    Returns:
        Documents in the order of the files; those without a token are left out.

    Raises:
        BatchError: names file and line: no JSON, other fields, roles that the template refuses, no
            template, nothing that the assistant says, a turn that the template writes otherwise
            once more follows, a token outside the vocabulary.

    Example:
        >>> import json, pathlib, tempfile, tokenizers, transformers
        >>> words = tokenizers.models.WordLevel({"hi": 0, "you": 1, "</s>": 2}, unk_token="</s>")
        >>> made = tokenizers.Tokenizer(words)
        >>> made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        >>> own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
        >>> file = pathlib.Path(tempfile.mkdtemp(), "rows.jsonl")
        >>> _ = file.write_text(json.dumps({"prompt": "hi ", "completion": "you"}))
        >>> [(d.ids.tolist(), d.labels.tolist()) for d in read_documents(file, own)]
        [([0, 1, 2], [-100, 1, 2])]
    """
    return list(documents_of(sources, tokenizer, template=template, vocabulary=vocabulary))


def documents_of(
    sources: str | Path | Iterable[str | Path],
    tokenizer: Any,
    *,
    template: str | None = None,
    vocabulary: int | None = None,
) -> Iterator[Document]:
    """`read_documents`, one at a time."""
    if not getattr(tokenizer, "is_fast", False):
        raise BatchError(
            f"{type(tokenizer).__name__} does not know which characters its tokens are: expected a"
            " fast tokenizer of transformers (with a tokenizer.json)"
        )
    several = [sources] if isinstance(sources, str | Path) else sources
    own = getattr(tokenizer, "chat_template", None) if template is None else template
    if isinstance(own, str) and "strftime_now" in own:
        template = _dated(own)
    reader = _Reader(tokenizer, template, vocabulary)
    yield from reader.documents(read_records(several))


def _dated(template: str) -> str:
    """A template with a macro for the date: transformers hands no function on to it."""
    formats = {f"%{letter}": _TODAY.strftime(f"%{letter}") for letter in "aAbBcdHIjmMpSxXyY"}
    written = "".join(f"|replace({code!r}, {value!r})" for code, value in formats.items())
    macro = f"{{%- macro strftime_now(format) -%}}{{{{ format{written} }}}}{{%- endmacro -%}}"
    return macro + template


@dataclass(frozen=True)
class _Reader:
    tokenizer: Any
    template: str | None
    vocabulary: int | None

    def documents(self, records: Iterable[Record]) -> Iterator[Document]:
        for record in records:
            ids, learned = self._tokens(record)
            if self.vocabulary is not None:
                self._check(ids, self.vocabulary, record.where)
            if ids.size:
                labels = np.where(learned, ids, IGNORED).astype(np.int32)
                yield Document(ids, labels, record.where)

    def _tokens(self, record: Record) -> tuple[IntArray, NDArray[np.bool_]]:
        kind = kind_of(record)
        if kind == "messages":
            return self._chat(record)
        if kind == "prompt":
            prompt, rest = (_string(record, key) for key in ("prompt", "completion"))
            if not rest:
                raise BatchError(f'{record.where}: "completion" is empty: nothing to learn')
            text, spans = prompt + rest, [(len(prompt), len(prompt) + len(rest))]
        else:
            text = _string(record, "text")
            spans = [(0, len(text))]
        ids, learned = self._encoded(text, spans, own=True)
        end = self.tokenizer.eos_token_id
        if end is None or not ids.size or ids[-1] == end:
            return ids, learned
        return np.append(ids, np.int32(end)), np.append(learned, True)

    def _encoded(
        self, text: str, spans: Sequence[tuple[int, int]], own: bool
    ) -> tuple[IntArray, NDArray[np.bool_]]:
        """Tokens, and which of them begin within the spans; `own`: with what tokenizers add."""
        found = self.tokenizer(
            text, add_special_tokens=own, return_offsets_mapping=True, verbose=False,
            return_attention_mask=False, return_special_tokens_mask=True,
        )  # fmt: skip
        ids = np.asarray(found["input_ids"], np.int32)
        offsets = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2)
        learned = np.zeros(ids.shape, np.bool_)
        for begin, end in spans:
            # The last character decides: a token may begin with the blank before a word. Blanks
            # alone may have no width (ByteLevel trims offsets), but end where they end.
            last = offsets[:, 1] - 1
            learned |= (last >= begin) & (last < end)
        return ids, learned & (np.asarray(found["special_tokens_mask"], np.int32) == 0)

    def _chat(self, record: Record) -> tuple[IntArray, NDArray[np.bool_]]:
        """A conversation's tokens, and where in it the assistant speaks."""
        template = self.template or getattr(self.tokenizer, "chat_template", None)
        if template is None:
            raise BatchError(
                f"{record.where}: has messages, but the tokenizer has no chat template: expected"
                " chat_template in its tokenizer_config.json, or a chat_template.jinja; give one"
                " with template= (--template FILE)"
            )
        messages = _messages(record)
        if isinstance(template, str) and _MARKED.search(template):
            return self._marked(record, messages)
        spans = []
        text = self._render(record, messages)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            if number:
                before = self._render(record, messages[:number], prompt=True)
            else:
                before = self._opening(record, messages[0])
            whole = self._render(record, messages[: number + 1])
            # At the end of a conversation a template may close it: that belongs to no turn between.
            until = _common(whole, text)
            if not text.startswith(before) or len(until) <= len(before):
                raise BatchError(
                    f"{record.where}: message {number}: the chat template writes what comes before"
                    " it otherwise once it is there (some drop earlier thoughts), so where it"
                    " begins cannot be seen; use a template with {% generation %}"
                )
            if until != whole and _end_of(message) not in until[len(before) :]:
                raise BatchError(
                    f"{record.where}: message {number}: the chat template writes it otherwise once"
                    " more follows (some drop earlier thoughts), so where it ends cannot be seen;"
                    " use a template with {% generation %}, or give each turn to learn a"
                    " conversation of its own"
                )
            spans.append((len(before), len(until)))
        if not spans:
            raise BatchError(
                f"{record.where}: nothing to learn: expected a message of the role assistant, got"
                f" {[message.get('role') for message in messages]}"
            )
        return self._encoded(text, spans, own=False)

    def _marked(
        self, record: Record, messages: list[Mapping[str, Any]]
    ) -> tuple[IntArray, NDArray[np.bool_]]:
        try:
            found = self.tokenizer.apply_chat_template(
                messages, tools=record.values.get("tools"), chat_template=self.template,
                return_dict=True, return_assistant_tokens_mask=True,
            )  # fmt: skip
        except Exception as error:  # of jinja, or of the template itself
            raise _refused(record, error) from error
        learned = np.asarray(found["assistant_masks"], np.bool_)
        if not learned.any():
            raise BatchError(f"{record.where}: nothing to learn: the template marks nothing in it")
        return np.asarray(found["input_ids"], np.int32), learned

    def _opening(self, record: Record, message: Mapping[str, Any]) -> str:
        """What the template puts before the assistant's words where nobody spoke earlier."""
        alone = self._render(record, [message])
        asked = self._render(record, [message], prompt=True)
        mark = asked[len(alone) :] if asked.startswith(alone) else ""
        if mark and alone.count(mark) == 1:
            return alone.partition(mark)[0] + mark
        content = message.get("content")
        words = content.strip() if isinstance(content, str) else ""
        if not words or alone.count(words) != 1:
            raise BatchError(
                f"{record.where}: message 0 is the assistant's, and where it begins in what the"
                " chat template writes cannot be seen: expected a message of another role before"
                " it, or a template with {% generation %}"
            )
        return alone.partition(words)[0]

    def _render(
        self, record: Record, messages: list[Mapping[str, Any]], prompt: bool = False
    ) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(
                messages, tools=record.values.get("tools"), chat_template=self.template,
                tokenize=False, add_generation_prompt=prompt,
            ))  # fmt: skip
        except Exception as error:  # of jinja, or of the template itself
            raise _refused(record, error) from error

    def _check(self, ids: IntArray, vocabulary: int, where: str) -> None:
        wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
        if wrong.size:
            token = int(ids[wrong[0]])
            raise BatchError(
                f"{where}: token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}, number"
                f" {wrong[0]} of the row) is outside the model's vocabulary of {vocabulary}"
            )


def _refused(record: Record, error: Exception) -> BatchError:
    return BatchError(f"{record.where}: the chat template refuses it: {error}")


def _string(record: Record, key: str) -> str:
    value = record.values.get(key)
    if not isinstance(value, str):
        raise BatchError(
            f'{record.where}: "{key}": expected a string, got'
            f" {'none' if value is None else type(value).__name__}"
        )
    return value


def _messages(record: Record) -> list[Mapping[str, Any]]:
    found = record.values["messages"]
    if not isinstance(found, list) or not found:
        raise BatchError(
            f'{record.where}: "messages": expected a list of messages, got'
            f" {'an empty one' if found == [] else type(found).__name__}"
        )
    for number, message in enumerate(found):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BatchError(
                f'{record.where}: message {number}: expected an object with "role" and "content",'
                f" got {message!r:.80}"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise BatchError(f'{record.where}: message {number}: it has no "content"')
    # datasets fill every field of every row: what has no value there was not in the example.
    return [{k: v for k, v in message.items() if v is not None} for message in found]


def _end_of(message: Mapping[str, Any]) -> str:
    """What a template writes of a message's end: of its last line, or the last function called."""
    if calls := message.get("tool_calls"):
        last = calls[-1]
        return str(last.get("function", last).get("name", ""))
    content = message.get("content")
    if isinstance(content, list):  # parts
        content = content[-1].get("text", "") if content else ""
    lines = str(content).strip().splitlines()
    return lines[-1].strip() if lines else ""


def _common(first: str, second: str) -> str:
    """What two texts begin with."""
    if second.startswith(first):
        return first
    length = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    return first[:length]
