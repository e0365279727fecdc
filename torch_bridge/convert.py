"""`convert`: a PyTorch module becomes pure functions over flat dicts of named arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from fzero.errors import ConversionError
from fzero.tree import leaf_bytes
from torch_bridge.converted import Converted
from torch_bridge.dtypes import is_float
from torch_bridge.export.example import example_tensors, refuse_untraceable
from torch_bridge.export.export import export_both, export_program
from torch_bridge.export.interpret import missing_operators, refuse_data_dependent, refuse_missing
from torch_bridge.export.mode import Mode, build_mode
from torch_bridge.export.stand_ins.capacity import capacity_of
from torch_bridge.export.watch.hooks import refuse_hooks
from torch_bridge.export.watch.modes import warn_of_modes
from torch_bridge.export.watch.questions import warn_of_questions
from torch_bridge.module.adapters import read_adapters
from torch_bridge.module.initial import COPIED_BYTES, on_host, read_initial
from torch_bridge.module.names import Layout, read_layout, refuse_overlaps, refuse_shared
from torch_bridge.module.signature import CallForm
from torch_bridge.module.wrappers import refuse_wrapped, unwrapped
from torch_bridge.structure.blocks import fewest_layers, roll_blocks
from torch_bridge.structure.divide import read_parallel
from torch_bridge.structure.retrace import Again, Graphs
from torch_bridge.structure.stacked_names import Names, stacked_leaves


def convert(
    module: torch.nn.Module,
    *example_args: Any,
    batch_dim: int | None = None,
    roll: bool | int = True,
    buffers: Mapping[str, Any] | None = None,
    train: bool = True,
    masters: bool | None = None,
    copy: bool | None = None,
    capacity: float | None = None,
    padding_side: str | None = None,
    **example_kwargs: Any,
) -> Converted:
    """Convert a PyTorch module for training and evaluation in JAX.

    The module is exported twice, in train and in eval mode, and is left as it was; a submodule in
    another mode than these two give it is named by a `ModeWarning`. Sizes of the
    example stay free where the module allows it; give an example with a batch of at least 2.
    `fixed_dims()` of the result lists those that are not free. Other sizes of these, and a batch
    of 1, are traced when they first come: for that the result keeps a copy of the module, without
    its weights.

    Args:
        module: any `torch.nn.Module`; transformers models are exported without key-value cache.
        *example_args: arguments for its forward: tensors (shapes as in use), and constants, which
            become part of the result.
        batch_dim: the dim of all tensor arguments (where they have it) that has to stay free:
            a module that ties it to the example is refused here, and not at the first call with
            another batch.
        roll: whether blocks that are equal but for their weights become one loop, over parameters
            stacked under names such as `h.*.ln.weight`: three or more in a row, or as many as
            this says. `print(converted.blocks)` shows what was rolled, and why not.
        buffers: values of buffers by `state_dict` name, instead of the module's own. A module on
            the `meta` device needs them for what is in no checkpoint, unless transformers computes
            it (rotary frequencies, positions).
        train: whether the module is trained. With `False` only the forward in eval mode is
            converted, in half the time, and what only the other one has is no reason to refuse
            (random skips, losses that depend on values).
        masters: whether trained parameters of 16 bits are kept as float32, of which every step
            makes its 16 bits (`fz.Plan(precision="bf16")`): a step of 1e-5 does not change a
            bfloat16 of size 1. They are 4 bytes a parameter instead of 2, sharded as the plan says
            from stage 1 on; exports have the module's own dtypes again. `False` keeps and updates
            16 bits. By default there are if the module is trained.
        copy: whether the initial values are copied now. If not, they are read from the module's
            memory when a state is made; a module that was changed in place meanwhile is refused.
            By default modules of up to 256 MiB are copied.
        capacity: in train mode an expert of transformers' mixtures takes at most this times its
            even share of all devices' tokens of a microbatch, the first in order; the share of
            choices that were dropped is the metric `dropped` of every train step. In eval mode,
            and by default, none is dropped, as in PyTorch.
        padding_side: `"right"`: rows are filled up at their end, as tokenizers with
            `padding_side="right"` do. On GPUs fused attention then takes the rows' lengths, and no
            mask of the size of the scores is stored. Every mask is compared with that: a row of
            another kind, such as one that is filled up in front, gives NaN.
        **example_kwargs: keyword arguments for its forward.

    Returns:
        The module as a pure function with its initial values.

    Raises:
        ConversionError: the module cannot be converted without changing what it computes: missing
            operators (all of them, with module paths), data-dependent sizes or control flow,
            custom autograd functions without a rule (`register_function`), Python state or random
            numbers that would be frozen, writes to parameters, float64 without x64; a `capacity`
            of a module without mixtures, a `padding_side` that no attention of the module reads; or
            `batch_dim` is no dim of the example, or cannot be kept free.

    Example:
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> sorted(converted.params)
        ['bias', 'weight']
    """
    min_layers = fewest_layers(roll)
    _require_switches(train=train, masters=masters, copy=copy)
    module = unwrapped(module)
    refuse_untraceable(module)
    warn_of_modes(module)
    warn_of_questions(module)
    args, kwargs = example_tensors((example_args, example_kwargs))
    _require_dim(batch_dim, (args, kwargs))
    keep, padded = train if masters is None else masters, _is_padded(padding_side)
    made = _Making(batch_dim, min_layers, train, keep, copy, padded=padded)
    with capacity_of(module, capacity, train):
        return made.of(module, args, kwargs, lambda layout: read_initial(module, layout, buffers))


def convert_copy(
    converted: Converted,
    change: Callable[[torch.nn.Module], None],
    values: Callable[[Layout], tuple[dict[str, Any], dict[str, Any]]],
) -> Converted:
    """A conversion of the same module, changed.

    Args:
        converted: a conversion; its `base` this becomes.
        change: changes a copy of the module, which has no weights, in place.
        values: initial values of the changed module's leaves, by its layout.

    Raises:
        ConversionError: no copy of the module could be kept, or the changed one is refused.
    """
    again = converted._graphs.again
    module, args, kwargs = again.original()
    change(module)
    both = True in converted._modes
    # Of the module itself it is known that it depends on no state of Python.
    padded = converted._modes[False].call.padded
    made = _Making(
        again.batch_dim or None, again.min_layers, both, converted.masters, None, False, padded
    )
    with again.device:
        found = made.of(module, args, kwargs, values)
    return replace(found, base=converted)


@dataclass(frozen=True)
class _Making:
    """How a module is converted; see `convert`."""

    batch_dim: int | None
    min_layers: int
    train: bool
    masters: bool
    copy: bool | None
    check: bool = True
    padded: bool = False

    @torch.inference_mode(False)
    def of(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        initial: Callable[[Layout], tuple[dict[str, Any], dict[str, Any]]],
    ) -> Converted:
        """The conversion of a module, called as in an example, with initial values by leaf."""
        refuse_untraceable(module)
        if self.train:
            refuse_hooks(module)
        refuse_wrapped(module)
        layout = read_layout(module)
        if self.train:
            refuse_shared(layout)
        values = initial(layout)
        batch_dim = self.batch_dim or 0
        if self.train and self.check:
            programs = export_both(module, args, kwargs, batch_dim)
        else:
            programs = {
                mode: export_program(module, args, kwargs, mode, batch_dim, self.check)
                for mode in ((True, False) if self.train else (False,))
            }
        for program in programs.values():
            refuse_data_dependent(program)
        refuse_missing([missing_operators(program) for program in programs.values()])
        form = partial(CallForm.of, module, args, kwargs, padded=self.padded)
        modes = {
            train: build_mode(program, layout, form(program.call_spec.in_spec))
            for train, program in programs.items()
        }
        refuse_overlaps(layout, {name for mode in modes.values() for name in mode.graph.mutations})
        if self.padded:
            _refuse_unpadded(modes.values())
        rolled, blocks = roll_blocks(programs, modes, layout, self.min_layers)
        again = Again(module, args, kwargs, batch_dim, layout, self.min_layers)
        names = Names(stacked_leaves(layout, blocks.stacks))
        params, buffers = names.stack(values[0]), names.stack(values[1])
        frozen = names.frozen(layout)
        floats = {name: value.dtype for name, value in params.items() if is_float(value.dtype)}
        # Frozen ones follow the others: a graph reads them in the dtype that it was traced in.
        dtypes = {name: dtype for name, dtype in floats.items() if name not in frozen} or floats
        small = sum(map(leaf_bytes, values[0].values())) <= COPIED_BYTES
        copy = small if self.copy is None else self.copy
        converted = Converted(
            frozen,
            layout,
            blocks,
            names,
            read_parallel(module, programs[False], modes[False], layout, names),
            self.masters,
            {name: on_host(value) for name, value in params.items()} if copy else params,
            {name: on_host(value) for name, value in buffers.items()},
            Graphs(modes, rolled, again, dtypes, names),
            read_adapters(module, layout),
        )
        if self.batch_dim is not None:
            _refuse_fixed(converted, self.batch_dim)
        return converted


def _require_switches(**given: bool | None) -> None:
    """Refuse what is no switch: any word counts as True, "no" as well."""
    for name, value in given.items():
        if not isinstance(value, bool | np.bool_) and (value is not None or name == "train"):
            raise ConversionError(
                f"tb.convert({name}={value!r:.60}): expected True or False. A forward's own"
                " argument of that name is given by position"
            )


def _require_dim(batch_dim: Any, example: Any) -> None:
    """Refuse a dim that no argument has: nothing would be kept free."""
    if batch_dim is None:
        return
    leaves = jax.tree.leaves(example)
    most = max((leaf.ndim for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)
    whole = isinstance(batch_dim, int | np.integer) and not isinstance(batch_dim, bool)
    if not whole or not 0 <= batch_dim < most:
        raise ConversionError(
            f"tb.convert(batch_dim={batch_dim!r:.60}): expected a dim of the example's tensors,"
            f" which have {most} at most, counted from 0"
        )


def _is_padded(side: Any) -> bool:
    """Whether rows are declared to end in their padding."""
    if side is None or (isinstance(side, str) and side == "right"):
        return side is not None
    raise ConversionError(
        f'tb.convert(padding_side={side!r:.60}): expected "right", or None where rows are filled up'
        " otherwise: masks are then read as they are. A forward's own argument of that name is"
        " given by position"
    )


def _refuse_unpadded(modes: Iterable[Mode]) -> None:
    """No attention of a module would take the lengths of rows."""
    ops = (op for mode in modes for op in mode.graph.ops)
    if not any("mask_padding" in op.kwargs for op in ops):
        raise ConversionError(
            'tb.convert(padding_side="right"): no scaled_dot_product_attention of the module has a'
            " mask that is computed of sizes and one argument `(rows, positions)`, or the rows'"
            " lengths. Give what says the padding in the example (attention_mask=...), and convert"
            ' a transformers model with attn_implementation="sdpa"; or leave padding_side out'
        )


def _refuse_fixed(converted: Converted, batch_dim: int) -> None:
    fixed = [name for name in converted.fixed_dims() if name.endswith(f"dim {batch_dim}")]
    if fixed:
        raise ConversionError(
            f"batch_dim={batch_dim}: the module ties {', '.join(fixed)} to the size in the example "
            "(a size of 1 always is). Compute with x.shape instead of a number (len(x) is one), "
            "give an example with a batch of at least 2, or leave out batch_dim and convert once "
            "for each size."
        )
