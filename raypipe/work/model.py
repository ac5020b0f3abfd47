"""A registered model in Python: `raypipe.load` returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from raypipe.errors import DataError
from raypipe.registry.package import Package
from raypipe.registry.versions import ModelVersion


@dataclass(frozen=True, repr=False)
class Model:
    """A version and its package, whose files are those that were registered."""

    package: Package
    version: ModelVersion

    @property
    def task(self) -> str:
        return self.package.task.kind

    @property
    def classes(self) -> tuple[str, ...]:
        return self.package.classes

    def predict(self, images: Sequence[bytes | str | Path]) -> pd.DataFrame:
        """A row for each image: label, score (the highest), and a column for each class's score.

        images: encoded bytes, or paths of files. Raises DataError for a file that cannot be read,
        and images.decode.BadImage for one that does not decode.
        """
        if images is None or isinstance(images, (bytes, str, Path)):
            raise DataError(
                "predict takes a list of images", got=type(images).__name__, fix="predict([image])"
            )
        # A list: of an array or a series, "is it empty" is ambiguous.
        images = list(images)
        if not images:
            return pd.DataFrame({"label": [], "score": []})
        predicted = self.package.predict([_encoded(image) for image in images])
        table = pd.DataFrame(
            {"label": predicted.labels, "score": predicted.scores_NC.max(axis=1).tolist()}
        )
        # A class may have any name, so the columns of scores have a prefix.
        for i, name in enumerate(self.classes):
            table[f"score_{name}"] = predicted.scores_NC[:, i].tolist()
        return table

    def __repr__(self) -> str:
        classes = ", ".join(self.classes) or "none"
        side = self.package.side_px
        return f"Model {self.version}: {self.task}, {side} px, classes {classes}"


def _encoded(image: bytes | str | Path) -> bytes:
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if not isinstance(image, (str, Path)):
        raise DataError("An image is encoded bytes or the path of a file", got=type(image).__name__)
    try:
        return Path(image).expanduser().read_bytes()
    except OSError as e:
        raise DataError(f"The image cannot be read: {e.strerror}", got=str(image)) from None
