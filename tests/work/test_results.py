"""What verbs say to people."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from raypipe.config import to_json, validate
from raypipe.costs.estimate import Part
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.registry import tracking
from raypipe.registry.export import Exported, Int8
from raypipe.registry.runs import KEY
from raypipe.registry.versions import ModelVersion
from raypipe.search import variants
from raypipe.search.ledger import Ledger
from raypipe.search.limits import Variant
from raypipe.tables.table import append
from raypipe.work import training
from raypipe.work.export import ExportedModel
from raypipe.work.planned import Planned
from raypipe.work.results.models import Registered, Trained


def test_the_command_that_promotes_a_version_can_be_typed() -> None:
    """It named no configuration, which `raypipe promote` needs; and a folder may have a blank."""
    second, first = (ModelVersion("cells", number, "uri", {}) for number in (2, 1))
    said = str(Registered(second, first, "sqlite://").facts({}, Path("my runs/best.yaml"))["model"])
    assert "champion stays cells/1" in said
    assert "raypipe promote 'my runs/best.yaml' --version 2 " in said
    only = Registered(first, first, "sqlite://").facts({}, Path("best.yaml"))
    assert only["model"] == "cells/1 (champion)"
    # Somebody has deleted the alias.
    none = Registered(second, None, "sqlite://")
    said = str(none.facts({}, Path("best.yaml"))["model"])
    assert "now there is none" in said
    assert "raypipe promote best.yaml --version 2 makes it champion" in said
    assert none.summary() == {"model": "cells/2", "champion": None}


def test_two_packages_of_one_training_are_apart_in_the_object_store() -> None:
    """With model.calibrate the second one's files took the place of the first one's."""
    result: Any = SimpleNamespace(key="training")
    nothing: Any = None
    keys = []
    for number, tags in ((1, {KEY: "training"}), (2, {KEY: "calibrated"}), (3, {})):
        version = ModelVersion("cells", number, "uri", tags)
        registered = Registered(version, version, "sqlite://")
        keys.append(Trained(nothing, result, registered, nothing).key())
    assert keys == ["training", "calibrated", "training"]


def test_what_the_splits_lack_is_said() -> None:
    """It is a table without test images, and nothing said so."""
    said: list[str] = []
    pinned_unlearned: dict[str, int] = {}
    show: Any = SimpleNamespace(say=said.append)

    def tell(test: str, refits: str | None = None) -> None:
        job = validate(Job, {"table": {"uri": "unused"}, "feed": {"test": test}})
        counts = {"train": 6, "val": 3, "test": 3, "tset": 0}
        pinned: Any = SimpleNamespace(
            counts=counts,
            splits={"train", "val", "test"},
            common=lambda one, other: [],
            unlearned=lambda train, split: {} if "val" in train else pinned_unlearned,
            classes=range(10),
            parts=lambda split: [split],
            columns=SimpleNamespace(labelled=dict, unlabelled=dict),
            task=SimpleNamespace(kind="single_label"),
        )
        training._tell_of_splits(pinned, job.feed, show, refits)

    tell("test")
    assert not said
    pinned_unlearned["8"] = 3
    tell("test")
    assert said.pop(0).startswith("1 of 10 classes have no training images, as '8': no model")
    assert "3 labels in feed.test=test" in said.pop(0) and not said
    # A refit learns the images of validation, too. But it may not come: then nobody had said it.
    tell("test", "train+val")
    assert all("no model learns them before search.refit" in line for line in said)
    assert len(said) == 2
    said.clear()
    pinned_unlearned.clear()
    tell("tset", "train+val")
    # A slip is named with a refit, too: it was told as a table without test images.
    assert said[-1].startswith("The table has no labelled images in feed.test=tset (its splits are")
    assert "nothing will say how good the model is" in said.pop()
    tell("tset")
    assert said == [
        "The table has no labelled images in feed.test=tset (its splits are test, train, val): "
        "the model is not tested"
    ]


def test_labels_that_nobody_uses_and_numbers_are_said(tmp_path: Path) -> None:
    """Rows of a misspelt split were left out, and 40 prices were 40 classes, without a word."""
    splits = ["train"] * 30 + ["val"] * 6 + ["Train"] * 3 + [None, "train", "train", "val", "Train"]
    rows = {
        "image_id": [f"i{n}" for n in range(44)],
        "image": [b"x"] * 44,
        "label": [*(f"{n + 0.5}" for n in range(40)), None, " ", "", None],
        "split": splits,
    }
    append(str(tmp_path / "t"), pa.table(rows), "add")
    job = validate(Job, {"table": {"uri": str(tmp_path / "t")}})
    pinned = pin(job.table, job.feed, kind="single_label")
    said: list[str] = []
    show: Any = SimpleNamespace(say=said.append)
    training._tell_of_labels(pinned, job.feed, show)
    bare, unused, numbers = said
    # Rows of training that had lost their labels were left out without a word, too.
    assert bare == "Images without a label are not used: 2 of train, 1 of val"
    assert unused.startswith("4 labelled images are not used: their split is")
    assert "no split" in unused and "'Train'" in unused
    assert "All 40 classes are numbers" in numbers and "model.task=regression" in numbers


def test_the_file_of_a_training_names_the_table_of_moves() -> None:
    """It knows no section `artifacts`: the command that promotes its version moved the alias past
    the table that all hosts share."""
    tree = {
        "table": {"uri": "unused"},
        "registry": {"uri": "http://mlflow:5000"},
        "artifacts": {"uri": "s3://bucket/runs"},
    }
    job = validate(Job, tree)
    saved = training._with_moves(job).training
    ours = tracking.moves_of(job.run, job.registry, job.artifacts)
    assert tracking.moves_of(saved.run, saved.registry).uri == ours.uri
    assert ours.uri == "s3://bucket/runs/raypipe-moves"
    # A folder that may be moved has no address in it.
    local = validate(Job, {"table": {"uri": "unused"}})
    assert training._with_moves(local).registry.moves is None


def test_what_is_not_estimated_is_in_no_upper_bound() -> None:
    """A dry run said `at most 40 min`, and below it that the refit is not estimated."""
    part = Part("trials", 2400.0, 4800.0, 2400.0)
    whole, lacks = (Planned("tune", {}, (part,), True, missing) for missing in ("", "the refit"))
    assert whole.facts()["takes"].startswith("at most 40 min") and whole.summary()["is_upper_bound"]
    assert lacks.facts()["takes"].startswith("about 40 min")
    assert lacks.facts()["takes"].endswith("without what is not estimated")
    assert not lacks.summary()["is_upper_bound"]


def test_with_a_budget_a_page_has_the_times_that_limits_measured(tmp_path: Path) -> None:
    """It had no front of speed and quality, although all its models were timed."""
    times = {"small_cnn at 32 px": Variant("small_cnn at 32 px", 2.0, 1.9, 2.1, 0.4)}
    kept = {shape: asdict(one) for shape, one in times.items()}
    result: Any = SimpleNamespace(folder=tmp_path)
    assert training._timings(result, Ledger(60.0)) == ({}, None)
    (tmp_path / variants.FILE).write_text(to_json(kept))
    assert training._timings(result, Ledger(60.0)) == (times, None)


def test_two_numbers_are_no_labels_that_agree() -> None:
    """int8 of a regression said "same labels: 0.0%"."""
    small = Int8(0.0, 0.1, 4.0, 1.5, None, None)
    done = Exported(Path("a.onnx"), "onnx", 10, 1e-6, 3, "drawn", small)
    assert "int8, same labels" in ExportedModel("m/1", False, done).facts()
    assert "int8, same labels" not in ExportedModel("m/1", True, done).facts()


def test_the_difference_of_an_exported_regression_has_its_unit() -> None:
    """A difference of 0.3 between two prices was printed as "at most 1e-06"."""
    small = Int8(0.0, 0.1, 4.0, 1.5, None, None)
    score = Exported(Path("a.onnx"), "onnx", 10, 1e-6, 3, "drawn", small)
    said = ExportedModel("m/1", False, score).facts()
    assert said["scores apart"] == "at most 1e-06"
    number = ExportedModel("m/1", True, replace(score, relative=True))
    assert number.facts()["scores apart"].startswith("at most 1e-06 of the number, or of the")
    assert number.facts()["int8, scores apart"].startswith("at most 0.1 of the number, or of the")
    assert number.summary()["relative"]
