"""ZeRO, mixed precision and exact accumulation as pure functions over one immutable state."""

import importlib as _importlib
import types as _types
import typing as _typing

from fzero.axes import Parts as Parts
from fzero.batch import Shared as Shared
from fzero.batch import pad_batch as pad_batch
from fzero.checkpoint.metadata import Checkpoint as Checkpoint
from fzero.checkpoint.metadata import checkpoint as checkpoint
from fzero.checkpoint.restore import restore as restore
from fzero.checkpoint.write import save as save
from fzero.checkpoint.write import wait as wait
from fzero.errors import BatchError as BatchError
from fzero.errors import CheckpointError as CheckpointError
from fzero.errors import ConversionError as ConversionError
from fzero.errors import DivergenceError as DivergenceError
from fzero.errors import FzeroError as FzeroError
from fzero.errors import HostsError as HostsError
from fzero.errors import NonFiniteError as NonFiniteError
from fzero.errors import PipelineError as PipelineError
from fzero.errors import PlacementError as PlacementError
from fzero.errors import PlanError as PlanError
from fzero.errors import PreflightError as PreflightError
from fzero.errors import ScheduleError as ScheduleError
from fzero.errors import StateConsumedError as StateConsumedError
from fzero.errors import StateError as StateError
from fzero.errors import UnusedDevicesWarning as UnusedDevicesWarning
from fzero.exchange.rows import all_rows as all_rows
from fzero.exchange.rows import own_rows as own_rows
from fzero.float8.recipe import Float8 as Float8
from fzero.hosts.join import join as join
from fzero.hosts.world import World as World
from fzero.links import Context as Context
from fzero.links import Layer as Layer
from fzero.links import Mean as Mean
from fzero.links import Stack as Stack
from fzero.losses import CrossEntropy as CrossEntropy
from fzero.losses import cross_entropy as cross_entropy
from fzero.losses import linear_cross_entropy as linear_cross_entropy
from fzero.model import Model as Model
from fzero.model import Sequential as Sequential
from fzero.plan import Plan as Plan
from fzero.plan_values import LossScaling as LossScaling
from fzero.precision import cast as cast
from fzero.preflight.public import preflight as preflight
from fzero.sharding.local_batch import local_batch as local_batch
from fzero.state.comparison import check_finite as check_finite
from fzero.state.comparison import check_same as check_same
from fzero.state.init import abstract_state as abstract_state
from fzero.state.init import init as init
from fzero.state.logical import logical as logical
from fzero.state.offload import offload as offload
from fzero.state.offload import reload as reload
from fzero.state.other_optimizer import eval_params as eval_params
from fzero.state.other_optimizer import with_optimizer as with_optimizer
from fzero.state.phases import Phases as Phases
from fzero.state.phases import enter as enter
from fzero.state.replan import replan as replan
from fzero.state.selection import averaged as averaged
from fzero.state.train_state import Pending as Pending
from fzero.state.train_state import TrainState as TrainState
from fzero.step import accumulate_step as accumulate_step
from fzero.step import eval_step as eval_step
from fzero.step import predict_step as predict_step
from fzero.step import train_step as train_step
from fzero.weight_records import dequantize as dequantize
from fzero.weight_records import quantize as quantize


# Training needs none of these: each is imported when asked for, so that `import fzero` is quick.
if _typing.TYPE_CHECKING:
    from fzero.exchange.attention import attention as attention
    from fzero.exchange.balance import balance_loss as balance_loss
    from fzero.exchange.experts import experts as experts
    from fzero.flax.models import from_flax as from_flax
    from fzero.optimizer.lookahead import lookahead as lookahead
    from fzero.optimizer.per_layer import as_stacked as as_stacked
    from fzero.optimizer.per_layer import per_layer as per_layer
    from fzero.optimizer.small_moments import small_moments as small_moments
    from fzero.preflight.rates import Rates as Rates
    from fzero.preflight.result import Preflight as Preflight
    from fzero.report.description import Description as Description
    from fzero.report.description import describe as describe
    from fzero.report.layout import Layout as Layout
    from fzero.report.layout import layout as layout
    from fzero.report.placement import Placement as Placement
    from fzero.report.placement import placement as placement
_LATE = {
    "Description": "fzero.report.description",
    "Layout": "fzero.report.layout",
    "Placement": "fzero.report.placement",
    "Preflight": "fzero.preflight.result",
    "Rates": "fzero.preflight.rates",
    "as_stacked": "fzero.optimizer.per_layer",
    "attention": "fzero.exchange.attention",
    "balance_loss": "fzero.exchange.balance",
    "describe": "fzero.report.description",
    "experts": "fzero.exchange.experts",
    "from_flax": "fzero.flax.models",
    "layout": "fzero.report.layout",
    "lookahead": "fzero.optimizer.lookahead",
    "per_layer": "fzero.optimizer.per_layer",
    "placement": "fzero.report.placement",
    "small_moments": "fzero.optimizer.small_moments",
}
_own = [name for name, value in globals().items() if not isinstance(value, _types.ModuleType)]
__all__ = [*(name for name in _own if not name.startswith("_")), *_LATE, "pipeline"]

# `dir(fzero)` and `import *`: the public names, not the modules that they are from.
__dir__ = __all__.copy


def __getattr__(name: str) -> object:
    if name in _LATE:
        return getattr(_importlib.import_module(_LATE[name]), name)
    if name == "pipeline":  # a public module
        return _importlib.import_module("fzero.pipeline")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
