"""Checkpoints: a folder exists as a checkpoint when its manifest does, and counts when every file matches it.

Each rank writes what it keeps, weights-RANK.safetensors and optimizer-RANK.safetensors, and last a part-RANK.json with size and
sha256 of each; rank 0 adds state.json and, when the parts of all ranks are there, publishes manifest.json by atomic rename. A
kill at any instruction leaves the previous checkpoint whole. Ranks meet in the folder, which all nodes share, so saving needs
no collective and may go on beside training. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from raypipe.config import to_json
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Snapshot
from raypipe.train.parallel.snapshot import Piece

MANIFEST = "manifest.json"


def write(folder: Path, snapshot: Snapshot, state: LoopState) -> Path:
    """Write and publish the checkpoint of a run of one rank."""
    write_part(folder, snapshot, 0, "alone")
    return publish(folder, state, 1, "alone", 0.0)


def write_part(folder: Path, snapshot: Snapshot, rank: int, attempt: str) -> None:
    """Write what one rank keeps. `attempt` tells this writing from an earlier one that left its files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        (folder / MANIFEST).unlink(missing_ok=True)
    named = {"weights": snapshot.weights, "optimizer": snapshot.optimizer}
    paths = [_save(folder / f"{kind}-{rank:05d}.safetensors", pieces) for kind, pieces in named.items() if pieces]
    part = {"attempt": attempt, "files": {path.name: _seal(path) for path in paths}, "facts": snapshot.facts}
    _replace(folder / f"part-{rank:05d}.json", part)


def publish(folder: Path, state: LoopState, world: int, attempt: str, timeout_s: float) -> Path:
    """Rank 0: wait for every rank's part of this attempt and make them a checkpoint. Raises TimeoutError."""
    (folder / "state.json").write_text(to_json(state.to_dict()))
    parts = [_part(folder, rank, attempt, time.monotonic() + timeout_s) for rank in range(world)]
    files = {"state.json": _seal(folder / "state.json")} | {k: v for part in parts for k, v in part["files"].items()}
    manifest = {"files": files, "facts": parts[0]["facts"], "epoch": state.epoch, "step": state.step, "world": world}
    _replace(folder / MANIFEST, manifest)
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


@dataclass(frozen=True)
class Checkpoint:
    """One that verified. Tensors are whole and read when they are asked for, one at a time, whatever ranks wrote them."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    facts: dict[str, Any]
    state: LoopState


def read(folder: Path, verified: bool = False) -> Checkpoint:
    """Raises ValueError when the checkpoint is not whole. Who has verified it just now need not do so again."""
    problem = None if verified else verify(folder)
    if problem:
        raise ValueError(f"{folder}: {problem}")
    manifest = json.loads((folder / MANIFEST).read_text())
    state = LoopState.of(json.loads((folder / "state.json").read_text()))
    whole = [Whole([folder / n for n in manifest["files"] if n.startswith(kind)]) for kind in ("weights-", "optimizer-")]
    return Checkpoint(whole[0], whole[1], manifest["facts"], state)


class Whole(Mapping[str, Tensor]):
    """The tensors that some files hold pieces of, by name."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[Any, int, tuple[int, ...]]]]:
        """Per name: the open (memory-mapped) file, where its elements begin, and the shape of the whole."""
        found: dict[str, list[tuple[Any, int, tuple[int, ...]]]] = {}
        for path in self._paths:
            opened = safe_open(path, framework="pt")
            places = json.loads(opened.metadata()["pieces"])  # type: ignore[no-untyped-call]
            for name, (start, shape) in places.items():
                found.setdefault(name, []).append((opened, start, tuple(shape)))
        return found

    def __getitem__(self, name: str) -> Tensor:
        pieces = [(opened.get_tensor(name), start, shape) for opened, start, shape in self._pieces[name]]
        shape = pieces[0][2]
        if len(pieces) == 1 and pieces[0][0].shape == shape:
            return pieces[0][0]
        flat = torch.empty(prod(shape), dtype=pieces[0][0].dtype)
        for values, start, _ in pieces:
            flat[start : start + values.numel()] = values.flatten()
        if sum(values.numel() for values, _, _ in pieces) != prod(shape):
            raise ValueError(f"The pieces of {name} do not make it whole: some rank's file is missing")
        return flat.view(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


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


def _save(path: Path, pieces: Mapping[str, Piece]) -> Path:
    places = {name: (piece.start, piece.shape) for name, piece in pieces.items()}
    save_file({name: piece.values for name, piece in pieces.items()}, path, {"pieces": json.dumps(places)})
    return path


def _part(folder: Path, rank: int, attempt: str, deadline: float) -> dict[str, Any]:
    path, wait = folder / f"part-{rank:05d}.json", 0.001
    while True:
        if path.exists() and (part := json.loads(path.read_text()))["attempt"] == attempt:
            return part  # type: ignore[no-any-return]
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} wrote no part of {folder.name}")
        time.sleep(wait)
        wait = min(0.1, 2 * wait)


def _replace(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(to_json(content))
    partial.replace(path)


def _seal(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
