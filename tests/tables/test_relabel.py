"""Labels that arrive later or change become a new version; what one ingest says twice in two ways
is believed in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import validate
from raypipe.tables import ingest as room
from raypipe.tables import relabel, scan, verdicts, versions
from raypipe.tables.clean import CleanConfig, known_as, rules
from raypipe.tables.ingest import IngestConfig, IngestResult, ingest, quarantine_uri
from raypipe.tables.table import ImageTable, TableConfig
from tests.tables.handmade import drop

Draw = Callable[..., bytes]
Labels = dict[str, "str | None"]


@pytest.fixture
def table(tmp_path: Path) -> TableConfig:
    return TableConfig(uri=str(tmp_path / "cells"))


@pytest.fixture
def folder(tmp_path: Path, textured: Draw) -> Path:
    """Twelve images."""
    (tmp_path / "photos").mkdir()
    for seed in range(12):
        (tmp_path / "photos" / f"{seed:02d}.png").write_bytes(textured(seed, 32))
    return tmp_path / "photos"


def take(
    table: TableConfig, folder: Path, labels: Labels | None, name: str = "line", **more: Any
) -> IngestResult:
    """Ingest the folder with these labels; None: without."""
    source: dict[str, Any] = {"images": str(folder), "labelled": False}
    if labels is not None:
        file = folder.parent / f"{name}.csv"
        file.write_text(
            "file,label\n" + "".join(f"{f},{label or ''}\n" for f, label in labels.items())
        )
        source = {"images": str(folder), "labels": str(file)}
    return ingest(
        table, validate(IngestConfig, {"from": source, "name": name, "workers": 0} | more)
    )


def named(labels: list[str | None]) -> Labels:
    return {f"{i:02d}.png": label for i, label in enumerate(labels)}


def held(table: TableConfig, *columns: str) -> dict[str, Any]:
    opened = ImageTable(table.uri)
    rows = scan.rows(opened, opened.pin(), ["path", *columns]).to_pylist()
    return {r.pop("path"): next(iter(r.values())) if len(columns) == 1 else r for r in rows}


def test_labels_that_arrive_later_are_a_new_version_that_says_who_and_why(
    table: TableConfig, folder: Path
) -> None:
    first = take(table, folder, None)
    assert (first.accepted, first.unlabelled) == (12, 12)
    before = held(table, "image_id", "split", "family", "image")
    labels = named(["a", "b"] * 6)
    done = take(table, folder, labels, "labelling desk")
    assert (done.accepted, done.present, done.relabelled, done.version.version) == (0, 12, 12, 1)
    assert held(table, "label") == labels
    assert held(table, "image_id", "split", "family", "image") == before
    opened = ImageTable(table.uri)
    entry = opened.history()[0]
    assert (entry["why"], entry["relabelled"], bool(entry["who"])) == (
        "relabel by ingest labelling desk",
        12,
        True,
    )
    changed = versions.diff(opened, first.version, done.version)
    assert (changed.added, changed.removed, changed.moved) == ([], [], [])
    assert changed.relabelled == sorted(
        (before[path]["image_id"], None, label) for path, label in labels.items()
    )


def test_a_label_that_changes_changes_and_again_is_nothing(
    table: TableConfig, folder: Path
) -> None:
    take(table, folder, named(["a"] * 12))
    corrected = named(["a"] * 10 + ["b", "c"])
    done = take(table, folder, corrected)
    assert (done.relabelled, held(table, "label")) == (2, corrected)
    again = take(table, folder, corrected)
    assert (again.relabelled, again.version) == (0, done.version)
    assert ImageTable(table.uri).pin() == done.version


def test_without_a_label_a_known_image_keeps_its_own(table: TableConfig, folder: Path) -> None:
    labels = named(["a", "b"] * 6)
    first = take(table, folder, labels)
    assert take(table, folder, None).version == first.version
    done = take(table, folder, named([None] * 11 + ["c"]))
    assert (done.relabelled, held(table, "label")) == (1, labels | {"11.png": "c"})


@pytest.mark.parametrize("rows_a_commit", [20_000, 4], ids=["one commit", "several"])
@pytest.mark.parametrize(
    ("by", "before"),
    [(None, None), ("line", "a"), ("line", "before"), ("other", "b"), ("other", "before")],
    ids=["new", "own contested", "own third", "another's contested", "another's third"],
)
def test_two_labels_in_one_ingest_are_quarantined_and_neither_is_believed(
    by: str | None,
    before: str | None,
    rows_a_commit: int,
    table: TableConfig,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """00 and 99 are one image; 01 and 98 too, and agree; 02's copy has no label."""
    monkeypatch.setattr(room, "ROWS_PER_COMMIT", rows_a_commit)
    monkeypatch.setattr("raypipe.tables.verify.CHUNK_BYTES", 1)
    if by:
        take(table, folder, named([before] * 12), by)
    for copy, of in (("99.png", "00.png"), ("98.png", "01.png"), ("97.png", "02.png")):
        (folder / copy).write_bytes((folder / of).read_bytes())
    labels = named(["a"] * 12) | {"99.png": "b", "98.png": "a", "97.png": None}
    done = take(table, folder, labels)
    assert done.reasons == {relabel.REASON: 1}
    assert done.seen == done.accepted + done.present + done.duplicates + done.quarantined == 15
    # A label that is none of the two is not contradicted.
    kept = "before" if before == "before" else None
    assert held(table, "label") == named(["a"] * 12) | {"00.png": kept}
    quarantine = ImageTable(quarantine_uri(table.uri))
    rejects = scan.rows(
        quarantine, quarantine.pin(), ["path", "label", "reason", "detail"]
    ).to_pylist()
    assert [(r["path"], r["label"], r["reason"]) for r in rejects] == [
        ("99.png", "b", relabel.REASON)
    ]
    assert "00.png, the same image, says 'a'" in rejects[0]["detail"]
    newest, rejected = ImageTable(table.uri).pin(), quarantine.pin()
    again = take(table, folder, labels)
    assert (again.accepted, again.relabelled, ImageTable(table.uri).pin()) == (0, 0, newest)
    assert quarantine.pin() == rejected
    (folder / "99.png").unlink()
    labels.pop("99.png")
    assert take(table, folder, labels).relabelled == 1  # the source agrees with itself again
    assert held(table, "label")["00.png"] == "a"


@pytest.mark.parametrize("label", ["ok", "fine"])
@pytest.mark.parametrize("who", ["line", "expert"])
def test_who_added_an_image_says_nothing_of_whose_label_it_has(
    who: str, label: str, table: TableConfig, folder: Path
) -> None:
    """line adds images, expert labels them, and then one of both contradicts itself: the label of
    the expert was taken away by any contradiction of line's, and stayed whatever the expert's own.
    """
    take(table, folder, None, "line")
    take(table, folder, named([label] * 12), "expert")
    (folder / "99.png").write_bytes((folder / "00.png").read_bytes())
    done = take(table, folder, named(["ok"]) | {"99.png": "bad"}, who)
    expected = None if label == "ok" else "fine"
    assert (done.reasons, held(table, "label")["00.png"]) == ({relabel.REASON: 1}, expected)
    assert (done.relabelled, done.labels_removed) == ((1, 1) if label == "ok" else (0, 0))


def test_a_label_is_found_wherever_in_the_source_it_stands(
    table: TableConfig, folder: Path
) -> None:
    (folder / "99.png").write_bytes((folder / "00.png").read_bytes())
    done = take(table, folder, named([None] + ["a"] * 11) | {"99.png": "b"})
    assert (done.accepted, done.duplicates, done.quarantined, done.relabelled) == (12, 1, 0, 0)
    assert held(table, "label") == named(["b"] + ["a"] * 11)


def test_relabels_at_once_lose_nothing(table: TableConfig, folder: Path) -> None:
    """Each corrects other images of the same file."""
    take(table, folder, named(["a"] * 12))
    halves = [dict(list(named(["b"] * 12).items())[i::3]) for i in range(3)]
    for i, half in enumerate(halves):
        (folder.parent / str(i)).mkdir()
        for path in half:
            (folder.parent / str(i) / path).write_bytes((folder / path).read_bytes())
    with ThreadPoolExecutor(3) as pool:
        done = list(
            pool.map(
                lambda i: take(table, folder.parent / str(i), halves[i], f"desk {i}"), range(3)
            )
        )
    assert [d.relabelled for d in done] == [4, 4, 4]
    assert held(table, "label") == named(["b"] * 12)
    assert len(held(table, "image_id")) == 12


@pytest.mark.parametrize("first_labels", [False, True], ids=["none", "others"])
def test_a_rival_that_commits_the_same_images_first_does_not_keep_our_labels_out(
    table: TableConfig,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    first_labels: bool,
) -> None:
    """The commit of another terminal had the same images, so it was taken for our own."""
    real, began = room.append_once, []

    def late(*given: Any, **more: Any) -> Any:
        if not began:
            began.append(True)
            take(table, folder, named(["b", "a"] * 6) if first_labels else None, "other terminal")
        return real(*given, **more)

    monkeypatch.setattr(room, "append_once", late)
    labels = named(["a", "b"] * 6)
    done = take(table, folder, labels)
    assert began and (done.accepted, done.present, done.relabelled) == (0, 12, 12)
    assert held(table, "label") == labels


def test_a_tag_keeps_the_labels_that_it_was_given_for(table: TableConfig, folder: Path) -> None:
    take(table, folder, named(["a"] * 12))
    opened = ImageTable(table.uri)
    opened.tag("golden")
    take(table, folder, named(["b"] * 12))
    for version, label in (("golden", "a"), (None, "b")):
        rows = scan.rows(opened, opened.pin(version), ["label"])
        assert rows["label"].to_pylist() == [label] * 12


def test_what_one_policy_dropped_comes_in_again_under_another(
    table: TableConfig, folder: Path
) -> None:
    first = take(table, folder, named(["a"] * 12)).version
    gone = sorted(held(table, "image_id").values())[:2]
    strict, lax = CleanConfig(dark=60), CleanConfig(dark=1)
    found = [verdicts.row(verdicts.Seen(i, "f", 0, i), "dark", dropped=True) for i in gone]
    verdicts.write(table.uri, first, "judged", rules(strict), found, 12, None)
    drop(ImageTable(table.uri), first, gone, "clean")
    cfg = validate(IngestConfig, {"from": {"images": str(folder), "labelled": False}, "workers": 0})
    assert ingest(table, cfg, policies=known_as(strict)).accepted == 0
    assert (
        ingest(table, cfg, policies=known_as(strict.model_copy(update={"tag": "golden"}))).accepted
        == 0
    )
    assert (
        ingest(table, cfg).accepted == 0
    )  # whoever names no policy gets none of what any has dropped
    assert ingest(table, cfg, policies=known_as(lax)).accepted == 2
