"""What a forward asks about being exported: the answer is yes, where PyTorch's own is no.

Libraries ask to leave out what cannot be exported, and compute the same either way. Of what a
user's own code does with the answer nobody knows that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from fzero.errors import warn
from torch_bridge.export.replaced import StandIn


_QUESTIONS = ("is_compiling", "is_exporting", "is_dynamo_compiling")
# Where PyTorch has them under further names.
_OTHER_NAMES = ("torch._dynamo.external_utils", "torch._utils")
_INSTALLED = ("site-packages", "dist-packages")


class TracedBranchWarning(UserWarning):
    """A forward asks whether it is compiled or exported, and may compute something else then."""


def questions() -> tuple[StandIn, ...]:
    """While a module is exported: the questions of `torch.compiler`, and a word if one is asked."""
    return tuple((torch.compiler, name, _told(name)) for name in _QUESTIONS)


def _told(name: str) -> Callable[[], bool]:
    own = getattr(torch.compiler, name)

    def asked() -> bool:
        answer, frame = bool(own()), sys._getframe(2)  # behind what `replaced` puts around this
        if frame.f_globals.get("__name__") in _OTHER_NAMES and frame.f_back is not None:
            frame = frame.f_back
        file = frame.f_code.co_filename
        if answer and not file.startswith("<") and not any(x in file for x in _INSTALLED):
            warn(
                f"{file}:{frame.f_lineno}: the forward asks torch.compiler.{name}(), which is true"
                " while it is exported and false where it runs: if it computes something else then,"
                " the conversion does, too. tb.parity compares them",
                TracedBranchWarning,
            )
        return answer

    return asked
