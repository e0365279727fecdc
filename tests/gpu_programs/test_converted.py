"""Converted models in bf16 on H200s: attention is cuDNN's, convolutions have features last."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings

import jax
import numpy as np
import optax
import pytest

import fzero as fz
from tests.gpu_programs.conftest import TX


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import torch_bridge as tb  # noqa: E402


SEQ, HEADS, WIDTH, LAYERS, VOCAB = 1024, 8, 512, 3, 1280
SIZES = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}


def gpt2():
    off = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=SEQ, **SIZES, **off
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=2, intermediate_size=1024, max_position_embeddings=SEQ, **SIZES,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=256
    )
    return transformers.ResNetForImageClassification(config)


@dataclasses.dataclass(frozen=True)
class Read:
    found: fz.Preflight
    text: str
    said: list[str]
    rows: int = 0
    logits: int = 0  # how many a device has, of words and tokens that are its own


def compiled(model, plan, batch, topology):
    """The prediction of a step, the program's text, and what was warned of."""
    texts = []
    compile_text = jax.stages.Compiled.as_text
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(
            jax.stages.Compiled,
            "as_text",
            lambda self: texts.append(compile_text(self)) or texts[-1],
        )
        found = fz.preflight(model, TX, plan, batch, topology)
    return Read(found, texts[-1], [str(one.message) for one in said])


@pytest.fixture(
    scope="module",
    params=[
        (gpt2, 2, {"data": 8}),
        (llama, 1, {"data": 8}),
        (llama, 1, {"data": 4, "tensor": 2}),
        (llama, 2, {"data": 4, "context": 2}),
    ],
    ids=["gpt2", "llama", "llama tensor", "llama context"],
)
def read(request):
    """A ZeRO-3 step, with one or two rows on each device of `data`."""
    make, rows, axes = request.param
    converted = tb.convert(make(), torch.zeros(2, 16, dtype=torch.long))
    model = converted.model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
    )
    plan = fz.Plan(zero=3, precision="bf16", remat="layer", **axes)
    batch = {"ids": jax.ShapeDtypeStruct((axes["data"] * rows, SEQ), np.int32)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fzero.losses.CHUNK_BYTES", 1)  # 128 tokens, the least
        found = compiled(model, plan, batch, "h200:8")
    return dataclasses.replace(found, rows=rows, logits=rows * SEQ * VOCAB * axes["data"] // 8)


def test_attention_is_fused(read):
    """`make test-gpu-programs` installs cuDNN's library: without it nothing could compile it."""
    forward = read.text.count('custom_call_target="__cudnn$fmhaSoftmax"')
    backward = read.text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"')
    scores = re.compile(rf"f\d+\[(\d+,){{2,}}{SEQ},{SEQ}\]")
    assert not [one for one in read.said if "Install cuDNN" in one]
    assert forward
    assert backward
    assert not scores.search(read.text)
    assert f"{SEQ},{SEQ}]" not in "".join(x for x in read.text.split() if x.startswith("pred["))


def test_no_array_has_the_size_of_the_logits(read):
    """Not of all words, nor of those of a device where the head is divided over `tensor`."""
    shapes = re.findall(r"\w+\[([\d,]+)\]", read.text)
    words = {VOCAB, VOCAB // 2}
    logits = {s for s in shapes if int(s.rpartition(",")[2]) in words}
    # The largest is a chunk's product as XLA cuts it: four partial sums of 128 tokens.
    assert max(math.prod(map(int, s.split(","))) for s in logits) < read.logits


def test_flops_of_fused_attention_are_counted(read):
    """More than the model's, by what is computed twice: the layers, and scores backwards."""
    assert not read.found.unknown_flops
    assert 1.0 < read.found.compiled_flops / read.found.model_flops < 1.5


def test_nothing_is_multiplied_in_float32(read):
    """Llama's angles are float32: what they widen is narrowed before it meets a weight."""
    shape_of = {}
    for line in read.text.splitlines():
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        shape_of[name] = rest.split("[")[0]
        if " dot(" in line:
            operands = rest.split(" dot(")[1].split(")")[0].split(", ")
            assert [shape_of.get(x, "bf16") for x in operands] == ["bf16", "bf16"], line


def test_convolutions_have_their_features_last():
    """As tensor cores want them: cuDNN's calls all do, and XLA turns no activation between them."""
    images = 32
    converted = tb.convert(resnet(), torch.zeros(2, 3, 64, 64))
    model = converted.model(
        lambda forward, batch: optax.softmax_cross_entropy_with_integer_labels(
            forward(batch["x"]).logits, batch["y"]
        ).mean()
    )
    batch = {
        "x": jax.ShapeDtypeStruct((images, 3, 64, 64), np.float32),
        "y": jax.ShapeDtypeStruct((images,), np.int32),
    }
    read = compiled(model, fz.Plan(data=1, precision="bf16"), batch, "h200:1")
    calls = [line for line in read.text.splitlines() if '"__cudnn$conv' in line]
    # Ten and one shortcut's, forwards, for their kernels and (but the first) for their inputs.
    assert len(calls) == 3 * (1 + 8 + 1) - 1
    for line in calls:
        assert "dim_labels=b01f_o01i->b01f" in line
        assert "= (bf16[" in line
    turned = re.findall(rf"= \w+\[{images},[0-9,]+\]\S* (?:transpose|copy)\(", read.text)
    assert len(turned) <= 4, turned  # the images, around the two poolings
    assert not read.found.unknown_flops
    assert read.found.compiled_flops == pytest.approx(read.found.model_flops, rel=0.05)


def test_a_mixtral_s_tokens_travel_and_its_experts_stay():
    """Of a layer: tokens there and back, and backwards there, and gradients there and back."""
    experts, k, hidden = 8, 2, 1024
    config = transformers.MixtralConfig(
        num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, intermediate_size=hidden, num_local_experts=experts,
        num_experts_per_tok=k, max_position_embeddings=SEQ, **SIZES,
    )  # fmt: skip
    module = transformers.MixtralForCausalLM(config)
    converted = tb.convert(module, torch.zeros(2, 16, dtype=torch.long))
    model = converted.model(
        lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
    )
    plan = fz.Plan(zero=3, data=1, expert=8, precision="bf16", remat="layer")
    read = compiled(model, plan, {"ids": jax.ShapeDtypeStruct((8, SEQ), np.int32)}, "h200:8")
    assert set(read.found.by_axes) == {"expert"}
    sent = [c for c in read.found.collectives if c.kind == "all-to-all"]
    room = -(-3 * SEQ * k // (2 * 8))  # a row of the batch on each device: 1.5 times an even share
    sizes = {8 * room * WIDTH * 2: 5, 8 * room * 4: 5}  # rows; gates and experts' numbers
    assert {size: sum(c.times for c in sent if c.bytes == size) for size in sizes} == sizes
    assert sum(c.times for c in sent) == 10
    # Dense leaves are gathered, for both passes but the token table; their gradients are added up,
    # and the rows of the token table's are gathered.
    others = [c for c in read.found.collectives if c.kind != "all-to-all"]
    gathered = [c for c in others if c.kind == "all-gather"]
    matrices = 2 * (4 * WIDTH * WIDTH + VOCAB * WIDTH) + VOCAB * WIDTH
    assert sum(c.bytes for c in gathered) == 2 * matrices + 8 * SEQ * (WIDTH * 2 + 4)
    assert {c.kind for c in others} == {"all-reduce", "all-gather"}
    dense = sum(leaf.size for name, leaf in converted.params.items() if "experts" not in name)
    # What all rows share, weights of norms, is added up in float32, and two numbers of the loss
    # travel along with them. (By itself goes the gradients' norm, a number for each leaf.)
    norms = sum(leaf.size for name, leaf in converted.params.items() if "norm" in name)
    assert norms == 3 * WIDTH
    added = sum(c.bytes for c in others if c.kind == "all-reduce" and c.bytes > 32)
    assert added == 2 * (dense - VOCAB * WIDTH) + 2 * norms + 8
    assert '"__cudnn$fmhaSoftmax"' in read.text


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_odd_lengths_is_fused_forwards_and_back(causal):
    """As a ViT's 197 places: jax refuses their gradients, and its forward pass says nothing."""

    def loss(params, buffers, batch, rng, train):
        x = batch["x"].astype(params["w"].dtype) @ params["w"]
        return fz.attention(x, x, x, causal=causal).astype("float32").sum(), buffers, {}

    model = fz.Model(lambda rng: ({"w": np.zeros((64, 64), np.float32)}, {}), loss)
    batch = {"x": jax.ShapeDtypeStruct((2, 197, HEADS, 64), np.float32)}
    read = compiled(model, fz.Plan(zero=0, precision="bf16", data=1), batch, "h200:1")
    for name in ("fmhaSoftmax", "fmhaSoftmaxBackward"):
        assert f'custom_call_target="__cudnn${name}"' in read.text
    assert not re.findall(r"= \w+\[(?:\d+,)*19[78],19[78]\]", read.text), "scores"


def _of_rows(rows, **options):
    """A step of rows that are packed or padded, one device."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    more = {"attention_mask": torch.ones(2, 16, dtype=torch.long)}
    if rows == "packed":
        more = {"attention_mask": torch.zeros(2, 1, 16, 16), "position_ids": ids}
    converted = tb.convert(llama(), input_ids=ids, **more, **options)

    def loss(forward, batch):
        given = {"attention_mask": batch["seen"]}
        if rows == "packed":
            given = {"attention_mask": tb.packed_mask(batch["seen"]), "position_ids": batch["ids"]}
        return tb.causal_lm_loss(forward(input_ids=batch["ids"], **given).logits, batch["ids"])

    plan = fz.Plan(zero=3, precision="bf16", data=1, remat="layer")
    batch = dict.fromkeys(("ids", "seen"), jax.ShapeDtypeStruct((2, SEQ), np.int32))
    return compiled(converted.model(loss), plan, batch, "h200:1")


@pytest.mark.nightly
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_rows_of_documents_and_padded_rows_are_fused(rows):
    """Their mask depends on data: 16 bits for each pair of a row, and no scores."""
    read = _of_rows(rows)
    for name in ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"):
        assert f'custom_call_target="__cudnn${name}"' in read.text
    heads = re.findall(rf"\w+\[(?:\d+,)*{HEADS},{SEQ},{SEQ}\]", read.text)
    assert not heads, "scores"
    assert not read.found.unknown_flops


def test_of_rows_that_end_in_their_padding_no_mask_is_stored():
    """The kernel takes lengths; a mask is computed only to be compared."""
    read = _of_rows("padded", padding_side="right")
    for name in ("fmhaSoftmax", "fmhaSoftmaxBackward"):
        assert f'custom_call_target="__cudnn${name}"' in read.text
    assert "PADDING_CAUSAL" in read.text
    # What lies in memory comes out of such an operation, or goes into one; others are within.
    mask = rf"= (?:pred\[(?:\d+,)*|\w+\[2,1,){SEQ},{SEQ}\]\S*"
    stored = r"(?:fusion|custom-call|copy|parameter|get-tuple-element)"
    assert not re.findall(rf"{mask} {stored}\(.*", read.text)


@pytest.mark.nightly
def test_a_t5_s_biases_are_added_in_the_kernel():
    """Those of its heads, which learn, and padding, over `tensor` too: forwards and back.

    Two attentions in a layer of the decoder. Nothing else is multiplied to the scores' size.
    """
    length = 384
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=HEADS,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.ones(2, 16, dtype=torch.long)
    given = {"attention_mask": ids, "decoder_input_ids": ids}
    module = transformers.T5ForConditionalGeneration(config)
    converted = tb.convert(module, input_ids=ids, **given)

    def loss(forward, batch):
        given = {"attention_mask": batch["seen"], "decoder_input_ids": batch["ids"]}
        return tb.causal_lm_loss(forward(input_ids=batch["ids"], **given).logits, batch["ids"])

    batch = dict.fromkeys(("ids", "seen"), jax.ShapeDtypeStruct((8, length), np.int32))
    plan = fz.Plan(zero=3, precision="bf16", data=2, tensor=2)
    read = compiled(converted.model(loss), plan, batch, "h200:4")
    for name in ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"):
        assert read.text.count(f'custom_call_target="__cudnn${name}"') == 6
    # The kernel gives the gradient of what it adds: of 4 rows and the 4 heads of a device.
    scores = rf"= \(?\w+\[(?:\d+,)*{length},{length}\]\S* (?:dot|custom-call)\(.*"
    assert not re.findall(scores, read.text)
    assert read.text.count(f"bf16[4,4,{length},{length}]{{3,2,1,0}}, u8[") >= 6
    assert not read.found.unknown_flops
