"""Several models on the same pinned rows: one read and one decode, so that nothing but the models can differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.models.tasks import NUMERIC
from raypipe.registry.package import Package, load_once
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableVersion


def hits(packages: Sequence[Package], table: ImageTable, version: TableVersion, where: scan.Where) -> pa.Table:
    """One row a labelled image: id, group (its source), and model_0, model_1, … true where that model is right.

    Raises ConfigError for models that predict numbers: these are near or far, not right or wrong.
    """
    task = packages[0].task
    if task.kind in NUMERIC:
        raise ConfigError("Models that predict numbers cannot be compared by hits yet", got=f"model.task={task.kind}")
    c = table.columns
    grouped = c.source in {f.name for f in table.delta(version.version).schema().fields}
    columns = [c.id, c.label, c.image] + ([c.source] if grouped else [])
    folders = [str(p.folder) for p in packages]

    def judged(batch: dict[str, Any]) -> dict[str, Any]:
        keep = [i for i, label in enumerate(batch[c.label]) if label is not None]
        labels = np.array([task.text(batch[c.label][i]) for i in keep], dtype=object)
        images = [batch[c.image][i] for i in keep]
        groups = batch[c.source][keep].astype(str) if grouped else np.full(len(keep), "all")
        right = {
            f"model_{n}": np.array(load_once(folder).predict(images, threads=1).labels, dtype=object) == labels
            for n, folder in enumerate(folders)
        }
        return {"id": batch[c.id][keep].astype(str), "group": groups, **right}

    stream = scan.dataset(table, version, columns, where).map_batches(judged, batch_size=64)
    parts = [pa.table({k: v.tolist() for k, v in b.items()}) for b in stream.iter_batches(batch_size=256) if len(b["id"])]
    return pa.concat_tables(parts).sort_by("id") if parts else pa.table({"id": pa.array([], pa.string())})
