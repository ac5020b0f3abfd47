"""What a manifest says is there, and what could not be sent is not said to have been."""

from __future__ import annotations

import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raypipe.artifacts import bundle, outbox, run_log
from raypipe.artifacts.settings import ArtifactsConfig
from raypipe.config import RunConfig
from raypipe.files import write_atomic
from raypipe.tables.objects import Objects

from .test_outbox import manifests, warnings

log = logging.getLogger("raypipe")


@dataclass
class Run:
    """A run's folder with a report and a package, and a folder that stands for a store."""

    root: Path
    target: Path

    @classmethod
    def made(cls, root: Path) -> Run:
        (root / "package").mkdir(parents=True)
        (root / "package" / "model.bin").write_bytes(os.urandom(1000))
        (root / "report.html").write_text("first")
        return cls(root, root.parent / "bucket")

    def sends(self, key: str, files: bool = True, uri: Path | str | None = None) -> None:
        run = RunConfig(name="cells", dir=str(self.root))
        cfg = ArtifactsConfig(uri=str(uri or self.target))
        with outbox.sent(run, cfg, "train") as outgoing:
            outgoing.key = key
            if files:
                outgoing.files["report.html"] = self.root / "report.html"
                outgoing.files["package"] = self.root / "package"

    def sends_in_vain(self, key: str) -> None:
        """The store is down."""
        self.target.write_text("a file where the bucket should be")
        self.sends(key)
        self.target.unlink()

    def pending(self) -> list[str]:
        return [p.name for p in (self.root / "artifacts" / "pending").glob("*.json")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.made(tmp_path / "run")


def names(found: dict[str, Any]) -> set[str]:
    return {name for name in found["files"] if not name.startswith("logs/")}


BOTH = {"report.html", "package/model.bin"}


def test_a_folder_that_moved_since_is_sent_from_where_it_is(run: Run) -> None:
    run.sends_in_vain("first")
    moved = Run(run.root.rename(run.root.with_name("moved")), run.target)
    moved.sends("second", files=False)
    first, _ = manifests(run.target)
    assert names(first) == BOTH and len(first["files"]) == 3 and not moved.pending()


def test_files_deleted_before_they_could_be_sent_are_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.sends_in_vain("first")
    (run.root / "report.html").unlink()
    caplog.clear()
    run.sends("second", files=False)
    first, _ = manifests(run.target)
    assert names(first) == {"package/model.bin"} and first["missing"] == ["report.html"]
    (warning,) = warnings(caplog)
    assert "report.html" in warning and "deleted before" in warning


def test_what_somebody_deleted_from_the_store_is_sent_again(run: Run) -> None:
    run.sends("key")
    place = run.target / "cells" / "train-key"
    (place / "report.html").unlink()
    next((place / "logs").iterdir()).unlink()
    run.sends("key")
    (found,) = manifests(run.target)
    assert names(found) == BOTH and len(found["files"]) == 3


def test_a_report_drawn_again_during_its_upload_has_the_hash_of_what_was_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Objects.write
    drawn = []

    def draws_first(self: Objects, name: str, content: Any) -> None:
        if name.endswith("report.html"):
            drawn.append((run.root / "report.html").write_text("second"))
        write(self, name, content)

    monkeypatch.setattr(Objects, "write", draws_first)
    run.sends("key")
    assert drawn and len(manifests(run.target)) == 1


def test_runs_of_one_folder_at_once_are_all_listed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads the manifest, adds its log, and writes it back."""
    write = Objects.write

    def slow(self: Objects, name: str, content: Any) -> None:
        time.sleep(0.02)
        write(self, name, content)

    monkeypatch.setattr(Objects, "write", slow)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(run.sends, "key") for _ in range(4)]:
            done.result()
    (found,) = manifests(run.target)
    assert len(found["files"]) == 2 + 4


def test_a_kill_between_two_manifests_leaves_no_log_out(run: Run) -> None:
    run.sends("key")
    # Its report was to be replaced.
    (run.target / "cells" / "train-key" / bundle.MANIFEST).unlink()
    (run.root / "report.html").write_text("second")
    run.sends("key")
    (found,) = manifests(run.target)
    assert len(found["files"]) == 2 + 2


def test_a_record_that_cannot_be_sent_holds_up_no_other(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.sends_in_vain("first")
    folder = run.root / "artifacts" / "pending"
    content = json.loads((folder / run.pending()[0]).read_text())
    # It sorts before all others, and its place is a file.
    (folder / "0.json").write_text(
        json.dumps({**content, "place": "cells/train-second/report.html"})
    )
    (folder / "1.json").write_text('{"format": 1}')
    caplog.clear()
    run.sends("second")
    assert len(manifests(run.target)) == 2 and sorted(run.pending()) == ["0.json", "1.json"]
    (warning,) = warnings(caplog)
    assert "of an earlier run" in warning and "0.json" in warning


def test_records_for_another_uri_are_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    wrong = run.root.parent / "wrong"
    wrong.write_text("a file where the bucket should be")
    run.sends("first", uri=wrong)
    run.sends("second")
    assert f"1 earlier runs wait for artifacts.uri={wrong}" in caplog.text and run.pending()


def test_the_same_place_written_otherwise_is_the_same(run: Run) -> None:
    run.sends_in_vain("first")
    run.sends("second", uri=f"file://{run.target}/")
    assert len(manifests(run.target)) == 2 and not run.pending()


def test_without_room_for_the_record_all_is_sent_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def full(path: Path, content: str) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write_atomic(path, content)

    monkeypatch.setattr("raypipe.artifacts.outbox.write_atomic", full)
    run.sends("key")
    (found,) = manifests(run.target)
    assert len(calls) == 2 and names(found) == BOTH and not run.pending()


def test_a_log_that_reached_its_end_still_says_why(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MOST_BYTES", 100)
    cfg = ArtifactsConfig(uri=str(run.target))
    with (
        pytest.raises(RuntimeError),
        outbox.sent(RunConfig(dir=str(run.root)), cfg, "train"),
    ):
        log.info("x" * 200)
        raise RuntimeError("the reason")
    (text,) = (p.read_text() for p in run.target.rglob("*.log"))
    assert "The log ends here" in text and "the reason" in text


def test_a_message_that_does_not_fit_its_values_ends_no_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = run_log._File(run.root / "a.log")
    handler.emit(logging.LogRecord("raypipe", logging.INFO, "", 0, "%d epochs", ("x",), None))
    try:
        raise ValueError("inner")
    except ValueError as e:
        info = (type(e), e, e.__traceback__)
        handler.emit(logging.LogRecord("raypipe", logging.ERROR, "", 0, "outer", (), info))
    handler.close()
    assert "ValueError: inner" in (run.root / "a.log").read_text()


def test_a_name_that_is_no_utf8_is_a_name() -> None:
    assert bundle.segment("a\udcff") != bundle.segment("a\udcfe")
