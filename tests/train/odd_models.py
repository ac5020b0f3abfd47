"""Backbones for `file:` that use their parameters, or their batch, in ways that ours do not."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn


class Masked(nn.Module):
    """As DINOv2: a token for masked patches that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 8))
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
        self.chance = 0.0

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = self.stem(images_BCHW).mean((2, 3))
        for block in self.blocks:
            if not (self.training and random.random() < self.chance):
                x = x + block(x)
        return x


def masked(pretrained: bool) -> nn.Module:
    return Masked()


def skipping(pretrained: bool) -> nn.Module:
    """Half of its blocks in each training step (stochastic depth by a Python `if`)."""
    model = Masked()
    model.chance = 0.5
    return model


class ByValue(Masked):
    """Branches on values, which shapes alone do not have."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = super().forward(images_BCHW)
        return -x if float(x.detach().sum()) > 1e9 else x


def by_value(pretrained: bool) -> nn.Module:
    return ByValue()


class Noise(Masked):
    """As a masked autoencoder: which patches it sees is drawn anew at each call."""

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return super().forward(images_BCHW * (torch.rand_like(images_BCHW) > 0.75))


def noise(pretrained: bool) -> nn.Module:
    return Noise()


def batched(pretrained: bool) -> nn.Module:
    """Normalises by its batch when it predicts, too."""
    model = Masked()
    model.stem[1] = nn.BatchNorm2d(8, track_running_stats=False)
    return model


def two_outputs(pretrained: bool) -> nn.Module:
    """As torchvision's Inception: more than features, in training alone."""

    class Two(Masked):
        def forward(self, images_BCHW: Tensor) -> Tensor:
            features = super().forward(images_BCHW)
            return (features, features) if self.training else features  # type: ignore[return-value]

    return Two()
