"""Backbones from elsewhere, by the prefix of their name. Each library is imported only when a name asks for it.

hf:vit                        Hugging Face, from a config: model type and `options`, random weights, no network
hf:/folder, hf:org/name@rev   weights too, from a local folder (config.json, *.safetensors), or from the hub if it is reachable
timm:resnet18                 timm's name; `options` go to timm.create_model
torchvision:resnet18          torchvision's name, its last linear layer removed
file:package.module:factory   your own: `def factory(pretrained: bool, **options) -> nn.Module`, which maps float images BCHW to
                              features BD

Only safetensors are read from Hugging Face folders, and no code that lies beside them is run. A `file:` factory must say that
it returns an nn.Module: a package names it and calls it when it loads, and so cannot name any other function.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError, nearest
from raypipe.models.backbones import BACKBONES, Backbone

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@lru_cache(maxsize=16)
def resolve(name: str, options: str) -> Backbone:
    """The backbone of a name and its options (JSON). Raises ConfigError when a library, folder or model is not there."""
    provider, _, rest = name.partition(":")
    return BACKBONES[name] if name in BACKBONES else PROVIDERS[provider](rest, json.loads(options))


def has_weights(name: str) -> bool:
    """Can this name come with pretrained weights? Decided by the name alone: nothing is imported."""
    if name in BACKBONES:
        return BACKBONES[name].pretrained
    return not name.startswith("hf:") or "/" in name


@torch.no_grad()
def width(backbone: nn.Module, side_px: int) -> int:
    """How many features a backbone gives, found out by two images. Raises ConfigError where they are no function of the image:
    random masks (masked autoencoders) and batch statistics make every prediction noise."""
    training = backbone.training
    images_BCHW = (
        torch.rand(2, 3, side_px, side_px, generator=torch.Generator().manual_seed(0)) - 0.5
    )
    try:
        features, alone = (backbone.eval()(some) for some in (images_BCHW, images_BCHW[1:]))
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as e:
        raise ConfigError(
            f"This backbone fails on an image: {' '.join(str(e).split())[:200]}",
            got=f"model.side_px={side_px}",
            fix="Set model.side_px to what it was made for, or take another model.name",
        ) from e
    backbone.train(training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        shape = tuple(alone.shape) if isinstance(alone, Tensor) else type(alone).__name__
        raise ConfigError(
            "A backbone gives one row of features an image",
            got=shape,
            rule="The shape is (images, features)",
        )
    if not torch.allclose(features[1:], alone, rtol=1e-2, atol=1e-3 * float(features.abs().max())):
        raise ConfigError(
            "This backbone gives an image other features each time, or in other company",
            got=f"{float((features[1:] - alone).abs().max()):.2g} apart, of {float(features.abs().max()):.2g}",
            rule="A model that predicts masks nothing at random and takes no statistics of its batch",
            fix="Switch its masking off in model.options, or take another model.name",
        )
    return features.shape[1]


def hugging_face(name: str, options: dict[str, Any]) -> Backbone:
    transformers = _import("transformers", "hf")
    folder = Path(name).expanduser()
    source, _, revision = (str(folder), "", "") if folder.is_dir() else name.partition("@")
    given = {"revision": revision or "main", "trust_remote_code": False}
    try:
        if "/" in name:
            config = transformers.AutoConfig.from_pretrained(source, **given, **options)
        else:
            config = transformers.AutoConfig.for_model(
                name, **{k: v for k, v in options.items() if k != "model_type"}
            )
    except OSError:
        raise ConfigError(
            "There is no such Hugging Face model to be had here",
            got=name,
            rule="It is a folder with a config.json, or a name on a hub that this machine reaches",
            fix="Download it elsewhere and set model.name=hf:/its/folder",
        ) from None
    except ValueError as e:
        raise ConfigError(
            f"Hugging Face cannot read this config: {' '.join(str(e).split())[:200]}", got=name
        ) from None

    def build(pretrained: bool) -> nn.Module:
        try:
            if pretrained:
                options = {
                    "use_safetensors": True,
                    "dtype": torch.float32,
                    "output_loading_info": True,
                    **given,
                }
                net, found = transformers.AutoModel.from_pretrained(
                    source, config=config, **options
                )
                return _complete(_Transformer(net), found["missing_keys"], name)
            return _Transformer(transformers.AutoModel.from_config(config))
        except (
            ImportError
        ) as e:  # a torchvision built for CUDA on a CPU-only torch breaks transformers too
            raise _lacks("transformers", "hf", e) from None
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"The weights cannot be read: {' '.join(str(e).split())[:200]}", got=name
            ) from None

    if hasattr(
        config, "mask_ratio"
    ):  # masked autoencoders: to hide patches is for their pretraining alone
        config.mask_ratio = 0.0
    mean, std = _processor(transformers, source, given) if "/" in name else (0.5, 0.5)
    side = getattr(config, "image_size", None) or 224
    written = json.loads(config.to_json_string(use_diff=False))
    return Backbone(
        build,
        None,
        mean,
        std,
        side if isinstance(side, int) else side[0],
        settled=(f"hf:{config.model_type}", written),
    )


class _Transformer(nn.Module):
    """A Hugging Face vision model as a function of images: its pooled output, else the class token, else the mean."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        if hasattr(
            getattr(net, "pooler", None), "dense"
        ):  # ViT's: image classifiers leave it untrained
            net.pooler = None
        self._class_token = any(name.endswith("cls_token") for name, _ in net.named_parameters())
        accepted = inspect.signature(net.forward).parameters
        if next(iter(accepted), None) != "pixel_values":
            raise ConfigError(
                "This Hugging Face model does not take images alone",
                got=f"hf:{net.config.model_type}",
                rule="Its first input is pixel_values",
                fix="Take the vision part, as hf:clip_vision_model",
            )
        self._resizes = "interpolate_pos_encoding" in accepted
        # ViT-MAE orders its patches by it, at random unless it is told.
        self._ordered = "noise" in accepted and isinstance(net.config.patch_size, int)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        more: dict[str, Any] = {"interpolate_pos_encoding": True} if self._resizes else {}
        if self._ordered:
            patches = images_BCHW.shape[2] * images_BCHW.shape[3] // self.net.config.patch_size**2
            more["noise"] = torch.arange(patches, device=images_BCHW.device).expand(
                len(images_BCHW), patches
            )
        found = self.net(images_BCHW, **more)
        pooled: Any = getattr(found, "pooler_output", None)
        last: Any = getattr(found, "last_hidden_state", None)
        if pooled is None and last is None:
            raise ConfigError(
                "This Hugging Face model gives no features", got=f"hf:{self.net.config.model_type}"
            )
        if pooled is not None:
            return pooled.flatten(1)  # type: ignore[no-any-return]
        if last.ndim == 4:
            return last.mean((2, 3))  # type: ignore[no-any-return]
        return last[:, 0] if self._class_token else last.mean(1)  # type: ignore[no-any-return]


def _complete(model: nn.Module, missing: Iterable[str], name: str) -> nn.Module:
    """The model, if its folder held every matrix that features depend on. transformers fills what is missing at random."""
    parameters = dict(model.named_parameters())
    asked = {f"net.{key}": key for key in missing if "mask_token" not in key}
    if random := [
        key for full, key in asked.items() if full in parameters and parameters[full].ndim > 1
    ]:
        raise ConfigError(
            "The weights lack a part of the model, which would stay random",
            got=f"hf:{name}: {', '.join(sorted(random)[:3])}",
            rule=f"{len(random)} of {len(parameters)} tensors are missing",
            fix="Take a folder that holds the whole model",
        )
    return model


def _processor(transformers: Any, source: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """Mean and std that the model was trained on."""
    found = transformers.utils.cached_file(
        source,
        "preprocessor_config.json",
        revision=given["revision"],
        _raise_exceptions_for_missing_entries=False,
    )
    told = json.loads(Path(found).read_text()) if found else {}
    return tuple(told.get("image_mean", (0.5,) * 3)), tuple(told.get("image_std", (0.5,) * 3))


def timm(name: str, options: dict[str, Any]) -> Backbone:
    library = _import("timm", "timm")
    if not library.is_model(name.partition(".")[0]):
        raise ConfigError(
            "timm has no such model", got=name, fix=nearest(name, library.list_models())
        )
    told = library.get_pretrained_cfg(name)
    mean, std, side = (told.mean, told.std, told.input_size[-1]) if told else (*IMAGENET, 224)

    def build(pretrained: bool) -> nn.Module:
        return library.create_model(name, pretrained=pretrained, num_classes=0, **options)  # type: ignore[no-any-return]

    return Backbone(build, None, tuple(mean), tuple(std), options.get("img_size", side))


def torchvision(name: str, options: dict[str, Any]) -> Backbone:
    library = _import("torchvision.models", "torchvision")
    if name not in library.list_models():
        raise ConfigError(
            "torchvision has no such model", got=name, fix=nearest(name, library.list_models())
        )
    side = library.get_model_weights(name).DEFAULT.transforms().crop_size[0]

    def build(pretrained: bool) -> nn.Module:
        net: nn.Module = library.get_model(
            name, weights="DEFAULT" if pretrained else None, **options
        )
        linear = [n for n, m in net.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ConfigError("This torchvision model has no linear layer to replace", got=name)
        owner, _, leaf = linear[-1].rpartition(".")
        setattr(net.get_submodule(owner), leaf, nn.Identity())
        return net

    return Backbone(build, None, *IMAGENET, options.get("image_size", side))


def own(name: str, options: dict[str, Any]) -> Backbone:
    module, _, factory = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), factory)
    except (ImportError, ValueError, AttributeError) as e:
        raise ConfigError(
            f"The model's factory cannot be imported: {e}",
            got=f"file:{name}",
            rule="It is file:package.module:factory, importable on every worker",
            fix="Put its folder on PYTHONPATH, or install it",
        ) from None
    made = function if inspect.isclass(function) else _returned(function)
    if not (inspect.isclass(made) and issubclass(made, nn.Module)):
        raise ConfigError(
            "A factory says that it returns an nn.Module",
            got=f"file:{name}",
            fix="Annotate it: -> nn.Module",
        )
    return Backbone(
        lambda pretrained: function(pretrained=pretrained, **options), None, 0.5, 0.5, 224
    )


def _returned(function: Any) -> Any:
    try:
        return get_type_hints(function).get("return")
    except (TypeError, NameError):
        return None


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except (
        ImportError,
        RuntimeError,
    ) as e:  # torchvision built for CUDA raises RuntimeError on a CPU-only torch
        raise _lacks(module.partition(".")[0], extra, e) from None


def _lacks(library: str, extra: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:200]
    return ConfigError(
        f"model.name={extra}:… needs {library}: {reason}",
        fix=f"pip install 'raypipe[{extra}]', or take a model of another provider",
    )


PROVIDERS: dict[str, Callable[[str, dict[str, Any]], Backbone]] = {
    "hf": hugging_face,
    "timm": timm,
    "torchvision": torchvision,
    "file": own,
}
