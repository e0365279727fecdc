"""The timeline of a pipeline's step as it ran, in the terms of the simulated one."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from fzero.errors import PipelineError
from fzero.pipeline.execute import Executor, HeldValues
from fzero.schedule.actions import Action
from fzero.schedule.medians import measured
from fzero.schedule.order import Value, gives, needs
from fzero.schedule.simulate import Event, Timeline


# Python's own 5 ms are longer than many an action.
_SWITCH_S = 1e-4


class Recording:
    """When the actions of one step ended; see `recorded`.

    Args:
        executor: what runs the schedule.
    """

    def __init__(self, executor: Executor) -> None:
        self._schedule = executor.schedule
        self._began = self._dispatched = time.perf_counter()
        # Of each action: when the host turned to it, and when its devices had done it.
        self._given: dict[Action, float] = {}
        self._ended: dict[Action, float] = {}
        self._queues: dict[int, queue.SimpleQueue[tuple[Action, Any] | None]] = {}
        self._threads: list[threading.Thread] = []

    def observe(self, action: Action, slots: HeldValues) -> None:
        """Takes note of an action that was dispatched; a thread of its rank waits for it."""
        result = slots.last
        if any(leaf.is_fully_addressable for leaf in jax.tree.leaves(result)):
            self._given[action] = self._dispatched
            self._queue(self._schedule.stage_to_rank[action.stage]).put((action, result))
        self._dispatched = time.perf_counter()

    def finish(self) -> None:
        """Waits for all actions."""
        for own in self._queues.values():
            own.put(None)
        for thread in self._threads:
            thread.join()

    def timeline(self) -> Timeline:
        """The actions of this process's ranks, with their times.

        An action starts when its rank had done the one before it, its inputs were there and the
        host had dispatched it; what it waits beyond that (for a transfer, say) counts as its own.

        Returns:
            The timeline, in seconds from the first start. Its `cost` has the medians of each stage,
            so that `simulate(timeline.schedule, timeline.cost)` is the same step on paper.

        Raises:
            PipelineError: no action was recorded.
        """
        if not self._ended:
            raise PipelineError(
                "timeline: expected one training step within recorded(step), got none"
            )
        ended = self._noted()
        times: dict[Value, float] = {}
        free: dict[int, float] = defaultdict(lambda: self._began)
        events: list[Event] = []
        for action, end in ended.items():
            rank = self._schedule.stage_to_rank[action.stage]
            inputs = [times.get(v, 0.0) for v in needs(action, self._schedule.num_stages)]
            start = min(end, max(free[rank], self._given[action], *inputs))
            times[gives(action)] = free[rank] = end
            events.append(Event(rank, action, start, end))
        first = min(event.start_s for event in events)
        moved = [Event(r, a, start - first, end - first) for r, a, start, end in events]
        moved.sort(key=lambda event: (event.rank, event.end_s))
        return measured(self._schedule, moved)

    def _noted(self) -> dict[Action, float]:
        """When actions ended, in the order of their dispatch.

        On busy cores an end may be noted late, even after that of an action that reads its result:
        then it was no later than that.
        """
        order = [action for action in self._given if action in self._ended]
        made = {gives(action): action for action in order}
        ended, after = dict(self._ended), dict[int, Action]()
        for action in reversed(order):
            rank = self._schedule.stage_to_rank[action.stage]
            if rank in after:
                ended[action] = min(ended[action], ended[after[rank]])
            after[rank] = action
            for value in needs(action, self._schedule.num_stages):
                if value in made:
                    ended[made[value]] = min(ended[made[value]], ended[action])
        return {action: ended[action] for action in order}

    def _queue(self, rank: int) -> queue.SimpleQueue[tuple[Action, Any] | None]:
        if rank not in self._queues:
            own = self._queues[rank] = queue.SimpleQueue()
            thread = threading.Thread(target=self._wait, args=(own,), daemon=True)
            self._threads.append(thread)
            thread.start()
        return self._queues[rank]

    def _wait(self, own: queue.SimpleQueue[tuple[Action, Any] | None]) -> None:
        while (item := own.get()) is not None:
            action, result = item
            with contextlib.suppress(Exception):  # the step itself tells of it
                jax.block_until_ready(result)
            self._ended[action] = time.perf_counter()


@contextlib.contextmanager
def recorded(step: Any) -> Iterator[Recording]:
    """Within it, a pipeline's step is timed: record one that has run before, so nothing compiles.

    Args:
        step: from `fz.train_step` with a plan of several stages.

    Raises:
        PipelineError: the step is no such pipeline.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, fzero as fz
        >>> from fzero.pipeline import recorded, simulate
        >>> block = fz.Stack("s", 2, lambda rng: {"w": jnp.zeros((4, 4))},
        ...                  lambda p, x, ctx: x @ p["w"])
        >>> first = fz.Layer("x", lambda rng: {"w": jnp.ones(4)},
        ...                  lambda p, x, ctx: ctx.batch["x"] * p["w"])
        >>> model = fz.Sequential([first, block], lambda x, batch: jnp.mean(x**2))
        >>> plan, tx = fz.Plan(pipe=2, data=1, microbatches=2), optax.sgd(0.1)
        >>> state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        >>> batch = {"x": np.ones((4, 4), np.float32)}
        >>> state, _ = step(state, batch)
        >>> with recorded(step) as recording:
        ...     state, _ = step(state, batch)
        >>> timeline = recording.timeline()
        >>> len(timeline.events), simulate(timeline.schedule, timeline.cost).makespan_s > 0
        (8, True)
    """
    plan = step.plan
    if plan.pipe == 1:
        raise PipelineError(
            "recorded: expected a pipeline's step (pipe=2 or more), got one with pipe=1"
        )
    executor: Executor = step.executor
    before, recording = executor.observer, Recording(executor)
    executor.observer = recording.observe
    # Threads that wait take note of an end when they get Python's lock: soon.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield recording
    finally:
        sys.setswitchinterval(interval)
        executor.observer = before
        recording.finish()
