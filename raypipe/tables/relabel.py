"""Labels that arrive later, or change: what an ingest says about images that the table holds
already.

An image is known by its bytes. Ingesting it again with a label where there was none, or with
another one, changes the label in a new version that says who, why and how many; `raypipe table
diff` names each of them. The row keeps its id and its split: a test image stays a test image
whatever it is called. Without a label, a known image keeps the one it has.

One ingest that gives an image two labels contradicts itself, and neither is believed: files that
disagree with the first one go to the quarantine, and the image is unlabelled, unless the label that
it has is from another source. When the source agrees with itself again, the next ingest labels the
image.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties

from raypipe.errors import DataError
from raypipe.tables import rewrite
from raypipe.tables.changes import Change
from raypipe.tables.commits import Moved
from raypipe.tables.retries import ATTEMPTS
from raypipe.tables.table import ImageTable, TableVersion

REASON = "two_labels"


class Heard:
    """Which label one ingest gives each image, in the source's order."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, str]] = {}  # id: the first label and the file that has it
        self._contested: set[str] = set()

    def listen(self, batch: list[pa.Table]) -> list[pa.Table]:
        """The batch with each image's label, wherever in it the label stands; files that disagree
        have a `reason`.

        Listening twice to a batch changes nothing.
        """
        heard = [self._disagreeing(chunk) for chunk in batch]
        return [self._settled(chunk, reasons) for chunk, reasons in zip(batch, heard, strict=True)]

    def _disagreeing(self, chunk: pa.Table) -> dict[int, str]:
        found: dict[int, str] = {}
        small = chunk.select(["image_id", "label", "path", "reason"]).to_pylist()
        for i, row in enumerate(small):
            image_id, label, path = row["image_id"], row["label"], row["path"]
            if row["reason"] or image_id is None or label is None:
                continue
            first, where = self._said.setdefault(image_id, (label, path))
            if first != label:
                self._contested.add(image_id)
                found[i] = (
                    f"{REASON}: {path} says {label!r}, and {where}, the same image, says {first!r}"
                )
        return found

    def _settled(self, chunk: pa.Table, disagreeing: dict[int, str]) -> pa.Table:
        ids, labels = chunk["image_id"].to_pylist(), chunk["label"].to_pylist()
        reasons, details = chunk["reason"].to_pylist(), chunk["detail"].to_pylist()
        for i, image_id in enumerate(ids):
            if i in disagreeing:  # what the file says stays with it in the quarantine
                reasons[i], details[i] = REASON, disagreeing[i]
            elif not reasons[i]:
                labels[i] = self.label(image_id)
        for name, values in (("label", labels), ("reason", reasons), ("detail", details)):
            at = chunk.schema.get_field_index(name)
            chunk = chunk.set_column(at, chunk.schema.field(at), pa.array(values, pa.string()))
        return chunk

    def label(self, image_id: str) -> str | None:
        """What is believed so far; None for nothing, or for two labels."""
        said = self._said.get(image_id)
        return said[0] if said and image_id not in self._contested else None

    def changed(self, row: dict[str, Any], source: str) -> bool:
        """Does the row's label differ from what this ingest, named `source`, makes of it?"""
        image_id = row["image_id"]
        if image_id in self._contested:
            return row["label"] is not None and row["source"] == source
        return image_id in self._said and row["label"] != self._said[image_id][0]

    @property
    def ids(self) -> pa.Array:
        return pa.array(list(self._said), pa.string())


def apply(
    table: ImageTable, heard: Heard, source: str, why: CommitProperties
) -> tuple[TableVersion, int]:
    """Give the table's rows the labels that were heard, in one commit; the version then, and how
    many rows changed.

    Raises DataError when the table cannot be written.
    """
    ids = heard.ids
    for _ in range(ATTEMPTS):
        base = table.delta()
        pinned = TableVersion(table.uri, base.version())
        if not len(ids):
            return pinned, 0
        rows = rewrite.places(table, pinned, ["image_id", "label", "source"])
        rows = rows.filter(pc.is_in(rows["image_id"], value_set=ids))
        changes: dict[str, Change] = {}
        changed = 0
        for batch in rows.to_batches(
            max_chunksize=10_000
        ):  # as Python objects a million rows are half a gigabyte
            for row in filter(lambda row: heard.changed(row, source), batch.to_pylist()):
                of = changes.setdefault(row["file"], Change()).values.setdefault("label", {})
                of[row["place"]] = heard.label(row["image_id"])
                changed += 1
        if not changed:
            return pinned, 0
        try:
            return TableVersion(table.uri, rewrite.commit(table, base, changes, why)), changed
        except Moved:
            continue
    raise DataError(
        f"Others keep writing to {table.uri}",
        got=f"{ATTEMPTS} attempts",
        fix="Run again when they are done",
    )
