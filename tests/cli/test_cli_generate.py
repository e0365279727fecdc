"""`fzero generate`: what PyTorch would write, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from cli_cases import TINY_CONFIG
from support.tokens import byte_tokenizer
from typer.testing import CliRunner

from fzero.errors import BatchError, FzeroError
from torch_bridge.cli.generate import app


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of bytes, whose matrices are large enough that it does not repeat itself."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY_CONFIG))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(25)
    module.save_pretrained(path)
    return path


def run(*args: object) -> str:
    found = CliRunner().invoke(app, [*map(str, args), "--devices", "1"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def test_a_prompt_goes_on_as_in_transformers(directory: Path) -> None:
    out = run("--model", directory, "--prompt", "to be", "--prompt", "or", "--max-new-tokens", 6)
    module = transformers.GPT2LMHeadModel.from_pretrained(directory)
    expected = ""
    for text in ("to be", "or"):
        ids = torch.tensor([list(text.encode())])
        new = module.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
        kept = new[: new.index(0)] if 0 in new else new
        expected += text + bytes(kept).decode(errors="replace") + "\n"
    assert out == expected


def test_a_question_gets_the_template_and_ends_where_that_ends_an_answer(
    directory: Path, tmp_path: Path
) -> None:
    """The model's own configuration knows of another end token: this one only the template has."""
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    module = transformers.GPT2LMHeadModel.from_pretrained(directory)
    ids = tokenizer("Hm?\n", return_tensors="pt").input_ids
    new = module.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert new[1] != new[0]
    last = tokenizer.convert_ids_to_tokens(new[1])  # from here on the mark of an answer's end
    tokenizer.add_special_tokens({"additional_special_tokens": [last]})
    end = "{{ '\n' if m['role'] == 'user' else '" + last + "' }}"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
    module.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    out = run("--model", tmp_path, "--prompt", "Hm?", "--chat", "--max-new-tokens", 6)
    assert out == f"Hm?\n{tokenizer.decode(new[:1], skip_special_tokens=True)}\n"


def test_a_question_without_a_template_is_named(directory: Path) -> None:
    with pytest.raises(FzeroError, match=r"--chat: .* has no tokenizer, and so no chat template"):
        run("--model", directory, "--prompt", "Hm?", "--chat")


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        pytest.param(("--prompt", ""), BatchError, "prompt 0 is empty", marks=pytest.mark.nightly),
        pytest.param(
            ("--prompt", "x" * 30),
            BatchError,
            "prompt 0 has 30 tokens, and 64 are to follow",
            marks=pytest.mark.nightly,
        ),
        (("--prompt", "x", "--top-p", "2"), FzeroError, "--top-p=2.0: expected more than 0"),
        (("--prompt", "x", "--top-k", "5"), FzeroError, "--top-k and .* give a --temperature"),
    ],
)
def test_bad_input_is_named(
    directory: Path, args: tuple[str, ...], error: type[FzeroError], message: str
) -> None:
    with pytest.raises(error, match=message):
        run("--model", directory, *args)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match="nothing is no directory"):
        run("--model", tmp_path / "nothing", "--prompt", "x")


def test_a_tokenizer_that_is_damaged_is_named(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(FzeroError, match="model: its tokenizer cannot be read"):
        run("--model", tmp_path / "model", "--prompt", "x")
