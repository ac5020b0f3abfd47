"""A user's own backbone, and functions that are none."""

from __future__ import annotations

import torch
from torch import nn


def net(pretrained: bool, width: int = 8) -> nn.Module:
    made = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    if pretrained:
        nn.init.constant_(made[0].weight, 0.1)
    return made


def unpooled(pretrained: bool) -> nn.Module:
    return nn.Conv2d(3, 4, 3)


class Divided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) / 0


def divided(pretrained: bool) -> nn.Module:
    return Divided()


class Angry(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such block")


def angry(pretrained: bool) -> nn.Module:
    return Angry()


def says_nothing(pretrained: bool):  # type: ignore[no-untyped-def]
    raise AssertionError("must not be called")


def says_tensor(pretrained: bool) -> torch.Tensor:
    raise AssertionError("must not be called")


def says_no_more(width: int = 8) -> nn.Module:
    raise AssertionError("must not be called")


class Twice(nn.Module):
    """One layer under two names, as wrappers of a network often have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4), nn.ReLU())
        self.first = self.net[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).mean((2, 3))


def twice(pretrained: bool) -> nn.Module:
    return Twice()
