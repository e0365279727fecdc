"""Random numbers of a forward: what would come out otherwise than in PyTorch, and how it is drawn.

A converted forward draws from the key that it is given. One that says itself where its numbers come
from is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributions import Dirichlet, Gamma

from fzero.errors import ConversionError
from torch_bridge.export.stand_ins.replacement import StandIn


_NOBODYS = 0x3D6A_91C7_0E52_B84F  # a seed that no forward has


def _refuse_seeds() -> None:
    """Refuse a forward that has seeded PyTorch's generator, by whatever function."""
    if torch.initial_seed() != _NOBODYS:
        raise ConversionError(
            f"the forward calls torch.manual_seed({torch.initial_seed()}), so that it draws the"
            " same numbers in each call: a converted one draws new ones, from the key that it is"
            " given. Draw them once, in __init__, and keep them (register_buffer)."
        )


def _gamma(self: Any, sample_shape: Any = ()) -> torch.Tensor:
    """PyTorch's own raises draws to a number above 0 behind autograd's back."""
    shape = self._extended_shape(torch.Size(sample_shape))
    drawn = torch._standard_gamma(self.concentration.expand(shape)) / self.rate.expand(shape)
    least = drawn.clamp(min=torch.finfo(drawn.dtype).tiny)
    return drawn + (least - drawn).detach()


def _dirichlet(self: Any, sample_shape: Any = ()) -> torch.Tensor:
    """Shares of gammas, where PyTorch's own has a Function for its gradient.

    By logarithms (a gamma of c is one of c + 1 times u^(1/c)), as those of small ones are all 0.
    """
    c = self.concentration.expand(self._extended_shape(torch.Size(sample_shape)))
    u = torch.rand_like(c).clamp(min=torch.finfo(c.dtype).tiny)
    return (torch._standard_gamma(c + 1).log() + u.log() / c).softmax(-1)


_set_rng_state = torch.set_rng_state


@contextlib.contextmanager
def unseeded() -> Iterator[None]:
    """Look after a forward whether it seeded PyTorch's generator; the caller's stays as it was."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(_NOBODYS)
    try:
        yield
        _refuse_seeds()
    finally:
        _set_rng_state(state)


def refuse_own_generator(kwargs: Mapping[str, Any]) -> None:
    """Numbers drawn from a generator that the forward gives."""
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise ConversionError(
            "the forward draws from a torch.Generator of its own, whose state no graph keeps: a"
            " converted one draws from the key that it is given. Leave generator= out, or draw"
            " outside of the module and hand the numbers in."
        )


def _restores(state: torch.Tensor) -> None:
    """PyTorch's own (`fork_rng`, checkpoints) calls it for what comes behind the forward."""
    caller = sys._getframe(2)  # behind what `replaced` puts around this
    if caller.f_code.co_filename.startswith(str(Path(torch.__file__).parent)):
        _refuse_seeds()  # which this would hide
        _set_rng_state(state)
        return
    raise ConversionError(
        "the forward calls torch.set_rng_state, so that it draws the numbers of that state again: a"
        " converted one draws new ones, from the key that it is given. Draw them once, and use them"
        " twice, or keep them (register_buffer)."
    )


def drawn_whole(x: torch.Tensor, *bounds: int, **given: Any) -> torch.Tensor:
    """`x.random_(low, high)`, an argument of which is named `from`, as no code can write it."""
    if not bounds or given:
        return x.random_(*bounds, **given)
    low, high = (0, *bounds)[-2:]
    return x.copy_(torch.randint(low, high, x.shape, device=x.device))


RANDOM_NUMBERS: tuple[StandIn, ...] = (
    *((owner, "set_rng_state", _restores) for owner in (torch, torch.random)),
    (Gamma, "rsample", _gamma),
    (Dirichlet, "rsample", _dirichlet),
)
