"""Where cleaning keeps its verdicts: a Delta table beside the images, one row for each verdict,
never changed.

A verdict is about one row of one version. `file` and `row` name it, because an id may be in a table
twice. `policy` is the key of everything that the judgement depends on. `rules` is the key of the
limits alone: ingest asks by it what they dropped.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import pyarrow as pa

from raypipe.tables import retries, scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import Moved, append_once
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import ImageTable, TableVersion

Verdict = Literal[
    "exact_duplicate", "near_duplicate", "broken", "dark", "bright", "blurred", "outlier"
]
Rows = list[dict[str, Any]]
SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),
        ("verdict", pa.string()),
        # for a duplicate: the image_id of the image that stays
        ("partner", pa.string()),
        ("policy", pa.string()),
        # the judged version, uri@vN
        ("table", pa.string()),
        # what was measured, and the limit it was compared with
        ("value", pa.float64()),
        ("limit", pa.float64()),
        ("dropped", pa.bool_()),
        ("rules", pa.string()),
        # of the image's bytes; null if they are null
        ("sha256", pa.string()),
        ("file", pa.string()),
        ("row", pa.int64()),
        # of the judged table: another one may be made at its address
        ("table_id", pa.string()),
    ]
)
# The verdict of a row that says: this version was judged. So a table without a fault is not judged
# again.
JUDGED = "judged"


class Seen(NamedTuple):
    """A judged row: its id, its file and its number there, and the sha256 of its bytes (None for a
    null).
    """

    image_id: str | None
    file: str
    row: int
    sha256: str | None


def uri_of(images: str) -> str:
    """The address of the verdicts on the table at `images`."""
    return resolve(images).rstrip("/") + "_verdicts"


def row(
    seen: Seen,
    verdict: str,
    partner: str | None = None,
    value: float = 0.0,
    limit: float = 0.0,
    dropped: bool = False,
) -> dict[str, Any]:
    """One verdict: the measured `value`, its `limit` and, for duplicates, the image that stays
    (`partner`).
    """
    return {
        **seen._asdict(),
        "verdict": verdict,
        "partner": partner,
        "value": value,
        "limit": limit,
        "dropped": dropped,
    }


def write(
    images: str,
    judged: TableVersion,
    policy: str,
    rules: str,
    rows: Rows,
    seen: int,
    storage_options: dict[str, str] | None,
) -> None:
    """Keep the verdicts on one version under one policy, in one commit; `seen` is the number of
    judged images.

    Does nothing if another run has kept them. Raises DataError when the table cannot be written.
    """
    judged_row = row(Seen(None, "", 0, None), JUDGED, value=float(seen))
    keys = {"policy": policy, "rules": rules, "table": str(judged)}
    keys |= {"table_id": judged.table_id}
    verdicts = pa.Table.from_pylist([each | keys for each in [*rows, judged_row]], SCHEMA)
    why = commit_properties(f"clean {judged}")
    uri = uri_of(images)
    for _ in range(retries.ATTEMPTS):
        base = None
        if ImageTable.exists(uri, storage_options):
            base = ImageTable(uri, storage_options=storage_options).delta()
            if read(images, judged, policy, storage_options) is not None:
                return
        try:
            append_once(uri, verdicts, base, why, None, storage_options)
            return
        except Moved:
            continue
    raise retries.busy(uri)


def read(
    images: str, judged: TableVersion, policy: str, storage_options: dict[str, str] | None = None
) -> Rows | None:
    """The verdicts on this version under this policy; None if it was not judged yet."""
    rows = _rows(images, {"policy": policy}, storage_options)
    rows = _of_versions(_of_table(rows, judged.table_id), [str(judged)])
    if not rows:
        return None
    return [row for row in rows if row["verdict"] != JUDGED]


def about(
    images: str, table_id: str, judged: list[str], storage_options: dict[str, str] | None = None
) -> Rows:
    """All rows about these versions (uri@vN) under any policy, JUDGED ones too. table_id: of the
    table that is there now; verdicts on an earlier one at its address are left out.
    """
    rows = _of_table(_rows(images, {}, storage_options), table_id)
    return _of_versions(rows, judged)


def _of_table(rows: Rows, table_id: str) -> Rows:
    """Rows about this table ("": any); those of an older raypipe do not say about which."""
    return [row for row in rows if not table_id or row["table_id"] in (None, "", table_id)]


def _of_versions(rows: Rows, versions: list[str]) -> Rows:
    """Rows about these versions, by their numbers: the table may have been moved, with its
    verdicts, and have another address now."""
    numbers = {one.rpartition("@v")[2] for one in versions}
    return [row for row in rows if (row["table"] or "").rpartition("@v")[2] in numbers]


def dropped_ids(
    images: str,
    table_id: str,
    policies: set[str] | None,
    storage_options: dict[str, str] | None = None,
) -> set[str]:
    """The ids that cleaning dropped from this table under these policies or rules (None: under
    any). table_id: as in `about`.
    """
    ids = set()
    for row in _of_table(_rows(images, {}, storage_options), table_id):
        # A row carries both keys, so that either of them can be asked for.
        keys = {row["rules"], row["policy"]}
        asked = policies is None or bool(keys & policies)
        if asked and row["dropped"] and row["image_id"]:
            ids.add(row["image_id"])
    return ids


def _rows(images: str, where: scan.Where, storage_options: dict[str, str] | None) -> Rows:
    """Rows of the verdict table that match `where`, with all columns of SCHEMA. Older tables lack
    some: they are None.
    """
    uri = uri_of(images)
    if not ImageTable.exists(uri, storage_options):
        return []
    table = ImageTable(uri, storage_options=storage_options)
    pinned = table.pin()
    have = table.at(pinned).schema().to_arrow().names
    columns = [name for name in SCHEMA.names if name in have]
    rows: Rows = scan.rows(table, pinned, columns, where).to_pylist()
    return [dict.fromkeys(SCHEMA.names) | row for row in rows]
