"""What raypipe writes into a commit about itself: the user, the reason, and the version that its
rows come from.

The log keeps these properties for as long as it keeps the commit. `raypipe table list` and `table
lineage` read them.
"""

from __future__ import annotations

import getpass
from typing import Any

from deltalake import CommitProperties

# The version that the rows of this commit come from: uri@vN, or @vN for a version of the same
# table.
SOURCE = "raypipe.from"
# Rows added by a commit that raypipe makes itself: deltalake counts none of these.
ADDED = "raypipe.added"


def commit_properties(why: str, source: str = "") -> CommitProperties:
    """Custom metadata of one commit: the reason `why`, the user and, for derived rows, the version
    `source`.
    """
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in a container the user may have no name
        user = ""
    metadata = {"raypipe": why, "raypipe.by": user, SOURCE: source}
    return CommitProperties(custom_metadata={k: v for k, v in metadata.items() if v})


def history_row(entry: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """One row of `ImageTable.history`, from a log entry and the version's tags.

    Each engine has its own names for the numbers of rows.
    """
    metrics = entry.get("operationMetrics") or {}
    who = entry.get("raypipe.by") or entry.get("userName") or entry.get("engineInfo", "")
    removed = ("raypipe.removed", "num_deleted_rows", "numDeletedRows")
    return {
        "version": entry["version"],
        "timestamp_ms": entry["timestamp"],
        "operation": entry["operation"],
        "who": who,
        "why": entry.get("raypipe", ""),
        "from": entry.get(SOURCE, ""),
        "added": _first_number({**metrics, **entry}, "num_added_rows", "numOutputRows", ADDED),
        "removed": _first_number({**metrics, **entry}, *removed),
        "relabelled": _first_number(entry, "raypipe.relabelled"),
        "changes": entry["changes"],
        "tags": names,
    }


def _first_number(entry: dict[str, Any], *names: str) -> int | None:
    """The first of these values that is present; engines write numbers as text too."""
    for name in names:
        if entry.get(name) is not None:
            text = str(entry[name])
            return int(text) if text.isdigit() else None
    return None
