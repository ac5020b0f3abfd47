"""The queries of the dashboard and the alert on tables that real checks and predictions left.

The numbers are compared with what raypipe itself shows: the page and the JSON of each verb.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pytest

from raypipe.cli import verbs
from raypipe.cli.console import Console
from raypipe.config import validate
from raypipe.job import Job
from raypipe.report.formats import chance
from raypipe.serve import batch
from raypipe.tables.ingest import ingest
from raypipe.tables.ingest_config import IngestConfig
from raypipe.tables.table import TableConfig
from raypipe.watch import records
from tests.conftest import encode, striped
from tests.infra import delta_views
from tests.infra.delta_views import rows
from tests.local_spark import ROOT

pytestmark = pytest.mark.spark
TABLES = ("drift", "calls", "decisions", "windows", "predictions")


@dataclass
class Left:
    """What a story left: its job, what verbs said, and a Spark that has its tables as views."""

    job: Job
    said: dict[str, dict[str, Any]]
    spark: Any

    def rows(self, query: str, **given: Any) -> list[dict[str, Any]]:
        named = {name: name for name in TABLES if query.startswith(name)}
        return rows(self.spark, query, named | given)


def _add(job: Job, table: str, seeds: range, name: str, dark: bool = False) -> None:
    """Ingest pictures of warm and cold stripes, unlabelled; dark: of another light."""
    folder = Path(job.run.dir).parent / f"photos-{name}"
    folder.mkdir()
    for seed in seeds:
        picture = striped(seed, ("warm", "cold")[seed % 2])
        if dark:
            picture = picture.point(lambda value: value // 4)
        (folder / f"{seed}.png").write_bytes(encode(picture))
    source = {"images": str(folder), "labelled": False}
    ingest(TableConfig(uri=table), validate(IngestConfig, {"from": source, "name": name}))


@pytest.fixture(scope="module")
def story(
    ray_session: str, photos: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Left]:
    """One model, a calm night, a dark night, a night with too few images, and no labels."""
    folder = tmp_path_factory.mktemp("story")
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    splits = {"train": 0.4, "val": 0.4, "test": 0.2}  # a reference of 24 images
    night = str(folder / "night")
    job = validate(
        Job,
        {
            "table": {"uri": str(folder / "table")},
            "run": {"name": "cells", "dir": str(folder / "run")},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
            "train": {"epochs": 4, "batch_size": 10, "precision": "fp32"},
            "watch": {"batch": {"uri": night}, "name": 'night\'s "batch"', "min_images": 20},
            "predict": {"table": {"uri": night}, "since": "last"},
        },
    )
    cfg = {"from": source, "splits": splits, "stratify": True}
    ingest(job.table, validate(IngestConfig, cfg))
    console = Console(as_json=True)
    said = {"train": verbs.run("train", job, console)}
    _add(job, night, range(1000, 1040), "calm")
    said["calm"] = verbs.run("drift", job, console)
    said["predicted first"] = verbs.run("predict", job, console)
    _add(job, night, range(2000, 2040), "dark", dark=True)
    said["dark"] = verbs.run("drift", job, console)
    said["retrain"] = verbs.run("retrain", job, console)
    said["predicted"] = verbs.run("predict", job, console)
    _add(job, night, range(3000, 3005), "few")
    said["few"] = verbs.run("drift", job, console)
    with delta_views.session(folder / "warehouse") as spark:
        for name in TABLES:
            if (job.run.path / name).exists():
                delta_views.view(spark, job.run.path / name, folder)
        yield Left(job, said, spark)


@pytest.mark.share
def test_checks_are_those_of_the_page_and_of_the_json(story: Left) -> None:
    found = story.rows("drift")
    assert [row["name"] for row in found] == [story.job.watch.name] * 2
    for name, is_drift in (("dark", True), ("calm", False)):
        told = story.said[name]
        page = Path(told["report"]).read_text("utf-8")
        [row] = [r for r in found if r["p_value"] == told["p_value"]]
        assert row["is_drift"] == told["is_drift"] == is_drift
        assert row["key"] in told["report"] and row["model"] == told["model"]
        assert escape(chance(row["p_value"])) in page
    # The tests of the newest check, one by one.
    tests = story.rows("drift_evidence")
    page = Path(story.said["dark"]["report"]).read_text("utf-8")
    kept = json.loads(records.checks(story.job.run, story.job.watch).rows[-1]["evidence"])
    assert len(tests) == len(kept) > 1
    for one in kept:
        [mine] = [
            t for t in tests if (t["detector"], t["looks_at"]) == (one["detector"], one["on"])
        ]
        for name in ("statistic", "p_value", "threshold", "is_drift"):
            assert mine[name] == one[name]
        assert escape(chance(one["p_value"])) in page


@pytest.mark.share
def test_the_alert_counts_the_dark_night_and_not_the_calm_one(story: Left) -> None:
    [row] = story.rows("drift_alert", hours=26)
    assert (row["drifted"], row["checks"]) == (1, 2)
    assert row["what"] == f"{story.job.watch.name} of {story.said['dark']['model']}"
    [row] = story.rows("drift_alert", hours=0)
    assert (row["drifted"], row["checks"]) == (0, 0), "all checks are older than no hours"


@pytest.mark.share
def test_predictions_by_label_are_those_that_predict_told(story: Left) -> None:
    told = story.said["predicted"]
    found = {row["label"]: row["images"] for row in story.rows("predictions")}
    mine = {row["key"] for row in story.rows("predictions")}
    assert found == told["labels"] and sum(found.values()) == told["images"] == 80
    by_version = story.rows("predictions_by_version")
    added = {row["version"]: row["images"] for row in by_version if row["key"] in mine}
    assert all(row["is_finished"] for row in by_version) and sum(added.values()) in (40, 80)
    # The dark night was predicted as a window of its check, too.
    assert [r["images"] for r in by_version if r["made_by"] == "drift check"] == [40]
    for key in mine:
        out = f"{story.job.run.path}/predictions"
        labels = batch.read_rows(out, key, ["label"])["label"].to_pylist()
        assert Counter(labels) == found


@pytest.mark.share
def test_windows_and_answers_are_those_of_the_log(story: Left) -> None:
    [row] = story.rows("windows")
    assert (row["event"], row["images"], row["checked_windows"]) == ("waiting", 5, 2)
    kept = records.calls(story.job.run, story.job.watch).rows
    last = {row["about"]: row for row in kept}  # in the order of commits
    found = {row["check_key"]: row for row in story.rows("calls")}
    # Two checks, and the night that waits for more images.
    assert found.keys() == last.keys() and len(found) == 3
    for about, row in found.items():
        assert (row["act"], row["reason"]) == (last[about]["act"], last[about]["reason"])
    assert "labels" in story.said["retrain"]["reason"]
    assert story.said["retrain"]["reason"] in {row["reason"] for row in found.values()}


@pytest.mark.slow
def test_a_real_quickstart_says_the_same(tmp_path: Path) -> None:
    """`raypipe quickstart` at small size, in a process of its own."""
    run = tmp_path / "solar"
    small = ["search.samples=3", "watch.retrain_samples=2", "train.epochs=12"]
    small += [f"run.dir={run}", f"table.uri={run}/tables/cells"]
    command = [sys.executable, "-m", "raypipe", "quickstart", "--json", *small]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=570)
    assert done.returncode == 0, done.stderr[-3000:]
    quickstart_says_the_same(run, tmp_path)


def quickstart_says_the_same(run: Path, folder: Path) -> None:
    """The queries on the tables of a quickstart in `run` against its JSON and its page."""
    told = json.loads((run / "quickstart.json").read_text("utf-8"))
    page = (run / "report.html").read_text("utf-8")
    names = [name for name in TABLES if (run / name).exists()]
    assert set(names) == {*TABLES} - {"windows"}, "its batches have names, and no windows"
    with delta_views.session(folder / "warehouse") as spark:
        for name in names:
            delta_views.view(spark, run / name, folder)
        checks = {row["name"]: row for row in rows(spark, "drift", {"drift": "drift"})}
        said = {n: {k: row[k] for k in ("is_drift", "p_value")} for n, row in checks.items()}
        assert said == told["drift"]
        for row in checks.values():
            assert escape(chance(row["p_value"])) in page
        for test in rows(spark, "drift_evidence", {"drift": "drift"}):
            assert escape(chance(test["p_value"])) in page
        [alert] = rows(spark, "drift_alert", {"drift": "drift", "hours": 26})
        drifted = sum(one["is_drift"] for one in told["drift"].values())
        assert (alert["drifted"], alert["checks"]) == (drifted, len(told["drift"]))

        judged = {r["slice"]: r for r in rows(spark, "decisions", {"decisions": "decisions"})}
        for name, one in told["slices"].items():
            row = judged[name]
            assert row["passed_gate"] == told["promoted"] and row["reason"] == told["decision"]
            for key in ("images", "won", "lost", "p_value"):
                assert row[key] == one[key]
            for key in ("champion", "challenger"):
                assert round(row[f"{key}_result"], 4) == one[key]
        [call] = rows(spark, "calls", {"calls": "calls"})
        assert call["act"] and call["check_key"] == checks["poly"]["key"]
        predicted = rows(spark, "predictions", {"predictions": "predictions"})
        for name, check in checks.items():
            mine = [r for r in predicted if f"night_{name}@" in r["predicted_table"]]
            assert sum(r["images"] for r in mine) == check["batch_images"]
