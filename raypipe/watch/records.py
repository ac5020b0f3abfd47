"""What is kept of drift checks and decisions, as its two tables say it.

Read only. A table of an earlier or later raypipe has other columns; what is missing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raypipe.config import RunConfig
from raypipe.tables import appended
from raypipe.tables.appended import Appended
from raypipe.watch.settings import WatchConfig


def checks(run: RunConfig, watch: WatchConfig) -> Appended:
    """The drift checks, oldest commit first."""
    return appended.read(watch.place(run, "drift"), watch.storage_options, clock="checked_at")


def looked_at(row: Mapping[str, Any]) -> Any:
    """What a drift check was about: equal for two checks of the same images."""
    if row.get("about"):
        return row["about"]
    # An earlier raypipe kept numbers of windows; without one, the version is what was checked.
    table, window = str(row["table"]), row.get("window")
    return (table.rpartition("@v")[0] if window else table, window)


def decisions(run: RunConfig, watch: WatchConfig) -> Appended:
    """The comparisons of champion and challenger, oldest commit first."""
    place = watch.place(run, "decisions")
    return appended.read(place, watch.storage_options, clock="decided_at")


def calls(run: RunConfig, watch: WatchConfig) -> Appended:
    """The decisions to retrain or not, oldest commit first."""
    return appended.read(watch.place(run, "calls"), watch.storage_options, clock="decided_at")


def slices_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The slices that a decision compared; [] where its text cannot be read."""
    try:
        read = json.loads(row.get("slices") or "{}")
        found = read["slices"] if isinstance(read, dict) else read
        return [dict(one) for one in found]
    except (ValueError, KeyError, TypeError):
        return []


def limits_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """`named` slices and what was `measured`, of a decision; {} without limits, or where its text
    cannot be read."""
    read = _judged(row)
    return {name: read[name] for name in ("named", "measured") if read.get(name)}


def seals_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The seals of the packages that a decision compared, by NAME/N; those that are not known are
    left out. An older raypipe kept none."""
    seals = _judged(row).get("seals")
    if not isinstance(seals, list) or len(seals) != 2:
        return {}
    pairs = zip((row.get("champion"), row.get("challenger")), seals, strict=True)
    return {str(version): str(seal) for version, seal in pairs if seal}


def _judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a decision's row says as JSON; {} where it cannot be read, or is an older raypipe's."""
    try:
        read = json.loads(row.get("slices") or "{}")
    except (ValueError, TypeError):
        return {}
    return read if isinstance(read, dict) else {}


def decision_about(run: RunConfig, watch: WatchConfig, version: str) -> dict[str, Any] | None:
    """The newest comparison in which this version was the challenger; None without one."""
    mine = [row for row in decisions(run, watch).rows if row.get("challenger") == version]
    return mine[-1] if mine else None
