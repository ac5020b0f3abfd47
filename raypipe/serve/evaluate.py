"""Compares several models on the same pinned rows.

All models see one read and one decode of the images, so nothing but the models can differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.feed.stored import SHA256, parsed
from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry.package import NOT_FINITE, Package, Predictions
from raypipe.serve.predicted_rows import attempted
from raypipe.serve.shared_package import share
from raypipe.tables import label_column, scan
from raypipe.tables.prepared import ORIGINAL
from raypipe.tables.table import ImageTable, TableVersion

BROKEN = "broken"  # why an image does not decode; "" where it does


def judge(
    packages: Sequence[Package],
    table: ImageTable,
    version: TableVersion,
    where: scan.Where,
    say: Callable[[str], None] = lambda text: None,
    belonging: str | None = None,
) -> pa.Table:
    """One row per labelled image, sorted by id; only an empty column id where there is none.

    Columns: id; group (the image's source, or "all"); sha256 of its bytes; stored_sha256, as the
    table has it, if it has; of a prepared table original_sha256, of the source's bytes; belongs
    (the text of the table's column `belonging`, blank for a null or without such a column); and for
    each model model_0, model_1, … whether it is right. With several tags, all of them must be. For
    models that predict numbers it is the absolute error. Where a model's answer is not finite it is
    wrong, by NaN. Images that do not decode are left out; `say` is told how many.
    """
    task = packages[0].task
    columns = table.columns
    names = {field.name for field in table.at(version).schema().fields}
    grouped = columns.source in names
    wanted = [columns.id, columns.label, columns.image]
    if grouped:
        wanted.append(columns.source)
    if belonging is not None:
        wanted.append(belonging)
    stored = {"stored_sha256": SHA256}
    # Another table's column of this name may hold anything.
    if version.origin_id:
        stored[ORIGINAL] = ORIGINAL
    wanted += [column for column in stored.values() if column in names]
    wanted = list(dict.fromkeys(wanted))
    shared = [share(package) for package in packages]

    def judge_batch(batch: pa.Table) -> dict[str, Any]:
        read = label_column.read(batch[columns.label], task.kind, columns.label)
        batch, labels = batch.filter(read.is_valid()), read.drop_null().to_pylist()
        images = batch[columns.image].to_pylist()

        groups = np.full(len(labels), "all")
        if grouped:
            # As `sources` of a package has them, a null too.
            groups = np.array([str(one) for one in batch[columns.source].to_pylist()], np.str_)
        ids = batch[columns.id].fill_null("").to_pylist()
        judged = {"id": np.array(ids, np.str_), "group": groups}
        # Of the bytes that are judged: a column of hashes may be missing, or of other bytes.
        hashes = [hashlib.sha256(image or b"").hexdigest() for image in images]
        judged["sha256"] = np.array(hashes, np.str_)
        for name, column in stored.items():
            digests = [""] * len(labels)
            if column in names:
                digests = [digest.tobytes().hex() for digest in parsed(batch[column])]
            judged[name] = np.array(digests, np.str_)
        belongs = [""] * len(labels)
        if belonging is not None:
            belongs = [_named(value) for value in batch[belonging].to_pylist()]
        judged["belongs"] = np.array(belongs, np.str_)
        judged[BROKEN] = np.full(len(labels), "", np.object_)

        # Every model predicts the same bytes. One broken image must not cost the comparison, which
        # comes when the challenger is trained.
        for n, package in enumerate(shared):
            attempt = attempted(package.open(), images, ids, threads=1)
            good = list(attempt.good)
            of_good = _judged(task, attempt.predictions, [labels[i] for i in good])
            mine = np.full(len(labels), np.nan if task.kind in NUMERIC else False, of_good.dtype)
            mine[good] = of_good
            judged[f"model_{n}"] = mine
            for place, why in attempt.errors.items():
                if why != NOT_FINITE:
                    judged[BROKEN][place] = why.partition(":")[0]
        judged[BROKEN] = judged[BROKEN].astype(np.str_)
        return judged

    dataset = scan.dataset(table, version, wanted, where)
    # As tables: an array of whole numbers with a null holds floats, and 1 becomes 1.0.
    stream = dataset.map_batches(judge_batch, batch_size=64, batch_format="pyarrow")
    parts: list[pa.Table] = []
    for batch in stream.iter_batches(batch_size=256):
        # An empty batch has columns of no type, which do not go with the others.
        if not len(batch["id"]):
            continue
        columns_of_part = {name: values.tolist() for name, values in batch.items()}
        parts.append(pa.table(columns_of_part))
    if not parts:
        return pa.table({"id": pa.array([], pa.string())})
    rows = pa.concat_tables(parts)
    is_good = pc.equal(rows[BROKEN], "")
    broken = Counter(rows[BROKEN].filter(pc.invert(is_good)).to_pylist())
    if broken:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(broken.items()))
        say(
            f"{broken.total()} of {len(rows)} labelled images of {version} do not decode, and are "
            f"not compared: {why}"
        )
    return rows.filter(is_good).drop_columns(BROKEN).sort_by("id")


def _named(group: Any) -> str:
    """Dates, numbers and truth values are names, too; null and NaN are none."""
    return "" if group is None or group != group else str(group)


def _judged(task: Task, predictions: Predictions, labels: Sequence[Any]) -> np.ndarray:
    """Per image: is the prediction right? For numbers: the absolute error."""
    if task.kind in NUMERIC:
        predicted_N = predictions.scores_NC[:, 0].astype(np.float64)
        true_N = task.encode(labels)[:, 0]
        return np.abs(predicted_N - true_N)

    predicted = np.array(predictions.labels, dtype=object)
    right_texts = [task.text(label) for label in labels]
    right = np.array(right_texts, dtype=object)
    return predicted == right
