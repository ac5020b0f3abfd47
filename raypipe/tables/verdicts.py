"""Where cleaning keeps what it found: a Delta table beside the images, one row a verdict, never changed."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa

from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableVersion, append, resolve

Verdict = Literal["exact_duplicate", "near_duplicate", "broken", "dark", "bright", "blurred", "outlier"]
Rows = list[dict[str, Any]]
SCHEMA = pa.schema(
    [(n, pa.string()) for n in ("image_id", "verdict", "partner", "policy", "table")]
    + [("value", pa.float64()), ("limit", pa.float64()), ("dropped", pa.bool_())]
)


def uri_of(images: str) -> str:
    return resolve(images).rstrip("/") + "_verdicts"


def row(image_id: str, verdict: str, partner: str | None = None, value: float = 0.0, limit: float = 0.0) -> dict[str, Any]:
    """What was measured (`value`), against which `limit`, and for duplicates the image that stays (`partner`)."""
    return {"image_id": image_id, "verdict": verdict, "partner": partner, "value": value, "limit": limit}


def write(
    images: str, judged: TableVersion, policy: str, rows: Rows, seen: int, storage_options: dict[str, str] | None
) -> None:
    """Keep the verdicts on one version under one policy, in one commit."""
    # One row without an image says that this version was judged, so that a table without a fault is not judged again.
    whole = [*rows, row("", "judged", value=float(seen)) | {"dropped": False}]
    for r in whole:
        r |= {"policy": policy, "table": str(judged)}
    append(uri_of(images), pa.Table.from_pylist(whole, SCHEMA), f"clean {judged}", storage_options)


def read(images: str, judged: TableVersion, policy: str, storage_options: dict[str, str] | None = None) -> Rows | None:
    """The verdicts on this version under this policy, or None when it was not judged yet."""
    found = _rows(images, {"table": str(judged), "policy": policy}, storage_options)
    return [r for r in found if r["image_id"]] if found else None


def dropped_ids(images: str, storage_options: dict[str, str] | None = None) -> set[str]:
    """Every image that cleaning ever dropped from this table: ingest does not take it again."""
    return {r["image_id"] for r in _rows(images, {}, storage_options) if r["dropped"]}


def _rows(images: str, where: scan.Where, storage_options: dict[str, str] | None) -> Rows:
    if not ImageTable.exists(uri_of(images), storage_options):
        return []
    table = ImageTable(uri_of(images), storage_options=storage_options)
    return scan.rows(table, table.pin(), SCHEMA.names, where).to_pylist()  # type: ignore[no-any-return]
