"""The training loop: evaluate, step, evaluate, on one state from beginning to end."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from fzero import CheckpointError
from torch_bridge.run.figures.gauge import Gauge
from torch_bridge.run.figures.progress import Display
from torch_bridge.run.figures.timings import Timings, write_line
from torch_bridge.run.figures.writers import Writer
from torch_bridge.run.hosts import Feed
from torch_bridge.run.interrupt import StopOnInterrupt
from torch_bridge.run.settings import TrainSettings


TrainStep = Callable[[Any, Any], tuple[Any, dict[str, Any]]]
EvalStep = Callable[[Any, Any], dict[str, Any]]


@dataclass
class History:
    """What was measured, in order; every entry is also a line of metrics.jsonl."""

    losses: list[tuple[int, float]] = field(default_factory=list)  # (steps done, nats per token)
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens: int = 0  # trained on, without what only fills rows up
    tokens_per_s: float | None = None
    interrupted: bool = False
    stopped_by: str = ""

    @property
    def steps_done(self) -> int:
        return self.losses[-1][0] if self.losses else 0


class _Meter:
    """Tokens per second of the training steps alone: compilation and evaluations do not count."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def count(self, tokens: int) -> None:
        if self._started is not None:
            self._tokens += tokens

    @property
    def rate(self) -> float | None:
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        seconds = self._seconds + running
        return self._tokens / seconds if self._tokens and seconds else None


class Recorder:
    """Takes the metrics of each step as device values and reads them one step late.

    Reading a metric waits for its step. Doing so only when the next step has been dispatched keeps
    the devices busy, and keeps at most two steps in flight.

    Args:
        sink: takes the lines of metrics.jsonl.
        display: shows steps.
        history: of the run that this one goes on with.
        gauge: what to show of the devices.
        timings: takes note of what took how long.
        writers: take what is measured, too.
    """

    def __init__(
        self,
        sink: TextIO,
        display: Display,
        history: History,
        gauge: Gauge,
        timings: Timings,
        writers: Sequence[Writer],
    ) -> None:
        self.history, self.timings = history, timings
        self._sink, self._display, self._gauge, self._writers = sink, display, gauge, writers
        self._compiled = False
        self._meter = _Meter()
        self._pending: tuple[int, dict[str, Any], int] | None = None

    def step(self, done: int, metrics: dict[str, Any], tokens: int) -> None:
        """Step number `done` (from 1), on so many tokens, was dispatched."""
        self._read_pending()
        self._pending = (done, metrics, tokens)
        if not self._compiled:
            # The first step compiles; the clock starts when it is over.
            self._read_pending()
            self._meter.start()
            self._compiled = True
        elif all(value.is_ready() for value in metrics.values()):
            self._read_pending()  # nobody waits: where steps are not dispatched, but run

    def validation(self, done: int, loss: float) -> None:
        """After `done` steps the validation loss was `loss`."""
        self.timings.done("validation", done)
        self.history.validation.append((done, loss))
        write_line(self._sink, {"step": done, "val_loss": _finite(loss)})
        self._tell(done, {"val_loss": loss})
        self._display.line(f"step {done}  validation loss {loss:.6f}")

    def say(self, text: str) -> None:
        """Shows a line that is no measurement."""
        self._display.line(text)

    def pause(self) -> None:
        """Waits for the last step and stops the clock."""
        self._read_pending()
        self._meter.stop()
        self.history.tokens_per_s = self._meter.rate

    def resume(self) -> None:
        """Starts the clock again."""
        self._meter.start()

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        done, metrics, tokens = self._pending
        self._pending = None
        values = {name: float(value) for name, value in metrics.items() if value.ndim == 0}
        self.timings.done("step" if self._compiled else "first step", done)
        self._meter.count(tokens)
        self.history.tokens += tokens
        self.history.losses.append((done, values["loss"]))
        finite = {name: _finite(value) for name, value in values.items()}
        write_line(self._sink, {"step": done} | finite | {"tokens": tokens})
        rate = self._meter.rate
        self._tell(done, values | self._gauge.figures(rate))
        self._display.step(done, values["loss"], rate, self._gauge.words(rate))

    def _tell(self, done: int, values: dict[str, float]) -> None:
        for writer in self._writers:
            writer(done, values)


def evaluate_state(eval_step: EvalStep, state: Any, feed: Feed, batch: int) -> float:
    """The validation loss in nats per predicted token; an exact mean for any batch size."""
    total = count = 0.0
    dispatched = (eval_step(state, rows) for rows in feed.validation(batch))
    # One batch ahead of what is read: the devices stay busy, and never more than two programs are
    # queued.
    for metrics, _ahead in itertools.pairwise(itertools.chain(dispatched, [{}])):
        tokens = float(metrics["count"])
        total += float(metrics["loss"]) * tokens
        count += tokens
    return total / count


def fit(
    state: Any,
    train_step: TrainStep,
    loss_of: Callable[[Any], float],
    feed: Feed,
    recorder: Recorder,
    stop: StopOnInterrupt,
    settings: TrainSettings,
    save: Callable[[Any, int], None],
) -> Any:
    """Trains `state`; returns the one reached after all steps, or at a Ctrl-C or SIGTERM.

    The validation loss is taken before the first step, every `eval_every` steps (0: never in
    between) and of the state that is returned. Every `save_every` steps (0: never), and at a
    Ctrl-C, the state is saved. The recorder's history says how many steps there have been.

    Args:
        state: with the parameters to begin with.
        train_step: of it.
        loss_of: the validation loss of a state.
        feed: what it is trained on.
        recorder: takes what is measured.
        stop: says when to stop early.
        settings: the run.
        save: keeps a state after so many steps.
    """
    history, num_steps = recorder.history, settings.steps
    eval_every, save_every = settings.eval_every, settings.save_every

    def validate() -> None:
        recorder.validation(done, loss_of(state))
        recorder.timings.placed(state, done)

    done = history.steps_done
    validated = history.validation[-1][0] if history.validation else None
    if validated is None or (eval_every and done % eval_every == 0 and validated != done):
        validate()
    stop.agree()
    while done < num_steps and not stop.agreed:
        which = settings.seed, done, settings.batch
        state, metrics = train_step(state, feed.train(*which))
        done += 1
        recorder.step(done, metrics, feed.corpus.num_tokens(*which))
        stop.agree()
        if done == num_steps or stop.agreed:
            break
        validates, saves = (every and done % every == 0 for every in (eval_every, save_every))
        if validates or saves:
            recorder.pause()
            if validates:
                validate()
            if saves:  # after its metrics: whatever resumes from it finds them
                _save(save, state, done, recorder)
            recorder.resume()
    recorder.pause()
    history.interrupted = bool(stop.agreed) and done < num_steps
    history.stopped_by = stop.agreed
    if history.interrupted:
        recorder.say(
            f"{stop.agreed}: stopped after step {done}; validating, then writing what was "
            f"reached ({stop.agreed} again: end at once and write nothing)"
        )
        _save(save, state, done, recorder)
    if history.validation[-1][0] != done:
        validate()
    return state


def _save(save: Callable[[Any, int], None], state: Any, done: int, recorder: Recorder) -> None:
    """Saves; a full disk is no reason to lose the run as well."""
    try:
        save(state, done)
    except CheckpointError as error:
        recorder.say(f"step {done}  no checkpoint: {error}")
    recorder.timings.done("checkpoint", done)


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: null stands for both."""
    return value if math.isfinite(value) else None
