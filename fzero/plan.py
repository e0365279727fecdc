"""The plan: frozen data that says how state is laid out and stepped. It holds no arrays."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fzero import compat
from fzero.axes import DATA, FURTHER, PIPE, REPLICA
from fzero.errors import PlanError, ScheduleError, UnusedDevicesWarning, known_fields, warn
from fzero.float8.recipe import Float8
from fzero.plan_exclusions import check_exclusions
from fzero.plan_values import LossScaling, as_tiers, check_values, expect_choice, given_devices
from fzero.policies import as_remat, policy_name
from fzero.schedule.actions import Schedule
from fzero.schedule.check import check
from fzero.schedule.names import BUILDERS, schedule, stages_per_rank
from fzero.summary import Boxed
from fzero.tree import path_patterns


@dataclass(frozen=True, repr=False)
class Plan(Boxed):
    """How a state is sharded and stepped.

    Args:
        zero: ZeRO stage. 0 replicates everything; 1 shards the optimizer state (and the fp32
            master under mixed precision); 2 is the same, and refuses `reduce="step"`; 3 the
            parameters too.
        data: devices in a sharding group (mesh axis `data`); `None` takes all that remain.
        pipe: pipeline ranks (mesh axis `pipe`). Each runs one stage, or several where the schedule
            says so (`interleaved`, `zb_v`).
        replica: sharding groups (mesh axis `replica`). Above 1 this is hybrid sharding: state is
            sharded within a group and replicated across groups.
        expert: devices that share out the experts of a mixture (mesh axis `expert`): leaves whose
            model says so are split over them, and stay so; `fz.experts` sends tokens to them. Rows
            of a batch are spread over them, too, for all other layers, whose state ZeRO shares out
            over them as over those of `data`.
        context: devices that share out each sequence (mesh axis `context`): dim 1 of batch leaves
            that it divides. Functions see whole sequences; `fz.attention` exchanges what it has to.
            ZeRO shares a state out over these devices as over those of `data`.
        tensor: devices that share out each layer (mesh axis `tensor`): leaves whose model says so
            (`shard` of `fz.Layer`, `fz.Stack`, `fz.Model`) are split over them, beside ZeRO, and
            stay so while they are used. A model's functions see whole arrays; XLA divides the work.
        sequence_parallel: whether, between the layers of a `Stack`, the devices of `tensor` share
            out positions too: dim 1 of values with three dims, where it divides. Norms and dropout
            there are computed once and not by each of them, and of what is kept for the backward
            pass each has its part. `None`: where it takes less time than it costs, which is where a
            device has many tokens: three values have as many elements as a layer's leaves that lie
            along `tensor`.
        microbatches: into how many a batch is cut; each device runs one after the other.
        precision: `fp32`; `bf16` or `fp16` compute from one fp32 master; `fp8`: `bf16`, with the
            products of parameters on 8-bit operands. A trained parameter that the model itself
            gives in 16 bits has no master: where the precision promises one (all but `fp32`),
            `init` warns.
        keep_fp32: regular expressions; a parameter in whose path one is found is used and sent in
            float32 under the other precisions: `(r"norm", r"router")`. A model's functions get it
            so, and say themselves where values go back to 16 bits. Of a converted module, the
            submodules that own such parameters are as after their `.float()`.
        clip_norm: largest global gradient norm, or `None`.
        remat: what is kept for the backward pass. `None`: what is fastest where memory allows. On
            GPUs that is `none`, else `dots`, else `layer`, chosen with the batch's shapes by what
            the devices' memory has room for; on CPUs `layer`. (So plans that divide a state
            otherwise may choose otherwise, and round otherwise: say it where bits are compared.)
            `none`: no product and no sum is computed again; what follows from them element by
            element is, wherever fewer bytes are kept so. `layer`: of a `Stack`, only each layer's
            input; `offload`: the same, in host memory; both keep everything but casts and reshapes
            of other layers and of a plain model. `dots`, or a policy such as
            `jax.checkpoint_policies.dots_saveable`: what it names, of stacks (beside each layer's
            input), layers and plain models alike. A function that calls `jax.checkpoint` (flax:
            `nn.remat`) itself keeps what that says. Gathered weights are never kept. In JSON, a
            policy is its name.
        min_shard_bytes: leaves smaller than this (one layer's part, in the compute dtype) stay
            whole. A collective over fewer bytes costs its latency and saves nothing.
        reduce: when gradients are reduced. `microbatch`: after each one, so that only shards are
            accumulated, and all four stages add in the same order. `step`: once a step, from whole
            local sums; stages 0 and 1 only.
        reduce_dtype: in what gradients are sent and added over devices: `None`, as the backward
            pass gives them (the compute dtype; float32 after several microbatches with
            reduce="step"); `fp32`, always in float32. That is over `data` and `replica`: over
            `expert`, `context` and `tensor` a product's terms are added in its own dtype.
        gather: when stages 1 and 2 gather updated parameters. `eager`: at the end of the step, all
            at once. `lazy`: layer by layer in the next step's first forward pass, as stage 3 does,
            which hides it; they stay whole until that step's last backward pass, so that no more
            is sent, and are kept as shards between steps. (Stage 3 gathers for every pass.)
        schedule: the order of the pipeline's work: a name (`fzero.pipeline.BUILDERS`) or a
            `fzero.pipeline.Schedule` for `microbatches` microbatches on `pipe` ranks. `None` is
            `1f1b`.
        partition: where the chain is cut into stages, see `fzero.pipeline.partition`: `uniform`,
            `parameters`, `type:REGEX`, or the number of layers of each stage.
        prefetch: whether a `Stack`'s layers are gathered one ahead of their use and reduced one
            behind, with two gathered layers alive; otherwise each is gathered when it is used. The
            numbers are the same. `None`: where communication can run beside computation, which is
            on GPUs.
        gather_dtype: what training gathers send with zero=3: `None`, weights in the compute dtype;
            `int8`, blocks of 256 weights as 8-bit integers with one float32 scale each, which is
            1.016 bytes an element. Every device then computes with the same rounded weights; the
            gradient, the update and evaluation are those of the exact ones. (What only products of
            `precision="fp8"` read goes in 8-bit floats with their own scale, which rounds nothing.)
        secondary: with zero=3, neighbouring devices of the data axis that together keep a copy of
            each layer from its forward to its backward pass, in the compute dtype, so that the
            backward pass gathers from them alone: a number, or `host`, for the devices of a host.
            The numbers are the same. A device keeps that share of all layers per microbatch under
            way. `None`, or one group of all: weights are gathered again from where they are kept.
        tiers: where fields of the state are kept between steps: `{"opt_state": "host"}`. They are
            `opt_state`, `ema`, `master` (fp32 parameters beside a compute copy), `params`; tiers:
            `host` (pinned memory), `disk`, a number (the largest leaves, until that share of the
            bytes is on the host), or a pair `("disk", 0.5)`. The rest is on the device. A step lets
            such leaves visit the device in turn.
        stream_bytes: the most bytes of parked leaves that visit a device at once; two such buckets
            are there at any time, one arriving or leaving while the other is used.
        update_on: where the optimizer runs: `device`, where what is parked visits it, or `host`: on
            the host's cores, with `tiers={"opt_state": "host"}`. Then gradients go down and
            parameters up, instead of all that is parked both ways: for links that are slower.
        disk_path: the directory for what is kept on disk: on a fast drive of each machine. The
            system's directory for temporary files if not given, which may be kept in memory.
        loss_scale: how fp16's loss scale moves; other precisions have none.
        ema: the decay of exponential moving averages of the trained parameters, such as 0.999, or
            `None` for none. They begin at the initial parameters; each optimizer step makes them
            `average + (1 - ema) * (parameter - average)`, in float32. They are kept in shards from
            zero=1 on, as the optimizer state is, and change no other number.
            `eval_step(which="ema")`, `fz.averaged` and `tb.save(which="ema")` use them.
        float8: which products of `precision="fp8"` run in 8 bits, and how they are scaled.
        skip_nonfinite: in fp32 and bf16, leave the state as it is when a gradient, or the float32
            sum of their squares, is not finite.
            (fp16 always does, and lowers its loss scale.)
        deterministic: on GPUs, run after run gives the same bits: XLA takes only kernels that add
            in a fixed order, and by rule rather than by timing them, which is slower. (CPUs do so
            anyway.) Another GPU, compiler or number of devices may still round otherwise.

    Raises:
        PlanError: a value is out of range or two of them exclude each other.

    Example:
        >>> plan = Plan(zero=3, data=8, precision="bf16")
        >>> Plan.from_json(plan.to_json()) == plan
        True

    Source: ZeRO, arXiv:1910.02054, sections 5 and 7 (stages, communication volume); ZeRO++,
        arXiv:2306.10209, section 3 (gather_dtype: qwZ; secondary: hpZ).
    """

    zero: int = 3
    data: int | None = None
    pipe: int = 1
    replica: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    sequence_parallel: bool | None = None
    microbatches: int = 1
    precision: str = "fp32"
    keep_fp32: tuple[str, ...] = ()
    clip_norm: float | None = None
    remat: str | Callable[..., Any] | None = None
    min_shard_bytes: int = 16 * 1024
    reduce: str = "microbatch"
    reduce_dtype: str | None = None
    gather: str = "eager"
    schedule: str | Schedule | None = None
    partition: str | tuple[int, ...] = "uniform"
    prefetch: bool | None = None
    gather_dtype: str | None = None
    secondary: int | str | None = None
    tiers: Mapping[str, Any] | tuple[tuple[str, str, float], ...] = ()
    stream_bytes: int = 64 * 2**20
    update_on: str = "device"
    disk_path: str | None = None
    loss_scale: LossScaling = field(default_factory=LossScaling)
    ema: float | None = None
    float8: Float8 = field(default_factory=Float8)
    skip_nonfinite: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            object.__setattr__(self, one.name, _of_python(getattr(self, one.name)))
        object.__setattr__(self, "remat", as_remat(self.remat))
        object.__setattr__(self, "tiers", as_tiers(self.tiers))
        object.__setattr__(self, "keep_fp32", path_patterns("keep_fp32", self.keep_fp32))
        if not isinstance(self.partition, str):
            object.__setattr__(self, "partition", tuple(map(_of_python, self.partition)))
        check_values(self)
        check_exclusions(self)
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.pipe == 1:
            if isinstance(self.schedule, str):
                expect_choice("schedule", self.schedule, tuple(BUILDERS))
            return
        try:
            made = self.build_schedule()
            if isinstance(self.schedule, Schedule):
                check(made)
        except ScheduleError as error:
            raise PlanError(f"plan: schedule: {error}") from error
        have = made.num_ranks, made.num_microbatches
        if have != (self.pipe, self.microbatches):
            raise PlanError(
                f"plan: the schedule is for {have[0]} ranks and {have[1]} microbatches, the plan"
                f" for pipe={self.pipe} and microbatches={self.microbatches}; make them agree"
            )
        if not any(action.kind == "B" or action.kind == "I" for action in made.actions):
            raise PlanError(
                "plan: the schedule has no backward actions; a plan needs a schedule that trains"
                " (evaluation runs its forwards alone)"
            )

    def build_schedule(self) -> Schedule:
        """The pipeline's schedule, built where the plan has only a name.

        Raises:
            ScheduleError: there is no schedule of that name and these sizes.

        Example:
            >>> Plan(pipe=4, microbatches=8, schedule="interleaved").build_schedule()
            Schedule(num_ranks=4, num_stages=8, num_microbatches=8)
        """
        if isinstance(self.schedule, Schedule):
            return self.schedule
        name = self.schedule or "1f1b"
        stages = self.pipe * stages_per_rank(name)
        return _proven(name, stages, self.microbatches)

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Mesh axis sizes on `num_devices` devices; needs no device.

        Raises:
            PlanError: the plan wants more devices than there are, `data=None` cannot be filled
                evenly, or `secondary` does not divide it.

        Example:
            >>> Plan(replica=2).sizes(8)
            {'replica': 2, 'data': 4}
        """
        groups = self.pipe * self.replica * math.prod(self.further.values())
        pipe = f"pipe={self.pipe} x " if self.pipe > 1 else ""
        inner = "".join(f" x {name}={size}" for name, size in self.further.items())
        if self.data is None and num_devices % groups:
            raise PlanError(
                f"plan: {num_devices} devices cannot be split into"
                f" {pipe}replica={self.replica}{inner} equal groups; choose a divisor"
                f" of {num_devices} or set data explicitly"
            )
        data = num_devices // groups if self.data is None else self.data
        wanted = groups * data
        if wanted > num_devices:
            raise PlanError(
                f"plan: {pipe}replica={self.replica} x data={data}{inner} needs {wanted}"
                f" devices, but there are {num_devices}; lower one of them, or start more"
                f" devices (on CPU: jax.config.update('jax_num_cpu_devices', {wanted}) before"
                " the first use)"
            )
        if isinstance(self.secondary, int) and data % self.secondary:
            raise PlanError(
                f"plan: secondary={self.secondary} does not divide data={data} into equal"
                " groups; choose a divisor"
            )
        axes = {PIPE: self.pipe} if self.pipe > 1 else {}
        return {**axes, REPLICA: self.replica, DATA: data, **self.further}

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The device mesh over the first devices given (default: all).

        Axes are `(replica, data)`, with `pipe` before them in a pipeline and the further ones
        (`expert`, `context`, `tensor`) behind them. A plan for several devices, but not all of
        them, and no choice of devices: an `UnusedDevicesWarning` says so.

        Raises:
            PlanError: there are too few devices, or what is given is none, or one of them twice.
        """
        have = jax.devices() if devices is None else given_devices(devices)
        sizes = self.sizes(len(have))
        shape = tuple(sizes.values())
        if devices is None and 1 < math.prod(shape) < len(have):
            warn(
                f"plan: {' x '.join(f'{name}={size}' for name, size in sizes.items())} take"
                f" {math.prod(shape)} of {len(have)} devices; the others are not used. Say"
                " data=None to use all, or pass the ones that are meant: devices=jax.devices()"
                f"[:{math.prod(shape)}]",
                UnusedDevicesWarning,
            )
        grid = np.asarray(have[: math.prod(shape)], dtype=object).reshape(shape)
        return compat.auto_mesh(grid, tuple(sizes))

    @property
    def further(self) -> dict[str, int]:
        """Sizes of the mesh axes beside `pipe`, `replica` and `data` that the plan has."""
        sizes = {name: getattr(self, name) for name in FURTHER}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def mixed(self) -> bool:
        """Whether compute runs in a lower precision than the fp32 master."""
        return self.precision != "fp32"

    @property
    def products(self) -> Float8 | None:
        """Which products run in 8 bits; `None`: none."""
        if self.precision != "fp8":
            return None
        return dataclasses.replace(self.float8, keep=(*self.float8.keep, *self.keep_fp32))

    @property
    def gathers_float8(self) -> bool:
        """Whether parameters that only products in 8 bits read are gathered in 8 bits.

        No value hangs on it. Not in pipelines, where a pass may read its parameters within a
        branch, nor with `secondary`, where parts of whole ones are kept.
        """
        scaled_whole = self.precision == "fp8" and self.float8.recipe == "tensorwise"
        return scaled_whole and self.zero == 3 and self.pipe == 1 and self.secondary is None

    @property
    def gathers_at_use(self) -> bool:
        """Whether parameters are kept as shards alone, which passes over the model gather."""
        return self.zero == 3 or self.gather == "lazy"

    @property
    def keeps_compute_copy(self) -> bool:
        """Whether a cast copy of the parameters is kept between steps (mixed precision, where
        passes read whole parameters)."""
        return self.mixed and not self.gathers_at_use

    @property
    def skips(self) -> bool:
        """Whether a step with a non-finite gradient leaves the state as it is."""
        return self.precision == "fp16" or self.skip_nonfinite

    def shards(self, state_class: str) -> bool:
        """Whether leaves of a state class (`params`, `compute`, `opt_state`, `ema`, `grads`) are
        kept sharded between steps."""
        if state_class == "params":
            return self.gathers_at_use or (self.mixed and self.zero >= 1)
        if state_class in ("opt_state", "ema"):
            return self.zero >= 1
        # Gradients that wait for their step are always shards.
        return {"compute": False, "grads": True}[state_class]

    @property
    def keeps_inputs(self) -> bool:
        """Whether a stack's backward pass starts from each layer's input alone."""
        return self.remat in (None, "layer", "offload")

    @property
    def parked(self) -> dict[str, tuple[str, float]]:
        """The tier and the share of each class that is not kept on the device, as `tiers` says."""
        return {name: (tier, share) for name, tier, share in as_tiers(self.tiers)}

    def tier(self, state_class: str) -> tuple[str, float]:
        """The tier that a state class is kept in between steps, and the share of its bytes.

        The rest is on the device.
        """
        master = "master" if state_class == "params" and self.keeps_compute_copy else state_class
        return self.parked.get(master, ("device", 1.0))

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON-able dict."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = json.loads(self.schedule.to_json())
        if isinstance(self.partition, tuple):
            values["partition"] = list(self.partition)
        if callable(self.remat):
            values["remat"] = policy_name(self.remat)
        values["loss_scale"] = dataclasses.asdict(self.loss_scale)
        values["float8"] = dataclasses.asdict(self.float8)
        values["tiers"] = {name: list(where) for name, where in self.parked.items()}
        return values

    @classmethod
    def from_json(cls, data: dict[str, Any] | str) -> Plan:
        """A plan from `to_json()` or its JSON text.

        Raises:
            PlanError: the text is no JSON, or a key is unknown.
        """
        try:
            values = json.loads(data) if isinstance(data, str) else dict(data)
        except json.JSONDecodeError as error:
            raise PlanError(f"plan: expected the JSON text of a plan: {error}") from error
        known_fields(cls, "plan", values)
        if isinstance(values.get("loss_scale"), dict):
            values["loss_scale"] = LossScaling.from_json(values["loss_scale"])
        if isinstance(values.get("float8"), dict):
            values["float8"] = Float8.from_json(values["float8"])
        if isinstance(values.get("schedule"), dict):
            try:
                text = io.StringIO(json.dumps(values["schedule"]))
                values["schedule"] = Schedule.from_json(text)
            except ScheduleError as error:
                raise PlanError(f"plan: schedule: {error}") from error
        return cls(**values)

    def __repr__(self) -> str:
        def default(field: dataclasses.Field[Any]) -> Any:
            make = field.default_factory
            return field.default if make is dataclasses.MISSING else make()

        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name == "zero" or getattr(self, field.name) != default(field)
        ]
        return f"Plan({', '.join(changed)})"

    def replace(self, **changes: Any) -> Plan:
        """The same plan with some values changed (and validated again)."""
        return dataclasses.replace(self, **changes)


def _of_python(value: Any) -> Any:
    """A number of NumPy's as Python's, which JSON has."""
    return value.item() if isinstance(value, np.generic) else value


@lru_cache(maxsize=256)
def _proven(name: str, stages: int, microbatches: int) -> Schedule:
    """A schedule by name, built and proven once for its sizes: plans are made by the dozen."""
    made = schedule(name, stages=stages, microbatches=microbatches)
    check(made)
    return made
