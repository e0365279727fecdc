"""Initial values: of modules without any, of modules that are too large to copy, and of 16 bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fzero as fz
import torch_bridge as tb


ROOT = Path(__file__).parents[2]


def tiny_llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Shifted(torch.nn.Module):
    """A linear layer and a buffer that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("shift", torch.arange(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


def on_meta() -> Shifted:
    with torch.device("meta"):
        return Shifted()


def test_a_llama_without_values_has_torchs_logits_once_it_is_restored(tmp_path: Path) -> None:
    """Rotary frequencies are in no file: transformers computes them, and so does the bridge."""
    torch.manual_seed(0)
    real = tiny_llama()
    real.save_pretrained(tmp_path)
    with torch.device("meta"):
        meta = tiny_llama()
    example = torch.zeros((2, 9), dtype=torch.int64, device="meta")
    converted = tb.convert(meta, example, train=False)
    state = tb.restore(tmp_path, converted, None, fz.Plan(data=1))
    ids = torch.randint(0, 37, (3, 7))
    run = jax.jit(lambda p, b: converted.apply(p, b, ids.numpy()).output.logits)
    want = real(ids).logits.detach().numpy()
    np.testing.assert_allclose(run(state.params, state.buffers), want, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_positions_that_transformers_leaves_out_of_files_are_computed(
    tmp_path: Path, device: str
) -> None:
    """Marian's sinusoids are parameters, which `save_pretrained` does not write."""
    import transformers

    def marian() -> Any:
        sizes = {f"{side}_{of}": n for side in ("encoder", "decoder")
                 for of, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 12))}  # fmt: skip
        config = transformers.MarianConfig(
            vocab_size=37, d_model=8, pad_token_id=0, decoder_start_token_id=0, **sizes
        )
        return transformers.MarianMTModel(config).eval()

    torch.manual_seed(0)
    real = marian()
    real.save_pretrained(tmp_path)
    with torch.device(device):
        module = marian()
    ids = torch.randint(1, 37, (2, 7))
    of = dict.fromkeys(("input_ids", "decoder_input_ids"), ids.to(device))
    converted = tb.convert(module, **of, train=False)
    state = tb.restore(tmp_path, converted, None, fz.Plan(data=1))
    given = dict.fromkeys(of, ids.numpy())
    run = jax.jit(lambda p, b: converted.apply(p, b, **given).output.logits)
    want = real(input_ids=ids, decoder_input_ids=ids).logits.detach().numpy()
    np.testing.assert_allclose(run(state.params, state.buffers), want, atol=1e-5)


def test_what_has_no_value_is_refused_by_name(tmp_path: Path) -> None:
    converted = tb.convert(on_meta(), torch.zeros((2, 3), device="meta"))
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch)))
    with pytest.raises(fz.ConversionError, match=r"`linear\.\w+`: no value.*tb\.restore"):
        fz.init(model, None, fz.Plan(data=1))
    with pytest.raises(fz.ConversionError, match=r"`linear\.\w+`: no value.*tb\.restore"):
        converted(np.ones((2, 3), np.float32))
    torch.save(Shifted().state_dict(), tmp_path / "model.pt")
    with pytest.raises(fz.CheckpointError, match=r"`shift`: no value.*buffers="):
        tb.restore(tmp_path / "model.pt", converted, None, fz.Plan(data=1))
    with pytest.raises(fz.ConversionError, match=r'same device.*x\.to\("meta"\)'):
        tb.convert(on_meta(), torch.zeros(2, 3))


def test_what_a_library_draws_is_not_taken_for_computed() -> None:
    """Random features: a buffer in no file, which `_init_weights` draws."""
    import transformers

    class Features(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.LlamaConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("drawn", torch.zeros(3), persistent=False)
            self.register_buffer("counted", torch.zeros(3), persistent=False)
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None:
            if isinstance(module, Features):
                module.drawn.normal_()
                module.counted.copy_(torch.arange(3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.drawn + self.counted

    with torch.device("meta"):
        module = Features(transformers.LlamaConfig(hidden_size=4, num_attention_heads=1))
    converted = tb.convert(module, torch.zeros(2, 3, device="meta"), train=False)
    with pytest.raises(fz.ConversionError, match=r"^`drawn`: no value") as told:
        fz.init(converted.model(lambda f, b: jnp.mean(f(b))), None, fz.Plan(data=1))
    assert "counted" not in str(told.value)


def test_buffers_that_are_in_no_checkpoint_are_given(tmp_path: Path) -> None:
    module = Shifted()
    torch.save(module.state_dict(), tmp_path / "model.pt")
    example = torch.zeros((2, 3), device="meta")
    given = {"shift": np.arange(2, dtype=np.float32)}
    converted = tb.convert(on_meta(), example, buffers=given, train=False)
    state = tb.restore(tmp_path / "model.pt", converted, None, fz.Plan(data=1))
    x = torch.randn(4, 3)
    got = converted.apply(state.params, state.buffers, x).output
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-5)
    for wrong, message in (({"lost": given["shift"]}, "no buffer"), ({"shift": x}, "shape")):
        with pytest.raises(fz.ConversionError, match=message):
            tb.convert(on_meta(), example, buffers=wrong)


def test_a_tensor_attribute_without_values_is_refused() -> None:
    module = on_meta()
    shift = module.shift
    del module.shift
    module.shift = shift
    said = r"`shift`.*`meta` device.*register_buffer.*\n  at: .*self.linear\(x\) \+ self.shift"
    with pytest.raises(fz.ConversionError, match=said):
        tb.convert(module, torch.zeros((2, 3), device="meta"))


class OfNumbers(torch.nn.Module):
    """Makes tensors of Python's numbers where its input is, in every way that PyTorch has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0], device=x.device) * torch.asarray(2, device=x.device)
        rows = torch.tensor(x.shape[0], device=x.device) + torch.as_tensor(0.5)
        other = x.new_tensor([[4, 5, 6]]) + x.new([7, 8, 9])
        other = other if x.new_tensor([4]).is_floating_point() else 0
        x = x[:, [2, 0, 1]] * scale + rows + other + x[[1]]
        x[:, [0]] = 5.0
        columns = x.t() * 1
        columns[[False, False, True]] = 6.0
        return columns.t() + x[[[0, 1], [2, 0]]].sum()  # a list of lists counts as a tuple


def test_numbers_of_a_forward_have_their_values_without_a_device() -> None:
    with torch.device("meta"):
        converted = tb.convert(OfNumbers(), torch.zeros(4, 3), train=False)
    for rows in (4, 2):
        x = torch.linspace(-1, 1, rows * 3).reshape(rows, 3)
        np.testing.assert_array_equal(converted(x), OfNumbers()(x))
    scaled = torch.nn.Identity()
    scaled.forward = lambda x: x * torch.tensor(2.0, device=x.device).item()  # type: ignore
    with pytest.raises(fz.ConversionError, match="no value to ask for"):
        tb.convert(scaled, torch.zeros((4, 3), device="meta"))
    scaled.forward = lambda x: x + torch.arange(3)  # type: ignore
    with pytest.raises(
        fz.ConversionError, match=r"tensors to be on the same device.*arange\(n, device=x.device\)"
    ):
        tb.convert(scaled, torch.zeros((4, 3), device="meta"))


def test_an_example_and_parts_on_other_devices_say_where_all_belongs() -> None:
    """PyTorch says it in other words of a norm than of a linear layer."""
    whole, part = torch.nn.LayerNorm(3), torch.nn.Sequential(torch.nn.Linear(3, 3))
    part.append(torch.nn.LayerNorm(3, device="meta"))
    said = (
        r"on the (same|expected) device.*x\.to\(\"meta\"\).*module\.to\(\"meta\"\)(.|\n)*at: File"
    )
    for module in (whole.to("meta"), part):
        with pytest.raises(fz.ConversionError, match=said):
            tb.convert(module, torch.zeros(4, 3))


MEMORY = """
import tests.conftest
import torch, torch_bridge as tb


def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


class Block(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.a = torch.nn.Linear(size, size, bias=False)

    def forward(self, x):
        return x + torch.relu(self.a(x))


def made(size):
    return torch.nn.Sequential(*(Block(size) for _ in range(5)))


tb.convert(made(8), torch.zeros(2, 8))  # what torch.export loads once
module = made(4096)
size = sum(p.numel() * 4 for p in module.parameters())
before = resident("VmRSS")
tb.convert(module, torch.zeros(2, 4096))
print((resident("VmHWM") - before) / size)
"""


@pytest.mark.slow
def test_converting_a_large_module_takes_a_fraction_of_its_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) <= 0.15


def test_a_module_that_is_read_where_it_lies_may_not_change() -> None:
    module = torch.nn.Linear(3, 2)
    converted = tb.convert(module, torch.zeros(2, 3), copy=False)
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch)))
    state = fz.init(model, None, fz.Plan(data=1))
    np.testing.assert_array_equal(state.params["weight"], module.weight.detach().numpy())
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(fz.ConversionError, match=r"`weight` was changed in place.*copy=True"):
        fz.init(model, None, fz.Plan(data=1))
    # These writes PyTorch does not count: some elements of a large tensor are compared.
    module = torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.Linear(100, 2))
    converted = tb.convert(module, torch.zeros(2, 300), copy=False)
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch)))
    fz.init(model, None, fz.Plan(data=1))
    module[0].weight.data.t()[:, :50] *= 2
    with pytest.raises(fz.ConversionError, match=r"`0\.weight` was changed in place"):
        fz.init(model, None, fz.Plan(data=1))
    module[0].weight.data.t()[:, :50] /= 2
    module[1].bias.detach().numpy()[0] = 3
    with pytest.raises(fz.ConversionError, match=r"`1\.bias` was changed in place"):
        fz.init(model, None, fz.Plan(data=1))
    # Another dtype is other memory: what was converted is still there.
    module = torch.nn.Linear(3, 2)
    want = module.weight.detach().numpy().copy()
    converted = tb.convert(module, torch.zeros(2, 3), copy=False)
    module.bfloat16()
    np.testing.assert_array_equal(converted.params["weight"], want)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_16_bit_module_learns_in_small_steps(layers: int, tmp_path: Path) -> None:
    """A step of AdamW(1e-5) is lost in bfloat16: there are masters, and exports round them."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers))).bfloat16()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    converted = tb.convert(module, x)
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch).astype("float32") ** 2))
    tx, plan = optax.adamw(1e-5), fz.Plan(data=1, precision="bf16")
    state = fz.init(model, tx, plan)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    before = jax.device_get(state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax's own
        state, _ = fz.train_step(model, tx, plan)(state, np.ones((2, 4), np.float32))
    changed = jax.tree.map(lambda a, b: bool(np.all(a != b)), before, jax.device_get(state.params))
    assert all(jax.tree.leaves(changed))
    back = tb.state_dict(converted, state)
    assert {tensor.dtype for tensor in back.values()} == {torch.bfloat16}
    tb.save(tmp_path / "model.safetensors", converted, state)
    restored = tb.restore(tmp_path / "model.safetensors", converted, tx, plan)
    assert {leaf.dtype for leaf in jax.tree.leaves(restored.params)} == {np.dtype("float32")}


def test_masters_can_be_declined() -> None:
    module = torch.nn.Linear(4, 4).bfloat16()
    converted = tb.convert(module, torch.ones(2, 4, dtype=torch.bfloat16), masters=False)
    state = fz.init(converted.model(lambda f, b: jnp.mean(f(b))), None, fz.Plan(data=1))
    assert state.params["weight"].dtype == jnp.bfloat16
