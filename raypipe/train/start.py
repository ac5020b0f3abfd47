"""The weights that a training starts from (`train.start_from`): a checkpoint's, or a package's.

A checkpoint is of the very same model. A package may know other classes: the head is then put
together by the names of the classes. A class that the package knows keeps its weights, a new one
starts at zero, and one that is gone is left out.

The head of a package standardises its features by the rows that it was trained on, and so does the
new head by its own. So weights are rewritten for the new means and spreads: of an image, the first
logits of the known classes are those that the package gives.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor, nn

from raypipe.errors import ConfigError, RaypipeError, one_line
from raypipe.models import finite
from raypipe.models.ensemble import first_of
from raypipe.models.heads import Head
from raypipe.models.providers import same_options
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry.package import Package
from raypipe.train import checkpoint, learned

log = logging.getLogger("raypipe")
FIX = "Set train.start_from=null, or name another folder"


def is_package(folder: Path) -> bool:
    """A checkpoint has a manifest.json, too."""
    return (folder / "package.json").is_file()


def learned_by(folder: str | None) -> np.ndarray:
    """identities_N2 of the rows behind `train.start_from` (learned.py): those that a package says.

    A checkpoint says none, nor does an older package: that is a warning.
    """
    if folder is None:
        return learned.NONE_N2
    kept = learned.by(_opened(Path(folder))) if is_package(Path(folder)) else None
    if kept is None:
        log.warning(
            "Which rows the weights of %s have learned from is not recorded: test images among "
            "them count as unseen",
            folder,
        )
        return learned.NONE_N2
    return kept


def require(folder: Path, model: ModelConfig) -> None:
    """Raise ConfigError, before anything is trained, for weights that are damaged or do not fit.

    DataError for a package that does not say what they have learned from in raypipe's way.
    """
    if is_package(folder):
        package = _opened(folder)
        require_same(package, model, folder)
        # Its own package will say it: not after a whole training that it cannot.
        learned.by(package)
        return
    problem = checkpoint.verify(folder, model_only=True)
    if problem:
        raise ConfigError(
            f"The checkpoint of train.start_from is incomplete: {problem}",
            got=str(folder),
            fix="Name an epoch's folder, or a model package",
        )


def load_into(model: nn.Module, folder: Path, cfg: ModelConfig, classes: tuple[str, ...]) -> None:
    """Load the weights into `model`: a whole ImageModel, or the Head of frozen features.

    classes: of `model`, in the order of its outputs. Raises ConfigError when the weights are
    another model's, DataError when they are not finite.
    """
    if is_package(folder):
        _load_package(model, folder, cfg, classes)
    else:
        _load_checkpoint(model, folder)


def _load_checkpoint(model: nn.Module, folder: Path) -> None:
    weights = dict(checkpoint.read(folder, verified=True).weights)
    fix = "Set train.start_from=null, or name another epoch's folder"
    finite.require_weights(weights, str(folder), fix)
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:
        raise ConfigError(
            "train.start_from holds the weights of another model",
            got=str(folder),
            rule=one_line(str(e).splitlines()[-1], 200),
            fix="Set model.name, model.mode and the classes as they were there, "
            "or train.start_from=null",
        ) from None


def _load_package(
    model: nn.Module, folder: Path, cfg: ModelConfig, classes: tuple[str, ...]
) -> None:
    package = _opened(folder)
    require_same(package, cfg, folder)
    weights = load(package.files["weights.safetensors"])
    if package.members:
        # A training is of one model, and the package's own settings are its first member's.
        log.info("train.start_from=%s is an ensemble: its first member's weights are taken", folder)
        weights = first_of(weights)
    finite.require_weights(weights, str(folder), FIX)
    theirs = {n.removeprefix("head."): w for n, w in weights.items() if n.startswith("head.")}
    whole = model if isinstance(model, ImageModel) else None
    head = whole.head if whole is not None else model
    assert isinstance(head, Head)
    if whole is not None:
        backbone = {n: w for n, w in weights.items() if not n.startswith("head.")}
        mine = {f"head.{n}": w for n, w in head.state_dict().items()}
        try:
            whole.load_state_dict(backbone | mine)
        except RuntimeError as e:
            raise _other(folder, one_line(str(e).splitlines()[-1], 200)) from None
    if theirs["linear.weight"].shape[1] != head.linear.in_features:
        raise _other(folder, f"{theirs['linear.weight'].shape[1]} features")
    _fill(head, theirs, package.classes, classes)


@torch.no_grad()
def _fill(
    head: Head, theirs: dict[str, Tensor], known: tuple[str, ...], classes: tuple[str, ...]
) -> None:
    """The rows of known classes, rewritten for this head's own means and spreads.

    Theirs is (W (x - m) / s + b) * spread + centre; ours has other m, s, spread and centre.
    """
    weight_CD, bias_C = theirs["linear.weight"].double(), theirs["linear.bias"].double()
    mean_D, std_D = theirs["mean"].double(), theirs["std"].double()
    bias_C = bias_C + weight_CD @ ((head.mean.double() - mean_D) / std_D)
    weight_CD = weight_CD * (head.std.double() / std_D)
    if head.scaled:
        centre_C, spread_C = theirs["centre"].double(), theirs["spread"].double()
        ours_C = head.spread.double()
        bias_C = (bias_C * spread_C + centre_C - head.centre.double()) / ours_C
        weight_CD = weight_CD * (spread_C / ours_C).unsqueeze(1)
    places = {name: place for place, name in enumerate(known)}
    for place, name in enumerate(classes):
        if name in places:
            head.linear.weight[place] = weight_CD[places[name]]
            head.linear.bias[place] = bias_C[places[name]]


def _opened(folder: Path) -> Package:
    """The package, checked against its own hashes, and against the seal that its folder names."""
    seal = folder.name if re.fullmatch("[0-9a-f]{64}", folder.name) else None
    try:
        return Package(folder, seal)
    except RaypipeError as e:
        raise ConfigError(
            f"The package of train.start_from cannot be used: {e.what}",
            got=e.got or str(folder),
            rule=e.rule,
            fix=FIX,
        ) from None


def require_same(package: Package, model: ModelConfig, folder: Path) -> None:
    """Raise ConfigError for a package whose weights mean something else in this model."""
    theirs = package.info["model"]
    ours = model.resolved()
    same = same_options(ours.name, theirs.get("options") or {}, ours.options)
    if theirs["name"] != ours.name or not same:
        raise _other(folder, f"backbone {theirs['name']}, and model.name={model.name}")
    # Older packages name no head; theirs is linear.
    if (head := theirs.get("head", "linear")) != ours.head:
        raise _other(folder, f"head {head}, and model.head={model.head}")
    if package.task.kind != model.task:
        raise _other(folder, f"task {package.task.kind}, and model.task={model.task}")
    # A frozen model's features are of the pretrained backbone, and not of the trained one.
    if model.mode == "frozen" and theirs.get("mode") != "frozen":
        raise _other(folder, "a trained backbone, and model.mode=frozen")


def _other(folder: Path, rule: str) -> ConfigError:
    return ConfigError(
        "train.start_from holds the weights of another model",
        got=str(folder),
        rule=f"It has {rule}",
        fix="Set model.name, model.head, model.mode and model.task as they were there, "
        "or train.start_from=null",
    )
