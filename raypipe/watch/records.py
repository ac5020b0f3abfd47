"""What a run's folder keeps of drift checks and decisions, as its two tables say it.

Read only. A table of an earlier or later raypipe has other columns; what is missing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raypipe.config import RunConfig
from raypipe.tables import appended
from raypipe.tables.appended import Appended

CHECKS, DECISIONS = "drift", "decisions"  # tables of a run's folder


def checks(run: RunConfig) -> Appended:
    """The drift checks of a run, oldest commit first."""
    return appended.read(str(run.path / CHECKS), clock="checked_at")


def decisions(run: RunConfig) -> Appended:
    """The comparisons of champion and challenger of a run, oldest commit first."""
    return appended.read(str(run.path / DECISIONS), clock="decided_at")


def slices_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The slices that a decision compared; [] where its text cannot be read."""
    try:
        read = json.loads(row.get("slices") or "{}")
        found = read["slices"] if isinstance(read, dict) else read
        return [dict(one) for one in found]
    except (ValueError, KeyError, TypeError):
        return []
