"""Whether there are gradients, as a forward asks in evaluation.

That is traced as training is, with gradients on: they may be taken of it. PyTorch evaluates within
`torch.no_grad()`, as a rule, and gives the other answer there.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fzero.errors import warn
from torch_bridge.export.watch.questions import PACKAGES, TracedBranchWarning


# Of a tensor: what it is asked, by its getter. Leaves (parameters, inputs) answer the same.
_GETTERS: dict[Any, str] = {
    getattr(torch.Tensor, name).__get__: name for name in ("requires_grad", "grad_fn", "is_leaf")
}


@contextlib.contextmanager
def gradients_asked(training: bool) -> Iterator[dict[Any, Callable[..., Any]]]:
    """Names the lines of a user's own code that ask, in evaluation.

    Args:
        training: whether it is not evaluation that is traced.

    Yields:
        What stands for the getters of tensors.
    """
    enabled, exporting = torch.is_grad_enabled, threading.get_ident()

    def are_enabled() -> bool:
        answer = enabled()
        # (torch.cond and the like are traced by PyTorch's compiler, which knows only the question.)
        silent = torch.compiler.is_dynamo_compiling() or threading.get_ident() != exporting
        if answer and not silent:
            _note("torch.is_grad_enabled()", sys._getframe(1))
        return answer

    def told(getter: Any, name: str) -> Callable[[Any], Any]:
        def get(x: torch.Tensor) -> Any:
            if x.requires_grad and not x.is_leaf:
                frame: Any = sys._getframe(1)
                while frame.f_code.co_name == "__torch_function__":  # modes, torch.export's too
                    frame = frame.f_back
                _note(f"a tensor's {name}", frame)
            return getter(x)

        return get

    if training:
        yield {}
        return
    torch.is_grad_enabled = are_enabled
    try:
        yield {getter: told(getter, name) for getter, name in _GETTERS.items()}
    finally:
        torch.is_grad_enabled = enabled


def _note(what: str, frame: types.FrameType) -> None:
    """Warns of the line that asks, if it is no library's."""
    code, line = frame.f_code, frame.f_lineno
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package in ("torch", "torch_bridge") or PACKAGES.intersection(Path(code.co_filename).parts):
        return
    said = linecache.getline(code.co_filename, line).strip()
    warn(
        f"{code.co_filename}:{line}: {code.co_qualname} asks {what} in evaluation (`{said}`): there"
        " are gradients while a forward is exported, and none within torch.no_grad(): if it"
        " computes something else then, the conversion does not. Ask self.training",
        TracedBranchWarning,
    )
