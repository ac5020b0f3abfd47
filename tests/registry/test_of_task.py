"""Versions of one registered model answer one question; others are told, or not promoted."""
# Starts no Ray cluster.

from __future__ import annotations

import dataclasses

import pytest

from raypipe.errors import DataError
from raypipe.models.tasks import Task
from raypipe.registry import of_task, promote, runs, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.tables.table import TableVersion

CELLS = Task("single_label", ("crack", "ok"))
PLANTS = Task("single_label", ("oak", "rose", "weed"))
SIZES = Task("regression", ("value",))


def test_other_classes_and_other_tasks_are_told_with_both_sides() -> None:
    champion = of_task.tags(CELLS)
    assert of_task.warning("cells/3", champion, CELLS) == ""
    said = of_task.warning("cells/3", champion, PLANTS)
    assert "cells/3 has 2 classes: crack, ok;" in said and "3 classes: oak, rose, weed" in said
    assert "registry.model" in said
    said = of_task.warning("cells/3", champion, SIZES)
    assert "model.task=single_label" in said and "model.task=regression" in said
    # An older raypipe wrote neither of them, or the task alone.
    assert of_task.warning("cells/3", {}, PLANTS) == ""
    assert of_task.warning("cells/3", {of_task.KIND: "single_label"}, PLANTS) == ""


def test_thousands_of_classes_fit_a_tag_and_are_told_apart() -> None:
    many = tuple(f"class {i:04d}" for i in range(3000))
    one, other = Task("single_label", many), Task("single_label", (*many[:-1], "z"))
    assert all(len(value) <= 256 for value in of_task.tags(one).values())
    assert of_task.warning("x/1", of_task.tags(one), other)
    assert not of_task.warning("x/1", of_task.tags(one), one)


def registered(store: Store, built: Package, task: Task) -> ModelVersion:
    key = task.classes[0]
    with runs.run(store, key, "train", {}, TableVersion("/data/cells", 17)) as run_id:
        pass
    assert built.folder is not None
    return versions.register(store, run_id, built.folder, key, of_task.tags(task))


def test_a_champion_is_not_replaced_by_a_version_of_another_task(
    shared_store: Store, built: Package
) -> None:
    store = dataclasses.replace(shared_store, model="one name, several tables")
    assert promote.beside(store, CELLS) == "", "the first one"
    cells = registered(store, built, CELLS)
    promote.promote(store, cells, expected=None)
    assert promote.beside(store, CELLS) == "" and "oak" in promote.beside(store, PLANTS)
    # Other classes may be right: as a table grows.
    plants = registered(store, built, PLANTS)
    promote.promote(store, plants, expected=cells.version)
    sizes = registered(store, built, SIZES)
    says = r"version .*/3 is of another task than the champion .*/2 .*registry\.model"
    with pytest.raises(DataError, match=says):
        promote.promote(store, sizes, expected=plants.version)
    with pytest.raises(DataError, match=says):
        promote.plan(store, sizes.version)
    assert promote.champion(store) == plants
