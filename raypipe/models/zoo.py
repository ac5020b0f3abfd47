"""Names -> image models. A model takes uint8 pixels and returns logits; normalisation is part of it.

Keeping mean and standard deviation inside the model means that training, batch prediction, drift and the served package
cannot disagree about them, and that only uint8 crosses a process border.

The default is EfficientNet-Lite0 with ImageNet weights, both installed as packages (Apache-2.0): no model hub is asked at run
time. Names with a prefix (hf:, timm:, torchvision:, file:) come from elsewhere: providers.py. A model is rebuilt from its
config alone: what a provider looked up is written down by `ModelConfig.settled`.

Shapes: pixels_BHWC uint8 0-255, features_BD float32, logits_BC float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from raypipe.config import Section
from raypipe.errors import ConfigError, nearest
from raypipe.models import depth, tasks
from raypipe.models.backbones import BACKBONES, Backbone, Channels
from raypipe.models.finite import require_rows
from raypipe.models.providers import PROVIDERS, has_weights, resolve, width
from raypipe.models.tasks import Kind


class ModelConfig(Section):
    """Which backbone, how it is transferred, to which task, at which resolution. `side_px: null` takes the backbone's own.

    frozen_blocks: with mode finetune, the stem and so many blocks above it stay as they were pretrained, batch statistics
    included. A convolutional backbone's lowest blocks are its dearest: efficientnet_lite0 trains 1.5 times as fast with 3.
    norm_momentum: how fast batch norms' running statistics follow the batches; null: as the backbone has it, which may be too
    slow for a short training (efficientnet_lite0: 0.01, made for 100,000 steps).
    views: a prediction is the mean over so many views of the image: 2 mirrored, 4 flipped both ways, 8 with quarter turns too.
    `options` go to whoever builds the backbone. mean and std are of pixels from 0 to 1, one number or one a channel; null takes
    those that the backbone was trained on.
    """

    name: str = "efficientnet_lite0"
    task: Kind = "single_label"
    mode: Literal["frozen", "finetune"] = "frozen"
    frozen_blocks: int = Field(default=0, ge=0)
    pretrained: bool = True
    side_px: int | None = Field(default=None, ge=16, le=2048)
    dropout: float = Field(default=0.2, ge=0, lt=1)
    norm_momentum: float | None = Field(default=None, gt=0, le=1)
    views: Literal[1, 2, 4, 8] = 1
    options: dict[str, Any] = Field(default={})
    mean: Channels | None = None
    std: Channels | None = None

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        provider, prefixed, _ = name.partition(":")
        if name not in BACKBONES and not (prefixed and provider in PROVIDERS):
            known = [*BACKBONES, *(f"{p}:…" for p in PROVIDERS)]
            raise ValueError(f"there is no backbone {name!r}. {nearest(name, known)}")
        return name

    @model_validator(mode="after")
    def _frozen_needs_weights(self) -> ModelConfig:
        exist = has_weights(self.name)
        if self.mode == "frozen" and not (self.pretrained and exist):
            raise ValueError(
                f"mode frozen needs pretrained weights, and {self.name} starts at random. Set model.mode=finetune"
            )
        if self.views > 1 and self.mode == "frozen":
            raise ValueError(
                "frozen features are of the image as it is. Set model.views=1, or model.mode=finetune"
            )
        if self.frozen_blocks and not (self.mode == "finetune" and self.pretrained):
            raise ValueError(
                "frozen_blocks is for pretrained weights under mode finetune. Set model.frozen_blocks=0"
            )
        if self.pretrained and not exist:
            raise ValueError(f"{self.name} has no pretrained weights. Set model.pretrained=false")
        return self

    @property
    def backbone(self) -> Backbone:
        """How to build it, looked up where its name says. Raises ConfigError when that is not to be had."""
        return resolve(self.name, json.dumps(self.options, sort_keys=True))

    @property
    def pixels(self) -> int:
        return self.side_px or self.backbone.side_px

    @property
    def normalisation(self) -> tuple[Channels, Channels]:
        """Mean and standard deviation of pixels from 0 to 1."""
        found = self.backbone
        return (
            found.mean if self.mean is None else self.mean,
            found.std if self.std is None else self.std,
        )

    @property
    def slug(self) -> str:
        """The name as part of a path."""
        return re.sub(r"[^\w.-]+", "-", self.name)

    def settled(self) -> ModelConfig:
        """The same architecture, resolution and normalisation with nothing left to look up: what a package keeps."""
        found = self.backbone
        name, options = found.settled or (self.name, self.options)
        mean, std = self.normalisation
        return self.model_copy(
            update={
                "name": name,
                "options": options,
                "mean": mean,
                "std": std,
                "side_px": self.pixels,
            }
        )


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
        spec = cfg.backbone
        mean, std = (
            torch.tensor(value, dtype=torch.float64)
            for value in (
                spec.mean if cfg.mean is None else cfg.mean,
                spec.std if cfg.std is None else cfg.std,
            )
        )
        # No buffers: they would be weights of every checkpoint. One value a channel, or one for all.
        self._scale, self._shift = (
            (v.float().view(-1, 1, 1)) for v in (1 / (255 * std), -mean / std)
        )
        self.task, self._fold, self._views = cfg.task, spec.fold, cfg.views
        self.backbone = spec.build(cfg.pretrained).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = Head(
            spec.features or width(self.backbone, cfg.pixels),
            classes,
            cfg.dropout,
            scaled=cfg.task == "regression",
        )
        if cfg.norm_momentum is not None:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.momentum = cfg.norm_momentum
        self._still = (
            tuple(depth.freeze(self, cfg.frozen_blocks)) if cfg.frozen_blocks else ()
        )  # a tuple: no submodules anew

    def train(self, mode: bool = True) -> ImageModel:
        super().train(mode)
        for module in self._still:
            module.eval()
        return self

    def embed(self, pixels_BHWC: Tensor) -> Tensor:
        """features_BD of uint8 (or already float 0-255, after augmentation) pixels."""
        if self._scale.device != pixels_BHWC.device:
            self._scale, self._shift = (
                self._scale.to(pixels_BHWC.device),
                self._shift.to(pixels_BHWC.device),
            )
        images_BCHW = (
            pixels_BHWC.permute(0, 3, 1, 2).to(torch.float32).mul(self._scale).add_(self._shift)
        )
        features = self.backbone(images_BCHW.contiguous(memory_format=torch.channels_last))
        if not isinstance(
            features, Tensor
        ):  # torchvision's Inception gives its auxiliary logits too, in training alone
            raise ConfigError(
                "A backbone gives one row of features an image",
                got=type(features).__name__,
                rule="In training too",
                fix="Switch further outputs off in model.options, as aux_logits: false",
            )
        return features.float()

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        return self.head(self.embed(pixels_BHWC))

    def scores(self, logits_BC: Tensor) -> Tensor:
        """What the logits mean under the model's task: probabilities, or numbers."""
        return tasks.scores(self.task, logits_BC)

    def for_inference(self) -> ImageModel:
        """A copy that only predicts: batch norms folded into convolutions. 1.3-1.5 times as fast on a CPU, equal to 2e-5."""
        with torch.no_grad():
            copy = deepcopy(self).eval()
            copy.backbone = self._fold(copy.backbone)
        return copy

    @torch.inference_mode()
    def predict(self, pixels_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(features_ND, scores_NC) of any number of uint8 images, on the model's own device. Scores are the mean over the
        views, features those of the image as it is. Raises DataError if some are not finite."""
        device = self.head.mean.device
        step = (
            16 if device.type == "cpu" else 256
        )  # two CPU cores: 49 images/s at 16 a batch, 34 at 64 (caches)
        features, scores = [], []
        for start in range(0, len(pixels_NHWC), step):
            pixels_BHWC = torch.from_numpy(np.array(pixels_NHWC[start : start + step])).to(device)
            by_view = [self.embed(view) for view in views(pixels_BHWC, self._views)]
            features.append(by_view[0].cpu())
            scores.append(
                torch.stack([self.scores(self.head(f)).float() for f in by_view]).mean(0).cpu()
            )
        if not features:
            widths = self.head.linear.in_features, self.head.linear.out_features
            return np.empty((0, widths[0]), np.float32), np.empty((0, widths[1]), np.float32)
        features_ND, scores_NC = torch.cat(features).numpy(), torch.cat(scores).numpy()
        for values, what in ((features_ND, "features"), (scores_NC, "scores")):
            require_rows(
                values,
                what,
                "Take another version of the model, or train again with a lower train.lr",
            )
        return features_ND, scores_NC


def views(pixels_BHWC: Tensor, count: int) -> Iterator[Tensor]:
    """The first `count` of: the images, mirrored, upside down, both; the same four across the diagonal."""
    for turned in (pixels_BHWC, pixels_BHWC.transpose(1, 2))[: 1 + count // 8]:
        yield from (
            turned.flip(dims) if dims else turned for dims in ((), (2,), (1,), (1, 2))[:count]
        )


def fingerprint(module: nn.Module) -> str:
    """12 hex digits of the weights: features computed with other weights are other features."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(
            tensor.detach()
            .cpu()
            .contiguous(memory_format=torch.contiguous_format)
            .numpy()
            .tobytes()
        )
    return digest.hexdigest()[:12]


def backbone_hash(cfg: ModelConfig, backbone: nn.Module, version: int) -> str:
    """16 hex digits of all that turns an image's bytes into features: the weights with their names,
    types and shapes; who built them, with which options (two poolings have the same weights);
    normalisation, resolution, views; and `version`, of the code in between."""
    settled = cfg.settled()
    told = settled.model_dump(
        mode="json", include={"name", "options", "mean", "std", "side_px", "views"}
    )
    given = {"given": cfg.name, "with": cfg.options, "source": _source(cfg.name)}
    digest = hashlib.sha256(
        json.dumps([version, told, given], sort_keys=True, default=str).encode()
    )
    for name, tensor in backbone.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(fingerprint(backbone).encode())
    return digest.hexdigest()[:16]


def _source(name: str) -> str:
    """The sha256 of the module that a file: factory stands in: its code may change and its weights
    stay. "" for other providers."""
    provider, _, rest = name.partition(":")
    if provider != "file":
        return ""
    found = importlib.util.find_spec(rest.partition(":")[0])
    source = Path(found.origin) if found and found.origin else None
    return hashlib.sha256(source.read_bytes()).hexdigest() if source and source.is_file() else ""
