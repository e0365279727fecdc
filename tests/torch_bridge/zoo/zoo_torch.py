"""Plain torch modules of the zoo, each small, each with what makes its kind difficult."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from transformers.utils import ModelOutput
from zoo_entries import Call, Entry


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, high: int = 17, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2, bias=False),
            nn.BatchNorm2d(8, momentum=0.3), nn.SiLU(), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.relu(out)


def residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Residual(8, 8, 1), Residual(8, 12, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip


class Recurrent(nn.Module):
    """All recurrent layers: several deep, both directions, projections, without biases, cells."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.narrow = nn.LSTM(12, 6, proj_size=3, bias=False, batch_first=True)
        self.gru = nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.plain = nn.RNN(8, 4, nonlinearity="relu", batch_first=True)
        self.tanh = nn.RNN(4, 4)
        self.cell = nn.LSTMCell(4, 3)
        self.gru_cell = nn.GRUCell(3, 3)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        a, (hidden, cell) = self.lstm(x)
        b, _ = self.narrow(a)
        c, last = self.gru(b, h)
        d, _ = self.plain(c)
        e, _ = self.tanh(d.transpose(0, 1))
        f, g = self.cell(e[0])
        return a, hidden, cell, c, last, e, self.gru_cell(f, g)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.post = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        layer = nn.TransformerEncoderLayer(
            16, 4, 24, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.pre = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = tokens == 0
        hidden = self.post(self.embed(tokens), src_key_padding_mask=mask)
        return self.pre(hidden)


def padded_ids(batch: int) -> Call:
    tokens = ids(batch, 7, seed=5).clamp(min=1)
    tokens[0, 4:] = 0
    return Call((tokens,))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            16, 2, 1, 1, 24, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, batch_first=True)
        self.plain = nn.MultiheadAttention(12, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out, weights = self.mixed(x, key, value)
        again, each = self.plain(out, out, out, average_attn_weights=False)
        return out, weights, again, each


class Norms(nn.Module):
    """Every norm, with running statistics where there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ModuleList([
            nn.LayerNorm((4, 6, 5)), nn.GroupNorm(2, 4), nn.RMSNorm(5), nn.LocalResponseNorm(3),
            nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False, momentum=0.4),
            nn.BatchNorm2d(4, track_running_stats=False), nn.InstanceNorm2d(4),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True, momentum=0.3),
        ])  # fmt: skip
        self.deep = nn.BatchNorm3d(2)
        self.line = nn.ModuleList([nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True)])

    def forward(self, x: torch.Tensor) -> Any:
        n = x.shape[0]
        out = [norm(x) for norm in self.flat]
        out.append(self.deep(x.reshape(n, 2, 2, 6, 5)))
        return out + [norm(x.flatten(2)) for norm in self.line]


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, stride=2, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, groups=2)
        self.up2 = nn.ConvTranspose2d(14, 6, 3, stride=2, padding=1, output_padding=1, dilation=1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        skip = F.relu(self.inner(x))
        low = F.relu(self.deep(skip))
        up = torch.cat([self.up(low), skip], 1)
        resized = [
            F.interpolate(low, scale_factor=2),
            F.interpolate(low, size=(5, 7), mode="nearest"),
            F.interpolate(low, size=(5, 7), mode="nearest-exact"),
            F.interpolate(low, scale_factor=1.7, mode="bilinear"),
            F.interpolate(low, size=(2, 7), mode="bilinear", align_corners=True),
            F.interpolate(low, scale_factor=(1.5, 2.0), mode="bicubic"),
            F.interpolate(low, size=(7, 3), mode="bicubic", align_corners=True),
            F.interpolate(up, size=(4, 5), mode="bilinear", antialias=True),
            F.interpolate(up, size=(3, 11), mode="bicubic", antialias=True),
            F.interpolate(low.flatten(2), scale_factor=1.3, mode="linear"),
            F.interpolate(low.unsqueeze(2), size=(3, 5, 6), mode="trilinear"),
            F.interpolate(low, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True),
        ]
        return self.out(self.up2(up)), resized


class Reparametrised(nn.Module):
    """weight_norm and spectral_norm, the current and the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(6, 5))
        self.b = nn.utils.weight_norm(nn.Conv1d(5, 4, 3), dim=None)
        self.c = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.d = nn.utils.spectral_norm(nn.Linear(4, 3))
        self.e = parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x).transpose(1, 2)).transpose(1, 2)
        return self.d(torch.tanh(self.c(h)))


class Indexing(nn.Module):
    """Gather and scatter in all forms, duplicates and negative indices included."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 5))  # what shows the gradients of everything else
        self.table = nn.Parameter(torch.randn(7, 5))
        self.embed = nn.Embedding(9, 5, padding_idx=3)

    def forward(self, x: torch.Tensor, where: torch.Tensor) -> Any:
        x = x * self.gain
        picked = self.table[where]  # (N, 4, 5)
        wide = where.unsqueeze(-1).expand(-1, -1, 5)
        base = torch.zeros(x.shape[0], 7, 5)
        put = base.index_put((torch.arange(x.shape[0])[:, None], where), x, accumulate=True)
        rows = x.clone()
        rows[:, [0, -1]] = picked[:, :2] * 2
        return (
            picked, x.gather(1, where.clamp(max=3).unsqueeze(-1)), self.embed(where + 1), put, rows,
            base.scatter_add(1, wide, x), base.scatter_reduce(1, wide, x, "sum"),
            base.scatter_reduce(1, wide, x, "mean", include_self=False),
            base.scatter_reduce(1, wide, x, "amax"),
            base.scatter_reduce(1, wide, x, "amin", include_self=False),
            base.scatter_reduce(1, wide, x, "mean"),
            (base + 1).scatter_reduce(1, wide, x, "prod"), base.scatter_reduce(1, wide, x, "prod"),
            base.scatter_reduce(1, wide, F.relu(x), "prod", include_self=False),
            base[:, -3:, ::2] + x[:, :3, ::2],
            x.index_select(1, torch.tensor([0, 2])), x.index_copy(1, torch.tensor([1]), x[:, :1]),
            x.index_fill(2, torch.tensor([0, 4]), 0.5), x[..., None, [1, 3]], x[:, [0, 1], [2, 3]],
            x.masked_scatter(x > 0, x.flip(1)),
            torch.diagonal_scatter(x, torch.ones(x.shape[0], 4), 1, 1, 2),
        )  # fmt: skip


class Ordering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.scale
        values, order = x.sort(descending=True)
        return (
            values, order, *x.topk(3), *x.topk(2, dim=1, largest=False), x.cumsum(1), x.argsort(),
            *x.cummax(1), *x.cummin(1), *x.kthvalue(3), *x.median(1, keepdim=True), x.median(),
            torch.aminmax(x, dim=1), torch.histc(x, 5, -2.0, 2.0), x.cumprod(1).sum(),
            torch.bucketize(x, torch.linspace(-1, 1, 5)), x.flip(0).diff(dim=1), x.argmax(1),
        )  # fmt: skip


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 6))
        self.a = nn.Parameter(torch.randn(4, 6, 5))
        self.bilinear = nn.Bilinear(6, 4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.gain
        y = torch.einsum("nhi,hij->nhj", x, self.a)
        return (
            y, torch.einsum("nhi,nhi->n", x, x), torch.einsum("...i,kij->...kj", x, self.a),
            torch.einsum("nhi->hn", x), self.bilinear(x[:, 0], y[:, 0, :4]), x @ x.mT,
            torch.tensordot(x, self.a, dims=([1, 2], [0, 1])), torch.baddbmm(y @ y.mT, x, x.mT),
            F.cosine_similarity(x[:, :1], x, dim=-1), torch.outer(x[:, 0, 0], y[:, 0, 0]),
            torch.kron(x[0], y[0]), torch.cdist(x, x + 1), torch.cross(x[..., :3], y[..., :3], -1),
        )  # fmt: skip


class Spectra(nn.Module):
    """Fourier transforms and complex numbers, one of them a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.Parameter(torch.ones(8))
        self.filter = nn.Parameter(torch.randn(5, 2))
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.window
        spectrum = torch.fft.rfft(x, norm="ortho")
        filtered = spectrum * torch.view_as_complex(self.filter) * self.gain
        whole = torch.fft.fft2(x, norm="forward") * torch.polar(x[0, 0].exp(), x.mean(0)[0])
        short = torch.stft(x.flatten(1), 8, 4, window=torch.hann_window(8), return_complex=True)
        return (
            torch.fft.irfft(filtered, n=8, norm="ortho"), torch.fft.ifft(filtered).abs(),
            torch.view_as_real(whole), torch.fft.irfftn(filtered, s=(3, 7)).sin(),
            torch.fft.fftshift(spectrum.imag), spectrum.conj() * filtered, filtered.angle(),
            torch.fft.rfft2(x).real, torch.fft.hfft(spectrum), short.abs().pow(2),
        )  # fmt: skip


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("window", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.weight
        y.add_(1.0).mul_(self.window).clamp_(-3, 3)
        y[:, 0] = 0.0
        y[:, 1:3] += x[:, 1:3]
        y.masked_fill_(x > 1.5, 0.25)
        z = torch.empty_like(y).copy_(y)
        z.transpose(0, 1)[2].mul_(self.weight.sum())
        z[:, -1].zero_().sub_(x[:, -1])
        if self.training:
            self.total.mul_(0.9).add_(x.detach().mean(0))
            self.steps += 1
        return torch.relu_(z), y, self.total * 2, self.steps


class Tied(nn.Module):
    """One weight under three names, one module called twice, one parameter frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight
        self.same = nn.ModuleDict({"block": self.block, "embed": self.embed})
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.same["embed"](tokens) * self.scale
        return self.head(self.block(self.same["block"](self.block(hidden))))


@dataclass
class Out(ModelOutput):
    """As transformers' models return it; entries that are None are left out."""

    logits: torch.Tensor | None = None
    skipped: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None
    extra: dict[str, Any] | None = None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, *, pair: tuple[torch.Tensor, Any], options: Any = None, twice: bool
    ) -> Out:
        y = self.linear(x) * (2 if twice else 1) + pair[0]
        z = y + pair[1]["deep"][0]
        return Out(logits=z, states=(x + y, y), extra={"a": [z.sum()], "b": 3})


def nested(batch: int) -> Call:
    pair = (floats(batch, 4, seed=1), {"deep": [floats(4, seed=2)]})
    return Call((floats(batch, 4),), {"pair": pair, "twice": True})


class NoGrad(nn.Module):
    """Gradients cut by detach and by no_grad, around values, statistics and teacher networks."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 6)
        self.teacher = nn.Linear(6, 6)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
            if self.training:
                self.centre.lerp_(self.student(x).mean(0), 0.1)
            with torch.enable_grad():
                inner = self.student(x) * 2
        out = self.student(x) - self.centre
        straight = out + (out.round() - out).detach()
        return -(target * out.log_softmax(-1)).sum(-1), straight, inner * out


ENTRIES: dict[str, Entry] = {
    "mlp": Entry(mlp, lambda n: Call((floats(n, 6),))),
    "cnn_batch_norm": Entry(Cnn, lambda n: Call((floats(n * 3, 3, 8, 8),))),
    "residual_net": Entry(residual_net, lambda n: Call((floats(n * 2, 3, 8, 8),))),
    "recurrent": Entry(
        Recurrent, lambda n: Call((floats(n, 5, 5), floats(4, n, 4, seed=1))), fixed=("h",)
    ),
    "transformer_encoder": Entry(Encoder, padded_ids),
    "transformer": Entry(
        Translator, lambda n: Call((floats(n, 5, 16), floats(n, 4, 16, seed=1)))
    ),
    "multihead_attention": Entry(
        Attention, lambda n: Call((floats(n, 5, 12), floats(n, 4, 7), floats(n, 4, 5))),
    ),
    "norms": Entry(Norms, lambda n: Call((floats(n, 4, 6, 5) * 2 + 1,))),
    "unet": Entry(Unet, lambda n: Call((floats(n, 3, 12, 16),))),
    "weight_and_spectral_norm": Entry(Reparametrised, lambda n: Call((floats(n, 5, 6),))),
    "indexing": Entry(
        Indexing,
        lambda n: Call((floats(n, 4, 5), torch.tensor([[0, 2, 6, 2], [1, 3, 3, 0]] * 2)[:n])),
    ),
    "ordering": Entry(Ordering, lambda n: Call((floats(n, 8),))),
    "products": Entry(Products, lambda n: Call((floats(n, 4, 6),))),
    "spectra": Entry(Spectra, lambda n: Call((floats(n, 3, 8),))),
    "in_place": Entry(InPlace, lambda n: Call((floats(n, 6),))),
    "tied_and_used_twice": Entry(Tied, lambda n: Call((ids(n, 5),))),
    "nested_arguments": Entry(Nested, nested, fixed=("pair[1]['deep'][0]",)),
    "no_grad": Entry(NoGrad, lambda n: Call((floats(n, 6),))),
}  # fmt: skip
