"""Pipeline schedules as data: built, checked, simulated and drawn without a device.

`partition` cuts a model into the stages that a schedule runs. All of that is in `fzero.schedule`
and `fzero.sharding.stages`; in this folder is what runs a schedule in a step:

- `execute` runs it, by `programs` of each stage; `stage_inputs`: between the state and the stages.
- `recording` (`recorded`): when each action ran.
"""

import importlib
from typing import Any

from fzero.schedule.actions import Action as Action
from fzero.schedule.actions import Schedule as Schedule
from fzero.schedule.builders import eager_one_f_one_b as eager_one_f_one_b
from fzero.schedule.builders import gpipe as gpipe
from fzero.schedule.builders import inference as inference
from fzero.schedule.builders import interleaved as interleaved
from fzero.schedule.builders import looped_bfs as looped_bfs
from fzero.schedule.builders import one_f_one_b as one_f_one_b
from fzero.schedule.check import Proof as Proof
from fzero.schedule.check import check as check
from fzero.schedule.draw import draw as draw
from fzero.schedule.liveness import Slots as Slots
from fzero.schedule.liveness import slots as slots
from fzero.schedule.names import BUILDERS as BUILDERS
from fzero.schedule.names import schedule as schedule
from fzero.schedule.order import align as align
from fzero.schedule.plot import plot as plot
from fzero.schedule.simulate import Cost as Cost
from fzero.schedule.simulate import Timeline as Timeline
from fzero.schedule.simulate import simulate as simulate
from fzero.schedule.zero_bubble import dualpipe_v as dualpipe_v
from fzero.schedule.zero_bubble import zb_h1 as zb_h1
from fzero.schedule.zero_bubble import zb_h2 as zb_h2
from fzero.schedule.zero_bubble import zb_v as zb_v


__all__ = [
    "BUILDERS",
    "Action",
    "Cost",
    "Partition",
    "Piece",
    "Proof",
    "Recording",
    "Schedule",
    "Slots",
    "Timeline",
    "align",
    "check",
    "draw",
    "dualpipe_v",
    "eager_one_f_one_b",
    "gpipe",
    "inference",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "partition",
    "plot",
    "recorded",
    "schedule",
    "simulate",
    "slots",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


# A schedule is data that plans are made of; a partition is made of models, which lie above plans.
# So what is above is imported when it is asked for.
_LAZY = dict.fromkeys(("Partition", "Piece", "partition"), "fzero.sharding.stages")
_LAZY |= dict.fromkeys(("Recording", "recorded"), "fzero.pipeline.recording")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
