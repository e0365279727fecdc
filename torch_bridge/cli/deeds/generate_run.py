"""`fzero generate`: from a directory and texts to texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fzero as fz
import torch_bridge as tb
from torch_bridge.cli import devices, models
from torch_bridge.cli.errors import CommandError
from torch_bridge.cli.flags.settings import HF_PREFIX, GenerateSettings
from torch_bridge.documents.chat import asked, end_tokens
from torch_bridge.generation.prompts import stop_array


# Lengths are free in the conversion's graph; only one of the cache is run.
_EXAMPLE = 8
_BYTES = 256
# Decoding multiplies single rows, which 8 bits make no faster: `fp8` decodes in bf16.
_DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def generate(settings: GenerateSettings) -> None:
    """Prints each prompt and what follows it.

    Raises:
        CommandError: there is no such model, or a setting is out of its range.
        BatchError: a prompt is empty or too long; named.
        ConversionError: the model cannot generate; named.
    """
    try:
        sampling = tb.Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed)
    except ValueError as error:
        said = str(error).replace("Sampling: ", "--", 1)
        raise CommandError(said.replace("top_", "top-", 1)) from error
    if not settings.temperature and (settings.top_k is not None or settings.top_p < 1):
        raise CommandError(
            "--top-k and --top-p are of what is drawn, but with --temperature 0, the default, the"
            " likeliest token is taken: give a --temperature, such as 1"
        )
    num_devices = devices.configure(settings.devices, settings.precision)
    directory = Path(settings.model.removeprefix(HF_PREFIX)).expanduser()
    if not directory.is_dir():
        raise CommandError(f"--model: {directory} is no directory; expected one with a config.json")
    loaded = models.load(f"{HF_PREFIX}{directory}", seed=0)
    encode, decode = _codec(loaded, settings.chat)
    prompts = [encode(text) for text in settings.prompts]
    converted = tb.convert(loaded.module, models.example_ids(_EXAMPLE), train=False)
    plan = fz.Plan(zero=settings.zero, data=num_devices)
    state = fz.init(converted.model(models.next_token_loss), None, plan)
    found = tb.generate(
        converted,
        state,
        prompts,
        settings.max_new_tokens,
        sampling=sampling,
        stop=_stops(loaded),
        dtype=_DTYPES[settings.precision],
    )
    between = "\n" if settings.chat else ""
    for text, tokens, stopped in zip(settings.prompts, found.tokens, found.stopped, strict=True):
        print(text + between + decode(tokens[:-1] if stopped else tokens))


def _stops(loaded: models.LoadedModel) -> list[int]:
    """What ends a text for the model, and a turn for its tokenizer."""
    own = set(stop_array(None, loaded.module, loaded.vocab_size).tolist())
    turns = end_tokens(loaded.tokenizer) if loaded.tokenizer is not None else ()
    return sorted(own | {token for token in turns if token < loaded.vocab_size})


def _codec(
    loaded: models.LoadedModel, chat: bool
) -> tuple[Callable[[str], Any], Callable[[Any], str]]:
    """Texts to tokens and back."""
    tokenizer = loaded.tokenizer
    if tokenizer is not None:
        return (
            lambda text: asked(tokenizer, text) if chat else tokenizer(text).input_ids,
            lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        )
    if chat:
        raise CommandError(
            f"--chat: {loaded.spec} has no tokenizer, and so no chat template; leave --chat out"
        )
    if loaded.vocab_size < _BYTES:
        raise CommandError(
            f"--model: {loaded.spec} has no tokenizer, and {loaded.vocab_size} tokens are too few"
            f" for bytes; expected a tokenizer.json beside it"
        )

    def decode(tokens: Sequence[int]) -> str:
        known = bytes(int(token) for token in tokens if token < _BYTES)
        return known.decode("utf-8", errors="replace")

    return lambda text: list(text.encode("utf-8")), decode
