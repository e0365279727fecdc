"""`tb.from_lightning`: modules with Lightning's methods, with and without Lightning itself."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import optax
import pytest
import torch
from support import tiny
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import fzero as fz
import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.lightning.steps import as_steps


NUM_STEPS = 6


class Classifier(nn.Module):
    """What a Lightning user writes, without the base class."""

    def __init__(self):
        super().__init__()
        # (A bias before a batch norm would have a gradient of nothing but roundings.)
        layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        self.net = nn.Sequential(*layers)
        self.outputs = []
        self.logger = "one of its own"

    def forward(self, x):
        return self.net(x)

    def shared_step(self, batch, stage):
        x, labels = batch
        logits = self(x)  # the module's own forward, through __call__
        loss = functional.cross_entropy(logits, labels)
        right = (logits.argmax(-1) == labels).float()
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=True)
        self.log_dict({f"{stage}_accuracy": right.mean(), "constant": 0.5}, on_epoch=True)
        assert self.logger == "one of its own"
        self.print("logged")
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch, "train")
        self.outputs.append(loss)  # read by nobody here
        return {"loss": loss, "logits": None}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.shared_step(batch, "val")

    def configure_optimizers(self):
        return make_adamw(self)


def make_adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def make_module(kind=Classifier):
    torch.manual_seed(0)
    return kind()


def batch_at(step, rows=16):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return [x, rng.integers(0, 3, rows).astype(np.int32)]


EXAMPLE = (torch.zeros(4, 4), torch.zeros(4, dtype=torch.long))


def fit(lightning, plan, steps=NUM_STEPS):
    """Validate and train in turn: all metrics, and the last state."""
    state, found = fz.init(lightning.model, lightning.tx, plan), []
    train = fz.train_step(lightning.model, lightning.tx, plan)
    evaluate = fz.eval_step(lightning.model, plan)
    for step in range(steps):
        evaluated = evaluate(state, batch_at(step))
        state, metrics = train(state, batch_at(step))
        found.append(jax.device_get((evaluated, metrics)))
    return found, state


def by_torch(module, optimizer, scheduler=None):
    """What a trainer does with it: `(validation loss, accuracy, training loss)` of each step."""
    found = []
    for step in range(NUM_STEPS):
        x, labels = (torch.from_numpy(part) for part in batch_at(step))
        with torch.no_grad():
            logits = module.eval().net(x)
        right = float((logits.argmax(-1) == labels).float().mean())
        validation = float(functional.cross_entropy(logits, labels.long()))
        loss = functional.cross_entropy(module.train().net(x), labels.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        found.append((validation, right, float(loss.detach())))
    return found


@pytest.fixture(scope="module")
def classifier():
    module = make_module()
    return module, tb.from_lightning(module, EXAMPLE)


def test_steps_and_optimizer_are_those_of_the_module(classifier):
    _, lightning = classifier
    # One device, or batch statistics would be of other rows.
    found, state = fit(lightning, tiny.plan(zero=3, data=1))
    module = make_module()
    expected = by_torch(module, make_adamw(module))
    for (evaluated, metrics), (validation, right, loss) in zip(found, expected, strict=True):
        assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-5)
        assert float(evaluated["loss"]) == pytest.approx(validation, rel=2e-5)
        assert float(evaluated["val_accuracy"]) == pytest.approx(right)
        assert metrics["train_loss"] == metrics["loss"]
        assert evaluated["val_loss"] == evaluated["loss"]
        assert metrics["constant"] == evaluated["constant"] == 0.5
    assert set(found[0][0]) == {"loss", "count", "val_loss", "val_accuracy", "constant"}
    entries = tb.state_dict(lightning.converted, state)
    assert list(entries) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose(entries[name], tensor, 1e-4, 1e-5, err_msg=name)


def test_validating_changes_no_training(classifier):
    _, lightning = classifier
    plan = tiny.plan(zero=3)
    train = fz.train_step(lightning.model, lightning.tx, plan)
    state = fz.init(lightning.model, lightning.tx, plan)
    alone = []
    for step in range(3):
        state, metrics = train(state, batch_at(step))
        alone.append(metrics["loss"].tobytes())
    found, _ = fit(lightning, plan, steps=3)
    assert [metrics["loss"].tobytes() for _, metrics in found] == alone


def test_the_module_is_left_as_it_was(classifier):
    module, _ = classifier
    assert type(module) is Classifier
    assert module.training
    assert module.outputs == []
    assert not {"forward", "log", "trainer"} & set(vars(module))


def stepping(interval, frequency=1, **options):
    def configure(self):
        sgd = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = lr_scheduler.ExponentialLR(sgd, 0.5)
        config = {"scheduler": scheduler, "interval": interval, "frequency": frequency}
        return {"optimizer": sgd, "lr_scheduler": config, "monitor": "val_loss"}

    return configure, options


def asking_the_trainer(self):
    sgd = torch.optim.SGD(self.parameters(), lr=0.5)
    # 4 steps, in 2 epochs of 3
    steps = self.trainer.estimated_stepping_batches * self.trainer.max_epochs / 2
    falling = lr_scheduler.LambdaLR(sgd, lambda n: 1 - n / steps)
    return [sgd], [{"scheduler": falling, "interval": "step"}]


def bare_scheduler(self):
    sgd = torch.optim.SGD(self.parameters(), lr=0.5)
    return [sgd], [lr_scheduler.StepLR(sgd, 2, 0.5)]


def in_tuples(self):
    of = stepping("step")[0](self)
    return [of["optimizer"]], (of["lr_scheduler"],)


# (configure_optimizers, arguments, rate after 0, 1, ... steps)
FORMS = {
    "optimizer": (lambda s: torch.optim.SGD(s.parameters(), lr=0.5), {}, [0.5, 0.5]),
    "list": (lambda s: [torch.optim.SGD(s.parameters(), lr=0.5)], {}, [0.5, 0.5]),
    "dict": (lambda s: {"optimizer": torch.optim.SGD(s.parameters(), lr=0.5)}, {}, [0.5, 0.5]),
    "dict-step": (*stepping("step"), [0.5, 0.25, 0.125]),
    "dict-frequency": (*stepping("step", 2, steps_per_epoch=4), [0.5, 0.5, 0.25, 0.25]),
    "dict-epoch": (*stepping("epoch", 3, steps_per_epoch=2), [*[0.5] * 6, 0.25]),
    "list-of-dicts": (lambda s: [stepping("step")[0](s)], {}, [0.5, 0.25]),
    "two-lists": (asking_the_trainer, {"num_steps": 4, "steps_per_epoch": 3}, [0.5, 0.375, 0.25]),
    "list-and-tuple": (in_tuples, {}, [0.5, 0.25]),
    "bare-scheduler": (bare_scheduler, {"steps_per_epoch": 1}, [0.5, 0.5, 0.25]),
}


@pytest.fixture(scope="module")
def line():
    """The smallest module that a class may change: converted in a moment."""

    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def training_step(self, batch, batch_idx):
            return (batch * self.weight).square().mean()

    return Line


def convert(kind, **options):
    return tb.from_lightning(kind(), torch.ones(4, 2), **options)


def test_the_number_of_rows_may_be_logged(line):
    def step(self, batch, batch_idx):
        self.log("rows", batch.shape[0])
        return (batch * self.weight).square().mean()

    lightning = convert(type("Line", (line,), {"training_step": step}), tx=optax.sgd(0.1))
    plan, rows = tiny.plan(data=2), np.zeros((12, 2), np.float32)
    state = fz.init(lightning.model, lightning.tx, plan)
    metrics = fz.train_step(lightning.model, lightning.tx, plan)(state, rows)[1]
    assert metrics["rows"] == 6  # of one device


def test_what_saves_time_in_a_forward_that_the_step_calls_is_computed_anew(line):
    """The module's call of itself is a part of the step's."""

    def forward(self, x):
        if not hasattr(self, "table"):
            self.table = torch.arange(1.0, 3.0)
        return x * self.weight * self.table

    def step(self, batch, batch_idx):
        return self(batch).square().mean()

    with pytest.warns(tb.PythonStateWarning, match="keeps table, which follows from sizes"):
        lightning = convert(
            type("Line", (line,), {"forward": forward, "training_step": step}), tx=optax.sgd(0.1)
        )
    plan, ones = tiny.plan(data=2), np.ones((4, 2), np.float32)
    state = fz.init(lightning.model, lightning.tx, plan)
    assert fz.train_step(lightning.model, lightning.tx, plan)(state, ones)[1]["loss"] == 2.5


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_configure_optimizers(line, name):
    configure, options, rates = FORMS[name]
    lightning = convert(type("Line", (line,), {"configure_optimizers": configure}), **options)
    params = {"weight": np.ones(2, np.float32)}
    state = lightning.tx.init(params)
    for rate in rates:
        updates, state = lightning.tx.update(params, state, params)
        assert float(updates["weight"][0]) == pytest.approx(-rate)


def test_a_step_that_failed_is_traced_again_as_a_step(line):
    """With other free sizes: what it had logged until then does not count, nor that it ran."""

    def training_step(self, batch, batch_idx):
        self.log(f"of {batch.ndim} dims", batch.mean())
        assert batch.ndim == 2
        return batch.mean()

    module = type("Line", (line,), {"training_step": training_step})()
    with as_steps(module, None):
        with pytest.raises(AssertionError):
            module(torch.ones(2))
        assert set(module(torch.ones(4, 2))["logs"]) == {"of 2 dims"}


def test_an_optax_optimizer_replaces_configure_optimizers(line):
    tx = optax.sgd(0.1)
    lightning = convert(line, tx=tx)
    assert lightning.tx is tx
    # Without a validation_step evaluation runs the training step in eval mode.
    value, _, metrics = lightning.model.loss(*lightning.model.init, np.ones((3, 2)), None, False)
    assert (float(value), metrics) == (1.0, {})


def uses(code):
    """A training step with a line more."""
    names = {"torch": torch}
    lines = "".join(f"\n    {one}" for one in code.split("; "))
    source = f"def training_step(self, batch, batch_idx):{lines}\n    return batch.mean()"
    exec(compile(source, "<step>", "exec"), names)
    return {"training_step": names["training_step"]}


def returns(configure):
    return {"configure_optimizers": configure}


SGD = torch.optim.SGD
# (members of the class, arguments, what the error says)
REFUSED = {
    "manual": ({"automatic_optimization": False}, {}, "automatic_optimization is False"),
    "hook": (
        {"on_before_optimizer_step": lambda self, optimizer: None},
        {},
        r"on_before_optimizer_step: .*belongs into the optax.*\n.*ignore_hooks",
    ),
    "clipping": (
        {"configure_gradient_clipping": lambda self: None},
        {},
        r"configure_gradient_clipping: clip with Plan\(clip_norm",
    ),
    "callbacks": ({"configure_callbacks": lambda self: []}, {}, r"configure_callbacks: .*plan"),
    "unknown hook": ({}, {"ignore_hooks": ["on_tea"]}, r"\['on_tea'\] are no hooks"),
    "trainer": (uses("self.trainer.max_epochs"), {}, r"uses self\.trainer"),
    "toggle": (uses("self.toggle_optimizer(None)"), {}, r"uses self\.toggle_optimizer"),
    "optimizers": (uses("self.optimizers().step()"), {}, r"uses self\.optimizers"),
    "epoch": (uses("x = self.current_epoch"), {}, r"uses self\.current_epoch"),
    "index": (uses("x = batch_idx % 2"), {}, "uses the value of batch_idx"),
    "index in torch": (uses("x = batch * batch_idx"), {}, "value of batch_idx|cannot trace"),
    "log shape": (uses("self.log('x', batch)"), {}, r"self\.log\('x'\): expected one number"),
    "log sum": (uses("self.log('x', 1, reduce_fx='sum')"), {}, "reduce_fx='sum'.*log a mean"),
    "log object": (uses("self.log('x', object())"), {}, "expected a tensor or a number"),
    "no loss": ({"training_step": lambda self, batch, i: None}, {}, "expected a scalar loss"),
    "loss shape": (
        {"training_step": lambda self, batch, i: batch},
        {},
        r"training_step: expected a scalar loss.*shape \(",
    ),
    "loaders": (
        {"validation_step": lambda self, batch, batch_idx, dataloader_idx: batch.mean()},
        {},
        r"validation_step takes \['dataloader_idx'\]",
    ),
    "which loss": (
        {"validation_step": lambda self, batch, batch_idx: self.log("accuracy", batch.mean())},
        {},
        r"logs \['accuracy'\]; return the loss, or say with eval_loss=",
    ),
    "no optimizer": ({}, {}, "has no configure_optimizers; pass tx="),
    "None": (returns(lambda s: None), {}, "configure_optimizers returned None"),
    "two": (
        returns(lambda s: [SGD(s.parameters(), 0.1), SGD(s.parameters(), 0.2)]),
        {},
        "returns 2 optimizers",
    ),
    "two schedulers": (
        returns(lambda s: ([o := SGD(s.parameters(), 0.1)], [lr_scheduler.StepLR(o, 1)] * 2)),
        {},
        "returns 2 schedulers.*ChainedScheduler",
    ),
    "epochs": (returns(bare_scheduler), {}, "once per epoch: pass steps_per_epoch="),
    "frequency": (
        returns(stepping("step", 2)[0]), {}, "frequency=2: pass steps_per_epoch=.*'frequency': 1"
    ),
    "uneven": (
        returns(stepping("step", 2)[0]), {"steps_per_epoch": 3}, "every 2 batches.*epoch of 3"
    ),
    "steps": (returns(asking_the_trainer), {}, r"estimated_stepping_batches: pass num_steps="),
    "more of the trainer": (
        returns(lambda s: s.trainer.datamodule), {}, r"uses self\.trainer\.datamodule"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pure_step_would_leave_out_is_refused_by_name(line, name):
    members, options, message = REFUSED[name]
    kind = type("Line", (line,), members)
    module = kind()
    with pytest.raises(ConversionError, match=message):
        tb.from_lightning(module, torch.ones(4, 2), **options)
    assert type(module) is kind


def test_what_makes_a_module_ready_has_to_be_called_before(line):
    kind = type("Line", (line,), {"setup": lambda self, stage: self.requires_grad_(False)})
    with pytest.warns(UserWarning, match=r"Line\.setup is taken as called: .*Call it before"):
        convert(kind, tx=optax.sgd(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(kind, tx=optax.sgd(0.1), ignore_hooks=("setup",))


def test_a_module_without_steps_is_refused():
    with pytest.raises(ConversionError, match="Linear has no training_step"):
        tb.from_lightning(nn.Linear(2, 1), torch.ones(4, 2))


def test_hooks_may_be_ignored_and_the_loss_chosen(line):
    def validate(self, batch):
        self.log("loss", 2 * batch.mean())
        self.log("other_loss", batch.mean())
        return batch.sum()

    members = {"on_train_epoch_end": lambda self: None, "validation_step": validate}
    lightning = convert(
        type("Line", (line,), members),
        tx=optax.sgd(0.1), eval_loss="other_loss", ignore_hooks=["on_train_epoch_end"],
    )  # fmt: skip
    value, _, metrics = lightning.model.loss(*lightning.model.init, np.ones((3, 2)), None, False)
    assert (float(value), {k: float(v) for k, v in metrics.items()}) == (
        1.0, {"logged_loss": 2.0, "other_loss": 1.0}
    )  # fmt: skip


def test_predictions_are_those_of_predict_step_or_of_forward(line, classifier):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3)]
            self.blocks = nn.Sequential(*blocks)

        def forward(self, batch):
            return self.blocks(batch)

        def training_step(self, batch, batch_idx):
            return self(batch).square().mean()

        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return {"out": self(batch), "name": "not an array"}

    rows = torch.randn(6, 2)
    for plan in (tiny.plan(zero=3, data=2), tiny.plan(zero=1, data=2, precision="bf16")):
        module = make_module(Deep)
        found = tb.from_lightning(module, torch.ones(4, 2), tx=optax.sgd(0.1))
        assert [link.name for link in found.model.predictor] == ["start", "blocks", "end"]
        outputs = fz.predict_step(found.model, plan)(fz.init(found.model, None, plan), rows.numpy())
        expected = module(rows).detach().numpy()
        tolerance = 1e-5 if plan.precision == "fp32" else 0.03
        np.testing.assert_allclose(
            outputs["out"].astype(np.float32), expected, tolerance, tolerance
        )

    plan = tiny.plan(data=2)
    members = {"forward": lambda self, batch: batch @ self.weight}
    found = convert(type("Line", (line,), members), tx=optax.sgd(0.1))
    ones = np.ones((4, 2), np.float32)
    outputs = fz.predict_step(found.model, plan)(fz.init(found.model, None, plan), ones)
    np.testing.assert_array_equal(outputs, [2.0, 2.0, 2.0, 2.0])
    model = classifier[1].model  # its forward takes no batch
    with pytest.raises(ConversionError, match=r"(?s)forward.*Classifier.*predict_step\(batch"):
        fz.predict_step(model, plan)(fz.init(model, None, plan), batch_at(0))


def test_a_predict_step_of_its_own_that_cannot_be_converted_is_named(line):
    members = {"predict_step": lambda self, batch, batch_idx: batch.tolist()}
    model = convert(type("Line", (line,), members), tx=optax.sgd(0.1)).model
    plan = tiny.plan(data=2)
    with pytest.raises(ConversionError, match="predict_step: predict_step of Line could not"):
        fz.predict_step(model, plan)(fz.init(model, None, plan), np.ones((4, 2), np.float32))


def test_with_lightning_itself():
    from pytorch_lightning import LightningModule  # two seconds: only here

    steps = {name: member for name, member in vars(Classifier).items() if "__" not in name}
    own = {"__init__": init_of_net, "logger": "one of its own"}
    kind = type("Real", (LightningModule,), {**steps, **own})
    found, _ = fit(tb.from_lightning(make_module(kind), EXAMPLE), tiny.plan(zero=3, data=1))
    module = make_module()
    expected = by_torch(module, make_adamw(module))
    losses = [float(metrics["loss"]) for _, metrics in found]
    np.testing.assert_allclose(losses, [loss for *_, loss in expected], 2e-5)


def init_of_net(self):
    super(type(self), self).__init__()
    self.net, self.outputs = Classifier().net, []
