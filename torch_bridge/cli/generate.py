"""Write what a model says after a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import fzero as fz
import torch_bridge as tb
from fzero.cli import command_app
from torch_bridge.cli.flags.options import (
    DevicesOption,
    Precision,
    ZeroOption,
    model_flag,
    precision_flag,
    seed_flag,
)
from torch_bridge.documents.chat import asked, end_tokens
from torch_bridge.generation.prompts import stop_array
from torch_bridge.run import models
from torch_bridge.run.devices import configure
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import HF_PREFIX


# Lengths are free in the conversion's graph; only one of the cache is run.
_EXAMPLE = 8
_BYTES = 256
# Decoding multiplies single rows, which 8 bits make no faster: `fp8` decodes in bf16.
_DTYPES = {"fp32": None, "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}

app = command_app()


@app.command("generate")
def generate(
    model: Annotated[
        str,
        model_flag(help="A directory of transformers, or one that `fzero train` wrote."),
    ],
    prompt: Annotated[list[str], typer.Option("--prompt", help="A text; once for each.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are questions: with the chat template around.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens after a prompt.")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; 1 draws from the model's own odds.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many tokens only.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest of this odds only.")] = 1.0,
    seed: Annotated[int, seed_flag(help="Of what is drawn.")] = 0,
    zero: ZeroOption = 0,
    devices: DevicesOption = None,
    precision: Annotated[
        Precision, precision_flag(help="What the model computes in.")
    ] = Precision.fp32,
) -> None:
    """Print every prompt with what the model writes after it, up to an end token.

    An end token is one of the model's, or what the chat template ends an answer with. A model
    without a tokenizer is one of bytes, as `fzero train` trains it.
    """
    sampling = _sampling(temperature, top_k, top_p, seed)
    num_devices = configure(devices, precision)
    directory = Path(model.removeprefix(HF_PREFIX)).expanduser()
    if not directory.is_dir():
        raise CommandError(f"--model: {directory} is no directory; expected one with a config.json")
    loaded = models.load(f"{HF_PREFIX}{directory}", seed=0)
    encode, decode = _codec(loaded, chat)
    prompts = [encode(text) for text in prompt]
    converted = tb.convert(loaded.module, models.example_ids(_EXAMPLE), train=False)
    state = fz.init(
        converted.model(models.next_token_loss), None, fz.Plan(zero=zero, data=num_devices)
    )
    found = tb.generate(
        converted, state, prompts, max_new_tokens, sampling=sampling, stop=_stops(loaded),
        dtype=_DTYPES[precision],
    )  # fmt: skip
    between = "\n" if chat else ""
    for text, tokens, stopped in zip(prompt, found.tokens, found.stopped, strict=True):
        print(text + between + decode(tokens[:-1] if stopped else tokens))


def _sampling(temperature: float, top_k: int | None, top_p: float, seed: int) -> tb.Sampling:
    try:
        sampling = tb.Sampling(temperature, top_k, top_p, seed)
    except ValueError as error:
        said = str(error).replace("Sampling: ", "--", 1)
        raise CommandError(said.replace("top_", "top-", 1)) from error
    if not temperature and (top_k is not None or top_p < 1):
        raise CommandError(
            "--top-k and --top-p are of what is drawn, but with --temperature 0, the default, the"
            " likeliest token is taken: give a --temperature, such as 1"
        )
    return sampling


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
