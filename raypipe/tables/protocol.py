"""Preflight: whether raypipe reads a Delta table right, or must refuse it.

A reader that ignores a table feature returns nulls or deleted rows without a message (measured:
Ray 2.60's and delta-rs's Arrow readers on column mapping and deletion vectors). So the features are
checked before any data is read. A table with another feature is refused, and the message names it.
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
    # Each file is read in its own types, then cast: exact for every widening the protocol allows.
    "typeWidening",
    "typeWidening-preview",
}
MODES = {"none", "name", "id"}
MODE_PROPERTY = "delta.columnMapping.mode"


def preflight(table: DeltaTable) -> None:
    """Raise DataError when the table uses a feature that raypipe cannot read right."""
    protocol = table.protocol()
    unreadable = set(protocol.reader_features or ()) - READABLE_FEATURES
    # deltalake 1.6 itself lists variantType when it sets a property, without any such column.
    if '"variant"' not in table.schema().to_json():
        unreadable.discard("variantType")

    mode = table.metadata().configuration.get(MODE_PROPERTY) or "none"
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
        rule=(
            "A table is read in full or refused: a partial read would return nulls or deleted rows"
        ),
        fix="Rewrite it without the feature, e.g. ALTER TABLE … DROP FEATURE, or a deep copy",
    )


def named_by_delta(error: Exception) -> set[str]:
    """The features in an error of deltalake, which refuses some before `preflight` can run."""
    return set(re.findall(r"Feature '([^']+)' is not supported", str(error)))


def mapping(table: DeltaTable) -> str:
    """How columns are matched with the columns of files: none, name or id.

    The table property alone is not enough: the protocol must have column mapping, too.
    """
    protocol = table.protocol()
    has_feature = "columnMapping" in (protocol.reader_features or ())
    if protocol.min_reader_version != 2 and not has_feature:
        return "none"
    return table.metadata().configuration.get(MODE_PROPERTY) or "none"
