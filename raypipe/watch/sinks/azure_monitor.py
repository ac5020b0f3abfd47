"""Events as records of the stream RaypipeDrift_CL (raypipe/monitor/)."""

from __future__ import annotations

from typing import Any

from raypipe.monitor import streams
from raypipe.monitor.monitor import Monitor
from raypipe.watch.events import Event

# Columns of the facts that have one; `Facts` holds all of them.
_COLUMNS = {
    "Name": "name",
    "PValue": "p_value",
    "Drifted": "is_drift",
    "Images": "images",
    "Accuracy": "accuracy",
    "Act": "act",
    "State": "state",
}
_MODEL = ("model", "champion")


class AzureMonitor:
    """A record an event. The event's id is the record's: both are the same when sent again."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def send(self, event: Event) -> None:
        self._monitor.note(streams.DRIFT, record(event))


def record(event: Event) -> dict[str, Any]:
    """The columns of an event."""
    facts = event.facts
    values: dict[str, Any] = {
        "RecordId": event.id,
        "RunId": event.run,
        "TimeGenerated": event.at,
        "Kind": event.kind,
        "Text": event.text,
        "Model": next((facts[name] for name in _MODEL if facts.get(name) is not None), None),
        "Facts": dict(facts),
    }
    return values | {column: facts.get(name) for column, name in _COLUMNS.items()}
