"""Windows: whatever happens to a table between two checks, each image is in one window."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError
from raypipe.serve import batch
from raypipe.serve.batch import Brought, Calls, PredictConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.watch.settings import WatchConfig
from raypipe.watch.windows import Waiting, Window, Windows
from tests.serve import test_since
from tests.serve.conftest import Registered, registered
from tests.serve.since_case import Case

__all__ = ["registered"]  # the fixture
pytestmark = pytest.mark.usefixtures("ray_session")


class Night:
    """A table, and the checks of it. Its clock goes an hour forward with each look."""

    def __init__(self, registered: Registered, folder: Path, **watch: Any) -> None:
        self.case = Case(registered, folder, [])
        self.run = RunConfig(name="mixed", dir=str(folder / "run"))
        self.source = TableConfig(uri=self.case.uri)
        # Small tables: the setting itself wants 20 images.
        self.watch = WatchConfig(**watch).model_copy(update={"min_images": 4})
        self.now = datetime(2026, 11, 1, tzinfo=UTC)
        self.said: list[str] = []

    def windows(self) -> Windows:
        return Windows(self.source, self.watch, self.run, self.said.append, lambda: self.now)

    def images(self, window: Window) -> tuple[Counter[tuple[str, str]], Brought]:
        """What is in a window, by its prediction."""
        pinned = self.source.model_copy(update={"version": window.version.version})
        model, store = self.case.registered.version, self.case.registered.store
        cfg = PredictConfig()
        if window.rows is None:
            made = batch.bring(store, self.run, pinned, cfg, Calls(), model)
        else:
            rows, key = window.rows, window.key
            made = batch.bring_rows(store, self.run, pinned, cfg, model, rows, key, Calls())
        found = batch.read_rows(made.uri, made.key, ["image_id", "sha256"]).to_pylist()
        return Counter((row["image_id"], row["sha256"]) for row in found), made

    def check(self) -> Counter[tuple[str, str]] | Waiting:
        """One night: the images that were checked, or that they wait."""
        windows = self.windows()
        window = windows.next()
        if isinstance(window, Waiting):
            return window
        found, made = self.images(window)
        # A window of the whole table has no number, and does not say how many it has.
        assert not window.number or sum(found.values()) == window.images
        windows.checked(window, f"evidence {window.number}", (made.uri, made.key))
        return Counter() if window.again else found

    def rows(self) -> Counter[tuple[str, str]]:
        """All images of the table now."""
        table = ImageTable(self.case.uri)
        rows = scan.rows(table, table.pin(), ["image_id", "image"]).to_pylist()
        return Counter((row["image_id"], sha256(row["image"]).hexdigest()) for row in rows)

    def events(self) -> list[tuple[str, int]]:
        return [(entry.event, entry.window) for entry in self.windows().log.entries]


@pytest.fixture
def night(registered: Registered, tmp_path: Path) -> Night:
    made = Night(registered, tmp_path)
    for start in (0, 10, 20):
        made.case.add(start, 10)
    return made


@pytest.mark.parametrize(
    "happens", [one for one, *_ in test_since.HAPPENS], ids=lambda happens: happens.__name__
)
def test_a_window_has_what_came_since_the_last_one(
    happens: Callable[[Case], None], night: Night
) -> None:
    assert night.check() == night.rows()
    before = night.rows()
    happens(night.case)
    came = night.rows() - before
    if sum(came.values()) < 4:
        waits = night.check()
        assert isinstance(waits, Waiting) if came else waits == Counter()
    else:
        assert night.check() == came
        came = Counter()
    # The next night has what waited, too.
    before = night.rows()
    night.case.add(50, 5)
    assert night.check() == came + (night.rows() - before)
    assert night.check() == Counter(), "nothing came since"


def test_few_images_wait_and_a_rerun_says_the_same(night: Night) -> None:
    night.check()
    night.case.add(30, 2)
    first, again = night.check(), night.check()
    assert isinstance(first, Waiting) and isinstance(again, Waiting)
    assert (first.images, first.needed, first.since) == (again.images, again.needed, 2) == (2, 4, 2)
    night.case.add(32, 2)
    found = night.check()
    assert isinstance(found, Counter) and {i for i, _ in found} == {"i30", "i31", "i32", "i33"}
    assert night.events() == [
        ("opened", 1),
        ("checked", 1),
        ("waiting", 2),
        ("opened", 2),
        ("checked", 2),
    ]


def test_two_at_once_share_a_window_though_images_came_between_them(night: Night) -> None:
    night.check()
    night.case.add(30, 5)
    one, other = night.windows(), night.windows()
    first = one.next()
    night.case.add(35, 5)
    second = other.next()
    assert isinstance(first, Window) and isinstance(second, Window)
    assert (first.key, first.images) == (second.key, second.images)
    _, made = night.images(first)
    one.checked(first, "evidence", (made.uri, made.key))
    other.checked(second, "evidence", (made.uri, made.key))
    assert night.events()[2:] == [("opened", 2), ("checked", 2)]
    rest = night.check()
    assert isinstance(rest, Counter) and {i for i, _ in rest} == {f"i{n}" for n in range(35, 40)}


def test_what_was_opened_before_a_kill_is_checked_first(night: Night) -> None:
    night.check()
    night.case.add(30, 5)
    killed = night.windows().next()
    night.case.add(35, 5)
    found = night.check()
    assert isinstance(killed, Window) and isinstance(found, Counter)
    assert {i for i, _ in found} == {f"i{n}" for n in range(30, 35)}


def test_an_opened_window_that_was_vacuumed_away_goes_into_the_next(night: Night) -> None:
    night.check()
    before = night.rows()
    night.case.add(30, 5)
    night.windows().next()
    # The version stays readable by its log, so the window stands until it fails.
    window = night.windows().next()
    assert isinstance(window, Window)
    night.windows().leave(window)
    night.case.add(35, 5)
    assert night.check() == night.rows() - before
    assert [event for event, _ in night.events()[2:]] == ["opened", "left", "opened", "checked"]


def test_a_table_that_was_restored_from_a_backup_loses_no_image(
    night: Night, tmp_path: Path
) -> None:
    night.check()
    backup = tmp_path / "backup"
    shutil.copytree(night.case.uri, backup)
    night.case.add(30, 5)
    night.check()
    shutil.rmtree(night.case.uri)
    backup.rename(night.case.uri)
    before = night.rows()
    night.case.add(60, 6)
    assert night.check() == night.rows() - before
    assert any("compared with those of earlier checks" in text for text in night.said)


def test_without_the_earlier_predictions_nobody_guesses(night: Night) -> None:
    night.check()
    test_since.optimized_vacuumed_and_appended(night.case)
    shutil.rmtree(night.run.path / "predictions")
    with pytest.raises(DataError, match=r"predictions of window 1 are gone.*watch\.window=all"):
        night.check()


@pytest.mark.parametrize("is_restored", [False, True])
def test_after_a_check_of_all_the_line_goes_on(night: Night, is_restored: bool) -> None:
    """The way out that the message names: one setting, for one night."""
    night.check()
    night.case.add(40, 5)
    night.check()
    if is_restored:
        DeltaTable(night.case.uri).restore(1)
        night.case.add(60, 4)
    else:
        test_since.optimized_vacuumed_and_appended(night.case)
    shutil.rmtree(night.run.path / "predictions")
    for _ in range(2):
        with pytest.raises(DataError, match=r"window=all: it looks at every image, and later"):
            night.check()

    since_last = night.watch
    night.watch = since_last.model_copy(update={"window": "all"})
    assert night.check() == night.rows()
    assert "Later checks begin behind this one, as window 3" in night.said
    assert night.check() == night.rows(), "the whole table, whenever it is asked for"
    night.watch = since_last
    assert night.check() == Counter(), "nothing came since"
    night.case.add(70, 5)
    assert sum(night.check().values()) == 5  # type: ignore[union-attr]
    # Nor do the windows count whose predictions are gone.
    DeltaTable(night.case.uri).restore(DeltaTable(night.case.uri).version() - 1)
    assert night.check() == Counter()
    night.case.add(80, 4)
    assert sum(night.check().values()) == 4  # type: ignore[union-attr]
    checked = [window for event, window in night.events() if event == "checked"]
    assert checked == [1, 2, 3, 4, 5]


def test_a_check_of_all_leaves_a_line_that_can_be_followed(night: Night) -> None:
    night.check()
    night.case.add(40, 5)
    since_last = night.watch
    night.watch = since_last.model_copy(update={"window": "all"})
    assert night.check() == night.rows()
    night.watch = since_last
    assert sum(night.check().values()) == 5  # type: ignore[union-attr]


def test_a_table_at_another_address_begins_anew_and_says_so(night: Night, tmp_path: Path) -> None:
    night.check()
    moved = tmp_path / "elsewhere"
    Path(night.case.uri).rename(moved)
    before, night.source = night.source, TableConfig(uri=str(moved))
    found = night.check()
    assert isinstance(found, Counter) and sum(found.values()) == 30
    [said] = night.said
    assert f"{moved} was checked as {before.uri} before, up to v2" in said and "anew" in said
    assert night.check() == Counter()
    # Another name is another line: nobody has to be told.
    night.watch = night.watch.model_copy(update={"name": "another"})
    night.windows().next()
    assert night.said == [said]


def test_a_table_made_again_begins_anew(night: Night) -> None:
    night.check()
    shutil.rmtree(night.case.uri)
    night.case.add(0, 6)
    assert night.check() == night.rows()


def test_missed_checks_are_named_and_a_clock_that_went_back_is_no_reason(night: Night) -> None:
    night.watch = night.watch.model_copy(update={"every_h": 24.0})
    night.check()
    last = night.now

    def missed_after(hours: float) -> str:
        night.now = last + timedelta(hours=hours)
        night.case.add(40, 1)
        window = night.windows().next()
        return window.missed

    assert missed_after(30) == ""
    assert missed_after(30 + 24 * 3 + 2) == (
        "2 checks did not run, or failed, since 2026-11-02 06:00 UTC"
    )
    assert "the clock stands before the last check" in missed_after(-48)
    # A night without images has run.
    night.now = last + timedelta(hours=8 * 24)
    for _ in range(2):
        assert isinstance(night.check(), Waiting) and isinstance(night.check(), Waiting)
        night.now += timedelta(hours=24)
    night.case.add(41, 5)
    assert isinstance(night.check(), Counter)
    for _ in range(2):
        night.now += timedelta(hours=24)
        assert night.check() == Counter() and night.check() == Counter()
    night.now += timedelta(hours=24)
    night.case.add(46, 5)
    window = night.windows().next()
    assert isinstance(window, Window) and window.missed == ""
    assert [event for event, _ in night.events()].count("nothing") == 4


def test_the_newest_images_stay_whole_commits(night: Night) -> None:
    night.watch = night.watch.model_copy(update={"window": "last_n", "last_n": 12})
    found = night.check()
    assert isinstance(found, Counter) and {i for i, _ in found} == {f"i{n}" for n in range(10, 30)}
    night.case.add(30, 12)
    found = night.check()
    assert isinstance(found, Counter) and {i for i, _ in found} == {f"i{n}" for n in range(30, 42)}
    night.watch = night.watch.model_copy(update={"last_n": 1000})
    assert night.check() == night.rows()
    assert night.events() == []


@pytest.mark.parametrize("given", [{"window": "all"}, {"window": "last_n", "last_n": 20}, {}])
def test_settings_that_do_nothing_with_such_a_window_are_named(
    given: dict[str, Any], night: Night
) -> None:
    """A check without its spans was taken for one that had found nothing by them."""
    night.watch = validate(WatchConfig, given | {"every_h": 24, "horizon": {"spans": [7]}})
    if not given:
        night.source = night.source.model_copy(update={"version": 1})
    night.windows().next()
    by = f"watch.window={given['window']}" if given else "watch.batch.version=1"
    assert [text.partition(": ")[0] for text in night.said] == [
        f"{name} has no effect with {by}" for name in ("watch.every_h", "watch.horizon.spans")
    ]
    night.said.clear()
    night.watch = validate(WatchConfig, given | {"horizon": {}})
    night.windows().next()
    assert not night.said


def last_of(night: Night) -> tuple[int | None, int]:
    """The version after which the newest images came, and how many they are."""
    window = night.windows().next()
    assert isinstance(window, Window)
    return window.since, window.images


def test_the_newest_images_are_found_at_any_distance(
    registered: Registered, tmp_path: Path
) -> None:
    """All 76 to 104 images were checked until there were 16 commits behind them."""
    night = Night(registered, tmp_path, window="last_n", last_n=40)
    night.case.add(0, 40)
    for commit in range(1, 17):
        night.case.add(40 + commit, 4)
        if commit >= 9:
            wanted = (None, 76) if commit == 9 else (commit - 10, 40)
            assert last_of(night) == wanted, commit


def test_the_newest_images_lie_behind_versions_that_cannot_be_read(
    registered: Registered, tmp_path: Path
) -> None:
    """Of versions 0 to 7 there is no log any more."""
    night = Night(registered, tmp_path, window="last_n", last_n=40)
    night.case.add(0, 40)
    for commit in range(1, 19):
        night.case.add(40 + commit, 4)
        if commit == 8:
            DeltaTable(night.case.uri).create_checkpoint()
            for number in range(8):
                (Path(night.case.uri) / "_delta_log" / f"{number:020d}.json").unlink()
        if commit == 16:
            assert last_of(night) == (None, 104), "nobody can tell"
    assert last_of(night) == (8, 40)
