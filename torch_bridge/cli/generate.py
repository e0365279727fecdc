"""Write what a model says after a prompt."""

from __future__ import annotations

from typing import Annotated

import typer

from fzero.cli import command_app
from torch_bridge.cli.flags.options import Precision
from torch_bridge.cli.flags.settings import GenerateSettings


app = command_app()


@app.command("generate")
def generate(
    model: Annotated[
        str,
        typer.Option(
            "--model", help="A directory of transformers, or one that `fzero train` wrote."
        ),
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
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage: 3 divides weights.")] = 0,
    devices: Annotated[int | None, typer.Option(help="As for `fzero train`.")] = None,
    precision: Annotated[
        Precision, typer.Option(help="What the model computes in.")
    ] = Precision.fp32,
) -> None:
    """Print every prompt with what the model writes after it, up to an end token.

    An end token is one of the model's, or what the chat template ends an answer with. A model
    without a tokenizer is one of bytes, as `fzero train` trains it.
    """
    # torch and transformers take seconds to import.
    from torch_bridge.cli.deeds import generate_run

    generate_run.generate(
        GenerateSettings(
            model, tuple(prompt), max_new_tokens, temperature, top_k, top_p, seed, zero, devices,
            precision.value, chat,
        )
    )  # fmt: skip
