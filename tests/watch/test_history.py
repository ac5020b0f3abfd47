"""Which checks a policy looks at, and in which order."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.config import RunConfig
from raypipe.tables.table import append
from raypipe.watch import check, history
from raypipe.watch.settings import WatchConfig

WATCH = WatchConfig()


def kept(run: RunConfig, about: str, window: int | None, drift: bool, at: str) -> None:
    row = dict.fromkeys(check._ROW.names) | {"key": f"{about} {at}", "name": "batch"}
    row |= {"model": "m/1", "table": "t@v1", "about": about, "window": window, "is_drift": drift}
    row |= {"checked_at": at}
    append(WATCH.place(run, "drift"), pa.Table.from_pylist([row], check._ROW), "check")


def drifts(run: RunConfig) -> list[bool]:
    return [one.is_drift for one in history.checks(run, WATCH, "m/1", None)]


def test_checks_are_in_the_order_of_their_commits(tmp_path: Path) -> None:
    """Of a table that was made again, the windows are numbered anew; a clock may go back; and
    whole versions have no number."""
    run = RunConfig(name="a", dir=str(tmp_path))
    for number in (1, 2, 3):
        kept(run, f"old {number}", number, True, f"2026-01-0{number}")
    for number in (1, 2):
        kept(run, f"new {number}", number, False, f"2025-12-0{number}")
    assert drifts(run) == [True, True, True, False, False]
    kept(run, "version 7", None, True, "2025-01-01")
    assert drifts(run)[-2:] == [False, True]
    kept(run, "new 2", 2, True, "2026-02-01")
    assert drifts(run) == [True, True, True, False, True, True]


def test_what_a_check_costs_is_read_with_it(tmp_path: Path) -> None:
    run = RunConfig(name="a", dir=str(tmp_path))
    kept(run, "old", None, True, "2026-01-01")
    row = dict.fromkeys(check._ROW.names) | {"key": "new", "name": "batch", "model": "m/1"}
    row |= {"table": "t@v1", "about": "new", "is_drift": True, "checked_at": "2026-01-02"}
    row |= {"accuracy": 0.8, "accuracy_low": 0.7, "accuracy_high": 0.9, "accuracy_known": 0.9}
    append(WATCH.place(run, "drift"), pa.Table.from_pylist([row], check._ROW), "check")
    old, new = history.checks(run, WATCH, "m/1", None)
    assert old.severity.loss is None and new.severity.loss == pytest.approx((0.1, 0.0, 0.2))
