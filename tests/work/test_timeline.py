"""One order for four tables: each keeps its own, whatever the clocks say."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import pairwise

from raypipe.registry import quality_parts
from raypipe.registry.moves import Move
from raypipe.report import Event, Folded, formats
from raypipe.tables.appended import COMMIT
from raypipe.watch import comparison
from raypipe.work.proof import timeline
from raypipe.work.proof.timeline import Happened

DAY_1 = datetime(2026, 1, 1, 3, tzinfo=timezone.utc)


def night(number: int, days: float | None = None, is_drift: bool = False) -> Happened:
    at = DAY_1 + timedelta(days=number if days is None else days)
    row = {"key": f"c{number}", "name": "night", "model": "cells/1", "table": f"n@v{number}"}
    row |= {"p_value": 0.001 if is_drift else 0.5, "is_drift": is_drift}
    return timeline.check({**row, "checked_at": at.isoformat(), COMMIT: number})


def decided(key: str, days: float, commit: int = 0) -> Happened:
    row = {"key": key, "champion": "cells/1", "challenger": "cells/2", "promoted": True}
    at = DAY_1 + timedelta(days=days)
    return timeline.decision({**row, "reason": "", "decided_at": at.isoformat(), COMMIT: commit})


def moved(number: int, days: float, **evidence: str) -> Happened:
    at = DAY_1 + timedelta(days=days)
    return timeline.move(Move(number, 1, 2, at, "me", "promotion", "", evidence), "champion")


def called(number: int, reason: str = "No drift: the champion stays") -> Happened:
    at = DAY_1 + timedelta(days=number, hours=-20)  # by a clock that is behind
    row = {"key": f"w{number}", "about": f"c{number}", "champion": "cells/1", "act": False}
    return timeline.call({**row, "reason": reason, "decided_at": at.isoformat(), COMMIT: number})


def keys(rows: list[Happened]) -> list[str]:
    return [row.key for row in rows]


def test_a_clock_that_went_back_moves_no_row() -> None:
    nights = [night(0), night(1), night(2, days=-30), night(3)]
    merged = timeline.merge(nights, [], [])
    assert keys(merged) == ["c0", "c1", "c2", "c3"]
    assert [row.is_back for row in merged] == [False, False, True, False]


def test_a_move_comes_after_its_decision_and_that_after_its_table() -> None:
    """The host that moved the alias has a clock a year behind."""
    merged = timeline.merge(
        [night(0), night(1, is_drift=True)],
        [decided("d", 1.1)],
        [moved(1, -2), moved(2, -365, decision="d", check="drift-night-c1")],
    )
    assert keys(merged) == ["1", "c0", "c1", "d", "2"]


def test_what_a_check_called_for_comes_after_it_and_is_folded_where_nothing_happened() -> None:
    nights = [night(number, is_drift=number == 3) for number in range(8)]
    wait = "Drift, but no labelled images that the champion has not seen: waiting for labels"
    calls = [called(number) if number != 3 else called(3, wait) for number in range(8)]
    merged = timeline.merge(nights, calls, [], [])
    assert keys(merged) == [f"{kind}{number}" for number in range(8) for kind in "cw"]
    shown = timeline.events(merged)
    assert [type(row).__name__ for row in shown] == ["Folded", "Event", "Event", "Folded"]
    assert [row.title for row in shown if isinstance(row, Folded)] == [
        "4 checks without drift",
        "3 checks without drift",
    ]
    [waits] = [row for row in shown if not isinstance(row, Folded) and "No retrain" in row.title]
    assert waits.title == "No retrain of cells/1"


def test_records_that_wait_for_each_other_do_not_hang() -> None:
    # The second move says it carried out a decision whose table has it behind another's.
    merged = timeline.merge([], [decided("a", 1), decided("b", 2)], [moved(1, 0, decision="b")])
    assert keys(merged) == ["a", "b", "1"]
    assert keys(timeline.merge([], [], [moved(1, 0, decision="gone")])) == ["1"]
    assert timeline.merge([], [], []) == []


def test_hundreds_of_nights_are_a_page_that_can_be_read() -> None:
    nights = [night(i, is_drift=i in (100, 250)) for i in range(400)]
    shown = timeline.events(timeline.merge(nights, [], []))
    assert len(shown) == 5
    folded = [row for row in shown if isinstance(row, Folded)]
    assert [len(row.events) for row in folded] == [149, 149, 100]
    # None is lost, and the newest is first.
    times = [event.at for row in folded for event in row.events]
    assert len(times) == 398 and all(a >= b for a, b in pairwise(times))


def test_rows_without_a_time_or_with_a_broken_one_stay() -> None:
    rows = [timeline.check({"key": "a", "checked_at": "yesterday"}), timeline.check({"key": "b"})]
    merged = timeline.merge(rows, [decided("d", 0)], [])
    assert sorted(keys(merged)) == ["a", "b", "d"]
    assert all(event for event in timeline.events(merged))


def test_a_time_of_another_zone_is_told_in_utc() -> None:
    """The page said 03:30 UTC, where it was 01:30."""
    row = timeline.check({"key": "a", "checked_at": "2026-11-01T03:30:00+02:00"})
    [event] = timeline.events([row])
    assert isinstance(event, Event) and event.at == "2026-11-01 01:30 UTC"
    assert timeline.time_of("0001-01-01T00:00:00+02:00") is None


def test_what_is_nearly_all_or_nothing_is_not_called_so() -> None:
    """One mistake in 20,000 images was "100.0 %", above a picture of it."""
    assert quality_parts.percent(19_999 / 20_000) == "99.995 %"
    assert quality_parts.percent(1.0) == "100.0 %" and quality_parts.percent(0.0) == "0.0 %"
    assert quality_parts.percent(3e-5) == "0.003 %" and quality_parts.percent(0.876) == "87.6 %"
    assert comparison.points(11 / 30_000) == "+0.04 points"
    assert comparison.points(0) == "+0.0 points" and comparison.points(-0.051) == "-5.1 points"
    assert formats.points(-11 / 30_000) == "−0.04" and formats.points(0.0) == "+0.0"


def test_a_better_challenger_that_was_refused_is_not_beaten() -> None:
    row = {"key": "k", "champion": "cells/1", "challenger": "cells/2", "promoted": False}
    told = timeline.decision(row | {"reason": "Refused: latency. It is better: +4.0 points on all"})
    assert "cells/2 does not replace cells/1" in told.title
