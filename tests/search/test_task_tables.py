"""The tasks of the benchmarks: the same images in the same splits, whoever makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import task_tables

DIGITS_1 = "a371aa1705e9"  # what records of seed 1 hold


def test_a_seed_gives_the_splits_of_the_records(tmp_path: Path) -> None:
    made = task_tables.table("digits", 1, tmp_path)
    assert task_tables.digest(made) == DIGITS_1
    assert task_tables.counts(made) == {"train": 1077, "val": 272, "test": 448}
    # A second call takes what is there.
    assert task_tables.table("digits", 1, tmp_path) == made


@pytest.mark.parametrize("task", [name for name in task_tables.TASKS if "elpv" in name])
def test_classes_of_the_solar_tasks(task: str) -> None:
    asked = task_tables.TASKS[task]
    _, rows = task_tables.solar_cells()
    kept = [row for row in rows if all(row[name] == value for name, value in asked.where)]
    assert len({row[asked.label_column] for row in kept}) == asked.classes
