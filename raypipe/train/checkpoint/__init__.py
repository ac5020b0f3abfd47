"""Checkpoints: a folder exists as a checkpoint when its manifest does, and counts when every file matches it.

Each rank writes what it keeps, weights-RANK.safetensors and optimizer-RANK.safetensors, and last a part-RANK.json with size and
sha256 of each; rank 0 adds state.json and, when the parts of all ranks are there, publishes manifest.json by atomic rename. A
kill at any instruction leaves the previous checkpoint whole. Ranks meet in the folder, which all nodes share, so saving needs
no collective and may go on beside training. Nothing is unpickled.

The manifest also holds the sha256 of every tensor. A tensor is copied, hashed and then used as that copy, so a file that is
swapped after it was verified is noticed, and a rank never holds a whole file. Checkpoints of format 1 (ba74455 and before) lack
these hashes: each of their files is read once, hashed, and those bytes are loaded.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from raypipe.config import require_format, to_json
from raypipe.errors import DataError
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Snapshot
from raypipe.train.parallel.snapshot import Piece

FORMAT = 2
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
    paths = [
        _save(folder / f"{kind}-{rank:05d}.safetensors", pieces)
        for kind, pieces in named.items()
        if pieces
    ]
    hashes = {
        f"{kind}-{rank:05d}.safetensors": _hashes(pieces)
        for kind, pieces in named.items()
        if pieces
    }
    part = {
        "attempt": attempt,
        "files": {path.name: _seal(path) for path in paths},
        "tensors": hashes,
        "facts": snapshot.facts,
    }
    _replace(folder / f"part-{rank:05d}.json", part)


def publish(folder: Path, state: LoopState, world: int, attempt: str, timeout_s: float) -> Path:
    """Rank 0: wait for every rank's part of this attempt and make them a checkpoint. Raises TimeoutError."""
    (folder / "state.json").write_text(to_json(state.to_dict()))
    parts = [_part(folder, rank, attempt, time.monotonic() + timeout_s) for rank in range(world)]
    files = {"state.json": _seal(folder / "state.json")} | {
        k: v for part in parts for k, v in part["files"].items()
    }
    manifest = {
        "format": FORMAT,
        "files": files,
        "facts": parts[0]["facts"],
        "epoch": state.epoch,
        "step": state.step,
    }
    manifest |= {
        "world": world,
        "tensors": {k: v for part in parts for k, v in part["tensors"].items()},
    }
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
    """Raises ValueError when the checkpoint is not whole, DataError when it changes while it is read. Who has verified it just
    now need not do so again."""
    problem = None if verified else verify(folder)
    if problem:
        raise ValueError(f"{folder}: {problem}")
    manifest = json.loads((folder / MANIFEST).read_text())
    require_format(manifest, FORMAT, f"The checkpoint {folder}")
    said = _bytes(folder / "state.json", manifest["files"]["state.json"]["sha256"])
    state = LoopState.of(json.loads(said))
    whole = [Whole(folder, manifest, kind) for kind in ("weights-", "optimizer-")]
    return Checkpoint(whole[0], whole[1], manifest["facts"], state)


class Whole(Mapping[str, Tensor]):
    """The tensors that the files of one kind hold pieces of, by name."""

    def __init__(self, folder: Path, manifest: dict[str, Any], kind: str) -> None:
        self._files = {
            folder / n: seal["sha256"]
            for n, seal in manifest["files"].items()
            if n.startswith(kind)
        }
        self._hashes: dict[str, dict[str, str]] = manifest.get("tensors", {})

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[_Opened, int, tuple[int, ...]]]]:
        """Per name: the open file, where its elements begin, and the shape of the whole."""
        found: dict[str, list[tuple[_Opened, int, tuple[int, ...]]]] = {}
        for path, sha256 in self._files.items():
            opened = _Opened(path, sha256, self._hashes.get(path.name))
            for name, (start, shape) in opened.places.items():
                found.setdefault(name, []).append((opened, start, tuple(shape)))
        return found

    def __getitem__(self, name: str) -> Tensor:
        pieces = [
            (opened.tensor(name), start, shape) for opened, start, shape in self._pieces[name]
        ]
        shape = pieces[0][2]
        if len(pieces) == 1 and pieces[0][0].shape == shape:
            return pieces[0][0]
        flat = torch.empty(prod(shape), dtype=pieces[0][0].dtype)
        for values, start, _ in pieces:
            flat[start : start + values.numel()] = values.flatten()
        if sum(values.numel() for values, _, _ in pieces) != prod(shape):
            raise ValueError(
                f"The pieces of {name} do not make it whole: some rank's file is missing"
            )
        return flat.view(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


class _Opened:
    """One file of tensors, memory-mapped. What it gives has the hash that the manifest says, `hashes` by tensor or `sha256`."""

    def __init__(self, path: Path, sha256: str, hashes: dict[str, str] | None) -> None:
        self._path, self._hashes = path, hashes
        self._file = safe_open(path, framework="pt") if hashes is not None else None
        data = b"" if hashes is not None else _bytes(path, sha256)
        self._loaded = load(data) if data else {}
        written = self._file.metadata() if self._file is not None else _metadata(data)  # type: ignore[no-untyped-call]
        self.places: dict[str, Any] = json.loads(written["pieces"])
        if hashes is not None and (odd := self.places.keys() ^ hashes.keys()):
            raise _changed(path, sorted(odd)[0])

    def tensor(self, name: str) -> Tensor:
        if self._hashes is None or self._file is None:
            return self._loaded[name]
        # The mapped file may change under us, the copy may not.
        copy: Tensor = self._file.get_tensor(name).clone()  # type: ignore[no-untyped-call]
        if _tensor_sha256(copy, self.places[name]) != self._hashes[name]:
            raise _changed(self._path, name)
        return copy


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
    save_file(
        {name: piece.values for name, piece in pieces.items()}, path, {"pieces": json.dumps(places)}
    )
    return path


def _hashes(pieces: Mapping[str, Piece]) -> dict[str, str]:
    return {
        name: _tensor_sha256(piece.values, (piece.start, piece.shape))
        for name, piece in pieces.items()
    }


def _tensor_sha256(values: Tensor, place: Sequence[Any]) -> str:
    """Of what a piece is and where it belongs."""
    flat = values.contiguous().flatten()
    digest = hashlib.sha256(json.dumps([str(values.dtype), int(place[0]), list(place[1])]).encode())
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _bytes(path: Path, sha256: str) -> bytes:
    """Read once: what is hashed is what is used."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise _changed(path, "its content")
    return data


def _metadata(data: bytes) -> dict[str, str]:
    """Of a safetensors file: eight bytes that say how long its JSON header is, then that."""
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(header["__metadata__"])


def _changed(path: Path, what: str) -> DataError:
    return DataError(
        f"A checkpoint is not what its manifest says: {what} does not match its sha256",
        got=str(path),
        rule="Nothing altered is loaded",
        fix="Remove its folder: raypipe goes on from the checkpoint before it",
    )


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
