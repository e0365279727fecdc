"""torchvision's operators, without torchvision: beside their definitions, sample by sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge as tb
from fzero.errors import ConversionError
from torch_bridge.lower import detection


pytestmark = pytest.mark.traced_once

NAMES = {
    "roi_align": "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt"
    " pooled_width, int sampling_ratio, bool aligned",
    "nms": "Tensor dets, Tensor scores, float iou_threshold",
    "deform_conv2d": "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias,"
    " SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt"
    " dilation_w, SymInt groups, SymInt offset_groups, bool use_mask",
}


@functools.cache
def operators() -> Any:
    """torchvision's schemas and sizes, as `torch.export` asks for them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, arguments in NAMES.items():
        library.define(f"{name}({arguments}) -> Tensor")

    @torch.library.register_fake("torchvision::roi_align", lib=library)
    def _(x: Any, rois: Any, scale: Any, height: int, width: int, *_: Any) -> Any:
        return x.new_empty(rois.shape[0], x.shape[1], height, width)

    @torch.library.register_fake("torchvision::nms", lib=library)
    def _(boxes: Any, scores: Any, iou_threshold: Any) -> Any:
        num = torch.library.get_ctx().new_dynamic_size()
        return boxes.new_empty(num, dtype=torch.long)

    @torch.library.register_fake("torchvision::deform_conv2d", lib=library)
    def _(x: Any, weight: Any, offset: Any, *_: Any) -> Any:
        return x.new_empty(x.shape[0], weight.shape[0], *offset.shape[-2:])

    return library


class Calls(nn.Module):
    def __init__(self, name: str, *options: Any) -> None:
        super().__init__()
        self.name, self.options = name, options

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return getattr(torch.ops.torchvision, self.name)(*args, *self.options)


def pixel(image: torch.Tensor, y: float, x: float) -> Any:
    """A pixel of `(C, H, W)`, zeros around it."""
    high, wide = image.shape[1:]
    return image[:, int(y), int(x)] if 0 <= y < high and 0 <= x < wide else 0.0


def between(image: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> Any:
    """Bilinear interpolation, as the papers define it."""
    top, left = math.floor(y), math.floor(x)
    return sum(
        pixel(image, a, b) * (1 - abs(y - a)) * (1 - abs(x - b))
        for a in (top, top + 1)
        for b in (left, left + 1)
    )


def roi_align(
    x: Any, rois: Any, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> Any:
    """Mask R-CNN (arXiv:1703.06870, section 3), with torchvision's border of one pixel."""
    high, wide = x.shape[2:]
    found = torch.zeros(len(rois), x.shape[1], height, width, dtype=x.dtype)
    for k, (row, *corners) in enumerate(rois.tolist()):
        left, top, right, bottom = (c * scale - 0.5 * aligned for c in corners)
        size = [bottom - top, right - left]
        size = size if aligned else [max(s, 1.0) for s in size]
        for p in range(height * ratio):
            for q in range(width * ratio):
                at_y = top + (p + 0.5) * size[0] / (height * ratio)
                at_x = left + (q + 0.5) * size[1] / (width * ratio)
                if -1 <= at_y <= high and -1 <= at_x <= wide:
                    y, z = (min(max(at, 0.0), n - 1.0) for at, n in ((at_y, high), (at_x, wide)))
                    here = between(x[int(row)], torch.tensor(y), torch.tensor(z)) / ratio**2
                    found[k, :, p // ratio, q // ratio] += here
    return found


def deform_conv2d(
    x: Any, weight: Any, offset: Any, mask: Any, bias: Any, sh: int, sw: int, ph: int, pw: int,
    dh: int, dw: int, groups: int, offset_groups: int, use_mask: bool,
) -> Any:  # fmt: skip
    """Deformable ConvNets v2 (arXiv:1811.11168, equation 1)."""
    n, c = x.shape[:2]
    out, each, kh, kw = weight.shape
    found = []
    for row in range(n):
        for o in range(out):
            for p in range(offset.shape[2]):
                for q in range(offset.shape[3]):
                    total = bias[o]
                    for i in range(each):
                        channel = o // (out // groups) * each + i
                        own = channel // (c // offset_groups)
                        for tap in range(kh * kw):
                            at = own * kh * kw + tap
                            y = p * sh - ph + tap // kw * dh + offset[row, 2 * at, p, q]
                            z = q * sw - pw + tap % kw * dw + offset[row, 2 * at + 1, p, q]
                            taken = between(x[row, channel : channel + 1], y, z)
                            taken = taken * (mask[row, at, p, q] if use_mask else 1.0)
                            total = total + (taken * weight[o, i, tap // kw, tap % kw]).sum()
                    found.append(total)
    return torch.stack(found).reshape(n, out, *offset.shape[2:])


def arguments(name: str, use_mask: bool = True) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    make = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=make)
    if name == "roi_align":
        # Within, over the borders, outside, of no size, and turned around.
        boxes = [[0, 1.2, 0.4, 9.1, 7.7], [1, -6, -4, 5.5, 20], [0, 40, 40, 50, 50],
                 [1, 3, 3, 3, 3], [0, 8, 8, 2, 3]]  # fmt: skip
        return [draw(2, 3, 6, 5), torch.tensor(boxes)], (0.5, 2, 3, 2)
    given = [
        draw(2, 4, 4, 5), draw(2, 2, 3, 2), draw(2, 2 * 2 * 6, 2, 3) * 2,
        draw(2, 2 * 6, 2, 3), draw(2),
    ]  # fmt: skip
    return given, (2, 2, 1, 1, 1, 2, 2, 2, use_mask)


def both(
    call: Callable[..., torch.Tensor], name: str, given: list[torch.Tensor],
    options: tuple[Any, ...], learned: tuple[int, ...],
) -> dict[str, tuple[Any, Any]]:  # fmt: skip
    """The conversion's output and gradients of some arguments, each beside that of `call`."""
    converted = tb.convert(Calls(name, *options), *given)
    leaves = [x.clone().requires_grad_(i in learned) for i, x in enumerate(given)]
    want = call(*leaves, *options)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    (want * weights).sum().backward()
    arrays = [x.numpy() for x in given]

    def total(own: dict[int, Any]) -> Any:
        args = [own.get(i, x) for i, x in enumerate(arrays)]
        out = converted.apply({}, {}, *args, train=True).output
        return jnp.sum(out * weights.numpy()), out

    slopes, got = jax.jit(jax.grad(total, has_aux=True))({i: arrays[i] for i in learned})
    wanted: list[Any] = [leaf.grad for leaf in leaves]
    pairs = {f"gradient of argument {i}": (slopes[i], wanted[i].numpy()) for i in learned}
    return {"output": (got, want.detach().numpy()), **pairs}


@pytest.mark.parametrize(
    ("name", "last", "learned"),
    [
        ("roi_align", (True,), (0,)),
        ("roi_align", (False,), (0,)),
        ("deform_conv2d", (), (0, 1, 2, 3, 4)),
        ("deform_conv2d", (), (0, 1, 2, 4)),
    ],
    ids=["aligned", "not aligned", "with a mask", "without a mask"],
)
def test_values_and_gradients_are_those_of_the_definition(
    name: str, last: tuple[Any, ...], learned: tuple[int, ...]
) -> None:
    assert operators()
    given, options = arguments(name, use_mask=3 in learned)
    pairs = both(globals()[name], name, given, (*options, *last), learned)
    for what, (got, want) in pairs.items():
        atol = 1e-5 if what == "output" else 2e-5
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=atol, err_msg=what)


def test_what_depends_on_data_is_refused_with_a_remedy() -> None:
    assert operators()
    given, options = arguments("roi_align")
    converted = tb.convert(Calls("roi_align", *options[:3], 0, True), *given)
    with pytest.raises(ConversionError, match="say sampling_ratio=2"):
        converted.apply({}, {}, *[x.numpy() for x in given])
    boxes = torch.rand(4, 4)
    with pytest.raises(ConversionError, match=r"(?s)torchvision.nms.*return boxes and scores"):
        tb.convert(Calls("nms", 0.5), boxes, torch.rand(4))


def test_aligned_boxes_may_be_smaller_than_a_pixel() -> None:
    """Of a ramp the mean over a bin is what its centre has."""
    ramp = jnp.arange(30.0).reshape(1, 1, 5, 6)
    box = jnp.asarray([[0, 2.0, 2.0, 2.5, 2.5]])
    found = detection.roi_align(ramp, box, 1.0, 2, 2, 2, True)
    centres = 2.0 - 0.5 + 0.5 * np.array([0.25, 0.75])
    np.testing.assert_allclose(found[0, 0], 6 * centres[:, None] + centres, rtol=1e-6)
