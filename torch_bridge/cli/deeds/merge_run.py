"""`fzero merge`: from a model and an adapter to a model."""

from __future__ import annotations

from pathlib import Path

import torch_bridge as tb
from torch_bridge.cli import devices, models
from torch_bridge.cli.errors import CommandError
from torch_bridge.cli.flags.settings import HF_PREFIX
from torch_bridge.cli.run import outputs
from torch_bridge.formats.content import Checkpoint
from torch_bridge.formats.peft import is_adapter
from torch_bridge.formats.write import write
from torch_bridge.module.lazy_tensor import in_memory


# Lengths are free in the conversion's graph, which is not run.
_EXAMPLE = 8


def merge(spec: str, adapter: Path, out: Path, undo: bool, overwrite: bool) -> None:
    """Writes `out`; see `fzero merge`.

    Raises:
        CommandError: there is no such model or adapter, or `out` is one of them or holds something.
        CheckpointError: the adapter is of another model, or more than low-rank updates.
    """
    directory = Path(spec.removeprefix(HF_PREFIX)).expanduser()
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
            whole = tb.state_dict(converted, converted.params)
            found = tb.unmerge(adapted, whole, adapted.params)
            ties = {
                alias: leaf.saved_name
                for leaf in converted.layout.leaves
                for alias in leaf.names
                if alias != leaf.saved_name
            }
            kept = {n: in_memory(n, t) for n, t in found.items() if n not in ties}
            content = Checkpoint(
                "", "state", kept, ties={a: n for a, n in ties.items() if n in kept}
            )
            write(content, scratch / outputs.WEIGHTS, "safetensors")
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
