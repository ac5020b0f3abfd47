"""A table that is predicted again and again, and what each prediction must say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.config import RunConfig
from raypipe.serve import batch
from raypipe.serve.batch import Calls, PredictConfig, PredictResult
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, append
from tests.serve.conftest import Registered


@dataclass
class Case:
    """A table, and predictions of it."""

    registered: Registered
    folder: Path
    said: list[str]

    @property
    def uri(self) -> str:
        return str(self.folder / "t")

    @property
    def cfg(self) -> PredictConfig:
        return PredictConfig(out=str(self.folder / "out"), since="last")

    def add(self, first: int, count: int, names: list[str | None] | None = None) -> None:
        images = self.registered.images[first : first + count]
        ids = names or [f"i{n}" for n in range(first, first + count)]
        columns = {"image_id": pa.array(ids, pa.string()), "split": ["train"] * len(ids)}
        append(self.uri, pa.table(columns | {"image": pa.array(images, pa.binary())}), "add")

    def predict(self, **source: Any) -> PredictResult:
        run = RunConfig(name="mixed", dir=str(self.folder))
        return batch.predict(
            self.registered.store,
            run,
            TableConfig(uri=self.uri, **source),
            self.cfg,
            self.registered.version,
            calls=Calls(say=self.said.append),
        )

    def check(self, done: PredictResult, **source: Any) -> None:
        """The prediction has the rows of its version, each as often, with what the model says."""
        cfg = TableConfig(uri=self.uri, **source)
        table = ImageTable.open(cfg)
        rows = scan.rows(table, done.table, ["image_id", "image"], cfg.where).to_pylist()
        wanted = Counter((row["image_id"], sha256(row["image"]).hexdigest()) for row in rows)
        found = batch.read_rows(
            done.out.uri, done.key, ["image_id", "sha256", "label", "scores"]
        ).to_pylist()
        assert Counter((row["image_id"], row["sha256"]) for row in found) == wanted
        assert done.images == len(found) == sum(done.labels.values())
        for row in found:
            label, scores = self.answer(row["sha256"])
            assert row["label"] == label
            np.testing.assert_allclose(row["scores"], scores, atol=1e-5)

    def answer(self, digest: str) -> tuple[str, np.ndarray]:
        hashes = [sha256(image).hexdigest() for image in self.registered.images]
        place = hashes.index(digest)
        return self.registered.answers.labels[place], self.registered.answers.scores_NC[place]

    def raw(self) -> list[dict[str, Any]]:
        out = ImageTable(str(self.folder / "out"))
        return scan.rows(out, out.pin(), ["image_id", "sha256", "gone"]).to_pylist()


def predicted_once(registered: Registered, folder: Path) -> Case:
    """30 images in three files, predicted."""
    made = Case(registered, folder, [])
    for start in (0, 10, 20):
        made.add(start, 10)
    first = made.predict()
    assert first.made == 30 and first.since is None
    made.check(first)
    return made
