"""Backbones from elsewhere, by the prefix of their name.

hf:vit                        Hugging Face, from a config: model type and `options`, random weights,
                              no network
hf:/folder, hf:org/name@rev   with weights, from a local folder (config.json, *.safetensors), or
                              from the hub if it is reachable
timm:resnet18                 timm's name; `options` go to timm.create_model
torchvision:resnet18          torchvision's name, its last linear layer removed
file:package.module:factory   your own: `def factory(pretrained: bool, **options) -> nn.Module`,
                              which maps float images BCHW to features BD

library_backbones.py builds those of libraries, own_backbone.py your own. Each says which foreign
code it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError, one_line
from raypipe.models import library_backbones, own_backbone
from raypipe.models.backbones import BACKBONES, Backbone
from raypipe.models.finite import is_finite
from raypipe.models.library_backbones import BESIDE


@lru_cache(maxsize=16)
def resolve(name: str, options: str) -> Backbone:
    """The backbone of a name and its options (JSON).

    Raises ConfigError when a library, folder or model is missing.
    """
    if name in BACKBONES:
        return BACKBONES[name]
    provider, _, rest = name.partition(":")
    return PROVIDERS[provider](rest, json.loads(options))


def has_weights(name: str) -> bool:
    """Can this name come with pretrained weights? The name decides; nothing is imported."""
    if name in BACKBONES:
        return BACKBONES[name].pretrained
    return not name.startswith("hf:") or "/" in name


def same_options(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Are these resolved options of one architecture?

    Each release of transformers writes options of its own, too. What only one of them has does not
    count there, nor what is beside the model, nor the type that weights were stored in.
    """
    if not name.startswith("hf:"):
        return one == other
    both = one.keys() & other.keys()
    return all(one[key] == other[key] for key in both - {*BESIDE, "dtype", "torch_dtype"})


@torch.no_grad()
def width(backbone: nn.Module, side_px: int) -> int:
    """The number of features of a backbone, measured with two random images.

    Raises ConfigError where the features of an image depend on more than the image: random masks
    (masked autoencoders) and batch statistics would make every prediction noise.
    """
    training = backbone.training
    generator = torch.Generator().manual_seed(0)
    images_BCHW = torch.rand(2, 3, side_px, side_px, generator=generator) - 0.5
    try:
        features = backbone.eval()(images_BCHW)
        alone = backbone.eval()(images_BCHW[1:])
    except Exception as e:  # the user's code raises anything
        raise ConfigError(
            f"This backbone fails on an image: {one_line(e, 200)}",
            got=f"model.side_px={side_px}",
            fix="Set model.side_px to the backbone's own size, or set another model.name",
        ) from e
    backbone.train(training)

    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        shape = tuple(alone.shape) if isinstance(alone, Tensor) else type(alone).__name__
        raise ConfigError(
            "A backbone must give one row of features for each image",
            got=shape,
            rule="The shape is (images, features)",
        )

    if not is_finite(features):
        raise ConfigError(
            "This backbone gives features that are not finite",
            got="NaN or infinity for an image of noise",
            fix="Mend its weights or its code, or take another model.name",
        )

    # The second image must have the same features with and without the first one.
    largest = float(features.abs().max())
    if not torch.allclose(features[1:], alone, rtol=1e-2, atol=1e-3 * largest):
        apart = float((features[1:] - alone).abs().max())
        raise ConfigError(
            "The features of an image change from call to call, or with the other images",
            got=f"{apart:.2g} apart, of {largest:.2g}",
            rule="In evaluation a backbone must mask nothing at random and use no batch statistics",
            fix="Switch off masking in model.options, or set another model.name",
        )
    return features.shape[1]


PROVIDERS: dict[str, Callable[[str, dict[str, Any]], Backbone]] = {
    "hf": library_backbones.hugging_face,
    "timm": library_backbones.timm,
    "torchvision": library_backbones.torchvision,
    "file": own_backbone.own,
}
