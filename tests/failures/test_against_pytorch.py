"""Against PyTorch itself: 30 float32 losses of every stage, on a GPT of 6.6M parameters.

No report of a failure, but the measure for all of them: a step that silently loses a gradient, a
decay or a correction still trains. Shown, with the same weights, tokens and AdamW: every ZeRO stage
on 8 devices has plain PyTorch's losses within 5e-6 (PyTorch's DDP and FSDP2 and DeepSpeed are
within 1e-6 of it), and this is narrow enough to see a forgotten weight decay or a wrong epsilon.
Against the same run in double precision fzero is closer (1e-6) than PyTorch itself (2e-6).

Stage 3 runs 3 steps, and all 30 nightly, where the other stages run the first ones, too,
to spare the suite minutes: they compute the same bits as stage 3, which is checked here for losses,
norms and the whole state that follows from them (and in tests/zero for 20 steps of many plans). The
third loss is the first that depends on a second moment which is not the square of one gradient.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import peers_small as small
import pytest
from failure_cases import bits, copied, differing

import fzero as fz


pytestmark = pytest.mark.as_users
# Promised. Losses are about 5, where float32 steps by 5e-7; PyTorch with one thread differs from
# PyTorch with two by 1e-6, and fzero from either by 2e-6.
WITHIN = 5e-6
# Steps of the stages that are compared with stage 3.
PREFIX = 4
STORED = json.loads((Path(__file__).parents[1] / "data/peers/small_losses.json").read_text())
PYTORCH = np.array(STORED["losses"]["float32"])
EXACT = np.array(STORED["losses"]["float64"])


class Curve(NamedTuple):
    """Losses and gradient norms, and the bits of the state after `PREFIX` steps, laid out whole."""

    losses: np.ndarray
    norms: np.ndarray
    early: dict[str, Any]


class Stage:
    """A stage's step and initial state."""

    def __init__(self, model: fz.Model, zero: int) -> None:
        self.model, self.plan, self.tx = model, fz.Plan(zero=zero, data=8), small.adamw()
        self.step = fz.train_step(model, self.tx, self.plan)
        self.first = fz.init(model, self.tx, self.plan)

    def run(self, steps: int, **hyperparams: float) -> Curve:
        """A run with some of AdamW's values changed."""
        state = copied(self.first)
        given = state.opt_state.hyperparams
        changed = {
            name: jax.device_put(np.float32(value), given[name].sharding)
            for name, value in hyperparams.items()
        }
        opt_state = state.opt_state._replace(hyperparams={**given, **changed})
        state, out, early = state.replace(opt_state=opt_state), [], {}
        for ids in small.tokens()[:steps]:
            state, metrics = self.step(state, {"ids": ids})
            # Waits for the step, so that one program at a time has the few cores of a test machine.
            out.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            if len(out) == PREFIX:
                whole = self.plan.replace(zero=0)
                early = bits(fz.replan(state, self.model, self.tx, self.plan, whole))
        assert self.step.num_traces == 1
        return Curve(*np.array(out, np.float32).T, early)


@pytest.fixture(scope="module")
def model() -> fz.Model:
    return small.native_model()


@pytest.fixture(scope="module")
def stage_3(model: fz.Model) -> Stage:
    return Stage(model, 3)


@pytest.fixture(scope="module")
def curve_3(stage_3: Stage) -> Curve:
    return stage_3.run(PREFIX)


def apart(losses: Any) -> float:
    """The largest difference to PyTorch's losses."""
    return float(np.max(np.abs(losses.astype(np.float64) - PYTORCH[: len(losses)])))


def test_same_start() -> None:
    assert small.sha256() == small.SHA256 == STORED["sha256"]
    assert sum(weight.size for weight in small.weights().values()) == 6_613_504


@pytest.mark.nightly
def test_stored_losses_are_pytorchs() -> None:
    assert len(PYTORCH) == small.STEPS
    # Two steps as a sample: the sums of a matmul are ordered by the number of threads.
    assert apart(small.torch_losses(2)) <= 1e-6


@pytest.mark.slow
def test_stage_3_has_pytorchs_losses(stage_3: Stage) -> None:
    losses = stage_3.run(3).losses
    assert apart(losses) <= WITHIN
    assert np.max(np.abs(losses - EXACT[:3])) <= 2e-6


@pytest.mark.nightly
def test_stage_3_has_all_of_pytorchs_losses(stage_3: Stage) -> None:
    losses = stage_3.run(small.STEPS).losses
    assert len(losses) == small.STEPS
    assert apart(losses) <= WITHIN
    # No further from the exact run than PyTorch: measured 0.9e-6, PyTorch 1.6e-6 (2.1e-6 with one
    # thread), a unit in the last place is 0.5e-6.
    assert np.max(np.abs(losses - EXACT)) <= 2e-6
    assert losses[0] - losses[-1] > 1.5  # it learns, so that every part of a step matters


@pytest.mark.nightly
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_other_stages_have_the_same_bits(zero: int, model: Any, curve_3: Curve) -> None:
    curve = Stage(model, zero).run(PREFIX)
    assert apart(curve.losses) <= WITHIN
    assert np.array_equal(curve.losses.view(np.int32), curve_3.losses[:PREFIX].view(np.int32))
    assert np.array_equal(curve.norms.view(np.int32), curve_3.norms[:PREFIX].view(np.int32))
    assert differing(curve.early, curve_3.early) == []


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "steps"), [({"decay": 0.0}, 8), ({"eps": 1e-6}, 3)])
def test_wrong_adamw_is_seen(wrong: dict[str, float], steps: int, stage_3: Stage) -> None:
    # After all 30 steps 2e-4 and 6e-4.
    assert apart(stage_3.run(steps, **wrong).losses) > 2 * WITHIN
