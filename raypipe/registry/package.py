"""The model package: encoded image bytes in, label and scores out; everything it needs is in one folder.

package.json          backbone, resolution, classes, lineage, metrics
weights.safetensors   the whole model (nothing is unpickled to load it)
reference.npz         features and scores of unseen images of the training domain: what drift is measured against
manifest.json         format version, and the sha256 of each file

The manifest's own sha256 is the package's *seal*. The registry keeps it in a tag of the registered version, outside of the
folder: whoever swaps weights and manifest together does not have the seal. Every file is read once; the bytes that were hashed
are the bytes that are loaded.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load, save

from raypipe.config import require_format, to_json
from raypipe.errors import DataError
from raypipe.images.decode import decode_batch
from raypipe.models.finite import require_rows, require_weights
from raypipe.models.tasks import Task
from raypipe.models.zoo import ImageModel, ModelConfig

FORMAT = 2  # of the folder; 1 (ba74455 and before) had no such number and is read as it is
MANIFEST = "manifest.json"
AGAIN = "Train and register again, with a lower train.lr"
_FILES = ("package.json", "weights.safetensors", "reference.npz")


@dataclass(frozen=True)
class Predictions:
    """labels are text: a class, tags joined by |, or a number. scores_NC are in the order of Package.classes, and sum to 1 for
    single labels; features_ND are the backbone's."""

    labels: list[str]
    scores_NC: np.ndarray
    features_ND: np.ndarray


@dataclass(frozen=True)
class Reference:
    """Unseen images of the training domain: features_ND, scores_NC and their ids, row by row."""

    features_ND: np.ndarray
    scores_NC: np.ndarray
    ids: tuple[str, ...]


class Package:
    """A model package whose files match its manifest. With a `seal` (the registry's), the manifest must match that.

    Raises DataError, before anything is loaded, for a package that is not whole, was altered, or is of a newer format.
    """

    def __init__(self, folder: Path, seal: str | None = None, name: str = "") -> None:
        self._open(_read(folder), str(folder), seal, name)
        self.folder: Path | None = folder

    @classmethod
    def of(cls, files: Mapping[str, bytes], seal: str) -> Package:
        """From the bytes of its files, manifest included, as `files` gave them elsewhere."""
        package = cls.__new__(cls)
        package._open(files, "bytes from another process", seal, "")
        package.folder = None
        return package

    def _open(self, files: Mapping[str, bytes], where: str, seal: str | None, name: str) -> None:
        self.seal = _sha256(files[MANIFEST])
        if seal is not None and self.seal != seal:
            raise DataError(
                f"The model package is not the one that was registered{f' as {name}' if name else ''}",
                got=f"{where}, manifest sha256 {self.seal[:12]}…",
                rule=f"Its registered version says {seal[:12]}…, and nothing altered is loaded",
                fix="Restore the package, or train and register again",
            )
        _check(files, where)
        self.files, self._where = files, where
        self.info: dict[str, Any] = json.loads(files["package.json"])
        self.classes: tuple[str, ...] = tuple(self.info["classes"])
        self.side_px: int = self.info["side_px"]
        self.task = Task(self.info["model"].get("task", "single_label"), self.classes)
        self._model: ImageModel | None = None

    @property
    def model(self) -> ImageModel:
        if self._model is None:
            untrained = {"pretrained": False, "mode": "finetune", "frozen_blocks": 0}
            cfg = ModelConfig.model_validate(self.info["model"] | untrained)
            model = ImageModel(cfg, len(self.classes))
            weights = load(self.files["weights.safetensors"])
            require_weights(
                weights, self._where, "Take another version of the model, or train again"
            )
            model.load_state_dict(weights)
            self._model = model.for_inference()
        return self._model

    def reference(self) -> Reference:
        with np.load(io.BytesIO(self.files["reference.npz"]), allow_pickle=False) as arrays:
            return Reference(arrays["features"], arrays["scores"], tuple(arrays["ids"].tolist()))

    def predict(self, images: Sequence[bytes], threads: int = 2) -> Predictions:
        """Labels and scores of encoded images. Raises decode.BadImage for one that does not decode, DataError for a model
        whose scores are not finite."""
        features_ND, scores_NC = self.model.predict(decode_batch(images, self.side_px, threads))
        require_rows(scores_NC, "scores", AGAIN)
        require_rows(features_ND, "features", AGAIN)
        return Predictions(self.task.predictions(scores_NC), scores_NC, features_ND)


def build(
    folder: Path,
    model: ImageModel,
    cfg: ModelConfig,
    classes: tuple[str, ...],
    reference: Reference,
    facts: dict[str, Any],
) -> Path:
    """Write a package; `facts` (lineage, metrics) go into package.json as they are. Raises DataError for weights or
    reference arrays that are not finite."""
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    features, scores = (
        reference.features_ND.astype(np.float32),
        reference.scores_NC.astype(np.float32),
    )
    require_weights(state, str(folder), AGAIN)
    require_rows(features, "features", AGAIN)
    require_rows(scores, "scores", AGAIN)
    arrays = io.BytesIO()
    np.savez(arrays, features=features, scores=scores, ids=np.array(reference.ids, dtype=np.str_))
    info = {
        "model": cfg.settled().model_dump(mode="json"),
        "side_px": cfg.pixels,
        "classes": list(classes),
    } | facts
    files = {
        "package.json": to_json(info, indent=2).encode(),
        "weights.safetensors": save(state),
        "reference.npz": arrays.getvalue(),
    }
    manifest = {"format": FORMAT} | {name: _sha256(data) for name, data in files.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (files | {MANIFEST: json.dumps(manifest).encode()}).items():
        (folder / name).write_bytes(data)
    return folder


def _read(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in (MANIFEST, *_FILES)}
    except OSError as e:
        raise DataError(f"This is not a whole model package: {e}", got=str(folder)) from None


def _check(files: Mapping[str, bytes], where: str) -> None:
    try:
        manifest = dict(json.loads(files[MANIFEST]))
    except (ValueError, TypeError) as e:
        raise DataError(f"This is not a whole model package: {MANIFEST}: {e}", got=where) from None
    require_format(manifest, FORMAT, f"The model package {where}")
    wrong = [name for name in _FILES if _sha256(files[name]) != manifest.get(name)]
    if wrong:
        raise DataError(
            "The model package does not match its sha256",
            got=", ".join(wrong),
            rule="Nothing altered is loaded",
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
