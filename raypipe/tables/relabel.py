"""Labels that arrive later, or change: what an ingest does with images that the table holds
already.

An image is known by its bytes. If it is ingested again with a label, and has none or another one in
the table, a new version changes the label; its commit has the user, the reason and the number of
rows. `raypipe table diff` lists each of them. The row keeps its id and its split: a test image
stays a test image whatever its label. An ingest without a label changes nothing.

One ingest may give an image two labels. Then neither is used: files that disagree with the first
one go to the quarantine. If the table's label is one of these labels, the image loses it, whoever
gave it: a row says which source added it, not which one labelled it. Any other label stays, because
a contradiction says nothing against it. When the source no longer contradicts itself, the next
ingest labels the image.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties

from raypipe.tables import retries, rewrite
from raypipe.tables.changes import Change
from raypipe.tables.commits import Moved
from raypipe.tables.table import ImageTable, TableVersion

REASON = "two_labels"
# Rows that are Python objects at a time: a million of them are half a gigabyte.
ROWS_AT_A_TIME = 10_000


class Labels:
    """Which label one ingest gives each image, in the source's order."""

    def __init__(self) -> None:
        # image_id -> the first label, and the path of the file that has it
        self._first: dict[str, tuple[str, str]] = {}
        # image_id -> all its labels, of an image with several
        self._contested: dict[str, set[str]] = {}

    def add(self, batch: list[pa.Table]) -> list[pa.Table]:
        """Note the labels of a verified batch, and return the batch with them.

        Every row gets its image's label, wherever in the batch that label is. Files that contradict
        an earlier label get a `reason`. Adding a batch twice changes nothing.
        """
        # All labels first: a label may come after the row that needs it.
        contradictions = [self._note(chunk) for chunk in batch]
        labelled = []
        for chunk, details in zip(batch, contradictions, strict=True):
            labelled.append(self._labelled(chunk, details))
        return labelled

    def label(self, image_id: str) -> str | None:
        """The label so far; None for an image without one, or with two."""
        if image_id not in self._first or image_id in self._contested:
            return None
        return self._first[image_id][0]

    def changes(self, row: dict[str, Any]) -> bool:
        """Does this ingest change the label of this row of the table?"""
        image_id, label = row["image_id"], row["label"]
        if image_id in self._contested:
            return label in self._contested[image_id]
        if image_id not in self._first:
            return False
        return bool(label != self._first[image_id][0])

    @property
    def ids(self) -> pa.Array:
        """The images that have a label in this ingest."""
        return pa.array(list(self._first), pa.string())

    def _note(self, chunk: pa.Table) -> dict[int, str]:
        """Note the labels of a chunk; returns {row: detail} of rows that contradict an earlier
        label.
        """
        details: dict[int, str] = {}
        small = chunk.select(["image_id", "label", "path", "reason"])
        for i, row in enumerate(small.to_pylist()):
            image_id, label, path = row["image_id"], row["label"], row["path"]
            if row["reason"] or image_id is None or label is None:
                continue
            first, where = self._first.setdefault(image_id, (label, path))
            if first != label:
                self._contested.setdefault(image_id, {first}).add(label)
                details[i] = (
                    f"{REASON}: {path} says {label!r}, and {where}, the same image, says {first!r}"
                )
        return details

    def _labelled(self, chunk: pa.Table, details: dict[int, str]) -> pa.Table:
        """The chunk with the labels so far; contradicting rows get a reason and their detail."""
        ids = chunk["image_id"].to_pylist()
        labels = chunk["label"].to_pylist()
        reasons = chunk["reason"].to_pylist()
        explanations = chunk["detail"].to_pylist()
        for i, image_id in enumerate(ids):
            if i in details:
                # The row goes to the quarantine and keeps the label of its file.
                reasons[i] = REASON
                explanations[i] = details[i]
            elif not reasons[i]:
                labels[i] = self.label(image_id)

        columns = {"label": labels, "reason": reasons, "detail": explanations}
        for name, values in columns.items():
            at = chunk.schema.get_field_index(name)
            field = chunk.schema.field(at)
            chunk = chunk.set_column(at, field, pa.array(values, field.type))
        return chunk


def apply(
    table: ImageTable, labels: Labels, why: CommitProperties
) -> tuple[TableVersion, int, int]:
    """Give the table's rows the labels of this ingest, in one commit: the newest version, how many
    rows changed, and how many of them lost their label.

    Raises DataError when the table cannot be written.
    """
    for _ in range(retries.ATTEMPTS):
        base = table.delta()
        pinned = TableVersion(table.uri, base.version())
        changes, rows = _changes(table, pinned, labels)
        if not rows:
            return pinned, 0, 0
        try:
            version = rewrite.commit(table, base, changes, why)
        except Moved:
            continue
        labels_now = [new for c in changes.values() for new in c.values["label"].values()]
        return TableVersion(table.uri, version), rows, labels_now.count(None)
    raise retries.busy(table.uri)


def _changes(
    table: ImageTable, pinned: TableVersion, labels: Labels
) -> tuple[dict[str, Change], int]:
    """The rows of this version whose label changes, by file, and how many they are."""
    changes: dict[str, Change] = {}
    changed = 0
    ids = labels.ids
    if not len(ids):
        return changes, changed
    rows = rewrite.places(table, pinned, ["image_id", "label"])
    rows = rows.filter(pc.is_in(rows["image_id"], value_set=ids))
    for batch in rows.to_batches(max_chunksize=ROWS_AT_A_TIME):
        for row in batch.to_pylist():
            if not labels.changes(row):
                continue
            change = changes.setdefault(row["file"], Change())
            new_labels = change.values.setdefault("label", {})
            new_labels[row["place"]] = labels.label(row["image_id"])
            changed += 1
    return changes, changed
