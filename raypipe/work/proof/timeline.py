"""All checks, decisions and alias moves of a model, in one order.

Four tables say what happened, and each has an order of its own: that of its commits, which no
clock can change. They are merged so that each table keeps its order, a decision comes before the
move that carried it out, and a check before what it called for. Only where neither says which came
first, the clocks do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

from raypipe import report
from raypipe.report.formats import chance
from raypipe.tables.appended import COMMIT
from raypipe.watch import feedback, severity

Kind = Literal["check", "call", "decision", "move"]
QUIET = "No drift: the champion stays"  # the policy's reason where nothing happened
FOLD = 3  # checks in a row without drift that become one line
NEVER = datetime.max.replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Happened:
    """One row of one of the tables.

    key: names it among its kind. order: its commit, or its number among the moves; None: the log
    has forgotten it. at: by the writer's clock; None if that is no time. after: keys of what came
    before it. is_back: its clock says earlier than the row before it.
    """

    kind: Kind
    key: str
    order: int | None
    at: datetime | None
    text: str
    is_alert: bool = False
    is_up: bool = False
    title: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    is_back: bool = False

    def summary(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "key": self.key,
            "order": self.order,
            "at": self.at.isoformat() if self.at else None,
            "clock_went_back": self.is_back,
            "text": self.text,
            **self.facts,
        }


def check(row: Mapping[str, Any]) -> Happened:
    """A row of drift checks."""
    is_drift, p_value = bool(row.get("is_drift")), row.get("p_value")
    p_text = "not known" if p_value is None else chance(float(p_value), row.get("alpha"))
    text = (
        f"{row.get('table')} against the reference of {row.get('model')}: p {p_text}, "
        f"{row.get('batch_images')} images; {severity.of_row(row)}"
    )
    measured = str(feedback.of_row(row))
    text += f"; {measured}" if measured else ""
    facts = {name: row.get(name) for name in ("name", "model", "table", "p_value", "is_drift")}
    word = "Drift" if is_drift else "No drift"
    return Happened(
        "check",
        str(row.get("key")),
        row.get(COMMIT),
        time_of(row.get("checked_at")),
        text,
        is_alert=is_drift,
        title=f"{word}: {row.get('name')}",
        facts=facts,
    )


def call(row: Mapping[str, Any]) -> Happened:
    """A row of decisions to retrain or not."""
    act = bool(row.get("act"))
    names = ("about", "name", "champion", "act")
    return Happened(
        "call",
        str(row.get("key")),
        row.get(COMMIT),
        time_of(row.get("decided_at")),
        str(row.get("reason")),
        is_up=act,
        title=f"Retrain of {row.get('champion')}"
        if act
        else f"No retrain of {row.get('champion')}",
        facts={name: row.get(name) for name in names},
        after=(str(row.get("about")),),
    )


def decision(row: Mapping[str, Any]) -> Happened:
    """A row of comparisons."""
    promoted = bool(row.get("promoted"))
    names = ("champion", "challenger", "table", "promoted")
    # A better one may be refused, as for its latency; and of few images nobody knows.
    word = "beats" if promoted else "does not replace"
    return Happened(
        "decision",
        str(row.get("key")),
        row.get(COMMIT),
        time_of(row.get("decided_at")),
        str(row.get("reason")),
        is_up=promoted,
        title=f"{row.get('challenger')} {word} {row.get('champion')}",
        facts={name: row.get(name) for name in names},
    )


def move(move: Any, alias: str) -> Happened:
    """A registry.moves.Move."""
    after = [str(move.evidence[name]) for name in ("decision", "check") if move.evidence.get(name)]
    ends = {"from": move.version_from, "to": move.version_to}
    before = "nothing" if move.version_from is None else f"version {move.version_from}"
    to = "nothing" if move.version_to is None else f"version {move.version_to}"
    note = f". {move.note}" if move.note else ""
    return Happened(
        "move",
        str(move.number),
        move.number,
        time_of(move.at),
        f"{move.why[:1].upper()}{move.why[1:]} by {move.who}, from {before}{note}",
        is_up=move.why == "promotion",
        is_alert=move.why == "rollback",
        title=f"The {alias} is {to}",
        facts={**ends, "who": move.who, "why": move.why, "note": move.note},
        # The key of a check ends the name of its page.
        after=tuple(key.rpartition("-")[2] for key in after),
    )


def time_of(value: Any) -> datetime | None:
    """A time in UTC from a text or a datetime; None for anything else. Without a zone it is UTC."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if not isinstance(value, datetime):
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return aware.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def merge(*tables: Sequence[Happened]) -> list[Happened]:
    """All rows in one order, oldest first; each table is in its own order already."""
    queues = [deque(_marked(table)) for table in tables]
    known = {row.key for table in tables for row in table if row.kind != "move"}
    done: set[str] = set()
    merged: list[Happened] = []
    while any(queues):
        heads = [queue for queue in queues if queue]
        ready = [q for q in heads if all(key in done for key in q[0].after if key in known)]
        # Records that contradict each other wait for one another: then the clock decides.
        queue = min(ready or heads, key=lambda q: q[0].at or NEVER)
        row = queue.popleft()
        merged.append(row)
        if row.kind != "move":
            done.add(row.key)
    return merged


def _marked(table: Sequence[Happened]) -> list[Happened]:
    """With a mark on each row whose clock says earlier than the row before it."""
    from dataclasses import replace

    marked, last = [], None
    for row in table:
        is_back = last is not None and row.at is not None and row.at < last
        marked.append(replace(row, is_back=is_back))
        last = row.at or last
    return marked


def events(rows: Sequence[Happened]) -> tuple[report.Event | report.Folded, ...]:
    """As a page shows them, newest first; runs of checks without drift are folded."""
    shown: list[report.Event | report.Folded] = []
    quiet: list[Happened] = []

    def close() -> None:
        checks = sum(1 for row in quiet if row.kind == "check")
        if checks < FOLD:
            shown.extend(_event(row) for row in quiet)
        else:
            span = f"{_day(quiet[-1])} to {_day(quiet[0])}"
            title = f"{checks} checks without drift"
            shown.append(report.Folded(title, span, tuple(map(_event, quiet))))
        quiet.clear()

    for row in reversed(rows):
        is_quiet = row.kind == "check" and not row.is_alert
        # What such a check led to: nothing.
        is_quiet |= row.kind == "call" and row.text == QUIET
        if is_quiet and not row.is_back:
            quiet.append(row)
            continue
        close()
        shown.append(_event(row))
    close()
    return tuple(shown)


def _event(row: Happened) -> report.Event:
    tone: report.Tone = "quiet"
    if row.is_alert:
        tone = "alert"
    elif row.is_up:
        tone = "up"
    elif row.kind == "check":
        tone = "good"
    at = f"{row.at:%Y-%m-%d %H:%M} UTC" if row.at else "no time"
    return report.Event(at, row.title, row.text, tone, "clock went back" if row.is_back else "")


def _day(row: Happened) -> str:
    return f"{row.at:%Y-%m-%d}" if row.at else "no time"
