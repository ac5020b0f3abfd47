"""The heads: features of a backbone -> logits. A linear one, and one of a Gaussian kernel.

Both standardise the features by the training set; the statistics are buffers, so a checkpoint, a
package and an exported graph hold all that a prediction needs.

Shapes: features_BD float32, logits_BC float32. M landmarks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

HeadKind = Literal["linear", "kernel"]
SMALLEST_STD = 1e-3  # a feature that never changes is divided by this


class Head(nn.Module):
    """Standardised features -> logits.

    The statistics are buffers, computed once from the training features. With frozen features this
    equals a well-conditioned logistic regression. Batch norm would depend on the world size; this
    does not.

    scaled (regression): the linear part works in standard deviations of the labels, and the output
    is in the labels' unit.
    """

    mean: Tensor
    std: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(self, features: int, classes: int, dropout: float, scaled: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(self._begin(features), classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.scaled = scaled
        if scaled:
            self.register_buffer("centre", torch.zeros(classes))
            self.register_buffer("spread", torch.ones(classes))

    def _begin(self, features: int) -> int:
        """Make what comes before the linear part. Returns how many inputs that part has."""
        return features

    @property
    def features(self) -> int:
        """How many features it takes."""
        return len(self.mean)

    @property
    def classes(self) -> int:
        """How many logits it gives."""
        return self.linear.out_features

    def scale_by(self, mean: float, spread: float) -> None:
        """Set the mean and the standard deviation of the training labels."""
        self.centre.fill_(mean)
        self.spread.fill_(spread)

    def standardise_by(self, mean_D: Tensor, std_D: Tensor) -> None:
        """Set the mean and the standard deviation of the training set's `prepared` features."""
        self.mean.copy_(mean_D)
        self.std.copy_(std_D.clamp_min(SMALLEST_STD))

    def prepared(self, features_BD: Tensor) -> Tensor:
        """What is standardised: the features."""
        return features_BD

    def standard(self, features_BD: Tensor) -> Tensor:
        """The standardised features."""
        return (self.prepared(features_BD) - self.mean) / self.std

    def forward(self, features_BD: Tensor) -> Tensor:
        return self._scaled(self.linear(self.dropout(self.standard(features_BD))))

    def _scaled(self, logits_BC: Tensor) -> Tensor:
        if self.scaled:
            return logits_BC.float() * self.spread + self.centre
        return logits_BC


class KernelHead(Head):
    """Similarities to landmarks -> logits.

    The similarity to a landmark is exp(-gamma * squared distance), between standardised signed
    square roots: the root makes small activations count, as for histograms (Perronnin et al. 2010,
    "Improving the Fisher kernel"). Landmarks are images of the training set. A linear function of
    the similarities is a kernel machine on the landmarks (Nyström's method: Williams and Seeger
    2001).

    It is fitted at once (train/solve/), not by steps: similarities are nearly collinear, and steps
    of a gradient would take for ever.
    """

    landmarks: Tensor
    gamma: Tensor

    def __init__(
        self,
        features: int,
        classes: int,
        dropout: float,
        scaled: bool = False,
        landmarks: int = 1,
    ) -> None:
        self._count = landmarks
        super().__init__(features, classes, dropout, scaled)

    def _begin(self, features: int) -> int:
        self.register_buffer("landmarks", torch.zeros(self._count, features))
        self.register_buffer("gamma", torch.ones(()))
        return self._count

    def prepared(self, features_BD: Tensor) -> Tensor:
        """What is standardised: the square root of each feature's size, with its sign."""
        return features_BD.sign() * features_BD.abs().sqrt()

    def similarities(self, standard_BD: Tensor) -> Tensor:
        """similarities_BM of standardised rows, from 0 to 1."""
        # |x - l|^2 = |x|^2 - 2 x l + |l|^2; rounding may make it negative.
        squared_BM = (
            standard_BD.square().sum(1, keepdim=True)
            - 2 * standard_BD @ self.landmarks.T
            + self.landmarks.square().sum(1)
        )
        return torch.exp(-self.gamma * squared_BM.clamp_min(0))

    def forward(self, features_BD: Tensor) -> Tensor:
        return self._scaled(self.linear(self.similarities(self.standard(features_BD))))

    def resize(self, landmarks: int) -> None:
        """Make room for so many landmarks; they and their weights are not set."""
        self._count = landmarks
        made: dict[str, Any] = {"device": self.mean.device, "dtype": self.mean.dtype}
        self.landmarks = torch.zeros(landmarks, self.features, **made)
        self.linear = nn.Linear(landmarks, self.classes, **made)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *more: Any, **by_name: Any
    ) -> None:
        """Torch calls this for each module that it loads: the number of landmarks is that of the
        loaded weights, because a small training set has fewer than were asked for.
        """
        loaded = state_dict.get(prefix + "landmarks")
        if loaded is not None and len(loaded) != len(self.landmarks):
            self.resize(len(loaded))
        super()._load_from_state_dict(state_dict, prefix, *more, **by_name)


def build(
    kind: HeadKind, features: int, classes: int, dropout: float, scaled: bool, landmarks: int
) -> Head:
    """A head whose weights are all zero. landmarks: of a kernel."""
    if kind == "kernel":
        return KernelHead(features, classes, dropout, scaled, landmarks)
    return Head(features, classes, dropout, scaled)
