"""What a watched model's runs tell others, as frozen values.

All events of one piece of work have the same `run`. For a check it is the key of its evidence, made
from content: the row in the table `drift`, the MLflow run, and the evidence of a promotion have it
too. So check, decision, retrain, version and log lines are joined by one word.

An event's `id` is made from content as well, so that an event that is sent again, after a kill or a
lost answer, has the id that the receiver knows. Only a heartbeat has its time in it: two nights that
check the same rows are two signs of life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from raypipe.config import key_of
from raypipe.registry.promote import ModelVersion
from raypipe.watch.check import CheckResult
from raypipe.watch.retrain import RetrainResult

FORMAT = 1
Kind = Literal["check", "missed", "decision", "retrain", "promotion", "heartbeat"]


@dataclass(frozen=True)
class Event:
    """One thing that happened. `at`: UTC, ISO 8601. `facts`: JSON values alone.

    text: the same in a line for people.
    """

    kind: Kind
    run: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())

    @property
    def id(self) -> str:
        timed = self.at if self.kind == "heartbeat" else None
        return f"{self.kind}-{key_of('event', FORMAT, self.kind, self.run, self.facts, timed)}"

    def as_json(self) -> dict[str, Any]:
        told = {"format": FORMAT, "id": self.id, "kind": self.kind, "run": self.run, "at": self.at}
        return told | {"text": self.text, "facts": dict(self.facts)}


def run_of(checked: CheckResult | None, champion: ModelVersion, *forced: Any) -> str:
    """The word that joins all events of one piece of work.

    forced: what a retrain without a check is about, as its table's version.
    """
    return checked.key if checked is not None else key_of("forced", str(champion), *forced)


def of_check(checked: CheckResult) -> Event:
    """A check has finished."""
    found = checked.report
    said = "drifts" if found.is_drift else "does not drift"
    facts = {
        "name": checked.name,
        "model": checked.model,
        "table": str(checked.table),
        "is_drift": found.is_drift,
        "p_value": found.p_value,
        "images": found.batch_images,
    }
    text = f"{checked.name} {said} against {checked.model}: p={found.p_value:.3g}"
    return Event("check", checked.key, text, facts)


def missed(run: str, windows: Sequence[str]) -> Event:
    """A run found windows that no earlier run had read, though they were due."""
    text = f"{len(windows)} windows were missed and are read now: {', '.join(windows)}"
    return Event("missed", run, text, {"windows": list(windows)})


def state(run: str, name: str, **facts: Any) -> Event:
    """A retrain has come to a state, as `started` or `failed`."""
    return Event("retrain", run, f"The retrain has {name}", {"state": name, **facts})


def of_retrain(run: str, done: RetrainResult, before: int | None) -> list[Event]:
    """What was decided, whether the champion moved, and that the retrain has finished.

    before: the champion's version when the retrain began.
    """
    decision = done.decision
    facts = {"act": decision.act, "reason": decision.reason, "champion": str(done.champion)}
    challenger = str(done.challenger) if done.challenger else None
    events = [Event("decision", run, decision.reason, facts | {"challenger": challenger})]
    if done.challenger is not None and decision.act and done.challenger.version != before:
        moved = {"version_from": before, "version_to": done.challenger.version}
        text = f"{done.challenger} replaces version {before}"
        events.append(Event("promotion", run, text, {"model": done.challenger.name, **moved}))
    return [*events, state(run, "finished", challenger=challenger, training=done.key)]


def heartbeat(run: str, verb: str) -> Event:
    """A run has finished. A service that expects one each night misses it when none comes."""
    return Event("heartbeat", run, f"raypipe {verb} has finished", {"verb": verb})
