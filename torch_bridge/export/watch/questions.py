"""What a forward asks, and is told otherwise than where it runs: whether it is exported (yes), and
whether there are other processes (no).

Libraries ask to leave out what cannot be exported, and compute the same either way. Of what a
user's own code does with the answer nobody knows that.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection

import torch

from fzero.errors import warn
from torch_bridge.export.watch.counts import names_of
from torch_bridge.export.watch.users_code import users_functions


_QUESTIONS = ("is_compiling", "is_exporting")
# Where what is installed lies: libraries ask in functions that no forward leads to.
PACKAGES = frozenset(("site-packages", "dist-packages"))
_AMONG_PROCESSES = frozenset(
    """
    all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single
    broadcast get_rank get_world_size is_initialized reduce_scatter reduce_scatter_tensor
    """.split()  # noqa: SIM905
)


class TracedBranchWarning(UserWarning):
    """A forward asks whether it is compiled or exported, and may compute something else then."""


def warn_of_questions(module: torch.nn.Module) -> None:
    """Say which code of a user's own asks. (Its functions are read: PyTorch's stay as they are.)"""
    for function in users_functions(module):
        names, code = set(names_of(function.__code__)), function.__code__
        where = f"{code.co_filename}:{code.co_firstlineno}: {function.__qualname__} asks"
        for name in sorted(names.intersection(_QUESTIONS)):
            warn(
                f"{where} {name}(), which is true while a forward is exported and false where it"
                " runs: if it computes something else then, the conversion does, too. tb.parity"
                " compares them",
                TracedBranchWarning,
            )
        among = sorted(names & _AMONG_PROCESSES) if _names_distributed(function, names) else []
        if among and not PACKAGES.intersection(code.co_filename.split(os.sep)):
            warn(
                f"{where} torch.distributed ({', '.join(among)}), but a forward is exported as one"
                " process's: what it does among several is left out. For statistics of all rows use"
                " nn.SyncBatchNorm; for a loss across rows, fz.all_rows of what forward gives",
                TracedBranchWarning,
            )


def _names_distributed(function: types.FunctionType, names: Collection[str]) -> bool:
    """Whether a function names PyTorch's module of processes, by whatever name."""
    modules = ["torch.distributed"] if "distributed" in names else []
    for value in map(function.__globals__.get, names):
        if isinstance(value, types.ModuleType):
            modules.append(value.__name__)
        elif isinstance(value, types.FunctionType):
            modules.append(value.__module__)
    return any(module.startswith("torch.distributed") for module in modules)
