"""Several models on the same pinned rows: one read and one decode, so that nothing but the models can differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
import torch

from raypipe.registry.package import Package
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableVersion


def hits(packages: Sequence[Package], table: ImageTable, version: TableVersion, where: scan.Where) -> pa.Table:
    """One row a labelled image: id, group (its source), label, and model_0, model_1, … true where that model is right."""
    c = table.columns
    grouped = c.source in {f.name for f in table.delta(version.version).schema().fields}
    columns = [c.id, c.label, c.image] + ([c.source] if grouped else [])
    stream = scan.dataset(table, version, columns, where).map_batches(
        _Judge,
        fn_constructor_args=([str(p.folder) for p in packages], c.id, c.label, c.image, c.source if grouped else None),
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    )
    parts = [
        pa.table({k: v.tolist() for k, v in b.items()})
        for b in stream.iter_batches(batch_size=256, batch_format="numpy")
        if len(b["id"])
    ]
    return pa.concat_tables(parts).sort_by("id") if parts else pa.table({"id": pa.array([], pa.string())})


class _Judge:
    def __init__(self, folders: list[str], id_column: str, label: str, image: str, source: str | None) -> None:
        torch.set_num_threads(2)
        self._packages = [Package(Path(f)) for f in folders]
        self._id, self._label, self._image, self._source = id_column, label, image, source

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        keep = [i for i, label in enumerate(batch[self._label]) if label is not None]
        labels = np.array([batch[self._label][i] for i in keep], dtype=object)
        groups = [str(batch[self._source][i]) if self._source else "all" for i in keep]
        out = {
            "id": np.array([str(batch[self._id][i]) for i in keep], dtype=object),
            "group": np.array(groups, dtype=object),
            "label": labels,
        }
        images = [batch[self._image][i] for i in keep]
        for n, package in enumerate(self._packages):
            out[f"model_{n}"] = np.array(package.predict(images).labels, dtype=object) == labels
        return out
