"""Put an adapter into its model, or take it out again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import torch_bridge as tb
from fzero.cli import command_app
from torch_bridge.cli.flags.options import DirectoryOption, OverwriteOption, model_flag
from torch_bridge.formats.peft import is_adapter
from torch_bridge.module.weights import to_host
from torch_bridge.run import devices, models, outputs
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import HF_PREFIX


# Lengths are free in the conversion's graph, which is not run.
_EXAMPLE = 8

app = command_app()


@app.command()
def merge(
    model: Annotated[str, model_flag(help="A directory of transformers: the adapter's base.")],
    adapter: Annotated[
        Path, typer.Option(help="A directory with an adapter, of PEFT or `fzero finetune`.")
    ],
    out: DirectoryOption,
    undo: Annotated[
        bool, typer.Option("--undo", help="--model has the adapter in it: write the one without.")
    ] = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Write a model with an adapter in its weights: transformers loads it, and needs no PEFT.

    Weights keep their dtype: the sum is computed in fp32 and rounded once.
    """
    directory = Path(model.removeprefix(HF_PREFIX)).expanduser()
    if not models.has_weights(directory):
        raise CommandError(f"--model {directory}: expected a directory with weights of a model")
    if not is_adapter(adapter):
        raise CommandError(f"--adapter {adapter}: expected a directory with adapter_config.json")
    for flag, source in (("--model", directory), ("--adapter", adapter)):
        if out.resolve() == source.resolve():
            raise CommandError(f"--out {out} is {flag}, which is read; give another directory")
    outputs.check(out, overwrite)
    devices.configure(None, "fp32")
    loaded = models.load(f"{HF_PREFIX}{directory}", 0, "auto")
    converted = tb.convert(loaded.module, models.example_ids(_EXAMPLE), train=False)
    adapted = tb.lora(converted, str(adapter))
    outputs.make(out)
    with outputs.model_staged(out) as scratch:
        if undo:
            merged = tb.state_dict(converted, converted.params)
            found = tb.unmerge(adapted, merged, adapted.params)
            plain = converted.with_values({name: to_host(one) for name, one in found.items()})
            tb.save(scratch / outputs.WEIGHTS, plain, plain.params)
        else:
            tb.save(scratch / outputs.WEIGHTS, adapted, adapted.params, merge=True)
        loaded.config.architectures = [type(loaded.module).__name__]
        loaded.save_config(scratch)
        # The adapter's own, if it has one: with the chat template that it was trained with.
        tokenizer = loaded.tokenizer if undo else models.tokenizer_of(adapter) or loaded.tokenizer
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
    count = len(adapted.adapters["default"].targets)
    word = "taken out of" if undo else "put into"
    print(f"{out}: {adapter} {word} {count} weights of {directory}")
