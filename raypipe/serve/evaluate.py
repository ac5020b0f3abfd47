"""Several models on the same pinned rows: one read and one decode, so that nothing but the models can differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry.package import Package, Predictions
from raypipe.serve.carry import carry
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableVersion


def judge(
    packages: Sequence[Package], table: ImageTable, version: TableVersion, where: scan.Where
) -> pa.Table:
    """One row a labelled image: id, group (its source), and for each model model_0, model_1, … whether it is right (all tags,
    where there are several) or, of models that predict numbers, its absolute error."""
    task = packages[0].task
    c = table.columns
    grouped = c.source in {f.name for f in table.delta(version.version).schema().fields}
    columns = [c.id, c.label, c.image] + ([c.source] if grouped else [])
    carried = [carry(package) for package in packages]

    def judged_batch(batch: dict[str, Any]) -> dict[str, Any]:
        keep = [i for i, label in enumerate(batch[c.label]) if label is not None]
        labels = [batch[c.label][i] for i in keep]
        images = [batch[c.image][i] for i in keep]
        groups = batch[c.source][keep].astype(str) if grouped else np.full(len(keep), "all")
        said = {
            f"model_{n}": package.open().predict(images, threads=1)
            for n, package in enumerate(carried)
        }
        judged = {name: _judged(task, found, labels) for name, found in said.items()}
        return {"id": batch[c.id][keep].astype(str), "group": groups, **judged}

    stream = scan.dataset(table, version, columns, where).map_batches(judged_batch, batch_size=64)
    parts = [
        pa.table({k: v.tolist() for k, v in b.items()})
        for b in stream.iter_batches(batch_size=256)
        if len(b["id"])
    ]
    return (
        pa.concat_tables(parts).sort_by("id")
        if parts
        else pa.table({"id": pa.array([], pa.string())})
    )


def _judged(task: Task, said: Predictions, labels: Sequence[Any]) -> np.ndarray:
    if task.kind in NUMERIC:
        return np.abs(said.scores_NC[:, 0].astype(np.float64) - task.encode(labels)[:, 0])
    return np.array(said.labels, dtype=object) == np.array(
        [task.text(label) for label in labels], dtype=object
    )
