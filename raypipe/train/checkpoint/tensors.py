"""The tensors of a checkpoint: hashed when written, joined from their pieces when read.

A file change between the check and the use must be noticed, without ever holding a whole file. So
each tensor is copied out of the mapped file, the copy is hashed, and that copy is used. The
manifest holds the sha256 of every tensor. Checkpoints of format 1 (ba74455 and before) lack these
hashes: each of their files is read once, hashed as a whole, and those bytes are loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from raypipe.errors import DataError
from raypipe.train.parallel.snapshot import Piece


class _PieceAt(NamedTuple):
    """A piece of a tensor in a file: where its elements begin in the flattened whole."""

    file: _TensorFile
    start: int
    whole_shape: tuple[int, ...]


class WholeTensors(Mapping[str, Tensor]):
    """Whole tensors by name, of the files of one kind, whichever ranks wrote their pieces.

    A tensor is read when it is asked for. Raises DataError for a file that changed, ValueError when
    a piece is missing.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], kind: str) -> None:
        self._sha256_of_files = {
            folder / name: seal["sha256"]
            for name, seal in manifest["files"].items()
            if name.startswith(kind)
        }
        self._hashes_of_files: dict[str, dict[str, str]] = manifest.get("tensors", {})

    @cached_property
    def _pieces(self) -> dict[str, list[_PieceAt]]:
        """All pieces of each tensor. The files are opened when the first tensor is asked for."""
        pieces: dict[str, list[_PieceAt]] = {}
        for path, sha256 in self._sha256_of_files.items():
            hashes = self._hashes_of_files.get(path.name)
            file = _TensorFile(path, sha256, hashes)
            for name, (start, shape) in file.places.items():
                piece = _PieceAt(file, start, tuple(shape))
                pieces.setdefault(name, []).append(piece)
        return pieces

    def __getitem__(self, name: str) -> Tensor:
        # Each piece is verified when it is read.
        pieces = self._pieces[name]
        shape = pieces[0].whole_shape
        values = [piece.file.tensor(name) for piece in pieces]
        if len(values) == 1 and values[0].shape == shape:
            return values[0]
        # Several ranks wrote pieces: put each where it belongs in the flattened whole.
        whole = torch.empty(prod(shape), dtype=values[0].dtype)
        filled = 0
        for piece, part in zip(pieces, values, strict=True):
            whole[piece.start : piece.start + part.numel()] = part.flatten()
            filled += part.numel()
        if filled != prod(shape):
            raise ValueError(
                f"The pieces of {name} do not make it whole: some rank's file is missing"
            )
        return whole.view(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


class _TensorFile:
    """One safetensors file, memory-mapped, or loaded at once if the checkpoint is of format 1.

    sha256: of the file. hashes: of each tensor; None in format 1. Raises DataError when the content
    does not match them.
    """

    def __init__(self, path: Path, sha256: str, hashes: dict[str, str] | None) -> None:
        self._path = path
        self._hashes = hashes
        # Format 1: the file is loaded and verified as a whole.
        if hashes is None:
            data = read_verified(path, sha256)
            self._loaded = load(data)
            metadata = _metadata(data)
        else:
            self._mapped = safe_open(path, framework="pt")
            metadata = self._mapped.metadata()  # type: ignore[no-untyped-call]
        # By tensor: where its piece begins, and the shape of the whole.
        self.places: dict[str, Any] = json.loads(metadata["pieces"])
        # A tensor without a hash could not be verified, and one without a place is missing.
        if hashes is not None and self.places.keys() != hashes.keys():
            unexpected = min(self.places.keys() ^ hashes.keys())
            raise _changed(path, unexpected)

    def tensor(self, name: str) -> Tensor:
        if self._hashes is None:
            return self._loaded[name]
        # The mapped file may change while it is read, the copy does not.
        copy: Tensor = self._mapped.get_tensor(name).clone()  # type: ignore[no-untyped-call]
        if _tensor_sha256(copy, self.places[name]) != self._hashes[name]:
            raise _changed(self._path, name)
        return copy


def hashes_of(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """The sha256 of each piece, and of its place in the whole tensor."""
    return {
        name: _tensor_sha256(piece.values, (piece.start, piece.shape))
        for name, piece in pieces.items()
    }


def _tensor_sha256(values: Tensor, place: Sequence[Any]) -> str:
    """place: (start in the flattened whole, shape of the whole)."""
    start, shape = place
    head = json.dumps([str(values.dtype), int(start), list(shape)])
    digest = hashlib.sha256(head.encode())
    flat = values.contiguous().flatten()
    # An empty tensor has no bytes to view.
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_verified(path: Path, sha256: str) -> bytes:
    """The bytes of a file, read once: what is hashed is what is used. Raises DataError."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise _changed(path, "its content")
    return data


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file: 8 bytes with its header's length, then the header."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return dict(header["__metadata__"])


def _changed(path: Path, what: str) -> DataError:
    return DataError(
        f"A checkpoint is not what its manifest says: {what} does not match its sha256",
        got=str(path),
        rule="Nothing altered is loaded",
        fix="Remove its folder: raypipe goes on from the checkpoint before it",
    )
