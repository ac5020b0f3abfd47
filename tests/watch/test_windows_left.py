"""Two checks of one window: one fails and leaves it, the other one finishes it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.tables.table import TableConfig, append
from raypipe.watch.settings import WatchConfig
from raypipe.watch.window_log import Entry
from raypipe.watch.windows import Window, Windows

NOW = datetime(2026, 11, 25, tzinfo=UTC)


def opened(windows: Windows, version: int, images: int) -> Window:
    """Window 1, up to this version. No connection to Ray is needed to say so."""
    state = f"rows of v{version}"
    entry = Entry(0, "opened", 1, None, version, state, images, NOW)
    assert windows.log.add(entry, "batch", "t")
    pinned = windows._table.pin(version)
    return Window(1, None, pinned, state, None, images, f"key of v{version}")


@pytest.fixture
def both(tmp_path: Path) -> tuple[Windows, Windows]:
    uri = str(tmp_path / "t")
    for name in "ab":
        append(uri, pa.table({"image_id": [name], "image": [b"x"], "split": ["train"]}), "add")
    run = RunConfig(name="m", dir=str(tmp_path / "run"))
    made = [Windows(TableConfig(uri=uri), WatchConfig(), run, print) for _ in range(2)]
    return made[0], made[1]


def events(windows: Windows) -> list[tuple[str, int]]:
    windows.log.refresh()
    return [(entry.event, entry.version) for entry in windows.log.entries]


def test_who_is_late_does_not_say_that_a_newer_window_was_checked(
    both: tuple[Windows, Windows],
) -> None:
    """Else the images that came between them were in no check."""
    slow, other = both
    old = opened(slow, 0, 1)
    other.log.refresh()
    other.leave(old)
    new = opened(other, 1, 2)
    slow.log.refresh()
    slow.checked(old, "evidence", ("p", "k"))
    slow.leave(old)
    assert events(other) == [("opened", 0), ("left", 0), ("opened", 1)]
    other.checked(new, "evidence", ("p", "k"))
    assert events(other)[-1] == ("checked", 1)


def test_a_window_that_was_left_and_checked_all_the_same_is_checked(
    both: tuple[Windows, Windows],
) -> None:
    slow, other = both
    old = opened(slow, 0, 1)
    other.log.refresh()
    other.leave(old)
    for windows in both:
        windows.checked(old, "evidence", ("p", "k"))
    assert events(other) == [("opened", 0), ("left", 0), ("checked", 0)]


def test_a_log_that_went_away_is_said(both: tuple[Windows, Windows]) -> None:
    """Else the check would end as if it had been noted."""
    slow, _ = both
    old = opened(slow, 0, 1)
    Path(slow.log.uri).rename(slow.log.uri + " elsewhere")
    with pytest.raises(DataError, match=r"no longer a table.*the next run begins anew.*all images"):
        slow.log.refresh()
    for call in (lambda: slow.checked(old, "evidence", ("p", "k")), lambda: slow.leave(old)):
        with pytest.raises(DataError, match=r"no longer a table.*bring the table back"):
            call()
