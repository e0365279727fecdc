"""Custom `torch.autograd.Function`s: refused, unless a JAX function stands in for them.

torch.export traces through a Function's forward and forgets its backward. A registered one is
traced as a single operator instead, which the JAX function then computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch.autograd.function import FunctionCtx

from fzero.errors import ConversionError
from torch_bridge.lower.registry import register_operator


Rule = Callable[..., Any]


@dataclass(frozen=True)
class _Tensor:
    """The index of the n-th tensor among the arguments of a call."""

    number: int


@dataclass(frozen=True)
class _Size:
    """The index of the n-th size (known only when the graph runs) among the arguments."""

    number: int


@dataclass
class _FunctionCall:
    """How modules call a registered Function; `single` and `dims` once it was traced."""

    function: Any
    rule: Rule
    args: tuple[Any, ...]
    ranks: tuple[int, ...]  # of its tensors
    single: bool = True
    dims: list[int | None] = field(default_factory=list)  # None: the output is None

    @property
    def key(self) -> Any:
        """What two equal calls share; by its text 1.0 is not 1, and NaN equals itself."""
        return self.function, self.rule, repr(self.args), self.ranks

    def arguments(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
        chosen = {_Tensor: tensors, _Size: sizes}
        return [chosen[type(a)][a.number] if type(a) in chosen else a for a in self.args]


_RULES: dict[type, Rule] = {}


def _bloom_gelu(x: jax.Array) -> jax.Array:
    # Its backward is the derivative of its forward, so nothing has to be said about it.
    return jax.nn.gelu(x, approximate=True)


# Functions of well-known libraries, by name: importing the libraries takes seconds.
_KNOWN: dict[str, Rule] = {"transformers.models.bloom.modeling_bloom.GeLUFunction": _bloom_gelu}
# Graphs name their calls by number, so that a graph holds no class of the user's.
_CALLS: list[_FunctionCall] = []
_NUMBERING = threading.Lock()


def register_function(function: type[torch.autograd.Function], jax_fn: Rule) -> None:
    """Say what computes a custom `torch.autograd.Function` in JAX.

    Args:
        function: the class whose `apply` modules call.
        jax_fn: takes what `apply` takes, with arrays for tensors, and returns what it returns.
            Its gradient is the one that counts: give it a `jax.custom_vjp` where it is not that
            of its own operations.

    Raises:
        TypeError: `function` is not a subclass of `torch.autograd.Function`.

    Example:
        >>> import jax
        >>> import torch_bridge as tb
        >>> class Scaled(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, by):
        ...         ctx.by = by
        ...         return x * by
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * ctx.by, None
        >>> tb.register_function(Scaled, lambda x, by: x * by)
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         return Scaled.apply(x, 2.0)
        >>> converted = tb.convert(Twice(), torch.ones(2, 3))
        >>> float(converted.apply({}, {}, torch.ones(4, 3)).output[0, 0])
        2.0
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise TypeError(f"expected a subclass of torch.autograd.Function, got {function!r}")
    _RULES[function] = jax_fn


@contextlib.contextmanager
def watch_functions() -> Iterator[list[str]]:
    """While a module is exported: trace registered Functions whole, record the names of others."""
    seen: list[str] = []
    base = torch.autograd.Function
    original = base.__dict__["apply"]
    exporting = threading.get_ident()

    def spy(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != exporting:  # another thread trains meanwhile
            return original.__get__(None, cls)(*args, **kwargs)
        if cls in _RULES and not kwargs:
            return _traced(cls, args, _RULES[cls])
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in _KNOWN and not kwargs:
            return _traced(cls, args, _KNOWN[name])
        # The gradients of custom operators and of control flow are made of Functions too, but these
        # are recorded whole: the table of operators decides about them. Where nothing is
        # differentiable (indices, masks; without gradients) there is no backward to lose.
        whole = cls.__module__.startswith(("torch._library.autograd", "torch._higher_order_ops"))
        if not whole and torch.is_grad_enabled() and _differentiable((args, kwargs)):
            seen.append(name)
        return original.__get__(None, cls)(*args, **kwargs)

    base.apply = classmethod(spy)  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        base.apply = original  # type: ignore[method-assign]


def _differentiable(arguments: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return any(t.is_floating_point() or t.is_complex() for t in tensors)


def refuse_functions(names: Sequence[str], mode: str) -> None:
    """Refuse a module whose forward ran Functions that have no rule.

    Raises:
        ConversionError: with the names of all of them.
    """
    if any(name.startswith("torch_bridge.wrap.") for name in names):
        raise ConversionError(
            f"the {mode} forward calls a function made by tb.wrap, which is computed in JAX, where"
            " torch.export sees nothing of it. Write that part in torch operators; or convert what"
            " is before and after it, and call the JAX function itself between them, in the loss"
            " or the model's apply."
        )
    if names:
        found = ", ".join(sorted(set(names)))
        raise ConversionError(
            f"the {mode} forward runs custom torch.autograd.Function(s): {found}. torch.export "
            "records only their forward, so the gradient in JAX would silently differ. Say with "
            "torch_bridge.register_function(Function, jax_fn) what computes each in JAX, or write "
            "the forward in plain torch operators (for checkpointing: use_reentrant=False, or "
            "leave it to the plan's remat), then convert again."
        )


def _traced(cls: Any, args: tuple[Any, ...], rule: Rule) -> Any:
    """Call a registered Function as one operator, which the graph then holds."""
    tensors: list[torch.Tensor] = []
    sizes: list[Any] = []
    template: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            template.append(_Tensor(len(tensors)))
            tensors.append(arg)
        elif isinstance(arg, torch.SymInt):
            template.append(_Size(len(sizes)))
            sizes.append(arg)
        elif arg is None or isinstance(arg, bool | int | float | str | torch.dtype):
            template.append(arg)
        else:
            raise ConversionError(
                f"{cls.__qualname__}.apply got a {type(arg).__name__}; a registered Function takes "
                "tensors, numbers, strings, dtypes and None"
            )
    number = _numbered(_FunctionCall(cls, rule, tuple(template), tuple(x.ndim for x in tensors)))
    made = iter(torch.ops.torch_bridge.function(tensors, sizes, number))
    call = _CALLS[number]
    outputs = tuple(None if dims is None else next(made) for dims in call.dims)
    return outputs[0] if call.single else outputs


def _numbered(call: _FunctionCall) -> int:
    """The number of a call; equal calls have one, so that equal blocks have equal graphs."""
    with _NUMBERING:
        for number, known in enumerate(_CALLS):
            if known.key == call.key:
                return number
        _CALLS.append(call)
        return len(_CALLS) - 1


def _forward(tensors: Sequence[torch.Tensor], sizes: Sequence[Any], call: int) -> list[Any]:
    """Run the Function's own forward, without recording anything for its backward."""
    known = _CALLS[call]
    args = known.arguments(tensors, sizes)
    context: Any = FunctionCtx()
    context.needs_input_grad = tuple(
        isinstance(a, torch.Tensor) and a.is_floating_point() for a in args
    )
    new_style = known.function.setup_context is not torch.autograd.Function.setup_context
    with torch.no_grad():
        out = known.function.forward(*args) if new_style else known.function.forward(context, *args)
    if getattr(context, "dirty_tensors", None):
        raise ConversionError(
            f"{known.function.__qualname__} writes to its arguments (mark_dirty); a registered "
            "Function returns new tensors: write to a copy (x.clone())"
        )
    known.single = not isinstance(out, tuple)
    outputs = (out,) if known.single else out
    known.dims = [None if o is None else o.ndim for o in outputs]
    # An operator's outputs may not be its inputs, nor views of them.
    return [o.clone() for o in outputs if o is not None]


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_LIBRARY.define("function(Tensor[] tensors, SymInt[] sizes, int call) -> Tensor[]")
_LIBRARY.impl("function", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("torch_bridge::function", _forward, lib=_LIBRARY)


@register_operator("torch_bridge.function.default")
def call_rule(tensors: Sequence[Any], sizes: Sequence[int], call: int) -> list[Any]:
    known = _CALLS[call]
    out = known.rule(*known.arguments(tensors, sizes))
    outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
    wanted = [d for d in known.dims if d is not None]
    given = [o for o in outputs if o is not None]
    if [getattr(o, "ndim", None) for o in given] != wanted:
        raise ConversionError(
            f"the JAX rule of {known.function.__qualname__} returned "
            f"{[getattr(o, 'shape', o) for o in given]}; its forward returns {len(wanted)} "
            f"tensor(s) with {wanted} dims"
        )
    return given
