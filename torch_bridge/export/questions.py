"""What a forward asks about being exported: the answer is yes, where PyTorch's own is no.

Libraries ask to leave out what cannot be exported, and compute the same either way. Of what a
user's own code does with the answer nobody knows that.
"""

from __future__ import annotations

import torch

from fzero.errors import warn
from torch_bridge.export.counts import names_of
from torch_bridge.export.users_code import users_functions


_QUESTIONS = ("is_compiling", "is_exporting")


class TracedBranchWarning(UserWarning):
    """A forward asks whether it is compiled or exported, and may compute something else then."""


def warn_of_questions(module: torch.nn.Module) -> None:
    """Say which code of a user's own asks. (Its functions are read: PyTorch's stay as they are.)"""
    for function in users_functions(module):
        asked = set(_QUESTIONS).intersection(names_of(function.__code__))
        for name in sorted(asked):
            code = function.__code__
            warn(
                f"{code.co_filename}:{code.co_firstlineno}: {function.__qualname__} asks {name}(),"
                " which is true while a forward is exported and false where it runs: if it computes"
                " something else then, the conversion does, too. tb.parity compares them",
                TracedBranchWarning,
            )
