"""What `fzero train` and `fzero eval` do, from checked settings to the written directory."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fzero as fz
import torch_bridge as tb
from fzero.hosts.agree import require_same
from torch_bridge.run import about, check, data, devices, hosts, models, outputs, plot, resume
from torch_bridge.run.corpus import Source
from torch_bridge.run.errors import CommandError
from torch_bridge.run.figures.gauge import Gauge, gauge_of
from torch_bridge.run.figures.progress import display
from torch_bridge.run.figures.timings import timings
from torch_bridge.run.figures.writers import open_writers
from torch_bridge.run.interrupt import EXIT_INTERRUPTED, StopOnInterrupt
from torch_bridge.run.loop import History, Recorder, evaluate_state, fit
from torch_bridge.run.models import LoadedModel
from torch_bridge.run.plan_file import made_by_optax
from torch_bridge.run.resume import Saver
from torch_bridge.run.settings import EvalSettings, TrainSettings, check_batch
from torch_bridge.run.tasks import Pretraining, Task, Trained


WARMUP_SHARE = 0.05
# Where the cosine ends, as a share of the peak: low enough to settle, not so low that the last
# steps are idle.
FINAL_SHARE = 0.1
# Sequences whose logits are compared with PyTorch's.
COMPARED_ROWS = 4


@dataclass(frozen=True)
class _Job:
    """A model brought into JAX, with its text and the layout of its state."""

    loaded: LoadedModel
    corpus: Source
    rows: int  # sequences that a device sees at once
    converted: tb.Converted
    model: fz.Model
    plan: fz.Plan


def train(settings: TrainSettings, task: Task) -> int:
    """Trains, writes `settings.out`, and returns the exit status.

    Args:
        settings: the run.
        task: what is trained, and on what.

    Raises:
        CommandError: something that was asked for cannot be done; nothing was trained.
    """
    with StopOnInterrupt() as stop:
        return _train(settings, task, stop)


def _train(settings: TrainSettings, task: Task, stop: StopOnInterrupt) -> int:
    world = hosts.join(settings)
    if world.process_id == 0 and not settings.resume:
        outputs.check(settings.out, settings.overwrite)
    # Before a checkpoint is looked for: that starts jax, with the devices it was given by then.
    num_devices = _devices(settings)
    checkpoint = resume.newest(settings.out) if settings.resume else None
    begun = settings.resume and checkpoint is None
    settings = replace(settings, resume=checkpoint is not None)
    own = hosts.own(settings, world)
    plan = settings.plan(num_devices)
    rows, tx = check_batch(settings.batch, plan), optimizer(settings)
    job = _prepare(task, task.load(settings), plan, rows)
    saver, history = Saver(settings, plan, job.corpus.whole), History()
    require_same("fzero train", saver.run)
    if checkpoint is not None:
        saver.require_same(checkpoint)
        state = fz.restore(saver.folder, job.model, tx, plan, number=checkpoint.number)
        history = resume.rewind(own.out, checkpoint.step, settings.eval_every)
    else:
        state = fz.init(job.model, tx, plan, settings.seed)
        stop.leave_if_asked()
        if world.process_id == 0:
            _begin(settings, saver.folder)
    with (
        display(settings.steps) as shown,
        (own.out / outputs.METRICS).open("a" if settings.resume else "w", encoding="utf-8") as sink,
        timings(own.out / outputs.TIMINGS, settings.resume) as times,
        open_writers(own.log, own.out, settings.to_json()) as writers,
    ):
        for line in _describe(job, num_devices):
            shown.line(line)
        if begun:
            shown.line("--resume: the run was ended before its first checkpoint; it begins anew")
        if checkpoint is not None:
            shown.line(f"resumed after step {checkpoint.step} of {settings.steps}")
        gauge = _gauge(settings, job, state, num_devices)
        if world.process_id == 0 and not settings.resume:
            about.write(own.out, job.model, tx, plan, num_devices, gauge)
        recorder = Recorder(sink, shown, history, gauge, times, writers)
        train_step, eval_step = fz.train_step(job.model, tx, plan), fz.eval_step(job.model, plan)
        feed = hosts.Feed(job.corpus, fz.layout(job.model, tx, plan))
        state = fit(
            state,
            about.Observed(train_step, own.out, settings.steps),
            partial(evaluate_state, eval_step, feed=feed, batch=_eval_batch(job)),
            feed,
            recorder,
            stop,
            settings,
            saver.save,
        )
    stop.restore()
    _write_model(own, task, job, state, num_devices)
    summary = _summary(settings, job, state, history, num_devices)
    missed = _verify(settings, job, state, history, summary) if settings.verify else []
    if world.process_id == 0:
        _write_summary(settings.out, job, history, num_devices, summary)
    fz.wait(saver.folder)
    return _conclude(settings, history, summary, missed)


def _devices(settings: TrainSettings) -> int:
    """Makes the run's devices; not before the batch is seen to divide over those asked for."""
    if (settings.devices or 0) > 0:
        check_batch(settings.batch, settings.plan(settings.devices))
    return devices.configure(settings.devices, settings.precision)


def _begin(settings: TrainSettings, checkpoints: Path) -> None:
    """The run's directory, without what a run that this one replaces went on from or drew."""
    outputs.make(settings.out)
    shutil.rmtree(checkpoints, ignore_errors=True)
    (settings.out / outputs.TIMELINE).unlink(missing_ok=True)  # not every run writes one
    outputs.write_json(settings.out / outputs.RUN, settings.to_json())


def evaluate(settings: EvalSettings) -> None:
    """Prints the validation loss of a model."""
    num_devices = devices.configure(settings.devices, settings.precision)
    plan = fz.Plan(zero=settings.zero, data=num_devices, precision=settings.precision)
    rows = check_batch(settings.batch, plan)
    loaded = models.load(settings.model, seed=0)
    if settings.weights is not None:
        models.load_weights(loaded.module, settings.weights)
    job = _prepare(Pretraining(settings.data), loaded, plan, rows)
    corpus = job.corpus
    assert isinstance(corpus, data.Corpus)
    state = fz.init(job.model, None, plan, 0)
    feed = hosts.Feed(corpus, fz.layout(job.model, None, plan))
    loss = evaluate_state(fz.eval_step(job.model, plan), state, feed, settings.batch)
    print(
        f"validation loss {loss:.6f}  "
        f"({len(corpus.validation)} sequences of {settings.data.seq} tokens)"
    )
    if settings.fingerprint not in (None, corpus.fingerprint):
        print("not the validation text of the training run: the two losses cannot be compared")


def optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """What the run's file names; else AdamW, whose rate rises for a twentieth of the steps, then
    falls as a cosine."""
    if settings.schedule is not None:
        rate = made_by_optax("schedule", settings.schedule)
    else:
        rate = _schedule(settings.lr, settings.steps)
    if settings.optimizer is not None:
        return made_by_optax("optimizer", settings.optimizer, learning_rate=rate)
    return optax.adamw(rate, b2=0.95, weight_decay=0.01)


def _schedule(lr: float, num_steps: int) -> optax.Schedule:
    warmup = max(1, round(WARMUP_SHARE * num_steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=lr / warmup,
        peak_value=lr,
        warmup_steps=warmup,
        decay_steps=max(num_steps, warmup + 1),
        end_value=lr * FINAL_SHARE,
    )


def _gauge(settings: TrainSettings, job: _Job, state: fz.TrainState, num_devices: int) -> Gauge:
    row = job.corpus.train_batch(settings.seed, 0, settings.batch, (0, settings.batch))
    first = {
        k: jax.ShapeDtypeStruct((settings.batch, *x.shape[1:]), x.dtype) for k, x in row.items()
    }
    tokens = settings.batch * settings.data.seq
    found = gauge_of(job.model, job.plan, first, tokens, num_devices, state)
    if job.converted.adapters and found.flops_per_token is not None:
        # Of three passes, frozen weights take part in two: they have no gradient.
        return replace(found, flops_per_token=found.flops_per_token * 2 / 3)
    return found


def _eval_batch(job: _Job) -> int:
    """Sequences of an evaluation: what devices see at once; a pipeline's microbatches together."""
    shards = (job.plan.data or 1) * job.plan.replica
    return job.rows * shards * (job.plan.microbatches if job.plan.pipe > 1 else 1)


def _prepare(task: Task, loaded: LoadedModel, plan: fz.Plan, rows: int) -> _Job:
    corpus = task.corpus(loaded)
    converted, loss = task.convert(loaded)
    return _Job(loaded, corpus, rows, converted, converted.model(loss), plan)


def _describe(job: _Job, num_devices: int) -> list[str]:
    about = devices.describe(num_devices)
    trained = _num_trained(job)
    share = f", {trained:,} more in adapters" if job.converted.adapters else ""
    return [
        f"model   {job.loaded.spec}: {job.loaded.num_parameters:,} parameters{share}",
        job.corpus.describe(),
        f"devices {num_devices} x {about['kind']}, ZeRO-{job.plan.zero}, {job.plan.precision}",
    ]


def _num_trained(job: _Job) -> int:
    """Parameters that steps change."""
    leaves = (leaf for leaf in job.converted.layout.leaves if leaf.is_param and not leaf.frozen)
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _write_model(
    settings: TrainSettings, task: Task, job: _Job, state: Any, num_devices: int
) -> None:
    """What other programs load."""
    loaded = job.loaded
    record = partial(
        outputs.RunRecord,
        factory=loaded.factory,
        batch=job.rows * num_devices,
        zero=job.plan.zero,
        devices=num_devices,
        precision=settings.precision,
        fingerprint=job.corpus.fingerprint,
    )
    with outputs.model_staged(settings.out) as scratch:
        task.write(scratch, Trained(loaded, job.converted, state, job.plan, record))


def _summary(
    settings: TrainSettings, job: _Job, state: Any, history: History, num_devices: int
) -> dict[str, Any]:
    """Everything a reader of the run may ask for; losses in nats per token."""
    last = history.validation[-1][1]
    entropy = job.corpus.unigram_entropy
    return {
        "model": job.loaded.spec,
        "parameters": job.loaded.num_parameters,
        "plan": job.plan.to_json(),
        "devices": devices.describe(num_devices),
        "steps": history.steps_done,
        "steps_asked": settings.steps,
        "interrupted": history.interrupted,
        "batch": settings.batch,
        "seq": settings.data.seq,
        "lr": settings.lr,
        "seed": settings.seed,
        "data": settings.data.to_json() | {"fingerprint": job.corpus.fingerprint},
        "train_loss_first": history.losses[0][1] if history.losses else None,
        "train_loss_last": history.losses[-1][1] if history.losses else None,
        "val_loss_first": history.validation[0][1],
        "val_loss_last": last,
        "val_losses": history.validation,
        # The best loss of a model that only knows how often each byte (or token) occurs in this
        # text.
        "byte_entropy": entropy if job.corpus.byte_level else None,
        "unigram_entropy": entropy,
        "below_unigram_entropy": entropy - last,
        "trained_parameters": _num_trained(job),
        "tokens": history.tokens,
        "tokens_per_s": history.tokens_per_s,
        "bytes_per_device": fz.placement(state).to_json()["bytes_per_device"],
        "versions": outputs.versions(),
        "torch_val_loss": None,
        "logits_max_abs_diff": None,
    }


def _verify(
    settings: TrainSettings, job: _Job, state: Any, history: History, summary: dict[str, Any]
) -> list[str]:
    """Adds PyTorch's figures to the summary and returns what does not agree."""
    corpus = job.corpus
    assert isinstance(corpus, data.Corpus)  # of plain text: others are not verified
    ids = corpus.validation[: min(job.rows, COMPARED_ROWS)]
    # fp32 on both sides, also after training in a lower precision: what is compared is the way
    # through the file.
    with jax.default_matmul_precision("highest"):
        # Stages of a pipeline have meshes of their own: one program takes what the host has.
        values = jax.device_get((fz.logical(job.model, state, job.plan), state.buffers))
        output, _ = jax.jit(job.converted.apply)(*values, ids)
    logits = np.asarray(models.logits_of(output))
    figures = check.in_torch(settings.out, job.loaded.factory, corpus, ids, logits)
    summary.update(figures)
    return check.missed_bounds(figures, history.validation[-1][1], settings.precision)


def _write_summary(
    out: Path, job: _Job, history: History, num_devices: int, summary: dict[str, Any]
) -> None:
    """The picture of the loss, and the summary."""
    title = (
        f"{job.loaded.name}, {job.loaded.num_parameters / 1e6:.1f}M parameters, "
        f"ZeRO-{job.plan.zero} on {num_devices} devices"
    )
    with outputs.staged(out) as scratch:
        plot.save_loss(scratch / outputs.PLOT, history, title, summary["byte_entropy"])
    outputs.write_json(out / outputs.SUMMARY, summary)


def _conclude(
    settings: TrainSettings, history: History, summary: dict[str, Any], missed: list[str]
) -> int:
    """Says how it ended, in the words of the summary; returns the exit status."""
    print(
        f"validation loss {summary['val_loss_first']:.4f} -> {summary['val_loss_last']:.6f}; "
        f"single {'bytes' if summary['byte_entropy'] else 'tokens'} have an entropy of "
        f"{summary['unigram_entropy']:.4f} nats: {summary['below_unigram_entropy']:.4f} below it"
    )
    if summary["torch_val_loss"] is not None:
        print(
            f"PyTorch, loading {settings.out}: validation loss {summary['torch_val_loss']:.6f}, "
            f"logits within {summary['logits_max_abs_diff']:.2g}"
        )
    if missed:
        raise CommandError(f"--verify: {'; '.join(missed)}")
    wrong = [step for step, loss in history.losses if not math.isfinite(loss)]
    if not math.isfinite(summary["val_loss_last"]):
        since = f", in training since step {wrong[0]}" if wrong else ""
        raise CommandError(
            f"the run diverged: its loss is not finite{since}. What it reached is in"
            f" {settings.out}; with --overwrite try a smaller --lr, or --clip 1.0"
        )
    if history.interrupted:
        print(
            f"interrupted: the state after {history.steps_done} of {settings.steps} steps is in "
            f"{settings.out}; the same command with --resume goes on"
        )
        return EXIT_INTERRUPTED if history.stopped_by == "Ctrl-C" else 0
    print(f"written to {settings.out}")
    return 0
