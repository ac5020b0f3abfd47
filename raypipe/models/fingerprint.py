"""Hashes of weights, and of everything else that turns an image's bytes into features."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import torch
from torch import nn

from raypipe.models.zoo import ModelConfig


def fingerprint(module: nn.Module) -> str:
    """12 hex digits of the weights: other weights give other features."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        contiguous = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
        digest.update(contiguous.numpy().tobytes())
    return digest.hexdigest()[:12]


def backbone_hash(cfg: ModelConfig, backbone: nn.Module, version: int) -> str:
    """16 hex digits of all that turns an image's bytes into features.

    That is: the weights with their names, types and shapes; who built them, with which options (two
    poolings have the same weights); normalisation, resolution and views; `version`, of the code in
    between.
    """
    resolved = cfg.resolved().model_dump(
        mode="json", include={"name", "options", "mean", "std", "side_px", "views"}
    )
    given = {"given": cfg.name, "with": cfg.options, "source": _source(cfg.name)}
    inputs = json.dumps([version, resolved, given], sort_keys=True, default=str)
    digest = hashlib.sha256(inputs.encode())
    for name, tensor in backbone.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(fingerprint(backbone).encode())
    return digest.hexdigest()[:16]


def _source(name: str) -> str:
    """The sha256 of the module that defines a file: factory; "" for other providers.

    Its code may change while its weights stay.
    """
    provider, _, rest = name.partition(":")
    if provider != "file":
        return ""
    spec = importlib.util.find_spec(rest.partition(":")[0])
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
