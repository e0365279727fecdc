"""Schedules give torch's own rates, step by step, and long after what was run ahead."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as lrs

import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.optim.rates import _power
from torch_bridge.optim.schedules import follow


NUM_STEPS = 60


class WarmedUp(lrs.LRScheduler):
    """Holds another scheduler in an attribute, which goes on after a warm-up."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return [base * self.last_epoch / 4 for base in self.base_lrs]

    def step(self, epoch=None):
        if self.last_epoch < 4:
            super().step()
        else:
            self.after.step()


class Counting:
    """Says another number in each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, _):
        self.calls += 1
        return 1 / self.calls


def two_groups(lr=0.1, **options):
    tensors = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": tensors[:1]}, {"params": tensors[1:], "lr": lr / 7}]
    return torch.optim.SGD(groups, lr=lr, **options)


def warmed_up(optimizer):
    warmup = lrs.LinearLR(optimizer, start_factor=1e-3, total_iters=7)
    cosine = lrs.CosineAnnealingLR(optimizer, T_max=11, eta_min=1e-3)
    constant = lrs.ConstantLR(optimizer, factor=1.0, total_iters=4)
    return lrs.SequentialLR(optimizer, [warmup, constant, cosine], milestones=[7, 12])


def chained(optimizer):
    parts = [lrs.ConstantLR(optimizer, 0.1, 4), lrs.ExponentialLR(optimizer, 0.9)]
    steps = [lrs.StepLR(optimizer, size, 0.8) for size in (2, 3)]
    return lrs.ChainedScheduler([*parts, *steps], optimizer)


# Those that are followed for ever ...
ENDLESS = {
    "step": lambda o: lrs.StepLR(o, step_size=7, gamma=0.5),
    "multi-step": lambda o: lrs.MultiStepLR(o, milestones=[3, 9, 9, 30], gamma=0.3),
    "constant": lambda o: lrs.ConstantLR(o, factor=0.25, total_iters=9),
    "linear": lambda o: lrs.LinearLR(o, start_factor=0.1, end_factor=0.9, total_iters=9),
    "exponential": lambda o: lrs.ExponentialLR(o, gamma=0.97),
    "growing": lambda o: lrs.ExponentialLR(o, gamma=1.01),
    # As one looks for the largest rate that trains: beyond the 32 that are looked up, too.
    "growing-fast": lambda o: lrs.ExponentialLR(o, gamma=4.0),
    "polynomial": lambda o: lrs.PolynomialLR(o, total_iters=13, power=2.0),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, T_max=9, eta_min=1e-3),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=8),
    "sequential": warmed_up,
    "chained": chained,
}
# ... and those that are for as many steps as are asked for.
ENDING = {
    "one-cycle": lambda o: lrs.OneCycleLR(o, max_lr=0.3, total_steps=NUM_STEPS),
    "growing-restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
    "nested": lambda o: WarmedUp(o, lrs.CosineAnnealingLR(o, T_max=9)),
    "counting": lambda o: lrs.LambdaLR(o, [Counting(), Counting()]),
    "lambda": lambda o: lrs.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.5**n]),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.9 if n % 2 else 1.0),
    "cyclic": lambda o: lrs.CyclicLR(o, 1e-3, 0.1, step_size_up=6, cycle_momentum=False),
    "chained-cosine": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.5, 3), lrs.CosineAnnealingLR(o, 9)]
    ),
    "chained-cycle": lambda o: lrs.ChainedScheduler(
        [lrs.OneCycleLR(o, 0.3, NUM_STEPS), lrs.StepLR(o, 7, 0.8)]
    ),
}


def by_torch(make, steps):
    """The rates of both groups in as many steps."""
    optimizer = two_groups()
    scheduler, found = make(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(steps):
            if number:
                scheduler.step()
            found.append([float(group["lr"]) for group in optimizer.param_groups])
    return np.array(found)


def looked_up(groups, counts):
    """What a compiled step sees, and what the host would."""
    rates = [group["lr"] for group in groups]
    find = jax.jit(lambda n: jnp.stack([jnp.asarray(r(n) if callable(r) else r) for r in rates]))
    return np.stack([np.asarray(find(jnp.int32(n))) for n in counts])


@pytest.mark.parametrize("name", [*ENDLESS, *ENDING])
def test_rates_are_those_of_torch(name):
    make = {**ENDLESS, **ENDING}[name]
    optimizer = two_groups(momentum=0.9)  # which falls with no rate
    scheduler, expected = make(optimizer), by_torch(make, NUM_STEPS)
    for _ in range(2):  # it is left as it was, with all that it holds
        groups = follow(optimizer, scheduler, 1, NUM_STEPS if name in ENDING else None)
        found = looked_up(groups, range(NUM_STEPS))
        np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_a_count_outside_of_a_scheduler_is_refused():
    calls, optimizer = [], two_groups()

    def rate(_):
        calls.append(None)
        return 1 / len(calls)

    with pytest.raises(ConversionError, match=r"other values when it is run once more.*attribute"):
        follow(optimizer, lrs.LambdaLR(optimizer, rate), 1, 5)
    held = WarmedUp(optimizer, (step for step in range(3)))
    with pytest.raises(
        ConversionError, match=r"something that it holds cannot be copied.*generator"
    ):
        follow(optimizer, held, 1, 5)


@pytest.mark.parametrize("name", ENDLESS)
def test_schedules_go_on_after_what_was_run_ahead(name):
    optimizer = two_groups()
    groups = follow(optimizer, ENDLESS[name](optimizer), 1, None)
    steps = 5000
    expected = by_torch(ENDLESS[name], steps)
    late = [*range(1000, 1100), *range(steps - 100, steps)]
    # One rounding for each bit of how many periods of a thousand steps have gone.
    found = looked_up(groups, late)
    tiny = np.finfo(np.float32).tiny
    np.testing.assert_allclose(found, expected[late].astype(np.float32), 5e-7, tiny)
    assert name.startswith("growing") or found.max() <= 0.1


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"every": 0}, "every=0: expected a number of optimizer steps, at least 1"),
        ({"every": 3}, "every=3 is between two steps of a scheduler, and there is none"),
        ({"num_steps": -1}, "num_steps=-1: expected a number of optimizer steps"),
        ({"num_steps": 2.5}, "num_steps=2.5: expected a number of optimizer steps"),
    ],
)
def test_a_number_of_steps_that_is_none_is_refused(counts, message):
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConversionError, match=message):
        tb.optimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], **counts)


def test_a_scheduler_is_left_as_it_was():
    optimizer = two_groups(torch.tensor(0.1))
    scheduler = warmed_up(optimizer)

    def everything():
        parts = [scheduler, *scheduler._schedulers]
        states = [{k: repr(v) for k, v in vars(one).items()} for one in parts]
        return states, [{k: repr(v) for k, v in g.items()} for g in optimizer.param_groups]

    before, rate = everything(), optimizer.param_groups[0]["lr"]
    # A rate that is a float32 tensor rounds in every step: no two periods are alike.
    follow(optimizer, scheduler, 1, NUM_STEPS)
    assert everything() == before
    assert optimizer.param_groups[0]["lr"] is rate
    assert not hasattr(optimizer, "_opt_called")


def test_lists_in_which_a_scheduler_counts_are_left_as_they_were():
    class Counting(lrs.LRScheduler):
        def __init__(self, optimizer):
            self.seen = []
            super().__init__(optimizer)

        def get_lr(self):
            self.seen.append(self.last_epoch)
            return [0.1 / len(self.seen) for _ in self.base_lrs]

    optimizer = two_groups()
    scheduler = Counting(optimizer)
    follow(optimizer, scheduler, 1, 5)
    assert scheduler.seen == [0]


def test_one_step_of_a_scheduler_for_many_of_the_optimizer():
    optimizer = two_groups()
    groups = follow(optimizer, lrs.StepLR(optimizer, 2, 0.5), 3, None)
    expected = np.repeat(by_torch(lambda o: lrs.StepLR(o, 2, 0.5), 10), 3, axis=0)
    np.testing.assert_array_equal(looked_up(groups, range(30)), expected.astype(np.float32))


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", ["exponential", "cosine", "sequential", "lambda"])
def test_a_scheduler_that_has_begun_goes_on_from_there(name, every):
    make, taken = {**ENDLESS, **ENDING}[name], 9
    optimizer = two_groups()
    scheduler = make(optimizer)
    optimizer.step()
    for _ in range(taken):
        scheduler.step()
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    named = [(n, g["params"][0]) for n, g in zip("ab", optimizer.param_groups, strict=True)]
    tx = tb.optimizer(optimizer, named, scheduler, every=every, num_steps=every * NUM_STEPS)
    state = tx.init(params)
    counts = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
    assert [int(count) for count in counts] == [every * taken] * 2
    expected = by_torch(make, NUM_STEPS).astype(np.float32)
    for step in range(every * taken, every * taken + 5):
        updates, state = tx.update(params, state, params)
        assert [float(-updates[n][0]) for n in "ab"] == list(expected[step // every])


def test_a_rate_that_holds_for_longer_than_any_table_falls_all_the_same():
    optimizer = two_groups()
    groups = follow(optimizer, lrs.StepLR(optimizer, 1500, 0.5), 1, None)
    expected = np.float32([[0.1, 0.1 / 7]]) * np.float32([[1], [0.5], [0.25]])
    np.testing.assert_allclose(looked_up(groups, [1499, 1500, 3000]), expected, rtol=1e-6)


def test_torch_refuses_to_go_on_where_one_cycle_ends_and_the_last_rate_stays():
    optimizer = two_groups()
    groups = follow(optimizer, lrs.OneCycleLR(optimizer, 0.3, total_steps=10), 1, None)
    last = by_torch(lambda o: lrs.OneCycleLR(o, 0.3, total_steps=10), 10)[-1].astype(np.float32)
    np.testing.assert_array_equal(looked_up(groups, [9, 10, 99]), np.stack([last] * 3))


class Rough(lrs.LRScheduler):
    """Changes what no transformation follows."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
        return [group["lr"] for group in self.optimizer.param_groups]


class Wrong(lrs.ExponentialLR):
    """Would be followed for ever if classes were not told from subclasses."""


def fails_at_step_5(step):
    if step == 5:
        raise IndexError("list index out of range")
    return 1.0


REFUSED = {
    "plateau": (lambda o: lrs.ReduceLROnPlateau(o), 9, "depends on metrics.*reduce_on_plateau"),
    "lambda": (ENDING["lambda"], None, "scheduler LambdaLR: .*pass num_steps="),
    "restarts": (ENDING["growing-restarts"], None, "WarmRestarts: .*pass num_steps="),
    "subclass": (lambda o: Wrong(o, 0.9), None, "scheduler Wrong: .*pass num_steps="),
    "other": (lambda o: lrs.ExponentialLR(two_groups(), 0.9), None, "another optimizer"),
    "decay": (lambda o: Rough(o), 9, r"Rough changes \['weight_decay of group 0'"),
    "fails": (lambda o: lrs.LambdaLR(o, fails_at_step_5), 9, "LambdaLR cannot make step 5: list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name):
    make, num_steps, message = REFUSED[name]
    optimizer = two_groups()
    scheduler = make(optimizer)
    with pytest.raises(ConversionError, match=message):
        follow(optimizer, scheduler, 1, num_steps)


def test_a_pattern_that_does_not_hold_is_not_followed():
    optimizer = two_groups()
    scheduler = lrs.ExponentialLR(optimizer, 0.9)
    scheduler.get_lr = lambda: [0.1 / (scheduler.last_epoch + 1)] * 2
    with pytest.raises(ConversionError, match="pass num_steps="):
        follow(optimizer, scheduler, 1, None)


def test_momentum_that_cycles_starts_at_its_beginning():
    params = {"w": torch.nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.AdamW(params.values())
    scheduler = lrs.OneCycleLR(optimizer, 0.1, total_steps=10)
    optimizer.step()
    scheduler.step()
    with pytest.raises(ConversionError, match=r"changes betas\[0\] as well .* made 1 step"):
        tb.optimizer(optimizer, params.items(), scheduler)
    nadam = torch.optim.NAdam(params.values())
    with pytest.raises(ConversionError, match=r"changes betas\[0\].*cycle_momentum=False"):
        tb.optimizer(nadam, params.items(), lrs.OneCycleLR(nadam, 0.1, total_steps=10))


@pytest.mark.parametrize("exponent", [0, 3, 10**5, 2**22 + 1])
def test_powers_of_large_exponents_are_exact_to_a_few_roundings(exponent: int) -> None:
    base = 1 - 1e-6
    np.testing.assert_allclose(_power(base, jnp.int32(exponent)), base**exponent, rtol=2e-6)


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)


def test_an_epoch_that_was_begun_has_its_own_rate() -> None:
    """Ten steps are four epochs of three."""
    optimizer = sgd()
    rate = follow(optimizer, lrs.LambdaLR(optimizer, lambda n: 1 / (n + 1)), 3, 10)[0]["lr"]
    assert float(rate(jnp.int32(9))) == 0.25


def test_a_schedule_of_epochs_is_as_long_as_the_epochs() -> None:
    optimizer = sgd()
    schedule = lrs.OneCycleLR(optimizer, 0.3, total_steps=3)
    follow(optimizer, schedule, 4, 12)
    with pytest.raises(ConversionError, match="3"):
        follow(optimizer, schedule, 4, 16)
