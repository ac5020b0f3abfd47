"""Where cleaning keeps what it found: a Delta table beside the images, one row a verdict, never changed.

A verdict is on one row of one version: `file` and `row` name it, because an id may stand in a table twice. `policy` is the key
of everything that the judgement depends on; `rules` is the key of the limits alone, so that ingest can ask what they dropped.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.tables import scan
from raypipe.tables.commits import Moved, append_once
from raypipe.tables.provenance import commit_properties
from raypipe.tables.retries import ATTEMPTS
from raypipe.tables.table import ImageTable, TableVersion, resolve

Verdict = Literal[
    "exact_duplicate", "near_duplicate", "broken", "dark", "bright", "blurred", "outlier"
]
Rows = list[dict[str, Any]]
SCHEMA = pa.schema(
    [(n, pa.string()) for n in ("image_id", "verdict", "partner", "policy", "table")]
    + [("value", pa.float64()), ("limit", pa.float64()), ("dropped", pa.bool_())]
    + [("rules", pa.string()), ("sha256", pa.string()), ("file", pa.string()), ("row", pa.int64())]
)
JUDGED = (
    "judged"  # says that a version was judged, so that a table without a fault is not judged again
)


class Seen(NamedTuple):
    """A row that was looked at: its id, its file and place there, and the sha256 of its bytes (None for a null)."""

    image_id: str | None
    file: str
    row: int
    sha256: str | None


def uri_of(images: str) -> str:
    return resolve(images).rstrip("/") + "_verdicts"


def row(
    seen: Seen,
    verdict: str,
    partner: str | None = None,
    value: float = 0.0,
    limit: float = 0.0,
    dropped: bool = False,
) -> dict[str, Any]:
    """What was measured (`value`), against which `limit`, and for duplicates the image that stays (`partner`)."""
    found = {
        "verdict": verdict,
        "partner": partner,
        "value": value,
        "limit": limit,
        "dropped": dropped,
    }
    return seen._asdict() | found


def write(
    images: str,
    judged: TableVersion,
    policy: str,
    rules: str,
    rows: Rows,
    seen: int,
    storage_options: dict[str, str] | None,
) -> None:
    """Keep the verdicts on one version under one policy, in one commit; not again when another run has kept them."""
    whole = [*rows, row(Seen(None, "", 0, None), JUDGED, value=float(seen))]
    told_rows = pa.Table.from_pylist(
        [r | {"policy": policy, "rules": rules, "table": str(judged)} for r in whole], SCHEMA
    )
    uri = uri_of(images)
    for _ in range(ATTEMPTS):
        base = (
            ImageTable(uri, storage_options=storage_options).delta()
            if ImageTable.exists(uri, storage_options)
            else None
        )
        if base is not None and read(images, judged, policy, storage_options) is not None:
            return
        try:
            append_once(
                uri,
                told_rows,
                base,
                commit_properties(f"clean {judged}"),
                None,
                storage_options,
            )
            return
        except Moved:
            continue
    raise DataError(
        f"Others keep writing to {uri}",
        got=f"{ATTEMPTS} attempts",
        fix="Run again when they are done",
    )


def read(
    images: str, judged: TableVersion, policy: str, storage_options: dict[str, str] | None = None
) -> Rows | None:
    """The verdicts on this version under this policy, or None when it was not judged yet."""
    found = _rows(images, {"table": str(judged), "policy": policy}, storage_options)
    return [r for r in found if r["verdict"] != JUDGED] if found else None


def dropped_ids(
    images: str, policies: set[str] | None, storage_options: dict[str, str] | None = None
) -> set[str]:
    """The images that cleaning dropped from this table under these policies or rules (None: under any)."""
    found = _rows(images, {}, storage_options)
    mine = [r for r in found if policies is None or {r["rules"], r["policy"]} & policies]
    return {r["image_id"] for r in mine if r["dropped"] and r["image_id"]}


def _rows(images: str, where: scan.Where, storage_options: dict[str, str] | None) -> Rows:
    if not ImageTable.exists(uri_of(images), storage_options):
        return []
    table = ImageTable(uri_of(images), storage_options=storage_options)
    pinned = table.pin()
    have = table.delta(pinned.version).schema().to_arrow().names
    rows: Rows = scan.rows(table, pinned, [n for n in SCHEMA.names if n in have], where).to_pylist()
    return [dict.fromkeys(SCHEMA.names) | r for r in rows]  # older tables lack the newer columns
