"""What a watched model's runs tell others, as frozen values.

All events of one piece of work have the same `run`. For a check it is the key of its evidence, made
from content: the row in the table `drift`, the MLflow run, and the evidence of a promotion have it
too. So check, decision, retrain, version and log lines are joined by one word.

An event's `id` is made from content as well: an event that is sent again, after a kill or a lost
answer, has the id that the receiver knows. Only a heartbeat has its time in it: two nights that
check the same rows are two signs of life.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from raypipe.config import key_of

FORMAT = 1
Kind = Literal["check", "missed", "decision", "retrain", "promotion", "heartbeat"]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    run: joins the events of one piece of work. text: the event in a line for people. facts: JSON
    values alone. at: UTC, ISO 8601.
    """

    kind: Kind
    run: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())

    @property
    def id(self) -> str:
        """The same for the same event, whenever it is sent."""
        timed = self.at if self.kind == "heartbeat" else None
        return f"{self.kind}-{key_of('event', FORMAT, self.kind, self.run, self.facts, timed)}"

    def as_json(self) -> dict[str, Any]:
        told = {"format": FORMAT, "id": self.id, "kind": self.kind, "run": self.run, "at": self.at}
        return told | {"text": self.text, "facts": dict(self.facts)}


def missed(run: str, which: str) -> Event:
    """Checks did not run when they were due, or failed; `which` in words. A run has their images
    now."""
    return Event("missed", run, f"Missed: {which}", {"missed": which})


def state(run: str, name: str, **facts: Any) -> Event:
    """A retrain has come to a state: `started`, `finished` or another one of its machine."""
    return Event("retrain", run, f"The retrain: {name}", {"state": name, **facts})


def heartbeat(run: str, verb: str) -> Event:
    """A run has finished. A service that expects one each night misses it when none comes."""
    return Event("heartbeat", run, f"raypipe {verb} has finished", {"verb": verb})
