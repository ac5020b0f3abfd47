"""Preflight: can we read this Delta table right, or must we refuse it?

Readers that ignore a table feature return nulls or resurrect deleted rows without a word (measured: Ray 2.60's and delta-rs's
Arrow readers on column mapping and deletion vectors). So the features are checked before any data is touched, and what we do
not read yet is refused by name.
"""

from __future__ import annotations

from deltalake import DeltaTable

from raypipe.errors import DataError

READABLE_FEATURES = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
_HARMLESS_WHEN_UNUSED = {"deletionVectors", "columnMapping"}


def preflight(table: DeltaTable) -> None:
    """Raise DataError naming the feature that this version cannot read; return silently when every row will be right."""
    protocol = table.protocol()
    features = set(protocol.reader_features or ())
    mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    unreadable = features - READABLE_FEATURES - _HARMLESS_WHEN_UNUSED
    if mapping != "none":
        unreadable.add(f"columnMapping ({mapping})")
    if "deletionVectors" in features and _has_deletion_vectors(table):
        unreadable.add("deletionVectors")
    if unreadable:
        raise DataError(
            f"The Delta table at {table.table_uri} uses a feature this version does not read",
            got=", ".join(sorted(unreadable)),
            rule="A table is read in full or refused: a partial read would return nulls or deleted rows",
            fix="Rewrite it without the feature, e.g. REORG TABLE … APPLY (PURGE) or a deep copy",
        )


def _has_deletion_vectors(table: DeltaTable) -> bool:
    return any(batch.num_rows for batch in table.deletion_vectors())
