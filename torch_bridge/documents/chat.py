"""Where an answer ends, and how an assistant is asked: what a chat template says of both."""

from __future__ import annotations

from typing import Any

from fzero.errors import BatchError


# What no template writes by itself.
_WORD = "fzero8714"


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end what an assistant says: the end token, and what its template writes there.

    Many a template ends turns otherwise than texts end (`<|eot_id|>`, `<|im_end|>`), and a model's
    own configuration may know of the latter only.

    Args:
        tokenizer: one of transformers.

    Returns:
        Numbers of tokens, sorted; none where nothing is known.

    Example:
        >>> import tokenizers, transformers
        >>> words = {"</s>": 0, "<turn>": 1, "<end>": 2, "fzero8714": 3}
        >>> made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
        >>> _ = made.add_special_tokens(["<turn>", "<end>"])
        >>> own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
        >>> own.chat_template = "{% for m in messages %}<turn>{{ m.content }}<end>{% endfor %}"
        >>> end_tokens(own)
        (0, 2)
    """
    found = {tokenizer.eos_token_id} - {None}
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WORD}]
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:  # of jinja, or of a template that wants other turns
            text = ""
        _, said, after = text.rpartition(_WORD)  # (a template may leave a text out, or change it)
        behind = tokenizer(after if said else "", add_special_tokens=False).input_ids
        added = getattr(tokenizer, "added_tokens_decoder", {})
        known = {number for number, token in added.items() if token.special}
        found |= set([number for number in behind if number in known][:1])
    return tuple(sorted(found))


def asked(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a question as a user's turn, up to where the assistant begins.

    Args:
        tokenizer: one of transformers.
        text: what the user says.

    Raises:
        BatchError: it has no chat template, or that refuses this.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise BatchError(
            "the tokenizer has no chat template: expected chat_template in its"
            " tokenizer_config.json, or a chat_template.jinja"
        )
    try:
        whole, without = (
            str(tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            ))
            for content in (text, "")
        )  # fmt: skip
    except Exception as error:  # of jinja, or of the template itself
        raise BatchError(f"the chat template refuses the prompt: {error}") from error
    if text.strip() and whole == without:
        raise BatchError(
            "the chat template leaves the prompt out: expected one that takes a text as a turn's"
            " content, not a list of parts alone"
        )
    return list(tokenizer(whole, add_special_tokens=False).input_ids)
