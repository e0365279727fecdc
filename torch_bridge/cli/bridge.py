"""Check that a PyTorch module computes the same in JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import torch_bridge as tb
from fzero.cli import command_app
from fzero.cli.flags import json_flag
from torch_bridge.cli.flags.options import batch_flag, model_flag, seed_flag, seq_flag
from torch_bridge.run import devices, models
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import HF_PREFIX, path_of


# As `x=float32[2,3]` or `ids=int64[2,16]<100`.
_INPUT = re.compile(r"(?P<name>\w+)=(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:<(?P<limit>\d+))?")
# Audio encoders shorten their input by hundreds: so many samples for each token asked for.
_SAMPLES_PER_TOKEN = 400

app = command_app(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """PyTorch modules in JAX."""


@app.command("check")
def check(
    model: Annotated[
        str,
        model_flag(
            help="hf:DIR or hf:CONFIG.json (random weights from the seed if there are none), or "
            "path/to/file.py:factory, a function that returns a torch.nn.Module.",
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=DTYPE[SHAPE]",
            help="An argument of forward, once for each: x=float32[2,3,8,8], or "
            "ids=int64[2,16]<100 for integers below 100. The first size is the batch.  "
            "[default: found in the config]",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, batch_flag(min=1, help="Rows in the example.")] = 2,
    seq: Annotated[int, seq_flag(min=1, help="Tokens per row.")] = 16,
    seed: Annotated[int, seed_flag(help="Of weights and inputs.")] = 0,
    json_file: Annotated[Path | None, json_flag(help="Write all figures to this file.")] = None,
) -> None:
    """Convert a module and compare values, loss, gradients and statistics with PyTorch, in fp32.

    Prints a table by submodule and the first value that differs; exits with 1 if one does.
    """
    found, heading = _compared(model, inputs or [], batch, seq, seed)
    if json_file is not None:
        json_file.write_text(found.to_json(), encoding="utf-8")
    print(heading, found, sep="\n", end="")
    raise typer.Exit(0 if found.agrees else 1)


@dataclass(frozen=True)
class Argument:
    """One tensor argument: its shape without the batch, and the limit of its integers."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    limit: int = 2

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        """Random values for a batch."""
        shape = (batch, *self.shape)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(self.dtype)
        return torch.randint(0, self.limit, shape, generator=generator).to(self.dtype)


def _compared(
    spec: str, inputs: Sequence[str], batch: int, seq: int, seed: int
) -> tuple[tb.Parity, str]:
    """The module behind `--model`, converted at one batch size and compared at another; and both
    sizes and what is fixed, in words."""
    devices.configure(None, "fp32")
    torch.manual_seed(seed)
    given = [parse_input(text) for text in inputs]
    if given:
        batch = given[0][0]
    module, config = _load(spec)
    arguments = [argument for _, argument in given] or _arguments(module, config, seq, spec)
    generator = torch.Generator().manual_seed(seed)
    example: dict[str, Any] = {a.name: a.draw(batch, generator) for a in arguments}
    converted = tb.convert(module, **example)
    fixed = converted.fixed_dims()
    # Where the module allows it, the comparison also shows that the batch is free.
    tied = {f"`{a.name}` dim 0" for a in arguments} & set(fixed)
    rows = batch if tied else batch + 1
    found = tb.parity(module, converted, {a.name: a.draw(rows, generator) for a in arguments})
    return found, (
        f"{sum(p.numel() for p in module.parameters()):,} parameters; converted at batch {batch}, "
        f"compared at batch {rows}\n"
        f"sizes as in the example only: {', '.join(fixed) or 'none'}"
    )


def parse_input(text: str) -> tuple[int, Argument]:
    """The batch and the rest of one `--input`.

    Raises:
        CommandError: it is not of the form NAME=DTYPE[SHAPE].
    """
    match = _INPUT.fullmatch(text.strip())
    dtype = getattr(torch, match["dtype"], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype) or not match["shape"].strip(", "):
        raise CommandError(
            f"--input {text}: expected NAME=DTYPE[SHAPE], such as x=float32[2,3,8,8] or "
            "ids=int64[2,16]<100"
        )
    shape = [int(n) for n in match["shape"].split(",") if n.strip()]
    limit = int(match["limit"]) if match["limit"] else 2
    return shape[0], Argument(match["name"], dtype, tuple(shape[1:]), limit)


def _load(spec: str) -> tuple[torch.nn.Module, Any]:
    if spec.startswith(HF_PREFIX):
        return _load_hf(path_of(spec.removeprefix(HF_PREFIX)))
    return models.make_module(*models.split_factory(spec)), None


def _load_hf(path: Path) -> tuple[torch.nn.Module, Any]:
    """The architecture that the config names, or else the causal model, or else the bare one."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = models.read_config(path)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    if models.has_weights(path):
        source = next((kind for kind in named if kind is not None), transformers.AutoModel)
        module = source.from_pretrained(
            path, config=config, local_files_only=True, dtype=torch.float32
        )
    elif any(named):
        module = next(kind for kind in named if kind is not None)(config).float()
    else:
        try:
            module = transformers.AutoModelForCausalLM.from_config(config).float()
        except ValueError:  # no causal language model
            module = transformers.AutoModel.from_config(config).float()
    return module, config


def _arguments(module: torch.nn.Module, config: Any, seq: int, spec: str) -> list[Argument]:
    """What a transformers model takes, by its main input and its config."""
    if config is None:
        raise CommandError(f"--model {spec}: say what forward takes, as --input x=float32[2,3,8,8]")
    main = str(getattr(module, "main_input_name", "input_ids"))
    text = getattr(config, "text_config", config)
    vocabulary = int(getattr(text, "vocab_size", 0) or 2)
    known: Mapping[str, Argument] = {
        "input_ids": Argument("input_ids", torch.int64, (seq,), vocabulary),
        "decoder_input_ids": Argument("decoder_input_ids", torch.int64, (seq,), vocabulary),
        "pixel_values": _pixels(config),
        "input_values": Argument("input_values", torch.float32, (seq * _SAMPLES_PER_TOKEN,)),
        "input_features": Argument(
            "input_features",
            torch.float32,
            (getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1)),
        ),
    }
    if main not in known:
        raise CommandError(f"--model {spec}: its main input is {main}; describe it with --input")
    names = [main]
    if main == "input_ids" and hasattr(config, "vision_config"):
        names.append("pixel_values")
    if getattr(config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    return [known[name] for name in names]


def _pixels(config: Any) -> Argument:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(vision, "num_channels", 3)
    return Argument("pixel_values", torch.float32, (channels, height, width))
