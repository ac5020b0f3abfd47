"""Labelled images that the champion has not seen."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa

from raypipe.config import validate
from raypipe.feed.dataset import Pinned, pin
from raypipe.registry.package import Package
from raypipe.tables.table import append
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
    return cast(Package, SimpleNamespace(info={"table": theirs, "made": made}))


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
