"""Backbones of libraries: Hugging Face's transformers, timm and torchvision.

A library is imported only when a name asks for it.

Security: only safetensors are read from Hugging Face folders, and no code beside them is run.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.errors import ConfigError, RaypipeError, nearest, one_line
from raypipe.models.backbones import Backbone

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and std of most pretrainings
# What a config of Hugging Face says beside the model: who wrote it, and where it was read.
BESIDE = ("transformers_version", "_name_or_path")


def hugging_face(name: str, options: dict[str, Any]) -> Backbone:
    """hf:… `name` is a model type, a local folder, or org/name@revision."""
    transformers = _import("transformers", "hf")
    folder = Path(name).expanduser()
    if folder.is_dir():
        source, revision = str(folder), ""
    else:
        source, _, revision = name.partition("@")
    where = {"revision": revision or "main", "trust_remote_code": False}
    with _asking(f"hf:{name}"):
        config = _hugging_face_config(transformers, name, source, where, options)

    def build(pretrained: bool) -> nn.Module:
        with _asking(f"hf:{name}"):
            return made(pretrained)

    def made(pretrained: bool) -> nn.Module:
        try:
            if not pretrained:
                return _Transformer(transformers.AutoModel.from_config(config))
            net, loading = transformers.AutoModel.from_pretrained(
                source,
                config=config,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                **where,
            )
            return _complete(_Transformer(net), loading["missing_keys"], name)
        except ImportError as e:
            # A torchvision built for CUDA on a CPU-only torch breaks transformers, too.
            raise _lacks("transformers", "hf", e) from None
        except (OSError, ValueError) as e:
            raise ConfigError(f"The weights cannot be read: {one_line(e, 200)}", got=name) from None

    # Masked autoencoders hide patches in their pretraining only.
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    # Weights are read as float32, whatever they are stored as: a package builds the same.
    if getattr(config, "dtype", None) not in (None, torch.float32):
        config.dtype = torch.float32

    # A model of timm's says in its config what others say in a processor's file.
    of_timm = getattr(config, "pretrained_cfg", None) or {}
    # A bare model type has random weights, so no statistics of a pretraining.
    mean, std = 0.5, 0.5
    if "/" in name:
        with _asking(f"hf:{name}"):
            mean, std = _processor(transformers, source, where, of_timm)
    side = getattr(config, "image_size", None) or of_timm.get("input_size", (224,))[-1]
    written = json.loads(config.to_json_string(use_diff=False))
    for key in BESIDE:
        written.pop(key, None)
    return Backbone(
        build,
        features=None,
        mean=mean,
        std=std,
        side_px=side if isinstance(side, int) else side[0],
        resolved=(f"hf:{config.model_type}", written),
    )


def _hugging_face_config(
    transformers: Any, name: str, source: str, where: dict[str, Any], options: dict[str, Any]
) -> Any:
    """The model's config, from its folder or hub, or of a model type with `options`."""
    try:
        if "/" in name:
            return transformers.AutoConfig.from_pretrained(source, **where, **options)
        changes = {key: value for key, value in options.items() if key != "model_type"}
        return transformers.AutoConfig.for_model(name, **changes)
    except OSError:
        raise ConfigError(
            "This Hugging Face model cannot be found",
            got=name,
            rule="It is a folder with a config.json, or a name on a hub that this machine reaches",
            fix="Download it elsewhere and set model.name=hf:/its/folder",
        ) from None
    except ValueError as e:
        raise ConfigError(
            f"Hugging Face cannot read this config: {one_line(e, 200)}", got=name
        ) from None


class _Transformer(nn.Module):
    """A Hugging Face vision model that maps images to features.

    Features: its pooled output, else its class token, else the mean of its last layer.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        # ViT's pooler has a dense layer that image classifiers leave untrained.
        if hasattr(getattr(net, "pooler", None), "dense"):
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
        # ViT-MAE orders its patches by `noise`, which is random unless it is given.
        self._ordered = "noise" in accepted and isinstance(net.config.patch_size, int)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        arguments: dict[str, Any] = {}
        if self._resizes:
            arguments["interpolate_pos_encoding"] = True
        if self._ordered:
            batch, _, height, width = images_BCHW.shape
            patches = height * width // self.net.config.patch_size**2
            in_order = torch.arange(patches, device=images_BCHW.device)
            arguments["noise"] = in_order.expand(batch, patches)

        outputs = self.net(images_BCHW, **arguments)
        # Models differ in what they return: a pooled output, or only their last layer.
        pooled: Any = getattr(outputs, "pooler_output", None)
        last: Any = getattr(outputs, "last_hidden_state", None)
        if pooled is not None:
            return pooled.flatten(1)
        if last is None:
            raise ConfigError(
                "This Hugging Face model gives no features", got=f"hf:{self.net.config.model_type}"
            )
        if last.ndim == 4:  # B D H W, of a convolutional network
            return last.mean((2, 3))
        return last[:, 0] if self._class_token else last.mean(1)


def _complete(model: nn.Module, missing: Iterable[str], name: str) -> nn.Module:
    """The model, if its folder held every matrix that features depend on; else ConfigError.

    transformers fills what is missing at random.
    """
    parameters = dict(model.named_parameters())
    random = []
    for key in missing:
        parameter = parameters.get(f"net.{key}")
        if "mask_token" not in key and parameter is not None and parameter.ndim > 1:
            random.append(key)
    if random:
        raise ConfigError(
            "The weights lack a part of the model, which would stay random",
            got=f"hf:{name}: {', '.join(sorted(random)[:3])}",
            rule=f"{len(random)} of {len(parameters)} tensors are missing",
            fix="Take a folder that holds the whole model",
        )
    return model


def _processor(
    transformers: Any, source: str, where: dict[str, Any], of_timm: dict[str, Any]
) -> tuple[Any, Any]:
    """Mean and std of the model's pretraining; 0.5 where its folder does not say."""
    path = transformers.utils.cached_file(
        source,
        "preprocessor_config.json",
        revision=where["revision"],
        _raise_exceptions_for_missing_entries=False,
    )
    if not path:
        return _channels(of_timm.get("mean")), _channels(of_timm.get("std"))
    settings = json.loads(Path(path).read_text())
    if settings.get("do_normalize") is False:
        return 0.0, 1.0
    return _channels(settings.get("image_mean")), _channels(settings.get("image_std"))


def _channels(given: Any) -> Any:
    """One number, or one a channel; 0.5 where none is given."""
    if given is None:
        return (0.5,) * 3
    return tuple(given) if isinstance(given, list) else given


def timm(name: str, options: dict[str, Any]) -> Backbone:
    """timm:… A name is an architecture, or ARCHITECTURE.PRETRAINING as timm writes it.

    The pretraining says how pixels are normalised and at which resolution; without one it is
    ImageNet's way at 224 px.
    """
    library = _import("timm", "timm")
    architecture = name.partition(".")[0]
    if not library.is_model(architecture):
        raise ConfigError(
            "timm has no such model", got=name, fix=nearest(name, library.list_models())
        )
    with _asking(f"timm:{name}"):
        pretraining = library.get_pretrained_cfg(name)
    mean: Any
    std: Any
    mean, std = IMAGENET
    side = 224
    if pretraining:
        mean = tuple(pretraining.mean)
        std = tuple(pretraining.std)
        side = pretraining.input_size[-1]

    def build(pretrained: bool) -> nn.Module:
        with _asking(f"timm:{name}"):
            return library.create_model(name, pretrained=pretrained, num_classes=0, **options)

    # `img_size` builds the network for another resolution.
    side_px = options.get("img_size", side)
    return Backbone(build, features=None, mean=mean, std=std, side_px=side_px)


def torchvision(name: str, options: dict[str, Any]) -> Backbone:
    """torchvision:…"""
    library = _import("torchvision.models", "torchvision")
    if name not in library.list_models():
        raise ConfigError(
            "torchvision has no such model", got=name, fix=nearest(name, library.list_models())
        )
    mean: Any
    std: Any
    with _asking(f"torchvision:{name}"):
        seen = library.get_model_weights(name).DEFAULT.transforms()
        mean, std, side = tuple(seen.mean), tuple(seen.std), seen.crop_size[0]
    side_px = options.get("image_size", side)

    # Pretrained weights change these without a word, and a package is built without such weights.
    given = dict(options)
    if name in ("googlenet", "inception_v3"):
        given.setdefault("transform_input", True)
    if name == "googlenet":
        given.setdefault("aux_logits", False)
    if name.startswith("vit_"):
        given.setdefault("image_size", side_px)
    without_heads = given.get("aux_logits") is False

    def build(pretrained: bool) -> nn.Module:
        arguments = dict(given)
        if pretrained and without_heads:
            # torchvision refuses this option for them: the heads are left out below.
            del arguments["aux_logits"]
        weights = "DEFAULT" if pretrained else None
        with _asking(f"torchvision:{name}"):
            net: nn.Module = library.get_model(name, weights=weights, **arguments)
        if without_heads:
            net.aux_logits = False  # type: ignore[assignment]
            for head in ("aux1", "aux2", "AuxLogits"):
                if hasattr(net, head):
                    setattr(net, head, None)

        # The last linear layer is the classifier.
        linear = [path for path, module in net.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ConfigError("This torchvision model has no linear layer to replace", got=name)
        owner, _, attribute = linear[-1].rpartition(".")
        setattr(net.get_submodule(owner), attribute, nn.Identity())
        return net

    return Backbone(build, features=None, mean=mean, std=std, side_px=side_px)


@contextmanager
def _asking(name: str) -> Iterator[None]:
    """While a library is asked for a backbone: its errors, of any type, become a ConfigError."""
    try:
        yield
    except (RaypipeError, MemoryError):
        raise
    except Exception as e:
        raise ConfigError(
            f"The library cannot build this backbone: {type(e).__name__}: {one_line(e, 200)}",
            got=name,
            rule="Name and options are the library's own, and it may have to download weights",
            fix="Correct model.name or model.options, or let this machine download the weights",
        ) from e


def _import(module: str, extra: str) -> Any:
    """Import an optional library. Raises ConfigError with the extra to install."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as e:
        # RuntimeError: a torchvision built for CUDA, on a CPU-only torch.
        raise _lacks(module.partition(".")[0], extra, e) from None


def _lacks(library: str, extra: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.name={extra}:… needs {library}: {one_line(error, 200)}",
        fix=f"pip install 'raypipe[{extra}]', or take a model of another provider",
    )
