"""What was checked and tried before: what a policy looks at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from raypipe.config import RunConfig
from raypipe.tables.commits import rows_named
from raypipe.watch import feedback, records, severity
from raypipe.watch.check import CheckResult
from raypipe.watch.cycle import Journal
from raypipe.watch.feedback import Feedback
from raypipe.watch.policy import Checked, Tried
from raypipe.watch.settings import WatchConfig
from raypipe.watch.severity import Severity


def checks(
    run: RunConfig,
    watch: WatchConfig,
    model: str,
    newest: CheckResult | None,
    seal: str | None = None,
) -> list[Checked]:
    """The checks of this model under watch.name, oldest first; of a window the last one counts.

    seal: of the model's package. Another registry may have a model of this name and number, and
    keep its checks in the same folder. An older raypipe kept no seal.
    """
    found: dict[Any, Checked] = {}
    about_newest: Any = None
    # In the order of their commits: clocks go back, and windows of another table, or of one that
    # was made again, have the same numbers.
    for row in records.checks(run, watch).rows:
        if (row.get("name"), row.get("model")) != (watch.name, model):
            continue
        if seal and row.get("seal") not in (None, seal):
            continue
        # An earlier check of the same, with other settings, goes.
        about = records.looked_at(row)
        found.pop(about, None)
        if newest is not None and row["key"] == newest.key:
            about_newest = about
        else:
            said = severity.of_row(row), feedback.of_row(row)
            found[about] = _checked(bool(row["is_drift"]), *said, _alarmed(row.get("evidence")))
    # The check that led here comes last, whatever the clocks say.
    if newest is None:
        return [*found.values()]
    # The same window may have been checked later, with settings that were changed back since.
    found.pop(about_newest, None)
    report = newest.report
    alarmed = {one.detector for one in report.evidence if one.is_drift}
    last = _checked(report.is_drift, report.severity, report.feedback, alarmed)
    return [*found.values(), last]


def _checked(is_drift: bool, estimated: Severity, says: Feedback, alarmed: set[str]) -> Checked:
    """Where labels alarm, the larger loss counts: the estimated one, or that which they measured.

    No estimate sees classes that look as before and mean something else. alarmed: detectors.
    """
    measured = Severity(says.measured, says.low, says.high, says.known)
    if feedback.DETECTOR not in alarmed or not says.is_share or measured.loss is None:
        return Checked(is_drift, estimated)
    # Images that are too far away for an estimate may cost more than was measured on others.
    is_unknown = estimated.loss is None and alarmed != {feedback.DETECTOR}
    if is_unknown or (estimated.loss is not None and estimated.loss[0] >= measured.loss[0]):
        return Checked(is_drift, estimated)
    return Checked(is_drift, measured, by_labels=True)


def _alarmed(evidence: object) -> set[str]:
    """The detectors that alarmed; none, where the text of a foreign row cannot be read."""
    try:
        return {str(one["detector"]) for one in json.loads(str(evidence)) if one["is_drift"]}
    except (ValueError, KeyError, TypeError):
        return set()


def count(watch: WatchConfig, run: RunConfig) -> int:
    """How many checks were kept under watch.name until now."""
    return len(_times(watch, run))


def _times(watch: WatchConfig, run: RunConfig) -> list[datetime]:
    """When the checks under watch.name were made, by their hosts, in the order of their commits."""
    place = watch.place(run, "drift")
    rows = rows_named(place, {"name": watch.name}, ["checked_at"], watch.storage_options)
    if not len(rows):
        return []
    return [datetime.fromisoformat(text) for text in rows["checked_at"].to_pylist()]


def tried(
    past: Journal, cycle: str, watch: WatchConfig, run: RunConfig, now: datetime
) -> list[Tried]:
    """Earlier retrains of this model, but this one: a retrain that has begun is gone on with.

    Checks since then are counted by their commits: the lease says how many there were before it.
    Times are those of the hosts that wrote, as far as the order of events allows them (`when`).
    """
    times = _times(watch, run)
    found: dict[str, Tried] = {}
    before: dict[str, int] = {}
    for place, event in enumerate(past.events):
        if event.cycle == cycle or event.event not in ("held", "trained", "ended"):
            continue
        hours = float(event.data.get("device_s", 0.0)) / 3600
        # A retrain that broke after its training, or was taken up again, has used them, too.
        if event.cycle in found:
            hours = max(hours, found[event.cycle].device_h)
        if "checks" in event.data:
            before[event.cycle] = int(event.data["checks"])
        known = before.get(event.cycle)
        # Leases of an older raypipe do not say: then clocks do.
        since = sum(time > event.at for time in times)
        earlier = [one.at for one in past.events[:place]]
        later = [one.at for one in past.events[place + 1 :]]
        if known is not None:
            since = max(0, len(times) - known)
            earlier += times[:known]
            later += times[known:]
        found[event.cycle] = Tried(when(event.at, earlier, later, now), since, hours)
    return list(found.values())


def when(
    at: datetime, before: Sequence[datetime], after: Sequence[datetime], now: datetime
) -> datetime:
    """When an event was, by clocks that may be wrong. before, after: what was committed earlier and
    later, by their own clocks. now: of this host.

    A time that has not come yet is wrong. The event was not after what followed it, so the earliest
    of that counts, and without any it was just now: it is not forgotten, and as soon as anything
    follows it grows old. A time before all that came earlier is wrong, too.
    """
    if at > now:
        at = min((time for time in after if time <= now), default=now)
    # The latest of the earlier times that may be right.
    return max((time for time in (*before, at) if time <= now), default=now)
