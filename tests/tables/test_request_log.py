"""Replicas that write to one request log in turns: each image once, and no file read twice."""

from __future__ import annotations

from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable

from raypipe.tables import scan, snapshot
from raypipe.tables.request_log import RequestLog, RequestTables
from raypipe.tables.table import ImageTable
from tests.conftest import encode, striped

START = datetime(2026, 11, 1, tzinfo=timezone.utc)
IMAGES = [encode(striped(seed, "a")) for seed in range(12)]


def add(log: RequestLog, *numbers: int) -> None:
    images = {sha256(IMAGES[n]).hexdigest(): {"image": IMAGES[n], "time": START} for n in numbers}
    log.add(images, [])


def stored(root: Path) -> list[str]:
    table = ImageTable(str(root / "images"))
    return [str(name) for name in scan.rows(table, table.pin(), ["image_id"])["image_id"]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose footers are read."""
    files: list[str] = []
    read = snapshot.read_footer

    def noted(uri: str, path: str, *given: object) -> object:
        files.append(path)
        return read(uri, path, *given)

    monkeypatch.setattr(snapshot, "read_footer", noted)
    return files


def test_two_replicas_in_turns_read_what_is_new_and_store_each_image_once(
    tmp_path: Path, opened: list[str]
) -> None:
    """Each write read the ids of all images again: with two replicas, thousands of files every five
    seconds after some hours."""
    one, other = (RequestLog(RequestTables.below(str(tmp_path))) for _ in range(2))
    for n in range(8):
        add(one, n)
    add(other, 7, 8)
    assert len(opened) == 8
    opened.clear()
    add(one, 8, 9)
    add(other, 0, 9, 10)
    # Of `one`: the other's file, and its own since it last looked; of `other`: both.
    assert len(opened) <= 8 + 1 + 2
    opened.clear()
    add(one, 10, 11)
    add(other, 0, 11)
    assert len(opened) <= 4
    assert len(stored(tmp_path)) == len(set(stored(tmp_path))) == 12


def test_an_image_that_was_deleted_may_come_again(tmp_path: Path) -> None:
    one, other = (RequestLog(RequestTables.below(str(tmp_path))) for _ in range(2))
    add(one, 0, 1)
    add(other, 2)
    add(one, 3)
    gone = sha256(IMAGES[1]).hexdigest()
    DeltaTable(str(tmp_path / "images")).delete(f"image_id = '{gone}'")
    DeltaTable(str(tmp_path / "images")).optimize.compact()
    add(one, 0, 1, 2, 3)
    assert sorted(stored(tmp_path)) == sorted(sha256(image).hexdigest() for image in IMAGES[:4])


def test_what_a_server_stored_itself_may_be_deleted_or_moved_away(tmp_path: Path) -> None:
    """It knew the image, so it never stored it again: labels that came back were of no image."""
    log = RequestLog(RequestTables.below(str(tmp_path)))
    add(log, 0, 1)
    gone = sha256(IMAGES[1]).hexdigest()
    DeltaTable(str(tmp_path / "images")).delete(f"image_id = '{gone}'")
    add(log, 1)
    assert sorted(stored(tmp_path)) == sorted(sha256(image).hexdigest() for image in IMAGES[:2])
    (tmp_path / "images").rename(tmp_path / "archive")
    add(log, 0)
    assert stored(tmp_path) == [sha256(IMAGES[0]).hexdigest()]


def test_ids_are_looked_up_and_not_copied_for_each_image(tmp_path: Path) -> None:
    """Of 400,000 ids a copy took 33 ms an image, in which nobody got an answer."""

    class Ids:
        """An id can be looked up here. Whatever else is asked of it raises."""

        def __contains__(self, short: bytes) -> bool:
            return False

    log = RequestLog(RequestTables.below(str(tmp_path)))
    ids: Any = Ids()
    log._known, log._mine = ids, ids
    base: Any = SimpleNamespace(version=lambda: log._known_at)
    assert len(log._new({"0" * 64: {"image": b"x", "time": START}}, base)) == 1
