"""A Lightning module's steps as its forward, so that they can be exported like any other.

While a module is traced its class is a subclass in which `forward` is the step of its mode, `log`
keeps what it is given, and everything that belongs to a trainer says that there is none.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from fzero.errors import ConversionError
from torch_bridge.export.stand_ins.replacement import as_class
from torch_bridge.lightning.hooks import own_method


# Names that fzero's steps report themselves.
_RESERVED = ("loss", "count", "grad_norm", "nonfinite", "skipped", "loss_scale")

_METHODS = (
    "optimizers",
    "lr_schedulers",
    "manual_backward",
    "toggle_optimizer",
    "untoggle_optimizer",
    "toggled_optimizer",
    "clip_gradients",
    "all_gather",
)
_VALUES = (
    "trainer",
    "fabric",
    "logger",
    "loggers",
    "current_epoch",
    "global_step",
    "global_rank",
    "local_rank",
)


@contextlib.contextmanager
def as_steps(module: torch.nn.Module, eval_loss: str | None) -> Iterator[None]:
    """Meanwhile, calling the module with a batch runs the step of its mode.

    The call returns `{"loss": scalar, "logs": {name: scalar}}`.

    Args:
        module: the module; its class is put back.
        eval_loss: the logged value that is the loss of `validation_step`.
    """
    with as_class(module, _TracedSteps(type(module), eval_loss).attributes(module)):
        yield


@contextlib.contextmanager
def as_prediction(module: torch.nn.Module) -> Iterator[None]:
    """Meanwhile, calling the module with a batch runs its `predict_step`.

    One that has none runs its forward with the batch, which is Lightning's default.

    Args:
        module: the module; its class is put back.

    Raises:
        ConversionError: it has neither.
    """
    kind = type(module)
    if own_method(kind, "predict_step") is None and own_method(kind, "forward") is None:
        raise ConversionError(
            f"{kind.__name__} has no predict_step(batch, batch_idx) and no forward: write one"
        )
    with as_class(module, _Prediction(kind, None).attributes(module)):
        yield


@contextlib.contextmanager
def with_trainer(module: torch.nn.Module, trainer: Any) -> Iterator[None]:
    """Meanwhile, the module's `trainer` is another object."""
    with as_class(module, {"trainer": trainer}):
        yield


class _BatchIndex:
    """Stands for `batch_idx`, whose value a graph would keep."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConversionError(
            "the step uses the value of batch_idx, which would be a constant of the converted"
            " graph. Leave it out of what is computed, or put it into the batch"
        )

    __bool__ = __index__ = __int__ = __float__ = __len__ = __iter__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = _refuse
    __str__ = __repr__ = __format__ = _refuse


class _TracedSteps:
    """What the class of a module has while its steps are traced.

    Args:
        kind: its class.
        eval_loss: see `as_steps`.
    """

    def __init__(self, kind: type, eval_loss: str | None) -> None:
        self.kind, self.eval_loss = kind, eval_loss
        # What the step that runs now has logged; None between steps.
        self.logs: dict[str, Any] | None = None

    def attributes(self, module: Any) -> dict[str, Any]:
        """Attributes of the subclass."""
        found: dict[str, Any] = {name: _refused(name) for name in _METHODS}
        found |= {name: property(_refused(name)) for name in _VALUES}
        found |= {"print": lambda *_, **__: None}
        # A module may have something of its own by such a name.
        found = {
            name: value
            for name, value in found.items()
            if name not in vars(module) and own_method(self.kind, name) is None
        }

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.logs is not None:  # called by the step: this is the module's own
                return self.kind.forward(module, *args, **kwargs)  # type: ignore[attr-defined]
            return self.run(module, *args, **kwargs)

        def log(
            module: Any, name: str, value: Any, prog_bar: bool = False, logger: Any = None,
            on_step: Any = None, on_epoch: Any = None, reduce_fx: Any = "mean", **_: Any,
        ) -> None:  # fmt: skip
            self.log(name, value, reduce_fx)

        def log_dict(module: Any, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            for name, value in dictionary.items():
                log(module, name, value, *args, **kwargs)

        # What export, and later every call, sees of the signature.
        names = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                 for n in ("self", "batch")]  # fmt: skip
        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        return found | {"forward": forward, "log": log, "log_dict": log_dict}

    def log(self, name: str, value: Any, reduce_fx: Any) -> None:
        """Keep a logged value."""
        if reduce_fx not in ("mean", torch.mean):
            raise ConversionError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): metrics are means over devices and"
                " microbatches; log a mean"
            )
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ConversionError(
                    f"self.log({name!r}): expected one number, got shape {tuple(value.shape)}"
                )
        elif isinstance(value, torch.SymInt | torch.SymFloat):  # x.shape[0]
            value = torch.scalar_tensor(value)  # type: ignore[arg-type]
        elif not isinstance(value, int | float):
            raise ConversionError(
                f"self.log({name!r}): expected a tensor or a number, got a {type(value).__name__};"
                " metric objects keep state from step to step. Log the value for this batch, as a"
                " tensor"
            )
        assert self.logs is not None, "log is called by a step"
        self.logs[name] = value

    def call(self, step: Any, name: str, batch: Any) -> tuple[Any, dict[str, Any]]:
        """What a step returns, and what it logs."""
        self.logs = {}
        try:
            return step(batch, *_more_arguments(step, name)), self.logs
        finally:
            self.logs = None

    def run(self, module: Any, batch: Any) -> Any:
        """The step of the module's mode."""
        name = "training_step"
        if not module.training and own_method(self.kind, "validation_step"):
            name = "validation_step"
        out, logs = self.call(getattr(module, name), name, batch)
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if name == "validation_step" and (self.eval_loss or not isinstance(loss, torch.Tensor)):
            loss = self._logged_loss(logs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ConversionError(
                f"{name}: expected a scalar loss, or a dict with one as 'loss', got {what:.80}"
            )
        return {"loss": loss.reshape(()), "logs": _metrics(logs, loss)}

    def _logged_loss(self, logs: Mapping[str, Any]) -> Any:
        """What a validation step logs as its loss, where it does not return one."""
        named = [self.eval_loss] if self.eval_loss else [n for n in logs if "loss" in n.lower()]
        if len(named) != 1 or named[0] not in logs:
            raise ConversionError(
                f"validation_step: which of what it logs is its loss? It logs {list(logs)}; return"
                " the loss, or say with eval_loss="
            )
        return torch.as_tensor(logs[named[0]])


class _Prediction(_TracedSteps):
    """The same for `predict_step`; what it logs is nobody's metric."""

    def run(self, module: Any, batch: Any) -> Any:
        """What it gives for a batch."""
        if own_method(self.kind, "predict_step") is not None:
            return self.call(module.predict_step, "predict_step", batch)[0]
        return self.call(lambda rows: module(rows), "forward", batch)[0]


def _more_arguments(step: Any, name: str) -> list[Any]:
    """What a step takes besides its batch: `batch_idx`, under any name."""
    first, *more = inspect.signature(step).parameters.values()
    if first.name == "dataloader_iter":
        raise ConversionError(
            f"{name} takes dataloader_iter; a pure step takes a batch: write"
            f" {name}(batch, batch_idx)"
        )
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    index: list[Any] = [_BatchIndex()] if more and more[0].kind not in keyword else []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = [
        parameter.name
        for parameter in more[len(index) :]
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variable
    ]
    if unknown:
        raise ConversionError(
            f"{name} takes {unknown} besides batch and batch_idx; a pure step has one batch. Give"
            " them defaults (dataloader_idx=0), or put them into the batch"
        )
    return index


def _metrics(logs: Mapping[str, Any], loss: torch.Tensor) -> dict[str, Any]:
    """Logged values as scalars that no gradient flows through."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        if name == "loss" and value is loss:
            continue  # steps report it themselves
        key = f"logged_{name}" if name in _RESERVED else name
        tensor = isinstance(value, torch.Tensor)
        found[key] = value.detach().reshape(()) if tensor else float(value)
    return found


def _refused(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ConversionError(
            f"the step uses self.{name}: there is no trainer around a pure step, and what it said"
            " would be a constant of the converted graph. Put what changes into the batch or a"
            " buffer (register_buffer), and do the rest outside of the step"
        )

    return refuse
