"""Hashes of weights, and of everything else that turns an image's bytes into features."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from raypipe.errors import DataError
from raypipe.models import own_code
from raypipe.models.zoo import ModelConfig


def fingerprint(module: nn.Module) -> str:
    """12 hex digits of the weights: other weights give other features."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        contiguous = tensor.detach().cpu().contiguous(memory_format=torch.contiguous_format)
        # As bytes: numpy has no bfloat16.
        digest.update(contiguous.flatten().view(torch.uint8).numpy().tobytes())
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
    given = {"given": cfg.name, "with": cfg.options, "source": source(cfg.name)}
    inputs = json.dumps([version, resolved, given], sort_keys=True, default=str)
    digest = hashlib.sha256(inputs.encode())
    for name, tensor in backbone.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(fingerprint(backbone).encode())
    return digest.hexdigest()[:16]


def source(name: str) -> str:
    """A hash of the user's own files that a backbone's name leads to; "" for all other names.

    Of a file: factory the code, with every module of the user's that it imports: code may change
    while weights stay. Of a local hf: folder what transformers reads: configuration and weights.
    """
    provider, _, rest = name.partition(":")
    if provider == "file":
        return _of_code(rest.partition(":")[0])
    folder = Path(rest).expanduser()
    if provider != "hf" or "/" not in rest or not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        stat = file.stat()
        digest.update(f"{file.name} ".encode() + _sha256(file, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()


@lru_cache(maxsize=64)
def _of_code(module: str) -> str:
    """Once a process: it goes on with the code that it has imported, whatever is edited since."""
    digest = hashlib.sha256()
    try:
        files = own_code.collect(module)
    except DataError:  # no Python source
        spec = find_spec(module)
        if spec is None or not spec.origin or not Path(spec.origin).is_file():
            return ""
        files = {module: Path(spec.origin).read_bytes()}
    for path in sorted(files):
        digest.update(f"{path} {len(files[path])} ".encode() + files[path])
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _sha256(file: Path, size: int, changed_ns: int) -> bytes:
    """size, changed_ns: a file that has both as before is not read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()
