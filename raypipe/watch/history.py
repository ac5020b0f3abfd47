"""What was checked and tried before: what a policy looks at."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from raypipe.config import RunConfig
from raypipe.tables.commits import rows_named
from raypipe.watch import records, severity
from raypipe.watch.check import CheckResult
from raypipe.watch.cycle import Journal
from raypipe.watch.policy import Checked, Tried
from raypipe.watch.settings import WatchConfig


def checks(
    run: RunConfig, watch: WatchConfig, model: str, newest: CheckResult | None
) -> list[Checked]:
    """The checks of this model under watch.name, oldest first; of a window the last one counts."""
    found: dict[Any, Checked] = {}
    # In the order of their commits: clocks go back, and windows of another table, or of one that
    # was made again, have the same numbers.
    for row in records.checks(run, watch).rows:
        if (row.get("name"), row.get("model")) != (watch.name, model):
            continue
        # An earlier check of the same, with other settings, goes.
        about = records.looked_at(row)
        found.pop(about, None)
        if newest is None or row["key"] != newest.key:
            found[about] = Checked(bool(row["is_drift"]), severity.of_row(row))
    # The check that led here comes last, whatever the clocks say.
    last = [Checked(newest.report.is_drift, newest.report.severity)] if newest else []
    return [*found.values(), *last]


def tried(past: Journal, cycle: str, watch: WatchConfig, run: RunConfig) -> list[Tried]:
    """Earlier retrains of this model, but this one: a retrain that has begun is gone on with."""
    place = watch.place(run, "drift")
    rows = rows_named(place, {"name": watch.name}, ["checked_at"], watch.storage_options)
    times = (
        [datetime.fromisoformat(text) for text in rows["checked_at"].to_pylist()] if rows else []
    )
    found: dict[str, Tried] = {}
    for event in past.events:
        if event.cycle == cycle or event.event not in ("held", "ended"):
            continue
        hours = float(event.data.get("device_s", 0.0)) / 3600
        since = sum(time > event.at for time in times)
        found[event.cycle] = Tried(event.at, since, hours)
    return list(found.values())
