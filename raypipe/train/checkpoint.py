"""Checkpoints: a folder exists as a checkpoint when its manifest does, and counts when every file matches it.

weights.safetensors, optimizer.pt (read with weights_only=True), state.json; manifest.json, with size and sha256 of each, is
written last and by atomic rename. A kill at any instruction leaves the previous checkpoint whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raypipe.train.loop import LoopState

MANIFEST = "manifest.json"


def write(folder: Path, weights: dict[str, Tensor], optimizer_state: dict[str, Any], state: LoopState) -> Path:
    """Write a whole checkpoint into `folder` and publish it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "weights.safetensors")
    torch.save(optimizer_state, folder / "optimizer.pt")
    (folder / "state.json").write_text(json.dumps(state.to_dict()))
    files = {
        p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)}
        for p in sorted(folder.iterdir())
        if not p.name.startswith(MANIFEST)
    }
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps({"files": files, "epoch": state.epoch, "step": state.step}))
    partial.replace(folder / MANIFEST)
    return folder


def verify(folder: Path) -> str | None:
    """None when the checkpoint is whole, else what is wrong with it."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"no readable manifest ({type(e).__name__})"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return f"{name} is missing or cut short"
        if _sha256(path) != expected["sha256"]:
            return f"{name} does not match its sha256"
    return None


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], LoopState]:
    """(weights, optimizer state, loop state) of a checkpoint that verifies. Raises ValueError otherwise."""
    problem = verify(folder)
    if problem:
        raise ValueError(f"{folder}: {problem}")
    optimizer_state = torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu")
    return (
        load_file(folder / "weights.safetensors"),
        optimizer_state,
        LoopState(**json.loads((folder / "state.json").read_text())),
    )


def newest(folders: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The verified checkpoint that is furthest, and what was skipped on the way to it, with the reason."""
    skipped: list[str] = []
    for folder in sorted(folders, reverse=True):  # names sort as (epoch, step)
        problem = verify(folder)
        if problem is None:
            return folder, skipped
        skipped.append(f"{folder.name}: {problem}")
    return None, skipped


def name(epoch: int, step: int = 0) -> str:
    """The folder of the checkpoint after so many epochs and steps of the next."""
    return f"epoch-{epoch:04d}-step-{step:07d}"


def keep(folder: Path, names: set[str]) -> None:
    """Delete the other checkpoints; the manifest goes first, so a kill leaves no half that looks whole."""
    for path in folder.glob("epoch-*"):
        if path.name not in names:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
