"""The request log of `raypipe serve` as a source: the images that users sent, with the labels that
came back to /feedback.

A label names a request, and the request's answer names the image. What the model said is never a
label. Of several labels for an image, of one request or of many, the last one counts. A label that
came back to a model of another task is left out: "0.5" is a number there and would be a class here.
Images that nobody labelled are left out, unless labels are not asked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.models import labels
from raypipe.models.labels import Kind
from raypipe.tables import scan
from raypipe.tables.request_log import RequestTables
from raypipe.tables.sources import delta
from raypipe.tables.sources.candidate import Candidate, Part, with_label
from raypipe.tables.sources.columns import SourceColumns
from raypipe.tables.sources.fence import Fence
from raypipe.tables.table import ImageTable, TableVersion

Options = dict[str, str] | None
Found = dict[str, str]  # image_id -> label


def row_groups(
    root: str, columns: SourceColumns, fence: Fence, options: Options
) -> tuple[list[Part], TableVersion, str]:
    """The images with their labels, the version of the table of images, and one line about both.

    Raises DataError where there is no request log, and where it has no label but one is asked for.
    """
    tables = RequestTables.below(root)
    if not ImageTable.exists(tables.images, options):
        raise DataError(
            "There is no request log here",
            got=root,
            rule="It is the folder `requests` that raypipe serve writes, with serve.keep above 0",
            fix="Set ingest.from.images to it",
        )
    # The labels have a table of their own, so the images are read without any.
    bare = replace(columns, label=None, split=None)
    parts, pinned, _ = delta.row_groups(tables.images, None, {}, bare, fence, options)
    if columns.label is None:
        return parts, pinned, "what users sent, without labels"
    found, said = _labels(tables, columns.task, options)
    return [_labelled(part, found, columns.task) for part in parts], pinned, said


def _labelled(part: Part, found: Found, task: Kind) -> Part:
    """The part's images that have a label."""
    candidates: list[Candidate] = []
    for candidate in part.candidates:
        label = found.get(candidate.path.rpartition("/")[2])
        if label is not None:
            candidates.append(with_label(candidate, task, label, None))
    return replace(part, candidates=candidates)


def _labels(tables: RequestTables, task: Kind, options: Options) -> tuple[Found, str]:
    """The last label of each image, and one line about all that came back."""
    feedback = _rows(tables.feedback, ["request_id", "label", "task", "time"], options).to_pylist()
    _require_task(feedback, task)
    requests = pa.array([row["request_id"] for row in feedback], pa.string())
    answers = _rows(tables.answers, ["request_id", "image_id"], options)
    # Most requests get no label: only those that did become Python objects.
    answers = answers.filter(pc.is_in(answers["request_id"], requests))
    image_of = {row["request_id"]: row["image_id"] for row in answers.to_pylist()}

    found: Found = {}
    counts: Counter[str] = Counter()
    # In the order of time: a later label replaces an earlier one.
    for row in sorted(feedback, key=lambda row: row["time"]):
        if row["task"] not in (task, None):
            counts["other"] += 1
            continue
        image = image_of.get(row["request_id"])
        if image is None:
            counts["lost"] += 1
            continue
        before = found.get(image)
        if before is not None and labels.read(task, before) != labels.read(task, row["label"]):
            counts["replaced"] += 1
        found[image] = row["label"]
    return found, _said(len(feedback), len(found), counts)


def _require_task(feedback: list[dict[str, Any]], task: Kind) -> None:
    """Raise DataError where labels came back, and none of them to a model of this task."""
    tasks = {row["task"] or task for row in feedback}
    if tasks and task not in tasks:
        raise DataError(
            "This is the request log of a model of another task",
            got=", ".join(sorted(tasks)),
            rule=f"Labels of model.task={task} are asked for",
            fix="Set model.task or ingest.from.task, or ingest.from.images to another log",
        )


def _said(came: int, images: int, counts: Counter[str]) -> str:
    said = f"{came} labels that came back, for {images} images"
    if counts["replaced"]:
        said += f"; {counts['replaced']} were replaced by a later one"
    if counts["lost"]:
        # serve.keep was lower then, or the server was killed before it wrote.
        said += f"; {counts['lost']} are for requests that were not kept"
    if counts["other"]:
        said += f"; {counts['other']} came back to a model of another task"
    return said


def _rows(uri: str, columns: list[str], options: Options) -> pa.Table:
    """The rows of one table of the log; none where it has not been written yet."""
    if not ImageTable.exists(uri, options):
        return pa.table({name: pa.array([], pa.string()) for name in columns})
    table = ImageTable(uri, storage_options=options)
    pinned = table.pin()
    # Logs of earlier versions have no column `task`.
    have = [field.name for field in table.at(pinned).schema().fields]
    rows = scan.rows(table, pinned, [name for name in columns if name in have])
    for name in columns:
        if name not in have:
            rows = rows.append_column(name, pa.nulls(len(rows), pa.string()))
    return rows
