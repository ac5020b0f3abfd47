"""A backbone that fails on white images alone, so that it loads and then harms."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn


class MyOwnError(Exception):
    """It cannot be read back: it takes two arguments, and keeps one."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = x.mean((2, 3)) * self.weight
        white = x.amin((1, 2, 3)) > 0.5
        if not white.any():
            return features
        if self.how == "raise":
            raise ValueError("it was made to")
        if self.how == "own":
            raise MyOwnError("it was made to", "forward")
        # Only where Ray works: a test that it kills would say nothing.
        if self.how == "exit" and "default_worker.py" in str(sys.argv):
            os._exit(3)
        return torch.where(white[:, None], torch.nan, features)


def net(pretrained: bool, how: str = "raise") -> nn.Module:
    return Odd(how)
