"""ZeRO sharding, mixed precision and exact accumulation as pure functions over one immutable state."""

from fzero.errors import BatchError as BatchError
from fzero.errors import CheckpointError as CheckpointError
from fzero.errors import ConversionError as ConversionError
from fzero.errors import FzeroError as FzeroError
from fzero.errors import PlacementError as PlacementError
from fzero.errors import PlanError as PlanError
from fzero.errors import ScheduleError as ScheduleError
from fzero.errors import StateConsumedError as StateConsumedError
from fzero.errors import StateError as StateError
from fzero.model import Context as Context
from fzero.model import Layer as Layer
from fzero.model import Mean as Mean
from fzero.model import Model as Model
from fzero.model import Sequential as Sequential
from fzero.model import Stack as Stack
from fzero.plan import Plan as Plan
from fzero.state import Pending as Pending
from fzero.state import TrainState as TrainState
from fzero.state import abstract_state as abstract_state
from fzero.state import init as init
from fzero.state import logical as logical
from fzero.state import replan as replan
from fzero.step import accumulate_step as accumulate_step
from fzero.step import eval_step as eval_step
from fzero.step import train_step as train_step
