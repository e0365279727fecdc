"""The PyTorch module behind `--model`: a Hugging Face directory or config, or a factory."""

from __future__ import annotations

import importlib.util
import json
import logging
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fzero as fz
import torch_bridge as tb
from torch_bridge.export.watch.forward import untouched
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import HF_PREFIX, path_of


WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
# transformers imports torchao where it is installed; what that says of its kernels is not for those
# who train something else.
QUIET = ("torchao", "torch.utils._pytree")
for _name in QUIET:
    logging.getLogger(_name).setLevel(logging.ERROR)


@dataclass(frozen=True)
class LoadedModel:
    """A module whose forward takes [batch, seq] token ids, and what is known about it."""

    module: torch.nn.Module
    spec: str  # as given to `--model`, its path made absolute
    vocab_size: int
    max_seq: int | None  # longest sequence it takes; None: not known
    tokenizer: Any = None
    config: Any = None  # the transformers configuration; None for a factory

    @property
    def name(self) -> str:
        """What a picture calls it. (A folder's name may have dots: `llama-3.1`.)"""
        return re.sub(r"\.(json|py:\w+)$", "", Path(self.spec.removeprefix(HF_PREFIX)).name)

    @property
    def factory(self) -> str | None:
        """`FILE.py:FACTORY`; None for a model of transformers."""
        return self.spec if self.config is None else None

    def save_config(self, folder: Path) -> None:
        """What transformers reads beside weights: the configuration, and that of generation."""
        self.config.save_pretrained(folder)
        generation = getattr(self.module, "generation_config", None)
        if generation is not None:
            generation.to_json_file(folder / "generation_config.json")  # as it is, unchecked

    @property
    def num_parameters(self) -> int:
        """Every parameter once, tied ones too."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def load(spec: str, seed: int, dtype: str = "fp32") -> LoadedModel:
    """Loads `hf:DIR`, `hf:CONFIG.json` or `FILE.py:FACTORY`; random weights come from `seed`.

    Args:
        spec: see above.
        seed: of random weights.
        dtype: "fp32", "bf16" or "auto" (that of the files), of models of transformers.

    Raises:
        CommandError: the spec has neither form, names something missing, or gives no module.
    """
    torch.manual_seed(seed)
    if spec.startswith(HF_PREFIX):
        return _load_hf(path_of(spec.removeprefix(HF_PREFIX)), dtype)
    path, name = split_factory(spec)
    module, spec = make_module(path, name), f"{path}:{name}"
    return LoadedModel(module, spec, _logits_width(module, spec), None)


def split_factory(spec: str) -> tuple[Path, str]:
    """`path/to/file.py:factory` as a path and a name.

    Raises:
        CommandError: it has another form.
    """
    path, colon, factory = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise CommandError(
            f"--model {spec}: expected hf:DIR, hf:CONFIG.json or path/to/file.py:factory"
        )
    return path_of(path), factory


def check_fit(model: LoadedModel, seq: int) -> None:
    """Refuses tokens that the vocabulary cannot hold, and sequences that are too long."""
    if model.tokenizer is None and model.vocab_size < 256:
        raise CommandError(
            f"--model {model.spec}: a vocabulary of {model.vocab_size} cannot hold the 256 byte "
            "values, and there is no tokenizer in the model directory; set vocab_size to 256 or "
            "more, or add a tokenizer"
        )
    if model.tokenizer is not None and len(model.tokenizer) > model.vocab_size:
        raise CommandError(
            f"--model {model.spec}: its tokenizer has {len(model.tokenizer)} tokens, the model a "
            f"vocabulary of {model.vocab_size}; set vocab_size to {len(model.tokenizer)} or more"
        )
    check_length(model, seq)


def check_length(model: LoadedModel, seq: int) -> None:
    """Refuses sequences that are longer than the model's positions."""
    if model.max_seq is not None and seq > model.max_seq:
        raise CommandError(
            f"--seq {seq} is longer than the {model.max_seq} positions of {model.spec}; "
            f"use --seq {model.max_seq}"
        )


def load_shapes(
    spec: str, values: bool
) -> LoadedModel | tuple[fz.Model, Callable[[int, int], Any]]:
    """A model as `load` takes it, without values: its tensors are on torch's `meta` device.

    A factory may also give an fzero model, with a function that gives the shapes of a batch of so
    many rows and tokens.

    Args:
        spec: as of `load`.
        values: whether to make random weights, where the model shall run; files have none to read.

    Raises:
        CommandError: as `load`.
    """
    if spec.startswith(HF_PREFIX):
        return _shapes_hf(path_of(spec.removeprefix(HF_PREFIX)), values)
    path, name = split_factory(spec)
    with without_values(not values):
        made = call_factory(path, name)
    if isinstance(made, torch.nn.Module):
        return LoadedModel(made, f"{path}:{name}", 0, None)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], fz.Model):
        return made
    raise CommandError(
        f"--model: {name} of {path} must return a torch.nn.Module, or a pair of an fzero.Model and "
        f"a function of (rows, seq) that gives the shapes of a batch; got {type(made).__name__}"
    )


def without_values(yes: bool) -> AbstractContextManager[Any]:
    """Where torch makes tensors of shapes alone, if so."""
    return torch.device("meta") if yes else nullcontext()


def _shapes_hf(path: Path, values: bool) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    config = read_config(path)
    with _causal(path), without_values(not values):
        module = AutoModelForCausalLM.from_config(config).float()
    longest = getattr(config, "max_position_embeddings", None)
    return LoadedModel(module, f"{HF_PREFIX}{path}", config.vocab_size, longest, None, config)


@contextmanager
def _causal(path: Path) -> Iterator[None]:
    """Where a causal language model is made of a configuration, of which there may be none."""
    try:
        yield
    except ValueError as error:
        raise CommandError(
            f"{_config_file(path)}: transformers has no causal language model for it: {error}"
        ) from error


def has_weights(path: Path) -> bool:
    """Whether a path is a directory with weights."""
    return any((path / name).exists() for name in WEIGHT_FILES)


def next_token_loss(forward: Any, batch: dict[str, Any]) -> Any:
    """Next-token cross-entropy as an exact mean over the tokens that are predicted."""
    return tb.causal_lm_loss(logits_of(forward(batch["input_ids"])), batch["labels"])


def load_weights(module: torch.nn.Module, path: Path) -> None:
    """Loads a weight file into a module that a factory made.

    Raises:
        CommandError: the names or shapes are not those of the module.
        CheckpointError: there is no such file, or it is damaged.
    """
    try:
        module.load_state_dict(tb.load(path))
    except RuntimeError as error:
        raise CommandError(
            f"--model: {path} does not fit what the factory makes: {error}"
        ) from error


def example_ids(seq: int) -> torch.Tensor:
    """Token ids to convert a model with, for any number of sequences."""
    return torch.zeros((2, seq), dtype=torch.int64)


# "auto": as the files have it; of random weights, as torch makes them.
_DTYPES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": "auto"}


def _load_hf(path: Path, dtype: str) -> LoadedModel:
    from transformers import AutoModelForCausalLM  # seconds to import: only when needed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bar would run into ours

    config = read_config(path)
    with _causal(path):
        if has_weights(path):
            module = _with_weights(path, config, dtype)
        else:
            module = AutoModelForCausalLM.from_config(config)
            module = module if dtype == "auto" else module.to(_DTYPES[dtype])
    text = config.get_text_config()  # itself, but for models that read images, too
    return LoadedModel(
        module=module,
        spec=f"{HF_PREFIX}{path}",
        vocab_size=text.vocab_size,
        max_seq=getattr(text, "max_position_embeddings", None),
        tokenizer=tokenizer_of(path),
        config=config,
    )


def _with_weights(path: Path, config: Any, dtype: str) -> Any:
    """The module of a directory, with all of its weights.

    Raises:
        CommandError: the weights are damaged, or some are in no file: transformers would draw them.
        ValueError: transformers has no such model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        module, found = AutoModelForCausalLM.from_pretrained(
            path, config=config, local_files_only=True, dtype=_DTYPES[dtype],
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CommandError(
            f"--model {path}: its weights cannot be read ({type(error).__name__}: {error})"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise CommandError(
            f"--model {path}: its files lack {missing[:4]}"
            f"{f' and {len(missing) - 4} more' * (len(missing) > 4)}, which transformers would"
            " draw at random: expected weights of this very model; is a file of them missing?"
        )
    return module


def tokenizer_of(path: Path) -> Any:
    """The tokenizer in a directory, or None.

    Raises:
        CommandError: it is damaged.
    """
    if not (path.is_dir() and any((path / name).exists() for name in TOKENIZER_FILES)):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of json, tokenizers (a plain one), or the file system
        raise CommandError(
            f"{path}: its tokenizer cannot be read ({type(error).__name__}: {error}); expected what"
            " a tokenizer's save_pretrained writes"
        ) from error


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def read_config(path: Path) -> Any:
    """The transformers configuration in a file, or in a directory.

    Raises:
        CommandError: there is no such file, or transformers does not know its model type.
    """
    from transformers import AutoConfig

    config_file = _config_file(path)
    if not config_file.is_file():
        if (config_file.parent / "adapter_config.json").is_file():
            raise CommandError(
                f"--model: {config_file.parent} is an adapter; fzero merge --model BASE --adapter"
                f" {config_file.parent} --out DIR makes a model of it and its base"
            )
        raise CommandError(
            f"--model: {config_file} does not exist; hf: takes a directory with a config.json, "
            "or such a file itself"
        )
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
        _refuse_quantised(config_file, values)
        return AutoConfig.for_model(**values)
    except CommandError:
        raise
    except (ValueError, TypeError) as error:
        # TypeError: the file holds no object, or no "model_type".
        raise CommandError(
            f"{config_file} is no transformers configuration with a known model_type: {error}"
        ) from error


def _refuse_quantised(config_file: Path, values: Any) -> None:
    """Weights that bitsandbytes, GPTQ, AWQ and others have packed are not read."""
    levels = [values, *values.values()] if isinstance(values, dict) else []
    configs = [p.get("quantization_config") for p in levels if isinstance(p, dict)]
    for found in filter(None, configs):
        said = found if isinstance(found, dict) else {}
        remedy = ""
        if said.get("load_in_4bit"):
            double = "nf4-double" if said.get("bnb_4bit_use_double_quant") else "nf4"
            remedy = f"; fzero finetune --lora RANK --base {double} quantises that as it is read"
        raise CommandError(
            f"{config_file}: its weights are quantised (quant_method {said.get('quant_method')!r}),"
            " which is not read: expected the model that they were made of, in 16 or 32 bits"
            f"{remedy}"
        )


def make_module(path: Path, name: str) -> torch.nn.Module:
    """The module that the function `name` of the Python file `path` returns.

    Raises:
        CommandError: there is no such file or function, or it returns no module.
    """
    module = call_factory(path, name)
    if not isinstance(module, torch.nn.Module):
        raise CommandError(
            f"--model: {name} of {path} must return a torch.nn.Module, got {type(module).__name__}"
        )
    return module


def call_factory(path: Path, name: str) -> Any:
    """What the function `name` of the Python file `path` returns.

    Raises:
        CommandError: there is no such file or function.
    """
    if not path.is_file():
        raise CommandError(f"--model: {path} does not exist")
    module_spec = importlib.util.spec_from_file_location(f"fzero_model_{path.stem}", path)
    assert module_spec is not None  # a .py file always has a loader
    assert module_spec.loader is not None
    namespace = importlib.util.module_from_spec(module_spec)
    sys.modules[namespace.__name__] = namespace  # where dataclasses look their fields' types up
    module_spec.loader.exec_module(namespace)
    factory = getattr(namespace, name, None)
    if not callable(factory):
        raise CommandError(f"--model: {path} has no function named {name!r}")
    return factory()


def _logits_width(module: torch.nn.Module, spec: str) -> int:
    """The size of the vocabulary, found by asking the module for the logits of two tokens."""
    with untouched(module, False), torch.no_grad():
        logits = logits_of(module(torch.zeros((1, 2), dtype=torch.int64)))
    shape = tuple(getattr(logits, "shape", ()))
    if len(shape) != 3 or shape[:2] != (1, 2):
        raise CommandError(
            f"--model {spec}: forward must turn token ids [batch, seq] into logits [batch, seq, "
            f"vocabulary]; for ids of shape [1, 2] it gave {shape or type(logits).__name__}"
        )
    return int(shape[-1])


def logits_of(output: Any) -> Any:
    """The logits in what a forward returns: the array, or a field of a transformers output."""
    if isinstance(output, dict):
        return output["logits"]
    if isinstance(output, tuple | list):
        return output[0]
    return getattr(output, "logits", output)
