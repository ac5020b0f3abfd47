"""Preflight: can we read this Delta table right, or must we refuse it?

Readers that ignore a table feature return nulls or resurrect deleted rows without a word (measured: Ray 2.60's and delta-rs's
Arrow readers on column mapping and deletion vectors). So the features are checked before any data is touched, and what we do
not read is refused by name.
"""

from __future__ import annotations

import re

from deltalake import DeltaTable

from raypipe.errors import DataError

READABLE_FEATURES = {
    "timestampNtz",
    "v2Checkpoint",
    "vacuumProtocolCheck",
    "deletionVectors",
    "columnMapping",
    "typeWidening",  # each file is read in its own types, then cast: exact for every widening that the protocol allows
    "typeWidening-preview",
}
MODES = {"none", "name", "id"}


def preflight(table: DeltaTable) -> None:
    """Raise DataError naming the feature that this version cannot read; return silently when every row will be right."""
    protocol = table.protocol()
    unreadable = set(protocol.reader_features or ()) - READABLE_FEATURES
    if '"variant"' not in table.schema().to_json():
        unreadable.discard(
            "variantType"
        )  # deltalake itself lists it when it sets a property (1.6), with no such column
    mode = table.metadata().configuration.get("delta.columnMapping.mode") or "none"
    if mode not in MODES:
        unreadable.add(f"columnMapping ({mode})")
    if protocol.min_reader_version > 3:
        unreadable.add(f"reader version {protocol.min_reader_version}")
    if unreadable:
        raise refusal(table.table_uri, unreadable)


def refusal(uri: str, unreadable: set[str]) -> DataError:
    return DataError(
        f"The Delta table at {uri} uses a feature this version does not read",
        got=", ".join(sorted(unreadable)),
        rule="A table is read in full or refused: a partial read would return nulls or deleted rows",
        fix="Rewrite it without the feature, e.g. ALTER TABLE … DROP FEATURE, or a deep copy",
    )


def named_by_delta(error: Exception) -> set[str]:
    """The features that deltalake says it cannot open a version for: some it refuses before we can look."""
    return set(re.findall(r"Feature '([^']+)' is not supported", str(error)))


def mapping(table: DeltaTable) -> str:
    """How columns find their data in the files: none, name or id. By the property alone no old protocol can map."""
    protocol = table.protocol()
    able = protocol.min_reader_version == 2 or "columnMapping" in (protocol.reader_features or ())
    return (
        (table.metadata().configuration.get("delta.columnMapping.mode") or "none")
        if able
        else "none"
    )
