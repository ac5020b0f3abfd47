"""The quarantine: a table beside the images that keeps what ingest rejected, with the reason and
the bytes.

A rejected file is kept once for each source, path, content and reason, however often it is
ingested. A file that is rejected again for another reason, or by another source, is another row.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from raypipe.tables import retries, scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import Moved, append_once
from raypipe.tables.fragment import Options
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import ImageTable, TableVersion

SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("path", pa.string()),
        ("source", pa.string()),
        ("label", pa.string()),
        ("image", pa.binary()),
    ]
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
KEY = ("source", "path", "image_id", "reason", "detail")
Key = tuple["str | None", ...]  # the values of KEY of a rejected file


def uri_of(images: str) -> str:
    """The address of the quarantine of the table at `images`."""
    return resolve(images).rstrip("/") + "_quarantine"


def keep(images: str, batch: list[pa.Table], source: str, options: Options) -> None:
    """Add the rejected rows of a verified batch, those with a `reason`, to the quarantine of the
    table at `images`.

    Raises DataError when the quarantine cannot be written.
    """
    rejected = _rejected(batch, source)
    if not rejected:
        return
    uri = uri_of(images)
    for _ in range(retries.ATTEMPTS):
        base, present = _read(uri, options)
        new = {key: row for key, row in rejected.items() if key not in present}
        if not new:
            return
        rows = pa.Table.from_pylist(list(new.values()), SCHEMA)
        why = commit_properties("quarantine")
        try:
            append_once(uri, rows, base, why, None, options)
            return
        except Moved:
            continue
    raise retries.busy(uri)


def _rejected(batch: list[pa.Table], source: str) -> dict[Key, dict[str, Any]]:
    """The rejected rows by key: of two with the same key the last one stays."""
    rejected: dict[Key, dict[str, Any]] = {}
    for chunk in batch:
        rows = chunk.filter(chunk["reason"].is_valid())
        for row in rows.to_pylist():
            row["source"] = source
            # The text of an error may name an object's address, which every run has another of.
            row["detail"] = _ADDRESS.sub("", row["detail"] or "")
            key = tuple(row[name] for name in KEY)
            rejected[key] = {name: row.get(name) for name in SCHEMA.names}
    return rejected


def _read(uri: str, options: Options) -> tuple[DeltaTable | None, set[Key]]:
    """The newest version of the quarantine (None: there is none yet), and the keys of its rows."""
    if not ImageTable.exists(uri, options):
        return None, set()
    table = ImageTable(uri, storage_options=options)
    base = table.delta()
    version = TableVersion(uri, base.version())
    rows = scan.rows(table, version, list(KEY))
    keys = zip(*(rows[name].to_pylist() for name in KEY), strict=True)
    return base, set(keys)
