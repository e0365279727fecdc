"""Arguments in, outputs out: the module's call signature and its nested containers."""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError


@jax.tree_util.register_pytree_with_keys_class
class Output(dict[str, Any]):
    """What a Hugging Face `ModelOutput` becomes: a dict whose entries are also attributes.

    Indexing with a number gives the n-th entry, as a `ModelOutput` does. It is a JAX pytree.

    Example:
        >>> out = Output(logits=1, loss=2)
        >>> out.logits, out["logits"], out[0]
        (1, 1, 1)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {list(self)}") from None

    def __getitem__(self, key: str | int) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        return [(jax.tree_util.DictKey(k), v) for k, v in self.items()], tuple(self)

    def tree_flatten(self) -> tuple[list[Any], tuple[str, ...]]:
        return list(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], values: Sequence[Any]) -> Output:
        return cls(zip(keys, values, strict=True))


@dataclass(frozen=True)
class CallForm:
    """How the example call was spelled, so that every later call is read the same way."""

    signature: inspect.Signature
    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    spec: torch_pytree.TreeSpec
    padded: bool = False  # rows were declared to end in their padding

    @classmethod
    def of(
        cls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: Any,
        padded: bool = False,
    ) -> CallForm:  # fmt: skip
        """The form of an example call that `torch.export` has flattened to `spec`."""
        signature = inspect.signature(module.forward)
        names = list(_named(signature, bind(signature, args, kwargs)))
        by_position = [n for n in names if n not in kwargs][: len(args)]
        keyword = tuple(_children(spec)[1].context)
        return cls(signature, tuple(by_position), keyword, spec, padded)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The leaves of a call, each with its path, in the order of the exported graph."""
        given = _named(self.signature, bind(self.signature, args, kwargs))
        args_spec, kwargs_spec = _children(self.spec)
        leaves: list[tuple[str, Any]] = []
        named = [
            *zip(self.positional, _children(args_spec), strict=True),
            *zip(self.keyword, _children(kwargs_spec), strict=True),
        ]
        for name, spec in named:
            leaves.extend(_leaves(spec, self._take(name, given), name))
        for name, value in given.items():
            default = self._default(name)
            if value is not default and not _same_constant(value, default):
                raise ConversionError(
                    f"argument `{name}` was not given when the module was converted; "
                    "torch.export recorded the call without it. Convert again with an example."
                )
        return leaves

    def _default(self, name: str) -> Any:
        parameter = self.signature.parameters.get(name)
        return inspect.Parameter.empty if parameter is None else parameter.default

    def _take(self, name: str, given: dict[str, Any]) -> Any:
        value = given.pop(name) if name in given else self._default(name)
        if value is inspect.Parameter.empty:
            expected = ", ".join((*self.positional, *self.keyword))
            raise ConversionError(
                f"argument `{name}` is missing; the module was converted with ({expected})"
            )
        return value


def bind(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Arguments by the names that a forward has for them.

    Raises:
        ConversionError: it takes others.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConversionError(f"the module's forward takes {signature}: {error}") from None


def _children(spec: torch_pytree.TreeSpec) -> list[torch_pytree.TreeSpec]:
    return list(spec.children())


def _named(signature: inspect.Signature, bound: inspect.BoundArguments) -> dict[str, Any]:
    """Bound arguments with `*args` and `**kwargs` spread out under names of their own."""
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}[{i}]": v for i, v in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def _leaves(spec: torch_pytree.TreeSpec, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if spec.is_leaf():
        yield path, value
        return
    children = _children(spec)
    if spec.type in (dict, OrderedDict):
        if not isinstance(value, Mapping) or set(value) != set(spec.context):
            raise ConversionError(_mismatch(path, f"a dict with keys {spec.context}", value))
        for key, child in zip(spec.context, children, strict=True):
            yield from _leaves(child, value[key], f"{path}[{key!r}]")
    elif spec.type in (tuple, list, namedtuple) or _is_namedtuple(spec.type):
        if not isinstance(value, list | tuple) or len(value) != len(children):
            raise ConversionError(_mismatch(path, f"{len(children)} items", value))
        for i, (child, item) in enumerate(zip(children, value, strict=True)):
            yield from _leaves(child, item, f"{path}[{i}]")
    else:
        raise ConversionError(
            f"argument `{path}` is a {spec.type.__name__}; pass tensors, dicts, lists or tuples"
        )


def _mismatch(path: str, expected: str, value: Any) -> str:
    got = f"keys {list(value)}" if isinstance(value, Mapping) else type(value).__name__
    return f"argument `{path}`: expected {expected} as in the example, got {got}"


def _is_namedtuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and kind is not tuple


def _same_constant(value: Any, expected: Any) -> bool:
    if isinstance(value, np.ndarray | jax.Array | torch.Tensor):
        return False
    return bool(type(value) is type(expected) and value == expected)


def check_constant(path: str, value: Any, expected: Any) -> None:
    """Refuse another value for an argument that export baked into the graph.

    Raises:
        ConversionError: `value` is not the example's.
    """
    if not _same_constant(value, expected):
        raise ConversionError(
            f"argument `{path}`: expected {expected!r}, got {value!r}. Arguments that are not "
            "tensors become part of the converted graph; convert once for each value."
        )


def build_output(spec: torch_pytree.TreeSpec, leaves: Sequence[Any]) -> Any:
    """The module's output: its leaves in the containers that the module returns them in.

    Args:
        spec: the output structure as torch recorded it.
        leaves: arrays and constants, in order.

    Returns:
        Tuples, lists, dicts and named tuples as they are, a `ModelOutput` as an `Output`.

    Raises:
        ConversionError: a container that JAX has no equivalent for.
    """
    remaining = iter(leaves)
    built = _build(spec, remaining)
    if next(remaining, remaining) is not remaining:
        raise ConversionError("the graph returned more values than the module's output has")
    return built


def _build(spec: torch_pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    if spec.is_leaf():
        return next(leaves)
    items = [_build(child, leaves) for child in _children(spec)]
    kind: Any = spec.type
    if kind in (tuple, list):
        return kind(items)
    if kind in (dict, OrderedDict):
        return kind(zip(spec.context, items, strict=True))
    named = spec.context if kind is namedtuple else kind
    if _is_namedtuple(named) and not issubclass(named, PackedSequence):
        return named(*items) if hasattr(named, "_fields") else tuple(items)  # torch.return_types
    if isinstance(kind, type) and issubclass(kind, Mapping) and len(spec.context) == len(items):
        return Output(zip(spec.context, items, strict=True))
    raise ConversionError(
        f"the module returns a {getattr(named, '__name__', named)}; return tensors in tuples,"
        " lists, dicts or named tuples (for a key-value cache: use_cache=False)"
    )


def check_output_spec(spec: torch_pytree.TreeSpec) -> None:
    """Refuse an output container at conversion rather than at the first call."""
    build_output(spec, [None] * spec.num_leaves)
