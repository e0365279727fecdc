"""A transformers decoder with its key-value cache as buffers of its own, so that export sees it.

A conversion's graphs were traced without a cache. The module is traced again here, through its own
code for a cache: transformers decides there itself what positions, masks, sliding windows and
biases (ALiBi) are when some keys are of an earlier call. Only where keys and values are kept is
given: each layer's cache is a pair of buffers of the module that computes them, so that equal
blocks have equal caches, and roll into one loop over stacked ones.
"""

# mypy: disable-error-code="misc,no-untyped-call"
# (transformers' classes have no types)
from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from fzero.errors import ConversionError
from torch_bridge.export.export import quiet
from torch_bridge.export.watch.forward import untouched
from torch_bridge.lower import register_operator


KEYS, VALUES = "cached_keys", "cached_values"
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


@torch.library.custom_op("torch_bridge::cache_write", mutates_args=())
def cache_write(cache: torch.Tensor, new: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """A cache `(B, K, S, E)` with new columns `(B, K, T, E)` from `start` on."""
    columns = start + torch.arange(new.shape[2], device=new.device)
    return cache.index_copy(2, columns, new)


@cache_write.register_fake
def _(cache: torch.Tensor, new: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


@register_operator("torch_bridge.cache_write.default")
def write_columns(cache: Any, new: Any, start: Any) -> Any:
    """As above; a slice, which XLA writes in place where the cache is not needed again."""
    return jax.lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), start, axis=2)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a cache and of what is added to it.

    Args:
        rows: prompts.
        new: tokens of a row that are run at once.
        length: tokens of a row that the cache holds.
        prefill: whether the cache is empty before.
    """

    rows: int
    new: int
    length: int
    prefill: bool

    @property
    def seen(self) -> int:
        """How many keys a query may see."""
        return self.new if self.prefill else self.length


def decoder_in(module: torch.nn.Module) -> torch.nn.Module:
    """A decoder itself, of one that PEFT has put adapters into."""
    own: Any = module
    learned = any(getattr(c, "is_prompt_learning", False) for c in _peft_configs(own))
    found = own.get_base_model() if hasattr(own, "get_base_model") and not learned else own
    return found


def _peft_configs(module: Any) -> Sequence[Any]:
    found = getattr(module, "peft_config", None)
    return list(found.values()) if isinstance(found, dict) else ()


def cache_argument(parameters: Collection[str]) -> str | None:
    """The argument of a forward that takes its cache; transformers 5.24 gave it another name."""
    return next((name for name in ("past_key_values", "cache") if name in parameters), None)


def refuse_others(module: torch.nn.Module) -> None:
    """Refuse what has no key-value cache that is handed in.

    Raises:
        ConversionError: names the module and what it lacks.
    """
    own: Any = decoder_in(module)
    name = type(own).__name__
    config = getattr(own, "config", None)
    parameters = inspect.signature(own.forward).parameters
    if config is None or not hasattr(own, "can_generate"):
        reason = "it is no model of transformers, so that it is not known how it takes a cache"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "it has an encoder, whose keys and values would have to be cached as well"
    elif any(getattr(one, "is_prompt_learning", False) for one in _peft_configs(own)):
        reason = "PEFT learns tokens before its prompts"
    elif cache_argument(parameters) is None or "input_ids" not in parameters:
        reason = "its forward takes no `past_key_values`"
    elif not own.can_generate():
        reason = "it gives no logits of a next token (transformers' can_generate() is False)"
    elif getattr(config, "add_cross_attention", False):
        reason = "it attends to another model's states (add_cross_attention)"
    elif not set(_layer_types(config)) <= set(_LAYERS):
        kinds = sorted(set(_layer_types(config)) - set(_LAYERS))
        reason = f"its layers {kinds} keep other things than keys and values"
    elif not getattr(own, "_can_compile_fullgraph", False):
        # Where it is not set, a model may count the keys it sees from the end of the cache.
        reason = "it takes no cache of fixed length (transformers: `_can_compile_fullgraph`)"
    elif not getattr(config, "is_causal", True):
        reason = "its attention is not causal"
    else:
        return
    raise ConversionError(
        f"generate: {name}: {reason}. Expected a decoder of transformers with a head for language"
        " modelling (GPT-2, Llama, Qwen, Gemma, ...)"
    )


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _layer_types(config: Any) -> Sequence[str]:
    text = _text_config(config)
    own = getattr(text, "layer_types", None)
    return own or ["full_attention"] * text.num_hidden_layers


@dataclass(frozen=True)
class Spot:
    """Where a layer's cache is kept.

    Attributes:
        module: path of the module that computes its keys.
        keys: heads and numbers of a token's keys.
        values: likewise.
        dtype: of both.
    """

    module: str
    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype


def find_spots(module: torch.nn.Module) -> tuple[Spot, ...]:
    """The spot of each layer, found by tracing one call.

    Args:
        module: a decoder, which `refuse_others` lets pass; its weights are not read.

    Raises:
        ConversionError: it does not write one pair of keys and values for each layer.
    """
    name = type(module).__name__
    running: list[str] = []
    found: dict[int, list[Spot]] = {}

    def seen(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        own, other = ((x.shape[1], x.shape[3]) for x in (keys, values))
        spot = Spot(running[-1], own, other, keys.dtype)
        found.setdefault(layer, []).append(spot)

    class Seeing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            cache = _cache([_Recorded(n, seen) for n in range(_num_layers(module))])
            return _run(module, ids, mask, None, cache)

    example = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
    try:
        with untouched(module, False), quiet(), _following(module, running):
            torch.export.export(Seeing(), example, strict=False)
    except Exception as error:  # whatever a model raises
        raise ConversionError(
            f"generate: {name} could not be traced with a cache of keys and values:"
            f" {type(error).__name__}: {error}"
        ) from error
    layers = range(_num_layers(module))
    odd = [n for n in layers if len(found.get(n, ())) != 1]
    if odd or len(found) != len(layers):
        raise ConversionError(
            f"generate: {name}: layers {odd or sorted(found)} do not write their own keys and"
            " values to a cache once in a call"
        )
    return tuple(found[n][0] for n in layers)


def _num_layers(module: Any) -> int:
    return len(_layer_types(decoder_in(module).config))


@contextlib.contextmanager
def _following(module: torch.nn.Module, running: list[str]) -> Iterator[None]:
    """The paths of the modules that are running, outermost first, in `running`."""
    handles = []
    for path, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        handles.append(
            child.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layer_class() -> Any:
    from transformers.cache_utils import CacheLayerMixin

    class Layer(CacheLayerMixin):
        """What every layer of a cache answers; a window is what the mask makes of it."""

        is_compileable = True  # so that a mask is made for one token, too
        is_sliding = False

        def __init__(self, length: int, seen: Any, write: Any) -> None:
            super().__init__()
            self.is_initialized = True
            self.length, self.start, self.write = length, seen, write

        def lazy_initialization(self, key_states: Any, value_states: Any) -> None: ...

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return self.write(key_states, value_states)

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.length, 0

        def get_seq_length(self) -> Any:
            return self.start

        def get_max_length(self) -> int:
            return self.length

    return Layer


class _Recorded:
    """What a layer is given, without a cache."""

    def __init__(self, number: int, seen: Any) -> None:
        self.number, self.seen = number, seen

    def layer(self) -> Any:
        def write(keys: Any, values: Any) -> Any:
            self.seen(self.number, keys, values)
            return keys, values

        return _layer_class()(3, 0, write)


class _ModuleCache:
    """A layer's cache in the buffers of a module.

    Args:
        owner: the module.
        sizes: the call's.
        start: tokens in the cache before it.
    """

    def __init__(self, owner: torch.nn.Module, sizes: Sizes, start: torch.Tensor) -> None:
        self.owner, self.sizes, self.start = owner, sizes, start
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None

    def layer(self) -> Any:
        def write(keys: Any, values: Any) -> Any:
            write_to: Any = torch.ops.torch_bridge.cache_write
            self.new = (
                write_to(getattr(self.owner, KEYS), keys, self.start),
                write_to(getattr(self.owner, VALUES), values, self.start),
            )
            return (keys, values) if self.sizes.prefill else self.new

        start = 0 if self.sizes.prefill else self.start
        return _layer_class()(self.sizes.seen, start, write)

    def keep(self) -> None:
        """Write what was added, once the call is over."""
        if self.new is not None:
            getattr(self.owner, KEYS).copy_(self.new[0])
            getattr(self.owner, VALUES).copy_(self.new[1])


def _cache(layers: Sequence[Any]) -> Any:
    from transformers.cache_utils import Cache

    return Cache(layers=[one.layer() for one in layers])


def _run(module: torch.nn.Module, ids: Any, mask: Any, positions: Any, cache: Any) -> torch.Tensor:
    """The logits of each row's last token, `(B, V)`."""
    module = decoder_in(module)
    parameters = inspect.signature(type(module).forward).parameters
    given: dict[str, Any] = {"use_cache": True}
    if (name := cache_argument(parameters)) is not None:
        given[name] = cache
    if positions is not None and "position_ids" in parameters:
        given["position_ids"] = positions
    if "logits_to_keep" in parameters:
        given["logits_to_keep"] = 1
    if "output_router_logits" in parameters:  # for a loss of routers, which needs a whole batch
        given["output_router_logits"] = False
    if "attention_mask" in parameters:
        given["attention_mask"] = mask
    logits: torch.Tensor = type(module).forward(module, input_ids=ids, **given).logits
    return logits[:, -1]


def with_cache(module: torch.nn.Module, spots: Sequence[Spot], sizes: Sizes) -> torch.nn.Module:
    """A decoder whose forward is one call with the cache in its buffers.

    Its arguments are `ids` `(B, T)`, `mask` `(B, keys that may be seen)`, `positions` `(B, T)` and
    `start`, an integer; it gives the logits `(B, V)` after the last token.

    Args:
        module: a copy that nobody else has; it is changed.
        spots: where its caches are.
        sizes: those of the call.
    """
    for spot in spots:
        owner = module.get_submodule(spot.module)
        for name, (heads, size) in ((KEYS, spot.keys), (VALUES, spot.values)):
            # memory that nothing touches: only shapes are read
            empty = torch.empty(sizes.rows, heads, sizes.length, size, dtype=spot.dtype)
            owner.register_buffer(name, empty, persistent=False)
    kind = type(module)

    class Cached(kind):  # type: ignore[valid-type]
        def forward(self, ids: Any, mask: Any, positions: Any, start: Any) -> Any:
            layers = [_ModuleCache(self.get_submodule(spot.module), sizes, start) for spot in spots]
            cache = _cache(layers)
            with _as(self, kind):
                logits = _run(self, ids, mask, positions, cache)
            for one in layers:
                one.keep()
            return logits

    Cached.__name__ = Cached.__qualname__ = kind.__name__
    module.__class__ = Cached
    return module


@contextlib.contextmanager
def _as(module: torch.nn.Module, kind: type) -> Iterator[None]:
    """A module in its own class, which its forward may ask for."""
    cached = module.__class__
    module.__class__ = kind
    try:
        yield
    finally:
        module.__class__ = cached
