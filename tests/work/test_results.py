"""What verbs say to people."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raypipe.config import validate
from raypipe.job import Job
from raypipe.registry.promote import ModelVersion
from raypipe.work import verbs
from raypipe.work.results.models import Registered


def test_the_command_that_promotes_a_version_can_be_typed() -> None:
    """It named no configuration, which `raypipe promote` needs; and a folder may have a blank."""
    second, first = (ModelVersion("cells", number, "uri", {}) for number in (2, 1))
    said = str(Registered(second, first, "sqlite://").facts({}, Path("my runs/best.yaml"))["model"])
    assert "champion stays cells/1" in said
    assert "raypipe promote 'my runs/best.yaml' --version 2 " in said
    only = Registered(first, first, "sqlite://").facts({}, Path("best.yaml"))
    assert only["model"] == "cells/1 (champion)"


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
        )
        verbs._tell_of_splits(pinned, job.feed, show, refits)

    tell("test")
    assert not said
    pinned_unlearned["8"] = 3
    tell("test")
    assert said.pop(0).startswith("1 of 10 classes have no training images, as '8': no model")
    assert "3 labels in feed.test=test" in said.pop(0) and not said
    # A refit learns the images of validation, too; of a table without tests it has its own words.
    tell("test", "train+val")
    assert not said
    tell("tset", "train+val")
    assert said.pop().startswith("The table has no test images. search.refit trains on validation")
    pinned_unlearned.clear()
    tell("tset")
    assert said == [
        "The table has no labelled images in feed.test=tset (its splits are test, train, val): "
        "the model is not tested"
    ]
