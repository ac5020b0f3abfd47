"""A backbone that fails on every image but a grey one, so that it loads and then harms."""

from __future__ import annotations

import time

import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.std((2, 3)).max()) > 1e-3:
            if self.how == "raise":
                raise RuntimeError("it was made to")
            time.sleep(0.3 if self.how == "slow" else 1e6)
        return x.mean((2, 3)) * self.weight


def net(pretrained: bool, how: str = "raise") -> nn.Module:
    return Odd(how)
