"""LSTM, GRU, plain RNN and state space layers: one `lax.scan` over time each and direction."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.dtypes import accumulation_dtype, cast, result_dtype
from torch_bridge.lower.random import native_dropout
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import product_dtype


CellStep = Callable[[Any, jax.Array], tuple[Any, jax.Array]]


@dataclass(frozen=True)
class _Weights:
    """One direction of one layer. Shapes: `w_ih (G H, I)`, `w_hh (G H, P)`, `w_hr (P, H)`."""

    w_ih: jax.Array
    w_hh: jax.Array
    b_ih: Any
    b_hh: Any
    w_hr: Any


@dataclass(frozen=True)
class _Options:
    """The trailing arguments that all recurrent operators have in common."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False  # which a packed sequence is not

    @property
    def drops(self) -> bool:
        return bool(self.train and self.dropout > 0.0 and self.num_layers > 1)


def _draws(x: Any, hx: Any, params: Any, *options: Any) -> bool:
    return _Options(*options).drops


def _split(params: Sequence[Any], options: _Options, dtype: Any) -> list[_Weights]:
    """The flat list of weights, one group for each layer and direction in torch's order."""
    groups = options.num_layers * (2 if options.bidirectional else 1)
    each = len(params) // groups
    projected = each > (4 if options.has_biases else 2)
    found = []
    for start in range(0, len(params), each):
        own = [cast(p, dtype) for p in params[start : start + each]]
        w_hr = own.pop() if projected else None
        b_ih, b_hh = (own[2], own[3]) if options.has_biases else (None, None)
        found.append(_Weights(own[0], own[1], b_ih, b_hh, w_hr))
    return found


def _plus(x: jax.Array, bias: Any) -> jax.Array:
    return x if bias is None else x + cast(bias, x.dtype)


def _inputs(x: jax.Array, w: _Weights) -> jax.Array:
    """The input's part of the gates."""
    return _plus(_times(x, w.w_ih, product_dtype(x, w.b_ih)), w.b_ih)


def _gates(h: jax.Array, w: _Weights) -> jax.Array:
    """The state's part of the gates, which are computed in float32: only states are rounded."""
    return _plus(_times(h, w.w_hh, accumulation_dtype(h)), w.b_hh)


def _times(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """`x @ weight.T` without the transpose, as an array of `dtype`."""
    sums = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, sums, preferred_element_type=dtype)


def _lstm_step(w: _Weights) -> CellStep:
    def step(carry: Any, gates: jax.Array) -> tuple[Any, jax.Array]:
        h, c = carry
        hidden = _gates(h, w)
        i, f, g, o = jnp.split(cast(gates, hidden.dtype) + hidden, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cast(c, f.dtype) + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = (jax.nn.sigmoid(o) * jnp.tanh(cell)).astype(h.dtype)
        if w.w_hr is not None:
            h = _times(h, w.w_hr, h.dtype)
        return (h, cell.astype(c.dtype)), h

    return step


def _gru_step(w: _Weights) -> CellStep:
    def step(carry: Any, gates: jax.Array) -> tuple[Any, jax.Array]:
        (h,) = carry
        # The hidden part of `n` is gated by `r`, so it cannot be added to the input's part here.
        hidden = _gates(h, w)
        xr, xz, xn = jnp.split(cast(gates, hidden.dtype), 3, axis=-1)
        hr, hz, hn = jnp.split(hidden, 3, axis=-1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + r * hn)
        h = ((cast(h, n.dtype) - n) * z + n).astype(h.dtype)
        return (h,), h

    return step


def _rnn_step(activation: Callable[[jax.Array], jax.Array]) -> Callable[[_Weights], CellStep]:
    def of(w: _Weights) -> CellStep:
        def step(carry: Any, gates: jax.Array) -> tuple[Any, jax.Array]:
            (h,) = carry
            hidden = _gates(h, w)
            h = activation(cast(gates, hidden.dtype) + hidden).astype(h.dtype)
            return (h,), h

        return step

    return of


def _up_to(step: CellStep) -> Callable[..., Any]:
    """A step that leaves rows alone that have no such position."""

    def masked(carry: Any, now: Any) -> tuple[Any, jax.Array]:
        gates, inside = now
        new, out = step(carry, gates)
        inside = inside[:, None]
        kept = jax.tree.map(lambda new, old: jnp.where(inside, new, old), new, carry)
        return kept, jnp.where(inside, out, 0)

    return masked


def _layers(
    x: jax.Array,
    states: Sequence[jax.Array],
    params: Sequence[Any],
    options: _Options,
    cell: Callable[[_Weights], CellStep],
    key: Any,
    lengths: Any = None,
) -> tuple[jax.Array, list[jax.Array]]:
    """All layers. Shapes: x `(T, N, I)` (or batch first), each state `(layers * dirs, N, H)`.

    Of rows with `lengths (N)`, states stop at a row's end (going back, they begin there), and
    outputs after it are zero.
    """
    dtype = result_dtype(x, *states, *params)
    weights = _split(params, options, dtype)
    directions = 2 if options.bidirectional else 1
    out = cast(jnp.swapaxes(x, 0, 1) if options.batch_first else x, dtype)
    finals: list[tuple[jax.Array, ...]] = []
    for layer in range(options.num_layers):
        if layer and options.drops:
            out, _ = native_dropout(out, options.dropout, True, jax.random.fold_in(key, layer))
        sides = []
        for direction in range(directions):
            number = layer * directions + direction
            w = weights[number]
            initial = tuple(cast(state[number], dtype) for state in states)
            # The input's part of all time steps is one large product outside the loop.
            gates, step = _inputs(out, w), cell(w)
            if lengths is None:
                final, side = jax.lax.scan(step, initial, gates, reverse=direction == 1)
            else:
                inside = jnp.arange(len(out))[:, None] < lengths
                now = gates, inside
                final, side = jax.lax.scan(_up_to(step), initial, now, reverse=direction == 1)
            finals.append(final)
            sides.append(side)
        out = jnp.concatenate(sides, axis=-1) if directions == 2 else sides[0]
    last = [jnp.stack(each) for each in zip(*finals, strict=True)]
    return (jnp.swapaxes(out, 0, 1) if options.batch_first else out), last


@register_operator("aten.lstm.input", draws=_draws)
def lstm(
    x: jax.Array, hx: Sequence[Any], params: Sequence[Any], *options: Any, key: Any = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    out, (h, c) = _layers(x, hx, params, _Options(*options), _lstm_step, key)
    return out, h, c


@register_operator("aten.gru.input", draws=_draws)
def gru(
    x: jax.Array, hx: Any, params: Sequence[Any], *options: Any, key: Any = None
) -> tuple[jax.Array, jax.Array]:
    out, (h,) = _layers(x, [hx], params, _Options(*options), _gru_step, key)
    return out, h


@register_operator("aten.rnn_tanh.input", draws=_draws)
def rnn_tanh(
    x: jax.Array, hx: Any, params: Sequence[Any], *options: Any, key: Any = None
) -> tuple[jax.Array, jax.Array]:
    out, (h,) = _layers(x, [hx], params, _Options(*options), _rnn_step(jnp.tanh), key)
    return out, h


@register_operator("aten.rnn_relu.input", draws=_draws)
def rnn_relu(
    x: jax.Array, hx: Any, params: Sequence[Any], *options: Any, key: Any = None
) -> tuple[jax.Array, jax.Array]:
    out, (h,) = _layers(x, [hx], params, _Options(*options), _rnn_step(jax.nn.relu), key)
    return out, h


_CELLS = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _rnn_step(jnp.tanh),
    "rnn_relu": _rnn_step(jax.nn.relu),
}


def _packed_draws(kind: str, x: Any, lengths: Any, states: Any, params: Any, *options: Any) -> bool:
    return _Options(*options).drops


@register_operator("torch_bridge.packed_rnn.default", draws=_packed_draws)
def packed_rnn(
    kind: str, x: jax.Array, lengths: jax.Array, states: Sequence[Any], params: Sequence[Any],
    *options: Any, key: Any = None,
) -> list[jax.Array]:  # fmt: skip
    """A recurrent layer of any kind for padded rows of several lengths, positions first."""
    of = _Options(*options)
    out, last = _layers(x, states, params, of, _CELLS[kind], key, lengths)
    return [out, *last]


def _cell(step: CellStep, x: jax.Array, w: _Weights, carry: tuple[Any, ...]) -> Any:
    return step(carry, _inputs(x, w))[0]


@register_operator("aten.lstm_cell.default")
def lstm_cell(
    x: jax.Array, hx: Sequence[Any], w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[jax.Array, jax.Array]:
    w = _Weights(w_ih, w_hh, b_ih, b_hh, None)
    h, c = _cell(_lstm_step(w), x, w, tuple(hx))
    return h, c


@register_operator("aten.gru_cell.default")
def gru_cell(
    x: jax.Array, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> jax.Array:
    w = _Weights(w_ih, w_hh, b_ih, b_hh, None)
    return _cell(_gru_step(w), x, w, (hx,))[0]


@register_operator("torch_bridge.linear_recurrence.default")
def linear_recurrence(decay: jax.Array, added: jax.Array) -> jax.Array:
    """States `h_t = decay_t h_{t-1} + added_t` along dim 2, from 0. Shapes: all `(N, C, T, S)`."""

    def step(state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        state = now[0] * state + now[1]
        return state, state

    rows = tuple(jnp.moveaxis(x, 2, 0) for x in (decay, added))
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(rows[1][0]), rows)[1], 0, 2)
