"""Names -> image models. A model takes uint8 pixels and returns logits; it normalises them itself.

The model holds its mean and standard deviation. So training, batch prediction, drift and the served
package cannot disagree about them, and only uint8 crosses a process border.

The default is EfficientNet-Lite0 with ImageNet weights, both installed as packages (Apache-2.0): no
model hub is asked at run time. Names with a prefix (hf:, timm:, torchvision:, file:) come from
models/providers.py. A model is rebuilt from its config alone: `ModelConfig.resolved` writes down
what a provider looked up.

Shapes: pixels_BHWC uint8 0-255, features_BD float32, logits_BC float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from raypipe.config import Section
from raypipe.errors import ConfigError, nearest
from raypipe.models import depth, heads, tasks
from raypipe.models.backbones import BACKBONES, Backbone, Channels
from raypipe.models.calibrate import tempered
from raypipe.models.predictor import Predictor
from raypipe.models.providers import PROVIDERS, has_weights, resolve, width
from raypipe.models.tasks import Kind

# Fields of a model that change neither its time nor its size.
NOT_SHAPE = {
    *("task", "mode", "frozen_blocks", "pretrained", "dropout", "norm_momentum", "calibrate"),
    *("mean", "std"),
}


class ModelConfig(Section):
    """Which backbone, how it is transferred, to which task, at which resolution."""

    name: str = "efficientnet_lite0"
    """The backbone: efficientnet_lite0, efficientnet_lite0_stages, small_cnn, or a name with the
    prefix of a provider: hf:, timm:, torchvision:, file:. The default needs no download. With
    raypipe[lite] also efficientnet_lite1 and efficientnet_lite2, each also with _stages."""

    task: Kind = "single_label"
    """What the labels mean. `single_label`: one of several classes. `multi_label`: any of several
    tags. `probability`: a number from 0 to 1. `regression`: any number."""

    mode: Literal["frozen", "finetune"] = "frozen"
    """`frozen`: train a head (the last layer) on features that are computed once. It takes minutes
    on a CPU. `finetune`: train the backbone, too."""

    frozen_blocks: int = Field(default=0, ge=0)
    """With mode finetune: the stem and this number of blocks above it are not trained, batch
    statistics included. A convolutional backbone's lowest blocks cost most: with 3,
    efficientnet_lite0 trains 1.5 times as fast."""

    pretrained: bool = True
    """Start from pretrained weights. false: from random ones."""

    head: heads.HeadKind = "linear"
    """What turns features into logits. `linear`: a linear layer on the features. `kernel`: a linear
    layer on the similarities to training images; needs mode frozen, and train.solver lbfgs or
    closed."""

    landmarks: int = Field(default=2048, ge=1)
    """With head kernel: number of training images, drawn at random, that an image is compared with.
    The head contains their features: 2,048 of efficientnet_lite0_stages are 23 MB. On the
    solar cells 512 cost two points of accuracy."""

    side_px: int | None = Field(default=None, ge=16, le=2048)
    """Height and width in pixels to which images are resized; the aspect ratio is not kept. null:
    the backbone's own."""

    dropout: float = Field(default=0.2, ge=0, lt=1)
    """The share of features that the head drops at random in training."""

    norm_momentum: float | None = Field(default=None, gt=0, le=1)
    """Momentum of the running statistics of batch norms. null: the backbone's own, which may be too
    small for a short training: efficientnet_lite0's 0.01 is for 100,000 steps."""

    views: Literal[1, 2, 4, 8] = 1
    """Number of views of the image over which a prediction is averaged. 2: also mirrored. 4:
    flipped both ways. 8: also with quarter turns. Each view costs a forward pass."""

    calibrate: bool = False
    """Divide the registered model's logits by a temperature that is fitted on validation images:
    then about 80 % of images with a score of 0.8 should be right. Predicted labels do not change.
    A temperature that does not help in a cross-validation is not used, and none is fitted if the
    weights have learned from validation images: the card says so."""

    options: dict[str, Any] = Field(default={})
    """Arguments for the library or the factory that builds the backbone."""

    mean: Channels | None = None
    """Mean of pixels from 0 to 1, one number or one a channel, for normalisation. null: that of
    the backbone's pretraining."""

    std: Channels | None = None
    """Standard deviation of pixels from 0 to 1, like `mean`."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        provider, prefixed, _ = name.partition(":")
        if name not in BACKBONES and not (prefixed and provider in PROVIDERS):
            known = [*BACKBONES, *(f"{p}:…" for p in PROVIDERS)]
            raise ValueError(f"there is no backbone {name!r}. {nearest(name, known)}")
        return name

    @field_validator("std")
    @classmethod
    def _above_zero(cls, std: Channels | None) -> Channels | None:
        values = std if isinstance(std, tuple) else (std,)
        if any(value is not None and value <= 0 for value in values):
            raise ValueError("a standard deviation is above 0: pixels are divided by it")
        return std

    @model_validator(mode="after")
    def _frozen_needs_weights(self) -> ModelConfig:
        exist = has_weights(self.name)
        if self.mode == "frozen" and not (self.pretrained and exist):
            fix = "Set model.mode=finetune"
            # Both at once: the next message would be about this one.
            if self.pretrained and not exist:
                fix += " and model.pretrained=false"
            raise ValueError(
                f"mode frozen needs pretrained weights, and {self.name} starts at random. {fix}"
            )
        if self.views > 1 and self.mode == "frozen":
            raise ValueError(
                "frozen features have one view of each image. "
                "Set model.views=1, or model.mode=finetune"
            )
        if self.frozen_blocks and not (self.mode == "finetune" and self.pretrained):
            raise ValueError(
                "frozen_blocks needs pretrained weights and mode finetune. "
                "Set model.frozen_blocks=0"
            )
        if self.pretrained and not exist:
            raise ValueError(f"{self.name} has no pretrained weights. Set model.pretrained=false")
        return self

    @model_validator(mode="after")
    def _calibrates_probabilities(self) -> ModelConfig:
        # For the numeric kinds a temperature would change the predictions themselves.
        if self.calibrate and self.task in tasks.NUMERIC:
            raise ValueError(
                f"a temperature is fitted to the scores of classes, and model.task={self.task} "
                "predicts a number. Set model.calibrate=false"
            )
        return self

    @property
    def backbone(self) -> Backbone:
        """How to build it. Raises ConfigError where the name cannot be looked up."""
        return resolve(self.name, json.dumps(self.options, sort_keys=True))

    @property
    def pixels(self) -> int:
        """The side in pixels."""
        return self.side_px or self.backbone.side_px

    @property
    def normalisation(self) -> tuple[Channels, Channels]:
        """Mean and standard deviation of pixels from 0 to 1."""
        backbone = self.backbone
        mean = backbone.mean if self.mean is None else self.mean
        std = backbone.std if self.std is None else self.std
        return mean, std

    @property
    def slug(self) -> str:
        """The name as part of a path."""
        return re.sub(r"[^\w.-]+", "-", self.name)

    @property
    def shape(self) -> str:
        """Models of equal shapes take equally long for an image, and have as many weights."""
        kept = self.resolved().model_dump(mode="json", exclude=NOT_SHAPE)
        return json.dumps(kept, sort_keys=True)

    def head_of(self, features: int, classes: int, most_landmarks: int | None = None) -> heads.Head:
        """A head without weights. most_landmarks: images in the training set, where it is known."""
        landmarks = min(self.landmarks, most_landmarks or self.landmarks)
        scaled = self.task == "regression"
        return heads.build(self.head, features, classes, self.dropout, scaled, landmarks)

    def resolved(self) -> ModelConfig:
        """The same architecture, resolution and normalisation, with nothing left to look up.

        A model package keeps this config.
        """
        name, options = self.backbone.resolved or (self.name, self.options)
        mean, std = self.normalisation
        update = {
            "name": name,
            "options": options,
            "mean": mean,
            "std": std,
            "side_px": self.pixels,
        }
        return self.model_copy(update=update)


class ImageModel(Predictor):
    """uint8 pixels -> logits. The features on the way are open to drift checks (`embed`)."""

    def __init__(self, cfg: ModelConfig, classes: int) -> None:
        super().__init__()
        spec = cfg.backbone
        self.task = cfg.task
        self._fold = spec.fold
        self._views = cfg.views
        self.side_px = cfg.pixels
        self.temperature = 1.0

        # Normalisation as pixels * scale + shift, one value a channel or one for all. These are no
        # buffers: buffers would be weights of every checkpoint.
        mean, std = (torch.tensor(value, dtype=torch.float64) for value in cfg.normalisation)
        self._scale = (1 / (255 * std)).float().view(-1, 1, 1)
        self._shift = (-mean / std).float().view(-1, 1, 1)

        backbone = spec.build(cfg.pretrained)
        self.backbone = backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        features = spec.features or width(self.backbone, cfg.pixels)
        self.head = cfg.head_of(features, classes)
        self.widths = (features, classes)

        # The backbone's own momentum may be too slow for a short training.
        if cfg.norm_momentum is not None:
            for module in self.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.momentum = cfg.norm_momentum

        # Modules that stay in eval mode. They are registered in the backbone already.
        self._frozen: tuple[nn.Module, ...] = ()
        if cfg.frozen_blocks:
            self._frozen = tuple(depth.freeze(self, cfg.frozen_blocks))

    def train(self, mode: bool = True) -> ImageModel:
        """Training mode, except for frozen blocks."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def embed(self, pixels_BHWC: Tensor) -> Tensor:
        """features_BD of uint8 pixels, or of float pixels 0-255 (after augmentation)."""
        # The normalisation follows the pixels: no buffers, so `to` does not move it.
        device = pixels_BHWC.device
        if self._scale.device != device:
            self._scale = self._scale.to(device)
            self._shift = self._shift.to(device)

        floats_BCHW = pixels_BHWC.permute(0, 3, 1, 2).to(torch.float32)
        images_BCHW = floats_BCHW.mul(self._scale).add_(self._shift)
        features = self.backbone(images_BCHW.contiguous(memory_format=torch.channels_last))
        if not isinstance(features, Tensor):
            # torchvision's Inception, in training: its auxiliary logits come, too.
            raise ConfigError(
                "A backbone must give one row of features for each image",
                got=type(features).__name__,
                rule="In training too",
                fix="Switch further outputs off in model.options, as aux_logits: false",
            )
        return features.float()

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        return self.head(self.embed(pixels_BHWC))

    def answers(self, pixels_BHWC: Tensor) -> tuple[Tensor, Tensor]:
        """(features_BD, scores_BC): one forward pass a view; the head is cheap."""
        features_of_views = [self.embed(view) for view in views(pixels_BHWC, self._views)]
        scores_of_views = [self.scores(self.head(f)).float() for f in features_of_views]
        mean_BC = torch.stack(scores_of_views).mean(0)
        return features_of_views[0], tempered(self.task, mean_BC, self.temperature)

    @property
    def spread(self) -> float:
        """Of a regression: the standard deviation of its training labels."""
        return float(self.head.spread)

    def for_inference(self) -> ImageModel:
        """A copy that only predicts: batch norms are folded into convolutions.

        1.3-1.5 times as fast on a CPU, equal to 2e-5.
        """
        with torch.no_grad():
            copy = deepcopy(self).eval()
            copy.backbone = self._fold(copy.backbone)
        return copy


def views(pixels_BHWC: Tensor, count: int) -> Iterator[Tensor]:
    """The first `count` views: the images, mirrored, upside down, both; then the same
    transposed.
    """
    flips = ((), (2,), (1,), (1, 2))[:count]
    sources = (pixels_BHWC, pixels_BHWC.transpose(1, 2)) if count == 8 else (pixels_BHWC,)
    for source in sources:
        for axes in flips:
            yield source.flip(axes) if axes else source
