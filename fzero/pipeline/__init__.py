"""Pipeline schedules as data: built, checked, simulated and drawn without a device.

`partition` cuts a model into the stages that a schedule runs.
"""

import importlib
from typing import Any

from fzero.pipeline.actions import Action as Action
from fzero.pipeline.actions import Schedule as Schedule
from fzero.pipeline.builders import eager_one_f_one_b as eager_one_f_one_b
from fzero.pipeline.builders import gpipe as gpipe
from fzero.pipeline.builders import inference as inference
from fzero.pipeline.builders import interleaved as interleaved
from fzero.pipeline.builders import looped_bfs as looped_bfs
from fzero.pipeline.builders import one_f_one_b as one_f_one_b
from fzero.pipeline.check import Proof as Proof
from fzero.pipeline.check import check as check
from fzero.pipeline.draw import draw as draw
from fzero.pipeline.liveness import Slots as Slots
from fzero.pipeline.liveness import slots as slots
from fzero.pipeline.names import BUILDERS as BUILDERS
from fzero.pipeline.names import schedule as schedule
from fzero.pipeline.order import align as align
from fzero.pipeline.plot import plot as plot
from fzero.pipeline.simulate import Cost as Cost
from fzero.pipeline.simulate import Timeline as Timeline
from fzero.pipeline.simulate import simulate as simulate
from fzero.pipeline.zero_bubble import dualpipe_v as dualpipe_v
from fzero.pipeline.zero_bubble import zb_h1 as zb_h1
from fzero.pipeline.zero_bubble import zb_h2 as zb_h2
from fzero.pipeline.zero_bubble import zb_v as zb_v


__all__ = [
    "BUILDERS",
    "Action",
    "Cost",
    "Partition",
    "Piece",
    "Proof",
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
    "schedule",
    "simulate",
    "slots",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


# A schedule is data that plans are made of; a partition is made of models, which lie above plans.
# So what is in `cut` is imported when it is asked for.
_LAZY = ("Partition", "Piece", "partition")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module("fzero.pipeline.cut"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
