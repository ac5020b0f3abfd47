"""A source column of numbers, as a table that raypipe did not ingest may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry.package import Package, Reference, build
from raypipe.serve import evaluate
from raypipe.tables.table import ImageTable


def test_slices_have_the_names_of_the_champion_s_sources(
    textured: Any, tmp_path: Path, ray_session: str
) -> None:
    """With a null among them, all sources of a batch were floats: the slice 1.0 beside the slice 1,
    and both of them new to a champion that was trained on 1."""
    count = 12
    sources = [None if n == 5 else n % 2 for n in range(count)]
    labels = [None if n == 3 else n % 3 for n in range(count)]
    columns = {
        "image_id": pa.array([None, *range(1, count)], pa.int64()),
        "image": [textured(seed, side_px=32) for seed in range(count)],
        "label": pa.array(labels, pa.int64()),
        "source": pa.array(sources, pa.int64()),
    }
    write_deltalake(str(tmp_path / "t"), pa.table(columns))
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    made = build(tmp_path / "p", ImageModel(cfg, 3), cfg, ("0", "1", "2"), empty, {})
    package, table = Package(made), ImageTable(str(tmp_path / "t"))
    judged = evaluate.judge([package, package], table, table.pin(), {}).to_pylist()

    said = package.predict(columns["image"]).labels
    expected = {
        str(n or ""): (str(sources[n]), said[n] == str(label), said[n] == str(label))
        for n, label in enumerate(labels)
        if label is not None
    }
    found = {row["id"]: (row["group"], row["model_0"], row["model_1"]) for row in judged}
    assert found == expected
