"""Labelled images that the champion has not seen."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from raypipe.config import replace, validate
from raypipe.feed.dataset import Pinned, pin
from raypipe.images.smaller import Shape
from raypipe.registry.package import Package
from raypipe.tables.prepare.run import prepare
from raypipe.tables.table import append
from raypipe.train import learned
from raypipe.train.job import TrainJob
from raypipe.watch import labels


def grown(job: TrainJob, source: str) -> Pinned:
    """A table of two commits of 10 images with the same ids, all from one source."""
    for start in (0, 10):
        ids = [f"i{n}" for n in range(start, start + 10)]
        columns: dict[str, Any] = {"image_id": ids, "image": [b"x"] * 10, "source": [source] * 10}
        columns |= {"label": ["a", "b"] * 5, "split": ["train"] * 8 + ["val", "test"]}
        append(job.table.uri, pa.table(columns), "add")
    return pin(job.table, job.feed, kind="classification")


def trained(pinned: Pinned, **made: str) -> Package:
    version = pinned.version
    theirs = {"uri": version.uri, "version": version.version, "sources": ["old"]}
    return cast(Package, SimpleNamespace(info={"table": theirs, "made": made}, files={}))


def test_nothing_in_a_table_that_was_made_again_was_seen(tmp_path: Path) -> None:
    """At the same place, as many commits later, with the same ids: but other images."""
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path)}})
    pinned = grown(job, "old")
    package = trained(pinned, table_id=pinned.version.table_id)
    assert labels.new_labels(job, pinned, package) == {}
    shutil.rmtree(job.table.uri)
    again = grown(job, "new")
    assert labels.new_labels(job, again, package) == {"new": 16}
    assert labels.new_labels(job, again, trained(again)) == {}, "an earlier raypipe kept no id"


@pytest.mark.parametrize("has_source", [True, False])
def test_a_table_that_was_moved_says_by_the_package_what_is_new(
    has_source: bool, tmp_path: Path
) -> None:
    """Labels of known sources never counted, and without sources all rows were new."""
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path)}})
    name = "old" if has_source else labels.ALL
    for start in (0, 10):
        ids = [f"i{n}" for n in range(start, start + 10)]
        columns: dict[str, Any] = {"image_id": ids, "image": [b"x"] * 10}
        columns |= {"source": ["old"] * 10} if has_source else {}
        columns |= {"label": ["a", "b"] * 5, "split": ["train"] * 8 + ["val", "test"]}
        append(job.table.uri, pa.table(columns), "add")
    before = pin(job.table.model_copy(update={"version": 0}), job.feed, kind="single_label")
    now = pin(job.table, job.feed, kind="single_label")
    sources = ["old"] if has_source else []
    theirs = {"uri": "/moved", "version": 0, "sources": sources}

    def package(**files: bytes) -> Package:
        return cast(Package, SimpleNamespace(info={"table": theirs, "made": {}}, files=files))

    kept = learned.files(learned.of_training(job, before), learned.NONE_N2)
    assert labels.new_labels(job, now, package(**kept)) == {name: 8}
    assert labels.new_labels(job, before, package(**kept)) == {}
    # An older package does not say which rows: no source is new.
    assert labels.new_labels(job, now, package()) == {}


@pytest.mark.parametrize(
    ("hashes", "new"), [((True, True), 8), ((True, False), 0), ((False, True), 0)]
)
def test_a_new_photograph_under_a_known_id_is_new(
    hashes: tuple[bool, bool],
    new: int,
    tmp_path: Path,
    heard: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ids may be shared, as those of products. Only without a sha256 nothing else tells.

    An image that was encoded anew looks the same, so their number is told.
    """
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path)}})
    for commit, has_hash in enumerate(hashes):
        columns: dict[str, Any] = {"image_id": [f"p{n // 2}" for n in range(10)]}
        columns |= {"image": [b"x"] * 10, "label": ["a", "b"] * 5}
        columns |= {"split": ["train"] * 8 + ["val", "test"]}
        said = [f"{commit + 1}{n}" * 32 if has_hash else None for n in range(10)]
        columns["sha256"] = pa.array(said, pa.string())
        append(job.table.uri, pa.table(columns), "add")
    before = pin(job.table.model_copy(update={"version": 0}), job.feed, kind="single_label")
    now = pin(job.table, job.feed, kind="single_label")
    theirs = {"uri": "/moved", "version": 0, "sources": []}
    kept = learned.files(learned.of_training(job, before), learned.NONE_N2)
    package = SimpleNamespace(info={"table": theirs, "made": {}}, files=kept)
    assert sum(labels.new_labels(job, now, cast(Package, package)).values()) == new
    told = f"{new} of {new} new labelled images have an id that the champion knows, and other bytes"
    assert (told in caplog.text) == bool(new)


def test_what_a_replay_left_out_is_not_new(tmp_path: Path) -> None:
    """The package has no list of the old rows that a head on frozen features did not replay."""
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path)}})
    pinned = grown(job, "old")
    half_N2 = learned.of_training(job, pinned)[:8]
    info = {"table": {"uri": "/moved", "version": 0, "sources": ["old"]}, "made": {}}
    info["config"] = {"feed": {"leave_out": "/gone/x.json"}}
    package = SimpleNamespace(info=info, files=learned.files(half_N2, learned.NONE_N2))
    assert labels.new_labels(job, pinned, cast(Package, package)) == {}


@pytest.mark.parametrize("part", [{"sample": 0.5}, {"where": {"source": "old"}}])
def test_what_the_champion_left_out_is_new(part: dict[str, Any], tmp_path: Path) -> None:
    """Of a champion that was trained on a part of the rows, all rows counted as seen."""
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path)}})
    pinned = grown(job, "old")
    package = trained(pinned, table_id=pinned.version.table_id)
    package.info["config"] = {"table": part}
    # It has learned from 8 rows of 16; they are told by their ids, which are twice in the table.
    rows_N2 = learned.of_training(job, pinned)
    package.files.update(learned.files(rows_N2[:4], learned.NONE_N2))
    (count,) = labels.new_labels(job, pinned, package).values()
    assert count >= 8


def test_a_package_without_a_list_is_compared_by_versions(tmp_path: Path) -> None:
    job = validate(TrainJob, {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path)}})
    before, pinned = grown(job, "old"), grown(job, "old")
    package = trained(before, table_id=before.version.table_id)
    package.info["config"] = {"table": {"where": {"source": "old"}}}
    assert labels.new_labels(job, pinned, package) == {"old": 16}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("has_hashes", [True, False])
def test_a_prepared_table_has_the_labels_of_its_source(
    has_hashes: bool, textured: Any, tmp_path: Path
) -> None:
    """After table.uri was set to the copy, all of its rows counted as newly labelled."""
    source = {"table": {"uri": str(tmp_path / "t")}, "run": {"dir": str(tmp_path)}}
    job = validate(TrainJob, source)
    copied = {side_px: str(tmp_path / f"t{side_px}") for side_px in (24, 48)}

    def add(first: int) -> None:
        images = [textured(n, 64) for n in range(first, first + 10)]
        columns: dict[str, Any] = {"image_id": [f"p{n}" for n in range(10)], "image": images}
        columns |= {"label": ["a", "b"] * 5, "split": ["train"] * 8 + ["val", "test"]}
        if has_hashes:
            columns["sha256"] = [hashlib.sha256(image).hexdigest() for image in images]
        append(job.table.uri, pa.table(columns), "add")
        for side_px, uri in copied.items():
            prepare(job.table, uri, Shape(side_px))

    def package(trained: TrainJob) -> Package:
        pinned = pin(trained.table, trained.feed, kind="single_label")
        theirs = {"uri": pinned.version.uri, "version": 0, "sources": []}
        kept = learned.files(learned.of_training(trained, pinned), learned.NONE_N2)
        return cast(Package, SimpleNamespace(info={"table": theirs, "made": {}}, files=kept))

    def new(trained: Package, asked: TrainJob) -> int:
        pinned = pin(asked.table, asked.feed, kind="single_label")
        return sum(labels.new_labels(asked, pinned, trained).values())

    add(0)
    jobs = [job, *(replace(job, {"table.uri": uri}) for uri in copied.values())]
    champions = [package(one) for one in jobs]
    others = [(one, other) for one in range(3) for other in range(3) if one != other]
    assert [new(champions[one], jobs[other]) for one, other in others] == [0] * 6
    # New photographs under known ids: only a hash of the source's bytes tells them.
    add(10)
    assert new(champions[0], jobs[1]) == new(champions[0], jobs[2]) == (8 if has_hashes else 0)
