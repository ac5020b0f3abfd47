"""The model package: encoded image bytes in, label and scores out; everything that needs is in one folder.

package.json          backbone, resolution, classes, lineage, metrics
weights.safetensors   the whole model (nothing is unpickled to load it)
reference.npz         features and scores of unseen images of the training domain: what drift is measured against
manifest.json         sha256 of each, checked before anything is loaded
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from raypipe.config import to_json
from raypipe.errors import DataError
from raypipe.images.decode import decode_batch
from raypipe.models.allocator import keep_memory
from raypipe.models.finite import require_rows, require_weights
from raypipe.models.tasks import Task
from raypipe.models.zoo import ImageModel, ModelConfig

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
    """A loaded model package."""

    def __init__(self, folder: Path) -> None:
        _check(folder)
        self.folder = folder
        self.info: dict[str, Any] = json.loads((folder / "package.json").read_text())
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
            weights = load_file(self.folder / "weights.safetensors")
            require_weights(weights, str(self.folder), "Take another version of the model, or train again")
            model.load_state_dict(weights)
            self._model = model.for_inference()
        return self._model

    def reference(self) -> Reference:
        with np.load(self.folder / "reference.npz", allow_pickle=False) as arrays:
            return Reference(arrays["features"], arrays["scores"], tuple(arrays["ids"].tolist()))

    def predict(self, images: Sequence[bytes], threads: int = 2) -> Predictions:
        """Labels and scores of encoded images. Raises decode.BadImage for one that does not decode."""
        features_ND, scores_NC = self.model.predict(decode_batch(images, self.side_px, threads))
        return Predictions(self.task.predictions(scores_NC), scores_NC, features_ND)


@lru_cache(maxsize=4)
def load_once(folder: str) -> Package:
    """The package of a folder, loaded once in each worker process. Ray Data runs one task a CPU, so each takes one thread."""
    torch.set_num_threads(1)
    keep_memory()
    return Package(Path(folder))


def build(
    folder: Path,
    model: ImageModel,
    cfg: ModelConfig,
    classes: tuple[str, ...],
    reference: Reference,
    facts: dict[str, Any],
) -> Path:
    """Write a package; `facts` (lineage, metrics) go into package.json as they are. Raises DataError, and writes nothing, for
    weights or a reference that are not finite."""
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    again = "Train again with a lower train.lr"
    require_weights(weights, str(folder), again)
    features, scores = reference.features_ND.astype(np.float32), reference.scores_NC.astype(np.float32)
    for values, what in ((features, "features"), (scores, "scores")):
        require_rows(values, what, again)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "weights.safetensors")
    np.savez(folder / "reference.npz", features=features, scores=scores, ids=np.array(reference.ids, dtype=np.str_))
    info = {"model": cfg.settled().model_dump(mode="json"), "side_px": cfg.pixels, "classes": list(classes)} | facts
    (folder / "package.json").write_text(to_json(info, indent=2))
    (folder / "manifest.json").write_text(json.dumps({name: _sha256(folder / name) for name in _FILES}))
    return folder


def _check(folder: Path) -> None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        wrong = [name for name in _FILES if _sha256(folder / name) != manifest.get(name)]
    except (OSError, ValueError) as e:
        raise DataError(f"This is not a whole model package: {e}", got=str(folder)) from None
    if wrong:
        raise DataError("The model package does not match its sha256", got=", ".join(wrong), rule="Nothing altered is loaded")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
