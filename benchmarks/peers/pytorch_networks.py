"""The networks for PyTorch, with its own modules: layers and sizes as in hpcdl/models/ and networks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Plus(nn.Module):
    """The sum of two branches, and optionally a rectifier."""

    def __init__(self, first: nn.Module, second: nn.Module, *, rectified: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.rectified = first, second, rectified

    def forward(self, x: Any) -> Any:
        """Return the sum of both branches of the same input."""
        total = self.first(x) + self.second(x)
        return torch.relu_(total) if self.rectified else total


class Beside(nn.Module):
    """Branches side by side, joined by channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Any) -> Any:
        """Return all branches of the same input."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Attention(nn.Module):
    """Self-attention after a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-3)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Any) -> Any:
        """Vectors (N, L, width) to the same."""
        y = self.norm(x)
        return self.attention(y, y, y, need_weights=False)[0]


class MeanOverPlaces(nn.Module):
    """Vectors (N, L, width) to (N, width)."""

    def forward(self, x: Any) -> Any:
        """The mean over L."""
        return x.mean(1)


class LastOfLstm(nn.Module):
    """Vectors (N, L, channels) to the final output of the second of two LSTM layers, (N, width)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(channels, width, num_layers=2, batch_first=True)
        for name, weights in self.layers.named_parameters():
            if name.startswith("bias_hh"):  # Keras has one bias, PyTorch adds two
                nn.init.zeros_(weights)
                weights.requires_grad = False

    def forward(self, x: Any) -> Any:
        """Return the final output, from one call of PyTorch's own kernel."""
        return self.layers(x)[0][:, -1]


class Unet(nn.Module):
    """Three levels down and up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_two_convolutions(*sizes) for sizes in ((3, 16), (16, 32), (32, 64)))
        self.bottom = _two_convolutions(64, 128)
        self.up = nn.ModuleList(_two_convolutions(*sizes) for sizes in ((192, 64), (96, 32), (48, 16)))
        self.smaller, self.larger = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.last, self.classes = nn.Conv2d(16, 8, 1), nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        """Images (N, 3, 96, 96) to logits (N, 10)."""
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = self.smaller(x)
        x = self.bottom(x)
        for block in self.up:
            x = block(torch.cat([self.larger(x), kept.pop()], 1))
        return self.classes(self.last(x).mean((2, 3)))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def cifar10_quick() -> nn.Module:
    def mean() -> nn.Module:
        return nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)

    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, padding=1), nn.ReLU(), *_convolution(32, 32, 5), mean(),
        *_convolution(32, 64, 5), mean(), nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10),
    )  # fmt: skip


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, 4), nn.ReLU(), _across_channels(), nn.MaxPool2d(3, 2), *_convolution(96, 256, 5),
        _across_channels(), nn.MaxPool2d(3, 2), *_convolution(256, 384, 3), *_convolution(384, 384, 3),
        *_convolution(384, 256, 3), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, 1000),
    )  # fmt: skip


def vgg19() -> nn.Module:
    parts, channels = [], 3
    for convolutions, filters in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for number in range(convolutions):
            parts += _convolution(filters if number else channels, filters, 3)
        parts.append(nn.MaxPool2d(2))
        channels = filters
    return nn.Sequential(
        *parts, nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(4096, 1000),
    )  # fmt: skip


def googlenet() -> nn.Module:
    stages = (
        ((192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64)),
        (
            (480, 192, 96, 208, 16, 48, 64), (512, 160, 112, 224, 24, 64, 64), (512, 128, 128, 256, 24, 64, 64),
            (512, 112, 144, 288, 32, 64, 64), (528, 256, 160, 320, 32, 128, 128),
        ),
        ((832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)),
    )  # fmt: skip
    parts: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), _across_channels(),
        *_convolution(64, 64, 1), *_convolution(64, 192, 3), _across_channels(),
    ]  # fmt: skip
    for stage in stages:
        parts += [nn.MaxPool2d(3, 2, padding=1), *(_inception(*filters) for filters in stage)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(1024, 1000))


def resnet50() -> nn.Module:
    parts: list[nn.Module] = [_normalised(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    width = 64
    for stage, (blocks, filters) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            shortcut = _normalised(width, 4 * filters, 1, stride) if block == 0 else nn.Identity()
            body = nn.Sequential(
                _normalised(width, filters, 1, stride), nn.ReLU(inplace=True),
                _normalised(filters, filters, 3), nn.ReLU(inplace=True), _normalised(filters, 4 * filters, 1),
            )  # fmt: skip
            parts.append(Plus(shortcut, body, rectified=True))
            width = 4 * filters
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def hepcnn() -> nn.Module:
    parts: list[nn.Module] = []
    for number in range(4):
        parts += [*_convolution(128 if number else 3, 128, 3), nn.MaxPool2d(2), nn.Dropout(0.5)]
    return nn.Sequential(
        *parts, *_convolution(128, 128, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 2)
    )  # fmt: skip


def transformer() -> nn.Module:
    width, parts = 256, []
    for _ in range(4):
        dense = nn.Sequential(
            nn.LayerNorm(width, eps=1e-3), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        parts += [Plus(nn.Identity(), Attention(width, 8)), Plus(nn.Identity(), dense)]
    return nn.Sequential(*parts, nn.LayerNorm(width, eps=1e-3), MeanOverPlaces(), nn.Linear(width, 10))


def lstm() -> nn.Module:
    return nn.Sequential(LastOfLstm(128, 256), nn.Linear(256, 10))


NETWORKS = {
    "lenet": (lenet, (1, 28, 28), 10), "cifar10-quick": (cifar10_quick, (3, 32, 32), 10),
    "alexnet": (alexnet, (3, 227, 227), 1000), "vgg19": (vgg19, (3, 224, 224), 1000),
    "googlenet": (googlenet, (3, 224, 224), 1000), "resnet50": (resnet50, (3, 224, 224), 1000),
    "hepcnn": (hepcnn, (3, 224, 224), 2), "transformer": (transformer, (64, 256), 10),
    "lstm": (lstm, (64, 128), 10), "unet": (Unet, (3, 96, 96), 10),
}  # fmt: skip
"""How each is made, the shape of a sample, and the number of classes."""


def _convolution(channels: int, filters: int, size: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, filters, size, padding=size // 2), nn.ReLU()]


def _normalised(channels: int, filters: int, size: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(channels, filters, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters))


def _two_convolutions(channels: int, filters: int) -> nn.Module:
    parts = [_normalised(channels, filters, 3), nn.ReLU(), _normalised(filters, filters, 3), nn.ReLU()]
    return nn.Sequential(*parts)


def _inception(
    channels: int, direct: int, reduce3: int, three: int, reduce5: int, five: int, projection: int
) -> nn.Module:
    return Beside(
        nn.Sequential(*_convolution(channels, direct, 1)),
        nn.Sequential(*_convolution(channels, reduce3, 1), *_convolution(reduce3, three, 3)),
        nn.Sequential(*_convolution(channels, reduce5, 1), *_convolution(reduce5, five, 5)),
        nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *_convolution(channels, projection, 1)),
    )


def _across_channels() -> nn.Module:
    return nn.LocalResponseNorm(5, alpha=1e-4)
