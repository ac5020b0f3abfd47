"""A report shows the photograph that was judged, also where several share its id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry.package import Package, Reference
from raypipe.registry.packing import build
from raypipe.tables.table import ImageTable
from raypipe.watch.pictures import images_of


def test_the_picture_of_an_id_is_the_one_with_the_features(tmp_path: Path, textured: Any) -> None:
    """On ba74455 every row of a product showed its last photograph."""
    images = [textured(seed, side_px=32) for seed in range(6)]
    ids = ["one", "one", "one", "two", "two", "three"]
    rows = {"image_id": [*ids, "one"], "image": pa.array([*images, b"rot"], pa.binary())}
    write_deltalake(str(tmp_path / "t"), pa.table(rows))
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    build(tmp_path / "package", ImageModel(cfg, 2), cfg, ("a", "b"), empty, {})
    package, table = Package(tmp_path / "package"), ImageTable(str(tmp_path / "t"))
    features = package.predict(images).features_ND
    assert images_of(table, table.pin(), ids, features, package) == images
    nowhere = images_of(table, table.pin(), ["gone"], features[:1], package)
    assert nowhere == [None] and images_of(table, table.pin(), [], features[:0], package) == []
