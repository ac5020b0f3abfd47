"""The model package: encoded image bytes in, labels and scores out. packing.py writes it. It is
one folder:

package.json          backbone, resolution, classes, lineage, metrics
weights.safetensors   the whole model (loading it unpickles nothing)
reference.npz         features and scores of unseen images of the training domain; drift is
                      measured against them
severity.json         what the estimate of accuracy without labels is calibrated with; only where
                      that makes sense (package.json says why not)
outcomes.npz          how wrong and how sure it was on held-out images, row by row; labels that come
                      later are compared with them
code/                 of a `file:` model: the user's own modules (own_code.py)
manifest.json         format version, and the sha256 of each file; a package is the files that it
                      names

The manifest's own sha256 is the package's *seal*. The registry keeps the seal in a tag of the
registered version, outside the folder. So weights and manifest cannot be swapped together
unnoticed. Every file is read once, and the hashed bytes are the bytes that are loaded.

Letters in names: N images, C classes, D features.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load

from raypipe.config import require_format
from raypipe.errors import DataError, RaypipeError, one_line
from raypipe.images.decode import Picture, decode_batch, decode_good
from raypipe.images.measure import SEEN
from raypipe.models import own_code
from raypipe.models.ensemble import EnsembleModel, Member
from raypipe.models.finite import require_rows, require_weights
from raypipe.models.outcomes import Outcomes, without_nan
from raypipe.models.predictor import Predictor
from raypipe.models.severity import Calibration
from raypipe.models.tasks import Task
from raypipe.models.zoo import ImageModel, ModelConfig

# Format of the folder. Format 1 (ba74455 and before) has no such number, and is still read. Only an
# ensemble needs format 3.
FORMAT, OF_ENSEMBLE = 2, 3
MANIFEST = "manifest.json"
SEVERITY = "severity.json"
MEMBERS = "members"  # of package.json: an ensemble's, without their weights
OUTCOMES = "outcomes.npz"
NOT_FINITE = "the model's answer is not finite"
AGAIN = "Train and register again, with a lower train.lr"
_FILES = ("package.json", "weights.safetensors", "reference.npz")
# Of a file in the package: no part begins with a dot, so none is `..`.
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


# Errors that say enough by themselves.
_AS_IT_IS = (RaypipeError, MemoryError)


@dataclass(frozen=True)
class Predictions:
    """Labels and scores of N images.

    labels: text: a class, tags joined by |, or a number.
    scores_NC: in the order of Package.classes; a row sums to 1 for single labels.
    features_ND: the backbone's.
    """

    labels: list[str]
    scores_NC: np.ndarray
    features_ND: np.ndarray


@dataclass(frozen=True)
class Attempt:
    """What a model says about the images of a batch that decode.

    predictions: of the N good images only, in order. good: their places in the batch.
    errors: one line for each other place. pixels_NHWC: uint8, what the model saw of the good ones.
    """

    predictions: Predictions
    good: tuple[int, ...]
    errors: dict[int, str]
    pixels_NHWC: np.ndarray


@dataclass(frozen=True)
class Reference:
    """Unseen images of the training's domains: features_ND, scores_NC and their ids, row by row.

    looks_NK: float32, the columns of `measure.SEEN`; NaN for images that were not looked at. None:
    an older raypipe wrote the package. domains: each row's known domain, as a source or a camera;
    empty: the table names none. None: an older raypipe wrote the package. groups: rows of one name
    belong together, as the cells of one module; None: each row stands alone.
    """

    features_ND: np.ndarray
    scores_NC: np.ndarray
    ids: tuple[str, ...]
    looks_NK: np.ndarray | None = None
    domains: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None


class Package:
    """A model package whose files match its manifest.

    With a `seal` (the registry's), the manifest must match the seal. Raises DataError, before
    anything is loaded, for a package that is incomplete, altered, or of a newer format. `name` is
    the registered version's, for messages.
    """

    def __init__(self, folder: Path, seal: str | None = None, name: str = "") -> None:
        self._open(_reader(folder), str(folder), seal, name)
        self.folder: Path | None = folder

    @classmethod
    def of(cls, files: Mapping[str, bytes], seal: str) -> Package:
        """From the bytes of its files and manifest: the `files` of a package in another process."""
        package = cls.__new__(cls)
        package._open(files.__getitem__, "bytes from another process", seal, "")
        package.folder = None
        return package

    def _open(self, read: Callable[[str], bytes], where: str, seal: str | None, name: str) -> None:
        # First the manifest against the seal, then the files against the manifest.
        written = read(MANIFEST)
        self.seal = sha256(written)
        self._is_sealed = seal is not None
        if seal is not None and self.seal != seal:
            as_name = f" as {name}" if name else ""
            raise DataError(
                f"The model package is not the one that was registered{as_name}",
                got=f"{where}, manifest sha256 {self.seal[:12]}…",
                rule=f"Its registered version says {seal[:12]}…, and nothing altered is loaded",
                fix="Restore the package, or train and register again with another run.seed",
            )
        manifest = _manifest(written, where)
        files = {MANIFEST: written}
        for file in (*_FILES, *sorted(manifest.keys() - {"format", *_FILES})):
            files[file] = read(file)
        _check(files, manifest)
        self.files = files
        self._where = where
        self.info: dict[str, Any] = json.loads(files["package.json"])
        self.classes: tuple[str, ...] = tuple(self.info["classes"])
        self.side_px: int = self.info["side_px"]
        # Older packages name no task; they have single labels.
        task = self.info["model"].get("task", "single_label")
        self.task = Task(task, self.classes)
        self.members = tuple(Member.from_json(one) for one in self.info.get(MEMBERS, ()))
        self._model: Predictor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The backbones that it needs, each once: of an ensemble its members'."""
        members = [member.model.name for member in self.members]
        return tuple(dict.fromkeys(members or [str(self.info["model"]["name"])]))

    @property
    def model(self) -> Predictor:
        """The model, ready for inference; loaded at the first use."""
        if self._model is None:
            try:
                with own_code.importable(self._own_code()):
                    model = self._built()
            except _AS_IT_IS:
                raise
            except Exception as e:  # the user's code raises anything
                raise self._failed("cannot be built", e) from e
            weights = load(self.files["weights.safetensors"])
            # A hash says nothing about NaN: such weights load, and predict one class.
            require_weights(
                weights, self._where, "Take another version of the model, or train again"
            )
            model.load_state_dict(weights)
            # Packages that were not calibrated name none.
            model.temperature = float(self.info.get("temperature", 1.0))
            self._model = model.for_inference()
        return self._model

    def _built(self) -> Predictor:
        if self.members:
            return EnsembleModel(self.members, len(self.classes))
        # The package holds all weights, so nothing is downloaded and nothing frozen.
        architecture = {"pretrained": False, "mode": "finetune", "frozen_blocks": 0}
        cfg = ModelConfig.model_validate(self.info["model"] | architecture)
        return ImageModel(cfg, len(self.classes))

    def _own_code(self) -> Mapping[str, bytes]:
        """The files, if the code among them may run. Raises DataError if it may not."""
        has_code = any(name.startswith(own_code.FOLDER) for name in self.files)
        if has_code and not self._is_sealed:
            raise DataError(
                "The model package holds code that no registered version confirms",
                got=self._where,
                rule="Code of a file: model runs only if the package matches a registered seal",
                fix="raypipe.load('models:/NAME@champion'), or Package(folder, seal=…)",
            )
        return self.files

    def reference(self) -> Reference:
        with np.load(io.BytesIO(self.files["reference.npz"]), allow_pickle=False) as arrays:
            ids = tuple(arrays["ids"].tolist())
            # Only looks whose columns are those of today.
            known = "looks" in arrays and tuple(arrays["looks_columns"].tolist()) == SEEN
            looks_NK = arrays["looks"] if known else None
            names = {
                name: without_nan(arrays[name].tolist())
                for name in ("domains", "groups")
                if name in arrays
            }
            return Reference(arrays["features"], arrays["scores"], ids, looks_NK, **names)

    def severity(self) -> Calibration | str:
        """What the accuracy on images without labels is estimated with; or why there is nothing.

        Raises DataError for a file that raypipe cannot have written.
        """
        if SEVERITY not in self.files:
            said = self.info.get("severity")
            known = isinstance(said, Mapping) and said.get("why_not")
            return str(known) if known else "the champion's package was made by an older raypipe"
        try:
            read = json.loads(self.files[SEVERITY])
        except (ValueError, RecursionError):
            read = None
        found = Calibration.from_json(read, self._where)
        widths = (len(found.scores_KC[0]), len(found.directions_DQ))
        ours = (len(self.classes), self.reference().features_ND.shape[1])
        if widths != ours:
            raise DataError(
                f"The calibration of severity of {self._where} is of another model",
                got=widths,
                rule=f"This one has {ours[0]} classes and {ours[1]} features",
                fix="Restore the package, or train and register again with another run.seed",
            )
        return found

    def outcomes(self) -> Outcomes | None:
        """How wrong and how sure it was on held-out images; None: an older raypipe wrote the
        package. Raises DataError for a file that raypipe cannot have written.
        """
        data = self.files.get(OUTCOMES)
        return None if data is None else Outcomes.from_bytes(data, self._where)

    def predict(self, images: Sequence[bytes], threads: int = 2) -> Predictions:
        """Labels and scores of encoded images.

        Raises decode.BadImage for an image that does not decode, and DataError for a model whose
        scores are not finite.
        """
        return self.predict_pixels(decode_batch(images, self.side_px, threads))

    def attempt(self, images: Sequence[Picture | None], threads: int = 2) -> Attempt:
        """Labels and scores of the images that decode; the others do not cost the batch.

        images: encoded bytes, uint8 pixels HWC of any size, or None for a missing one. Each is
        decoded once. Raises DataError for a model whose scores are not finite.
        """
        decoded = decode_good(images, self.side_px, threads)
        predictions = self.predict_pixels(decoded.pixels_NHWC)
        return Attempt(predictions, decoded.good, decoded.errors, decoded.pixels_NHWC)

    def attempt_finite(self, images: Sequence[Picture | None], threads: int = 2) -> Attempt:
        """As `attempt`; an image without a finite answer is an error, NOT_FINITE.

        Raises DataError for a model that has no finite answer to any image: not to noise, either.
        """
        try:
            return self.attempt(images, threads)
        except DataError:
            bad = set(self._not_finite(images, range(len(images)), threads))
            if len(bad) == len(images):
                # A batch may be one image, which says nothing of the model. Noise does: images
                # without contrast are what models divide by zero on.
                shape = (1, self.side_px, self.side_px, 3)
                self.predict_pixels(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
        good = [None if place in bad else image for place, image in enumerate(images)]
        attempt = self.attempt(good, threads)
        return replace(attempt, errors=attempt.errors | dict.fromkeys(sorted(bad), NOT_FINITE))

    def _not_finite(
        self, images: Sequence[Picture | None], places: Sequence[int], threads: int
    ) -> list[int]:
        """The places of images that have no finite answer alone, found by halves."""
        try:
            self.attempt([images[place] for place in places], threads)
        except DataError:
            if len(places) == 1:
                return list(places)
            half = len(places) // 2
            return [
                *self._not_finite(images, places[:half], threads),
                *self._not_finite(images, places[half:], threads),
            ]
        return []

    def predict_pixels(self, pixels_NHWC: np.ndarray) -> Predictions:
        """Labels and scores of decoded images: uint8 RGB, upright, of the model's side.

        Raises DataError for a model whose scores are not finite, RaypipeError for one that fails.
        """
        model = self.model
        try:
            features_ND, scores_NC = model.predict(pixels_NHWC)
        except _AS_IT_IS:
            raise
        except Exception as e:
            raise self._failed(f"fails on {len(pixels_NHWC)} images", e) from e
        require_rows(scores_NC, "scores", AGAIN)
        require_rows(features_ND, "features", AGAIN)
        return Predictions(self.task.predictions(scores_NC), scores_NC, features_ND)

    def _failed(self, what: str, error: Exception) -> RaypipeError:
        """The error for one of the model's own code, which may be anybody's.

        A worker must not raise the user's own class: the driver could not even read it.
        """
        at = traceback.extract_tb(error.__traceback__)[-1]
        return RaypipeError(
            f"The model {what}: {type(error).__name__}: {one_line(error)}",
            got=", ".join(self.names),
            rule=f"Its code raised this in {at.name}, line {at.lineno} of {Path(at.filename).name}",
            fix="Take another version of the model, or mend its code and register it again",
        )


def seal_of(folder: Path) -> str:
    """The seal of a package in a folder; of its manifest alone, no other file is read.

    Raises OSError if there is none.
    """
    return sha256((folder / MANIFEST).read_bytes())


def _reader(folder: Path) -> Callable[[str], bytes]:
    """Reads a file of the package. It raises DataError if the file is missing."""

    def read(name: str) -> bytes:
        try:
            return (folder / name).read_bytes()
        except OSError as e:
            raise DataError(f"The model package is incomplete: {e}", got=str(folder)) from None

    return read


def _manifest(written: bytes, where: str) -> dict[str, Any]:
    """The manifest. Raises DataError for one that cannot be read, or names files elsewhere."""
    try:
        manifest = dict(json.loads(written))
    except (ValueError, TypeError) as e:
        raise DataError(f"The model package is incomplete: {MANIFEST}: {e}", got=where) from None
    require_format(manifest, OF_ENSEMBLE, f"The model package {where}")
    outside = [name for name in manifest if not _NAME.fullmatch(name)]
    if outside:
        raise DataError(
            "The manifest of the model package names files that are not in it", got=outside[:3]
        )
    return manifest


def _check(files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> None:
    """Raise DataError if files do not match the manifest."""
    read = (name for name in files if name != MANIFEST)
    altered = [name for name in read if sha256(files[name]) != manifest.get(name)]
    if altered:
        raise DataError(
            "The model package does not match its sha256",
            got=", ".join(altered),
            rule="Nothing altered is loaded",
        )


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
