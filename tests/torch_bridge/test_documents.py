"""Documents: conversations, completions and texts as tokens, rows and batches."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from unittest import mock

import datasets
import numpy as np
import optax
import pytest
import tokenizers

import fzero as fz
import torch_bridge as tb
from tests.support.tokens import MARKED, VOCABULARY, byte_tokenizer
from torch_bridge.documents.chat import asked, end_tokens
from torch_bridge.documents.spool import Spool
from torch_bridge.documents.tokens import Document


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où?"},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Here, still."},
]


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def learned(tokenizer, document):
    kept = [int(token) for token in document.labels if token != -100]
    assert kept == [int(t) for t, label in zip(document.ids, document.labels, strict=True)
                    if label != -100]  # fmt: skip
    return tokenizer.decode(kept)


def test_of_a_conversation_the_assistants_words_are_learned(tmp_path):
    path = written(tmp_path / "chat.jsonl", {"messages": CHAT}, {"messages": CHAT[1:3]})
    tokenizer = byte_tokenizer()
    first, second = tb.read_documents(path, tokenizer, vocabulary=VOCABULARY)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(first.ids) == whole
    assert learned(tokenizer, first) == "Là.<|end|>\nHere, still.<|end|>\n"
    assert learned(tokenizer, second) == "Là.<|end|>\n"
    # transformers' own masks, where the template marks what the assistant writes
    for own, other in ((byte_tokenizer(MARKED), None), (tokenizer, MARKED)):
        marked = tb.read_documents(path, own, template=other)
        for one, same in zip(marked, (first, second), strict=True):
            np.testing.assert_array_equal(one.ids, same.ids)
            np.testing.assert_array_equal(one.labels, same.labels)


def test_completions_and_texts_end_with_the_end_token(tmp_path):
    tokenizer = byte_tokenizer(None)
    path = written(tmp_path / "rows.jsonl", {"prompt": "1 + 1 =", "completion": " 2"},
                   {"text": "All of it."}, {"text": "Once.<|end|>"})  # fmt: skip
    pair, text, ended = tb.read_documents([path], tokenizer)
    assert tokenizer.decode(pair.ids) == "1 + 1 = 2<|end|>"
    assert learned(tokenizer, pair) == " 2<|end|>"
    assert learned(tokenizer, text) == "All of it.<|end|>"
    assert tokenizer.decode(ended.ids) == "Once.<|end|>"
    assert (pair.where, text.where) == (f"{path}:1", f"{path}:2")


def test_datasets_on_disk_are_read_like_files(tmp_path):
    records = [{"messages": CHAT}, {"messages": CHAT[1:3]}]
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    want = tb.read_documents(written(tmp_path / "chat.jsonl", *records), byte_tokenizer())
    got = tb.read_documents(tmp_path / "saved", byte_tokenizer())
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.labels, other.labels)
    assert got[1].where == f"{tmp_path / 'saved'}, row 1"
    datasets.DatasetDict(train=datasets.Dataset.from_list(records)).save_to_disk(
        str(tmp_path / "splits")
    )
    with pytest.raises(fz.BatchError, match=r"several splits, \['train'\]: expected one"):
        tb.read_documents(tmp_path / "splits", byte_tokenizer())


def test_blanks_are_learned_where_the_tokenizer_trims_offsets(tmp_path):
    tokenizer = byte_tokenizer()
    trims = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.backend_tokenizer.post_processor = trims
    path = written(
        tmp_path / "rows.jsonl",
        {"messages": [CHAT[1], {"role": "assistant", "content": "a  b\n\n\tc"}]},
        {"prompt": "1 ", "completion": " 2\n"},
    )
    chat, pair = tb.read_documents(path, tokenizer)
    assert learned(tokenizer, chat) == "a  b\n\n\tc<|end|>\n"
    assert learned(tokenizer, pair) == " 2\n<|end|>"


def test_a_turn_whose_thoughts_are_dropped_is_refused_not_cut(tmp_path):
    turns = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>One more.</think>Two."},
    ]
    last = written(tmp_path / "last.jsonl", {"messages": turns})
    keeps = (
        "{% for m in messages %}{{ m['role'] }}:"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '<think></think>' +"
        " m['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = byte_tokenizer(keeps)
    (whole,) = tb.read_documents(last, tokenizer)
    assert learned(tokenizer, whole) == "<think>One more.</think>Two.<|end|>"
    more = written(tmp_path / "more.jsonl", {"messages": [*turns, turns[0]]})
    with pytest.raises(fz.BatchError, match=r"more\.jsonl:1: message 1: .* where it ends cannot"):
        tb.read_documents(more, tokenizer)


# Of gpt-oss: an answer ends otherwise where it is the last, and `<|end|>` ends no generation.
HARMONY = (
    "{% for m in messages %}<|start|>{{ m['role'] }}{% if m['role'] == 'assistant' %}"
    "<|channel|>final{% endif %}<|message|>{{ m['content'] }}"
    "{{ '<|return|>' if m['role'] == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def harmony():
    tokenizer = byte_tokenizer(HARMONY)
    more = ["<|return|>", "<|channel|>", "<|message|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": more})
    return tokenizer


def test_the_end_of_an_answer_is_learned_where_it_ends_generation(tmp_path):
    path = written(tmp_path / "chat.jsonl", {"messages": CHAT})
    (found,) = tb.read_documents(path, harmony())
    assert learned(harmony(), found) == (
        "<|channel|>final<|message|>Là.<|channel|>final<|message|>Here, still.<|return|>"
    )


def test_tokens_that_end_an_answer_are_the_templates_and_the_end_token():
    def words(tokenizer):
        return sorted(tokenizer.convert_ids_to_tokens(list(end_tokens(tokenizer))))

    assert words(harmony()) == ["<|end|>", "<|return|>"]
    assert words(byte_tokenizer()) == words(byte_tokenizer(None)) == ["<|end|>"]
    assert words(byte_tokenizer("{{ raise_exception('no') }}")) == ["<|end|>"]
    bare = byte_tokenizer("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    bare.eos_token = None
    assert words(bare) == []  # a line break ends no answer
    begun = byte_tokenizer("{% for m in messages %}{{ m['content'] }}<|end|><|start|>{% endfor %}")
    assert words(begun) == ["<|end|>"]  # what begins the next turn ends none
    only_parts = byte_tokenizer(
        "<|start|>{% for m in messages %}{% for part in m['content'] %}{{ part.text }}"
        "{% endfor %}<|end|>{% endfor %}"
    )
    assert words(only_parts) == ["<|end|>"]  # <|start|> is not behind the answer, which is left out
    with pytest.raises(fz.BatchError, match="the chat template leaves the prompt out"):
        asked(only_parts, "Où?")
    own = harmony()
    assert own.decode(asked(own, "Où?")) == "<|start|>user<|message|>Où?<|end|><|start|>assistant"
    with pytest.raises(fz.BatchError, match="no chat template: expected chat_template in"):
        asked(byte_tokenizer(None), "Où?")
    with pytest.raises(fz.BatchError, match="the chat template refuses the prompt: no"):
        asked(byte_tokenizer("{{ raise_exception('no') }}"), "Où?")


def test_a_template_that_asks_for_the_date_gives_the_same_tokens_on_every_day(tmp_path):
    path = written(tmp_path / "chat.jsonl", {"messages": CHAT[1:3]})
    for own in (byte_tokenizer().chat_template, MARKED):
        dated = "{{ strftime_now('%d %b %Y') }}" + own
        (found,) = tb.read_documents(path, byte_tokenizer(), template=dated)
        assert byte_tokenizer().decode(found.ids).startswith("26 Jul 2024")


def test_a_conversation_that_the_assistant_begins(tmp_path):
    greeting = {"role": "assistant", "content": "Be kind."}  # as the system prompt has it
    path = written(tmp_path / "chat.jsonl", {"messages": [greeting, CHAT[1]]})
    system = "<|start|>system\nBe kind.<|end|>\n"
    tokenizer = byte_tokenizer(system + byte_tokenizer().chat_template)
    (found,) = tb.read_documents(path, tokenizer)
    assert learned(tokenizer, found) == "Be kind.<|end|>\n"
    # a template that says nothing of what is asked: begun at the words, where they are seen once
    plain = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    (found,) = tb.read_documents(path, tokenizer, template=plain)
    assert learned(tokenizer, found) == "Be kind.<|end|>"
    with pytest.raises(fz.BatchError, match=r"message 0 is the assistant's, and where it begins"):
        tb.read_documents(path, tokenizer, template=system + plain)


def test_fields_that_datasets_fill_are_not_there(tmp_path):
    def called(**arguments):
        function = {"name": "f", "arguments": arguments}
        tool = {"name": "f", "parameters": {name: {"type": "x"} for name in arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        return {"messages": [CHAT[1], answer], "tools": [tool]}

    records = [called(a=1), called(b="2")]
    template = "{{ tools | tojson }}" + byte_tokenizer().chat_template.replace(
        "m['content']", "m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '')"
    )
    tokenizer = byte_tokenizer(template)
    want = tb.read_documents(written(tmp_path / "chat.jsonl", *records), tokenizer)
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    got = tb.read_documents(tmp_path / "saved", tokenizer)
    for one, other in zip(got, want, strict=True):
        assert "null" not in tokenizer.decode(one.ids)
        assert sorted(tokenizer.decode(one.ids)) == sorted(tokenizer.decode(other.ids))
        assert sorted(learned(tokenizer, one)) == sorted(learned(tokenizer, other))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "a"', "expected one JSON object on this line"),
        (r'{"text": "cut \ud83d"}', "expected one JSON object on this line: .* surrogates not"),
        ("[1]", "expected a JSON object, got list"),
        ('{"txt": "a"}', 'expected one of "messages".* got the fields txt'),
        ('{"text": "a", "prompt": "b"}', "got the fields prompt, text"),
        ('{"prompt": "b"}', '"completion": expected a string, got none'),
        ('{"text": 3}', '"text": expected a string, got int'),
        ('{"messages": []}', "expected a list of messages, got an empty one"),
        ('{"messages": [{"content": "x"}]}', "message 0: expected an object with"),
        ('{"messages": [{"role": "assistant"}]}', 'message 0: it has no "content"'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "nothing to learn.*'user'"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(tmp_path, line, told):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(fz.BatchError, match=rf"bad\.jsonl:3: .*{told}"):
        tb.read_documents(path, byte_tokenizer())


def test_a_files_first_line_may_begin_with_windows_mark(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert len(tb.read_documents(path, byte_tokenizer())) == 2


def test_templates_and_tokens_that_do_not_fit_are_named(tmp_path):
    path = written(tmp_path / "chat.jsonl", {"messages": CHAT})
    with pytest.raises(fz.BatchError, match=r"chat\.jsonl:1: has messages, but .* no chat templ"):
        tb.read_documents(path, byte_tokenizer(None))
    with pytest.raises(fz.BatchError, match=r"chat\.jsonl:1: the chat template refuses it: no sy"):
        tb.read_documents(path, byte_tokenizer("{{ raise_exception('no system') }}"))
    with pytest.raises(fz.BatchError, match=r"jsonl:1: token 256 \('<.start.>', number 0 of the"):
        tb.read_documents(path, byte_tokenizer(), vocabulary=256)
    forgets = "{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(fz.BatchError, match=r"jsonl:1: message 2: .* otherwise once it is there"):
        tb.read_documents(path, byte_tokenizer(forgets))
    # Of an answer in parts the end is that of the last.
    drops = (
        "{% for m in messages %}{% set all = loop.last or m['role'] == 'user' %}{{ m['role'] }}"
        "{% for p in m['content'] %}{% if loop.first or all %}{{ p.text }}{% endif %}{% endfor %}|"
        "{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    chat = [{"role": role, "content": parts} for role in ("user", "assistant", "user")]
    path = written(tmp_path / "parts.jsonl", {"messages": chat})
    with pytest.raises(fz.BatchError, match=r"jsonl:1: message 1: .* once more follows"):
        tb.read_documents(path, byte_tokenizer(drops))
    with pytest.raises(fz.BatchError, match=r"none\.jsonl: cannot be read"):
        tb.read_documents(tmp_path / "none.jsonl", byte_tokenizer())


def test_rows_hold_documents_with_what_is_learned(tmp_path):
    path = written(tmp_path / "rows.jsonl", *({"prompt": "ab", "completion": c} for c in "wxyz"))
    tokenizer = byte_tokenizer()
    documents = tb.read_documents(path, tokenizer)
    rows = tb.Rows.of(documents, length=8)
    assert (len(rows), rows.num_tokens, rows.num_learned) == (2, 16, 8)
    assert rows.values["segments"].tolist() == [[1] * 4 + [2] * 4] * 2
    assert tokenizer.decode(rows[0]["ids"]) == "abw<|end|>abx<|end|>"
    apart = tb.Rows.of(documents, length=8, packed=False)
    assert (len(apart), apart.num_tokens, apart.num_learned) == (4, 16, 8)
    # Every epoch has every row once, in an order of its own.
    epochs = [apart.batch(0, epoch, 4)["ids"].tolist() for epoch in range(6)]
    assert all(sorted(rows) == sorted(apart[:]["ids"].tolist()) for rows in epochs)
    assert len({str(rows) for rows in epochs}) > 1
    # Other rows, though tokens and labels are the same: who sees whom is not.
    one, rest = (Document(np.array(ids), np.array([-100, *ids[1:]]), "") for ids in ([4, 5], [6]))
    joined = Document(np.array([4, 5, 6]), np.array([-100, 5, -100]), "")
    both = [tb.Rows.of(documents, length=3) for documents in ([one, rest], [joined])]
    for name in ("ids", "labels"):
        np.testing.assert_array_equal(both[0].values[name], both[1].values[name])
    assert both[0].fingerprint != both[1].fingerprint
    learned = Document(joined.ids, np.array([-100, 5, 6]), "")
    assert tb.Rows.of([learned], length=3).fingerprint != both[1].fingerprint
    with pytest.raises(fz.BatchError, match=r"rows\.jsonl:1: 4 tokens, but rows have 3"):
        tb.Rows.of(documents, length=3)
    assert len(tb.Rows.of(documents, length=3, too_long="skip")) == 0
    cut = tb.Rows.of(documents, length=3, too_long="cut")
    assert (len(cut), cut.cut, cut.num_learned) == (4, 4, 4)


def test_batches_go_on_in_another_number_of_processes(tmp_path):
    path = written(tmp_path / "rows.jsonl", *({"text": f"number {n}"} for n in range(7)))
    rows = tb.Rows.of(tb.read_documents(path, byte_tokenizer()), length=12)
    model = fz.Model(
        lambda rng: ({"w": np.ones(4, np.float32)}, {}),
        lambda p, b, *_: ((p["w"] ** 2).sum(), b, {}),
    )
    plan, tx = fz.Plan(data=2), optax.sgd(0.1)
    one = tb.grain_batches(rows, 4, seed=3)
    for step in range(3):  # into the second epoch
        np.testing.assert_array_equal(next(one)["ids"], rows.batch(3, step, 4)["ids"])
    fz.save(
        tmp_path / "saved",
        fz.init(model, tx, plan),
        plan,
        data_position=one.get_state(),
        asynchronous=False,
    )
    position = fz.checkpoint(tmp_path / "saved").data_position
    parts = [tb.grain_batches(rows, 4, seed=3, process=n, num_processes=2) for n in range(2)]
    for part in parts:
        part.set_state(position)
    for step in (3, 4):
        joined = np.concatenate([next(part)["ids"] for part in parts])
        np.testing.assert_array_equal(joined, rows.batch(3, step, 4)["ids"])
    other = tb.Rows.of(tb.read_documents(path, byte_tokenizer()), length=16)
    for given, size, seed in ((rows, 2, 3), (rows, 4, 4), (other, 4, 3)):
        with pytest.raises(fz.BatchError, match=r"a position in .*'rows': 7, 'size': 4, 'seed': 3"):
            tb.grain_batches(given, size, seed=seed).set_state(position)
    seen = np.concatenate([rows.batch(3, step, 7)["ids"] for step in range(2)])
    assert sorted(map(bytes, seen)) == sorted(2 * list(map(bytes, rows.values["ids"])))
    with pytest.raises(fz.BatchError, match="7 rows in batches of 4 over 3 processes"):
        tb.grain_batches(rows, 4, process=0, num_processes=3)


def test_what_fills_the_last_batch_up_is_no_row():
    """Validation is a mean over all rows, each of which counts once."""
    documents = [Document(np.arange(n, n + 4), np.arange(n, n + 4), "") for n in range(1, 8)]
    rows = tb.Rows.of(documents, length=4, packed=False)
    for size in (3, 4, 7, 9):
        batches = list(rows.in_order(size))
        assert {len(batch["ids"]) for batch in batches} == {size}
        for name, filling in {"ids": 0, "segments": 0, "labels": -100}.items():
            found = np.concatenate([batch[name] for batch in batches])
            np.testing.assert_array_equal(found[:7], rows.values[name])
            assert (found[7:] == filling).all()


class _Counted(Spool):
    """Notes which documents are looked at."""

    def __getitem__(self, index):
        looked.append(index)
        return super().__getitem__(index)


looked: list[int] = []


def test_a_process_reads_and_holds_only_its_own_rows():
    """Of documents in a file: batches, what fills the last one, counts and memory."""

    def made():
        for n in range(1000):
            ids = np.full(1000 + n % 25, n)
            yield Document(ids, np.where(np.arange(ids.size) < 3, -100, ids), f"ünder:{n}")

    tracemalloc.start()
    spool = Spool.of(made())
    rows = tb.Rows.of(spool, length=2048)
    assert (len(rows), rows.num_learned) == (500, sum(1000 + n % 25 - 3 for n in range(1000)))
    own = list(rows.in_order(64, slice(0, 1)))
    mean = rows.fingerprint, rows.num_tokens, rows.batch(0, 3, 64, slice(0, 1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Documents are 8 MiB, rows as arrays 16 MiB; 64 rows, of which all is counted, are 2 MiB.
    assert peak < 4 * 2**20, peak
    # The same as in memory, of each process and of all.
    whole = tb.Rows.of(list(made()), length=2048)
    assert mean[:2] == (whole.fingerprint, whole.num_tokens)
    assert spool[999].where == "ünder:999"
    for kind in (rows, whole):
        parts = [kind.batch(0, 3, 64, slice(n * 16, n * 16 + 16)) for n in range(4)]
        for name, value in whole.batch(0, 3, 64).items():
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), value)
    assert [len(x["ids"]) for x in own] == [1] * 8
    last = [x["labels"] for x in whole.in_order(64)][-1]
    assert (last[500 - 7 * 64 :] == -100).all()
    # Every twentieth validates, and the others train.
    held, kept = spool[19::20], spool.without(spool[19::20])
    assert (len(held), len(kept), held[0].ids[0], kept[19].ids[0]) == (50, 950, 19, 20)
    # Two documents a row, and nobody else's.
    counted = tb.Rows.of(_Counted(spool._bytes, spool._ends, spool._chosen), length=2048)
    looked.clear()
    counted.batch(0, 3, 64, slice(16, 32))
    assert len(looked) == 32


def test_documents_without_a_label_for_each_token_and_full_disks_are_named(monkeypatch):
    short = Document(np.arange(3), np.arange(2), "file:7")
    with pytest.raises(fz.BatchError, match=r"file:7: .* got int64 of shape \[3\] and int64 of"):
        tb.Rows.of([short], length=8)
    with pytest.raises(fz.BatchError, match=r"file:8: expected whole numbers .* got float64"):
        tb.Rows.of([Document(np.ones(2), np.ones(2), "file:8")], length=8)
    assert len(Spool.of([])) == len(tb.Rows.of(Spool.of([]), length=8)) == 0

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: mock.MagicMock(
        __enter__=lambda _: mock.Mock(write=full), __exit__=lambda *_: False))  # fmt: skip
    with pytest.raises(fz.BatchError, match=r"cannot be written .*No space left.*TMPDIR"):
        Spool.of([Document(np.arange(3), np.arange(3), "file:1")])
