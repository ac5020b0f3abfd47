"""Checkpoints: folders that count as complete when every file matches the manifest.

The protocol of a save; all ranks share the folder, and need no other way to meet:

1. Rank 0 removes the manifest, so that a folder that is written again does not count meanwhile.
2. Each rank writes its own shard: weights-RANK.safetensors, optimizer-RANK.safetensors, and last
   part-RANK.json with the size and sha256 of both.
3. Rank 0 writes state.json and waits until the parts of all ranks are there.
4. Rank 0 publishes manifest.json by an atomic rename. Now the folder is a checkpoint.

A kill at any instruction leaves the previous checkpoint complete. A power cut does, too, where
files are flushed to the disk before step 4 (`flushed`); else the newest manifests may outlive the
files that they name. Saving needs no collective operation, so it may go on beside training. Nothing
is unpickled. tensors.py says how tensors are verified when they are read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from raypipe.config import require_format, to_json
from raypipe.errors import DataError
from raypipe.files import flush, write_atomic
from raypipe.train.checkpoint.tensors import WholeTensors, hashes_of, read_verified
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Snapshot
from raypipe.train.parallel.snapshot import Piece

FORMAT = 2
MANIFEST = "manifest.json"
AVERAGED = "averaged"  # of a snapshot's facts: how many trainings' weights it is the mean of


def write(folder: Path, snapshot: Snapshot, state: LoopState) -> Path:
    """Write and publish the checkpoint of a run with one rank."""
    write_part(folder, snapshot, 0, "alone")
    return publish(folder, state, 1, "alone", 0.0)


def write_part(
    folder: Path, snapshot: Snapshot, rank: int, attempt: str, flushed: bool = False
) -> None:
    """Write one rank's shard.

    attempt: names this run, the same on all ranks. An earlier run may have left parts in the
    folder. flushed: wait until the disk has the tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Step 1 of the protocol above.
    if rank == 0:
        (folder / MANIFEST).unlink(missing_ok=True)
    # By file name: size and sha256 of the file, and the sha256 of each tensor in it.
    files = {}
    tensors = {}
    for kind, pieces in (("weights", snapshot.weights), ("optimizer", snapshot.optimizer)):
        if pieces:
            path = folder / f"{kind}-{rank:05d}.safetensors"
            _save_pieces(path, pieces)
            if flushed:
                flush(path)
            files[path.name] = _seal(path)
            tensors[path.name] = hashes_of(pieces)
    # The part comes last: it says that this rank's files are complete.
    part = {"attempt": attempt, "files": files, "tensors": tensors, "facts": snapshot.facts}
    write_atomic(_part_path(folder, rank), to_json(part))


def publish(
    folder: Path,
    state: LoopState,
    world: int,
    attempt: str,
    timeout_s: float,
    flushed: bool = False,
) -> Path:
    """On rank 0: wait for the parts of all ranks, and write the manifest. Raises TimeoutError.

    flushed: as for `write_part`.
    """
    state_file = folder / "state.json"
    state_file.write_text(to_json(state.to_dict()))
    if flushed:
        flush(state_file)
    files = {state_file.name: _seal(state_file)}
    tensors: dict[str, dict[str, str]] = {}
    # The facts of rank 0 stand for all ranks.
    facts = None
    for rank in range(world):
        part = _wait_for_part(folder, rank, attempt, time.monotonic() + timeout_s)
        files |= part["files"]
        tensors |= part["tensors"]
        if rank == 0:
            facts = part["facts"]
    manifest = {
        "format": FORMAT,
        "files": files,
        "facts": facts,
        "epoch": state.epoch,
        "step": state.step,
        "world": world,
        "tensors": tensors,
    }
    if flushed:
        # The files' names, too.
        flush(folder)
    write_atomic(folder / MANIFEST, to_json(manifest))
    return folder


def verify(folder: Path, hashes: bool = True, model_only: bool = False) -> str | None:
    """None when the checkpoint is complete, else what is wrong with it.

    hashes: false looks at the sizes of the files with tensors alone. Whoever reads a tensor then
    still compares it with its own hash. model_only: leave out the optimizer's files, which nobody
    reads whose training has ended. They are two thirds of a checkpoint.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        return f"no readable manifest ({type(e).__name__})"
    for name, expected in files.items():
        if model_only and name.startswith("optimizer-"):
            continue
        path = folder / name
        # The size first: it costs nothing, and finds files that a kill cut short.
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return f"{name} is missing or cut short"
        if (hashes or path.suffix == ".json") and _sha256(path) != expected["sha256"]:
            return f"{name} does not match its sha256"
    return None


def weights_digest(folder: Path) -> str:
    """Names the weights of a checkpoint by their content, as its ranks wrote them.

    Read from the manifest: nothing is verified. Raises OSError, ValueError, KeyError or TypeError
    for a folder that is no checkpoint.
    """
    files = json.loads((folder / MANIFEST).read_text())["files"]
    weights = sorted(name for name in files if name.startswith("weights-"))
    if not weights:
        raise ValueError(f"{folder} has no weights of a checkpoint")
    digest = hashlib.sha256()
    for name in weights:
        digest.update(files[name]["sha256"].encode())
    return digest.hexdigest()


def weights_mb(folder: Path) -> float:
    """MB (10^6 bytes) of the weights of a checkpoint, without the optimizer's state, which is two
    or three times as large. Read from the manifest; 0: it cannot be read.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        return sum(files[name]["bytes"] for name in files if name.startswith("weights-")) / 1e6
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def averaged(folder: Path) -> int:
    """How many trainings' weights these are the mean of. Read from the manifest, as above."""
    facts = json.loads((folder / MANIFEST).read_text()).get("facts") or {}
    # A training counts the steps of its EMA by the same name, beside its scaler.
    if "scaler" in facts:
        return 1
    return int(facts.get(AVERAGED, 1))


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. Tensors are read one at a time, whole, whichever ranks wrote them."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    facts: dict[str, Any]
    state: LoopState
    world: int
    """Ranks that wrote it."""


def read(folder: Path, verified: bool = False) -> Checkpoint:
    """Open a checkpoint. verified: the caller has just called `verify`, so it is not repeated.

    Raises ValueError when it is incomplete, DataError when it changes while it is read.
    """
    problem = None if verified else verify(folder)
    if problem:
        raise ValueError(f"{folder}: {problem}")
    manifest = json.loads((folder / MANIFEST).read_text())
    require_format(manifest, FORMAT, f"The checkpoint {folder}")
    state = read_verified(folder / "state.json", manifest["files"]["state.json"]["sha256"])
    return Checkpoint(
        weights=WholeTensors(folder, manifest, "weights-"),
        optimizer=WholeTensors(folder, manifest, "optimizer-"),
        facts=manifest["facts"],
        state=LoopState.from_dict(json.loads(state)),
        world=manifest["world"],
    )


def read_model(folder: Path, hashes: bool = True) -> Checkpoint:
    """Open the checkpoint of a training that has ended, for its weights and its state.

    hashes: false is enough for the state. Raises DataError when what is read is damaged; the
    optimizer may be.
    """
    problem = verify(folder, hashes, model_only=True)
    if problem is not None:
        said_by = _said_to_have_ended(folder)
        raise DataError(
            "The weights of a model are damaged",
            got=f"{folder}: {problem}",
            rule="Nothing altered is loaded",
            fix=f"Remove {said_by or folder}, and run the same command again: it goes on from what "
            "is whole",
        )
    return read(folder, verified=True)


def _said_to_have_ended(folder: Path) -> Path | None:
    """The result.json of the checkpoint's training or search: it lies beside their config.yaml."""
    for parent in folder.parents:
        if (parent / "config.yaml").exists():
            result = parent / "result.json"
            return result if result.exists() else None
    return None


def newest(folders: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The furthest complete checkpoint, and the skipped ones after it, with what is wrong."""
    skipped: list[str] = []
    for folder in sorted(folders, key=place, reverse=True):
        problem = verify(folder)
        if problem is None:
            return folder, skipped
        skipped.append(f"{folder.name}: {problem}")
    return None, skipped


def before(folder: Path) -> Path | None:
    """The furthest checkpoint beside this one that is not as far. Its tensors are not hashed."""
    earlier = [path for path in folder.parent.glob("epoch-*") if place(path) < place(folder)]
    for path in sorted(earlier, key=place, reverse=True):
        if verify(path, hashes=False) is None:
            return path
    return None


def name(epoch: int, step: int = 0) -> str:
    """The folder's name after so many epochs, and so many steps of the next epoch."""
    return f"epoch-{epoch:04d}-step-{step:07d}"


def place(folder: Path) -> tuple[int, ...]:
    """(epoch, step) of a folder's name. Names themselves do not sort so from epoch 10,000 on."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", folder.name))


def epoch_of(folder: Path) -> int:
    """How many epochs had ended, by the folder's name."""
    return int(folder.name.split("-")[1])


def keep(folder: Path, names: set[str]) -> None:
    """Delete all other checkpoints that are not further than these.

    With train.checkpoint_async another rank may have written its part of the next one already. The
    manifest goes first, so that a kill leaves none that looks complete.
    """
    furthest = max(place(folder / name) for name in names)
    for path in folder.glob("epoch-*"):
        if path.name not in names and place(path) < furthest:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _save_pieces(path: Path, pieces: Mapping[str, Piece]) -> None:
    values = {}
    places = {}
    for name, piece in pieces.items():
        values[name] = piece.values
        places[name] = (piece.start, piece.shape)
    # The file says where its pieces belong, so that a reader needs no other rank's file.
    about = {"pieces": json.dumps(places)}
    try:
        save_file(values, path, about)
    except SafetensorError as e:
        # It sets the file's size first, which volumes of Unity Catalog refuse (EOPNOTSUPP). They
        # take a copy, written from its beginning to its end.
        if f"os error {errno.EOPNOTSUPP}" not in str(e):
            raise
        with tempfile.TemporaryDirectory() as own:
            save_file(values, Path(own) / path.name, about)
            with (Path(own) / path.name).open("rb") as file, path.open("wb") as copy:
                shutil.copyfileobj(file, copy, 8 * 2**20)


def _part_path(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.json"


def _wait_for_part(folder: Path, rank: int, attempt: str, deadline: float) -> dict[str, Any]:
    """A rank's part of this attempt, as soon as it is there. Raises TimeoutError."""
    path = _part_path(folder, rank)
    pause_s = 0.001
    while True:
        # A part of an earlier attempt does not count: its shard may be another state.
        if path.exists():
            part: dict[str, Any] = json.loads(path.read_text())
            if part["attempt"] == attempt:
                return part
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} wrote no part of {folder.name}")
        # Short pauses first, then longer ones, up to 0.1 s.
        time.sleep(pause_s)
        pause_s = min(0.1, 2 * pause_s)


def _seal(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
