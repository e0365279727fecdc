"""Configurations of DeepSpeed, Accelerate and the Trainer, as they are published, and bent ones."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import fzero as fz
import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.cli.import_config import app


DATA = json.loads((pathlib.Path(__file__).parents[1] / "data/configs/published.json").read_text())


@pytest.fixture(autouse=True)
def _as_users_promote():
    with jax.numpy_dtype_promotion("standard"):  # optax.adam wants it
        yield


def imported(row):
    if row["kind"] == "accelerate":
        return tb.from_accelerate(row["config"])
    given = {key: value for key, value in DATA["auto"].items() if says_auto(row["config"], key)}
    return tb.from_deepspeed(row["config"], devices=DATA["devices"], auto=given)


def says_auto(config, key):
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config == "auto"


@pytest.mark.parametrize("row", DATA["configs"], ids=lambda row: row["source"])
def test_published_configurations(row):
    if "error" in row:
        with pytest.raises(ConversionError) as failed:
            imported(row)
        assert str(failed.value) == row["error"]
        return
    got = imported(row)
    assert f"fz.{got.plan!r}" == row["plan"]
    # Every key of the file is told of, whichever way.
    told = {note.key.split(".")[0] for note in got.notes}
    quiet = {"num_machines", "mixed_precision", "data_types"}
    assert not {key for key, value in row["config"].items() if value} - told - quiet


@pytest.mark.parametrize("case", DATA["rates"]["cases"], ids=lambda case: str(case["params"])[:60])
def test_rates_are_those_of_deepspeed(case):
    got = tb.from_deepspeed({
        "optimizer": {"type": "AdamW", "params": {"lr": DATA["rates"]["lr"]}},
        "scheduler": {"type": case["type"], "params": case["params"]},
    })  # fmt: skip
    rates = [got.schedule(jnp.int32(n)) for n in range(len(case["rates"]))]
    # Rates are float32 here and float64 there.
    np.testing.assert_allclose(rates, case["rates"], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "params", "make"),
    [
        ("AdamW", {"lr": 0.1, "weight_decay": 0.1, "betas": [0.8, 0.9]},
         lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, betas=(0.8, 0.9))),
        # DeepSpeed's Adam decays as AdamW does unless it is told otherwise.
        ("Adam", {"lr": 0.1, "weight_decay": 0.1},
         lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        ("Adam", {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False},
         lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1)),
        ("AdamW", {"lr": 0.1, "torch_adam": True}, lambda p: torch.optim.AdamW(p, lr=0.1)),
        # DeepSpeed's own kernels decay nothing unless they are told to.
        ("AdamW", {"lr": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0)),
        ("Adam", {"lr": 0.1, "torch_adam": True}, lambda p: torch.optim.AdamW(p, lr=0.1)),
        # PyTorch's own Adam decays nothing either, only its AdamW does.
        ("Adam", {"lr": 0.1, "torch_adam": True, "adam_w_mode": False},
         lambda p: torch.optim.Adam(p, lr=0.1)),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
         lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)),
    ],
)  # fmt: skip
def test_optimizers_are_those_of_torch(name, params, make):
    tx = tb.from_deepspeed({"optimizer": {"type": name, "params": params}}).tx
    w = np.array([1.0, -2.0, 0.5], "f")
    theirs = torch.nn.Parameter(torch.tensor(w))
    optimizer, ours, state = make([theirs]), jnp.array(w), tx.init(jnp.array(w))
    for _ in range(4):
        theirs.grad = 2 * theirs.detach() + 1
        optimizer.step()
        updates, state = tx.update(2 * ours + 1, state, ours)
        ours = ours + updates
    # optax takes 1 - 0.999**t in float32, torch in float64: 6e-5 of each update of 0.1.
    np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "half", "dtype"),
    [("fp32", "bf16", "fp32"), ("bf16", "bf16", None), ("fp32", None, None)],
)
def test_gradients_are_sent_in_float32_where_it_is_said(kind, half, dtype):
    config = {"communication_data_type": kind, **({half: {"enabled": True}} if half else {})}
    assert tb.from_deepspeed(config).plan.reduce_dtype == dtype


def test_lions_second_beta_is_deepspeeds():
    """0.99: after a gradient of 1, one of -0.05 turns nothing yet (with Adam's 0.999 it would)."""
    tx = tb.from_deepspeed({"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}).tx
    w, moved = jnp.zeros(()), []
    state = tx.init(w)
    for gradient in (1.0, -0.05):
        update, state = tx.update(jnp.float32(gradient), state, w)
        moved.append(float(update))
    np.testing.assert_allclose(moved, [-0.1, -0.1], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stag": 2}}, "zero_optimization.stag is 2.*did you mean 'stage'"),
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, r"pass auto=.*params\.lr"),
        ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "compressed reductions"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "optax.amsgrad"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "keep one"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "write 0"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, "pass devices="),
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}}, "8-bit"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "device 'cpu'"),
        ({"curriculum_learning": {"enabled": True}}, "choose your batches"),
        ({"sparse_attention": {"mode": "fixed"}}, "write the mask into your model"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "total_num_steps is missing"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9.5}}},
         "total_num_steps is 9.5.*expected a whole number"),
        ({"train_batch_size": 0}, "train_batch_size is 0: expected 1 or more"),
        ({"train_batch_size": -16}, "train_batch_size is -16: expected 1 or more"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 0}, "per_gpu is 0: expected 1"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -0.1}}}, "lr is -0.1: expected 0 or"),
        ({"optimizer": {"type": "Lion", "params": {"betas": [0.9, 1]}}}, "two numbers below 1"),
        ({"optimizer": {"type": "SGD", "params": {"weight_decay": -1}}}, "decay is -1: expected 0"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_its_key(config, words):
    with pytest.raises(ConversionError, match=words):
        tb.from_deepspeed(config)


@pytest.mark.parametrize(
    ("read", "config", "words"),
    [
        (tb.from_accelerate, {"num_processes": 0}, "num_processes is 0: expected 1 or more"),
        (tb.from_accelerate, {"num_processes": -2}, "num_processes is -2: expected 1 or more"),
        (tb.from_accelerate, {"num_machines": 0}, "num_machines is 0: expected 1 or more"),
        (tb.from_training_arguments, {"per_device_train_batch_size": 0}, "size is 0: expected 1"),
        (tb.from_training_arguments, {"gradient_accumulation_steps": 0}, "steps is 0: expected 1"),
        (tb.from_training_arguments, {"learning_rate": -1.0}, "rate is -1.0: expected 0 or more"),
        (tb.from_training_arguments, {"adam_beta2": 1}, "beta2 is 1.0: expected less than 1"),
    ],
)
def test_counts_and_rates_that_cannot_be_are_refused(read, config, words):
    with pytest.raises(ConversionError, match=words):
        read(config)


def test_accelerates_number_of_processes_that_nobody_said_is_noted():
    got = tb.from_accelerate({"num_processes": -1})
    assert got.plan.data is None
    assert [(note.key, note.value) for note in got.notes if note.key == "num_processes"] == [
        ("num_processes", -1)
    ]


def test_a_rate_that_yaml_takes_for_a_text_is_a_number(tmp_path):
    path = tmp_path / "arguments.yaml"
    path.write_text("learning_rate: 5e-5\nmax_steps: 10\ngradient_accumulation_steps: 4\n")
    got = tb.from_training_arguments(path)
    assert (float(got.schedule(0)), got.plan.microbatches) == (pytest.approx(5e-5), 4)


def test_a_loss_scale_that_is_switched_off_is_not_in_the_plan():
    off = {"fp16": {"enabled": False, "loss_scale": 128, "initial_scale_power": 4}}
    assert tb.from_deepspeed(off).plan == tb.from_deepspeed({}).plan


def test_names_of_older_files_park_parameters_and_moments_on_the_host():
    def found(**old):
        return tb.from_deepspeed({"zero_optimization": {"stage": 3, **old}}).plan

    assert found(cpu_offload_param=True) == fz.Plan(zero=3, tiers={"params": "host"})
    assert found(cpu_offload=True) == fz.Plan(zero=3, tiers={"opt_state": "host"})


def test_batch_sizes_that_do_not_agree():
    config = {"train_batch_size": 60, "train_micro_batch_size_per_gpu": 4,
              "gradient_accumulation_steps": 2}  # fmt: skip
    with pytest.raises(ConversionError, match=r"expected 4 x 2 x 8 devices = 64"):
        tb.from_deepspeed(config, devices=8)
    got = tb.from_deepspeed({**config, "train_batch_size": 64}, devices=8)
    assert (got.plan.microbatches, got.batch_size) == (2, 64)


def test_a_state_trains_with_what_a_file_says(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
    }))  # fmt: skip
    got = tb.from_deepspeed(file, devices=2)
    model = fz.Model(
        lambda rng: ({"w": jnp.zeros(4)}, {}),
        lambda p, b, batch, rng, train: (jnp.mean((batch["x"] @ p["w"] - 1) ** 2), b, {}),
    )
    plan = dataclasses.replace(got.plan, data=2)
    state, step = fz.init(model, got.tx, plan), fz.train_step(model, got.tx, plan)
    losses = []
    for _ in range(20):
        state, metrics = step(state, {"x": np.ones((8, 4), "f")})
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1] == 1.0  # DeepSpeed's first updates run at the rate 0
    assert losses[-1] < 0.2


ARGUMENTS = {
    "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 3, "max_steps": 10,
    "adam_beta2": 0.95, "bf16": False, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
    "per_device_train_batch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("zero", "plan"),
    [
        ({"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2},
         fz.Plan(zero=3, gather_dtype="int8", secondary=2)),
        ({"stage": 3, "mics_shard_size": 2}, fz.Plan(zero=3, data=2, replica=4)),
        ({"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/d", "ratio": 0.5}},
         fz.Plan(zero=1, tiers={"opt_state": ("disk", 0.5)}, disk_path="/d")),
    ],
)  # fmt: skip
def test_shards_of_several_sizes_and_places(zero, plan):
    assert tb.from_deepspeed({"zero_optimization": zero}, devices=8).plan == plan


@pytest.mark.parametrize(("on_cpu", "remat"), [(True, "offload"), (False, fz.Plan().remat)])
def test_checkpoints_of_activations_are_where_deepspeed_has_them(on_cpu, remat):
    config = {"activation_checkpointing": {"cpu_checkpointing": on_cpu, "profile": False}}
    assert tb.from_deepspeed(config).plan.remat == remat


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
def test_rates_are_those_of_the_trainer(kind):
    got = tb.from_training_arguments({**ARGUMENTS, "lr_scheduler_type": kind}, devices=2)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = transformers.get_scheduler(kind, optimizer, 3, 10)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    ours = [got.schedule(jnp.int32(n)) for n in range(11)]
    # float32 here; a cosine near its end is a difference of ones.
    np.testing.assert_allclose(ours, rates, rtol=1e-6, atol=1e-10)
    assert (got.plan.microbatches, got.plan.clip_norm, got.batch_size) == (2, 0.5, 16)


class Recurrent(torch.nn.Module):
    """Names with `bias` in them, and norms of several names."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.gru, self.bn1 = torch.nn.GRU(8, 8), torch.nn.BatchNorm1d(8)
        self.norm, self.q_norm, self.norm2 = (torch.nn.LayerNorm(8) for _ in range(3))
        self.relative_attention_bias = torch.nn.Embedding(4, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
        ),
        Recurrent,
    ],
    ids=["gpt2", "recurrent"],
)
def test_the_trainer_decays_neither_biases_nor_norms(make):
    module = make()
    # With a rate of 1 and no gradient, an update is what the decay takes.
    tx = tb.from_training_arguments({
        **ARGUMENTS, "learning_rate": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0,
    }).tx  # fmt: skip
    params = {name: jnp.ones(p.shape) for name, p in module.named_parameters()}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    decayed = {name for name, update in updates.items() if np.any(update)}
    theirs = transformers.Trainer.get_decay_parameter_names(None, module)
    assert decayed == {name for name in params if name in theirs}


@pytest.mark.parametrize(
    ("words", "config", "fields"),
    [
        ("full_shard auto_wrap", {}, {"zero": 3}),
        ("shard_grad_op offload", {}, {"zero": 2, "tiers": {"opt_state": "host"}}),
        (["full_shard"], {"activation_checkpointing": True}, {"zero": 3, "remat": "layer"}),
        (True, {"version": 2, "reshard_after_forward": False}, {"zero": 2}),
        (True, {"cpu_offload": True, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
         {"zero": 3, "tiers": {"opt_state": "host", "params": "host"}}),
    ],
)  # fmt: skip
def test_arguments_with_fsdp(words, config, fields, tmp_path):
    given = {"max_steps": 10, "fsdp": words, "fsdp_config": config}
    plan = fz.Plan(**{"data": 8, "clip_norm": 1.0, "remat": "none", **fields})
    assert tb.from_training_arguments(given, devices=8).plan == plan
    (tmp_path / "fsdp.json").write_text(json.dumps(config))
    in_a_file = {**given, "fsdp_config": str(tmp_path / "fsdp.json")}
    assert tb.from_training_arguments(in_a_file, devices=8).plan == plan
    # transformers says words otherwise than they were given.
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
    assert tb.from_training_arguments(arguments, devices=8).plan == plan
    assert tb.from_training_arguments({**given, "fsdp": ""}, devices=8).plan.zero == 0


def test_arguments_with_a_deepspeed_file_fill_in_its_autos():
    config = {
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto"}},
        "gradient_clipping": "auto", "train_batch_size": "auto",
    }  # fmt: skip
    got = tb.from_training_arguments({**ARGUMENTS, "bf16": True, "deepspeed": config}, devices=4)
    assert (got.plan.zero, got.plan.precision, got.plan.clip_norm) == (3, "bf16", 0.5)
    assert float(got.schedule(4)) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("arguments", "config", "said"),
    [
        ({"max_grad_norm": 1.0}, {"gradient_clipping": 5.0}, "gradient_clipping is 5.0, and max_"),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2}, "is 2, and gra"),
        ({"fp16": True}, {"fp16": {"enabled": False}}, "fp16.enabled is False, and fp16 is True"),
        ({"learning_rate": 1e-3}, {"optimizer": {"params": {"lr": 0.5}}}, "lr is 0.5, and learn"),
        ({"adam_beta1": 0.5}, {"optimizer": {"params": {"betas": [0.9, 0.999]}}}, "betas is"),
        ({"fsdp": "full_shard"}, {}, "deepspeed and fsdp are both given"),
    ],
)
def test_a_deepspeed_file_that_says_otherwise_is_refused(arguments, config, said):
    file = {"zero_optimization": {"stage": 1}, **config}
    with pytest.raises(fz.ConversionError, match=re.escape(said)):
        tb.from_training_arguments(
            {**ARGUMENTS, "adam_beta2": 0.999, **arguments, "deepspeed": file}, devices=4
        )


def test_a_number_of_steps_that_is_said_twice_is_one():
    asked = {**ARGUMENTS, "max_steps": 10}
    assert tb.from_training_arguments(asked, num_steps=10).schedule is not None
    with pytest.raises(fz.ConversionError, match="max_steps is 10, and num_steps=100"):
        tb.from_training_arguments(asked, num_steps=100)


def test_arguments_that_clip_nothing_do_not_clip():
    assert tb.from_training_arguments({**ARGUMENTS, "max_grad_norm": 0.0}).plan.clip_norm is None
    assert tb.from_training_arguments({**ARGUMENTS, "max_grad_norm": None}).plan.clip_norm is None
    del (none := dict(ARGUMENTS))["max_grad_norm"]
    assert tb.from_training_arguments(none).plan.clip_norm == 1.0


@pytest.mark.parametrize(("asked", "remat"), [(True, "layer"), (False, "none")])
def test_checkpointing_of_gradients_is_remat(asked, remat):
    got = tb.from_training_arguments({**ARGUMENTS, "gradient_checkpointing": asked}, devices=2)
    assert got.plan.remat == remat


@pytest.mark.parametrize(("strategy", "zero"), [("HYBRID_SHARD", 3), ("HYBRID_SHARD_ZERO2", 2)])
def test_machines_are_replicas_of_a_hybrid_sharding(strategy, zero):
    plan = tb.from_accelerate({
        "distributed_type": "FSDP", "num_processes": 24, "num_machines": 3,
        "fsdp_config": {"fsdp_sharding_strategy": strategy},
    }).plan  # fmt: skip
    assert (plan.zero, plan.data, plan.replica) == (zero, 8, 3)


@pytest.mark.parametrize("apart", [False, True])
def test_accelerate_takes_its_deepspeed_part(apart, tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({
        "zero_optimization": zero, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5,
    }))  # fmt: skip
    named = "deepspeed_config_file: ds.json"
    inside = """zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: none
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  zero3_init_flag: true"""
    (tmp_path / "accelerate.yaml").write_text(f"""distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
parallelism_config:
  parallelism_config_tp_size: 2
deepspeed_config:
  {named if apart else inside}
""")
    plan = tb.from_accelerate(tmp_path / "accelerate.yaml").plan
    assert plan == fz.Plan(
        zero=3, data=4, tensor=2, precision="bf16", microbatches=4, clip_norm=0.5,
        tiers={"opt_state": "host"}, remat=plan.remat,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "sizes", "axes"),
    [
        (4, {"tp": 2}, {"data": 2, "tensor": 2}),
        (8, {"dp_replicate": 2, "cp": 2}, {"replica": 2, "data": 2, "context": 2}),
        (4, {"dp_shard": 2, "tp": 2}, {"data": 2, "tensor": 2}),
        (2, {"tp": 4}, "num_processes is 2: .*data=1 x tensor=4"),
        (6, {"tp": 4}, "num_processes is 6: .*data=1 x tensor=4"),
        (8, {"dp_shard": 2, "tp": 2}, "num_processes is 8: .*data=2 x tensor=2"),
    ],
)
def test_processes_are_the_product_of_all_axes(processes, sizes, axes):
    given = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    config = {"distributed_type": "FSDP", "num_processes": processes, "parallelism_config": given}
    if isinstance(axes, str):
        with pytest.raises(ConversionError, match=axes):
            tb.from_accelerate(config)
        return
    assert tb.from_accelerate(config).plan.sizes(processes) == {"replica": 1, **axes}


@pytest.mark.parametrize(
    ("number", "name"),
    [(1, "FULL_SHARD"), (2, "SHARD_GRAD_OP"), (3, "NO_SHARD"), (4, "HYBRID_SHARD")],
)
def test_strategies_may_be_numbers_as_older_versions_write_them(number, name):
    plans = [
        tb.from_accelerate({
            "distributed_type": "FSDP", "num_processes": 8, "num_machines": 2,
            "fsdp_config": {"fsdp_sharding_strategy": given},
        }).plan
        for given in (number, name)
    ]  # fmt: skip
    assert plans[0] == plans[1]


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_a_part_that_is_left_out_is_noted_as_if_it_were_there(kind):
    given = {"distributed_type": kind, "num_processes": 2}
    empty = {"fsdp_config": {}} if kind == "FSDP" else {"deepspeed_config": {}}
    noted = [tb.from_accelerate(config).notes for config in (given, given | empty)]
    assert noted[0] == noted[1]
    assert any(note.became.startswith("zero=") for note in noted[0])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optim": "adafactor"}, "expected one of"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "optax.schedules"),
        ({"max_steps": -1}, "pass num_steps="),
        ({"bf16": True, "fp16": True}, "keep one"),
        ({"optim_args": "amsgrad=True"}, "optim_args is 'amsgrad=True': .*tb.optimizer"),
        ({"optim_target_modules": ["q_proj"]}, "optax.partition"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor is 0.1: .*CrossEntropy"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5.0"),
        ({"parallelism_config": {"tp_size": 2}}, "axes in the plan"),
        ({"learing_rate": 1e-3}, "learing_rate is no training argument: did you mean learning_"),
    ],
)
def test_arguments_without_counterpart_are_refused(more, words):
    with pytest.raises(ConversionError, match=words):
        tb.from_training_arguments({**ARGUMENTS, **more})


def test_the_command_prints_the_plan_and_every_key(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text('{"zero_optimization": {"stage": 1, "overlap_comm": true}, "fp16": {}}')
    done = CliRunner().invoke(app, [str(file)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("fz.Plan(zero=1)")
    assert "zero_optimization.overlap_comm" in done.output
    file.write_text("{")
    failed = CliRunner().invoke(app, [str(file)])
    assert "expected JSON" in str(failed.exception)


def test_a_share_of_warm_up_steps_is_rounded_up():
    """As transformers does: 0.1 of 15 are two."""
    values = {"learning_rate": 1.0, "max_steps": 15, "warmup_ratio": 0.1}
    assert float(tb.from_training_arguments(values).schedule(1)) == 0.5


def test_values_that_a_file_does_not_ask_for_are_told():
    config = {"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    given = {"gradient_clipping": 2.0, "optimizer.params.lr": 1e-4, "gradient_cliping": 1.0}
    with pytest.warns(
        UserWarning, match=r"auto gives gradient_cliping, optimizer\.params\.lr, and"
    ):
        assert tb.from_deepspeed(config, auto=given).plan.clip_norm == 2.0
    with pytest.warns(UserWarning, match="auto gives gradient_clipping, and the file has no"):
        tb.from_accelerate({"distributed_type": "MULTI_GPU"}, auto={"gradient_clipping": 2.0})


def test_accelerate_and_its_deepspeed_file_agree_on_the_precision(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    config = {
        "distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}
    }  # fmt: skip
    for said in ("no", "bf16"):
        assert tb.from_accelerate({**config, "mixed_precision": said}).plan.precision == "bf16"
    with pytest.raises(ConversionError, match="mixed_precision is 'fp16': the DeepSpeed file says"):
        tb.from_accelerate({**config, "mixed_precision": "fp16"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup_ratio": 5}, r"warmup_ratio=5: expected how many updates, or a share"),
        ({"warmup_steps": -1}, r"warmup_steps=-1, "),
        ({"warmup_ratio": 0.1, "lr_scheduler_type": "constant_with_warmup"}, "pass num_steps="),
    ],
)
def test_a_warmup_that_cannot_be_is_refused(values, message):
    with pytest.raises(ConversionError, match=message):
        tb.from_training_arguments(values)


def test_a_constant_rate_has_no_warmup():
    found = tb.from_training_arguments(
        {"warmup_ratio": 0.1, "lr_scheduler_type": "constant", "learning_rate": 0.5}
    )
    assert [float(found.schedule(n)) for n in (0, 9)] == [0.5, 0.5]


def test_a_run_without_devices_is_refused():
    with pytest.raises(ConversionError, match="devices=0: expected how many"):
        tb.from_training_arguments({"per_device_train_batch_size": 2, "max_steps": 3}, devices=0)
    with pytest.raises(ConversionError, match="devices=0: expected how many"):
        tb.from_deepspeed({"zero_optimization": {"stage": 1}}, devices=0)
